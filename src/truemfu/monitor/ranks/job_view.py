"""Rank 0's view of its job: what every rank last reported, and sums over all ranks.

    store thread   take(messages) ──► JobSums, the latest row of each rank, Stragglers
    row thread     step(…), waiting_for(…) ──► rows of the job;  metrics() ──► perf/rank/…
    any thread     scope, totals(), table() ──► the summary

A rank that has not reported for three rows is silent. Nothing here waits for a rank.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from ...errors import one_line
from .amounts import TOTALS, Amounts, Exact, Message, StepKey
from .job_sums import JobSums
from .rank_record import MOST_NAMED, RankRecord, named
from .rank_row import RankRow
from .reporter import GPU_NAME, ROW_EVERY_S, RankReporter
from .straggler_alert import Alert, straggler_metrics
from .stragglers import Stragglers

SILENT_S = 3 * ROW_EVERY_S
_EACH_RANK = 16
"""The largest job in which every rank has metrics of its own."""
_MOST_LISTED = 64
_MOST_ALERTED = 32
"""Alerts that are warnings too, of all that a run can have."""
_METRICS = {
    "step_time": "step_time_s",
    "data_wait": "data_wait_s",
    "clock_mhz": "clock_mhz",
    "memory_bytes": "memory_bytes",
}
"""Metrics under `perf/rank/<n>/`, and the fields of a row that they are."""


class JobView:
    """Lives in rank 0; may be used on any thread."""

    def __init__(
        self, world_size: int, *, notice: Callable[..., None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.world_size = world_size
        self._others = range(1, world_size)
        self._notice, self._clock = notice, clock
        self._lock = threading.Lock()
        self._sums = JobSums(world_size - 1)
        self._ranks: dict[int, RankRecord] = {}
        self._given_up: set[int] = set()
        """Ranks that were too late, until they report again."""
        self._silent: dict[int, str] = {}
        """Ranks without a message for a while before the store was last read, and what is said of each."""
        self._incomplete, self._first_incomplete = 0, 0
        """Rows whose job figures are unknown, and the step of the first one."""
        self._missed: set[int] = set()
        """The ranks that did not report these."""
        self._began_s = clock()
        self._alerted: set[str] = set()
        self._stragglers = Stragglers(window_s=ROW_EVERY_S)

    def take(self, messages: Iterable[bytes], *, from_store: bool = True) -> None:
        """New messages of ranks, none perhaps; one that cannot be read is ignored.

        Only what the store was read for shows that a rank is silent: rank 0's own messages and those in files
        come without it.
        """
        now_s = self._clock()
        rows: list[RankRow] = []
        fell_silent: list[str] = []
        late: list[Alert] = []
        fault: Exception | None = None
        with self._lock:
            for data in messages:
                try:
                    self._take(_DECODER.decode(data), now_s, rows)
                except (msgspec.MsgspecError, ValueError):
                    continue
            if from_store:
                fell_silent = self._find_silent(now_s)
            if rows or from_store:
                try:
                    late = self._stragglers.add(rows, now_s, is_read=from_store)
                except Exception as error:  # else the store would be taken for the one that failed
                    fault = error
        for text in fell_silent[:MOST_NAMED]:
            self._notice(text)
        self._warn_of_late(late)
        if fault is not None:
            self._notice(f"the rows of ranks could not be compared: {one_line(fault)}")

    def take_own(self, message: bytes) -> None:
        """A message of rank 0 itself."""
        self.take([message], from_store=False)

    def _take(self, message: Message, now_s: float, rows: list[RankRow]) -> None:
        row = message.row
        known = self._ranks.get(row.rank)
        if known is not None and (row.number, message.steps) < (known.row.number, known.message.steps):
            return  # an earlier one, on another way
        is_new = known is None or row.number != known.row.number
        if known is None:
            known = self._ranks[row.rank] = RankRecord(message, now_s)
        known.take(message, now_s)
        if is_new:
            rows.append(row)
        self._silent.pop(row.rank, None)
        if row.rank:  # rank 0 adds its own amounts itself
            self._given_up.discard(row.rank)
            self._sums.take(message)

    def _find_silent(self, now_s: float) -> list[str]:
        """The store was read: what is said of each rank that has fallen silent since the last time."""
        found = {}
        for rank in self._others:
            known = self._ranks.get(rank)
            seen_s = self._began_s if known is None else known.seen_s
            if rank not in self._silent and not self._has_ended(rank) and now_s - seen_s > SILENT_S:
                found[rank] = self._about_silent(rank)
        self._silent |= found
        return list(found.values())

    def _warn_of_late(self, changed: Iterable[Alert]) -> None:
        """Warn of each rank that begins to hold up the job, or ends to; silence has its own warning."""
        for alert in changed:
            if alert.cause in ("silent", "ended"):
                continue
            about = f"rank {alert.rank}, {alert.cause}, {alert.until_s is None}"
            if about not in self._alerted and len(self._alerted) >= _MOST_ALERTED:
                self._notice("more ranks hold up the job: they are in the summary and in perf/straggler_*")
                continue
            self._alerted.add(about)
            self._notice(str(alert), about=about)

    def step(self, key: StepKey) -> Amounts | None:
        """The sums of a step over the other ranks; None if they are not complete. In the order of steps."""
        with self._lock:
            return self._sums.of(key)

    def is_waiting_for(self, key: StepKey) -> bool:
        """Whether some rank may still report this step."""
        with self._lock:
            return bool(self._missing(key) - self._given_up)

    def go_without(self, key: StepKey) -> str:
        """The figures of this step stay unknown; returns what is missing, as text.

        The ranks that have not reported it are not waited for again until they report.
        """
        with self._lock:
            self._given_up |= self._missing(key)
            self._first_incomplete = self._first_incomplete if self._incomplete else key.step
            self._incomplete += 1
            self._missed |= self._given_up
            return named(sorted(self._given_up)) or "the other ranks"

    def _missing(self, key: StepKey) -> set[int]:
        """The ranks that have not reported this step and have not ended."""
        return {
            rank for rank in self._others if self._sums.covered(rank) < key[:2] and not self._has_ended(rank)
        }

    def expect_all(self) -> None:
        """Wait once more for all ranks but the silent ones: their last steps may arrive on another way."""
        with self._lock:
            self._given_up = set(self._silent)

    def unfinished(self) -> list[int]:
        """The ranks that have neither sent a last row nor fallen silent."""
        with self._lock:
            return [r for r in self._not_ended() if r not in self._silent and r not in self._given_up]

    def _has_ended(self, rank: int) -> bool:
        known = self._ranks.get(rank)
        return known is not None and known.row.is_last

    def _not_ended(self) -> list[int]:
        return [rank for rank in self._others if not self._has_ended(rank)]

    def _about_silent(self, rank: int) -> str:
        known = self._ranks.get(rank)
        return f"rank {rank} has never reported" if known is None else known.silent_since()

    @property
    def scope(self) -> str:
        """What the job's figures cover."""
        text = f"job of {self.world_size} ranks, summed"
        with self._lock:
            if not self._incomplete:
                return text
            what = f"{self._incomplete:,} steps, first step {self._first_incomplete}"
            ranks = named(sorted(self._missed))
            return f"{text}; unknown for {what}" + (f": {ranks} missing" if ranks else "")

    def notes(self) -> list[str]:
        """For the summary: which ranks did not end in order, and which share a GPU."""
        with self._lock:
            ranks = self._not_ended()
            found = [
                f"{self._about_silent(rank)}: it sent no last row, so it may have been killed"
                for rank in ranks[:MOST_NAMED]
            ]
            if len(ranks) > MOST_NAMED:
                found.append(f"{len(ranks) - MOST_NAMED:,} more ranks sent no last row")
            return found + self._about_shared_gpus()

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
            f"{named(shared[0])} share one GPU{more}: MFU and HFU are relative to one peak for each "
            "rank, and hardware counters read all that runs on a GPU"
        ]

    def totals(self, own: RankReporter) -> dict[str, Any]:
        """The job's sums since the start, as reported by its ranks; None where one does not know its own."""
        steps, sums = own.amounts.sums()
        found = [(steps, {name: sums.get(name) for name in TOTALS})]
        with self._lock:
            others = [known for rank, known in self._ranks.items() if rank]
            found += [(known.message.steps, {n: known.sum_of(n) for n in TOTALS}) for known in others]
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

    def stragglers(self) -> list[dict[str, Any]]:
        """The ranks that held up the job, as plain data: those that still do, then the newest others."""
        alerts = [*self._stragglers.alerts, *reversed(self._stragglers.past)][:_MOST_LISTED]
        return [{**msgspec.to_builtins(alert), "share": alert.share, "text": str(alert)} for alert in alerts]

    def table(self) -> list[dict[str, Any]]:
        """Each rank as plain data, the first few dozen."""
        with self._lock:
            return [self._entry(rank) for rank in range(min(self.world_size, _MOST_LISTED))]

    def _entry(self, rank: int) -> dict[str, Any]:
        known = self._ranks.get(rank)
        if known is None:
            return {"rank": rank, "status": "never reported"}
        status = "silent" if rank in self._silent else "no last row"
        return known.entry("ended" if known.row.is_last else status)


_DECODER = msgspec.json.Decoder(Message)


def _total(ranks: Iterable[tuple[int, tuple[int, Exact] | None]]) -> float | None:
    """The sum over ranks; None if one does not know it for each of its steps."""
    total: Exact = 0
    for steps, found in ranks:
        if found is None or found[0] != steps:
            return None
        total += found[1]
    return total if isinstance(total, int) else total.numerator if total.denominator == 1 else float(total)
