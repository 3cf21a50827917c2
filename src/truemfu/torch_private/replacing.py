"""Replaces names of torch for the duration of a count."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import table
from .find import ABSENT


@contextlib.contextmanager
def replaced(path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a module's name by `make(original)` inside the context; does nothing if it is not loaded."""
    home, _, name = path.partition(":")
    module: Any = sys.modules.get(home)
    original = table.get(path, load=False)
    if module is None or original is ABSENT:
        if module is not None:
            table.miss(path)
        yield
        return
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)
