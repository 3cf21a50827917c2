"""Experiments on this machine: a slot for each GPU, one experiment in a slot at a time; one slot on a CPU.

A slot starts the worker of the next experiment ahead, so that its imports cost no time of their own:

    current   start gate build warm_up timed │ count    profiled   done │
    next                                     │ imports   paused  imports│ order ─► …

Nothing of the next worker runs while the current one measures. It does not touch the GPU before its order.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from ... import plain_files
from ...records import Phase, SweepCase
from ..config import SweepConfig
from ..gpus import chosen_gpus
from ..paths import SweepFolder
from ..process import WorkerProcess
from ..trainers.base import NEEDS_OPACUS

_START = """
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from truemfu.sweep.worker.__main__ import start
start()
"""
WORKER = (sys.executable, "-c", _START)
"""Unlike `python -m`, without the current folder before the installed packages: a torch.py that happens to be
there is not torch. A trainer in the current folder is found behind them."""


class Slot:
    """One place an experiment can run at, and the worker that is ready there for the next one."""

    def __init__(
        self, name: str, visible_gpu: str, folder: SweepFolder, command: Sequence[str] = WORKER
    ) -> None:
        self.name = name
        self._visible_gpu = visible_gpu
        self._command = command
        self._folder = folder
        self._ready: WorkerProcess | None = None
        self._ready_imports: list[str] = []
        # Two workers of a slot can be there at once, so two files take turns.
        self._logs = [folder.slot_log(f"{name}-{turn}") for turn in range(2)]

    def worker_for(self, case: SweepCase) -> WorkerProcess:
        """A fresh worker: the one that was made ready, or a new one where that has died meanwhile.

        Or where it was made ready for a case that needs other imports: they would be in this one's memory.
        """
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.go_on()
            if not ready.wait(0) and self._ready_imports == _imports(case):
                return ready
            ready.end()
        return self._start(case)

    def make_ready(self, case: SweepCase) -> None:
        """Start the worker of the next case; what it imports depends on the case."""
        if self._ready is None:
            with contextlib.suppress(OSError):  # then it is started when its turn comes, or says why not
                self._ready = self._start(case)
                self._ready_imports = _imports(case)

    def let_measure(self, phase: Phase) -> None:
        """Keep the next worker still while the current one is in a phase that measures."""
        if self._ready is not None:
            if phase in (Phase.COUNT, Phase.DONE):
                self._ready.go_on()
            else:
                self._ready.pause()

    def close(self) -> None:
        """End the worker that was made ready for nothing."""
        if self._ready is not None:
            self._ready.end()
            self._ready = None
        for log in self._logs:
            with contextlib.suppress(OSError):  # a folder that cannot be written keeps its files
                plain_files.remove(log)

    def _start(self, case: SweepCase) -> WorkerProcess:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._visible_gpu}
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            # Numbers then mean the same as in nvidia-smi.
            environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self._logs.reverse()
        self._folder.make()  # an experiment may have removed it
        return WorkerProcess([*self._command, *_imports(case)], environment=environment, log=self._logs[0])


def _imports(case: SweepCase) -> list[str]:
    return ["--import", "opacus"] if case.trainer in NEEDS_OPACUS else []


def slots(
    config: SweepConfig, device: str, folder: SweepFolder, command: Sequence[str] = WORKER
) -> list[Slot]:
    """The slots of this machine for a sweep on this device."""
    if device == "cpu":
        return [Slot("cpu", "", folder, command)]
    gpus = chosen_gpus(config.gpus)
    return [Slot(f"gpu{number}", gpu, folder, command) for number, gpu in gpus.items()]
