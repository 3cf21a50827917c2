"""The counting mode: runs every operator of a step itself, on fake tensors or as it is, and tallies it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...convention import Convention
from ...torch_private.dispatch import (
    FakeTensor,
    OpOverload,
    TorchDispatchMode,
    current_graph_task_id,
    disable_torch_function,
    flex_attention_operators,
)
from ..attention.eager import readable
from ..attention.masks import mask_of_function
from ..operators.matrix_work import factors
from ..shadow.fake_kernels import FAKE_KERNELS
from ..shadow.values import Following, Value
from . import collectives
from .tally import PRODUCTS, Entry, Tally, operator_name

_DEVICE = torch.ops.prim.device.default
_SAME_DTYPE = PRODUCTS | frozenset(f"aten::{n}" for n in "mv addmv dot".split())


class CountingMode(Tally, TorchDispatchMode):
    """Adds up the FLOPs of everything that runs while the mode is active.

    `following` runs operators on fake tensors; without it they run unchanged, on their own devices.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch wraps a mode's dispatch so that it is not compiled, at a cost per operator; during a count
        the compiler is disabled anyway."""
        return False

    def __init__(
        self,
        convention: Convention,
        *,
        documents: Sequence[Sequence[int]] | None = None,
        following: Following | None = None,
        is_on_shadow: bool = False,
    ) -> None:
        """`is_on_shadow`: a shadow is counted, so that no collective may start."""
        TorchDispatchMode.__init__(self)
        Tally.__init__(self, convention, documents=documents)
        self.is_on_shadow = is_on_shadow
        self.outside_parameters: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        """Parameters outside the model that the step used, through globals, and their previous gradients."""
        self._following = following

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if current_graph_task_id() == -1:
            return self._run(func, args, kwargs or {})
        with disable_torch_function():  # in a backward pass it would intercept the calls made here as well
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator and count it."""
        self.operators += 1
        if self.is_on_shadow:
            self._save_outside_gradients(args)
        name = operator_name(func)
        out = self._output(name, func, args, kwargs)
        self.record(name, func, args, kwargs, out)
        return out

    def _output(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        fake_kernel = FAKE_KERNELS.get(name) if self._following is not None else None
        if fake_kernel is not None:
            return fake_kernel(*args, **kwargs)
        if self.is_on_shadow and name.partition("::")[0] in collectives.NAMESPACES:
            return collectives.run_on_shapes(
                func,
                args,
                kwargs,
                in_forward=current_graph_task_id() == -1,
                is_assumed=self._following is None or bool(self._following.assumptions),
            )
        if self._following is not None and isinstance(func, OpOverload):
            return self._following.run(func, args, kwargs)
        return func(*args, **kwargs)

    def _save_outside_gradients(self, args: Iterable[Any]) -> None:
        """Save the gradients of parameters outside the model, since this step would add to them."""
        for argument in args:
            cls = type(argument)
            if cls is list or cls is tuple:
                self._save_outside_gradients(argument)
            elif (
                cls is not FakeTensor
                and isinstance(argument, torch.Tensor)
                and argument.requires_grad
                and argument.is_leaf
                and id(argument) not in self.outside_parameters
            ):
                self.outside_parameters[id(argument)] = (argument, argument.grad)
                argument.grad = None  # else the count would add to it in place

    def _count(self, name: str, func: Any, args: Any, kwargs: Any, out: Any) -> Entry | None:
        if name in _SAME_DTYPE and self._following is not None:
            left, right = factors(name, args)[:2]
            if left.dtype is not right.dtype:  # fake tensors accept this, a real product does not
                raise RuntimeError(
                    f"{name} of {left.dtype} and {right.dtype}: both operands need the same dtype"
                )
        return super()._count(name, func, args, kwargs, out)

    def record_launch(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a kernel of this name, launched outside the dispatcher with these arguments."""
        super().record_launch(name, args, kwargs)
        if self._following is not None:
            self._following.record_launch([*args, *kwargs.values()])

    def _evaluated(self, function: Callable[..., Any], shape: Sequence[int], device: Any) -> Value | None:
        """A flex-attention mask, computed on real indices or on fake ones whose values are known."""
        if self._following is None:
            return super()._evaluated(function, shape, device)
        with self._following:
            allowed = mask_of_function(function, shape, partial(torch.arange, device=device))
        return None if allowed is None else readable(allowed)


def count_flex_attention(mode: type) -> None:
    """Register a mode's rule, which some versions of torch require for operators that take functions."""
    if hasattr(TorchDispatchMode, "supports_higher_order_operators"):
        return

    def rule(operator: Any) -> Callable[..., Any]:
        return lambda mode, *args, **kwargs: mode.__torch_dispatch__(operator, (), args, kwargs)

    with contextlib.suppress(Exception):  # without a rule, the operator itself raises when it is counted
        for operator in flex_attention_operators():
            operator.py_impl(mode)(rule(operator))


count_flex_attention(CountingMode)
