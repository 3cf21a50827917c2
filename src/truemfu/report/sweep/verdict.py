"""What a sweep shows, in sentences written from its figures: who is fastest, what privacy costs, what failed.

Everything is at equal points. What is not known is left out, and listed with the reason.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from ...records import OUT_OF_MEMORY, Status
from ...sweep.trainers.base import PRIVATE
from ...text import counted, duration, flop_rate, share, some_of
from .figures import ExperimentFigures, Ratio, SweepSummary
from .groups import Group, groups_of

_MOST_NAMED = 4
_Time = tuple[float, float | None]
"""Seconds, and their relative standard error; None with too few steps for one."""


def verdict(summary: SweepSummary) -> tuple[list[str], list[tuple[str, str]]]:
    """Sentences, and what is not known with the reason."""
    groups = groups_of(summary.experiments)
    unknown: list[tuple[str, str]] = []
    sentences = [
        *(sentence for group in groups for sentence in _fastest(group, unknown)),
        *_cost_of_privacy(summary, unknown),
        *(sentence for group in groups for sentence in _best_mfu(group, unknown)),
        *_out_of_memory(summary.experiments, groups),
        *_other_failures(summary),
    ]
    return sentences or ["No experiment finished."], list(dict.fromkeys(unknown))


def _on(group: Group) -> str:
    return f" ({group.title})" if group.title else ""


def _fastest(group: Group, unknown: list[tuple[str, str]]) -> Iterator[str]:
    """The trainer that is fastest at most of the points that several trainers finished."""
    points: dict[tuple[int | None, int | None], dict[str, _Time]] = defaultdict(dict)
    for row in group.finished:
        assert row.step_time_s is not None
        points[row.batch_size, row.seq_len][row.trainer] = row.step_time_s, row.step_time_error
    shared = [times for times in points.values() if len(times) > 1]
    if not shared:
        if len({row.trainer for _, row in group.experiments}) > 1:
            unknown.append((f"the fastest trainer{_on(group)}", "no two trainers finished the same point"))
        return
    wins = Counter(winner for times in shared if (winner := _winner(times)) is not None)
    best, count = wins.most_common(1)[0] if wins else ("", 0)
    if 2 * count <= len(shared):
        yield f"No trainer is clearly the fastest at most points that several trainers finished{_on(group)}."
        return
    behind = [
        sorted(seconds for seconds, _ in times.values())[1] / times[best][0]
        for times in shared
        if _winner(times) == best
    ]
    points_won = (
        "the only point"
        if len(shared) == 1
        else f"all {count} points"
        if count == len(shared)
        else f"{count} of {len(shared)} points"
    )
    yield (
        f"{best} is the fastest trainer at {points_won} that several trainers finished{_on(group)}; the "
        f"next one takes {_range(min(behind), max(behind))} times as long."
    )


def _winner(times: Mapping[str, _Time]) -> str | None:
    """The fastest trainer at a point, if its lead is more than twice the standard error of both times."""
    best, second = sorted(times, key=lambda trainer: times[trainer][0])[:2]
    (own_s, own_error), (next_s, next_error) = times[best], times[second]
    if own_error is None or next_error is None:
        return None
    return best if next_s / own_s - 1 > 2 * math.hypot(own_error, next_error) else None


def _cost_of_privacy(summary: SweepSummary, unknown: list[tuple[str, str]]) -> Iterator[str]:
    """The private trainers relative to the baseline, the cheapest first."""
    known = [row for row in summary.against_baseline if row.trainer in PRIVATE and row.step_time]
    for row in sorted(known, key=lambda row: row.step_time.geometric_mean if row.step_time else 0.0):
        assert row.step_time is not None
        memory = f" and {_factor(row.peak_memory)} the memory" if row.peak_memory is not None else ""
        yield (
            f"Cost of privacy with {row.trainer}: {_factor(row.step_time)} the step time of "
            f"{summary.baseline}{memory}, over {counted(row.step_time.points, 'point')}."
        )
    for trainer in summary.trainers:
        if trainer.trainer in PRIVATE and trainer.trainer not in {row.trainer for row in known}:
            why = f"{trainer.trainer} and {summary.baseline} finished no common point"
            unknown.append((f"the cost of privacy with {trainer.trainer}", why))


def _best_mfu(group: Group, unknown: list[tuple[str, str]]) -> Iterator[str]:
    rows = list(group.finished)
    known = [row for row in rows if row.mfu is not None]
    if not known:
        if rows:
            unknown.append((f"MFU{_on(group)}", "no peak is known for this device: set TRUEMFU_PEAK_TFLOPS"))
        return
    best = max(known, key=lambda row: row.mfu or 0.0)
    peak = f" of {flop_rate(best.peak_flops_per_s)}" if best.peak_flops_per_s else ""
    hfu = f", HFU {share(best.hfu)}" if best.hfu is not None else ""
    yield (
        f"Highest MFU{_on(group)}: {share(best.mfu)}{peak}{hfu}, by {best.trainer} at {_point(best)} "
        f"({duration(best.step_time_s)} a step)."
    )


def _out_of_memory(experiments: Sequence[ExperimentFigures], groups: Sequence[Group]) -> Iterator[str]:
    group_of = {at: group for group in groups for at, _ in group.experiments}
    failed = [(at, row) for at, row in enumerate(experiments) if row.end in OUT_OF_MEMORY]
    if not failed:
        if experiments and all(row.end == Status.OK.value for row in experiments):
            yield "Every experiment finished; nothing ran out of memory."
        return
    named = [
        f"{row.trainer} at {_point(row)}{_on(group_of[at])}" + (f" ({row.fits})" if row.fits else "")
        for at, row in failed
    ]
    yield f"Out of memory: {some_of(named, _MOST_NAMED)}."


def _other_failures(summary: SweepSummary) -> Iterator[str]:
    others = {
        end: count
        for end, count in summary.totals.ends.items()
        if end != Status.OK.value and end not in OUT_OF_MEMORY
    }
    if others:
        yield f"Without a result for other reasons: {', '.join(f'{n} {end}' for end, n in others.items())}."


def _point(row: ExperimentFigures) -> str:
    return f"batch {row.batch_size}, sequence {row.seq_len}"


def _factor(ratio: Ratio) -> str:
    spread = f" ({ratio.lowest:.2f} to {ratio.highest:.2f})" if ratio.points > 1 else ""
    return f"{ratio.geometric_mean:.2f} times{spread}"


def _range(low: float, high: float) -> str:
    return f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
