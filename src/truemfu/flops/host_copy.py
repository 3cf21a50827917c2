"""Copies a tensor's values to the host without blocking the training thread.

HostCopy(tensor)      on the training thread: enqueues a copy on the current stream and returns at once
    .ready()          whether the values have arrived; never waits
    .get()            the values; waits, so for threads other than the training thread
host_copy(tensor)     the values now; waits
"""

from __future__ import annotations

import time

import torch

_POLL_S = 0.001


class HostCopy:
    """An asynchronous copy of a tensor to the host; a CPU tensor is copied immediately."""

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

    def ready(self) -> bool:
        """Whether `get` would return at once."""
        if self._arrived is not None and self._arrived.query():
            self._arrived = None  # the driver need not be queried again
        return self._arrived is None

    def get(self) -> torch.Tensor:
        """The values; polls until they have arrived, sleeping in between."""
        while not self.ready():
            time.sleep(_POLL_S)
        return self._values


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU copy of a tensor's values; waits for the device."""
    return tensor.detach().cpu().clone()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same for reading only: a CPU tensor is returned as it is, without a copy."""
    return tensor.detach() if tensor.device.type == "cpu" else host_copy(tensor)
