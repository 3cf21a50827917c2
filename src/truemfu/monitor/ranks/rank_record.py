"""What rank 0 knows of one rank: its latest row and message, and its means over the run so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import msgspec

from .amounts import Exact, Message, number
from .rank_row import RankRow

MOST_NAMED = 8


@dataclass
class RankRecord:
    """Begins with the first message of the rank."""

    message: Message
    """The last one, with its last run of steps only."""
    seen_s: float
    """When it arrived, by this process' monotonic clock."""

    @property
    def row(self) -> RankRow:
        return self.message.row

    def take(self, message: Message, now_s: float) -> None:
        """A newer message."""
        self.message = msgspec.structs.replace(message, names=[], runs=message.runs[-1:])
        self.seen_s = now_s

    def sum_of(self, name: str) -> tuple[int, Exact] | None:
        """Over how many steps since the start an amount is known, and its sum over these."""
        found = self.message.sums.get(name)
        return None if found is None else (found.steps, number(found.value))

    def silent_since(self) -> str:
        row = self.row
        where = row.device if row.device.startswith(row.host) else f"{row.host}, {row.device}"
        since = f"{_time(self.message.at_s)}, step {self.message.step}"
        return f"rank {row.rank} ({where}) has been silent since {since}"

    def entry(self, status: str) -> dict[str, Any]:
        """Plain data for the summary."""
        row, timed = self.row, self.message.timed
        return {
            "rank": row.rank,
            "host": row.host,
            "device": row.device,
            "role": row.role,
            "status": status,
            "last_seen": _time(self.message.at_s),
            "step": self.message.step,
            "steps": timed.steps,
            "step_time_s": timed.seconds / timed.steps if timed.steps else None,
            "data_wait_s": None if timed.data_wait_s is None else timed.data_wait_s / timed.steps,
            "collective_s": None if row.collective_s is None else sum(row.collective_s.values()),
            "clock_mhz": row.clock_mhz,
            "memory_bytes": row.memory_bytes,
        }


def named(ranks: Sequence[int]) -> str:
    """The ranks as text, the first few by number; empty if there are none."""
    if not ranks:
        return ""
    numbers = ", ".join(map(str, ranks[:MOST_NAMED]))
    more = f" and {len(ranks) - MOST_NAMED:,} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {numbers}{more}"


def _time(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
