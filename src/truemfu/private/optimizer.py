"""PrivateOptimizer: private steps in a loop of one's own.

    backward(losses_of, batch) ─► forward, one backward pass, clip, add to the sum; as often as needed
    step(), or optimizer.step() ─► the sum of all ranks, one draw of noise, divided ─► `.grad` ─► the update

Noise is added by a hook of the optimizer itself, so no step is without it, whoever calls it. Between
`backward` and that hook no parameter of the optimizer has a `.grad`: one that is there is not private, and is
an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..errors import ModelError, UsageError, brief, warn_once
from .batches import samples_of
from .bookkeeping import BookKeeping, Losses, zeros_like
from .check import gradient_error
from .gradients import at_least_fp32
from .noise import noise_like, secure_generator
from .parallel import Ranks


class Monitor(Protocol):
    """What the check needs of a `TrainingMonitor`."""

    def pause(self, kind: str = ...) -> AbstractContextManager[None]:
        """Exclude what runs inside from the step."""

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Log these with the next step."""


class PrivateOptimizer:
    """Clips the gradient of each sample to `max_grad_norm`, and adds noise of `noise_multiplier` times it.

        private = PrivateOptimizer(model, optimizer, max_grad_norm=1.0, noise_multiplier=1.0)
        for batch in loader:
            loss = private.backward(losses_of, batch)
            private.step()

    `losses_of(model, batch)` returns the loss of each sample, shape (samples,). The sum is divided by
    `expected_batch_size`, of all ranks and micro-batches together, as Poisson sampling needs it; by the
    number of samples that were seen if it is None. (ε, δ) is the accountant's, for example that of Opacus.

    Every `check_every` steps, beginning with the first, the clipped sum of `check_samples` samples of the
    batch is compared with a loop over them. A relative error above `check_limit` (the root of the precision:
    3.5e-4 in fp32, 0.09 in bf16) raises, or warns with `when_wrong="warn"`; `monitor` logs it as
    `privacy/gradient_error`.
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
        check_every: int | None = 500,
        check_samples: int = 3,
        check_limit: float | None = None,
        when_wrong: str = "raise",
        monitor: Monitor | None = None,
    ) -> None:
        if not (0 < max_grad_norm < math.inf and 0 <= noise_multiplier < math.inf):
            raise UsageError(
                "expected max_grad_norm above 0 and noise_multiplier of at least 0; got "
                f"{max_grad_norm} and {noise_multiplier}"
            )
        counts = {"expected_batch_size": expected_batch_size, "check_every": check_every}
        for what, count in {**counts, "check_samples": check_samples}.items():
            if count is not None and count < 1:
                raise UsageError(f"{what} must be at least 1; got {count}")
        if check_limit is not None and not check_limit >= 0:
            raise UsageError(f"check_limit must be at least 0; got {check_limit}")
        inner = getattr(optimizer, "optimizer", optimizer)  # that of accelerate has one inside
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(f"expected an optimizer of torch; got {type(inner).__name__}")
        if secure_mode and generator is not None:
            raise UsageError("secure_mode has a generator of its own: leave generator out")
        if when_wrong not in ("raise", "warn"):
            raise UsageError(f'when_wrong must be "raise" or "warn"; got {brief(when_wrong)}')
        self.model, self.optimizer = model, optimizer
        self.gradient_error: float | None = None
        """Of the last check."""
        self._ranks = Ranks(model)
        self._book = BookKeeping(self._ranks.module, max_grad_norm)
        _check_optimizer(optimizer, self._book.parameters)
        self._max_grad_norm = max_grad_norm
        self._check_every, self._check_samples, self._check_limit = check_every, check_samples, check_limit
        self._raises, self._monitor = when_wrong == "raise", monitor
        self._steps, self._next_check = 0, 0
        self._std = noise_multiplier * max_grad_norm
        self._expected_batch_size = expected_batch_size
        self._generator = secure_generator() if secure_mode else generator
        self._is_secure = secure_mode
        self._sums: dict[str, Tensor] | None = None
        self._samples = 0
        self._hook = inner.register_step_pre_hook(self._before_step)

    def backward(self, losses_of: Losses, batch: Any) -> Tensor:
        """Add the clipped gradients of this batch; the mean loss, without synchronising.

        An empty batch, which Poisson sampling may give, adds nothing and has a NaN loss.
        """
        samples = samples_of(batch)
        if self._sums is None:
            self.zero_grad()
            self._sums = {}
        if samples == 0:
            return torch.full((), torch.nan)
        if self._check_every and self._steps >= self._next_check:
            self._check(losses_of, batch)
            self._next_check = self._steps - self._steps % self._check_every + self._check_every
        with self._ranks.apart():
            found = self._book.clipped_sum(losses_of, self.model, batch)
        self._samples += samples
        for name, value in found.sums.items():
            if name in self._sums:  # a bf16 sum would stop growing
                value = self._sums[name].to(at_least_fp32(value)).add_(value)
            self._sums[name] = value
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

    def __getstate__(self) -> NoReturn:
        raise UsageError(
            "PrivateOptimizer cannot be copied or pickled: torch drops the hook that adds the noise; save "
            "optimizer.state_dict() instead"
        )

    def _check(self, losses_of: Losses, batch: Any) -> None:
        epsilon = 0.0

        def clipped(among: Sequence[int]) -> dict[str, Tensor]:
            nonlocal epsilon
            found = self._book.clipped_sum(losses_of, module, batch, among)
            epsilon = found.epsilon
            return found.sums

        module = self._ranks.module
        with nullcontext() if self._monitor is None else self._monitor.pause("other"):
            error = gradient_error(
                module,
                losses_of,
                batch,
                clipped,
                max_grad_norm=self._max_grad_norm,
                samples=self._check_samples,
            )
        self.gradient_error = error
        if self._monitor is not None:
            self._monitor.add_metrics({"privacy/gradient_error": error})
        limit = epsilon**0.5 if self._check_limit is None else self._check_limit
        if error > limit:
            message = (
                f"the private gradient of step {self._steps + 1} is wrong: it differs from a loop over "
                f"{self._check_samples} samples by {error:.1e} (limit {limit:.1e}); a layer may mix samples, "
                "see them in another order, or be random without a Dropout module"
            )
            if self._raises:
                raise ModelError(message)
            warn_once(message)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(value is not None for value in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise UsageError("a private step takes no closure: its gradient would not be private")
        if self._sums is None:
            raise UsageError("a private step needs backward(losses_of, batch) of PrivateOptimizer before it")
        names = {id(parameter): name for name, parameter in self._book.parameters.items()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                which = names.get(id(parameter), f"of shape {tuple(parameter.shape)}")
                raise ModelError(
                    f"the parameter {which} has a gradient that is not private: nothing else may run "
                    "backward between backward() and the step, and what is not trained must have no gradient"
                )
        samples = self._expected_batch_size or self._ranks.total(self._samples)
        for name, parameter in self._book.parameters.items():
            total = self._sums.pop(name, None)
            if total is None:  # every batch was empty
                total = zeros_like(parameter)
            dtype = parameter.dtype if self._ranks.is_alone else at_least_fp32(total)
            mean = self._noisy(total, 1 / max(samples, 1), dtype)
            parameter.grad = self._ranks.summed(mean, parameter).to(parameter.dtype)
        self._sums, self._samples = None, 0
        self._steps += 1

    def _noisy(self, total: Tensor, share: float, dtype: torch.dtype) -> Tensor:
        """This rank's share of the mean, rounded to this dtype once, after the noise: rounded noise may tell
        the sum below it.
        """
        exact, mean = at_least_fp32(total), torch.empty_like(total, dtype=dtype)
        if self._std == 0 or not self._ranks.draws_noise:
            return torch.mul(total.to(exact), share, out=mean)
        noise = noise_like(total, exact, self._std * share, self._generator, secure=self._is_secure)
        return torch.add(noise, total, alpha=share, out=mean)


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
