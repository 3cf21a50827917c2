"""Which ranks hold up a job, from the rows that rank 0 reads: alerts that begin once and end once.

    rows of reads ──► a window of all ranks ──► lateness within each role ──► three windows ──► Alert

A rank is compared with ranks of the same role, window by window (lateness.py). An alert begins with three
windows in a row that are late, for the same cause, by more than half the limit, and by more than the limit on
average. It ends with three that are not, or when another cause has become larger. Windows without a timed
step are warm-up and count neither way. A rank without a row for three windows is silent, or has ended if its
last row says so. While the store is not read, nobody is silent. However often rows are read, ranks are
compared once a window. The rows of a rank's first seconds are more frequent and are not compared.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from .lateness import Limits, SlowCause, lateness
from .rank_row import RankRow
from .straggler_alert import Alert

_MAX_PAST = 1000
_NEARLY = 0.9
"""Reads and rows are not exactly a window apart."""
_GAP = 1.5
"""Windows without a read, after which the store is taken to have failed meanwhile."""
_SHORTEST = 0.5
"""Of a window: a row that covers less is not compared."""


@dataclass(eq=False, slots=True)
class _Rank:
    """What is known of one rank."""

    row: RankRow
    heard_s: float
    unjudged: list[RankRow] = field(default_factory=list)
    judged: RankRow | None = None
    """The newest row of a whole window with timed steps."""
    cause: SlowCause | None = None
    """Of the alert that holds."""
    absent: Alert | None = None
    late: list[tuple[RankRow, dict[SlowCause, float]]] = field(default_factory=list)
    """The last windows, if all of them are late by more than half a limit."""
    calm_since_s: list[float] = field(default_factory=list)
    """The ends of windows in a row without the cause of the alert."""
    since_s: float = 0.0
    since_step: int | None = None
    steps: int = 0
    step_s: float = 0.0
    lost_s: float = 0.0
    throttle: str | None = None

    def begin(self, cause: SlowCause) -> None:
        """An alert over the late windows so far."""
        self.cause = cause
        windows = [(row, found[cause]) for row, found in self.late if cause in found]
        first = windows[0][0]
        self.since_s = first.at_s - first.steps * (first.step_time_s or 0.0)
        self.since_step = None if first.step is None else first.step - first.steps + 1
        for row, seconds in windows:
            self.extend(row, seconds)

    def extend(self, row: RankRow, seconds: float) -> None:
        """One more late window of the alert."""
        self.steps += row.steps
        self.step_s += row.steps * (row.step_time_s or 0.0)
        self.lost_s += row.steps * seconds
        self.throttle = row.throttle or self.throttle

    def mean_s(self, cause: SlowCause) -> float:
        """Over the last late windows."""
        return sum(found.get(cause, 0.0) for _, found in self.late) / len(self.late)

    def end(self) -> None:
        """There is no alert any more."""
        self.cause, self.steps, self.step_s, self.lost_s, self.throttle = None, 0, 0.0, 0.0, None
        self.calm_since_s.clear()

    def alert(self, until_s: float | None = None) -> Alert:
        """The alert as of now."""
        assert self.cause is not None
        return Alert(
            rank=self.row.rank,
            host=self.row.host,
            device=self.row.device,
            cause=self.cause,
            since_s=self.since_s,
            since_step=self.since_step,
            step_time_s=self.step_s / self.steps,
            excess_s=self.lost_s / self.steps,
            lost_s=self.lost_s,
            detail=self.throttle if self.cause == "gpu" else None,
            until_s=until_s,
        )


class Stragglers:
    """Give it the rows of each read, on one thread; the alerts can be asked for on any."""

    def __init__(self, *, window_s: float = 10.0, windows: int = 3) -> None:
        self._window_s, self._windows = window_s, windows
        self._ranks: dict[int, _Rank] = {}
        self._limits: defaultdict[str, Limits] = defaultdict(Limits)
        self._read_s = self._answers_since_s = -math.inf
        """The last read, and since when there has been one every window."""
        self._judged_s = -math.inf
        self._past: deque[Alert] = deque(maxlen=_MAX_PAST)
        self.alerts: tuple[Alert, ...] = ()
        """Those that hold, with what they have cost until the last read."""

    @property
    def past(self) -> list[Alert]:
        """Alerts that have ended, the newest thousand."""
        return list(self._past.copy())

    def add(self, rows: list[RankRow], now_s: float, *, is_read: bool = True) -> list[Alert]:
        """From the new rows of a read: the alerts that begin with it, and those that end (with `until_s`).

        `is_read` is False for rank 0's own rows, which do not come from the store.
        """
        changed: list[Alert] = []
        if is_read:
            if now_s - self._read_s > _GAP * self._window_s:
                self._answers_since_s = now_s
            self._read_s = now_s
        heard = {row.rank for row in sorted(rows, key=_age) if self._hear(row, now_s, changed)}
        if heard:
            if now_s - self._judged_s >= _NEARLY * self._window_s:
                self._judged_s = now_s
                self._judge(changed)
            if now_s - self._read_s <= _GAP * self._window_s:
                self._find_absent(heard, now_s, changed)
        ranks = self._ranks.values()
        held = [rank.alert() for rank in ranks if rank.cause is not None]
        self.alerts = (*held, *(rank.absent for rank in ranks if rank.absent is not None))
        self._past.extend(alert for alert in changed if alert.until_s is not None)
        return changed

    def _hear(self, row: RankRow, now_s: float, changed: list[Alert]) -> bool:
        """Take a row; whether it was a new one."""
        rank = self._ranks.get(row.rank)
        if rank is not None and _age(row) == _age(rank.row):
            return False
        if rank is not None and row.number <= rank.row.number:  # another process in its place
            self._remove(rank, changed)
            rank = None
        if rank is None:
            rank = self._ranks[row.rank] = _Rank(row, now_s)
        rank.row, rank.heard_s = row, now_s
        if row.window_s is None or row.window_s >= _SHORTEST * self._window_s:
            rank.unjudged.append(row)
        if rank.absent is not None and not row.is_last:
            changed.append(msgspec.structs.replace(rank.absent, until_s=row.at_s))
            rank.absent = None
        return True

    def _judge(self, changed: list[Alert]) -> None:
        """All rows so far, one of each rank after the other, each time against the newest of all."""
        while True:
            new: set[int] = set()
            has_rows = False
            roles: defaultdict[str, list[_Rank]] = defaultdict(list)
            for number, rank in self._ranks.items():
                if rank.unjudged:
                    has_rows = True
                    row = rank.unjudged.pop(0)
                    if row.steps and row.step_time_s is not None and not row.is_last:
                        rank.judged = row
                        new.add(number)
                if rank.judged is not None and not rank.row.is_last and rank.absent is None:
                    roles[rank.judged.role].append(rank)
            if not has_rows:
                return
            for role, ranks in roles.items():
                if len(ranks) > 1:
                    self._compare(self._limits[role], ranks, new, changed)

    def _compare(self, role: Limits, ranks: list[_Rank], new: set[int], changed: list[Alert]) -> None:
        """The ranks of a role, of which those with a new row are judged."""
        newest = [rank.judged for rank in ranks if rank.judged is not None]
        seconds = lateness(newest)
        step_times_s = [row.step_time_s for row in newest if row.step_time_s is not None]
        limits = role.add(seconds, step_times_s)
        for place, (rank, row) in enumerate(zip(ranks, newest, strict=True)):
            if row.rank not in new:
                continue
            found = {cause: value for cause in limits if (value := seconds[cause][place]) is not None}
            self._count(rank, row, {c: s for c, s in found.items() if s > limits[c] / 2}, limits, changed)

    def _count(
        self,
        rank: _Rank,
        row: RankRow,
        found: dict[SlowCause, float],
        limits: dict[SlowCause, float],
        changed: list[Alert],
    ) -> None:
        """One more window of a rank, with the causes that are above half their limit."""
        if found:
            rank.late.append((row, found))
        else:
            rank.late.clear()
        if len(rank.late) > self._windows:
            del rank.late[0]
        if rank.cause is not None and rank.cause in found:
            rank.calm_since_s.clear()
            rank.extend(row, found[rank.cause])
        elif rank.cause is not None:
            rank.calm_since_s.append(row.at_s)
            if len(rank.calm_since_s) == self._windows:
                changed.append(rank.alert(until_s=rank.calm_since_s[0]))
                rank.end()
        if len(rank.late) < self._windows:
            return
        lasting = [cause for cause in found if all(cause in window for _, window in rank.late)]
        above = [cause for cause in lasting if rank.mean_s(cause) > limits[cause]]
        largest = max(above, key=rank.mean_s, default=None)
        if largest is None or (rank.cause is not None and rank.mean_s(largest) <= rank.mean_s(rank.cause)):
            return
        self._end_cause(rank, changed)
        rank.begin(largest)
        changed.append(rank.alert())

    def _find_absent(self, heard: set[int], now_s: float, changed: list[Alert]) -> None:
        others_go_on = any(not self._ranks[number].row.is_last for number in heard)
        for number, rank in self._ranks.items():
            if number in heard:
                continue
            waited_s = now_s - max(rank.heard_s, self._answers_since_s)
            is_long = waited_s >= _NEARLY * self._windows * self._window_s
            if not is_long or rank.absent is not None or not others_go_on:
                continue
            rank.late.clear()
            self._end_cause(rank, changed)
            rank.absent = Alert(
                rank=number,
                host=rank.row.host,
                device=rank.row.device,
                cause="ended" if rank.row.is_last else "silent",
                since_s=rank.row.at_s,
                since_step=rank.row.step,
            )
            changed.append(rank.absent)

    def _end_cause(self, rank: _Rank, changed: list[Alert]) -> None:
        if rank.cause is not None:
            changed.append(rank.alert(until_s=rank.row.at_s))
        rank.end()

    def _remove(self, rank: _Rank, changed: list[Alert]) -> None:
        """The process is gone, and another one has its number."""
        self._end_cause(rank, changed)
        if rank.absent is not None:
            changed.append(msgspec.structs.replace(rank.absent, until_s=rank.row.at_s))
        del self._ranks[rank.row.rank]


def _age(row: RankRow) -> tuple[float, int]:
    return row.at_s, row.number
