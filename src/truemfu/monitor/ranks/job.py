"""Rank 0's view of its job: what every rank last reported, and sums over all ranks.

    store thread   take(messages) ──► JobSums, the latest row of each rank, Stragglers
    resolver       step(…), waiting_for(…) ──► rows of the job;  metrics() ──► perf/rank/…
    any thread     scope, totals(), table() ──► the summary

A rank that has not reported for three rows is silent. Nothing here waits for a rank.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec

from ...errors import one_line
from .amounts import TOTALS, Exact, Message, number
from .job_sums import JobStep, JobSums
from .rank_row import RankRow
from .reporter import GPU_NAME, ROW_EVERY_S, RankReporter
from .straggler_alert import straggler_metrics
from .stragglers import Stragglers

SILENT_S = 3 * ROW_EVERY_S
_EACH_RANK = 16
"""The largest job in which every rank has metrics of its own."""
_MOST_LISTED = 64
_MOST_NAMED = 8
_MOST_ALERTED = 32
"""Alerts that are warnings too, of all that a run can have."""
_METRICS = {
    "step_time": "step_time_s",
    "data_wait": "data_wait_s",
    "clock_mhz": "clock_mhz",
    "memory_bytes": "memory_bytes",
}
"""Metrics under `perf/rank/<n>/`, and the fields of a row that they are."""
_ALL = (sys.maxsize, sys.maxsize)


@dataclass
class _Rank:
    """What is known of one rank."""

    row: RankRow
    seen_s: float
    """When its last message arrived, by this process' monotonic clock."""
    message: Message
    """The last one, without the amounts of single steps."""
    steps: int = 0
    seconds: float = 0.0
    data_wait_s: float | None = None

    def add(self, row: RankRow) -> None:
        """Add another window of steps."""
        if row.step_time_s is not None:
            self.steps += row.steps
            self.seconds += row.steps * row.step_time_s
            if row.data_wait_s is not None:
                self.data_wait_s = (self.data_wait_s or 0.0) + row.steps * row.data_wait_s


@dataclass
class _Missing:
    """Rows whose job figures are unknown."""

    rows: int = 0
    first_step: int | None = None
    ranks: set[int] = field(default_factory=set)


class Job:
    """The job of this process, which is its rank 0."""

    def __init__(
        self, world_size: int, *, notice: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.world_size = world_size
        self._notice, self._clock = notice, clock
        self._lock = threading.Lock()
        self._sums = JobSums(world_size - 1)
        self._ranks: dict[int, _Rank] = {}
        self._given_up: set[int] = set()
        self._reported_by_all: tuple[int, int] | None = None
        """Era and step up to which all ranks that are waited for have reported; None: to be computed."""
        self._missing = _Missing()
        self._began_s = self._read_s = clock()
        self._alerted: set[str] = set()
        self._silent: dict[int, str] = {}
        self._stragglers = Stragglers(window_s=ROW_EVERY_S)
        self._comparing = threading.Lock()
        """Held while ranks are compared: rank 0's own rows come from another thread than the others'."""

    def take(self, messages: Iterable[bytes], *, from_store: bool = True) -> None:
        """New messages of ranks, none perhaps; one that cannot be read is ignored.

        Only what the store was read for shows that a rank is silent: rank 0's own messages and those in files
        come without it.
        """
        now_s = self._clock()
        rows: list[RankRow] = []
        with self._lock:
            if from_store:
                self._read_s = now_s
            for data in messages:
                try:
                    message = _DECODER.decode(data)
                    self._take(message, now_s, rows)
                except (msgspec.MsgspecError, ValueError):
                    continue
        if rows or from_store:
            try:
                self._compare(rows, now_s, from_store=from_store)
            except Exception as error:  # else the store would be taken for the one that failed
                self._notice(f"the rows of ranks could not be compared: {one_line(error)}")

    def _compare(self, rows: list[RankRow], now_s: float, *, from_store: bool) -> None:
        """Warn of each rank that begins to hold up the job, or ends to; silence has its own warning."""
        with self._comparing:
            changed = self._stragglers.add(rows, now_s, is_read=from_store)
        for alert in changed:
            if alert.cause in ("silent", "ended"):
                continue
            about = f"rank {alert.rank}, {alert.cause}, {alert.until_s is None}"
            if about not in self._alerted and len(self._alerted) >= _MOST_ALERTED:
                self._notice("more ranks hold up the job: they are in the summary and in perf/straggler_*")
                continue
            self._alerted.add(about)
            self._notice(str(alert), about=about)

    def stragglers(self) -> list[dict[str, Any]]:
        """The ranks that held up the job, as plain data: those that still do, then the newest others."""
        alerts = [*self._stragglers.alerts, *reversed(self._stragglers.past)][:_MOST_LISTED]
        return [{**msgspec.to_builtins(alert), "share": alert.share, "text": str(alert)} for alert in alerts]

    def _take(self, message: Message, now_s: float, rows: list[RankRow]) -> None:
        row = message.row
        known = self._ranks.get(row.rank)
        if known is not None and (row.number, message.steps) < (known.row.number, known.message.steps):
            return  # an earlier one, on another way
        is_new = known is None or row.number != known.row.number
        if known is None:
            known = self._ranks[row.rank] = _Rank(row, now_s, message)
        if is_new:
            known.add(row)
            rows.append(row)
        known.row, known.seen_s = row, now_s
        known.message = msgspec.structs.replace(message, names=[], segments=message.segments[-1:])
        self._silent.pop(row.rank, None)
        if row.rank:  # rank 0 adds its own amounts itself
            self._given_up.discard(row.rank)
            self._reported_by_all = None
            self._sums.take(message)

    def step(self, era: int, step: int, stride: int) -> JobStep | None:
        """The sums of a step over the other ranks; None if they are not complete. In the order of steps."""
        with self._lock:
            return self._sums.of(era, step, stride)

    def waiting_for(self, era: int, step: int) -> list[int]:
        """The ranks that may still report this step."""
        with self._lock:
            if self._reported_by_all is None:
                reported = [self._sums.covered(rank) for rank in self._waited_for()]
                self._reported_by_all = min(reported, default=_ALL)
            if (era, step) <= self._reported_by_all:
                return []  # the usual case, without a look at each rank
            return [rank for rank in self._waited_for() if self._sums.covered(rank) < (era, step)]

    def _waited_for(self) -> Iterator[int]:
        return (
            rank
            for rank in range(1, self.world_size)
            if rank not in self._given_up and not self._has_ended(rank)
        )

    def give_up(self, ranks: Iterable[int]) -> None:
        """Do not wait for these ranks again until they report."""
        with self._lock:
            self._given_up.update(ranks)
            self._reported_by_all = None

    def expect_all(self) -> None:
        """Wait once more for all ranks but the silent ones: their last steps may arrive on another way."""
        with self._lock:
            self._given_up = set(self._silent_ranks())
            self._reported_by_all = None

    def is_incomplete(self, step: int) -> str:
        """The figures of this step are unknown, which is counted; returns what is missing, as text."""
        with self._lock:
            missing = self._missing
            missing.rows += 1
            missing.first_step = step if missing.first_step is None else missing.first_step
            missing.ranks |= self._given_up
            return self._named(sorted(self._given_up)) or "the other ranks"

    def check_silence(self) -> None:
        """Warn of each rank that has fallen silent."""
        with self._lock:
            found = [rank for rank in self._silent_ranks() if rank not in self._silent]
            for rank in found:
                self._silent[rank] = self._about_silent(rank)
            texts = [self._silent[rank] for rank in found[:_MOST_NAMED]]
        for text in texts:
            self._notice(text)

    def _silent_ranks(self) -> list[int]:
        """Those without a message for a while before the store was last read."""
        return [
            rank
            for rank in range(1, self.world_size)
            if not self._has_ended(rank) and self._read_s - self._seen_s(rank) > SILENT_S
        ]

    def _seen_s(self, rank: int) -> float:
        known = self._ranks.get(rank)
        return self._began_s if known is None else known.seen_s

    def _has_ended(self, rank: int) -> bool:
        known = self._ranks.get(rank)
        return known is not None and known.row.is_last

    def _about_silent(self, rank: int) -> str:
        known = self._ranks.get(rank)
        if known is None:
            return f"rank {rank} has never reported"
        since, step = _time(known.message.at_s), known.message.step
        return f"rank {rank} ({_where(known.row)}) has been silent since {since}, step {step}"

    def unfinished(self) -> list[int]:
        """The ranks that have neither sent a last row nor fallen silent."""
        with self._lock:
            silent = {*self._silent_ranks(), *self._given_up}
            return [r for r in range(1, self.world_size) if not self._has_ended(r) and r not in silent]

    @property
    def scope(self) -> str:
        """What the job's figures cover."""
        text = f"job of {self.world_size} ranks, summed"
        with self._lock:
            missing = self._missing
            if not missing.rows:
                return text
            what = f"{missing.rows:,} steps, first step {missing.first_step}"
            named = self._named(sorted(missing.ranks))
            return f"{text}; unknown for {what}" + (f": {named} missing" if named else "")

    def notes(self) -> list[str]:
        """For the summary: which ranks did not end in order, and which share a GPU."""
        with self._lock:
            shared = self._about_shared_gpus()
            silent = [self._silent.get(rank) or self._about_silent(rank) for rank in self._not_ended()]
            more = [f"{len(silent) - _MOST_NAMED:,} more ranks sent no last row"] * (
                len(silent) > _MOST_NAMED
            )
            return [f"{text}: it sent no last row" for text in silent[:_MOST_NAMED]] + more + shared

    def _about_shared_gpus(self) -> list[str]:
        ranks_of: dict[str, list[int]] = {}
        for rank, known in sorted(self._ranks.items()):
            if known.row.device.startswith(GPU_NAME):
                ranks_of.setdefault(known.row.device, []).append(rank)
        shared = [ranks for ranks in ranks_of.values() if len(ranks) > 1]
        if not shared:
            return []
        more = f", and {len(shared) - 1:,} more GPUs have several ranks" if len(shared) > 1 else ""
        return [
            f"{self._named(shared[0])} share one GPU{more}: MFU and HFU are relative to one peak for each "
            "rank, and hardware counters read all that runs on a GPU"
        ]

    def _not_ended(self) -> list[int]:
        return [rank for rank in range(1, self.world_size) if not self._has_ended(rank)]

    def totals(self, own: RankReporter) -> dict[str, Any]:
        """The job's sums since the start, as reported by its ranks; None where one does not know its own."""
        steps, sums = own.amounts.sums()
        found = [(steps, {name: sums.get(name) for name in TOTALS})]
        with self._lock:
            for rank in range(1, self.world_size):
                known = self._ranks.get(rank)
                if known is not None:
                    message = known.message
                    found.append((message.steps, {name: _sum_in(message, name) for name in TOTALS}))
        return {
            "steps": steps,
            "ranks": len(found),
            "is_complete": len(found) == self.world_size and all(rank[0] == steps for rank in found),
            **{name: _total([(n, of[name]) for n, of in found]) for name in TOTALS},
        }

    def metrics(self) -> dict[str, float]:
        """The figures of each rank's last window, and the rank that holds up the others most.

        Of a large job the least, the median and the largest.
        """
        with self._lock:
            rows = {rank: known.row for rank, known in sorted(self._ranks.items())}
        found: dict[str, float] = {}
        for name, attribute in _METRICS.items():
            values = {
                rank: value for rank, row in rows.items() if (value := getattr(row, attribute)) is not None
            }
            if self.world_size <= _EACH_RANK:
                found |= {f"perf/rank/{rank}/{name}": value for rank, value in values.items()}
            elif values:
                over = sorted(values.values())
                found[f"perf/rank/min/{name}"] = over[0]
                found[f"perf/rank/median/{name}"] = statistics.median(over)
                found[f"perf/rank/max/{name}"] = over[-1]
        return found | straggler_metrics(self._stragglers.alerts)

    def table(self) -> list[dict[str, Any]]:
        """Each rank as plain data, the first few dozen."""
        with self._lock:
            silent = {*self._silent_ranks(), *self._silent}
            return [self._entry(rank, silent) for rank in range(min(self.world_size, _MOST_LISTED))]

    def _entry(self, rank: int, silent: set[int]) -> dict[str, Any]:
        known = self._ranks.get(rank)
        if known is None:
            return {"rank": rank, "status": "never reported"}
        row = known.row
        status = "ended" if row.is_last else "silent" if rank in silent else "no last row"
        return {
            "rank": rank,
            "host": row.host,
            "device": row.device,
            "role": row.role,
            "status": status,
            "last_seen": _time(known.message.at_s),
            "step": known.message.step,
            "steps": known.steps,
            "step_time_s": known.seconds / known.steps if known.steps else None,
            "data_wait_s": None
            if known.data_wait_s is None or not known.steps
            else known.data_wait_s / known.steps,
            "collective_s": None if row.collective_s is None else sum(row.collective_s.values()),
            "clock_mhz": row.clock_mhz,
            "memory_bytes": row.memory_bytes,
        }

    def _named(self, ranks: Sequence[int]) -> str:
        if not ranks:
            return ""
        names = ", ".join(map(str, ranks[:_MOST_NAMED]))
        more = f" and {len(ranks) - _MOST_NAMED:,} more" if len(ranks) > _MOST_NAMED else ""
        return f"rank{'s' * (len(ranks) > 1)} {names}{more}"


_DECODER = msgspec.json.Decoder(Message)


def _sum_in(message: Message, name: str) -> tuple[int, Exact] | None:
    found = message.sums.get(name)
    return None if found is None else (found.steps, number(found.value))


def _total(ranks: Iterable[tuple[int, tuple[int, Exact] | None]]) -> float | None:
    """The sum over ranks; None if one does not know it for each of its steps."""
    total: Exact = 0
    for steps, found in ranks:
        if found is None or found[0] != steps:
            return None
        total += found[1]
    return total if isinstance(total, int) else total.numerator if total.denominator == 1 else float(total)


def _where(row: RankRow) -> str:
    return row.device if row.device.startswith(row.host) else f"{row.host}, {row.device}"


def _time(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
