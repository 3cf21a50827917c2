"""One private step of several ranks: DDP and FSDP2.

Each rank has samples of its own and sees whole weights when it uses them, so the norms of its samples need no
other rank. The first rank adds the noise to its own clipped sum, once; then the sums of all ranks are added:

    DDP      all-reduce; DDP itself reduces nothing, because autograd leaves no gradient
    FSDP2    reduce-scatter to the shards, parameter by parameter
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial

from ..errors import ModelError


class Ranks:
    """The ranks that train this model together, as one of them sees them."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self._group: dist.ProcessGroup | None = None
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self.module, self._group, self._ddp = model.module, model.process_group, model
        elif isinstance(model, nn.DataParallel):
            raise ModelError("private training does not support DataParallel: use DDP or one GPU")
        elif any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ModelError("private training does not support FSDP1: use FSDP2 (fully_shard) or DDP")
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if self.is_sharded:
            meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
            if len(meshes) > 1:
                raise ModelError("private training supports FSDP2 on one device mesh; this model has several")
            (self._mesh,) = meshes

    @contextmanager
    def apart(self) -> Iterator[None]:
        """DDP sends nothing inside: no gradient will come, and a rank with an empty batch has no pass."""
        if self._ddp is None:
            yield
            return
        with self._ddp.no_sync():
            self._ddp.require_forward_param_sync = False  # of buffers
            yield

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks to sum with."""
        return self._group is None and not self.is_sharded

    @property
    def draws_noise(self) -> bool:
        """Whether this rank is the one that adds the noise."""
        if self.is_sharded:
            return not any(self._mesh.get_coordinate() or ())
        return self._group is None or dist.get_rank(self._group) == 0

    def summed(self, total: Tensor, parameter: Tensor) -> Tensor:
        """The sum over all ranks, as the gradient of this parameter."""
        if isinstance(parameter, DTensor):
            parts = DTensor.from_local(total, self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            whole: Tensor = parts.redistribute(placements=parameter.placements)
            return whole
        if self._group is not None:
            total = total.contiguous()  # it is summed as it is in memory, and ranks may have other layouts
            dist.all_reduce(total, group=self._group)
        return total

    def total(self, count: int) -> int:
        """The sum of a number over all ranks."""
        if self.is_alone:
            return count
        one = torch.tensor(count, device=self._device)
        if self.is_sharded:
            parts = DTensor.from_local(one, self._mesh, [Partial()] * self._mesh.ndim, run_check=False)
            return int(parts.full_tensor())
        dist.all_reduce(one, group=self._group)
        return int(one)
