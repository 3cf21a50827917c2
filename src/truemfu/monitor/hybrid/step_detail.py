"""The composition of a step: dtypes, attention, tiles, from an observed step with the same batches.

Unknown values are None: the cross-check then expects just what was counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...crosscheck import KnownWork
from ...flops import FlopCount, StepWork
from ...hardware.tiles import Shape, mean_tile_factor
from ..step_flops.known import Unknown
from ..step_flops.source import FlopsSource
from ..step_note import StepNote

_NOTHING = KnownWork()


class StepDetails:
    """Finds the details of a step, and caches those of the last count."""

    def __init__(
        self, flops: FlopsSource, device: torch.device, audited_tiles: Mapping[Shape, float]
    ) -> None:
        self._flops, self._device, self._audited_tiles = flops, device, audited_tiles
        self.notes: dict[str, None] = {}
        """What could not be found, each once."""
        self._of: FlopCount | None = None
        self._detail = _NOTHING

    def of(self, note: StepNote) -> KnownWork:
        """The detail of a step; empty if its FLOPs were not counted."""
        count = self._flops.count(note)
        if isinstance(count, Unknown) or not count.hardware_flops:
            return _NOTHING
        if self._of is not count:
            work = self._flops.known.work(note)
            if work is None:
                self.notes[
                    "the cross-check does not account for tile padding and skipped blocks of masks: no step "
                    "with the same batches was observed"
                ] = None
            self._of = count
            self._detail = detail_of(count, work, self._capability(), self._sm_count(), self._audited_tiles)
        return self._detail

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
) -> KnownWork:
    """A count, and its work by shape if known, as shares."""
    detail = KnownWork(
        flops_by_dtype={dtype: flops / count.model_flops for dtype, flops in count.by_dtype.items() if flops},
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
        attention_flops=work.attention / work.hardware_flops,
        attention_executed_share=blocked / work.attention if work.attention and blocked is not None else None,
        tile_factor=tiles,
        few_channel_flops=work.few_channels / work.hardware_flops,
        grouped_flops=work.grouped / work.hardware_flops,
        grouped_padded_flops=work.grouped_padded / work.hardware_flops,
        unaligned_flops=work.unaligned / work.hardware_flops,
    )
