"""The composition of a typical step: dtypes, attention, tiles. Found once for each state of the model.

It is the count of one batch by shape (`flops.step_work`). Unknown values are None: the cross-check then
expects just what was counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...flops import FlopCount, StepWork
from ...hardware.tiles import Shape, mean_tile_factor
from ..hybrid.hardware_figures import StepDetail
from ..training_side.batch_notes import BatchNote
from ..training_side.model_state import ModelState, States
from .flops_of_steps import Counting, state_of

_NOTHING = StepDetail()


class StepDetails:
    """Finds the details of a step, and caches those of the current model state."""

    def __init__(
        self, counting: Counting, device: torch.device, audited_tiles: Mapping[Shape, float]
    ) -> None:
        self._counting, self._device, self._audited_tiles = counting, device, audited_tiles
        self.notes: dict[str, None] = {}
        """What could not be found, each once."""
        self._of: ModelState | None = None
        self._detail = _NOTHING

    def of(self, states: States, notes: Sequence[BatchNote], *, measured: bool) -> StepDetail:
        """The detail of steps in this state, from the first micro-batch; empty with several models."""
        slots = {note.template.slot for note in notes}
        state = state_of(states, notes[0]) if len(slots) == 1 else None
        if state is None:
            return _NOTHING
        if self._of is not state:
            found = self._found(state, notes[0], measured=measured)
            if found is None:
                return _NOTHING
            self._of, self._detail = state, found
        return self._detail

    def _found(self, state: ModelState, note: BatchNote, *, measured: bool) -> StepDetail | None:
        count = self._counting.batch(state, note, measured=measured)
        if count is None or not count.hardware_flops:
            return None
        work = None
        if measured and not self._counting.estimates_only:
            found = self._counting.by_shape(state, note)
            if isinstance(found, str):
                self.notes[f"the cross-check does not account for tiles and skipped blocks: {found}"] = None
            else:
                work = found
        return detail_of(count, work, self._capability(), self._sm_count(), self._audited_tiles)

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
    audited_tiles: Mapping[Shape, float],
) -> StepDetail:
    """A count, and its work by shape if known, as shares."""
    detail = StepDetail(
        dtype_shares={dtype: flops / count.model_flops for dtype, flops in count.by_dtype.items() if flops},
        uncounted=count.uncounted,
    )
    if work is None or not work.hardware_flops:
        return detail
    blocked = work.attention_blocked
    tiles = None
    if compute_capability is not None:
        tiles = mean_tile_factor(
            work.products,
            compute_capability,
            sm_count=sm_count,
            other_flops=work.other,
            audited=audited_tiles,
        )
    return replace(
        detail,
        attention_share=work.attention / work.hardware_flops,
        attention_executed_share=blocked / work.attention if work.attention and blocked is not None else None,
        tile_factor=tiles,
        few_channel_share=work.few_channels / work.hardware_flops,
        grouped_share=work.grouped / work.hardware_flops,
        grouped_padded_share=work.grouped_padded / work.hardware_flops,
        unaligned_share=work.unaligned / work.hardware_flops,
    )
