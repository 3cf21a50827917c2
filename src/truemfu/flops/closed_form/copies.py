"""Copies of an example batch: of other sizes, and with other values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..batch import CUMULATIVE, GRIDS, documents_of, is_readable
from ..host_copy import on_host

VALUE_NAMES = frozenset({*CUMULATIVE, *GRIDS, "position_ids"})
"""Arguments whose values state the lengths of documents or the sizes of images."""
_TOKENS = frozenset({"input_ids", "decoder_input_ids", "token_type_ids", "mm_token_type_ids"})
_NO_LABEL = -100


class Example:
    """A batch whose number of samples and length can be changed; each is None if it cannot.

    Samples are the first dimension that all tensors share, the length is the second one of all tokens and
    sequences of vectors.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        tensors = [tensor for _, tensor in named_tensors(batch)]
        has_lengths = any(name in VALUE_NAMES for name, _ in named_tensors(batch))
        first = {tensor.shape[0] for tensor in tensors if tensor.dim()}
        second = {tensor.shape[1] for tensor in tensors if _is_sequence(tensor)}
        self.samples = first.pop() if len(first) == 1 and not has_lengths else None
        self.length = second.pop() if len(second) == 1 and not has_lengths else None

    def copy(self, samples: int | None, length: int | None) -> Any:
        """The example with these sizes; its integers are repeated."""

        def changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if samples is not None and shape:
                shape[0] = samples
            if length is not None and _is_sequence(tensor):
                shape[1] = length
            if _is_real(tensor):
                made = torch.empty(shape, dtype=tensor.dtype, device="meta")
                return made.requires_grad_(tensor.requires_grad)
            values = on_host(tensor)
            for dim, size in enumerate(shape):
                if size != values.shape[dim]:
                    values = values.index_select(dim, torch.arange(size) % values.shape[dim])
            return values

        return with_tensors(changed, self._batch)


def with_other_values(batch: Any) -> Any | None:
    """The batch with other integers wherever the work of a model may depend on them; None if nowhere.

    Masks get padding or lose it, labels likewise, any other integer becomes its neighbour. Tokens stay, and
    lengths of documents and image grids.
    """
    is_packed = documents_of(batch) is not None
    changes = 0

    def changed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal changes
        if _is_real(tensor) or not tensor.numel() or name in VALUE_NAMES or name in _TOKENS:
            return tensor
        if "mask" in name and (is_packed or tensor.dim() != 2):
            return tensor
        changes += 1
        return _changed(name, on_host(tensor))

    copy = with_tensors(changed, batch)
    return copy if changes else None


def _changed(name: str, values: torch.Tensor) -> torch.Tensor:
    if values.dim() < 2 and values.dtype is not torch.bool:
        return torch.where(values > 0, values - 1, values + 1)
    if "mask" in name or values.dtype is torch.bool:
        flags = values != 0
        is_uniform = bool((flags == flags.flatten()[0]).all())
        return (flags ^ _tail(values) if is_uniform else torch.ones_like(flags)).to(values.dtype)
    if name == "labels":
        is_complete = bool((values >= 0).all())
        return values.masked_fill(_tail(values), _NO_LABEL) if is_complete else values.clamp(min=0)
    return torch.where(values > 0, values - 1, values + 1)


def _tail(values: torch.Tensor) -> torch.Tensor:
    """Marks the last third of the last dimension."""
    size = values.shape[-1] if values.dim() else 1
    return torch.arange(size) >= 2 * size // 3


def with_values(batch: Any) -> Any:
    """The batch with values for integers that have none: masks without padding, zeros elsewhere."""

    def filled(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if is_readable(tensor) or _is_real(tensor):
            return tensor
        make = torch.ones if "mask" in name else torch.zeros
        return make(tensor.shape, dtype=tensor.dtype, device="cpu")

    return with_tensors(filled, batch)


def named_tensors(batch: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in a batch with their innermost names."""
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from named_tensors(value, str(key))
    elif type(batch) in (tuple, list):
        for value in batch:
            yield from named_tensors(value, name)


def with_tensors(change: Callable[[str, torch.Tensor], torch.Tensor], batch: Any, name: str = "") -> Any:
    """The batch with other tensors in place of its own."""
    if isinstance(batch, torch.Tensor):
        return change(name, batch)
    if isinstance(batch, Mapping):
        return {key: with_tensors(change, value, str(key)) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(with_tensors(change, value, name) for value in batch)
    return batch


def _is_sequence(tensor: torch.Tensor) -> bool:
    return tensor.dim() == (3 if tensor.is_floating_point() else 2)


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
