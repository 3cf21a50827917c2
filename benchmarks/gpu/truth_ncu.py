"""Nsight Compute as the referee of `hardware_truth.py`: each part's pieces of work in one run under ncu.

A piece is told from the next by a kernel that only spins. ncu takes a tenth of a second or more for a kernel,
so of a training step it looks at those that use the tensor pipe: all others were seen to leave it alone.
Names are matched with their template arguments, where PyTorch's elementwise kernels say what they do.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from truth_cases import LAYERS, PRODUCTS, RUNS, Run, attention, elementwise, wide_run

from truemfu.hardware.nsight.command import find_ncu
from truemfu.hardware.nsight.csv_output import (
    MATRIX_METRIC,
    PIPE_METRIC,
    TENSOR_METRICS,
    KernelLaunch,
    parse_ncu_csv,
)

USES_THE_PIPE = (
    "nvjet|gemm|cudnn_generated|flash|xmma|cutlass|triton|gpu_kernel_impl_nocast|"
    "multi_tensor_apply|SoftMax|Gelu|layer_norm|CatArray|reduce_kernel"
)
HFMA2 = "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum"
_SEPARATOR = "spin_kernel"
_PREDICATE = re.compile(r"^@\S+ +")
_NUMBER = re.compile(r"_\d+$")

Piece = list[KernelLaunch]


def under_ncu(part: str) -> None:
    """The work itself, as `kind number number …`; called in the process that ncu watches."""
    kind, *numbers = part.split()
    for number in map(int, numbers):
        if kind == "products":
            _piece(PRODUCTS[number].make())
        elif kind == "elementwise":
            work = list(elementwise().values())[number]
            work()
            _piece(work)
        elif number == len(RUNS):
            _, step = wide_run().build()
            step()
            _piece(step)
        else:
            _layers(RUNS[number])


def _layers(run: Run) -> None:
    for layers in (1, 2):
        with attention(run.causal):
            model, _, step = run.build(layers)
            step()
            step()
            _piece(step)
        del model, step
        torch.compiler.reset()


def _piece(work: Callable[[], object]) -> None:
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    torch.cuda._sleep(1)
    work()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def pieces_by_ncu(script: str, part: str, kernels: str | None = None) -> list[Piece]:
    """Every piece's launches as ncu measured them, in the order of `under_ncu`; those `kernels` matches."""
    operations = TENSOR_METRICS if kernels is None else TENSOR_METRICS[:1]  # all runs are in bf16
    metrics = (*operations, PIPE_METRIC, MATRIX_METRIC, *([HFMA2] if kernels is None else []))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        call = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        call += ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        call += ["--metrics", ",".join(metrics)]
        if kernels is not None:
            call += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{_SEPARATOR}|{kernels}"]
        done = subprocess.run(
            [*call, sys.executable, script, "--under-ncu", part], capture_output=True, text=True
        )
        if done.returncode:
            print(done.stdout[-2000:], done.stderr[-2000:])
        pieces: list[Piece] = []
        for launch in parse_ncu_csv(log.read_text(errors="replace")):
            if _SEPARATOR in launch.name:
                pieces.append([])
            elif pieces:
                pieces[-1].append(launch)
        return pieces


def instructions_by_ncu(script: str, number: int) -> dict[str, int]:
    """How often each instruction of an elementwise case was executed, by its name in SASS.

    Of those on the tensor pipe the operands are kept, but for the register that is written.
    """
    done = subprocess.run(
        [
            *(find_ncu(), "--csv", "--page", "source", "--section", "SourceCounters"),
            *("--profile-from-start", "off", "--kernel-name-base", "demangled"),
            *("--kernel-name", "regex:elementwise|multi_tensor_apply"),
            *(sys.executable, script, "--under-ncu", f"elementwise {number}"),
        ],
        capture_output=True,
        text=True,
    )
    executed: Counter[str] = Counter()
    columns: list[str] | None = None
    for row in csv.reader(done.stdout.splitlines()):
        if "Source" in row and any("Instructions Executed" in name for name in row):
            columns = row
        elif columns is not None and len(row) == len(columns):
            source = _PREDICATE.sub("", row[columns.index("Source")].strip(" ;"))
            name, _, operands = source.partition(" ")
            if name.startswith("HFMA2"):
                name += f" …,{operands.partition(',')[2]}"
            times = row[next(i for i, title in enumerate(columns) if "Instructions Executed" in title)]
            executed[name] += int(times.replace(",", "") or 0)
    if not executed:
        print(done.stdout[-3000:], done.stderr[-1000:])
    return dict(executed.most_common())


def by_kernel(*weighed: tuple[Piece, int]) -> list[dict[str, Any]]:
    """The launches of some pieces, each piece so many times, added up by kernel: tensor work first."""
    return added_up(
        {
            "kernel": launch.name,
            "launches": times,
            "ops": times * round(sum(launch.metrics.get(metric) or 0 for metric in TENSOR_METRICS)),
            "pipe": times * round(launch.metrics.get(PIPE_METRIC) or 0),
            "matrix": times * round(launch.metrics.get(MATRIX_METRIC) or 0),
            "hfma2": times * round(launch.metrics.get(HFMA2) or 0),
        }
        for piece, times in weighed
        for launch in piece
    )


def added_up(kernels: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a kernel; the numbers of Triton's differ from graph to graph and are left out."""
    sums: dict[str, Counter[str]] = {}
    for kernel in kernels:
        name = kernel["kernel"]
        name = _NUMBER.sub("", name) if name.startswith("triton_") else name
        sums.setdefault(name, Counter()).update({k: v for k, v in kernel.items() if k != "kernel"})
    rows = [{"kernel": name, **values} for name, values in sums.items()]
    return sorted(rows, key=lambda row: (-row["ops"], -row["pipe"]))


def kernels_of(script: str, number: int, kernels: str) -> list[dict[str, Any]]:
    """The kernels of all layers of a run, from those of one and two: every further layer runs the same."""
    pieces = pieces_by_ncu(script, f"runs {number}", kernels)
    if number == len(RUNS):
        return by_kernel((pieces[0], 1))
    one, two = pieces
    return by_kernel((two, LAYERS - 1), (one, -(LAYERS - 2)))
