"""Programs that notice whether their step runs otherwise, or twice, when truemfu watches it.

Each program of `observed_programs.py` runs alone, with a `TrainingMonitor` and under `truemfu run`. Weights
(bit by bit), the states of all generators of random numbers, standard output, noted side effects, files and
the exit code must be the same, within the time limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import truemfu

from .attack import Attack
from .observed_programs import PROGRAMS

LIMIT_S = 30.0
"""For one run of a program; the slowest takes a few seconds, most of them to start."""
_ROOT = Path(__file__).parents[1]
_HEAD = "from faults.observed_loop import *\nbegin()\n"
_HUNG = "it did not end"


def script_of(text: str) -> str:
    """The whole script of a program: it begins with the seeds and ends with the record."""
    return f"{_HEAD}{text.strip()}\nfinish()\n"


def run_alone(text: str, folder: Path, name: str, *, monitored: bool) -> dict[str, Any]:
    """In a fork of this process, which has torch loaded; with a monitor or without."""
    script, inside, environment = _prepared(text, folder, name)
    if monitored:
        environment["OBSERVED_MONITOR"] = str(folder / f"{name}-monitor")
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            os.environ.update(environment)
            os.chdir(inside)
            out = os.open(folder / f"{name}.out", os.O_WRONLY | os.O_CREAT)
            err = os.open(folder / f"{name}.err", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return _result(_ended(pid), folder, name)


def run_watched(text: str, folder: Path, name: str) -> dict[str, Any]:
    """Under `truemfu run`, in a process of its own."""
    script, inside, environment = _prepared(text, folder, name)
    source = str(Path(truemfu.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([source, str(_ROOT)])
    command = ["run", "-o", str(folder / f"{name}-monitor"), "--", sys.executable, str(script)]
    with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "truemfu", *command],
            cwd=inside,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    return _result(_ended(process.pid), folder, name)


def check(text: str, folder: Path) -> None:
    """Raise where a program with us is not the program alone."""
    alone = run_alone(text, folder, "alone", monitored=False)
    assert alone["status"] == 0 or alone["weights"] is not None, f"the program itself fails: {alone}"
    differences = []
    for name, found in (
        ("monitor", run_alone(text, folder, "monitor", monitored=True)),
        ("run", run_watched(text, folder, "run")),
    ):
        differences += [
            f"{name}: {key}: {_shown(alone[key])} alone, {_shown(found[key])} with truemfu"
            for key in alone
            if alone[key] != found[key]
        ]
        if found["status"] != alone["status"]:
            differences.append((folder / f"{name}.err").read_text(errors="replace")[-300:])
    assert not differences, "; ".join(differences)


def attacks(chance: random.Random) -> list[Attack]:
    """One for each program; none is drawn."""
    return [Attack(name, partial(check, text)) for name, text in PROGRAMS.items()]


def _prepared(text: str, folder: Path, name: str) -> tuple[Path, Path, dict[str, str]]:
    script, inside = folder / f"{name}.py", folder / f"{name}-files"
    script.write_text(script_of(text), "utf-8")
    inside.mkdir()
    environment = {
        "OBSERVED_RECORD": str(folder / f"{name}.json"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return script, inside, environment


def _ended(pid: int) -> int | str:
    """The exit status of a process and of the session it leads, which is killed at the time limit."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _HUNG


def _result(status: int | str, folder: Path, name: str) -> dict[str, Any]:
    record = folder / f"{name}.json"
    empty = {
        "weights": None,
        "torch random state": None,
        "numpy random state": None,
        "python random state": None,
        "noted": None,
    }
    inside = folder / f"{name}-files"
    return {
        "status": status,
        **empty,
        **(json.loads(record.read_text("utf-8")) if record.exists() else {}),
        "output": (folder / f"{name}.out").read_text(errors="replace"),
        "files": {
            str(path.relative_to(inside)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            for path in sorted(inside.rglob("*"))
            if path.is_file()
        },
    }


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:80]} … {text[-70:]}"
