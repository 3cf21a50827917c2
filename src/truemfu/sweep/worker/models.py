"""The reference models: one GPT-style decoder in plain PyTorch, in four sizes.

The sweep times them and `truemfu count 1b` counts them, so they must run under every trainer, including
differentially private ones. Those need three details: positions are rotary, so no embedding
is looked up with an index that is not of the batch's shape; every `Linear` sees (batch, sequence, features);
and the head's weight is not shared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..sizes import SIZES, ModelSize


class ReferenceOutput(NamedTuple):
    """What `ReferenceModel` returns; the loss is `None` without labels."""

    loss: Tensor | None
    logits: Tensor


class Block(nn.Module):
    """Pre-norm decoder block: causal self-attention, then a GELU MLP of four times the width."""

    def __init__(self, size: ModelSize, **factory: Any) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(hidden, **factory)
        self.query = nn.Linear(hidden, hidden, **factory)
        self.key = nn.Linear(hidden, hidden, **factory)
        self.value = nn.Linear(hidden, hidden, **factory)
        self.out = nn.Linear(hidden, hidden, **factory)
        self.mlp_norm = nn.LayerNorm(hidden, **factory)
        self.up = nn.Linear(hidden, 4 * hidden, **factory)
        self.down = nn.Linear(4 * hidden, hidden, **factory)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        processed: Tensor = self.down(F.gelu(self.up(self.mlp_norm(x))))
        return x + processed


class ReferenceModel(nn.Module):
    """GPT-style language model with rotary positions and an untied head."""

    def __init__(self, size: ModelSize, **factory: Any) -> None:
        super().__init__()
        self.size = size
        self.gradient_checkpointing = False
        self.tokens = nn.Embedding(size.vocab, size.hidden, **factory)
        self.blocks = nn.ModuleList(Block(size, **factory) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden, **factory)
        self.head = nn.Linear(size.hidden, size.vocab, bias=False, **factory)
        self.apply(_initialise)

    def gradient_checkpointing_enable(self) -> None:
        """From now on store only the input of each block and recompute the rest in backward."""
        self.gradient_checkpointing = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ReferenceOutput:
        x = self.tokens(input_ids)
        cos, sin = _rotation(input_ids.shape[1], self.size.hidden // self.size.heads, x)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return ReferenceOutput(None if labels is None else _next_token_loss(logits, labels), logits)


def build_reference_model(
    size: str,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> ReferenceModel:
    """The reference model of this name (`SIZES`), on `device` (or the device context in force)."""
    return ReferenceModel(SIZES[size], device=device, dtype=dtype)


REFERENCE_MODELS: Mapping[str, Callable[[torch.dtype], ReferenceModel]] = MappingProxyType(
    {size: partial(build_reference_model, size, None) for size in SIZES}
)
"""Each size as a function of the dtype, as the command line needs it."""


def parameter_count(model: nn.Module) -> int:
    """Number of parameters, a shared one once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _rotation(length: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (length, dim / 2): elementwise, no matrix product."""
    frequencies = 10_000.0 ** (torch.arange(0, dim, 2, device=like.device) / -dim)
    angles = torch.arange(length, device=like.device)[:, None] * frequencies
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features by its position's angle; x is (batch, heads, length, dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _initialise(module: nn.Module) -> None:
    """GPT-2's initialisation: small normal weights, so that the first loss is about log(vocab)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it; labels of -100 are left out."""
    predictions, targets = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(predictions.flatten(0, 1).float(), targets.flatten())
