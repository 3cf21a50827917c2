"""The children of a module: which flow each one takes, and the flow after it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import TYPE_CHECKING, Any

from torch import nn

from ..wrappers import unwrap
from . import module_types
from .convolution import CONVOLUTIONS, is_gate, pool_by_function
from .matrices import expert_list
from .module_types import Linear
from .source import names_in, pools_in
from .streams import PIXELS, TARGET, FixedSize, Sequences, Stream
from .work import Flow

if TYPE_CHECKING:
    from .walk import Walk

_BRANCH = re.compile(r"shortcut|skip|identity", re.IGNORECASE)
_MAYBE_BRANCH = re.compile(r"downsample", re.IGNORECASE)
_SAME_INPUT = (
    {"gate_proj", "up_proj"},
    {"w1", "w3"},
    {"wi_0", "wi_1"},
    {"gate", "up"},
    {"gate", "router", "experts", "shared_expert", "shared_experts", "shared_expert_gate"},
)
_BEFORE = re.compile(r"input|before|pre_", re.IGNORECASE)


def visit_children(walk: Walk, module: nn.Module, path: str, flow: Flow) -> Flow:
    """Visit a module's children in order, with the usual exceptions."""
    children = _runnable(module)
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    repeated = isinstance(module, nn.ModuleList) or (is_list and _has_equal_blocks(children))
    if repeated and "expert" in path and len(children) > 1:
        return expert_list(walk, module, path, flow)
    normed_first = [c for n, c in children.items() if _BEFORE.search(n) and module_types.is_norm(c)]
    before = flow = flow.trained(any(map(module_types.is_trained, normed_first)))
    decoder = _decoder_with_encoder(children)
    pools, finished, seen = list(pools_in(type(module).forward)), [flow], set[str]()
    for index, (name, child) in enumerate(children.items()):
        if id(child) in walk.visited and not is_list and not module_types.is_embedding(child):
            continue  # another name of a layer registered elsewhere
        branch = _is_branch(name, child, flow, list(children.values())[index + 1 :])
        same_input = any(name in group and group & seen for group in _SAME_INPUT)
        if name == decoder:
            walk.memory, taken = flow, Flow(Stream(TARGET))
        elif branch or same_input:
            taken = before
        else:
            taken = _matching(child, flow, [before] if is_list else finished)
        start, was_dead = len(walk.works), walk.dead
        if repeated:
            walk.blocks.append(index)
            walk.dead = walk.live_layers is not None and index >= walk.live_layers % (len(children) + 1)
        after = _visit_child(walk, module, child, f"{path}.{name}" if path else name, taken)
        if repeated:
            walk.blocks.pop()
            walk.dead = was_dead
        _repeat(walk, module, child, start)
        if branch:
            flow = flow.trained(after.needs)
        else:
            flow = _with_extra_tokens(module, flow, after).trained(same_input and flow.needs)
        seen.add(name)
        for call in [p for p in pools if (p.after & set(children)) <= seen]:
            pools.remove(call)
            flow = pool_by_function(call, flow)
            walk.recent.append(flow)
        finished.append(flow)
    if walk.contrastive and module is walk.model:
        _similarity(walk, finished)
    return before.trained(flow.needs) if is_gate(before, flow) else flow


def _runnable(module: nn.Module) -> dict[str, nn.Module]:
    """The children that run, without the original of a layer that is trained as a copy."""
    children = {}
    saved = module._modules.get("modules_to_save")
    for name, child in module._modules.items():
        if child is None or (name == "original_module" and saved is not None and len(list(saved.children()))):
            continue
        children[name] = unwrap(child)
    return children


def _visit_child(walk: Walk, module: nn.Module, child: nn.Module, path: str, flow: Flow) -> Flow:
    """Visit one child; after an image tower, select the features that the configuration selects."""
    config = getattr(module, "config", None)
    layer, outer = getattr(config, "vision_feature_layer", None), walk.live_layers
    if isinstance(layer, int) and not module_types.has_text(child):
        walk.live_layers = layer
    after = walk.visit(child, path, flow)
    walk.live_layers = outer
    if after.stream.source == PIXELS and flow.stream.source != PIXELS:
        if getattr(config, "vision_feature_select_strategy", None) == "default":
            after = replace(after, stream=replace(after.stream, extra=0))
        if (tokens := module_types.number([config], ["mm_tokens_per_image"])) is not None:
            after = replace(after, stream=Stream(PIXELS, steps=((FixedSize(tokens),),)))
    return after


def _with_extra_tokens(module: nn.Module, before: Flow, after: Flow) -> Flow:
    """Add the class tokens of a module to the patches that its child has produced."""
    stream = after.stream
    if stream.source != PIXELS or stream.steps == before.stream.steps or not after.width:
        return after
    extra = module_types.extra_tokens(module, after.width)
    return replace(after, stream=replace(stream, extra=stream.extra + extra)) if extra else after


def _is_branch(name: str, child: nn.Module, flow: Flow, later: list[nn.Module]) -> bool:
    """Whether a child runs in parallel to the others: its result is added to theirs."""
    if _BRANCH.search(name):
        return True
    if not _MAYBE_BRANCH.search(name):
        return False
    following = next((c.in_channels for c in later if isinstance(c, CONVOLUTIONS)), None)
    return flow.width in (_width_out(child), following)


def _width_out(module: nn.Module) -> int | None:
    """Output features of the last layer of a module."""
    width: int | None = None
    for child in module.modules():
        linear: Linear | None = module_types.linear_of(child)
        if isinstance(child, CONVOLUTIONS):
            width = child.out_channels
        elif linear is not None:
            width = linear.features_out
    return width


def _matching(child: nn.Module, flow: Flow, finished: list[Flow]) -> Flow:
    """The flow that a child takes: the last one, unless its first layer fits only an earlier one's width."""
    first = module_types.linear_of(child) or next(
        (linear for *_, linear in module_types.linears_in(child)), None
    )
    if first is None or _fits(first, flow):
        return flow
    for other in reversed(finished):
        elsewhere = other.stream.source != flow.stream.source and other.width == first.features_in
        if elsewhere or (other.stream.source == PIXELS and other.attended and _fits(first, other)):
            return other
    return flow


def _fits(linear: Linear, flow: Flow) -> bool:
    """Whether a layer accepts a flow's features, of one position or of a square of positions."""
    if flow.width is None or linear.features_in == flow.width:
        return True
    ratio, rest = divmod(linear.features_in, flow.width)
    return rest == 0 and isqrt(ratio) ** 2 == ratio


def _decoder_with_encoder(children: Mapping[str, nn.Module]) -> str | None:
    """The name of a decoder that attends to a sibling encoder."""
    if not any(name.endswith("encoder") for name in children):
        return None
    decoders = (
        n for n, c in children.items() if n.endswith("decoder") and module_types.has_cross_attention(c)
    )
    return next(decoders, None)


def _has_equal_blocks(children: Mapping[str, nn.Module]) -> bool:
    """Whether several children are blocks of the same class."""
    classes = Counter(type(c) for c in children.values() if c._modules)
    return any(n > 1 for n in classes.values())


def _repeat(walk: Walk, module: nn.Module, child: nn.Module, start: int) -> None:
    """Repeat layers that share their weights: the forward runs more layers than there are in the list."""
    config: Any = getattr(module, "config", None)
    layers = module_types.number([config], ["num_hidden_layers"]) or 0
    if not isinstance(child, nn.ModuleList) or not 0 < len(child) < layers or layers % len(child):
        return
    if {"range", "num_hidden_layers"} <= names_in(type(module).forward):
        walk.notes[f"{len(child)} layers are assumed to run {layers} times"] = None
        for i, work in enumerate(walk.works[start:], start):
            walk.works[i] = work.times(layers // len(child))


def _similarity(walk: Walk, finished: list[Flow]) -> None:
    """Every text against every image, in the width of their projections."""
    last = {flow.stream.source: flow for flow in finished if flow.width is not None}
    width = finished[-1].width
    if len(last) != 2 or width is None:
        return
    a, b = last.values()
    pairs, unit = Sequences(a.stream, b.stream), 2 * width
    walk.add("", "linear", walk.works[-1].dtype, pairs, unit, unit * (a.needs + b.needs))
