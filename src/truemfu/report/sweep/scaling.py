"""How experiments on several GPUs scale, against the same experiment on one.

    efficiency = tokens/s on n GPUs ÷ (n × tokens/s on one GPU)

The batch is that of each rank, so the work of a rank is the same in both (weak scaling). Only the same
trainer, model, batch, sequence, dtype, optimizer and device name are compared; without such an experiment the
efficiency is None, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...records import CaseResult, Status
from .figures import Scaling


def scaling_of(results: Iterable[CaseResult]) -> list[Scaling]:
    """One entry for each finished experiment on several GPUs."""
    results = list(results)
    on_one = [result for result in results if result.case.gpus == 1]
    return [_scaling(result, on_one) for result in results if result.case.gpus > 1 and _finished(result)]


def peaks_by_rank(result: CaseResult | None) -> list[int]:
    """Peak memory of each rank on its device; empty for one process, or if one is unknown."""
    ranks = result.measured.ranks if result is not None and result.measured is not None else []
    found = [
        rank.memory.process_bytes
        if result is not None and result.case.device == "cpu"
        else rank.memory.allocated_bytes
        for rank in ranks
    ]
    known = [peak for peak in found if peak is not None]
    return known if len(known) == len(found) else []


def _scaling(result: CaseResult, on_one: list[CaseResult]) -> Scaling:
    assert result.measured is not None
    one, reason = _same_on_one(result, on_one)
    one_tokens_per_s = one.measured.tokens_per_s if one is not None and one.measured is not None else None
    efficiency = None
    if one_tokens_per_s:
        efficiency = result.measured.tokens_per_s / (result.case.gpus * one_tokens_per_s)
    return Scaling(
        name=result.name,
        gpus=result.case.gpus,
        parallel=result.case.parallel,
        device=_device(result),
        tokens_per_s=result.measured.tokens_per_s,
        on_one=one.name if one is not None else None,
        on_one_tokens_per_s=one_tokens_per_s,
        efficiency=efficiency,
        reason=reason,
        peak_memory_by_rank_bytes=peaks_by_rank(result),
    )


def _same_on_one(result: CaseResult, on_one: list[CaseResult]) -> tuple[CaseResult | None, str | None]:
    """The finished experiment to compare with, or why there is none."""
    same = [one for one in on_one if _settings(one) == _settings(result)]
    finished = [one for one in same if _finished(one)]
    alike = [one for one in finished if _device(one) == _device(result)]
    if alike:
        return alike[0], None
    if finished:
        return None, f"{finished[0].name} ran on another device: {_device(finished[0])}"
    if same:
        return None, f"{same[0].name} did not finish: {same[0].end.value}"
    return None, "no such experiment on one GPU"


def _settings(result: CaseResult) -> tuple[object, ...]:
    case = result.case
    return (
        case.trainer,
        case.model,
        case.batch_size,
        case.seq_len,
        case.dtype,
        case.optimizer,
        case.compile,
        case.device,
    )


def _device(result: CaseResult) -> str | None:
    return result.environment.device_name if result.environment is not None else None


def _finished(result: CaseResult) -> bool:
    return result.end is Status.OK and result.measured is not None
