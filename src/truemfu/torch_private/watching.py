"""Names of torch that a monitor needs on the training thread: the state of autograd, vmap, autocast; calls.

Each name is tested before use: one that still exists but no longer works counts as missing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import table
from .find import ABSENT

_found = {
    path: table.get(path)
    for path in (
        table.GRAPH_TASK,
        table.AUTOGRAD_NODE,
        table.FUNCTORCH_LEVEL,
        table.ANY_AUTOCAST,
        table.CURRENT_STREAM,
        table.COMPILED_CALL,
        table.VERSION,
    )
}


def _works(probe: Callable[..., bool], *args: Any) -> bool:
    """The result of a probe; False if it raises, so that an import never fails."""
    try:
        return probe(*args)
    except Exception:
        return False


def _in_node() -> int:
    return -1 if _found[table.AUTOGRAD_NODE]() is None else 0


def _no_backward() -> int:
    return -1


def _no_level() -> None:
    return None


def _any_autocast() -> bool:
    table.miss(table.ANY_AUTOCAST)
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def _sees_autocast(is_any: Callable[[], bool]) -> bool:
    """Whether `is_any` distinguishes a thread with autocast from one without."""
    before = torch.is_autocast_enabled("cpu")
    try:
        torch.set_autocast_enabled("cpu", True)
        results = [is_any()]
        torch.set_autocast_enabled("cpu", False)
        results.append(is_any())
    finally:
        torch.set_autocast_enabled("cpu", before)
    return results == [True, torch.is_autocast_enabled("cuda")]


def _backward_number() -> Callable[[], int]:
    if _found[table.GRAPH_TASK] is not ABSENT:
        return _found[table.GRAPH_TASK]  # type: ignore[no-any-return]
    return _no_backward if _found[table.AUTOGRAD_NODE] is ABSENT else _in_node


def _or(path: str, instead: Any) -> Any:
    return instead if _found[path] is ABSENT else _found[path]


backward_number: Callable[[], int] = _backward_number()
"""The number of the backward pass this thread is in; -1 outside. Only valid if `detects_backward`."""
functorch_level: Callable[[], Any] = _or(table.FUNCTORCH_LEVEL, _no_level)
"""The innermost active vmap or other functorch transform; None outside. Only valid if `detects_functorch`."""
_sees = _found[table.ANY_AUTOCAST] is not ABSENT and _works(_sees_autocast, _found[table.ANY_AUTOCAST])
is_any_autocast: Callable[[], bool] = _found[table.ANY_AUTOCAST] if _sees else _any_autocast


def _run_on_a_thread(probe: Callable[[], Any]) -> None:
    thread = threading.Thread(target=probe, name="truemfu-probe", daemon=True)
    thread.start()
    thread.join()


@functools.cache
def detects_backward() -> bool:
    """Whether a forward pass inside a backward pass, run by a checkpoint, can be recognised.

    Tried out on another thread: a caller inside `vmap` or `grad` of functorch cannot call `backward`, and
    modes, transforms and grad mode belong to a thread.
    """
    seen: list[int] = []

    def probe() -> None:
        leaf = torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True)
        leaf.register_hook(lambda gradient: seen.append(backward_number()))
        seen.append(backward_number())
        leaf.clone().backward()

    _run_on_a_thread(probe)
    outside, inside = seen
    is_new = outside == -1 or outside != inside or backward_number is _in_node
    if inside not in (None, -1) and is_new:
        return True
    table.miss(table.GRAPH_TASK)
    return False


@functools.cache
def detects_functorch() -> bool:
    """Whether a forward pass inside vmap or another functorch transform can be recognised.

    Tried out on another thread: `vmap` refuses to run under saved-tensor hooks, and its first call imports
    the compiler, which torch 2.6 cannot do where calls of torch are hidden from modes.
    """
    seen: list[Any] = []

    def probe(x: torch.Tensor) -> torch.Tensor:
        seen.append(functorch_level())
        return x

    _run_on_a_thread(lambda: torch.func.vmap(probe)(torch.zeros(1, device="cpu")))
    if seen[0] is not None:
        return True
    table.miss(table.FUNCTORCH_LEVEL)
    return False


current_stream_data: Callable[[int], Any] | None = _or(table.CURRENT_STREAM, None)
"""Identifies the current stream without creating an object; None if torch lacks it."""

CALL = "_compiled_call_impl"
"""The attribute in which a module stores the callable that replaces its `_call_impl`."""


def compiled_call(model: nn.Module) -> Any:
    """The compiled callable that `Module.compile` has set on a model; None if there is none."""
    return model.__dict__.get(CALL) if _found[table.COMPILED_CALL] is not ABSENT else None


def miss_compiled_calls() -> None:
    """Warn about an unobserved forward pass, if it may be one of a model compiled with `Module.compile`."""
    if _found[table.COMPILED_CALL] is ABSENT:
        table.miss(table.COMPILED_CALL)


def _version_works(version: Callable[[torch.Tensor], int]) -> bool:
    with torch.inference_mode(False):
        tensor = torch.zeros((), device="cpu")
        before = version(tensor)
        tensor.zero_()
        return version(tensor) != before


def _version_of() -> Callable[[torch.Tensor], int] | None:
    found = _found[table.VERSION]
    get = getattr(found, "__get__", None)
    return get if get is not None and _works(_version_works, get) else None


_known_version = _version_of()
detects_overwrites = _known_version is not None
"""Whether an overwritten tensor can be recognised."""


def _no_version(tensor: torch.Tensor) -> int:
    table.miss(table.VERSION)
    return 0


version_of: Callable[[torch.Tensor], int] = _known_version or _no_version
"""A number that changes when a tensor is overwritten; raises RuntimeError for an inference tensor."""


def graph_counters() -> Any:
    """The counters of torch.compile, a mapping of mappings, once it is loaded; else None."""
    found = table.get(table.COUNTERS, load=False)
    if hasattr(found, "get"):
        return found
    if "torch._dynamo.utils" in sys.modules:
        table.miss(table.COUNTERS)
    return None


def default_store() -> Any:
    """The store of the default process group; None if its backend has none."""
    found = table.get(table.DEFAULT_STORE)
    if found is ABSENT:
        raise RuntimeError(table.reason(table.DEFAULT_STORE))
    return found()
