"""An alert about one rank: what trackers, notices and the summary say of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from .lateness import SlowCause

Cause = Literal[SlowCause, "silent", "ended"]
CAUSE_NUMBERS: dict[Cause, int] = {
    "input": 1, "gpu": 2, "host": 3, "link": 4, "work": 5, "silent": 6, "ended": 7, "blocked": 8,
}  # fmt: skip
"""For trackers, which draw numbers."""

_PHRASES: dict[Cause, str] = {
    "input": "waits for data {excess} longer than the others in each step of {step}",
    "gpu": "has a GPU that is slower than the others' by up to {excess} in each step of {step}{detail}",
    "host": "is later than the others by {excess} in each step of {step}, because of its host",
    "blocked": "is blocked {excess} longer than the others in each step of {step}: it sleeps or waits for "
    "something that the other ranks do not wait for",
    "link": "arrives at collectives {excess} later than the others in each step of {step}, possibly because "
    "of its link (this cause is untested)",
    "work": "has more work than the others, up to {excess} in each step of {step} (uneven work, not a fault)",
}
_AT_MOST = ("gpu", "work")


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One rank that is late, silent or has ended before the others."""

    rank: int
    host: str
    device: str
    cause: Cause
    since_s: float
    """Unix time: where the first late window began; where the last row was written, if silent or ended."""
    since_step: int | None
    """The first late step; the last known step, if silent or ended."""
    step_time_s: float | None = None
    """The mean since then."""
    excess_s: float | None = None
    """Seconds per step beyond the others', by this cause; the mean since then. None: silent or ended."""
    lost_s: float | None = None
    """Excess × steps so far."""
    detail: str | None = None
    """The driver's throttle reason, for `gpu`."""
    until_s: float | None = None
    """Unix time of the first row of the recovery, once it is certain; None while the alert holds."""

    @property
    def share(self) -> float | None:
        """Of the step, and so of the job's time: all ranks wait for the last one."""
        if self.excess_s is None or not self.step_time_s:
            return None
        return self.excess_s / self.step_time_s

    @property
    def is_fault(self) -> bool:
        """False for uneven work and for a rank that ended in order."""
        return self.cause not in ("work", "ended")

    def __str__(self) -> str:
        """One sentence, without a full stop."""
        name = f"rank {self.rank} ({self.host}, {self.device})"
        step = "unknown" if self.since_step is None else f"{self.since_step:,}"
        if self.cause in ("silent", "ended"):
            if self.until_s is not None:
                return f"{name} reports again after step {step}"
            if self.cause == "silent":
                return f"{name} has not reported for three windows; its last step was {step}"
            return f"{name} ended after step {step}, before the others"
        assert self.excess_s is not None
        assert self.lost_s is not None
        at_most = "up to " if self.cause in _AT_MOST else ""
        if self.until_s is not None:
            cost = f"since step {step} this cost the job {at_most}{_seconds(self.lost_s)}"
            return f"{name} is no longer late ({self.cause}); {cost}"
        phrase = _PHRASES[self.cause].format(
            excess=_seconds(self.excess_s),
            step=_seconds(self.step_time_s or 0.0),
            detail=f" ({self.detail})" if self.detail else "",
        )
        return f"{name} {phrase}, since step {step}: {at_most}{self.share or 0.0:.0%} of the job's time"


def straggler_metrics(alerts: Iterable[Alert]) -> dict[str, float]:
    """For trackers: how many ranks have an alert, and the one that costs the job most.

    A gauge keeps its last value, so the names are there without an alert too: rank -1, cause 0 and no cost.
    What a silent or ended rank costs is unknown, and left out.
    """
    held = [alert for alert in alerts if alert.until_s is None]
    if not held:
        return {
            "perf/straggler_count": 0,
            "perf/straggler_rank": -1,
            "perf/straggler_cause": 0,
            "perf/straggler_excess_s": 0.0,
            "perf/straggler_share": 0.0,
            "perf/straggler_lost_s": 0.0,
        }
    worst = max(held, key=lambda alert: (alert.excess_s is not None, alert.excess_s or 0.0, alert.is_fault))
    of_worst: dict[str, float | None] = {
        "perf/straggler_rank": worst.rank,
        "perf/straggler_cause": CAUSE_NUMBERS[worst.cause],
        "perf/straggler_excess_s": worst.excess_s,
        "perf/straggler_share": worst.share,
        "perf/straggler_lost_s": worst.lost_s,
    }
    known = {name: value for name, value in of_worst.items() if value is not None}
    return {"perf/straggler_count": len(held), **known}


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"
