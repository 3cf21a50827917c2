"""Attention in plain operators: finds which products are scores, and which masks apply to them.

Eager attention is two batched products with a softmax between them. To count it by document, or by the pairs
a mask allows, the products must be recognised:

    bmm ──► (scale, mask, bias, reshape …) ──► softmax ──► (dropout, cast …) ──► bmm
    scores        masks are collected            resolved: pairs known          values

Tags are attributes of the tensors; a product whose result never enters a softmax stays an ordinary product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...torch_private.dispatch import FakeTensor, disable_modes
from ..host_copy import on_host
from ..shadow.values import Value, value_of

aten = torch.ops.aten

Scale = Callable[[int], tuple[int, int]]
"""Converts the FLOPs of a product over all pairs to (needed, executed) FLOPs for the pairs that count."""

MASKED_SCORE = -1e4
"""An additive mask blocks a pair if its value is at most this."""

_PRODUCTS = {aten.bmm, aten.baddbmm, aten.mm, aten.addmm}
_SOFTMAX = {aten._softmax, aten._safe_softmax}
_TRANSPOSING = {aten.transpose, aten.permute, aten.t}
_PROPAGATING = _TRANSPOSING | {
    aten.view,
    aten._unsafe_view,
    aten.reshape,
    aten.clone,
    aten._to_copy,
    aten.alias,
    aten.detach,
    aten.mul,
    aten.mul_,
    aten.div,
    aten.div_,
    aten.tanh,
    aten.sub,
    aten.native_dropout,
    aten.expand,
    aten.unsqueeze,
    aten.squeeze,
    aten.slice,
    aten.cat,
}
_ADD = {aten.add, aten.add_}
_FILL = {aten.masked_fill, aten.masked_fill_}
_WRITE = {aten.index_put, aten.index_put_}


@dataclass
class Scores:
    """A product that may turn out to be attention scores, and the masks applied before a softmax.

    A mask of None could not be read.
    """

    entry: Any
    masks: list[Value | None] = field(default_factory=list)


@dataclass
class Probabilities:
    """The result of a softmax over scores; once multiplied by the values, both products are attention."""

    scores: Any
    scale: Scale


def tag_of(tensor: Any) -> Scores | Probabilities | None:
    """The tensor's role in attention, if any is known."""
    return getattr(tensor, "_truemfu_attention", None)


def _tag(tensor: Any, tag: Scores | Probabilities) -> None:
    if isinstance(tensor, torch.Tensor):
        tensor._truemfu_attention = tag  # type: ignore[attr-defined]


def readable(tensor: Any) -> Value | None:
    """The value of a tensor: always for a real one, if known for a fake one."""
    if not isinstance(tensor, torch.Tensor):
        return None
    if (value := value_of(tensor)) is not None:
        return value
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return None
    return Value(lambda: on_host(tensor))


def allowed_by(mask: Any, read: Callable[[torch.Tensor], Value | None]) -> Value | None:
    """True where a mask allows a pair: a boolean mask itself, an additive one where it is not hugely
    negative. `read` returns a tensor's value, if it is known."""
    if not isinstance(mask, torch.Tensor):
        return None
    tagged: Value | None = getattr(mask, "_truemfu_allowed", None)
    if tagged is not None:
        return tagged
    value = read(mask)
    if value is None:
        return None
    if mask.dtype is torch.bool:
        return value
    return Value(lambda: value.tensor() > MASKED_SCORE)


class EagerAttention:
    """Follows products through a forward pass; `resolve` gives the pairs when scores enter a softmax."""

    def __init__(
        self,
        resolve: Callable[[Sequence[int], Sequence[Value | None]], Scale],
        rescale: Callable[[Any, Scale], None],
        read: Callable[[torch.Tensor], Value | None],
    ) -> None:
        self._resolve = resolve
        self._read = read
        self._rescale = rescale

    def record(self, packet: Any, args: tuple[Any, ...], out: Any, entry: Any) -> None:
        """Record one operator of the forward pass; `entry` is its entry in the tally, if it is a product."""
        if packet in _PRODUCTS and entry is not None:
            self._record_product(packet, args, out, entry)
        elif packet in _SOFTMAX:
            tag = tag_of(args[0])
            if isinstance(tag, Scores):
                shape = tuple(args[0].shape)
                is_other_dim = args[1] not in (-1, len(shape) - 1)
                masks: list[Value | None] = [None] * len(tag.masks) if is_other_dim else tag.masks
                _tag(out, Probabilities(tag.entry, self._resolve(shape, masks)))
        elif packet in _ADD:
            self._record_add(args, out)
        elif packet in _FILL:
            self._record_mask(args[0], args[1], args[2], out, blocked_where=True)
        elif packet in _WRITE:
            condition = _whole_mask(args[1], args[0])
            if condition is not None:
                self._record_mask(args[0], condition, args[2], out, blocked_where=True)
        elif packet is aten.where and len(args) == 3:
            if _lowest(args[1]):
                self._record_mask(args[2], args[0], args[1], out, blocked_where=True)
            else:
                self._record_mask(args[1], args[0], args[2], out, blocked_where=False)
        elif packet in _PROPAGATING:
            self._propagate(packet, args, out)

    def _record_product(self, packet: Any, args: tuple[Any, ...], out: Any, entry: Any) -> None:
        biased = packet in (aten.baddbmm, aten.addmm)
        operands = args[1:3] if biased else args[:2]
        probabilities = next((t for a in operands if isinstance(t := tag_of(a), Probabilities)), None)
        if probabilities is not None:
            self._rescale(entry, probabilities.scale)
            if probabilities.scores is not None:
                self._rescale(probabilities.scores, probabilities.scale)
                probabilities.scores = None
            return
        scores = Scores(entry)
        if biased and (allowed := allowed_by(args[0], self._read)) is not None:
            scores.masks.append(allowed)
        _tag(out, scores)

    def _propagate(self, packet: Any, args: tuple[Any, ...], out: Any) -> None:
        sources = args[0] if isinstance(args[0], (list, tuple)) else args[:2]
        tag = next((t for a in sources if (t := tag_of(a)) is not None), None)
        target = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(tag, Scores) and packet in _TRANSPOSING and tag.masks:
            tag = Scores(tag.entry, [None] * len(tag.masks))  # the masks have another orientation
        if tag is not None:
            _tag(target, tag)
        elif hasattr(args[0], "_truemfu_allowed") and target.shape == args[0].shape:
            target._truemfu_allowed = args[0]._truemfu_allowed

    def _record_add(self, args: tuple[Any, ...], out: Any) -> None:
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            tag = tag_of(one)
            if isinstance(tag, Scores):
                if (allowed := allowed_by(other, self._read)) is not None:
                    tag.masks.append(allowed)
                _tag(out, tag)
                return
            if isinstance(tag, Probabilities):
                return
        # an unknown bias plus a known mask, added to the scores later: attach the mask to the sum
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            if (
                isinstance(one, torch.Tensor)
                and isinstance(other, torch.Tensor)
                and readable(one) is None
                and one.dim() >= 3
                and other.dim() >= 2
                and (allowed := allowed_by(other, self._read)) is not None
            ):
                out._truemfu_allowed = allowed
                return

    def _record_mask(self, masked: Any, condition: Any, fill: Any, out: Any, *, blocked_where: bool) -> None:
        tag = tag_of(masked)
        if tag is not None:
            _tag(out, tag)
        if isinstance(tag, Probabilities) or not _lowest(fill) or (value := readable(condition)) is None:
            return
        allowed = Value(lambda: value.tensor() != blocked_where)
        if isinstance(tag, Scores):
            tag.masks.append(allowed)
        elif isinstance(out, torch.Tensor) and readable(out) is None:
            out._truemfu_allowed = allowed  # type: ignore[attr-defined]


def _whole_mask(indices: Any, tensor: torch.Tensor) -> torch.Tensor | None:
    """The boolean mask in `tensor[..., mask] = value`, if there is one and it covers the last dimensions."""
    masks = [index for index in indices if index is not None]
    if len(masks) != 1 or masks[0].dtype is not torch.bool or indices[-1] is None:
        return None
    mask: torch.Tensor = masks[0]
    return mask if len(indices) - 1 + mask.dim() == tensor.dim() else None


def _lowest(fill: Any) -> bool:
    """Whether a number, or a tensor of one, is so low that a softmax makes it zero."""
    if isinstance(fill, torch.Tensor):
        known = readable(fill) if fill.numel() == 1 else None
        if known is None:
            return False
        with disable_modes():
            fill = known.tensor().max().item()
    return bool(fill <= MASKED_SCORE)
