"""Device values that are needed on the host, fetched together and without waiting.

`log_step` may get its loss, gradient norm and mask as device tensors, and a batch may hold its documents or
image grids there. Reading one immediately would wait for the GPU, and even an asynchronous copy of a single
number is a driver call that slows a launch-bound run. So tensors are held briefly without a copy, and every
few seconds all of one shape become one copy to the host:

    hold ─► held tensors ─► flush: one stack, one copy per shape and dtype ─► Held.get, on another thread

A held tensor must not change. If it was changed in place meanwhile, it is not used, and from then on tensors
of its name are copied at once; so are numbers that arrive at the same address again (a running sum, the
output of a CUDA graph) and tensors that would keep much memory alive. The CUDA graphs of torch.compile
overwrite each other's outputs without changing the tensors' versions, so once there are any every number is
copied at once.

The first use of a kernel and new page-locked memory make a program wait until the device is idle. So the
first tensor of each dtype and rank goes through all of it immediately, and memory for numbers is reserved: in
the first step little is queued. Whole tensors (documents, grids) get their memory when they first need it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ...flops import HostCopy
from ...torch_private.dispatch import hidden_from_modes
from ...torch_private.watching import detects_overwrites, version_of

_LONGEST_WAIT_S = 3.0
_MAX_HELD = 256
_MAX_HELD_BYTES = 16 << 20
_LARGEST_HELD_BYTES = 256 << 10
"""Of the storage of a held tensor; one with a larger storage is copied, counted or sent at once."""
_COMPILED_GRAPHS = "torch._inductor.cudagraph_trees"
"""Imported at the latest when torch.compile first makes a CUDA graph."""
_RESERVED_SIZES = tuple(1 << power for power in range(3, 13))
"""Bytes of page-locked memory that numbers need: up to 256 of 8 bytes, in powers of two."""
_RESERVED_OF_EACH = 8
"""Loss, gradient norm, learning rate and mask, for this flush and one that is not read yet."""


def _copy_of(tensors: list[torch.Tensor], *, count: bool) -> HostCopy:
    """One copy to the host: tensors of one shape, or the number of nonzero elements of each."""
    together = torch.stack(tensors)
    return HostCopy(together.flatten(1).count_nonzero(dim=1) if count else together)


class Held:
    """A tensor to be copied to the host; `is_void` if it was overwritten before it could be fetched."""

    __slots__ = ("_copy", "_index", "count", "is_void", "name", "tensor", "version")

    def __init__(self, name: str, tensor: torch.Tensor, version: int, count: bool) -> None:
        self.name, self.version, self.count = name, version, count
        self.tensor: torch.Tensor | None = tensor
        self._copy: HostCopy | None = None
        self._index = 0
        self.is_void = False

    def sent(self, copy: HostCopy, index: int) -> None:
        """It is part of this copy, at this index."""
        self._copy, self._index, self.tensor = copy, index, None

    def mark_overwritten(self) -> None:
        """Its value was overwritten before it was copied."""
        self.is_void, self.tensor = True, None

    def ready(self) -> bool:
        """Whether the value has arrived; never waits."""
        return self.is_void or (self._copy is not None and self._copy.ready())

    def get(self) -> torch.Tensor:
        """The values, once they are ready."""
        assert self._copy is not None
        return self._copy.get()[self._index]

    def number(self) -> float | None:
        """A single number, once it is ready; None if it was overwritten too soon."""
        return None if self.is_void else float(self.get())


Number = float | Held | None


class HostValues:
    """Takes tensors and numbers on the training thread, and fetches those on a CUDA device."""

    def __init__(self, notice: Callable[..., None]) -> None:
        self._notice = notice
        self._held: list[Held] = []
        self._by_address: dict[tuple[str, int], Held] = {}
        self._bytes = 0
        self._since_s = 0.0
        self._copied_at_once: set[str] = set()
        self._prepared: set[tuple[Any, ...]] = set()

    def copy_at_once(self, name: str) -> None:
        """A number of this name was overwritten before it could be read: copy the next ones at once."""
        if name not in self._copied_at_once:
            self._copied_at_once.add(name)
            self._notice(
                f"{name} was overwritten on the device after it was passed in, so one value is missing; "
                "from now on it is copied at once"
            )

    def number(self, name: str, value: Any) -> Number:
        """A number, or one to be copied to the host; None, with a warning, for what is not a number."""
        try:
            return self._number(name, value)
        except Exception as error:  # tensor subclasses may raise anything
            self._notice(f"{name} is not logged: got {' '.join(str(error).split())}", about=name)
            return None

    def _number(self, name: str, value: Any) -> Number:
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
            raise TypeError("a tensor without a value (on the meta device)")
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
        """Hold a tensor until the next flush; with `count` only its number of nonzero elements is copied."""
        try:
            version = version_of(tensor)
            tensor = tensor.detach()
        except RuntimeError:  # an inference tensor has no version
            tensor = tensor.clone()
            version = version_of(tensor)
        address = name, tensor.data_ptr()
        before = self._by_address.get(address)
        if before is not None:  # only the last tensor at this address is certain to be intact
            if is_input and before.version == version and detects_overwrites:
                return before  # the same argument again
            before.mark_overwritten()
            self.copy_at_once(name)
        is_large = tensor.untyped_storage().nbytes() > _LARGEST_HELD_BYTES
        if is_large and is_input and tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            is_large = False  # what is launched now runs at each replay only
        if is_large and is_input and not count:
            held = Held(name, tensor, version, count)
            held.sent(_copy_of([tensor], count=False), 0)
            return held
        if (
            is_large
            or name in self._copied_at_once
            or (not is_input and _COMPILED_GRAPHS in sys.modules)
            or not detects_overwrites
        ):
            tensor, count = (tensor.count_nonzero(), False) if count else (tensor.clone(), count)
            address, version = (name, tensor.data_ptr()), version_of(tensor)
        if (layout := (tensor.dtype, tensor.dim(), count)) not in self._prepared:
            self._prepare(tensor, layout)
        held = Held(name, tensor, version, count)
        if not self._held:
            self._since_s = time.perf_counter()
        self._held.append(held)
        self._by_address[address] = held
        if is_input:  # a number's size is negligible
            self._bytes += tensor.nbytes
        return held

    @property
    def oldest_s(self) -> float | None:
        """When the oldest held tensor was taken; None if none is held."""
        return self._since_s if self._held else None

    def flush_if_due(self, now_s: float, *, is_due: bool = False) -> None:
        """Send the held tensors if that is due, or if they are many, large or old."""
        number = len(self._held)
        if number and (
            is_due
            or now_s - self._since_s > _LONGEST_WAIT_S
            or number > _MAX_HELD
            or self._bytes > _MAX_HELD_BYTES
        ):
            self.flush()

    def flush(self) -> None:
        """Send all held tensors to the host: one copy per shape and dtype, after the queued work."""
        held_tensors, self._held, self._by_address, self._bytes = self._held, [], {}, 0
        alike: defaultdict[Any, list[tuple[Held, torch.Tensor]]] = defaultdict(list)
        for held in held_tensors:
            tensor = held.tensor
            if tensor is None:
                continue
            if version_of(tensor) != held.version:
                held.mark_overwritten()
                self.copy_at_once(held.name)
            else:
                alike[held.name, tensor.shape, tensor.dtype, held.count].append((held, tensor))
        for (_, _, _, count), entries in alike.items():
            with hidden_from_modes():
                copy = _copy_of([tensor for _, tensor in entries], count=count)
            for index, (held, _) in enumerate(entries):
                held.sent(copy, index)

    def _prepare(self, tensor: torch.Tensor, layout: tuple[Any, ...]) -> None:
        """Load the kernels and reserve the memory that a flush of such tensors will need."""
        if tensor.is_complex() and not layout[-1]:
            raise TypeError("complex numbers")
        if not self._prepared and tensor.is_cuda:
            reserved = [
                torch.empty(size, dtype=torch.uint8, pin_memory=True)
                for size in _RESERVED_OF_EACH * _RESERVED_SIZES
            ]
            del reserved  # torch caches it for the next allocation
        self._prepared.add(layout)
        _copy_of([tensor, tensor], count=layout[-1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a replicated DTensor; a TypeError if it is sharded."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    if not all(placement.is_replicate() for placement in placements):
        raise TypeError(
            "a sharded DTensor, whose value needs a collective, which the monitor never starts "
            "(pass tensor.full_tensor())"
        )
    return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def is_there(value: Number | torch.Tensor) -> bool:
    """Whether a value can be read without waiting."""
    return not isinstance(value, Held) or value.ready()


def resolved(value: Number) -> float | None:
    """A number that has arrived; None if there is none, or if it was overwritten too soon."""
    return value.number() if isinstance(value, Held) else value
