"""Three ways to clip each sample's gradient, on Opacus. They are timed; no (ε, δ) is claimed.

    DPSGDTrainer                     every sample's gradient is stored, then clipped and summed
    DPGhostClippingTrainer           norms from activations and output gradients, without the gradients;
                                     a second backward pass of the losses scaled by them
    DPFastGradientClippingTrainer    norms from each layer's per-sample gradients, freed at once;
                                     the same second pass

All add Gaussian noise, because it costs time. The batch is used as given (no Poisson sampling), and
gradients are divided by its size. The wrappers are applied directly: `PrivacyEngine` with
`use_ghost_clipping=False` silently uses ghost clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import opacus
import torch
from opacus.grad_sample import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from ...errors import one_line
from ..failures import is_out_of_memory
from .base import TrainerSettings, Unsupported
from .standard import losses_by_sample, make_optimizer

_OPACUS = str(Path(opacus.__file__).parent)


class _OpacusTrainer:
    """What the three share: the wrapped model, the optimizer around the plain one, how they fail."""

    private = True

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        name = type(self).__name__
        if settings.compile:
            raise Unsupported(f"{name} cannot be compiled: torch.compile drops the hooks of Opacus")
        self._what = f"{name} cannot train {type(model).__name__}"
        self._model = model.train()
        with _as_unsupported(self._what):
            self._wrapped, optimizer_class = self._wrap(model, settings)
            self._optimizer: Any = optimizer_class(
                make_optimizer(model, settings),
                noise_multiplier=settings.noise_multiplier,
                max_grad_norm=settings.max_grad_norm,
                expected_batch_size=1,  # set in each step
                loss_reduction="mean",
            )

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """One optimizer step; the mean loss."""
        with _as_unsupported(self._what):
            self._optimizer.zero_grad(set_to_none=True)
            losses = losses_by_sample(self._model, batch)
            self._optimizer.expected_batch_size = len(losses)
            self._backward(losses)
            self._optimizer.step()
            return losses.detach().mean()

    def _wrap(self, model: nn.Module, settings: TrainerSettings) -> tuple[Any, Callable[..., Any]]:
        raise NotImplementedError

    def _backward(self, losses: Tensor) -> None:
        raise NotImplementedError


class DPSGDTrainer(_OpacusTrainer):
    """DP-SGD as published: one gradient per sample, stored in memory."""

    def _wrap(self, model: nn.Module, settings: TrainerSettings) -> tuple[Any, Callable[..., Any]]:
        return GradSampleModule(model, loss_reduction="mean"), DPOptimizer

    def _backward(self, losses: Tensor) -> None:
        losses.mean().backward()


class _TwoPassTrainer(_OpacusTrainer):
    """Norms in a first backward pass, clipped gradients in a second one."""

    use_ghost_clipping: bool

    def _wrap(self, model: nn.Module, settings: TrainerSettings) -> tuple[Any, Callable[..., Any]]:
        wrapped = GradSampleModuleFastGradientClipping(
            model,
            loss_reduction="mean",
            max_grad_norm=settings.max_grad_norm,
            use_ghost_clipping=self.use_ghost_clipping,
        )
        return wrapped, DPOptimizerFastGradientClipping

    def _backward(self, losses: Tensor) -> None:
        DPTensorFastGradientClipping(self._wrapped, self._optimizer, losses, "mean").backward()


class DPGhostClippingTrainer(_TwoPassTrainer):
    """Norms without gradients, for the layers that have such a rule (linear, embedding)."""

    use_ghost_clipping = True


class DPFastGradientClippingTrainer(_TwoPassTrainer):
    """Norms from the gradients of one layer at a time."""

    use_ghost_clipping = False


@contextmanager
def _as_unsupported(what: str) -> Iterator[None]:
    """Turn an error raised in Opacus' code into `Unsupported`; an out-of-memory stays one."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, _DEVICE_ERRORS) or not _raised_in_opacus(error):
            raise
        raise Unsupported(f"{what}: Opacus {opacus.__version__} raised {one_line(error)}") from error


_DEVICE_ERRORS: tuple[type[Exception], ...] = tuple(
    error for error in [getattr(torch, "AcceleratorError", None)] if error is not None
)


def _raised_in_opacus(error: BaseException) -> bool:
    """Whether Opacus' code is among the callers of what failed (its hooks run inside backward)."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_OPACUS):
            return True
        trace = trace.tb_next
    return False
