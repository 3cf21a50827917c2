"""Whether an operator without gradients belongs to a custom Function that was called with gradients.

Torch disables gradients while a Function's forward runs. Whether they were enabled when it was called is
known from the Function's context, which has edges to the inputs' nodes only then; a Function that receives
no context in its forward (`setup_context`) leaves the question open.
"""

from __future__ import annotations

import inspect
from types import CodeType, FrameType
from typing import Any

from torch.autograd.function import BackwardCFunction

from ..count.data_flow import APART, UNDECIDED, calling_frames, forward_codes


class FunctionCalls:
    """Finds the Functions among the callers by the code of their forward."""

    def __init__(self) -> None:
        self._is_forward: dict[CodeType, bool] = {}

    def phase(self) -> str | None:
        """The phase of an operator in the Functions whose forward runs now: forward if one of them was called
        with gradients. None if no Function is among the callers."""
        found: str | None = None
        forwards: frozenset[Any] | None = None
        for frame in calling_frames():
            code = frame.f_code
            if code not in self._is_forward:
                forwards = forwards or forward_codes()
                self._is_forward[code] = code in forwards
            if self._is_forward[code]:
                context = _context(frame)
                if context is None:
                    found = UNDECIDED
                elif context.next_functions:
                    return "forward"
                found = found or APART
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
