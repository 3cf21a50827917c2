"""For all tests."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # A shell starts what it runs in the background with Ctrl-C ignored, and every process started from here
    # would inherit that: the tests that interrupt one would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FOREVER_S = 240


@pytest.fixture
def never_waits() -> Iterator[None]:
    """For what must not block: a test that waits for ever fails."""

    def give_up(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"waited for {_FOREVER_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_FOREVER_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
