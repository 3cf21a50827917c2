"""An existing log, read in pieces: where its last row ends, and the valid rows of a damaged one.

    [
    {"global_step": 1, ...},        a piece ends where a row's line does: ",\\n"
    {"global_step": 2, ...}
    ]

The file may have any size and content, and is read in the training process: the memory in use is bounded. A
row is a JSON object with an integer as `global_step`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from math import isfinite
from typing import Any, NamedTuple

import msgspec

_PIECE = 1 << 18
"""Bytes processed at once, which holds the GIL for a millisecond or two."""
_LONGEST_ROW = 1 << 24
_BLANK = b"\0 \t\r\n"
"""Zeros too: a machine that crashed may leave them at the end of a file."""
_BETWEEN_ROWS = b",\n"
_ROWS = msgspec.json.Decoder(list[dict[str, Any]])
_ROW_BEGINS = re.compile(rb'\{\s*"global_step"')
_OUTSIDE_ROWS = b"[],\0 \t\r\n"


class LastRow(NamedTuple):
    """Where the last complete row of a log ends, 0 if there is none, and how many rows there are."""

    at: int
    rows: int


def find_end(fd: int) -> LastRow | None:
    """The end of a log that is valid except for a partial last row; None if it is damaged."""
    found = LastRow(0, 0)
    for begin, piece, is_last in _pieces(fd, _text_size(fd)):
        opening = b"" if begin == 0 else b"[\n"
        text = opening + piece
        if not is_last and not piece.endswith(_BETWEEN_ROWS):
            return None
        whole = _whole_rows(text) if is_last else text.rstrip(_BLANK).removesuffix(b",")
        rows = None if whole is None else _rows_in(whole + b"]")
        if whole is None or rows is None:
            return None
        if rows:
            found = LastRow(begin + len(whole) - len(opening), found.rows + rows)
    return found


def rows_of_damaged(fd: int) -> Iterator[bytes | None]:
    """The rows of a damaged log, each on one line; None for each part that is not a row."""
    buffer, at, size, is_end = b"", 0, _text_size(fd), False
    while not is_end:
        piece = os.pread(fd, min(_PIECE, size - at), at)
        buffer, at, is_end = buffer + piece, at + len(piece), not piece
        begins = [found.start() for found in _ROW_BEGINS.finditer(buffer)]
        is_all = is_end or len(buffer) >= _LONGEST_ROW
        if len(begins) < 2 and not is_all:
            continue
        rest = len(buffer) if is_all else begins.pop()  # the last row may not be complete yet
        ends = [*begins[1:], rest]
        if buffer[: begins[0] if begins else rest].strip(_OUTSIDE_ROWS):
            yield None
        for begin, end in zip(begins, ends, strict=False):
            yield from _row_and_rest(buffer[begin:end])
        buffer = buffer[rest:]


def _row_and_rest(text: bytes) -> Iterator[bytes | None]:
    """A row, and None if there is other text between it and the next."""
    try:
        decoded = text.decode(errors="surrogateescape")  # the text after the row may be anything
        value, end = _STRICT.raw_decode(decoded)
        row = decoded[:end].encode()
        if b"\n" in row:
            row = json.dumps(value).encode()
        if _rows_in(b"[" + row + b"]") is None:
            raise ValueError("not a row")
    except (ValueError, RecursionError):  # UnicodeEncodeError is a ValueError
        yield None
        return
    yield row
    if decoded[end:].encode(errors="surrogateescape").strip(_OUTSIDE_ROWS):
        yield None


def _text_size(fd: int) -> int:
    """The size of the file without the blanks and zeros at its end."""
    end = os.fstat(fd).st_size
    while end:
        begin = max(end - _PIECE, 0)
        text = os.pread(fd, end - begin, begin).rstrip(_BLANK)
        if text:
            return begin + len(text)
        end = begin
    return 0


def _pieces(fd: int, size: int) -> Iterator[tuple[int, bytes, bool]]:
    """The file in pieces of complete rows, each with its offset and whether it is the last."""
    begin, buffer = 0, b""
    while begin + len(buffer) < size:
        piece = os.pread(fd, min(_PIECE, size - begin - len(buffer)), begin + len(buffer))
        if not piece:  # truncated since its size was read
            size = begin + len(buffer)
        buffer += piece
        cut = buffer.rfind(_BETWEEN_ROWS)
        is_last = begin + len(buffer) >= size
        if is_last:
            yield begin, buffer, True
        elif cut >= 0 or len(buffer) >= _LONGEST_ROW:
            end = len(buffer) if cut < 0 else cut + len(_BETWEEN_ROWS)
            yield begin, buffer[:end], False
            begin, buffer = begin + end, buffer[end:]


def _whole_rows(text: bytes) -> bytes | None:
    """The end of a log up to its last complete row, without the closing bracket; None if damaged."""
    text = text.rstrip(_BLANK)
    if text.endswith(b"]"):
        return text[:-1].rstrip()
    # Interrupted during a write: the last row may be complete or partial; rows end at line ends.
    for torn in (text, text[: max(text.rfind(b"\n"), 0)]):
        rows = torn.rstrip().removesuffix(b",")
        if rows and _rows_in(rows + b"]") is not None:
            return rows
    return None


def _rows_in(text: bytes) -> int | None:
    """How many rows this JSON array has; None if it is invalid, or contains anything else."""
    try:
        rows = _ROWS.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        try:  # a lone surrogate, which json writes and msgspec rejects
            rows = _STRICT.decode(text.decode())
        except (ValueError, RecursionError):
            return None
    is_whole = isinstance(rows, list) and all(
        isinstance(row, dict) and type(row.get("global_step")) is int for row in rows
    )
    return len(rows) if is_whole else None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not valid JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _refuse(text)


_STRICT = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)
"""Rejects NaN, infinities and numbers that overflow to infinity."""
