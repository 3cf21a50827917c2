"""Line charts over steps, as paths for an SVG that is stretched to the width of the page.

Coordinates are in a square of `SIDE` × `SIDE` units, the origin at the top left; ticks are in percent of it.
The drawing is stretched, its text is not: ticks and legends are set by the page around it.

A long log is thinned: neighbouring rows share a bucket, which is drawn as the median of its values on a band
from its lowest to its highest, so that no spike is lost. A few values far above all others would flatten
the rest; for outliers, as in step times, the chart ends below them, draws them at its edge, and states that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIDE = 1000
MOST_ROWS = 1000
"""Up to this many rows are drawn as they are."""
BUCKETS = 500

_TICKS = 4
_BEFORE_OVERFLOW = 1e300
_ENOUGH_TO_CUT = 10
_USUAL = 0.98
_FAR = 3.0
_SAME = 1e-9


@dataclass(frozen=True, kw_only=True)
class Series:
    """A name, and a value for each step, or None."""

    name: str
    values: Sequence[float | None]


@dataclass(frozen=True, kw_only=True)
class Tick:
    percent: float
    text: str


@dataclass(frozen=True, kw_only=True)
class Line:
    """A drawn series: the path of its line, and of the band behind it if it was thinned."""

    name: str
    path: str
    band: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything a page needs to draw it."""

    title: str
    unit: str
    lines: Sequence[Line]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    beyond: str | None
    """A sentence about the values above the drawing."""


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One or more neighbouring rows."""

    step: float
    low: float
    middle: float
    high: float


def line_chart(
    title: str,
    steps: Sequence[int],
    series: Iterable[Series],
    *,
    unit: str = "",
    from_zero: bool = True,
    cuts_spikes: bool = True,
) -> Chart | None:
    """The chart; None if no series has a value. `steps` ascend, and every series is as long."""
    shown = [Series(name=one.name, values=[_drawable(value) for value in one.values]) for one in series]
    shown = [one for one in shown if any(value is not None for value in one.values)]
    if not shown:
        return None
    x = _steps_axis(steps)
    values = [value for one in shown for value in one.values if value is not None]
    y = _values_axis(values, from_zero, cuts_spikes)
    lines = []
    for one in shown:
        runs = thinned(steps, one.values)
        lines.append(
            Line(
                name=one.name,
                path=" ".join(_stroke(run, x, y) for run in runs),
                band=" ".join(_area(run, x, y) for run in runs) if _is_thinned(len(steps)) else "",
            )
        )
    return Chart(
        title=title,
        unit=unit,
        lines=lines,
        x_ticks=[Tick(percent=100 * x.part(v), text=tick_text(v, x.step)) for v in x.ticks()],
        y_ticks=[Tick(percent=100 * (1 - y.part(v)), text=tick_text(v, y.step)) for v in y.ticks()],
        beyond=_beyond(steps, shown, y.high, unit),
    )


def thinned(steps: Sequence[int], values: Sequence[float | None]) -> list[list[Bucket]]:
    """At most `BUCKETS` buckets, in runs without a gap: a bucket without any value ends a run."""
    size = _bucket_rows(len(steps))
    runs: list[list[Bucket]] = [[]]
    for begin in range(0, len(steps), size):
        known = [value for value in values[begin : begin + size] if value is not None]
        if known:
            last = min(begin + size, len(steps)) - 1
            middle = statistics.median(known)
            step = (steps[begin] + steps[last]) / 2
            runs[-1].append(Bucket(step=step, low=min(known), middle=middle, high=max(known)))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def thinning(rows: int) -> str | None:
    """A sentence on how charts of that many rows were thinned; None if they were not."""
    if not _is_thinned(rows):
        return None
    return (
        f"{rows:,} rows in groups of {_bucket_rows(rows):,}: each line is a group's median, the band behind "
        "it reaches from its lowest to its highest."
    )


def tick_text(value: float, step: float) -> str:
    """A tick with the decimals that distinguish it from its neighbours."""
    if not 1e-4 <= step < 1e9:
        return f"{value:.3g}"
    decimals = next(digits for digits in range(6) if math.isclose(round(step, digits), step, rel_tol=1e-6))
    return f"{value:,.{decimals}f}".replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """A range, and the distance between its ticks."""

    low: float
    high: float
    step: float

    def part(self, value: float) -> float:
        """The position of a value in the range, from 0 to 1; a value above the range is at 1."""
        return (min(value, self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [count * self.step for count in range(first, last + 1)]


def _steps_axis(steps: Sequence[int]) -> _Axis:
    first, last = steps[0], steps[-1]
    if first == last:
        return _Axis(low=first - 1, high=last + 1, step=1)
    return _Axis(low=first, high=last, step=max(1.0, _nice((last - first) / _TICKS)))


def _values_axis(values: Sequence[float], from_zero: bool, cuts_spikes: bool) -> _Axis:
    low = min(0.0, *values) if from_zero else min(values)
    top = _top(values, low) if cuts_spikes else max(values)
    high = max(0.0, top) if from_zero else top
    if high - low <= max(_SAME * max(abs(low), abs(high)), 1 / _BEFORE_OVERFLOW):
        margin = 0.5 * abs(low) or 1.0
        low, high = (low if from_zero else low - margin), high + margin
    step = _nice((high - low) / _TICKS)
    # The range ends on ticks, so that the line has room at both edges.
    low = step * math.floor(low / step + 1e-9)
    high = step * math.ceil(high / step - 1e-9)
    return _Axis(low=low, high=high, step=step)


def _top(values: Sequence[float], low: float) -> float:
    """The highest value, or less if a few are several times as high as all others."""
    highest = max(values)
    usual = sorted(values)[int(_USUAL * (len(values) - 1))]
    if len(values) >= _ENOUGH_TO_CUT and highest - low > _FAR * (usual - low) > 0:
        return low + 1.25 * (usual - low)
    return highest


def _nice(rough: float) -> float:
    """The next larger of 1, 2, 2.5, 5 × a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(times * power for times in (1, 2, 2.5, 5, 10) if times * power >= rough * (1 - 1e-9))


def _drawable(value: float | None) -> float | None:
    """None for a value that cannot be drawn: not finite, or so large that a difference overflows."""
    return value if value is not None and abs(value) < _BEFORE_OVERFLOW else None


def _is_thinned(rows: int) -> bool:
    return rows > MOST_ROWS


def _bucket_rows(rows: int) -> int:
    return -(-rows // BUCKETS) if _is_thinned(rows) else 1


def _beyond(steps: Sequence[int], series: Iterable[Series], top: float, unit: str) -> str | None:
    above = [
        (value, step)
        for one in series
        for step, value in zip(steps, one.values, strict=True)
        if value is not None and value > top + _SAME * abs(top)
    ]
    if not above:
        return None
    highest, step = max(above)
    what = "1 value is" if len(above) == 1 else f"{len(above):,} values are"
    text = f"{highest:,.0f}" if 1e3 <= highest < 1e9 else f"{highest:.4g}"
    return f"{what} above the chart, up to {text}{unit and ' ' + unit} at step {step:,}."


def _stroke(run: Sequence[Bucket], x: _Axis, y: _Axis) -> str:
    points = [_point(bucket.step, bucket.middle, x, y) for bucket in run]
    # A line of length zero with round ends is a dot, for a single value.
    return f"M{'L'.join(points if len(points) > 1 else points * 2)}"


def _area(run: Sequence[Bucket], x: _Axis, y: _Axis) -> str:
    there = [_point(bucket.step, bucket.high, x, y) for bucket in run]
    back = [_point(bucket.step, bucket.low, x, y) for bucket in reversed(run)]
    return f"M{'L'.join(there + back)}Z"


def _point(step: float, value: float, x: _Axis, y: _Axis) -> str:
    return f"{SIDE * x.part(step):.1f} {SIDE * (1 - y.part(value)):.1f}"
