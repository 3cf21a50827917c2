"""The stack of dispatch modes of this thread: puts a mode below those of the program, and takes it out again.

A mode entered by `with` would be on top of the stack: a mode of the program that was entered before and is
left earlier would take ours off instead of itself. `with` also tells the compiler that a mode is active, so
that it runs compiled code eagerly. Modes of torch itself (fake tensors, tracing) are always below all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import table
from .find import ABSENT

_NAMES = (table.PUSH_MODE, table.POP_MODE, table.MODE_STACK, table.STACK_LENGTH)
_push, _pop, _stack, _length = (table.get(name) for name in _NAMES)

modes_below: Callable[[], int] = (lambda: 0) if _length is ABSENT else _length
"""How many modes are below the one whose operator is being handled."""


def check_observes() -> None:
    """Raise ModelError if torch lacks a name without which no step can be observed."""
    table.require(*_NAMES)


def modes_of_this_thread() -> list[Any]:
    """The modes on the stack, without those of torch itself; the last one handles an operator first."""
    return [mode for mode in _stack() if getattr(mode, "_mode_key", None) is None]


def only_has(kind: type) -> bool:
    """Whether all modes on the stack of this thread, those of torch too, are of this class."""
    return all(isinstance(mode, kind) for mode in _stack())


def put_at_the_bottom(mode: Any) -> None:
    """Put a mode below all others of the program on this thread."""
    _replace(modes_of_this_thread(), lambda modes: [mode, *modes])


def take_out(unwanted: Callable[[Any], bool]) -> bool:
    """Take such modes off the stack of this thread, wherever they are; whether there were any."""
    modes = modes_of_this_thread()
    if not any(map(unwanted, modes)):
        return False
    _replace(modes, lambda modes: [mode for mode in modes if not unwanted(mode)])
    return True


def _replace(modes: list[Any], change: Callable[[list[Any]], list[Any]]) -> None:
    changed = change(modes)
    for _ in modes:
        _pop()
    for mode in changed:
        _push(mode)
