"""Line charts over steps: their axes, their values in buckets, and the table of them.

`templates/macros.html.jinja` draws them: a square of 1000 × 1000 units, the origin at the top left, that is
stretched to the width of the page. Its text is not stretched: ticks and legends are set around it.

A long log is thinned: neighbouring rows share a bucket, which is drawn as the median of its values on a band
from its lowest to its highest, so that no spike is lost. A few values far above all others would flatten
the rest; for outliers, as in step times, the chart ends below them, draws them at its edge, and states that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import and_, attrgetter
from types import MappingProxyType

from .tables import Cell, Column, Table

MOST_ROWS = 500
"""Up to this many rows are drawn as they are."""
BUCKETS = 250

_TICKS = 4
_BEFORE_OVERFLOW = 1e300
_ENOUGH_TO_CUT = 10
_USUAL = 0.98
_FAR = 3.0
_SAME = 1e-9
_MARK_PLACES = 200
SIDE = 1000
"""Units of a drawing in the templates."""
_DASH_PERIOD = 18


@dataclass(frozen=True, kw_only=True)
class Series:
    """A name, and a value for each step, or None or NaN. `key` is what a page shows and hides it by."""

    name: str
    values: Sequence[float | None]
    key: int = 0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One or more neighbouring rows."""

    first: int
    last: int
    low: float
    middle: float
    high: float

    @property
    def step(self) -> float:
        return (self.first + self.last) / 2


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series as stretches of buckets without a gap."""

    name: str
    key: int
    runs: Sequence[Sequence[Bucket]]
    dashes: str = ""
    """Of a line that runs on top of another one, which is seen through its gaps."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Everything a page needs to draw it."""

    title: str
    unit: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    is_thinned: bool
    """Whether a line is the middle of a band."""
    is_stacked: bool
    """Whether each line is the upper edge of an area on top of the one before."""
    beyond: str | None
    """A sentence about the values above the drawing."""
    table: Table
    """The drawn values, a row for each position."""
    marks: Mapping[str, Sequence[int]]
    """Where there is a vertical line, such as for a checkpoint, by what it is for."""


def line_chart(
    title: str,
    steps: Sequence[int],
    series: Iterable[Series],
    *,
    unit: str = "",
    from_zero: bool = True,
    cuts_spikes: bool = True,
    marks: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> Chart | None:
    """The chart; None if no series has a value. `steps` ascend, and every series is as long.

    `marks` are seconds by step for each kind of mark.
    """
    shown = [(one, buckets) for one in series if any(buckets := thinned(steps, one.values))]
    if not shown:
        return None
    x = _steps_axis(steps)
    drawn = [bucket for _, buckets in shown for bucket in buckets if bucket is not None]
    is_thinned = _is_thinned(len(steps))
    ends = [bucket.low for bucket in drawn] if is_thinned else []
    y = values_axis([*ends, *(bucket.high for bucket in drawn)], from_zero, cuts_spikes)
    has_beyond = max(bucket.high for bucket in drawn) > y.high
    return Chart(
        title=title,
        unit=unit,
        lines=[
            Line(
                name=one.name,
                key=one.key,
                runs=_runs(buckets),
                dashes=_dashes((number + 1) / len(shown))
                if any(_coincide(buckets, other) for _, other in shown[number + 1 :])
                else "",
            )
            for number, (one, buckets) in enumerate(shown)
        ],
        x=x,
        y=y,
        is_thinned=is_thinned,
        is_stacked=False,
        beyond=_beyond(steps, [one for one, _ in shown], y.high, unit) if has_beyond else None,
        table=_table(title, unit, shown, x, marks, is_thinned=is_thinned),
        marks=_places(marks, x),
    )


def stacked_chart(
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    unit: str = "",
    marks: Mapping[str, Mapping[int, float]] = MappingProxyType({}),
) -> Chart | None:
    """Parts of a whole as areas on top of each other, each the mean of its group of rows.

    None if no row has a value. A part that a row does not have is 0 where the row has others.
    """
    size = _bucket_rows(len(steps))
    groups = [range(begin, min(begin + size, len(steps))) for begin in range(0, len(steps), size)]
    tops: list[list[Bucket | None]] = [[] for _ in series]
    for group in groups:
        rows = [at for at in group if any(_drawable([one.values[at] for one in series]))]
        below = 0.0
        for one, buckets in zip(series, tops, strict=True):
            value = sum(_drawable([one.values[at] for at in rows])) / len(rows) if rows else None
            buckets.append(
                None
                if value is None
                else Bucket(
                    first=steps[group[0]],
                    last=steps[group[-1]],
                    low=below,
                    middle=below + value,
                    high=below + value,
                )
            )
            below += value or 0.0
    ends = [bucket.high for bucket in tops[-1] if bucket is not None]
    if not ends:
        return None
    x, y = _steps_axis(steps), values_axis(ends, from_zero=True, cuts_spikes=True)
    values = [
        (one, [None if b is None else replace(b, middle=b.high - b.low) for b in buckets])
        for one, buckets in zip(series, tops, strict=True)
    ]
    beyond = max(ends)
    return Chart(
        title=title,
        unit=unit,
        lines=[
            Line(name=one.name, key=one.key, runs=_runs(buckets))
            for one, buckets in zip(series, tops, strict=True)
        ],
        x=x,
        y=y,
        is_thinned=False,
        is_stacked=True,
        beyond=f"The highest sum, above the chart, is {beyond:.4g} {unit}." if beyond > y.high else None,
        table=_table(title, unit, values, x, marks, is_thinned=False),
        marks=_places(marks, x),
    )


def _places(marks: Mapping[str, Mapping[int, float]], x: Axis) -> dict[str, list[int]]:
    """Where marks are drawn; those that would be on top of each other are one."""
    return {
        kind: sorted({round(_MARK_PLACES * x.part(step)) * SIDE // _MARK_PLACES for step in found})
        for kind, found in marks.items()
    }


def thinned(steps: Sequence[int], values: Sequence[float | None]) -> list[Bucket | None]:
    """At most `BUCKETS` buckets; None for one without any value."""
    size = _bucket_rows(len(steps))
    found: list[Bucket | None] = []
    for begin in range(0, len(steps), size):
        known = _drawable(values[begin : begin + size])
        last = min(begin + size, len(steps)) - 1
        found.append(
            Bucket(
                first=steps[begin],
                last=steps[last],
                low=min(known),
                middle=statistics.median(known),
                high=max(known),
            )
            if known
            else None
        )
    return found


def _runs(buckets: Iterable[Bucket | None]) -> list[list[Bucket]]:
    """Buckets without a gap between them."""
    runs: list[list[Bucket]] = [[]]
    for bucket in buckets:
        if bucket is not None:
            runs[-1].append(bucket)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _coincide(one: Sequence[Bucket | None], other: Sequence[Bucket | None]) -> bool:
    """Whether two lines have a stretch in common."""
    same = [a is not None and b is not None and a.middle == b.middle for a, b in zip(one, other, strict=True)]
    return any(map(and_, same, same[1:]))


def _dashes(part: float) -> str:
    return f"{_DASH_PERIOD * part:.1f} {_DASH_PERIOD * (1 - part):.1f}"


def _table(
    title: str,
    unit: str,
    shown: Sequence[tuple[Series, Sequence[Bucket | None]]],
    x: Axis,
    marks: Mapping[str, Mapping[int, float]],
    *,
    is_thinned: bool,
) -> Table:
    columns = [Column(label="steps" if is_thinned else "step", is_number=not is_thinned)]
    for one, _ in shown:
        columns.append(Column(label=one.name, unit=unit, key=one.key))
        if is_thinned:
            columns += [Column(label=f"{one.name}, {end}", unit=unit, key=one.key) for end in _ENDS]
    if marks:
        columns.append(Column(label="pauses", is_number=False))
    rows, places = [], []
    paused = [(step, kind, seconds) for kind, own in marks.items() for step, seconds in own.items()]
    for buckets in zip(*(buckets for _, buckets in shown), strict=True):
        first = next((bucket for bucket in buckets if bucket is not None), None)
        if first is None:
            continue
        label = f"{first.first:,}" if first.first == first.last else f"{first.first:,} to {first.last:,}"
        cells = [Cell(text=label)]
        for bucket in buckets:
            cells.append(_cell(None if bucket is None else bucket.middle))
            if is_thinned:
                cells += [_cell(None if bucket is None else value(bucket)) for value in _ENDS.values()]
        if marks:
            cells.append(Cell(text=_paused_text(paused, first)))
        rows.append(cells)
        places.append(round(100 * x.part(first.step), 2))
    return Table(title=title, columns=columns, rows=rows, places=places)


def _paused_text(paused: Iterable[tuple[int, str, float]], bucket: Bucket) -> str:
    seconds: dict[str, float] = {}
    for step, kind, spent in paused:
        if bucket.first <= step <= bucket.last:
            seconds[kind] = seconds.get(kind, 0.0) + spent
    return ", ".join(f"{kind} {spent:.3g} s" for kind, spent in seconds.items())


_ENDS = MappingProxyType({"lowest": attrgetter("low"), "highest": attrgetter("high")})


def _cell(value: float | None) -> Cell:
    return Cell(text="unknown" if value is None else f"{value:.4g}".replace("e+", "e"))


def thinning(rows: int) -> str | None:
    """A sentence on how charts of that many rows were thinned; None if they were not."""
    if not _is_thinned(rows):
        return None
    return (
        f"{rows:,} rows in groups of {_bucket_rows(rows):,}: the line is the median of each group, the band "
        "behind it the range from lowest to highest."
    )


def tick_text(value: float, step: float) -> str:
    """A tick with the decimals that distinguish it from its neighbours."""
    if not 1e-4 <= step < 1e9:
        return f"{value:.3g}"
    decimals = next(digits for digits in range(6) if math.isclose(round(step, digits), step, rel_tol=1e-6))
    return f"{value:,.{decimals}f}".replace("-", "−")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A range, and the distance between its ticks."""

    low: float
    high: float
    step: float

    def part(self, value: float) -> float:
        """The position of a value in the range, from 0 to 1; a value above the range is at 1."""
        return (min(value, self.high) - self.low) / (self.high - self.low)

    def across(self, value: float) -> float:
        """The position of a value from the left, in units of the drawing."""
        return round(SIDE * self.part(value), 1)

    def down(self, value: float) -> float:
        """The position of a value from the top."""
        return round(SIDE * (1 - self.part(value)), 1)

    @property
    def ticks(self) -> dict[float, str]:
        """The values with a tick, and their texts."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        values = [count * self.step for count in range(first, last + 1)]
        return {value: tick_text(value, self.step) for value in values}


def _steps_axis(steps: Sequence[int]) -> Axis:
    first, last = steps[0], steps[-1]
    if first == last:
        return Axis(low=first - 1, high=last + 1, step=1)
    step = max(1.0, _nice((last - first) / _TICKS))
    whole = step if step.is_integer() else 2 * step  # a training step is a whole number
    return Axis(low=first, high=last, step=whole)


def values_axis(values: Sequence[float], from_zero: bool, cuts_spikes: bool) -> Axis:
    low = min(0.0, min(values)) if from_zero else min(values)
    top = _top(values, low) if cuts_spikes else max(values)
    high = max(0.0, top) if from_zero else top
    if high - low <= max(_SAME * max(abs(low), abs(high)), 1 / _BEFORE_OVERFLOW):
        margin = 0.5 * abs(low) or 1.0
        low, high = (low if from_zero else low - margin), high + margin
    step = _nice((high - low) / _TICKS)
    # The range ends on ticks, so that the line has room at both edges.
    low = step * math.floor(low / step + 1e-9)
    high = step * math.ceil(high / step - 1e-9)
    return Axis(low=low, high=high, step=step)


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


def _drawable(values: Iterable[float | None]) -> list[float]:
    """The values that can be drawn: finite, and not so large that a difference overflows."""
    return [value for value in values if value is not None and -_BEFORE_OVERFLOW < value < _BEFORE_OVERFLOW]


def _is_thinned(rows: int) -> bool:
    return rows > MOST_ROWS


def _bucket_rows(rows: int) -> int:
    return -(-rows // BUCKETS) if _is_thinned(rows) else 1


def _beyond(steps: Sequence[int], series: Iterable[Series], top: float, unit: str) -> str | None:
    limit = top + _SAME * abs(top)
    above = [
        (value, step)
        for one in series
        for step, value in zip(steps, one.values, strict=True)
        if value is not None and limit < value < _BEFORE_OVERFLOW
    ]
    if not above:
        return None
    highest, step = max(above)
    what = "1 value is" if len(above) == 1 else f"{len(above):,} values are"
    text = f"{highest:,.0f}" if 1e3 <= highest < 1e9 else f"{highest:.4g}"
    return f"{what} above the chart, up to {text}{unit and ' ' + unit} at step {step:,}."
