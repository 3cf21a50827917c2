"""A step as lanes, for the streams of a device or for what it does, in which kinds of work have colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...text import duration
from .line_chart import SIDE

COLOURS = 8


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of one kind, in thousandths of the step."""

    left: int
    width: int
    key: int
    """Its colour, plus `COLOURS` for each shade."""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class DrawnLane:
    name: str
    segments: Sequence[Segment]
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class LaneChart:
    """Everything a page needs to draw it. `kinds` has the name of each colour's key."""

    title: str
    lanes: Sequence[DrawnLane]
    kinds: Mapping[int, str]
    ticks: Mapping[int, str]
    """Texts by their place from the left, in percent."""
    about: str = ""


def lane_chart(
    title: str,
    lanes: Mapping[str, Sequence[tuple[int, int, str]]],
    names: Mapping[str, str],
    length_s: float,
) -> LaneChart | None:
    """The chart; `names` are those of kinds, the most important first. Kinds beyond the colours share one."""
    used = {kind for segments in lanes.values() for _, _, kind in segments}
    shown = [kind for kind in names if kind in used]
    if not shown:
        return None
    keys = {kind: min(place, COLOURS - 1) for place, kind in enumerate(shown)}
    kinds: dict[int, list[str]] = {}
    for kind in shown:
        kinds.setdefault(keys[kind], []).append(names[kind])
    return LaneChart(
        title=title,
        lanes=[
            DrawnLane(
                name=name,
                segments=[
                    Segment(left=max(0, start), width=min(end, SIDE) - max(0, start), key=keys[kind])
                    for start, end, kind in segments
                    if kind in keys
                ],
            )
            for name, segments in lanes.items()
        ],
        kinds={key: ", ".join(texts) for key, texts in kinds.items()},
        ticks=ticks_of(length_s),
    )


def ticks_of(length_s: float) -> dict[int, str]:
    """The times below the lanes."""
    return {percent: duration(length_s * percent / 100) for percent in (0, 25, 50, 75, 100)}
