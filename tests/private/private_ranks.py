"""Two ranks on gloo take private steps; each writes its gradients."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from networks import VOCAB, Network, losses_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from truemfu.errors import ModelError
from truemfu.private import PrivateOptimizer
from truemfu.private.bookkeeping import BookKeeping

SEED = 12
MICRO_BATCHES = ((3, 1), (2, 2))
"""Samples of each rank, of two micro-batches."""
KEPT: list[torch.nn.Module] = []
"""Models, to the end of the process: see `rank_process`."""


def batch() -> torch.Tensor:
    return torch.randint(VOCAB, (8, 5), generator=torch.Generator().manual_seed(0))


def rank_process(rank: int, folder: Path, ways: tuple[str, ...], address: str) -> None:
    """Steps under DDP and FSDP2. A collective that waits for two minutes is an error."""
    torch.set_num_threads(1)
    limit = timedelta(minutes=2)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=limit)
    for parallel in ways:
        private_steps(rank, folder / parallel, parallel)
    step_with_layouts(rank, folder)
    dist.destroy_process_group()
    # The last owner of a gloo group, here the DDP module, joins its thread with Python's lock held, for
    # which the thread may wait (torch 2.13): this function must not return.
    os._exit(0)


def private_steps(rank: int, folder: Path, parallel: str) -> None:
    model = Network(SEED)
    model.register_buffer("constant", torch.ones(2))
    if parallel == "ddp":
        called: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for part in model.parts:
            fully_shard(part, mesh=mesh)
        called = fully_shard(model, mesh=mesh)
    for noise in (0.0, 1e4):
        optimizer = torch.optim.SGD(called.parameters(), lr=0.0)
        private = PrivateOptimizer(
            called, optimizer, max_grad_norm=0.5, noise_multiplier=noise, check_every=1
        )
        if parallel == "ddp":  # a rank whose batch is empty keeps no other waiting
            private.backward(losses_of, batch()[: 4 * (1 - rank)])
            private.step()
        torch.manual_seed(5)  # as scripts do: the same on every rank
        for part, sizes in zip(batch().split([4, 4]), MICRO_BATCHES, strict=True):
            private.backward(losses_of, part.split(sizes)[rank])
        private.step()
        assert private.gradient_error is not None
        assert 0 < private.gradient_error < 1e-4
        found = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        torch.save(found, folder / f"{noise:g}_{rank}.pt")
        private.remove()
    wrong = PrivateOptimizer(called, optimizer, max_grad_norm=0.5, noise_multiplier=0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BookKeeping, "weights", lambda book, norms: 0.3 / norms)
        with pytest.raises(ModelError, match="private gradient of step 1 is wrong"):
            wrong.backward(losses_of, batch()[4 * rank :][:4])
    if parallel == "ddp":  # which adds gradients again
        called.zero_grad()
        losses_of(called, batch()[4 * rank :][:4]).mean().backward()
        plain = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        torch.save(plain, folder / f"plain_{rank}.pt")
    KEPT.append(called)


def convolution() -> torch.nn.Module:
    torch.manual_seed(SEED)
    return torch.nn.Conv2d(4, 8, 3, bias=False).to(memory_format=torch.channels_last)


def images() -> torch.Tensor:
    made = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    return made.contiguous(memory_format=torch.channels_last)


def losses_of_images(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(x).square().sum((1, 2, 3))
    return found


def step_with_layouts(rank: int, folder: Path) -> None:
    """The clipped sum of the first rank lies in memory as channels last; the other rank has no samples."""
    called = torch.nn.parallel.DistributedDataParallel(convolution())
    optimizer = torch.optim.SGD(called.parameters(), lr=0.0)
    private = PrivateOptimizer(called, optimizer, max_grad_norm=0.5, noise_multiplier=0.0)
    private.backward(losses_of_images, images()[: 4 * (1 - rank)])
    private.step()
    torch.save({name: p.grad for name, p in called.module.named_parameters()}, folder / f"images_{rank}.pt")
    KEPT.append(called)
