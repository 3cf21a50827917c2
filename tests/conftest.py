"""For all tests."""

from __future__ import annotations

import signal
import threading

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # A shell starts what it runs in the background with Ctrl-C ignored, and every process started from here
    # would inherit that: the tests that interrupt one would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)
