"""What every trained layer saw in one forward and backward pass, without computing a gradient of a weight.

    forward hook of each layer ─► its parameters do not require grad while it runs, so that autograd computes
                                  no gradient of them; its output passes through `_Record`
    backward of `_Record`      ─► input and output gradient become per-sample gradients of the layer

Input and output gradient meet in the backward pass, so a layer may be used several times, and a
checkpointed one is recorded once, with its recomputed input. A parameter that is used outside of its layer
still requires grad there, and autograd leaves a gradient behind: that is an error, not a silent loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import ModelError
from .gradients import Gradient
from .layers import Layer

Recorded = dict[str, list[Gradient]]
"""What each use of a parameter adds to its gradient, by its name in the model."""


@contextmanager
def recording(layers: Sequence[Layer], samples: int) -> Iterator[Recorded]:
    """Record the passes inside, of this many samples."""
    found: Recorded = {}
    with ExitStack() as stack:
        for layer in layers:
            hooks = _Hooks(layer, samples, found)
            before = layer.module.register_forward_pre_hook(hooks.before)
            # Before all other hooks, and after an error too.
            after = layer.module.register_forward_hook(
                hooks.after, prepend=True, with_kwargs=True, always_call=True
            )
            stack.callback(before.remove)
            stack.callback(after.remove)
        yield found


class _Hooks:
    """Around each forward pass of a layer."""

    def __init__(self, layer: Layer, samples: int, found: Recorded) -> None:
        self._layer, self._samples, self._found = layer, samples, found
        self._anchor = torch.zeros((), requires_grad=True)
        """Makes an output require grad, though neither the input nor a parameter does."""

    def before(self, module: nn.Module, args: Any) -> None:
        if not all(isinstance(getattr(module, key), nn.Parameter) for key in self._layer.rules):
            raise ModelError(f"{self._layer} runs with other tensors in place of its parameters")
        self._require_grad(False)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        self._require_grad(True)
        inputs = [*args, *kwargs.values()]
        if output is None:  # the forward pass has failed
            return None
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            raise ModelError(f"{self._layer} is not supported: expected one tensor in and one tensor out")
        if isinstance(inputs[0], DTensor) or isinstance(output, DTensor):
            raise ModelError(f"{self._layer} is split over ranks: tensor parallelism is not supported")
        x, output = (self._of_each_sample(values) for values in (inputs[0], output))
        recorded: Tensor = _Record.apply(output, self._anchor, x.detach(), self)  # type: ignore[no-untyped-call]
        return recorded

    def record(self, x: Tensor, grad: Tensor) -> None:
        for name, gradient in self._layer.gradients(x, grad):
            self._found.setdefault(name, []).append(gradient)

    def _require_grad(self, required: bool) -> None:
        for key in self._layer.rules:
            getattr(self._layer.module, key).requires_grad_(required)

    def _of_each_sample(self, values: Tensor) -> Tensor:
        """With one entry per sample: what is shared, such as the embedding of positions, is repeated."""
        if values.dim() > 1 and values.shape[0] == 1:
            values = values.expand(self._samples, *values.shape[1:])
        if values.dim() == 0 or values.shape[0] != self._samples:
            raise ModelError(
                f"{self._layer} saw a tensor of shape {tuple(values.shape)} in a batch of {self._samples} "
                "samples: the first dimension must be that of samples"
            )
        return values


class _Record(torch.autograd.Function):
    """The identity, which hands the layer's input and the gradient of its output on."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, x: Tensor, hooks: _Hooks) -> Tensor:
        ctx.save_for_backward(x)
        ctx.hooks = hooks
        return output.detach()  # no view, so that a later operation may be in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.hooks.record(*ctx.saved_tensors, grad)
        return grad, None, None, None
