"""What follows from observed steps for others: the same integer, one of a fitted form, or a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from observed_notes import RowSide, Thread
from torch import Tensor, nn

from truemfu import FlopCount
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.ranks.role import RankRole
from truemfu.monitor.step_flops.known import FORM, Unknown
from truemfu.monitor.step_flops.source import ESTIMATE, GIVEN, StepFlops, UnknownFlops
from truemfu.monitor.step_note import StepExtras, StepNote

WIDTH = 8
OTHER_OPERATORS = "the step ran other operators than the observed steps with the same batches"
NOT_REPEATED = "no observation was repeated, so equal batches may not mean equal work"
VARIES = "observed steps with the same batches did different work, so only observed steps have known FLOPs"


class Repeated(nn.Module):
    """A layer that runs as often as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(WIDTH, WIDTH, bias=False), 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x) for _ in range(self.times)])


def rows(samples: int = 4) -> dict[str, Any]:
    return {"x": torch.randn(samples, WIDTH)}


def flops(samples: int = 4, times: int = 1) -> int:
    return 2 * 2 * samples * WIDTH * WIDTH * times


@pytest.fixture
def model() -> Repeated:
    return Repeated()


@pytest.fixture
def thread() -> Thread:
    return Thread()


@pytest.fixture
def side(model: Repeated) -> RowSide:
    return RowSide(model)


def known(side: RowSide, note: StepNote) -> tuple[int, str] | str:
    """The FLOPs of a step and how they are known, or why they are not."""
    answer = side.known.answer(note)
    return answer.reason if isinstance(answer, Unknown) else (answer.model_flops, answer.method)


def repeat(thread: Thread, side: RowSide, model: Repeated) -> None:
    """Observe steps of another kind that agree: from then on equal batches mean equal work."""
    for _ in range(2):
        side.known.take(thread.observe(model, rows(1), nodes=3))
    assert side.repeats_agreed == 1


def test_the_same_batches_and_nodes_have_the_integer_of_the_observed_step(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    observed = thread.observe(model, rows(4), rows(6), nodes=5)
    side.known.take(observed)
    assert known(side, observed) == (flops(10), OBSERVED)
    assert known(side, thread.note(rows(4), rows(6), nodes=5)) == NOT_REPEATED
    assert side.plan.is_due(3, 0.0)  # to be repeated
    side.known.take(thread.observe(model, rows(4), rows(6), nodes=5))
    assert side.repeats_agreed == 1
    assert known(side, thread.note(rows(4), rows(6), nodes=5)) == (flops(10), OBSERVED)
    assert known(side, thread.note(rows(4), rows(6), nodes=None)) == (flops(10), OBSERVED)
    assert side.known.steps == [1, 3]


def test_a_repeat_is_asked_for_until_a_step_is_observed(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    side.known.take(thread.observe(model, rows()))
    side.plan.observed(2, 0.001, 0.0)  # the step is accounted for after what it shows was learned
    assert side.plan.is_due(3, 0.0)
    assert not side.plan.is_due(4, 0.0)


def test_a_repeat_that_agrees_holds_for_all_kinds_of_steps(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    side.known.take(thread.observe(model, rows(4)))
    repeat(thread, side, model)
    side.known.take(thread.observe(model, rows(6)))
    assert known(side, thread.note(rows(4))) == (flops(4), OBSERVED)
    assert known(side, thread.note(rows(6))) == (flops(6), OBSERVED)
    assert side.repeats_agreed == 1  # told once


@pytest.mark.parametrize(
    "batches",
    [[rows(5)], [rows(4), rows(4)], [{"x": torch.randn(4, WIDTH).double()}], [{**rows(), "flag": True}]],
    ids=["other samples", "two micro-batches", "another dtype", "another argument"],
)
def test_batches_of_another_kind_are_unknown(
    thread: Thread, side: RowSide, model: Repeated, batches: list[dict[str, Any]]
) -> None:
    side.known.take(thread.observe(model, rows(4)))
    reason = known(side, thread.note(*batches))
    assert isinstance(reason, str)
    assert reason.startswith("no step with the same batch shapes was observed")


def test_another_state_of_the_modules_is_unknown(thread: Thread, side: RowSide, model: Repeated) -> None:
    side.known.take(thread.observe(model, rows(4), state=0))
    assert isinstance(known(side, thread.note(rows(4), state=1)), str)


def test_other_numbers_of_nodes_are_known_between_three_observed_ones_that_agree(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    for nodes in (5, 12):
        side.known.take(thread.observe(model, rows(), nodes=nodes))
        assert known(side, thread.note(rows(), nodes=7)) == OTHER_OPERATORS
    side.known.take(thread.observe(model, rows(), nodes=9))
    found = [known(side, thread.note(rows(), nodes=nodes)) for nodes in (4, 5, 7, 12, 13)]
    assert found == [OTHER_OPERATORS, *[(flops(), OBSERVED)] * 3, OTHER_OPERATORS]


def test_numbers_of_nodes_between_observed_ones_that_differ_are_unknown(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    for nodes, times in ((5, 1), (9, 2), (12, 1)):
        model.times = times
        side.known.take(thread.observe(model, rows(), nodes=nodes))
    assert known(side, thread.note(rows(), nodes=7)) == OTHER_OPERATORS
    assert known(side, thread.note(rows(), nodes=9)) == (flops(times=2), OBSERVED)
    assert side.said == []  # more nodes, more work: no contradiction


def test_gradients_of_other_parameters_are_other_work(thread: Thread, side: RowSide, model: Repeated) -> None:
    for _ in range(2):
        side.known.take(thread.observe(model, rows(), gradients=b"\1\0"))
    assert known(side, thread.note(rows(), gradients=b"\1\0")) == (flops(), OBSERVED)
    assert known(side, thread.note(rows(), gradients=b"\0\1")) == OTHER_OPERATORS
    model.times = 2
    side.known.take(thread.observe(model, rows(), gradients=b"\0\1"))
    assert known(side, thread.note(rows(), gradients=b"\0\1")) == (flops(times=2), OBSERVED)
    assert known(side, thread.note(rows(), gradients=b"\1\0")) == (flops(), OBSERVED)
    assert known(side, thread.note(rows())) == OTHER_OPERATORS  # no optimizer stepped: it may be either
    assert side.said == []


@pytest.mark.parametrize("first", [None, b"\1"])
def test_steps_without_an_optimizer_step_are_like_those_with_one(
    thread: Thread, side: RowSide, model: Repeated, first: bytes | None
) -> None:
    second = b"\1" if first is None else None
    side.known.take(thread.observe(model, rows(), gradients=first))
    side.known.take(thread.observe(model, rows(), gradients=second))
    assert side.repeats_agreed == 1
    for gradients in (first, second):
        assert known(side, thread.note(rows(), gradients=gradients)) == (flops(), OBSERVED)
    assert known(side, thread.note(rows(), gradients=b"\0")) == OTHER_OPERATORS


def test_gradients_between_observed_ones_that_agree_have_their_integer(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    for gradients in (b"\1\1\0\0\0", b"\1\0\1\0\0", b"\1\1\1\1\0"):
        assert known(side, thread.note(rows(), gradients=b"\1\0\0\1\0")) != (flops(), OBSERVED)
        side.known.take(thread.observe(model, rows(), gradients=gradients))
    enclosed = [b"\1\0\0\1\0", b"\0\1\1\1\0"]
    others = [b"\1\0\0\0\0", b"\1\0\0\0\1", b"\1\1"]  # fewer, a new one, another optimizer
    assert [known(side, thread.note(rows(), gradients=g)) for g in enclosed] == [(flops(), OBSERVED)] * 2
    assert [known(side, thread.note(rows(), gradients=g)) for g in others] == [OTHER_OPERATORS] * 3


def test_an_enclosed_step_that_did_other_work_is_a_contradiction(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    for nodes in (5, 9, 12):
        side.known.take(thread.observe(model, rows(), nodes=nodes))
    model.times = 2
    side.known.take(thread.observe(model, rows(), nodes=7))
    assert "the work of steps with the same batches changed between steps 5 and 6" in side.said[0]


def test_a_form_holds_for_gradients_of_the_same_parameters(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for samples in (2, 4, 6, 10, 12, 20):
        side.known.take(thread.observe(model, rows(samples), gradients=b"\1\0"))
    assert known(side, thread.note(rows(16), gradients=b"\1\0")) == (flops(16), FORM)
    assert known(side, thread.note(rows(16))) == (flops(16), FORM)
    assert isinstance(known(side, thread.note(rows(16), gradients=b"\1\1")), str)


def observe_at(thread: Thread, side: RowSide, model: Repeated, step: int, times: int) -> StepNote:
    model.times = times
    note = thread.observe(model, rows(), step=step)
    side.known.take(note)
    return note


def test_a_contradiction_is_a_warning_that_names_both_steps(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    observe_at(thread, side, model, 3, times=1)
    observe_at(thread, side, model, 40, times=2)
    assert side.said == [
        "the work of steps with the same batches changed between steps 3 and 40, from "
        f"{flops():,} to {flops(times=2):,} FLOPs: steps between them may have either"
    ]
    assert (
        known(side, thread.note(rows(), step=41)) == VARIES
    )  # or changed for good, which the next one tells
    assert side.plan.is_due(42, 0.0)
    for step in (42, 43):
        observe_at(thread, side, model, step, times=2)
    assert known(side, thread.note(rows(), step=44)) == (flops(times=2), OBSERVED)


def test_a_step_between_contradicting_ones_is_unknown(thread: Thread, side: RowSide, model: Repeated) -> None:
    repeat(thread, side, model)
    observe_at(thread, side, model, 3, times=1)
    between = thread.note(rows(), step=20)
    for step in (40, 41, 42):
        observe_at(thread, side, model, step, times=2)
    assert "before and after this one" in str(known(side, between))
    assert known(side, thread.note(rows(), step=43)) == (flops(times=2), OBSERVED)


def test_after_two_contradictions_only_observed_steps_are_known(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for step, times in ((1, 1), (2, 1), (3, 1), (40, 2), (80, 1)):
        last = observe_at(thread, side, model, step, times=times)
    assert known(side, thread.note(rows())) == VARIES
    assert known(side, last) == (flops(), OBSERVED)
    for step in range(81, 88):
        observe_at(thread, side, model, step, times=1)
        assert known(side, thread.note(rows())) == VARIES  # what varied may vary again
    observe_at(thread, side, model, 88, times=1)
    assert known(side, thread.note(rows(), step=89)) == (flops(), OBSERVED)


def test_work_that_the_first_step_alone_has_is_a_change_and_not_variation(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    observe_at(thread, side, model, 1, times=2)
    observe_at(thread, side, model, 2, times=1)
    assert known(side, thread.note(rows(), step=3)) == VARIES  # until observations agree more often than not
    for step in (3, 4, 5, 6):
        observe_at(thread, side, model, step, times=1)
    assert known(side, thread.note(rows(), step=7)) == (flops(), OBSERVED)


def test_a_contradiction_makes_what_was_observed_of_other_batches_outdated(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    side.known.take(thread.observe(model, rows(6)))
    assert isinstance(known(side, thread.note(rows(6))), tuple)
    for step, times in ((3, 1), (4, 1), (40, 2)):
        observe_at(thread, side, model, step, times=times)
    assert isinstance(known(side, thread.note(rows(6))), str)


def test_other_backward_passes_are_other_work(thread: Thread, side: RowSide, model: Repeated) -> None:
    for _ in range(2):
        side.known.take(thread.observe(model, rows(), passes=5))
    assert known(side, thread.note(rows(), passes=5)) == (flops(), OBSERVED)
    assert isinstance(known(side, thread.note(rows(), passes=6)), str)


def test_a_step_observed_from_its_first_batch_on_is_dropped_where_work_precedes_that(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    first = thread.observe(model, rows(), is_whole=False)
    side.known.take(first)
    assert known(side, first) == (flops(), OBSERVED)
    assert not side.known.is_settled(first)  # not before a whole step has shown that nothing was missed
    whole = thread.observe(model, rows(), before=lambda: torch.ones(4, WIDTH) @ weight)
    side.known.take(whole)
    assert side.whole_steps_wanted == 1
    assert known(side, whole) == (flops() + 2 * 4 * WIDTH * WIDTH, OBSERVED)
    part = thread.observe(model, rows(6), is_whole=False)
    side.known.take(part)
    assert part.extras.observed is not None
    assert part.extras.observed.count is None
    assert isinstance(known(side, part), str)
    assert side.plan.is_due(3, 0.0)  # a whole step instead


def test_a_row_of_an_unknown_kind_waits_a_few_seconds_for_an_observation(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    repeat(thread, side, model)
    note = thread.note(rows(), end_s=10.0)
    side.now_s = 12.0
    assert not side.known.is_settled(note)
    side.now_s = 15.1
    assert side.known.is_settled(note)
    side.now_s = 12.0
    side.known.take(thread.observe(model, rows()))
    assert side.known.is_settled(note)
    assert known(side, note) == (flops(), OBSERVED)


def test_a_row_does_not_wait_for_an_observation_that_the_share_does_not_allow(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for step in range(1, 12):
        side.plan.observed(step, 5.0, now_s=2.0)
    side.now_s = 12.0
    assert side.known.is_settled(thread.note(rows(), end_s=11.0))


def test_rows_without_readable_batches_do_not_wait(thread: Thread, side: RowSide) -> None:
    assert side.known.is_settled(thread.note())
    reason = known(side, thread.note())
    assert isinstance(reason, str)
    assert "attach the object you call" in reason


def test_other_documents_in_the_same_shape_ask_for_an_observation(thread: Thread, side: RowSide) -> None:
    def packed(*lengths: int) -> dict[str, Any]:
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        return {"input_ids": torch.zeros(1, 8, dtype=torch.long), "position_ids": positions}

    embedding = nn.Embedding(9, WIDTH)
    for _ in range(2):
        note = thread.observe(lambda input_ids, position_ids: embedding(input_ids), packed(3, 5))
        side.known.take(note)
    assert side.plan.is_due(3, 0.0)  # what the first one asked for
    assert not isinstance(side.known.answer(thread.note(packed(3, 5))), Unknown)
    assert not side.plan.is_due(4, 0.0)
    assert not side.known.is_settled(thread.note(packed(2, 6)))
    assert side.plan.is_due(5, 0.0)


def test_sizes_between_observed_ones_follow_a_form_and_others_do_not(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for samples in (2, 4, 6, 10, 12, 20):
        side.known.take(thread.observe(model, rows(samples), nodes=7))
    assert known(side, thread.note(rows(16))) == (flops(16), FORM)
    for note in (thread.note(rows(22)), thread.note(rows(7)), thread.note(rows(16), nodes=8)):
        assert isinstance(known(side, note), str)


def test_a_form_that_an_observation_contradicts_is_a_warning(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for samples in (2, 4, 6, 10, 12, 20):
        side.known.take(thread.observe(model, rows(samples), nodes=7))
    model.times = 2
    side.known.take(thread.observe(model, rows(16), nodes=7))
    (said,) = side.said
    assert said.startswith("FLOPs from a closed form may be wrong in steps before step 7")
    assert isinstance(known(side, thread.note(rows(18))), str)


def test_an_observation_that_failed_gives_its_reason_and_is_tried_again_three_times(
    thread: Thread, side: RowSide, model: Repeated
) -> None:
    for step in range(3, 8):
        note = thread.observe(model, rows(), step=step)
        assert note.extras.observed is not None
        note.extras.observed.observation.fail("it could not be seen")
        side.known.take(note)
        assert side.plan.is_due(step, 0.0) == (step < 6)
        side.plan.observed(step, 0.001, 0.0)
    assert known(side, thread.note(rows())) == "it could not be seen"


def test_an_estimate_is_apart_from_unknown_flops(thread: Thread, model: Repeated) -> None:
    side = RowSide(nn.Linear(WIDTH, WIDTH, bias=False))
    found = side.flops.of(thread.note({"input": torch.randn(4, WIDTH)}))
    assert isinstance(found, UnknownFlops)
    assert found.reason.startswith("no step with the same batch shapes was observed")
    assert found.estimate is not None
    assert (found.estimate.method, found.estimate.model_flops) == (ESTIMATE, flops())


def test_mode_estimate_has_the_estimate_as_flops(thread: Thread) -> None:
    side = RowSide(nn.Linear(WIDTH, WIDTH, bias=False), mfu_calculation_mode="estimate")
    found = side.flops.of(thread.note({"input": torch.randn(4, WIDTH)}))
    assert isinstance(found, StepFlops)
    assert (found.method, found.model_flops) == (ESTIMATE, flops())


def test_a_step_without_products_is_unknown_and_not_zero(thread: Thread, side: RowSide) -> None:
    weight = torch.ones(WIDTH, requires_grad=True)
    note = thread.observe(lambda x: x * weight, rows())
    side.flops.learn(note)
    assert side.flops.of(note) == UnknownFlops(
        reason="no matrix products, convolutions or attention were seen in the step", estimate=None
    )


def test_flops_of_the_caller_come_before_all_else(thread: Thread, side: RowSide) -> None:
    note = thread.note(rows(), extras=StepExtras(given_flops=5e9))
    side.rank.role = RankRole(splits_sequences=True)
    found = side.flops.of(note)
    assert isinstance(found, StepFlops)
    assert (found.method, found.model_flops) == (GIVEN, 5e9)
    refused = side.flops.of(thread.note(rows()))
    assert isinstance(refused, UnknownFlops)
    assert refused.reason.startswith("sequences are split over ranks")
    assert isinstance(side.flops.count(thread.note(rows())), Unknown)
    assert side.flops.is_settled(thread.note(rows()))


def test_an_error_in_a_count_is_a_warning(
    thread: Thread, side: RowSide, model: Repeated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> FlopCount:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("truemfu.flops.observe.observation.Observation.count", fails)
    note = thread.observe(model, rows())
    side.flops.learn(note)
    assert side.said == ["an observed step could not be counted: RuntimeError: no such luck"]
    assert isinstance(side.flops.of(note), UnknownFlops)
