"""A private step by book-keeping against the plain step of the same model, on a real GPU.

Why: privacy should cost its products and its noise, and nothing else. For the 1.3 B reference model in bf16,
with SGD, it prints for each shape
  check     the relative error of the clipped sum against the loop over samples, in bf16 and in fp32
  step      plain and private steps in turns: medians, and the median ratio of neighbours with its quartiles
  memory    the peak of allocated memory of either
  waiting   whether a private step passes torch.cuda.set_sync_debug_mode("error")
  kernels   where the GPU's time of one private step goes, by class, beside the plain step
Ends with one line of JSON; exits 1 where a check failed. On a CPU it runs a tiny model, as a test of itself.

    python benchmarks/gpu/private.py [--shapes 4x512 8x1024] [--turns 12] [--tiny]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import truemfu
from truemfu.private import PrivateOptimizer, losses_by_sample
from truemfu.sweep.worker.models import build_reference_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

TURN = 4
CLASSES = (
    ("products", ("gemm", "nvjet", "cutlass", "cublas", "splitK")),
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    ("random numbers", ("normal", "distribution")),
    ("embedding", ("embedding", "index", "radix", "DeviceScan", "sort")),
    ("reductions", ("reduce", "norm", "softmax", "SoftMax", "LayerNorm")),
    ("copies", ("copy", "Memcpy", "Memset", "Cat")),
    ("optimizer", ("multi_tensor",)),
    ("elementwise", ("elementwise",)),
)


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shapes", nargs="+", default=["4x512", "8x1024"])
    options.add_argument("--turns", type=int, default=12)
    options.add_argument("--tiny", action="store_true")
    chosen = options.parse_args()
    device = torch.device("cpu" if chosen.tiny else "cuda")
    name = "CPU" if chosen.tiny else torch.cuda.get_device_name()
    versions = {"truemfu": truemfu.__version__, "torch": torch.__version__, "source": source_id()}
    print(f"gpu/private {datetime.date.today()}, {name}, {versions}", flush=True)
    found: dict[str, Any] = {"date": str(datetime.date.today()), "device": name, "versions": versions}
    failed = False
    for shape in chosen.shapes:
        batch, length = (int(size) for size in ("2x16" if chosen.tiny else shape).split("x"))
        found[shape] = of_shape(device, batch, length, chosen.turns, tiny=chosen.tiny)
        failed = failed or not found[shape]["is_right"]
    print(json.dumps(found))
    return int(failed)


def of_shape(device: torch.device, batch: int, length: int, turns: int, *, tiny: bool) -> dict[str, Any]:
    """Print and return everything about one shape."""
    print(f"{batch} × {length}", flush=True)
    found: dict[str, Any] = {"is_right": True}
    for dtype in (torch.float32, torch.bfloat16):
        model, data = model_and_batch(device, dtype, batch, length, tiny=tiny)
        private = PrivateOptimizer(
            model, torch.optim.SGD(model.parameters(), lr=1e-4), max_grad_norm=1.0, noise_multiplier=1.0
        )
        private.backward(losses_by_sample, data)
        print(f"  check     {dtype}: relative error {private.gradient_error:.1e}", flush=True)
        found[f"error {dtype}"] = private.gradient_error
        private.remove()
        if dtype == torch.float32:
            del model, private
            gc.collect()
    plain_optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    private = PrivateOptimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        check_every=None,
    )

    def plain_step() -> None:
        losses_by_sample(model, data).mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()

    def private_step() -> None:
        private.backward(losses_by_sample, data)
        private.step()
        private.zero_grad()

    kinds = {"plain": plain_step, "private": private_step}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, step in kinds.items():
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        step()
        if device.type == "cuda":
            found[f"memory {kind}"] = torch.cuda.max_memory_allocated()
    for _ in range(turns):
        for kind, step in kinds.items():
            times[kind].append(timed(device, step))
    ratios = [private / plain for plain, private in zip(times["plain"], times["private"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    found |= {"ratio": middle} | {kind: statistics.median(each) for kind, each in times.items()}
    print(
        f"  step      plain {found['plain'] * 1e3:.1f} ms, private {found['private'] * 1e3:.1f} ms: "
        f"{middle:.3f} × ({low:.3f} to {high:.3f}, {turns} turns of {TURN})",
        flush=True,
    )
    if device.type == "cuda":
        memory = [found[f"memory {kind}"] / 2**30 for kind in kinds]
        times_more = memory[1] / memory[0]
        print(f"  memory    plain {memory[0]:.1f} GiB, private {memory[1]:.1f} GiB: {times_more:.3f} ×")
        found["waits"] = waits(private_step)
        found["is_right"] = found["waits"] is None
        print(f"  waiting   {found['waits'] or 'sync debug mode error: nothing raised'}", flush=True)
        for kind, step in kinds.items():
            found[f"kernels {kind}"] = kernels = of_kernels(step)
            print(f"  kernels   {kind}: " + ", ".join(f"{what} {ms:.1f}" for what, ms in kernels["classes"]))
            print(
                "\n".join(f"            {ms:7.2f} ms {n:5d} × {what}" for what, ms, n in kernels["largest"])
            )
    return found


def model_and_batch(
    device: torch.device, dtype: torch.dtype, batch: int, length: int, *, tiny: bool
) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build_reference_model("tiny" if tiny else "1b", device=device, dtype=dtype).train()
    ids = torch.randint(100, (batch, length), device=device)
    return model, {"input_ids": ids, "labels": ids}


def timed(device: torch.device, step: Callable[[], None]) -> float:
    """Seconds of one step, the mean of a few; the first is not timed."""
    step()
    if device.type != "cuda":
        begin_s = time.perf_counter()
        for _ in range(TURN):
            step()
        return (time.perf_counter() - begin_s) / TURN
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(TURN):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / TURN


def waits(step: Callable[[], None]) -> str | None:
    """What a step waits for; None if it does not wait."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def of_kernels(step: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds of one step's kernels by class, and the largest of them."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.device_time / 1e3
            numbers[event.name] += 1
    classes: Counter[str] = Counter()
    for name, ms in times.items():
        kinds = (kind for kind, words in CLASSES if any(word in name for word in words))
        classes[next(kinds, "others")] += ms
    classes["all"] = sum(times.values())
    largest = [(name[:150], ms, numbers[name]) for name, ms in times.most_common(14)]
    return {"classes": classes.most_common(), "largest": largest}


if __name__ == "__main__":
    sys.exit(main())
