"""Keeps the process's random generators as they would be without a count.

A count draws from its own generator where torch allows it, so most counts change no shared generator. If one
changed nevertheless, it is restored, but only if the count changed it: another thread (a prefetching loader)
may have drawn meanwhile, and must not draw the same numbers twice.

    unchanged                                   nothing to do
    changed, no other thread could draw         restored
    changed, and the model's code draws there   restored
    changed otherwise                           another thread's draws: left as it is
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...torch_private.replacing import replaced
from ...torch_private.table import DEFAULT_GENERATOR
from ..identity.model_code import random_generators_used

_OWN_THREADS = "truemfu"


@contextlib.contextmanager
def own_random_draws(model: nn.Module) -> Iterator[set[str]]:
    """Restore the random states of every device and library after the code inside has run.

    Yields a set to which the caller adds the generators it knows to have been used: "torch", "cuda".
    """
    before = {name: get() for name, (get, _) in _generators().items()}
    drawn: set[str] = set()
    try:
        with _own_generator():
            yield drawn
    finally:
        changed = {
            name: (put, before[name])
            for name, (get, put) in _generators().items()
            if name in before and not _is_same(before[name], get())
        }
        if changed:
            ours = changed if is_alone() else drawn | _generators_in_code(model)
            for name, (put, state) in changed.items():
                if name in ours:
                    put(state)


@contextlib.contextmanager
def _own_generator() -> Iterator[None]:
    """Let `torch.get_rng_state`, `set_rng_state`, `manual_seed` and `fork_rng` use a separate generator on
    this thread: a checkpoint saves and restores the random state, and models seed it."""
    with replaced(DEFAULT_GENERATOR, _ByThread):
        yield


class _ByThread:
    """Replaces a generator: by a separate one on the creating thread, by the original on other threads."""

    def __init__(self, process_wide: Any) -> None:
        self._process_wide, self._thread = process_wide, threading.get_ident()
        self._own = torch.Generator()
        self._own.set_state(process_wide.get_state())

    def __getattr__(self, name: str) -> Any:
        is_here = threading.get_ident() == self._thread
        return getattr(self._own if is_here else self._process_wide, name)


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _generators() -> dict[str, _Access]:
    """How to read and set the state of each generator that the process shares."""
    found: dict[str, _Access] = {
        "torch": (torch.default_generator.get_state, torch.default_generator.set_state),
        "python": (random.getstate, random.setstate),
    }
    if torch.cuda.is_initialized():
        found["cuda"] = (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all)
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        found["numpy"] = (numpy_random.get_state, numpy_random.set_state)
    return found


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)


def is_alone() -> bool:
    """Whether no other Python thread is running that could have drawn."""
    here = threading.get_ident()
    return all(t.ident == here or t.name.startswith(_OWN_THREADS) for t in threading.enumerate())


def _generators_in_code(model: nn.Module) -> set[str]:
    found = set(random_generators_used(model))
    return found | {"cuda"} if "torch" in found else found
