"""A monitored run as a self-contained HTML report: verdict, figures, waterfall, charts, slow steps, ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

from ...census.record import Census, stored_census
from ...records import RunRecord, RunSummary
from ...run_summary.phases import PHASE_NAMES
from ...run_summary.texts import (
    NO_SUMMARY,
    cost,
    estimate_mark,
    facts,
    figures,
    hardware_figures,
    memory,
    mfu_text,
    started,
    why_no_waterfall,
    without_tensor_work,
)
from ...text import counted, duration, sentence, size
from ..drawing.html import write_template
from ..drawing.line_chart import Chart, Series, line_chart, stacked_chart, thinning
from ..drawing.tables import Table, digits, measures, table_of, words
from ..explain.page import view_of as view_of_census
from .job_view import job_view
from .load import LoadedRun
from .log_rows import PAUSES, PHASES, LogRows
from .log_summary import results_of
from .one_step import picture_of
from .ranks import RankLine
from .verdict import verdict
from .waterfall_bars import view_of
from .worst_steps import worst_steps, worst_table

_MOST_KERNELS = 40
_MOST_RANKS = 512
_MOST_PAUSES = 200
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def write_run_page(path: Path, run: LoadedRun, price_per_gpu_hour: float | None = None) -> Path:
    """Write the report to `path` and return the path."""
    results = results_of(run)
    record, summary = results.record, results.summary
    worst = worst_steps(run.rows, summary)
    price = None if price_per_gpu_hour is None else cost(results, price_per_gpu_hour)
    census = stored_census(run.folder)
    sentences, unknown = verdict(results, worst, price)
    pauses = pauses_of(run.rows)
    return write_template(
        path,
        "run_page.html.jinja",
        title=f"Training run {run.folder.resolve().name}".rstrip(),
        lead=_lead(record, summary),
        damage=run.notes,
        verdict=sentences,
        unknown=unknown,
        facts=facts(results),
        figures=[*figures(results), memory(results), *([] if price is None else [price])],
        charts=_charts(run.rows, summary, pauses),
        about_charts=thinning(len(run.rows)) if run.rows else "There are no charts: the log has no rows.",
        waterfall=view_of(summary.hardware),
        no_waterfall=why_no_waterfall(results),
        last_window=run.last_window,
        one_step=picture_of(summary.typical_step),
        census=None if census is None else view_of_census(census, _MOST_KERNELS),
        about_census="" if census is None else _about_census(census, summary),
        hardware=[] if summary.hardware is None else hardware_figures(summary.hardware, record.scope),
        worst=worst_table(worst) if worst else None,
        pauses=_pauses_table(pauses),
        more_pauses=max(0, sum(map(len, pauses.values())) - _MOST_PAUSES),
        ranks=_ranks_table(run.ranks.lines[:_MOST_RANKS]) if run.ranks.lines else None,
        more_ranks=max(0, len(run.ranks.lines) - _MOST_RANKS),
        stragglers=[straggler.text for straggler in summary.stragglers if straggler.text],
        job=None if run.job is None else job_view(run.job),
        remarks=[
            ("Warnings", summary.warnings),
            ("Lost", summary.lost),
            ("Notes", [*_non_finite(run.rows), *map(sentence, summary.notes)]),
        ],
        nothing_to_remark=(
            "Nothing was lost, and there were no warnings."
            if record.summary is not None
            else f"Warnings and lost data are {NO_SUMMARY}."
        ),
    )


def _about_census(census: Census, summary: RunSummary) -> str:
    """Which step it is of, and what it says of the waterfall."""
    split = without_tensor_work(summary)
    step = (census.step or "a step").replace("ProfilerStep#", "step ")
    text = f"Kineto recorded {step} of this run; its time is not among the step times."
    return text if split is None else f"{text} Busy without tensor work: {split}."


def _lead(record: RunRecord, summary: RunSummary) -> str:
    words = [record.device or "device unknown"]
    if summary.steps is not None:
        words.append(f"{summary.steps:,} steps")
    if summary.median_mfu is not None:
        words.append(f"MFU {mfu_text(summary)}")
    if began := started(record):
        words.append(began)
    return f"{', '.join(words)}."


def pauses_of(rows: LogRows) -> dict[str, dict[int, float]]:
    """Seconds of what ran outside of steps by kind and step, over all attempts that are in the log."""
    found = {}
    for kind, name in PAUSES.items():
        if rows.has(name):
            column = rows.column(name)
            found[kind] = dict(compress(zip(rows.steps, column, strict=True), map((0.0).__lt__, column)))
    return found


@dataclass(frozen=True, kw_only=True)
class StepValues:
    """What a chart over steps shows of a run."""

    title: str
    names: Mapping[str, str]
    """The name of each line by its value in a row."""
    unit: str
    times: float
    from_zero: bool = True
    cuts_spikes: bool = True


def charted(median_step_time_s: float | None) -> list[StepValues]:
    """The charts of a run."""
    scale, unit = _time_unit(median_step_time_s)
    return [
        StepValues(
            title="Loss",
            names={"loss": "loss"},
            unit="",
            times=1,
            from_zero=False,
            cuts_spikes=False,  # the first losses are far above the others, but not outliers
        ),
        StepValues(title="MFU and HFU", names={"mfu": "MFU", "hfu": "HFU"}, unit="%", times=100),
        StepValues(title="Step time", names={"step_time_s": "step time"}, unit=unit, times=1 / scale),
    ]


def scaled(rows: LogRows, name: str, times: float) -> Sequence[float]:
    """The values of a column in the unit of a chart."""
    column = rows.column(name)
    return column if times == 1 else [value * times for value in column]


def _charts(rows: LogRows, summary: RunSummary, pauses: Mapping[str, Mapping[int, float]]) -> list[Chart]:
    """The charts that have values."""
    if not rows:
        return []
    found = []
    for values in charted(summary.median_step_time_s):
        names, title = dict(values.names), values.title
        if "mfu" in names:
            title += estimate_mark(summary)
        if "hfu" in names and _are_equal(rows.column("mfu"), rows.column("hfu")):
            names = {"mfu": "MFU, equal to HFU"}
        found.append(
            line_chart(
                title,
                rows.steps,
                [
                    Series(name=text, values=scaled(rows, name, values.times), key=key)
                    for key, (name, text) in enumerate(names.items())
                ],
                unit=values.unit,
                from_zero=values.from_zero,
                cuts_spikes=values.cuts_spikes,
                marks=pauses,
            )
        )
    found.append(_phases_chart(rows, summary, pauses))
    return [chart for chart in found if chart is not None]


def _phases_chart(
    rows: LogRows, summary: RunSummary, pauses: Mapping[str, Mapping[int, float]]
) -> Chart | None:
    """The phases of each step on top of each other."""
    scale, unit = _time_unit(summary.median_step_time_s)
    series = [
        Series(name=PHASE_NAMES[phase], values=scaled(rows, value, 1 / scale), key=key)
        for key, (phase, value) in enumerate(PHASES.items())
        if rows.has(value)
    ]
    return stacked_chart("Phases of a step", rows.steps, series, unit=unit, marks=pauses) if series else None


def _are_equal(one: Sequence[float], other: Sequence[float]) -> bool:
    """Whether two columns have the same values and the same gaps."""
    return all(a == b or (a != a and b != b) for a, b in zip(one, other, strict=True))


def _time_unit(seconds: float | None) -> tuple[float, str]:
    """A readable unit for the usual step time."""
    return next((unit for unit in _TIME_UNITS if (seconds or 1.0) >= unit[0]), _TIME_UNITS[-1])


def _pauses_table(pauses: Mapping[str, Mapping[int, float]]) -> Table | None:
    """Evaluations, checkpoints and so on, the longest first."""
    found = sorted(
        ((seconds, step, kind) for kind, own in pauses.items() for step, seconds in own.items()), reverse=True
    )
    if not found:
        return None
    return table_of(
        "Evaluations, checkpoints and other pauses",
        found[:_MOST_PAUSES],
        [
            digits("step", lambda pause: f"{pause[1]:,}"),
            words("what", lambda pause: pause[2]),
            measures("time", duration, lambda pause: pause[0], unit="s"),
        ],
    )


def _ranks_table(lines: Sequence[RankLine]) -> Table:
    return table_of(
        "Ranks",
        lines,
        [
            words("rank", lambda line: line.ranks),
            words("host", lambda line: line.host),
            words("device", lambda line: line.device),
            digits("attempts", lambda line: f"{line.attempts:,}"),
            digits("steps", lambda line: f"{line.steps:,}"),
            measures("mean step", duration, lambda line: line.mean_step_s),
            measures("data wait a step", duration, lambda line: line.data_wait_s),
            measures("memory", size, lambda line: line.memory_bytes),
            words("last seen", lambda line: line.last_seen),
        ],
    )


def _non_finite(rows: LogRows) -> list[str]:
    """A sentence about a NaN or infinite loss: its gap in the chart is easily missed."""
    odd = {
        at: kinds["training/loss"]
        for at, kinds in rows.known("non_finite").items()
        if "training/loss" in kinds
    }
    if not odd:
        return []
    what, first = counted(len(odd), "step"), min(odd)
    return [f"The loss was not finite at {what}, first at step {rows.steps[first]:,} ({odd[first]})."]
