"""Observed steps on a real GPU: what they cost, that they wait for nothing, and that their FLOPs are right.

Why: the monitor counts FLOPs by watching a few real steps operator by operator. For each model it prints
  observed    the extra time of each observed step after the first over the median plain step
  memory      the peak of allocated memory in observed steps against plain ones
  flops       model FLOPs of the log's rows against count_flops (on fake tensors), except of the experts,
              whose router needs real values, and of the model under autocast: there all rows must be equal
  waiting     whether the run, observed steps included, passes torch.cuda.set_sync_debug_mode("error")
  share       what all observations of the run took of its time
Models: the 1.3 B reference model, Llama 1.3 B (plain, accumulation 3, both checkpoints, compiled), a U-Net, a
mixture of experts, a vision transformer under autocast. Ends with one line of JSON; exits 1 where a check
failed. On a CPU it runs tiny models, as a test of itself.

    python benchmarks/gpu/observe.py [--only NAME …] [--steps 12] [--tiny]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import truemfu
from truemfu import TrainingMonitor, count_flops

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

Step = Callable[[], torch.Tensor]
PARTS = 3
"""Micro-batches of the accumulated step."""


class Case:
    """A training: `step` runs one, `counted` is what count_flops says of it, or None."""

    def __init__(self, model: nn.Module, step: Step, counted: Callable[[], int] | None) -> None:
        self.model, self.step, self.counted = model, step, counted


def language_model(kind: str, tiny: bool, *, how: str = "") -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cpu" if tiny else "cuda"
    dtype = torch.float32 if tiny else torch.bfloat16
    if kind == "reference":
        from truemfu.sweep.worker.models import build_reference_model

        model: Any = build_reference_model("tiny" if tiny else "1b", device=device, dtype=dtype)
    else:
        sizes = (
            {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
            if tiny
            else {
                "hidden_size": 2048,
                "intermediate_size": 5504,
                "num_hidden_layers": 24,
                "num_attention_heads": 32,
            }
        )
        config = LlamaConfig(vocab_size=1000 if tiny else 32000, max_position_embeddings=4096, **sizes)
        with torch.device(device):
            model = LlamaForCausalLM(config).to(dtype)
    model.train()
    if how in ("reentrant", "checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
    batch_size, length = (2, 16) if tiny else (4, 512)
    ids = torch.randint(1000, (batch_size, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=not tiny)
    called = torch.compile(model) if how == "compiled" else model
    parts = PARTS if how == "accumulated" else 1

    def step() -> torch.Tensor:
        for _ in range(parts):
            loss: torch.Tensor = called(input_ids=ids, labels=ids).loss
            (loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def counted() -> int:
        return parts * count_flops(model, {"input_ids": ids, "labels": ids}).model_flops

    return Case(called, step, counted)


def trained(optimizer: torch.optim.Optimizer, loss_of: Step) -> Step:
    """A step on one batch: what `loss_of` gives is differentiated."""

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


class UNet(nn.Module):
    """Convolutions down and up with skip connections, attention in the middle."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels
        self.first = nn.Conv2d(3, c, 3, padding=1)
        self.down = nn.ModuleList([nn.Conv2d(c * 2**i, c * 2 ** (i + 1), 3, 2, 1) for i in range(3)])
        self.middle = nn.MultiheadAttention(c * 8, 8, batch_first=True)
        self.up = nn.ModuleList([nn.Conv2d(c * 2 ** (i + 1) + c * 2**i, c * 2**i, 3, 1, 1) for i in range(3)])
        self.last = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = torch.relu(down(x))
        rows = x.flatten(2).transpose(1, 2)
        rows = rows + self.middle(rows, rows, rows, need_weights=False)[0]
        x = rows.transpose(1, 2).reshape(x.shape)
        for up, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2)
            x = torch.relu(up(torch.cat([x, skip], dim=1)))
        out: torch.Tensor = self.last(x)
        return out


def u_net(tiny: bool) -> Case:
    device = "cpu" if tiny else "cuda"
    model = UNet(8 if tiny else 64).to(device)
    images = torch.randn((1, 3, 32, 32) if tiny else (16, 3, 256, 256), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = trained(optimizer, lambda: (model(images) - images).square().mean())
    return Case(model, step, lambda: count_flops(model, (images,)).model_flops)


class Experts(nn.Module):
    """Layers of experts that a router chooses, two for each token, run one after the other."""

    def __init__(self, layers: int, width: int, experts: int) -> None:
        super().__init__()
        self.routers = nn.ModuleList([nn.Linear(width, experts, bias=False) for _ in range(layers)])
        self.experts = nn.ModuleList(
            [
                nn.ModuleList(
                    [
                        nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
                        for _ in range(experts)
                    ]
                )
                for _ in range(layers)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights, chosen = router(x).softmax(-1).topk(2, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(experts):  # type: ignore[arg-type]
                rows, place = torch.where(chosen == number)
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
            x = x + out
        return x


def experts(tiny: bool) -> Case:
    device = "cpu" if tiny else "cuda"
    model = Experts(2, 32, 4).to(device) if tiny else Experts(8, 1024, 8).to(device, torch.bfloat16)
    width = 32 if tiny else 1024
    tokens = torch.randn(64 if tiny else 8192, width, device=device, dtype=next(model.parameters()).dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = trained(optimizer, lambda: model(tokens).square().mean())
    return Case(model, step, None)


def vision(tiny: bool) -> Case:
    from transformers import ViTConfig, ViTModel

    device = "cpu" if tiny else "cuda"
    sizes = (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        if tiny
        else {}
    )
    with torch.device(device):
        model = ViTModel(ViTConfig(**sizes)).train()
    images = torch.randn(2 if tiny else 64, 3, 224, 224, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def forward() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(pixel_values=images).last_hidden_state.float().square().mean()
        return loss

    return Case(model, trained(optimizer, forward), None)


class Block(nn.Module):
    """A layer that a checkpoint of the program's own wraps, half of the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + checkpoint(self.inner, x, use_reentrant=False)
        return out


def checkpointed_stack(tiny: bool) -> Case:
    device, width, layers = ("cpu", 32, 2) if tiny else ("cuda", 4096, 12)
    model = nn.Sequential(*[Block(width) for _ in range(layers)]).to(device)
    rows = torch.randn(16 if tiny else 8192, width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    step = trained(optimizer, lambda: model(rows).square().mean())
    return Case(model, step, lambda: count_flops(model, (rows,)).model_flops)


CASES: dict[str, Callable[[bool], Case]] = {
    "reference 1b": lambda tiny: language_model("reference", tiny),
    "Llama 1.3 B": lambda tiny: language_model("llama", tiny),
    "Llama, accumulation 3": lambda tiny: language_model("llama", tiny, how="accumulated"),
    "Llama, checkpointed": lambda tiny: language_model("llama", tiny, how="checkpointed"),
    "Llama, re-entrant checkpoint": lambda tiny: language_model("llama", tiny, how="reentrant"),
    "Llama, compiled": lambda tiny: language_model("llama", tiny, how="compiled"),
    "U-Net": u_net,
    "experts": experts,
    "ViT, autocast": vision,
    "checkpointed stack": checkpointed_stack,
}


def waits_by_itself(case: Case) -> bool:
    """Whether the program waits for the device without a monitor: a router, a checkpoint's random state."""
    case.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.step()
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def run(name: str, tiny: bool, steps: int) -> dict[str, Any]:
    """One case with a monitor that observes its first two steps and, by its frequency, later ones."""
    case = CASES[name](tiny)
    on_gpu = not tiny
    waits = on_gpu and waits_by_itself(case)
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        config = {"monitoring": {"peak_tflops": 989.4, "flops_profile_freq": max(4, steps // 3)}}
        monitor = TrainingMonitor(folder, config, model=case.model)
        error = None
        began_s = time.perf_counter()
        for step in range(1, steps + 1):
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            if on_gpu and not waits and step > 1:
                torch.cuda.set_sync_debug_mode("error")
            try:
                loss = case.step()
                monitor.log_step(step, 0, loss.detach(), None, 1e-5)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
                break
            finally:
                if on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
            peaks.append(torch.cuda.max_memory_allocated() if on_gpu else 0)
        if on_gpu:
            torch.cuda.synchronize()
        run_s = time.perf_counter() - began_s
        monitor.close()
        rows = json.loads((Path(folder) / "training_log.json").read_text())
        summary = monitor.summary()
    observed = [row["global_step"] for row in rows if row.get("perf/observed")]
    plain = [row["perf/step_time"] for row in rows if "perf/warmup" not in row and "perf/step_time" in row]
    plain_s = statistics.median(plain) if plain else None
    extra = [
        row["perf/step_time"] - plain_s
        for row in rows
        if row.get("perf/observed") and row["global_step"] > 1 and plain_s is not None
    ]
    flops = {
        round(row["perf/tflops_per_gpu"] * 1e12 * row["perf/step_time"])
        for row in rows
        if "perf/tflops_per_gpu" in row
    }
    found: dict[str, Any] = {
        "name": name,
        "error": error,
        "plain_step_s": plain_s,
        "observed_steps": observed,
        "extra_s": extra,
        "peak_bytes_observed": max((peaks[s - 1] for s in observed if 1 < s <= len(peaks)), default=None),
        "peak_bytes_plain": max(
            (p for s, p in enumerate(peaks, 1) if s not in observed and s > 2), default=None
        ),
        "flops": sorted(flops),
        "rows": len(rows),
        "rows_with_flops": sum("perf/tflops_per_gpu" in row for row in rows),
        "unknown": summary["mfu_unknown"],
        "warnings": summary["warnings"],
        "waits_by_itself": waits,
        "share": summary["monitor_cost"]["observing_s"] / run_s,
        "counted": None if case.counted is None else case.counted(),
    }
    return found


def show(found: dict[str, Any]) -> bool:
    """Print one case; whether its checks hold."""
    extra = found["extra_s"]
    plain = found["plain_step_s"]
    print(f"\n{found['name']}")
    if found["error"] is not None:
        print(f"  FAILED: {found['error']}")
        return False
    if plain is not None and extra:
        shown = ", ".join(f"{1e3 * seconds:.0f}" for seconds in extra)
        print(
            f"  plain step {1e3 * plain:.1f} ms; observed steps {found['observed_steps']}: {shown} ms more; "
            f"all of them {found['share']:.1%} of this short run"
        )
    if found["peak_bytes_observed"] and found["peak_bytes_plain"]:
        more = found["peak_bytes_observed"] - found["peak_bytes_plain"]
        print(f"  peak memory {found['peak_bytes_plain'] / 2**20:,.1f} MiB, observed {more / 2**20:+.3f} MiB")
    counted, flops = found["counted"], found["flops"]
    expected = counted or (flops[0] if flops else 0)
    is_same = bool(flops) and all(abs(one - expected) <= 1e-6 * expected for one in flops)
    print(
        f"  FLOPs of {found['rows_with_flops']} of {found['rows']} rows: {flops}; "
        f"{'not compared with count_flops' if counted is None else f'count_flops: {counted}'}: "
        f"{'equal' if is_same else 'DIFFERENT'}"
    )
    if found["waits_by_itself"]:
        print("  the program waits for the device by itself: not checked for waits")
    for reason, steps in found["unknown"].items():
        print(f"  unknown in {steps} rows: {reason}")
    for text in found["warnings"]:
        print(f"  warning: {text}")
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", default=not torch.cuda.is_available())
    options = parser.parse_args()
    device = "CPU" if options.tiny else torch.cuda.get_device_name()
    print(f"{datetime.date.today()}, {device}, torch {torch.__version__}, truemfu {truemfu.__version__}")
    print(f"source {source_id()}")
    results, is_good = [], True
    for name in options.only:
        found = run(name, options.tiny, options.steps)
        is_good = show(found) and is_good
        results.append(found)
        gc.collect()
        if not options.tiny:
            torch.cuda.empty_cache()
    print(json.dumps({"device": device, "torch": torch.__version__, "cases": results}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
