"""Several runs side by side on one HTML report: figures, facts that differ, waterfalls, charts in one.

Step times and utilization of unlike devices are never in one chart; losses of all runs are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...run_summary.texts import (
    Figure,
    RunResults,
    cost,
    estimate_mark,
    facts,
    figures,
    memory,
    why_no_waterfall,
)
from ..drawing.html import write_template
from ..drawing.line_chart import Chart, Series, line_chart
from ..drawing.tables import Cell, Column, Table, plain, table_of
from .load import LoadedRun
from .log_summary import results_of
from .page import StepValues, charted, scaled
from .waterfall_bars import points
from .worst_steps import FIELDS, TITLE, worst_steps

MOST_RUNS = 8
_OF_ANY_DEVICE = ("Loss",)


@dataclass(frozen=True, kw_only=True)
class _Shown:
    """A run with its name on this page; `key` is its position."""

    key: int
    name: str
    run: LoadedRun
    results: RunResults
    figures: Mapping[str, Figure]
    """By label."""


def write_runs_page(path: Path, runs: Sequence[LoadedRun], price_per_gpu_hour: float | None = None) -> Path:
    """Write the report to `path` and return the path."""
    shown = []
    for key, (name, run) in enumerate(zip(_names(runs), runs, strict=True)):
        results = results_of(run)
        found = [*figures(results), memory(results)]
        found += [] if price_per_gpu_hour is None else [cost(results, price_per_gpu_hour)]
        own = {figure.label: figure for figure in found}
        shown.append(_Shown(key=key, name=name, run=run, results=results, figures=own))
    sentences, unknown = _verdict(shown)
    return write_template(
        path,
        "runs_page.html.jinja",
        title=f"{len(shown)} training runs side by side",
        lead=", ".join(one.name for one in shown) + ".",
        verdict=sentences,
        unknown=unknown,
        damage=[(one.name, one.run.notes) for one in shown if one.run.notes],
        names=[one.name for one in shown],
        figures=_figures_table(shown),
        facts=_by_run("What was run", shown, [dict(facts(one.results)) for one in shown], marks=True),
        waterfall=_waterfall_table(shown),
        no_waterfall=list(dict.fromkeys(why_no_waterfall(one.results) for one in shown)),
        charts=list(_charts(shown)),
        worst=_worst_table(shown),
    )


def _names(runs: Sequence[LoadedRun]) -> list[str]:
    """The folders' names; their paths if two have the same name."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _verdict(shown: Sequence[_Shown]) -> tuple[list[str], list[tuple[str, str]]]:
    sentences: list[str] = []
    unknown: list[tuple[str, str]] = []
    has_tokens = sum(one.figures["tokens/s"].is_known for one in shown) > 1
    for what, label in (
        ("median MFU", "MFU, median"),
        ("median tokens/s", "tokens/s") if has_tokens else ("median samples/s", "samples/s"),
    ):
        known = [(one.figures[label], one.name) for one in shown if one.figures[label].is_known]
        if len(known) < 2:
            unknown.append((f"which run has the highest {what}", "fewer than two runs have this figure"))
            continue
        known.sort(key=lambda found: found[0].number or 0.0, reverse=True)
        (best, name), *others = known
        rest = ", ".join(f"{other} {figure.value}" for figure, other in others)
        if best.value == others[-1][0].value:
            sentences.append(f"The {what} is the same in all runs that have one: {best.value}.")
        else:
            sentences.append(f"Highest {what}: {name} with {best.value}; {rest}.")
    devices = list(dict.fromkeys(one.results.record.device or "unknown" for one in shown))
    if len(devices) > 1:
        sentences.append(
            f"The runs used different devices ({', '.join(devices)}): MFU is relative to each device's own "
            "peak, and times are drawn in a chart for each device."
        )
    sentences.append("`truemfu compare` tests whether a difference is more than noise.")
    return sentences, unknown


def _figures_table(shown: Sequence[_Shown]) -> Table:
    table = _by_run(
        "Figures", shown, [{label: one.value for label, one in each.figures.items()} for each in shown]
    )
    if len(shown) != 2:
        return table
    ratios = [_ratio(*(one.figures.get(row[0].text) for one in shown)) for row in table.rows]
    return replace(
        table,
        columns=[*table.columns, Column(label="ratio")],
        rows=[[*row, plain(ratio)] for row, ratio in zip(table.rows, ratios, strict=True)],
        sentence=f"The ratio is {shown[1].name} over {shown[0].name}.",
    )


def _ratio(first: Figure | None, second: Figure | None) -> str:
    if first is None or second is None or not first.number or second.number is None:
        return "-"
    return f"{second.number / first.number:.3f}"


def _waterfall_table(shown: Sequence[_Shown]) -> Table | None:
    falls = [
        {part.name: points(part.share) for part in (fall.parts if fall is not None else ())}
        for fall in (one.results.summary.waterfall for one in shown)
    ]
    return _by_run("Where the peak went, points of the peak", shown, falls) if any(falls) else None


def _by_run(
    title: str, shown: Sequence[_Shown], each: Sequence[Mapping[str, str]], *, marks: bool = False
) -> Table:
    """A row for each label and a column for the texts of each run; texts that differ are marked."""

    def row(label: str) -> list[Cell]:
        texts = [found.get(label, "-") for found in each]
        kind = ("text differs" if len(set(texts)) > 1 else "text") if marks else ""
        return [plain(label), *(Cell(text=text, kind=kind) for text in texts)]

    return Table(
        title=title,
        columns=[
            Column(label="what", is_number=False),
            *(Column(label=one.name, is_number=not marks, key=one.key) for one in shown),
        ],
        rows=[row(label) for label in dict.fromkeys(label for found in each for label in found)],
    )


def _charts(shown: Sequence[_Shown]) -> Iterator[Chart]:
    longest_s = max((one.results.summary.median_step_time_s or 0.0 for one in shown), default=0.0)
    for values in charted(longest_s or None):
        if values.title in _OF_ANY_DEVICE:
            groups = {"": list(shown)}
        else:
            groups = {}
            for one in shown:
                groups.setdefault(one.results.record.device or "device unknown", []).append(one)
        for device, members in groups.items():
            title = values.title if len(groups) == 1 else f"{values.title}, {device}"
            if (chart := _chart(title, values, members)) is not None:
                yield chart


def _chart(title: str, values: StepValues, members: Sequence[_Shown]) -> Chart | None:
    """The first value of `values` for each run: MFU where a run alone also has HFU."""
    name = next(iter(values.names))
    steps = sorted(set().union(*(one.run.rows.steps for one in members)))
    if not steps:
        return None
    series = []
    for one in members:
        own = dict(zip(one.run.rows.steps, scaled(one.run.rows, name, values.times), strict=True))
        mark = estimate_mark(one.results.summary) if name == "mfu" else ""
        shown_as = one.name + mark
        series.append(Series(name=shown_as, values=[own.get(step, math.nan) for step in steps], key=one.key))
    return line_chart(
        title.replace("MFU and HFU", "MFU"),
        steps,
        series,
        unit=values.unit,
        from_zero=values.from_zero,
        cuts_spikes=values.cuts_spikes,
    )


def _worst_table(shown: Sequence[_Shown]) -> Table | None:
    """The slowest steps of every run."""
    worst = [(one, step) for one in shown for step in worst_steps(one.run.rows, one.results.summary)]
    if not worst:
        return None
    table = table_of(TITLE, [step for _, step in worst], FIELDS, keys=[one.key for one, _ in worst])
    return replace(
        table,
        columns=[Column(label="run", is_number=False), *table.columns],
        rows=[[plain(one.name), *row] for (one, _), row in zip(worst, table.rows, strict=True)],
    )
