"""A model's layers in the order they are registered, with the rows each one processes and its backward.

Rows and query-key pairs are functions of a batch's sizes: `Stream` and `Pairs`.

Nothing is run, so what a forward does between its layers is inferred from how models are usually written:
children run in the order they are registered, a shortcut beside the others; a token embedding starts the
text, a convolution the images or audio.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from ...convention import Convention
from ...errors import ModelError
from ..attention.pairs import CAUSAL, FULL, Band
from ..attention.windows import sliding_window
from ..operators.dtype_names import dtype_name
from ..wrappers import unwrap_fsdp
from . import layers

FUSED_NOTE = "a fused attention kernel is assumed, whose backward computes the scores again"
_TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk")
_BRANCH = re.compile(r"shortcut|skip|identity|downsample$", re.IGNORECASE)


TOKENS, TARGET, SIGNAL, FEATURES = "token ids", "a decoder's token ids", "images or audio", "features"
"""The inputs that a stream may start at."""

Sizes = Mapping[str, Mapping[int, int]]
"""For each input of a batch: how many sequences or images of each length there are."""


@dataclass(frozen=True)
class Stream:
    """Rows at one point of the model."""

    source: str
    stride: Fraction = Fraction(1)
    """How many positions of the input there are for each row."""
    extra: int = 0
    """Rows added to each sequence: class and register tokens."""
    pooled: bool = False
    """Whether one row is left of each sequence."""

    def of(self, sizes: Sizes) -> int:
        """Rows of all sequences."""
        return sum(self.rows(length) * count for length, count in sizes.get(self.source, {}).items())

    def rows(self, length: int) -> int:
        """Rows of a sequence of this length in the batch."""
        return 1 if self.pooled else int(length / self.stride) + self.extra


@dataclass(frozen=True)
class Pairs:
    """Query-key pairs of an attention layer."""

    queries: Stream
    keys: Stream | None
    """Another stream that is attended to; None for self-attention."""
    band: Band
    window: int | None
    """How many patches attend to one another, if they are confined to windows."""

    def of(self, sizes: Sizes) -> int:
        """Pairs of all sequences."""
        lengths = sizes.get(self.queries.source, {})
        if self.keys is not None:
            return self.queries.of(sizes) * self.keys.of(sizes) // max(sum(lengths.values()), 1)
        return sum(self._pairs(self.queries.rows(length)) * count for length, count in lengths.items())

    def _pairs(self, rows: int) -> int:
        return self.band.pairs(rows) if self.window is None else rows * min(self.window, rows)


class WalkPoint(NamedTuple):
    """Where the walk is: the rows that the next layer takes, and their features."""

    stream: Stream
    width: int | None


class Walk:
    """One pass over a model's modules; the public attributes are what it found."""

    def __init__(self, model: nn.Module, convention: Convention) -> None:
        self.works: defaultdict[tuple[Stream | Pairs, str], Counter[str]] = defaultdict(Counter)
        """Forward, backward and recomputed FLOPs for each row or pair, by dtype."""
        self.uncounted: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.features_in: int | None = None
        """Features that the first layer takes, if it is a linear one."""
        self.signal_dims, self.patch_size = 0, Fraction(1)
        """Dimensions of the images or audio that a convolution takes, and positions for each of its rows."""
        self.sequence_first = False
        self._convention = convention
        self._point = WalkPoint(Stream(FEATURES), None)
        self._encoded: Stream | None = None
        self._is_trained = False
        """Whether a layer before this one is trained, so that backward reaches its output."""
        self._around: list[nn.Module] = [model]
        """The modules that contain the current one, outermost first, and the current one."""
        self._blocks: list[int] = []
        """Indices of the current module in the lists of layers that contain it."""
        self._experts = 1
        """How many modules like the current one each token visits."""
        self._seen: set[int] = set()
        self._visit(model, "")
        self._around = []  # the model is not kept

    @property
    def sources(self) -> set[str]:
        """The inputs that the layers take."""
        return {units.source for units, _ in self.works if isinstance(units, Stream)}

    def _visit(self, module: nn.Module, name: str) -> None:
        """Record the work of a module and move to the point after it."""
        self._around.append(module)
        self._seen.add(id(module))
        (stream, width), sizes = self._point, layers.features(module)
        if isinstance(module, layers.CONVOLUTIONS):
            self._convolve(module)
        elif isinstance(module, layers.RESIZERS):
            self._resize(layers.stride_of(module, self.signal_dims))
        elif type(module).__name__.startswith("Adaptive"):  # pooling to a given size, usually 1
            self._point = WalkPoint(replace(stream, pooled=True), width)
        elif sizes is not None:
            self._multiply(module, *sizes)
        elif layers.starts_text(module, name) and stream.source not in (TOKENS, TARGET):
            self._point = WalkPoint(Stream(TOKENS), None)
        elif not isinstance(module, nn.Embedding):
            self._multiply_own(module)
            self._visit_children(module, name)
        self._is_trained |= any(p is not None and p.requires_grad for p in module._parameters.values())
        self._around.pop()

    def _visit_children(self, module: nn.Module, name: str) -> None:
        """Visit the children in order; of experts that are modules, one for all."""
        children, experts = layers.runnable(module), self._experts
        is_list, before = layers.is_list(module), self._point
        if is_list and "expert" in name:
            self._experts = self._visited_experts(module, len(children))
            children = dict([*children.items()][:1])
        is_cross = bool(layers.CROSS.search(name))
        self._is_trained |= bool(self._blocks) and layers.has_trained_norms_first(module)
        for index, (child_name, child) in enumerate(children.items()):
            if id(child) in self._seen and not isinstance(module, (nn.ModuleList, nn.Sequential)):
                continue  # another name of a layer that is registered elsewhere
            last, is_branch = self._point, bool(_BRANCH.search(child_name))
            if layers.is_decoder(child, child_name):
                self._encoded, self._point = last.stream, WalkPoint(Stream(TARGET), None)
            elif is_cross and self._encoded and layers.KEYS.fullmatch(child_name):
                is_branch, self._point = True, WalkPoint(self._encoded, None)
            elif is_branch:
                self._point = before
            self._blocks += [index] * is_list
            self._visit(child, child_name)
            del self._blocks[len(self._blocks) - is_list :]
            if is_branch:
                self._point = last
        self._experts = experts
        if (widths := layers.attention_widths(module)) is not None:
            self._attend(module, is_cross, *widths)
        stream, width = self._point
        if stream.pooled and width == before.width:
            self._point = before  # channels were weighted by their pooled values
        elif stream.stride != before.stream.stride:
            self._point = WalkPoint(replace(stream, extra=stream.extra + layers.extra_tokens(module)), width)

    def _add(self, weight: torch.Tensor | None, rows: Stream, flops: int) -> None:
        """Record a product; in backward there is one for the weight and one for the input, if needed."""
        is_trained = weight is not None and weight.requires_grad
        flops *= self._experts
        backward = flops * (is_trained + self._is_trained)
        again = flops * any(map(layers.is_checkpointed, self._around))
        self.works[rows, self._dtype(weight)].update(forward=flops, backward=backward, recompute=again)
        self._is_trained |= is_trained

    def _dtype(self, weight: torch.Tensor | None) -> str:
        """The dtype of a product: the weight's, or that of a quantiser, of FSDP2 or of autocast."""
        device = "cpu" if weight is None else weight.device.type
        dtype = None if weight is None else weight.dtype
        if dtype is None or not (dtype.is_floating_point or dtype.is_complex):
            own = getattr(self._around[-1], "compute_dtype", None)
            dtype = own if isinstance(own, torch.dtype) else torch.get_default_dtype()
        sharded = [unwrap_fsdp(module)[1] for module in self._around]
        dtype = next((found for found in reversed(sharded) if found is not None), dtype)
        if dtype.itemsize <= 4 and device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        return dtype_name(dtype, device, convolution=isinstance(self._around[-1], layers.CONVOLUTIONS))

    def _multiply(self, module: nn.Module, features_in: int, features_out: int) -> None:
        """A linear layer; its features may show that positions were pooled or merged before it."""
        stream, width = self._point
        if width is None and stream.source in (FEATURES, TARGET):
            self.features_in = self.features_in or features_in
        rows = stream
        if stream.source == SIGNAL and self.signal_dims > 1 and not self._blocks:
            if not any(layers.starts_text(m, path) for path, m in self._around[0].named_modules()):
                rows = replace(stream, pooled=True)
            elif width and features_in % width == 0:
                rows = stream = replace(stream, stride=stream.stride * (features_in // width))
        self._add(layers.first_weight(module), rows, 2 * features_in * features_out)
        self._point = WalkPoint(stream, features_out)

    def _multiply_own(self, module: nn.Module) -> None:
        """Products with weights that are not layers: routers, experts, recurrent weights, projections."""
        for name, weight in layers.own_matrices(module).items():
            if not layers.MATRIX.search(name):
                self.uncounted[f"parameters of {type(module).__name__}"] += 1
                continue
            flops = 2 * weight.numel()
            if weight.dim() == 3:
                flops = flops // len(weight) * self._visited_experts(module, len(weight))
            self._add(weight, self._point.stream, flops)

    def _visited_experts(self, module: nn.Module, count: int) -> int:
        """How many experts a token is routed to; raises ModelError if nothing states it."""
        holders = (*self._around[:-3:-1], *self._around[-2].children(), self._config)
        values = (getattr(holder, name, None) for holder in holders for name in _TOP_K)
        visited = next((value for value in values if isinstance(value, int)), None)
        if visited is None or not 0 < visited <= count:
            raise ModelError(
                f"{type(module).__name__} holds {count} experts, and neither its block nor its config states "
                "how many each token uses (top_k, num_experts_per_tok): count it with count_flops"
            )
        return visited

    @property
    def _config(self) -> Any:
        """The nearest configuration."""
        configs = (getattr(module, "config", None) for module in reversed(self._around))
        return next((config for config in configs if config is not None), None)

    def _resize(self, stride: Fraction) -> None:
        """Change the number of positions of an image or of audio."""
        stream, width = self._point
        if stream.source == SIGNAL:
            self._point = WalkPoint(replace(stream, stride=stream.stride * stride), width)

    def _convolve(self, module: Any) -> None:
        """A convolution: each output (transposed: each input) is multiplied by the kernel of its group."""
        dims, stream = len(module.kernel_size), self._point.stream
        if stream.source == FEATURES or (stream.source != SIGNAL and dims > 1):
            self.signal_dims, self.patch_size = dims, layers.stride_of(module, dims)
            self._point = WalkPoint(Stream(SIGNAL), None)
        before = self._point.stream
        self._resize(layers.stride_of(module, dims))
        after = self._point.stream
        flops = 2 * prod(module.kernel_size) * module.out_channels * (module.in_channels // module.groups)
        self._add(layers.first_weight(module), before if module.transposed else after, flops)
        self._point = WalkPoint(after, module.out_channels)

    def _attend(self, module: nn.Module, is_cross: bool, query_width: int, value_width: int) -> None:
        """Scores and values: four products in backward, and in a fused kernel the scores again."""
        self.sequence_first |= not getattr(module, "batch_first", True)
        flops, stream = 2 * (query_width + value_width), self._point.stream
        again = flops * any(map(layers.is_checkpointed, self._around))
        if self._is_trained and getattr(self._config, "_attn_implementation", None) != "eager":
            again += 2 * query_width
            self.notes[FUSED_NOTE] = None
        pairs = Pairs(stream, self._encoded if is_cross else None, self._band(module), self._window())
        work = self.works[pairs, self._dtype(layers.first_weight(module))]
        work.update(forward=flops, backward=2 * flops * self._is_trained, recompute=again)

    def _band(self, module: nn.Module) -> Band:
        """Which pairs the convention counts."""
        is_causal = getattr(module, "is_causal", "Causal" in type(module).__name__)
        if self._convention.attention == "full" or not is_causal:
            return FULL
        window = sliding_window(self._config, module)
        return CAUSAL if window is None else Band(behind=window - 1, ahead=0)

    def _window(self) -> int | None:
        """How many patches of an image attend to one another in this layer; None for all."""
        config = self._config
        whole, pixels = getattr(config, "fullatt_block_indexes", None), getattr(config, "window_size", None)
        if isinstance(whole, (list, tuple)) and isinstance(pixels, int) and self._blocks[-1] not in whole:
            return int((pixels // config.patch_size) ** 2)
        return None
