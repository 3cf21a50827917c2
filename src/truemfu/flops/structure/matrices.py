"""Matrices outside linear layers: experts, routers, recurrent weights, state-space scans."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import ModelError
from . import module_types
from .streams import FEATURES, Chunks, Rows, Sequences
from .work import Flow

if TYPE_CHECKING:
    from .walk import Walk

CELLS = (nn.RNNCell, nn.LSTMCell, nn.GRUCell)


def multiply_own(walk: Walk, module: nn.Module, path: str, flow: Flow) -> Flow:
    """Matrices among a module's own parameters: experts, routers, projections; and its other parameters."""
    if module_types.is_norm(module):
        return flow.trained(module_types.is_trained(module))
    own, inner = module_types.own_parameters(module), flow
    if (state := own.get("A_log")) is not None:
        _scan(walk, module, path, flow, state)
    else:
        certain, unknown = module_types.matrices(module)
        for parameter in certain.values():
            _matrix(walk, module, path, inner, parameter)
            inner = inner.trained(parameter.requires_grad)
        if unknown:
            walk.uncounted[f"parameters of {type(module).__name__}"] += len(unknown)
    return inner.trained(any(p.requires_grad for p in own.values()))


def _matrix(walk: Walk, module: nn.Module, path: str, flow: Flow, parameter: torch.Tensor) -> None:
    unit, kind = 2 * parameter.numel(), "linear"
    if parameter.dim() == 3:
        unit = unit // parameter.shape[0] * visited_experts(walk, module, path, parameter.shape[0])
        kind = "experts"
    factor = parameter.requires_grad + flow.needs
    walk.add(path, kind, walk.dtype(module, parameter), Rows(flow.stream), unit, unit * factor)


def visited_experts(walk: Walk, module: nn.Module, path: str, count: int) -> int:
    """How many experts a token is routed to; raises ModelError if nothing states it."""
    block = walk.around[-2] if len(walk.around) > 1 else module
    visited = module_types.experts_per_token([module, block, *block.children(), walk.config])
    if visited is None or not 0 < visited <= count:
        raise ModelError(
            f"{path or type(module).__name__} holds {count} experts, and neither its block nor its config "
            "states how many each token uses (top_k, num_experts_per_tok): count it with count_flops"
        )
    return visited


def expert_list(walk: Walk, module: nn.Module, path: str, flow: Flow) -> Flow:
    """Experts that are modules: one of them, times the number that each token uses."""
    visited = visited_experts(walk, module, path, len(module._modules))
    start = len(walk.works)
    after = walk.visit(next(iter(module.children())), path, flow)
    for i, work in enumerate(walk.works[start:], start):
        walk.works[i] = replace(work.times(visited), module=path, kind="experts")
    return after


def _scan(walk: Walk, module: nn.Module, path: str, flow: Flow, state: torch.Tensor) -> None:
    """The products of a state-space layer's reference path, without its projections.

    Each channel's state is multiplied by C once per row (A is channels × state); or, in chunks: C·Bᵀ and the
    result by the values, the state of each chunk, the states carried over all chunks, C by those states.
    """
    factor, dtype = 2 * (flow.needs or module_types.is_trained(module)), walk.dtype(module, state)
    if state.dim() == 2:
        unit = 2 * state.numel()
        walk.add(path, "scan", dtype, Rows(flow.stream), unit, unit * factor)
        return
    chunk, width = module_types.number([module], ["chunk_size"]), module_types.number([module], ["head_dim"])
    size = module_types.number([module], ["ssm_state_size", "d_state"])
    if chunk is None or width is None or size is None:
        walk.uncounted[f"scan of {type(module).__name__}"] += 1
        return
    heads = state.numel()
    unit = 2 * heads * chunk * (size * chunk + chunk * width + 2 * width * size)
    walk.add(path, "scan", dtype, Chunks(flow.stream, chunk), unit, unit * factor)
    unit = 2 * heads * width * size
    walk.add(path, "scan", dtype, Chunks(flow.stream, chunk, pairs=True), unit, unit * factor)


def recur(walk: Walk, module: nn.RNNBase, path: str, flow: Flow) -> Flow:
    """At each step the input is multiplied by W_ih and the state by W_hh; the first state needs no gradient.

    A fused kernel computes every gradient, needed or not: unneeded ones count as recomputation.
    """
    walk.start_features(flow, module.input_size)
    walk.sequence_first |= not module.batch_first and flow.stream.source == FEATURES
    rows, sequences, below = Rows(flow.stream), Sequences(flow.stream), flow.needs
    dtype = walk.dtype(module, next(module.parameters()))
    fused = walk.device_type == "cuda" or (isinstance(module, nn.LSTM) and not module.proj_size)
    for layer in range(module.num_layers):
        needs_gradient = below
        for end in (f"l{layer}", f"l{layer}_reverse")[: 1 + module.bidirectional]:
            named = {name: p for name, p in module.named_parameters() if name.endswith("_" + end)}
            weights = {name[7:9]: p for name, p in named.items() if name.startswith("weight")}
            forward = 2 * sum(w.numel() for w in weights.values())
            backward = 2 * sum(w.numel() * w.requires_grad for w in weights.values())
            trained = any(p.requires_grad for p in named.values())
            if below or trained:
                state = 2 * weights["hh"].numel()
                projection = 2 * weights["hr"].numel() if "hr" in weights else 0
                backward += 2 * weights["ih"].numel() * below + state + projection
                walk.add(
                    path, "recurrent", dtype, sequences, 0, -state, executed_backward=0 if fused else -state
                )
            done = 2 * forward if (below or trained) and fused else backward
            walk.add(path, "recurrent", dtype, rows, forward, backward, executed_backward=done)
            needs_gradient = needs_gradient or trained
        below = needs_gradient
    width = (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
    return replace(flow, width=width, needs=below)


def recur_once(walk: Walk, module: Any, path: str, flow: Flow) -> Flow:
    """A recurrent cell; the structure does not show how often a forward calls it."""
    walk.notes["a recurrent cell is assumed to run once for each position"] = None
    walk.start_features(flow, module.input_size)
    trained = module_types.is_trained(module)
    unit = 2 * (module.weight_ih.numel() + module.weight_hh.numel())
    factor = trained + (flow.needs or trained)
    walk.add(path, "recurrent", walk.dtype(module, module.weight_ih), Rows(flow.stream), unit, unit * factor)
    return replace(flow.trained(trained), width=module.hidden_size)
