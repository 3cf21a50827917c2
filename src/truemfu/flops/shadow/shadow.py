"""A model's shadow: a copy of its modules on tensors with shapes and no data, sharing no mutable state.

Counting runs the shadow, never the model: no parameter, gradient, buffer, hook, mode flag or compiled code of
the model is changed, even if the count fails half-way. Each module becomes a shell of the same class with its
own dictionaries; parameters and buffers become fake tensors; containers, closures, bound methods and plain
objects are copied with references to the shadow's modules and tensors, so that writes to them do not reach
the model; objects of a framework or a C library are shared, and so is an object whose class has `__del__`:
a copy would run it a second time, and delete a folder or close a descriptor that the original still uses.

Wrappers are removed: DDP and DataParallel, `torch.compile`, FSDP2 (a sharded parameter has its full size
here). So no collective starts, and no compiled code is invalidated.
"""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import queue
import random
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ...errors import ModelError
from ...torch_private.trees import tree_map
from ..registry import module_formula
from ..wrappers import is_not_model_work, module_of, unwrap, unwrap_fsdp

Maker = Callable[[torch.Tensor, torch.dtype, "torch.device | None"], torch.Tensor]
"""Makes a tensor's replacement, with this dtype, on this device (None: its own). See `tensor_makers.py`."""

_PLAIN = frozenset((str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size))
_SHARED = (str, bytes, int, float, bool, complex, type, types.ModuleType, torch.dtype, torch.device)
_FRAMEWORKS = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "wandb",
    "mlflow", "tensorboard", "numpy", "datasets", "ray",
}  # fmt: skip
_CACHE = type(functools.lru_cache(lambda: None))  # the type of a decorated function
_COPIED_C_TYPES: tuple[type, ...] = (types.SimpleNamespace, threading.local)
_HEAP_TYPE = 1 << 9  # set for classes defined by a class statement
_MAX_CONTAINER = 100_000
_CONSUMED = (types.GeneratorType, types.CoroutineType, queue.Queue, queue.SimpleQueue)
"""Besides iterators: what gives each of its items once."""


class Shadow:
    """Makes the shadow of a model and of its arguments; `make` replaces the tensors."""

    def __init__(self, make: Maker) -> None:
        self.device: torch.device | None = None
        """The device of tensors made from here on; None: that of the tensor they replace."""
        self._make = make
        self._memo: dict[int, Any] = {}
        self._param_dtype: torch.dtype | None = None
        self._alive: list[Any] = []  # keeps ids in the memo from being used again

    def tree(self, thing: Any) -> Any:
        """The shadow of a model or any object: modules and tensors are replaced, mutable objects copied."""
        if type(thing) in _PLAIN or isinstance(thing, _SHARED):
            return thing
        if type(thing) in weakref.ProxyTypes:
            return weakref.proxy(self.tree(thing.__repr__.__self__))
        if _has_finalizer(type(thing)) and not isinstance(thing, (torch.Tensor, nn.Module)):
            return thing
        for types_handled, make in _MAKERS:
            if isinstance(thing, types_handled):
                return self._once(thing, functools.partial(make, self))
        is_iterator = module_of(type(thing)) in ("builtins", "itertools") and isinstance(thing, Iterator)
        if is_iterator or isinstance(thing, _CONSUMED):
            return self._once(thing, _copy_or_refusal)
        if module_of(type(thing)).startswith("numpy"):
            return self._once(thing, copy.deepcopy) if getattr(thing, "size", 0) <= _MAX_CONTAINER else thing
        return self._once(thing, self._object) if _is_plain_object(type(thing)) else thing

    def _once(self, thing: Any, make: Callable[[Any], Any]) -> Any:
        if id(thing) not in self._memo:
            self._alive.append(thing)
            self._memo[id(thing)] = make(thing)
        return self._memo[id(thing)]

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor's replacement; for a parameter, a parameter with the same extra attributes."""
        is_cast = self._param_dtype is not None and isinstance(tensor, nn.Parameter)
        dtype = self._param_dtype if is_cast and tensor.is_floating_point() else None
        made = self._make(tensor, dtype or tensor.dtype, self.device)
        if made is not tensor and isinstance(tensor, nn.Parameter):
            if type(made) is torch.Tensor:
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            own = vars(made)
            extra = {k: v for k, v in vars(tensor).items() if not k.startswith("_truemfu") and k not in own}
            for name, value in extra.items():
                setattr(made, name, self.tree(value))
            made._is_param = True
        return made

    def _module(self, module: nn.Module) -> nn.Module:
        if id(module) in self._memo:
            return self._memo[id(module)]  # type: ignore[no-any-return]
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{type(module).__name__} is TorchScript, which cannot be counted: pass the nn.Module"
            )
        cls, fsdp_dtype = unwrap_fsdp(module)
        inherited, self._param_dtype = self._param_dtype, fsdp_dtype or self._param_dtype
        shell: nn.Module = object.__new__(_without_finalizer(cls))
        _copy_slots(module, shell, self.tree)
        self._alive.append(module)
        self._memo[id(module)] = shell
        state = shell.__dict__
        for name, value in module.__dict__.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                state[name] = self._hooks(name, value)
            elif name in (
                "_parameters",
                "_buffers",
                "_modules",
            ):  # some wrappers have dictionaries of their own
                state[name] = {key: self.tree(each) for key, each in value.items()}
            elif name == "_compiled_call_impl":
                state[name] = None
            else:
                state[name] = self.tree(value)
        formula = module_formula(cls)
        if formula is not None:
            state["forward"] = functools.partial(formula, shell)
        if fsdp_dtype is not None:
            shell.register_forward_pre_hook(_cast_inputs(fsdp_dtype), prepend=True, with_kwargs=True)
        self._param_dtype = inherited
        return shell

    def _hooks(self, name: str, hooks: dict[Any, Any]) -> dict[Any, Any]:
        """Hooks run in a count, since they may change the work, but on copies of what they close over.

        Left out: hooks of FSDP and tensor parallelism (their collectives), backward and state-dict hooks,
        which do none of the step's work, and hooks marked `_truemfu_skip` (themselves or the object they are
        bound to), which only observe the run.
        """
        copied = type(hooks)()
        if "state_dict" in name or "backward" in name:
            return copied
        for key, hook in hooks.items():
            if not is_not_model_work(hook):
                copied[key] = self.tree(hook)
        return copied

    def _container(self, thing: Any) -> Any:
        if len(thing) > _MAX_CONTAINER or isinstance(thing, torch.Size):
            return thing
        if isinstance(thing, tuple):
            items = [self.tree(value) for value in thing]
            if all(a is b for a, b in zip(items, thing, strict=True)):
                return thing
            return type(thing)(*items) if hasattr(thing, "_fields") else type(thing)(items)
        try:
            made = copy.copy(thing)
        except Exception:  # a custom container that cannot be copied is shared
            return thing
        self._memo[id(thing)] = made
        if isinstance(thing, dict):
            for key, value in thing.items():
                dict.__setitem__(made, key, self.tree(value))
        elif isinstance(thing, (list, collections.deque)):
            for index, value in enumerate(thing):
                made[index] = self.tree(value)
        return made

    def _method(self, method: types.MethodType) -> Any:
        owner, function = self.tree(method.__self__), self.tree(method.__func__)
        unchanged = owner is method.__self__ and function is method.__func__
        return method if unchanged else types.MethodType(function, owner)

    def _builtin_method(self, method: Any) -> Any:
        owner = self.tree(method.__self__)
        return method if owner is method.__self__ else getattr(owner, method.__name__)

    def _partial(self, partial: functools.partial[Any]) -> Any:
        made = functools.partial(
            self.tree(partial.func),
            *(self.tree(a) for a in partial.args),
            **{k: self.tree(v) for k, v in partial.keywords.items()},
        )
        made.__dict__.update(partial.__dict__)
        return made

    def _function(self, function: types.FunctionType) -> Any:
        """A function with copies of its closure and defaults; one without either is shared.

        For a compiled function, the original one.
        """
        compiled_from = getattr(function, "_torchdynamo_orig_callable", None)
        if compiled_from is not None and not getattr(function, "_torchdynamo_disable", False):
            return self.tree(compiled_from)
        if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
            return function
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        made = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, None, cells if cells else None
        )
        self._memo[id(function)] = made
        made.__defaults__ = self.tree(function.__defaults__)
        made.__kwdefaults__ = self.tree(function.__kwdefaults__)
        made.__dict__.update(function.__dict__)
        made.__module__, made.__qualname__ = function.__module__, function.__qualname__
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            try:
                new.cell_contents = self.tree(old.cell_contents)
            except ValueError:  # the cell is still empty
                continue
        return made

    def _object(self, thing: Any) -> Any:
        """A copy of an object of a plain Python class, so that writes do not reach the original."""
        base: Any = next((base for base in _COPIED_C_TYPES if isinstance(thing, base)), object)
        try:
            shell = base.__new__(type(thing))
        except TypeError:  # its base is another C type
            return thing
        self._memo[id(thing)] = shell
        _copy_slots(thing, shell, self.tree)
        for name, value in getattr(thing, "__dict__", {}).items():
            shell.__dict__[name] = self.tree(value)
        return shell

    def _reference(self, reference: weakref.ref[Any]) -> Any:
        target = reference()
        copied = self.tree(target)
        return reference if copied is target else weakref.ref(copied)


def _copy_or_refusal(thing: Any) -> Any:
    """An iterator at the same position; something that refuses to be advanced if it cannot be copied."""
    try:
        with warnings.catch_warnings():  # itertools warns that copying ends with Python 3.14
            warnings.simplefilter("ignore", DeprecationWarning)
            return copy.deepcopy(thing)
    except Exception:  # whatever an object in it raises
        return _Uncopied(thing)


class _Uncopied:
    """Replaces an iterator or a queue that cannot be copied: a count that would advance it fails."""

    def __init__(self, thing: Any) -> None:
        self._type_name = type(thing).__name__

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"the model or its batch holds a {self._type_name}, which a count would advance: the training "
            "would lose the items that the count consumes"
        )

    def __iter__(self) -> Any:
        return self

    __next__ = send = get = get_nowait = put = put_nowait = _refuse


def _copy_slots(thing: Any, shell: Any, tree: Callable[[Any], Any]) -> None:
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                object.__setattr__(shell, name, tree(getattr(thing, name)))


def _is_plain_object(cls: type) -> bool:
    """Whether objects of a class are the user's own: written in Python, not of a framework, not an enum."""
    if module_of(cls).split(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    bases = [base for base in cls.__mro__ if base is not object and module_of(base) != "typing"]
    return all(
        base.__flags__ & _HEAP_TYPE
        and module_of(base).split(".")[0] not in _FRAMEWORKS
        and not issubclass(base, (enum.Enum, BaseException, type))
        for base in bases
    )


def _has_finalizer(cls: type) -> bool:
    """Whether a class written in Python has `__del__`; generators have one of their own."""
    return bool(cls.__flags__ & _HEAP_TYPE) and hasattr(cls, "__del__")


def _without_finalizer(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of a module's shell: the module's own, or a subclass of it that does nothing at its end."""
    if not _has_finalizer(cls):
        return cls
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: type[nn.Module] = types.new_class(
        cls.__name__, (cls,), exec_body=lambda body: body.update(same, __del__=lambda self: None)
    )
    return made


def _cast_inputs(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def one(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        return tree_map(one, args), tree_map(one, kwargs)

    return cast


_MAKERS: tuple[tuple[type | tuple[type, ...], Callable[[Shadow, Any], Any]], ...] = (
    (torch.Tensor, Shadow.tensor),
    (nn.Module, lambda shadow, module: shadow._module(unwrap(module))),
    ((list, tuple, dict, set, collections.deque), Shadow._container),
    (types.MethodType, Shadow._method),
    (types.BuiltinMethodType, Shadow._builtin_method),
    (functools.partial, Shadow._partial),
    (types.FunctionType, Shadow._function),
    (_COPIED_C_TYPES, Shadow._object),
    (weakref.ref, Shadow._reference),
    (torch.Generator, lambda _, generator: generator.clone_state()),
    ((random.Random, bytearray, array.array, torch.autocast), lambda _, thing: copy.copy(thing)),
    (_CACHE, lambda shadow, cached: shadow.tree(cached.__wrapped__)),
)
"""How each type is copied. Not an attribute of Shadow: that reference cycle would keep the model alive."""
