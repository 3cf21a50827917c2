"""The phases of a run's steps in words, and the one sentence on what limits a step, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping

from ..records import RunRecord, RunSummary
from ..text import counted, share
from .sums import PHASES

PASSES_LABEL, LIMIT_LABEL = "forward and backward", "steps are"
PHASE_NAMES = {phase: phase.replace("_", " ") for phase in PHASES} | {"no_grad": "without gradients"}
_LIMITS = 0.25
"""The part of a step from which on something besides the model's passes is what limits it."""
_SMALLEST_SHOWN = 0.001


def shares_of(phases_s: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each phase as shares of their sum, in the order of a step; empty if that is 0."""
    whole_s = sum(phases_s.values())
    if whole_s <= 0:
        return {}
    return {phase: phases_s[phase] / whole_s for phase in PHASE_NAMES if phase in phases_s}


def passes_share(phases_s: Mapping[str, float]) -> float | None:
    """The share of a step in forward and backward passes; None if unknown."""
    shares = shares_of(phases_s)
    return shares.get("forward", 0.0) + shares.get("backward", 0.0) if shares else None


def phases_text(phases_s: Mapping[str, float]) -> str:
    """The shares of a step: `data wait 12.0 %, forward 30.1 %`."""
    return ", ".join(
        f"{PHASE_NAMES[phase]} {share(part)}"
        for phase, part in shares_of(phases_s).items()
        if part >= _SMALLEST_SHOWN
    )


def why_no_phases(summary: RunSummary) -> str | None:
    """Why no step of the run has phases; None if some have, or the run was not divided into phases."""
    reasons = summary.phases_unknown
    return max(reasons, key=lambda reason: reasons[reason]) if reasons and not summary.phases_s else None


def limit_of_steps(record: RunRecord, summary: RunSummary) -> str | None:
    """The largest of what takes a quarter of a step or more besides forward and backward passes.

    Else those; None if unknown.
    """
    shares = shares_of(summary.phases_s)
    if not shares:
        return None

    def of(*phases: str) -> float:
        return sum(shares.get(phase, 0.0) for phase in phases)

    workers = record.loader_workers
    loader = "the loader" if workers is None else f"the loader ({counted(workers, 'worker')})"
    update = f"optimizer {share(of('optimizer'))}, clipping {share(of('clipping'))}"
    model = passes_share(summary.phases_s)
    found = {
        f"input-bound: {share(of('data_wait'))} of a step waits for {loader}": of("data_wait"),
        f"input-bound: {share(of('input'))} of a step lies between a batch and its forward pass "
        "(copies to the device, work on the host)": of("input"),
        f"bound by work without gradients: {share(of('no_grad'))} of a step "
        f"(forward and backward passes {share(model)})": of("no_grad"),
        f"bound by the update of the weights: {share(of('clipping', 'optimizer'))} of a step ({update})": of(
            "clipping", "optimizer"
        ),
        f"bound by the rest of the loop: {share(of('other'))} of a step is in no phase of its own "
        "(logging, copies to the host, gradients set to zero)": of("other"),
    }
    largest = max(found, key=lambda text: found[text])
    if found[largest] >= _LIMITS:
        return largest
    waits = f", {share(of('data_wait'))} waits for {loader}" if "data_wait" in shares else ""
    return f"bound by the model: {share(model)} of a step is forward and backward passes{waits}"
