"""Experiments on this machine: a slot for each GPU, one experiment in a slot at a time; one slot on a CPU.

For experiments on several GPUs a slot has that many. Slots of different sizes would share GPUs, so the sweep
uses one size after another.

A slot starts the worker of the next experiment early, so that its imports take no extra time:

    current   start gate build warm_up timed │ count     profiled   done │
    next                                     │ imports, then waits      │ order ─► …

The next worker does not use the GPU before its order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ...errors import UsageError
from ...records import SweepCase
from ..config import SweepConfig
from ..gpus import chosen_gpus
from ..process import WorkerProcess, start_command
from ..trainers.base import NEEDS_OPACUS

WORKER = start_command("truemfu.sweep.worker.__main__")
"""Starts a worker."""


class Slot:
    """A device that runs one experiment at a time, and the worker that is ready for the next one."""

    def __init__(self, name: str, visible_gpus: str, command: Sequence[str] = WORKER) -> None:
        self.name = name
        self._visible_gpus = visible_gpus
        self._command = command
        self._ready: WorkerProcess | None = None
        self._ready_imports: list[str] = []

    def worker_for(self, case: SweepCase) -> WorkerProcess:
        """The worker that was made ready, or a new one if that has died.

        Also a new one if the ready worker has imported something else: its memory would include that.
        """
        ready, self._ready = self._ready, None
        if ready is not None:
            if not ready.wait(0) and self._ready_imports == imports_of(case):
                return ready
            ready.end()
        return self._start(case)

    def make_ready(self, case: SweepCase) -> None:
        """Start the worker of the next case, with the imports of that case."""
        if self._ready is None:
            with contextlib.suppress(OSError):  # it is then started when needed, which reports the error
                self._ready = self._start(case)
                self._ready_imports = imports_of(case)

    def close(self) -> None:
        """End the ready worker, which is not needed."""
        if self._ready is not None:
            self._ready.end()
            self._ready = None

    def _start(self, case: SweepCase) -> WorkerProcess:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._visible_gpus}
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            # Indices are then those of nvidia-smi.
            environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        return WorkerProcess([*self._command, *imports_of(case)], environment=environment)


def imports_of(case: SweepCase) -> list[str]:
    """Arguments of a worker: what this case needs is imported ahead."""
    return ["opacus"] if case.trainer in NEEDS_OPACUS else []


def slots(
    config: SweepConfig,
    device: str,
    command: Sequence[str] = WORKER,
    *,
    gpus_per_experiment: int = 1,
) -> list[Slot]:
    """The slots of this machine for experiments on this device; a UsageError if it has too few GPUs."""
    if device == "cpu":
        return [Slot("cpu", "", command)]
    gpus = list(chosen_gpus(config.gpus).items())
    if gpus_per_experiment > len(gpus):
        raise UsageError(
            f"gpus_per_experiment is {gpus_per_experiment}, but only {len(gpus)} "
            f"{'GPU' if len(gpus) == 1 else 'GPUs'} can be used here: set it to {len(gpus)} at most, or use "
            "device cpu"
        )
    found = []
    for first in range(0, len(gpus) - gpus_per_experiment + 1, gpus_per_experiment):
        numbers, entries = zip(*gpus[first : first + gpus_per_experiment], strict=True)
        found.append(Slot(f"gpu{'-'.join(map(str, numbers))}", ",".join(entries), command))
    return found
