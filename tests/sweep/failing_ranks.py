"""Trainers of which one rank fails, each in its own way; named `failing_ranks:Class`.

All pass the gradient check, as those of `failing_trainers` do, and the fault is in rank 1 alone.
"""

from __future__ import annotations

import os

import failing_trainers
from torch import nn

from truemfu.sweep.trainers.base import TrainerSettings
from truemfu.sweep.trainers.standard import StandardTrainer
from truemfu.sweep.worker import run_files


def is_faulty_rank() -> bool:
    return os.environ.get("RANK") == "1"


class _InOneRank:
    """Before a fault of `failing_trainers`: it does not happen in other ranks."""

    def fault(self, batch_size: int) -> None:
        if is_faulty_rank():
            super().fault(batch_size)  # type: ignore[misc]


class Raises(_InOneRank, failing_trainers.Raises):
    pass


class OutOfGpuMemory(_InOneRank, failing_trainers.OutOfGpuMemory):
    pass


class KillsItself(_InOneRank, failing_trainers.KillsItself):
    pass


class Exits(_InOneRank, failing_trainers.Exits):
    pass


class Hangs(_InOneRank, failing_trainers.Hangs):
    pass


class TrainsAlone(StandardTrainer):
    """Not a fault of one rank: no rank gets the gradients of the others."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        super().__init__(getattr(model, "module", model), settings)


class StartsNoProfiler(StandardTrainer):
    """In rank 0, the one that is profiled, no profiler can be started."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        super().__init__(model, settings)
        if os.environ.get("RANK") == "0":
            run_files.profile = _Unavailable  # type: ignore[misc,assignment]


class _Unavailable:
    def __init__(self, **_: object) -> None:
        raise RuntimeError("the profiler is in use")
