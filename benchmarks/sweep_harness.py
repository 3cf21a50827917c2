"""How much of a sweep's time is the sweep itself? At most 5 % of it may be outside the experiments.

Why: every experiment has a fresh process, and a fresh process costs an interpreter and its imports. A sweep
starts the next worker while nothing is measured, so that less of this is seen. Runs `truemfu sweep` as a user
does, from the command's start to its exit, and prints for each experiment the seconds of every phase after
its order: imports that were not hidden, gradient check, build, steps (warm-up and timed), count, trace, and
the end of its process after it was done. Own work is all of these but the last (several GPUs at once count
once); the rest of the wall time is the harness. Exit code 1 where that is more than 5 %. Ends with one line
of JSON.

    python benchmarks/sweep_harness.py [--config profiling_config.json] [--output sweep_harness.txt]
    python benchmarks/sweep_harness.py --finished benchmarks/results/sweep_h200

Without --config it is the test matrix: the hardest case, because its experiments are so short. `--finished`
reads a sweep that ran in one go elsewhere; its wall time is then from its record to the end of its last
experiment, without the start of the command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from truemfu.records import CaseResult, Phase, Status, SweepRecord, read_record
from truemfu.report.sweep.load import load_sweep

LIMIT = 0.05
COLUMNS = {
    "imports": (Phase.START,),
    "gate": (Phase.GRADIENT_CHECK,),
    "build": (Phase.BUILD,),
    "steps": (Phase.WARM_UP, Phase.TIMED),
    "count": (Phase.COUNT,),
    "trace": (Phase.PROFILED,),
    "end": (Phase.DONE,),
}


def phase_seconds(result: CaseResult) -> dict[str, float]:
    """How long each phase took, from the order until the process was gone."""
    began_s, wall_s = result.began_at_s, result.wall_s
    assert began_s is not None
    assert wall_s is not None
    starts = [max(entry.began_at_s, began_s) for entry in result.phases]
    lengths = [later - start for start, later in zip(starts, [*starts[1:], began_s + wall_s], strict=True)]
    found = dict.fromkeys(COLUMNS, 0.0)
    for entry, seconds in zip(result.phases, lengths, strict=True):
        column = next(name for name, phases in COLUMNS.items() if entry.phase in phases)
        found[column] += seconds
    return found


def own_work(result: CaseResult) -> tuple[float, float]:
    """From the order until it was done, or until its process was gone."""
    assert result.began_at_s is not None
    seconds = phase_seconds(result)
    return result.began_at_s, result.began_at_s + sum(seconds.values()) - seconds["end"]


def covered_s(stretches: Iterable[tuple[float, float]]) -> float:
    """The length of time that at least one of the stretches (begin, end) covers."""
    total = 0.0
    reached = float("-inf")
    for begin, end in sorted(stretches):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


def sweep(config: Path | None, folder: Path) -> tuple[list[CaseResult], float]:
    """The results of a fresh sweep, and the seconds the whole command took."""
    which = ["--mode", "test"] if config is None else ["--config", str(config)]
    command = [sys.executable, "-m", "truemfu", "sweep", *which, "--no-fit", "-o", str(folder)]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    if done.returncode not in (0, 1):
        sys.exit(f"the sweep ended with exit code {done.returncode}")
    results = [entry.result for entry in load_sweep(folder).entries if entry.result is not None]
    return [result for result in results if result.began_at_s is not None], wall_s


def finished(folder: Path) -> tuple[list[CaseResult], float]:
    """The results of a sweep that is over, and the seconds from its record to its last experiment's end."""
    results = [entry.result for entry in load_sweep(folder).entries if entry.result is not None]
    created_s = read_record(folder / "sweep.json", SweepRecord).created_at_s
    return results, max((r.began_at_s or 0) + (r.wall_s or 0) for r in results) - created_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="a matrix of your own")
    parser.add_argument("--finished", type=Path, help="the folder of a sweep that ran before")
    parser.add_argument("--output", type=Path, help="also write what is printed here")
    options = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    if options.finished:
        results, wall_s = finished(options.finished)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            results, wall_s = sweep(options.config, Path(temporary) / "sweep")
    environment = next(result.environment for result in results if result.environment is not None)
    versions = ", ".join(f"{package} {version}" for package, version in environment.versions.items())
    say(
        f"sweep_harness {datetime.date.today()}  {versions}, Python {environment.python}, "
        f"{environment.device_name}"
    )
    which = options.finished or options.config
    say(f"{'the test matrix' if which is None else which.name}, {len(results)} experiments")
    say("")
    width = max(len(result.name) for result in results)
    say(f"{'experiment, seconds':{width}}" + "".join(f"{name:>9}" for name in COLUMNS) + f"{'wall':>9}")
    rows: dict[str, Any] = {}
    for result in results:
        seconds = phase_seconds(result)
        say(
            f"{result.name:{width}}"
            + "".join(f"{value:9.2f}" for value in seconds.values())
            + f"{result.wall_s:9.2f}"
            + ("" if result.end is Status.OK else f"  {result.end.value}")
        )
        rows[result.name] = {**seconds, "wall": result.wall_s, "result": result.end.value}
    harness_s = wall_s - covered_s(map(own_work, results))
    share = harness_s / wall_s
    verdict = "PASS" if share <= LIMIT else "FAIL"
    say("")
    say(
        f"wall {wall_s:.2f} s, outside the experiments {harness_s:.2f} s: {share:.1%} "
        f"(allowed: {LIMIT:.0%}): {verdict}"
    )
    summary = {"wall_s": wall_s, "harness_s": harness_s, "share": share, "limit": LIMIT, "verdict": verdict}
    say(json.dumps({**summary, "experiments": rows}))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if verdict == "PASS" else 1


if __name__ == "__main__":
    sys.exit(main())
