"""An opinion as lines of text and as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..text import UNKNOWN, counted, flop_rate, percent_text
from .choices import of_time
from .verdict import TOLERANCE, Opinion, Verdict

_STATUS = {
    "agrees": "agrees",
    "explained": "differs, explained",
    "unexplained": "differs, unexplained",
    "unknown": "cannot be checked",
}


def as_dict(opinion: Opinion) -> dict[str, Any]:
    """Ready for JSON; unknown values are None."""
    work, logged = opinion.work, opinion.logged
    return {
        "source": logged.source,
        "model": logged.model if work is None else work.model,
        "device": None if opinion.peak.spec is None else opinion.peak.spec.name,
        "peak_flops_per_s": opinion.peak.flops_per_s,
        "gpus": logged.gpus,
        "batch": logged.batch,
        "seq": logged.seq,
        "attention": opinion.attention,
        "is_counted": None if work is None else work.is_counted,
        "tokens_per_s_per_device": opinion.tokens_per_s_per_device,
        "flops_per_token": opinion.flops_per_token,
        "tflops": opinion.tflops,
        "mfu": opinion.mfu,
        "implied_peak_tflops": opinion.implied_peak_tflops,
        "agrees": None if not opinion.is_decided and not opinion.disagrees else not opinion.disagrees,
        "verdicts": [asdict(verdict) for verdict in opinion.verdicts],
        "notes": notes(opinion),
    }


def facts(opinion: Opinion) -> list[tuple[str, str]]:
    """What was computed, and from what; an unknown value is left out."""
    work, logged, peak, spec = opinion.work, opinion.logged, opinion.peak.flops_per_s, opinion.peak.spec
    sizes = [
        None if logged.batch is None else counted(logged.batch, "sample"),
        None if logged.seq is None else counted(logged.seq, "token"),
        None if logged.gpus is None else counted(logged.gpus, "device"),
    ]
    rows: list[tuple[str, str | None]] = [
        ("log", logged.source),
        ("model", logged.model if work is None else work.model),
        ("step", ", ".join(size for size in sizes if size)),
        ("tokens/s of a device", _number(opinion.tokens_per_s_per_device)),
        (
            f"FLOPs of a token, attention {opinion.attention}",
            None if opinion.flops_per_token is None else f"{opinion.flops_per_token:,.4g}",
        ),
        ("peak", None if peak is None else f"{flop_rate(peak)}, {'as given' if spec is None else spec.name}"),
    ]
    return [(name, text) for name, text in rows if text]


def figure_rows(opinion: Opinion) -> list[tuple[str, str, str, str]]:
    """Each figure: its name, as it was logged, ours, and the verdict."""
    rows = []
    for verdict in opinion.verdicts:
        name, shown = ("MFU", percent_text) if verdict.figure == "mfu" else ("TFLOP/s of a device", _rate)
        ours = opinion.mfu if verdict.figure == "mfu" else opinion.tflops
        ours_shown = UNKNOWN if ours is None else shown(ours)
        status = _STATUS[verdict.status]
        if verdict.figure == "mfu" and verdict.status == "agrees" and opinion.logged.tflops is not None:
            status = "agrees with the logged TFLOP/s"
        rows.append((name, shown(verdict.logged), ours_shown, status))
    return rows


def sentences(opinion: Opinion) -> Iterator[str]:
    """What is wrong with each figure, or what is missing to say so."""
    for verdict in opinion.verdicts:
        name = "MFU" if verdict.figure == "mfu" else "TFLOP/s"
        for note in verdict.notes:
            yield f"{name}: {note}"
        yield from (f"{name}: {text}" for text in _reasons(verdict))
    if opinion.peak.flops_per_s is None and opinion.implied_peak_tflops is not None:
        yield f"the logged MFU implies a peak of {_rate(opinion.implied_peak_tflops)} TFLOP/s"
    if opinion.mfu is None and opinion.tflops is not None and opinion.logged.tflops is None:
        yield f"computed: {_rate(opinion.tflops)} TFLOP/s of a device"


def notes(opinion: Opinion) -> list[str]:
    """What limits the opinion."""
    logged = opinion.logged
    found = [*logged.notes, *(c.text for c in of_time(logged, TOLERANCE) if c.key == "rate")]
    if logged.gpus is None and (logged.tokens_per_s or logged.step_time_s):
        found.append("one device is assumed; --gpus gives their number")
    if opinion.work is not None and not opinion.work.is_counted:
        found.append(
            "from the number of parameters alone, embeddings and experts cannot be told apart; --model gives"
            " a count"
        )
    return found


def _reasons(verdict: Verdict) -> Iterator[str]:
    if verdict.status == "unknown":
        yield f"to check it, add {'; '.join(verdict.missing)}"
    elif verdict.status == "unexplained":
        yield "no known way to count, peak, number of devices or time gives the logged figure"
    elif verdict.status == "explained":
        several = len(verdict.explanations) > 1
        if several:
            yield f"{len(verdict.explanations)} explanations fit equally; the log does not tell which"
        for number, explanation in enumerate(verdict.explanations, start=1):
            yield (f"({number}) " if several else "") + "; and ".join(explanation.texts)


def _rate(value: float) -> str:
    return f"{value:,.4g}"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:,.5g}" if value < 1000 else f"{value:,.0f}"
