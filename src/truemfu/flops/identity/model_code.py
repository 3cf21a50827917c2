"""The Python code that a model's forward can run, found from the model without running anything.

    modules ──► their classes, hooks and attributes ──► functions ──► what their code names ──► functions …

A method is taken if its name occurs in any code found so far, whatever object it is called on. So the walk
finds more than a step runs. It misses what no name leads to: code behind a C library, and classes of objects
that only exist while a step runs and that no code found names.
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

from ..wrappers import unwrap
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
    """Each Python function once that the model's forward and backward can run, helpers included.

    Left out are torch, numpy, the standard library, training frameworks and truemfu itself. At most
    `MAX_FUNCTIONS`.
    """
    yield from ModelCode(model).functions


def mentions(model: nn.Module) -> frozenset[str]:
    """Which generators of random numbers that the process shares the model's code may draw from or set.

    A subset of "python", "numpy" and "torch". Drawing from torch's generator is not a mention, only seeding
    it, setting its state or forking it. All three where there is more code than the walk reads.
    """
    code = ModelCode(model)
    return frozenset(code.generators) if code.is_complete else GENERATORS


class ModelCode:
    """The walk over a model's code and what it found. Its order is the same in every process."""

    def __init__(self, model: nn.Module, *also: Any) -> None:
        """Walk from the model, and from other functions or objects that take part in a step."""
        self.members: list[tuple[type, str, Any]] = []
        """Attributes of classes that the code can reach, as they stand in the class."""
        self.classes: dict[type, None] = {}
        self.generators: set[str] = set()
        self.references: dict[int, list[tuple[str, Any]]] = {}
        """What the names in each function stand for, by the function's id."""
        self.is_complete = True
        """Whether all code was read; False past `MAX_FUNCTIONS` or `MAX_VALUES`."""
        self._functions: dict[int, types.FunctionType] = {}
        self._names: set[str] = set()
        self._pieces: set[str] = set()
        self._unnamed: dict[str, list[tuple[type, Any]]] = {}
        self._built: set[type] = set()
        self._seen: dict[int, Any] = {}  # holds what was seen, so that no id is used twice
        self._waiting: collections.deque[Any] = collections.deque([unwrap(model), *also])
        self._operators = _operators_in_python()
        for hooks in global_hooks():
            self._push(hooks)
        while self._waiting and self.is_complete:
            self._look_at(self._waiting.popleft())
            if not self._waiting:
                self._name_composed()
        for name, members in self._unnamed.items():
            for cls, value in members:
                if issubclass(cls, nn.Module) and _is_code(value):
                    self._note_member(cls, name, value)  # not followed: only a change of it is noticed

    @property
    def functions(self) -> tuple[types.FunctionType, ...]:
        """Functions whose code is read."""
        return tuple(self._functions.values())

    @property
    def seen(self) -> tuple[Any, ...]:
        """Every object that the walk came by."""
        return tuple(self._seen.values())

    def _push(self, value: Any) -> None:
        if type(value) not in _SCALARS and id(value) not in self._seen:
            self._waiting.append(value)

    def _push_all(self, values: Any) -> None:
        for value in values:
            self._push(value)

    def _look_at(self, value: Any) -> None:
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
            self._note_generator(value)
            if isinstance(value, torch.Tensor):
                self._class(type(value), is_called=False)
        else:
            self._note_generator(value)
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
            self._note_generator(function)
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
                self._note_module(value, names)
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
        """Take the members of classes that have these names."""
        for name in names:
            if name not in self._names:
                self._names.add(name)
                for cls, value in self._unnamed.pop(name, ()):
                    self._member(cls, name, value)

    def _name_composed(self) -> None:
        """Take members whose name a `getattr` could put together, such as `_forward_` with a mode behind."""
        pieces = tuple(self._pieces)
        self._name([name for name in self._unnamed if name.startswith(pieces) or name.endswith(pieces)])

    def _class(self, cls: type, *, is_called: bool) -> None:
        """Take those members of a class that can run, now or once a name leads to them."""
        if is_called and cls not in self._built:
            self._built.add(cls)
            # A forward names classes of modules to test for them, and hardly builds one: not followed.
            take = self._note_member if issubclass(cls, nn.Module) else self._member
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
                        self._note_member(base, name, value)
                else:
                    self._unnamed.setdefault(name, []).append((base, value))

    def _note_member(self, cls: type, name: str, value: Any) -> None:
        self.members.append((cls, name, value))

    def _member(self, cls: type, name: str, value: Any) -> None:
        self._note_member(cls, name, value)
        self._push(value)

    def _note_module(self, module: types.ModuleType | NotImported, names: tuple[str, ...]) -> None:
        """Remember a module of random numbers that a function names."""
        name = module if isinstance(module, NotImported) else module.__name__
        if name == "random":
            self.generators.add("python")
        elif name.startswith("numpy.random") or (name == "numpy" and "random" in names):
            self.generators.add("numpy")

    def _note_generator(self, value: Any) -> None:
        """Remember a shared generator of random numbers, or a function of one."""
        if isinstance(value, types.ModuleType):
            self._note_module(value, ())
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
    """Whether the code of a class is read; of classes that torch makes of a graph it is, too."""
    forward = vars(cls).get("forward")
    return is_read(cls.__module__) or (
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
