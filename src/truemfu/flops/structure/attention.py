"""Attention from structure: projections, products of queries, keys and values, and their backward.

The products' sizes follow from the projections: the queries' output is heads × head size, the output
projection's input is heads × value size, however many heads share a key. The kernel determines only what is
recomputed: a fused one computes the scores again in backward, and every gradient, needed or not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from ..attention.pairs import CAUSAL, FULL, Band
from ..attention.windows import sliding_window
from . import module_types
from .source import names_in
from .streams import TOKENS, CrossPairs, Quantity, Rows, SelfPairs

if TYPE_CHECKING:
    from .walk import Walk
    from .work import Flow

FUSED_NOTE = "a fused attention kernel is assumed, whose backward computes the scores again"


def attend(walk: Walk, module: nn.Module, path: str, flow: Flow) -> Flow:
    """Attention whose projections are layers: each reads the input, keys of cross-attention the memory."""
    memory = _memory(walk, path, flow, module)
    children = {name: child for name, child in module._modules.items() if child is not None}
    for name in [
        n for n, c in children.items() if module_types.role(n) is None and module_types.has_convolution(c)
    ]:
        memory = walk.visit(children.pop(name), f"{path}.{name}", flow)  # keys and values of fewer positions
    flows: dict[str, Flow] = {}
    outputs = []
    for name, child in children.items():
        role = module_types.role(name)
        if role is None and module_types.linear_of(child) is not None:
            walk.uncounted[f"what {type(module).__name__} does with {name}"] += 1
        if role == "o":
            outputs.append((name, child))
            continue
        start = flow if memory is None or role not in ("k", "v", "kv") else memory
        after = walk.visit(child, f"{path}.{name}", start if role is None else flows.get(role, start))
        if role is not None:
            flows[role] = after
    shared = flows.get("qkv") or flows.get("kv")
    q = flows.get("q") or flows["qkv"]
    k, v = flows.get("k") or shared, flows.get("v") or shared
    assert k is not None
    v = v or k
    qk_width, v_width = _widths(children, flows, q)
    _products(walk, module, path, flow, memory, qk_width, v_width, (q.needs, k.needs, v.needs))
    after = replace(flow, width=v_width, needs=flow.needs or q.needs or k.needs or v.needs, attended=True)
    for name, child in outputs:
        after = walk.visit(child, f"{path}.{name}", after)
    return replace(after, stream=flow.stream, attended=True)


def attend_multihead(walk: Walk, module: nn.MultiheadAttention, path: str, flow: Flow) -> Flow:
    """`nn.MultiheadAttention`, whose projections are its own parameters."""
    memory = _memory(walk, path, flow, module)
    walk.start_features(flow, module.embed_dim)
    walk.sequence_first |= not module.batch_first and flow.stream.source != TOKENS
    width, source = module.embed_dim, memory or flow
    together = module.in_proj_weight
    if together is not None:
        weights = [(together, width * width)] * 3
    else:
        parts = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        weights = [(w, w.numel()) for w in parts if w is not None]
    needs = []
    trained_bias = module.in_proj_bias is not None and module.in_proj_bias.requires_grad
    for (weight, size), seen in zip(weights, (flow, source, source), strict=True):
        unit = 2 * size
        factor = weight.requires_grad + seen.needs
        walk.add(path, "linear", walk.dtype(module, weight), Rows(seen.stream), unit, unit * factor)
        needs.append(seen.needs or weight.requires_grad or trained_bias)
    _products(walk, module, path, flow, memory, width, width, (needs[0], needs[1], needs[2]))
    after = replace(flow, width=width, needs=any(needs), attended=True)
    linear = module_types.linear_of(module.out_proj)
    assert linear is not None
    after = walk.linear(module.out_proj, path, after, linear)
    return replace(after, stream=flow.stream, attended=True)


def _memory(walk: Walk, path: str, flow: Flow, module: nn.Module) -> Flow | None:
    """The input of the keys in cross-attention; None for self-attention."""
    return walk.memory if module_types.is_cross(path, module) else None


def _widths(children: dict[str, nn.Module], flows: dict[str, Flow], q: Flow) -> tuple[int, int]:
    """heads × head size of the scores, and of the values."""
    out = next((c for n, c in children.items() if module_types.role(n) == "o"), None)
    first = None if out is None else module_types.linear_of(out)
    if out is not None and first is None:
        first = next((linear for _, _, linear in module_types.linears_in(out)), None)
    k, v = flows.get("k"), flows.get("v")
    assert q.width is not None
    if first is not None:
        same = "qkv" in flows or (k is not None and v is not None and k.width == v.width)
        return (first.features_in if same else q.width), first.features_in
    if "qkv" in flows:
        return q.width // 3, q.width // 3
    if k is not None and v is not None and k.width and v.width:
        return q.width, q.width * v.width // k.width
    return q.width, q.width


def _products(
    walk: Walk,
    module: nn.Module,
    path: str,
    flow: Flow,
    memory: Flow | None,
    qk_width: int,
    v_width: int,
    needs: tuple[bool, bool, bool],
) -> None:
    """Scores and values forward; in backward dV, dP, dQ and dK, if a layer below needs them."""
    q, k, v = needs
    forward = 2 * (qk_width + v_width)
    backward = 2 * (v_width * (v + (q or k)) + qk_width * (q + k))
    fused = _is_fused(walk, module, qk_width == v_width, memory is not None)
    executed_backward = backward
    if any(needs) and fused:
        executed_backward = 2 * (3 * qk_width + 2 * v_width)
        walk.notes[FUSED_NOTE] = None
    pairs: Quantity
    executed: Quantity
    if memory is not None:
        pairs = executed = CrossPairs(flow.stream, memory.stream)
    else:
        band, window = _band(walk, module), _window_of_patches(walk, module)
        pairs = SelfPairs(flow.stream, band, window)
        executed = SelfPairs(flow.stream, band, window, executed=flow.stream.source == TOKENS)
    dtype = walk.dtype(module, next(module.parameters()))
    walk.add(
        path,
        "attention",
        dtype,
        pairs,
        forward,
        backward,
        executed=executed,
        executed_backward=executed_backward,
    )


def _is_fused(walk: Walk, module: nn.Module, same_widths: bool, cross: bool) -> bool:
    """Whether a fused kernel runs: not for eager attention, and on a CPU in fewer cases."""
    config = walk.config
    chosen = getattr(config, "_attn_implementation", None)
    if chosen == "eager":
        return False
    if isinstance(module, nn.MultiheadAttention):
        around = walk.around[-2] if len(walk.around) > 1 else module
        own = isinstance(around, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
        if not own and "need_weights" not in names_in(type(around).forward):
            return False  # it returns the probabilities, which no fused kernel computes
    elif chosen is None:
        names = names_in(type(module).forward)
        if "scaled_dot_product_attention" not in names and {"softmax", "Softmax"} & names:
            return False
    if not cross and _has_learned_bias(walk):
        return False
    on_cpu = walk.device_type in ("cpu", "meta")
    return not (on_cpu and (_dropout(module, config) or not same_widths))


def _has_learned_bias(walk: Walk) -> bool:
    """Whether scores of this stack get a learned bias: a mask with a gradient, which no kernel accepts."""
    stack = next((m for m in walk.around if isinstance(m, nn.ModuleList)), None)
    if stack is None:
        return False
    return any(
        "relative" in name and "bias" in name and p.requires_grad for name, p in stack.named_parameters()
    )


def _dropout(module: nn.Module, config: Any) -> bool:
    """Whether probabilities are dropped in training."""
    if not module.training:
        return False
    for name in ("attention_dropout", "attn_dropout", "dropout_p", "dropout"):
        own = getattr(module, name, None)
        if isinstance(own, nn.Dropout):
            return own.p > 0
        if isinstance(own, (int, float)):
            return own > 0
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop", "dropout_rate")
    values = [getattr(config, name, None) for name in names]
    return any(isinstance(value, (int, float)) and value > 0 for value in values)


def _band(walk: Walk, module: nn.Module) -> Band:
    """Which pairs the convention counts here."""
    if walk.convention.attention == "full" or not _is_causal(walk, module):
        return FULL
    window = sliding_window(walk.config, module)
    return CAUSAL if window is None else Band(behind=window - 1, ahead=0)


def _is_causal(walk: Walk, module: nn.Module) -> bool:
    own = getattr(module, "is_causal", None)
    if own is True or getattr(module, "is_decoder", None) is True or "Causal" in type(module).__name__:
        return True
    if own is None and "is_causal" in names_in(type(module).forward):
        return True
    declared = (module_types.is_causal_in_code(m) for m in reversed(walk.around))
    return next((answer for answer in declared if answer is not None), False)


def _window_of_patches(walk: Walk, module: nn.Module) -> int | None:
    """The side, in patches, of the windows that patches of an image are confined to in this layer."""
    config = walk.config
    whole = getattr(config, "fullatt_block_indexes", None)
    patch, pixels = (
        module_types.number([config], ["patch_size"]),
        module_types.number([config], ["window_size"]),
    )
    if isinstance(whole, (list, tuple)) and walk.blocks and patch and pixels:
        merge = module_types.number([config], ["spatial_merge_size"]) or 1
        return None if walk.blocks[-1] in whole else pixels // merge // patch * merge
    holders = (module, *walk.around[-4:-1][::-1])
    own = next((w for m in holders if (w := getattr(m, "window_size", None)) is not None), None)
    own = own[0] if isinstance(own, (tuple, list)) and own else own
    return own if isinstance(own, int) and own > 0 else None
