"""One step of a model's shadow under a tally: on fake tensors, or on real copies if that fails.

    model, batch ──► shadow ──► forward, loss, backward ──► CountingMode

Process state that the count changes is restored: random states, global values, autocast, gradients.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import TruemfuError, one_line
from ...torch_private.dispatch import FakeTensorMode, check_fake_tensors, disable_modes, forget_fake_tensors
from ...torch_private.trees import tree_flatten
from ..interruption import OtherCountRuns, TimeIsUp, supervision, was_interrupted
from ..isolation.process_state import (
    flex_attention_anywhere,
    local_attention,
    quiet_fake_tensors,
    uncompiled,
    untouched_casts,
)
from ..isolation.random_states import own_random_draws
from ..isolation.shared_state import untouched_globals
from ..shadow.shadow import Maker, Shadow
from ..shadow.tensor_makers import FakeTensorMaker, real_copy
from ..shadow.values import Following
from ..structure.estimate import Estimator
from ..wrappers import has_values
from .calls import follow_modules, following_calls
from .counting_mode import CountingMode
from .explain import explain, is_about_fake_tensors
from .kernel_launches import watched_launches
from .loss import loss_of

FAKE, REAL = "count on fake tensors", "count on real CPU copies"
_MAX_REAL_BYTES = 4 << 30
_BENCHMARK_SIZE = 512


class CountedStep:
    """One step of a model's shadow, ready to be run on fake tensors or on real copies."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        convention: Convention,
        backward: bool,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        documents: list[list[int]] | None,
        device: torch.device | None,
    ) -> None:
        self.device = device
        self.model, self.args, self.kwargs = model, args, kwargs
        self.convention, self.backward, self.loss_fn = convention, backward, loss_fn
        self.documents = documents

    def run(self) -> tuple[CountingMode, str, tuple[str, ...]]:
        """The step's tally, the method and the notes."""
        try:
            tally, following = self.run_fake()
        except TruemfuError:
            raise
        except Exception as error:
            if was_interrupted():
                raise
            fake_error = error
        else:
            return tally, FAKE, tuple(f"{assumed} was assumed" for assumed in following.assumptions)
        if not has_values(self.model) or self.real_bytes() > _MAX_REAL_BYTES:
            raise explain(fake_error, self.model) from fake_error
        if self.would_take_too_long():
            raise TimeIsUp
        try:
            tally = self.run_real()
        except TruemfuError:
            raise
        except Exception as error:
            if was_interrupted():
                raise
            cause = error if is_about_fake_tensors(fake_error) else fake_error
            raise explain(cause, self.model) from error
        return tally, REAL, (f"counting on fake tensors failed ({one_line(fake_error)})",)

    def real_bytes(self) -> int:
        """The bytes that real copies of parameters, buffers and batch would take."""
        inputs = tree_flatten((self.args, self.kwargs))[0]
        tensors = [*self.model.parameters(), *self.model.buffers(), *inputs]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def would_take_too_long(self) -> bool:
        """Whether a run on real copies is estimated to exceed the time limit on this processor."""
        supervised = supervision()
        if supervised is None or math.isinf(supervised.left_s):
            return False
        try:
            estimated = Estimator(self.model, convention=self.convention)(self.kwargs or self.args)
        except TruemfuError:  # the limit is checked at each operator as well
            return False
        return estimated.hardware_flops / cpu_flops_per_s() > supervised.left_s

    def run_fake(self) -> tuple[CountingMode, Following]:
        check_fake_tensors()
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        following = Following(fake_mode)
        tally = CountingMode(self.convention, documents=self.documents, following=following)
        try:
            with flex_attention_anywhere(), quiet_fake_tensors():
                self._run(FakeTensorMaker(fake_mode, on_read=tally.mark_model_values_read), tally, fake_mode)
        finally:
            forget_fake_tensors(fake_mode)
        return tally, following

    def run_real(self) -> CountingMode:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        tally = CountingMode(self.convention, documents=self.documents, generator=generator)
        tally.mark_model_values_read()
        self._run(real_copy, tally, contextlib.nullcontext())
        return tally

    @torch.inference_mode(False)
    def _run(
        self, make: Maker, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        with _one_at_a_time():
            self._run_without_modes(make, tally, fake_mode)

    def _run_without_modes(
        self, make: Maker, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        try:
            with disable_modes():  # a mode around the count must not see it
                self._run_alone(make, tally, fake_mode)
        finally:
            for parameter, grad in tally.outside_parameters.values():
                parameter.grad = grad

    def _run_alone(
        self, make: Maker, tally: CountingMode, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        shadow = Shadow(make)
        model = shadow.model(self.model)
        shadow.device = self.device or shadow.device
        if isinstance(make, FakeTensorMaker):
            make.on_read = None  # from here on it converts the model's inputs, not its own tensors
        args, kwargs = shadow.tree(self.args), shadow.tree(self.kwargs)
        loss_fn = shadow.tree(self.loss_fn)
        follow_modules(model, tally)
        tally.is_on_shadow = True
        untouched = untouched_globals(self.model, self.loss_fn)
        casts, attention = untouched_casts(), local_attention()
        with untouched, own_random_draws(self.model) as drawn, casts, attention, uncompiled():
            try:
                with fake_mode, watched_launches(tally), following_calls(tally, on_shadow=True), tally:
                    self._forward_and_backward(model, args, kwargs, loss_fn, tally)
            finally:
                if tally.has_drawn:
                    drawn.add("torch")

    def _forward_and_backward(
        self, model: nn.Module, args: Any, kwargs: Any, loss_fn: Any, tally: CountingMode
    ) -> None:
        with torch.set_grad_enabled(self.backward):
            output = model(*args, **kwargs)
            if not self.backward:
                return
            loss = loss_of(output, loss_fn)
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()


_lock = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Let one count run at a time, since it changes process state; a supervised one does not wait."""
    if not _lock.acquire(blocking=supervision() is None):
        raise OtherCountRuns
    try:
        yield
    finally:
        _lock.release()


@functools.cache
def cpu_flops_per_s() -> float:
    """The rate at which this processor multiplies small matrices: an upper bound for a model's layers."""
    matrix = torch.ones(_BENCHMARK_SIZE, _BENCHMARK_SIZE, device="cpu", dtype=torch.float32)
    seconds = []
    with disable_modes(), torch.no_grad():
        for _ in range(4):  # the first one starts threads
            began_s = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - began_s)
    return 2 * _BENCHMARK_SIZE**3 / min(seconds)
