"""A run in sentences written from its figures: MFU, largest loss, data wait, slow ranks, slow steps.

What is not known is left out, and listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...records import RunSummary, WaterfallPart
from ...run_summary.phases import limit_of_steps, why_no_phases
from ...run_summary.texts import (
    NO_LOADER,
    Figure,
    RunResults,
    hfu_text,
    mfu_text,
    peak_text,
    why_no_utilization,
)
from ...text import duration, share
from .worst_steps import UNKNOWN_CAUSE, WorstStep

Unknown = list[tuple[str, str]]


def verdict(run: RunResults, worst: Sequence[WorstStep], cost: Figure | None) -> tuple[list[str], Unknown]:
    """Sentences, and what is not known with the reason."""
    summary = run.summary
    unknown: Unknown = []
    sentences = [
        *_utilization(run, unknown),
        *_largest_loss(summary, unknown),
        *_waiting(summary, unknown),
        *_limit(run, unknown),
        *_pauses(summary),
        *_ranks(run),
        *_slow_steps(summary, worst),
    ]
    if cost is not None and cost.is_known:
        sentences.append(f"A million tokens cost {cost.value}: {cost.remark}.")
    elif cost is not None:
        unknown.append(("the cost of a million tokens", cost.remark))
    return sentences or ["Nothing is known about this run yet."], unknown


def _utilization(run: RunResults, unknown: Unknown) -> Iterator[str]:
    summary = run.summary
    over = f" over {summary.medians_over}" if summary.medians_over else ""
    if summary.median_mfu is None:
        unknown.append(("MFU", why_no_utilization(run)))
        if summary.median_step_time_s is not None:
            yield f"A step takes {duration(summary.median_step_time_s)} (median{over})."
        return
    hfu = "" if summary.median_hfu is None else f", HFU {hfu_text(summary)}"
    step = "" if summary.median_step_time_s is None else f", {duration(summary.median_step_time_s)} a step"
    yield f"MFU {mfu_text(summary)} of {peak_text(run)}{hfu}{step} (medians{over})."


def _largest_loss(summary: RunSummary, unknown: Unknown) -> Iterator[str]:
    fall = summary.waterfall
    parts = [part for part in (fall.parts[:-1] if fall is not None else ()) if part.share]
    largest = max(parts, key=lambda part: part.share or 0.0, default=None)
    if largest is None or (largest.share or 0.0) <= 0:
        unknown.append(("where the rest of the peak went", "there is no waterfall, see below"))
        return
    inner = max(largest.of, key=lambda part: part.share or 0.0, default=largest)
    is_telling = inner is not largest and (inner.share or 0.0) > 0 and inner.name != "other"
    yield f"The largest loss is {_part(largest)}" + (f", most of it {_part(inner)}." if is_telling else ".")


def _part(part: WaterfallPart) -> str:
    return f"{part.name}: {100 * (part.share or 0.0):.1f} points of the peak"


def _waiting(summary: RunSummary, unknown: Unknown) -> Iterator[str]:
    if summary.data_wait_share is None:
        unknown.append(("data wait", NO_LOADER))
    else:
        yield f"Waiting for data took {share(summary.data_wait_share)} of the time."
    if summary.padding_lost:
        yield f"{share(summary.padding_lost)} of all tokens are padding."


def _limit(run: RunResults, unknown: Unknown) -> Iterator[str]:
    """What limits a step, by its phases."""
    if (limit := limit_of_steps(run.record, run.summary)) is not None:
        yield f"Steps are {limit}."
    elif (why_not := why_no_phases(run.summary)) is not None:
        unknown.append(("the phases of a step", why_not))


def _pauses(summary: RunSummary) -> Iterator[str]:
    spent = [
        f"{'other pauses' if kind == 'other' else kind} {duration(paused.seconds)} "
        f"({share(paused.share)} of the run)"
        for kind, paused in summary.left_out.items()
        if paused.seconds is not None and paused.share is not None
    ]
    if spent:
        yield f"Outside of steps: {', '.join(spent)}."


def _ranks(run: RunResults) -> Iterator[str]:
    world_size = run.record.world_size or 1
    texts = [straggler.text for straggler in run.summary.stragglers if straggler.text]
    if texts:
        more = f" More such ranks, listed below: {len(texts) - 1}." if len(texts) > 1 else ""
        yield f"A rank held up the others: {texts[0].rstrip('.')}.{more}"
    elif run.summary.ranks and world_size > 1:
        yield f"None of {world_size:,} ranks held up the others."


def _slow_steps(summary: RunSummary, worst: Sequence[WorstStep]) -> Iterator[str]:
    if worst:
        first = worst[0]
        why = "; cause unknown" if first.cause == UNKNOWN_CAUSE else f": {first.cause}, {first.details}"
        yield (
            f"The slowest step is {first.step:,} with {duration(first.seconds)}, "
            f"{first.times_median:.1f} times the median{why}."
        )
    elif summary.median_step_time_s is not None:
        yield "No step took 1.5 times as long as the median."
