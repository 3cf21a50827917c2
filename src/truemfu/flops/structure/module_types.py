"""Classifies modules by class, parameters and the names of their children; nothing is run.

Structure comes first (shapes of weights, features in and out); names decide where shapes cannot, as between
the queries and the keys of an attention. No model names are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .source import names_in

_TOP_K = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
)
_MATRIX = re.compile(r"^(w\d*|kernel)$|weight|proj|lora|router|gate|^up|^down", re.IGNORECASE)
_TABLE = re.compile(r"pos|embed|token|bias|norm|scale|table|cls|quer|latent|mean|std|prompt", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe|type|segment|relative|time", re.IGNORECASE)
_EXTRA_TOKENS = re.compile(r"(cls|class|dist|reg|det)\w*_(token|embed)", re.IGNORECASE)
_Q = re.compile(r"(to_|w|linear_)?q(?!kv|_?k_?v)(_|$)|quer(y|ies)(?!_key)", re.IGNORECASE)
_KV = re.compile(r"(to_|w|linear_|c_)?kv(_|$)|key_value", re.IGNORECASE)
_K = re.compile(r"(to_|w|linear_)?k(?!v)(_|$)|keys?(?!_value)", re.IGNORECASE)
_V = re.compile(r"(to_|w|linear_)?v(_|$)|values?", re.IGNORECASE)
_QKV = re.compile(r"(to_|w|attn_)?qkv(_\w+)?|c_attn|query_key_value|w_pack", re.IGNORECASE)
_OUT = re.compile(r"w?o|o_proj|(to_|linear_)?out(_proj|_lin|put)?|dense|(c_)?proj(ection)?", re.IGNORECASE)
_CROSS = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn|encoder_decoder", re.IGNORECASE)


class Linear(NamedTuple):
    """A product with a weight matrix: `features_in` × `features_out`."""

    features_in: int
    features_out: int
    trained: bool
    parameter: torch.Tensor | None


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself, without those of its children."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def is_trained(module: nn.Module) -> bool:
    """Whether any parameter of a module or of its children is trained."""
    return any(p.requires_grad for p in module.parameters())


def linear_of(module: nn.Module) -> Linear | None:
    """The product of a linear layer of any class; None for other modules and for wrappers."""
    if module._modules and "parametrizations" not in module._modules:
        return None
    own = own_parameters(module)
    weights = {name: p for name, p in module.named_parameters() if not name.endswith("bias")}
    trained = any(p.requires_grad for name, p in weights.items() if "lora" not in name.lower())
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    parameter = next((p for p in weights.values()), None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):
        return Linear(sizes[0], sizes[1], trained, parameter)
    weight = own.get("weight")
    if weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]:
        return Linear(weight.shape[0], weight.shape[1], trained, parameter)  # transposed: (in, out)
    return None


def linears_in(module: nn.Module) -> Iterator[tuple[str, nn.Module, Linear]]:
    """The linear layers of a module's subtree, with their paths in it, without those of inactive adapters."""
    active = getattr(module, "active_adapters", None)
    for path, child in module.named_modules():
        found = linear_of(child)
        if found is None or not path:
            continue
        adapter = path.split(".")[1] if path.startswith("lora_") and "." in path else None
        if adapter is None or not isinstance(active, (list, tuple)) or adapter in active:
            yield path, child, found


def lora_parts(module: nn.Module) -> list[tuple[str, nn.Module, Linear]]:
    """The base layer and its low-rank pairs, in that order; empty for anything else.

    A pair goes from the base's input to fewer features and from those to the base's output.
    """
    if len(module._modules) < 3:
        return []
    parts = list(linears_in(module))
    if len(parts) % 2 == 0 or (len(parts) < 3 and not hasattr(module, "base_layer")):
        return []
    base = parts[0][2]
    if getattr(module, "merged", False) is True or getattr(module, "disable_adapters", False) is True:
        return parts[:1]
    narrow = min(base.features_in, base.features_out)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    for (_, _, down), (_, _, up) in pairs:
        rank = down.features_out
        fits = (down.features_in, up.features_out) == (base.features_in, base.features_out)
        if not fits or up.features_in != rank or rank >= narrow:
            return []
    return parts


def number(holders: Sequence[Any], names: Sequence[str]) -> int | None:
    """The first integer that one of these objects has under one of these names."""
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def experts_per_token(holders: Sequence[Any]) -> int | None:
    """How many experts a token is routed to, from a router, its block or a configuration."""
    return number(holders, _TOP_K)


def matrices(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Parameters of an unknown module that are multiplied by rows, and those that may be."""
    certain: dict[str, nn.Parameter] = {}
    unknown: dict[str, nn.Parameter] = {}
    for name, parameter in own_parameters(module).items():
        if parameter.dim() < 2 or min(parameter.shape) < 2 or _TABLE.search(name):
            continue
        (certain if _MATRIX.search(name) else unknown)[name] = parameter
    return certain, unknown


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a normalisation."""
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def is_embedding(module: nn.Module) -> bool:
    """Whether a module is a lookup table."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or (
        "embedding" in type(module).__name__.lower()
        and not module._modules
        and [p.dim() for p in own_parameters(module).values()] == [2]
    )


def holds_tokens(name: str) -> bool:
    """Whether an embedding of this name holds tokens, not positions or the like."""
    return not _POSITIONS.search(name)


def has_text(module: nn.Module) -> bool:
    """Whether a module has a token embedding."""
    return any(
        is_embedding(child) and holds_tokens(path.rpartition(".")[2])
        for path, child in module.named_modules()
    )


def extra_tokens(module: nn.Module, width: int) -> int:
    """The number of class and register tokens that a module prepends to its patches."""
    return sum(
        p.numel() // width
        for name, p in own_parameters(module).items()
        if _EXTRA_TOKENS.search(name) and p.shape[-1] == width
    )


def role(name: str) -> str | None:
    """What a child of an attention module computes: "q", "k", "v", "kv", "qkv", "o", or something else."""
    for kind, pattern in (("qkv", _QKV), ("o", _OUT)):
        if pattern.fullmatch(name):
            return kind
    for kind, pattern in (("kv", _KV), ("q", _Q), ("k", _K), ("v", _V)):
        if pattern.match(name):
            return kind
    return None


def is_attention(module: nn.Module) -> bool:
    """Whether a module projects to queries and keys itself."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    roles = {role(name) for name, child in module._modules.items() if child is not None}
    if not ("qkv" in roles or ("q" in roles and {"k", "kv"} & roles)):
        return False
    roles = {role(name) for name, child in module._modules.items() if child is not None and _projects(child)}
    return "qkv" in roles or ("q" in roles and bool({"k", "kv"} & roles))


def _projects(module: nn.Module) -> bool:
    return linear_of(module) is not None or next(linears_in(module), None) is not None


def is_cross(path: str, module: nn.Module) -> bool:
    """Whether an attention's keys come from another stream, by its own name or that of its layer."""
    own = getattr(module, "is_cross_attention", None)
    if isinstance(own, bool):
        return own
    return bool(_CROSS.search(path.rpartition(".")[2]))


def has_cross_attention(module: nn.Module) -> bool:
    """Whether any attention in a module's subtree attends to another stream."""
    return any(is_cross(path, child) for path, child in module.named_modules() if is_attention(child))


def is_causal_in_code(module: nn.Module) -> bool | None:
    """Whether a module's forward uses a causal mask; None if its code does not show it."""
    names = names_in(type(module).forward)
    if "create_bidirectional_mask" in names:
        return None if "create_causal_mask" in names else False
    causal = {"create_causal_mask", "tril", "triu", "generate_square_subsequent_mask"}
    return True if causal & names else None


def checkpointing(module: nn.Module) -> bool | None:
    """Whether a module's forward is recomputed in backward: True if completely, False if it stops early.

    None if it is not recomputed. Non-reentrant checkpointing stops once the last tensor that backward needs
    is available.
    """
    if type(module).__name__ == "CheckpointWrapper":
        return "NO_REENTRANT" not in str(getattr(module, "checkpoint_impl", ""))
    layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    if not (layer and module.training and getattr(module, "gradient_checkpointing", False)):
        return None
    function = getattr(module, "_gradient_checkpointing_func", None)
    return bool(getattr(function, "keywords", {}).get("use_reentrant", True))


def has_convolution(module: nn.Module) -> bool:
    """Whether a module contains a convolution."""
    return any(isinstance(child, nn.Conv2d) for child in module.modules())


def makes_inputs_trained(module: nn.Module) -> bool:
    """Whether a hook makes an embedding's output need a gradient, as for adapters with checkpointing."""
    names = (getattr(hook, "__name__", "") for hook in module._forward_hooks.values())
    return any("require_grad" in name for name in names)


def has_dropout(module: nn.Module) -> bool:
    """Whether one of a module's direct children is an active dropout."""
    return any(isinstance(c, nn.Dropout) and c.p > 0 and c.training for c in module.children())
