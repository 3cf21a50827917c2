"""Remedies of models, applied to the modules that a step calls, once its first step has shown which they are.

That step is unchanged, and part of the warm-up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..torch_private.trees import tree_map_only

_FORMAT = torch.channels_last


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a step uses."""

    modules: Sequence[nn.Module]
    """That it calls, each outside of the others."""
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device


def repeated_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost containers with several blocks of one class, each block with parts, and their names."""

    def found_in(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        children = list(module.children())
        is_container = isinstance(module, (nn.ModuleList, nn.Sequential))
        blocks = [child for child in children if next(child.children(), None) is not None]
        if (
            is_container
            and len(blocks) > 1
            and len(blocks) == len(children)
            and len(set(map(type, blocks))) == 1
        ):
            yield name, module
            return
        for child, inner in module.named_children():
            yield from found_in(f"{name}.{child}" if name else child, inner)

    yield from found_in("", model)


def _compile(training: Training, option: str) -> None:
    for module in training.modules:
        module.compile()


def _compile_blocks(training: Training, option: str) -> None:
    for module in training.modules:
        for _, container in repeated_blocks(module):
            for block in container.children():
                block.compile()


def _cuda_graphs(training: Training, option: str) -> None:
    for module in training.modules:
        module.compile(mode="reduce-overhead")


def _autocast(training: Training, option: str) -> None:
    """Forward passes in bf16, their results in fp32, as accelerate does it."""

    def with_autocast(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast(training.device.type, torch.bfloat16):
                result = forward(*args, **kwargs)
            return tree_map_only(torch.Tensor, _in_fp32, result)

        return call

    for module in training.modules:
        module.forward = with_autocast(module.forward)


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


def _channels_last(training: Training, option: str) -> None:
    """Weights, the optimizer's values for them, and the inputs of each module."""
    for module in training.modules:
        module.to(memory_format=_FORMAT)  # type: ignore[call-overload]
        module.register_forward_pre_hook(_inputs_in_format, with_kwargs=True)
    for optimizer in training.optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = _in_format(value)


def _inputs_in_format(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return tree_map_only(torch.Tensor, _in_format, args), tree_map_only(torch.Tensor, _in_format, kwargs)


def _in_format(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=_FORMAT) if tensor.dim() == 4 else tensor


def _attention(training: Training, option: str) -> None:
    if "set_attn_implementation" not in option:
        return
    for module in training.modules:
        set_implementation: Any = getattr(module, "set_attn_implementation", None)
        if set_implementation is not None:
            set_implementation("sdpa")


def _liger(training: Training, option: str) -> None:
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    for module in training.modules:
        _apply_liger_kernel_to_instance(model=module)


APPLY: dict[str, Callable[[Training, str], None]] = {
    "compile": _compile,
    "compile_blocks": _compile_blocks,
    "cuda_graphs": _cuda_graphs,
    "autocast_bf16": _autocast,
    "channels_last": _channels_last,
    "attention": _attention,
    "liger": _liger,
}
