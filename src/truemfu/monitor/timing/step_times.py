"""The time of each step by its marks, and whether the gap before it belongs to it."""

from __future__ import annotations

from ..metrics import StepTime
from .between_steps import Between, Gap, UsualGaps, gap_seconds
from .clock import Span, duration_s, left_out_s
from .phases import phases_of


class StepTiming:
    """Lives on the row thread, and sees the steps in order, once the device has passed them."""

    def __init__(self, *, has_phases: bool = False) -> None:
        self._has_phases = has_phases
        self._gaps = UsualGaps()
        self.gap_is_excluded = False
        """Whether the gap before the last step is excluded from it."""
        self.last: Span | None = None
        """The marks of the last step, with such a gap among its pauses."""

    def of(self, steps: int, span: Span, gap: Gap, *, has_compiled_code: bool = False) -> StepTime:
        """The time of the next step, which represents so many."""
        excluded = self._gaps.excluded(gap, span)
        self.gap_is_excluded = bool(excluded)
        self.last = span = span._replace(pauses=[*span.pauses, *excluded]) if excluded else span
        took = StepTime(steps, duration_s(span), *_between(gap, span, is_excluded=bool(excluded)))
        if self._has_phases and took.elapsed_s is not None:
            took = took._replace(phases_s=phases_of(span, has_compiled_code=has_compiled_code))
        if not span.pauses:
            return took
        gap_s = gap_seconds([(pause.begin, pause.end) for pause in excluded])
        return took._replace(left_out_s=left_out_s(span.pauses), gap_s=gap_s)


def _between(gap: Gap, span: Span, *, is_excluded: bool) -> Between:
    """What lay between the steps; a host that waits for the device is not between them."""
    found = gap.between()
    if is_excluded:
        return found._replace(other_s=0.0, forwards=0)
    device_s = gap_seconds(parts) if (parts := gap.parts(span)) else None
    if found.other_s is None or device_s is None:
        return found
    return found._replace(other_s=min(found.other_s, device_s))
