"""Waits for torch without importing it: a script that never does costs nothing.

`import torch` ──► the spec that Python finds, its loader ──► torch runs ──► AutoMonitor.install
"""

from __future__ import annotations

import atexit
import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ..environment import is_disabled
from .run_settings import RunSettings, is_first_process, say, settings_from_environment


def watch_from_environment() -> None:
    """Watch this process's training as `truemfu run` was told; without it do nothing."""
    settings = None if is_disabled() else settings_from_environment()
    if settings is None:
        return

    def loaded() -> None:
        from .auto import AutoMonitor

        AutoMonitor.install(settings)

    sys.meta_path.insert(0, _TorchFinder(loaded))
    if is_first_process():
        atexit.register(_closing_line, settings)


class _TorchFinder(MetaPathFinder):
    """Finds torch as Python does, and calls `loaded` once it has run."""

    def __init__(self, loaded: Callable[[], None]) -> None:
        self._loaded = loaded

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch" or path is not None:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None:
            sys.meta_path.insert(0, self)
        else:
            with contextlib.suppress(AttributeError):  # a loader of another kind: torch is imported unwatched
                _call_after(spec.loader, self._loaded)
        return spec


def _call_after(loader: Any, loaded: Callable[[], None]) -> None:
    """Let this loader, which is made for one module, call `loaded` once the module has run."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        run(module)
        try:
            loaded()
        except Exception as error:
            say(f"this process is not watched: {type(error).__name__}: {error}")

    loader.exec_module = exec_module


def _closing_line(settings: RunSettings) -> None:
    """At the end of the command: where the figures are, or why there are none."""
    from pathlib import Path

    from ..records import RUN_FILE

    files = Path(settings.output).glob(f"**/{RUN_FILE}")
    if any(file.stat().st_mtime >= settings.began_s for file in files):
        folder = settings.output
        say(f"run folder: {folder}; for an HTML report: truemfu report {folder} -o report.html")
        return
    auto = sys.modules.get("truemfu.integrations.auto")
    why = "torch was not imported" if auto is None else auto.AutoMonitor.why_nothing()
    say(f"no training was seen: {why}")
