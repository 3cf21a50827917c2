"""Experiments on this machine: a slot for each GPU, one experiment in a slot at a time; one slot on a CPU.

For experiments on several GPUs a slot has that many. Slots of different sizes would share GPUs, so the sweep
uses one size after another.

A slot starts the worker of the next experiment early, so that its imports take no extra time:

    current   start gate build warm_up timed │ count    profiled   done │
    next                                     │ imports   paused  imports│ order ─► …

The next worker is paused while the current one measures. It does not use the GPU before its order.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ... import plain_files
from ...errors import UsageError
from ...records import Phase, SweepCase
from ..config import SweepConfig
from ..gpus import chosen_gpus
from ..paths import SweepFolder
from ..process import WorkerProcess, start_command
from ..trainers.base import NEEDS_OPACUS

WORKER = start_command("truemfu.sweep.worker.__main__")
"""Starts a worker."""


class Slot:
    """A device that runs one experiment at a time, and the worker that is ready for the next one."""

    def __init__(
        self, name: str, visible_gpus: str, folder: SweepFolder, command: Sequence[str] = WORKER
    ) -> None:
        self.name = name
        self._visible_gpus = visible_gpus
        self._command = command
        self._folder = folder
        self._ready: WorkerProcess | None = None
        self._ready_imports: list[str] = []
        # A slot can have two workers at once, so two log files alternate.
        self._logs = [folder.slot_log(f"{name}-{turn}") for turn in range(2)]

    def worker_for(self, case: SweepCase) -> WorkerProcess:
        """The worker that was made ready, or a new one if that has died.

        Also a new one if the ready worker has imported something else: its memory would include that.
        """
        ready, self._ready = self._ready, None
        if ready is not None:
            ready.resume()
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

    def let_measure(self, phase: Phase) -> None:
        """Pause the next worker while the current one is in a phase that measures."""
        if self._ready is not None:
            if phase in (Phase.COUNT, Phase.DONE):
                self._ready.resume()
            else:
                self._ready.pause()

    def close(self) -> None:
        """End the ready worker, which is not needed."""
        if self._ready is not None:
            self._ready.end()
            self._ready = None
        for log in self._logs:
            with contextlib.suppress(OSError):  # a folder that cannot be written keeps its files
                plain_files.remove(log)

    def _start(self, case: SweepCase) -> WorkerProcess:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": self._visible_gpus}
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            # Indices are then those of nvidia-smi.
            environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        self._logs.reverse()
        self._folder.make()  # an experiment may have removed it
        return WorkerProcess([*self._command, *imports_of(case)], environment=environment, log=self._logs[0])


def imports_of(case: SweepCase) -> list[str]:
    """Arguments of a worker: what this case needs is imported ahead."""
    return ["opacus"] if case.trainer in NEEDS_OPACUS else []


def slots(
    config: SweepConfig,
    device: str,
    folder: SweepFolder,
    command: Sequence[str] = WORKER,
    *,
    gpus_per_experiment: int = 1,
) -> list[Slot]:
    """The slots of this machine for experiments on this device; a UsageError if it has too few GPUs."""
    if device == "cpu":
        return [Slot("cpu", "", folder, command)]
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
        found.append(Slot(f"gpu{'-'.join(map(str, numbers))}", ",".join(entries), folder, command))
    return found
