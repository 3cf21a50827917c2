"""The live check of a private gradient: the clipped sum of a few samples against a loop over them.

    the very batch ─┬─► what is checked: the clipped sum of samples i, j, k, from a pass of the whole batch
                    └─► samples i, j, k, each alone: plain autograd, clip, add
                                  largest relative difference of any parameter ≤ limit

Both run with dropout off, because a loop draws other random numbers; afterwards model, gradients, buffers and
random states are as before. It finds a gradient that is not the sum of the clipped gradients of the samples,
whatever the cause, while the loss looks normal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..flops import preserved_random_states
from .batches import cut, samples_of
from .gradients import at_least_fp32

_SMALLEST_SHARE = 1e-2
"""A parameter with less of the whole gradient is compared relative to this share: it is mostly rounding."""
NAN_RELATIVE_ERROR = sys.float_info.max
"""The error of a gradient with NaN or infinity: JSON has no infinity."""

_DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


def gradient_error(
    model: nn.Module,
    losses_of: Callable[[Any, Any], Tensor],
    batch: Any,
    clipped: Callable[[Sequence[int]], Mapping[str, Tensor]],
    *,
    max_grad_norm: float,
    samples: int = 3,
) -> float:
    """The largest relative error of any parameter's clipped sum over a few samples of the batch.

    `clipped(among)` is what is checked: it runs the training's own forward and backward pass on the whole
    batch, and returns the sum, without noise, of the clipped gradients of the samples with these numbers, by
    parameter name.
    """
    count = samples_of(batch)
    among = [number * count // min(samples, count) for number in range(min(samples, count))]
    with undisturbed(model):
        left = {name: value.clone() for name, value in clipped(among).items()}
        norms = {name: value.norm(dtype=at_least_fp32(value)) for name, value in left.items()}
        for turn in range(samples):  # as many on each rank, because under FSDP2 each waits for the others
            number = among[turn % len(among)]
            with _used_weights(model, left) as trained:
                loss = losses_of(model, cut(batch, count, slice(number, number + 1))).sum()
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            if turn >= len(among):
                continue
            own = {name: g for name, g in zip(trained, found, strict=True) if g is not None}
            norm = torch.stack([g.norm(dtype=at_least_fp32(g)) for g in own.values()]).norm()
            scale = (max_grad_norm / norm).clamp(max=1.0)
            for name, gradient in own.items():
                left[name] -= gradient * scale.to(gradient.dtype)
        return largest_error(left, norms)


def largest_error(left: Mapping[str, Tensor], norms: Mapping[str, Tensor]) -> float:
    """The largest norm of what is left of a gradient, relative to the norm that it should have."""
    whole = torch.stack(list(norms.values())).norm()
    errors = [
        left[name].norm(dtype=at_least_fp32(left[name]))
        / torch.maximum(norm, _SMALLEST_SHARE * whole).clamp(min=torch.finfo(norm.dtype).tiny)
        for name, norm in norms.items()
    ]
    worst = torch.stack(errors).max().item()
    return worst if worst < NAN_RELATIVE_ERROR else NAN_RELATIVE_ERROR


@contextmanager
def _used_weights(model: nn.Module, names: Container[str]) -> Iterator[dict[str, Tensor]]:
    """The parameters of these names; under FSDP2 the whole ones that the layers use inside."""
    used: dict[str, Tensor] = {}

    def note(own: Mapping[str, str], layer: nn.Module, *_: Any) -> None:
        used.update((name, getattr(layer, key)) for name, key in own.items())

    with ExitStack() as stack:
        for prefix, module in model.named_modules():
            keys = {f"{prefix}.{key}".lstrip("."): key for key, _ in module.named_parameters(recurse=False)}
            own = {name: key for name, key in keys.items() if name in names}
            if own:
                note(own, module)
                stack.callback(module.register_forward_pre_hook(partial(note, own)).remove)
        yield used


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Without dropout and in full fp32 inside; everything that a pass may change is as before afterwards."""
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    registered = [(module, dict(module._buffers)) for module in model.modules()]
    dropouts = list(dropouts_of(model))
    with preserved_random_states(), full_fp32():
        try:
            for module, name, _ in dropouts:
                setattr(module, name, 0.0)
            yield
        finally:
            for module, name, value in dropouts:
                setattr(module, name, value)
            for owner, before in registered:
                owner._buffers.clear()
                owner._buffers.update(before)
            with torch.no_grad():
                for buffer, kept in buffers.items():
                    buffer.copy_(kept)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient


@contextmanager
def full_fp32() -> Iterator[None]:
    """Products and convolutions in fp32 are not rounded to TF32 inside."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def dropouts_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    """Each probability of a dropout in the model: its module, its attribute and its value."""
    for module in model.modules():
        for name, value in vars(module).items():
            is_one = "drop" in name or (name == "p" and isinstance(module, _DROPOUTS))
            if is_one and isinstance(value, float):
                yield module, name, value
