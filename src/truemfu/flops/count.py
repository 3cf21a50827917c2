"""Counting one step: `count_flops` for a model and a batch, `count_step` for any callable.

model, batch ──► shadow on fake tensors ──► forward, loss, backward under a Tally ──► FlopCount
                      │ cannot run that way
                      └─► shadow on real CPU copies, the same way
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..convention import Convention
from ..errors import BatchError, ModelError, TruemfuError, UsageError, warn_once
from .batch import documents_of, is_readable
from .flop_count import FlopCount
from .shadow import Shadow, unwrap
from .tally import CHECKPOINTS_SHOW, Tally
from .values import Following, attach, value_of

FAKE, REAL, EXECUTED = "count on fake tensors", "count on real CPU copies", "count of an executed step"
_DEFAULT = Convention()
_MAX_REAL_BYTES = 4 << 30
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


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
    count = tally.result(method=method, notes=notes)
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
    tally = Tally(convention)
    single_thread = torch.autograd.set_multithreading_enabled(False)  # autograd numbers its nodes by thread
    final = contextlib.nullcontext() if CHECKPOINTS_SHOW else tally.final_backward()
    with single_thread, final, _uncompiled(), _following_modules(tally), _Calls(tally), tally:
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
    if count.uncounted:
        names = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(count.uncounted.items()))
        warn_once(
            f"operators that may do matrix work and have no formula are not counted: {names}; "
            "register one with truemfu.register_formula"
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
    step = _Step(model, args, kwargs, convention, backward, loss_fn, documents_of(batch), place)
    try:
        tally, following = step.run_fake()
    except TruemfuError:
        raise
    except Exception as error:
        fake_error = error
    else:
        notes = tuple(f"{assumed} was assumed" for assumed in following.assumptions)
        return tally, FAKE, notes
    if not step.has_values() or step.real_bytes() > _MAX_REAL_BYTES:
        raise _explain(fake_error, model) from fake_error
    try:
        tally = step.run_real()
    except TruemfuError:
        raise
    except Exception as error:
        told = error if _is_about_fake_tensors(fake_error) else fake_error
        raise _explain(told, model) from error
    return tally, REAL, (f"fake tensors would not do ({_one_line(fake_error)})",)


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

    def has_values(self) -> bool:
        """Whether the model could be copied: nothing of it is on the meta device, fake or sharded."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return all(is_readable(t) and not hasattr(t, "device_mesh") for t in tensors)

    def real_bytes(self) -> int:
        """What real copies of parameters, buffers and batch would take."""
        inputs = tree_flatten((self.args, self.kwargs))[0]
        tensors = [*self.model.parameters(), *self.model.buffers(), *inputs]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))

    def run_fake(self) -> tuple[Tally, Following]:
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        following = Following(fake_mode)
        tally = Tally(self.convention, documents=self.documents, following=following)
        with _flex_attention_anywhere(), _quiet_fake_tensors():
            self._run(Shadow(fake_mode), tally, fake_mode)
        return tally, following

    def run_real(self) -> Tally:
        tally = Tally(self.convention, documents=self.documents)
        self._run(Shadow(None), tally, contextlib.nullcontext())
        return tally

    @torch.inference_mode(False)
    def _run(self, shadow: Shadow, tally: Tally, fake_mode: contextlib.AbstractContextManager[Any]) -> None:
        try:
            with _disable_current_modes():  # a mode around the count must not see it
                self._run_alone(shadow, tally, fake_mode)
        finally:
            for parameter, grad in tally.strangers.values():
                parameter.grad = grad

    def _run_alone(
        self, shadow: Shadow, tally: Tally, fake_mode: contextlib.AbstractContextManager[Any]
    ) -> None:
        model = shadow.model(self.model)
        shadow.place = self.place or shadow.place
        args, kwargs = shadow.tree(self.args), shadow.tree(self.kwargs)
        loss_fn = shadow.tree(self.loss_fn)
        _follow_modules(model, tally)
        with _untouched_state(), fake_mode, _Calls(tally, stand_in=True), tally:
            with torch.set_grad_enabled(self.backward):
                output = model(*args, **kwargs)
                if not self.backward:
                    return
                loss = _loss(output, loss_fn)
            with torch.autograd.set_multithreading_enabled(False), tally.final_backward():
                loss.backward()


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


def _loss(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
    if loss_fn is not None:
        try:
            loss = loss_fn(output)
        except Exception as error:
            raise ModelError(
                f"loss_fn raised {_one_line(error)} (it is called with the model's output)"
            ) from error
        if not isinstance(loss, torch.Tensor):
            raise ModelError(f"loss_fn must return a tensor; it returned {type(loss).__name__}")
    else:
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        loss = own if isinstance(own, torch.Tensor) else _sum_of_outputs(output)
    if not loss.requires_grad:
        raise ModelError(
            "the loss needs no gradient: no parameter that requires one reaches it "
            "(count with backward=False, or unfreeze something)"
        )
    if loss.is_complex():
        raise ModelError(f"the loss must be a real number; it is {loss.dtype}")
    return loss if loss.dim() == 0 else loss.sum()


def _sum_of_outputs(output: Any) -> torch.Tensor:
    kind = type(output).__name__
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    elif not isinstance(output, (torch.Tensor, tuple, list, dict)) and hasattr(output, "__dict__"):
        output = list(vars(output).values())
    tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor)]
    if not tensors:
        raise ModelError(
            f"the model returned {kind} without a tensor in it: a training step needs an "
            "output to differentiate (or pass loss_fn)"
        )
    needed = [t for t in tensors if t.requires_grad and (t.is_floating_point() or t.is_complex())]
    if not needed:
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        raise ModelError(
            f"no output of the model ({dtypes}) needs a gradient: its parameters are frozen, it returns no "
            "floating-point tensor, or it runs without gradients (count with backward=False)"
        )
    total = needed[0].sum()
    for tensor in needed[1:]:
        total = total + tensor.sum()
    return total.real if total.is_complex() else total


def _is_about_fake_tensors(error: Exception) -> bool:
    """Whether an error comes from running without data, and says nothing to the user."""
    home = type(error).__module__
    text = str(error).lower()
    return (
        home.startswith(("torch._subclasses", "torch.fx.experimental"))
        or "fake" in text
        or "shape_env" in text
    )


def _one_line(error: Exception) -> str:
    """An error's text on one line, not too long, with its kind where that says more than the text."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 300 else text[:297] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _explain(error: Exception, model: nn.Module) -> TruemfuError:
    """One line for an error from inside the model."""
    name, text = type(unwrap(model)).__name__, _one_line(error)
    if isinstance(error, TypeError) and ("argument" in text or "forward()" in text):
        return BatchError(f"the batch does not fit {name}, which takes {_arguments(model)}: {text}")
    names = _arguments(model).split(", ")
    about_batch = _came_from_torch(error) or any(re.search(rf"\b{re.escape(n)}\b", text) for n in names)
    if about_batch and not isinstance(error, NotImplementedError):
        return BatchError(f"{name} cannot run on this batch: {text}")
    return ModelError(f"{name} cannot be run for a count: {text}")


def _arguments(model: nn.Module) -> str:
    """The names of the arguments a model takes."""
    names = [p.name for p in inspect.signature(unwrap(model).forward).parameters.values() if p.kind < 4]
    return ", ".join(names[:12]) + (", …" if len(names) > 12 else "")


def _came_from_torch(error: Exception) -> bool:
    """Whether torch refused an operation, rather than the model's own code: shapes or dtypes do not fit."""
    trace = error.__traceback__
    home = ""
    while trace is not None:
        home = trace.tb_frame.f_globals.get("__name__", "")
        trace = trace.tb_next
    return home.partition(".")[0] == "torch" or home.startswith("truemfu.")


def _follow_modules(model: nn.Module, tally: Tally) -> None:
    """Tell the tally which module runs; the model is a shadow, so its hooks are ours to set."""
    for path, module in model.named_modules():
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int):
            tally.pairs.windows[path] = window

        def enter(module: nn.Module, args: Any, path: str = path) -> None:
            tally.enter_module(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            tally.leave_module()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)


@contextlib.contextmanager
def _following_modules(tally: Tally) -> Iterator[None]:
    """The same for modules that are not ours: hooks on all modules of the process, while it lasts.

    A module is named by the attribute path from the outermost module that was called.
    """
    roots: list[nn.Module] = []
    names: dict[int, str] = {}

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) not in names:
            roots.append(module)
            names.update({id(m): path for path, m in module.named_modules()})
        tally.enter_module(names[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        tally.leave_module()

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Calls(TorchFunctionMode):
    """Sees a few torch calls whole, before they turn into operators.

    `scaled_dot_product_attention` before torch pads head sizes for its kernels; constructors and exports that
    read a tensor's memory directly, which fake tensors do not have; and, where the run may `stand_in` for the
    real one, attention on nested tensors, which few devices have kernels for.
    """

    def __init__(self, tally: Tally, *, stand_in: bool = False) -> None:
        super().__init__()
        self._tally = tally
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            q = args[0] if args else kwargs["query"]
            v = args[2] if len(args) > 2 else kwargs["value"]
            if self._stand_in and q.is_nested:
                return _attention_by_document(*args, **kwargs)
            with self._tally.sdpa_head_dims(q.shape[-1], v.shape[-1]):
                return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            return func(_plain_numbers(args[0]), *args[1:], **kwargs)
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and isinstance(args[0], FakeTensor):
            return torch.tensor(args[0].tolist(), dtype=args[0].dtype).numpy()
        if func in _RECURRENT and any(isinstance(t, FakeTensor) for t in tree_flatten(args)[0]):
            with torch.backends.cudnn.flags(
                enabled=False
            ):  # cuDNN's own kernel looks at the weights' storage
                return func(*args, **kwargs)
        if func == _SET_DATA and (value := value_of(args[1])) is not None:
            attach(args[0], value)
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            raise RuntimeError("a kernel bound by hand reads a tensor's memory")
        return func(*args, **kwargs)


def _attention_by_document(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention on jagged tensors of (samples, heads, ragged length, head size), sample after sample."""
    offsets = query.transpose(1, 2).offsets()
    parts = []
    for tensor in (query, key, value):
        tokens_first = tensor.transpose(1, 2)
        lengths = tokens_first.offsets().diff().tolist()
        parts.append([part.transpose(0, 1)[None] for part in tokens_first.values().split(lengths)])
    attention = nn.functional.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # a forced kernel may not exist here
        results = [
            attention(q, k, v, *args, **kwargs)[0].transpose(0, 1) for q, k, v in zip(*parts, strict=True)
        ]
    return torch.nested.nested_tensor_from_jagged(torch.cat(results), offsets).transpose(1, 2)


def _plain_numbers(values: Any) -> Any:
    """Nested lists with the scalar fake tensors in them read."""
    if isinstance(values, FakeTensor):
        return values.tolist() if values.dim() else values.item()
    if isinstance(values, (list, tuple)):
        return [_plain_numbers(v) for v in values]
    return values


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled code runs eagerly inside, and is as compiled as before afterwards."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _flex_attention_anywhere() -> Iterator[None]:
    """Let flex attention take fake CPU tensors that need gradients: there is no kernel, none is needed."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    check = getattr(flex, "_validate_device", None)
    if check is None:
        yield
        return
    flex._validate_device = lambda *args, **kwargs: None  # type: ignore[union-attr]
    try:
        yield
    finally:
        flex._validate_device = check  # type: ignore[union-attr]


@contextlib.contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Torch logs a traceback for every operator that fails on fake tensors; our error is one line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def _untouched_state() -> Iterator[None]:
    """Random states of every device and library, and autocast's cache, are afterwards as before."""
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python_state = random.getstate()
    numpy_random = _numpy_random()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with _uncompiled():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def _numpy_random() -> Any:
    return getattr(sys.modules.get("numpy"), "random", None)
