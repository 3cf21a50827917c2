"""A monitored run read back from its folder: its record and its rows.

    training_run.json ─► RunRecord       facts about the run, and at its end the summary
    training_log.json ─► LogRow …        one row per logged step; of two rows of one step the last counts
    ranks/*.jsonl     ─► RanksOfRun      what each rank of a job reported, as far as its file is there

Both may be damaged, or one may be missing: a run that was killed, a file copied while it grew. Everything
readable is read, and `notes` names the rest. The files may have been copied from anywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .. import plain_files
from ..errors import RecordError, UsageError
from ..records import LOG_FILE, RUN_FILE, RunRecord, read_record
from .ranks_view import RanksOfRun, load_ranks

_WITHOUT_RECORD = "device, versions and the run's summary are not known; this report is based on its log"


class LogRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The values of a log row that the report shows; all others are ignored."""

    global_step: int
    loss: float | None = msgspec.field(name="training/loss", default=None)
    step_time_s: float | None = msgspec.field(name="perf/step_time", default=None)
    mfu: float | None = msgspec.field(name="perf/mfu", default=None)
    mfu_per_gpu: float | None = msgspec.field(name="perf/mfu_per_gpu", default=None)
    """Of this rank alone, in a job of several."""
    hfu: float | None = msgspec.field(name="perf/hfu", default=None)
    tflops_per_gpu: float | None = msgspec.field(name="perf/tflops_per_gpu", default=None)
    tokens_per_s: float | None = msgspec.field(name="perf/tokens_per_second", default=None)
    samples_per_s: float | None = msgspec.field(name="perf/samples_per_second", default=None)
    padding_efficiency: float | None = msgspec.field(name="perf/padding_efficiency", default=None)
    data_wait_s: float | None = msgspec.field(name="perf/data_wait", default=None)
    between_steps_s: float | None = msgspec.field(name="perf/between_steps", default=None)
    forwards_between_steps: int = msgspec.field(name="perf/forwards_between_steps", default=0)
    evaluation_s: float | None = msgspec.field(name="perf/evaluation_time", default=None)
    checkpoint_s: float | None = msgspec.field(name="perf/checkpoint_time", default=None)
    generation_s: float | None = msgspec.field(name="perf/generation_time", default=None)
    other_pause_s: float | None = msgspec.field(name="perf/other_pause_time", default=None)
    method: str | None = msgspec.field(name="perf/method", default=None)
    hfu_method: str | None = msgspec.field(name="perf/hfu_method", default=None)
    """The source of the executed work, if that is not the count."""
    is_warmup: bool = msgspec.field(name="perf/warmup", default=False)
    non_finite: dict[str, str] = {}
    """Metrics that were not finite, with "nan" or "inf": their own values are then None."""


@dataclass(frozen=True, kw_only=True)
class LastWindow:
    """The last window of hardware counters, from the last row that has one."""

    step: int
    metrics: Mapping[str, float]
    """The finite `perf/` metrics of that row, in its order."""
    clock_source: str | None = None


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """A run as read from its files."""

    folder: Path
    record: RunRecord | None
    """None without a readable run file."""
    rows: tuple[LogRow, ...]
    """By step, each step once."""
    ranks: RanksOfRun
    """Empty for a single process."""
    last_window: LastWindow | None = None
    """Only read without a summary, which covers all windows."""
    notes: tuple[str, ...] = ()
    """Sentences about problems with the files."""

    @property
    def files(self) -> list[Path]:
        """The files it was read from."""
        log_name = LOG_FILE if self.record is None else _log_name(self.record)
        return [self.folder / RUN_FILE, self.folder / log_name]


def holds_run(folder: Path) -> bool:
    """Whether the folder contains files of a monitor."""
    return (folder / RUN_FILE).is_file() or (folder / LOG_FILE).is_file()


def load_run(folder: Path | str) -> LoadedRun:
    """Read the run in `folder`, the `output_dir` of a TrainingMonitor."""
    folder = Path(folder)
    if not holds_run(folder):
        raise UsageError(f"{folder} does not contain a run: expected {RUN_FILE} or {LOG_FILE}")
    notes: list[str] = []
    record, fault = _record(folder / RUN_FILE)
    if fault is not None:
        notes.append(f"{fault}; {_WITHOUT_RECORD}.")
    elif record is not None and record.summary is None:
        notes.append(
            "The run has no summary yet: it is still running, or it ended without closing its monitor; "
            "this report is based on its log."
        )
    log_name = LOG_FILE if record is None else _log_name(record)
    found = _rows(folder / log_name, notes)
    if record is None and not found:
        raise UsageError(
            f"{folder} does not contain a readable run: {fault}, and the log {log_name} has no readable row"
        )
    ranks = load_ranks(folder)
    notes += [f"Rows of a rank are missing: {fault}." for fault in ranks.faults]
    summary = None if record is None else record.summary
    logged = None if summary is None else summary.steps
    if logged is not None and len(found) > logged:
        notes.append(
            f"The log contains {len(found):,} steps, the summary only covers the last start: "
            f"{logged:,} steps."
        )
    return LoadedRun(
        folder=folder,
        record=record,
        rows=tuple(row for row, _ in found),
        ranks=ranks,
        last_window=_last_window(found) if summary is None else None,
        notes=tuple(notes),
    )


def _log_name(record: RunRecord) -> str:
    """Only the file name: files from elsewhere must not lead out of the folder."""
    return Path(record.log_file).name


def _record(path: Path) -> tuple[RunRecord | None, str | None]:
    """The run file, or its problem."""
    if not path.is_file():
        return None, f"The run file {path.name} is missing"
    try:
        return read_record(path, RunRecord), None
    except RecordError as error:
        return None, f"The run file {error}".replace(str(path), path.name)


_FoundRow = tuple[LogRow, msgspec.Raw]
"""A row, and its JSON for values that are not in `LogRow`."""


def _rows(path: Path, notes: list[str]) -> list[_FoundRow]:
    """The rows of the log by step."""
    try:
        data = plain_files.read(path)
    except OSError as error:
        notes.append(f"The log {path.name} cannot be read, so there are no charts: {error.strerror}.")
        return []
    try:
        found = [(_ROW.decode(raw), raw) for raw in msgspec.json.decode(data, type=list[msgspec.Raw])]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found, unread = _whole_rows(data)
        cut = not data.rstrip(b"\0 \t\r\n").endswith(b"]")
        what = "is cut off" if cut else "is damaged"
        notes.append(
            f"The log {path.name} {what}: {len(found):,} rows were read, {unread:,} could not be read."
        )
    by_step = {row.global_step: (row, raw) for row, raw in found}
    if again := len(found) - len(by_step):
        what = "1 row repeats" if again == 1 else f"{again:,} rows repeat"
        notes.append(f"{what} a step that was logged again (the run was restarted): the last row counts.")
    return [by_step[step] for step in sorted(by_step)]


_OF_COUNTERS = re.compile(
    rb'"perf/(loss/|executed_|energy_j_per_|sm_clock_mhz"|power_w"|(tensor|sm|dram)_active")'
)
_NO_NUMBER = 1e300


def _last_window(found: list[_FoundRow]) -> LastWindow | None:
    for row, raw in reversed(found):
        if not _OF_COUNTERS.search(bytes(raw)):
            continue
        values: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        metrics = {
            name: float(value)
            for name, value in values.items()
            if name.startswith("perf/") and type(value) in (int, float) and abs(value) < _NO_NUMBER
        }
        source = values.get("perf/clock_source")
        return LastWindow(
            step=row.global_step,
            metrics=metrics,
            clock_source=source if isinstance(source, str) else None,
        )
    return None


_ROW = msgspec.json.Decoder(LogRow)
_ROW_BEGINS = re.compile(r"\n\s*\{")


def _whole_rows(data: bytes) -> tuple[list[_FoundRow], int]:
    """Every complete row of a damaged log, and the number of incomplete ones."""
    text = data.decode("utf-8", errors="replace")
    parse = json.JSONDecoder().raw_decode
    rows: list[_FoundRow] = []
    unread = 0
    at = text.find("{")
    while at >= 0:
        try:
            value, end = parse(text, at)
            rows.append((msgspec.convert(value, LogRow), msgspec.Raw(text[at:end])))
            at = text.find("{", end)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            unread += 1
            begin = _ROW_BEGINS.search(text, at)
            at = begin.end() - 1 if begin else -1
    return rows, unread
