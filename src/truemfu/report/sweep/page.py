"""A sweep as a self-contained HTML report: verdict, heat map, charts by machine, experiments, failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ...records import OUT_OF_MEMORY, Status
from ...text import duration, flop_rate, share, size
from ..drawing.html import write_template
from ..drawing.panel_chart import PanelChart, PanelSeries, Spread, panel_chart
from ..drawing.tables import Cell, Column, Table, heated, plain, table_of, words
from .figures import ExperimentFigures, SweepSummary
from .groups import Group, groups_of
from .texts import context_lines, experiments_table, failure_line, headline, tables_of, trainer_keys
from .verdict import verdict

_SHORT_ENDS = dict.fromkeys((end.value for end in OUT_OF_MEMORY), "OOM")
_LOGS_SHOWN = 24


def write_sweep_page(path: Path, summary: SweepSummary, price_per_gpu_hour: float | None = None) -> Path:
    """Write the report to `path` and return the path."""
    sentences, unknown = verdict(summary)
    trainers = trainer_keys(summary)
    return write_template(
        path,
        "sweep_page.html.jinja",
        title="Profiling sweep",
        lead=_lead(summary),
        verdict=sentences,
        unknown=unknown,
        trainers=list(trainers),
        groups=[_group_view(group, trainers) for group in groups_of(summary.experiments)],
        experiments=experiments_table(summary, price_per_gpu_hour),
        tables=tables_of(summary)[1:],
        failures=_failures(summary),
        logs=[(failure.name, failure.log_tail) for failure in summary.failures if failure.log_tail][
            :_LOGS_SHOWN
        ],
        notes=summary.notes,
    )


def _lead(summary: SweepSummary) -> str:
    words = [f"{headline(summary)}.", *context_lines(summary)]
    if summary.created_at_s is not None:
        words.append(f"{datetime.fromtimestamp(summary.created_at_s, timezone.utc):%Y-%m-%d %H:%M} UTC.")
    return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class GroupView:
    """What is drawn of one group of experiments."""

    title: str
    peak: str
    maps: Mapping[str, Table]
    """Heat maps by what they show."""
    charts: Sequence[PanelChart]


def _group_view(group: Group, trainers: Mapping[str, int]) -> GroupView:
    own = {row.trainer: trainers[row.trainer] for _, row in group.experiments}
    peaks = {
        f"{flop_rate(row.peak_flops_per_s)} ({row.peak_source or 'source unknown'})"
        for row in group.finished
        if row.peak_flops_per_s is not None
    }
    return GroupView(
        title=group.title,
        peak=", ".join(sorted(peaks)) or "unknown",
        maps={
            label: table
            for label, figure, text, is_less_better in _MAPS
            if (table := _map(group, own, label, figure, text, is_less_better)) is not None
        },
        charts=[chart for chart in _charts(group, own) if chart is not None],
    )


_MAPS: tuple[tuple[str, Callable[[ExperimentFigures], float | None], Callable[[float], str], bool], ...] = (
    ("MFU", lambda row: row.mfu, share, False),
    ("HFU", lambda row: row.hfu, share, False),
    ("step time", lambda row: row.step_time_s, duration, True),
    ("peak memory", lambda row: row.peak_memory_bytes if row.step_time_s is not None else None, size, True),
)


def _map(
    group: Group,
    trainers: Mapping[str, int],
    label: str,
    figure: Callable[[ExperimentFigures], float | None],
    text: Callable[[float], str],
    is_less_better: bool,
) -> Table | None:
    """Sequence and batch down, trainers across; None without any value."""
    if all(figure(row) is None for _, row in group.experiments):
        return None
    at: dict[tuple[str, int | None, int | None], tuple[int, ExperimentFigures]] = {}
    for index, row in group.experiments:
        point = (row.trainer, row.seq_len, row.batch_size)
        if point not in at or at[point][1].step_time_s is None:  # an experiment with a value stays
            at[point] = (index, row)

    def cell(trainer: str, seq_len: int, batch_size: int) -> Cell:
        found = at.get((trainer, seq_len, batch_size))
        if found is None:
            return Cell(text="-", kind="none")
        index, row = found
        value = figure(row)
        if value is None:
            is_ok = row.end == Status.OK.value
            words = "unknown" if is_ok else _SHORT_ENDS.get(row.end, row.end)
            return Cell(text=words, kind="none" if is_ok else "bad", of_row=index)
        return Cell(text=text(value), value=value, of_row=index)

    points = [
        (seq_len, batch_size)
        for seq_len in group.seq_lens
        for batch_size in group.batch_sizes
        if any((trainer, seq_len, batch_size) in at for trainer in trainers)
    ]
    cells = heated(
        [[cell(trainer, *point) for trainer in trainers] for point in points], is_less_better=is_less_better
    )
    rows = [
        [plain(f"{seq_len:,}"), plain(f"{batch_size:,}"), *row]
        for (seq_len, batch_size), row in zip(points, cells, strict=True)
    ]
    columns = [Column(label="sequence"), Column(label="batch")]
    columns += [Column(label=trainer, is_number=True, key=key) for trainer, key in trainers.items()]
    return Table(title=f"{label} by sequence, batch and trainer", columns=columns, rows=rows)


def _charts(group: Group, trainers: Mapping[str, int]) -> list[PanelChart | None]:
    def series(
        name: str,
        key: int,
        trainer: str,
        spread: Callable[[ExperimentFigures], Spread | None],
        is_dashed: bool = False,
    ) -> PanelSeries:
        values = {
            (f"sequence {row.seq_len:,}", f"{row.batch_size:,}"): found
            for row in group.finished
            if row.trainer == trainer
            and row.seq_len is not None
            and row.batch_size is not None
            and (found := spread(row)) is not None
        }
        return PanelSeries(name=name, key=key, values=values, is_dashed=is_dashed)

    def chart(
        title: str, unit: str, every: Sequence[PanelSeries], text: Callable[[Spread], str]
    ) -> PanelChart | None:
        return panel_chart(
            title,
            every,
            unit=unit,
            x_label="batch size",
            text=text,
            panels=[f"sequence {seq_len:,}" for seq_len in group.seq_lens],
            positions=[f"{batch_size:,}" for batch_size in group.batch_sizes],
        )

    each = list(trainers.items())
    utilization = [series(f"{name}, MFU", key, name, _percent("mfu")) for name, key in each]
    utilization += [series(f"{name}, HFU", key, name, _percent("hfu"), True) for name, key in each]
    return [
        chart(
            "Step time, median with the middle 80 % of steps", "ms",
            [series(name, key, name, _step_time) for name, key in each],
            lambda spread: f"{spread.middle:,.2f} ({spread.low:,.2f} to {spread.high:,.2f})",
        ),
        chart(
            "Peak memory, up to what torch reserved", "GiB",
            [series(name, key, name, _memory) for name, key in each],
            lambda spread: f"{spread.middle:,.2f}"
            + (f" (reserved {spread.high:,.2f})" if spread.high > spread.middle else ""),
        ),
        chart(
            "MFU and HFU", "%", utilization, lambda spread: f"{spread.middle:.1f}"
        ),
    ]  # fmt: skip


def _step_time(row: ExperimentFigures) -> Spread | None:
    if row.step_time_s is None:
        return None
    low, high = row.step_time_p10_s, row.step_time_p90_s
    return Spread(
        low=1e3 * min(row.step_time_s, low if low is not None else row.step_time_s),
        middle=1e3 * row.step_time_s,
        high=1e3 * max(row.step_time_s, high if high is not None else row.step_time_s),
    )


def _memory(row: ExperimentFigures) -> Spread | None:
    if row.peak_memory_bytes is None:
        return None
    peak = row.peak_memory_bytes / 2**30
    reserved = peak if row.reserved_bytes is None else row.reserved_bytes / 2**30
    return Spread(low=peak, middle=peak, high=max(peak, reserved))


def _percent(name: str) -> Callable[[ExperimentFigures], Spread | None]:
    def spread(row: ExperimentFigures) -> Spread | None:
        value = getattr(row, name)
        return None if value is None else Spread(low=100 * value, middle=100 * value, high=100 * value)

    return spread


def _failures(summary: SweepSummary) -> Table | None:
    if not summary.failures:
        return None
    return table_of(
        "Failures",
        summary.failures,
        [
            words("experiment", lambda failure: failure.name),
            words("status", lambda failure: failure.end),
            words("cause", failure_line, kind="text"),
        ],
    )
