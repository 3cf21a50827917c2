"""Whether what a count depends on still holds: a cheap look at the model, no count.

The work of a step changes when a parameter is frozen or freed, a module is swapped, added or wrapped, a dtype
changes, dropout or checkpointing is switched. All of these show in the structure of the modules, their
parameters' shapes, dtypes and flags, and the modules' own switches (booleans and short texts).
"""

from __future__ import annotations

from torch import nn

from ..flops.shadow import unwrap

_MAX_TEXT = 40


def fingerprint(model: nn.Module) -> int:
    """A number that changes, within this process, when a new count is due."""
    model = unwrap(model)
    parts: list[object] = []
    for module in model.modules():
        own = vars(module)
        parts.append(type(module))
        parts.append(len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]))
        for name, value in own.items():
            if value is True or value is False or (type(value) is str and len(value) <= _MAX_TEXT):
                parts.append((name, value))
        for name, parameter in own["_parameters"].items():
            if parameter is not None:
                parts.append((name, parameter.requires_grad, parameter.dtype, tuple(parameter.shape)))
    parts.append(getattr(getattr(model, "config", None), "_attn_implementation", None))
    return hash(tuple(parts))


def structure(model: nn.Module) -> str:
    """The same in every process: module classes and parameters, for ranks to see that their models agree."""
    import hashlib

    model = unwrap(model)
    text = "\n".join(
        [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
        + [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    )
    return hashlib.sha256(text.encode()).hexdigest()
