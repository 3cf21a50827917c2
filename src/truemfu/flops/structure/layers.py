"""What a module is, from its class, the shapes of its weights and the names of its children.

Shapes come first; names decide where shapes cannot, as between the queries and the keys of an attention. No
model names are used.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import prod
from typing import Any

from torch import nn

from ..wrappers import unwrap

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_POOLS = ("MaxPool", "AvgPool")
RESIZERS = (nn.Upsample, *(getattr(nn, f"{kind}{dims}d") for kind in _POOLS for dims in (1, 2, 3)))
MATRIX = re.compile(r"^(w\d*|kernel)$|weight|proj|router|gate|^up|^down", re.IGNORECASE)
_TABLE = re.compile(r"pos|embed|token|bias|norm|scale|table|cls|quer|latent|mean|std|prompt", re.IGNORECASE)
_POSITIONS = re.compile(r"pos|wpe|type|segment|relative|time", re.IGNORECASE)
_EXTRA_TOKENS = re.compile(r"(cls|class|dist|reg)\w*_(token|embed)", re.IGNORECASE)
CROSS = re.compile(r"cross|encoder_?attn|enc_?dec|multihead_attn", re.IGNORECASE)
_FUSED = re.compile(r"(to_|w|attn_)?qkv(_\w+)?|c_attn|query_key_value|w_pack", re.IGNORECASE)
_QUERIES = re.compile(r"(to_|w|linear_)?q(_\w+)?|quer(y|ies)(?!_key)\w*", re.IGNORECASE)
KEYS = re.compile(r"(to_|w|linear_|c_)?(k|v|kv)(_\w+)?|(keys?|values?)(_\w+)?", re.IGNORECASE)
_OUT = re.compile(r"w?o|o_proj|(to_|linear_)?out(_proj|_lin|put)?|dense|(c_)?proj(ection)?", re.IGNORECASE)


def first_weight(module: nn.Module) -> nn.Parameter | None:
    """The weight of a layer, also if it is parametrised; None if a quantiser has packed it into buffers."""
    return next((p for name, p in module.named_parameters() if not name.endswith("bias")), None)


def features(module: nn.Module) -> tuple[int, int] | None:
    """Features in and out of a linear layer of any class; None for other modules and for wrappers."""
    if module._modules and "parametrizations" not in module._modules:
        return None
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):
        return sizes[0], sizes[1]
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and getattr(module, "nf", None) == weight.shape[1]:
        return weight.shape[0], weight.shape[1]  # stored transposed
    return None


def own_matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of the module itself that may be multiplied by rows."""
    own = {name: p for name, p in module._parameters.items() if p is not None and not _TABLE.search(name)}
    return {name: p for name, p in own.items() if p.dim() > 1 and min(p.shape) > 1}


def starts_text(module: nn.Module, path: str) -> bool:
    """Whether a module is an embedding of tokens, not of positions or the like."""
    return isinstance(module, nn.Embedding) and not _POSITIONS.search(path.rpartition(".")[2])


def extra_tokens(module: nn.Module) -> int:
    """The number of class and register tokens that a module adds to its patches."""
    found = [p for name, p in module._parameters.items() if p is not None and _EXTRA_TOKENS.search(name)]
    return sum(p.numel() // p.shape[-1] for p in found)


def stride_of(module: Any, dims: int) -> Fraction:
    """How many positions a convolution, pooling or upsampling reads for each one it writes."""
    if isinstance(module, nn.Upsample):
        return 1 / Fraction(getattr(module, "scale_factor", None) or 1) ** dims
    stride = module.stride or module.kernel_size
    positions = Fraction(prod(stride) if isinstance(stride, tuple) else stride**dims)
    return 1 / positions if getattr(module, "transposed", False) else positions


def attention_widths(module: nn.Module) -> tuple[int, int] | None:
    """Heads × head size of the queries and of the values; None for a module that is no attention.

    The queries' projection has the former as output, the output projection the latter as input, however many
    heads share a key.
    """
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    found = {
        name: sizes
        for name, child in module._modules.items()
        if child is not None and (sizes := [s for part in child.modules() if (s := features(part))])
    }
    queries = [sizes[-1][1] for name, sizes in found.items() if _QUERIES.fullmatch(name)]
    fused = [sizes[-1][1] // 3 for name, sizes in found.items() if _FUSED.fullmatch(name)]
    if not fused and not (queries and any(map(KEYS.fullmatch, found))):
        return None
    outputs = [sizes[0][0] for name, sizes in found.items() if _OUT.fullmatch(name)]
    values = (outputs or queries or fused)[-1]
    return (queries or [values])[-1], values


def is_decoder(module: nn.Module, name: str) -> bool:
    """Whether a module is a decoder that attends to an encoder."""
    return name.endswith("decoder") and any(CROSS.search(path) for path, _ in module.named_modules())


def is_list(module: nn.Module) -> bool:
    """Whether a module is a list of layers of the same class."""
    classes = [type(child) for child in module.children() if child._modules]
    is_repeated = isinstance(module, nn.Sequential) and len(set(classes)) < len(classes)
    return isinstance(module, nn.ModuleList) or is_repeated


def runnable(module: nn.Module) -> dict[str, nn.Module]:
    """The children that run: of a layer that is trained as a copy, the copy."""
    children = {name: unwrap(child) for name, child in module._modules.items() if child is not None}
    if getattr(module, "modules_to_save", None):
        children.pop("original_module", None)
    return children


def has_trained_norms_first(block: nn.Module) -> bool:
    """Whether a block normalises with trained weights before its layers, wherever the norms are listed."""
    names = {child: type(child).__name__ for child in block.children()}
    norms = [child for child, name in names.items() if "Norm" in name and "BatchNorm" not in name]
    is_first = getattr(block, "norm_first", True)
    return is_first and any(p.requires_grad for norm in norms for p in norm.parameters())


def is_checkpointed(module: nn.Module) -> bool:
    """Whether activation checkpointing runs a module's forward again in backward."""
    is_on = module.training and getattr(module, "gradient_checkpointing", False)
    is_layer = any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)
    return bool(is_on and is_layer) or type(module).__name__ == "CheckpointWrapper"
