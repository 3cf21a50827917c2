"""What models cost, what this machine can do, and how well one training step uses it.

    python examples/count_and_time.py

Counts the reference models and a few well-known architectures from their dimensions alone, times a small
training step on the hardware at hand, and prints both. No network, no weights, no GPU needed.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from truemfu import Utilization, count_flops
from truemfu.cli.console import output, percent, short, table, working
from truemfu.flops.flop_count import FlopCount
from truemfu.flops.models.example_batch import example_batch
from truemfu.flops.models.hf_config import model_from_config
from truemfu.flops.models.model_view import BatchRequest
from truemfu.hardware.ceiling.ceiling import measure_ceiling
from truemfu.hardware.detect import spec_of
from truemfu.sweep.worker.models import SIZES, build_reference_model, parameter_count

WELL_KNOWN: Mapping[str, tuple[BatchRequest, dict[str, Any]]] = {
    "Llama 3 8B": (
        BatchRequest(samples=1, length=4096),
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "Llama 3.1 405B": (
        BatchRequest(samples=1, length=4096),
        {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 16_384,
            "intermediate_size": 53_248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
        },
    ),
    "Mixtral 8x7B": (
        BatchRequest(samples=1, length=4096),
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2.5-VL 7B, one image": (
        BatchRequest(samples=1, length=2048, images=1, image_size=448),
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": 151_655,
            "vision_start_token_id": 151_652,
            "vision_end_token_id": 151_653,
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                "vocab_size": 152_064,
                "hidden_size": 3584,
                "intermediate_size": 18_944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            },
            "vision_config": {
                "depth": 32,
                "hidden_size": 1280,
                "intermediate_size": 3420,
                "num_heads": 16,
                "out_hidden_size": 3584,
                "fullatt_block_indexes": [7, 15, 23, 31],
            },
        },
    ),
    "Mamba-2 1.3B": (
        BatchRequest(samples=1, length=4096),
        {
            "model_type": "mamba2",
            "vocab_size": 50_288,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_heads": 64,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
}

WARM_UP_STEPS, TIMED_STEPS = 2, 9


@dataclass(frozen=True, kw_only=True)
class Counted:
    name: str
    parameters: int
    batch: str
    flops: FlopCount
    seconds: float


def count_everything() -> list[Counted]:
    counted = []
    for size in SIZES:
        request = BatchRequest(samples=4, length=512)
        counted.append(_count(size, lambda size=size: build_reference_model(size, "meta"), request))
    for name, (request, config) in WELL_KNOWN.items():
        counted.append(_count(name, lambda config=config: model_from_config(config), request))
    return counted


def _count(name: str, build: Any, request: BatchRequest) -> Counted:
    with working(f"counting {name}"):
        start = time.perf_counter()
        model: nn.Module = build()
        flops = count_flops(model, example_batch(model, request))
        seconds = time.perf_counter() - start
    return Counted(
        name=name,
        parameters=parameter_count(model),
        batch=f"{request.samples} × {request.length}",
        flops=flops,
        seconds=seconds,
    )


@dataclass(frozen=True, kw_only=True)
class Timed:
    size: str
    batch: str
    dtype: str
    device: str
    utilization: Utilization


def time_a_step() -> Timed:
    """A few steps of a reference model, forward, backward and optimizer, on the accelerator or the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    size, samples, length, dtype = (
        ("medium", 16, 1024, torch.bfloat16) if accelerator else ("small", 4, 64, torch.float32)
    )
    device = accelerator or torch.device("cpu")
    model = build_reference_model(size, device, dtype)
    ids = torch.randint(SIZES[size].vocab, (samples, length), device=device)
    flops = count_flops(model, {"input_ids": ids, "labels": ids})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with working(f"timing {size}"):
        step_time_s = _seconds_per_call(step, device)
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    spec = spec_of(device)
    if spec is not None:
        used = Utilization.of(flops, step_time_s, device=device)
    else:
        with working("measuring the matmul ceiling"):
            ceiling = measure_ceiling(device, [name])[0]
        used = Utilization.of(
            flops,
            step_time_s,
            peak_flops_per_s=ceiling.burst_flops_per_s,
            peak_source=f"measured matmul ceiling of this {device.type}, {name}",
        )
    label = spec.name if spec is not None else f"{device.type}, not in the table"
    return Timed(size=size, batch=f"{samples} × {length}", dtype=name, device=label, utilization=used)


def _seconds_per_call(step: Any, device: torch.device) -> float:
    """The median of a few steps, each waited for."""
    times = []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        start = time.perf_counter()
        step()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times[WARM_UP_STEPS:])[TIMED_STEPS // 2]


COLUMNS = (
    "model",
    "parameters",
    "batch × tokens",
    "forward",
    "backward",
    "recompute",
    "FLOPs per step",
    "counted in",
)


def rows_of(counted: list[Counted]) -> list[list[str]]:
    return [
        [
            item.name,
            f"{item.parameters:,}",
            item.batch,
            short(item.flops.forward),
            short(item.flops.backward),
            short(item.flops.recompute),
            f"{item.flops.model_flops:,}",
            f"{item.seconds:.1f} s",
        ]
        for item in counted
    ]


def facts_of(timed: Timed) -> list[tuple[str, str]]:
    used = timed.utilization
    return [
        ("model", f"{timed.size}, {timed.batch} tokens, {timed.dtype}"),
        ("device", timed.device),
        ("step", f"{1e3 * (used.step_time_s or 0):.1f} ms"),
        ("achieved", f"{short(used.achieved_flops_per_s or 0)}FLOP/s"),
        ("peak", f"{short(used.peak_flops_per_s or 0)}FLOP/s ({used.peak_source})"),
        ("MFU", "unknown" if used.mfu is None else percent(used.mfu, 1)),
        ("HFU", "unknown" if used.hfu is None else percent(used.hfu, 1)),
    ]


def main() -> None:
    console = output()
    counted = count_everything()
    timed = time_a_step()

    models = table(*COLUMNS, title="One training step, counted without weights and without a GPU")
    for row in rows_of(counted):
        models.add_row(*row)
    console.print(models, "")
    facts = table("one step, timed here", "")
    facts.columns[1].justify = "left"
    for fact in facts_of(timed):
        facts.add_row(*fact)
    console.print(facts, "")

    console.print("A multiply-add is 2 FLOPs; attention counts all pairs; elementwise work is not counted.")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
