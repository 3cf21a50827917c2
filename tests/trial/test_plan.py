"""What a trial measures in the time it has."""

from __future__ import annotations

import msgspec
from tests.trial.test_table import GPU

from truemfu.remedies.facts import UNCHANGED, Evidence
from truemfu.remedies.table import REMEDIES
from truemfu.trial.plan import make_plan, turns

ALL = [remedy.name for remedy in REMEDIES if remedy.from_outside]


def test_the_plan_has_all_that_applies_in_the_order_of_the_table() -> None:
    plan = make_plan(GPU, only=(), rounds=2, process_s=10, time_left_s=None)
    assert list(plan.options) == ALL
    assert {name: verdict for name, (verdict, _) in plan.others.items()} == dict.fromkeys(
        ("larger_batch", "pad_vocabulary", "packing"), "cannot be applied from outside"
    )
    assert plan.notes == []


def test_the_plan_has_what_was_asked_for() -> None:
    plan = make_plan(GPU, only=["tf32", "compile"], rounds=2, process_s=10, time_left_s=None)
    assert list(plan.options) == ["compile", "tf32"]
    assert plan.others["fused_optimizer"] == ("not measured", "not among --only")
    cpu = msgspec.structs.replace(GPU, device="cpu")
    plan = make_plan(cpu, only=["tf32"], rounds=2, process_s=10, time_left_s=None)
    assert list(plan.options) == []
    assert plan.others["tf32"] == ("does not apply", "the device is cpu")


def test_processes_and_their_time_are_counted() -> None:
    plan = make_plan(
        GPU, only=["tf32", "fused_optimizer", "compile"], rounds=2, process_s=10, time_left_s=None
    )
    order = [name for turn in range(2) for name in turns(list(plan.options), turn)]
    assert order.count(UNCHANGED) == 4
    assert plan.process_count() == len(order) + 4  # together, and the unchanged runs beside that
    assert plan.seconds(10) == 10 * (plan.process_count() + 2)  # two processes compile


def test_with_little_time_there_are_fewer_rounds_then_fewer_remedies() -> None:
    def plan(left_s: float) -> object:
        return make_plan(GPU, only=(), rounds=4, process_s=10, time_left_s=left_s)

    whole = make_plan(GPU, only=(), rounds=4, process_s=10, time_left_s=None).seconds(10)
    assert plan(whole).notes == []
    assert 2 <= plan(whole - 1).rounds < 4
    assert list(plan(whole - 1).options) == ALL
    short = plan(200)
    assert short.rounds == 2
    assert list(short.options) == ALL[: len(short.options)]
    assert 1 < len(short.options) < len(ALL)
    assert short.seconds(10) <= 200
    assert "2 of 4 rounds" in short.notes[0]
    assert ALL[-1] in short.notes[0]
    assert short.others[ALL[-1]] == ("not measured", "--time is too short")
    assert list(plan(1).options) == ALL[:1]  # one is always tried: what is measured until then counts


def test_without_evidence_nothing_is_tried() -> None:
    plan = make_plan(Evidence(), only=(), rounds=2, process_s=10, time_left_s=None)
    assert not plan.options
    assert plan.process_count() == 0
