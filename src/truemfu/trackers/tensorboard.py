"""TensorBoard: one event per row, at its true step, under `<output_dir>/tensorboard`.

All numbers of a row go into one event: writing them one by one costs several times as much. The description
of the run and strings in rows are shown under the tab "text"; a string is written when it changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Names, known, writable


class TensorBoardTracker:
    """Writes an event file; a restarted run adds another one."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "tensorboard"
        self._writer: Any = None
        self._texts: dict[str, str] = {}
        self._names = Names(writable)

    def start(self, run: Mapping[str, Any]) -> None:
        """Open the event file and write the description of the run."""
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(str(self.path))
        self._show("truemfu/run", run)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of the row at its step; true and false are 1 and 0."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        row = {self._names(key): value for key, value in known(metrics).items()}
        numbers = {key: value for key, value in row.items() if not isinstance(value, str)}
        self._writer.add_summary(
            Summary(
                value=[Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items()]
            ),
            step,
        )
        for key in row.keys() - numbers.keys():
            if self._texts.get(key) != row[key]:
                self._texts[key] = row[key]
                self._write_text(key, row[key], step)

    def flush(self) -> None:
        """Write what was logged so far to the disk."""
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the closing summary and close the file."""
        self._show("truemfu/summary", summary)
        self._writer.close()

    def _show(self, tag: str, data: Mapping[str, Any]) -> None:
        lines = json.dumps(data, indent=2, default=str).splitlines()
        self._write_text(tag, "\n".join(f"    {line}" for line in lines), 0)  # indented: code in Markdown

    def _write_text(self, tag: str, text: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text as text_summary

        self._writer.add_summary(text_summary(tag, text), step)
