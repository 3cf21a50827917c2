"""The run file next to the log: the description of the run, and at its end the summary.

    start ─► what is known at the start
    log   ─► what is known with the first rows ─► flush: written with the git commit
    finish ─► written with the summary

It is a tracker with its own lane: the run's folder may hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ... import plain_files
from ...commit import commit_in_files
from ...provenance import command, library_versions, redacted_data


class RunFile:
    """A tracker that writes one JSON object atomically; a disk error becomes a warning."""

    def __init__(self, path: Path, *, notice: Callable[[str], None]) -> None:
        self._path, self._notice = path, notice
        self._run: dict[str, Any] = {}
        self._is_new = False

    def start(self, run: Mapping[str, Any]) -> None:
        """Create the folder and store the description of the run; it is written with the first row."""
        self._run = {"command": command(), **run}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._notice(f"the output folder cannot be created, nothing is logged locally: {error}")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add to the description of the run."""
        self._run |= metrics
        self._is_new = True

    def flush(self) -> None:
        """Write the description."""
        if not self._is_new:
            return
        self._is_new = False
        if "git_commit" not in self._run:
            self._run["git_commit"] = commit_in_files()
        self._write(self._run)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the final description of the run, and its summary."""
        at_the_end = {key: summary.get(key, value) for key, value in self._run.items()}
        self._write({**at_the_end, "versions": library_versions(), "summary": summary})

    def _write(self, run: Mapping[str, Any]) -> None:
        try:
            text = msgspec.json.encode(redacted_data(run))
            plain_files.replace(self._path, msgspec.json.format(text, indent=2))
        except OSError as error:
            self._notice(f"{self._path.name} could not be written: {error}")
