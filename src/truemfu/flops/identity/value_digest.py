"""Any value that can affect a model's work, as bytes that are the same in every process.

Nothing depends on `hash`, `id`, `repr` of an unknown object or the order of a set. Weights and buffers are
represented by shape and dtype, other tensors and arrays by their values, code by its bytecode and constants,
objects by their class and attributes. State of a process or a run that does not affect a forward (locks,
loggers, generators, weak references, addresses in texts, times of day) is represented by its type alone.
`Unreadable` is raised for everything else, which could affect a forward and cannot be read.
"""

from __future__ import annotations

import collections
import contextvars
import enum
import functools
import inspect
import os
import re
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..wrappers import module_of
from .code_digest import code_digest, name_of, pack
from .code_names import NotImported, cells_of
from .code_packages import home_of, is_read, package_of, source_path, version_of
from .compiled_code import Unreadable, check_visible, is_builtin, is_compiled
from .held_values import GETTERS, attributes_of, has_parts
from .run_objects import has_no_effect, text_of
from .value_bytes import array_bytes, tensor_digest, valued_digest

MAX_VALUES = 1_000_000

_PER_PROCESS = re.compile(
    r"\bat 0x[0-9a-fA-F]+|\b[0-9a-f]{8}-?[0-9a-f]{4}-?[1-7][0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}\b"
)
"""Addresses and UUIDs in texts."""
_TIME_OF_DAY_S = (1.4e9, 4.0e9)
_OF_CONFIG = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "model_type"}
)
_LABELS = {
    "PreTrainedConfig": _OF_CONFIG,
    "PretrainedConfig": _OF_CONFIG,
    "PreTrainedModel": frozenset(
        {"name_or_path", "generation_config", "_use_kernels", "_weight_conversions"}
    ),
    "PeftConfigMixin": frozenset({"base_model_name_or_path", "revision"}),
    "Module": frozenset({"_is_hf_initialized"}),
}
"""Attributes of library classes that state where a model came from; a restart loads it from a checkpoint."""
_LIBRARIES = ("transformers", "peft", "torch")
_MIN_HASH = 1 << 32
_ORDERED_ITEMS = 32
"""A longer dictionary is a lookup table, and may have been filled in the order of a set."""
_CONTAINERS = (list, tuple, collections.deque)
_HELD = (nn.Module, torch.Tensor)


class ValueDigest:
    """Turns values into bytes.

    Modules and tensors of the model are numbered in the order they are found. `registered` are the ids of its
    parameters and buffers, whose values are never read.
    """

    def __init__(
        self,
        numbers: dict[int, int],
        module_digest: Callable[[nn.Module], bytes],
        registered: frozenset[int],
    ) -> None:
        self.packages: set[str] = set()
        """Top-level packages of the code found."""
        self._numbers = numbers
        self._module_digest = module_digest
        self._registered = registered
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: dict[int, int] = {}
        self._left = MAX_VALUES

    def of(self, value: Any) -> bytes:
        """The bytes of a value."""
        write = _SCALARS.get(type(value))
        if write is not None:
            return b"=" + write(value) if type(value) is not int else self._integer(value)
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._open:
            return b"above %d" % (len(self._open) - self._open[id(value)])
        self._left -= 1
        if self._left < 0:
            raise Unreadable("the model holds too many values")
        self._open[id(value)] = len(self._open)
        try:
            found = self._composed(value)
        finally:
            del self._open[id(value)]
        self._known[id(value)] = (value, found)
        return found

    def attributes(self, attributes: dict[str, Any], cls: type) -> bytes:
        """The bytes of the attributes of an object of this class, in the order of their names."""
        labels = _labels_of(cls)
        parts = []
        for name in sorted(name for name in attributes if isinstance(name, str)):
            value = attributes[name]
            if name not in labels and not _is_of_this_process(name, value):
                parts += [name.encode(), self.of(value)]
        return pack(*parts)

    def function(self, function: types.FunctionType) -> bytes:
        """The bytes of a function: its code, defaults and closure, not what its names refer to."""
        home = home_of(function)
        self.packages.add(package_of(home))
        cells = [part for name, value in cells_of(function) for part in (name.encode(), self.of(value))]
        compiled_from = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled_from is not None:
            return self.of(compiled_from)
        if not is_read(home):
            return pack(b"known function", home.encode(), function.__code__.co_name.encode(), *cells)
        return pack(
            b"function",
            code_digest(function.__code__),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *cells,
        )

    def _integer(self, value: int) -> bytes:
        return b"id of %d" % self._numbers[value] if value in self._numbers else b"=%d" % value

    def _composed(self, value: Any) -> bytes:
        if isinstance(value, _HELD):
            return self._held(value)
        if isinstance(value, type) and not isinstance(value, types.GenericAlias):  # both for Python 3.10
            self.packages.add(package_of(module_of(value)))
            return pack(b"class", name_of(value))
        if isinstance(value, types.ModuleType):
            return pack(b"module", value.__name__.encode())
        if isinstance(value, NotImported):
            return self._not_imported(value)
        if isinstance(value, enum.Enum):
            return pack(b"enum", name_of(type(value)), str(value.name).encode(), self.of(value.value))
        if isinstance(value, (bool, int, float, complex, str, bytes)):  # an instance of a subclass
            plain: Any = next(kind for kind in (int, float, complex, str, bytes) if isinstance(value, kind))
            return pack(name_of(type(value)), _SCALARS[plain](plain(value)))
        return self._callable(value) or self._container(value) or self._object(value)

    def _held(self, value: nn.Module | torch.Tensor) -> bytes:
        number = self._numbers.get(id(value))
        if number is not None:
            return b"number %d" % number
        if isinstance(value, nn.Module):
            return self._module_digest(value)
        return tensor_digest(value) if id(value) in self._registered else valued_digest(value)

    def _callable(self, value: Any) -> bytes | None:
        """Functions and their wrappers."""
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, types.MethodType):
            return pack(b"method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, (functools.partial, functools.partialmethod)):
            return pack(b"partial", *map(self.of, (value.func, value.args, value.keywords)))
        if isinstance(value, (staticmethod, classmethod)):
            return pack(name_of(type(value)), self.of(value.__func__))
        if isinstance(value, property):
            return pack(b"property", self.of(value.fget), self.of(value.fset))
        if isinstance(value, functools.cached_property):
            return pack(b"property", self.of(value.func))
        if isinstance(value, (torch.jit.ScriptFunction, torch.jit.ScriptModule)):
            raise Unreadable("TorchScript")
        if isinstance(value, functools.singledispatchmethod):
            return pack(b"dispatched", self.of(value.func), self.of(value.dispatcher))
        if type(value).__module__ == "functools" and hasattr(value, "__wrapped__"):
            return pack(name_of(type(value)), self.of(value.__wrapped__))
        if isinstance(value, GETTERS):
            return pack(b"getter", self.of(value.__reduce__()))
        if isinstance(value, (weakref.ref, *weakref.ProxyTypes)):
            return pack(b"weak")
        return self._builtin(value) if is_compiled(value) and text_of(value) is None else None

    def _builtin(self, value: Any) -> bytes:
        """A function of a C library: represented by its name and the version of its package."""
        if not is_builtin(value) and not isinstance(getattr(value, "__name__", None), str):
            raise Unreadable(f"an object of {name_of(type(value)).decode()} is called and not read")
        owner = getattr(value, "__self__", None)
        home = getattr(value, "__module__", None) or getattr(
            getattr(value, "__objclass__", type(owner)), "__module__", ""
        )
        package = package_of(home)
        self.packages.add(package)
        if is_read(home) and package and version_of(package) is None:
            raise Unreadable(f"{name_of(value).decode()} is compiled, and {package} has no version")
        bound_to = b"" if owner is None or isinstance(owner, types.ModuleType) else self.of(owner)
        return pack(b"builtin", name_of(value), bound_to)

    def _container(self, value: Any) -> bytes | None:
        name = name_of(type(value))
        if isinstance(value, dict):
            items = [pack(self.of(key), self.of(item)) for key, item in dict.items(value)]
            if len(items) > _ORDERED_ITEMS:
                items.sort()
            return pack(b"dict", name, *items, self._extra(value))
        if isinstance(value, _CONTAINERS):
            return pack(b"list", name, *map(self.of, value), self._extra(value))
        if isinstance(value, (set, frozenset)):
            return pack(b"set", *sorted(self.of(item) for item in value if _is_constant(item)))
        if isinstance(value, types.MappingProxyType):
            return pack(b"view", self.of(dict(value)))
        if isinstance(value, slice):
            return pack(name, *map(self.of, (value.start, value.stop, value.step)))
        if isinstance(value, range):
            return pack(name, repr(value).encode())
        numbers = array_bytes(value)
        return None if numbers is None else pack(numbers, self._extra(value))

    def _extra(self, value: Any) -> bytes:
        extra = attributes_of(value) if is_read(module_of(type(value))) else {}
        return self.attributes(extra, type(value)) if extra else b""

    def _object(self, value: Any) -> bytes:
        cls = type(value)
        self.packages.add(package_of(module_of(cls)))
        text = text_of(value)
        if text is not None:
            return pack(name_of(cls), _text(text))
        if isinstance(value, os.PathLike):
            return pack(name_of(cls), str(value).encode())
        members = getattr(cls, "__members__", None)
        if isinstance(members, dict):  # an enumeration of a C++ library
            return pack(name_of(cls), str(getattr(value, "name", "")).encode())
        if isinstance(value, torch.ScriptObject):
            raise Unreadable("an object of TorchScript")
        if isinstance(value, contextvars.ContextVar):
            return self._context_variable(value)
        if isinstance(value, types.GeneratorType):
            return self._generator(value)
        if isinstance(value, types.CodeType):
            return code_digest(value)
        if isinstance(value, (threading.local, torch.UntypedStorage, torch.TypedStorage)):
            raise Unreadable(f"what an object of {name_of(cls).decode()} holds is not read")
        if has_parts(value):
            check_visible(cls)
            return pack(b"object", name_of(cls), self.attributes(attributes_of(value), cls))
        inner = attributes_of(value).get("__wrapped__")
        if inner is None and not has_no_effect(value):
            raise Unreadable(f"an object of {name_of(cls).decode()} is not read")
        return pack(b"opaque", name_of(cls), b"" if inner is None else self.of(inner))

    def _context_variable(self, value: contextvars.ContextVar[Any]) -> bytes:
        """Its value in this thread, and its default."""
        found = [b"context variable", value.name.encode()]
        for run in (contextvars.copy_context().run, contextvars.Context().run):
            try:
                found.append(self.of(run(value.get)))
            except LookupError:
                found.append(b"not set")
        return pack(*found)

    def _generator(self, value: types.GeneratorType[Any, Any, Any]) -> bytes:
        """A generator that has not started, as in a context manager: its code and arguments."""
        if inspect.getgeneratorstate(value) != inspect.GEN_CREATED:
            raise Unreadable("a generator that has begun")
        local = inspect.getgeneratorlocals(value)
        return pack(b"generator", code_digest(value.gi_code), self.attributes(local, type(value)))

    def _not_imported(self, module_name: str) -> bytes:
        """A module that a function would import: its version, or its file if it has none."""
        package = package_of(module_name)
        if not is_read(package) or version_of(package) is not None:
            self.packages.add(package)
            return pack(b"not imported", module_name.encode())
        path = source_path(module_name)
        try:
            content = b"" if path is None else path.read_bytes()
        except OSError:
            raise Unreadable(f"the file of {module_name} cannot be read") from None
        return pack(b"not imported", module_name.encode(), content)


@functools.lru_cache(maxsize=4096)
def _labels_of(cls: type) -> frozenset[str]:
    bases = (base for base in cls.__mro__ if package_of(module_of(base)) in _LIBRARIES)
    return frozenset().union(*(_LABELS.get(base.__name__, frozenset()) for base in bases))


def _is_of_this_process(name: str, value: Any) -> bool:
    """Whether an attribute is ours, a hash, or cached tensors: none of these is a setting of the model."""
    if type(value) is int:
        return name.endswith("_hash") and abs(value) >= _MIN_HASH
    if isinstance(value, dict) and name.endswith(("cache", "cached")):
        return all(isinstance(item, torch.Tensor) for item in dict.values(value))
    return name.startswith("_truemfu")


def _is_constant(item: Any) -> bool:
    """Whether an element of a set is a setting; a set of anything else is a registry that grows."""
    return isinstance(item, (str, bytes, int, float, bool, tuple, frozenset, enum.Enum, torch.dtype))


def _float(value: float) -> bytes:
    """A number; one that looks like a time of day is not a setting, so its value is left out."""
    low, high = _TIME_OF_DAY_S
    return b"time of day" if low < value < high and value % 1 else repr(value).encode()


def _text(value: str) -> bytes:
    return _PER_PROCESS.sub("…", value).encode("utf-8", "surrogatepass")


def _dtype(value: torch.dtype) -> bytes:
    """Only its name: a configuration may hold a dtype or its name."""
    return str(value).removeprefix("torch.").encode()


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: b"'" + _text(value),
    bytes: lambda value: b"b" + value,
    int: lambda value: b"%d" % value,
    bool: lambda value: b"True" if value else b"False",
    float: lambda value: b"." + _float(value),
    complex: lambda value: b"j" + repr(value).encode(),
    type(None): lambda value: b"None",
    type(Ellipsis): lambda value: b"...",
    torch.dtype: lambda value: b"'" + _dtype(value),
    torch.device: lambda value: b"device " + value.type.encode(),
    torch.Size: lambda value: b"size " + repr(tuple(value)).encode(),
}
