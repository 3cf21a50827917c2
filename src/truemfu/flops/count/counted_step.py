"""One step of a model's shadow under a tally: on fake tensors, or on real copies if that fails.

    model, batch ──► shadow ──► forward, loss, backward ──► CountingMode

Process state that the count changes is restored: random states, autocast, gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
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
from ..isolation.process_state import for_fake_tensors, local_attention, untouched_casts
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
        tally = self._tally(following)
        with _lock, for_fake_tensors():
            self._run(partial(fake_tensor, fake_mode), tally, fake_mode)
        return tally, following

    def run_real(self) -> CountingMode:
        """The tally of the step on real copies on the CPU."""
        tally = self._tally(None)
        self._run(real_copy, tally, contextlib.nullcontext())
        return tally

    def _tally(self, following: Following | None) -> CountingMode:
        return CountingMode(self.convention, documents=self.documents, following=following, is_on_shadow=True)

    def _run(
        self, make: Maker, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        given = self.model, self.args, self.kwargs, self.loss_fn
        try:
            with (
                shadow_step(*given, make, device=self.device, backward=self.backward) as step,
                fake_mode,
                counted(tally),
            ):
                step()
        finally:
            for parameter, grad in tally.outside_parameters.values():
                parameter.grad = grad


@contextlib.contextmanager
def shadow_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any], torch.Tensor] | None,
    make: Maker,
    *,
    device: torch.device | None,
    backward: bool = True,
) -> Iterator[Callable[[], None]]:
    """A function that runs one step of a model's shadow, inside the context.

    Modes around it do not see the step, and process state that it changes is restored. `make` makes the
    shadow's tensors, those of the arguments on `device`.
    """
    with _lock, torch.inference_mode(False), disable_modes(), preserved_random_states(), untouched_casts():
        shadow = Shadow(make)
        own = shadow.tree(model)
        shadow.device = device
        own_args, own_kwargs, own_loss_fn = shadow.tree(args), shadow.tree(kwargs), shadow.tree(loss_fn)

        def step() -> None:
            with torch.set_grad_enabled(backward):
                output = own(*own_args, **own_kwargs)
                loss = loss_of(output, own_loss_fn) if backward else None
            if loss is not None:
                loss.backward()

        with local_attention():
            yield step


_lock = threading.RLock()
