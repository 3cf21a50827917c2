"""What the tests of the supervisor share: a listener that remembers, small sweeps, a look at processes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from truemfu.records import CaseResult, Phase
from truemfu.sweep.config import TEST_CONFIG, SweepConfig, override
from truemfu.sweep.process import TOKEN_NAME
from truemfu.sweep.supervisor.state import CaseState

HERE = Path(__file__).parent
FOREVER_S = 600.0


class Recorder:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reused: list[str] = []
        self.phases: dict[str, list[Phase]] = {}
        self.results: list[CaseResult] = []
        self.lines: list[str] = []

    def started(self, names: Sequence[str], reused: Sequence[CaseResult]) -> None:
        self.names = list(names)
        self.reused = [result.name for result in reused]

    def changed(self, name: str, state: CaseState) -> None:
        self.phases.setdefault(name, []).append(state.phase)

    def ended(self, result: CaseResult) -> None:
        self.results.append(result)

    def message(self, text: str) -> None:
        self.lines.append(text)


class Watching(Recorder):
    """Lets a stand-in for a worker wait until its supervisor has seen its phase `timed`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._watched = folder / "watched"

    def changed(self, name: str, state: CaseState) -> None:
        super().changed(name, state)
        if state.phase is Phase.TIMED:
            self._watched.touch()


UNTIL_WATCHED = """
def until_watched():
    watched = Path(os.environ["TRUEMFU_TEST_FOLDER"]) / "watched"
    watched.unlink(missing_ok=True)
    while not watched.exists():
        time.sleep(0.01)
"""
"""For the code of such a stand-in: its supervisor looks at it once more."""


def small(**settings: Any) -> SweepConfig:
    """A sweep of tiny experiments on the CPU, a few steps each."""
    quick: dict[str, Any] = {"device": "cpu", "seq_lengths": [16], "profiled_steps": 0}
    # The same number of steps however slow the machine is: the final loss depends on it.
    quick |= {"min_steps": 3, "max_steps": 3, "max_timed_s": 600.0}
    return override(TEST_CONFIG, **{**quick, **settings})


def last_line(log: Path) -> dict[str, Any]:
    """The result at the end of a log."""
    found: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
    return found


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def processes_of_sweeps(mark: str) -> list[int]:
    """Every process that carries a sweep's token and, in its environment, this mark of the test's own."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if mark.encode() in environment and f"{TOKEN_NAME}=".encode() in environment:
            found.append(int(entry.name))
    return found


def until(condition: Any) -> None:
    """Wait until something is so; far longer than it can take."""
    latest = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < latest
        time.sleep(0.02)
