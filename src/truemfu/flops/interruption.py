"""Stops a count early: at its time limit, on a signal, or when it needs values still on the device.

    with Supervision(limit_s=60) as supervision:     on the training thread, between two steps
        FlopModel.fit(snapshot, batch)
    supervision.signals                              those that arrived meanwhile, for the caller to deliver

A count changes state of torch and restores it. An exception from a signal handler could arrive in between, so
handlers are deferred: the signal is recorded, the count stops at its next operator, all state is restored,
and only then does the handler run. Signals that are ignored by default, such as SIGCHLD, do not stop a count.
A second Ctrl-C or SIGTERM is handled at once, so that code that runs no operator can be interrupted too.

`CountStopped` and its subclasses derive from BaseException, so that neither our own fallbacks nor a model's
`except Exception` treat them as a failure of the model.
"""

from __future__ import annotations

import contextvars
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch

_URGENT = (signal.SIGINT, signal.SIGTERM)
_HARMLESS = {
    getattr(signal, name) for name in ("SIGCHLD", "SIGCONT", "SIGURG", "SIGWINCH") if hasattr(signal, name)
}
"""Signals that are ignored by default, such as the one for a child's exit; they do not stop a count."""


class CountStopped(BaseException):
    """A supervised count stops here, for a reason outside the model."""


class TimeIsUp(CountStopped):
    """The count took, or would take, longer than its limit."""


class SignalArrived(CountStopped):
    """A signal is waiting to be handled."""


class OtherCountRuns(CountStopped):
    """Another thread is counting, and a count changes state of the whole process: try again later."""


class ValuesPending(CountStopped):
    """The count needs values that are still being copied from the device: try again when they arrive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.is_weight = isinstance(tensor, torch.nn.Parameter)


class Fetched:
    """Copies of device tensors for counts that must not wait; stored from one attempt to the next."""

    def __init__(self, start_copy: Callable[[torch.Tensor], Any]) -> None:
        self._start_copy = start_copy
        self._copies: dict[tuple[Any, ...], Any] = {}

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Start copying these tensors, unless already started."""
        for tensor in tensors:
            key = _memory_of(tensor)
            if key not in self._copies:
                self._copies[key] = self._start_copy(tensor)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values; raises ValuesPending until they have arrived."""
        self.start([tensor])
        copy = self._copies[_memory_of(tensor)]
        if not copy.ready():
            raise ValuesPending(tensor)
        return copy.get()  # type: ignore[no-any-return]

    def ready(self) -> bool:
        """Whether all requested values have arrived."""
        return all(copy.ready() for copy in self._copies.values())


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Supervision:
    """Stops the counts inside it at its limits; one at a time on a thread.

    Without `end_at_signals` signals are handled after the count, which could otherwise never finish where
    they keep arriving.
    """

    def __init__(
        self, *, limit_s: float = math.inf, fetched: Fetched | None = None, end_at_signals: bool = True
    ) -> None:
        self._limit_s, self.fetched, self._end_at_signals = limit_s, fetched, end_at_signals
        self.signals: list[int] = []
        """Signals that arrived and are not handled yet, each once, in order of arrival."""
        self.raised: BaseException | None = None
        """What a handler raised during the count; not an error of the model."""
        self.is_late = False
        """Whether the time limit has stopped the count, even if the model's code caught the exception."""
        self._ends_s = math.inf
        self._must_stop = False
        self._handlers: dict[int, Any] = {}
        self._token: contextvars.Token[Supervision | None] | None = None

    @property
    def left_s(self) -> float:
        """Seconds left before the time limit."""
        return self._ends_s - time.perf_counter()

    def check(self) -> None:
        """Stop the count if a signal or the time limit demands it; called at each operator."""
        if self._must_stop:
            raise SignalArrived
        if time.perf_counter() > self._ends_s:
            self.is_late = True
            raise TimeIsUp

    def __enter__(self) -> Supervision:
        self._ends_s = time.perf_counter() + self._limit_s
        self._token = _current.set(self)
        if threading.current_thread() is threading.main_thread():  # handlers are set and run only there
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._on_signal)
            except BaseException:  # a handler ran in between
                self._restore_handlers()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        """Restore all handlers, even if one of them runs and raises meanwhile."""
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                if signal.getsignal(number) == self._on_signal:  # else the model has set a handler of its own
                    signal.signal(number, handler)
                del self._handlers[number]
        finally:
            if self._handlers:
                self._restore_handlers()
            elif self._token is not None:
                token, self._token = self._token, None
                _current.reset(token)

    def deferred(self, number: int) -> Any:
        """The handler that runs after the count."""
        return self._handlers.get(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number not in self.signals:
            self.signals.append(number)
            self._must_stop |= self._end_at_signals and number not in _HARMLESS
        elif number in _URGENT and number in self._handlers:
            self.signals.remove(number)
            try:
                self._handlers[number](number, frame)
            except BaseException as error:
                self.raised = error
                raise


def user_handler(number: int) -> Any:
    """The user's handler of a signal, also while a count defers it."""
    handler = signal.getsignal(number)
    count = getattr(handler, "__self__", None)
    return count.deferred(number) if isinstance(count, Supervision) else handler


def deliver(signals: list[int]) -> None:
    """Run the deferred handlers; if one raises, that propagates and the remaining signals stay listed."""
    while signals:
        signal.raise_signal(signals.pop(0))


_current: contextvars.ContextVar[Supervision | None] = contextvars.ContextVar("supervision", default=None)


def supervision() -> Supervision | None:
    """The supervision of counts on this thread; None for a count without limits."""
    return _current.get()


def was_interrupted() -> bool:
    """Whether a signal handler raised during this count, which explains any error."""
    current = supervision()
    return current is not None and current.raised is not None
