"""Where formulas are kept: one for each operator, one for each module class no dispatch mode can see.

A formula of an operator is a pure function of its arguments (tensors stand for their shapes) that returns
the FLOPs of one call, or an `AttentionWork` for kernels whose pairs depend on a mask:

    @register_formula("mylib::fused_mlp")
    def fused_mlp(x, up, down, *, out):
        return 2 * x.shape[0] * up.numel() + 2 * x.shape[0] * down.numel()

A formula of a module class is its forward pass in plain PyTorch. While counting, and only then, it runs in
place of the module's own forward, so forward, backward, dtypes and masks all follow from it:

    @register_module(te.Linear)
    def linear(module, x):
        return F.linear(x, module.weight, module.bias)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR_FORMULAS: dict[str, Callable[..., Any]] = {}
MODULE_FORMULAS: dict[type, Callable[..., Any]] = {}


def register_formula(*operators: str) -> Callable[[F], F]:
    """Register the decorated function as the formula of these operators, each named `library::operator`.

    It is called with the operator's own arguments and the keyword `out`, the operator's result, and
    returns the FLOPs of that call. A formula that returns 0 says: this operator does no matrix work.
    """
    if not operators:
        raise UsageError("register_formula takes the operator's name: @register_formula('library::operator')")
    for name in operators:
        if not isinstance(name, str) or name.count("::") != 1:
            raise UsageError(
                f"an operator is named like 'aten::mm' (library::operator, no overload); got {name!r}"
            )

    def keep(formula: F) -> F:
        OPERATOR_FORMULAS.update(dict.fromkeys(operators, formula))
        return formula

    return keep


def register_module(*classes: type) -> Callable[[F], F]:
    """Register the decorated function as the plain-PyTorch forward of these module classes.

    It is called as `function(module, *args, **kwargs)` with whatever the module's forward was given, in
    place of that forward, while counting. Subclasses that do not override `forward` are covered too.
    """
    from torch import nn

    if not classes:
        raise UsageError("register_module takes the module's class: @register_module(MyModule)")
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise UsageError(f"register_module takes subclasses of torch.nn.Module; got {cls!r}")

    def keep(forward: F) -> F:
        MODULE_FORMULAS.update(dict.fromkeys(classes, forward))
        return forward

    return keep


def module_formula(cls: type) -> Callable[..., Any] | None:
    """The registered forward for a module class: its own, or that of the class its forward comes from."""
    for base in cls.__mro__:
        if base in MODULE_FORMULAS:
            return MODULE_FORMULAS[base]
        if "forward" in base.__dict__:
            return None
    return None
