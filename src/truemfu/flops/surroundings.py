"""What a count finds around it and leaves as it was: random states, autocast, the compiler, torch's checks.

On the thread that trains, a count saves what belongs to the process and puts it back. On a background thread
it must not even do that, since the training goes on in between: see `background.py`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .background import in_background

_AUTOCAST_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class AutocastState:
    """What the training thread has set for itself alone and a count on another thread must know."""

    dtypes: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether autocast is on for it, and the dtype it casts to."""
    default_device: torch.device
    """Where tensors are made that do not say where."""

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """This thread inside the same state; unlike leaving `torch.autocast`, leaving it clears no cache."""
        before = autocast_state()
        self._set()
        device = self.default_device
        try:
            with device if device != before.default_device else contextlib.nullcontext():
                yield
        finally:
            before._set()

    def _set(self) -> None:
        for device_type, enabled, dtype in self.dtypes:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


def autocast_state() -> AutocastState:
    """The state of this thread: to be asked for inside the model's forward, where it is as in training."""
    return AutocastState(
        dtypes=tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_DEVICES
        ),
        default_device=torch.empty(0).device,
    )


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code runs eagerly inside, and is as compiled as before afterwards."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def untouched_state() -> Iterator[None]:
    """Random states of every device and library, and autocast's cache, are afterwards as before."""
    if in_background():
        yield
        return
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python_state = random.getstate()
    numpy_random = _numpy_random()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with uncompiled():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Torch logs a traceback for every operator that fails on fake tensors; our error is one line.

    Messages of other threads pass.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    here = threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != here

    logger.addFilter(of_others)
    try:
        yield
    finally:
        logger.removeFilter(of_others)
