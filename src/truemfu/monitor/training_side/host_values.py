"""What lies on the device and is wanted on the host, fetched together and without waiting.

`log_step` may get its loss, gradient norm and mask as device tensors, and a batch may hold its documents or
image grids there. Reading one on the spot would wait for the GPU, and even an asynchronous copy of a single
number is a driver call that a launch-bound run feels. So tensors are kept for a moment, each as it is, and
every few seconds all of one shape become one copy to the host:

    hold ─► kept tensors ─► flush: one stack, one copy per shape and dtype ─► Held.get, on another thread

A kept tensor must still be what it was. One that was changed in place meanwhile is not used, and from then on
its kind is copied at once; so is a number that comes again at the same place, as a running sum or the output
of a CUDA graph does, and what would keep much memory alive. The graphs of torch.compile write over each
other's outputs behind torch's back, so once there are any every number is copied at once.

The first use of a kernel and new page-locked memory make a program wait until the device is idle. So the
first tensor of a kind goes through all of it on the spot, and memory for numbers is set aside: that is in the
first step, when little is queued. Whole tensors (documents, grids) get theirs when they first need it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...flops import HostCopy
from ...torch_private.watching import detects_overwrites, version_of

_LONGEST_WAIT_S = 3.0
_MAX_KEPT = 256
_MAX_KEPT_BYTES = 16 << 20
_LARGEST_KEPT_BYTES = 256 << 10
"""Of the memory that a kept tensor is part of; what lies in more is copied, counted or sent at once."""
_COMPILED_GRAPHS = "torch._inductor.cudagraph_trees"
"""Imported when torch.compile first makes a CUDA graph, if not before."""
_RESERVED_SIZES = tuple(1 << power for power in range(3, 13))
"""Bytes of page-locked memory that numbers need: up to 256 of 8 bytes, in powers of two."""
_RESERVED_OF_EACH = 8
"""Loss, gradient norm, learning rate and mask, of this flush and of one that is not read yet."""


class _Sent:
    """Tensors of one shape, or how many elements of each are not zero, on their way to the host together."""

    def __init__(self, tensors: list[torch.Tensor], *, count: bool) -> None:
        together = torch.stack(tensors)
        self._copy = HostCopy(together.flatten(1).count_nonzero(dim=1) if count else together)
        self.ready = self._copy.ready
        self._numbers: list[float] | None = None

    def tensor(self, place: int) -> torch.Tensor:
        """That of one of them."""
        return self._copy.get()[place]

    def number(self, place: int) -> float:
        """That of one of them, all being single numbers."""
        if self._numbers is None:
            self._numbers = [float(number) for number in self._copy.get().tolist()]
        return self._numbers[place]


class Held:
    """A tensor on its way to the host; `is_void` where its value was gone before it could be fetched."""

    __slots__ = ("_place", "_sent", "count", "is_void", "name", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor, version: int, count: bool) -> None:
        self.name, self.version, self.count = name, version, count
        self.tensor: torch.Tensor | None = tensor
        self._sent: _Sent | None = None
        self._place = 0
        self.is_void = False

    def sent(self, sent: _Sent, place: int) -> None:
        """It is part of what was sent, at this place."""
        self._sent, self._place, self.tensor = sent, place, None

    def gone(self) -> None:
        """What it stood for was overwritten."""
        self.is_void, self.tensor = True, None

    def ready(self) -> bool:
        """Whether `get` has an answer: asks, never waits."""
        return self.is_void or (self._sent is not None and self._sent.ready())

    def get(self) -> torch.Tensor:
        """The values, once they are ready."""
        assert self._sent is not None
        return self._sent.tensor(self._place)

    def number(self) -> float | None:
        """A single number, once it is ready; None where it was overwritten too soon."""
        if self.is_void:
            return None
        assert self._sent is not None
        return self._sent.number(self._place)


Number = float | Held | None


class HostValues:
    """Takes tensors and numbers on the training thread, and fetches what lies on a CUDA device."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._kept: list[Held] = []
        self._places: dict[tuple[str, int], Held] = {}
        self._bytes = 0
        self._since_s = 0.0
        self._copied_at_once: set[str] = set()
        self._kinds: set[tuple[Any, ...]] = set()

    def copy_at_once(self, name: str) -> None:
        """A number of this name was overwritten before it could be read: the next are copied on the spot."""
        if name not in self._copied_at_once:
            self._copied_at_once.add(name)
            self._notice(
                f"{name} was overwritten on the device after it was passed in, so a value of it is missing; "
                "from now on it is copied at once"
            )

    def number(self, name: str, value: Any) -> Number:
        """A number now, or one that is on its way; None for None. Anything else is a TypeError."""
        if value is None or type(value) is float:
            return value
        if type(value) is torch.Tensor:
            if value.is_cuda and value.dim() == 0:  # the usual case on a GPU
                return self._hold(name, value, is_input=False)
        elif isinstance(value, torch.Tensor):
            value = _local(value)
        else:
            return float(value)
        if value.numel() != 1:
            raise TypeError(f"a tensor of shape {tuple(value.shape)}, where one number was expected")
        if value.is_meta:
            raise TypeError("a tensor without a value (meta)")
        if not value.is_cuda:
            return float(value.detach())
        return self._hold(name, value if value.dim() == 0 else value.reshape(()), is_input=False)

    def tokens_in(self, mask: torch.Tensor) -> Number:
        """How many positions of a mask are set."""
        if not mask.is_cuda:
            return float(mask.count_nonzero())
        return self._hold("attention_mask", mask, is_input=True, count=True)

    def values(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Held:
        """All values of an argument of the model, as they are now."""
        return self._hold(name, tensor, is_input=True) if tensor.is_cuda else tensor.detach().clone()

    def _hold(self, name: str, tensor: torch.Tensor, *, is_input: bool, count: bool = False) -> Held:
        """Keep a tensor until the next flush; with `count` only how many of its elements are not zero."""
        try:
            version = version_of(tensor)
            tensor = tensor.detach()
        except RuntimeError:  # an inference tensor has no version
            tensor = tensor.clone()
            version = version_of(tensor)
        place = name, tensor.data_ptr()
        before = self._places.get(place)
        if before is not None:  # of what lies here, all but the last may have been overwritten
            if is_input and before.version == version and detects_overwrites:
                return before  # the same argument again
            before.gone()
            self.copy_at_once(name)
        is_large = tensor.untyped_storage().nbytes() > _LARGEST_KEPT_BYTES
        if is_large and is_input and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            is_large = False  # whatever is launched now runs with each replay, and not before
        if is_large and is_input and not count:
            held = Held(name, tensor, version, count)
            held.sent(_Sent([tensor], count=False), 0)
            return held
        if (
            is_large
            or name in self._copied_at_once
            or (not is_input and _COMPILED_GRAPHS in sys.modules)
            or not detects_overwrites
        ):
            tensor, count = (tensor.count_nonzero(), False) if count else (tensor.clone(), count)
            place, version = (name, tensor.data_ptr()), version_of(tensor)
        if (kind := (tensor.dtype, tensor.dim(), count)) not in self._kinds:
            self._prepare(tensor, kind)
        held = Held(name, tensor, version, count)
        if not self._kept:
            self._since_s = time.perf_counter()
        self._kept.append(held)
        self._places[place] = held
        if is_input:  # a number weighs nothing
            self._bytes += tensor.nbytes
        return held

    @property
    def oldest_s(self) -> float | None:
        """Since when something is kept that was not sent; None where nothing is."""
        return self._since_s if self._kept else None

    def flush_if_due(self, now_s: float, *, is_due: bool = False) -> None:
        """Send what is kept, if that is due, there is enough of it or it has waited long enough."""
        kept = len(self._kept)
        if kept and (
            is_due
            or now_s - self._since_s > _LONGEST_WAIT_S
            or kept > _MAX_KEPT
            or self._bytes > _MAX_KEPT_BYTES
        ):
            self.flush()

    def flush(self) -> None:
        """Send all that is kept to the host: one copy for each shape and dtype, behind the work queued."""
        kept, self._kept, self._places, self._bytes = self._kept, [], {}, 0
        alike: defaultdict[Any, list[tuple[Held, torch.Tensor]]] = defaultdict(list)
        for held in kept:
            tensor = held.tensor
            if tensor is None:
                continue
            if version_of(tensor) != held.version:
                held.gone()
                self.copy_at_once(held.name)
            else:
                alike[held.name, tensor.shape, tensor.dtype, held.count].append((held, tensor))
        for (_, _, _, count), entries in alike.items():
            sent = _Sent([tensor for _, tensor in entries], count=count)
            for place, (held, _) in enumerate(entries):
                held.sent(sent, place)

    def _prepare(self, tensor: torch.Tensor, kind: tuple[Any, ...]) -> None:
        """Have the kernels loaded and the memory there that a flush of such tensors will need."""
        if tensor.is_complex() and not kind[-1]:
            raise TypeError("complex numbers")
        if not self._kinds and tensor.is_cuda:
            reserved = [
                torch.empty(size, dtype=torch.uint8, pin_memory=True)
                for size in _RESERVED_OF_EACH * _RESERVED_SIZES
            ]
            del reserved  # torch keeps it for the next that asks
        self._kinds.add(kind)
        _Sent([tensor, tensor], count=kind[-1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor that may be spread over ranks; a TypeError if that is a part."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() for placement in placements):
        raise TypeError(
            "a sharded DTensor: its value is known after a collective, which is yours to start "
            "(pass tensor.full_tensor())"
        )
    return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def is_there(value: Number) -> bool:
    """Whether a number can be read without waiting."""
    return not isinstance(value, Held) or value.ready()


def resolved(value: Number) -> float | None:
    """A number that is there; None where there is none, or where it was overwritten too soon."""
    return value.number() if isinstance(value, Held) else value
