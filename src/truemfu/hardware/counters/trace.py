"""Counter traces: samples, one line of JSON each, recorded on one machine and replayed on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...errors import CounterError, RecordError, ReplayEnded, warn_once
from ...plain_files import read_given
from .samples import CounterSample, CounterSource, GpuInfo

TRACE_VERSION = 1


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="gpus"):
    """The first line of a trace."""

    version: int = TRACE_VERSION
    gpus: tuple[GpuInfo, ...]
    note: str | None = None


class _Failure(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="error"):
    """A read that failed."""

    index: int
    message: str


class Recorder:
    """A source that records all samples of another, one line of JSON each, for `Replay`.

    A write error ends the recording, not the reading.
    """

    def __init__(self, source: CounterSource, path: str | Path, *, note: str | None = None) -> None:
        self._source = source
        self._path = Path(path)
        try:
            self._file: Any = self._path.open("wb")
        except OSError as problem:
            raise CounterError(f"cannot write the trace {self._path}: {problem.strerror}") from None
        self._write(_Header(gpus=tuple(source.gpus()), note=note))

    def gpus(self) -> Sequence[GpuInfo]:
        return self._source.gpus()

    def read(self, index: int) -> CounterSample:
        try:
            sample = self._source.read(index)
        except CounterError as problem:
            if not isinstance(problem, ReplayEnded):
                self._write(_Failure(index=index, message=str(problem)))
            raise
        self._write(sample)
        return sample

    def close(self) -> None:
        self._source.close()
        if self._file is not None:
            self._file.close()

    def _write(self, line: msgspec.Struct) -> None:
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
        except OSError as problem:
            self._file = None
            warn_once(f"the trace {self._path} is incomplete from here on: {problem.strerror}")


class Replay:
    """A source that replays the samples of a trace, in order for each GPU, including failures.

    `note` is the trace's own description of its origin.
    """

    def __init__(self, path: str | Path) -> None:
        header, lines = _trace(Path(path))
        self._gpus = header.gpus
        self.note = header.note
        self._lines: dict[int, Iterator[CounterSample | _Failure]] = {
            gpu.index: iter([line for line in lines if line.index == gpu.index]) for gpu in self._gpus
        }

    def gpus(self) -> Sequence[GpuInfo]:
        return self._gpus

    def read(self, index: int) -> CounterSample:
        line = next(self._lines[index], None)
        if line is None:
            raise ReplayEnded(f"the trace has no more samples of GPU {index}")
        if isinstance(line, _Failure):
            raise CounterError(line.message)
        return line

    def close(self) -> None:
        """Nothing to release: the file was read at once."""


def _trace(path: Path) -> tuple[_Header, list[CounterSample | _Failure]]:
    try:
        raw = read_given(path).splitlines()
    except OSError as problem:
        raise RecordError(f"cannot read the trace {path}: {problem.strerror}") from None
    decoder = msgspec.json.Decoder(_Header | CounterSample | _Failure)
    lines: list[CounterSample | _Failure] = []
    header: _Header | None = None
    for number, text in enumerate(raw, 1):
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as problem:
            if header is not None and number == len(raw):
                break  # the writer was stopped in the middle of a line
            raise RecordError(f"{path}, line {number}: not a counter trace: {problem}") from None
        if isinstance(line, _Header):
            header = line
        else:
            lines.append(line)
    if header is None or header.version > TRACE_VERSION:
        found = "no header" if header is None else f"version {header.version}"
        raise RecordError(f"{path}: expected a counter trace of version {TRACE_VERSION}, got {found}")
    return header, lines
