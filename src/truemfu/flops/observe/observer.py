"""Watches the operators of one training step while it runs, without changing anything in it.

    enter ──► the program runs its step: each operator runs, then it is counted ──► leave ──► Observation

The mode is at the bottom of the thread's stack of dispatch modes, so it handles an operator last, after those
of the program. Tensor subclasses with a dispatch of their own unfold first: their inner operators are seen.
Threads of autograd inherit the mode; other threads are not seen.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...convention import Convention
from ...errors import one_line
from ...torch_private.compiler import dynamo_disable, is_compiling
from ...torch_private.composite import as_called, divided, is_undivided
from ...torch_private.dispatch import TorchDispatchMode, disable_torch_function
from ...torch_private.mode_stack import (
    modes_below,
    modes_of_this_thread,
    only_has,
    put_at_the_bottom,
    take_out,
)
from ..count.counting_mode import count_flex_attention
from ..count.kernel_launches import watch_launches
from .compiled import CompiledRegions, reason_not_to_observe
from .graphs import Captures, GraphReplay
from .observation import Observation

_OWN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))
_NO_DISPATCH = torch.Tensor.__torch_dispatch__
OTHER_THREAD = "the step's forward pass began on a different thread from the one that calls log_step"
_left_behind: set[int] = set()
"""Threads whose stack has a mode that another thread finished."""


class StepObserver:
    """Watches what one training step runs, or a CUDA graph's capture. Made and entered on its thread."""

    def __init__(
        self, convention: Convention, *, captures: Captures | None = None, is_capture: bool = False
    ) -> None:
        self._captures = None if is_capture else captures or cuda_captures(convention)
        self._seen = Observation(convention, is_capture=is_capture)
        self._regions = CompiledRegions(self._is_watching, self._seen.saw_region)
        self._mode = _mode(self._seen, self._regions)
        self._thread = threading.get_ident()
        self._passes: list[bool] = []
        self._generation_passes = 0
        self._watches = contextlib.ExitStack()

    def enter(self) -> None:
        """Begin to watch this thread, and autograd's threads as it uses them."""
        self._thread = threading.get_ident()
        take_out(_is_finished)
        if (reason := reason_not_to_observe()) is not None:
            self._seen.fail(reason)
            return
        self._seen.mark_start()
        self._watches.callback(self._regions.watch())
        if self._captures is not None:
            self._captures.begin_step(self)
            self._watches.callback(self._captures.end_step, self)
        put_at_the_bottom(self._mode)
        self._watches.callback(watch_launches(self._seen, self._is_watching))

    def leave(self) -> Observation:
        """Stop watching; what was seen. Never raises."""
        self._mode.is_finished = True
        self._watches.close()
        if threading.get_ident() == self._thread:
            try:
                take_out(_is_finished)
            except Exception as error:
                self._seen.fail(f"observing the step did not end properly ({one_line(error)})")
        else:
            _left_behind.add(self._thread)
            self._seen.fail(OTHER_THREAD)
        return self._seen

    def fail(self, reason: str) -> None:
        """Record why the FLOPs of this step are unknown, whatever is seen of it."""
        self._seen.fail(reason)

    def suspend(self) -> None:
        """Ignore what runs from now on: a pause inside the step."""
        self._mode.is_suspended = True

    def resume(self) -> None:
        """Watch again after a pause."""
        self._mode.is_suspended = False

    def _is_watching(self) -> bool:
        """Whether what runs now on this thread is seen: it may be one of autograd's."""
        mode = self._mode
        return not mode.is_finished and mode.is_of_the_step() and mode in modes_of_this_thread()

    def captures(self, *, is_capturing: bool) -> None:
        """Record that this thread captures a CUDA graph, if it is the step's: nothing is executed then."""
        if self._mode in modes_of_this_thread():
            self._mode.is_capturing = is_capturing

    def replayed(self, capture: Observation | None) -> None:
        """Record that a CUDA graph is replayed; `capture` is the tally of its capture, if there is one."""
        if self._is_watching():
            self._seen.add_later(GraphReplay(capture, position=len(self._seen.entries)))

    def pass_begins(self, *, is_training: bool, name: str | None = None) -> None:
        """Record that a watched model's forward begins; work is split by this name, if it has one."""
        if threading.get_ident() != self._thread:
            return
        take_out(_is_finished)
        self._passes.append(is_training)
        self._seen.training_passes += is_training
        self._seen.enter_module(name or "")

    def pass_ends(self) -> None:
        """Record that the watched model's forward has ended, by return or exception."""
        if threading.get_ident() == self._thread and self._passes:
            self._seen.training_passes -= self._passes.pop()
            self._seen.leave_module()

    def generation_pass_begins(self) -> int:
        """Record that a pass of `generate` begins; its number in the step."""
        self._generation_passes += 1
        self._seen.generation_pass = self._generation_passes
        return self._generation_passes

    def generation_ends(self) -> None:
        """Record that `generate` has returned, or that what runs now belongs to no pass of it."""
        self._seen.generation_pass = 0

    def batch_begins(self, *, may_be_packed: bool = False) -> None:
        """Record that a micro-batch of the step begins; documents may be packed in its rows."""
        if threading.get_ident() != self._thread:
            self._seen.fail(OTHER_THREAD)
        self._seen.batch_begins(may_be_packed=may_be_packed)


def observe_capture(convention: Convention) -> Callable[[], Observation]:
    """Begin to observe the capture of a CUDA graph on this thread; returns what ends it."""
    observer = StepObserver(convention, is_capture=True)
    observer.enter()
    return observer.leave


@functools.cache
def cuda_captures(convention: Convention) -> Captures:
    """The captures of CUDA graphs in this process: to be held by a monitor for its lifetime."""
    return Captures(torch.cuda.CUDAGraph, lambda: observe_capture(convention))


class _ObserverMode(TorchDispatchMode):
    """Runs each operator unchanged, then reports it to the tally."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would wrap the dispatch in a function that loads the compiler."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, tally: Observation, regions: CompiledRegions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._regions = regions
        self.is_finished = self.is_suspended = self.is_capturing = False
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_finished or (modes_below() and not only_has(_ObserverMode)):
            return func(*args, **kwargs)  # the latter: torch traces, on tensors without data
        if types and not _OWN_TYPES.issuperset(types) and any(map(_has_dispatch, types)):
            return NotImplemented  # a tensor subclass: its own dispatch unfolds it
        if is_undivided(func, args):
            put_at_the_bottom(self)
            try:
                return divided(func, args, kwargs)
            finally:
                take_out(lambda mode: mode is self)
        with disable_torch_function():
            with as_called(func, args):
                out = func(*args, **kwargs)
            if self.is_of_the_step():
                try:
                    self._tally.saw(func, args, kwargs, out)
                except Exception as error:
                    self._tally.fail(f"counting {func} failed: {one_line(error)}")
        return out

    def is_of_the_step(self) -> bool:
        """Whether what runs now is executed for the step and seen by operators alone."""
        return not (
            self.is_suspended
            or self.is_capturing
            or self._tally.problem is not None
            or self._regions.is_inside()
            or self._compiles()
        )

    def _compiles(self) -> bool:
        """Whether the compiler runs; if that cannot be told, the FLOPs of the step are unknown."""
        try:
            return is_compiling()
        except Exception as error:  # the program's operators go on
            self._tally.fail(f"cannot tell whether the step ran the compiler: {one_line(error)}")
            return True


count_flex_attention(_ObserverMode)


def _mode(tally: Observation, regions: CompiledRegions) -> _ObserverMode:
    """A mode; once the compiler is loaded, one whose own code it does not compile.

    Dynamo compiles whatever Python code runs inside a compiled function after a graph break, such as the
    backward pass of a compiled step, and ours with it.
    """
    disable = dynamo_disable()
    return _ObserverMode(tally, regions) if disable is None else _uncompiled(disable)(tally, regions)


@functools.cache
def _uncompiled(disable: Callable[[Any], Any]) -> type[_ObserverMode]:
    class UncompiledMode(_ObserverMode):
        __torch_dispatch__ = disable(_ObserverMode.__torch_dispatch__)

    count_flex_attention(UncompiledMode)
    return UncompiledMode


def take_out_left_behind() -> None:
    """Take modes that another thread finished off the stack of this one."""
    if _left_behind and threading.get_ident() in _left_behind:
        _left_behind.discard(threading.get_ident())
        take_out(_is_finished)


def _forked() -> None:
    """In a forked process (a worker of a DataLoader) no step is observed."""
    take_out(lambda mode: isinstance(mode, _ObserverMode))


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)


def _has_dispatch(cls: type) -> bool:
    """Whether a subclass of tensors handles operators itself: lazy parameters, say, do not."""
    return cls.__torch_dispatch__ is not _NO_DISPATCH  # type: ignore[attr-defined]


def _is_finished(mode: Any) -> bool:
    return isinstance(mode, _ObserverMode) and mode.is_finished
