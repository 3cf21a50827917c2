"""Real jobs with one rank made late: what the detector says of their rows, beside what TraceML says.

Five jobs for each stage of benchmarks/straggler_job.py, of 2 to 4 real processes under DDP by gloo, with
windows of two seconds instead of ten. Late are: a loader that sleeps (input), a host that computes beside
the model (host), larger batches (work); in healthy jobs none. Right: of the alerts that begin after the
onset, the first is about the late rank and its cause, at its fourth window at the latest, since the onset may
be inside a window. Alerts before the onset are printed too. TraceML watches the same runs if `--traceml`
names its command. Its verdict is on the whole run, of which the first third is healthy.

    python benchmarks/straggler_runs.py [--runs 5] [--stages input host work healthy] [--traceml COMMAND]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch

import truemfu

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.source_id import source_id
from benchmarks.straggler_rows import HERE, run_job
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.straggler_alert import Alert
from truemfu.monitor.ranks.stragglers import Stragglers

WINDOW_S = 2.0
WINDOWS = 12
ONSET = 4
STAGES = ("input", "host", "work", "healthy")
TRACEML_KINDS = {"input": "INPUT_STRAGGLER", "host": "COMPUTE_STRAGGLER", "work": "COMPUTE_STRAGGLER"}


def said_of(folder: Path) -> list[tuple[int, Alert]]:
    """The alerts on a job's rows, each with its window."""
    stragglers = Stragglers(window_s=WINDOW_S)
    files = sorted(folder.glob("*.jsonl"))
    ranks = [
        [msgspec.json.decode(line, type=RankRow) for line in path.read_bytes().splitlines()] for path in files
    ]
    said = []
    for number in range(max(len(rows) for rows in ranks)):
        window = [rows[number] for rows in ranks if number < len(rows)]
        said += [(number, alert) for alert in stragglers.add(window, WINDOW_S * number)]
    return said


def run_with_traceml(command: str, ranks: int, folder: Path, *arguments: str) -> dict[str, object]:
    """The same job under TraceML: its primary diagnosis."""
    logs = folder / "traceml"
    full = [command, "run", str(HERE / "straggler_job.py"), "--nproc-per-node", str(ranks)]
    full += ["--logs-dir", str(logs), "--run-name", "run"]
    full += ["--args", "--folder", str(folder), *arguments, "--traceml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(full, env=environment, check=True, timeout=600, stdout=subprocess.DEVNULL)
    found = json.loads((logs / "run" / "final_summary.json").read_text(encoding="utf-8"))
    return dict(found["primary_diagnosis"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--traceml")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if arguments.output:
            arguments.output.write_text("\n".join(lines) + "\n", encoding="utf-8")

    say(
        f"straggler_runs {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores shared with other work; windows of {WINDOW_S:g} s, late from window "
        f"{ONSET + 1} on"
    )
    for stage in arguments.stages:
        ours = theirs = 0
        for run in range(arguments.runs):
            is_right, is_theirs = _one(stage, run, arguments.traceml, say)
            ours += is_right
            theirs += is_theirs
        told = f"; TraceML {theirs} of {arguments.runs}" if arguments.traceml else ""
        say(f"{stage}: right rank and cause in {ours} of {arguments.runs}{told}")


def _one(stage: str, run: int, traceml: str | None, say: object) -> tuple[bool, bool]:
    draws = random.Random(f"{stage} {run}")
    ranks = draws.choice((2, 3, 4))
    late_rank, size = draws.randrange(ranks), draws.uniform(0.6, 1.2)
    options = ["--stage", stage, "--late-rank", str(late_rank), "--size", f"{size:.2f}"]
    options += ["--windows", str(WINDOWS), "--window-s", str(WINDOW_S), "--onset-window", str(ONSET)]
    diagnosis: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if traceml:
            diagnosis = run_with_traceml(traceml, ranks, folder, *options)
        else:
            run_job(ranks, folder, *options)
        said = said_of(folder)
    begun = [(number, alert.rank, alert.cause) for number, alert in said if alert.until_s is None]
    if stage == "healthy":
        is_right = not begun
    else:
        after = [alert for alert in begun if alert[0] >= ONSET]
        is_right = bool(after) and after[0][1:] == (late_rank, stage) and after[0][0] < ONSET + 4
    evidence = diagnosis.get("evidence")
    worst = evidence.get("worst") if isinstance(evidence, dict) else None
    their_rank = worst.get("rank") if isinstance(worst, dict) else None
    kind = diagnosis.get("kind")
    if stage == "healthy":
        is_theirs = "STRAGGLER" not in str(kind)
    else:
        is_theirs = kind == TRACEML_KINDS[stage] and their_rank == late_rank
    assert callable(say)
    truth = "healthy" if stage == "healthy" else f"rank {late_rank} late by {size:.0%} of a step"
    say(f"  {stage} {run}: {ranks} ranks, {truth}: {'right' if is_right else 'WRONG'}")
    for window, alert in said:
        say(f"    window {window + 1}: {alert}")
    if traceml:
        say(f"    TraceML: {kind}, rank {their_rank}: {diagnosis.get('summary')}")
    return is_right, is_theirs


if __name__ == "__main__":
    main()
