"""Counting on a thread of its own, while the training thread goes on training.

    with background():            # on the counting thread
        count_flops(snapshot, batch)

Most of what a count sets is known to its thread alone: modes, gradient and autocast flags, hooks on saved
tensors. The rest belongs to the process, and inside `background()` this thread keeps off it:

    random states            neither saved nor restored nor drawn from
    the compiler's stance    left alone; compiled code that a model calls by itself is refused beforehand
    dispatch modes           entered without the flags by which the compiler of all threads sees them
    checkpoints              run again without setting the process' random state back and forth
    warnings                 not even for a moment are they turned off
    settings of torch        a model that sets them in its forward is refused (`NeedsTrainingThread`)

Where torch itself reaches for such a state on the way, it finds a door: an attribute that behaves as ever on
all threads but this one. Doors are there while somebody counts in the background, and gone afterwards.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils import checkpoint

from ..errors import NeedsTrainingThread
from .doors import Door, never_traced

# Python has one lock, and a thread that works keeps it for 5 ms whoever else asks: beside a count that never
# sleeps, a loop of tiny operators takes many times as long a step. Each change of threads costs too, so
# sleeping after each operator takes more from the training in all than sleeping now and then.
WORK_S = 0.002
"""How long a background count works before it rests."""

PAUSE_S = 0.02
"""How long it then sleeps."""

_thread = threading.local()


def in_background() -> bool:
    """Whether this thread counts beside a training run."""
    return getattr(_thread, "inside", False)


@contextmanager
def background(rest: Callable[[], None] | None = None) -> Iterator[None]:
    """Whatever this thread counts inside leaves no trace that another thread could notice.

    `rest`, where given, is called every few operators in place of a short sleep: a monitor returns from it
    only while the training thread needs no Python (in its backward pass), which makes the count free, and
    raises from it to give the count up.
    """
    if in_background():
        yield
        return
    # Imported before the doors go up, for two of them stand there, and nobody may import them in between.
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.nn.attention.flex_attention")
    never_traced(in_background)
    with ExitStack() as doors:
        for door in _DOORS:
            doors.enter_context(door)
        _thread.inside, _thread.rest, _thread.since_s = True, rest or _short_sleep, time.perf_counter()
        try:
            with _autocast_cache_of_others():
                yield
        finally:
            _thread.inside, _thread.rest = False, None


def give_way() -> None:
    """Let the training thread have the interpreter; called after each operator of a background count."""
    if time.perf_counter() - _thread.since_s >= WORK_S:
        _thread.rest()
        _thread.since_s = time.perf_counter()


def _short_sleep() -> None:
    time.sleep(PAUSE_S)


@contextmanager
def _autocast_cache_of_others() -> Iterator[None]:
    """Leaving the outermost autocast region clears the casts cached by all threads: stay inside of one."""
    cached = torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.autocast_decrement_nesting()


def _enter_mode(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The flags that entering a mode sets keep *other* threads from compiling, some of them for good."""

    def __enter__(mode: Any) -> Any:
        if not in_background():
            return own(mode)
        dispatch._push_mode(mode)
        return mode

    return __enter__


def _exit_mode(own: Callable[..., Any]) -> Callable[..., Any]:
    def __exit__(mode: Any, *error: Any) -> Any:
        if not in_background():
            return own(mode, *error)
        state = vars(mode)
        dispatch._pop_mode(state.get("_dispatch_key") or state.get("_mode_key"))
        return None

    return __exit__


def _never_compile(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Compiled code that is called after all runs eagerly: compiling under a mode would spoil it for good."""

    def _callback_from_stance(callback: Any) -> Any:
        return None if in_background() else own(callback)

    return _callback_from_stance


def _without_random_state(own: staticmethod[Any, Any]) -> staticmethod[Any, Any]:
    def forward(ctx: Any, run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        return own.__func__(ctx, run_function, preserve_rng_state and not in_background(), *args)

    return staticmethod(forward)


def _generator_without_random_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def _checkpoint_without_reentrant_generator(
        fn: Any, preserve_rng_state: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        return own(fn, preserve_rng_state and not in_background(), *args, **kwargs)

    return _checkpoint_without_reentrant_generator


def _refuse_kernels(own: Callable[..., Any]) -> Callable[..., Any]:
    def _sdpa_kernel(*args: Any, **kwargs: Any) -> Any:
        if in_background():
            raise NeedsTrainingThread(
                "the model chooses attention kernels (sdpa_kernel) for the whole process"
            )
        return own(*args, **kwargs)

    return _sdpa_kernel


def _quiet_gradient(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Torch reads a gradient here with the warnings of the whole process turned off for the moment."""

    def safe_grad(tensor: Any) -> Any:
        if not in_background():
            return own(tensor)
        return tensor.grad if tensor.is_leaf else None

    return safe_grad


def _flex_attention_check(own: Callable[..., Any]) -> Callable[..., Any]:
    """Flex attention has no kernel for CPU tensors that need gradients; fake tensors need none."""

    def _validate_device(*args: Any, **kwargs: Any) -> Any:
        return None if getattr(_thread, "any_device", False) else own(*args, **kwargs)

    return _validate_device


def _refuse_compiler(own: Callable[..., Any]) -> Callable[..., Any]:
    """Flex attention calls the compiler where nobody else has, and sets the compiler's options to do so."""

    def environment(*args: Any, **kwargs: Any) -> Any:
        if in_background():
            raise NeedsTrainingThread("flex attention calls the compiler, which all threads share")
        return own(*args, **kwargs)

    return environment


def _loaded(name: str) -> Callable[[], Any]:
    return lambda: sys.modules.get(name)


_FLEX = _loaded("torch.nn.attention.flex_attention")
_FLEX_ATTENTION = Door(_FLEX, "_validate_device", _flex_attention_check)

_DOORS = (
    Door(lambda: dispatch.TorchDispatchMode, "__enter__", _enter_mode),
    Door(lambda: dispatch.TorchDispatchMode, "__exit__", _exit_mode),
    Door(_loaded("torch._dynamo.eval_frame"), "_callback_from_stance", _never_compile),
    Door(lambda: checkpoint.CheckpointFunction, "forward", _without_random_state),
    Door(lambda: checkpoint, "_checkpoint_without_reentrant_generator", _generator_without_random_state),
    Door(
        _loaded("torch.distributed._composable.checkpoint_activation"),
        "_checkpoint_without_reentrant_generator",
        _generator_without_random_state,
    ),
    Door(_loaded("torch._subclasses.meta_utils"), "safe_grad", _quiet_gradient),
    Door(lambda: torch.nn.attention, "_sdpa_kernel", _refuse_kernels),
    Door(_FLEX, "setup_compilation_env", _refuse_compiler),
    Door(_FLEX, "_set_compilation_env", _refuse_compiler),  # before torch 2.9
)


@contextmanager
def flex_attention_anywhere() -> Iterator[None]:
    """Let flex attention take fake tensors of any device on this thread; in the background it is refused."""
    if in_background():
        yield
        return
    with _FLEX_ATTENTION:
        _thread.any_device = True
        try:
            yield
        finally:
            _thread.any_device = False
