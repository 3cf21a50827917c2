"""A summary as text: tables for a terminal or an HTML page, Markdown, CSV, JSON.

SweepSummary ─► tables_of, failure_texts ─► terminal (cli/summarize.py), markdown, page (sweep_page.py)
             └► csv_text, json_text: raw values in base units, for other programs

Names, messages and logs come from other people's files. In Markdown they are plain text (no active link,
image or HTML), in CSV none of them is a formula, and control characters are always escaped.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType

import msgspec

from ...records import Status
from ...text import UNKNOWN, duration, number, printable, share, size
from ...training_plan import per_million_tokens
from ..drawing.markdown import markdown_tables, markdown_text
from ..drawing.tables import Cell, Column, Table, plain, text_table
from .figures import (
    AgainstBaseline,
    Experiment,
    Failure,
    LargestBatch,
    Ratio,
    SweepSummary,
    TrainerTotals,
)


def headline(summary: SweepSummary) -> str:
    """The sweep in one line."""
    totals = summary.totals
    statuses = ", ".join(f"{count} {status}" for status, count in totals.ends.items())
    rate = f"{totals.succeeded} of {totals.experiments} experiments succeeded"
    return f"{rate} ({share(totals.success_rate)}): {statuses}"


def tables_of(summary: SweepSummary) -> list[Table]:
    """The tables to show, in reading order; failures are separate text."""
    tables = [experiments_table(summary), _trainers(summary)]
    if summary.against_baseline:
        tables.append(_against_baseline(summary))
    if summary.scaling:
        tables.append(_scaling(summary))
    if any(row.smallest_out_of_memory is not None for row in summary.largest_batches):
        tables.append(_largest_batches(summary))
    return tables


def failure_texts(summary: SweepSummary) -> list[tuple[str, list[str]]]:
    """Each failure as one line, and the last lines of its log."""
    return [(failure_line(failure), failure.log_tail) for failure in summary.failures]


def markdown(summary: SweepSummary) -> str:
    context = [markdown_text(line) for line in context_lines(summary)]
    parts = ["# Profiling sweep", f"{markdown_text(headline(summary))}.", *context]
    parts += markdown_tables(tables_of(summary))
    if summary.failures:
        parts.append("## Failures")
    for line, log in failure_texts(summary):
        parts.append(f"- {markdown_text(line)}")
        if log:
            parts.append("\n".join(f"      {printable(entry)}" for entry in log))
    parts.extend(f"Note: {markdown_text(note)}" for note in summary.notes)
    return "\n\n".join(parts) + "\n"


def csv_text(summary: SweepSummary) -> str:
    """One row per experiment, every field of `Experiment`, nothing rounded; unknown is empty.

    Text that a spreadsheet would read as a formula is prefixed with `'`.
    """
    text = io.StringIO()
    fields = [field.name for field in msgspec.structs.fields(Experiment)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([_csv_cell(getattr(row, field)) for field in fields] for row in summary.experiments)
    return text.getvalue()


def json_text(summary: SweepSummary) -> str:
    return printable(msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()) + "\n"


WRITERS: Mapping[str, Callable[[SweepSummary], str]] = MappingProxyType(
    {"json": json_text, "csv": csv_text, "markdown": markdown}
)


def context_lines(summary: SweepSummary) -> list[str]:
    """The models' parameter counts, devices and versions; empty if no experiment recorded them."""
    sizes = {row.model: row.parameters for row in summary.experiments if row.parameters is not None}
    lines = (
        [", ".join(f"{model}: {count:,} parameters" for model, count in sizes.items()) + "."] if sizes else []
    )
    if summary.devices:
        versions = ", ".join(f"{package} {version}" for package, version in summary.versions.items())
        hosts = f" on {', '.join(summary.hosts)}" if len(summary.hosts) > 1 else ""
        lines.append(f"{', '.join(summary.devices)}{hosts}; {versions}.")
    return lines


def _on_column(summary: SweepSummary) -> tuple[str, ...]:
    """A column that names the device, if the sweep has several kinds of it or numbers of GPUs."""
    kinds = {(row.device, row.gpus, row.parallel) for row in summary.trainers}
    return ("on",) if len(kinds) > 1 or any(row.gpus > 1 for row in summary.trainers) else ()


def _on_cell(
    summary: SweepSummary, row: Experiment | TrainerTotals | AgainstBaseline | LargestBatch
) -> tuple[str, ...]:
    """The cell of that column: `2 × NVIDIA H200, ddp`."""
    if not _on_column(summary):
        return ()
    device = row.device or "unknown device"
    return (f"{row.gpus} × {device}, {row.parallel}" if row.gpus > 1 else device,)


_SEVERAL_GPUS = (
    " On several GPUs: tokens/s, MFU and HFU of all, step time of the slowest rank, memory of the fullest; "
    "the batch is that of each rank."
)


def experiments_table(summary: SweepSummary, price_per_gpu_hour: float | None = None) -> Table:
    """Every experiment; with a price, what a million tokens cost on a GPU."""
    several_hosts = len(summary.hosts) > 1
    trainers = trainer_keys(summary)
    columns = [
        *(Column(label=label, is_number=False) for label in ("experiment", "status", *_on_column(summary))),
        *([Column(label="host", is_number=False)] if several_hosts else []),
        Column(label="step", unit="s"),
        Column(label="±", unit="of the median"),
        Column(label="tokens/s"),
        Column(label="peak memory", unit="bytes"),
        Column(label="HFU"),
        Column(label="MFU"),
    ]
    if price_per_gpu_hour is not None:
        columns.append(Column(label="$ per million tokens"))

    def cells(row: Experiment) -> list[Cell]:
        found = [
            *map(plain, (row.name, row.end, *_on_cell(summary, row))),
            *([plain(row.host or UNKNOWN)] if several_hosts else []),
            Cell(text=duration(row.step_time_s), value=row.step_time_s),
            Cell(text=share(row.step_time_error), value=row.step_time_error),
            Cell(text=number(row.tokens_per_s), value=row.tokens_per_s),
            Cell(text=size(row.peak_memory_bytes), value=row.peak_memory_bytes),
            Cell(text=share(row.hfu), value=row.hfu),
            Cell(text=share(row.mfu), value=row.mfu),
        ]
        if price_per_gpu_hour is not None:
            is_on_gpu = row.reserved_bytes is not None
            rate = row.tokens_per_s if is_on_gpu else None
            cost = per_million_tokens(price_per_gpu_hour, rate, gpus=row.gpus)
            found.append(Cell(text=UNKNOWN if cost is None else f"{cost:.4g}", value=cost))
        return found

    return Table(
        title="Experiments",
        sentence=(
            "Median step time with its standard error; MFU is the model's work over time and peak, HFU the "
            f"executed work. Peak memory: {summary.memory_kind or 'not measured'}."
            + (_SEVERAL_GPUS if summary.scaling else "")
        ),
        columns=columns,
        rows=[cells(row) for row in summary.experiments],
        keys=[trainers[row.trainer] for row in summary.experiments],
    )


def trainer_keys(summary: SweepSummary) -> dict[str, int]:
    """The number of each trainer, by which a page shows and hides it."""
    return {
        trainer: key for key, trainer in enumerate(dict.fromkeys(row.trainer for row in summary.trainers))
    }


def _trainers(summary: SweepSummary) -> Table:
    return text_table(
        title="Trainers",
        sentence=(
            "Every experiment is in the rate. Compare the means over points that all trainers finished; "
            "the others cover different points for each trainer."
        ),
        labels=(
            "trainer",
            *_on_column(summary),
            "ok",
            "of",
            "success",
            "mean peak, points all finished",
            "n",
            "mean peak, own finished",
            "n",
        ),
        rows=[
            (
                row.trainer,
                *_on_cell(summary, row),
                str(row.succeeded),
                str(row.experiments),
                share(row.success_rate),
                size(row.mean_peak_memory_common_bytes),
                str(row.common_points),
                size(row.mean_peak_memory_bytes),
                str(row.finished_points),
            )
            for row in summary.trainers
        ],
    )


def _against_baseline(summary: SweepSummary) -> Table:
    return text_table(
        title=f"Against {summary.baseline}",
        sentence="At equal model, batch, sequence, dtype and device: geometric mean, lowest to highest.",
        labels=(
            "trainer",
            *_on_column(summary),
            "points",
            "step time",
            "range",
            "peak memory",
            "range",
            "executed work",
            "range",
        ),
        rows=[
            (
                row.trainer,
                *_on_cell(summary, row),
                str(row.step_time.points if row.step_time else 0),
                *_ratio(row.step_time),
                *_ratio(row.peak_memory),
                *_ratio(row.hardware_flops),
            )
            for row in summary.against_baseline
        ],
    )


def _scaling(summary: SweepSummary) -> Table:
    return text_table(
        title="Scaling",
        sentence=(
            "Tokens/s over n times the tokens/s of the same experiment on one GPU of the same kind, with the "
            "same batch on each GPU."
        ),
        labels=("experiment", "GPUs", "tokens/s", "on one GPU", "efficiency", "peak memory by rank"),
        rows=[
            (
                row.name,
                str(row.gpus),
                number(row.tokens_per_s),
                number(row.on_one_tokens_per_s),
                share(row.efficiency) if row.reason is None else f"{UNKNOWN} ({row.reason})",
                ", ".join(map(size, row.peak_memory_by_rank_bytes)) or UNKNOWN,
            )
            for row in summary.scaling
        ],
    )


def _largest_batches(summary: SweepSummary) -> Table:
    return text_table(
        title="Largest batch",
        sentence="After out-of-memory failures: batches that finished, batches that did not, and what fits.",
        labels=(
            "trainer",
            *_on_column(summary),
            "model",
            "sequence",
            "dtype",
            "finished",
            "out of memory",
            "found to fit",
        ),
        rows=[
            (
                row.trainer,
                *_on_cell(summary, row),
                row.model,
                str(row.seq_len),
                row.dtype,
                _or_unknown(row.largest_finished),
                _or_unknown(row.smallest_out_of_memory),
                row.fits or UNKNOWN,
            )
            for row in summary.largest_batches
        ],
    )


def failure_line(failure: Failure) -> str:
    """A failure with its phase, its message and what fits."""
    details = [f"{failure.name}: {failure.end}"]
    if failure.phase and failure.end != Status.PRUNED.value:
        details.append(f" in phase {failure.phase}")
    if failure.signal:
        details.append(f" ({failure.signal})")
    elif failure.exit_code:
        details.append(f" (exit code {failure.exit_code})")
    details.append(f": {failure.message}")
    if failure.peak_memory_bytes is not None:
        details.append(f"; peak memory {size(failure.peak_memory_bytes)}")
    if failure.fits:
        details.append(f"; {failure.fits}")
    return "".join(details)


def _ratio(ratio: Ratio | None) -> tuple[str, str]:
    if ratio is None:
        return UNKNOWN, UNKNOWN
    return f"{ratio.geometric_mean:.2f}×", f"{ratio.lowest:.2f} to {ratio.highest:.2f}"


_FORMULA = ("=", "+", "-", "@")


def _csv_cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = printable(value)
    is_active = text.lstrip().startswith(_FORMULA) or text.startswith(("\t", "\n"))
    return f"'{text}" if is_active and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _or_unknown(value: object | None) -> str:
    return UNKNOWN if value is None else str(value)
