"""How much of the time collectives ran, by process group, as NCCL's watchdog measured them.

    watchdog thread ── duration of each collective ──► torch's flight recorder ── read for each row ─► shares

The recorder keeps the latest collectives only. So a share is over the time that its records cover: from the
start of the oldest one to that of the newest, whose own duration belongs to the next window. Whether other
kernels ran at the same time is not recorded. Durations exist where TORCH_NCCL_ENABLE_TIMING=1 was set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from ...torch_private.flight_recorder import nccl_records


class _Collective(msgspec.Struct, frozen=True):
    record_id: int
    process_group: tuple[str, str]
    """Its name, which is unique, and its description."""
    time_created_ns: int
    duration_ms: float | None = None


class _Collectives(msgspec.Struct, frozen=True):
    entries: list[_Collective] = []


class CollectiveTimes:
    """The collectives of this process since the last reading."""

    def __init__(self, records: Callable[[], bytes | None] = nccl_records) -> None:
        self._records = records
        self._next: dict[str, int] = {}
        """By name of a group: the record with which its next window begins."""

    def shares(self) -> dict[str, float] | None:
        """By group, the share of time in its collectives; None if nothing was timed.

        A group is called by its description, and by its name too where several have the same description.
        """
        data = self._records()
        if data is None:
            return None
        by_group: dict[tuple[str, str], list[_Collective]] = {}
        for record in sorted(_DECODER.decode(data).entries, key=lambda record: record.record_id):
            name, _ = record.process_group
            if record.duration_ms is not None and record.record_id >= self._next.get(name, 0):
                by_group.setdefault(record.process_group, []).append(record)
        found: dict[str, float] = {}
        described = Counter(description for _, description in by_group)
        for (name, description), timed in by_group.items():
            covered_s = 1e-9 * (timed[-1].time_created_ns - timed[0].time_created_ns)
            if covered_s <= 0:
                continue
            self._next[name] = timed[-1].record_id
            spent_s = 1e-3 * sum(record.duration_ms or 0.0 for record in timed[:-1])
            group = description if described[description] == 1 else f"{description} {name}"
            found[group] = spent_s / covered_s
        return found or None


_DECODER = msgspec.json.Decoder(_Collectives)
