"""Code as bytes that are the same in every process: bytecode, names and constants, no files or lines."""

from __future__ import annotations

import functools
import hashlib
import types
from typing import Any

from .code_names import codes


def pack(*parts: bytes) -> bytes:
    """One digest of several byte strings in order."""
    framed = [piece for part in parts for piece in (len(part).to_bytes(8, "little"), part)]
    return hashlib.sha256(b"".join(framed)).digest()


def name_of(thing: Any) -> bytes:
    """The name that a class or function was defined under."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    home = module if isinstance(module, str) else None  # a descriptor's text would have an address
    return f"{home}.{name or getattr(thing, '__name__', '')}".encode()


@functools.lru_cache(maxsize=16384)
def code_digest(code: types.CodeType) -> bytes:
    """The digest of a code object and the code objects inside it."""
    return pack(*(part for inner in codes(code) for part in _parts(inner)))


def _parts(code: types.CodeType) -> list[bytes]:
    constants = [_constant(c) for c in code.co_consts if not isinstance(c, types.CodeType)]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return [
        code.co_name.encode(),
        code.co_code,
        getattr(code, "co_exceptiontable", b""),
        repr(names).encode(),
        repr(arguments).encode(),
        pack(*constants),
    ]


def _constant(constant: Any) -> bytes:
    """A constant as written in the source."""
    if isinstance(constant, tuple):
        return pack(b"tuple", *map(_constant, constant))
    if isinstance(constant, frozenset):
        return pack(b"frozenset", *sorted(map(_constant, constant)))
    return f"{type(constant).__name__} {constant!r}".encode()
