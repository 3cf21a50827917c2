"""What a typical step is made of: dtypes, attention, tiles. Found once for each state of the model.

One more count of one batch, in the background as all counts are, kept by shape (`flops.step_work`). What
cannot be found is None: the cross-check then expects no more than the count says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import TruemfuError
from ..flops.flop_count import FlopCount
from ..flops.step_work import StepWork
from ..hardware.tiles import tile_factor
from .counting import Counting, ModelState
from .hardware_figures import StepDetail
from .observe import BatchNote

_NOTHING = StepDetail()


class StepDetails:
    """Asks for the details of a step, and keeps those of the current state."""

    def __init__(self, counting: Counting, device: torch.device) -> None:
        self._counting, self._device = counting, device
        self._of: ModelState | None = None
        self._detail = _NOTHING

    def of(self, state: ModelState | None, notes: Sequence[BatchNote]) -> StepDetail:
        """The detail of steps in this state, by the first micro-batch that was asked for."""
        if state is None or not notes or self._counting.estimates_only:
            return _NOTHING
        if self._of is not state:
            self._of, self._detail = state, self._found(state, notes[0])
        return self._detail

    def _found(self, state: ModelState, note: BatchNote) -> StepDetail:
        count = self._counting.batch(state, note, measured=True)
        if count is None or not count.hardware_flops:
            return _NOTHING
        try:
            work = self._counting.by_shape(state, note)
        except TruemfuError:  # counted otherwise (an estimate, real tensors): no shapes to be had
            work = None
        return detail_of(count, work, self._capability(), self._sm_count())

    def _capability(self) -> tuple[int, int] | None:
        return torch.cuda.get_device_capability(self._device) if self._device.type == "cuda" else None

    def _sm_count(self) -> int | None:
        if self._device.type != "cuda":
            return None
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)


def detail_of(
    count: FlopCount,
    work: StepWork | None,
    compute_capability: tuple[int, int] | None,
    sm_count: int | None,
) -> StepDetail:
    """A count, and the same by shape where there is one, as shares of what is executed."""
    executed = count.hardware_flops
    shares = {dtype: flops / count.model_flops for dtype, flops in count.by_dtype.items() if flops}
    if work is None:
        return StepDetail(
            dtype_shares=shares,
            forward_share=count.forward / executed,
            recompute_share=count.recompute / executed,
            uncounted=count.uncounted,
        )
    return StepDetail(
        dtype_shares=shares,
        forward_share=count.forward / executed,
        recompute_share=count.recompute / executed,
        attention_share=work.attention / work.hardware_flops if work.hardware_flops else None,
        attention_executed_share=work.attention_blocked / work.attention if work.attention else None,
        tile_factor=_mean_tile_factor(work, compute_capability, sm_count),
        uncounted=count.uncounted,
    )


def _mean_tile_factor(
    work: StepWork, compute_capability: tuple[int, int] | None, sm_count: int | None
) -> float | None:
    """Of everything but attention; what has no shape weighs in with factor 1."""
    needed = padded = float(work.other)
    if compute_capability is None:
        return None
    for (dtype, shape), flops in work.products.items():
        factor = tile_factor(shape, compute_capability, dtype=dtype, sm_count=sm_count)
        if factor is None:
            return None
        needed += flops
        padded += flops * factor
    return padded / needed if needed else None
