"""Runs programs of `observed_programs.py`, each in a fork of a process that has torch loaded.

`python -m faults.observed_process SCRIPT …` is what `truemfu run` starts: it watches every fork as it would
watch a process of its own, since it opens a monitor where an optimizer is made.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first step imports it: once here, not in every fork

from truemfu.monitor import monitor

from . import observed_loop

_LOADED = (torch, monitor)
LIMIT_S = 60.0
"""For one run of a program; most take a fraction of a second, on a busy machine some seconds."""
HUNG = "it did not end"


@dataclass(frozen=True)
class Place:
    """Where one run of one program is: everything beside its script, by the script's name."""

    script: Path

    @property
    def files(self) -> Path:
        """The working directory of the program."""
        return self.script.with_suffix(".files")

    @property
    def record(self) -> Path:
        return self.script.with_suffix(".json")

    @property
    def output(self) -> Path:
        return self.script.with_suffix(".out")

    @property
    def errors(self) -> Path:
        return self.script.with_suffix(".err")

    @property
    def status(self) -> Path:
        return self.script.with_suffix(".status")

    @property
    def monitor(self) -> Path:
        return self.script.with_suffix(".monitor")


def run_script(place: Place, *, monitored: bool) -> None:
    """In this process, which was forked for it: the program as the main module."""
    os.setsid()
    place.files.mkdir()
    os.chdir(place.files)
    os.environ["OBSERVED_RECORD"] = str(place.record)
    if monitored:
        os.environ["OBSERVED_MONITOR"] = str(place.monitor)
    for stream, path in ((1, place.output), (2, place.errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    runpy.run_path(str(place.script), run_name="__main__")


def wait(pid: int, place: Place) -> None:
    """Until the process has ended, and write how; its session is killed at the time limit."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            place.status.write_text(str(os.waitstatus_to_exitcode(status)))
            return
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    place.status.write_text(HUNG)


def main() -> None:
    """Every script in turn; a fork leaves this function by its own end, as a script of its own would."""
    observed_loop.begin()
    for script in sys.argv[1:]:
        pid = os.fork()
        if not pid:
            run_script(Place(Path(script)), monitored=False)
            return
        wait(pid, Place(Path(script)))


if __name__ == "__main__":
    main()
