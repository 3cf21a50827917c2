"""The whole job in words, bars and tables: for the run's page, and for `truemfu status`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...records import WaterfallPart
from ...text import counted, duration, share
from ..drawing.tables import Table, digits, measures, table_of, words
from .job import BETWEEN, COUNTED, Job
from .waterfall_bars import WaterfallBar, bars_of


@dataclass(frozen=True, kw_only=True)
class JobView:
    sentences: Sequence[str]
    bars: Sequence[WaterfallBar]
    starts: Table
    parts: Table


def job_view(job: Job) -> JobView:
    """The job's part of the page."""
    whole_s = sum(seconds for _, seconds in job.parts) or 1.0
    lost = sorted((part for part in job.parts if part[0] != COUNTED), key=lambda part: -part[1])
    ordered = [*lost, (COUNTED, dict(job.parts).get(COUNTED, 0.0))]
    parts = [WaterfallPart(key=name, name=name, share=seconds / whole_s) for name, seconds in ordered]
    return JobView(
        sentences=[*(f"{label}: {text}." for label, text in job_lines(job)), _READING],
        bars=bars_of("from the first start to the last end", parts, lost[0][0] if lost else None),
        starts=table_of(
            "Starts",
            job.starts,
            [
                words("began, UTC", lambda start: start.began_at),
                measures("time", duration, lambda start: start.seconds, unit="s"),
                words("ended by", lambda start: start.ended),
                words("steps", _steps),
                digits("that counted", lambda start: f"{start.counted:,}"),
                words("on", lambda start: start.where),
            ],
        ),
        parts=table_of(
            "Where the job's time went",
            job.parts,
            [
                words("part", lambda part: part[0]),
                measures("time", duration, lambda part: part[1], unit="s"),
                measures("share", share, lambda part: part[1] / whole_s),
            ],
        ),
    )


_READING = (
    "Goodput is the time in steps that counted over the time the devices were held. A step does not count if "
    "a later start did it again, or began before it. Job MFU is the model FLOPs of the steps that counted "
    "over what the devices could have done in the time they were held. The bars are in percent of the time "
    "from the first start to the last end."
)


def job_lines(job: Job) -> list[tuple[str, str]]:
    """Goodput and job MFU, each with how it came about."""
    held, gaps = job.held, job.with_gaps
    if held.goodput is None:
        return [(label, f"unknown ({job.unknown})") for label in ("goodput", "job MFU")]
    goodput = f"{share(held.goodput)} of {duration(held.seconds)} held"
    mfu = f"unknown ({job.unknown})"
    if held.job_mfu is not None:
        mfu = f"{share(held.job_mfu)} = {share(job.step_mfu)} in steps × {share(held.goodput)} of the time"
    if job.estimated_steps and held.job_mfu is not None:
        mfu += f"; FLOPs estimated in {counted(job.estimated_steps, 'step')}"
    if gaps is not None:
        between = dict(job.parts)[BETWEEN]
        goodput += f"; {share(gaps.goodput)} if the {duration(between)} between starts were held too"
        if gaps.job_mfu is not None:
            mfu += f"; {share(gaps.job_mfu)} with the time between starts"
    return [("goodput", goodput), ("job MFU", mfu)]


def job_json(job: Job | None) -> dict[str, Any]:
    """What a script reads; None where a value is unknown."""
    if job is None:
        return {"goodput": None, "job_mfu": None, "job": None}
    return {
        "goodput": job.held.goodput,
        "job_mfu": job.held.job_mfu,
        "job": asdict(job) | {"parts": dict(job.parts)},
    }


def _steps(start: Any) -> str:
    if start.first_step is None:
        return "none on disk"
    return f"{start.steps:,}: {start.first_step:,} to {start.last_step:,}"
