"""The census of one step on a real GPU: whether its parts add up, what it costs, and what it says.

Why: `truemfu explain` divides a recorded step among classes of kernels. For each model it prints
  sum         kernels and gaps of the recorded step against CUDA events around it; at most 2 % apart
  ordinary    the median step that was not recorded, and how much longer the recorded one took
  cost        seconds of starting, stopping and saving (at most 3), and of reading the trace at the end
  classes     time of each class, and the kernels without a class, which should be none
  unlinked    kernels without an operator, without FLOPs (products), without bytes
  bounds      what each remedy could gain at most
Models: Llama, ViT, ConvNeXt, ResNet, BERT, a mixture of experts, a U-Net, Llama compiled, Llama with
activation checkpoints, Llama in fp32; random weights, bf16, trained under a TrainingMonitor in mode hybrid.
--output DIR keeps the trace of a small model of each kind (DIR/KIND.json.gz) and censuses (DIR/census.json).
Ends with one line of JSON; exits 1 where a check failed. With --tiny it runs on a CPU, as a test of itself.

    python benchmarks/gpu/explain.py --output DIR [--only NAME …] [--steps 40] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.census.census import census_of
from truemfu.census.record import CENSUS_FILE, TRACE_FILE, Census
from truemfu.records import read_record

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

LARGE, SMALL, TINY = range(3)
"""The model that is measured, the one whose trace is kept, the one that runs on a CPU."""
Step = Callable[[], torch.Tensor]
MOST_APART, MOST_COST_S = 0.02, 3.0


class UNet(nn.Module):
    """Convolutions down and up with skip connections and group normalisation."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        sizes = [channels * 2**i for i in range(depth + 1)]
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList(self._block(a, b, 2) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(self._block(b, a, 1) for a, b in itertools.pairwise(sizes))
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    @staticmethod
    def _block(given: int, made: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, stride, 1), nn.GroupNorm(8, made), nn.SiLU())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x, kept = self.first(images), []
        for block in self.down:
            kept.append(x)
            x = block(x)
        for block in reversed(self.up):
            x = block(nn.functional.interpolate(x, scale_factor=2)) + kept.pop()
        out: torch.Tensor = self.last(x)
        return out


def language(size: int, device: str, *, experts: bool = False, how: str = "") -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    hidden, layers, vocabulary = ((2048, 8, 32000), (512, 2, 8000), (64, 2, 1000))[size]
    config: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": max(4, hidden // 128),
        "num_key_value_heads": max(4, hidden // 128),
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
    }
    dtype = torch.float32 if how == "fp32" or device == "cpu" else torch.bfloat16
    with torch.device(device):
        if experts:
            model: Any = MixtralForCausalLM(
                MixtralConfig(**config, num_local_experts=8, num_experts_per_tok=2)
            ).to(dtype)
        else:
            model = LlamaForCausalLM(LlamaConfig(**config)).to(dtype)
    if how == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    samples, length = ((8, 1024), (2, 256), (2, 16))[size]
    ids = torch.randint(1000, (samples, length), device=device)
    called = torch.compile(model) if how == "compiled" else model
    return called, lambda: called(input_ids=ids, labels=ids).loss


def bert(size: int, device: str) -> tuple[nn.Module, Step]:
    from transformers import BertConfig, BertForMaskedLM

    layers, hidden = ((8, 768), (2, 256), (2, 64))[size]
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=hidden // 32 if size else 12,
        intermediate_size=4 * hidden,
        vocab_size=30522 if size < TINY else 1000,
    )
    with torch.device(device):
        model: Any = BertForMaskedLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16)
    samples, length = ((64, 256), (4, 128), (2, 16))[size]
    ids = torch.randint(1000, (samples, length), device=device)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def vision(kind: str, size: int, device: str) -> tuple[nn.Module, Step]:
    import transformers

    side = (224, 224, 64)[size]
    if kind == "vit":
        layers, hidden = ((12, 768), (2, 256), (2, 64))[size]
        config: Any = transformers.ViTConfig(
            image_size=side,
            patch_size=16,
            num_hidden_layers=layers,
            hidden_size=hidden,
            num_attention_heads=hidden // 64 if size < TINY else 4,
            intermediate_size=4 * hidden,
        )
        made: Any = transformers.ViTForImageClassification
    elif kind == "convnext":
        depths, widths = (
            ([3, 3, 9, 3], [96, 192, 384, 768]),
            ([1, 1, 1, 1], [64, 128, 256, 512]),
            ([1, 1, 1, 1], [8, 16, 32, 64]),
        )[size]
        config = transformers.ConvNextConfig(image_size=side, depths=depths, hidden_sizes=widths)
        made = transformers.ConvNextForImageClassification
    else:
        depths, widths = (
            ([3, 4, 6, 3], [256, 512, 1024, 2048]),
            ([1, 1, 1, 1], [64, 128, 256, 512]),
            ([1, 1, 1, 1], [8, 16, 32, 64]),
        )[size]
        config = transformers.ResNetConfig(depths=depths, hidden_sizes=widths)
        made = transformers.ResNetForImageClassification
    config.num_labels = 1000
    with torch.device(device):
        model = made(config)
    images = torch.randn((128, 8, 2)[size], 3, side, side, device=device)
    labels = torch.randint(1000, (len(images),), device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            out: torch.Tensor = model(pixel_values=images, labels=labels).loss
        return out

    return model, loss


def u_net(size: int, device: str) -> tuple[nn.Module, Step]:
    channels, depth = ((64, 4), (32, 3), (8, 2))[size]
    model = UNet(channels, depth).to(device)
    side = (256, 128, 32)[size]
    images = torch.randn((32, 4, 2)[size], 3, side, side, device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            out = model(images)
        return nn.functional.mse_loss(out.float(), images)

    return model, loss


MODELS: dict[str, Callable[[int, str], tuple[nn.Module, Step]]] = {
    "llama": language,
    "vit": lambda size, device: vision("vit", size, device),
    "convnext": lambda size, device: vision("convnext", size, device),
    "resnet": lambda size, device: vision("resnet", size, device),
    "bert": bert,
    "experts": lambda size, device: language(size, device, experts=True),
    "u_net": u_net,
    "checkpointed": lambda size, device: language(size, device, how="checkpointed"),
    "fp32": lambda size, device: language(size, device, how="fp32"),
    "compiled": lambda size, device: language(size, device, how="compiled"),
}


class Marks:
    """The end of each step on the device's clock, or on the host's."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self, number: int) -> float:
        """Of a step, counted from 1: between its mark and the one before."""
        one, other = self._marks[number - 1], self._marks[number]
        return float(one.elapsed_time(other)) / 1e3 if self._is_cuda else other - one


def train(name: str, size: int, device: str, steps: int, folder: Path) -> tuple[dict[str, Any], Census]:
    """Train under a monitor; its figures, and the census."""
    model, loss_of = MODELS[name](size, device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    marks = Marks(device)
    config = {"monitoring": {"mfu_calculation_mode": "hybrid", "census": True}}
    with TrainingMonitor(folder, config, model=model, trackers=[]) as monitor:
        marks.mark()
        for step in range(1, steps + 1):
            loss = loss_of()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            marks.mark()
            monitor.log_step(step, None, loss.detach(), None, None)
        if device == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
    closing_s = time.perf_counter() - began_s
    summary = monitor.summary()
    census = read_record(folder / CENSUS_FILE, Census)
    number = int((census.step or "#0").partition("#")[2])
    began_s = time.perf_counter()
    census_of(folder / TRACE_FILE)
    reading_s = time.perf_counter() - began_s
    plain = [marks.seconds(n) for n in range(10, steps + 1) if abs(n - number) > 2]
    by_events_s = marks.seconds(number)
    products = [row for row in census.kernels if row.kind in ("products", "convolutions", "attention")]
    figures = {
        "device": census.device,
        "step": number,
        "events_ms": 1e3 * by_events_s,
        "sum_ms": 1e3 * sum(one.seconds for one in census.classes),
        "busy_ms": 1e3 * census.busy_s,
        "ordinary_ms": 1e3 * statistics.median(plain),
        "median_by_monitor_ms": None if census.ordinary_step_s is None else 1e3 * census.ordinary_step_s,
        "after_ms": 1e3 * marks.seconds(number + 1),
        "cost_s": summary["monitor_cost"]["census_s"],
        "reading_s": reading_s,
        "closing_s": closing_s,
        "trace_mb": (folder / TRACE_FILE).stat().st_size / 1e6,
        "launches": census.launches,
        "without_operator": sum(row.launches for row in census.kernels if row.operator is None),
        "without_module": sum(row.launches for row in census.kernels if row.module is None),
        "products_without_flops_ms": 1e3 * sum(row.seconds for row in products if row.flops is None),
        "without_bytes_ms": 1e3 * sum(row.seconds for row in census.kernels if row.bytes is None),
        "flops": sum(one.flops or 0 for one in census.classes),
        "hfu_of_count": summary["median_hfu"],
        "warnings": summary["warnings"],
        "notes": census.notes,
    }
    figures["apart"] = figures["sum_ms"] / figures["events_ms"] - 1
    del model, optimizer, loss_of
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return figures, census


def failures(figures: dict[str, Any], census: Census) -> list[str]:
    found = []
    if abs(figures["apart"]) > MOST_APART:
        found.append(f"parts are {100 * figures['apart']:+.1f} % from the events")
    if (figures["cost_s"] or 0) > MOST_COST_S:
        found.append(f"it cost {figures['cost_s']:.1f} s")
    if not any(one.flops for one in census.classes):
        found.append("no FLOPs")
    if any(one.key == "other" and one.share > 0.01 for one in census.classes):
        found.append("more than 1 % in kernels without a class")
    return found


def show(name: str, figures: dict[str, Any], census: Census) -> None:
    print(f"== {name}: " + ", ".join(f"{k} {_short(v)}" for k, v in figures.items()))
    for one in census.classes:
        rate = (
            "" if one.flops is None or not one.seconds else f"{one.flops / one.seconds / 1e12:8.1f} TFLOP/s"
        )
        moved = "" if one.bytes is None or not one.seconds else f"{one.bytes / one.seconds / 1e12:6.2f} TB/s"
        print(
            f"  {one.name:26}{1e3 * one.seconds:9.3f} ms {100 * one.share:5.1f} % {one.launches:6}"
            f"{rate}{moved}"
        )
    for row in census.kernels[:25]:
        print(
            f"  {1e3 * row.seconds:8.3f} ms {row.launches:5} {row.kind:13} {row.operator} | "
            f"{row.kernel[:60]} | "
            f"{row.module} | {row.dtype} | {row.limit} {1e3 * (row.limit_s or 0):.3f} {row.unknown or ''}"
        )
    for row in [row for row in census.kernels if row.kind == "other"][:10]:
        print(f"  no class: {row.operator} | {row.kernel}")
    for bound in census.bounds:
        seconds = "-" if bound.at_most_s is None else f"{1e3 * bound.at_most_s:.2f} ms"
        print(f"  {bound.remedy:18}{seconds:>12}  {bound.evidence}")
    sys.stdout.flush()


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    options.output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    censuses: dict[str, Any] = {}
    for name in options.only:
        for size in [TINY] if options.tiny else [LARGE, SMALL]:
            title = name if size != SMALL else f"{name}, small"
            try:
                with tempfile.TemporaryDirectory() as folder:
                    figures, census = train(name, size, device, options.steps, Path(folder))
                    if size != LARGE:
                        shutil.copy(Path(folder) / TRACE_FILE, options.output / f"{name}.json.gz")
                show(title, figures, census)
                # A small model has no step that is like another: what counts is the large one.
                figures["failures"] = failures(figures, census) if size != SMALL else []
                results[title], censuses[title] = figures, msgspec.to_builtins(census)
            except Exception as error:
                traceback.print_exc()
                results[title] = {"failures": [f"{type(error).__name__}: {error}"]}
            print(f"  failures: {results[title]['failures'] or 'none'}", flush=True)
            (options.output / "census.json").write_text(json.dumps(censuses, indent=1), encoding="utf-8")
    print(json.dumps({"source": source_id(), "torch": torch.__version__, "models": results}))
    return int(any(one["failures"] for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
