"""How often the right rank and the right cause are named, on replayed rows of real jobs.

100 replays for each cause (benchmarks/straggler_replay.py). The seed decides which job, which rank, from
which window on, how large. Right: the only alert is about the late rank, with its cause, at its third late
window at the latest. Then 100 healthy replays on each kind of device, in which any alert is false. Thresholds
were chosen on seeds from 1000 on.

    python benchmarks/stragglers.py [--first-seed 0] [--replays 100] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections import Counter
from pathlib import Path

import torch

import truemfu

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.source_id import source_id
from benchmarks.straggler_replay import CAUSES, RECORDED, SIZES, false_alarms, healthy, judge, staged


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.replays)
    recorded = json.loads(RECORDED.read_text(encoding="ascii"))
    jobs = [f"{len(job['steps'])} windows of {job['ranks']} ranks" for job in recorded.pop("jobs")]
    lines = [
        f"stragglers {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}",
        f"rows: {', '.join(f'{name} {value}' for name, value in recorded.items())}: {', '.join(jobs)}",
        f"seeds {seeds[0]} to {seeds[-1]}; jobs of 2, 4 and 8 ranks; "
        f"a cause adds {SIZES[0]:.0%} to {SIZES[1]:.0%} to the step",
        "",
        f"{'cause':<16}{'right':>10}{'windows until named':>22}{'smallest wrong':>16}  otherwise",
    ]
    for cause in CAUSES:
        lines.append(_line(cause, seeds))
    for kind in ("cpu", "gpu"):
        replays = [healthy(seed, kind) for seed in seeds]
        found = [false_alarms(replay) for replay in replays]
        count = sum(bool(alerts) for alerts in found)
        said = Counter(alert.cause for alerts in found for alert in alerts)
        lines.append(f"{'healthy, ' + kind:<16}{count:>10} false alarms in {len(seeds)}  {dict(said) or ''}")
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")


def _line(cause: str, seeds: range) -> str:
    replays = [staged(cause, seed) for seed in seeds]
    outcomes = [judge(replay, cause) for replay in replays]
    right = sum(outcome.is_right for outcome in outcomes)
    named = [outcome.named_after for outcome in outcomes if outcome.named_after is not None]
    wrong: Counter[str] = Counter()
    missed_sizes = []
    for replay, outcome in zip(replays, outcomes, strict=True):
        if not outcome.is_right:
            said = {
                f"{'right' if alert.rank == replay.late_rank else 'another'} rank: {alert.cause}"
                for alert in outcome.alerts
            }
            wrong[", ".join(sorted(said)) or "nothing"] += 1
            missed_sizes.append(replay.size)
    times = f"median {statistics.median(named):g}, most {max(named)}" if named else "-"
    smallest = f"{min(missed_sizes):.0%} of step" if missed_sizes else "-"
    untested = " (untested on real links)" if cause == "link" else ""
    return f"{cause:<16}{right:>6}/{len(seeds)}{times:>22}{smallest:>16}  {dict(wrong) or ''}{untested}"


if __name__ == "__main__":
    main()
