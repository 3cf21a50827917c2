"""What `truemfu run` tells the processes of its command, through their environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SETTINGS = "TRUEMFU_RUN"
FIRST_PROCESS = "TRUEMFU_RUN_PID"
_SITE = Path(__file__).parent / "site"


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The options of `truemfu run`."""

    output: str
    """The run folder, absolute."""
    config: str | None = None
    mode: str | None = None
    trackers: tuple[str, ...] | None = None
    check_privacy: bool = False
    """Whether the clipped sums of a training with Opacus are checked."""
    census: bool = False
    """Whether a step is recorded for `truemfu explain`, whatever the mode."""
    began_s: float = 0.0
    """Unix time at which the command was started, which tells it from other commands."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command that is to be watched; it keeps this process's id."""
        path = [str(_SITE), *filter(None, [base.get("PYTHONPATH")])]
        return {
            **base,
            SETTINGS: json.dumps(asdict(self)),
            FIRST_PROCESS: str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(path),
        }


def settings_from_environment() -> RunSettings | None:
    """The settings of the `truemfu run` that this process belongs to; None outside of one."""
    text = os.environ.get(SETTINGS)
    if not text:
        return None
    values = json.loads(text)
    trackers = values.pop("trackers")
    return RunSettings(**values, trackers=None if trackers is None else tuple(trackers))


def is_first_process() -> bool:
    """Whether this process is the command itself, not one that it started."""
    return os.environ.get(FIRST_PROCESS) == str(os.getpid())


def say(text: str) -> None:
    """A line on stderr, which belongs to the script as well: nothing happens if it is closed."""
    try:
        sys.stderr.write(f"truemfu: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        return


def python_command(command: Sequence[str], python: str) -> list[str]:
    """`train.py …` and `-m module …` as `python train.py …`; any other command unchanged."""
    return [python, *command] if command[0] == "-m" or command[0].endswith(".py") else list(command)
