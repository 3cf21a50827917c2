"""The ranks of a job, from the rows that every rank left in the run's folder.

    ranks/*.jsonl ─► a line for each device: host, steps, mean step, data wait, memory, last seen

However many files are there are read, one after the other: those of one machine, or of all. A device is one
line whatever rank numbers it had; a rank that shares its device with another has a line of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ...monitor.ranks.rank_file import read_files
from ...monitor.ranks.rank_row import RankRow

_MOST_FAULTS = 8


@dataclass(frozen=True, kw_only=True)
class RankLine:
    """One device of a job."""

    ranks: str
    host: str
    device: str
    attempts: int
    steps: int
    mean_step_s: float | None
    """A row of a rank has the mean of its window, so there is no median of single steps."""
    data_wait_s: float | None
    """A step's."""
    memory_bytes: int | None
    last_seen: str


@dataclass(frozen=True, kw_only=True)
class RanksOfRun:
    """What the files of a run's ranks say."""

    lines: tuple[RankLine, ...] = ()
    """By the rank that a device had last."""
    faults: tuple[str, ...] = ()
    """What could not be read."""


def load_ranks(folder: Path) -> RanksOfRun:
    """The ranks of the run in a folder; empty for a single process."""
    lines: list[tuple[int, RankLine]] = []
    faults: list[str] = []
    for rows, own_faults in read_files(folder):
        lines += rank_lines(rows)
        faults += own_faults
    if len(faults) > _MOST_FAULTS:
        faults[_MOST_FAULTS:] = [f"{len(faults) - _MOST_FAULTS:,} more files"]
    return RanksOfRun(
        lines=tuple(line for _, line in sorted(lines, key=lambda found: found[0])),
        faults=tuple(faults),
    )


def rank_lines(rows: Sequence[RankRow]) -> list[tuple[int, RankLine]]:
    """The rows of a file by their time: the line of its device, or of each rank that shared it, by rank."""
    parts: dict[tuple[str, str, int | None], list[RankRow]] = defaultdict(list)
    is_shared = _is_shared(rows)
    for row in rows:
        parts[row.host, row.device, row.rank if is_shared else None].append(row)
    return [(found[-1].rank, _line(found)) for found in parts.values()]


def _is_shared(rows: Sequence[RankRow]) -> bool:
    """Whether a process went on reporting after one of another rank had begun."""
    newest: dict[int, int] = {}
    last_rank: int | None = None
    for row in rows:
        if row.rank != last_rank and newest.get(row.rank) == row.number - 1 > 0:
            return True
        newest[row.rank], last_rank = row.number, row.rank
    return False


def _line(rows: Sequence[RankRow]) -> RankLine:
    last = rows[-1]
    timed = [(row.steps, row.step_time_s) for row in rows if row.step_time_s is not None and row.steps]
    timed_steps = sum(number for number, _ in timed)
    steps = sum(row.steps for row in rows)
    waits = [row.steps * row.data_wait_s for row in rows if row.data_wait_s is not None]
    return RankLine(
        ranks=", ".join(map(str, dict.fromkeys(row.rank for row in rows))),
        host=last.host,
        device=last.device.removeprefix(f"{last.host}:"),
        attempts=sum(row.number == 1 for row in rows) or 1,
        steps=steps,
        mean_step_s=sum(number * mean for number, mean in timed) / timed_steps if timed else None,
        data_wait_s=sum(waits) / steps if waits and steps else None,
        memory_bytes=max((row.memory_bytes for row in rows if row.memory_bytes is not None), default=None),
        last_seen=f"{datetime.fromtimestamp(last.at_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
        + ("" if last.is_last else ", no last row"),
    )
