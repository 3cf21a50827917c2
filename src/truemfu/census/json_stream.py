"""The events of a Chrome trace, read one by one from a file of any size, plain or gzip.

    file ─► pieces of text ─► header values ─► `traceEvents`: one event at a time ─► the values after them

An object is decoded as soon as it is whole, and nothing is kept. A file that ends too early gives what was
whole, and `cut` says where.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from ..errors import RecordError

_PIECE = 1 << 20
_LARGEST_VALUE = 64 << 20
"""In characters: no event is nearly as long, so a longer one is not a trace."""
_LONGEST_TOKEN = 32
"""Of what is cut in the middle, apart from texts: a number, an escape."""
_EVENTS = "traceEvents"
_BLANK = " \t\r\n"


class EventStream:
    """Iterate once; then `header` has the other values, and `cut` says where the file ends early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}
        self.cut: str | None = None
        self.events = 0
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._text, self._at, self._read, self._has_ended = "", 0, 0, False
        self._more: Callable[[], str] = lambda: ""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            file = _opened(self.path)
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with file:
            self._more = lambda: self._piece(file, decoder)
            try:
                yield from self._top()
            except EOFError:
                self.cut = (
                    f"{self.path.name} is cut off after {self._read / 1e6:,.1f} MB: "
                    f"{self.events:,} whole events were read"
                )

    def _piece(self, file: IO[bytes], decoder: codecs.IncrementalDecoder) -> str:
        """More text; empty at the end."""
        try:
            data = file.read(_PIECE)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            data = b""
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}") from None
        self._read += len(data)
        return decoder.decode(data) if data else ""

    def _top(self) -> Iterator[dict[str, Any]]:
        first = self._next_sign()
        if first == "[":  # the array alone, as other tools write it
            yield from self._array()
            return
        if first != "{":
            raise RecordError(f"{self.path} is not a trace: it should begin with {{ or [, and has {first!r}")
        has_events = False
        while (sign := self._next_sign()) != "}":
            if sign == ",":
                continue
            self._at -= 1
            key = self._value()
            if self._next_sign() != ":" or not isinstance(key, str):
                raise self._invalid("expected a key and a colon")
            if key == _EVENTS:
                if self._next_sign() != "[":
                    raise self._invalid(f"{_EVENTS} is not a list")
                has_events = True
                yield from self._array()
            else:
                self._next_sign()
                self._at -= 1
                self.header[key] = self._value()
        if not has_events:
            raise RecordError(f"{self.path} is not a trace: it has no {_EVENTS}")

    def _array(self) -> Iterator[dict[str, Any]]:
        while (sign := self._next_sign()) != "]":
            if sign == ",":
                continue
            self._at -= 1
            event = self._value()
            self.events += 1
            if isinstance(event, dict):
                yield event

    def _next_sign(self) -> str:
        """The next character that is not blank."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _BLANK:
                at += 1
            if at < len(text):
                self._at = at + 1
                return text[at]
            self._at = at
            self._fill()

    def _value(self) -> Any:
        """The next value, whole."""
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                left = len(self._text) - error.pos
                may_go_on = left <= _LONGEST_TOKEN or error.msg.startswith("Unterminated")
                if not may_go_on or len(self._text) - self._at > _LARGEST_VALUE:
                    raise self._invalid(error.msg) from None
                self._fill()
                continue
            except RecursionError:
                raise self._invalid("nested too deeply") from None
            if end == len(self._text) and not self._has_ended and not isinstance(value, (dict, list)):
                self._fill()  # a number may go on
                continue
            self._at = end
            return value

    def _fill(self) -> None:
        """Read more; EOFError at the end of the file."""
        if self._has_ended:
            raise EOFError
        piece = self._more()
        self._has_ended = not piece
        self._text, self._at = self._text[self._at :] + piece, 0

    def _invalid(self, what: str) -> RecordError:
        return RecordError(
            f"{self.path} is not valid JSON after event {self.events:,} "
            f"({self._read / 1e6:,.1f} MB read): {what}"
        )


def _opened(path: Path) -> IO[bytes]:
    """The file, decompressed if it is gzip."""
    file = open(path, "rb")  # noqa: SIM115  # closed by the caller
    if file.peek(2)[:2] == b"\x1f\x8b":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return file
