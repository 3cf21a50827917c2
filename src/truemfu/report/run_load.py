"""A monitored run read back from its folder: what is true of it, and its rows.

    training_run.json ─► RunRecord       what is true of the run, and at its end the summary
    training_log.json ─► LogRow …        one row a logged step; of two rows of one step the last counts

Both may be damaged, or one may be missing: a run that was killed, a file copied while it grew. What can be
read is read, and what could not be is said in `notes`. The files may have been copied from anywhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import RecordError, UsageError
from ..records import LOG_FILE, RUN_FILE, RunRecord, read_record

_WITHOUT_RECORD = "device, versions and the run's summary are not known, and what is shown comes from its log"


class LogRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A row of the log, as far as the report shows it; everything else in it is left alone."""

    global_step: int
    loss: float | None = msgspec.field(name="training/loss", default=None)
    step_time_s: float | None = msgspec.field(name="perf/step_time", default=None)
    mfu: float | None = msgspec.field(name="perf/mfu", default=None)
    hfu: float | None = msgspec.field(name="perf/hfu", default=None)
    tflops_per_gpu: float | None = msgspec.field(name="perf/tflops_per_gpu", default=None)
    tokens_per_s: float | None = msgspec.field(name="perf/tokens_per_second", default=None)
    samples_per_s: float | None = msgspec.field(name="perf/samples_per_second", default=None)
    padding_efficiency: float | None = msgspec.field(name="perf/padding_efficiency", default=None)
    data_wait_s: float | None = msgspec.field(name="perf/data_wait", default=None)
    method: str | None = msgspec.field(name="perf/method", default=None)
    hfu_method: str | None = msgspec.field(name="perf/hfu_method", default=None)
    """What the executed work rests on, where that is not the count."""
    is_warmup: bool = msgspec.field(name="perf/warmup", default=False)
    non_finite: dict[str, str] = {}
    """Which metric was no finite number, and which kind: its own value is then None."""


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run as its files tell it."""

    folder: Path
    record: RunRecord | None
    """None where there is no run file, or none that can be read."""
    rows: tuple[LogRow, ...]
    """By step, each step once."""
    notes: tuple[str, ...] = ()
    """What is wrong with the files."""


def holds_run(folder: Path) -> bool:
    """Whether a monitor has written here."""
    return (folder / RUN_FILE).is_file() or (folder / LOG_FILE).is_file()


def load_run(folder: Path | str) -> LoadedRun:
    """Read the run in `folder`, the `output_dir` of a TrainingMonitor."""
    folder = Path(folder)
    if not holds_run(folder):
        raise UsageError(f"{folder} holds no run: expected {RUN_FILE} or {LOG_FILE}")
    notes: list[str] = []
    record = _record(folder / RUN_FILE, notes)
    log_name = LOG_FILE if record is None else Path(record.log_file).name
    rows = _rows(folder / log_name, notes)
    if record is not None and record.summary is not None:
        logged = record.summary.steps
        if logged is not None and len(rows) > logged:
            notes.append(
                f"the log holds {len(rows):,} steps, the summary is of the last start alone: {logged:,} steps"
            )
    return LoadedRun(folder=folder, record=record, rows=rows, notes=tuple(notes))


def _record(path: Path, notes: list[str]) -> RunRecord | None:
    if not path.is_file():
        notes.append(f"{path.name} is missing: {_WITHOUT_RECORD}")
        return None
    try:
        record = read_record(path, RunRecord)
    except RecordError as error:
        notes.append(f"{error}".replace(str(path), path.name) + f"; {_WITHOUT_RECORD}")
        return None
    if record.summary is None:
        notes.append(
            "the run has no summary yet: it is still going on, or it ended without closing its monitor; "
            "what is shown comes from its log"
        )
    return record


def _rows(path: Path, notes: list[str]) -> tuple[LogRow, ...]:
    """The rows of the log by step."""
    try:
        data = path.read_bytes()
    except OSError as error:
        notes.append(f"{path.name} cannot be read, so there are no charts: {error.strerror}")
        return ()
    try:
        found = msgspec.json.decode(data, type=list[LogRow])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found, unread = _whole_rows(data)
        cut = not data.rstrip(b"\0 \t\r\n").endswith(b"]")
        what = "is cut off" if cut else "is damaged"
        notes.append(f"{path.name} {what}: {len(found):,} rows were read, {unread:,} could not be")
    by_step = {row.global_step: row for row in found}
    if again := len(found) - len(by_step):
        what = "1 row is" if again == 1 else f"{again:,} rows are"
        notes.append(f"{what} of a step that was logged again (the run was restarted): the last row counts")
    return tuple(by_step[step] for step in sorted(by_step))


_ROW_BEGINS = re.compile(r"\n\s*\{")


def _whole_rows(data: bytes) -> tuple[list[LogRow], int]:
    """Every row of a damaged log that is whole, and how many are not."""
    text = data.decode("utf-8", errors="replace")
    parse = json.JSONDecoder().raw_decode
    rows: list[LogRow] = []
    unread = 0
    at = text.find("{")
    while at >= 0:
        try:
            value, end = parse(text, at)
            rows.append(msgspec.convert(value, LogRow))
            at = text.find("{", end)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            unread += 1
            begin = _ROW_BEGINS.search(text, at)
            at = begin.end() - 1 if begin else -1
    return rows, unread
