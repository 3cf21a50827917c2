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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import ModelError, one_line
from ..flops import is_checkpoint, unwrap
from ..private.batches import samples_of, tensors_of
from ..private.check import dropouts_of, gradient_error
from ..private.optimizer import Monitor as StepMonitor
from ..torch_private.watching import version_of
from .find_models import models_with, parameters_of

FIRST_CHECK, CHECK_EVERY = 2, 500
"""In steps. In the first step the model is not yet known to be one of Opacus."""
_CLIP_WHOLE_SAMPLES = (
    *("DPOptimizer", "DistributedDPOptimizer"),
    *("DPOptimizerFastGradientClipping", "DistributedDPOptimizerFastGradientClipping"),
)
"""Optimizers that clip the gradient of a sample over all parameters together."""
_TF32_EPSILON = 2.0**-10


class Monitor(StepMonitor, Protocol):
    """What the check needs of a `TrainingMonitor`."""

    def notice(self, text: str) -> None:
        """Warn once, and repeat it in the summary."""


class OpacusCheck:
    """Of the first optimizer of Opacus in a process."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._steps = 0
        self._pass: _ForwardPass | None = None
        self.checked, self.largest_error = 0, 0.0
        self._was_wrong = False

    def update_begins(self, optimizer: torch.optim.Optimizer, monitor: Monitor) -> None:
        """The optimizer inside that of Opacus is about to update its parameters."""
        parameters = parameters_of(optimizer)
        if not any(hasattr(p, "summed_grad") for p in parameters) or _is_other_rank():
            return
        if self._optimizer is None:
            self._optimizer = optimizer
        if self._optimizer is not optimizer:
            return
        self._steps += 1
        recorded, self._pass = self._pass, None
        try:
            if recorded is not None:
                recorded.end()
                with monitor.pause("other"):
                    self._check(recorded, parameters, monitor)
            if self._steps + 1 == FIRST_CHECK or (self._steps + 1) % CHECK_EVERY == 0:
                self._pass = _ForwardPass(_private_model(parameters))
        except Exception as unknown:  # a model may refuse to run alone, or Opacus may be used in another way
            monitor.notice(f"the private gradient was not checked: {one_line(unknown)}")

    def result(self) -> str:
        """One line about all checks."""
        if self._optimizer is None:
            return "no optimizer of Opacus made a step: no private gradient was checked"
        if not self.checked:
            return f"no private gradient was checked in {self._steps} steps with Opacus"
        return (
            f"private gradients were checked in {self.checked} of {self._steps} steps of the first "
            f"optimizer of Opacus: they differ from a loop over the samples by {self.largest_error:.1e} at "
            "most"
        )

    def _check(self, recorded: _ForwardPass, parameters: list[Tensor], monitor: Monitor) -> None:
        error, limit = recorded.error(_private_optimizer(self._optimizer), parameters)
        if error > limit and recorded.doubt is not None:
            raise ModelError(recorded.doubt)
        is_first_wrong = error > limit and not self._was_wrong
        self._was_wrong |= error > limit
        self.checked, self.largest_error = self.checked + 1, max(self.largest_error, error)
        monitor.add_metrics({"privacy/gradient_error": error})
        if is_first_wrong:
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
        self._versions: list[int] = []
        self._outputs: list[Tensor] = []
        self._gradients: dict[int, Tensor] = {}
        """Of the tensors of the output, by their place; of the first backward pass."""
        self._autocast: torch.dtype | None = None
        self.doubt: str | None = None
        """Why a difference may be that of the comparison."""
        self._hooks = [
            model.register_forward_pre_hook(self._begins, with_kwargs=True),
            model.register_forward_hook(self._ended),
        ]

    def end(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()

    def _begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            self._passes += 1
            self._inputs, self._versions = (args, kwargs), _versions((args, kwargs))

    def _ended(self, model: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._outputs = list(tensors_of(output))
        self._gradients.clear()
        for place, tensor in enumerate(self._outputs):
            if tensor.requires_grad and not any(tensor is other for other in self._outputs[:place]):
                tensor.register_hook(functools.partial(self._keep, place))
                device = tensor.device.type
                self._autocast = (
                    torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
                )

    def _keep(self, place: int, gradient: Tensor) -> None:
        self._gradients.setdefault(place, gradient)

    def error(self, optimizer: Any, parameters: list[Tensor]) -> tuple[float, float]:
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
        if _versions(self._inputs) != self._versions:
            raise ModelError("the inputs of its model have changed since its forward pass")
        if any(is_checkpoint(node) for output in self._outputs for node in _nodes_behind(output)):
            raise ModelError("re-entrant checkpoints hide its weights from the gradient of a single sample")
        seeds = self._seeds()
        sums = {
            name: parameter.summed_grad.view_as(parameter)
            for name, parameter in model.named_parameters()
            if getattr(parameter, "summed_grad", None) is not None
        }
        if len(sums) != sum(getattr(p, "summed_grad", None) is not None for p in parameters):
            raise ModelError("its optimizer trains parameters of other models too")
        samples = samples_of(self._inputs)
        if any(len(g) != samples for g in seeds.values() if g.dim()):
            raise ModelError("the first tensor that its model gets does not have one entry for each sample")
        scale = samples if model.loss_reduction == "mean" else 1
        # A loss that the model returns is already the sample's own when the sample runs alone.
        seeds = {place: g * scale if g.dim() else g for place, g in seeds.items()}
        if model.loss_reduction == "sum" and not all(g.dim() for g in seeds.values()):
            self.doubt = "its model returns a loss, which may be a mean, and the reduction is a sum"
        inner, device = unwrap(model._module), sums[min(sums)].device.type

        def losses_of(_: nn.Module, part: Any) -> Tensor:
            (args, kwargs), own = part
            with torch.autocast(device, self._autocast, enabled=self._autocast is not None):
                outputs = list(tensors_of(inner(*args, **kwargs)))
            if any(outputs[place].shape != g.shape for place, g in own.items()):
                raise ModelError("its model returns tensors of other shapes for a sample alone")
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
        dtypes = {one.dtype for one in (*sums.values(), *seeds.values())} | {self._autocast}
        epsilon = max(torch.finfo(dtype).eps for dtype in dtypes if dtype is not None)
        if device == "cuda" and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            epsilon = max(epsilon, _TF32_EPSILON)
        return error, epsilon**0.5

    def _seeds(self) -> dict[int, Tensor]:
        """The gradients of the outputs that no other output was computed from."""
        if not self._gradients:
            raise ModelError("no output of its model had a gradient")
        inner = {
            place
            for place in self._gradients
            for other in self._gradients
            if other != place and _is_computed_from(self._outputs[other], self._outputs[place])
        }
        if inner:
            self.doubt = "an output of its model is computed from another, and the loss may use both"
        return {place: g for place, g in self._gradients.items() if place not in inner}


def _is_computed_from(one: Tensor, other: Tensor) -> bool:
    """Whether `other` is behind `one` in autograd's graph."""
    return one is not other and any(node is other.grad_fn for node in _nodes_behind(one))


def _nodes_behind(tensor: Tensor) -> Iterator[Any]:
    """Each node of autograd's graph that a tensor was computed by."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            yield node
            seen.add(node)
            waiting += [before for before, _ in node.next_functions]


def _versions(inputs: Any) -> list[int]:
    """Of all tensors, how often each was written in place."""
    return [version_of(tensor) for tensor in tensors_of(inputs) if not tensor.is_inference()]


@contextmanager
def _without_hooks(model: Any) -> Iterator[None]:
    """The hooks of Opacus do nothing inside."""
    were_enabled, model.hooks_enabled = model.hooks_enabled, False
    try:
        yield
    finally:
        model.hooks_enabled = were_enabled


def _private_model(parameters: list[Tensor]) -> Any:
    """The model that computes gradients of samples by hooks; a ModelError if there is none."""
    from opacus.grad_sample import AbstractGradSampleModule

    found = [m for outer in models_with(parameters) for m in outer.modules()]
    model = next((m for m in found if isinstance(m, AbstractGradSampleModule)), None)
    if not hasattr(model, "hooks_enabled"):
        raise ModelError("its model does not compute the gradients of samples by hooks of a GradSampleModule")
    return model


def _private_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """That of Opacus around this one."""
    from opacus.optimizers import DPOptimizer

    around = (found for found in gc.get_objects() if DPOptimizer in type(found).__mro__)
    for found in around:
        if found.original_optimizer is optimizer:
            return found
    raise ModelError("its optimizer is not inside one of Opacus")


def _is_other_rank() -> bool:
    """Whether this is another rank than the first, whose sums Opacus overwrites before the update."""
    return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
