"""Looks up a private name of torch; only here, so that a test can remove any name."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""The result for a name that this version of torch does not have."""


def find(path: str, *, load: bool = True) -> Any:
    """The object at `module:attribute.attribute`, or ABSENT; without `load` only from a loaded module."""
    home, _, names = path.partition(":")
    value: Any = sys.modules.get(home)
    if value is None:
        if not load:
            return ABSENT
        try:
            value = importlib.import_module(home)
        except ImportError:
            return ABSENT
    for name in names.split("."):
        value = getattr(value, name, ABSENT)
        if value is ABSENT:
            return ABSENT
    return value
