"""Counting one step: `count_flops` for a model and a batch, `count_step` for any callable.

model, batch ──► shadow on fake tensors ──► forward, loss, backward under a Tally ──► FlopCount
                      │ cannot run that way
                      └─► shadow on real CPU copies, the same way
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...convention import Convention
from ...errors import (
    BatchError,
    ModelError,
    TruemfuError,
    UsageError,
    one_line,
    warn_once,
)
from ...torch_private.dispatch import FakeTensorMode, check_counts, check_fake_tensors, disable_modes
from ...torch_private.trees import tree_flatten
from ...torch_versions import warn_if_untested
from ..attention.windows import Windows
from ..batch import documents_of
from ..flop_count import FlopCount
from ..interruption import OtherCountRuns, TimeIsUp, supervision, was_interrupted
from ..isolation.process_state import flex_attention_anywhere, quiet_fake_tensors, uncompiled, untouched_casts
from ..isolation.random_states import own_random_draws
from ..isolation.shared_state import untouched_globals
from ..shadow.shadow import Maker, Shadow, has_values, unwrap
from ..shadow.tensor_makers import FakeLikeness, real_copy
from ..shadow.values import Following
from .calls import follow_modules, following_calls, following_modules
from .explain import explain, is_about_fake_tensors
from .kernel_launches import watched_launches
from .loss import loss_of
from .self_check import check_known_model
from .tally import Tally

FAKE, REAL, EXECUTED = "count on fake tensors", "count on real CPU copies", "count of an executed step"
_DEFAULT = Convention()
_MAX_REAL_BYTES = 4 << 30
_PACE_EDGE = 512


def count_flops(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    convention: Convention = _DEFAULT,
    backward: bool = True,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> FlopCount:
    """FLOPs of one training step of `model` on `batch`, exact, on no device and without touching the model.

    `batch` is a mapping of keyword arguments or a tuple of positional ones, as the model takes it; its
    tensors may be real, meta or fake. The loss is `loss_fn(output)` where given, else the output's `.loss`,
    else the sum of its floating-point tensors that need a gradient. `backward=False` counts the forward
    pass alone, without gradients.
    """
    tally, method, notes = run_counted(
        model, batch, convention=convention, backward=backward, loss_fn=loss_fn
    )
    args, kwargs = check_call(model, batch)
    outside = Windows(unwrap(model), convention).notes_for_batch(kwargs or args)
    count = tally.result(method=method, notes=(*notes, *outside))
    warn_uncounted(count)
    return count


def count_step(
    fn: Callable[..., Any], *args: Any, convention: Convention = _DEFAULT, **kwargs: Any
) -> FlopCount:
    """FLOPs that `fn(*args, **kwargs)` executes: a whole training step, a private trainer's, anything.

    The callable runs for real, once, with all its effects; compiled code inside runs eagerly for this call
    and stays compiled. What runs in a backward pass counts as backward, what a checkpoint runs again as
    recompute.
    """
    if not callable(fn):
        raise UsageError(f"count_step takes a callable and its arguments; got {type(fn).__name__}")
    check_counts()
    check_known_model()
    tally = Tally(convention)
    single_thread = torch.autograd.set_multithreading_enabled(False)  # autograd numbers its nodes by thread
    with (
        single_thread,
        uncompiled(),
        following_modules(tally),
        watched_launches(tally),
        following_calls(tally),
        tally,
    ):
        fn(*args, **kwargs)
    count = tally.result(method=EXECUTED)
    warn_uncounted(count)
    return count


def profile_model_flops(model: nn.Module, batch_example: Mapping[str, Any] | tuple[Any, ...]) -> float | None:
    """Forward and backward FLOPs for a real batch; None, and one warning that says why, if there are none."""
    try:
        return float(count_flops(model, batch_example).model_flops)
    except Exception as error:  # a training run must not stop for want of a number
        warn_once(f"no FLOPs for this model: {error}")
        return None


def warn_uncounted(count: FlopCount) -> None:
    """One warning that names the operators nobody has a formula for."""
    text = uncounted_notice(count)
    if text is not None:
        warn_once(text)


def uncounted_notice(count: FlopCount) -> str | None:
    """What there is to say about operators without a formula; None where all have one."""
    if not count.uncounted:
        return None
    names = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(count.uncounted.items()))
    return (
        f"operators that may do matrix work and have no formula are not counted: {names}; "
        "register one with truemfu.register_formula, or a module's work with truemfu.register_module"
    )


def run_counted(
    model: nn.Module,
    batch: Mapping[str, Any] | tuple[Any, ...],
    *,
    convention: Convention,
    backward: bool,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    place: torch.device | None = None,
) -> tuple[Tally, str, tuple[str, ...]]:
    """Run one step of the model's shadow under a tally: the tally, how it was run, and what to know of it.

    `place` is the device a made-up batch stands for, where its own tensors are elsewhere.
    """
    check_options(convention, backward, loss_fn)
    args, kwargs = check_call(model, batch)
    _check_forward(model)
    warn_if_untested()
    check_counts()
    check_known_model()
    step = _Step(model, args, kwargs, convention, backward, loss_fn, documents_of(batch), place)
    try:
        tally, following = step.run_fake()
    except TruemfuError:
        raise
    except Exception as error:
        if was_interrupted():
            raise
        fake_error = error
    else:
        notes = tuple(f"{assumed} was assumed" for assumed in following.assumptions)
        return tally, FAKE, notes
    if not has_values(model) or step.real_bytes() > _MAX_REAL_BYTES:
        raise explain(fake_error, model) from fake_error
    if step.would_take_too_long():
        raise TimeIsUp
    try:
        tally = step.run_real()
    except TruemfuError:
        raise
    except Exception as error:
        if was_interrupted():
            raise
        told = error if is_about_fake_tensors(fake_error) else fake_error
        raise explain(told, model) from error
    return tally, REAL, (f"fake tensors would not do ({one_line(fake_error)})",)


class _Step:
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
        place: torch.device | None,
    ) -> None:
        self.place = place
        self.model, self.args, self.kwargs = model, args, kwargs
        self.convention, self.backward, self.loss_fn = convention, backward, loss_fn
        self.documents = documents

    def real_bytes(self) -> int:
        """What real copies of parameters, buffers and batch would take."""
        inputs = tree_flatten((self.args, self.kwargs))[0]
        tensors = [*self.model.parameters(), *self.model.buffers(), *inputs]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def would_take_too_long(self) -> bool:
        """Whether real copies, by the estimate and this processor's pace, would run past the time limit."""
        supervised = supervision()
        if supervised is None or math.isinf(supervised.left_s):
            return False
        from ..structure.estimate import Estimator  # it is built on this module

        try:
            estimated = Estimator(self.model, convention=self.convention)(self.kwargs or self.args)
        except TruemfuError:  # the limit is checked at each operator as well
            return False
        return estimated.hardware_flops / cpu_flops_per_s() > supervised.left_s

    def run_fake(self) -> tuple[Tally, Following]:
        check_fake_tensors()
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        following = Following(fake_mode)
        tally = Tally(self.convention, documents=self.documents, following=following)
        with flex_attention_anywhere(), quiet_fake_tensors():
            self._run(FakeLikeness(fake_mode, on_read=tally.note_own_values), tally, fake_mode)
        return tally, following

    def run_real(self) -> Tally:
        generator = torch.Generator().manual_seed(torch.initial_seed())
        tally = Tally(self.convention, documents=self.documents, generator=generator)
        tally.note_own_values()
        self._run(real_copy, tally, contextlib.nullcontext())
        return tally

    @torch.inference_mode(False)
    def _run(self, make: Maker, tally: Tally, fake_mode: contextlib.AbstractContextManager[Any]) -> None:
        with _one_at_a_time():
            self._run_in_turn(make, tally, fake_mode)

    def _run_in_turn(
        self, make: Maker, tally: Tally, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        try:
            with disable_modes():  # a mode around the count must not see it
                self._run_alone(make, tally, fake_mode)
        finally:
            for parameter, grad in tally.strangers.values():
                parameter.grad = grad

    def _run_alone(
        self, make: Maker, tally: Tally, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        shadow = Shadow(make)
        model = shadow.model(self.model)
        shadow.place = self.place or shadow.place
        if isinstance(make, FakeLikeness):
            make.on_read = None  # from here on it makes what the model is given, not what it holds
        args, kwargs = shadow.tree(self.args), shadow.tree(self.kwargs)
        loss_fn = shadow.tree(self.loss_fn)
        follow_modules(model, tally)
        tally.sets_gradients_back = True
        untouched = untouched_globals(self.model, self.loss_fn)
        with untouched, own_random_draws(self.model) as drawn, untouched_casts(), uncompiled():
            try:
                with fake_mode, watched_launches(tally), following_calls(tally, stand_in=True), tally:
                    self._forward_and_backward(model, args, kwargs, loss_fn, tally)
            finally:
                if tally.has_drawn:
                    drawn.add("torch")

    def _forward_and_backward(
        self, model: nn.Module, args: Any, kwargs: Any, loss_fn: Any, tally: Tally
    ) -> None:
        with torch.set_grad_enabled(self.backward):
            output = model(*args, **kwargs)
            if not self.backward:
                return
            loss = loss_of(output, loss_fn)
        with torch.autograd.set_multithreading_enabled(False), tally.final_backward():
            loss.backward()


_lock = threading.RLock()


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """What a count sets and restores belongs to the process. A supervised count does not wait for another."""
    if not _lock.acquire(blocking=supervision() is None):
        raise OtherCountRuns
    try:
        yield
    finally:
        _lock.release()


@functools.cache
def cpu_flops_per_s() -> float:
    """The pace at which this processor multiplies small matrices: what a model's layers reach at best."""
    matrix = torch.ones(_PACE_EDGE, _PACE_EDGE, device="cpu", dtype=torch.float32)
    seconds = []
    with disable_modes(), torch.no_grad():
        for _ in range(4):  # the first one starts threads
            began_s = time.perf_counter()
            torch.mm(matrix, matrix)
            seconds.append(time.perf_counter() - began_s)
    return 2 * _PACE_EDGE**3 / min(seconds)


def check_options(convention: Any, backward: Any, loss_fn: Any) -> None:
    """The options of a count, or a clear error."""
    if not isinstance(convention, Convention):
        raise UsageError(
            f"convention must be a Convention, such as Convention(attention='causal'); got {convention!r}"
        )
    if not isinstance(backward, bool):
        raise UsageError(f"backward must be True or False; got {backward!r}")
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of the model's output; got {loss_fn!r}")


def _check_forward(model: nn.Module) -> None:
    """A container of modules can be attached, but not run."""
    called = unwrap(model)
    if getattr(called.forward, "__func__", None) is nn.Module.forward:
        raise ModelError(
            f"{type(called).__name__} has no forward method, so it cannot be run for a count: pass the "
            "module that the training calls, or define forward"
        )


def check_call(model: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The batch as positional and keyword arguments, or a clear error."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module to count; got the class itself: pass an instance, {model.__name__}()"
        )
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module to count; got {type(model).__name__}")
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(
            f"{name} is TorchScript, which cannot be counted: pass the nn.Module it was made from"
        )
    if "_parameters" not in vars(model):
        raise ModelError(f"{name} is not initialised: its __init__ must call super().__init__()")
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules()):
        raise ModelError(
            f"{name} is sharded by FullyShardedDataParallel, which keeps flat pieces of parameters: count "
            "the model before wrapping it, or shard it with fully_shard"
        )
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ModelError(f"{name} has uninitialised parameters: run one batch through its lazy layers first")
    if isinstance(batch, Mapping):
        unknown = [key for key in batch if not isinstance(key, str)]
        if unknown:
            raise BatchError(f"a batch maps argument names to tensors; got the key {unknown[0]!r}")
        args: tuple[Any, ...] = ()
        kwargs = dict(batch)
    elif isinstance(batch, (tuple, list)):
        args, kwargs = tuple(batch), {}
    elif isinstance(batch, torch.Tensor):
        args, kwargs = (batch,), {}
    else:
        raise BatchError(
            "a batch is a mapping of keyword arguments or a tuple of positional ones; "
            f"got {type(batch).__name__}"
        )
    return args, kwargs
