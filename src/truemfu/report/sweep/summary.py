"""Computes the summary of a sweep from its entries: pure arithmetic, no files, no drawing.

Four rules keep the figures honest.

- Every experiment is in the denominator, including failed, pruned, lost and never started ones.
- Trainers are only compared at equal points (model, batch, sequence, dtype, optimizer, device, GPUs). A mean
  over what each trainer finished favours one that failed on the large ones; it is also given, with a label.
- Means and ratios are taken over one kind of device and one number of GPUs: unlike ones have separate rows.
  Hosts with the same devices share them, and are listed.
- Peak memory is what torch allocated on the GPU, or on a CPU the process's resident memory. The two are never
  mixed in a mean; `memory_kind` states which one it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

import msgspec

from ...records import OUT_OF_MEMORY, CaseResult, Environment, Measured, Memory, Status, SweepCase
from ...text import shortened
from .figures import (
    AgainstBaseline,
    ExperimentFigures,
    Failure,
    LargestBatch,
    Ratio,
    SweepSummary,
    SweepTotals,
    TrainerTotals,
)
from .groups import only_value
from .load import NOT_RUN, LoadedSweep, SweepEntry
from .scaling import scaling_of, settings_of

BASELINE = "StandardTrainer"
GPU_MEMORY, HOST_MEMORY = "GPU allocated", "process resident"

_NOISY = 0.05
_LONGEST_MESSAGE = 1000


def summarize(sweep: LoadedSweep) -> SweepSummary:
    """The summary of a loaded sweep."""
    experiments = [experiment_of(entry) for entry in sweep.entries]
    results = [entry.result for entry in sweep.entries if entry.result is not None]
    kinds = {row.memory_kind for row in experiments if row.memory_kind is not None}
    memory_kind = GPU_MEMORY if GPU_MEMORY in kinds else HOST_MEMORY if kinds else None
    sites = _sites(experiments)
    finished = _finished_points(experiments, sites)
    environments = [result.environment for result in results if result.environment is not None]
    notes = [*sweep.notes, *_version_notes(environments), *_own_notes(results), *_noisy_notes(experiments)]
    if len(kinds) > 1:
        notes.append("experiments on a CPU are left out of mean peak memory: the others ran on a GPU")
    without = [trainer for trainer, points in finished.items() if not points]
    if without and len(without) < len(finished):
        notes.append(
            f"the common points leave out trainers that finished no experiment: {', '.join(without)}"
        )
    return SweepSummary(
        sweep_id=sweep.record.sweep_id if sweep.record is not None else None,
        created_at_s=sweep.record.created_at_s if sweep.record is not None else None,
        devices=list(dict.fromkeys(environment.device_name for environment in environments)),
        hosts=_hosts(results),
        versions=dict(environments[-1].versions) if environments else {},
        memory_kind=memory_kind,
        baseline=BASELINE,
        totals=_totals(experiments),
        trainers=_trainers(experiments, sites, finished, memory_kind),
        against_baseline=_against_baseline(finished),
        largest_batches=_largest_batches(sweep.entries, sites),
        scaling=scaling_of(experiments),
        experiments=experiments,
        failures=_failures(sweep.entries, experiments),
        notes=notes,
    )


class _Site(NamedTuple):
    """What experiments must share for a mean over them."""

    device: str | None
    gpus: int
    parallel: str | None


def _sites(experiments: Sequence[ExperimentFigures]) -> dict[str, _Site]:
    """Where each experiment ran, by name; one of unknown device on the sweep's only device, if it has one."""
    only = only_value(experiments, "device")
    return {row.name: _Site(row.device or only, row.gpus, row.parallel) for row in experiments}


def _hosts(results: Iterable[CaseResult]) -> list[str]:
    """Every host, in the order of their experiments."""
    hosts: dict[str, None] = {}
    for result in results:
        ranks = result.measured.ranks if result.measured is not None else []
        hosts.update(dict.fromkeys(rank.host for rank in ranks))
        if result.environment is not None:
            hosts[result.environment.host] = None
    return list(hosts)


def _version_notes(environments: Sequence[Environment]) -> list[str]:
    """Notes about experiments that ran under different versions."""
    found: dict[str, set[str]] = {}
    for environment in environments:
        for package, version in environment.versions.items():
            found.setdefault(package, set()).add(version)
    return [
        f"experiments ran under different versions of {package}: {', '.join(sorted(versions))}"
        for package, versions in found.items()
        if len(versions) > 1
    ]


def _own_notes(results: Iterable[CaseResult]) -> list[str]:
    """The experiments' own notes; a note shared by several appears once."""
    names: dict[str, list[str]] = {}
    for result in results:
        trace_note = result.measured.trace_note if result.measured is not None else None
        for note in dict.fromkeys([*result.notes, *([trace_note] if trace_note else [])]):
            names.setdefault(shortened(note, _LONGEST_MESSAGE), []).append(result.name)
    return [
        f"{who[0] if len(who) == 1 else f'{len(who)} experiments'}: {note}" for note, who in names.items()
    ]


def _noisy_notes(experiments: Iterable[ExperimentFigures]) -> list[str]:
    """A note about medians of very noisy steps, whose ratios are unreliable."""
    noisy = [row.name for row in experiments if (row.step_time_error or 0.0) > _NOISY]
    if not noisy:
        return []
    error = f"{100 * _NOISY:.0f} %"
    return [f"step times with an error above {error} (was the machine busy?): {', '.join(noisy)}"]


def experiment_of(entry: SweepEntry) -> ExperimentFigures:
    """The figures of one experiment."""
    known: dict[str, Any] = _fields(entry.case, "model", "dtype", "optimizer", "compile")
    result = entry.result
    if result is not None:
        known |= _fields(result, "fits", "parameters", "wall_s")
        known["phase"] = result.phase.value
        known |= _fields(result.memory, "reserved_bytes", "process_bytes")
        known["peak_memory_bytes"], known["memory_kind"] = peak_memory(result)
        known["peak_memory_by_rank_bytes"] = _peaks_by_rank(result)
        if result.environment is not None:
            known |= {"device": result.environment.device_name, "host": result.environment.host}
        if result.gate is not None:
            known["gate_error"] = result.gate.relative_error
        if result.measured is not None:
            known |= _measured(result.measured)
    return ExperimentFigures(
        **_fields(entry, "name", "trainer", "batch_size", "seq_len", "gpus", "parallel", "end"),
        message=_message(entry),
        **known,
    )


def _measured(measured: Measured) -> dict[str, Any]:
    steps = measured.steps
    return {
        **_fields(measured, "tokens_per_s", "samples_per_s", "data_wait_s"),
        **_fields(
            measured.flops, "mfu", "hfu", "model_flops", "hardware_flops", "peak_flops_per_s", "peak_source"
        ),
        "step_time_s": steps.median_s,
        "step_time_p10_s": steps.p10_s,
        "step_time_p90_s": steps.p90_s,
        "step_time_error": steps.relative_error,
        "timed_steps": len(steps.times_s),
        "stable": steps.stable,
    }


def _fields(known: object | None, *names: str) -> dict[str, Any]:
    return {} if known is None else {name: getattr(known, name) for name in names}


def _message(entry: SweepEntry) -> str | None:
    """Why there is no measurement, shortened: an exception may contain a whole tensor."""
    text = entry.result.message if entry.result is not None else entry.reason
    return None if text is None else shortened(text, _LONGEST_MESSAGE)


def peak_memory(result: CaseResult) -> tuple[int | None, str | None]:
    """Peak memory on this experiment's device, and which memory that is."""
    peak = None if result.memory is None else _on_device(result.case, result.memory)
    kind = HOST_MEMORY if result.case.device == "cpu" else GPU_MEMORY
    return (None, None) if peak is None else (peak, kind)


def _on_device(case: SweepCase, memory: Memory) -> int | None:
    return memory.process_bytes if case.device == "cpu" else memory.allocated_bytes


def _peaks_by_rank(result: CaseResult) -> list[int]:
    """Peak memory of each rank on its device; empty for one process, or if one is unknown."""
    ranks = [] if result.measured is None else result.measured.ranks
    found = [_on_device(result.case, rank.memory) for rank in ranks]
    known = [peak for peak in found if peak is not None]
    return known if len(known) == len(found) else []


def _totals(experiments: Sequence[ExperimentFigures]) -> SweepTotals:
    ends = dict(Counter(row.end for row in experiments).most_common())
    succeeded = ends.get(Status.OK.value, 0)
    return SweepTotals(
        experiments=len(experiments),
        succeeded=succeeded,
        success_rate=succeeded / len(experiments),
        ends=ends,
    )


class EqualPoint(NamedTuple):
    """What two experiments must share to be compared; only the trainer may differ."""

    site: _Site
    settings: tuple[object, ...]


def _finished_points(
    experiments: Iterable[ExperimentFigures], sites: Mapping[str, _Site]
) -> dict[str, dict[EqualPoint, ExperimentFigures]]:
    """Every trainer's finished experiments by point; a trainer that finished none has an empty entry."""
    finished: dict[str, dict[EqualPoint, ExperimentFigures]] = {}
    for row in experiments:
        points = finished.setdefault(row.trainer, {})
        if row.end == Status.OK.value:
            points[EqualPoint(sites[row.name], settings_of(row))] = row
    return finished


def _trainers(
    experiments: Sequence[ExperimentFigures],
    sites: Mapping[str, _Site],
    finished: Mapping[str, Mapping[EqualPoint, ExperimentFigures]],
    memory_kind: str | None,
) -> list[TrainerTotals]:
    reached = [set(points) for points in finished.values() if points]
    common = set.intersection(*reached) if reached else set()
    groups: dict[tuple[str, _Site], list[ExperimentFigures]] = {}
    for row in experiments:
        groups.setdefault((row.trainer, sites[row.name]), []).append(row)
    found = []
    for (trainer, site), own in groups.items():
        points = {point: row for point, row in finished[trainer].items() if point.site == site}
        at_common = _peaks((points[point] for point in common if point in points), memory_kind)
        overall = _peaks(points.values(), memory_kind)
        found.append(
            TrainerTotals(
                trainer=trainer,
                **site._asdict(),
                **msgspec.structs.asdict(_totals(own)),
                mean_peak_memory_common_bytes=fmean(at_common) if at_common else None,
                common_points=len(at_common),
                mean_peak_memory_bytes=fmean(overall) if overall else None,
                finished_points=len(overall),
            )
        )
    return found


def _peaks(experiments: Iterable[ExperimentFigures], memory_kind: str | None) -> list[int]:
    return [
        row.peak_memory_bytes
        for row in experiments
        if row.peak_memory_bytes is not None and row.memory_kind == memory_kind
    ]


def _against_baseline(
    finished: Mapping[str, Mapping[EqualPoint, ExperimentFigures]],
) -> list[AgainstBaseline]:
    baseline = finished.get(BASELINE, {})
    rows = []
    for trainer, points in finished.items():
        if trainer == BASELINE:
            continue
        by_site: dict[_Site, list[tuple[ExperimentFigures, ExperimentFigures]]] = {}
        for point in points:
            if point in baseline:
                by_site.setdefault(point.site, []).append((points[point], baseline[point]))
        for site, pairs in by_site.items():
            rows.append(
                AgainstBaseline(
                    trainer=trainer,
                    **site._asdict(),
                    step_time=_ratio(pairs, lambda row: row.step_time_s),
                    samples_per_s=_ratio(pairs, lambda row: row.samples_per_s),
                    mfu=_ratio(pairs, lambda row: row.mfu),
                    peak_memory=_ratio(pairs, lambda row: row.peak_memory_bytes),
                    hardware_flops=_ratio(pairs, lambda row: row.hardware_flops),
                )
            )
    return rows


def _ratio(
    pairs: Iterable[tuple[ExperimentFigures, ExperimentFigures]],
    figure: Callable[[ExperimentFigures], float | None],
) -> Ratio | None:
    """The figure of the first of each pair relative to the second."""
    both = ((figure(own), figure(baseline)) for own, baseline in pairs)
    ratios = [own / baseline for own, baseline in both if own and baseline]
    if not ratios:
        return None
    return Ratio(
        geometric_mean=geometric_mean(ratios), lowest=min(ratios), highest=max(ratios), points=len(ratios)
    )


def _largest_batches(entries: Iterable[SweepEntry], sites: Mapping[str, _Site]) -> list[LargestBatch]:
    groups: dict[tuple[str, str, int, str, _Site], list[CaseResult]] = {}
    for entry in entries:
        if entry.result is not None:
            case = entry.result.case
            key = (case.trainer, case.model, case.seq_len, case.dtype, sites[entry.name])
            groups.setdefault(key, []).append(entry.result)
    rows = []
    for (trainer, model, seq_len, dtype, site), members in groups.items():
        fit = [result.case.batch_size for result in members if result.end is Status.OK]
        failed = sorted(
            (result for result in members if result.end in OUT_OF_MEMORY),
            key=lambda result: result.case.batch_size,
        )
        if fit or failed:
            rows.append(
                LargestBatch(
                    trainer=trainer,
                    model=model,
                    seq_len=seq_len,
                    dtype=dtype,
                    **site._asdict(),
                    largest_finished=max(fit, default=None),
                    smallest_out_of_memory=failed[0].case.batch_size if failed else None,
                    fits=next((result.fits for result in failed if result.fits), None),
                )
            )
    return rows


def _failures(entries: Sequence[SweepEntry], experiments: Sequence[ExperimentFigures]) -> list[Failure]:
    failures = [
        _failure(entry, row)
        for entry, row in zip(entries, experiments, strict=True)
        if entry.end != Status.OK.value
    ]
    frequency = Counter(failure.end for failure in failures)
    first = {end: index for index, end in enumerate(frequency)}
    return sorted(failures, key=lambda failure: (-frequency[failure.end], first[failure.end]))


def _failure(entry: SweepEntry, row: ExperimentFigures) -> Failure:
    result = entry.result
    log_tail = entry.log_tail if result is None else result.log_tail
    return Failure(
        name=row.name,
        end=row.end,
        phase=row.phase,
        message=row.message or (NOT_RUN if result is None else "no reason was recorded"),
        exit_code=None if result is None else result.exit_code,
        signal=None if result is None else result.signal,
        fits=row.fits,
        peak_memory_bytes=row.peak_memory_bytes,
        log_tail=[shortened(line, _LONGEST_MESSAGE) for line in log_tail],
    )
