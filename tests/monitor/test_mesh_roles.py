"""Roles and counts of single ranks on larger meshes, under the fake process group: nothing is exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from mesh_jobs import EXPERTS, WIDTH, Decoder, Experts, Mixture, plan_of_blocks, sharded, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from truemfu import count_flops
from truemfu.monitor.ranks.find_role import role_of
from truemfu.monitor.ranks.role import RankRole

WORLD = 8


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """One job for all tests: torch keeps meshes of earlier ones."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    yield
    dist.destroy_process_group()


def place(module: nn.Module, mesh: Any, placements: dict[str, Any]) -> None:
    """Distribute these parameters of a module over a mesh of one dimension."""
    for name, placement in placements.items():
        parameter = nn.Parameter(distribute_tensor(getattr(module, name), mesh, [placement]))
        module.register_parameter(name, parameter)


def tensor_parallel(mesh: Any, blocks: int = 3, **options: Any) -> nn.Module:
    return parallelize_module(Decoder(**options), mesh, plan_of_blocks(blocks, sequence=False))


def test_replicas_of_shards_of_split_layers() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = sharded(tensor_parallel(mesh["tp"]), mesh["replicate", "shard"])
    assert role_of([model]) == RankRole(flops_shared_by=2, tokens_shared_by=2)
    plain = count_flops(Decoder(), (tokens(2),))
    assert count_flops(model, (tokens(2),)).model_flops == plain.model_flops


def test_parts_of_a_sharded_model() -> None:
    """They are inside the modules that are sharded, which are not watched themselves."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "tp"))
    model = sharded(tensor_parallel(mesh["tp"]), mesh["shard"])
    parts = [child for block in model.blocks for child in block.children()]
    assert role_of(parts) == RankRole(flops_shared_by=4, tokens_shared_by=4)
    unnamed = sharded(Decoder(), init_device_mesh("cpu", (WORLD,)))
    assert role_of([child for block in unnamed.blocks for child in block.children()]) == RankRole()


def test_layers_split_along_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    model = nn.Linear(WIDTH, WIDTH)
    weight = distribute_tensor(model.weight, mesh, [Shard(0), Shard(1)])
    model.weight = nn.Parameter(weight)
    assert role_of([model]).flops_shared_by == 8


def test_split_sequences_of_split_layers() -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("cp", "tp"))
    model, inputs = tensor_parallel(mesh["tp"]), tokens(2)
    with context_parallel(mesh["cp"], buffers=[inputs], buffer_seq_dims=[1]):
        assert role_of([model]) == RankRole(flops_shared_by=2, tokens_shared_by=2, splits_sequences=True)
    assert role_of([model]) == RankRole(flops_shared_by=2, tokens_shared_by=2)


@pytest.mark.parametrize("index", [0, 1])
def test_stages_of_split_layers(index: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
    model = tensor_parallel(mesh["tp"], blocks=2, first=2 * index, end=2 * index + 2, of=8)
    stage = PipelineStage(model, index, 4, torch.device("cpu"), group=mesh.get_group("pp"))
    expected = RankRole(
        flops_shared_by=2, tokens_shared_by=2, has_tokens=index == 0, name=f"pipeline stage {index} of 4"
    )
    assert role_of([model]) == expected
    assert role_of([Decoder()]) == RankRole()  # a model that is no stage of it
    del stage


def test_sharded_stages() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "data"))
    model = sharded(Decoder(0, 2, of=8), mesh["data"])
    stage = PipelineStage(model, 0, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    assert role_of([model]) == RankRole(name="pipeline stage 0 of 2")
    del stage


@pytest.mark.parametrize("name", ["ep", "experts?", "tp"])
def test_experts_are_recognised_by_name_or_shape(name: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))
    model = Mixture(Experts())
    model.experts.bias = nn.Parameter(torch.zeros(EXPERTS, WIDTH))
    model.experts.scale = nn.Parameter(torch.zeros(1))
    split = {"up": Shard(0), "down": Shard(0), "bias": Shard(0), "scale": Replicate()}
    place(model.experts, mesh, split)
    assert role_of([model]).flops_shared_by == (WORLD if name == "tp" else 1)


def test_sharded_experts() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("shard", "ep"))
    model = Mixture(Experts())
    place(model.experts, mesh["ep"], {"up": Shard(0), "down": Shard(0)})
    fully_shard(model.experts, mesh=mesh["shard"])
    assert role_of([model]) == RankRole()
    expected = count_flops(Mixture(Experts()), (tokens(2),)).model_flops
    assert count_flops(model, (tokens(2),)).model_flops == expected


def test_heads_in_a_stack_of_matrices_are_not_experts() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    model = nn.Module()
    model.heads, model.out = nn.Parameter(torch.zeros(8, 4, 4)), nn.Parameter(torch.zeros(32, 8))
    place(model, mesh, {"heads": Shard(0), "out": Shard(0)})
    assert role_of([model]).flops_shared_by == WORLD


def test_finding_a_role_uses_neither_collectives_nor_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    model = sharded(tensor_parallel(mesh["tp"]), mesh["replicate", "shard"])
    used: list[str] = []
    names = [
        n for n in dir(c10d) if n.startswith(("all_", "barrier", "broadcast", "gather", "new_", "reduce"))
    ]
    for name in (*names, "_get_default_store", "send", "recv", "isend", "irecv", "scatter"):
        for home in (dist, c10d):
            if hasattr(home, name):
                monkeypatch.setattr(home, name, lambda *_, name=name, **__: used.append(name))
    assert role_of([model]).flops_shared_by == 2
    assert used == []
    dist.all_reduce(torch.ones(1))
    assert used == ["all_reduce"]
