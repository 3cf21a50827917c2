"""Whether an operator without gradients belongs to a custom Function that was called with gradients.

Torch disables gradients while a Function's forward runs. Whether they were enabled when it was called is
known from the Function's context, which has edges to the inputs' nodes only then; a Function that receives
no context in its forward (`setup_context`) leaves the question open.
"""

from __future__ import annotations

import enum
import inspect
import sys
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_APPLY = getattr(torch.autograd.Function.apply, "__code__", None)


class Call(enum.Enum):
    """How the Functions among the callers were called."""

    NONE = "no Function is among the callers"
    WITH_GRADIENTS = "called with gradients"
    WITHOUT_GRADIENTS = "called without gradients"
    UNKNOWN = "unknown"


def function_call() -> Call:
    """How the Functions whose forward runs now were called: with gradients if one of them was."""
    inner: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    found = Call.NONE
    while frame is not None:
        if frame.f_code is _APPLY and inner is not None:
            context = _context(inner)
            if context is None:
                found = Call.UNKNOWN
            elif context.next_functions:
                return Call.WITH_GRADIENTS
            elif found is Call.NONE:
                found = Call.WITHOUT_GRADIENTS
        inner, frame = frame, frame.f_back
    return found


def _context(forward: FrameType) -> Any:
    """The context that a Function's forward received as its first argument; None if it received none."""
    code = forward.f_code
    if code.co_argcount:
        first = forward.f_locals.get(code.co_varnames[0])
    elif code.co_flags & inspect.CO_VARARGS:
        first = next(iter(forward.f_locals.get(code.co_varnames[code.co_kwonlyargcount], ())), None)
    else:
        first = None
    return first if isinstance(first, BackwardCFunction) else None
