"""The progress of a sweep, on stderr: a line for each event, and on a terminal what runs now below them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ..records import CaseResult, Status
from ..report.sweep.load import entry_of
from ..report.sweep.summary import experiment_of
from ..sweep.supervisor.state import CaseState
from ..text import counted, duration, number, on_one_line, share, size
from .console import say, silence

_MOST_SHOWN = 8
"""Running experiments; on a cluster there may be hundreds."""


class Lines:
    """A line when an experiment begins and one when it has ended, with the estimated time that is left.

    A `SweepListener`. `show` redraws the text below the lines; None where nothing can be redrawn.
    """

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show
        self._running: dict[str, CaseState] = {}
        self._names: list[str] = []
        self._ended = 0
        self._ran_s: list[float] = []

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        self._names = list(names)
        self._ended = len(reused)
        there = f"; {len(reused)} already have a result" if reused else ""
        self.message(counted(len(names), "experiment") + there)

    def changed(self, name: str, state: CaseState) -> None:
        if name not in self._running:
            self.message(f"{name}: started on {state.slot}")
        self._running[name] = state
        self._show_running()

    def ended(self, result: CaseResult) -> None:
        self._running.pop(result.name, None)
        self._ended += 1
        if result.wall_s is not None:
            self._ran_s.append(result.wall_s)
        self.message(f"{result.name}: {_result_text(result)}  [{self._state_text()}]")
        self._show_running()

    def message(self, text: str) -> None:
        try:
            say(on_one_line(text), err=True)
        except OSError:
            # The reader has closed the pipe; the sweep continues.
            silence(sys.stderr)

    def _show_running(self) -> None:
        if self._show is None:
            return
        lines = [
            f"{name}: {state.phase.value} on {state.slot}, "
            f"{state.elapsed_s:.0f} of {state.time_limit_s:.0f} s"
            for name, state in self._running.items()
        ]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"and {len(lines) - _MOST_SHOWN:,} more"]
        self._show("\n".join([self._state_text(), *map(on_one_line, lines)]))

    def _state_text(self) -> str:
        """How many are done, and from the mean of those how long the others take."""
        left = len(self._names) - self._ended
        words = f"{self._ended} of {len(self._names)} done"
        if not self._ran_s or not left:
            return words
        mean_s = sum(self._ran_s) / len(self._ran_s)
        begun_s = sum(min(state.elapsed_s, mean_s) for state in self._running.values())
        left_s = (left * mean_s - begun_s) / max(len(self._running), 1)
        time_left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"{words}, about {time_left} left"


def _result_text(result: CaseResult) -> str:
    if result.end is not Status.OK:
        return f"{result.end.value}: {result.message}"
    row = experiment_of(entry_of(result))
    words = [f"ok: {duration(row.step_time_s)} a step", f"{number(row.tokens_per_s)} tokens/s"]
    if row.mfu is not None and row.hfu is not None:
        words.append(f"MFU {share(row.mfu)}, HFU {share(row.hfu)}")
    if row.peak_memory_bytes is not None:
        words.append(f"{size(row.peak_memory_bytes)} {row.memory_kind}")
    return ", ".join(words)
