"""Escape sequences in every field of every command's output, on a real terminal.

The calls, the hostile files and the check are those of `tests/test_terminal_injection.py`.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

from tests.test_terminal_injection import CALLS, TERMINALS, assert_harmless, on_terminal, parts_of, write_all

from .attack import Attack

_TOGETHER = 16
"""So many calls share a process, which takes seconds to start; each is an attack of its own in the table."""


def _attack(folder: Path, *, calls: list[str], terminal: str) -> None:
    write_all(folder)
    (folder / "calls.json").write_text(json.dumps([(call, CALLS[call]) for call in calls]))
    shown = parts_of(on_terminal(folder, TERMINALS[terminal]))
    for call in calls:
        assert_harmless(call, terminal, shown[call])
        if call != "count, debugged":
            assert "error: unexpected" not in shown[call], shown[call]
            assert "Traceback" not in shown[call], shown[call]


def attacks(chance: random.Random) -> list[Attack]:
    """Every call on a plain terminal and on one that draws."""
    found = []
    for terminal in TERMINALS:
        calls = list(CALLS)
        chance.shuffle(calls)
        for first in range(0, len(calls), _TOGETHER):
            chosen = calls[first : first + _TOGETHER]
            run = partial(_attack, calls=chosen, terminal=terminal)
            found.append(Attack(f"{terminal} terminal: {', '.join(chosen)}", run, parts=len(chosen)))
    return found
