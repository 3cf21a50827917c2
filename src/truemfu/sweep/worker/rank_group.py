"""The processes of one experiment: a single one, or the ranks that torchrun has started.

    RankGroup()   one process: nothing to agree on, the model as it is
    join(case)    a rank of several: DDP or FSDP2 around the model, and a group of its own for messages

Phases are the same for all ranks, and each step needs every rank. So ranks agree wherever one of them alone
could decide otherwise (how many steps to time, whether the steps trained), and a step that fails ends its
rank: `StepFailed` passes the handlers that let a single process go on without its count or its trace.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import text_of
from ...records import SweepCase
from ..trainers.base import Trainer

Value = TypeVar("Value")

_TIMEOUT = timedelta(days=1)
"""The sweep's own time limit ends an experiment that hangs, and long before."""

_LOST_PEER_TEXTS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "NCCL")


class StepFailed(BaseException):
    """A step raised in a rank, for the reason in `__cause__`; other ranks may be waiting inside that step."""


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """The ranks of an experiment, as one of them sees them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    parallel: str | None = None
    messages: Any = None
    """The process group for messages, on the CPU, so that they do not queue behind the device's work."""

    def device(self, kind: str) -> torch.device:
        """The device of this rank."""
        return torch.device("cuda", self.local_rank) if kind == "cuda" else torch.device(kind)

    def build_device(self, kind: str) -> torch.device:
        """Where the model is built: under FSDP2 on the host, because a whole one may not fit the device."""
        return torch.device("cpu") if self.parallel == "fsdp2" else self.device(kind)

    def gather(self, value: Value) -> list[Value]:
        """The value of every rank, in order, in every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.messages)
        return found

    def of_first(self, value: Value) -> Value:
        """The value of rank 0, in every rank."""
        return self.gather(value)[0]

    def wrapped(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model as this rank trains it; its parameters keep their names in `model`."""
        if self.parallel == "ddp":
            return nn.parallel.DistributedDataParallel(
                model, device_ids=None if device.type == "cpu" else [device]
            )
        if self.parallel == "fsdp2":
            return _sharded(model, self.size, device)
        return model

    def guarded(self, trainer: Trainer) -> Trainer:
        """The trainer; one of several ranks raises `StepFailed` if a step fails."""
        return trainer if self.size == 1 else _GuardedTrainer(trainer)


ALONE = RankGroup()
"""An experiment in one process."""


class _GuardedTrainer:
    def __init__(self, trainer: Trainer) -> None:
        self.private = trainer.private
        self._trainer = trainer

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        try:
            return self._trainer.step(batch)
        except Exception as error:
            raise StepFailed from error


def join(case: SweepCase) -> RankGroup:
    """This rank's group, from the environment that torchrun sets; waits until all ranks have joined."""
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if case.device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if case.device == "cuda" else "gloo", timeout=_TIMEOUT)
    messages = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    return RankGroup(rank=rank, size=size, local_rank=local_rank, parallel=case.parallel, messages=messages)


def cause_of(error: BaseException) -> BaseException:
    """What a rank's step raised, or the error itself."""
    return error.__cause__ if isinstance(error, StepFailed) and error.__cause__ is not None else error


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as it does if another rank has ended: the cause is there, not here."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _LOST_PEER_TEXTS)


def _sharded(model: nn.Module, size: int, device: torch.device) -> nn.Module:
    """The model under FSDP2: one group of parameters for each block, one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (size,))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model: the entries of its outermost lists of modules."""
    found = []
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            found += [block for block in child if any(True for _ in block.parameters())]
        else:
            found += _blocks(child)
    return found
