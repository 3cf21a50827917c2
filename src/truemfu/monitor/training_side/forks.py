"""Whether this process was forked from the one that is monitored: asked at each step, so at no cost."""

from __future__ import annotations

import os

number = 0
"""How many forks lie between this process and the one that imported this."""


def _forked() -> None:
    global number
    number += 1


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
