"""One step of a run as parts: which step, which models have a name, and what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.monitor.metrics import StepTime
from truemfu.monitor.rows.typical_steps import TypicalSteps
from truemfu.monitor.step_note import StepPosition
from truemfu.monitor.timing.clock import MOST_CHANGES, HostClock, Span, StepClock, TimeMark
from truemfu.records import RunRecord, TypicalStep, read_record

WIDTH = 8


def at(seconds: float) -> TimeMark:
    return TimeMark(seconds, None, seconds)


def trained(
    folder: Path, in_step: Callable[[TrainingMonitor, Callable[[], Any]], None], *, named: bool
) -> TypicalStep:
    """The kept step of a short run, in each step of which `in_step` can call a reference model."""
    policy, reference = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer, batch = torch.optim.SGD(policy.parameters(), lr=0.1), torch.ones(2, WIDTH)
    model = {"policy": policy, "reference": reference} if named else policy
    with TrainingMonitor(folder, model=model) as monitor:  # type: ignore[arg-type]
        for step in range(1, 25):
            in_step(monitor, lambda: reference(batch))
            policy(batch).sum().backward()
            optimizer.step()
            monitor.log_step(step, 0, 1.0, None, 0.1)
    summary = read_record(folder / "training_run.json", RunRecord).summary
    assert summary is not None
    assert summary.typical_step is not None
    return summary.typical_step


def without_gradients(monitor: TrainingMonitor, reference: Callable[[], Any]) -> None:
    with torch.no_grad():
        torch.ones(2).sum()
        reference()
        torch.ones(2).sum()


def test_a_model_with_a_name_is_a_part_of_its_block_without_gradients(tmp_path: Path) -> None:
    kept = trained(tmp_path, without_gradients, named=True)
    assert [(part.phase, part.work) for part in kept.parts] == [
        ("other", None),
        ("no_grad", None), ("no_grad", "reference"), ("no_grad", None),
        ("other", None), ("forward", None), ("backward", None),
        ("other", None), ("optimizer", None), ("other", None),
    ]  # fmt: skip
    assert kept.like == kept.of


def test_models_have_no_marks_where_one_model_is_watched(tmp_path: Path) -> None:
    kept = trained(tmp_path, without_gradients, named=False)
    assert Counter((part.phase, part.work) for part in kept.parts)["no_grad", None] == 1
    assert {part.work for part in kept.parts} == {None}


def test_a_pause_is_a_part_of_its_own(tmp_path: Path) -> None:
    def evaluate(monitor: TrainingMonitor, reference: Callable[[], Any]) -> None:
        with monitor.pause("evaluation"):
            without_gradients(monitor, reference)

    kept = trained(tmp_path, evaluate, named=True)
    assert [part.work for part in kept.parts if part.phase == "pause"] == ["evaluation"]
    assert "no_grad" not in {part.phase for part in kept.parts}


def test_a_model_that_raised_ends_with_its_block(tmp_path: Path) -> None:
    def raising(monitor: TrainingMonitor, reference: Callable[[], Any]) -> None:
        module = next(m.module for m in monitor._hooks.models.modules if m.name == "reference")
        assert module is not None
        with torch.no_grad(), pytest.raises(RuntimeError):
            module(torch.ones(2, WIDTH + 1))

    kept = trained(tmp_path, raising, named=True)
    seen = [(part.phase, part.work) for part in kept.parts]
    assert seen[seen.index(("no_grad", "reference")) + 1] == ("other", None)


def test_names_take_no_step_its_phases() -> None:
    clock = StepClock(HostClock())
    clock.begin()
    for _ in range(MOST_CHANGES):
        clock.enter("no_grad", "reference")
        clock.enter("no_grad")
    span = clock.end(0.0)
    assert len(span.changes) <= MOST_CHANGES // 4 + 1
    assert clock.model is None


# Which step.


def add(steps: TypicalSteps, number: int, step_s: float, *, generates: bool = False, **more: Any) -> None:
    begin, end = at(10.0 * number), at(10.0 * number + step_s)
    middle = at(10.0 * number + step_s / 2)
    span = Span(begin, end, (), [(middle, "no_grad" if generates else "forward")])
    call = SimpleNamespace(is_paused=False, begin=middle, end=end)
    note: Any = SimpleNamespace(
        warmup=more.get("warmup", False),
        position=StepPosition(number, 1),
        generations=(call,) if generates else (),
    )
    phases: Any = more.get("phases", {"other": step_s / 2, span.changes[0][1]: step_s / 2})
    steps.add(note, StepTime(1, step_s, None, phases_s=phases), span)


def kept_of(steps: TypicalSteps) -> TypicalStep | None:
    return msgspec.convert(steps.as_dict(), TypicalStep | None)  # type: ignore[call-overload, no-any-return]


def test_it_is_the_median_of_the_recent_steps() -> None:
    steps = TypicalSteps()
    assert steps.as_dict() is None
    for number in range(100):
        add(steps, number, 9.0 if number < 80 else 1.0 + number % 5)
    kept = kept_of(steps)
    assert kept is not None
    assert sum(part.seconds for part in kept.parts) == 3.0
    assert kept.step is not None
    assert kept.step >= 84
    assert (kept.like, kept.of) == (100, 100)


@pytest.mark.parametrize(("every", "is_of_those"), [(2, True), (64, True), (500, False)])
def test_steps_that_generate_are_preferred_unless_they_are_rare(every: int, is_of_those: bool) -> None:
    steps = TypicalSteps()
    for number in range(1, 1001):
        add(steps, number, 4.0, generates=number % every == 0)
    kept = kept_of(steps)
    assert kept is not None
    assert any(part.work == "generate" for part in kept.parts) == is_of_those
    assert kept.of == 1000
    assert kept.like == (1000 // every if is_of_those else 998)


def test_steps_of_warm_up_and_those_without_phases_are_not_kept() -> None:
    steps = TypicalSteps()
    add(steps, 1, 1.0, warmup=True)
    add(steps, 2, 1.0, phases="no forward pass was seen")
    add(steps, 3, 1.0, phases=None)
    assert steps.as_dict() is None
