"""What a model's signature and configuration show about its inputs, and the requested batch size."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import BatchError, UsageError

DEFAULT_LENGTH = 512
_LARGEST_SIZE = 2**31 - 1
"""Of a dimension: anything larger is a mistake, and two such sizes overflow torch's 64 bits."""
_MOST_TOKENS = 2**28
"""Of a batch: tokens are generated with values, at most 2 GiB of them."""


@dataclass(frozen=True, kw_only=True)
class BatchRequest:
    """How large a batch: samples, tokens per sample, images per sample and their edge in pixels.

    `length` and `image_size` default to the model's own if `None`; with `images=0` a model of text and images
    is counted on text only.
    """

    samples: int
    length: int | None = None
    images: int = 1
    image_size: int | None = None

    def __post_init__(self) -> None:
        for what, value, least in (
            ("batch size", self.samples, 1),
            ("sequence length", self.length, 1),
            ("number of images", self.images, 0),
            ("image size", self.image_size, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{what} must be at least {least}; got {value}")
            if value is not None and value > _LARGEST_SIZE:
                raise UsageError(f"{what} must be at most {_LARGEST_SIZE:,}; got {value:,}")
        if self.samples * (self.length or 1) > _MOST_TOKENS:
            raise UsageError(
                f"a batch must have at most {_MOST_TOKENS:,} tokens; got {self.samples:,} × "
                f"{self.length or 1:,}: count fewer samples, FLOPs are proportional to them"
            )


class ModelView:
    """A model's forward arguments, configuration, dtype and device."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.arguments = inspect.signature(model.forward).parameters
        self.config: Any = getattr(model, "config", None)
        text_config: Any = getattr(self.config, "get_text_config", None)
        self.text: Any = text_config() if callable(text_config) else self.config
        self.vision: Any = getattr(self.config, "vision_config", None) or self.config
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0, device="cpu"))
        self.dtype, self.on_meta = first.dtype, first.is_meta

    def takes(self, *names: str) -> bool:
        return all(name in self.arguments for name in names)

    def head(self, *endings: str) -> bool:
        return type(self.model).__name__.endswith(endings)

    def floats(self, *shape: int) -> Tensor:
        """Without values for a model without values, else random: some models drop an all-zero image."""
        if self.on_meta:
            return torch.empty(shape, dtype=self.dtype, device="meta")
        generator = torch.Generator().manual_seed(0)
        return torch.rand(shape, generator=generator, device="cpu").to(self.dtype)

    @property
    def vocab(self) -> int:
        for config in (self.text, self.config):
            size = getattr(config, "vocab_size", None)
            if isinstance(size, int):
                return size
        embeddings = (m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding))
        size = next(embeddings, None)
        if size is None:
            raise UsageError(f"{type(self.model).__name__} takes input_ids but states no vocabulary size")
        return size

    @property
    def classes(self) -> int:
        return int(getattr(self.config, "num_labels", 2))

    @property
    def image_token(self) -> int | None:
        for name in ("image_token_id", "image_token_index"):
            token = getattr(self.config, name, None)
            if token is not None:
                return int(token)
        return None

    @property
    def max_length(self) -> int | None:
        """Positions of the text side, if the configuration limits them."""
        for config in (self.config, self.text):
            for name in ("max_target_positions", "max_position_embeddings", "n_positions", "n_ctx"):
                limit = getattr(config, name, None)
                if isinstance(limit, int) and limit > 0:
                    return limit
        return None

    def length(self, request: BatchRequest) -> int:
        return request.length or min(DEFAULT_LENGTH, self.max_length or DEFAULT_LENGTH)

    def image_edges(self, request: BatchRequest, default: int = 224) -> tuple[int, int]:
        size = request.image_size or getattr(self.vision, "image_size", None) or default
        if isinstance(size, Mapping):
            return int(size["height"]), int(size["width"])
        if isinstance(size, list | tuple):
            return int(size[0]), int(size[-1])
        return int(size), int(size)

    def images(self, count: int, request: BatchRequest) -> Tensor:
        height, width = self.image_edges(request)
        return self.floats(count, self.channels, height, width)

    @property
    def channels(self) -> int:
        for name in ("num_channels", "in_channels", "in_chans"):
            count = getattr(self.vision, name, None)
            if isinstance(count, int):
                return count
        return 3

    def tokens(self, *shape: int) -> Tensor:
        """Ordinary tokens, the same in every run: no special tokens and no padding."""
        special = {
            value
            for config in (self.config, self.text)
            for name, value in (vars(config).items() if config is not None else ())
            if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
        }
        ordinary = [token for token in range(min(self.vocab, 4096)) if token not in special]
        if not ordinary:
            raise BatchError(f"a vocabulary of {self.vocab} leaves no ordinary token to build a batch from")
        generator = torch.Generator().manual_seed(0)
        picks = torch.randint(len(ordinary), shape, generator=generator, device="cpu")
        return torch.tensor(ordinary, device="cpu")[picks]
