"""What a sweep's supervisor costs for each experiment: processor time, and memory that must not grow.

Why: a sweep of 10,000 experiments is supervised from a login node. At most 20 ms of processor time an
experiment are allowed, and its memory must be flat. The experiments do nothing, in a worker without torch, so
that only the supervision is measured: on this machine (`local`), and on a Ray that is started for the sweep.
With Ray, the supervisor and the driver process that keeps the tasks are measured apart; node agents and Ray's
own processes run on the nodes and are not part of it. Memory is the resident set of the supervisor after a
tenth of the experiments and after the last; it may grow by 10 %. Exit code 1 where a limit is exceeded. Ends
with one line of JSON.

    python benchmarks/cluster_supervisor.py [--experiments 1000] [--launchers local,ray] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from truemfu import __version__
from truemfu.records import CaseResult
from truemfu.sweep.config import TEST_CONFIG, override
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.runner import run_sweep
from truemfu.sweep.supervisor.state import CaseState

LIMIT_S = 0.020
GROWTH = 0.10
NOTHING = """
import json, os, sys
order = json.loads(sys.stdin.readline())
result = {key: order[key] for key in ("name", "sweep_id", "content_hash", "case")}
result |= {"version": 1, "end": "ok", "phase": "done"}
os.write(int(os.environ["TRUEMFU_SWEEP_ANSWER"]), json.dumps(result).encode())
"""
WORKER = (sys.executable, "-S", "-c", NOTHING)


def resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """A listener that notes the supervisor's memory, and the driver's processor time while it lives."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder = SweepFolder(folder)
        self._early = max(total // 10, 1)
        self.ended_count = 0
        self.early_bytes = 0
        self.driver_s: float | None = None

    def started(self, names: Any, reused: Any) -> None:
        assert not reused

    def changed(self, name: str, state: CaseState) -> None: ...

    def message(self, text: str) -> None: ...

    def ended(self, result: CaseResult) -> None:
        assert result.end.value == "ok", result
        self.ended_count += 1
        if self.ended_count == self._early:
            self.early_bytes = resident_bytes()
        for jobs in self._folder.all_jobs() if self.ended_count % 10 == 0 else ():
            try:
                pid = (jobs / "keeper.lock").read_text()
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                self.driver_s = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            except OSError:
                continue


def measure(launcher: str, experiments: int) -> dict[str, Any]:
    config = override(
        TEST_CONFIG,
        trainers=["StandardTrainer"],
        batch_sizes=list(range(1, experiments + 1)),
        device="cpu",
        launcher=launcher,
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "sweep"
        watch = Watch(folder, experiments)
        began_s, cpu_s = time.monotonic(), time.process_time()
        run_sweep(config, folder, listener=watch, command=WORKER)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
        late_bytes = resident_bytes()
    assert watch.ended_count == experiments
    return {
        "launcher": launcher,
        "experiments": experiments,
        "supervisor_s": cpu_s / experiments,
        "driver_s": None if watch.driver_s is None else watch.driver_s / experiments,
        "early_bytes": watch.early_bytes,
        "late_bytes": late_bytes,
        "wall_s": wall_s,
        "passed": cpu_s / experiments <= LIMIT_S and late_bytes <= watch.early_bytes * (1 + GROWTH),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experiments", type=int, default=1000)
    parser.add_argument("--launchers", default="local,ray")
    parser.add_argument("--output", type=Path, help="also write what is printed here")
    options = parser.parse_args()
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    say(
        f"cluster_supervisor {datetime.date.today()}  truemfu {__version__}, ray {metadata.version('ray')}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    say(f"{'launcher':10}{'experiments':>12}{'supervisor':>12}{'driver':>10}{'memory':>20}{'wall':>9}")
    rows = []
    for launcher in options.launchers.split(","):
        row = measure(launcher, options.experiments)
        rows.append(row)
        driver = "-" if row["driver_s"] is None else f"{row['driver_s'] * 1e3:.1f} ms"
        memory = f"{row['early_bytes'] / 2**20:.1f} -> {row['late_bytes'] / 2**20:.1f} MiB"
        say(
            f"{launcher:10}{row['experiments']:12}{row['supervisor_s'] * 1e3:9.1f} ms{driver:>10}{memory:>20}"
            f"{row['wall_s']:7.0f} s  {'PASS' if row['passed'] else 'FAIL'}"
        )
    say(f"allowed: {LIMIT_S * 1e3:.0f} ms of processor time an experiment, {GROWTH:.0%} more memory")
    say(json.dumps(rows))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
