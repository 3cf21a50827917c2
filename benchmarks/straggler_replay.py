"""Recorded rows of healthy jobs, replayed with one late rank in them.

Recorded (`tests/data/straggler_rows.json`, by benchmarks/straggler_rows.py): jobs of 4 and 8 real processes
under DDP by gloo, none of them made late. A replay takes one of them (or two ranks of the smaller one),
begins at any window, gives the ranks new numbers, and from some window on changes the rows as a late rank
would: its own cause grows, and the step of all ranks grows by as much, since they wait for it.

GPUs are not recorded but drawn. From the committed runs on an H200 (hardware_truth_training.txt and
hardware_truth_staged.txt in benchmarks/results): the clock, 1,650 MHz, which differs by 0.4 % between runs of
the same kind, and the share in which it is busy, with 0 to 3 points idle. Assumed, since those runs had one
chip: chips differ by 1.5 % in clock and by 1 point in busy share (one standard deviation).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.straggler_alert import Alert
from truemfu.monitor.ranks.stragglers import Stragglers

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "straggler_rows.json"
FIELDS = ("steps", "step_time_s", "data_wait_s", "host_s")
"""What a recording has for each window and rank."""
WINDOW_S = 10.0
LENGTH = 16
CAUSES = ("input", "gpu", "host", "work", "link", "silent", "ended")
SIZES = (0.15, 0.6)
"""How much of the healthy step a cause adds; drawn evenly on a logarithmic scale."""

CLOCK_MHZ = 1650.0
CHIPS_DIFFER = 0.015
CLOCK_NOISE = 0.004
BUSY_SHARE, BUSY_DIFFERS, BUSY_NOISE = 0.97, 0.01, 0.01

Windows = list[list[RankRow]]


@dataclass(frozen=True)
class Replay:
    """The rows of one job, window by window."""

    windows: Windows
    kind: str
    """The ranks' devices: cpu or gpu."""
    late_rank: int | None = None
    onset: int | None = None
    """The first late window."""
    size: float = 0.0


@dataclass(frozen=True)
class Outcome:
    is_right: bool
    """The only alert is about the late rank, by its cause, at its third late window."""
    named_after: int | None
    """Windows, if the late rank and its cause were named."""
    alerts: list[Alert]


@cache
def recordings() -> dict[int, list[Windows]]:
    """By the number of ranks: jobs, each as windows with one row per rank."""
    found: dict[int, list[Windows]] = {}
    for job in json.loads(RECORDED.read_text(encoding="ascii"))["jobs"]:
        columns = zip(
            *(job[field] for field in ("steps", "step_time_s", "data_wait_s", "host_s")), strict=True
        )
        found.setdefault(job["ranks"], []).append([_rows(*window) for window in columns])
    return found


def _rows(steps: list[int], *seconds: list[float]) -> list[RankRow]:
    return [
        RankRow(
            rank=rank,
            world_size=len(steps),
            host="node0",
            device="",
            number=0,
            at_s=0.0,
            steps=steps[rank],
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            host_s=host_s,
            model_flops=1e9,
            tokens=256.0,
        )
        for rank, (step_time_s, data_wait_s, host_s) in enumerate(zip(*seconds, strict=True))
    ]


def healthy(seed: int, kind: str) -> Replay:
    """No rank is late."""
    return Replay(_base(random.Random(f"healthy {kind} {seed}"), kind), kind)


def staged(cause: str, seed: int) -> Replay:
    """One rank is late."""
    rng = random.Random(f"{cause} {seed}")
    kind = {"gpu": "gpu", "link": "gpu"}.get(cause) or rng.choice(("cpu", "gpu"))
    windows = _base(rng, kind, has_collectives=cause == "link")
    late_rank, onset = rng.randrange(len(windows[0])), rng.randint(3, 9)
    size = SIZES[0] * (SIZES[1] / SIZES[0]) ** rng.random()
    changed = [
        window if number < onset else _late(window, cause, late_rank, size, is_first=number == onset)
        for number, window in enumerate(windows)
    ]
    return Replay(changed, kind, late_rank, onset, size)


def judge(replay: Replay, cause: str) -> Outcome:
    """What the detector says of a staged replay."""
    stragglers = Stragglers(window_s=WINDOW_S)
    alerts, named_after = [], None
    assert replay.onset is not None
    onset = replay.onset + (cause == "ended")  # the window with its last row is not missing
    for number, window in enumerate(replay.windows):
        for alert in stragglers.add(window, WINDOW_S * number):
            alerts.append(alert)
            if named_after is None and (alert.rank, alert.cause) == (replay.late_rank, cause):
                named_after = number - onset + 1
    is_right = len(alerts) == 1 and named_after is not None and named_after <= 3
    return Outcome(is_right, named_after, alerts)


def false_alarms(replay: Replay) -> list[Alert]:
    """What the detector says of a healthy replay."""
    stragglers = Stragglers(window_s=WINDOW_S)
    found: list[Alert] = []
    for number, window in enumerate(replay.windows):
        found += stragglers.add(window, WINDOW_S * number)
    return found


def _base(rng: random.Random, kind: str, *, has_collectives: bool = False) -> Windows:
    """A healthy job."""
    size = rng.choice((2, 4, 8))
    recorded = rng.choice(recordings()[max(size, 4)])
    ranks = rng.sample(range(len(recorded[0])), size)
    first = rng.randrange(len(recorded))
    chips = [
        (CLOCK_MHZ * rng.gauss(1, CHIPS_DIFFER), min(1.0, rng.gauss(BUSY_SHARE, BUSY_DIFFERS)))
        for _ in range(size)
    ]
    windows: Windows = []
    step = 0
    for number in range(LENGTH):
        window = recorded[(first + number) % len(recorded)]
        step += window[0].steps
        rows = []
        for rank in range(size):
            changes: dict[str, Any] = {
                "rank": rank,
                "world_size": size,
                "device": f"{kind}-{rank}",
                "number": number + 1,
                "at_s": WINDOW_S * (number + 1),
                "step": step,
            }
            if kind == "gpu":
                clock, busy = chips[rank]
                changes |= {
                    "host_s": None,
                    "clock_mhz": clock * rng.gauss(1, CLOCK_NOISE),
                    "busy_share": min(1.0, max(0.0, rng.gauss(busy, BUSY_NOISE))),
                    "throttle": "power limit",
                }
            row = _with(window[ranks[rank]], **changes)
            if has_collectives:
                assert row.step_time_s is not None
                row = _with(row, collective_s={"world": 0.2 * row.step_time_s * rng.gauss(1, 0.05)})
            rows.append(row)
        windows.append(rows)
    return windows


def _late(window: list[RankRow], cause: str, late_rank: int, size: float, *, is_first: bool) -> list[RankRow]:
    """One window with this rank late."""
    own = window[late_rank]
    assert own.step_time_s is not None
    if cause == "silent":
        return [row for row in window if row.rank != late_rank]
    if cause == "ended":
        rest = [row for row in window if row.rank != late_rank]
        return [*rest, _with(own, is_last=True)] if is_first else rest
    late_s = size * own.step_time_s
    own_s = own.host_s if own.host_s is not None else own.step_time_s * (own.busy_share or 0.0)
    changes: dict[str, Any] = {}
    if cause == "input":
        assert own.data_wait_s is not None
        changes = {"data_wait_s": own.data_wait_s + late_s}
    elif cause == "work":
        assert own.model_flops is not None
        assert own.tokens is not None
        more = 1 + late_s / own_s
        changes = {"model_flops": own.model_flops * more, "tokens": own.tokens * more}
        if own.host_s is not None:
            changes["host_s"] = own.host_s * more
    elif cause == "gpu":
        assert own.clock_mhz is not None
        changes = {"clock_mhz": own.clock_mhz / (1 + late_s / own_s), "throttle": "thermal slowdown"}
    elif cause == "host" and own.host_s is not None:
        changes = {"host_s": own.host_s + late_s}
    rows = []
    for row in window:
        assert row.step_time_s is not None
        step_s = row.step_time_s + late_s
        changed: dict[str, Any] = {"step_time_s": step_s}
        is_late = row.rank == late_rank
        if row.busy_share is not None:  # the others' GPUs are busy waiting in a collective
            is_idle = is_late and cause in ("input", "host")
            busy_s = row.step_time_s * row.busy_share + (0.0 if is_idle else late_s)
            changed["busy_share"] = min(1.0, busy_s / step_s)
        if row.collective_s is not None and not is_late:
            changed["collective_s"] = {name: value + late_s for name, value in row.collective_s.items()}
        rows.append(_with(row, **changed, **(changes if is_late else {})))
    return rows


def _with(row: RankRow, **changes: Any) -> RankRow:
    return msgspec.structs.replace(row, **changes)
