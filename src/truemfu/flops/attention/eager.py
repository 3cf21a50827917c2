"""Attention in plain operators: finds which products are scores, and which masks apply to them.

Eager attention is two batched products with a softmax between them. To count it by document, or by the pairs
a mask allows, the products must be recognised:

    bmm ──► (scale, mask, bias, reshape …) ──► softmax ──► (dropout, cast …) ──► bmm
    scores        masks are collected            resolved: pairs known          values

Tags are kept beside the tensors; a product whose result never enters a softmax stays an ordinary product.
Masks are read through the tally, which in a training run starts copies and holds no tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

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
_CONCERNED = _PRODUCTS | _SOFTMAX | _PROPAGATING | _ADD | _FILL | _WRITE | {aten.where}


Mask = Callable[[], Value | None]
"""Returns where a mask allows a pair, when the scores enter a softmax; None if it cannot be read."""


class AttentionTally(Protocol):
    """What is told of attention, and reads the tensors that mask scores."""

    def resolve_eager(self, shape: Sequence[int], masks: Sequence[Value | None]) -> Scale:
        """What scores of this shape and with these masks count, which enter a softmax."""

    def rescale(self, entry: Any, scale: Scale) -> None:
        """A product turns out to belong to attention."""

    def value(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor; None if it cannot be read."""

    def value_later(self, tensor: torch.Tensor, scores: torch.Tensor) -> Callable[[], Value | None]:
        """The same for a tensor added to a product, which may not be a mask: read once it proves to be."""


@dataclass
class Scores:
    """A product that may turn out to be attention scores, and the masks applied before a softmax."""

    entry: Any
    masks: list[Mask] = field(default_factory=list)


@dataclass
class Probabilities:
    """The result of a softmax over scores; once multiplied by the values, both products are attention."""

    scores: Any
    scale: Scale


def is_unknown(tensor: Any) -> bool:
    """Whether a tensor has no data, and its value is not known in another way."""
    return (
        isinstance(tensor, torch.Tensor)
        and (isinstance(tensor, FakeTensor) or tensor.is_meta)
        and value_of(tensor) is None
    )


def readable(tensor: Any) -> Value | None:
    """The value of a tensor: always for a real one, if known for a fake one."""
    if not isinstance(tensor, torch.Tensor) or is_unknown(tensor):
        return None
    return value_of(tensor) or Value(lambda: on_host(tensor))


def _allowing(value: Value | None, dtype: torch.dtype) -> Value | None:
    """True where a mask of this value allows a pair: a boolean mask itself, an additive one where it is not
    hugely negative."""
    if value is None or dtype is torch.bool:
        return value
    return Value(lambda: value.tensor() > MASKED_SCORE)


class EagerAttention:
    """Follows products through a forward pass, for a tally."""

    def __init__(self, tally: AttentionTally) -> None:
        self._tally = tally
        self._tags: Any = WeakTensorKeyDictionary()
        """By tensor, its role in attention: Scores or Probabilities."""
        self._allowed: Any = WeakTensorKeyDictionary()
        """By tensor of unknown value, where it is known to allow a pair."""

    @staticmethod
    def concerns(packet: Any) -> bool:
        """Whether an operator may be part of attention."""
        return packet in _CONCERNED

    def allowed_by(self, mask: Any) -> Value | None:
        """True where a mask allows a pair; None if it cannot be read."""
        if not isinstance(mask, torch.Tensor):
            return None
        known: Value | None = self._allowed.get(mask)
        return known or _allowing(self._tally.value(mask), mask.dtype)

    def record(self, packet: Any, args: tuple[Any, ...], out: Any, entry: Any) -> None:
        """Record one operator of the forward pass; `entry` is its entry in the tally, if it is a product."""
        if packet in _PRODUCTS and entry is not None:
            self._record_product(packet, args, out, entry)
        elif packet in _SOFTMAX:
            tag = self._tag_of(args[0])
            if isinstance(tag, Scores):
                shape = tuple(args[0].shape)
                is_other_dim = args[1] not in (-1, len(shape) - 1)
                masks = [None if is_other_dim else mask() for mask in tag.masks]
                self._tag(out, Probabilities(tag.entry, self._tally.resolve_eager(shape, masks)))
        elif packet in _ADD:
            self._record_add(args, out)
        elif packet in _FILL:
            self._record_mask(args[0], args[1], args[2], out, blocked_where=True)
        elif packet in _WRITE:
            condition = _whole_mask(args[1], args[0])
            if condition is not None:
                self._record_mask(args[0], condition, args[2], out, blocked_where=True)
        elif packet is aten.where and len(args) == 3:
            if isinstance(self._tag_of(args[2]), Scores) or (is_unknown(out) and _lowest(args[1])):
                self._record_mask(args[2], args[0], args[1], out, blocked_where=True)
            else:
                self._record_mask(args[1], args[0], args[2], out, blocked_where=False)
        elif packet in _PROPAGATING:
            self._propagate(packet, args, out)

    def _tag_of(self, tensor: Any) -> Scores | Probabilities | None:
        return self._tags.get(tensor) if isinstance(tensor, torch.Tensor) else None

    def _tag(self, tensor: Any, tag: Scores | Probabilities) -> None:
        if isinstance(tensor, torch.Tensor):
            self._tags[tensor] = tag

    def _record_product(self, packet: Any, args: tuple[Any, ...], out: Any, entry: Any) -> None:
        biased = packet in (aten.baddbmm, aten.addmm)
        operands = args[1:3] if biased else args[:2]
        probabilities = next((t for a in operands if isinstance(t := self._tag_of(a), Probabilities)), None)
        if probabilities is not None:
            self._tally.rescale(entry, probabilities.scale)
            if probabilities.scores is not None:
                self._tally.rescale(probabilities.scores, probabilities.scale)
                probabilities.scores = None
            return
        scores = Scores(entry)
        if biased:
            self._add_mask(scores, args[0], out)
        self._tag(out, scores)

    def _add_mask(self, scores: Scores, mask: Any, masked: torch.Tensor) -> None:
        """Add what is added to scores to their masks, unless its value is unknown."""
        if not isinstance(mask, torch.Tensor):
            return
        known: Value | None = self._allowed.get(mask)
        if known is not None:
            scores.masks.append(lambda: known)
        elif not is_unknown(mask):
            later, dtype = self._tally.value_later(mask, masked), mask.dtype
            scores.masks.append(lambda: _allowing(later(), dtype))

    def _propagate(self, packet: Any, args: tuple[Any, ...], out: Any) -> None:
        sources = args[0] if isinstance(args[0], (list, tuple)) else args[:2]
        tag = next((t for a in sources if (t := self._tag_of(a)) is not None), None)
        target = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(tag, Scores) and packet in _TRANSPOSING and tag.masks:
            tag = Scores(tag.entry, [lambda: None] * len(tag.masks))  # the masks have another orientation
        if tag is not None:
            self._tag(target, tag)
        elif (
            isinstance(args[0], torch.Tensor)
            and (known := self._allowed.get(args[0])) is not None
            and target.shape == args[0].shape
        ):
            self._allowed[target] = known

    def _record_add(self, args: tuple[Any, ...], out: Any) -> None:
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            tag = self._tag_of(one)
            if isinstance(tag, Scores):
                self._add_mask(tag, other, one)
                self._tag(out, tag)
                return
            if isinstance(tag, Probabilities):
                return
        # an unknown bias plus a known mask, added to the scores later: attach the mask to the sum
        for one, other in ((args[0], args[1]), (args[1], args[0])):
            if (
                is_unknown(one)
                and isinstance(other, torch.Tensor)
                and one.dim() >= 3
                and other.dim() >= 2
                and (allowed := self.allowed_by(other)) is not None
            ):
                self._allowed[out] = allowed
                return

    def _record_mask(self, masked: Any, condition: Any, fill: Any, out: Any, *, blocked_where: bool) -> None:
        tag = self._tag_of(masked)
        if tag is not None:
            self._tag(out, tag)
        if not isinstance(tag, Scores) and (tag is not None or not is_unknown(out)):
            return
        value = None if is_unknown(condition) else self._tally.value(condition)
        lowest = self._is_lowest(fill)
        if value is None or lowest is False:
            return

        def allowed() -> torch.Tensor:
            blocks = lowest if isinstance(lowest, bool) else bool(lowest.tensor().max() <= MASKED_SCORE)
            return (value.tensor() != blocked_where) | (not blocks)

        if isinstance(tag, Scores):
            found = Value(allowed)
            tag.masks.append(lambda: found)
        else:
            self._allowed[out] = Value(allowed)

    def _is_lowest(self, fill: Any) -> bool | Value:
        """Whether a fill makes the softmax zero; its value if that is still on the device."""
        if isinstance(fill, torch.Tensor) and fill.is_cuda and fill.numel() == 1 and not is_unknown(fill):
            return self._tally.value(fill) or False
        return _lowest(fill)


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
        if fill.numel() != 1 or is_unknown(fill):
            return False
        known = value_of(fill)
        with disable_modes():
            fill = (on_host(fill) if known is None else known.tensor()).max().item()
    return bool(fill <= MASKED_SCORE)
