"""A census in tables and sentences, for a terminal and a page."""

from __future__ import annotations

from ...census.classes import CLASSES, GAPS
from ...census.record import Bound, Census, ClassTime, KernelRow
from ...remedies.table import BY_NAME
from ...run_summary.texts import Figure
from ...text import UNKNOWN, duration, flop_rate, share
from ..drawing.tables import Table, digits, measures, table_of, words

_MOST_SHOWN = 15


def figures(census: Census) -> list[Figure]:
    """What the census is of."""
    gaps, ordinary = census.gaps, census.ordinary_step_s
    step = census.step or "the whole trace, which is not divided into steps"
    if census.steps_in_trace > 1:
        step += f", the last whole one of {census.steps_in_trace}"
    found = [
        Figure(label="source", value=census.source, remark=step),
        Figure(
            label="device",
            value=census.device or "unknown",
            remark=""
            if census.peak_known
            else "operators of the CPU stand for kernels"
            if census.is_host
            else "its peaks and its bandwidth are not known, so neither are limits: --device NAME gives it",
        ),
        Figure(
            label="step, as recorded", value=duration(census.step_s), remark="recording makes the host slower"
        ),
    ]
    if ordinary is not None:
        found.append(Figure(label="step, median of the run", value=duration(ordinary)))
    of_step = ordinary if ordinary is not None and ordinary >= census.busy_s else census.step_s
    found += [
        Figure(
            label="kernels",
            value=duration(census.busy_s),
            remark=f"{share(census.busy_s / of_step if of_step else None)} of the step, "
            f"{census.launches:,} launches",
        ),
        Figure(
            label="gaps, as recorded",
            value=duration(gaps.host_s + gaps.data_wait_s + gaps.device_s),
            remark=f"the host launched late {duration(gaps.host_s)}, waited for data "
            f"{duration(gaps.data_wait_s)}, launched in time {duration(gaps.device_s)}",
        ),
    ]
    return found


def tables_of(census: Census, most: int | None = _MOST_SHOWN) -> list[Table]:
    """The tables to show, in reading order; `most` limits the kernels."""
    every = (
        _classes_table(census),
        _remedies_table(census),
        _costs_table(census, most),
        _other_remedies_table(census),
    )
    return [table for table in every if table.rows]


def _classes_table(census: Census) -> Table:
    """Where the step's time went."""

    def work(one: ClassTime) -> str:
        return UNKNOWN if one.flops is None or not one.seconds else flop_rate(one.flops / one.seconds)

    def moved(one: ClassTime) -> str:
        return UNKNOWN if one.bytes is None else f"{one.bytes / 1e9:,.2f} GB"

    return table_of(
        "Where the step's time went",
        census.classes,
        [
            words("class", lambda one: one.name),
            measures("time", duration, lambda one: one.seconds, unit="s"),
            measures("of the step", share, lambda one: one.share),
            digits("launches", lambda one: f"{one.launches:,}" if one.key != GAPS else UNKNOWN),
            words("rate", work),
            words("moved", moved),
        ],
    )


def _costs_table(census: Census, most: int | None) -> Table:
    """The kernels that take the most time."""
    return table_of(
        "What costs most",
        census.kernels[:most],
        [
            words("operator", lambda row: row.operator or row.kernel[:60]),
            words("class", lambda row: CLASSES[row.kind]),
            words("module", lambda row: row.module or UNKNOWN),
            digits("launches", lambda row: f"{row.launches:,}"),
            measures("time", duration, lambda row: row.seconds, unit="s"),
            words("limit", _limit),
        ],
    )


def _limit(row: KernelRow) -> str:
    """The limit, and how much of their time the kernels need at least."""
    if row.limit is None:
        return "unknown"
    if row.limit == "launch" or row.limit_s is None or not row.running_s:
        return row.limit
    return f"{row.limit}, {100 * row.limit_s / row.running_s:.0f} %"


def notes(census: Census) -> list[str]:
    """What to know about the census; why limits are unknown, each reason once."""
    reasons = dict.fromkeys(row.unknown for row in census.kernels if row.unknown)
    return [*(f"limits are unknown where {reason}" for reason in reasons), *census.notes]


def _remedies_table(census: Census) -> Table:
    """What each remedy could gain at most, the largest first."""
    of = census.ordinary_step_s or census.step_s

    def at_most(bound: Bound) -> str:
        if bound.at_most_s is None:
            return UNKNOWN
        return f"at most {duration(min(bound.at_most_s, of))} of {duration(of)}"

    return table_of(
        "What remedies could gain",
        [bound for bound in census.bounds if bound.applies],
        [
            words("remedy", _title),
            words("at most", at_most),
            words("because", lambda bound: bound.evidence, kind="text"),
        ],
        sentence="Bounds, not predictions: `truemfu try` measures what a remedy gains.",
    )


def _other_remedies_table(census: Census) -> Table:
    return table_of(
        "No bound for",
        [bound for bound in census.bounds if not bound.applies],
        [words("remedy", _title), words("because", lambda bound: bound.evidence, kind="text")],
    )


def _title(bound: Bound) -> str:
    return BY_NAME[bound.remedy].title
