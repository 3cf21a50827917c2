"""One rank of a small data-parallel job that writes its `RankRow`s; one rank can be made late on purpose.

A transformer layer under DDP by gloo on the CPU, one thread a rank, batches from a DataLoader. The script
measures the row's fields itself: step time and the wait in the loader by the clock, host time by the
scheduler's account of the training thread (on a processor, or waiting for one), tokens by the batch.

    torchrun --nproc-per-node 4 benchmarks/straggler_job.py --folder out [--window-s 1] [--windows 12]
        [--stage healthy|input|host|work] [--late-rank 1] [--onset-window 4] [--size 0.5] [--traceml]

stages, from the onset on and on the late rank only:
  input   the dataset sleeps for `size` × the step time so far
  host    the training thread runs Python for that long in each step, before the forward pass
  work    the batches are larger by `size`
With --traceml, under `traceml run`, each step is also one of TraceML's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from truemfu.monitor.ranks.rank_row import RankRow

WIDTH = 64
LENGTH = 32
WARM_UP = 5
SAMPLES = 8


class Late:
    """What makes this rank late, once it is on."""

    def __init__(self, stage: str, size: float) -> None:
        self.stage, self.size = stage, size
        self.is_on = False
        self.seconds = 0.0

    def begin(self, step_time_s: float) -> None:
        self.is_on, self.seconds = True, self.size * step_time_s

    @property
    def samples(self) -> int:
        is_larger = self.is_on and self.stage == "work"
        return round(SAMPLES * (1 + self.size)) if is_larger else SAMPLES

    def load(self) -> None:
        if self.is_on and self.stage == "input":
            time.sleep(self.seconds)

    def compute(self) -> None:
        if self.is_on and self.stage == "host":
            ends_s = time.thread_time() + self.seconds
            while time.thread_time() < ends_s:
                sum(range(500))


class Batches(IterableDataset[Any]):
    def __init__(self, late: Late) -> None:
        self._late = late

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self._late.load()
            yield torch.randn(self._late.samples, LENGTH, WIDTH)


class Recorder:
    """The windows of one rank."""

    def __init__(self, path: Path, rank: int, world_size: int, window_s: float) -> None:
        self._path, self._rank, self._world_size, self._window_s = path, rank, world_size, window_s
        self.number = 0
        self._step = 0
        self.step_time_s = 0.0
        self._begin()

    def _begin(self) -> None:
        self._begun_s, self._host_s = time.perf_counter(), _host_s()
        self._steps = self._tokens = 0
        self._data_wait_s = 0.0

    def waited(self, seconds: float) -> None:
        self._data_wait_s += seconds

    def stepped(self, tokens: int, *, is_last: bool = False) -> None:
        self._step += 1
        if self._step <= WARM_UP:
            self._begin()
            return
        self._steps += 1
        self._tokens += tokens
        taken_s = time.perf_counter() - self._begun_s
        if taken_s < self._window_s and not is_last:
            return
        self.number += 1
        self.step_time_s = taken_s / self._steps
        parameters = 12 * WIDTH * WIDTH
        row = RankRow(
            rank=self._rank,
            world_size=self._world_size,
            host="node0",
            device=f"cpu-{self._rank}",
            number=self.number,
            at_s=round(time.time(), 3),
            is_last=is_last,
            step=self._step,
            steps=self._steps,
            step_time_s=round(self.step_time_s, 6),
            data_wait_s=round(self._data_wait_s / self._steps, 6),
            host_s=round((_host_s() - self._host_s) / self._steps, 6),
            model_flops=6.0 * parameters * self._tokens / self._steps,
            tokens=self._tokens / self._steps,
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(row) + b"\n")
        self._begin()


def _host_s() -> float:
    """Seconds this thread was on a processor or waited for one."""
    running, waiting, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(running) + int(waiting)) / 1e9


def _traceml_steps(model: nn.Module) -> Callable[[], contextlib.AbstractContextManager[None]]:
    import traceml_ai

    traceml_ai.init()
    return lambda: traceml_ai.trace_step(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--stage", choices=("healthy", "input", "host", "work"), default="healthy")
    parser.add_argument("--late-rank", type=int, default=1)
    parser.add_argument("--onset-window", type=int, default=4)
    parser.add_argument("--size", type=float, default=0.5)
    parser.add_argument("--traceml", action="store_true")
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(rank)
    dist.init_process_group("gloo")
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    late = Late(arguments.stage if rank == arguments.late_rank else "healthy", arguments.size)
    recorder = Recorder(arguments.folder / f"{rank}.jsonl", rank, world_size, arguments.window_s)
    traced = _traceml_steps(model) if arguments.traceml else contextlib.nullcontext
    loader = iter(DataLoader(Batches(late), batch_size=None))
    goes_on = torch.ones(1)
    while goes_on.item() > 0:
        begun_s = time.perf_counter()
        batch = next(loader)
        recorder.waited(time.perf_counter() - begun_s)
        with traced():
            late.compute()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # The job's own way to end all ranks at the same step.
        goes_on.fill_(rank != 0 or recorder.number < arguments.windows)
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        recorder.stepped(batch.shape[0] * batch.shape[1], is_last=goes_on.item() == 0)
        if recorder.number >= arguments.onset_window and not late.is_on and arguments.stage != "healthy":
            late.begin(recorder.step_time_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
