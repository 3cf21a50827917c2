"""A tensor's values on the host without anybody waiting for the device.

start_host_copy(tensor)   on the training thread: enqueues a copy and returns at once
    .ready()              whether the values have arrived: asks, never waits
    .get()                the values, on whatever thread has the time to wait for them
host_copy(tensor)         the values now; a supervised count ends instead of waiting (`ValuesPending`)
"""

from __future__ import annotations

import time

import torch

from .interruption import supervision

_POLL_S = 0.001


class HostCopy:
    """Values on their way to the host; a CPU tensor's are there at once, as a copy.

    What `get` returns is a CPU tensor that remembers where the values came from (`place_of`), so that a count
    later takes it for the tensor it stands for.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        source = tensor.detach()
        self._arrived: torch.cuda.Event | None = None
        if source.is_cuda:
            # Page-locked and contiguous: any other target would make the copy wait for the device.
            self._values = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=True)
            self._values.copy_(source, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(source.device))
        else:
            self._values = source.cpu() if source.device.type != "cpu" else source.clone()
        if source.device.type != "cpu":
            self._values._truemfu_place = source.device  # type: ignore[attr-defined]
        if tensor.requires_grad:
            self._values.requires_grad_()

    def ready(self) -> bool:
        """Whether `get` would return at once."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None  # the values in it need not ask the driver again
        return self._arrived is None

    def get(self) -> torch.Tensor:
        """The values; asks again and again until they are there, and sleeps in between."""
        while not self.ready():
            time.sleep(_POLL_S)
        return self._values


def start_host_copy(tensor: torch.Tensor) -> HostCopy:
    """Begin to copy a tensor's values to the host, behind what the current stream has been given so far."""
    return HostCopy(tensor)


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of a tensor's values; under supervision it ends the count rather than wait for a device."""
    supervised = supervision()
    if tensor.is_cuda and supervised is not None and supervised.fetched is not None:
        return supervised.fetched.get(tensor)
    return tensor.detach().cpu().clone()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Likewise, to be read only: a CPU tensor's own values are not copied."""
    return tensor.detach() if tensor.device.type == "cpu" else host_copy(tensor)


def place_of(tensor: torch.Tensor) -> torch.device:
    """The device a tensor stands on in the run that is counted; without one, the CPU."""
    place: torch.device | None = getattr(tensor, "_truemfu_place", None)
    if place is not None:
        return place
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device
