"""MFU, days and cost in `truemfu count`: from a device's peak and a rate, without a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..hardware.detect import dtype_name, find_spec
from ..hardware.specs import DTYPES
from ..text import percent_text
from ..training_plan import TrainingPlan
from ..utilization import datasheet_flops_per_s, ideal_flops_per_s
from .console import SafeConsole, short, table
from .options import device_of_table

if TYPE_CHECKING:
    from ..flops import FlopCount, Target

FP8_NOTE = "note: fp8 needs the same FLOPs as bf16, so they were counted in bf16; the peak is the fp8 peak."

_ASSUMED = (
    "Assumed: every step is like this one{length}, and no time is lost to restarts, evaluations or "
    "checkpoints."
)
_ABOVE_PEAK = (
    "note: an MFU above 100 % is impossible: check the device, the dtype, and --gpus; --tokens-per-second is "
    "the rate of all GPUs together."
)
_NO_HFU = "unknown: only a run shows what its kernels execute"
_NO_PEAK = "unknown: no peak is known; give --device, or set TRUEMFU_PEAK_TFLOPS"
_NO_RATE = "unknown: give --tokens-per-second or --mfu"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a plan, as given."""

    device: str | None
    gpus: int
    tokens_per_second: float | None
    mfu: float | None
    tokens: float | None
    price: float | None


def wanted_plan(given: PlanOptions) -> PlanOptions | None:
    """The plan to make, or None if no option asks for one. A device's name is resolved to a row's key."""
    if given.gpus < 1:
        raise UsageError(f"--gpus must be at least 1; got {given.gpus}")
    if given.tokens_per_second is not None and given.mfu is not None:
        raise UsageError(
            "--tokens-per-second gives the MFU: leave out --mfu, or leave out --tokens-per-second"
        )
    if given.device is not None:
        named = given.device if _is_of_torch(given.device) else device_of_table(given.device)
        return replace(given, device=named)
    if given.tokens_per_second is None and given.mfu is None and given.tokens is None:
        if given.price is not None or given.gpus > 1:
            raise UsageError("--gpus and --price need one of --tokens, --mfu or --tokens-per-second")
        return None
    return given


def dtype_is_fp8(name: str) -> bool:
    """Whether this is a name of fp8; any other name, known or not, is not decided here."""
    try:
        return dtype_name(name) == "fp8"
    except UsageError:
        return False


def plan_of(wanted: PlanOptions, target: Target, flops: FlopCount, peak_dtype: str | None) -> TrainingPlan:
    """The plan for a counted step; `peak_dtype` overrides the dtypes of its products."""
    if target.samples is None or target.length is None:
        raise UsageError(
            f"{target.name} has no tokens in its batch ({target.shapes}), so MFU, days and cost are "
            "unknown: leave out --device, --tokens-per-second, --mfu and --tokens"
        )
    by_dtype = flops.by_dtype if peak_dtype is None else {peak_dtype: flops.model_flops}
    peak_of = (
        ideal_flops_per_s if wanted.device is None or _is_of_torch(wanted.device) else datasheet_flops_per_s
    )
    peak, source = peak_of(by_dtype, wanted.device)  # a device that is named is not this machine's
    return TrainingPlan(
        flops_per_token=flops.model_flops / (target.samples * target.length),
        gpus=wanted.gpus,
        peak_flops_per_s=peak,
        peak_source=source,
        tokens_per_second=wanted.tokens_per_second,
        mfu=wanted.mfu,
        tokens=wanted.tokens,
        price_per_gpu_hour=wanted.price,
    ).completed()


def why_no_peak(wanted: PlanOptions, by_dtype: Iterable[str]) -> str:
    """Why there is no peak: no device, or one without a rate in the dtypes of the step."""
    spec = None if wanted.device is None else find_spec(wanted.device)
    if spec is None:
        return _NO_PEAK
    has = [dtype for dtype in DTYPES if spec.peak(dtype) is not None]
    lacks = [dtype for dtype in by_dtype if dtype not in has]
    return (
        f"unknown: no {' or '.join(lacks)} peak is known for {spec.name}; it has {', '.join(has)} (--dtype)"
    )


def show_plan(console: SafeConsole, plan: TrainingPlan, length: int | None, no_peak: str) -> None:
    """Print it; `no_peak` is the reason if its peak is unknown."""
    drawn = table("without a run", "", texts=[""])
    for label, text in _rows(plan, no_peak):
        drawn.add_row(label, text)
    console.print("", drawn, "")
    if plan.mfu is not None and plan.mfu > 1:
        console.print(_ABOVE_PEAK)
    console.print(_ASSUMED.format(length="" if length is None else f", of sequences of {length:,} tokens"))


def _rows(plan: TrainingPlan, no_peak: str) -> list[tuple[str, str]]:
    peak, rate, gpus = plan.peak_flops_per_s, plan.tokens_per_second, plan.gpus
    no_rate = no_peak if peak is None and plan.mfu is not None else _NO_RATE
    rows = [
        (
            "peak of the GPU" if gpus == 1 else f"peak of each of {gpus:,} GPUs",
            no_peak if peak is None else f"{short(peak)}FLOP/s, {plan.peak_source}",
        ),
        ("FLOPs per token", f"{short(plan.flops_per_token)}FLOP"),
        ("tokens/s" if gpus == 1 else "tokens/s of all GPUs", no_rate if rate is None else f"{rate:,.0f}"),
        (
            "MFU",
            percent_text(plan.mfu) if plan.mfu is not None else no_peak if rate is not None else _NO_RATE,
        ),
        ("HFU", _NO_HFU),
    ]
    if plan.tokens is not None:
        rows += [
            ("tokens", short(plan.tokens)),
            ("FLOPs of all tokens", f"{plan.total_flops:.4g}"),
            ("days", no_rate if plan.days is None else f"{plan.days:,.4g}"),
            ("GPU hours", no_rate if plan.gpu_hours is None else f"{plan.gpu_hours:,.0f}"),
            ("cost", _cost(plan.cost, no_rate, plan)),
        ]
    if plan.price_per_gpu_hour is not None:
        rows.append(("cost of a million tokens", _cost(plan.cost_per_million_tokens, no_rate, plan)))
    return rows


def _cost(cost: float | None, no_rate: str, plan: TrainingPlan) -> str:
    if plan.price_per_gpu_hour is None:
        return "unknown: give --price, the price of a GPU hour"
    if cost is None:
        return no_rate
    amount = f"{cost:,.0f}" if cost >= 1000 else f"{cost:,.4g}"
    return f"{amount} at {plan.price_per_gpu_hour:g} per GPU hour"


def _is_of_torch(device: str) -> bool:
    return re.fullmatch(r"(cuda|xpu|hpu|cpu)(:\d+)?", device) is not None
