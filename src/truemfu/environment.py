"""The environment variables that switch truemfu on or off."""

from __future__ import annotations

import os

DISABLED = "TRUEMFU_DISABLED"
ENABLED = "TRUEMFU"
_OFF = ("", "0", "false", "no", "off")


def is_set(name: str) -> bool:
    """Whether a switch is set to anything other than a word for "off"."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def is_disabled() -> bool:
    """Whether everything is switched off, for this process and those it starts."""
    return is_set(DISABLED)
