"""What `log_step` costs the training thread, beside what people use today, in one run.

Why: a monitor that costs a millisecond a step is switched off. Prints: microseconds per step (median, p99) of
our log_step with the local log, with loss and gradient norm as tensors, and with a CPU mask to reduce (whose
reduction alone is shown too); of a plain wandb.log of the same metrics; of torch.profiler on one step in 500,
spread over the 500; and of a JSON encode of the same row, the yardstick that makes figures of two machines
comparable. These are calls in a loop, with warm caches. Then the same ways beside Lightning's
ThroughputMonitor, each between the steps of a real Trainer. Then the process's memory over a million steps. A
peer that is not installed is left out and named. Ends with one line of JSON.

    python benchmarks/monitor_overhead.py [--steps 20000] [--million 1000000] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import truemfu
from source_id import source_id
from truemfu import TrainingMonitor
from truemfu.sweep.worker.models import build_reference_model

ROW = {
    "global_step": 123456,
    "training/loss": 2.345678,
    "training/lr": 3e-4,
    "training/epoch": 1,
    "training/grad_norm": 0.987654,
    "perf/step_time": 0.0941,
    "perf/tokens_per_second": 21763.0,
    "perf/mfu": 0.4123,
}


def percentiles(times_s: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    ordered = sorted(times_s)
    return {
        "median_us": statistics.median(ordered) * 1e6,
        "p99_us": ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)] * 1e6,
    }


def timed(
    action: Callable[[int], Any], steps: int, between: Callable[[], Any] | None = None
) -> dict[str, float]:
    """Times of single calls; `between` runs outside the clock, as a step would."""
    times = []
    for step in range(1, steps + 1):
        if between is not None:
            between()
        began = time.perf_counter()
        action(step)
        times.append(time.perf_counter() - began)
    return percentiles(times)


def json_encode(steps: int) -> dict[str, float]:
    return timed(lambda step: json.dumps(ROW), steps)


def our_log_step(folder: str, steps: int, *, tensors: bool = False, mask: bool = False) -> dict[str, float]:
    """`log_step` as a bare loop calls it; the forward pass between two calls is outside the clock."""
    model = build_reference_model("tiny")
    ids = torch.zeros(2, 16, dtype=torch.long)
    loss = torch.tensor(2.5, requires_grad=tensors) if tensors else 2.5
    norm = torch.tensor(0.5) if tensors else 0.5
    attention_mask = torch.ones(8, 1024, dtype=torch.long) if mask else None
    with quiet_monitor(folder, model) as monitor:

        def log(step: int) -> None:
            monitor.log_step(step, 0, loss, norm, 3e-4, attention_mask)

        hook_times: list[float] = []

        hook = next(iter(model._forward_pre_hooks.values()))

        def forward() -> None:
            hook(model, (), {"input_ids": ids})

        for step in range(3):  # the first two are observed
            forward()
            log(step)
        monitor.save_logs()
        result = timed(log, steps, forward)
        for _ in range(min(steps, 2000)):
            began = time.perf_counter()
            forward()
            hook_times.append(time.perf_counter() - began)
        result["hook_median_us"] = statistics.median(hook_times) * 1e6
    return result


def mask_reduction(steps: int) -> dict[str, float]:
    mask = torch.ones(8, 1024, dtype=torch.long)
    return timed(lambda step: mask.count_nonzero(), steps)


class quiet_monitor:
    """A monitor whose closing words go nowhere."""

    def __init__(self, folder: str, model: nn.Module) -> None:
        self._monitor = TrainingMonitor(folder, model=model)

    def __enter__(self) -> TrainingMonitor:
        return self._monitor

    def __exit__(self, *exception: object) -> None:
        stderr, sys.stderr = sys.stderr, open(os.devnull, "w")  # noqa: SIM115
        try:
            self._monitor.close()
        finally:
            sys.stderr.close()
            sys.stderr = stderr


def plain_wandb(folder: str, steps: int) -> dict[str, float]:
    import wandb

    run = wandb.init(project="overhead", mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    try:
        return timed(lambda step: run.log(ROW, step=step), min(steps, 3000))
    finally:
        run.finish()


def between_steps(folder: str, steps: int) -> dict[str, dict[str, float]]:
    """Each way inside a real Trainer of Lightning, between the steps of a small layer: no warm caches."""
    import lightning.pytorch as pl
    import wandb
    from lightning.pytorch.callbacks import ThroughputMonitor
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Timed(pl.Callback):
        """Calls something at the end of each step, by the clock."""

        def __init__(self, action: Callable[[int, Any], Any]) -> None:
            self.spent, self._action = [0.0], action

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            began = time.perf_counter()
            self._action(len(self.spent), outputs["loss"])
            self.spent[-1] += time.perf_counter() - began
            self.spent.append(0.0)

    class TimedThroughput(ThroughputMonitor):
        """Lightning's own, hook by hook."""

        spent = [0.0]  # noqa: RUF012

        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            super().on_train_batch_start(*args, **kwargs)
            self.spent[-1] += time.perf_counter() - began

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            super().on_train_batch_end(*args, **kwargs)
            self.spent[-1] += time.perf_counter() - began
            self.spent.append(0.0)

    def run(callback: Any, module: Module) -> dict[str, float]:
        data = torch.utils.data.TensorDataset(torch.zeros(min(steps, 2000) * 2, 8))
        trainer = pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            callbacks=[callback],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        return percentiles(callback.spent[10:-1])

    found = {"JSON encode": run(Timed(lambda step, loss: json.dumps(ROW)), Module())}
    module = Module()
    with quiet_monitor(f"{folder}/ours", module.layer) as monitor:
        ours = Timed(lambda step, loss: monitor.log_step(step, 0, loss, 0.5, 3e-4))
        hooks = module.layer._forward_pre_hooks
        key, hook = next(iter(hooks.items()))

        def timed_hook(*call: Any) -> None:
            began = time.perf_counter()
            hook(*call)
            ours.spent[-1] += time.perf_counter() - began

        hooks[key] = timed_hook
        found["truemfu hook and log_step"] = run(ours, module)
    wandb_run = wandb.init(
        project="between", mode="offline", dir=folder, settings=wandb.Settings(silent=True)
    )
    try:
        found["wandb.log, offline"] = run(Timed(lambda step, loss: wandb_run.log(ROW, step=step)), Module())
    finally:
        wandb_run.finish()
    throughput = TimedThroughput(batch_size_fn=lambda batch: batch[0].shape[0], length_fn=lambda batch: 8)
    found["Lightning ThroughputMonitor"] = run(throughput, Module())
    return found


def profiler_every_500(steps: int) -> dict[str, float]:
    """One profiled step, its events read, less a plain step, spread over 500 steps."""
    from torch.profiler import ProfilerActivity, profile

    model = build_reference_model("tiny")
    ids = torch.zeros(2, 64, dtype=torch.long)

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    plain, profiled = [], []
    for _ in range(10):
        began = time.perf_counter()
        step()
        plain.append(time.perf_counter() - began)
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as prof:
            step()
        sum(event.flops or 0 for event in prof.key_averages())
        profiled.append(time.perf_counter() - began)
    extra = statistics.median(profiled) - statistics.median(plain)
    return {"median_us": extra / 500 * 1e6, "p99_us": max(profiled) * 1e6}


def a_million_steps(folder: str, steps: int) -> list[dict[str, float]]:
    """The process's memory while a monitor logs steps of changing shape."""
    process = psutil.Process()
    model = build_reference_model("tiny")
    batches = [{"input_ids": torch.zeros(2, length, dtype=torch.long)} for length in range(8, 72)]
    samples = []
    with quiet_monitor(folder, model) as monitor:
        hook = next(iter(model._forward_pre_hooks.values()))
        for step in range(1, steps + 1):
            hook(model, (), batches[step % len(batches)])
            monitor.log_step(step, 0, 2.5, 0.5, 3e-4)
            if step % 2000 == 0:
                assert monitor._live is not None
                # A loop without a step in it is faster than any training.
                monitor._live._row_thread.finish_pending(60)
            if step in (steps // 100, steps // 10, steps // 4, steps // 2, steps):
                monitor.save_logs()
                gc.collect()
                samples.append({"steps": step, "rss_mib": process.memory_info().rss / 2**20})
    return samples


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--million", type=int, default=1_000_000, help="steps of the memory run; 0: leave it out"
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[str] = []

    def say(text: str = "") -> None:
        print(text, flush=True)
        lines.append(text)

    versions = {p: version(p) for p in ("torch", "lightning", "wandb")}
    named = ", ".join(f"{name} {found or 'not installed'}" for name, found in versions.items())
    say(
        f"monitor_overhead {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), Python "
        f"{platform.python_version()}, {named}, {platform.machine()}, one thread"
    )
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "JSON encode of the row": lambda: json_encode(options.steps),
            "truemfu log_step": lambda: our_log_step(f"{folder}/a", options.steps),
            "truemfu log_step, tensors": lambda: our_log_step(f"{folder}/b", options.steps, tensors=True),
            "truemfu log_step, CPU mask": lambda: our_log_step(f"{folder}/c", options.steps, mask=True),
            "  of which the mask's sum": lambda: mask_reduction(options.steps),
            "torch.profiler, 1 step in 500": lambda: profiler_every_500(options.steps),
        }
        if versions["wandb"]:
            ways["wandb.log, offline"] = lambda: plain_wandb(folder, options.steps)
        say()
        say(f"{'on the training thread, each step':34} {'median µs':>10} {'p99 µs':>10} {'× JSON':>8}")
        for name, way in ways.items():
            results[name] = way()
            ratio = results[name]["median_us"] / results["JSON encode of the row"]["median_us"]
            say(f"{name:34} {results[name]['median_us']:10.1f} {results[name]['p99_us']:10.1f} {ratio:8.1f}")
        hook = results["truemfu log_step"]["hook_median_us"]
        say(f"{'truemfu forward hook, per batch':34} {hook:10.1f}")
        cold: dict[str, dict[str, float]] = {}
        if versions["lightning"] and versions["wandb"]:
            cold = between_steps(folder, options.steps)
            say()
            say(f"{'between the steps of a Trainer':34} {'median µs':>10} {'p99 µs':>10} {'× JSON':>8}")
            for name, found in cold.items():
                ratio = found["median_us"] / cold["JSON encode"]["median_us"]
                say(f"{name:34} {found['median_us']:10.1f} {found['p99_us']:10.1f} {ratio:8.1f}")
        memory = a_million_steps(f"{folder}/m", options.million) if options.million else []
    if memory:
        say()
        say("memory of the process while logging, batches of 64 shapes")
        for sample in memory:
            say(f"  {sample['steps']:>10,} steps {sample['rss_mib']:8.1f} MiB")
    say(json.dumps({"versions": versions, "results": results, "between_steps": cold, "memory": memory}))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
