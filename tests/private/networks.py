"""Random networks of supported layers, and the clipped sum of a batch by a loop over its samples."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

VOCAB = 11
WIDTH = 8


class LoRA(nn.Module):
    """An adapter on a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


class ByHead(nn.Module):
    """A linear layer and a norm on a tensor of four dimensions, between attention's products."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH // 2, WIDTH // 2), LlamaRMSNorm(WIDTH // 2)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.inner(x.unflatten(-1, (2, -1)))).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2)


class OnChannels(nn.Module):
    """A layer that expects channels before positions."""

    def __init__(self, layer: nn.Module, *, is_2d: bool = False) -> None:
        super().__init__()
        self.layer, self.is_2d = layer, is_2d

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT
        if self.is_2d:
            return self.layer(F.pad(x[:, :, None], (0, 0, 1, 1)))[..., : x.shape[-1]].mean(2).mT
        return self.layer(x)[..., : x.shape[-1]].mT


class Pooled(nn.Module):
    """A layer that sees one vector of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mean(1))[:, None]


def with_frozen_bias() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    return layer


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "frozen bias": with_frozen_bias,
    "transformers' Conv1D": lambda: Conv1D(WIDTH, WIDTH),
    "wide and narrow": lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "RMS norm": lambda: nn.RMSNorm(WIDTH),
    "Llama's norm": lambda: LlamaRMSNorm(WIDTH),
    "Gemma's norm": lambda: GemmaRMSNorm(WIDTH),
    "group norm": lambda: OnChannels(nn.GroupNorm(2, WIDTH)),
    "convolution": lambda: OnChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding="same", dilation=2, bias=False)),
    "grouped convolution": lambda: OnChannels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)),
    "two-dimensional": lambda: OnChannels(
        nn.Conv2d(WIDTH, WIDTH, (2, 3), stride=(1, 1), padding=(0, 1), groups=2), is_2d=True
    ),
    "LoRA": LoRA,
    "by head": ByHead,
    "pooled": Pooled,
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "convolution, in place": lambda: OnChannels(
        nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.SiLU(inplace=True))
    ),
}


class Network(nn.Module):
    """Embeddings, random parts with residual connections, some of them twice or checkpointed, and a head."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=choose.choice([None, 0]))
        self.positions = nn.Embedding(16, WIDTH) if choose.random() < 0.5 else None
        chosen = choose.choices(list(PARTS), k=choose.randint(1, 5))
        self.parts = nn.ModuleList(PARTS[name]() for name in chosen)
        self.head = nn.Linear(WIDTH, VOCAB, bias=choose.random() < 0.5)
        if choose.random() < 0.4:
            self.head.weight = self.tokens.weight
        self.order = list(range(len(chosen)))
        if choose.random() < 0.5:
            self.order += choose.choices(self.order, k=2)
        self.checkpointed = {at for at in self.order if choose.random() < 0.3}
        self.description = ", ".join([*(chosen[at] for at in self.order), f"seed {seed}"])
        for parameter in self.parameters():  # norms too are not at their first values, ones and zeros
            with torch.no_grad():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1])[None])
        for at in self.order:
            part = self.parts[at]
            added = checkpoint(part, x, use_reentrant=False) if at in self.checkpointed else part(x)
            x = x + added.tanh()
        return self.head(x)


def losses_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token loss, mean over each sample's own tokens."""
    return F.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)


def loop(
    model: nn.Module, ids: Tensor, max_grad_norm: float, losses: Callable[..., Tensor] = losses_of
) -> dict[str, Tensor]:
    """One sample at a time, by plain autograd."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for one in ids.split(1):
        own = torch.autograd.grad(losses(model, one).sum(), list(trained.values()), allow_unused=True)
        whole = torch.stack([gradient.norm() for gradient in own if gradient is not None]).norm()
        scale = (max_grad_norm / whole).clamp(max=1)
        for name, gradient in zip(trained, own, strict=True):
            if gradient is not None:
                total[name] += scale.to(gradient.dtype) * gradient
    return total


def relative_error(made: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest of any parameter, relative to that parameter or a thousandth of all."""
    assert set(made) == set(expected)
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    return max(
        ((made[name] - value).norm() / torch.maximum(value.norm(), 1e-3 * whole)).item()
        for name, value in expected.items()
    )
