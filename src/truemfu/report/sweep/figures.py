"""The values of a sweep's summary: plain structs whose field names are the keys of its JSON.

Unknown values are None.
"""

from __future__ import annotations

import msgspec


class ExperimentFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one experiment."""

    name: str
    trainer: str
    model: str | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    compile: bool | None = None
    device: str | None = None
    host: str | None = None
    gpus: int
    parallel: str | None = None
    end: str
    phase: str | None = None
    message: str | None = None
    fits: str | None = None
    step_time_s: float | None = None
    """Median of the timed steps."""
    step_time_p10_s: float | None = None
    step_time_p90_s: float | None = None
    """The fastest and the slowest tenth of them begin here."""
    step_time_error: float | None = None
    """Relative standard error of that median."""
    timed_steps: int | None = None
    stable: bool | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    model_flops: int | None = None
    hardware_flops: int | None = None
    peak_flops_per_s: float | None = None
    peak_source: str | None = None
    peak_memory_bytes: int | None = None
    memory_kind: str | None = None
    peak_memory_by_rank_bytes: list[int] = []
    """Of an experiment on several GPUs; `peak_memory_bytes` is the highest of them."""
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    data_wait_s: float | None = None
    parameters: int | None = None
    gate_error: float | None = None
    wall_s: float | None = None


class SweepTotals(msgspec.Struct, frozen=True, kw_only=True):
    experiments: int
    succeeded: int
    success_rate: float
    ends: dict[str, int]


class TrainerTotals(SweepTotals, frozen=True, kw_only=True):
    """One trainer over all its experiments on one kind of device and number of GPUs."""

    trainer: str
    device: str | None
    gpus: int
    parallel: str | None
    mean_peak_memory_common_bytes: float | None
    """Over the points that every trainer finished (ignoring those that finished none): comparable."""
    common_points: int
    mean_peak_memory_bytes: float | None
    """Over all points this trainer finished, which differ between trainers: not comparable."""
    finished_points: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One figure relative to the baseline at equal points."""

    geometric_mean: float
    lowest: float
    highest: float
    points: int


class AgainstBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer relative to the baseline on the same kind of device; above 1 is more of a figure."""

    trainer: str
    device: str | None
    gpus: int
    parallel: str | None
    step_time: Ratio | None
    samples_per_s: Ratio | None
    mfu: Ratio | None
    peak_memory: Ratio | None
    hardware_flops: Ratio | None


class LargestBatch(msgspec.Struct, frozen=True, kw_only=True):
    trainer: str
    model: str
    seq_len: int
    dtype: str
    device: str | None
    gpus: int
    parallel: str | None
    largest_finished: int | None
    smallest_out_of_memory: int | None
    fits: str | None
    """What was found to fit after an out-of-memory, as text."""


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment on several GPUs, relative to the same one on one GPU."""

    name: str
    gpus: int
    parallel: str | None
    device: str | None
    tokens_per_s: float
    on_one: str | None
    """The name of the experiment on one GPU."""
    on_one_tokens_per_s: float | None
    efficiency: float | None
    """Tokens/s over n times the tokens/s of one GPU; 1 is perfect."""
    reason: str | None
    """Why there is no efficiency."""
    peak_memory_by_rank_bytes: list[int]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    end: str
    phase: str | None
    message: str
    exit_code: int | None
    signal: str | None
    fits: str | None
    peak_memory_bytes: int | None
    log_tail: list[str]


class SweepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole summary; its field names are the keys of the JSON."""

    sweep_id: str | None
    created_at_s: float | None
    devices: list[str]
    hosts: list[str]
    versions: dict[str, str]
    memory_kind: str | None
    baseline: str
    totals: SweepTotals
    trainers: list[TrainerTotals]
    against_baseline: list[AgainstBaseline]
    largest_batches: list[LargestBatch]
    scaling: list[Scaling]
    experiments: list[ExperimentFigures]
    failures: list[Failure]
    """Grouped by cause, the most frequent first."""
    notes: list[str]
