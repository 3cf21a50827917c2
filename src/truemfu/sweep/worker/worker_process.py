"""The process of an experiment: it ends with its parent, prints to its log, sends its result, exits."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

from ... import plain_files
from ...records import CaseResult, Status, encode

_PR_SET_PDEATHSIG = 1
_STDOUT = 1


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


def write_line(text: str) -> None:
    """Write a line to the log at once. On a full disk the line is lost, the experiment continues.

    By its descriptor, so that a trainer may replace or close sys.stdout.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    with contextlib.suppress(OSError):
        plain_files.write_all(_STDOUT, text.encode(errors="replace") + b"\n")


def send(result: CaseResult, answer: plain_files.Descriptor) -> int:
    """Send the result through memory, which no disk can lose; returns the worker's exit code."""
    if not answer.is_ours:
        write_line("the result cannot be sent: the trainer has closed every file descriptor")
        return 1
    plain_files.write_all(answer.number, encode(result))
    return 0 if result.end is Status.OK else 1
