"""The identity of a model, for counts that are reused: the same text for the same work in any process.

    structure, parameters, buffers, switches and attributes of all modules ─┐
    code of every forward, its helpers and hooks, and the values they name ─┤
    registered formulas ────────────────────────────────────────────────────┼─► SHA-256
    versions of Python, torch and every package the code comes from ────────┤
    truemfu's own sources that count, and torch's switches ─────────────────┘

Values of parameters and buffers are not part of it; those of other tensors and arrays are. A false difference
costs a new count; a false match would give a wrong number. So if anything cannot be read, the identity is
None and the count is not stored.
"""

from __future__ import annotations

import functools
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ... import __version__
from ..operators import formulas as _formulas  # registers truemfu's own formulas
from ..registry import MODULE_FORMULAS, OPERATOR_FORMULAS
from ..wrappers import module_of, unwrap, unwrap_fsdp
from .code_digest import name_of, pack
from .code_packages import is_read, version_of
from .compiled_code import Unreadable, is_compiled
from .held_values import OF_TORCH, forward_hooks, global_hooks
from .model_code import ModelCode
from .value_bytes import tensor_digest
from .value_digest import ValueDigest

_OWN_SOURCES = ("flops", "convention.py")


def model_identity(model: nn.Module, *also: Any) -> str | None:
    """A SHA-256 that differs whenever the FLOPs of a step on the same batch could; None if unreadable.

    `also` are other parts of the step than the model, such as a loss function. Never raises.
    """
    try:
        return _Identity(unwrap(model)).digest(also).hex()
    except Exception:  # any object may raise when inspected: the count is then not stored
        return None


class _Identity:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        registered = frozenset(map(id, (*model.parameters(), *model.buffers())))
        self._values = ValueDigest(self._numbers, self._module, registered)

    def digest(self, also: tuple[Any, ...]) -> bytes:
        formulas = [*OPERATOR_FORMULAS.values(), *MODULE_FORMULAS.values()]
        code = ModelCode(self._model, *also, *formulas)
        if not code.is_complete:
            raise Unreadable("the model has too much code")
        parts = [
            self._module(self._model),
            *map(self._values.of, (*also, *global_hooks())),
            self._formulas(),
            self._code(code),
        ]
        return pack(*parts, _process_state(), self._versions())

    def _number(self, thing: Any) -> tuple[bytes, bool]:
        """The number of a module or tensor, and whether it is a new one."""
        is_new = id(thing) not in self._numbers
        if is_new:
            self._numbers[id(thing)] = len(self._numbers)
            self._alive.append(thing)
        return b"%d" % self._numbers[id(thing)], is_new

    def _module(self, wrapped: nn.Module) -> bytes:
        """A module and its descendants."""
        module = unwrap(wrapped)
        number, is_new = self._number(module)
        if not is_new:
            return b"again " + number
        _check_forward(module)
        cls, dtype = unwrap_fsdp(module)
        self._values.packages.add(module_of(cls).partition(".")[0])
        own = {name: value for name, value in vars(module).items() if name not in OF_TORCH}
        tensors = [
            part
            for kind in (module._parameters, module._buffers)
            for name, tensor in kind.items()
            for part in (name.encode(), self._tensor(tensor))
        ]
        children = [
            part
            for name, child in module._modules.items()
            for part in (name.encode(), b"None" if child is None else self._module(child))
        ]
        # Children come before attributes, so that an attribute that refers to a module finds its number.
        return pack(
            number,
            name_of(cls),
            str(dtype).encode(),
            b"training" if module.training else b"evaluation",
            pack(*tensors),
            pack(*children),
            pack(*map(self._values.of, forward_hooks(module))),
            self._values.attributes(own, cls),
        )

    def _tensor(self, tensor: torch.Tensor | None) -> bytes:
        if tensor is None:
            return b"None"
        number, is_new = self._number(tensor)
        if is_new and is_lazy(tensor):
            raise Unreadable("a parameter has no shape yet")
        return number + tensor_digest(tensor) if is_new else b"again " + number

    def _formulas(self) -> bytes:
        by_operator = [
            part
            for name in sorted(OPERATOR_FORMULAS)
            for part in (name.encode(), self._formula(OPERATOR_FORMULAS[name]))
        ]
        by_module = sorted(pack(name_of(cls), self._formula(f)) for cls, f in MODULE_FORMULAS.items())
        return pack(pack(*by_operator), *by_module)

    def _formula(self, formula: Any) -> bytes:
        is_ours = not is_read(getattr(formula, "__module__", None))
        return name_of(formula) if is_ours else self._values.of(formula)

    def _code(self, code: ModelCode) -> bytes:
        """Functions with what their names refer to, and the class members that these reach."""
        of = self._values.of
        functions = []
        for function in code.functions:
            named = (pack(name.encode(), of(value)) for name, value in code.references[id(function)])
            functions.append(pack(of(function), *named))
        functions.sort()
        members = sorted(pack(name_of(cls), name.encode(), of(value)) for cls, name, value in code.members)
        classes = sorted(pack(*map(name_of, cls.__mro__)) for cls in code.classes)
        return pack(pack(*functions), pack(*members), pack(*classes))

    def _versions(self) -> bytes:
        found = {name: version_of(name) for name in sorted(self._values.packages)}
        return repr([(name, version) for name, version in found.items() if version is not None]).encode()


def _check_forward(module: nn.Module) -> None:
    """Raise `Unreadable` if a module's forward is not Python code."""
    if isinstance(module, torch.jit.ScriptModule):
        raise Unreadable(f"{type(module).__name__} is TorchScript")
    for attributes in (vars(module), *map(vars, type(module).__mro__)):
        if "forward" in attributes:
            if is_compiled(attributes["forward"]):
                raise Unreadable(f"the forward of {type(module).__name__} is compiled")
            return


def _process_state() -> bytes:
    """What a count depends on besides the model: versions, our own sources, torch's switches."""
    cuda = torch.backends.cuda
    switches = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.mkldnn.is_available(),
        str(torch.get_default_dtype()),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        _switch(torch.backends.cudnn, "allow_tf32"),
        _switch(cuda.matmul, "allow_tf32"),
    )
    versions = (*sys.version_info[:2], sys.implementation.name, torch.__version__, __version__)
    return pack(repr(versions).encode(), repr(switches).encode(), _own_sources())


def _switch(home: Any, name: str) -> str:
    """A switch of torch; some releases warn or raise if it was set by its newer name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return str(getattr(home, name))
        except (AttributeError, RuntimeError):
            return str(getattr(home, "fp32_precision", None))


@functools.lru_cache(maxsize=1)
def _own_sources() -> bytes:
    """Digest of truemfu's counting sources, so that counts of another version are never reused."""
    package = Path(__file__).parents[2]
    files: list[Path] = []
    for source in _OWN_SOURCES:
        path = package / source
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return pack(*(file.read_bytes() for file in files))


assert _formulas
