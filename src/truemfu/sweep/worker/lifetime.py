"""How a process of an experiment starts and ends: never after its parent, and at once when all is written."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """This process does not outlive the one that started it, however that ends."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def find_modules_here() -> None:
    """Find trainers and factories in the current folder, after installed packages."""
    with contextlib.suppress(FileNotFoundError):  # it may have been removed
        sys.path.append(os.getcwd())


def exit_at_once(code: int) -> NoReturn:
    """All is written, and an orderly exit of torch and CUDA is slow."""
    with contextlib.suppress(Exception):  # the log's disk may be full, or its streams closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
