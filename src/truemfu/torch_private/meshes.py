"""How torch spreads a model over ranks: data-parallel groups of FSDP2, pipeline stages, context parallelism.

Everything here is read from objects of this process: no collective and no store is used.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import table
from .find import ABSENT

_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"


def ranks_of(group: Any) -> frozenset[int]:
    """The ranks of a process group."""
    return frozenset(torch.distributed.get_process_group_ranks(group))


def sharding_groups(module: nn.Module) -> Iterator[frozenset[int]]:
    """The ranks over which FSDP2 shards or replicates the parameters of this module."""
    if not any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is None:
            continue
        for name in ("shard_process_group", "replicate_process_group"):
            found = getattr(group.mesh_info, name, None)
            if found is not None:
                yield ranks_of(found)


def sharded_modules() -> list[nn.Module]:
    """The modules of this process that FSDP2 shards; searched for only if the program uses it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    base = getattr(fsdp, "FSDPModule", None)
    return [] if base is None else _instances(base)


def pipeline_stages() -> list[Any]:
    """The pipeline stages of this process; searched for only if the program uses pipelines."""
    base = table.loaded(table.PIPELINE_STAGE)
    if base is ABSENT:
        return []
    return _instances(base)


def _instances(base: type) -> list[Any]:
    """By type, since `isinstance` would ask objects that pretend to be of another class."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), base)]


def patched_attention() -> tuple[Any, Any] | None:
    """The mesh of an active `context_parallel`, and the attention function it replaced; None without one."""
    function = F.scaled_dot_product_attention
    if not isinstance(function, types.FunctionType) or not function.__module__.startswith(_CONTEXT_PARALLEL):
        return None
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells["device_mesh"].cell_contents, cells["target_fn"].cell_contents


def context_mesh_of_hook(hook: Any) -> Any:
    """The mesh over which a forward hook splits sequences; None for any other hook."""
    target = getattr(hook, "func", None)
    if not (getattr(target, "__module__", None) or "").startswith(_CONTEXT_PARALLEL):
        return None
    return hook.keywords.get("mesh")
