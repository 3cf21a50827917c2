"""Whether an operator without gradients belongs to a custom Function that was called with gradients.

Torch disables gradients while a Function's forward runs. Whether they were enabled when it was called is
known from the Function's context, which has edges to the inputs' nodes only then; a Function that receives
no context in its forward (`setup_context`) leaves the question open.
"""

from __future__ import annotations

import enum
import inspect
import sys
from types import CodeType, FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction

from ..count.data_flow import forward_codes


class Call(enum.Enum):
    """How the Functions among the callers were called."""

    NONE = "no Function is among the callers"
    WITH_GRADIENTS = "called with gradients"
    WITHOUT_GRADIENTS = "called without gradients"
    UNKNOWN = "unknown"


class FunctionCalls:
    """Finds the Functions among the callers by the code of their forward."""

    def __init__(self) -> None:
        self._is_forward: dict[CodeType, bool] = {}

    def current(self) -> Call:
        """How the Functions whose forward runs now were called: with gradients if one of them was."""
        found = Call.NONE
        frame: FrameType | None = sys._getframe(1)
        forwards: frozenset[Any] | None = None
        while frame is not None:
            code = frame.f_code
            if code not in self._is_forward:
                forwards = forwards or forward_codes()
                self._is_forward[code] = code in forwards
            if self._is_forward[code]:
                context = _context(frame)
                if context is None:
                    found = Call.UNKNOWN
                elif context.next_functions:
                    return Call.WITH_GRADIENTS
                elif found is Call.NONE:
                    found = Call.WITHOUT_GRADIENTS
            frame = frame.f_back
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
