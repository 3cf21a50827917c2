"""Which part of the job's work this rank does, read from its models: no collective and no store call.

DTensor parameters        mesh dimensions over which FSDP2 shards or replicates: data parallelism, each
                          rank has its own batch; over which only stacks of experts are split: expert
                          parallelism, each rank has its own tokens; all others: tensor parallelism, the
                          ranks share one batch and its products
context parallelism       each rank has its own tokens of one sequence; FLOPs are unknown
pipeline stages           each rank counts its own stages; the first one has the tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ...errors import SplitOverRanks
from ...flops import unwrap
from ...torch_private.meshes import (
    context_mesh_of_hook,
    patched_attention,
    pipeline_stages,
    ranks_of,
    sharded_modules,
    sharding_groups,
)
from .role import RankRole

_LOCAL_SHARDS = "torch.distributed.tensor.parallel.ddp"
_EXPERT_DIMS = 3
_EXPERT_NAMES = frozenset({"ep", "expert", "expert_parallel"})
_TENSOR_NAMES = frozenset({"tp", "etp", "tensor", "tensor_parallel", "model"})


def role_of(models: Iterable[nn.Module]) -> RankRole:
    """The role of this rank, at a moment when its models can run; raises SplitOverRanks if it is unknown."""
    models = [unwrap(model) for model in models]
    tensor = tensor_parallel_size(models)
    stages = _stages_of(models)
    return RankRole(
        flops_shared_by=tensor,
        tokens_shared_by=tensor,
        has_tokens=not stages or 0 in stages,
        splits_sequences=context_parallel_size(models) > 1,
        name=_stage_name(stages),
    )


def tensor_parallel_size(models: Iterable[nn.Module]) -> int:
    """How many ranks share one batch because layers are split over them; 1 if none are."""
    modules = [module for model in models for module in model.modules()]
    if any(getattr(hook, "__module__", None) == _LOCAL_SHARDS for hook in _hooks(modules)):
        raise SplitOverRanks(
            "DistributedDataParallel holds the local shards of tensor-parallel layers, so the size of the "
            "whole layers is not visible: use fully_shard with a mesh of replicas instead"
        )
    data = {ranks for module in modules for ranks in sharding_groups(module)}
    uses: dict[frozenset[int], list[_Use]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            for ranks, use in _mesh_dimensions(parameter):
                if len(ranks) > 1 and ranks not in data:
                    uses.setdefault(ranks, []).append(use)
    for ranks in _sharded_around(modules) if uses else ():
        uses.pop(ranks, None)
    return math.prod(len(ranks) for ranks, found in uses.items() if not _splits_experts(found))


def _sharded_around(modules: Iterable[nn.Module]) -> Iterator[frozenset[int]]:
    """The groups of FSDP2 in modules that contain these: parts of a sharded model may be watched alone."""
    inside = set(map(id, modules))
    for outer in sharded_modules():
        if any(id(module) in inside for module in outer.modules()):
            yield from sharding_groups(outer)


def context_parallel_size(models: Iterable[nn.Module]) -> int:
    """Over how many ranks each sequence is split right now; 1 if it is not."""
    patched = patched_attention()
    meshes = [] if patched is None else [patched[0]]
    modules = [module for model in models for module in model.modules()]
    meshes += [mesh for hook in _hooks(modules) if (mesh := context_mesh_of_hook(hook)) is not None]
    return max((int(mesh.size()) for mesh in meshes), default=1)


def _hooks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    for module in modules:
        yield from module._forward_pre_hooks.values()


class _Use(NamedTuple):
    """One parameter on one dimension of a mesh."""

    name: str
    """Of the mesh dimension; empty if it has none."""
    shape: tuple[int, ...]
    placement: Any


def _mesh_dimensions(parameter: Any) -> Iterator[tuple[frozenset[int], _Use]]:
    """The ranks along each dimension of a distributed parameter's mesh, and how it is placed there."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ("",) * len(parameter.placements)
    for dimension, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        yield ranks_of(mesh.get_group(dimension)), _Use(name, tuple(parameter.shape), placement)


def _splits_experts(uses: Sequence[_Use]) -> bool:
    """Whether a mesh dimension distributes whole experts: by its name, else by what is split along it.

    Experts are stacks of matrices (experts × rows × columns), with or without biases (experts × columns).
    """
    names = {use.name.lower() for use in uses}
    if names <= _EXPERT_NAMES or names <= _TENSOR_NAMES:
        return names <= _EXPERT_NAMES
    split = [use for use in uses if not use.placement.is_replicate()]
    return (
        any(len(use.shape) == _EXPERT_DIMS for use in split)
        and all(use.placement.is_shard(0) for use in split)
        and len({use.shape[0] for use in split}) == 1
    )


def _stages_of(models: Iterable[nn.Module]) -> dict[int, int]:
    """The pipeline stages that these models are or hold: their index, and how many the pipeline has."""
    held = {id(module) for model in models for module in model.modules()}
    return {
        stage.stage_index: stage.num_stages for stage in pipeline_stages() if id(unwrap(stage.submod)) in held
    }


def _stage_name(stages: dict[int, int]) -> str:
    if not stages:
        return ""
    total = max(stages.values())
    numbers = ", ".join(str(index) for index in sorted(stages))
    return f"pipeline stage{'s' if len(stages) > 1 else ''} {numbers} of {total}"
