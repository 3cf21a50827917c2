"""Which models cannot be counted beside their training, told from their code before anything runs.

A count off the training thread cannot undo what a model's forward does to the process: it may draw from
Python's or numpy's random numbers, set a switch of torch, or call code it has compiled itself. What the
methods of the model's modules refer to shows that in milliseconds. What their helper functions refer to may
never be reached, so there a wire is laid instead: calling one ends the count with `NeedsTrainingThread`.
"""

from __future__ import annotations

import dis
import random
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..errors import NeedsTrainingThread
from .shadow import unwrap

_SWITCHES = {
    "manual_seed": "seeds torch's random numbers",
    "set_rng_state": "sets a random state",
    "fork_rng": "sets a random state",
    "sdpa_kernel": "chooses attention kernels for the whole process",
    "flex_attention": "uses flex attention, which calls the compiler",
    "set_stance": "sets the compiler's stance",
    "set_default_dtype": "sets the default dtype",
    "set_float32_matmul_precision": "sets the precision of products",
    "use_deterministic_algorithms": "switches between algorithms",
    "set_num_threads": "sets the number of threads",
    "catch_warnings": "changes the filters of warnings",
}
_HELPERS_DEEP = 2
_BOUND = (types.MethodType, types.BuiltinMethodType)


def needs_training_thread(model: nn.Module, batch: Any) -> str | None:
    """Why a count of this model on this batch must run on the training thread; None if it need not."""
    model = unwrap(model)
    inputs = tree_flatten(dict(batch) if isinstance(batch, Mapping) else batch)[0]
    if any(isinstance(t, torch.Tensor) and t.is_nested for t in inputs):
        return "a batch of jagged tensors is counted with attention kernels chosen for the whole process"
    hooks = nn.modules.module
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
        if getattr(hooks, name):
            return "hooks on all modules of the process would run in the count too"
    seen: set[types.CodeType] = set()
    for module in model.modules():
        kind = type(module).__name__
        if isinstance(module, nn.RNNBase) and any(p.is_cuda for p in module.parameters(recurse=False)):
            return f"{kind} on CUDA is counted with cuDNN switched off for the whole process"
        for function in _methods(module):
            if function.__code__ not in seen:
                seen.add(function.__code__)
                reason = _reason(function)
                if reason is not None:
                    return f"{kind}.{function.__name__} {reason}"
    return None


def lay_wires(model: nn.Module) -> None:
    """Make a shadow's methods raise `NeedsTrainingThread` where a helper would disturb the training."""
    for module in model.modules():
        for function in _methods(module):
            name = function.__name__
            plain = type(module).__dict__.get(name, getattr(type(module), name, None)) is function
            if plain and name not in vars(module) and (wired := _wired(function)) is not function:
                vars(module)[name] = types.MethodType(wired, module)


def _methods(module: nn.Module) -> Iterator[types.FunctionType]:
    """The functions that a module's forward is made of: its own, and methods that these refer to by name.

    Torch's own classes are left out, and so is what only builds or saves the module.
    """
    own = vars(module).get("forward")
    if isinstance(own, types.MethodType) and isinstance(own.__func__, types.FunctionType):
        yield own.__func__
    classes = [c for c in type(module).__mro__ if c.__module__.partition(".")[0] not in ("torch", "builtins")]
    seen: set[str] = set()
    names = {"forward", "__call__"}
    while names:
        seen |= names
        found = [f for c in classes for name in names if (f := _function(vars(c).get(name))) is not None]
        yield from found
        names = {n for f in found for w in _wrapped(f) for code in _codes(w.__code__) for n in code.co_names}
        names -= seen


def _function(attribute: Any) -> types.FunctionType | None:
    """The function behind an attribute of a class: a method of any kind, or a property."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, (staticmethod, classmethod)):
        attribute = attribute.__func__
    return attribute if isinstance(attribute, types.FunctionType) else None


def _wrapped(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """A function and those that its decorators close over."""
    yield function
    for cell in function.__closure__ or ():
        inner = _contents(cell)
        if isinstance(inner, types.FunctionType) and inner is not function:
            yield from _wrapped(inner)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions, loops and lambdas written inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _imports(code: types.CodeType) -> bool:
    """Whether a code imports something while it runs."""
    return any(instruction.opname == "IMPORT_NAME" for instruction in dis.get_instructions(code))


def _reason(function: types.FunctionType) -> str | None:
    """What a function does to the process by itself, as a clause; None if nothing shows."""
    if _is_compiled(function):
        return "is compiled, and a count would have to switch the compiler off for all threads"
    for wrapped in _wrapped(function):
        for code in _codes(wrapped.__code__):
            names = set(code.co_names)
            for name in names & _SWITCHES.keys():
                return _SWITCHES[name]
            if "random" in names and "random" not in wrapped.__globals__ and _imports(code):
                return "imports a generator of random numbers that the process shares"
            for name in names:
                value = wrapped.__globals__.get(name)
                if _draws(value) or ("random" in names and getattr(value, "__name__", "") == "numpy"):
                    return "draws random numbers from a generator that the process shares"
                if _is_compiled(value):
                    return f"calls {name}, which is compiled"
    return None


def _draws(value: Any) -> bool:
    """Whether a global is a shared source of random numbers, or a function of one."""
    numpy_random = sys.modules.get("numpy.random")
    if value is random or (value is not None and value is numpy_random):
        return True
    owner = getattr(value, "__self__", None) if isinstance(value, _BOUND) else None
    shared = getattr(getattr(numpy_random, "mtrand", None), "_rand", None)
    return owner is not None and (owner is getattr(random, "_inst", None) or owner is shared)


def _is_compiled(value: Any) -> bool:
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (nn.Module, type, types.ModuleType)):
        return False
    return "_torchdynamo_orig_callable" in attributes and not attributes.get("_torchdynamo_disable")


def _wired(function: types.FunctionType) -> types.FunctionType:
    """A function whose risky helpers are replaced by wires; the function itself where it has none."""
    wires = {}
    for code in _codes(function.__code__):
        for name in code.co_names:
            helper = function.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and (reason := _deep_reason(helper, _HELPERS_DEEP)):
                wires[name] = _wire(f"{function.__qualname__} calls {name}, which {reason}")
    cells = [_wired_cell(cell, function) for cell in function.__closure__ or ()]
    if not wires and all(a is b for a, b in zip(cells, function.__closure__ or (), strict=True)):
        return function
    copied = types.FunctionType(
        function.__code__,
        {**function.__globals__, **wires},
        function.__name__,
        function.__defaults__,
        tuple(cells) or None,
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__.update(function.__dict__)
    return copied


def _wired_cell(cell: types.CellType, outside: types.FunctionType) -> types.CellType:
    inner = _contents(cell)
    if not isinstance(inner, types.FunctionType) or inner is outside:
        return cell
    wired = _wired(inner)
    return cell if wired is inner else types.CellType(wired)


def _deep_reason(function: types.FunctionType, depth: int) -> str | None:
    """What a function, or one that it calls by name, does to the process."""
    if function.__module__.partition(".")[0] in ("torch", "truemfu"):
        return None
    reason = _reason(function)
    if reason is not None or not depth:
        return reason
    for code in _codes(function.__code__):
        for name in code.co_names:
            helper = function.__globals__.get(name)
            if isinstance(helper, types.FunctionType) and helper is not function:
                reason = _deep_reason(helper, depth - 1)
                if reason is not None:
                    return reason
    return None


def _wire(reason: str) -> Any:
    def wire(*args: Any, **kwargs: Any) -> Any:
        raise NeedsTrainingThread(reason)

    return wire
