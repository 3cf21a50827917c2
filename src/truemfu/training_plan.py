"""Tokens per second, MFU, days and cost of a training that has not run yet, from its FLOPs per token.

    MFU       = tokens/s × FLOPs per token / (GPUs × peak of one)
    tokens/s  = MFU × GPUs × peak of one / FLOPs per token
    days      = tokens / tokens/s / 86400
    cost      = GPU hours × price of one

One of tokens/s and MFU is given, the other follows. Assumed: every step is like the counted one, and no time
is lost to restarts, evaluation or checkpoints. HFU stays unknown: only a run shows what its kernels execute.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .utilization import calculate_mfu

_SECONDS_PER_DAY = 86_400
_SECONDS_PER_HOUR = 3_600


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training on `gpus` equal GPUs; `tokens_per_second` is of all of them, the peak and the price of one.

    The price may be in any currency, and costs are in the same. Unknown is None.
    """

    flops_per_token: float
    gpus: int
    peak_flops_per_s: float | None
    peak_source: str | None
    tokens_per_second: float | None = None
    mfu: float | None = None
    tokens: float | None = None
    price_per_gpu_hour: float | None = None
    hfu: None = None

    def completed(self) -> TrainingPlan:
        """With the MFU of its rate, or the rate of its MFU; with neither, both stay unknown."""
        peak_of_all = None if self.peak_flops_per_s is None else self.gpus * self.peak_flops_per_s
        if self.tokens_per_second is not None:
            return replace(
                self, mfu=calculate_mfu(self.flops_per_token * self.tokens_per_second, 1.0, peak_of_all)
            )
        if self.mfu is None or peak_of_all is None:
            return self
        return replace(self, tokens_per_second=self.mfu * peak_of_all / self.flops_per_token)

    @property
    def total_flops(self) -> float | None:
        return None if self.tokens is None else self.tokens * self.flops_per_token

    @property
    def seconds(self) -> float | None:
        if self.tokens is None or self.tokens_per_second is None:
            return None
        return self.tokens / self.tokens_per_second

    @property
    def days(self) -> float | None:
        return None if self.seconds is None else self.seconds / _SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.gpus * self.seconds / _SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        if self.gpu_hours is None or self.price_per_gpu_hour is None:
            return None
        return self.gpu_hours * self.price_per_gpu_hour

    @property
    def cost_per_million_tokens(self) -> float | None:
        return per_million_tokens(self.price_per_gpu_hour, self.tokens_per_second, gpus=self.gpus)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        derived = ("total_flops", "days", "gpu_hours", "cost", "cost_per_million_tokens")
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}


def per_million_tokens(
    price_per_gpu_hour: float | None, tokens_per_s: float | None, *, gpus: int
) -> float | None:
    """Price × GPUs ÷ tokens per hour × 10⁶; None without a price or a rate."""
    if price_per_gpu_hour is None or not tokens_per_s:
        return None
    return price_per_gpu_hour * gpus / (_SECONDS_PER_HOUR * tokens_per_s) * 1e6
