"""What a count records above the level of operators: which module runs, and a few torch calls as a whole."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode, has_torch_function

from ...torch_private.dispatch import FakeTensor, disable_modes
from ...torch_private.replacing import replaced
from ...torch_private.table import RUN_BACKWARD
from ...torch_private.trees import tree_flatten
from ..shadow.values import attach, value_of
from .counting_mode import CountingMode
from .kernel_launches import watch_launches
from .tally import Tally

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_MEMORY_EXPORTS = {
    torch.Tensor.numpy: "torch.Tensor.numpy",
    torch.Tensor.__array__: "torch.Tensor.__array__",
    torch.Tensor.__dlpack__: "torch.Tensor.__dlpack__",
    torch.Tensor.data_ptr: "torch.Tensor.data_ptr",
    torch.Tensor.__cuda_array_interface__.__get__: "torch.Tensor.__cuda_array_interface__",
}
"""Calls that pass a tensor's memory to code outside torch, and their names in `uncounted`."""
_PLAIN_TENSOR = torch.empty(0, device="cpu")
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@contextlib.contextmanager
def counted(tally: CountingMode) -> Iterator[None]:
    """Count what this thread runs inside the context; compiled code inside runs eagerly."""
    here = threading.get_ident()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # nodes are numbered by thread
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_following_modules(tally))
        stack.callback(watch_launches(tally, lambda: threading.get_ident() == here))
        stack.enter_context(_following_calls(tally))
        stack.enter_context(tally)
        yield


@contextlib.contextmanager
def _following_modules(tally: Tally) -> Iterator[None]:
    """Report to the tally which module runs inside the context, by global module hooks.

    A module is named by the attribute path from the outermost module that was called. Other threads may run
    modules meanwhile, which are not counted.
    """
    roots: list[nn.Module] = []
    names: dict[int, str] = {}
    here = threading.get_ident()

    def enter(module: nn.Module, args: Any) -> None:
        if threading.get_ident() != here:
            return
        if id(module) not in names:
            roots.append(module)
            for path, inner in module.named_modules():
                names[id(inner)] = path
                if isinstance(window := getattr(inner, "sliding_window", None), int):
                    tally.pairs.windows[path] = window
        tally.enter_module(names[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == here:
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


@contextlib.contextmanager
def _following_calls(tally: CountingMode) -> Iterator[None]:
    """Report torch calls to the tally, also during a backward pass: torch suspends a mode while it handles a
    call, and the call that runs the backward pass lasts until that pass is over."""
    calls, here = Calls(tally), threading.get_ident()

    def followed(run_backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_suspended = threading.get_ident() == here and not has_torch_function((_PLAIN_TENSOR,))
        with calls if is_suspended else contextlib.nullcontext():
            return run_backward(*args, **kwargs)

    with replaced(RUN_BACKWARD, followed), calls:
        yield


class Calls(TorchFunctionMode):
    """Intercepts a few torch calls before they are split into operators.

    These are constructors and exports that read a tensor's memory, which fake tensors do not have; exports of
    any tensor, after which torch no longer sees the work; and, on a shadow, attention on nested tensors, for
    which few devices have kernels.
    """

    def __init__(self, tally: CountingMode) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.scaled_dot_product_attention:
            if self._tally.is_on_shadow and (args[0] if args else kwargs["query"]).is_nested:
                return _attention_by_document(*args, **kwargs)
            return func(*args, **kwargs)  # from a place of its own, which `PaddedHeads` recognises
        if func in (torch.tensor, torch.as_tensor) and args and not isinstance(args[0], torch.Tensor):
            return self._from_numbers(func, args, kwargs)
        if (name := _MEMORY_EXPORTS.get(func)) is not None:
            self._tally.record_export(name, args[0])
            if isinstance(args[0], FakeTensor):
                return _array_of(func, args[0])
        if func in _RECURRENT and any(isinstance(t, FakeTensor) for t in tree_flatten(args)[0]):
            return _recurrent(func, *args, **kwargs)
        if func == _SET_DATA and (value := value_of(args[1])) is not None:
            attach(args[0], value)
        return func(*args, **kwargs)

    def _from_numbers(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A tensor of given numbers; torch would create it on the device and wait for the copy."""
        numbers = _plain_numbers(args[0]) if isinstance(args[0], (list, tuple)) else args[0]
        if func is torch.as_tensor and len(args) > 2:
            args, kwargs["device"] = args[:2], args[2]
        given = kwargs.get("device")
        device = torch.get_default_device() if given is None else torch.device(given)
        if not self._tally.is_on_shadow or device.type in ("cpu", "meta"):
            return func(numbers, *args[1:], **kwargs)
        needs_gradient = kwargs.pop("requires_grad", False)
        made = func(numbers, *args[1:], **{**kwargs, "device": "cpu"}).to(device)
        return made.requires_grad_() if needs_gradient else made


def _array_of(func: Any, fake: torch.Tensor) -> Any:
    """A NumPy array of a fake tensor's known values; RuntimeError if they are not known."""
    is_index = not (fake.is_floating_point() or fake.is_complex())
    if func not in (torch.Tensor.numpy, torch.Tensor.__array__) or not (is_index or value_of(fake)):
        raise RuntimeError("code outside torch reads a tensor's memory, which has no values in a count")
    numbers, dtype = fake.tolist(), fake.dtype
    with disable_modes():
        return torch.tensor(numbers, dtype=dtype, device="cpu").numpy()


def _recurrent(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer on fake tensors, without cuDNN, whose kernel would access the weights' storage."""
    if args[0].device.type != "cuda":
        return func(*args, **kwargs)
    with torch.backends.cudnn.flags(enabled=False):
        return func(*args, **kwargs)


def _attention_by_document(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Attention on jagged tensors of (samples, heads, ragged length, head size), one sample at a time."""
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
    """Nested lists in which fake tensors are replaced by their values."""
    if isinstance(values, FakeTensor):
        return values.tolist() if values.dim() else values.item()
    if isinstance(values, (list, tuple)):
        return [_plain_numbers(v) for v in values]
    return values
