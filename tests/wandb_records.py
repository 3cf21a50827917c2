"""Offline W&B runs, read back with W&B's own reader."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The records of this kind in the one offline run under `folder`."""
    from wandb.util import get_core_path

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    # What `wandb leet inspect` calls, without the second that its own start takes.
    options = ["--no-observability", "--json", "--run-file", str(file)]
    command = [get_core_path(), "leet", "inspect", *options]
    for _ in range(50):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        if any(line["type"] == "exit" for line in lines):
            break
        time.sleep(0.1)  # on a busy machine W&B writes the file a moment after the run is finished
    return [line[kind] for line in lines if line["type"] == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of that run."""
    return [record["item"] for record in records(folder, "history")]
