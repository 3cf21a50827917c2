"""After an out-of-memory: the largest batch or model that fits in memory, by measurement.

    finished experiments that differ in batch alone ─► a batch that fits, one that does not
        ─► between the two, probes (fresh workers, two steps each) by bisection
        ─► not even a batch of 1: the next smaller reference model

Without probes, only finished experiments are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from ...records import OUT_OF_MEMORY, CaseResult, Memory, Status, SweepCase
from ..sizes import SIZES

_MAX_PROBES = 5


Prober = Callable[[SweepCase], CaseResult]
"""Runs a few steps of a case in a fresh worker; OK means that they fit in memory."""


def propose(results: Iterable[CaseResult], probe: Prober | None) -> Iterator[tuple[str, str]]:
    """For each experiment that ran out of memory and has no answer yet: its name, and what fits, as text."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for result in results:
        case = result.case
        device = result.environment.device_name if result.environment is not None else None
        key = (case.trainer, case.model, case.seq_len, case.dtype, case.gpus, case.parallel, device)
        groups.setdefault(key, []).append(result)
    for group in groups.values():
        unanswered = [result for result in group if result.end in OUT_OF_MEMORY and result.fits is None]
        answer = _search(group, probe) if unanswered else None
        if answer is not None:
            yield from ((result.name, answer) for result in unanswered)


def _search(group: list[CaseResult], probe: Prober | None) -> str | None:
    """The largest batch that fits, as far as a few probes show; None if nothing is known to fit."""
    smallest_bad = min(
        (result for result in group if result.end in OUT_OF_MEMORY), key=lambda result: result.case.batch_size
    )
    case, bad = smallest_bad.case, smallest_bad.case.batch_size
    total_bytes = smallest_bad.memory.device_total_bytes if smallest_bad.memory else None
    good, memory = 0, None
    for result in group:
        if result.end is Status.OK and good < result.case.batch_size < bad:
            good, memory = result.case.batch_size, result.memory
    for remaining in range(_MAX_PROBES, -1, -1):
        batch = _next_batch(good, bad, remaining)
        if probe is None or batch is None:
            break
        answer = probe(msgspec.structs.replace(case, batch_size=batch))
        if answer.end is Status.OK:
            good, memory = batch, answer.memory
        elif answer.end in OUT_OF_MEMORY:
            bad = batch
        else:
            known = _known(good, bad, memory, total_bytes) or f"batch {bad} does not fit"
            return f"{known}; a probe of batch {batch} {_failure(answer)}"
    if good == 0 and bad == 1 and probe is not None:
        return _smaller_model(case, probe, total_bytes)
    return _known(good, bad, memory, total_bytes)


def _next_batch(good: int, bad: int, remaining: int) -> int | None:
    """Halfway between a batch that fits and one that does not; the very last try is a batch of 1."""
    if remaining == 0:
        return 1 if good == 0 and bad > 1 else None
    return (good + bad) // 2 if bad - good > 1 else None


def _known(good: int, bad: int, memory: Memory | None, total_bytes: int | None) -> str | None:
    if good == 0:
        return "not even a batch of 1 fits" if bad == 1 else None
    return f"batch {good} fits{_measured(memory, total_bytes)}; batch {bad} does not"


def _smaller_model(case: SweepCase, probe: Prober, total_bytes: int | None) -> str:
    nothing = f"not even a batch of 1 of {case.model} fits at sequence length {case.seq_len}"
    sizes = list(SIZES)
    smaller = reversed(sizes[: sizes.index(case.model)]) if case.model in sizes else iter(())
    for model in smaller:
        answer = probe(msgspec.structs.replace(case, model=model, batch_size=1))
        if answer.end is Status.OK:
            return f"{nothing}; {model} at batch 1 does{_measured(answer.memory, total_bytes)}"
        if answer.end not in OUT_OF_MEMORY:
            return f"{nothing}; a probe of {model} {_failure(answer)}"
    return nothing


def _failure(answer: CaseResult) -> str:
    """Why a probe neither fits nor runs out of memory."""
    return "took too long" if answer.end is Status.TIMEOUT else f"failed: {answer.message}"


def _measured(memory: Memory | None, total_bytes: int | None) -> str:
    if memory is None:
        return ""
    held = memory.allocated_bytes if memory.allocated_bytes is not None else memory.process_bytes
    if held is None:
        return ""
    total = memory.device_total_bytes or total_bytes
    of = f" of {total / 2**30:.1f} GiB" if total else ""
    return f" (measured: {held / 2**30:.1f} GiB{of})"
