"""One step of a model's shadow under a tally: on fake tensors, or on real copies if that fails.

    model, batch ──► shadow ──► forward, loss, backward ──► CountingMode

Process state that the count changes is restored: random states, autocast, gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import TruemfuError, one_line
from ...torch_private.dispatch import FakeTensorMode, check_counts, check_fake_tensors, disable_modes
from ...torch_private.trees import tree_flatten
from ...torch_versions import warn_if_untested
from ..arguments import check_call, check_forward, check_options
from ..batch import documents_of
from ..isolation.process_state import (
    attention_in_given_dtype,
    flex_attention_anywhere,
    local_attention,
    quiet_fake_tensors,
    untouched_casts,
)
from ..isolation.random_states import preserved_random_states
from ..shadow.shadow import Maker, Shadow
from ..shadow.tensor_makers import fake_tensor, real_copy
from ..shadow.values import Following
from ..wrappers import has_values
from .calls import counted
from .counting_mode import CountingMode
from .explain import explain, is_about_fake_tensors
from .loss import loss_of

FAKE, REAL = "count on fake tensors", "count on real CPU copies"
_MAX_REAL_BYTES = 4 << 30


class CountedStep:
    """One step of a model's shadow, ready to be run on fake tensors or on real copies.

    `device` is where a generated batch would be in training, if its tensors are elsewhere.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        convention: Convention,
        backward: bool,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        device: torch.device | None = None,
    ) -> None:
        check_options(convention, backward, loss_fn)
        self.args, self.kwargs = check_call(model, batch)
        self.model, self.device = model, device
        self.convention, self.backward, self.loss_fn = convention, backward, loss_fn
        self.documents = documents_of(batch)

    def run(self) -> tuple[CountingMode, str, tuple[str, ...]]:
        """The step's tally, the method and the notes."""
        check_forward(self.model)
        warn_if_untested()
        check_counts()
        try:
            tally, following = self.run_fake()
        except TruemfuError:
            raise
        except Exception as error:
            fake_error = error
        else:
            return tally, FAKE, tuple(f"{assumed} was assumed" for assumed in following.assumptions)
        if not has_values(self.model) or self.real_bytes() > _MAX_REAL_BYTES:
            raise explain(fake_error, self.model) from fake_error
        try:
            tally = self.run_real()
        except TruemfuError:
            raise
        except Exception as error:
            cause = error if is_about_fake_tensors(fake_error) else fake_error
            raise explain(cause, self.model) from error
        return tally, REAL, (f"counting on fake tensors failed ({one_line(fake_error)})",)

    def real_bytes(self) -> int:
        """The bytes that real copies of parameters, buffers and batch would take."""
        inputs = tree_flatten((self.args, self.kwargs))[0]
        tensors = [*self.model.parameters(), *self.model.buffers(), *inputs]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def run_fake(self) -> tuple[CountingMode, Following]:
        """The tally of the step on fake tensors, and what was assumed of their values."""
        check_fake_tensors()
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        following = Following(fake_mode)
        tally = CountingMode(self.convention, documents=self.documents, following=following)
        with _lock, flex_attention_anywhere(), attention_in_given_dtype(), quiet_fake_tensors():
            self._run(partial(fake_tensor, fake_mode), tally, fake_mode)
        return tally, following

    def run_real(self) -> CountingMode:
        """The tally of the step on real copies on the CPU."""
        tally = CountingMode(self.convention, documents=self.documents)
        self._run(real_copy, tally, contextlib.nullcontext())
        return tally

    @torch.inference_mode(False)
    def _run(
        self, make: Maker, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        try:
            # A count changes process state, and modes around it must not see it.
            with _lock, disable_modes(), preserved_random_states(), untouched_casts():
                self._run_shadow(Shadow(make), tally, fake_mode)
        finally:
            for parameter, grad in tally.outside_parameters.values():
                parameter.grad = grad

    def _run_shadow(
        self, shadow: Shadow, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        model = shadow.tree(self.model)
        shadow.device = self.device
        args, kwargs, loss_fn = shadow.tree(self.args), shadow.tree(self.kwargs), shadow.tree(self.loss_fn)
        tally.is_on_shadow = True
        with local_attention(), fake_mode, counted(tally):
            with torch.set_grad_enabled(self.backward):
                output = model(*args, **kwargs)
                loss = loss_of(output, loss_fn) if self.backward else None
            if loss is not None:
                loss.backward()


_lock = threading.RLock()
