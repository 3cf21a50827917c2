"""The progress of a sweep, on stderr: a live table on a terminal, else one line for each event."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table

from ..records import CaseResult, Status
from ..report.sweep.load import entry_of
from ..report.sweep.summary import experiment_of
from ..sweep.supervisor.state import CaseState, SweepListener
from ..text import UNKNOWN, counted, duration, number, on_one_line, share, size
from .console import SafeConsole, say, silence, table

_COLUMNS = ("experiment", "state", "step", "tokens/s", "MFU", "HFU", "peak memory", "time")
_LINES_AROUND_TABLE = 6


@contextmanager
def progress() -> Iterator[SweepListener]:
    """A listener for `run_sweep`: a table on a terminal, else lines."""
    console = SafeConsole(stderr=True)
    # Colour can be forced without a terminal (CI); a dumb terminal cannot redraw.
    if not (sys.stderr.isatty() and console.is_interactive):
        yield Lines()
        return
    listener = LiveTable(console)
    # The summary that follows repeats every row, so the table is removed.
    with Live(console=console, get_renderable=listener.draw, refresh_per_second=4, transient=True):
        yield listener


class Lines:
    """A line when an experiment begins and one when it has ended, with the estimated time that is left."""

    def __init__(self) -> None:
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

    def ended(self, result: CaseResult) -> None:
        self._note_end(result)
        self.message(f"{result.name}: {_result_text(result)}  [{self._state_text()}]")

    def message(self, text: str) -> None:
        try:
            say(on_one_line(text), err=True)
        except OSError:
            # The reader has closed the pipe; the sweep continues.
            silence(sys.stderr)

    def _note_end(self, result: CaseResult) -> None:
        self._running.pop(result.name, None)
        self._ended += 1
        if result.wall_s is not None:
            self._ran_s.append(result.wall_s)

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


class LiveTable(Lines):
    """All experiments in one live table."""

    def __init__(self, console: SafeConsole) -> None:
        super().__init__()
        self._console = console
        self._rows: dict[str, Sequence[str]] = {}
        # rich draws from its own thread.
        self._lock = threading.Lock()

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        with self._lock:
            for result in reused:
                self._rows[result.name] = _cells(result, f"{result.end.value}, reused")
        super().started(names, reused)  # prints: not while the lock is held, which drawing needs

    def changed(self, name: str, state: CaseState) -> None:
        with self._lock:
            self._running[name] = state

    def ended(self, result: CaseResult) -> None:
        with self._lock:
            self._note_end(result)
            self._rows[result.name] = _cells(result, result.end.value)
        if result.end is not Status.OK:
            self.message(f"{result.name}: {_result_text(result)}")

    def message(self, text: str) -> None:
        self._console.print(on_one_line(text))

    def draw(self) -> Group:
        """The table as it is now; on a small screen the part with running experiments."""
        with self._lock:
            drawn: Table = table(*_COLUMNS)
            drawn.columns[1].justify = "left"
            for name in self._window():
                drawn.add_row(*map(on_one_line, self._row(name)))
            return Group(drawn, self._state_text()) if self._names else Group("reading the folder")

    def _row(self, name: str) -> Sequence[str]:
        state = self._running.get(name)
        if state is not None:
            waiting = [UNKNOWN] * (len(_COLUMNS) - 3)
            where = f"{state.phase.value} on {state.slot}"
            return name, where, *waiting, f"{state.elapsed_s:.0f} of {state.time_limit_s:.0f} s"
        return self._rows.get(name) or (name, "waits", *[UNKNOWN] * (len(_COLUMNS) - 2))

    def _window(self) -> list[str]:
        room = max(self._console.height - _LINES_AROUND_TABLE, 3)
        active = next((i for i, name in enumerate(self._names) if name in self._running), 0)
        first = max(min(active - room // 2, len(self._names) - room), 0)
        return self._names[first : first + room]


def _cells(result: CaseResult, state: str) -> Sequence[str]:
    row = experiment_of(entry_of(result))
    return (
        row.name,
        state,
        duration(row.step_time_s),
        number(row.tokens_per_s),
        share(row.mfu),
        share(row.hfu),
        size(row.peak_memory_bytes),
        UNKNOWN if row.wall_s is None else f"{row.wall_s:.0f} s",
    )


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
