"""Names of torch that a count puts something else in the place of, for as long as it lasts."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from . import table
from .find import ABSENT


@contextlib.contextmanager
def replaced(path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Have `make(what is there)` in the place of a module's name inside; nothing for a module not loaded."""
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
