"""A model's layers in the order they are registered, with the rows each one processes and its backward.

    module tree ──► Walk: a Flow goes from child to child ──► Work: FLOPs per row, pair, image …

Nothing is run, so what a forward does between its layers is inferred from how models are usually written:
children run in the order they are registered; queries, keys and values, gates and up-projections read the
same input; a token embedding starts the text, a convolution that does not fit its input an image or audio.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import ModelError
from . import module_types
from .attention import attend, attend_multihead
from .children import visit_children
from .convolution import CONVOLUTIONS, RESIZERS, WIDTHS_NOTE, convolve, resize
from .dtypes import ComputeDtypes, fsdp_dtype
from .matrices import CELLS, multiply_own, recur, recur_once
from .module_types import Linear
from .streams import FEATURES, FRAMES, PIXELS, TARGET, TOKENS, Quantity, Rows, Stream
from .work import Flow, Work

_AFTER = re.compile(r"post_(feedforward|mlp|ffw|ffn)", re.IGNORECASE)
_HEAD = re.compile(
    r"(?:^|\.)(heads?|\w*classifier|classification_head|fc|score|cls|pooler|logits|mlp_head)\b"
)
_POOLER = re.compile(r"(?:^|\.)pooler\b")


class Walk:
    """One pass over a model's modules; `works`, `uncounted` and `notes` are what it found."""

    def __init__(self, model: nn.Module, convention: Convention) -> None:
        self.model, self.convention = model, convention
        self.works: list[Work] = []
        self.uncounted: Counter[str] = Counter()
        self.notes: dict[str, None] = {}
        self.features_in: int | None = None
        """Features of the first layer, if it is neither an embedding nor a convolution."""
        self.sequence_first = False
        self.memory: Flow | None = None
        """The input of the keys in cross-attention."""
        self.around: list[nn.Module] = []
        """The modules that contain the current one, outermost first, and the current one."""
        self.blocks: list[int] = []
        """Indices of the current module in the lists of layers that contain it."""
        self.visited: set[int] = set()
        self.recent: deque[Flow] = deque(maxlen=32)
        self.pixel_channels: int | None = None
        self.dead = False
        """Whether the current layer does not reach the loss."""
        self.live_layers: int | None = None
        """How many layers of the current tower reach the loss, as a list index."""
        self.contrastive = isinstance(getattr(model, "logit_scale", None), torch.Tensor)
        self.device_type = next((p.device.type for p in model.parameters()), "cpu")
        self._dtypes = ComputeDtypes(self.device_type)
        self._fsdp: list[torch.dtype | None] = [None]
        self._has_attention = any(module_types.is_attention(m) for m in model.modules())
        self._has_text = module_types.has_text(model)
        self.last = self.visit(model, "", Flow(Stream(FEATURES)))
        if not self.works:
            raise ModelError(
                f"{type(model).__name__} has no known layer, so it cannot be estimated from its structure: "
                "count it with count_flops"
            )

    @property
    def config(self) -> Any:
        """The nearest configuration."""
        return next((c for m in reversed(self.around) if (c := getattr(m, "config", None)) is not None), None)

    def add(
        self,
        path: str,
        kind: str,
        dtype: str,
        counted: Quantity,
        forward: int,
        backward: int,
        *,
        executed: Quantity | None = None,
        executed_backward: int | None = None,
    ) -> None:
        """Record one product; after the last layer that reaches the loss there is no backward."""
        done = backward if executed_backward is None else executed_backward
        self.works.append(
            Work(
                module=path,
                kind=kind,
                dtype=dtype,
                counted=counted,
                executed=executed or counted,
                forward=forward,
                backward=0 if self.dead else backward,
                executed_backward=0 if self.dead else done,
            )
        )

    def dtype(self, module: nn.Module, parameter: torch.Tensor | None, *, conv: bool = False) -> str:
        """The dtype in which a module multiplies by this parameter."""
        return self._dtypes.of(module, parameter, self._fsdp[-1], conv=conv)

    def start_features(self, flow: Flow, width: int) -> None:
        """Record the first layer's input features: they determine the batch's rows."""
        if flow.width is None and flow.stream.source in (FEATURES, TARGET):
            self.features_in = self.features_in or width

    def visit(self, module: nn.Module, path: str, flow: Flow) -> Flow:
        """Record the work of a module on this flow; returns the flow after it."""
        start = len(self.works)
        self.around.append(module)
        self.visited.add(id(module))
        self._fsdp.append(fsdp_dtype(module) or self._fsdp[-1])
        flow = self._visit(module, path, flow)
        self._fsdp.pop()
        self.around.pop()
        whole = module_types.checkpointing(module)
        if whole is not None and flow.needs and not self.dead:
            self._run_again(module, path, start, whole)
        return flow

    def _visit(self, module: nn.Module, path: str, flow: Flow) -> Flow:
        if (linear := module_types.linear_of(module)) is not None:
            return self.linear(module, path, flow, linear)
        if isinstance(module, CONVOLUTIONS):
            return convolve(self, module, path, flow)
        if isinstance(module, RESIZERS):
            return resize(module, flow)
        if isinstance(module, nn.Flatten) and module.start_dim == 1:
            return replace(flow, stream=replace(flow.stream, pooled=True))
        if module_types.is_embedding(module):
            return self._embed(module, path, flow)
        if isinstance(module, nn.RNNBase):
            return recur(self, module, path, flow)
        if isinstance(module, CELLS):
            return recur_once(self, module, path, flow)
        if isinstance(module, nn.MultiheadAttention):
            return attend_multihead(self, module, path, flow)
        if parts := module_types.lora_parts(module):
            return self._adapt(parts, path, flow)
        if module_types.is_attention(module):
            return attend(self, module, path, flow)
        inner = multiply_own(self, module, path, flow)
        # the scale of a contrastive model is applied to the outputs of its towers
        return visit_children(
            self, module, path, flow if self.contrastive and module is self.model else inner
        )

    def linear(self, module: nn.Module, path: str, flow: Flow, linear: Linear) -> Flow:
        """A product with a weight: in backward one product for the weight, one for the input."""
        self.start_features(flow, linear.features_in)
        stream = self._stream_of_linear(path, flow, linear)
        unit = 2 * linear.features_in * linear.features_out
        rows, dtype = Rows(stream), self.dtype(module, linear.parameter)
        self.add(path, "linear", dtype, rows, unit, unit * (linear.trained + flow.needs))
        after = replace(
            flow.trained(module_types.is_trained(module)), stream=stream, width=linear.features_out
        )
        for name, parameter in module_types.own_parameters(module).items():
            if "lora" in name.lower() and parameter.dim() == 2:
                into = flow.needs if parameter.shape[1] == linear.features_in else after.needs
                unit = 2 * parameter.numel()
                self.add(path, "linear", dtype, rows, unit, unit * (parameter.requires_grad + into))
        return after

    def _stream_of_linear(self, path: str, flow: Flow, linear: Linear) -> Stream:
        """The rows of a linear layer, after pooling, merging or flattening that no module may show."""
        stream, width = flow.stream, flow.width
        if stream.pooled:
            return stream
        ratio = linear.features_in // width if width and linear.features_in % width == 0 else 1
        if stream.source in (PIXELS, FRAMES) and ratio > 1:
            if flow.attended and isqrt(ratio) ** 2 == ratio:
                return replace(stream, merged=stream.merged * ratio)
            return replace(stream, pooled=True)
        if stream.source in (PIXELS, FRAMES) and width and linear.features_in < width and self.blocks:
            self.notes[WIDTHS_NOTE] = None
        if self.blocks:
            return stream
        if stream.source == PIXELS and not self._has_attention:
            return replace(stream, pooled=True)
        if flow.attended and (self.contrastive or _POOLER.search(path)):
            return replace(stream, pooled=True)
        behind = flow.attended or not self._has_attention
        if behind and _HEAD.search(path) and not (stream.source == PIXELS and self._has_text):
            vocabulary = getattr(self.config, "vocab_size", None)
            return replace(stream, head=linear.features_out != vocabulary)
        return stream

    def _adapt(self, parts: list[tuple[str, nn.Module, Linear]], path: str, flow: Flow) -> Flow:
        """A base layer and its low-rank pairs, all from the same input."""
        (name, base, linear), *pairs = parts
        after = self.linear(base, f"{path}.{name}", flow, linear)
        for (down_name, down, down_linear), (up_name, up, up_linear) in zip(
            pairs[::2], pairs[1::2], strict=True
        ):
            low = self.linear(down, f"{path}.{down_name}", flow, down_linear)
            after = after.trained(self.linear(up, f"{path}.{up_name}", low, up_linear).needs)
        return after

    def _embed(self, module: nn.Module, path: str, flow: Flow) -> Flow:
        """A lookup without a product. A token embedding always starts the text."""
        trained = module_types.is_trained(module) or module_types.makes_inputs_trained(module)
        width = next(iter(module_types.own_parameters(module).values())).shape[-1]
        text = flow.stream.source in (TOKENS, TARGET)
        if text or not module_types.holds_tokens(path.rpartition(".")[2]):
            return replace(flow.trained(trained), width=width)
        if flow.width is not None:
            self.memory = flow
        return Flow(Stream(TOKENS), width, trained or (flow.needs and not self.contrastive))

    def _run_again(self, module: nn.Module, path: str, start: int, whole: bool) -> None:
        """Count a checkpointed block's forward again, without the last product if it stops before that.

        It stops there if autograd saves nothing after that product: no normalisation, no dropout.
        """
        again, skipped = self.works[start:], -1
        if not whole and again and again[-1].kind == "linear":
            inside, _, last = again[-1].module.removeprefix(path + ".").rpartition(".")
            holder = module.get_submodule(inside)
            names = list(holder._modules)
            later = [holder._modules[name] for name in names[names.index(last) + 1 :]]
            normed = bool(inside) and any(c is not None and module_types.is_norm(c) for c in later)
            ends = any(_AFTER.search(name) for name, _ in module.named_children())
            if not (normed or ends or module_types.has_dropout(holder)):
                skipped = len(self.works) - 1
        for i, work in enumerate(again, start):
            if i != skipped:
                self.works[i] = replace(work, again=work.forward)
