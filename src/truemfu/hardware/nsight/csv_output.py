"""Parses Nsight Compute's CSV into kernel launches with what was counted in them.

The output of ncu depends on its version, page and locale. Both layouts are read (a row per kernel with a line
of units below the header, which the raw page gives; a row per metric), decimal and thousands signs of either
kind, scaled units, and n/a: a chip without fp8 has it for every kernel, and a kernel for which all metrics
are n/a is unknown, not zero.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator

import msgspec

TENSOR_METRICS: tuple[str, ...] = tuple(
    f"sm__ops_path_tensor_src_{source}.sum"
    for source in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp8", "fp64", "int8")
)
"""The multiplies and adds of the tensor cores by the dtype of their inputs: exactly 2·4096³ for 4096³."""

PIPE_METRIC = "sm__pipe_tensor_op_hmma_cycles_active.sum"
"""Cycles in which the tensor pipe of a sub-core is busy: what NVML's activity counter counts. Some kernels
without a product are counted too."""

MATRIX_METRIC = "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.sum"
"""Those of them with matrix instructions."""

_TENSOR_METRIC = re.compile(r"sm__ops_path_tensor_src_(\w+)\.sum")
_NCU_LINE = re.compile(r"==(?:PROF|WARNING|ERROR)==")
_OF_THE_COMMAND = "The application "
_COUNT = re.compile(r"sm__(?:ops|inst|pipe|cycles)_\w+\.sum")


class KernelLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch: the metrics of ncu that count something, by name; None is n/a."""

    name: str
    process_id: int | None = None
    compute_capability: str | None = None
    metrics: dict[str, int | None] = msgspec.field(default_factory=dict)

    def tensor_flops(self) -> dict[str, int] | None:
        """Executed tensor operations by the dtype of their inputs; None if no metric has a value.

        ncu has overlapping subsets of them (`src_fp8` is `src_fp8_dst_fp16` and `src_fp8_dst_fp32` together,
        each of them with and without sparsity): if a total is present, its subsets are left out.
        """
        found: dict[str, int] = {}
        for metric, value in self.metrics.items():
            matched = _TENSOR_METRIC.fullmatch(metric)
            if matched and value is not None:
                found[matched[1]] = value
        if not found:
            return None
        by_dtype: dict[str, int] = defaultdict(int)
        for source, value in found.items():
            if not any(source.startswith(f"{whole}_") for whole in found):
                by_dtype[source.partition("_")[0]] += value
        return dict(by_dtype)


def parse_ncu_csv(text: str) -> tuple[KernelLaunch, ...]:
    """The launches in the CSV output of ncu, ignoring other text before, between and after the table.

    Launches are identified by process and ID. Text without a table has none.
    """
    launches: dict[tuple[str, str], dict[str, str]] = {}
    metrics: dict[tuple[str, str], dict[str, int | None]] = defaultdict(dict)
    for row, units in _rows(text):
        launch = (row.get("Process ID", ""), row["ID"])
        launches[launch] = row
        if "Metric Name" in row:
            cells = {row["Metric Name"]: (row.get("Metric Value", ""), row.get("Metric Unit", ""))}
        else:
            cells = {name: (value, units.get(name, "")) for name, value in row.items()}
        for metric, (value, unit) in cells.items():
            if _COUNT.fullmatch(metric):
                metrics[launch][metric] = parse_count(value, unit)
    return tuple(
        KernelLaunch(
            name=row["Kernel Name"],
            process_id=int(launch[0]) if launch[0].isdigit() else None,
            compute_capability=row.get("CC") or None,
            metrics=metrics[launch],
        )
        for launch, row in launches.items()
    )


def errors_in(text: str) -> list[str]:
    """ncu's own error messages, without the one that reports a failure of the command."""
    lines = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    messages = [line.removeprefix("==ERROR==").strip() for line in lines]
    return [words for words in messages if not words.startswith(_OF_THE_COMMAND)]


def is_from_ncu(text: str) -> bool:
    """Whether ncu printed this: it has a table, even an empty one, or a message of ncu."""
    return any(_NCU_LINE.match(line) or _is_header(_cells(line)) for line in text.splitlines())


def _rows(text: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Every row of every table as column → cell, with the units below the header, if any."""
    header: list[str] | None = None
    units: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("==") or "," not in line:
            continue
        cells = _cells(line)
        if _is_header(cells):
            header, units = cells, {}
        elif header is not None and len(cells) == len(header):
            row = dict(zip(header, cells, strict=True))
            if row["ID"] or row["Kernel Name"]:
                yield row, units
            else:
                units = row


def _cells(line: str) -> list[str]:
    """Line by line: a stray quote in what the program printed must not swallow the table."""
    try:
        return next(csv.reader([line]), [])
    except csv.Error:  # a field of megabytes, or a zero byte: not a line of a table
        return []


def _is_header(cells: list[str]) -> bool:
    return "Kernel Name" in cells and "ID" in cells


_SCALES = {"K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALED = re.compile(r"([KkMGTP])(?:inst|ops?|cycles?)\b.*")


def parse_count(text: str, unit: str = "") -> int | None:
    """A count as ncu prints it; None for n/a.

    A count has no decimals, so every separator in it is one of thousands, unless the unit is scaled: then ncu
    prints numbers below a thousand, and the separator is the decimal one.
    """
    scaled = _SCALED.fullmatch(unit)
    plain = re.sub(r"\(!\)|['\s]", "", text)
    plain = plain.replace(",", ".") if scaled else re.sub(r"[.,]", "", plain)
    if not re.fullmatch(r"\d+(\.\d+)?", plain):
        return None
    return round(float(plain) * _SCALES[scaled[1]]) if scaled else int(plain)
