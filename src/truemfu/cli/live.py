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
from ..sweep.supervisor.outcome import CaseState, SweepListener
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
    """A line when an experiment begins and one when it has ended."""

    def __init__(self) -> None:
        self._clock = _Clock()

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        self._clock.started(names, reused)
        self.message(_start_text(names, reused))

    def changed(self, name: str, state: CaseState) -> None:
        if self._clock.changed(name, state):
            self.message(f"{name}: started on {state.slot}")

    def ended(self, result: CaseResult) -> None:
        self._clock.ended(result)
        self.message(f"{result.name}: {_result_text(result)}  [{self._clock.state_text()}]")

    def message(self, text: str) -> None:
        try:
            say(on_one_line(text), err=True)
        except OSError:
            # The reader has closed the pipe; the sweep continues.
            silence(sys.stderr)


class LiveTable:
    """All experiments in one live table."""

    def __init__(self, console: SafeConsole) -> None:
        self._console = console
        self._clock = _Clock()
        self._names: list[str] = []
        self._rows: dict[str, Sequence[str]] = {}
        # rich draws from its own thread.
        self._lock = threading.Lock()

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        with self._lock:
            self._names = list(names)
            self._clock.started(names, reused)
            for result in reused:
                self._rows[result.name] = _cells(result, f"{result.end.value}, reused")
        self.message(_start_text(names, reused))

    def changed(self, name: str, state: CaseState) -> None:
        with self._lock:
            self._clock.changed(name, state)

    def ended(self, result: CaseResult) -> None:
        with self._lock:
            self._clock.ended(result)
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
            return Group(drawn, self._clock.state_text()) if self._names else Group("reading the folder")

    def _row(self, name: str) -> Sequence[str]:
        state = self._clock.running.get(name)
        if state is not None:
            waiting = [UNKNOWN] * (len(_COLUMNS) - 3)
            where = f"{state.phase.value} on {state.slot}"
            return name, where, *waiting, f"{state.elapsed_s:.0f} of {state.time_limit_s:.0f} s"
        return self._rows.get(name) or (name, "waits", *[UNKNOWN] * (len(_COLUMNS) - 2))

    def _window(self) -> list[str]:
        room = max(self._console.height - _LINES_AROUND_TABLE, 3)
        active = next((i for i, name in enumerate(self._names) if name in self._clock.running), 0)
        first = max(min(active - room // 2, len(self._names) - room), 0)
        return self._names[first : first + room]


class _Clock:
    """Running and finished experiments, and the estimated end."""

    def __init__(self) -> None:
        self.running: dict[str, CaseState] = {}
        self._total = 0
        self._ended = 0
        self._ran_s: list[float] = []

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        self._total = len(names)
        self._ended = len(reused)

    def changed(self, name: str, state: CaseState) -> bool:
        """Record it; whether this experiment has just started."""
        begins = name not in self.running
        self.running[name] = state
        return begins

    def ended(self, result: CaseResult) -> None:
        self.running.pop(result.name, None)
        self._ended += 1
        if result.wall_s is not None:
            self._ran_s.append(result.wall_s)

    def state_text(self) -> str:
        words = f"{self._ended} of {self._total} done"
        left_s = self._left_s()
        return words if left_s is None else f"{words}, about {_minutes(left_s)} left"

    def _left_s(self) -> float | None:
        """From the mean of finished experiments; None before the first and after the last."""
        left = self._total - self._ended
        if not self._ran_s or not left:
            return None
        mean_s = sum(self._ran_s) / len(self._ran_s)
        begun_s = sum(min(state.elapsed_s, mean_s) for state in self.running.values())
        return (left * mean_s - begun_s) / max(len(self.running), 1)


def _start_text(names: Sequence[str], reused: Sequence[CaseResult]) -> str:
    there = f"; {len(reused)} already have a result" if reused else ""
    return counted(len(names), "experiment") + there


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


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
