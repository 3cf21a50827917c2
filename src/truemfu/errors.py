"""Every error and warning of this package, in one tree.

    TruemfuError                 anything we raise on purpose; its text is one clear line
    ├── ModelError               the model cannot be built, run or differentiated
    │   └── SplitOverRanks       its work is spread over ranks so that one rank's share is unknown
    ├── BatchError               the batch does not fit the model, or lacks something that is needed
    ├── RecordError              a file that should hold one of our records does not
    ├── CounterError             the hardware's counters cannot be read, now or at all
    │   ├── NvmlMissing          nvidia-ml-py is not installed
    │   └── ReplayEnded          a recorded trace has no more samples
    └── UsageError               a wrong argument: an unknown name, size, dtype, device

    TruemfuWarning               issued once per text and process

`UsageError` is also a `ValueError`, so code that does not know this package still catches it.
"""

from __future__ import annotations

import difflib
import reprlib
import warnings
from collections.abc import Iterable

from .text import printable, shortened

_MAX_MESSAGE = 600
_MAX_VALUE = 80


class TruemfuError(Exception):
    """Base of all errors raised on purpose: the message is one line meant for the user.

    Its `str` is printable and of bounded length, including anything it quotes (a configuration value, a file
    name), because Python itself may print it.
    """

    def __str__(self) -> str:
        return message_of(super().__str__())


class ModelError(TruemfuError):
    """The model cannot be built, run or differentiated."""


class SplitOverRanks(ModelError):
    """The model's work is spread over ranks in a way that leaves this rank's share unknown."""


class BatchError(TruemfuError):
    """The batch does not fit the model, or lacks something that is needed."""


class RecordError(TruemfuError):
    """A file that should hold one of our records does not; the message names the file and the reason."""


class CounterError(TruemfuError):
    """The counters cannot be read, now or at all; the message gives the reason in one line."""


class NvmlMissing(CounterError):
    """nvidia-ml-py, by which an NVIDIA GPU is asked, is not installed."""


class ReplayEnded(CounterError):
    """A recorded trace has no more samples."""


class UsageError(TruemfuError, ValueError):
    """An argument is wrong; the message states what was expected, what was given and what to do."""


class TruemfuWarning(UserWarning):
    """Something the user should know; each text is issued once per process."""

    def __str__(self) -> str:
        return message_of(super().__str__())


def message_of(text: str) -> str:
    """Text for the user, which may quote anything, as one printable line of bounded length."""
    return shortened(printable(" ".join(text.split())), _MAX_MESSAGE)


def one_line(error: BaseException) -> str:
    """An error as one line of bounded length; our own errors without their type name."""
    text = message_of(text_of(error))
    if not isinstance(error, TruemfuError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return shortened(text)


def text_of(error: BaseException) -> str:
    """An error's message; if its `str` raises, a text that names the second error's type."""
    try:
        return str(error)
    except Exception as second:
        return f"(its own message cannot be read: {type(second).__name__})"


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = _MAX_VALUE


def brief(value: object) -> str:
    """A value as quoted in an error message: bounded in time and length, even for a YAML alias bomb."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = f"a very long {type(value).__name__}"
    return shortened(" ".join(text.split()), _MAX_VALUE)


_already_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn with `message` unless this process has already done so.

    The only exception that propagates is a warning that a filter turns into an error. A closed or failing
    stderr, or a warning handler that raises, must not affect the caller, which may be a training step.
    """
    if message in _already_warned:
        return
    _already_warned.add(message)
    try:
        warnings.warn(message, TruemfuWarning, stacklevel=3)
    except (TruemfuWarning, KeyboardInterrupt):
        raise
    except BaseException:
        return


def closest(name: str, known: Iterable[str], least: float = 0.6) -> str:
    """A hint ` (did you mean 'x'?)` for a misspelt name in any case, or an empty string.

    `least` is how alike two names must be, from 0 to 1.
    """
    lower = {entry.lower(): entry for entry in known}
    match = difflib.get_close_matches(name[:_MAX_VALUE].lower(), list(lower), n=1, cutoff=least)
    return f" (did you mean {lower[match[0]]!r}?)" if match else ""
