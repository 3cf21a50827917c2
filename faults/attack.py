"""What an attack is, and how many of them run: each in a forked process, with a folder and a time limit."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TIME_LIMIT_S = 120.0
"""For one attack: far more than any takes, so that only one that hangs reaches it."""
_MEMORY_LIMIT_BYTES = 4 << 30
"""An attack that has truemfu read without end costs itself its memory, and no other process."""
_POLL_S = 0.005
_FAILED = 1
_SHOWN_CHARACTERS = 1500


@dataclass(frozen=True)
class Attack:
    """`run` gets an empty folder of its own, and raises where the attack got through."""

    name: str
    run: Callable[[Path], None]
    parts: int = 1
    """How many attacks it counts for: those that share its process."""


@dataclass(frozen=True)
class Family:
    """Attacks of one kind. `attacks` yields the same ones for the same seed; the short form is a sample."""

    name: str
    about: str
    attacks: Callable[[random.Random], Sequence[Attack]]
    short: int
    """How many attacks of the full form the short one runs."""

    def chosen(self, seed: int, *, is_short: bool) -> list[tuple[int, Attack]]:
        """The attacks to run, each with its index in the full form."""
        numbered = list(enumerate(self.attacks(random.Random(f"{seed} {self.name}"))))
        if is_short and len(numbered) > self.short:
            numbered = sorted(random.Random(seed).sample(numbered, self.short), key=lambda entry: entry[0])
        return numbered


@dataclass
class Outcome:
    """What became of the attacks of a family."""

    family: str
    tried: int = 0
    failed: int = 0
    seconds: float = 0.0
    got_through: dict[int, str] = field(default_factory=dict)
    """Index → name of the attack and what it printed."""

    @property
    def survived(self) -> int:
        return self.tried - self.failed


def run_all(
    family: str, attacks: Sequence[tuple[int, Attack]], *, jobs: int, report: Callable[[str], None]
) -> Outcome:
    """Run attacks side by side, so many at a time, each in a process of its own."""
    outcome = Outcome(family)
    began = time.monotonic()
    done, waiting, running = 0, list(reversed(attacks)), {}
    with tempfile.TemporaryDirectory(prefix="truemfu-faults-") as scratch:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, attack = waiting.pop()
                folder = Path(scratch) / str(index)
                folder.mkdir()
                running[_started(attack, folder)] = index, attack, folder, time.monotonic() + TIME_LIMIT_S
            for pid, (index, attack, folder, deadline) in list(running.items()):
                status = _ended(pid, deadline)
                if status is None:
                    continue
                del running[pid]
                done += 1
                outcome.tried += attack.parts
                outcome.failed += 0 if (problem := _problem(status, folder)) is None else attack.parts
                if problem is not None:
                    outcome.got_through[index] = f"{attack.name}: {problem}"
                    report(f"  {family}:{index} GOT THROUGH  {attack.name}: {problem}")
                _discard(folder)
                if done % 50 == 0:
                    report(f"  {family}: {done} of {len(attacks)}")
            time.sleep(_POLL_S)
    outcome.seconds = time.monotonic() - began
    return outcome


def _started(attack: Attack, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = _FAILED
    try:
        os.setsid()  # whatever it starts ends with it
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
        printed = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(printed, stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
        inside = folder / "inside"
        inside.mkdir()
        os.chdir(inside)
        with _thread_failures():
            attack.run(inside)
        code = 0
    except BaseException:
        os.write(printed, f"\n{_MARK}\n{traceback.format_exc()}".encode(errors="backslashreplace"))
    finally:
        os._exit(code)


_MARK = "the attack got through:"


class _thread_failures:
    """An exception that leaves a thread is one that got through, also where it cannot be printed."""

    def __enter__(self) -> None:
        self.seen: list[str] = []
        threading.excepthook = lambda failure: self.seen.append(
            f"{failure.exc_type.__name__}: {failure.exc_value}"
        )

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is None:
            assert not self.seen, f"exceptions left a thread: {self.seen}"


def _ended(pid: int, deadline: float) -> int | None:
    """The status of a process that has ended, or was killed for taking too long; None while it runs."""
    done, status = os.waitpid(pid, os.WNOHANG)
    if not done:
        if time.monotonic() < deadline:
            return None
        _kill_group(pid)
        os.waitpid(pid, 0)
        return -1
    _kill_group(pid)
    return status


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _problem(status: int, folder: Path) -> str | None:
    """Why this attack got through, in one line; None where it did not."""
    printed = folder / "printed.txt"
    text = printed.read_text(errors="replace") if printed.exists() else ""
    if status == -1:
        return f"not over after {TIME_LIMIT_S:.0f} s"
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}: {text[-200:]!r}"
    if status:
        said = text.rpartition(_MARK)[2].strip()
        return " | ".join(_last_lines(said))
    if "Traceback (most recent call last)" in text:
        return f"a traceback was printed: {_last_lines(text)[-1]}"
    return None


def _last_lines(text: str) -> list[str]:
    lines = [line.strip() for line in text.splitlines() if line.strip() and set(line.strip()) - set("^~")]
    return [line[:_SHOWN_CHARACTERS] for line in lines[-3:]] or ["(nothing was printed)"]


def _discard(folder: Path) -> None:
    for path, folders, _ in os.walk(folder):
        for name in folders:
            inner = Path(path) / name
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def run_here(attack: Attack) -> None:
    """One attack in this process, with all it prints: to look into it."""
    with tempfile.TemporaryDirectory(prefix="truemfu-faults-") as folder:
        os.chdir(folder)
        with _thread_failures():
            attack.run(Path(folder))
