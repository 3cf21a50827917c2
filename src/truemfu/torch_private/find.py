"""Looks a name of torch up; the one place that does, so that a test can take any name away."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "ABSENT"})()
"""In the place of a name that this version of torch does not have."""


def find(path: str, *, load: bool = True) -> Any:
    """What is at `module:attribute.attribute`, or ABSENT; without `load` only in a loaded module."""
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
