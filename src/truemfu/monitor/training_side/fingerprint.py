"""Whether what a count depends on still holds: a cheap look at the model, no count.

The work of a step changes when a parameter is frozen or freed, a module is swapped, added or wrapped, a dtype
changes, dropout or checkpointing is switched. All of these show in the structure of the modules, their
parameters' shapes, dtypes and flags, and the modules' own switches and numbers.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from ...flops import unwrap

_MAX_TEXT = 40


def fingerprint(model: nn.Module) -> tuple[int, int]:
    """Two numbers that change, within this process, when a new count is due.

    The first sums up structure, parameters and switches, the second the modules' own numbers (a depth, the
    experts of a token, a rate of dropout). Some models count something in such a number, step by step.
    """
    model = unwrap(model)
    parts: list[object] = []
    numbers: list[object] = []
    for module in model.modules():
        own = vars(module)
        parts.append(type(module))
        hooks = (*own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        parts.append(sum(not getattr(hook, "_truemfu_skip", False) for hook in hooks))
        for name, value in own.items():
            kind = type(value)
            if kind is bool or (kind is str and len(value) <= _MAX_TEXT):
                parts.append((name, value))
            elif kind is int or kind is float:
                numbers.append((name, value))
        for name, parameter in own["_parameters"].items():
            if parameter is not None:
                parts.append((name, parameter.requires_grad, parameter.dtype, tuple(parameter.shape)))
                if type(parameter) is not nn.Parameter:  # how it is split over ranks
                    parts.append(getattr(parameter, "placements", None))
    config = getattr(model, "config", None)
    parts.append(getattr(config, "_attn_implementation", None))
    own_config = getattr(config, "__dict__", {})
    numbers += [(name, value) for name, value in own_config.items() if type(value) in (int, float)]
    return hash(tuple(parts)), hash(tuple(numbers))


def has_uninitialized(model: nn.Module) -> bool:
    """Whether there are parameters whose shape is not known before the first forward pass."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def is_tensor_parallel(model: nn.Module) -> bool:
    """Whether layers are split over ranks, beyond what FSDP splits to save memory alone."""
    for module in model.modules():
        for parameter in module._parameters.values():
            placements = getattr(parameter, "placements", ())
            shards = sum("Shard" in type(placement).__name__ for placement in placements)
            if shards > 1 or (shards and not _is_under_fsdp(model)):
                return True
    return False


def _is_under_fsdp(model: nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for m in model.modules() for base in type(m).__mro__)


def structure(model: nn.Module) -> str:
    """The same in every process: module classes and parameters, for ranks to see that their models agree."""
    import hashlib

    model = unwrap(model)
    text = "\n".join(
        [f"{name} {type(module).__qualname__}" for name, module in model.named_modules()]
        + [f"{n} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for n, p in model.named_parameters()]
    )
    return hashlib.sha256(text.encode()).hexdigest()
