"""Record the rows of healthy jobs of real processes, for replays: `tests/data/straggler_rows.json`.

Jobs of 4 and 8 ranks (benchmarks/straggler_job.py), one after the other, windows of ten seconds. The file's
first entries say when, on what and with which versions. Only the measured fields are kept; the others are the
same in all rows.

    python benchmarks/straggler_rows.py [--windows 20] [--jobs 2] [--folders FOLDER ...]   (recorded before)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.straggler_replay import FIELDS, RECORDED

HERE = Path(__file__).parent


def run_job(ranks: int, folder: Path, *arguments: str, time_limit_s: float = 900) -> None:
    """One job by torchrun; its rows are in the folder, one file per rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(HERE / "straggler_job.py"), "--folder", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environment, check=True, timeout=time_limit_s)


def measured(folder: Path) -> dict[str, Any]:
    """The whole windows of a job: for each field and window, a value of each rank."""
    files = sorted(folder.glob("*.jsonl"))
    ranks = [[json.loads(line) for line in path.read_text(encoding="ascii").splitlines()] for path in files]
    windows = list(zip(*([row for row in rows if not row.get("is_last")] for rows in ranks), strict=False))
    return {
        "ranks": len(ranks),
        **{field: [[row[field] for row in window] for window in windows] for field in FIELDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2, help="of each size")
    parser.add_argument("--folders", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    folders = arguments.folders
    if not folders:
        for ranks in (4, 8) * arguments.jobs:
            folders.append(Path(tempfile.mkdtemp()))
            run_job(ranks, folders[-1], "--windows", str(arguments.windows), "--window-s", "10")
    recorded = {
        "recorded": datetime.date.today().isoformat(),
        "by": "benchmarks/straggler_rows.py",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores shared with other work",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "jobs": [measured(folder) for folder in folders],
    }
    text = (
        json.dumps(recorded, separators=(",", ":")).replace('{"ranks"', '\n{"ranks"').replace('],"', '],\n"')
    )
    RECORDED.write_text(text + "\n", encoding="ascii")
    print(f"{RECORDED}: {len(folders)} jobs, {len(text):,} bytes")


if __name__ == "__main__":
    main()
