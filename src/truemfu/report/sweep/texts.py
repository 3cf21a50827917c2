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
from ..drawing.documents import json_text, markdown_document, markdown_text
from ..drawing.tables import Field, Table, digits, measures, table_of, words
from .figures import (
    AgainstBaseline,
    ExperimentFigures,
    Failure,
    LargestBatch,
    Ratio,
    Scaling,
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
    failures = ["## Failures"] if summary.failures else []
    for line, log in failure_texts(summary):
        failures.append(f"- {markdown_text(line)}")
        if log:
            failures.append("\n".join(f"      {printable(entry)}" for entry in log))
    lines = [f"{headline(summary)}.", *context_lines(summary)]
    return markdown_document("Profiling sweep", lines, tables_of(summary), summary.notes, more=failures)


def csv_text(summary: SweepSummary) -> str:
    """One row per experiment, every field of `ExperimentFigures`, nothing rounded; unknown is empty.

    Text that a spreadsheet would read as a formula is prefixed with `'`.
    """
    text = io.StringIO()
    fields = [field.name for field in msgspec.structs.fields(ExperimentFigures)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    writer.writerows([_csv_cell(getattr(row, field)) for field in fields] for row in summary.experiments)
    return text.getvalue()


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


def _on(summary: SweepSummary) -> list[Field]:
    """A column that names the device, if the sweep has several kinds of it or numbers of GPUs."""
    kinds = {(row.device, row.gpus, row.parallel) for row in summary.trainers}
    if len(kinds) <= 1 and not any(row.gpus > 1 for row in summary.trainers):
        return []

    def device(row: ExperimentFigures | TrainerTotals | AgainstBaseline | LargestBatch) -> str:
        name = row.device or "unknown device"
        return f"{row.gpus} × {name}, {row.parallel}" if row.gpus > 1 else name

    return [words("on", device)]


_SEVERAL_GPUS = (
    " On several GPUs: tokens/s, MFU and HFU of all together, step time of the slowest rank, memory of the "
    "rank that used most; the batch size is per rank."
)


def experiments_table(summary: SweepSummary, price_per_gpu_hour: float | None = None) -> Table:
    """Every experiment; with a price, what a million tokens cost on a GPU."""
    trainers = trainer_keys(summary)

    def cost(row: ExperimentFigures) -> float | None:
        is_on_gpu = row.reserved_bytes is not None
        rate = row.tokens_per_s if is_on_gpu else None
        return per_million_tokens(price_per_gpu_hour or 0.0, rate, gpus=row.gpus)

    fields = [
        words("experiment", lambda row: row.name),
        words("status", lambda row: row.end),
        *_on(summary),
        *([words("host", lambda row: row.host or UNKNOWN)] if len(summary.hosts) > 1 else []),
        measures("step", duration, lambda row: row.step_time_s, unit="s"),
        measures("±", share, lambda row: row.step_time_error, unit="of the median"),
        measures("tokens/s", number, lambda row: row.tokens_per_s),
        measures("peak memory", size, lambda row: row.peak_memory_bytes, unit="bytes"),
        measures("HFU", share, lambda row: row.hfu),
        measures("MFU", share, lambda row: row.mfu),
    ]
    if price_per_gpu_hour is not None:
        fields.append(measures("$ per million tokens", _dollars, cost))
    return table_of(
        "Experiments",
        summary.experiments,
        fields,
        sentence=(
            "Median step time with its standard error; MFU is model FLOPs over step time and peak, HFU the "
            f"same with executed FLOPs. Peak memory: {summary.memory_kind or 'not measured'}."
            + (_SEVERAL_GPUS if summary.scaling else "")
        ),
        keys=[trainers[row.trainer] for row in summary.experiments],
    )


def _dollars(cost: float | None) -> str:
    return UNKNOWN if cost is None else f"{cost:.4g}"


def trainer_keys(summary: SweepSummary) -> dict[str, int]:
    """The number of each trainer, by which a page shows and hides it."""
    return {
        trainer: key for key, trainer in enumerate(dict.fromkeys(row.trainer for row in summary.trainers))
    }


def _trainers(summary: SweepSummary) -> Table:
    return table_of(
        "Trainers",
        summary.trainers,
        [
            words("trainer", lambda row: row.trainer),
            *_on(summary),
            digits("ok", lambda row: row.succeeded),
            digits("of", lambda row: row.experiments),
            digits("success", lambda row: share(row.success_rate)),
            digits("mean peak, common points", lambda row: size(row.mean_peak_memory_common_bytes)),
            digits("n", lambda row: row.common_points),
            digits("mean peak, all its points", lambda row: size(row.mean_peak_memory_bytes)),
            digits("n", lambda row: row.finished_points),
        ],
        sentence=(
            "The success rate includes every experiment. Compare the means over common points, which all "
            "trainers finished; the other means cover different points for each trainer."
        ),
    )


def _against_baseline(summary: SweepSummary) -> Table:
    return table_of(
        f"Against {summary.baseline}",
        summary.against_baseline,
        [
            words("trainer", lambda row: row.trainer),
            *_on(summary),
            digits("points", lambda row: row.step_time.points if row.step_time else 0),
            *_ratios("step time", lambda row: row.step_time),
            *_ratios("samples/h", lambda row: row.samples_per_s),
            *_ratios("MFU", lambda row: row.mfu),
            *_ratios("peak memory", lambda row: row.peak_memory),
            *_ratios("executed work", lambda row: row.hardware_flops),
        ],
        sentence="At equal model, batch, sequence, dtype and device: geometric mean, lowest to highest.",
    )


def _ratios(label: str, ratio: Callable[[AgainstBaseline], Ratio | None]) -> list[Field]:
    def spread(row: AgainstBaseline) -> str:
        found = ratio(row)
        return UNKNOWN if found is None else f"{found.lowest:.2f} to {found.highest:.2f}"

    def mean(row: AgainstBaseline) -> str:
        found = ratio(row)
        return UNKNOWN if found is None else f"{found.geometric_mean:.2f}×"

    return [digits(label, mean), digits("range", spread)]


def _scaling(summary: SweepSummary) -> Table:
    return table_of(
        "Scaling",
        summary.scaling,
        [
            words("experiment", lambda row: row.name),
            digits("GPUs", lambda row: row.gpus),
            digits("tokens/s", lambda row: number(row.tokens_per_s)),
            digits("on one GPU", lambda row: number(row.on_one_tokens_per_s)),
            digits("efficiency", _efficiency),
            digits(
                "peak memory by rank",
                lambda row: ", ".join(map(size, row.peak_memory_by_rank_bytes)) or UNKNOWN,
            ),
        ],
        sentence=(
            "Tokens/s divided by n times the tokens/s of the same experiment on one GPU of the same kind, "
            "with the same batch on each GPU."
        ),
    )


def _efficiency(row: Scaling) -> str:
    return share(row.efficiency) if row.reason is None else f"{UNKNOWN} ({row.reason})"


def _largest_batches(summary: SweepSummary) -> Table:
    trainers = trainer_keys(summary)
    return table_of(
        "Largest batch",
        summary.largest_batches,
        [
            words("trainer", lambda row: row.trainer),
            *_on(summary),
            digits("model", lambda row: row.model),
            digits("sequence", lambda row: row.seq_len),
            digits("dtype", lambda row: row.dtype),
            digits("finished", lambda row: row.largest_finished or UNKNOWN),
            digits("out of memory", lambda row: row.smallest_out_of_memory or UNKNOWN),
            digits("found to fit", lambda row: row.fits or UNKNOWN),
        ],
        sentence="After out-of-memory failures: batches that finished, batches that did not, and what fits.",
        keys=[trainers[row.trainer] for row in summary.largest_batches],
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
