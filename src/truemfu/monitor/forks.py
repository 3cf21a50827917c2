"""Whether this process was forked from the monitored one: a counter, since every step checks it."""

from __future__ import annotations

import os

number = 0
"""The number of forks between the process that imported this module and this one."""


def _forked() -> None:
    global number
    number += 1


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
