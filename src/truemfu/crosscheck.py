"""Compares counted with executed FLOPs, and names likely causes of a difference.

    counted ─► expected = (counted − attention) × tile factor + attention × its executed share
    executed (counters, Nsight Compute) ─► ratio = executed / expected ─► within the threshold, or causes

The count is what the steps of a window need, recomputation included. What a chip executes differs for known
reasons, which are corrected first: tiles overhang (`hardware.tiles`), and causal attention kernels skip
blocks of the mask (`CAUSAL_SHARE`) while the full convention counts them. If one is unknown, it is
among the causes.

A cause is only named with evidence: work in the count that is known to execute differently, in an amount
that fits the difference; an operator without a formula; a process seen on the GPU. A difference that merely
has a plausible size is "unknown". Causes are stated as likely, the best evidence first; nothing is corrected
because of them.

This module only imports the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .text import some_of

THRESHOLD = 0.1
"""Counters lag and count some elementwise work: a smaller difference is not reported."""

CAUSAL_SHARE = 0.5625
"""The share of the full count that causal attention kernels execute: measured on an H200 at 1,024 tokens,
forward and backward alike."""

FEW_CHANNELS_EXECUTED = (5.0, 8.0)
"""Executed over counted FLOPs of a convolution with fewer than eight input channels, forward and weight
gradient together: kernels pad the channels. Measured on an H200 with three channels in bf16: 6.67 (16 × 16
patches of a ViT) and 7.08 (7 × 7 of a ResNet)."""

_FEW_CHANNELS_READ = 1.5
"""How much the activity of such kernels overstates them: 682.7 FLOP per active cycle instead of 1,024."""

_NEAR = 0.06
_HALF_MASK = 0.5
_LEAST_PADDING = 0.25
_NAMES_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A possible explanation of the difference; `predicted_ratio` is the ratio it would give, if known."""

    key: str
    sentence: str
    predicted_ratio: float | None = None


@dataclass(frozen=True, kw_only=True)
class CrossCheck:
    """One window's verdict. `ratio` is executed over expected; `causes` is empty if they agree.

    `least_flops` is the least expected: lower than `expected_flops` only for products so small that tiles add
    more than the threshold. A library's tiles for those are not known, so anything from no overhang to the
    model's (`expected_flops`) agrees. `is_upper_bound`: `executed_flops` may be too high: it is computed
    from activity that no audit corrected.
    """

    counted_flops: float
    executed_flops: float
    expected_flops: float
    least_flops: float
    ratio: float
    threshold: float
    is_upper_bound: bool = False
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
        """One line for the user; None if they agree."""
        if self.agrees:
            return None
        known = [cause.sentence for cause in self.causes if cause.key != _UNKNOWN.key]
        why = f"likely: {'; '.join(known)}" if known else f"cause {_UNKNOWN.sentence}"
        expected = self.least_flops if self.executed_flops < self.least_flops else self.expected_flops
        at_most = "at most " if self.is_upper_bound else ""
        bound = ", an upper bound without an audit" if self.is_upper_bound else ""
        return (
            f"the GPU executed {at_most}{self.executed_flops / expected:.2f} times what the count expects "
            f"({self.executed_flops:.4g} against {expected:.4g} FLOP{bound}); {why}"
        )

    def explained_by(self, least_flops: float, most_flops: float) -> bool:
        """Whether this much beyond the expected is significant, and fits the difference."""
        beyond, slack = self.ratio - 1, self.threshold / 2
        least, most = least_flops / self.expected_flops, most_flops / self.expected_flops
        return most >= slack and least - slack <= beyond <= most + slack

    def as_metrics(self) -> dict[str, float]:
        """Executed over counted, and over expected, which includes the known effects."""
        return {
            "perf/executed_over_counted": self.executed_flops / self.counted_flops,
            "perf/executed_over_expected": self.ratio,
        }

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return {**asdict(self), "agrees": self.agrees, "notice": self.notice}


@dataclass(frozen=True, kw_only=True)
class KnownWork:
    """What is known of a window's work besides its total; the FLOPs are parts of the count.

    `few_channel_flops` are those of convolutions with fewer than eight input channels; `grouped_flops` those
    of grouped products, which come to `grouped_padded_flops` at most when the rows of each group are rounded
    up to tiles; `unaligned_flops` those of 16-bit products with a size that is not a multiple of eight.
    `attention_executed_share` is what kernels execute of the attention counted: 1 without a mask or under the
    causal convention, less for causal kernels under the full one. `uncounted` are operators without a formula
    and their calls. `other_processes` are the ids of processes on the GPU without this one; inside a
    container the driver reports the host's ids, so give none if this process is not among them.
    """

    attention_flops: float | None = None
    attention_executed_share: float | None = None
    tile_factor: float | None = None
    few_channel_flops: float | None = None
    grouped_flops: float | None = None
    grouped_padded_flops: float | None = None
    unaligned_flops: float | None = None
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    uncounted: Mapping[str, int] = field(default_factory=dict)
    other_processes: Sequence[int] = ()


_NOTHING_KNOWN = KnownWork()


def crosscheck(
    counted_flops: float | None,
    executed_flops: float | None,
    work: KnownWork = _NOTHING_KNOWN,
    *,
    exact: bool = False,
    is_upper_bound: bool = False,
    threshold: float = THRESHOLD,
) -> CrossCheck | None:
    """Compare one window's counted FLOPs (recomputation included) with the executed ones.

    None if either is unknown, not finite or not above zero. `exact`: the executed FLOPs were counted (Nsight
    Compute). `is_upper_bound`: they were computed from the activity of a pipe without the correction of an
    audit.
    """
    if not _positive(counted_flops) or not _positive(executed_flops):
        return None
    assert counted_flops is not None
    assert executed_flops is not None
    assert threshold > 0
    attention = work.attention_flops or 0.0
    if not 0 <= attention <= counted_flops:
        attention = 0.0
    share = 1.0 if work.attention_executed_share is None else work.attention_executed_share
    factor = work.tile_factor or 1.0
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
        is_upper_bound=is_upper_bound,
    )
    if result.agrees:
        return result
    looks = _MORE if result.ratio > 1 else _LESS
    causes = tuple(cause for look in looks for cause in look(result, work))
    return replace(result, causes=causes or (_UNKNOWN,))


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _uncounted_kernels(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    if work.uncounted:
        names = sorted(work.uncounted, key=lambda name: -work.uncounted[name])
        yield Cause(
            key="uncounted",
            sentence=f"operators without a formula do matrix work: {some_of(names, _NAMES_SHOWN)}",
        )


def _another_process(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    if work.other_processes:
        pids = ", ".join(map(str, work.other_processes[:_NAMES_SHOWN]))
        yield Cause(key="other_process", sentence=f"another process uses this GPU (process {pids})")


def _few_channels(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    counted = work.few_channel_flops or 0.0
    read = _FEW_CHANNELS_READ if check.is_upper_bound else 1.0
    least, most = (counted * (times * read - 1) for times in FEW_CHANNELS_EXECUTED)
    if counted and check.explained_by(least, most):
        low, high = FEW_CHANNELS_EXECUTED
        reads = f", and activity counters read {read:g} times that" if check.is_upper_bound else ""
        yield Cause(
            key="few_channels",
            sentence=(
                f"convolutions with fewer than 8 input channels ({counted / check.counted_flops:.1%} of "
                f"the count) execute {low:g} to {high:g} times their count: kernels pad the channels{reads}"
            ),
            predicted_ratio=1 + (least + most) / 2 / check.expected_flops,
        )


def _grouped_products(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    counted, padded = work.grouped_flops or 0.0, work.grouped_padded_flops or 0.0
    most = padded - counted
    if counted and check.explained_by(_LEAST_PADDING * most, most):
        yield Cause(
            key="grouped_products",
            sentence=(
                f"grouped products ({counted / check.counted_flops:.1%} of the count) round the rows of "
                f"each expert up to whole tiles (up to {padded / counted:.2f} times their count)"
            ),
            predicted_ratio=1 + most / 2 / check.expected_flops,
        )


def _unaligned_products(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    """Older instructions take two cycles for the work of one: activity reads twice their work."""
    unaligned = work.unaligned_flops
    if check.is_upper_bound and unaligned and check.explained_by(unaligned, unaligned):
        yield Cause(
            key="unaligned",
            sentence=(
                "matrix products with a size that is not a multiple of 8 "
                f"({unaligned / check.counted_flops:.1%} of the count) fall back to "
                "older instructions, for which activity counters read twice the executed work"
            ),
            predicted_ratio=1 + unaligned / check.expected_flops,
        )


def _masked_attention(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    """Under the full convention: from all kernels at `CAUSAL_SHARE` down to exactly half of the mask."""
    if work.attention_executed_share is not None or not work.attention_flops:
        return
    attention = work.attention_flops / check.counted_flops
    least, predicted = (1 - attention * (1 - share) for share in (_HALF_MASK, CAUSAL_SHARE))
    if least * (1 - _NEAR) <= check.ratio <= 1:
        yield Cause(
            key="masked_attention",
            sentence=(
                f"causal attention kernels execute about {CAUSAL_SHARE} of the full attention that was "
                f"counted (predicts {predicted:.2f})"
            ),
            predicted_ratio=predicted,
        )


def _outside_tensor_pipe(check: CrossCheck, work: KnownWork) -> Iterator[Cause]:
    plain = work.flops_by_dtype.get("fp32", 0.0) / check.counted_flops
    if plain >= THRESHOLD / 2:
        yield Cause(
            key="plain_fp32",
            sentence=f"{100 * plain:.0f} % of the count is fp32, which runs outside the tensor pipe",
            predicted_ratio=1 - plain,
        )


_MORE: tuple[Callable[[CrossCheck, KnownWork], Iterator[Cause]], ...] = (
    _another_process,
    _uncounted_kernels,
    _few_channels,
    _grouped_products,
    _unaligned_products,
)
_LESS: tuple[Callable[[CrossCheck, KnownWork], Iterator[Cause]], ...] = (
    _masked_attention,
    _outside_tensor_pipe,
)
_UNKNOWN = Cause(key="unknown", sentence="unknown: run `truemfu audit`")
