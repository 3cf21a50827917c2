"""What two folders hold to be compared: a run, repeated runs or a sweep, each with the facts that must agree.

    a run's folder              ─► Side of one run
    a folder of runs' folders   ─► Side of repeated runs
    a sweep's folder            ─► Side of experiments by name; those without step times have their status

Facts are texts by label; `MeasuredRun.facts` has those of a run or an experiment, None where unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import UsageError
from ...records import RunRecord, Status
from ...run_summary.texts import estimate_mark, shapes_text
from ...sweep.paths import RECORD_FILE
from ...utilization import share_of_peak
from ..folder import run_or_sweep
from ..run.load import holds_run, load_run
from ..sweep.load import LoadedSweep, SweepEntry
from ..sweep.summary import peak_memory
from .step_series import StepSeries, StepSize, series_of


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run, or one experiment of a sweep."""

    where: str
    """Its folder, and the experiment's name."""
    series: StepSeries
    facts: Mapping[str, str | None]
    """What must agree with the other side."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What may differ, and is stated then."""
    peak_source: str | None = None
    mfu_mark: str = ""
    """Behind an MFU of which steps are estimated."""
    is_on_cpu: bool = False
    files: tuple[Path, ...] = ()
    """Of a run: where it was read from."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two folders."""

    path: Path
    runs: tuple[MeasuredRun, ...] = ()
    """Of a run, or of repeated ones."""
    experiments: Mapping[str, MeasuredRun | str] = field(default_factory=dict)
    """Of a sweep: those that succeeded, and the status of the others."""
    files: tuple[Path, ...] = ()
    """What it was read from."""
    notes: tuple[str, ...] = ()

    @property
    def is_sweep(self) -> bool:
        return not self.runs


def load_side(path: Path) -> Side:
    """Read one of the two folders."""
    folders = _repeats(path)
    if not folders:
        found = run_or_sweep(path)
        if isinstance(found, LoadedSweep):
            return Side(
                path=found.source,
                experiments={entry.name: _experiment(path, entry) for entry in found.entries},
                files=tuple(found.files),
                notes=tuple(f"{path}: {note}" for note in found.notes),
            )
        folders = [found]
    runs = tuple(map(_run, folders))
    return Side(path=path, runs=runs, files=tuple(file for run in runs for file in run.files))


def _repeats(path: Path) -> list[Path]:
    """The runs inside a folder that is neither a run nor a sweep itself."""
    if not path.is_dir() or holds_run(path) or (path / RECORD_FILE).exists():
        return []
    try:
        return sorted(folder for folder in path.iterdir() if folder.is_dir() and holds_run(folder))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _run(folder: Path) -> MeasuredRun:
    run = load_run(folder)
    record, series = run.record, series_of(run.rows)
    summary = None if record is None else record.summary
    notes = list(run.notes)
    mark = "" if summary is None else estimate_mark(summary)
    if mark:
        notes.append(f"its MFU is {mark.strip(' ()')}, not counted")
    return MeasuredRun(
        where=str(folder),
        series=series,
        facts={} if record is None else _facts_of_run(record, series),
        versions={} if record is None else {**record.versions, "Python": record.python or "unknown"},
        peak_source=None if summary is None else summary.peak_source,
        mfu_mark=mark,
        is_on_cpu=record is not None and record.device == "cpu",
        files=tuple(run.files),
        notes=tuple(f"{folder}: {note}" for note in notes),
    )


def _facts_of_run(record: RunRecord, series: StepSeries) -> dict[str, str | None]:
    model = record.model
    shapes = record.batch_shapes
    attention = record.convention.get("attention")
    return {
        "device": record.device,
        "number of ranks": None if record.world_size is None else str(record.world_size),
        "dtype of the parameters": None if model is None or not model.dtypes else ", ".join(model.dtypes),
        "attention convention": None if attention is None else str(attention),
        "number of parameters": _count(None if model is None else model.parameters),
        "number of trained parameters": _count(None if model is None else model.trainable_parameters),
        "batch": shapes_text(shapes[0]) if len(shapes) == 1 else None,
        "steps for each row of the log": str(series.steps_per_row),
    }


def _count(number: int | None) -> str | None:
    return None if number is None else f"{number:,}"


def _experiment(path: Path, entry: SweepEntry) -> MeasuredRun | str:
    result = entry.result
    if result is None or result.measured is None or result.end is not Status.OK:
        reason = entry.reason if result is None else result.message
        return f"{entry.end}: {reason}" if reason else entry.end
    measured, case, environment = result.measured, result.case, result.environment
    times = [seconds for seconds in measured.steps.times_s if 0 < seconds < math.inf]
    flops = measured.flops
    peak = None if flops is None else flops.peak_flops_per_s
    samples, tokens = float(case.batch_size * case.gpus), float(measured.tokens_per_step)
    mfu = [] if flops is None else [share_of_peak(flops.model_flops, seconds, peak) for seconds in times]
    return MeasuredRun(
        where=f"{path}, {entry.name}",
        series=StepSeries(
            step_times_s=times,
            tokens_per_s=[tokens / seconds for seconds in times],
            samples_per_s=[samples / seconds for seconds in times],
            mfu=[share for share in mfu if share is not None],
            tokens=StepSize(median=tokens, low=tokens, high=tokens),
            samples=StepSize(median=samples, low=samples, high=samples),
            peak_flops_per_s=peak,
            peak_memory_bytes=peak_memory(result)[0],
        ),
        facts={
            "device": None if environment is None else environment.device_name,
            "trainer": case.trainer,
            "model": case.model,
            "dtype": case.dtype,
            "attention convention": case.attention,
            "number of ranks": str(case.gpus),
            "batch size of each rank": str(case.batch_size),
            "sequence length": str(case.seq_len),
            "optimizer": case.optimizer,
            "torch.compile": "on" if case.compile else "off",
            "number of parameters": _count(result.parameters),
        },
        versions={} if environment is None else {**environment.versions, "Python": environment.python},
        peak_source=None if flops is None else flops.peak_source,
        is_on_cpu=case.device == "cpu",
    )


def refuse_if_different(first: MeasuredRun, second: MeasuredRun) -> None:
    """A UsageError that names both values, where a comparison of the two would mean nothing."""
    for label, one in first.facts.items():
        other = second.facts.get(label)
        if one is not None and other is not None and one != other:
            raise UsageError(_refusal(label, one, other, first, second))
    for label, own, others in (
        ("samples in a step", first.series.samples, second.series.samples),
        ("tokens in a step", first.series.tokens, second.series.tokens),
    ):
        if own is not None and others is not None and _are_apart(own, others):
            raise UsageError(_refusal(label, f"{own.median:,.6g}", f"{others.median:,.6g}", first, second))
    peaks = (first.series.peak_flops_per_s, second.series.peak_flops_per_s)
    are_of_table = all((side.peak_source or "").startswith("datasheet") for side in (first, second))
    if are_of_table and not _is_about(*peaks):  # of one device: the dtypes differ
        one, other = (f"{(peak or 0) / 1e12:,.1f} TFLOP/s" for peak in peaks)
        raise UsageError(_refusal("peak of the dtypes used", one, other, first, second))


def _refusal(label: str, one: str, other: str, first: MeasuredRun, second: MeasuredRun) -> str:
    return f"cannot compare: {label} is {one} in {first.where} and {other} in {second.where}"


_SAME_SIZE = 0.01
_SAME_PEAK = 0.05


def _are_apart(one: StepSize, other: StepSize) -> bool:
    """Whether steps process different amounts: batches of varying length overlap, others are equal."""
    are_unlike = abs(one.median - other.median) > _SAME_SIZE * max(one.median, other.median)
    return are_unlike and (one.high < other.low or other.high < one.low)


def _is_about(one: float | None, other: float | None) -> bool:
    return one is None or other is None or abs(one - other) <= _SAME_PEAK * max(one, other)


def have_same_peak(first: MeasuredRun, second: MeasuredRun) -> bool:
    """Whether MFU of both is relative to the same peak."""
    return _is_about(first.series.peak_flops_per_s, second.series.peak_flops_per_s)


def unchecked_facts(first: MeasuredRun, second: MeasuredRun) -> list[str]:
    """Labels of what is known of one of the two alone."""
    labels = dict.fromkeys((*first.facts, *second.facts))
    return [
        label for label in labels if (first.facts.get(label) is None) != (second.facts.get(label) is None)
    ]


def version_differences(first: MeasuredRun, second: MeasuredRun) -> list[str]:
    """Packages whose versions differ, each as text."""
    return [
        f"{package} {first.versions[package]} in A, {second.versions[package]} in B"
        for package in first.versions
        if package in second.versions and first.versions[package] != second.versions[package]
    ]
