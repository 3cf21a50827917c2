"""The names in the code of one function: globals, attributes of modules among them, and imports.

The bytecode is not interpreted. A name counts wherever it occurs, so more is found than a call would reach.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from .code_packages import home_of, is_read

_IMPORT = dis.opmap["IMPORT_NAME"]
_EXTENDED = dis.opmap["EXTENDED_ARG"]
_LOADS = {
    dis.opmap[name]: shift
    for name, shift in (
        ("LOAD_GLOBAL", int(sys.version_info >= (3, 11))),
        ("LOAD_NAME", 0),
        ("LOAD_FROM_DICT_OR_GLOBALS", 0),
    )
    if name in dis.opmap
}
"""Instructions that read a global, and by how many bits the index of its name is shifted."""
_GLOBAL_STORES = {dis.opmap["STORE_GLOBAL"]: 0, dis.opmap["DELETE_GLOBAL"]: 0}
_ATTRIBUTE_STORES = {dis.opmap["STORE_ATTR"]: 0, dis.opmap["DELETE_ATTR"]: 0}
_COMPOSING = frozenset({"BUILD_STRING", "BINARY_OP", "BINARY_ADD"})
_MISSING = object()


class NotImported(str):
    """The name of a module that a function would import and that is not imported yet."""

    __slots__ = ()


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, comprehensions and classes inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)


@functools.lru_cache(maxsize=16384)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Every name that a code object and those inside it use for globals, attributes and imports, in order."""
    return tuple(dict.fromkeys(name for inner in codes(code) for name in inner.co_names))


@functools.lru_cache(maxsize=16384)
def globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a code object and those inside it read as globals, in order."""
    return _named_by(code, _LOADS)


@functools.lru_cache(maxsize=16384)
def stored_globals_in(code: types.CodeType) -> tuple[str, ...]:
    """The names that a code object and those inside it bind as globals, by a `global` statement."""
    return _named_by(code, _GLOBAL_STORES)


@functools.lru_cache(maxsize=16384)
def stored_attributes_in(code: types.CodeType) -> tuple[str, ...]:
    """The attributes that a code object and those inside it write."""
    return _named_by(code, _ATTRIBUTE_STORES)


def _named_by(code: types.CodeType, instructions: dict[int, int]) -> tuple[str, ...]:
    """The names that certain instructions use, in order."""
    found: dict[str, None] = {}
    for inner in codes(code):
        content = inner.co_code
        operations = content[::2]
        for operation, shift in instructions.items():
            at = operations.find(operation)
            while at >= 0:
                number, scale, before = content[2 * at + 1], 8, at - 1
                while before >= 0 and operations[before] == _EXTENDED:
                    number |= content[2 * before + 1] << scale
                    scale, before = scale + 8, before - 1
                found[inner.co_names[number >> shift]] = None
                at = operations.find(operation, at + 1)
    return tuple(found)


@functools.lru_cache(maxsize=16384)
def composed_in(code: types.CodeType) -> tuple[str, ...]:
    """Parts of names that a code object composes for `getattr`: `run_` in `getattr(self, f"run_{mode}")`."""
    found: dict[str, None] = {}
    for inner in codes(code):
        if "getattr" not in inner.co_names:
            continue
        texts: list[str] | None = None
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "getattr":
                texts = []
            elif texts is not None:
                if isinstance(instruction.argval, str) and instruction.opname == "LOAD_CONST":
                    texts.append(instruction.argval)
                elif instruction.opname in _COMPOSING:
                    found.update(dict.fromkeys(texts))
                elif instruction.opname.startswith("CALL"):
                    texts = None
    return tuple(found)


@functools.lru_cache(maxsize=16384)
def texts_in(code: types.CodeType) -> tuple[str, ...]:
    """Constants that could be attribute names for `getattr`."""
    texts = (c for inner in codes(code) for c in inner.co_consts if isinstance(c, str) and c.isidentifier())
    return tuple(dict.fromkeys(texts))


def cells_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function closes over, by name; cells that are still empty are left out."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def references(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's names refer to now: globals, attributes of its modules, imported objects.

    For a function that reads the environment, also the variables that it may read.
    """
    names = names_in(function.__code__)
    known = function.__globals__
    for name in globals_in(function.__code__):
        value = known.get(name, _MISSING)
        if value is not _MISSING:
            yield name, value
            if isinstance(value, types.ModuleType):
                yield from _attributes(name, value, names)
    if "environ" in names or "getenv" in names:
        yield from ((f"environ {text}", os.environ.get(text)) for text in texts_in(function.__code__))
    package = str(known.get("__package__") or known.get("__name__") or "")
    for name in _loaded(_imports_of(function.__code__, package)):
        module = sys.modules.get(name)
        yield name, NotImported(name) if module is None else module
        if module is not None:
            yield from _attributes(name, module, names)


def _loaded(imports: tuple[tuple[str, tuple[str, ...]], ...]) -> Iterator[str]:
    """The modules that imports reach: the named one, and modules among the names imported from it."""
    for name, taken in imports:
        yield name
        if not taken:  # `import a.b` gives `a`
            yield name.partition(".")[0]
        yield from (f"{name}.{item}" for item in taken if f"{name}.{item}" in sys.modules)


def _attributes(path: str, module: types.ModuleType, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Attributes of a module, and of modules among them, that a code object names; imports nothing.

    For torch and other modules whose code is not read, only functions that other code has patched in.
    """
    waiting = [(path, module)]
    seen = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        is_open = is_read(module.__name__)
        own = vars(module)
        for name in names:
            value = own.get(name, _MISSING)
            if value is _MISSING:
                continue
            if isinstance(value, types.ModuleType):
                waiting.append((f"{path}.{name}", value))
            if is_open or (isinstance(value, types.FunctionType) and is_read(home_of(value))):
                yield f"{path}.{name}", value


@functools.lru_cache(maxsize=16384)
def _imports_of(code: types.CodeType, package: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The full names of modules that a code object imports when run, each with the names imported from it."""
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    for inner in codes(code):
        if _IMPORT not in inner.co_code[::2]:
            continue
        before: list[Any] = [0, None]  # a relative import's level and the imported names are loaded first
        for instruction in dis.get_instructions(inner):
            if instruction.opname == "IMPORT_NAME":
                level, taken = before
                name = _absolute(str(instruction.argval), level if isinstance(level, int) else 0, package)
                found[name, taken if isinstance(taken, tuple) else ()] = None
            elif instruction.opname != "EXTENDED_ARG":
                before = [before[1], instruction.argval]
    return tuple(found)


def _absolute(name: str, level: int, package: str) -> str:
    if not level:
        return name
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except (ImportError, ValueError):
        return name
