"""The layout of a waterfall: a bar for each part that starts where the one above ended, and a table.

Positions are in percent of the drawing's width, which is the peak, or more if a gain exceeds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...records import RunHardware, WaterfallPart, WaterfallRecord
from ...run_summary.texts import waterfall_basis
from ...text import sentence
from ..drawing.tables import Cell, Column, Table, plain

_SUM_TOLERANCE = 0.01
_SHOWN = 0.0005


@dataclass(frozen=True, kw_only=True)
class WaterfallBar:
    """A part as a bar. `kind` selects its colour: peak, loss, largest, gain or useful."""

    name: str
    points: str
    left_percent: float
    width_percent: float
    kind: str


@dataclass(frozen=True, kw_only=True)
class WaterfallView:
    bars: Sequence[WaterfallBar]
    table: Table
    advice: Sequence[str]
    basis: str
    """What the parts are of; empty for those of a row, whose page says that it has the last window."""
    sentences: Sequence[str]


def view_of(hardware: RunHardware | None) -> WaterfallView | None:
    """The waterfall of a run; None without one."""
    fall = hardware.waterfall if hardware is not None else None
    if hardware is None or fall is None or not fall.parts:
        return None
    return WaterfallView(
        bars=bars_of("the peak", fall.parts, hardware.limiter),
        table=_table(fall, hardware.limiter),
        advice=hardware.advice,
        basis="" if hardware.windows is None else sentence(waterfall_basis(hardware)),
        sentences=[*_reading(fall.parts), *map(sentence, fall.notes)],
    )


def points(share: float | None) -> str:
    """A share of the peak in percentage points."""
    return "unknown" if share is None else f"{100 * share:.1f}".replace("-", "−").replace("−0.0", "0.0")


def bars_of(whole_name: str, parts: Sequence[WaterfallPart], limiter: str | None) -> list[WaterfallBar]:
    """The whole, and its parts from the top; the last one is what is left."""
    spans, level = [(0.0, 1.0)], 1.0
    for part in parts[:-1]:
        left_after = level - (part.share or 0.0)
        spans.append((min(level, left_after), max(level, left_after)))
        level = left_after
    spans.append((min(0.0, level), max(0.0, level)))
    least, most = min(low for low, _ in spans), max(high for _, high in spans)
    percent = 100 / (most - least)
    whole = WaterfallPart(key="whole", name=whole_name, share=1.0)
    kinds = ["peak", *(_kind(part, limiter) for part in parts[:-1]), "useful"]
    return [
        WaterfallBar(
            name=part.name,
            points=points(part.share),
            left_percent=round((low - least) * percent, 2),
            width_percent=round((high - low) * percent, 2),
            kind=kind,
        )
        for part, (low, high), kind in zip([whole, *parts], spans, kinds, strict=True)
    ]


def _kind(part: WaterfallPart, limiter: str | None) -> str:
    if part.share is not None and part.share < 0:
        return "gain"
    return "largest" if _holds(part, limiter) else "loss"


def _holds(part: WaterfallPart, key: str | None) -> bool:
    return key is not None and key in (part.key, *(inner.key for inner in part.of))


def _table(fall: WaterfallRecord, limiter: str | None) -> Table:
    """Every part, with its own parts below it, and their sum."""

    def row(name: str, share: float | None, kind: str = "part") -> list[Cell]:
        return [
            Cell(text=name, kind=kind),
            plain(points(share)),
            plain(_tflops(share, fall.peak_flops_per_s)),
        ]

    rows = []
    for outer in fall.parts:
        rows.append(row(_name(outer), outer.share, "biggest" if _holds(outer, limiter) else "part"))
        rows += [row(_name(inner), inner.share, "inner") for inner in outer.of]
    return Table(
        title="Where the peak went",
        columns=[
            Column(label="part", is_number=False),
            Column(label="points of the peak"),
            Column(label="TFLOP/s"),
        ],
        rows=[*rows, row("together", _sum(fall.parts))],
    )


def _name(part: WaterfallPart) -> str:
    if not part.missing:
        return part.name
    return f"{part.name} (not separated; unknown or left out: {', '.join(part.missing)})"


def _tflops(share: float | None, peak_flops_per_s: float | None) -> str:
    if share is None or peak_flops_per_s is None:
        return "unknown"
    return f"{share * peak_flops_per_s / 1e12:,.1f}".replace("-", "−").replace("−0.0", "0.0")


def _sum(parts: Sequence[WaterfallPart]) -> float:
    return sum(part.share or 0.0 for part in parts)


def _reading(parts: Sequence[WaterfallPart]) -> Iterator[str]:
    """Notes for reading this waterfall."""
    if any(part.share is not None and part.share < -_SHOWN for part in parts):
        yield "A negative part is a gain: it adds to what is left."
    if abs(_sum(parts) - 1) > _SUM_TOLERANCE:
        yield f"The parts add up to {points(_sum(parts))} points, not to 100: one is unknown or wrong."
