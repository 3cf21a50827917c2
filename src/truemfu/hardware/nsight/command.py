"""Nsight Compute: its location, its command line, and the step count of an audited process.

    command ─► ncu_command ─► ncu runs it ─► report ─► table_command ─► CSV (`csv_output`) ─┐
          the process marks a step, writes its StepCount ───────────────────────────────────┴─► `audit`

Collecting replays every kernel, 0.2 to 0.4 s each, so audit a model of a few layers. Clocks and
caches are left alone: operations do not depend on them.

The file that an audited process writes, at the path in `COUNT_VARIABLE`, is `StepCount` as JSON. The process
marks the counted step with cudaProfilerStart and cudaProfilerStop (`torch.cuda.profiler`), so that ncu sees
the kernels of that step and no others.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...errors import UsageError
from ...records import read_record
from .csv_output import MATRIX_METRIC, PIPE_METRIC, TENSOR_METRICS

COUNT_VARIABLE = "TRUEMFU_AUDIT"
"""The path of the file to which an audited process writes the count of its marked step."""

METRICS = (*TENSOR_METRICS, PIPE_METRIC, MATRIX_METRIC)
"""The metrics of an audit; n/a on chips without them."""

_GET_NCU = (
    "Nsight Compute (ncu) is not installed or not on the PATH: it comes with the CUDA toolkit, or alone from "
    "https://developer.nvidia.com/nsight-compute"
)
_INSTALL_PATTERNS = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")


def find_ncu() -> str:
    """The path of ncu: on the PATH, else in the default folders of its installers (the newest)."""
    found = shutil.which("ncu")
    if found is None:
        candidates = [
            path for pattern in _INSTALL_PATTERNS for path in sorted(Path("/").glob(pattern.lstrip("/")))
        ]
        found = str(candidates[-1]) if candidates else None
    if found is None:
        raise UsageError(_GET_NCU)
    return found


def ncu_command(
    ncu: str,
    command: Sequence[str],
    *,
    report: Path,
    log_file: Path,
    from_start: bool = False,
    launch_skip: int = 0,
    launch_count: int | None = None,
    kernel_name: str | None = None,
    metrics: Sequence[str] = (),
) -> list[str]:
    """The call that runs `command` under ncu and leaves its metrics in `report` (a name ending in .ncu-rep).

    ncu's own messages go to `log_file`, including a line for each profiled kernel, which would be missing
    with CSV output in the same call. Without `from_start` only launches between cudaProfilerStart and Stop
    are profiled. A `launch_count` ends the run once it is reached.
    """
    call = [ncu, "--export", str(report), "--force-overwrite", "--log-file", str(log_file)]
    call += ["--metrics", ",".join((*METRICS, *metrics)), "--target-processes", "all"]
    call += ["--clock-control", "none", "--cache-control", "none"]
    call += ["--profile-from-start", "on" if from_start else "off"]
    if launch_skip:
        call += ["--launch-skip", str(launch_skip)]
    if launch_count is not None:
        call += ["--launch-count", str(launch_count), "--kill", "yes"]
    if kernel_name is not None:
        call += ["--kernel-name", kernel_name]
    return [*call, *command]


def table_command(ncu: str, report: Path) -> list[str]:
    """The call that prints a report as CSV."""
    return [ncu, "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"]


class ProductWork(msgspec.Struct, frozen=True, kw_only=True):
    """All products of m×k by k×n of a step: 2·m·n·k FLOP each, `flops` together."""

    m: int
    n: int
    k: int
    flops: int


class ExecutedParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a step that GPUs execute differently.

    Plain products by their shapes; fused attention, whose kernels execute `attention_blocked_flops` when they
    skip whole blocks of the mask; convolutions with fewer than eight input channels; grouped products, at
    most `grouped_padded_flops` with the rows of each group rounded up to tiles.
    """

    products: tuple[ProductWork, ...] = ()
    attention_flops: int | None = None
    attention_blocked_flops: int | None = None
    few_channel_flops: int | None = None
    grouped_flops: int | None = None
    grouped_padded_flops: int | None = None


class StepCount(ExecutedParts, frozen=True, kw_only=True):
    """The count of a process's marked step: needed FLOPs, and executed FLOPs including recomputation.

    `model_flops_by_operator` splits `model_flops`; `attention` is the convention. If no step was marked or it
    could not be counted, `reason` states why, and numbers are None. Written by the process with id
    `process_id`; next to a saved table the audit adds `is_whole_step`: whether all launches of the marked
    step were to be profiled and no others.
    """

    model_flops: int | None = None
    hardware_flops: int | None = None
    process_id: int | None = None
    step: int | None = None
    attention: str | None = None
    method: str | None = None
    model_flops_by_operator: dict[str, int] = msgspec.field(default_factory=dict)
    uncounted: dict[str, int] = msgspec.field(default_factory=dict)
    reason: str | None = None
    is_whole_step: bool | None = None


def read_step_count(path: Path) -> StepCount | None:
    """The count the audited process wrote; None if it wrote nothing."""
    return read_record(path, StepCount) if os.path.lexists(path) else None
