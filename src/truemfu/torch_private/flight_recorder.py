"""The collectives that torch has recorded in this process, with durations by its watchdog thread."""

from __future__ import annotations

from . import table
from .find import ABSENT


def nccl_records() -> bytes | None:
    """The latest NCCL collectives as JSON; None where torch does not record them. Waits for nothing."""
    dump = table.get(table.NCCL_RECORDS)
    if dump is ABSENT:
        return None
    found: bytes | str = dump(True, False)
    return found.encode() if isinstance(found, str) else found
