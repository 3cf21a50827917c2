"""A worker's output: lines in its log, and its result for the supervisor."""

from __future__ import annotations

import contextlib
import sys

from ... import plain_files
from ...records import CaseResult, Status, encode

_STDOUT = 1


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
