"""A monitored run as a self-contained HTML report: figures, charts, waterfall, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..records import RunRecord, RunSummary
from .chart import SIDE, Chart, Series, line_chart, thinning
from .html import write_template
from .ranks_view import life_of
from .render import duration
from .log_rows import LogRows
from .run_load import LoadedRun
from .run_summary import summary_of_log
from .run_texts import (
    NO_SUMMARY,
    facts,
    figures,
    hardware_figures,
    of_last_window,
    share,
    started,
    why_no_waterfall,
)
from .waterfall_view import view_of

_MOST_RANKS = 512
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def write_run_page(path: Path, run: LoadedRun) -> Path:
    """Write the report to `path` and return the path."""
    record = run.record or RunRecord()
    summary = record.summary or summary_of_log(run.rows, run.last_window)
    return write_template(
        path,
        "run_page.html.jinja",
        title=f"Training run {run.folder.resolve().name}".rstrip(),
        lead=_lead(record, summary),
        damage=run.notes,
        facts=facts(record, summary, run.rows),
        figures=figures(record, summary, run.rows),
        charts=_charts(run.rows, summary),
        about_charts=thinning(len(run.rows)) if run.rows else "There are no charts: the log has no rows.",
        waterfall=view_of(summary.hardware),
        no_waterfall=why_no_waterfall(record, summary),
        of_last_window=None if run.last_window is None else of_last_window(run.last_window),
        hardware=[] if summary.hardware is None else hardware_figures(summary.hardware, record.scope),
        ranks=run.ranks.lines[:_MOST_RANKS],
        more_ranks=max(0, len(run.ranks.lines) - _MOST_RANKS),
        stragglers=[straggler.text for straggler in summary.stragglers if straggler.text],
        life=[
            (part.name, duration(part.seconds), share(part.share))
            for part in life_of(run.ranks.of_first, _paused_s(run.rows))
        ],
        side=SIDE,
        remarks=[
            ("Warnings", summary.warnings),
            ("Lost", summary.lost),
            ("Notes", [*_non_finite(run.rows), *summary.notes]),
        ],
        nothing_to_remark=(
            "Nothing was lost, and there were no warnings."
            if record.summary is not None
            else f"Not known: {NO_SUMMARY}."
        ),
    )


def _lead(record: RunRecord, summary: RunSummary) -> str:
    words = [record.device or "device unknown"]
    if summary.steps is not None:
        words.append(f"{summary.steps:,} steps")
    if summary.median_mfu is not None:
        words.append(f"MFU {share(summary.median_mfu)}")
    if began := started(record):
        words.append(began)
    return f"{', '.join(words)}."


def _paused_s(rows: LogRows) -> dict[str, float]:
    """Seconds of what ran outside of steps, over all attempts that are in the log."""
    kinds = ("evaluation", "checkpoint", "generation", "other_pause")
    return {kind.replace("_", " "): sum(getattr(row, f"{kind}_s") or 0.0 for row in rows) for kind in kinds}


def _charts(rows: LogRows, summary: RunSummary) -> list[Chart]:
    """The charts that have values."""
    if not rows:
        return []
    steps = [row.global_step for row in rows]
    scale, unit = _time_unit(summary.median_step_time_s)
    found = (
        line_chart(
            "Loss",
            steps,
            [_series("loss", (row.loss for row in rows), 1)],
            from_zero=False,
            cuts_spikes=False,  # the first losses are far above the others, but not outliers
        ),
        line_chart("MFU and HFU", steps, _utilization(rows), unit="%"),
        line_chart(
            "Step time",
            steps,
            [_series("step time", (row.step_time_s for row in rows), 1 / scale)],
            unit=unit,
        ),
    )
    return [chart for chart in found if chart is not None]


def _utilization(rows: LogRows) -> list[Series]:
    """MFU and HFU; one line if they are equal."""
    mfu = _series("MFU", (row.mfu for row in rows), 100)
    hfu = _series("HFU", (row.hfu for row in rows), 100)
    return [replace(mfu, name="MFU, equal to HFU")] if mfu.values == hfu.values else [mfu, hfu]


def _series(name: str, values: Iterable[float | None], times: float) -> Series:
    return Series(name=name, values=[None if value is None else value * times for value in values])


def _time_unit(seconds: float | None) -> tuple[float, str]:
    """A readable unit for the usual step time."""
    return next((unit for unit in _TIME_UNITS if (seconds or 1.0) >= unit[0]), _TIME_UNITS[-1])


def _non_finite(rows: LogRows) -> list[str]:
    """A sentence about a NaN or infinite loss: its gap in the chart is easily missed."""
    odd = [row for row in rows if "training/loss" in row.non_finite]
    if not odd:
        return []
    what = "1 step" if len(odd) == 1 else f"{len(odd):,} steps"
    first = odd[0]
    kind = first.non_finite["training/loss"]
    return [f"The loss was not finite at {what}, first at step {first.global_step:,} ({kind})."]
