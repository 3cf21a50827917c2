"""A census as a self-contained HTML page, and as a part of a run's page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...census.classes import CLASSES
from ...census.record import Census
from ...run_summary.texts import Figure
from ...text import duration, sentence
from ..drawing.html import write_template
from ..drawing.lane_chart import LaneChart, lane_chart
from ..drawing.tables import Table
from .texts import figures, notes, tables_of


@dataclass(frozen=True, kw_only=True)
class CensusView:
    """What a page shows of a census."""

    figures: Sequence[Figure]
    picture: LaneChart | None
    tables: Sequence[Table]
    notes: Sequence[str]


def view_of(census: Census, most: int | None = None) -> CensusView:
    """The view; `most` limits the kernels that are shown."""
    return CensusView(
        figures=figures(census),
        picture=lane_chart(
            "The step on the device",
            {f"stream {lane.stream}": lane.segments for lane in census.lanes},
            {one.key: CLASSES[one.key] for one in census.classes},
            census.step_s,
        ),
        tables=tables_of(census, most),
        notes=[sentence(note) for note in notes(census)],
    )


def write_explain_page(path: Path, census: Census) -> Path:
    """Write the page to `path` and return the path."""
    step = census.step or "its whole trace"
    return write_template(
        path,
        "explain_page.html.jinja",
        title="Where the time of a step goes",
        lead=f"{census.device or 'device unknown'}, {step} of {census.source}, {duration(census.step_s)}.",
        view=view_of(census),
    )
