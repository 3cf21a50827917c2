"""The work that `hardware_truth.py` measures and Nsight Compute referees: products, runs, staged runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from truemfu.sweep.sizes import SIZES
from truemfu.sweep.worker.models import ReferenceModel

DEVICE = torch.device("cuda", 0)
LAYERS = SIZES["1b"].layers
LEARNING_RATE = 1e-9
"""Next to nothing, so that the weights stay those that ncu saw: what AdamW's kernel leaves on the tensor pipe
depends on the values."""
Step = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product, repeated."""

    dtype: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.m}×{self.n}×{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def make(self) -> Callable[[], object]:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if self.dtype == "tf32" else "ieee"
        a = torch.randn(self.m, self.k, device=DEVICE)
        b = torch.randn(self.n, self.k, device=DEVICE)
        if self.dtype == "fp8":
            one = torch.ones((), device=DEVICE)
            a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
            return lambda: torch._scaled_mm(
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        kind = {
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
            "tf32": torch.float32,
            "fp64": torch.float64,
        }[self.dtype]
        left, right = a.to(kind), b.to(kind).t()
        out = torch.empty(self.m, self.n, device=DEVICE, dtype=kind)
        return lambda: torch.mm(left, right, out=out)


PRODUCTS = (
    Product("bf16", 8192, 8192, 8192),
    Product("bf16", 4096, 4096, 4096),
    Product("bf16", 2048, 2048, 2048),
    Product("bf16", 1024, 1024, 1024),
    Product("bf16", 8192, 32000, 2048),
    Product("bf16", 4104, 4104, 4096),
    Product("bf16", 1000, 1000, 1000),
    Product("bf16", 16384, 128, 4096),
    Product("bf16", 4095, 4095, 4096),
    Product("fp16", 8192, 8192, 8192),
    Product("tf32", 8192, 8192, 8192),
    Product("fp8", 8192, 8192, 8192),
    Product("fp64", 4096, 4096, 4096),
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A way to train the reference model."""

    samples: int
    length: int
    causal: bool = True
    checkpointed: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        words = [f"{self.samples}×{self.length}", "causal" if self.causal else "full attention"]
        words += ["checkpointed"] * self.checkpointed + ["compiled"] * self.compiled
        return ", ".join(words)

    def build(self, layers: int = LAYERS) -> tuple[nn.Module, dict[str, torch.Tensor], Step]:
        torch.manual_seed(0)
        size = dataclasses.replace(SIZES["1b"], layers=layers)
        model = ReferenceModel(size, device=DEVICE, dtype=torch.bfloat16)
        if self.checkpointed:
            model.gradient_checkpointing_enable()
        if self.compiled:
            model.compile()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        ids = torch.randint(size.vocab, (self.samples, self.length), device=DEVICE)
        batch = {"input_ids": ids, "labels": ids}
        return model, batch, training_step(model, batch, optimizer)


RUNS = (
    Run(4, 512),
    Run(8, 1024),
    Run(16, 2048),
    Run(8, 1024, causal=False),
    Run(8, 1024, checkpointed=True),
    Run(8, 1024, compiled=True),
)


@dataclasses.dataclass(frozen=True)
class OtherModel:
    """A model whose kernels differ from the reference model's; random weights, bf16, cut to few layers."""

    name: str
    make: Callable[[], tuple[nn.Module, dict[str, torch.Tensor]]]

    def build(self) -> tuple[nn.Module, dict[str, torch.Tensor], Step]:
        torch.manual_seed(0)
        with DEVICE:
            model, batch = self.make()
        model = model.to(torch.bfloat16).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        return model, batch, training_step(model, batch, optimizer)


def _images(samples: int) -> dict[str, torch.Tensor]:
    pixels = torch.randn(samples, 3, 224, 224, dtype=torch.bfloat16)
    return {"pixel_values": pixels, "labels": torch.randint(1000, (samples,))}


def _vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024,
        num_hidden_layers=2,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config), _images(128)


def _resnet() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=1000,
    )
    return ResNetForImageClassification(config), _images(256)


def _experts() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32_000,
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    ids = torch.randint(config.vocab_size, (4, 1024))
    return Qwen3MoeForCausalLM(config), {"input_ids": ids, "labels": ids}


OTHER_MODELS = (
    OtherModel("ViT-L/16 of two layers, 128 images", _vit),
    OtherModel("ResNet-18, 256 images", _resnet),
    OtherModel("64 experts, one layer, 4×1024", _experts),
)


class attention:
    """While entered, `scaled_dot_product_attention` attends to everything where `causal` is False."""

    def __init__(self, causal: bool) -> None:
        self._causal, self._kept = causal, F.scaled_dot_product_attention

    def __enter__(self) -> None:
        if not self._causal:
            kept = self._kept
            F.scaled_dot_product_attention = lambda q, k, v, is_causal=False: kept(q, k, v)  # type: ignore

    def __exit__(self, *_: object) -> None:
        F.scaled_dot_product_attention = self._kept


def elementwise() -> dict[str, Callable[[], object]]:
    """Kernels that multiply no matrices, some of which tick the tensor pipe all the same."""
    x = torch.randn(2048, 8192, device=DEVICE, dtype=torch.bfloat16)
    columns, wide = x[:, ::2], x.float()
    return {
        "bf16 x · x": lambda: x * x,
        "bf16 x · x, strided": lambda: columns * columns,
        "bf16 copy, strided": lambda: columns.contiguous(),
        "bf16 SiLU": lambda: F.silu(x),
        "bf16 GELU": lambda: F.gelu(x),
        "bf16 layer norm": lambda: F.layer_norm(x, (8192,)),
        "fp32 softmax": lambda: torch.softmax(wide, -1),
        "fp32 x · x, strided": lambda: wide[:, ::2] * wide[:, ::2],
        "bf16 fused AdamW": _adamw(1e-3 * x),
        "bf16 fused AdamW, all zero": _adamw(torch.zeros_like(x)),
    }


def _adamw(gradient: torch.Tensor) -> Callable[[], object]:
    weights = nn.Parameter(torch.randn_like(gradient))
    weights.grad = gradient
    return torch.optim.AdamW([weights], lr=LEARNING_RATE, fused=True).step


def training_step(model: nn.Module, batch: dict[str, Any], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> torch.Tensor:
        output = model(**batch)
        loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


class Wide(nn.Module):
    """A few very wide layers: nearly all of its time is matrix products."""

    def __init__(self, blocks: int = 2, *, checkpointed: bool = False) -> None:
        super().__init__()
        hidden = 8192
        self.tokens = nn.Embedding(1024, hidden)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.Linear(hidden, hidden, bias=False) for _ in range(4))) for _ in range(blocks)
        )
        self.checkpointed = checkpointed

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x: torch.Tensor = self.tokens(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x.mean()


class Tiny(nn.Module):
    """Many layers with next to nothing to do in each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(400)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).mean()
        return result


class Staged(NamedTuple):
    """A run with one limit that is known beforehand."""

    name: str
    limiters: tuple[str, ...]
    make: Callable[[], nn.Module]
    batch: dict[str, torch.Tensor]
    wait_s: float = 0.0

    def build(self) -> tuple[nn.Module, Step]:
        torch.manual_seed(0)
        model = self.make().to(DEVICE, torch.bfloat16)
        return model, training_step(model, self.batch, torch.optim.SGD(model.parameters(), lr=1e-9))

    def batches(self) -> Iterator[Any]:
        while True:
            if self.wait_s:
                time.sleep(self.wait_s)
            yield self.batch


def _all_zero() -> nn.Module:
    """Zeros draw less power: its limit takes less of the clock, and what is staged takes more."""
    model = Wide(checkpointed=True)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def staged_runs() -> tuple[Staged, ...]:
    ids = torch.randint(1024, (16, 1024), device=DEVICE)
    half = torch.ones_like(ids)
    half[:, 512:] = 0
    few = torch.randn(8, 64, device=DEVICE, dtype=torch.bfloat16)
    return (
        Staged("slow data loader", ("idle_data_wait",), lambda: Wide(1), {"input_ids": ids}, 0.3),
        Staged("many tiny kernels", ("idle_launch_gaps", "no_tensor_unfilled"), Tiny, {"x": few}),
        Staged("power-limited products", ("clock",), Wide, {"input_ids": ids}),
        Staged("half padding", ("padding_tokens",), Wide, {"input_ids": ids, "attention_mask": half}),
        Staged("checkpointing (all-zero weights)", ("recomputation",), _all_zero, {"input_ids": ids}),
    )


def wide_run() -> Staged:
    """The products of a wide model, which no small search of tiles foresees."""
    return next(run for run in staged_runs() if run.limiters == ("clock",))
