"""What may end a count before it is done: its time limit, a signal, values that are still on the device.

    with Supervision(limit_s=60) as supervision:     on the thread that trains, between two steps
        FlopModel.fit(snapshot, batch)
    supervision.signals                              those that arrived meanwhile, for the caller to deliver

A count sets state of torch and puts it back. An exception out of a signal handler could arrive between the
two, so handlers are deferred: a signal is noted, the count ends at its next operator, all state is restored,
and only then does the handler run. Signals that are ignored by default, such as SIGCHLD, end no count.
Ctrl-C or SIGTERM that arrives a second time is handled at once: code that runs no operator must be
interruptible too.

`CountStopped` and its kin are no `Exception`: neither our own fallbacks nor a model's `except Exception` take
them for a failure of the model.
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
"""Signals that are ignored by default, such as the one for the end of a child: no count ends at these."""


class CountStopped(BaseException):
    """A supervised count ends here, for a reason that is not the model's."""


class TimeIsUp(CountStopped):
    """The count would take, or took, longer than it may."""


class SignalArrived(CountStopped):
    """A signal waits to be handled."""


class OtherCountRuns(CountStopped):
    """Another thread counts, and what a count sets belongs to the process: try again later."""


class ValuesPending(CountStopped):
    """Values that the count needs are on their way from the device: try again when they have arrived."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.is_weight = isinstance(tensor, torch.nn.Parameter)


class Fetched:
    """Copies of device tensors for counts that must not wait; kept from one attempt to the next."""

    def __init__(self, start_copy: Callable[[torch.Tensor], Any]) -> None:
        self._start_copy = start_copy
        self._copies: dict[tuple[Any, ...], Any] = {}

    def start(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to copy these, unless that has begun."""
        for tensor in tensors:
            key = _memory_of(tensor)
            if key not in self._copies:
                self._copies[key] = self._start_copy(tensor)

    def get(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values; ValuesPending until they have arrived."""
        self.start([tensor])
        copy = self._copies[_memory_of(tensor)]
        if not copy.ready():
            raise ValuesPending(tensor)
        return copy.get()  # type: ignore[no-any-return]

    def ready(self) -> bool:
        """Whether everything that was asked for has arrived."""
        return all(copy.ready() for copy in self._copies.values())


def _memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class Supervision:
    """Ends the counts inside it at its limits; one at a time on a thread.

    Where signals keep arriving, a count would never be done: it need not `end_at_signals`. They are then
    handled when it is over.
    """

    def __init__(
        self, *, limit_s: float = math.inf, fetched: Fetched | None = None, end_at_signals: bool = True
    ) -> None:
        self._limit_s, self.fetched, self._end_at_signals = limit_s, fetched, end_at_signals
        self.signals: list[int] = []
        """Signals that arrived and were not handled yet, each once, in their order."""
        self.raised: BaseException | None = None
        """What a handler raised that ran in the middle: it is not the model's."""
        self.is_late = False
        """Whether the time limit has ended the count, whatever a model's own code made of that."""
        self._ends_s = math.inf
        self._is_to_end = False
        self._handlers: dict[int, Any] = {}
        self._token: contextvars.Token[Supervision | None] | None = None

    @property
    def left_s(self) -> float:
        """How much longer the count may take."""
        return self._ends_s - time.perf_counter()

    def check(self) -> None:
        """End the count if it is time to; called at each operator."""
        if self._is_to_end:
            raise SignalArrived
        if time.perf_counter() > self._ends_s:
            self.is_late = True
            raise TimeIsUp

    def __enter__(self) -> Supervision:
        self._ends_s = time.perf_counter() + self._limit_s
        self._token = _current.set(self)
        if threading.current_thread() is threading.main_thread():  # handlers run, and are set, there alone
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._note)
            except BaseException:  # a handler ran in between
                self._put_back()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    def _put_back(self) -> None:
        """Set all handlers as they were, also where one of them runs and raises meanwhile."""
        try:
            while self._handlers:
                number, handler = next(iter(self._handlers.items()))
                if signal.getsignal(number) == self._note:  # else the model has set a handler of its own
                    signal.signal(number, handler)
                del self._handlers[number]
        finally:
            if self._handlers:
                self._put_back()
            elif self._token is not None:
                token, self._token = self._token, None
                _current.reset(token)

    def deferred(self, number: int) -> Any:
        """The handler that runs after the count."""
        return self._handlers.get(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self.signals:
            self.signals.append(number)
            self._is_to_end |= self._end_at_signals and number not in _HARMLESS
        elif number in _URGENT and number in self._handlers:
            self.signals.remove(number)
            try:
                self._handlers[number](number, frame)
            except BaseException as error:
                self.raised = error
                raise


def handler_behind_count(number: int) -> Any:
    """The handler of a signal, also while a count defers it."""
    handler = signal.getsignal(number)
    count = getattr(handler, "__self__", None)
    return count.deferred(number) if isinstance(count, Supervision) else handler


def deliver(signals: list[int]) -> None:
    """Let the handlers run that were deferred; what they raise passes through, and the rest stays listed."""
    while signals:
        signal.raise_signal(signals.pop(0))


_current: contextvars.ContextVar[Supervision | None] = contextvars.ContextVar("supervision", default=None)


def supervision() -> Supervision | None:
    """The supervision that this thread counts under; None for a count that nothing limits."""
    return _current.get()


def was_interrupted() -> bool:
    """Whether a signal handler raised in the middle of this count: an error is then its own."""
    watched = supervision()
    return watched is not None and watched.raised is not None
