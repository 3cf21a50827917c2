"""SIGTERM and SIGHUP: rows are written first, then the signal has the effect it has without a monitor.

    signal ─► Python's own C handler ─► a byte in a pipe ─► our thread: rows are written, 2 s at most
                                     └► main thread, when it runs Python again: our handler waits for that

- The default action ends the process by that signal. Our thread does that if the main thread stays in a call,
  such as a collective whose other ranks have ended.
- A handler that was set before is called after the rows are written; the run continues if it returns.
- A signal that is ignored, or handled by code that is not Python, is not touched.
- A handler set after ours replaces it. If it calls ours, rows are written and nothing else happens.

The handler takes no lock: it may interrupt any code on the main thread, the monitor's included. It wakes the
thread and waits for a limited time; if it has interrupted a step that is being noted, it returns at once, and
the thread sends the signal again when rows are written. Forked children get the previous handlers back. One
watch serves all monitors of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from ..plain_files import Descriptor

LIMIT_S = 2.0
"""The longest delay of a signal."""
_FOR_WRITING_S = 1.8
_TO_HANDLE_S = 0.1
"""Within that time a main thread that runs Python calls its handler."""
_POLL_S = 0.005
_WATCHED = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_END = 0
"""Ends the thread; no signal has this number."""

WriteOut = Callable[[float], object]
"""Writes rows within the given seconds, on a monitor thread."""


class _Writer(NamedTuple):
    write_out: WriteOut
    is_held: Callable[[], bool]


_writers: list[_Writer] = []
_watch: _Watch | None = None
_ending = threading.Lock()
_masks = threading.local()


def write_at_signals(write_out: WriteOut, is_held: Callable[[], bool]) -> Callable[[], None]:
    """Write rows at SIGTERM and SIGHUP, until the returned function is called.

    `is_held`: whether the calling thread holds the lock that `write_out` needs. Handlers can only be set on
    the main thread: on another one this changes nothing.
    """
    global _watch
    writer = _Writer(write_out, is_held)
    _writers.append(writer)
    if _watch is None and threading.current_thread() is threading.main_thread():
        _watch = _Watch()

    def leave() -> None:
        global _watch
        if writer in _writers:
            _writers.remove(writer)
        if not _writers and _watch is not None and threading.current_thread() is threading.main_thread():
            _watch.end()
            _watch = None

    return leave


class _Watch:
    """Our handlers, and the thread that writes rows for them."""

    def __init__(self) -> None:
        self._is_over = False
        self._written_from_s = -1.0
        """When the last completed write of rows began."""
        self._put_off: set[int] = set()
        """Signals that arrived while the main thread held the lock for writing: they are sent again, once."""
        self._sent_again: set[int] = set()
        self._reader, self._writer = map(Descriptor.high, os.pipe())
        os.set_blocking(self._writer.number, False)
        self._thread = threading.Thread(target=self._live, name="truemfu-signals", daemon=True)
        self._thread.start()
        self._handler = self._handle
        self._before: dict[int, Any] = {}
        for number in _WATCHED:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._handler)
        other = signal.set_wakeup_fd(self._writer.number, warn_on_full_buffer=False)
        if other != -1:  # an event loop uses it: rows are then written when the main thread runs Python
            signal.set_wakeup_fd(other)

    def end(self) -> None:
        """Restore the handlers; on the main thread."""
        self._is_over = True
        self._put_back()
        self._wake(_END)
        self._thread.join(LIMIT_S)
        if not self._thread.is_alive():
            self._close_pipe()
        for number in self._put_off:  # the thread ended before it handled them
            signal.raise_signal(number)

    def forked(self) -> None:
        """In a forked child, which has the handlers and the pipe but not the thread."""
        self._is_over = True
        self._put_back()
        self._close_pipe()

    def _put_back(self) -> None:
        for number, before in self._before.items():
            if self._is_set(number):
                signal.signal(number, before)
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, self._writer.number):
            signal.set_wakeup_fd(current)

    def _close_pipe(self) -> None:
        self._reader.close()
        self._writer.close()

    def _wake(self, number: int) -> bool:
        """Write a byte for the thread; whether it can read it."""
        if not (self._writer.is_ours and self._thread.is_alive()):
            return False  # the program has closed our descriptors, which ends the thread
        with contextlib.suppress(OSError):  # full: the thread has enough to read
            os.write(self._writer.number, bytes((number,)))
        return True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_ours = signal.getsignal(number) == self._handler
        is_written = number in self._sent_again
        self._sent_again.discard(number)
        if not (self._is_over or is_written):
            asked_s, can_put_off = time.monotonic(), self._can_put_off(number)
            is_awake = self._wake(number)
            if is_awake and can_put_off:
                self._put_off.add(number)
                return
            while is_awake and self._written_from_s < asked_s and time.monotonic() < asked_s + LIMIT_S:
                time.sleep(_POLL_S)
        before = self._before[number]
        if callable(before):
            before(number, frame)
        elif is_ours:
            _end_by(number)

    def _can_put_off(self, number: int) -> bool:
        """Whether the main thread is in a call of the monitor that will return, and it can be resent."""
        is_held = any(writer.is_held() for writer in list(_writers))
        return is_held and self._is_set(number)

    def _live(self) -> None:
        """The thread: blocks in a read, so that it costs nothing until a signal arrives."""
        try:
            self._write_out_at_signals()
        except BaseException:  # a program may close descriptors it does not know
            return

    def _write_out_at_signals(self) -> None:
        while self._reader.is_ours:
            numbers = os.read(self._reader.number, 64)
            if not numbers or _END in numbers:
                return
            for number in self._before.keys() & set(numbers):
                began_s, ends = time.monotonic(), self._is_set(number) and not callable(self._before[number])
                position = _main_thread_position()
                for writer in list(_writers):
                    with contextlib.suppress(Exception):  # the process is about to end
                        writer.write_out(began_s + _FOR_WRITING_S - time.monotonic())
                self._written_from_s = began_s
                if number in self._put_off:
                    self._sent_again.add(number)
                    self._put_off.discard(number)
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
                elif ends:
                    time.sleep(max(0.0, began_s + _TO_HANDLE_S - time.monotonic()))
                    if self._is_set(number) and _main_thread_position() == position:
                        _end_by(number)  # else it has run a handler, ours or another

    def _is_set(self, number: int) -> bool:
        return bool(signal.getsignal(number) == self._handler)


def _main_thread_position() -> tuple[int, int] | None:
    """Its current Python instruction: unchanged if it has not run Python since."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def _end_by(number: int) -> None:
    """Apply the signal's default action; from any thread."""
    if os.getpid() == 1 or not _ending.acquire(blocking=False):
        return  # the first process of a container ignores signals without a handler
    set_action = ctypes.CDLL(None).signal
    set_action.argtypes, set_action.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_action(number, None)
    os.kill(os.getpid(), number)


def _before_fork() -> None:
    """Block signals until the child has restored its handlers: the pipe is shared with the parent."""
    if _watch is not None:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)


def _after_fork() -> None:
    if (before := getattr(_masks, "before", None)) is not None:
        _masks.before = None
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    global _watch
    if _watch is not None:
        _watch.forked()
        _watch = None
        _writers.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
