"""How experiments on several GPUs scale, against the same experiment on one.

    efficiency = tokens/s on n GPUs ÷ (n × tokens/s on one GPU)

The batch is that of each rank, so the work of a rank is the same in both (weak scaling). Only the same
trainer, model, batch, sequence, dtype, optimizer and device name are compared; without such an experiment the
efficiency is None, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...records import Status
from .figures import ExperimentFigures, Scaling


def scaling_of(experiments: Sequence[ExperimentFigures]) -> list[Scaling]:
    """One entry for each finished experiment on several GPUs."""
    on_one = [row for row in experiments if row.gpus == 1 and row.phase is not None]
    return [
        _scaling(row, row.tokens_per_s, on_one)
        for row in experiments
        if row.gpus > 1 and row.tokens_per_s is not None and _is_finished(row)
    ]


def settings_of(row: ExperimentFigures) -> tuple[object, ...]:
    """What experiments that are compared have in common, whatever their trainer and device."""
    return (row.model, row.batch_size, row.seq_len, row.dtype, row.optimizer, row.compile)


def _scaling(row: ExperimentFigures, tokens_per_s: float, on_one: Sequence[ExperimentFigures]) -> Scaling:
    one, reason = _same_on_one(row, on_one)
    one_tokens_per_s = None if one is None else one.tokens_per_s
    return Scaling(
        name=row.name,
        gpus=row.gpus,
        parallel=row.parallel,
        device=row.device,
        tokens_per_s=tokens_per_s,
        on_one=None if one is None else one.name,
        on_one_tokens_per_s=one_tokens_per_s,
        efficiency=tokens_per_s / (row.gpus * one_tokens_per_s) if one_tokens_per_s else None,
        reason=reason,
        peak_memory_by_rank_bytes=row.peak_memory_by_rank_bytes,
    )


def _same_on_one(
    row: ExperimentFigures, on_one: Sequence[ExperimentFigures]
) -> tuple[ExperimentFigures | None, str | None]:
    """The finished experiment to compare with, or why there is none."""
    same = [one for one in on_one if one.trainer == row.trainer and settings_of(one) == settings_of(row)]
    finished = [one for one in same if _is_finished(one)]
    alike = [one for one in finished if one.device == row.device]
    if alike:
        return alike[0], None
    if finished:
        return None, f"{finished[0].name} ran on another device: {finished[0].device}"
    if same:
        return None, f"{same[0].name} did not finish: {same[0].end}"
    return None, "no such experiment on one GPU"


def _is_finished(row: ExperimentFigures) -> bool:
    return row.end == Status.OK.value and row.step_time_s is not None
