"""An existing log, read in pieces: where its last row ends, and the valid rows of a damaged one.

    [
    {"global_step": 1, ...},        a part: a row, and what follows it up to the next
    {"global_step": 2, ...}
    ]

The file may have any size and content, and is read in the training process: the memory in use is bounded. A
row is a JSON object that begins with an integer `global_step`. A report reads a damaged log in the same way.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from math import isfinite
from typing import Any, NamedTuple

import msgspec

_PIECE = 1 << 18
"""Bytes processed at once, which holds the GIL for a millisecond or two."""
_LONGEST_ROW = 1 << 24
_BLANK = b"\0 \t\r\n"
"""Zeros too: a machine that crashed may leave them at the end of a file."""
_OUTSIDE_ROWS = b"[]," + _BLANK
_ROW_BEGINS = re.compile(rb'\{\s*"global_step"')
_TORN_ROW = rb'(\{("([a-z_]*|global_step"[^\n]*(?<!\])))?)?'
"""What an interrupted write leaves of a row, which has no newline."""
_NO_ROW_YET = re.compile(rb"(\[\s*(\]|" + _TORN_ROW + rb"))?")
_AFTER_LAST_ROW = re.compile(rb"\]?|,\s*" + _TORN_ROW)


class LastRow(NamedTuple):
    """Where the last complete row of a log ends, 0 if there is none, and how many rows there are."""

    at: int
    rows: int


def pieces_of(fd: int) -> Iterator[bytes]:
    """A file in pieces, from its begin."""
    at = 0
    while piece := os.pread(fd, _PIECE, at):
        at += len(piece)
        yield piece


def find_end(pieces: Iterable[bytes]) -> LastRow | None:
    """The end of a log that is valid except for a partial last row; None if it is damaged."""
    at, rows, before = 0, 0, b""
    for part in _parts(pieces):
        if part.row is not None:
            if before.strip(_BLANK) != (b"," if rows else b"["):
                return None
            at, rows, before = part.end, rows + 1, b""
        before += part.rest
        if len(before) > _LONGEST_ROW:
            return None
    end = _AFTER_LAST_ROW if rows else _NO_ROW_YET
    return LastRow(at, rows) if end.fullmatch(before.strip(_BLANK)) else None


def rows_of_damaged(pieces: Iterable[bytes]) -> Iterator[bytes | None]:
    """The rows of a damaged log, each on one line; None for each part that is not a row."""
    for part in _parts(pieces):
        if part.row is not None:
            yield part.row
        if part.rest.strip(_OUTSIDE_ROWS):
            yield None


class _Part(NamedTuple):
    """A row on one line, where it ends in the file, and what follows; without a row all is `rest`."""

    row: bytes | None
    end: int
    rest: bytes


def _parts(pieces: Iterable[bytes]) -> Iterator[_Part]:
    """The file in parts: a row and what follows it; what is before the first row is one too."""
    at, buffer = 0, b""
    for piece in chain(pieces, [b""]):
        buffer += piece
        begins = [found.start() for found in _ROW_BEGINS.finditer(buffer)]
        is_all = not piece or len(buffer) >= _LONGEST_ROW
        if is_all or len(begins) > 1:
            rest = len(buffer) if is_all else begins.pop()  # the last row may not be complete yet
            for begin, end in pairwise((0, *begins, rest)):
                if begin < end:
                    yield _part(at + begin, buffer[begin:end])
            at, buffer = at + rest, buffer[rest:]


def _part(at: int, text: bytes) -> _Part:
    row = text.rstrip(_OUTSIDE_ROWS)
    try:
        if b"\n" not in row and _is_row(_DECODER.decode(row)):
            return _Part(row, at + len(row), text[len(row) :])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass  # more text follows, or a lone surrogate, which json writes and msgspec rejects
    try:
        decoded = text.decode(errors="surrogateescape")  # the text after the row may be anything
        value, end = _STRICT.raw_decode(decoded)
        row = decoded[:end].encode()
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        return _Part(None, at, text)
    if not _is_row(value):
        return _Part(None, at, text)
    one_line = json.dumps(value).encode() if b"\n" in row else row
    return _Part(one_line, at + len(row), text[len(row) :])


def _is_row(value: Any) -> bool:
    return isinstance(value, dict) and type(value.get("global_step")) is int


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _refuse(text)


_DECODER = msgspec.json.Decoder(dict[str, Any])
_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Rejects NaN, infinities and numbers that overflow to infinity."""
