"""The stack of dispatch modes of this thread: puts a mode below those of the program, and takes it out again.

A mode entered by `with` would be on top of the stack: a mode of the program that was entered before and is
left earlier would take ours off instead of itself. `with` also tells the compiler that a mode is active, so
that it runs compiled code eagerly. Modes of torch itself (fake tensors, tracing) are always below all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import table
from .dispatch import REQUIRED

_NAMES = (table.PUSH_MODE, table.POP_MODE, table.MODE_STACK, table.STACK_LENGTH)
_push, _pop = table.get(table.PUSH_MODE), table.get(table.POP_MODE)
_stack: Callable[[], list[Any]] = table.get_or(table.MODE_STACK, list)

modes_below: Callable[[], int] = table.get_or(table.STACK_LENGTH, lambda: 0)
"""How many modes are below the one whose operator is being handled."""


def why_not_to_observe() -> str | None:
    """One line about a name without which no step can be observed; None if torch has all."""
    for path in (*REQUIRED, *_NAMES):
        if not table.has(path):
            return table.reason(path)
    return None


def modes_of_this_thread() -> list[Any]:
    """The modes on the stack, without those of torch itself; the last one handles an operator first."""
    return [mode for mode in _stack() if getattr(mode, "_mode_key", None) is None]


def only_has(kind: type) -> bool:
    """Whether all modes on the stack of this thread, those of torch too, are of this class."""
    return all(isinstance(mode, kind) for mode in _stack())


def put_at_the_bottom(mode: Any) -> None:
    """Put a mode below all others of the program on this thread."""
    modes = modes_of_this_thread()
    _replace(modes, [mode, *modes])


def take_out(unwanted: Callable[[Any], bool]) -> bool:
    """Take such modes off the stack of this thread, wherever they are; whether there were any."""
    modes = modes_of_this_thread()
    kept = [mode for mode in modes if not unwanted(mode)]
    if len(kept) < len(modes):
        _replace(modes, kept)
    return len(kept) < len(modes)


def _replace(modes: list[Any], others: list[Any]) -> None:
    for _ in modes:
        _pop()
    for mode in others:
        _push(mode)
