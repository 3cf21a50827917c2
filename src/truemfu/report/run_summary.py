"""What a run comes to so far, from its log alone: for a run that has not ended, or not properly.

The monitor's own summary is better where there is one: it knows how many steps lie between two rows, and
what the monitor cost.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from ..records import RunSummary
from .run_load import LogRow


def summary_of_log(rows: Sequence[LogRow]) -> RunSummary:
    """Medians over the rows after warm-up, or over all where there are no others."""
    steady = [row for row in rows if not row.is_warmup and row.step_time_s is not None]
    over = steady or rows
    methods = Counter(row.method for row in rows if row.method is not None)
    return RunSummary(
        steps=len(rows),
        warmup_steps=sum(row.is_warmup for row in rows),
        medians_over="steps after warm-up" if steady else "all steps (none after warm-up)",
        median_step_time_s=_median(row.step_time_s for row in over),
        median_mfu=_median(row.mfu for row in over),
        median_hfu=_median(row.hfu for row in over),
        median_tokens_per_second=_median(row.tokens_per_s for row in over),
        median_samples_per_second=_median(row.samples_per_s for row in over),
        padding_lost=_padding_lost(rows),
        data_wait_share=_data_wait_share(steady),
        method=methods.most_common(1)[0][0] if methods else None,
    )


def peak_flops_per_s(rows: Sequence[LogRow]) -> float | None:
    """The peak the last MFU was taken against: FLOP/s over MFU."""
    for row in reversed(rows):
        if row.mfu and row.tflops_per_gpu:
            return 1e12 * row.tflops_per_gpu / row.mfu
    return None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def _padding_lost(rows: Iterable[LogRow]) -> float | None:
    """One less useful tokens over tokens; a row's tokens are its rate times its time."""
    tokens = useful = 0.0
    for row in rows:
        if (
            row.padding_efficiency is not None
            and row.tokens_per_s is not None
            and row.step_time_s is not None
        ):
            amount = row.tokens_per_s * row.step_time_s
            tokens += amount
            useful += amount * row.padding_efficiency
    return 1 - useful / tokens if tokens else None


def _data_wait_share(rows: Iterable[LogRow]) -> float | None:
    waited = [(row.data_wait_s, row.step_time_s) for row in rows if row.data_wait_s is not None]
    seconds = sum(step_time_s or 0.0 for _, step_time_s in waited)
    return sum(wait_s for wait_s, _ in waited) / seconds if seconds else None
