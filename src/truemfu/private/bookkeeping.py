"""The clipped sum of a batch, by book-keeping (Bu et al., arXiv 2210.00038): one backward pass.

forward, backward of the summed losses ─► the uses of each parameter (`recording.py`)
norms of each sample over all parameters ─► min(1, C / norm)
one product per use ─► the sum of the clipped gradients; no gradient of a single sample is kept
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ModelError, UsageError
from .batches import samples_of
from .gradients import InputGrams, Outer, SampleWeights, SmallParameters, Sums, squared_norms
from .layers import Layer, check_keeps_samples_apart, supported_layers
from .recording import Recorded, recording

Losses = Callable[[Any, Any], Tensor]
"""model, batch ─► the loss of each sample, shape (samples,)."""


class ClippedSum(NamedTuple):
    """Of one batch."""

    losses: Tensor
    norms: Tensor
    """Of each sample's gradient, before it is clipped."""
    epsilon: float
    """The relative spacing of numbers in the least precise of the products."""
    sums: dict[str, Tensor]
    """The sum of the clipped gradients of each trained parameter."""


class BookKeeping:
    """Computes clipped sums for one model, whose trained layers it checks once."""

    def __init__(self, model: nn.Module, max_grad_norm: float) -> None:
        self._max_grad_norm = max_grad_norm
        self._layers: Sequence[Layer] = supported_layers(model)
        if not self._layers:
            raise ModelError(f"{type(model).__name__} has no trained parameters")
        self._model = model
        self.parameters = _trained(model)

    def clipped_sum(
        self, losses_of: Losses, model: nn.Module, batch: Any, among: Sequence[int] | None = None
    ) -> ClippedSum:
        """Of this batch; of the samples `among` it alone, if given. The parameters' `.grad` stays as it is.

        `model` is what `losses_of` calls: the model itself, or a wrapper of it.
        """
        self._check_unchanged()
        samples = samples_of(batch)
        with self._no_other_gradients(), recording(self._layers, samples) as uses:
            losses = losses_of(model, batch)
            _check_losses(losses, samples)
            if uses:
                raise ModelError("the losses run a backward pass of their own: it is not supported")
            torch.autograd.backward(losses.sum())
        with torch.no_grad(), _without_autocast(losses.device):
            epsilon = max(
                (torch.finfo(use.dtype).eps for of_one in uses.values() for use in of_one), default=0.0
            )
            products, small = _by_kind(uses)
            inputs = InputGrams()
            squares = [squared_norms(of_one, samples, inputs) for of_one in products.values()]
            del inputs
            squares += [] if small is None else [small.squared_norms()]
            norms = torch.stack(squares).sum(0).sqrt() if squares else losses.new_zeros(samples)
            weights = self.weights(norms)
            if among is not None:
                chosen = torch.zeros_like(weights)
                chosen[list(among)] = weights[list(among)]
                weights = chosen
            sums = {} if small is None else small.weighted_sums(weights)
            of_samples = SampleWeights(weights)
            for name, parameter in self.parameters.items():
                if name in products:  # each is freed with its sum
                    found = [use.weighted_sum(of_samples) for use in products.pop(name)]
                    found = [one.to(torch.promote_types(one.dtype, parameter.dtype)) for one in found]
                    sums[name] = functools.reduce(torch.add, found)
                elif name not in sums:
                    sums[name] = zeros_like(parameter)
        return ClippedSum(losses.detach(), norms, epsilon, sums)

    def _check_unchanged(self) -> None:
        """Since the layers were checked."""
        for name, module in self._model.named_modules():
            check_keeps_samples_apart(name, module)
        changed = _trained(self._model).keys() ^ self.parameters.keys()
        if changed:
            raise ModelError(
                f"{min(changed)} was frozen, unfrozen, added or removed since the model was checked: make a "
                "new PrivateOptimizer"
            )

    def weights(self, norms: Tensor) -> Tensor:
        """What each sample's gradient is multiplied by: 1, or less if its norm is above the largest."""
        return (self._max_grad_norm / norms).clamp(max=1.0)

    @contextmanager
    def _no_other_gradients(self) -> Iterator[None]:
        """A gradient that autograd computes inside is not clipped: an error."""
        before = {name: parameter.grad for name, parameter in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        try:
            yield
            found = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        finally:
            for name, parameter in self.parameters.items():
                parameter.grad = before[name]
        if found:
            raise ModelError(
                f"the per-sample gradients of {found[0]} are unknown: it is used outside of its layer, or "
                "torch.compile has dropped the layer's hooks"
            )


def _by_kind(uses: Recorded) -> tuple[dict[str, list[Outer]], SmallParameters | None]:
    products: dict[str, list[Outer]] = {}
    small: dict[str, list[Sums]] = {}
    for name, of_one in uses.items():
        for use in of_one:
            kind: dict[str, list[Any]] = products if isinstance(use, Outer) else small
            kind.setdefault(name, []).append(use)
    assert not products.keys() & small.keys(), "a parameter is used both in a product and elementwise"
    uses.clear()
    return products, SmallParameters(small) if small else None


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """It would round the products of norms, if `backward` is called inside of it."""
    if not (torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)):
        return nullcontext()
    context: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
    return context


def _check_losses(losses: Any, samples: int) -> None:
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (samples,):
        raise UsageError(
            f"expected one loss per sample, of shape ({samples},); got {shape}: average over the tokens of "
            "each sample on its own, never over the batch"
        )
    if not losses.requires_grad:
        raise UsageError("the losses do not depend on trained parameters")


def zeros_like(parameter: Tensor) -> Tensor:
    """Of the whole parameter, also if this rank has a shard of it."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
