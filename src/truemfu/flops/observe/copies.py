"""Copies of small device values that formulas need, started without waiting for the device."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...torch_private.watching import detects_overwrites, version_of
from ..host_copy import HostCopy
from ..shadow.values import Value

LIMIT_BYTES = 64 << 20
"""What all copies of one step may take together."""


class Uncopied(Exception):
    """A value that a formula needs cannot be copied; the message is the reason."""


class Copies:
    """The copies of one step. The same values are copied once, however often they are needed."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, Value]] = weakref.WeakKeyDictionary()
        self._bytes = 0

    def value(self, tensor: torch.Tensor) -> Value:
        """A tensor's value at this moment, to be read once all copies are ready."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise Uncopied("a value that the count needs is computed inside a CUDA graph")
        known = self._known.setdefault(tensor.untyped_storage(), {})
        key = None
        if detects_overwrites and not tensor.is_inference():
            key = (version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            if key in known:
                return known[key]
        self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > LIMIT_BYTES:
            raise Uncopied("the masks and lengths that the count needs are larger than 64 MiB")
        copy = HostCopy(tensor)
        self._copies.append(copy)
        value = Value(copy.get)
        if key is not None:
            known[key] = value
        return value

    def ready(self) -> bool:
        """Whether all copies have arrived; never waits."""
        return all(copy.ready() for copy in self._copies)
