"""The registry of formulas: for operators, and for module classes whose work a dispatch mode cannot see.

An operator's formula is a pure function of its arguments (of tensors, only shapes are used) that returns the
FLOPs of one call, or an `AttentionWork` for kernels whose pairs depend on a mask:

    @register_formula("mylib::fused_mlp")
    def fused_mlp(x, up, down, *, out):
        return 2 * x.shape[0] * up.numel() + 2 * x.shape[0] * down.numel()

A module class's formula is its forward pass in plain PyTorch. During a count only, it runs instead of the
module's own forward, so forward, backward, dtypes and masks all follow from it:

    @register_module(te.Linear)
    def linear(module, x):
        return F.linear(x, module.weight, module.bias)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ..errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

OPERATOR_FORMULAS: dict[str, Callable[..., Any]] = {}
MODULE_FORMULAS: dict[type, Callable[..., Any]] = {}


def register_formula(*operators: str) -> Callable[[F], F]:
    """Register the decorated function as the formula of these operators, each named `library::operator`.

    It is called with the operator's own arguments and the keyword `out`, the operator's result, and
    returns the FLOPs of that call. A formula that returns 0 declares that the operator does no matrix work.
    """
    if not operators:
        raise UsageError("register_formula takes the operator's name: @register_formula('library::operator')")
    for name in operators:
        if not isinstance(name, str) or name.count("::") != 1:
            raise UsageError(
                f"an operator is named like 'aten::mm' (library::operator, no overload); got {name!r}"
            )

    def register(formula: F) -> F:
        OPERATOR_FORMULAS.update(dict.fromkeys(operators, formula))
        return formula

    return register


def register_module(*classes: type) -> Callable[[F], F]:
    """Register the decorated function as the plain-PyTorch forward of these module classes.

    During a count it is called as `function(module, *args, **kwargs)` with the forward's arguments, instead
    of that forward. Subclasses that do not override `forward` are covered too.
    """
    from torch import nn

    if not classes:
        raise UsageError("register_module takes the module's class: @register_module(MyModule)")
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise UsageError(f"register_module takes subclasses of torch.nn.Module; got {cls!r}")

    def register(forward: F) -> F:
        MODULE_FORMULAS.update(dict.fromkeys(classes, forward))
        return forward

    return register


def replaced_modules(modules: Iterable[Any]) -> list[str]:
    """The names of the classes among these modules for which a forward is registered, each once."""
    if not MODULE_FORMULAS:
        return []
    return sorted({type(module).__name__ for module in modules if module_formula(type(module)) is not None})


def module_formula(cls: type) -> Callable[..., Any] | None:
    """The forward registered for a module class, or for the class it inherits its forward from."""
    for base in cls.__mro__:
        if base in MODULE_FORMULAS:
            return MODULE_FORMULAS[base]
        if "forward" in base.__dict__:
            return None
    return None
