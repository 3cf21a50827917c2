"""Two ranks on one GPU: the job's figures, and what a rank's row costs by the clock.

A Llama of 34 M parameters in bf16 under DDP, both ranks on the first GPU, by gloo, and by NCCL where it
allows that. Monitors run in `hybrid` mode with their usual windows of ten seconds. Prints for each backend
  job         its model FLOPs against the count of one process times ranks and steps, to the integer, and the
              last row of its log
  row         the last row of each rank, as it stands in the run's folder
  cost        microseconds on the thread that does it: a row (made, sent and put aside), a message, rank 0's
              reading of what has arrived; and log_step on the training thread, per step
  timing      the share of time in collectives by NCCL's own records, if any
Exits 1 where the FLOPs differ, or where a row was made on the training thread.

    python benchmarks/gpu/ranks.py [--seconds 45] [--backends gloo nccl] [--device cuda]
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import truemfu
from truemfu import TrainingMonitor, count_flops
from truemfu.monitor.ranks.collective_times import CollectiveTimes
from truemfu.monitor.ranks.job_view import JobView
from truemfu.monitor.ranks.rank_file import read_files
from truemfu.monitor.ranks.reporter import RankReporter

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

RANKS = 2
SHAPES = {"cuda": (8, 512), "cpu": (1, 16)}
"""Samples and tokens of a batch; that of the CPU is to try the script."""
COSTS = {
    "a row": (RankReporter, "_make_row"),
    "a message": (RankReporter, "_send_message"),
    "reading": (JobView, "take"),
}


class Timed:
    """Calls of one method: microseconds of processor time and of the clock, and on which threads."""

    def __init__(self, owner: type, name: str) -> None:
        self.cpu_us: list[float] = []
        self.wall_us: list[float] = []
        self.threads: set[str] = set()
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu_us.append(1e6 * (time.thread_time() - cpu_s))
                self.wall_us.append(1e6 * (time.perf_counter() - wall_s))
                self.threads.add(threading.current_thread().name)

        setattr(owner, name, timed)

    def figures(self) -> dict[str, Any] | None:
        if not self.cpu_us:
            return None
        return {
            "calls": len(self.cpu_us),
            "cpu_us": round(statistics.median(self.cpu_us), 1),
            "wall_us": round(statistics.median(self.wall_us), 1),
            "threads": sorted(self.threads),
        }


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=8192,
        )
    )


def train(backend: str, folder: Path, seconds: float, device: torch.device) -> None:
    """One rank; writes its figures to the folder."""
    dist.init_process_group(backend)
    rank = dist.get_rank()
    model = llama().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    batch = torch.randint(8192, SHAPES[device.type], device=device)
    alone = count_flops(model, {"input_ids": batch, "labels": batch})
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    costs = {name: Timed(*method) for name, method in COSTS.items()}
    logging: list[float] = []
    monitor = TrainingMonitor(folder, {"monitoring": {"mfu_calculation_mode": "hybrid"}}, model=ddp)
    ends_s, step = time.perf_counter() + seconds, 0
    is_over = torch.zeros(1)
    while not is_over.item():
        step += 1
        loss = ddp(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        began_s = time.perf_counter()
        monitor.log_step(step, 0, loss.detach(), 0.0, 1e-4)
        logging.append(time.perf_counter() - began_s)
        if step % 10 == 0:
            is_over[0] = time.perf_counter() > ends_s
            dist.all_reduce(moved := is_over.to(device if backend == "nccl" else "cpu"))
            is_over = moved.cpu()
    in_training = {name: cost.figures() for name, cost in costs.items()}
    timing = CollectiveTimes().shares()
    dist.barrier()
    monitor.close()
    found = {
        "backend": backend,
        "steps": step,
        "alone_flops": alone.model_flops,
        "costs": in_training,
        "log_step_us": round(1e6 * statistics.median(logging[len(logging) // 2 :]), 1),
        "collective_shares": timing,
        "summary": monitor.summary(),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found, default=str), encoding="utf-8")
    dist.destroy_process_group()


def run(backend: str, seconds: float, device: str) -> bool:
    """Start both ranks, and print what they found; whether that is right."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        call = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
        call += [
            __file__,
            "--train",
            made,
            "--backends",
            backend,
            "--seconds",
            str(seconds),
            "--device",
            device,
        ]
        timing = {
            "TORCH_NCCL_ENABLE_TIMING": "1",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(call, capture_output=True, text=True, env=os.environ | timing)
        if done.returncode:
            lines = [
                line for line in done.stderr.splitlines() if "Duplicate GPU" in line or "Error: " in line
            ]
            print(f"{backend}: not possible: {(lines or done.stderr.splitlines())[0].strip()[:300]}")
            return "Duplicate GPU" in done.stderr or "invalid usage" in done.stderr
        ranks = [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
        rows = [row for found, _ in read_files(folder) for row in found]
        log = json.loads((folder / "training_log.json").read_text("utf-8"))
    first = ranks[0]
    flops = first["summary"]["totals"]["model_flops"]
    expected = first["steps"] * RANKS * first["alone_flops"]
    is_exact = flops == expected
    result = "equal" if is_exact else "DIFFER"
    print(f"{backend}: {first['steps']} steps")
    print(f"  job: model FLOPs {flops}, steps × {RANKS} × one process: {expected}: {result}")
    known = {key: value for key, value in log[-1].items() if key.startswith("perf/")}
    print(f"  last row of the log: {json.dumps(known)}")
    for own in {row.rank: row for row in sorted(rows, key=lambda row: row.number)}.values():
        print(f"  row: {own}")
    for rank, found in enumerate(ranks):
        print(f"  rank {rank}: cost {json.dumps(found['costs'])}, log_step {found['log_step_us']} µs")
        print(f"  rank {rank}: share of time in collectives {found['collective_shares']}")
    print(f"  summary: {json.dumps(first['summary'])[:4000]}")
    beside = [cost["threads"] for found in ranks for cost in found["costs"].values() if cost]
    return is_exact and not any("MainThread" in threads for threads in beside)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--backends", nargs="+", default=["gloo", "nccl"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.backends[0], asked.train, asked.seconds, torch.device(asked.device))
        return 0
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.machine()
    print(
        f"gpu/ranks {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}, {name}, {RANKS} ranks on one device"
    )
    wrong = [backend for backend in asked.backends if not run(backend, asked.seconds, asked.device)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
