"""What a step's kernels are given: the shapes of its products, and its attention block by block.

A count says how many FLOPs a step needs and executes by arithmetic. What silicon executes depends on shapes
too: tiles overhang the edges of a product, and an attention kernel works through whole blocks of its mask.
A count that ran has all of it: here it is summed up by shape, for the cross-check and the waterfall.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .tally import Tally

Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """One step, in executed FLOPs by the convention of the count.

    `attention` is that of fused kernels, `attention_blocked` the same when they skip no less than whole
    blocks of 128 × 128 of their mask, None where a mask does not tell; `other` has no shape here:
    convolutions, recurrent cells, grouped and registered products.
    """

    products: Mapping[tuple[str, Shape], int]
    """FLOPs by dtype and (m, n, k)."""
    attention: int
    attention_blocked: int | None
    other: int

    @property
    def hardware_flops(self) -> int:
        return sum(self.products.values()) + self.attention + self.other


def work_of(tally: Tally) -> StepWork:
    """What a counted step executes, by shape."""
    products: Counter[tuple[str, Shape]] = Counter()
    attention = other = 0
    blocked: int | None = 0
    for entry in tally.entries:
        if entry.shape is not None:
            products[entry.dtype, entry.shape] += entry.executed
        elif entry.is_attention:
            attention += entry.executed
            blocked = None if blocked is None or entry.blocked is None else blocked + entry.blocked
        else:
            other += entry.executed
    return StepWork(products=products, attention=attention, attention_blocked=blocked, other=other)
