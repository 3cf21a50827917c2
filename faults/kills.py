"""Random signals: to a training process, and to the supervisor of a sweep, which is then resumed.

What a process has told its parent to be on disk is promised: it must be there after any end.
A log always loads.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

import torch

from truemfu import TrainingMonitor

from .attack import Attack
from .sweep_folder import check_shown, resume, shown, template
from .training import Net, rows_in

_TRAININGS = 60
_SUPERVISORS = 20
_WAIT_S = 60.0


def _train_for_ever(folder: Path, told: int, save_freq: int) -> None:
    """Log steps; tell the parent each step that is logged, and each that is on disk."""
    model = Net()
    with TrainingMonitor(folder, {"monitoring": {"save_freq": save_freq}}, model=model) as monitor:
        first = max((row["global_step"] for row in rows_in(folder)), default=0) + 1
        for step in range(first, first + 10**6):
            model(torch.randn(2, 8)).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 0.1)
            os.write(told, f"logged {step}\n".encode())
            if step % 20 == 0:
                monitor.save_logs()
                os.write(told, f"saved {step}\n".encode())


def _ends(pid: int) -> None:
    """Wait for it, and fail where it does not end."""
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"it did not end within {_WAIT_S:.0f} s of the signal")


def _training(inside: Path, *, number: int, delays_s: list[float], save_freq: int) -> None:
    """Killed, continued in the same folder, killed again."""
    folder = inside / "out"
    promised: set[int] = set()
    for delay_s in delays_s:
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reads)
            with contextlib.suppress(KeyboardInterrupt):
                _train_for_ever(folder, writes, save_freq)
            os._exit(0)
        os.close(writes)
        with open(reads, "rb", buffering=0) as told:
            first = told.readline()  # it trains
            time.sleep(delay_s)
            os.set_blocking(reads, False)
            before = told.read() or b""  # of steps after the signal nothing is promised
            os.kill(pid, number)
            lines = [first, *before.splitlines(keepends=True)]
            os.set_blocking(reads, True)
            told.read()
        _ends(pid)
        logged = [
            int(line.split()[1]) for line in lines if line.startswith(b"logged") and line.endswith(b"\n")
        ]
        saved = [int(line.split()[1]) for line in lines if line.startswith(b"saved") and line.endswith(b"\n")]
        asked_for = (
            logged if number != signal.SIGKILL else [step for step in logged if step <= max(saved, default=0)]
        )
        promised |= set(asked_for)
        steps = {row["global_step"] for row in rows_in(folder)}
        missing = sorted(promised - steps)
        assert not missing, f"{len(missing)} promised rows are not in the log, first step {missing[0]}"


def _supervisor(inside: Path, *, number: int, delays_s: list[float]) -> None:
    """Ended and resumed, again and again; then every experiment is there once, with its figures."""
    folder = inside / "sweep"
    intact = shown(template())
    assert intact is not None
    os.environ["TRUEMFU_FAULTS_PHASE_S"] = "0.05"
    finished: dict[str, bytes] = {}
    for delay_s in delays_s:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(KeyboardInterrupt):  # before the sweep has begun: as the command does
                os.setsid()
                resume(folder)
            os._exit(0)
        time.sleep(delay_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        _ends(pid)
        for name, content in finished.items():
            assert (folder / "results" / name).read_bytes() == content, (
                f"{name} was finished, and was run again"
            )
        finished = {path.name: path.read_bytes() for path in folder.glob("results/*.json")}
        for content in finished.values():
            json.loads(content)
    problem = resume(folder)
    assert problem is None, problem
    for name, content in finished.items():
        assert (folder / "results" / name).read_bytes() == content, f"{name} was finished, and was run again"
    check_shown(folder, intact[0])
    again = shown(folder)
    assert again is not None
    assert {name: entry["end"] for name, entry in again[0].items()} == dict.fromkeys(intact[0], "ok")
    assert [path.name for path in (folder / "running").iterdir()] == ["lock"]


def attacks(chance: random.Random) -> list[Attack]:
    """Signals at random moments."""
    template()
    found = []
    for _ in range(_TRAININGS):
        number = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        delays_s = [chance.uniform(0.0, 0.6) for _ in range(2)]
        run = partial(_training, number=number, delays_s=delays_s, save_freq=chance.choice((1, 10, 100)))
        found.append(
            Attack(f"{number.name} to a training after {delays_s[0]:.2f} and {delays_s[1]:.2f} s", run)
        )
    for _ in range(_SUPERVISORS):
        number = chance.choice((signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
        delays_s = [chance.uniform(0.0, 1.5) for _ in range(2)]
        run = partial(_supervisor, number=number, delays_s=delays_s)
        found.append(
            Attack(f"{number.name} to a supervisor after {delays_s[0]:.2f} and {delays_s[1]:.2f} s", run)
        )
    return found
