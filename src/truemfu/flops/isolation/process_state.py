"""Process state that a count preserves: autocast, the compiler, torch's checks and messages.

Whatever a count changes is restored when it ends. Random states are in `random_states.py`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ...torch_private.meshes import patched_attention
from ...torch_private.replacing import replaced
from ...torch_private.table import FLEX_CHECK

_AUTOCAST_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, kw_only=True)
class AutocastState:
    """Whether autocast is on around a forward pass, for each device type, and the dtype it casts to."""

    dtypes: tuple[tuple[str, bool, torch.dtype], ...]

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Apply this state to the current thread; unlike `torch.autocast`, it clears no cache on exit."""
        before = autocast_state()
        self._set()
        try:
            yield
        finally:
            before._set()

    def _set(self) -> None:
        for device_type, enabled, dtype in self.dtypes:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)


def autocast_state() -> AutocastState:
    """The state of this thread; call it inside the model's forward, to get the state used in training."""
    return AutocastState(
        dtypes=tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _AUTOCAST_DEVICES
        )
    )


@contextlib.contextmanager
def untouched_casts() -> Iterator[None]:
    """Autocast caches nothing inside the context, and its cache is preserved for the outermost region."""
    cached = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.autocast_decrement_nesting()


@contextlib.contextmanager
def for_fake_tensors() -> Iterator[None]:
    """What torch does otherwise on fake tensors: attention as on a GPU, and no message for each failure.

    Flex attention accepts CPU tensors that need gradients, since fake tensors need no kernel. Products of
    attention have the dtype of its inputs, as in the fused kernels of a GPU: a CPU has no such kernel for
    attention with dropout, and torch then computes bf16 and fp16 in fp32. The traceback that torch logs for
    every operator that fails is suppressed.
    """
    logger, cuda = logging.getLogger("torch._subclasses.fake_tensor"), torch.backends.cuda
    is_allowed, is_silent = cuda.fp16_bf16_reduction_math_sdp_allowed(), logger.disabled
    cuda.allow_fp16_bf16_reduction_math_sdp(True)
    logger.disabled = True
    try:
        with replaced(FLEX_CHECK, lambda check, *args, **kwargs: None):
            yield
    finally:
        cuda.allow_fp16_bf16_reduction_math_sdp(is_allowed)
        logger.disabled = is_silent


@contextlib.contextmanager
def local_attention() -> Iterator[None]:
    """Inside `context_parallel`: attention without its exchange of keys and values between ranks."""
    patched = patched_attention()
    if patched is None:
        yield
        return
    exchanging, F.scaled_dot_product_attention = F.scaled_dot_product_attention, patched[1]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = exchanging
