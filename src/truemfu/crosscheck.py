"""Counted against executed: does the silicon agree with the arithmetic, and if not, what is likely?

    counted ─► expected = (counted − attention) × tile factor + attention × its executed share
    executed (counters, Nsight Compute) ─► ratio = executed / expected ─► within the threshold, or causes

The count is what the steps of a window need, recomputation included. What a chip executes differs for known
reasons, so those are taken out first: tiles overhang (`hardware.tiles`), and causal attention kernels skip
blocks of the mask (`CAUSAL_SHARE`) while the full convention counts them. Both may be unknown: then they are
among the causes.

A cause is only named where something speaks for it: a ratio it predicts, an operator without a formula, a
process seen on the GPU. They are said as likely, the best evidence first; nothing is corrected because of
them.

This module imports nothing but the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

THRESHOLD = 0.1
"""Counters lag and tick for elementwise work: below this difference nothing is worth a line."""

CAUSAL_SHARE = 0.5625
"""Of the full count, what causal attention kernels execute: measured on an H200 at 1,024 tokens, forward and
backward alike."""

_NEAR = 0.06
_HALF_MASK = 0.5
_ALL_RECOMPUTED = 1 / 3
_ELEMENTWISE = 0.1
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class OtherProcess:
    """A process beside ours that holds memory on the GPU."""

    pid: int
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What may explain the difference; `predicted_ratio` is the ratio it would give, where it gives one."""

    key: str
    sentence: str
    predicted_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class CrossCheck:
    """One window's verdict. `ratio` is executed over expected; `causes` is empty where they agree.

    `least_flops` is what is expected at least: the same, but for products so small that tiles make up more
    than the threshold. Which tiles a library takes for those is not known, so all from no overhang at all to
    the model's (`expected_flops`) agrees.
    """

    counted_flops: float
    executed_flops: float
    expected_flops: float
    least_flops: float
    ratio: float
    threshold: float
    causes: tuple[Cause, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether counted and executed are within the threshold of each other."""
        return (
            self.least_flops * (1 - self.threshold)
            <= self.executed_flops
            <= self.expected_flops * (1 + self.threshold)
        )

    @property
    def notice(self) -> str | None:
        """One line for the user; None where there is nothing to say."""
        if self.agrees:
            return None
        likely = "; ".join(cause.sentence for cause in self.causes)
        expected = self.least_flops if self.executed_flops < self.least_flops else self.expected_flops
        return (
            f"the GPU executed {self.executed_flops / expected:.2f} times what the count expects "
            f"({self.executed_flops:.4g} against {expected:.4g} FLOP); likely: {likely}"
        )

    def as_metrics(self) -> dict[str, float]:
        """Executed over counted as they are, and over what was expected after the known effects."""
        return {
            "perf/executed_over_counted": self.executed_flops / self.counted_flops,
            "perf/executed_over_expected": self.ratio,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return {**asdict(self), "agrees": self.agrees, "notice": self.notice}


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """All that may speak for a cause."""

    ratio: float
    counted_flops: float
    forward_flops: float | None
    recompute_flops: float | None
    attention_flops: float | None
    attention_share: float | None
    flops_by_dtype: Mapping[str, float]
    uncounted: Mapping[str, int]
    other_processes: Sequence[OtherProcess]
    exact: bool

    def near(self, predicted: float) -> bool:
        return abs(self.ratio / predicted - 1) <= _NEAR


def crosscheck(
    counted_flops: float | None,
    executed_flops: float | None,
    *,
    forward_flops: float | None = None,
    recompute_flops: float | None = None,
    attention_flops: float | None = None,
    attention_executed_share: float | None = None,
    tile_factor: float | None = None,
    flops_by_dtype: Mapping[str, float] | None = None,
    uncounted: Mapping[str, int] | None = None,
    other_processes: Sequence[OtherProcess] = (),
    exact: bool = False,
    threshold: float = THRESHOLD,
) -> CrossCheck | None:
    """Compare one window's counted FLOPs (recomputation included) with the executed ones.

    None where either is unknown, not finite or not above zero: there is nothing to compare.

    `forward_flops`, `recompute_flops` and `attention_flops` are parts of the count, `flops_by_dtype` splits
    it. `attention_executed_share` is what kernels execute of the attention counted: 1 without a mask or under
    the causal convention, less for causal kernels under the full one. `uncounted` are operators
    without a formula and their calls. `other_processes` must leave out our own; inside a container the driver
    speaks of the host's process numbers, so give none where ours is not among them. `exact` says that
    the executed FLOPs were counted as such (Nsight Compute) and not made from the activity of a pipe, its
    clock and the rate of a dtype.
    """
    if not _positive(counted_flops) or not _positive(executed_flops):
        return None
    assert counted_flops is not None
    assert executed_flops is not None
    assert threshold > 0
    attention = (
        attention_flops if attention_flops is not None and 0 <= attention_flops <= counted_flops else 0
    )
    share = 1.0 if attention_executed_share is None else attention_executed_share
    factor = tile_factor or 1.0
    is_known = exact or factor <= 1 + threshold
    least, expected = (
        (counted_flops - attention) * tiles + attention * share
        for tiles in (factor if is_known else 1.0, factor)
    )
    if not _positive(least) or not _positive(expected):
        return None
    result = CrossCheck(
        counted_flops=counted_flops,
        executed_flops=executed_flops,
        expected_flops=expected,
        least_flops=least,
        ratio=executed_flops / expected,
        threshold=threshold,
    )
    if result.agrees:
        return result
    evidence = _Evidence(
        ratio=result.ratio,
        counted_flops=counted_flops,
        forward_flops=forward_flops,
        recompute_flops=recompute_flops,
        attention_flops=attention_flops,
        attention_share=attention_executed_share,
        flops_by_dtype=flops_by_dtype or {},
        uncounted=uncounted or {},
        other_processes=other_processes,
        exact=exact,
    )
    looks = _MORE if result.ratio > 1 else _LESS
    causes = tuple(cause for look in looks for cause in look(evidence))
    return replace(result, causes=causes or (_UNKNOWN,))


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _uncounted_kernels(evidence: _Evidence) -> Iterator[Cause]:
    if evidence.uncounted:
        names = sorted(evidence.uncounted, key=lambda name: -evidence.uncounted[name])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        yield Cause(
            key="uncounted",
            sentence=f"operators without a formula do matrix work: {', '.join(names[:_NAMES_SHOWN])}{more}",
        )


def _another_process(evidence: _Evidence) -> Iterator[Cause]:
    if evidence.other_processes:
        pids = ", ".join(str(process.pid) for process in evidence.other_processes[:_NAMES_SHOWN])
        yield Cause(key="other_process", sentence=f"another process is on this GPU (process {pids})")


def _slower_dtype(evidence: _Evidence) -> Iterator[Cause]:
    if not evidence.exact and evidence.near(2):
        yield Cause(
            key="dtype",
            sentence=(
                "the products ran in a dtype of half the rate per cycle than assumed (tf32 for bf16), or by "
                "older instructions that take two cycles for one (sizes that are no multiples of 8)"
            ),
            predicted_ratio=2.0,
        )


def _faster_dtype(evidence: _Evidence) -> Iterator[Cause]:
    if not evidence.exact and evidence.near(0.5):
        yield Cause(
            key="dtype",
            sentence="the products ran in a dtype of twice the rate per cycle than assumed (fp8 for bf16)",
            predicted_ratio=0.5,
        )


def _recomputation(evidence: _Evidence) -> Iterator[Cause]:
    """Up to one more forward: 4/3 of a dense model's step, or exactly where the forward is known."""
    forward = evidence.forward_flops
    if forward is None:
        at_most = 1 + (0 if evidence.recompute_flops else _ALL_RECOMPUTED)
    else:
        at_most = 1 + max(0.0, forward - (evidence.recompute_flops or 0.0)) / evidence.counted_flops
    if at_most <= 1 + _NEAR:
        return
    if evidence.ratio <= at_most * (1 + _NEAR):
        yield Cause(
            key="recomputation",
            sentence=f"recomputation the count did not see (checkpointing gives up to {at_most:.2f})",
            predicted_ratio=at_most,
        )


def _elementwise(evidence: _Evidence) -> Iterator[Cause]:
    if not evidence.exact and evidence.ratio <= 1 + 2 * _ELEMENTWISE:
        yield Cause(
            key="elementwise",
            sentence="some kernels without a product tick the same counter, a few percent as a rule",
        )


def _masked_attention(evidence: _Evidence) -> Iterator[Cause]:
    """Under the full convention: from all kernels at `CAUSAL_SHARE` down to exactly half of the mask."""
    if evidence.attention_share is not None or not evidence.attention_flops:
        return
    attention = evidence.attention_flops / evidence.counted_flops
    least, predicted = (1 - attention * (1 - share) for share in (_HALF_MASK, CAUSAL_SHARE))
    if least * (1 - _NEAR) <= evidence.ratio <= 1:
        yield Cause(
            key="masked_attention",
            sentence=(
                f"causal attention kernels execute about {CAUSAL_SHARE} of the full attention that was "
                f"counted (gives {predicted:.2f})"
            ),
            predicted_ratio=predicted,
        )


def _outside_tensor_pipe(evidence: _Evidence) -> Iterator[Cause]:
    plain = evidence.flops_by_dtype.get("fp32", 0.0) / evidence.counted_flops
    if plain >= THRESHOLD / 2:
        yield Cause(
            key="plain_fp32",
            sentence=f"{100 * plain:.0f} % of the count is fp32, which runs outside the tensor pipe",
            predicted_ratio=1 - plain,
        )


_MORE: tuple[Callable[[_Evidence], Iterator[Cause]], ...] = (
    _slower_dtype,
    _another_process,
    _uncounted_kernels,
    _recomputation,
    _elementwise,
)
_LESS: tuple[Callable[[_Evidence], Iterator[Cause]], ...] = (
    _masked_attention,
    _faster_dtype,
    _outside_tensor_pipe,
)
_UNKNOWN = Cause(
    key="unknown",
    sentence=(
        "work that is no part of the steps (an evaluation outside monitor.pause()), or something unknown; "
        "`truemfu audit` shows it by kernel"
    ),
)
