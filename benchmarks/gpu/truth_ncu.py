"""Nsight Compute as the referee of `hardware_truth.py`: each part's pieces of work in one run under ncu.

A piece is told from the next by a kernel that only spins. ncu takes a tenth of a second or more for a kernel,
so of a training step it looks at those that use the tensor pipe: all others were seen to leave it alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from truth_cases import LAYERS, PRODUCTS, RUNS, attention, elementwise, wide_run

from truemfu.hardware.nsight import find_ncu
from truemfu.hardware.nsight_csv import KernelLaunch, parse_ncu_csv

OPS = tuple(
    f"sm__ops_path_tensor_src_{source}.sum"
    for source in ("bf16_dst_fp32", "fp16", "tf32_dst_fp32", "fp8", "fp64")
)
_USES_THE_PIPE = (
    "regex:spin_kernel|nvjet|gemm|cudnn_generated|flash|xmma|cutlass|triton|gpu_kernel_impl_nocast|"
    "multi_tensor_apply|SoftMax|Gelu|layer_norm|CatArray|reduce_kernel"
)
PIPE = "sm__pipe_tensor_op_hmma_cycles_active.sum"
MATRIX = "sm__pipe_tensor_op_hmma_type_hmma_hgmma_qgmma_cycles_active.sum"
HFMA2 = "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum"
WIDE = "wide"
_SEPARATOR = "spin_kernel"

Piece = list[KernelLaunch]


def under_ncu(part: str) -> None:
    """The work itself; called in the process that ncu watches. A number is that of a run."""
    if part == "matmuls":
        for product in PRODUCTS:
            _piece(product.make())
    elif part == "elementwise":
        for work in elementwise().values():
            work()
            _piece(work)
    elif part == WIDE:
        _, step = wide_run().build()
        step()
        _piece(step)
    else:
        run = RUNS[int(part)]
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


def pieces_by_ncu(script: str, part: str) -> list[Piece]:
    """Every piece's launches as ncu measured them, in the order of `under_ncu`."""
    of_products = part in ("matmuls", "elementwise")
    metrics = (*OPS, PIPE, MATRIX, HFMA2) if of_products else (OPS[0], PIPE, MATRIX)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        call = [find_ncu(), "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        call += ["--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        call += ["--metrics", ",".join(metrics)]
        call += [] if of_products else ["--kernel-name", _USES_THE_PIPE]
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


def by_kernel(*weighed: tuple[Piece, int]) -> list[dict[str, Any]]:
    """The launches of some pieces, each piece so many times, added up by kernel: tensor work first."""
    sums: dict[str, Counter[str]] = {}
    for piece, times in weighed:
        for launch in piece:
            kernel = sums.setdefault(launch.name, Counter())
            kernel["launches"] += times
            kernel["ops"] += times * round(sum(launch.metrics.get(metric) or 0 for metric in OPS))
            for key, metric in (("pipe", PIPE), ("matrix", MATRIX), ("hfma2", HFMA2)):
                kernel[key] += times * round(launch.metrics.get(metric) or 0)
    rows = [{"kernel": name, **values} for name, values in sums.items()]
    return sorted(rows, key=lambda row: (-row["ops"], -row["pipe"]))


def kernels_of(script: str, part: str) -> list[dict[str, Any]]:
    """The kernels of all layers of a run, from those of one and two: every further layer runs the same."""
    pieces = pieces_by_ncu(script, part)
    if part == WIDE:
        return by_kernel((pieces[0], 1))
    one, two = pieces
    return by_kernel((two, LAYERS - 1), (one, -(LAYERS - 2)))
