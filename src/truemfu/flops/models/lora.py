"""LoRA adapters on a model to count, added by PEFT itself.

    r=16,targets=q_proj+v_proj ─► LoraOptions ─► adapters in place, everything else frozen

Only the rank and the adapted modules decide the FLOPs; scaling and dropout do not. The adapters have the
dtype of the weights they adapt, as products have under autocast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ...errors import UsageError, closest, one_line

_FORM = "r=16,targets=q_proj+v_proj"
_ALL = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """The rank, and the ends of the names of adapted modules; None is PEFT's choice for the architecture."""

    rank: int
    targets: tuple[str, ...] | None = None


def parse_lora(text: str) -> LoraOptions:
    """`r=16,targets=q_proj+v_proj`, or only `r=16`."""
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in ("r", "targets") or not equals or not value or key in values:
            hint = closest(key, ("r", "targets"))
            raise UsageError(f"lora must have the form {_FORM}; got {part.strip()!r} in {text!r}{hint}")
        values[key] = value
    try:
        rank = int(values.get("r", ""))
    except ValueError:
        rank = 0
    if rank < 1:
        raise UsageError(f"lora needs a rank of at least 1, as in {_FORM}; got {text!r}")
    targets = values.get("targets")
    names = None if targets is None else tuple(name.strip() for name in targets.split("+"))
    if names is not None and not all(names):
        raise UsageError(f"lora has an empty name among its targets: {text!r}")
    return LoraOptions(rank=rank, targets=names)


def add_lora(model: nn.Module, options: LoraOptions) -> None:
    """Add the adapters in place and freeze the rest, as a PEFT model does."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UsageError("lora needs peft: pip install 'truemfu[lora]'") from error
    targets = list(options.targets) if options.targets is not None else None
    config = LoraConfig(r=options.rank, target_modules=_ALL if targets == [_ALL] else targets)
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:
        names = dict.fromkeys(
            path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)
        )
        raise UsageError(
            f"no LoRA adapters for {type(model).__name__} ({one_line(error)}); give targets=, such as its "
            f"linear modules {'+'.join(names) or '(it has none)'}"
        ) from error
    require_grads: Any = getattr(model, "enable_input_require_grads", None)
    if require_grads is not None and getattr(model, "is_gradient_checkpointing", False):
        # A checkpointed layer passes gradients on only if its input needs one; PEFT and trainers do this too.
        require_grads()
