"""The Python code that a model's forward can run, found from the model without running anything.

    modules ──► their classes, hooks and attributes ──► functions ──► what their code names ──► functions …

A method is included if its name occurs in any code found so far, on any object. So the walk finds more than a
step runs. It misses code that no name leads to: code called by a C library, and classes of objects that exist
only during a step and are not named in the code found.
"""

from __future__ import annotations

import collections
import random
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..wrappers import module_of, unwrap
from .code_names import NotImported, cells_of, composed_in, globals_in, names_in, references, texts_in
from .code_packages import home_of, is_read
from .held_values import GETTERS, OF_TORCH, forward_hooks, global_hooks, parts_of

MAX_FUNCTIONS = 6000
MAX_VALUES = 300_000
GENERATORS = frozenset({"python", "numpy", "torch"})

_SCALARS = frozenset(
    (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size)
)
_TORCH_SEEDS = frozenset(
    {
        "manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all",
        "fork_rng", "default_generator", "seed_everything", "set_seed", "graphsafe_set_rng_state",
    }
)  # fmt: skip
_BUILDING = frozenset({"__init__", "__new__", "__post_init__"})
_NOT_IN_A_STEP = frozenset(
    {
        "__repr__", "__str__", "__format__", "__dir__", "__del__", "__copy__", "__deepcopy__", "__reduce__",
        "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__sizeof__", "__init_subclass__",
        "__subclasshook__", "__class_getitem__", "__set_name__", "__prepare__", "__instancecheck__",
        "__subclasscheck__", "__annotate__", "__annotate_func__",
    }
)  # fmt: skip
_MIN_PIECE = 3
_ALWAYS = frozenset({"forward", "backward", "setup_context", "vjp", "jvp"})


def functions_of(model: nn.Module) -> Iterator[types.FunctionType]:
    """Every Python function, once, that the model's forward and backward can run, helpers included.

    Excludes torch, numpy, the standard library, training frameworks and truemfu itself. At most
    `MAX_FUNCTIONS`.
    """
    yield from ModelCode(model).functions


def random_generators_used(model: nn.Module) -> frozenset[str]:
    """Which shared random generators of the process the model's code may draw from or set.

    A subset of "python", "numpy" and "torch". Drawing from torch's generator does not count, only seeding it,
    setting its state or forking it. All three if there is more code than the walk reads.
    """
    code = ModelCode(model)
    return frozenset(code.generators) if code.is_complete else GENERATORS


class ModelCode:
    """The walk over a model's code and what it found. Its order is the same in every process."""

    def __init__(self, model: nn.Module, *also: Any) -> None:
        """Walk from the model, and from other functions or objects that are part of a step."""
        self.members: list[tuple[type, str, Any]] = []
        """Class attributes that the code can reach, as defined in the class."""
        self.classes: dict[type, None] = {}
        self.generators: set[str] = set()
        self.references: dict[int, list[tuple[str, Any]]] = {}
        """What the names in each function refer to, by the function's id."""
        self.is_complete = True
        """Whether all code was read; False past `MAX_FUNCTIONS` or `MAX_VALUES`."""
        self._functions: dict[int, types.FunctionType] = {}
        self._names: set[str] = set()
        self._pieces: set[str] = set()
        self._unnamed: dict[str, list[tuple[type, Any]]] = {}
        self._built: set[type] = set()
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that no id is reused
        self._waiting: collections.deque[Any] = collections.deque([unwrap(model), *also])
        self._operators = _operators_in_python()
        for hooks in global_hooks():
            self._push(hooks)
        while self._waiting and self.is_complete:
            self._visit(self._waiting.popleft())
            if not self._waiting:
                self._name_composed()
        for name, members in self._unnamed.items():
            for cls, value in members:
                if issubclass(cls, nn.Module) and _is_code(value):
                    self._record_member(cls, name, value)  # not followed: only a change of it is detected

    @property
    def functions(self) -> tuple[types.FunctionType, ...]:
        """Functions whose code is read."""
        return tuple(self._functions.values())

    @property
    def seen(self) -> tuple[Any, ...]:
        """Every object that the walk visited."""
        return tuple(self._seen.values())

    def _push(self, value: Any) -> None:
        if type(value) not in _SCALARS and id(value) not in self._seen:
            self._waiting.append(value)

    def _push_all(self, values: Any) -> None:
        for value in values:
            self._push(value)

    def _visit(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if len(self._seen) > MAX_VALUES:
            self.is_complete = False
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, type):
            self._class(value, is_called=True)
        elif isinstance(value, (torch.Tensor, types.ModuleType)):
            self._record_generator(value)
            if isinstance(value, torch.Tensor):
                self._class(type(value), is_called=False)
        else:
            self._record_generator(value)
            if isinstance(value, GETTERS):
                self._name(_names_in_getter(value))
            self._push_all(parts_of(value))
            self._class(type(value), is_called=False)

    def _module(self, wrapped: nn.Module) -> None:
        module = unwrap(wrapped)
        self._seen[id(module)] = module
        self._class(type(module), is_called=False)
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                self._push(value)
        self._push_all(forward_hooks(module))
        self._push_all(module._parameters.values())
        self._push_all(module._buffers.values())
        self._push_all(child for child in module._modules.values() if child is not None)

    def _function(self, function: types.FunctionType) -> None:
        compiled_from = getattr(function, "_torchdynamo_orig_callable", None)
        self._push(compiled_from)
        self._push(getattr(function, "__wrapped__", None))
        self._push_all(value for _, value in cells_of(function))
        if not is_read(home_of(function)):  # a decorator of torch, or a function of its own
            self._record_generator(function)
            return
        if len(self._functions) >= MAX_FUNCTIONS:
            self.is_complete = False
            return
        self._functions[id(function)] = function
        self._push_all(function.__defaults__ or ())
        self._push_all((function.__kwdefaults__ or {}).values())
        names = names_in(function.__code__)
        if not _TORCH_SEEDS.isdisjoint(names):
            self.generators.add("torch")
        self.references[id(function)] = found = list(references(function))
        for _, value in found:
            if isinstance(value, (types.ModuleType, NotImported)):
                self._record_random_module(value, names)
            else:
                self._push(value)
        if "ops" in names:
            self._push_all(d for (n, op), d in self._operators.items() if n in names and op in names)
        self._name((*names, *texts_in(function.__code__)))
        self._pieces.update(text for text in composed_in(function.__code__) if len(text) >= _MIN_PIECE)
        if "globals" in globals_in(function.__code__):
            known = function.__globals__.values()
            self._push_all(value for value in known if isinstance(value, types.FunctionType))

    def _name(self, names: Iterable[str]) -> None:
        """Include the class members with these names."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                for cls, value in self._unnamed.pop(name, ()):
                    self._member(cls, name, value)

    def _name_composed(self) -> None:
        """Include members whose name a `getattr` could compose, such as `_forward_` followed by a mode."""
        pieces = tuple(self._pieces)
        self._name([name for name in self._unnamed if name.startswith(pieces) or name.endswith(pieces)])

    def _class(self, cls: type, *, is_called: bool) -> None:
        """Include the members of a class that can run, now or once their name is found."""
        if is_called and cls not in self._built:
            self._built.add(cls)
            # A forward names module classes in isinstance tests and rarely builds one: not followed.
            take = self._record_member if issubclass(cls, nn.Module) else self._member
            for base in cls.__mro__:
                if is_read_class(base):
                    for name in sorted(_BUILDING & vars(base).keys()):
                        take(base, name, vars(base)[name])
        if cls in self.classes:
            return
        for base in cls.__mro__:
            if base in self.classes:
                continue
            self.classes[base] = None
            if not is_read_class(base):
                continue
            for name, value in vars(base).items():
                is_special = name.startswith("__") and name.endswith("__")
                if name in _BUILDING or name in _NOT_IN_A_STEP:
                    continue
                if name in _ALWAYS or name in self._names or (is_special and _is_code(value)):
                    self._member(base, name, value)
                elif type(value) in _SCALARS:
                    if not is_special:
                        self._record_member(base, name, value)
                else:
                    self._unnamed.setdefault(name, []).append((base, value))

    def _record_member(self, cls: type, name: str, value: Any) -> None:
        self.members.append((cls, name, value))

    def _member(self, cls: type, name: str, value: Any) -> None:
        self._record_member(cls, name, value)
        self._push(value)

    def _record_random_module(self, module: types.ModuleType | NotImported, names: tuple[str, ...]) -> None:
        """Record a random number module that a function names."""
        name = module if isinstance(module, NotImported) else module.__name__
        if name == "random":
            self.generators.add("python")
        elif name.startswith("numpy.random") or (name == "numpy" and "random" in names):
            self.generators.add("numpy")

    def _record_generator(self, value: Any) -> None:
        """Record a shared random generator, or a method of one."""
        if isinstance(value, types.ModuleType):
            self._record_random_module(value, ())
            return
        if isinstance(value, types.FunctionType):
            if home_of(value).startswith("torch") and value.__name__ in _TORCH_SEEDS:
                self.generators.add("torch")
            return
        owner = getattr(value, "__self__", None) if isinstance(value, _BOUND) else value
        numpy_random = sys.modules.get("numpy.random")
        if owner is getattr(random, "_inst", _NOTHING):
            self.generators.add("python")
        elif owner is getattr(getattr(numpy_random, "mtrand", None), "_rand", _NOTHING):
            self.generators.add("numpy")
        elif owner is torch.default_generator:
            self.generators.add("torch")


_NOTHING = object()
_BOUND = (types.MethodType, types.BuiltinMethodType)


def is_read_class(cls: type) -> bool:
    """Whether the code of a class is read, which includes classes that torch generates from a graph."""
    forward = vars(cls).get("forward")
    return is_read(module_of(cls)) or (
        isinstance(forward, types.FunctionType) and issubclass(cls, nn.Module) and is_read(home_of(forward))
    )


def _is_code(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, staticmethod, classmethod, property))


def _names_in_getter(getter: Any) -> Iterator[str]:
    """The names that `attrgetter("a.b")` or `methodcaller("run")` look up."""
    make, args = getter.__reduce__()
    for text in (*args, *getattr(make, "args", ())):
        if isinstance(text, str):
            yield from text.split(".")


def _operators_in_python() -> dict[tuple[str, str], Any]:
    """Operators defined with `torch.library.custom_op`, by namespace and name."""
    home = sys.modules.get("torch._library.custom_ops")
    known = dict(getattr(home, "OPDEFS", {}))
    names = (name.partition("::") for name in sorted(known))
    return {(namespace, name): known[f"{namespace}::{name}"] for namespace, _, name in names}
