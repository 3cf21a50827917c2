"""The contents of modules and objects, read without running their code: attributes, hooks, items."""

from __future__ import annotations

import collections
import functools
import operator
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..wrappers import is_not_model_work, module_of
from .code_packages import home_of, is_read, package_of

OF_TORCH = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes that every module has."""
GETTERS = (operator.itemgetter, operator.attrgetter, operator.methodcaller)
"""C function objects that reveal their arguments when they are pickled."""


def parts_of(value: Any) -> Iterator[Any]:
    """The parts of a value, if functions or modules could be among them."""
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, functools.singledispatchmethod):
        yield from (value.func, value.dispatcher)
    elif isinstance(value, GETTERS):
        yield from value.__reduce__()
    elif isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
        yield value.__self__
    elif isinstance(value, Mapping):
        yield from _items(value)
    elif isinstance(value, (list, tuple, collections.deque)):
        yield from value
    elif isinstance(value, (set, frozenset)):
        functions = (item for item in value if isinstance(item, types.FunctionType))
        yield from sorted(functions, key=lambda f: (home_of(f), f.__qualname__))
    if has_parts(value):
        yield from attributes_of(value).values()
    elif not isinstance(value, type):
        yield from (attributes_of(value).get(name) for name in ("__wrapped__", "fn"))


def has_parts(value: Any) -> bool:
    """Whether an object's attributes can affect a forward: it is the user's own, plain data, or callable.

    Trainers, loggers, threads, process groups and the like are represented by their class.
    """
    home = module_of(type(value))
    if is_read(home) or (callable(value) and not isinstance(value, (type, *_CALLABLES))):
        return not home.startswith("torch._ops")
    package = package_of(home)
    return package in _PLAIN_DATA or (package == "torch" and not home.startswith(_MACHINERY))


_PLAIN_DATA = frozenset({"argparse", "collections", "decimal", "fractions", "types"})
_MACHINERY = (
    "torch._C", "torch._dynamo", "torch._functorch", "torch._inductor", "torch._ops", "torch.cuda",
    "torch.distributed", "torch.futures", "torch.fx", "torch.jit", "torch.library", "torch.multiprocessing",
    "torch.optim", "torch.profiler", "torch.utils.data", "torch.utils.hooks", "torch.utils.tensorboard",
)  # fmt: skip
_CALLABLES = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, including slots, without running its code."""
    try:
        found = dict(object.__getattribute__(value, "__dict__"))
    except (AttributeError, TypeError):
        found = {}
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = vars(cls).get(name)
            if isinstance(descriptor, types.MemberDescriptorType):
                try:
                    found[name] = descriptor.__get__(value)
                except AttributeError:
                    continue
    return found


def forward_hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of a module that run in a count: not those that only observe the run or gather shards."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        yield from (hook for hook in hooks.values() if not is_not_model_work(hook))


def global_hooks() -> Iterator[Any]:
    """Global module hooks that run in a count."""
    home = nn.modules.module
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        yield from (hook for hook in getattr(home, name).values() if not is_not_model_work(hook))


def _items(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """Keys and values; for a dict subclass, without its own access methods."""
    if isinstance(mapping, dict):
        yield from dict.keys(mapping)
        yield from dict.values(mapping)
    elif isinstance(mapping, types.MappingProxyType):
        yield from _items(dict(mapping))
