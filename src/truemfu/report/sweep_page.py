"""A sweep as a self-contained HTML report."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from .figures import SweepSummary
from .html import Section, write_page
from .render import context_lines, failure_texts, headline, tables_of


def write_sweep_page(path: Path, summary: SweepSummary) -> Path:
    """Write the report to `path` and return the path."""
    return write_page(path, title="Profiling sweep", lead=_lead(summary), sections=_sections(summary))


def _lead(summary: SweepSummary) -> str:
    words = [f"{headline(summary)}.", *context_lines(summary)]
    if summary.created_at_s is not None:
        words.append(f"{datetime.fromtimestamp(summary.created_at_s, timezone.utc):%Y-%m-%d %H:%M} UTC.")
    return " ".join(words)


def _sections(summary: SweepSummary) -> list[Section]:
    experiments, *others = tables_of(summary)
    sections = [
        Section(
            heading=table.title,
            sentences=[table.sentence] if table.sentence else [],
            columns=table.columns,
            rows=table.rows,
            # The last column of the experiments is their MFU.
            bars=[min(row.mfu or 0.0, 1.0) for row in summary.experiments] if table is experiments else None,
        )
        for table in (experiments, *others)
    ]
    for line, log in failure_texts(summary):
        name, _, what = line.partition(": ")
        sections.append(Section(heading=f"Failure: {name}", sentences=[what], log=log))
    if summary.notes:
        sections.append(Section(heading="Notes", sentences=summary.notes))
    return sections
