"""Watches the operators of one training step while it runs, without changing anything in it.

    enter ──► the program runs its step: each operator runs, then it is counted ──► leave ──► Observation

The mode is at the bottom of the thread's stack of dispatch modes, so it handles an operator last, after those
of the program. Tensor subclasses with a dispatch of their own unfold first: their inner operators are seen.
Threads of autograd inherit the mode; other threads are not seen.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ...convention import Convention
from ...errors import one_line
from ...torch_private.dispatch import TorchDispatchMode, check_counts, disable_torch_function
from ...torch_private.mode_stack import check_observes, modes_below, put_at_the_bottom, take_out
from ..count.counting_mode import count_flex_attention
from .observation import Observation
from .observed_tally import ObservedTally

_OWN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter, torch.nn.Buffer))


class StepObserver:
    """Watches what one training step runs. Made on the training thread, entered there."""

    def __init__(self, convention: Convention) -> None:
        check_counts()
        check_observes()
        self._tally = ObservedTally(convention)
        self._mode = _ObserverMode(self._tally)
        self._thread = threading.get_ident()
        self._passes: list[bool] = []
        self._began_in_forward = False
        self._first_batch_at: int | None = None

    def enter(self) -> None:
        """Begin to watch this thread, and autograd's threads as it uses them."""
        self._thread = threading.get_ident()
        take_out(_is_finished)
        self._tally.mark_start()
        put_at_the_bottom(self._mode)

    def leave(self) -> Observation:
        """Stop watching; what was seen. Never raises."""
        self._mode.is_finished = True
        if threading.get_ident() == self._thread:
            try:
                take_out(_is_finished)
            except Exception as error:
                self._tally.fail(f"the observation did not end in order ({one_line(error)})")
        return Observation(self._tally, self._first_batch_at, began_in_forward=self._began_in_forward)

    def suspend(self) -> None:
        """Ignore what runs from now on: a pause inside the step."""
        self._mode.is_suspended = True

    def resume(self) -> None:
        """Watch again after a pause."""
        self._mode.is_suspended = False

    def pass_begins(self, *, is_training: bool, name: str | None = None) -> None:
        """Record that a watched model's forward begins; work is split by this name, if it has one."""
        if threading.get_ident() != self._thread:
            return
        take_out(_is_finished)
        if not self._tally.operators:
            self._began_in_forward = True
        self._passes.append(is_training)
        self._tally.training_passes += is_training
        self._tally.enter_module(name or "")

    def pass_ends(self) -> None:
        """Record that the watched model's forward has ended, by return or exception."""
        if threading.get_ident() == self._thread and self._passes:
            self._tally.training_passes -= self._passes.pop()
            self._tally.leave_module()

    def batch_begins(self) -> None:
        """Record that a micro-batch of the step begins."""
        if self._first_batch_at is None:
            self._first_batch_at = len(self._tally.entries)


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

    def __init__(self, tally: ObservedTally) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_finished = self.is_suspended = False
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_finished or modes_below():  # the latter: torch traces, on tensors without data
            return func(*args, **kwargs)
        if types and not _OWN_TYPES.issuperset(types):
            return NotImplemented  # a tensor subclass: its own dispatch unfolds it
        with disable_torch_function():
            out = func(*args, **kwargs)
            if not self.is_suspended:
                try:
                    self._tally.saw(func, args, kwargs, out)
                except Exception as error:
                    self._tally.fail(f"counting {func} failed: {one_line(error)}")
        return out


count_flex_attention(_ObserverMode)


def _is_finished(mode: Any) -> bool:
    return isinstance(mode, _ObserverMode) and mode.is_finished
