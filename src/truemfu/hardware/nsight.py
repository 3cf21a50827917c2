"""Nsight Compute as the referee: the exact tensor operations of every kernel, read from its CSV output.

    command ─► ncu_command ─► ncu runs it, writes CSV ─► parse_ncu_csv ─► KernelLaunch … ─► audit_of ─► Audit
                                    the process itself writes its count ─► read_step_count ─┘

`sm__ops_path_tensor_src_<dtype>….sum` counts the multiplies and adds of the tensor cores: for a 4096³ product
it is exactly 2·4096³. Collecting it replays every kernel, about 0.2 s each, so a step of a few layers is
what to audit. Clocks and caches are left alone: operations do not depend on them.

What ncu prints depends on its version, page and locale. Both layouts are read (a row per metric; a row per
kernel with a line of units below the header), decimal and thousands signs of either kind, scaled units, and
n/a: a chip without fp8 says so for every kernel, and a kernel for which all metrics are n/a is unknown,
not zero.

The file that an audited process writes, at the path in `COUNT_VARIABLE`, is `StepCount` as JSON. The process
marks the counted step with cudaProfilerStart and cudaProfilerStop (`torch.cuda.profiler`), so that ncu sees
the kernels of that step and no others.
"""

from __future__ import annotations

import csv
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import RecordError, UsageError, one_line

COUNT_VARIABLE = "TRUEMFU_AUDIT"
"""Names the file into which an audited process writes the count of the step it marked."""

TENSOR_METRICS: tuple[str, ...] = tuple(
    f"sm__ops_path_tensor_src_{source}.sum"
    for source in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp8", "fp64", "int8")
)

_GET_NCU = (
    "Nsight Compute (ncu) is not installed or not on the PATH: it comes with the CUDA toolkit, or alone from "
    "https://developer.nvidia.com/nsight-compute"
)
_USUAL_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


def find_ncu() -> str:
    """The path of ncu: on the PATH, else where its installers put it (the newest)."""
    found = shutil.which("ncu")
    if found is None:
        places = [path for pattern in _USUAL_PLACES for path in sorted(Path("/").glob(pattern.lstrip("/")))]
        found = str(places[-1]) if places else None
    if found is None:
        raise UsageError(_GET_NCU)
    return found


def ncu_command(
    ncu: str,
    command: Sequence[str],
    *,
    log_file: Path,
    from_start: bool = False,
    launch_skip: int = 0,
    launch_count: int | None = None,
    kernel_name: str | None = None,
    metrics: Sequence[str] = (),
) -> list[str]:
    """The call that runs `command` under ncu and leaves its tensor operations in `log_file` as CSV.

    Without `from_start` only launches between cudaProfilerStart and Stop are profiled. A `launch_count` ends
    the run once it is reached.
    """
    call = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log_file)]
    call += ["--metrics", ",".join((*TENSOR_METRICS, *metrics)), "--target-processes", "all"]
    call += ["--clock-control", "none", "--cache-control", "none"]
    call += ["--profile-from-start", "on" if from_start else "off"]
    if launch_skip:
        call += ["--launch-skip", str(launch_skip)]
    if launch_count is not None:
        call += ["--launch-count", str(launch_count), "--kill", "yes"]
    if kernel_name is not None:
        call += ["--kernel-name", kernel_name]
    return [*call, *command]


class KernelLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """One launch as ncu saw it: every metric by its name, in base units; None is n/a."""

    name: str
    process_id: int | None = None
    metrics: dict[str, float | None] = msgspec.field(default_factory=dict)

    def tensor_flops(self) -> dict[str, int] | None:
        """Executed tensor operations by the dtype of their inputs; None where no metric has a value.

        ncu knows them in overlapping cuts (`src_fp8` is `src_fp8_dst_fp16` and `src_fp8_dst_fp32` together,
        each of them with and without sparsity): where a total is there, its cuts are left out.
        """
        found: dict[str, int] = {}
        for metric, value in self.metrics.items():
            matched = _TENSOR_METRIC.fullmatch(metric)
            if matched and value is not None:
                found[matched[1]] = round(value)
        if not found:
            return None
        by_dtype: dict[str, int] = defaultdict(int)
        for source, value in found.items():
            if not any(source.startswith(f"{whole}_") for whole in found):
                by_dtype[source.partition("_")[0]] += value
        return dict(by_dtype)


_TENSOR_METRIC = re.compile(r"sm__ops_path_tensor_src_(\w+)\.sum")


def parse_ncu_csv(text: str) -> tuple[KernelLaunch, ...]:
    """The launches in the CSV output of ncu, whatever stands before, between and after the table.

    Launches are told apart by process and ID. Text without a table has none.
    """
    names: dict[tuple[str, str], str] = {}
    metrics: dict[tuple[str, str], dict[str, float | None]] = defaultdict(dict)
    for row, units in _rows(text):
        launch = (row.get("Process ID", ""), row["ID"])
        names[launch] = row["Kernel Name"]
        if "Metric Name" in row:
            cells = {row["Metric Name"]: (row.get("Metric Value", ""), row.get("Metric Unit", ""))}
        else:
            cells = {name: (value, units.get(name, "")) for name, value in row.items() if "__" in name}
        for metric, (value, unit) in cells.items():
            whole = _TENSOR_METRIC.fullmatch(metric) is not None
            metrics[launch][metric] = parse_value(value, unit, whole=whole)
    return tuple(
        KernelLaunch(
            name=name, process_id=int(launch[0]) if launch[0].isdigit() else None, metrics=metrics[launch]
        )
        for launch, name in names.items()
    )


def _rows(text: str) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """Every row of every table as column → cell, with the units below the header where there are some."""
    header: list[str] | None = None
    units: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("==") or "," not in line:
            continue
        # Line by line: a stray quote in what the program printed must not swallow the table.
        cells = next(csv.reader([line]))
        if "Kernel Name" in cells and "ID" in cells:
            header, units = cells, {}
        elif header is not None and len(cells) == len(header):
            row = dict(zip(header, cells, strict=True))
            if row["ID"] or row["Kernel Name"]:
                yield row, units
            else:
                units = row


_SCALES = {"K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SCALED = re.compile(r"([KkMGTP])(?:inst|ops?|cycles?)\b.*")
_GROUPS = re.compile(r"\d{1,3}(?:([.,'\s])\d{3})(?:\1\d{3})*")


def parse_value(text: str, unit: str = "", *, whole: bool = False) -> float | None:
    """A number as ncu prints it, in the base unit; None for n/a, nan and what is no amount.

    One sign with three digits behind it may be a decimal or a thousands sign. A count (`whole`) has no
    decimals, so there it is thousands, unless the unit is scaled: then ncu keeps numbers below a thousand.
    Elsewhere a comma is thousands, but for percents, and a point is decimal. With two signs the last is the
    decimal one.
    """
    scaled = _SCALED.fullmatch(unit)
    plain = text.replace("(!)", "").strip()
    groups = _GROUPS.fullmatch(plain)
    if groups and not scaled and (whole or (groups[1] != "." and unit != "%")):
        plain = re.sub(r"\D", "", plain)
    plain = re.sub(r"['\s]", "", plain)
    dot, comma = plain.rfind("."), plain.rfind(",")
    if dot >= 0 and comma >= 0:
        thousands, decimal = (",", ".") if dot > comma else (".", ",")
        plain = plain.replace(thousands, "").replace(decimal, ".")
    elif plain.count(",") > 1 or plain.count(".") > 1:
        plain = plain.replace(",", "").replace(".", "")
    else:
        plain = plain.replace(",", ".")
    try:
        value = float(plain) * (_SCALES[scaled[1]] if scaled else 1)
    except ValueError:
        return None
    return value if math.isfinite(value) and value >= 0 else None


class StepCount(msgspec.Struct, frozen=True, kw_only=True):
    """Our count of the step a process marked: what it needs and what it executes, recomputation included.

    `model_flops_by_operator` splits `model_flops`; `attention` is the convention. Written by the process
    whose number is `process_id`, of one rank.
    """

    model_flops: int
    hardware_flops: int
    process_id: int | None = None
    attention: str | None = None
    method: str | None = None
    model_flops_by_operator: dict[str, int] = msgspec.field(default_factory=dict)
    uncounted: dict[str, int] = msgspec.field(default_factory=dict)


def read_step_count(path: Path) -> StepCount | None:
    """What the audited process wrote; None where it wrote nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=StepCount)
    except msgspec.MsgspecError as error:
        raise RecordError(f"{path} holds no count of a step: {one_line(error)}") from None


class KernelWork(msgspec.Struct, frozen=True, kw_only=True):
    """All launches of one kernel: executed tensor operations, None where ncu could not tell them."""

    name: str
    kind: str
    launches: int
    executed_flops: int | None


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    """What was executed, by kernel (the most first), and what had been counted, where that is known.

    `executed_by_kind` and `counted_by_kind` have the keys attention, convolution, matmul and other; the
    counted are the model's, so recomputation is in the first alone. `unmeasured_launches` had no value.
    """

    kernels: tuple[KernelWork, ...]
    launches: int
    unmeasured_launches: int
    executed_flops: int | None
    executed_by_dtype: dict[str, int]
    executed_by_kind: dict[str, int]
    counted_by_kind: dict[str, int]
    count: StepCount | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


def audit_of(launches: Sequence[KernelLaunch], count: StepCount | None = None) -> Audit:
    """Add launches up by kernel; those of the counting process alone, where it told its number."""
    own = count.process_id if count is not None else None
    if own is not None and any(launch.process_id == own for launch in launches):
        launches = [launch for launch in launches if launch.process_id == own]
    by_dtype: dict[str, int] = defaultdict(int)
    by_kind: dict[str, int] = defaultdict(int)
    by_name: dict[str, list[int | None]] = defaultdict(list)
    for launch in launches:
        flops = launch.tensor_flops()
        by_name[launch.name].append(None if flops is None else sum(flops.values()))
        for dtype, amount in (flops or {}).items():
            by_dtype[dtype] += amount
            by_kind[kind_of(launch.name)] += amount
    kernels = [
        KernelWork(name=name, kind=kind_of(name), launches=len(values), executed_flops=_sum(values))
        for name, values in by_name.items()
    ]
    counted: dict[str, int] = defaultdict(int)
    for operator, needed in (count.model_flops_by_operator if count is not None else {}).items():
        counted[kind_of(operator, otherwise="matmul")] += needed
    return Audit(
        kernels=tuple(sorted(kernels, key=lambda kernel: (-(kernel.executed_flops or 0), kernel.name))),
        launches=len(launches),
        unmeasured_launches=sum(value is None for values in by_name.values() for value in values),
        executed_flops=_sum([value for values in by_name.values() for value in values]),
        executed_by_dtype={dtype: amount for dtype, amount in by_dtype.items() if amount},
        executed_by_kind={kind: amount for kind, amount in by_kind.items() if amount},
        counted_by_kind=dict(counted),
        count=count,
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


_KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE),
    "convolution": re.compile(r"conv|dgrad|wgrad|fprop", re.IGNORECASE),
    "matmul": re.compile(
        r"gemm|nvjet|matmul|cublas|cutlass|gemv|xmma|(?<![a-z])b?mm(?![a-z])", re.IGNORECASE
    ),
}


def kind_of(name: str, otherwise: str = "other") -> str:
    """What a kernel or an operator does, as far as its name tells."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), otherwise)
