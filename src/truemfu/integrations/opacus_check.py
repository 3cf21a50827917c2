"""The live check of a script that trains with Opacus, for `truemfu run --check-privacy`.

    forward pass of a checked step  ──► its inputs and outputs are kept, and the gradient of each output
    the update of that step begins  ──► each sample alone through the model, with its own output gradients:
                                        clip, add; compare with the sum that Opacus adds its noise to

The loss is the script's own, so it is not run again: the gradients of the outputs are those of the step. What
is compared are the layers' per-sample gradients, their norms, and the clipped sum.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ModelError
from ..private.batches import samples_of
from ..private.check import dropouts_of, gradient_error
from .find_models import models_with, parameters_of

FIRST_CHECK, CHECK_EVERY = 2, 500
"""In steps. In the first step the model is not yet known to be one of Opacus."""
_CLIP_WHOLE_SAMPLES = (
    *("DPOptimizer", "DistributedDPOptimizer"),
    *("DPOptimizerFastGradientClipping", "DistributedDPOptimizerFastGradientClipping"),
)
"""Optimizers that clip the gradient of a sample over all parameters together."""


class Monitor(Protocol):
    """What the check needs of a `TrainingMonitor`."""

    def pause(self, kind: str = ...) -> AbstractContextManager[None]:
        """Exclude what runs inside from the step."""

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log these with the next step."""

    def notice(self, text: str) -> None:
        """Warn once, and repeat it in the summary."""


class OpacusCheck:
    """Of the first optimizer of Opacus in a process."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._steps = 0
        self._pass: _ForwardPass | None = None
        self.errors: list[float] = []

    def update_begins(self, optimizer: torch.optim.Optimizer, monitor: Monitor) -> None:
        """The optimizer inside that of Opacus is about to update its parameters."""
        parameters = parameters_of(optimizer)
        if not parameters or not hasattr(parameters[0], "summed_grad") or _is_other_rank():
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._optimizer is not optimizer:
            return
        self._steps += 1
        recorded, self._pass = self._pass, None
        if recorded is not None:
            recorded.end()
            with monitor.pause("other"):
                self._check(recorded, monitor)
        if self._steps + 1 == FIRST_CHECK or (self._steps + 1) % CHECK_EVERY == 0:
            self._pass = _ForwardPass(_private_model(parameters))

    def result(self) -> str:
        """One line about all checks."""
        if self._optimizer is None:
            return "no optimizer of Opacus made a step: no private gradient was checked"
        if not self.errors:
            return f"no private gradient was checked in {self._steps} steps with Opacus"
        return (
            f"private gradients were checked in {len(self.errors)} of {self._steps} steps: they differ from "
            f"a loop over the samples by {max(self.errors):.1e} at most"
        )

    def _check(self, recorded: _ForwardPass, monitor: Monitor) -> None:
        try:
            error, limit = recorded.error(_private_optimizer(self._optimizer))
        except ModelError as unknown:
            monitor.notice(f"the private gradient of step {self._steps} was not checked: {unknown}")
            return
        self.errors.append(error)
        monitor.add_metrics({"privacy/gradient_error": error})
        if error > limit:
            monitor.notice(
                f"the private gradient of step {self._steps} is wrong: it differs from a loop over the "
                f"samples by {error:.1e} (limit {limit:.1e}); a layer may mix samples or see them in another "
                "order"
            )


class _ForwardPass:
    """Of a model of Opacus, from one update to the next: what went in, what came out, and its gradient."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._passes = 0
        self._inputs: tuple[Any, Any] = ((), {})
        self._samples = 0
        self._gradients: dict[int, Tensor] = {}
        """Of the tensors of the output, by their place; of the first backward pass."""
        self.end: Callable[[], None] = model.register_forward_hook(self._ended, with_kwargs=True).remove

    def _ended(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._passes += 1
        self._inputs = args, kwargs
        self._gradients.clear()
        for place, tensor in enumerate(_tensors(output)):
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._keep, place))

    def _keep(self, place: int, gradient: Tensor) -> None:
        self._gradients.setdefault(place, gradient)

    def error(self, optimizer: Any) -> tuple[float, float]:
        """The relative error of the clipped sum, and its limit; a ModelError with the reason if unknown."""
        model, name = self._model, type(optimizer).__name__
        if name not in _CLIP_WHOLE_SAMPLES:
            raise ModelError(f"{name} clips in another way")
        if self._passes != 1 or optimizer.accumulated_iterations != 1:
            raise ModelError(f"its model ran {self._passes} forward passes with gradients, expected one")
        if not model.batch_first:
            raise ModelError("the first dimension of its model's tensors is not that of samples")
        if any(rate and module.training for module, _, rate in dropouts_of(model)):
            raise ModelError("its model has dropout, so a second forward pass differs")
        if not self._gradients:
            raise ModelError("no output of its model had a gradient")
        samples = samples_of(self._inputs)
        scale = samples if model.loss_reduction == "mean" else 1
        # A loss that the model returns is already the sample's own when the sample runs alone.
        scalars = {place: g for place, g in self._gradients.items() if g.dim() == 0}
        seeds = scalars or {place: g * scale for place, g in self._gradients.items()}
        sums = {
            name: parameter.summed_grad.view_as(parameter)
            for name, parameter in model.named_parameters()
            if getattr(parameter, "summed_grad", None) is not None
        }

        def losses_of(_: nn.Module, part: Any) -> Tensor:
            (args, kwargs), own = part
            outputs = _tensors(model._module(*args, **kwargs))
            return torch.stack([(outputs[place] * g).sum() for place, g in own.items()]).sum()

        with torch.enable_grad(), _without_hooks(model):
            error = gradient_error(
                model,
                losses_of,
                (self._inputs, seeds),
                lambda _: sums,
                max_grad_norm=optimizer.max_grad_norm,
                samples=samples,
            )
        epsilon = max(torch.finfo(g.dtype).eps for g in (*sums.values(), *seeds.values()))
        return error, epsilon**0.5


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """The hooks of Opacus do nothing inside."""
    were_enabled, model.hooks_enabled = model.hooks_enabled, False
    try:
        yield
    finally:
        model.hooks_enabled = were_enabled


def _tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if not isinstance(output, Mapping | list | tuple):
        return []
    inside = output.values() if isinstance(output, Mapping) else output
    return [tensor for value in inside for tensor in _tensors(value)]


def _private_model(parameters: list[Tensor]) -> Any:
    from opacus.grad_sample import AbstractGradSampleModule

    found = [m for outer in models_with(parameters) for m in outer.modules()]
    return next(m for m in found if isinstance(m, AbstractGradSampleModule))


def _private_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """That of Opacus around this one."""
    from opacus.optimizers import DPOptimizer

    around = (found for found in gc.get_objects() if DPOptimizer in type(found).__mro__)
    return next(found for found in around if found.original_optimizer is optimizer)


def _is_other_rank() -> bool:
    """Whether this is another rank than the first, whose sums Opacus overwrites before the update."""
    return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
