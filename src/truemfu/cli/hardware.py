"""`truemfu devices` and `truemfu peak`: the hardware's peak, by datasheet and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click
from rich.table import Table

from ..errors import UsageError, closest
from ..hardware.ceiling.ceiling import CeilingRun, MatmulCeiling, measure_ceiling
from ..hardware.detect import device_name, dtype_name, override_flops_per_s, spec_of
from ..hardware.search import search_devices
from ..hardware.specs import DTYPES
from .console import json_option, output, percent, print_json, table, working
from .options import device_keys, list_option

_COLUMNS = (
    "dtype",
    "TFLOP/s",
    "reached",
    "= clock",
    "× pipe",
    "SM MHz",
    "W / limit",
    "m×n×k",
    "limited by",
)
_MEASURED_DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


@click.command(short_help="List datasheet peaks, and the row this machine matches.")
@click.argument("name", nargs=-1, shell_complete=device_keys)
@json_option
def devices(name: tuple[str, ...], as_json: bool) -> None:
    """The table of dense peaks, or the rows with NAME in their name, and the row this machine matches.

    All figures are dense TFLOP/s (int8: TOP/s) from the datasheet of each chip, never with
    sparsity; a dash is a rate the chip does not have. `--json` adds the source of every row.

    \b
    Examples
        truemfu devices
        truemfu devices 4090
        truemfu devices h100 --json
    """
    found = search_devices(" ".join(name))
    matched, override = spec_of(), override_flops_per_s()
    if as_json:
        rows = [asdict(spec) for spec in found]
        this = {"name": device_name(), "match": None if matched is None else asdict(matched)}
        print_json({"devices": rows, "this_machine": {**this, "override_flops_per_s": override}})
        return
    console = output()
    peaks = table("device", *DTYPES, "GB", "GB/s", title="dense peak, TFLOP/s")
    for spec in found:
        rates = (_tera(spec.peak(dtype)) for dtype in DTYPES)
        memory = "-" if spec.memory_bytes is None else f"{spec.memory_bytes / 1e9:.0f}"
        bandwidth = spec.memory_bandwidth_bytes_per_s
        peaks.add_row(
            spec.name,
            *rates,
            memory,
            "-" if bandwidth is None else f"{bandwidth / 1e9:.0f}",
            style="bold" if matched is not None and matched.key == spec.key else None,
        )
    console.print(peaks)
    row = "no row of the table" if matched is None else f"the row {matched.name}"
    console.print(f"this machine: {device_name()} matches {row}")
    if override is not None:
        console.print(f"TRUEMFU_PEAK_TFLOPS overrides the table: {override / 1e12:g} TFLOP/s")


@click.command(short_help="Measure the matmul rate this device reaches right now.")
@list_option(
    "--dtype",
    "dtypes",
    help=f"{', '.join(_MEASURED_DTYPES[:-1])} or {_MEASURED_DTYPES[-1]}; several with commas."
    "  [default: the usual ones]",
)
@click.option("--seconds", type=float, help="Length of each sustained run.  [default: 2; 0.5 on a CPU]")
@json_option
def peak(dtypes: tuple[str, ...] | None, seconds: float | None, as_json: bool) -> int:
    """The matmul rate this device reaches now, in a burst and sustained, compared with its datasheet.

    A burst is the rate before the power limit takes effect; sustained is what a long run can reach. Each is
    the best of a few shapes, and the two may differ. The share of the datasheet's peak is
    the clock's share times the kernel's share (how busy it keeps the tensor pipe). Exit codes: 0 done,
    1 nothing could be measured, 2 wrong usage.

    \b
    Examples
        truemfu peak
        truemfu peak --dtype bf16,fp8 --seconds 10
    """
    for dtype in dtypes or ():
        _check_dtype(dtype)
    with working("identifying the device") as show:
        ceilings = measure_ceiling(dtypes=dtypes or None, seconds=seconds, progress=show)
    code = 0 if any(ceiling.burst or ceiling.sustained for ceiling in ceilings) else 1
    if as_json:
        print_json([ceiling.as_dict() for ceiling in ceilings])
        return code
    console = output()
    datasheet_title = " / datasheet" if any(ceiling.datasheet_flops_per_s for ceiling in ceilings) else ""
    rows = [
        (f"{ceiling.dtype} {kind}", *_cells(run, ceiling))
        for ceiling in ceilings
        for kind, run in (("burst", ceiling.burst), ("sustained", ceiling.sustained))
        if run is not None
    ]
    if rows:
        title = f"{ceilings[0].device_name}: large matrix products, reached{datasheet_title}"
        console.print(_with_values(rows, title))
    for ceiling in ceilings:
        if ceiling.skipped is not None:
            console.print(f"{ceiling.dtype} skipped: {ceiling.skipped}")
    for note in ceilings[0].notes:
        console.print(f"note: {note}")
    held = [ceiling for ceiling in ceilings if ceiling.sustained is not None]
    if held:
        best = next((ceiling for ceiling in held if ceiling.dtype == "bf16"), held[0])
        console.print(
            f"to log MFU against this ({best.dtype}, sustained) as perf/mfu_of_measured_peak, set"
            f" monitoring.measured_peak_tflops: {_tera(best.sustained_flops_per_s)}"
        )
    return code


def _with_values(rows: Sequence[Sequence[str]], title: str) -> Table:
    """The table without columns that have no value: a CPU reports neither clock nor power."""
    known = [column for column in range(len(_COLUMNS)) if any(row[column] != "-" for row in rows)]
    drawn = table(*(_COLUMNS[column] for column in known), title=title)
    for row in rows:
        drawn.add_row(*(row[column] for column in known))
    return drawn


def _check_dtype(dtype: str) -> None:
    """The table of peaks has dtypes without a product in torch: those are not offered here."""
    offered = ", ".join(_MEASURED_DTYPES)
    try:
        name = dtype_name(dtype)
    except UsageError:
        hint = closest(dtype, _MEASURED_DTYPES)
        raise UsageError(f"unknown dtype {dtype!r}; give one of {offered}{hint}") from None
    if name not in _MEASURED_DTYPES:
        raise UsageError(f"torch has no plain {name} matrix product; give one of {offered}")


def _cells(run: CeilingRun, ceiling: MatmulCeiling) -> tuple[str, ...]:
    """A row of the table. A clock that only the driver reports is an upper bound, and marked as such."""
    clock_hz = run.reported_clock_hz if run.clock_hz is None else run.clock_hz
    at_most = "≤" if clock_hz is not None and run.clock_hz is None else ""
    return (
        _pair(_tera(run.flops_per_s), _tera(ceiling.datasheet_flops_per_s)),
        percent(run.of_datasheet),
        percent(run.clock_of_datasheet),
        percent(run.pipe_of_clock),
        _pair(at_most + _whole(clock_hz, 1e6), _whole(ceiling.datasheet_clock_hz, 1e6)),
        _pair(_whole(run.power_w), _whole(run.power_limit_w)),
        "×".join(map(str, run.shape)),
        "-" if run.limited_by is None else run.limited_by.replace("_", " "),
    )


def _pair(reached: str, limit: str) -> str:
    return reached if limit == "-" else f"{reached} / {limit}"


def _whole(value: float | None, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.0f}"


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{float(f'{rate / 1e12:.4g}'):g}"
