"""The tables of an audit: by kernel, by kind of work, pipe activity, and a verdict in one line."""

from __future__ import annotations

import re

import msgspec
from rich.table import Table

from ..crosscheck import CrossCheck, KnownWork, crosscheck
from ..hardware.nsight.audit import Audit, KernelWork
from ..text import on_one_line
from .console import output, percent, print_json, short, table

_WIDEST_NAME, _NARROWEST_NAME = 64, 16
_WRAPPERS = re.compile(r"^at::(?:\w+_)?elementwise_kernel<(?:\d+, )*(?:void at::gpu_kernel_impl\w*<)?")
_REPEATED = re.compile(r"(\b[\w:]+, )\1+")
_ALL_KNOWN, _SOME_UNKNOWN = 0.01, 0.05
_CYCLES = "cycles in which the tensor pipe of a sub-core is active; other cycles: active without matrix work"
_EXPECTED = "expected: the count with recomputation, tile padding and without masked blocks that kernels skip"
_AUDIT_KEY = "monitoring.performance_monitoring.hybrid_mode.audit"


def show_audit(result: Audit, top: int, as_json: bool, *, is_a_step: bool = True) -> int:
    """Print it; `is_a_step`: it covers exactly the launches of one step."""
    check = _check(result) if is_a_step else None
    verdict = _verdict(result, check)
    if as_json:
        comparison = {"crosscheck": None if check is None else check.as_dict(), "verdict": verdict}
        print_json({**msgspec.to_builtins(result), **comparison, "is_a_step": is_a_step})
        return 0
    console = output()
    console.print(_kernel_table(result, top))
    console.print(_CYCLES, style="dim")
    if more := result.kernels[top:]:
        rest = _flop(sum(kernel.executed_flops or 0 for kernel in more))
        kernels, them = ("kernels", "them") if len(more) > 1 else ("kernel", "it")
        console.print(f"and {len(more)} more {kernels} with {rest} (--top shows {them})")
    if result.counted_by_kind and is_a_step:
        console.print(_kind_table(result))
        console.print(_EXPECTED, style="dim")
    dtypes = ", ".join(f"{dtype} {short(done)}" for dtype, done in sorted(result.executed_by_dtype.items()))
    text = "n/a" if result.executed_flops is None else _flop(result.executed_flops)
    console.print(f"executed: {text} in {result.launches} launches{f' ({dtypes})' if dtypes else ''}")
    if result.unmeasured_launches:
        console.print(f"not measured: {result.unmeasured_launches} launches; ncu has no value for them")
    for kernel in result.below_usual_rate:
        console.print(_slow(kernel), soft_wrap=True)
    if verdict is not None:
        console.print(verdict, soft_wrap=True)
    if (activity := _activity(result, is_a_step)) is not None:
        console.print(activity, soft_wrap=True)
    return 0


def _kernel_table(result: Audit, top: int) -> Table:
    """The table by kernel; names are shortened on a narrow terminal."""
    drawn = table(
        "kernel",
        "kind",
        "launches",
        "FLOP executed",
        "share",
        "FLOP/cycle",
        "other cycles",
        title="executed tensor operations",
        texts=["kind"],
    )
    drawn.columns[0].min_width = _NARROWEST_NAME
    for kernel in result.kernels[:top]:
        done, rate, other = kernel.executed_flops, kernel.flops_per_cycle, kernel.non_matrix_cycles
        drawn.add_row(
            _short_name(kernel.name),
            kernel.kind,
            str(kernel.launches),
            "n/a" if done is None else short(done),
            "-" if not done or not result.executed_flops else percent(done, result.executed_flops),
            "-" if rate is None else f"{rate:,.4g}" if rate < 1000 else f"{rate:,.0f}",
            "n/a" if other is None else short(other),
        )
    return drawn


def _kind_table(result: Audit) -> Table:
    columns = ("kind", "executed", "counted", "executed/counted", "expected", "executed/expected")
    drawn = table(*columns, title="by kind of work, FLOP")
    for kind in sorted({*result.executed_by_kind, *result.counted_by_kind}):
        done, needed = result.executed_by_kind.get(kind, 0), result.counted_by_kind.get(kind, 0)
        expected = result.expected_by_kind.get(kind)
        drawn.add_row(
            kind,
            short(done),
            short(needed),
            f"{done / needed:.4f}" if needed else "-",
            "n/a" if expected is None else short(expected),
            f"{done / expected:.4f}" if expected else "-",
        )
    return drawn


def _check(result: Audit) -> CrossCheck | None:
    """The count compared with the tensor cores; with a tight threshold if all effects are known."""
    count = result.count
    if count is None or count.hardware_flops is None:
        return None
    attention, blocked = count.attention_flops, count.attention_blocked_flops
    share = 1.0 if count.attention == "causal" and attention is None else None
    if attention and blocked is not None:
        share = blocked / attention
    others = count.hardware_flops - (attention or 0)
    has_unknown_tiles = bool(count.few_channel_flops or count.grouped_flops)
    is_known = (
        attention is not None
        and result.unmatched_flops == 0
        and not count.uncounted
        and not has_unknown_tiles
    )
    work = KnownWork(
        attention_flops=result.counted_by_kind.get("attention") if attention is None else attention,
        attention_executed_share=share,
        tile_factor=1 + (result.tile_flops or 0) / others if others else None,
        few_channel_flops=count.few_channel_flops,
        grouped_flops=count.grouped_flops,
        grouped_padded_flops=count.grouped_padded_flops,
        uncounted=count.uncounted,
    )
    threshold = _ALL_KNOWN if is_known else _SOME_UNKNOWN
    return crosscheck(count.hardware_flops, result.executed_flops, work, exact=True, threshold=threshold)


def _verdict(result: Audit, check: CrossCheck | None) -> str | None:
    count = result.count
    if check is None:
        return None if count is None or count.reason is None else f"not compared: {count.reason}"
    if not check.agrees:
        known = [cause.sentence for cause in check.causes if cause.key != "unknown"]
        why = f"likely: {'; '.join(known)}" if known else "cause unknown: the tables above show it by kernel"
        return (
            f"differs: the GPU executed {check.ratio:.4f} times what the count expects "
            f"({_flop(check.executed_flops)} against {_flop(check.expected_flops)}); {why}"
        )
    effects = []
    if result.tile_flops:
        effects.append(f"tile padding ({_flop(result.tile_flops)} more)")
    if count is not None and count.attention_flops != count.attention_blocked_flops:
        share = (count.attention_blocked_flops or 0) / (count.attention_flops or 1)
        effects.append(f"skipped blocks of the mask ({share:.4f} of the counted attention is left)")
    after = f", after {' and '.join(effects)}" if effects else ""
    if result.unmatched_flops:
        after += f"; matrix products of unknown shape: {_flop(result.unmatched_flops)}"
    return (
        f"agrees: the GPU executed {check.ratio:.4f} times what the count expects"
        f"{after}; counted with recomputation {_flop(check.counted_flops)}"
    )


def _slow(kernel: KernelWork) -> str:
    rate, usual = kernel.flops_per_cycle, kernel.usual_flops_per_cycle
    assert rate is not None
    assert usual is not None
    return (
        f"below the usual rate: {_short_name(kernel.name)} executes {rate:,.0f} FLOP per active cycle, "
        f"other kernels in {' and '.join(kernel.dtypes)} {usual:,.0f}: activity counters read "
        f"{usual / rate:.2f} times its work"
    )


def _activity(result: Audit, is_a_step: bool) -> str | None:
    """How much activity counters overstate these launches, and how to correct for it."""
    active, matrix, ratio = result.pipe_cycles, result.matrix_cycles, result.executed_over_activity
    if active is None or matrix is None:
        return None
    text = f"no matrix work: {short(active - matrix)} of {short(active)} active cycles of the tensor pipe"
    if ratio is None:
        return text
    text = (
        f"executed over activity: {ratio:.4f} (activity counters read {1 / ratio:.4f} times as much); {text}"
    )
    return (
        f"{text}; to correct for this, save the output of --json and set `{_AUDIT_KEY}` to that file"
        if is_a_step
        else text
    )


def _short_name(name: str) -> str:
    """The distinctive part of a kernel's name: for torch's elementwise kernels the functor."""
    name = _WRAPPERS.sub("at::…<", name.replace("<unnamed>::", "").removeprefix("void "))
    name = on_one_line(_REPEATED.sub(r"\1", name))
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def _flop(amount: float) -> str:
    """16.34 TFLOP; below a thousand without a prefix."""
    text = short(amount)
    return f"{text}FLOP" if " " in text else f"{text} FLOP"
