"""A model's shadow: the same modules on tensors that have shapes and no data, sharing nothing that changes.

Counting runs the shadow, never the model: no parameter, gradient, buffer, hook, mode flag or compiled code of
the model is touched, even if the count fails half-way. Each module becomes a shell of the same class with its
own dictionaries; parameters and buffers become fake tensors; containers, closures, bound methods and plain
objects on the way are rebuilt to lead to the shadow's modules and tensors, so that writing to them leaves no
trace; what belongs to a framework or a C library is shared.

Wrappers are taken off: DDP and DataParallel, `torch.compile`, FSDP2 (a sharded parameter has its full size
here). So nothing starts a collective, and nothing compiled is disturbed.
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
from ..interruption import supervision
from ..registry import module_formula
from ..wrappers import beneath_fsdp, is_left_out, unwrap

Maker = Callable[[torch.Tensor, torch.dtype, "torch.device | None"], torch.Tensor]
"""Makes what stands for a tensor, with this dtype, on this device (None: its own). See `tensor_makers.py`."""

_PLAIN = frozenset((str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device, torch.Size))
_SHARED = (str, bytes, int, float, bool, complex, type, types.ModuleType, torch.dtype, torch.device)
_FRAMEWORKS = {
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "wandb",
    "mlflow", "tensorboard", "numpy", "datasets", "ray",
}  # fmt: skip
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has to itself."""
CACHE = type(functools.lru_cache(lambda: None))
"""What `functools.lru_cache` makes of a function."""
_HEAP_TYPE = 1 << 9  # set for classes made by a class statement
_MAX_CONTAINER = 100_000
_ITERATORS = frozenset({"builtins", "itertools"})
"""Where iterators come from whose position a copy can have to itself."""


class Shadow:
    """Makes the shadow of a model and of whatever the model is called with; `make` decides on its tensors."""

    def __init__(self, make: Maker) -> None:
        self.place: torch.device | None = None
        """Where tensors made from here on stand, if not where they are."""
        self._make = make
        self._supervision = supervision()
        self._memo: dict[int, Any] = {}
        self._param_dtype: torch.dtype | None = None
        self._at = ""  # the attribute that is being copied, for messages
        self._alive: list[Any] = []  # keeps ids in the memo from being used again

    def model(self, model: nn.Module) -> nn.Module:
        """The shadow of a whole model."""
        shadow = self._module(unwrap(model))
        assert isinstance(shadow, nn.Module)
        return shadow

    def tree(self, thing: Any) -> Any:
        """The shadow of anything: modules and tensors are replaced, what could be written to is copied."""
        if type(thing) in _PLAIN or isinstance(thing, _SHARED):
            return thing
        if type(thing) in weakref.ProxyTypes:
            return weakref.proxy(self.tree(thing.__repr__.__self__))
        for kind, make in _MAKERS:
            if isinstance(thing, kind):
                return self._once(thing, functools.partial(make, self))
        if type(thing).__module__ in _ITERATORS and isinstance(thing, Iterator):
            return self._once(thing, self._iterator)
        if type(thing).__module__.startswith("numpy"):
            return self._once(thing, copy.deepcopy) if getattr(thing, "size", 0) <= _MAX_CONTAINER else thing
        return self._once(thing, self._object) if is_plain_object(type(thing)) else thing

    def _once(self, thing: Any, make: Callable[[Any], Any]) -> Any:
        if id(thing) not in self._memo:
            self._alive.append(thing)
            self._memo[id(thing)] = make(thing)
        return self._memo[id(thing)]

    def tensor(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What stands for a tensor; for a parameter one too, with the attributes it carries."""
        made = self._make(tensor, dtype or tensor.dtype, self.place)
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
        if self._supervision is not None:
            self._supervision.check()
        cls, fsdp_dtype = beneath_fsdp(module)
        inherited, self._param_dtype = self._param_dtype, fsdp_dtype or self._param_dtype
        shell: nn.Module = object.__new__(cls)
        _copy_slots(module, shell, self.tree)
        self._alive.append(module)
        self._memo[id(module)] = shell
        state = shell.__dict__
        for name, value in module.__dict__.items():
            if type(value) in _PLAIN:
                state[name] = value
            elif name in _OF_TORCH and not value:
                state[name] = type(value)()
            elif name == "_parameters":
                state[name] = {k: self._parameter(v) for k, v in value.items()}
            elif name == "_modules":
                state[name] = {k: None if v is None else self._module(unwrap(v)) for k, v in value.items()}
            elif name == "_buffers":
                state[name] = {k: self.tree(v) for k, v in value.items()}
            elif name.endswith("_hooks") and isinstance(value, dict):
                state[name] = self._hooks(name, value)
            elif name == "_compiled_call_impl":
                state[name] = None
            else:
                self._at = f"{cls.__name__}.{name}"
                state[name] = self.tree(value)
        formula = module_formula(cls)
        if formula is not None:
            state["forward"] = functools.partial(formula, shell)
        if fsdp_dtype is not None:
            shell.register_forward_pre_hook(_cast_inputs(fsdp_dtype), prepend=True, with_kwargs=True)
        self._param_dtype = inherited
        return shell

    def _parameter(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        dtype = self._param_dtype
        if parameter is not None and dtype is not None and parameter.is_floating_point():
            return self._once(parameter, lambda p: self.tensor(p, dtype))  # type: ignore[no-any-return]
        return self.tree(parameter)  # type: ignore[no-any-return]

    def _hooks(self, name: str, hooks: dict[Any, Any]) -> dict[Any, Any]:
        """Hooks run in a count, for they may change the work, but on copies of what they close over.

        Left out: hooks of FSDP and tensor parallelism (their collectives), hooks on backward and state dicts,
        which do no work of the step, and hooks marked `_truemfu_skip` (themselves or the object they are
        bound to), which watch the run.
        """
        kept = type(hooks)()
        if "state_dict" in name or "backward" in name:
            return kept
        for key, hook in hooks.items():
            if not is_left_out(hook):
                kept[key] = self.tree(hook)
        return kept

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
        except Exception:  # a container of its own making that cannot be copied is shared
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
        """A generator's own method draws from the copy of the generator, not from the training's numbers."""
        owner = getattr(method, "__self__", None)
        is_generator = isinstance(owner, random.Random) or type(owner).__module__.startswith("numpy.random")
        return getattr(self.tree(owner), method.__name__) if is_generator else method

    def _partial(self, partial: functools.partial[Any]) -> Any:
        made = functools.partial(
            self.tree(partial.func),
            *(self.tree(a) for a in partial.args),
            **{k: self.tree(v) for k, v in partial.keywords.items()},
        )
        made.__dict__.update(partial.__dict__)
        return made

    def _function(self, function: types.FunctionType) -> Any:
        """A function with copies of what it closes over and of its defaults; a plain one is shared.

        Of a compiled function, the one that was compiled.
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
        """A copy of an object of a plain Python class, so that what is written to it stays with us."""
        try:
            shell = object.__new__(type(thing))
        except TypeError:  # built by a C type after all
            return thing
        self._memo[id(thing)] = shell
        _copy_slots(thing, shell, self.tree)
        for name, value in getattr(thing, "__dict__", {}).items():
            shell.__dict__[name] = self.tree(value)
        return shell

    def _cached_function(self, cached: Any) -> Any:
        """The same function with a cache of its own, which starts empty."""
        parameters = cached.cache_parameters()
        return functools.lru_cache(**parameters)(self.tree(cached.__wrapped__))

    def _iterator(self, iterator: Iterator[Any]) -> Any:
        """An iterator at the same position, with copies of the iterators it reads from."""
        try:
            with warnings.catch_warnings():  # itertools warn that copies of them end with Python 3.14
                warnings.simplefilter("ignore", DeprecationWarning)
                reduced: Any = iterator.__reduce__()
                make, args, *state = reduced
                made = make(*(self.tree(argument) for argument in args))
                if state and state[0] is not None:
                    made.__setstate__(self.tree(state[0]))
        except (TypeError, AttributeError):
            return self._uncopied(iterator)
        return made

    def _queue(self, thing: queue.Queue[Any]) -> Any:
        """A queue with the same items; where the training would wait for another thread, the count ends."""
        if type(thing) not in (queue.Queue, queue.LifoQueue, queue.PriorityQueue):
            return thing
        made = type(thing)(thing.maxsize)
        self._memo[id(thing)] = made
        made.queue = self.tree(thing.queue)
        made.unfinished_tasks = thing.unfinished_tasks
        vars(made)["get"] = lambda block=True, timeout=None: type(made).get(made, False)
        vars(made)["put"] = lambda item, block=True, timeout=None: type(made).put(made, item, False)
        return made

    def _thread_local(self, thing: threading.local) -> Any:
        made = type(thing).__new__(type(thing))
        self._memo[id(thing)] = made
        made.__dict__.update({name: self.tree(value) for name, value in vars(thing).items()})
        return made

    def _uncopied(self, thing: Any) -> Any:
        return _Uncopied(self._at, type(thing).__name__)

    def _namespace(self, thing: types.SimpleNamespace) -> Any:
        made = types.SimpleNamespace()
        self._memo[id(thing)] = made
        made.__dict__.update({name: self.tree(value) for name, value in vars(thing).items()})
        return made

    def _reference(self, reference: weakref.ref[Any]) -> Any:
        target = reference()
        copied = self.tree(target)
        return reference if copied is target else weakref.ref(copied)


class _Uncopied:
    """Stands for an iterator or queue that has no copy: a count that would advance it ends with an error."""

    def __init__(self, place: str, kind: str) -> None:
        self.place, self.kind = place, kind

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelError(
            f"{self.place} is a {self.kind}, which a count would advance: it cannot be copied, so "
            "the training would miss what the count takes from it"
        )

    def __iter__(self) -> Any:
        return self

    __next__ = __await__ = send = throw = get = get_nowait = put = put_nowait = _refuse

    def close(self) -> None:
        """Nothing to close; the generator itself stays as it is."""


def _copy_of_generator(generator: torch.Generator) -> torch.Generator:
    made = torch.Generator(device=generator.device)
    made.set_state(generator.get_state())
    return made


def _copy_slots(thing: Any, shell: Any, tree: Callable[[Any], Any]) -> None:
    for cls in type(thing).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(thing, name):
                object.__setattr__(shell, name, tree(getattr(thing, name)))


def is_plain_object(cls: type) -> bool:
    """Whether objects of a class are the user's own: written in Python, no framework's, no enumeration."""
    if cls.__module__.split(".")[0] in sys.stdlib_module_names - {"__main__"}:
        return False
    bases = [base for base in cls.__mro__ if base is not object and base.__module__ != "typing"]
    return all(
        base.__flags__ & _HEAP_TYPE
        and base.__module__.split(".")[0] not in _FRAMEWORKS
        and not issubclass(base, (enum.Enum, BaseException, type))
        for base in bases
    )


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
    (types.SimpleNamespace, Shadow._namespace),
    (weakref.ref, Shadow._reference),
    (torch.Generator, lambda _, generator: _copy_of_generator(generator)),
    ((random.Random, bytearray, array.array, torch.autocast), lambda _, thing: copy.copy(thing)),
    (CACHE, Shadow._cached_function),
    (queue.Queue, Shadow._queue),
    (threading.local, Shadow._thread_local),
    ((types.GeneratorType, types.CoroutineType, queue.SimpleQueue), Shadow._uncopied),
)
"""How each type is copied. No attribute of a Shadow: it would refer to itself, and so keep the model."""
