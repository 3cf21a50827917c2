"""Functions and objects of C, C++, Cython and Rust, which have no Python code or attributes to read."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..wrappers import module_of
from .code_digest import name_of
from .code_packages import is_read

_BUILTINS = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_POINTER_BYTES = 8


class Unreadable(Exception):
    """Something that could affect the model's work cannot be read."""


def is_compiled(value: Any) -> bool:
    """Whether a value is a function without Python code: of C, C++, Cython or Rust."""
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, type)):
        return False
    call = getattr(type(value), "__call__", None)  # noqa: B004 - where it is defined, not whether
    return isinstance(value, (*_BUILTINS, torch.jit.ScriptFunction)) or isinstance(
        call, types.WrapperDescriptorType
    )


def is_builtin(value: Any) -> bool:
    """Whether a value is a C function or descriptor, fully identified by its name and what it is bound to."""
    return isinstance(value, _BUILTINS)


def check_visible(cls: type) -> None:
    """Raise `Unreadable` for a class whose objects store state outside Python attributes."""
    for base in cls.__mro__[:-1]:
        parent = base.__base__ or object
        slots = vars(base).get("__slots__", ())
        pointers = 1 if isinstance(slots, str) else len(tuple(slots))
        pointers += bool(base.__dictoffset__ and not parent.__dictoffset__)
        pointers += bool(base.__weakrefoffset__ and not parent.__weakrefoffset__)
        hidden = base.__basicsize__ - parent.__basicsize__ - pointers * _POINTER_BYTES
        if hidden > 0 and is_read(module_of(base)):
            raise Unreadable(f"objects of {name_of(base).decode()} are those of a C library")
