"""`truemfu devices` and `truemfu peak`: what the hardware could do, on paper and right now."""

from __future__ import annotations

from dataclasses import asdict

import click

from .console import debug_option, json_option, output, percent, print_json, table, working


@click.command(short_help="Datasheet peaks, and the row this machine matches.")
@json_option
@debug_option
def devices(as_json: bool) -> None:
    """The table of dense peaks, and the row this machine matches.

    All figures are dense TFLOP/s (int8: TOP/s) as the datasheet of each chip gives them, never those with
    sparsity; a dash is a rate the chip does not have. `--json` adds the source of every row.
    """
    from ..hardware.detect import override_flops_per_s, spec_of
    from ..hardware.specs import DEVICES, DTYPES

    matched, override = spec_of(), override_flops_per_s()
    if as_json:
        rows = [asdict(spec) for spec in DEVICES]
        this = {"name": _device_name(), "match": None if matched is None else asdict(matched)}
        print_json({"devices": rows, "this_machine": {**this, "override_flops_per_s": override}})
        return
    console = output()
    peaks = table("device", *DTYPES, "GB", "GB/s", title="dense peak, TFLOP/s")
    for spec in DEVICES:
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
    console.print(f"this machine: {_device_name()} matches {row}")
    if override is not None:
        console.print(f"TRUEMFU_PEAK_TFLOPS overrides the table: {override / 1e12:g} TFLOP/s")


@click.command(short_help="The matmul rate this device reaches right now.")
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="fp64, fp32, tf32, fp16, bf16, fp8 or int8; may be given again.  [default: the usual ones]",
)
@click.option("--seconds", type=float, help="Length of each sustained run.  [default: 2; 0.5 on a CPU]")
@json_option
@debug_option
def peak(dtypes: tuple[str, ...], seconds: float | None, as_json: bool) -> None:
    """The matmul rate this device reaches now, in a burst and sustained, beside its datasheet.

    A burst is the silicon before it heats up; sustained is what a long run can hope for, after the power
    limit has had its say.
    """
    from ..hardware.ceiling import measure_ceiling

    with working("multiplying matrices"):
        ceilings = measure_ceiling(dtypes=dtypes or None, seconds=seconds)
    if as_json:
        print_json([asdict(ceiling) for ceiling in ceilings])
        return
    console = output()
    rates = table(
        "dtype",
        "burst",
        "sustained",
        "datasheet",
        "burst of datasheet",
        "m×n×k",
        title=f"{ceilings[0].device_name}: matrix products, TFLOP/s",
    )
    for ceiling in ceilings:
        burst, sheet = ceiling.burst_flops_per_s, ceiling.datasheet_flops_per_s
        rates.add_row(
            ceiling.dtype,
            _tera(burst),
            _tera(ceiling.sustained_flops_per_s),
            _tera(sheet),
            "-" if burst is None or sheet is None else percent(burst, sheet),
            "×".join(map(str, ceiling.shape)) if ceiling.shape else f"skipped: {ceiling.skipped}",
        )
    console.print(rates)


def _tera(rate: float | None) -> str:
    return "-" if rate is None else f"{float(f'{rate / 1e12:.4g}'):g}"


def _device_name() -> str:
    """The current accelerator as torch names it, or `cpu`."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return (
        str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
    )
