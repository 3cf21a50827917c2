"""trackio: logs to the program's run if it is given or open in this thread, else to a new one.

A new run is in the project "truemfu", in trackio's default local database (`trackio show`). trackio stores
its open run per thread, so the program's run is found if the tracker is created on the thread that opened it;
on another one, pass it: `TrackioTracker(output_dir, run=trackio.init(...))`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .base import Names, known, writable

_DISABLED_FEATURES = ("embed", "auto_log_gpu", "auto_log_cpu")
"""Automatic features of trackio to switch off, where its version has them."""


class TrackioTracker:
    """Logs rows at their true steps; trackio's own thread writes them."""

    def __init__(self, output_dir: Path, *, run: Any = None) -> None:
        self._dir = output_dir
        self._run = run if run is not None else _open_run()
        self._is_ours = self._run is None
        self._names = Names(writable)

    def start(self, run: Mapping[str, Any]) -> None:
        """Open a run if there is none, with its description as the configuration."""
        if self._is_ours:
            import trackio

            parameters = inspect.signature(trackio.init).parameters
            self._run = trackio.init(
                project="truemfu",
                name=self._dir.resolve().name,
                config={"truemfu": dict(run)},
                **{name: False for name in _DISABLED_FEATURES if name in parameters},
            )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the row at its step."""
        self._run.log({self._names(key): value for key, value in known(metrics).items()}, step=step)

    def flush(self) -> None:
        """Nothing to do: trackio writes twice a second automatically."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close a run created here; the program closes its own."""
        if self._is_ours:
            self._run.finish()


def _open_run() -> Any:
    module = sys.modules.get("trackio.context_vars")
    return None if module is None else module.current_run.get()
