"""What counting costs: seconds, memory, microseconds, beside FlopCounterMode and torch.profiler in one run.

Why: a count that takes long, needs the GPU's memory or must be repeated for every shape cannot be left on.
Prints: a table of what one training step of the reference model costs plain, under each peer and beside our
count; the fit of a closed form for the 1.3 B model and one call of it; `truemfu count` on a configuration of
Llama 3.1 405 B, with its peak memory. Ends with one line of JSON.

    python benchmarks/flops_cost.py [--size small] [--repeats 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import truemfu
from truemfu import FlopModel, count_flops
from truemfu.sweep.worker.models import build_reference_model

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def tokens(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def step_costs(size: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of one step, plain and under each way of measuring, interleaved."""
    model = build_reference_model(size)
    batch = tokens(2, 128)

    def step() -> None:
        model.zero_grad()
        model(**batch).loss.backward()

    def under_flop_counter() -> None:
        with FlopCounterMode(display=False):
            step()

    def under_profiler() -> None:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as prof:
            step()
        prof.key_averages()

    ways: dict[str, Callable[[], Any]] = {
        "plain step": step,
        "step under FlopCounterMode": under_flop_counter,
        "step under torch.profiler, events read": under_profiler,
        "truemfu.count_flops, beside the step": lambda: count_flops(model, batch),
    }
    for action in ways.values():
        action()
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, action in ways.items():
            costs[name].append(seconds(action))
    return costs


def closed_form_costs() -> dict[str, float]:
    """Seconds to fit the 1.3 B model, microseconds for a shape it has not seen."""
    model = build_reference_model("1b", device="meta")
    fitted: list[FlopModel] = []
    fit_s = seconds(lambda: fitted.append(FlopModel.fit(model, tokens(4, 512))))
    shapes = [tokens(samples, length) for samples in (1, 3, 8) for length in (100, 1000, 2000)]
    calls = []
    for _ in range(300):
        for batch in shapes:
            calls.append(seconds(lambda batch=batch: fitted[0](batch)))  # type: ignore[misc]
    flop_counter_s = seconds(lambda: _flop_counter_on_fake(tokens(4, 512)))
    return {
        "fit_1b_s": fit_s,
        "call_us_median": statistics.median(calls) * 1e6,
        "call_us_p99": sorted(calls)[int(len(calls) * 0.99)] * 1e6,
        "flop_counter_mode_per_shape_1b_s": flop_counter_s,
    }


def _flop_counter_on_fake(batch: dict[str, torch.Tensor]) -> None:
    """The nearest thing FlopCounterMode offers: one run on meta tensors for every new shape."""
    model = build_reference_model("1b", device="meta")
    with FlopCounterMode(display=False):
        model(**{k: v.to("meta") for k, v in batch.items()}).loss.backward()


def config_costs() -> dict[str, float]:
    """`truemfu count` on a 405 B configuration in its own process: seconds and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LLAMA_405B))
        command = [
            sys.executable,
            "-m",
            "truemfu",
            "count",
            str(path),
            "--batch",
            "1",
            "--seq",
            "8192",
            "--json",
        ]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        elapsed = time.perf_counter() - began
    counted = json.loads(done.stdout)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {
        "count_405b_s": elapsed,
        "count_405b_peak_gib": peak_bytes / 2**30,
        "count_405b_model_flops": counted["model_flops"],
    }


def fit_405b_s() -> float:
    """The fit of a closed form for that model on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_405B)).to(torch.bfloat16)
    batch = {name: ids.to("meta") for name, ids in tokens(1, 8192).items()}
    return seconds(lambda: FlopModel.fit(model, batch))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="small", help="reference model whose step is measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    config = config_costs()
    costs = step_costs(options.size, options.repeats)
    closed = closed_form_costs()
    fit_s = fit_405b_s()
    plain = statistics.median(costs["plain step"])
    lines = [f"One step of `{options.size}`, 2 × 128 tokens, CPU; {options.repeats} repeats, interleaved", ""]
    lines += ["| what | median, s | spread, s | × plain step |", "| --- | --- | --- | --- |"]
    for name, values in costs.items():
        median = statistics.median(values)
        lines.append(
            f"| {name} | {median:.3f} | {min(values):.3f}–{max(values):.3f} | {median / plain:.2f} |"
        )
    lines += [
        "",
        f"FlopModel.fit on the 1.3 B model: {closed['fit_1b_s']:.1f} s, once",
        f"a shape it has not seen: {closed['call_us_median']:.1f} µs (p99 {closed['call_us_p99']:.1f})",
        f"FlopCounterMode on meta tensors, per shape: {closed['flop_counter_mode_per_shape_1b_s']:.1f} s",
        f"truemfu count on Llama 3.1 405 B, 1 × 8192: {config['count_405b_s']:.1f} s, "
        f"{config['count_405b_peak_gib']:.2f} GiB, {config['count_405b_model_flops']:.4e} FLOPs",
        f"FlopModel.fit on the same model, meta tensors: {fit_s:.1f} s, once",
        "",
    ]
    summary = {
        **closed,
        **config,
        "fit_405b_s": fit_s,
        "ratios_to_plain_step": {k: round(statistics.median(v) / plain, 3) for k, v in costs.items()},
        "truemfu": truemfu.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "date": datetime.date.today().isoformat(),
    }
    text = "\n".join([*lines, json.dumps(summary)])
    print(text)
    if options.output:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
