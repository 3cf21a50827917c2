"""One step of a run as lanes on its own clock: generate, models without gradients, train, wait, other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...records import StepPart, TypicalStep
from ...run_summary.phases import PHASE_NAMES
from ...run_summary.sums import GENERATE, PAUSE, PAUSES
from ...text import duration, percent_text
from ..drawing.lane_chart import COLOURS, DrawnLane, LaneChart, Segment, ticks_of
from ..drawing.line_chart import SIDE

_PHASES = {
    "no_grad": ("without gradients", 1),
    "forward": ("train", 0),
    "backward": ("train", COLOURS),
    "clipping": ("train", 2 * COLOURS),
    "optimizer": ("train", 3 * COLOURS),
    "data_wait": ("wait", 4),
    "input": ("wait", 4 + COLOURS),
    "other": ("other", 7),
}
"""The lanes of phases, and the keys of their colours and shades."""
_LEFT_OUT, _COLOUR_LEFT_OUT, _COLOUR_GENERATE, _COLOUR_MODELS = "left out", 6, 3, 1
_LAST = (*dict.fromkeys(lane for lane, _ in _PHASES.values()), _LEFT_OUT)
"""The order of lanes, after generation and the models that have a name."""
_MOST_PARTS = 4000
_NARROWEST = 2
"""In thousandths: so much of a short part is seen."""


def picture_of(step: TypicalStep | None) -> LaneChart | None:
    """The picture; None without a step that took time."""
    parts = [] if step is None else [part for part in step.parts[:_MOST_PARTS] if part.seconds > 0]
    whole_s = sum(part.seconds for part in parts)
    if step is None or not 0 < whole_s < math.inf:
        return None
    bars: dict[str, list[Segment]] = {}
    lane_s: dict[str, float] = {}
    kinds: dict[int, str] = {}
    end_s = 0.0
    for part in parts:
        lane, key, name = _look(part)
        lane_s[lane] = lane_s.get(lane, 0.0) + part.seconds
        begin_s, end_s = end_s, end_s + part.seconds
        left, right = (round(SIDE * s / whole_s) for s in (begin_s, end_s))
        title = f"{name}: {duration(part.seconds)}, {percent_text(part.seconds / whole_s)}"
        left = min(left, SIDE - _NARROWEST)
        bars.setdefault(lane, []).append(
            Segment(left=left, width=max(right - left, _NARROWEST), key=key, title=title)
        )
        if lane in ("train", "wait"):  # in others all bars are alike
            kinds[key] = name
    order = sorted(bars, key=lambda lane: _LAST.index(lane) if lane in _LAST else -1 - (lane == GENERATE))
    lanes = []
    for lane in order:
        remark = f"{duration(lane_s[lane])}, {percent_text(lane_s[lane] / whole_s)}"
        lanes.append(DrawnLane(name=lane, segments=bars[lane], remark=remark))
    return LaneChart(
        title=_title(step),
        lanes=lanes,
        kinds=kinds,
        ticks=ticks_of(whole_s),
        about=_about(step, parts, order),
    )


def _look(part: StepPart) -> tuple[str, int, str]:
    """The lane of a part, the key of its colour, and its name; generation and models in a pause are pale."""
    if part.phase == PAUSE and part.work in (None, *PAUSES):
        return _LEFT_OUT, _COLOUR_LEFT_OUT, f"{part.work or 'other'} (left out)"
    if part.work is not None:
        colour = _COLOUR_GENERATE if part.work == GENERATE else _COLOUR_MODELS
        name = f"model {part.work}" if part.work in _LAST else part.work
        return name, colour + COLOURS * (part.phase == PAUSE), name
    return *_PHASES.get(part.phase, _PHASES["other"]), PHASE_NAMES.get(part.phase, "other")


def _title(step: TypicalStep) -> str:
    if step.step is None:
        return "One step"
    first = "" if step.steps == 1 else f"s {step.step - step.steps + 1:,} to"
    return f"Step{first} {step.step:,}"


def _about(step: TypicalStep, parts: Sequence[StepPart], lanes: Sequence[str]) -> str:
    left_out_s = sum(part.seconds for part in parts if part.phase == PAUSE)
    took = f"{_title(step)} took {duration(sum(part.seconds for part in parts) - left_out_s)}"
    if left_out_s:
        took += f", without {duration(left_out_s)} that are drawn but left out of its time (in pale, and in "
        took += f"the lane {_LEFT_OUT})"
    found = [f"{took}. Its time is the median of recent steps of its kind."]
    if step.like is not None and step.of is not None and step.like < step.of:
        found.append(f"Such steps are {step.like:,} of {step.of:,} after warm-up.")
    if any(lane not in (GENERATE, *_LAST) for lane in lanes):
        found.append("Lanes with the name of a model are its passes without gradients.")
    return " ".join(found)
