"""Trainers as users might write them, each with a fault of its own; named `failing_trainers:Class`.

All pass the gradient check: the fault is in the trainer of the experiment, which is the second one in its
process. TRUEMFU_TEST_FOLDER is where they leave, and look for, files of the tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from truemfu.sweep.trainers.base import TrainerSettings
from truemfu.sweep.trainers.standard import StandardTrainer

FOLDER = Path(os.environ.get("TRUEMFU_TEST_FOLDER", "."))


class _Faulty(StandardTrainer):
    """Trains as it should, but for `fault`, at every step after that of the gradient check."""

    made = 0

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        super().__init__(model, settings)
        type(self).made += 1
        self._in_earnest = type(self).made > 1

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        if self._in_earnest:
            self.fault(len(batch["input_ids"]))
        return super().step(batch)

    def fault(self, batch_size: int) -> None:
        raise NotImplementedError


class Raises(_Faulty):
    def fault(self, batch_size: int) -> None:
        raise RuntimeError("the loss has exploded")


class OutOfGpuMemory(_Faulty):
    """As on a GPU that holds three samples."""

    def fault(self, batch_size: int) -> None:
        if batch_size > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


class EatsMemory(_Faulty):
    """To be run inside a memory limit."""

    def fault(self, batch_size: int) -> None:
        eaten = [bytearray(b"x") * (64 << 20) for _ in range(256)]
        raise RuntimeError(f"{len(eaten)} blocks of 64 MiB were there to eat: no limit was set")


class KillsItself(_Faulty):
    def fault(self, batch_size: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Segfaults(_Faulty):
    def fault(self, batch_size: int) -> None:
        ctypes.string_at(0)


class Exits(_Faulty):
    def fault(self, batch_size: int) -> None:
        print("about to leave", flush=True)
        os._exit(3)


class Hangs(_Faulty):
    """And will not be talked to."""

    def fault(self, batch_size: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (FOLDER / "hangs").touch()
        while True:
            time.sleep(60)


class Daemonises(_Faulty):
    """Trains well, but leaves a process in a session of its own; its id is in `daemon.pid`."""

    def fault(self, batch_size: int) -> None:
        if not (FOLDER / "daemon.pid").exists():
            daemonise(FOLDER / "daemon.pid")


class WaitsForLeave(_Faulty):
    """Leaves a daemon behind and sits still until the file `go` is there."""

    def fault(self, batch_size: int) -> None:
        if not (FOLDER / "go").exists():
            daemonise(FOLDER / "daemon.pid")
        while not (FOLDER / "go").exists():
            time.sleep(0.05)


class FillsDisk(_Faulty):
    def fault(self, batch_size: int) -> None:
        with (FOLDER / "filler").open("wb", buffering=0) as file:
            while True:
                if file.write(b"x" * (1 << 16)) < 1 << 16:
                    file.write(b"x")


class TrainsOnAFullDisk(_Faulty):
    """Like one beside which somebody else fills the disk."""

    def fault(self, batch_size: int) -> None:
        with contextlib.suppress(OSError), (FOLDER / "filler").open("ab", buffering=0) as file:
            while file.write(b"x" * (1 << 16)):
                pass
        with contextlib.suppress(OSError), (FOLDER / "filler").open("ab", buffering=0) as file:
            while file.write(b"x"):
                pass


def daemonise(pid_file: Path) -> None:
    """The classical way: a child, a session of its own, a grandchild, and no file left open."""
    if child := os.fork():
        os.waitpid(child, 0)
        while not pid_file.exists():
            time.sleep(0.01)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.closerange(0, 3)
    temporary = pid_file.with_suffix(".tmp")
    temporary.write_text(str(os.getpid()))
    temporary.rename(pid_file)
    time.sleep(600)
    os._exit(0)
