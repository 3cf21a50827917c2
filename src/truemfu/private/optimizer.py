"""PrivateOptimizer: private steps in a loop of one's own.

    backward(losses_of, batch) ─► forward, one backward pass, clip, add to the sum; as often as needed
    step(), or optimizer.step() ─► the sum of all ranks, one draw of noise, divided ─► `.grad` ─► the update

Noise is added by a hook of the optimizer itself, so no step is without it, whoever calls it. Between
`backward` and that hook no parameter has a `.grad`: one that is there came from elsewhere, is not private, and
is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, UsageError
from .batches import samples_of
from .bookkeeping import BookKeeping, Losses, zeros_like
from .noise import add_noise, secure_generator
from .parallel import Ranks


class PrivateOptimizer:
    """Clips the gradient of each sample to `max_grad_norm`, and adds noise of `noise_multiplier` times it.

        private = PrivateOptimizer(model, optimizer, max_grad_norm=1.0, noise_multiplier=1.0)
        for batch in loader:
            loss = private.backward(losses_of, batch)
            private.step()

    `losses_of(model, batch)` returns the loss of each sample, shape (samples,). The sum is divided by
    `expected_batch_size`, of all ranks and micro-batches together, as Poisson sampling needs it; by the
    number of samples that were seen if it is None. (ε, δ) is the accountant's, for example that of Opacus.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: int | None = None,
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        if max_grad_norm <= 0 or noise_multiplier < 0:
            raise UsageError(
                "expected max_grad_norm above 0 and noise_multiplier of at least 0; got "
                f"{max_grad_norm} and {noise_multiplier}"
            )
        if secure_mode and generator is not None:
            raise UsageError("secure_mode has a generator of its own: leave generator out")
        self.model, self.optimizer = model, optimizer
        self._ranks = Ranks(model)
        self._book = BookKeeping(self._ranks.module, max_grad_norm)
        _check_optimizer(optimizer, self._book.parameters)
        self._std = noise_multiplier * max_grad_norm
        self._expected_batch_size = expected_batch_size
        self._generator = secure_generator() if secure_mode else generator
        self._is_secure = secure_mode
        self._sums: dict[str, Tensor] | None = None
        self._samples = 0
        self._hook = optimizer.register_step_pre_hook(self._before_step)

    def backward(self, losses_of: Losses, batch: Any) -> Tensor:
        """Add the clipped gradients of this batch; the mean loss, without synchronising.

        An empty batch, which Poisson sampling may give, adds nothing and has a NaN loss.
        """
        if self._sums is None:
            self.zero_grad()
            self._sums = {}
        samples = samples_of(batch)
        if samples == 0:
            return torch.full((), torch.nan)
        self._samples += samples
        found = self._book.clipped_sum(losses_of, self.model, batch)
        for name, value in found.sums.items():
            self._sums[name] = self._sums[name].add_(value) if name in self._sums else value
        return found.losses.mean()

    def step(self) -> None:
        """Add the noise and let the optimizer do its step."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Forget gradients, and what was summed since the last step."""
        self._sums, self._samples = None, 0
        for parameter in self._book.parameters.values():
            parameter.grad = None

    def remove(self) -> None:
        """Give the optimizer back: its steps are no longer private."""
        self._hook.remove()

    def _before_step(self, *_: Any) -> None:
        if self._sums is None:
            raise UsageError("a private step needs backward(losses_of, batch) of PrivateOptimizer before it")
        for name, parameter in self._book.parameters.items():
            if parameter.grad is not None:
                raise ModelError(
                    f"the parameter {name} has a gradient that is not private: nothing else may run backward "
                    "between backward() and the step"
                )
        samples = self._expected_batch_size or self._ranks.total(self._samples)
        for name, parameter in self._book.parameters.items():
            total = self._sums.pop(name, None)
            if total is None:  # every batch was empty
                total = zeros_like(parameter)
            if self._ranks.draws_noise:
                add_noise(total, self._std, self._generator, secure=self._is_secure)
            parameter.grad = self._ranks.summed(total, parameter).div_(max(samples, 1))
        self._sums, self._samples = None, 0


def _check_optimizer(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
    """An optimizer with other parameters would leave the model as it is, and look as if it trained."""
    names = {id(parameter): name for name, parameter in trained.items()}
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    missing = [name for key, name in names.items() if key not in held]
    if missing:
        raise UsageError(
            f"the optimizer does not have the trained parameter {missing[0]} of the model: make it from the "
            "model's parameters as they are now"
        )
    strange = held.keys() - names.keys()
    if strange:
        raise UsageError(
            f"the optimizer has a parameter of shape {tuple(held[strange.pop()].shape)} that the model does "
            "not have, or does not train"
        )
