"""trackio: into the program's run where it is given or open in this thread, else one of our own.

A run of our own is in the project "truemfu", in trackio's usual local database (`trackio show`). trackio
keeps its open run per thread, so the program's is seen where the tracker is made on the thread that opened
it; on any other, pass it: `TrackioTracker(output_dir, run=trackio.init(...))`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Names, known, writable

_NOT_WANTED = ("embed", "auto_log_gpu", "auto_log_cpu")
"""What trackio does by itself, as far as its version knows of it."""


class TrackioTracker:
    """Logs rows at their true steps; trackio's own thread writes them."""

    def __init__(self, output_dir: Path, *, run: Any = None) -> None:
        self._dir = output_dir
        self._run = run if run is not None else _open_run()
        self._is_ours = self._run is None
        self._names = Names(writable)

    def start(self, run: Mapping[str, Any]) -> None:
        """Open a run where there is none, with what is known of it as its configuration."""
        if self._is_ours:
            import trackio

            known_here = inspect.signature(trackio.init).parameters
            self._run = trackio.init(
                project="truemfu",
                name=self._dir.resolve().name,
                config={"truemfu": dict(run)},
                **{name: False for name in _NOT_WANTED if name in known_here},
            )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the row at its step."""
        self._run.log({self._names(key): value for key, value in known(metrics).items()}, step=step)

    def flush(self) -> None:
        """Nothing to do: trackio writes twice a second by itself."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close a run of our own; the program closes its own."""
        if self._is_ours:
            self._run.finish()


def _open_run() -> Any:
    module = sys.modules.get("trackio.context_vars")
    return None if module is None else module.current_run.get()
