"""The work of a step by shape: its matrix products, and its attention in whole blocks.

A count gives the FLOPs that a step needs and executes by arithmetic. What the GPU executes also depends on
shapes: tiles extend past the edges of a product, and an attention kernel processes whole blocks of its mask.
A completed count contains the shapes: here they are summed up for the cross-check and the waterfall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .tally import Tally

Shape = tuple[int, int, int]

_ALIGNED = 8
_SIXTEEN_BIT = ("bf16", "fp16")
_GROUP_TILE = 128


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step, in executed FLOPs by the convention of the count.

    `attention` is that of fused kernels, `attention_blocked` the same if they skip only whole blocks of
    128 × 128 of their mask (None if the mask is not known); `other` is work without a shape here:
    convolutions, recurrent cells, grouped and registered products. Of these, `few_channels` are convolutions
    with fewer than eight input channels, which kernels pad, and `grouped` are grouped products, which become
    at most `grouped_padded` when the rows of each group are rounded up to tiles of 128.
    """

    products: Mapping[tuple[str, Shape], int]
    """FLOPs by dtype and (m, n, k)."""
    attention: int
    attention_blocked: int | None
    other: int
    few_channels: int = 0
    grouped: int = 0
    grouped_padded: int = 0

    @property
    def hardware_flops(self) -> int:
        return sum(self.products.values()) + self.attention + self.other

    @property
    def unaligned(self) -> int:
        """FLOPs of 16-bit products with a size that is not a multiple of eight."""
        return sum(
            flops
            for (dtype, shape), flops in self.products.items()
            if dtype in _SIXTEEN_BIT and any(size % _ALIGNED for size in shape)
        )


def work_of(tally: Tally) -> StepWork:
    """What a counted step executes, by shape."""
    products: Counter[tuple[str, Shape]] = Counter()
    attention = other = few_channels = grouped = 0
    grouped_padded = 0.0
    blocked: int | None = 0
    for entry in tally.training_entries():
        if entry.shape is not None:
            products[entry.dtype, entry.shape] += entry.executed
        elif entry.is_attention:
            attention += entry.executed
            blocked = None if blocked is None or entry.blocked is None else blocked + entry.blocked
        else:
            other += entry.executed
            if entry.channels is not None and entry.channels < _ALIGNED:
                few_channels += entry.executed
            if entry.groups is not None:
                groups, rows = entry.groups
                grouped += entry.executed
                grouped_padded += entry.executed * (rows + groups * (_GROUP_TILE - 1)) / rows
    return StepWork(
        products=products,
        attention=attention,
        attention_blocked=blocked,
        other=other,
        few_channels=few_channels,
        grouped=grouped,
        grouped_padded=round(grouped_padded),
    )
