"""`truemfu audit`: the exact executed tensor operations of one step against our count, by kernel.

    options, command ─► ncu runs it ─► CSV and the process's own count ─► tables, exit code

What the command prints goes to stderr, so that stdout has the tables or the JSON alone.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from .console import debug_option, json_option, output, percent, print_json, short, table

if TYPE_CHECKING:
    from ..crosscheck import CrossCheck
    from ..hardware.nsight import Audit

_COUNT_FROM_START = 1000
_STDERR = 2
_WIDEST_NAME = 90
_EXACT = 0.05


@click.command(
    short_help="Exact executed tensor operations of a step, by kernel (needs Nsight Compute).",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--from-start", is_flag=True, help="Profile every launch, not only those of a marked step.")
@click.option("--launch-skip", type=click.IntRange(min=0), default=0, help="Launches to pass over first.")
@click.option(
    "--launch-count",
    type=click.IntRange(min=1),
    help=f"Stop after so many.  [default: all of the step; {_COUNT_FROM_START} with --from-start]",
)
@click.option("--kernel-name", help="Only kernels of this name, or regex:EXPRESSION.")
@click.option("--metrics", default="", help="Further ncu metrics, with commas; they are in --save alone.")
@click.option("--save", type=click.Path(path_type=Path, dir_okay=False), help="Keep ncu's CSV here.")
@click.option("--read", type=click.Path(path_type=Path), help="Read such a CSV and run nothing.")
@click.option("--top", type=click.IntRange(min=1), default=20, show_default=True, help="Kernels to show.")
@json_option
@debug_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def audit(
    from_start: bool,
    launch_skip: int,
    launch_count: int | None,
    kernel_name: str | None,
    metrics: str,
    save: Path | None,
    read: Path | None,
    top: int,
    as_json: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND under Nsight Compute and add up what its tensor cores really executed, kernel by kernel.

    A TrainingMonitor in the command marks one step and writes its count, and the two are compared. Without
    one, mark a step with torch.cuda.profiler.start() and stop(), or profile from the start.

    \b
    Examples
        truemfu audit -- python train.py
        truemfu audit --from-start --launch-skip 500 --launch-count 200 -- python train.py
        truemfu audit --from-start --kernel-name regex:gemm --json -- python train.py
        truemfu audit --save step.csv -- python train.py
        truemfu audit --read step.csv

    Every kernel is replayed, about 0.2 s each: audit a model of a few layers. Exit codes: 0 done, 1 the
    command failed or nothing was profiled, 2 the call was wrong or ncu is not installed.
    """
    from ..errors import UsageError
    from ..hardware.nsight import audit_of, find_ncu, ncu_command, parse_ncu_csv, read_step_count

    if read is not None:
        if command:
            raise UsageError("--read runs nothing: leave out the command, or leave out --read")
        text = _text(read)
        result = audit_of(parse_ncu_csv(text))
        return _show(result, top, as_json) if result.launches else _nothing(text, 0, True)
    if not command:
        raise UsageError("give the command to audit: truemfu audit -- python train.py")
    if from_start and launch_count is None:
        launch_count = _COUNT_FROM_START
    with tempfile.TemporaryDirectory(prefix="truemfu-audit-") as folder:
        log_file, count_file = save or Path(folder, "ncu.csv"), Path(folder, "count.json")
        call = ncu_command(
            find_ncu(),
            command,
            log_file=log_file,
            from_start=from_start,
            launch_skip=launch_skip,
            launch_count=launch_count,
            kernel_name=kernel_name,
            metrics=[metric for metric in metrics.split(",") if metric],
        )
        code = _run(call, count_file)
        text = _text(log_file) if log_file.is_file() else ""
        result = audit_of(parse_ncu_csv(text), read_step_count(count_file))
    if not result.launches:
        return _nothing(text, code, from_start)
    shown = _show(result, top, as_json)
    # A run that was ended at its last launch has not failed.
    failed = code != 0 and launch_count is None
    if failed:
        click.echo(f"error: the command ended with code {code}; what was profiled is shown", err=True)
    return 1 if failed else shown


def _run(call: list[str], count_file: Path) -> int:
    from ..hardware.nsight import COUNT_VARIABLE

    return subprocess.run(
        call, env={**os.environ, COUNT_VARIABLE: str(count_file)}, stdout=_STDERR
    ).returncode


def _text(path: Path) -> str:
    from ..errors import UsageError

    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _nothing(text: str, code: int, from_start: bool) -> int:
    """No launch was profiled: say why, as far as ncu says it."""
    said = [
        line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")
    ]
    if "ERR_NVGPUCTRPERM" in text:
        why = "this user may not read the GPU's counters: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
    elif said:
        why = f"ncu says: {said[0]}"
    elif code:
        why = f"the command ended with code {code}"
    elif from_start:
        why = "no kernel was launched"
    else:
        why = "no step was marked: use a TrainingMonitor, torch.cuda.profiler.start(), or --from-start"
    click.echo(f"error: nothing was profiled; {why}", err=True)
    return 1


def _show(result: Audit, top: int, as_json: bool) -> int:
    check = _check(result)
    if as_json:
        print_json({**result.as_dict(), "crosscheck": None if check is None else check.as_dict()})
        return 0
    console, total = output(), result.executed_flops
    console.print(_kernel_table(result, top))
    if len(result.kernels) > top:
        rest = _flop(sum(kernel.executed_flops or 0 for kernel in result.kernels[top:]))
        console.print(f"and {len(result.kernels) - top} more kernels with {rest} (--top shows them)")
    if result.counted_by_kind:
        console.print(_kind_table(result))
    dtypes = ", ".join(f"{dtype} {short(done)}" for dtype, done in sorted(result.executed_by_dtype.items()))
    said = "n/a" if total is None else _flop(total)
    console.print(f"executed: {said} in {result.launches} launches{f' ({dtypes})' if dtypes else ''}")
    if result.unmeasured_launches:
        console.print(f"not measured: {result.unmeasured_launches} launches; ncu has no value for them")
    if check is not None:
        ratio = check.executed_flops / check.counted_flops
        console.print(f"counted:  {_flop(check.counted_flops)}, executed over counted {ratio:.4f}")
        if check.notice is not None:
            console.print(check.notice, markup=False, soft_wrap=True)
    return 0


def _kernel_table(result: Audit, top: int) -> Table:
    drawn = table("kernel", "kind", "launches", "FLOP executed", "share", title="executed tensor operations")
    drawn.columns[1].justify = "left"
    for kernel in result.kernels[:top]:
        done = kernel.executed_flops
        drawn.add_row(
            escape(_cut(kernel.name)),
            kernel.kind,
            str(kernel.launches),
            "n/a" if done is None else short(done),
            "-" if done is None or not result.executed_flops else percent(done, result.executed_flops),
        )
    return drawn


def _kind_table(result: Audit) -> Table:
    drawn = table("kind", "FLOP executed", "FLOP counted (model)", "ratio", title="by kind of work")
    for kind in sorted({*result.executed_by_kind, *result.counted_by_kind}):
        done, needed = result.executed_by_kind.get(kind, 0), result.counted_by_kind.get(kind, 0)
        drawn.add_row(kind, short(done), short(needed), f"{done / needed:.4f}" if needed else "-")
    return drawn


def _check(result: Audit) -> CrossCheck | None:
    from ..crosscheck import crosscheck

    count = result.count
    if count is None:
        return None
    attention = result.counted_by_kind.get("attention")
    return crosscheck(
        count.hardware_flops,
        result.executed_flops,
        recompute_flops=count.hardware_flops - count.model_flops,
        attention_flops=attention,
        attention_executed_share=1.0 if count.attention == "causal" else None,
        uncounted=count.uncounted,
        exact=True,
        threshold=_EXACT,
    )


def _cut(name: str) -> str:
    return name if len(name) <= _WIDEST_NAME else f"{name[: _WIDEST_NAME - 1]}…"


def _flop(amount: float) -> str:
    """16.34 TFLOP; below a thousand without a prefix."""
    said = short(amount)
    return f"{said}FLOP" if " " in said else f"{said} FLOP"
