"""Sums over ranks from their messages, rows that wait for them, and ranks that fall silent."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import msgspec
import pytest

from truemfu.monitor.ranks.amounts import Amounts, Message, OwnAmounts, StepKey, exact
from truemfu.monitor.ranks.job_sums import JobSums
from truemfu.monitor.ranks.job_view import SILENT_S, JobView
from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.reporter import ROW_EVERY_S, Identity, RankReporter
from truemfu.monitor.ranks.row_sources import RowSources
from truemfu.monitor.ranks.straggler_alert import straggler_metrics
from truemfu.monitor.rows.held_rows import HOLD_S, HeldRows


def row(rank: int, number: int = 1, **values: Any) -> RankRow:
    known = {"world_size": 4, "host": f"host{rank}", "device": f"GPU-{rank}", "at_s": 1e9}
    return RankRow(rank=rank, number=number, **(known | values))


def sent(own: OwnAmounts, rank: int, **values: Any) -> Message:
    """A message as it arrives."""
    return msgspec.json.decode(msgspec.json.encode(own.message(row(rank, **values))), type=Message)


def test_random_steps_are_summed_exactly_in_whatever_pieces_they_arrive() -> None:
    draw = random.Random(0)
    for _ in range(50):
        others, steps = draw.randint(1, 4), draw.randint(1, 40)
        amounts: list[list[dict[str, Any]]] = [
            [
                {
                    "tokens": draw.choice([7, 7, 7, 8, 2**70]),
                    **({"model_flops": Fraction(draw.choice([1, 1, 2]), 3)} if draw.random() < 0.9 else {}),
                }
                for _ in range(steps)
            ]
            for _ in range(others)
        ]
        own = [OwnAmounts() for _ in range(others)]
        reported = [0] * others
        sums, asked = JobSums(others), 0
        while asked < steps:
            rank = draw.randrange(others)
            for _ in range(draw.randint(0, 6)):
                if reported[rank] < steps:
                    own[rank].add(reported[rank] + 1, 1, amounts[rank][reported[rank]])
                    reported[rank] += 1
            sums.take(sent(own[rank], rank + 1))
            while asked < min(reported) and all(sums.covered(r + 1) >= (0, asked + 1) for r in range(others)):
                asked += 1
                found = sums.of(StepKey(0, asked, 1))
                of_step = [rank[asked - 1] for rank in amounts]
                names = set.intersection(*(set(rank) for rank in of_step))
                assert found is not None
                assert found == {name: sum(rank[name] for rank in of_step) for name in names}


def test_equal_steps_are_one_run() -> None:
    own, sums = OwnAmounts(), JobSums(1)
    for step in range(1, 1001):
        own.add(step, 1, {"tokens": 5})
    message = sent(own, 1)
    assert len(message.runs) == 1
    assert len(msgspec.json.encode(message)) < 500
    sums.take(message)
    assert sums.of(StepKey(0, 1, 1)) == sums.of(StepKey(0, 1000, 1)) == {"tokens": 5}


def test_steps_on_other_numbers_are_not_added_up() -> None:
    every, tenth, sums = OwnAmounts(), OwnAmounts(), JobSums(2)
    for step in range(1, 21):
        every.add(step, 1, {"tokens": 1})
    for step in (10, 20):
        tenth.add(step, 10, {"tokens": 10})
    sums.take(sent(every, 1))
    sums.take(sent(tenth, 2))
    assert sums.of(StepKey(0, 20, 1)) is None
    assert sums.of(StepKey(0, 20, 10)) is None


def test_step_numbers_that_begin_again_are_kept_apart() -> None:
    own, sums = OwnAmounts(), JobSums(1)
    keys = [own.add(step, 1, {"tokens": tokens}) for step, tokens in ((1, 5), (2, 6), (1, 7), (2, 8))]
    assert keys == [(0, 1, 1), (0, 2, 1), (1, 1, 1), (1, 2, 1)]
    sums.take(sent(own, 1))
    found = [sums.of(key) for key in keys]
    assert [step and step["tokens"] for step in found] == [5, 6, 7, 8]


def test_more_changes_than_a_message_holds_cost_their_steps_but_no_total() -> None:
    own, sums = OwnAmounts(), JobSums(1)
    for step in range(1, 1001):
        own.add(step, 1, {"tokens": step})
    message = sent(own, 1)
    sums.take(message)
    assert message.sums["tokens"].value == str(sum(range(1, 1001)))
    assert sums.of(StepKey(0, 1, 1)) is None
    last = sums.of(StepKey(0, 1000, 1))
    assert last is not None
    assert last == {"tokens": 1000}


@pytest.mark.parametrize(
    ("value", "shared_by", "expected"),
    [
        (7, 1, 7),
        (7, 2, Fraction(7, 2)),
        (8, 2, 4),
        (2.0, 1, 2),
        (0.5, 1, Fraction(1, 2)),
        (10**30, 1, 10**30),
    ],
)
def test_shares_are_exact(value: float, shared_by: int, expected: object) -> None:
    assert exact(value, shared_by) == expected


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class HeldJob:
    """Rank 0 of a job of three, with rows that wait."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.noted: list[str] = []
        self.is_connected = self.expects_reports = True
        self.failure: str | None = None
        self.job = JobView(3, notice=self.notice, clock=self.clock)
        self.own = {rank: OwnAmounts() for rank in (1, 2)}
        self.held: HeldRows[int] = HeldRows(self, self.job, self.notice, clock=self.clock)  # type: ignore[arg-type]

    @property
    def store(self) -> HeldJob:
        return self

    def notice(self, text: str, **_: Any) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.noted.append(text)

    def report(self, rank: int, steps: range, amounts: Amounts = {"tokens": 1}) -> None:  # noqa: B006
        for step in steps:
            self.own[rank].add(step, 1, amounts)
        self.send(rank)

    def send(self, rank: int, **values: Any) -> None:
        message = self.own[rank].message(row(rank, world_size=3, **values))
        self.job.take([msgspec.json.encode(message)])

    def put(self, *steps: int) -> None:
        for step in steps:
            self.held.put(step, StepKey(0, step, 1))

    def released(self, *, is_awaited: bool = False) -> dict[int, Any]:
        found = self.held.release(is_awaited=is_awaited)
        return {step: None if others is None else others.get("tokens") for step, others in found}


def test_a_row_waits_until_all_ranks_have_reported_its_step() -> None:
    of = HeldJob()
    of.put(1, 2, 3)
    of.report(1, range(1, 4))
    assert of.released() == {}
    of.report(2, range(1, 3))
    assert of.released() == {1: 2, 2: 2}
    of.report(2, range(3, 4))
    assert of.released() == {3: 2}
    assert of.said == of.noted == []
    assert of.job.scope == "job of 3 ranks, summed"


def test_a_rank_that_is_too_late_is_named_and_not_waited_for_again_until_it_reports() -> None:
    of = HeldJob()
    of.put(1)
    of.report(1, range(1, 4))
    of.clock.now_s = HOLD_S + 1
    assert of.released() == {}  # its message may be on its way
    of.clock.now_s = HOLD_S + 4
    assert of.released() == {1: None}
    (text,) = of.said
    assert text.startswith("rank 2 did not report within 23 s")
    of.put(2)
    assert of.released() == {2: None}
    assert of.job.scope == "job of 3 ranks, summed; unknown for 2 steps, first step 1: rank 2 missing"
    of.report(2, range(1, 3))
    of.put(3)
    assert of.released() == {}
    of.report(2, range(3, 4))
    assert of.released() == {3: 2}


def test_at_the_end_rows_wait_for_a_moment_only() -> None:
    of = HeldJob()
    of.put(1)
    of.held.release_in(2.0)
    assert of.released(is_awaited=True) == {}
    of.clock.now_s = 2.1
    assert of.released(is_awaited=True) == {1: None}
    assert of.said == []
    assert "did not report their last steps" in of.noted[0]


def test_rows_wait_for_files_of_other_ranks_after_the_group_was_destroyed() -> None:
    of = HeldJob()
    of.report(1, range(1, 3))
    of.is_connected = False
    of.put(1, 2)
    assert of.released() == {}
    of.report(2, range(1, 2))
    assert of.released() == {1: 2}
    of.clock.now_s = HOLD_S + 4
    assert of.released() == {2: None}
    assert of.said == []
    assert "no process group" in of.noted[0]


def test_without_a_connection_nothing_is_held() -> None:
    of = HeldJob()
    of.is_connected = of.expects_reports = False
    of.put(1, 2)
    assert of.released() == {1: None, 2: None}
    assert "no process group" in of.noted[0]
    of.failure = "the store does not respond"
    of.put(3)
    assert of.released() == {3: None}
    assert of.said[0].startswith("the store does not respond; the figures of the job are unknown")


def test_a_rank_that_has_ended_is_not_waited_for() -> None:
    of = HeldJob()
    of.report(1, range(1, 3))
    of.report(2, range(1, 2))
    of.send(2, number=2, is_last=True)
    of.put(1, 2)
    assert of.released() == {1: 2, 2: None}


def test_a_silent_rank_is_named_once_with_its_last_time_and_step() -> None:
    of = HeldJob()
    of.report(1, range(1, 8))
    of.clock.now_s = SILENT_S - 1
    of.report(1, range(8, 9))
    assert of.said == []
    of.clock.now_s = SILENT_S + 1
    of.job.take([])
    assert of.said == ["rank 2 has never reported"]
    of.clock.now_s = 2 * SILENT_S + 1
    of.job.take([], from_store=False)
    assert len(of.said) == 1  # the store was not read meanwhile
    of.job.take([])
    of.job.take([])
    assert len(of.said) == 2
    assert of.said[1].startswith("rank 1 (host1, GPU-1) has been silent since 20")
    assert of.said[1].endswith("UTC, step 8")
    assert [rank["status"] for rank in of.job.table()] == ["never reported", "silent", "never reported"]


def test_metrics_of_each_rank_or_of_all_together() -> None:
    small, large = JobView(3, notice=print), JobView(17, notice=print)
    for job in (small, large):
        job.take(
            [
                msgspec.json.encode(OwnAmounts().message(row(rank, step_time_s=1.0 + rank)))
                for rank in range(3)
            ]
        )
    no_late_rank = straggler_metrics([])
    assert small.metrics() == {f"perf/rank/{rank}/step_time": 1.0 + rank for rank in range(3)} | no_late_rank
    assert large.metrics() == {
        "perf/rank/min/step_time": 1.0,
        "perf/rank/median/step_time": 2.0,
        "perf/rank/max/step_time": 3.0,
        **no_late_rank,
    }


def test_a_rank_that_waits_for_data_is_named_with_what_it_costs() -> None:
    of = HeldJob()
    for window in range(1, 6):
        of.clock.now_s += 10.0
        for rank in range(3):
            waited = 0.25 if rank == 2 else 0.0
            seen = row(
                rank,
                window,
                world_size=3,
                at_s=1e9 + 10 * window,
                step=20 * window,
                steps=20,
                step_time_s=0.5,
                data_wait_s=waited,
            )
            of.job.take([msgspec.json.encode(OwnAmounts().message(seen))])
    assert [text.split(" waits")[0] for text in of.said] == ["rank 2 (host2, GPU-2)"]
    late = of.job.stragglers()[0]
    assert (late["rank"], late["cause"], late["share"]) == (2, "input", pytest.approx(0.5))
    assert of.job.metrics()["perf/straggler_rank"] == 2


def test_an_earlier_message_that_comes_later_changes_nothing() -> None:
    of = HeldJob()
    of.own[1].add(1, 1, {"tokens": 1})
    earlier = msgspec.json.encode(of.own[1].message(row(1, 1, world_size=3)))
    of.own[1].add(2, 1, {"tokens": 1})
    of.send(1, number=2, is_last=True)
    of.job.take([earlier])
    assert of.job.table()[1]["status"] == "ended"
    assert of.job.table()[1]["step"] == 2


def test_many_late_ranks_leave_room_for_other_warnings() -> None:
    said: list[str] = []
    job = JobView(200, notice=lambda text, **_: said.append(text), clock=(clock := Clock()))
    for window in range(1, 6):
        clock.now_s += 10.0
        rows = [
            row(rank, window, world_size=200, at_s=1e9 + 10 * window, steps=20, step_time_s=0.5)
            for rank in range(200)
        ]
        late = [msgspec.structs.replace(one, data_wait_s=0.25 * (one.rank >= 120)) for one in rows]
        job.take([msgspec.json.encode(OwnAmounts().message(one)) for one in late])
    assert job.metrics()["perf/straggler_count"] == 80
    assert sum(" waits for data " in text for text in said) == 32
    assert any(text.startswith("more ranks hold up the job") for text in said)


def test_a_message_that_cannot_be_read_is_ignored() -> None:
    of = HeldJob()
    of.job.take([b"{", b'{"row": 1}'])
    assert [rank["status"] for rank in of.job.table()] == ["never reported"] * 3


def test_rows_come_soon_after_the_start_and_then_every_ten_seconds() -> None:
    clock, messages = Clock(), []
    own = Identity(rank=1, world_size=2, host="a", device="GPU-1", restart=3)
    reporter = RankReporter(
        own,
        role_name=lambda: "stage 1",
        memory_bytes=lambda: 5,
        send=lambda data: messages.append(msgspec.json.decode(data, type=Message)),
        clock=clock,
    )
    at_s: list[float] = []
    clock.now_s = 0.5
    while clock.now_s < 40:
        clock.now_s += 0.5
        before = messages[-1].row.number if messages else 0
        reporter.add(
            len(at_s) + 1, 1, 0.2, 0.1, paused_s=0.0, is_warmup=clock.now_s < 3, amounts={"tokens": 10}
        )
        if reporter.due_in_s == 0:
            reporter.tick()
        if messages and messages[-1].row.number > before:
            at_s.append(clock.now_s)
    assert at_s == [1.0, 2.0, 4.0, 8.0, 8 + ROW_EVERY_S, 8 + 2 * ROW_EVERY_S, 8 + 3 * ROW_EVERY_S]
    last = messages[-1].row
    assert (last.rank, last.device, last.restart, last.role, last.memory_bytes) == (
        1,
        "GPU-1",
        3,
        "stage 1",
        5,
    )
    assert last.window_s == ROW_EVERY_S
    assert last.steps == 20
    assert (last.step_time_s, last.data_wait_s, last.tokens) == pytest.approx((0.2, 0.1, 10))
    assert messages[0].row.steps == 0  # warm-up
    reporter.close()
    reporter.close()
    assert [message.row.is_last for message in messages[-2:]] == [False, True]


def test_ranks_that_share_a_gpu_are_noted() -> None:
    of = HeldJob()
    of.report(1, range(1, 2))
    of.send(2, is_last=True)
    of.send(1, is_last=True)
    assert of.job.notes() == []
    of.send(1, is_last=True, number=2, device="localhost:cpu:0")
    of.send(2, is_last=True, number=2, device="localhost:cpu:0")
    assert of.job.notes() == []
    of.send(1, is_last=True, number=3)
    of.send(2, is_last=True, number=3, device="GPU-1")
    (note,) = of.job.notes()
    assert note.startswith("ranks 1, 2 share one GPU: MFU and HFU are relative to one peak for each rank")


@pytest.mark.parametrize(("counted_mhz", "expected_mhz"), [(None, 1500.0), (1600.0, 1600.0)])
def test_the_clock_of_a_row_is_counted_by_the_driver_or_by_hybrid(
    counted_mhz: float | None, expected_mhz: float
) -> None:
    class Gpu:
        def window(self) -> dict[str, Any]:
            return {"busy_share": 0.9, "clock_mhz": counted_mhz}

    messages: list[Message] = []
    reporter = RankReporter(
        Identity(rank=1, world_size=2, host="a", device="GPU-1", restart=0),
        role_name=lambda: "",
        memory_bytes=lambda: None,
        send=lambda data: messages.append(msgspec.json.decode(data, type=Message)),
        sources=RowSources(gpu=Gpu(), clock_hz=lambda: 1.5e9),  # type: ignore[arg-type]
    )
    reporter.tick(now=True)
    reporter.add(1, 1, 0.2, None, paused_s=0.0, is_warmup=False, amounts={})
    reporter.tick(now=True)
    assert messages[-1].row.clock_mhz == expected_mhz


def test_the_share_of_time_in_collectives_is_that_of_the_busiest_group_in_the_last_row() -> None:
    shares: list[dict[str, float] | None] = [{"dp": 0.2, "tp": 0.5}, None]

    class Collectives:
        def shares(self) -> dict[str, float] | None:
            return shares.pop(0)

    messages: list[Message] = []
    clock = Clock()
    reporter = RankReporter(
        Identity(rank=1, world_size=2, host="a", device="GPU-1", restart=0),
        role_name=lambda: "",
        memory_bytes=lambda: None,
        send=lambda data: messages.append(msgspec.json.decode(data, type=Message)),
        sources=RowSources(collectives=Collectives()),  # type: ignore[arg-type]
        clock=clock,
    )
    assert reporter.sources.collective_share is None
    for expected in (0.5, None):
        reporter.add(1, 1, 0.2, None, paused_s=0.0, is_warmup=False, amounts={})
        clock.now_s += 3 * ROW_EVERY_S
        reporter.tick()
        assert reporter.sources.collective_share == expected
    assert messages[0].row.collective_s == pytest.approx({"dp": 0.04, "tp": 0.1})


def test_rows_that_rank_0_did_not_read_are_in_the_means_of_a_rank() -> None:
    messages: list[bytes] = []
    clock = Clock()
    reporter = RankReporter(
        Identity(rank=1, world_size=2, host="a", device="cpu:1", restart=0),
        role_name=lambda: "",
        memory_bytes=lambda: None,
        send=messages.append,
        clock=clock,
    )
    for step, seconds in enumerate((9.0, 0.1, 0.3), start=1):
        reporter.add(step, 1, seconds, 0.05, paused_s=0.0, is_warmup=step == 1, amounts={})
        clock.now_s += 3 * ROW_EVERY_S
        reporter.tick()
    reporter.close()
    job = JobView(2, notice=print)
    job.take(messages[-1:])
    entry = job.table()[1]
    assert entry["steps"] == 2
    assert (entry["step_time_s"], entry["data_wait_s"]) == pytest.approx((0.2, 0.05))
