"""The layers whose per-sample gradients are known, from their input and the gradient of their output.

    a linear layer (also transformers' Conv1D)    an outer product per position
    an embedding                                  a row per position
    a convolution in 1, 2 or 3 dimensions         an outer product per position, on patches
    LayerNorm, RMSNorm, GroupNorm                 the normalised input times the gradient, summed
    any other module with 1-D parameters only     the same by autograd, on a copy of them for each sample

The last kind is for the RMS norms of transformers and the like. Whether a module's parameters only scale and
shift is tested in its first pass: two samples with other copies must be as if each had run alone.

A model is refused by name, before training, if another layer has trained parameters, or if a layer would mix
samples or keep statistics of the data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from ..errors import ModelError
from .check import dropouts_of
from .gradients import Convolution, ConvolutionSettings, Gradient, Lookup, Outer, Sums, at_least_fp32

Rule = Callable[[Any, Tensor, Tensor], Gradient]
"""module, input, gradient of the output ─► the gradient of one parameter."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


class Layer(NamedTuple):
    """A module with trained parameters."""

    name: str
    module: nn.Module
    rules: Mapping[str, Rule]
    """Of the parameters that are trained, by their names in the module."""
    names: Mapping[str, str]
    """Their names in the model: a shared parameter has one."""

    def __str__(self) -> str:
        return _named(self.name, self.module)

    def gradients(self, x: Tensor, grad: Tensor) -> list[tuple[str, Gradient]]:
        """What this use of the layer adds to the gradients of its parameters, by their names in the model."""
        return [(self.names[key], rule(self.module, x, grad)) for key, rule in self.rules.items()]


def supported_layers(model: nn.Module) -> list[Layer]:
    """The layers of the model that are trained; a ModelError names the first that is not supported."""
    layers, names = [], {id(p): name for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        check_keeps_samples_apart(name, module)
        trained = {key: names[id(p)] for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        if trained:
            known = _rules_for(name, module, list(trained))
            layers.append(Layer(name, module, {key: known[key] for key in trained}, trained))
    return layers


def check_keeps_samples_apart(name: str, module: nn.Module) -> None:
    """A ModelError if the module mixes samples or keeps statistics of them."""
    if isinstance(module, _BATCH_NORMS) and (module.training or not module.track_running_stats):
        raise ModelError(
            f"{_named(name, module)} mixes samples: no sample has a gradient of its own; use GroupNorm or "
            "LayerNorm, or freeze it in eval mode"
        )
    if isinstance(module, _INSTANCE_NORMS) and module.training and module.track_running_stats:
        raise ModelError(f"{_named(name, module)} keeps statistics of the data without noise")


def _named(name: str, module: nn.Module) -> str:
    return f"{name or 'the model'} ({type(module).__name__})"


def _rules_for(name: str, module: nn.Module, trained: Sequence[str]) -> Mapping[str, Rule]:
    what = _named(name, module)
    rules = _RULES.get(type(module).forward)
    if rules is None and _is_transformers_conv1d(module):
        rules = {"weight": _transposed_linear_weight, "bias": _last_dimension}
    if rules is not None:
        reason = _unusual(module) or next(
            (f"a parameter {key!r}" for key in trained if key not in rules), None
        )
        if reason:
            raise ModelError(f"{what} has {reason}: its per-sample gradients are not supported")
        return rules
    inner = sum(1 for _ in module.parameters())
    own = [parameter.dim() for parameter in module.parameters(recurse=False)]
    if len(own) == inner and set(own) == {1}:
        if any(probability for _, _, probability in dropouts_of(module)):
            raise ModelError(f"{what} is not supported: it has both dropout and trained parameters")
        return {key: _Elementwise(what, key) for key in trained}
    raise ModelError(
        f"{what} is not supported: per-sample gradients are known for linear layers, embeddings, "
        "convolutions, layer, RMS and group norms; freeze its parameters or replace it"
    )


def _unusual(module: nn.Module) -> str | None:
    """What changes the gradient of a known layer."""
    if "forward" in vars(module):
        return "a forward method of its own"
    if any(parameter.is_complex() for parameter in module.parameters()):
        return "complex parameters"
    if isinstance(module, nn.Embedding):
        options = ("max_norm", "scale_grad_by_freq", "sparse")
        return next((f"{name}={getattr(module, name)}" for name in options if getattr(module, name)), None)
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode!r}"
        if module.padding == "same" and any(2 * half != whole for half, whole in _same_padding(module)):
            return "uneven padding"
    return None


def _is_transformers_conv1d(module: nn.Module) -> bool:
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and type(module).forward is home.Conv1D.forward


def _linear_weight(module: nn.Module, x: Tensor, grad: Tensor) -> Gradient:
    return Outer(_by_position(grad), _by_position(x.to(grad.dtype)))


def _transposed_linear_weight(module: nn.Module, x: Tensor, grad: Tensor) -> Gradient:
    return Outer(_by_position(x.to(grad.dtype)), _by_position(grad))


def _by_position(values: Tensor) -> Tensor:
    """(samples, positions, features)"""
    return values.reshape(len(values), -1, values.shape[-1])


def _last_dimension(module: nn.Module, x: Tensor, grad: Tensor) -> Gradient:
    return _summed(_by_position(grad), (1,))


def _summed(values: Tensor, dims: tuple[int, ...]) -> Sums:
    """In at least fp32."""
    dtype = at_least_fp32(values)
    return Sums(values.sum(dims, dtype=dtype) if dims else values.to(dtype))


def _embedding_weight(module: nn.Embedding, x: Tensor, grad: Tensor) -> Gradient:
    ids = x.reshape(len(x), -1)
    by_position = grad.reshape(*ids.shape, -1)
    if module.padding_idx is not None:
        by_position = by_position.masked_fill((ids == module.padding_idx)[:, :, None], 0)
    return Lookup(ids, by_position, module.num_embeddings)


def _convolution_weight(module: nn.Conv2d, x: Tensor, grad: Tensor) -> Gradient:
    padding = module.padding
    if isinstance(padding, str):
        padding = tuple(half if padding == "same" else 0 for half, _ in _same_padding(module))
    settings = ConvolutionSettings(module.stride, padding, module.dilation, module.groups)
    return Convolution(x.to(grad.dtype), grad, module.weight.shape, settings)


def _same_padding(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[tuple[int, int]]:
    """In each dimension: on one side, and on both together."""
    both = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return [(whole // 2, whole) for whole in both]


def _channels(module: nn.Module, x: Tensor, grad: Tensor) -> Gradient:
    return _summed(grad, tuple(range(2, grad.dim())))


def _layer_norm_weight(module: nn.LayerNorm, x: Tensor, grad: Tensor) -> Gradient:
    return _normalised(module, grad * F.layer_norm(x, module.normalized_shape, eps=module.eps))


def _rms_norm_weight(module: nn.RMSNorm, x: Tensor, grad: Tensor) -> Gradient:
    return _normalised(module, grad * F.rms_norm(x, module.normalized_shape, eps=module.eps))


def _layer_norm_bias(module: nn.LayerNorm, x: Tensor, grad: Tensor) -> Gradient:
    return _normalised(module, grad)


def _normalised(module: nn.LayerNorm | nn.RMSNorm, values: Tensor) -> Gradient:
    return _summed(values, tuple(range(1, values.dim() - len(module.normalized_shape))))


def _group_norm_weight(module: nn.GroupNorm, x: Tensor, grad: Tensor) -> Gradient:
    return _channels(module, x, grad * F.group_norm(x, module.num_groups, eps=module.eps))


class _Elementwise:
    """A parameter that multiplies or shifts the last dimension, whatever else the module does."""

    def __init__(self, what: str, key: str) -> None:
        self._what, self._key, self._is_tested = what, key, False

    def __call__(self, module: nn.Module, x: Tensor, grad: Tensor) -> Gradient:
        parameter: Tensor = getattr(module, self._key).detach()
        if not self._is_tested:
            # Not x itself, which may be zero: then any parameter would pass.
            one = torch.linspace(-1, 2, x[:1].numel(), dtype=x.dtype, device=x.device).view_as(x[:1])
            self._test(module, parameter, one)
            self._is_tested = True
        with torch.enable_grad():
            copies = self._copies(parameter.expand(len(x), -1), x).requires_grad_()
            output = self._run(module, copies, x)
            (found,) = torch.autograd.grad(output, copies, grad.to(output.dtype))
        return _summed(found.flatten(1, -2), (1,))

    def _test(self, module: nn.Module, parameter: Tensor, one: Tensor) -> None:
        different = torch.stack([parameter, 1.25 * parameter + 0.125])
        try:
            alone = torch.cat([self._run(module, own, one) for own in different])
            together = self._run(module, self._copies(different, one), torch.cat([one, one]))
            is_elementwise = alone.shape == together.shape and torch.allclose(alone, together)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise self._refusal() from error
        if not is_elementwise:
            raise self._refusal()

    def _refusal(self) -> ModelError:
        return ModelError(
            f"{self._what} is not supported: its parameter {self._key!r} does more than scale or shift the "
            "last dimension of its input"
        )

    def _copies(self, values: Tensor, x: Tensor) -> Tensor:
        """One copy for each sample, in the shape that broadcasts against the module's input."""
        return values.reshape(len(values), *[1] * (x.dim() - 2), -1).clone()

    def _run(self, module: nn.Module, values: Tensor, x: Tensor) -> Tensor:
        called = functional_call(_Bare(module), {f"inner.{self._key}": values}, (x,))
        assert isinstance(called, Tensor)
        return called


class _Bare(nn.Module):
    """A module without its hooks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner.forward(x)


_LINEAR: Mapping[str, Rule] = {"weight": _linear_weight, "bias": _last_dimension}
_CONVOLUTION: Mapping[str, Rule] = {"weight": _convolution_weight, "bias": _channels}
_RULES: Mapping[Any, Mapping[str, Rule]] = {
    nn.Linear.forward: _LINEAR,
    nn.Embedding.forward: {"weight": _embedding_weight},
    nn.Conv1d.forward: _CONVOLUTION,
    nn.Conv2d.forward: _CONVOLUTION,
    nn.Conv3d.forward: _CONVOLUTION,
    nn.LayerNorm.forward: {"weight": _layer_norm_weight, "bias": _layer_norm_bias},
    nn.RMSNorm.forward: {"weight": _rms_norm_weight},
    nn.GroupNorm.forward: {"weight": _group_norm_weight, "bias": _channels},
}
"""By what the module runs, so that a subclass with another forward is not taken for its base."""
