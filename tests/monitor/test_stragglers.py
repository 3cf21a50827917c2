"""Which rank is late and why: replays of recorded rows, and the rules one by one."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from benchmarks.straggler_replay import CAUSES, false_alarms, healthy, judge, staged

from truemfu.monitor.ranks.rank_row import RankRow
from truemfu.monitor.ranks.straggler_alert import Alert, straggler_metrics
from truemfu.monitor.ranks.stragglers import Stragglers

WINDOW_S = 10.0
REPLAYS = range(100)


def row(rank: int, window: int, **changes: Any) -> RankRow:
    """A window of ten steps of one second, on a CPU."""
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": 2,
        "host": f"node{rank // 8}",
        "device": f"GPU-{rank}",
        "number": window + 1,
        "at_s": 1000.0 + WINDOW_S * (window + 1),
        "step": 10 * (window + 1),
        "steps": 10,
        "step_time_s": 1.0,
        "data_wait_s": 0.01,
        "host_s": 0.5,
        "outside_s": 0.55,
        "model_flops": 1e12,
        "tokens": 1000.0,
    }
    return RankRow(**(fields | changes))


def gpu_row(rank: int, window: int, **changes: Any) -> RankRow:
    """The same on a GPU."""
    return row(
        rank,
        window,
        **({"host_s": None, "outside_s": None, "busy_share": 0.95, "clock_mhz": 1700.0} | changes),
    )


class Job:
    """A detector that is given one window of all ranks after the other."""

    def __init__(self, ranks: int = 2, make: Any = row) -> None:
        self.stragglers = Stragglers(window_s=WINDOW_S)
        self.window = 0
        self._ranks, self._make = ranks, make

    def run(self, windows: int, late: int | None = None, **changes: Any) -> list[Alert]:
        """What is said in these windows, in which one rank's rows have these changes."""
        said: list[Alert] = []
        for _ in range(windows):
            rows = [
                self._make(rank, self.window, **(changes if rank == late else {}))
                for rank in range(self._ranks)
            ]
            said += self.add(rows)
        return said

    def add(self, rows: list[RankRow]) -> list[Alert]:
        self.window += 1
        return self.stragglers.add(rows, WINDOW_S * self.window)


@pytest.mark.parametrize("cause", CAUSES)
def test_replays_of_recorded_rows_name_the_late_rank_and_its_cause(cause: str) -> None:
    outcomes = [judge(staged(cause, seed), cause) for seed in REPLAYS]
    assert sum(outcome.is_right for outcome in outcomes) >= 95


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_healthy_replays_raise_no_alarm(kind: str) -> None:
    assert sum(bool(false_alarms(healthy(seed, kind))) for seed in REPLAYS) <= 1


def test_an_alert_begins_with_the_third_late_window_and_is_given_once() -> None:
    job = Job()
    assert job.run(4) == []
    assert job.run(2, late=1, data_wait_s=0.31) == []
    (alert,) = job.run(1, late=1, data_wait_s=0.31)
    assert (alert.rank, alert.host, alert.device, alert.cause) == (1, "node0", "GPU-1", "input")
    assert (alert.since_step, alert.since_s) == (41, 1040.0)
    assert alert.excess_s == pytest.approx(0.3)
    assert alert.share == pytest.approx(0.3)
    assert alert.lost_s == pytest.approx(9.0)
    assert job.run(5, late=1, data_wait_s=0.31) == []
    (held,) = job.stragglers.alerts
    assert held.lost_s == pytest.approx(24.0)


def test_an_alert_ends_after_three_windows_without_its_cause() -> None:
    job = Job()
    job.run(3, late=1, data_wait_s=0.31)
    assert job.run(2) == []
    assert job.run(1, late=1, data_wait_s=0.31) == []
    assert job.run(2) == []
    (ended,) = job.run(1)
    assert (ended.rank, ended.cause) == (1, "input")
    assert ended.until_s == 1070.0
    assert ended.lost_s == pytest.approx(12.0)
    assert job.stragglers.alerts == ()
    assert job.stragglers.past == [ended]
    assert job.run(10) == []


def test_late_windows_that_are_not_in_a_row_raise_no_alert() -> None:
    job = Job(4)
    for _ in range(6):
        assert job.run(2, late=2, host_s=0.9) == []
        assert job.run(1) == []


@pytest.mark.parametrize(
    ("make", "changes", "cause"),
    [
        (row, {"data_wait_s": 0.3}, "input"),
        (row, {"host_s": 0.8}, "host"),
        (row, {"host_s": 0.85, "model_flops": 1.6e12}, "work"),
        (row, {"host_s": 0.8, "data_wait_s": 0.31}, "input"),  # a loader that computes on the training thread
        (row, {"host_s": 0.9, "data_wait_s": 0.11}, "host"),
        (row, {"outside_s": 0.9}, "blocked"),
        (row, {"outside_s": 0.95, "host_s": 0.85}, "host"),
        (row, {"outside_s": 0.95, "data_wait_s": 0.4}, "input"),
        (gpu_row, {"data_wait_s": 0.31, "busy_share": 0.65}, "input"),
        (gpu_row, {"busy_share": 0.65}, "host"),
        (gpu_row, {"busy_share": 0.5, "data_wait_s": 0.11}, "host"),
        (gpu_row, {"clock_mhz": 1200.0}, "gpu"),
        (gpu_row, {"model_flops": 1.5e12}, "work"),
        (gpu_row, {"model_flops": 1.5e12, "clock_mhz": 1600.0}, "work"),
        (gpu_row, {"model_flops": None, "tokens": 1500.0}, "work"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_the_cause_is_the_one_that_explains_most_seconds(
    ranks: int, make: Any, changes: dict[str, Any], cause: str
) -> None:
    job = Job(ranks, make)
    assert [(alert.rank, alert.cause) for alert in job.run(4, late=1, **changes)] == [(1, cause)]


def test_time_in_collectives_names_a_link_only_where_nothing_else_explains_it() -> None:
    def timed(rank: int, window: int, **changes: Any) -> RankRow:
        return gpu_row(rank, window, **({"collective_s": {"dp": 0.3, "tp": 0.1}} | changes))

    early = {"collective_s": {"dp": 0.1, "tp": 0.05}}
    assert [alert.cause for alert in Job(4, timed).run(3, late=2, **early)] == ["link"]
    assert [alert.cause for alert in Job(4, timed).run(3, late=2, **early, clock_mhz=1275.0)] == ["gpu"]


def test_a_longer_step_alone_is_no_cause() -> None:
    assert Job(4).run(10, late=1, step_time_s=2.0) == []


def test_the_alert_of_a_slow_gpu_has_the_throttle_reason() -> None:
    (alert,) = Job(4, gpu_row).run(3, late=3, clock_mhz=1200.0, throttle="thermal slowdown")
    assert alert.detail == "thermal slowdown"
    assert "thermal slowdown" in str(alert)


def test_only_ranks_of_equal_role_are_compared() -> None:
    job = Job(4)
    for window in range(8):
        stages = [
            row(rank, window, role=f"stage {rank // 2}", host_s=0.3 + 0.5 * (rank // 2)) for rank in range(4)
        ]
        assert job.add(stages) == []
    job = Job(4)
    for window in range(8):
        assert (
            job.add([row(rank, window, role=f"stage {rank}", host_s=0.2 * rank) for rank in range(4)]) == []
        )


def test_warm_up_windows_count_neither_way() -> None:
    job = Job()
    job.run(2, late=1, data_wait_s=0.5)
    assert job.run(5, late=1, steps=0, step_time_s=None, data_wait_s=None) == []
    assert [alert.cause for alert in job.run(1, late=1, data_wait_s=0.5)] == ["input"]
    job = Job()
    assert job.run(10, late=1, steps=0, step_time_s=None, data_wait_s=9.0, host_s=9.0) == []
    assert job.run(10, late=1, steps=0, data_wait_s=9.0, host_s=9.0) == []


def test_half_of_the_ranks_can_be_late() -> None:
    job = Job(8)
    said = []
    for window in range(3):
        said += job.add([row(rank, window, data_wait_s=0.4 if rank >= 4 else 0.01) for rank in range(8)])
    assert sorted((alert.rank, alert.cause) for alert in said) == [(rank, "input") for rank in range(4, 8)]


def test_ranks_that_differ_a_lot_need_more_to_be_late() -> None:
    waits = random.Random(5)
    job = Job(16)
    for window in range(40):
        assert job.add([row(rank, window, data_wait_s=waits.uniform(0.0, 0.4)) for rank in range(16)]) == []


def test_a_silent_rank_is_named_after_three_windows_and_again_when_it_reports() -> None:
    job = Job(3)
    job.run(4)
    said = []
    for _ in range(3):
        assert said == []
        said += job.add([row(rank, job.window) for rank in (0, 2)])
    (silent,) = said
    assert (silent.rank, silent.cause, silent.since_step, silent.since_s) == (1, "silent", 40, 1040.0)
    assert silent.is_fault
    assert job.add([row(rank, job.window) for rank in (0, 2)]) == []
    (over,) = job.run(1)
    assert (over.rank, over.cause, over.until_s) == (1, "silent", 1090.0)
    assert job.stragglers.alerts == ()


def test_nobody_is_silent_at_the_first_read_after_a_failure_of_the_store() -> None:
    job = Job(3)
    job.run(4)
    job.window += 10
    assert (
        job.add([row(rank, job.window) for rank in (0, 2)]) == []
    )  # the store answers again, for some at first


def test_rows_of_many_reads_are_compared_once_a_window() -> None:
    stragglers = Stragglers(window_s=WINDOW_S)
    said = []
    for tick in range(80):  # a read a second; each rank reports every ten seconds, at its own time
        window, rank = divmod(tick, 10)
        wait_s = 0.4 if rank == 4 and window >= 4 else 0.01
        for alert in stragglers.add([row(rank, window, data_wait_s=wait_s)], float(tick)):
            said.append((tick, alert.rank, alert.cause))
    assert said == [(72, 4, "input")]


def test_a_larger_cause_takes_over_from_an_alert() -> None:
    job = Job(4)
    (first,) = job.run(3, late=2, host_s=0.7)
    assert job.run(2, late=2, host_s=0.7, data_wait_s=0.9) == []
    ended, second = job.run(1, late=2, data_wait_s=0.9)
    assert (first.cause, ended.cause, second.cause) == ("host", "host", "input")
    assert ended.until_s is not None
    assert second.since_step == 31
    assert [alert.cause for alert in job.stragglers.alerts] == ["input"]


def test_reads_more_often_than_windows_make_nobody_silent() -> None:
    stragglers = Stragglers(window_s=WINDOW_S)
    for tick in range(100):
        assert stragglers.add([row(tick % 10, tick // 10)], float(tick)) == []


def test_a_rank_that_ends_before_the_others_is_no_fault() -> None:
    job = Job(3)
    job.run(2)
    job.run(1, late=1, is_last=True)
    said = []
    for _ in range(3):
        said += job.add([row(rank, job.window) for rank in (0, 2)])
    (ended,) = said
    assert (ended.rank, ended.cause, ended.is_fault) == (1, "ended", False)


def test_ranks_that_all_end_are_not_reported() -> None:
    job = Job(3)
    job.run(2)
    assert job.add([row(rank, 2, is_last=True) for rank in (0, 1)]) == []
    for _ in range(5):
        assert job.add([row(2, job.window, is_last=True)]) == []


def test_ranks_whose_launchers_count_restarts_differently_are_compared() -> None:
    """torchrun's agent of a node counts a restart only if a process of that node failed."""
    job = Job()
    (alert,) = job.run(3, late=1, data_wait_s=0.5, restart=1)
    assert (alert.rank, alert.cause) == (1, "input")


def test_the_short_rows_of_the_first_seconds_are_not_compared() -> None:
    stragglers = Stragglers(window_s=WINDOW_S)
    for number, at_s in enumerate((1.0, 2.0, 4.0, 8.0)):
        rows = [row(rank, number, at_s=at_s, window_s=at_s / 2, data_wait_s=0.5 * rank) for rank in range(2)]
        assert stragglers.add(rows, at_s) == []
    late = [row(rank, 4, at_s=18.0, window_s=10.0, data_wait_s=0.5 * rank) for rank in range(2)]
    assert stragglers.add(late, 18.0) == []
    assert stragglers.alerts == ()


def test_nobody_is_silent_while_the_store_is_not_read() -> None:
    """Rank 0's own rows do not come from the store."""
    job = Job(3)
    job.run(2)
    for window in range(2, 9):
        assert job.stragglers.add([row(0, window)], WINDOW_S * window, is_read=False) == []
    said = [alert for _ in range(3) for alert in job.run(1)]
    assert said == []


def test_a_rank_is_silent_where_the_store_is_read_and_has_nothing_of_it() -> None:
    job = Job()
    job.run(2)
    said = []
    for window in range(2, 6):
        said += job.stragglers.add([], WINDOW_S * window)
        said += job.stragglers.add([row(0, window)], WINDOW_S * window, is_read=False)
    assert [(alert.rank, alert.cause) for alert in said] == [(1, "silent")]


def test_a_process_that_takes_a_rank_begins_anew() -> None:
    job = Job()
    job.run(2, late=1, data_wait_s=0.5)
    for window in range(2):
        assert job.add([row(0, 2 + window), row(1, window, data_wait_s=0.5)]) == []


def test_rows_that_arrive_late_and_together_give_the_same_alerts() -> None:
    at_once, one_by_one = Stragglers(), Stragglers()
    windows = [
        [row(rank, window, host_s=0.5 + 0.4 * (rank == 2)) for rank in range(4)] for window in range(5)
    ]
    said = [alert for i, rows in enumerate(windows) for alert in one_by_one.add(rows, WINDOW_S * i)]
    shuffled = [row for rows in windows for row in rows]
    random.Random(0).shuffle(shuffled)
    assert at_once.add(shuffled, 50.0) == said
    assert at_once.alerts == one_by_one.alerts


def test_a_row_that_is_read_twice_counts_once() -> None:
    job = Job()
    job.run(2, late=1, data_wait_s=0.5)
    for _ in range(6):
        assert job.add([row(0, 1), row(1, 1, data_wait_s=0.5)]) == []
    assert [alert.cause for alert in job.add([row(0, 2), row(1, 2, data_wait_s=0.5)])] == ["input"]


def test_unknown_fields_are_not_judged() -> None:
    bare = dict.fromkeys(("data_wait_s", "host_s", "model_flops", "tokens"))
    job = Job(4, lambda rank, window, **changes: row(rank, window, **(bare | changes)))
    assert job.run(5, late=1, data_wait_s=9.0) == []  # no other rank knows its own


def test_sixteen_thousand_ranks_with_one_late() -> None:
    draws = random.Random(7)
    job = Job(16384, lambda rank, window, **changes: gpu_row(rank, window, **(_noise(draws) | changes)))
    assert job.run(2) == []
    assert [(a.rank, a.cause) for a in job.run(3, late=9000, clock_mhz=1100.0)] == [(9000, "gpu")]


def _noise(draws: random.Random) -> dict[str, Any]:
    return {
        "clock_mhz": draws.gauss(1700.0, 25.0),
        "busy_share": min(1.0, draws.gauss(0.96, 0.01)),
        "data_wait_s": draws.gauss(0.01, 0.002),
    }


def test_metrics_are_those_of_the_rank_that_costs_most() -> None:
    assert set(straggler_metrics([]).values()) == {0, -1}
    job = Job(8)
    for window in range(3):
        late = {1: {"data_wait_s": 0.2}, 6: {"host_s": 0.9}}
        job.add([row(rank, window, **late.get(rank, {})) for rank in range(8)])
    assert straggler_metrics(job.stragglers.alerts) == {
        "perf/straggler_count": 2,
        "perf/straggler_rank": 6,
        "perf/straggler_cause": 3,
        "perf/straggler_excess_s": pytest.approx(0.4),
        "perf/straggler_share": pytest.approx(0.4),
        "perf/straggler_lost_s": pytest.approx(12.0),
    }
    job.run(3)
    assert straggler_metrics([*job.stragglers.alerts, *job.stragglers.past]) == {
        "perf/straggler_count": 0,
        "perf/straggler_rank": -1,
        "perf/straggler_cause": 0,
        "perf/straggler_excess_s": 0.0,
        "perf/straggler_share": 0.0,
        "perf/straggler_lost_s": 0.0,
    }


def alert(**changes: Any) -> Alert:
    fields: dict[str, Any] = {
        "rank": 5,
        "host": "node7",
        "device": "GPU-1a2b",
        "cause": "input",
        "since_s": 0.0,
        "since_step": 1200,
        "step_time_s": 0.8,
        "excess_s": 0.21,
        "lost_s": 63.0,
    }
    return Alert(**(fields | changes))


NAME = "rank 5 (node7, GPU-1a2b) "


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {},
            "waits for data 0.21 s longer than the others in each step of 0.80 s, since step 1,200: 26% of "
            "the job's time",
        ),
        (
            {"cause": "gpu", "detail": "power limit"},
            "has a GPU that is slower than the others' by up to 0.21 s in each step of 0.80 s (power limit), "
            "since step 1,200: up to 26% of the job's time",
        ),
        (
            {"cause": "host", "excess_s": 0.02},
            "is later than the others by 20.0 ms in each step of 0.80 s, because of its host, since step "
            "1,200: 2% of the job's time",
        ),
        ({"cause": "silent"}, "has not reported for three windows; its last step was 1,200"),
        ({"cause": "ended", "since_step": None}, "ended after step unknown, before the others"),
        ({"cause": "silent", "until_s": 9.0}, "reports again after step 1,200"),
        (
            {"cause": "work", "until_s": 9.0},
            "is no longer late (work); since step 1,200 this cost the job up to 63.00 s",
        ),
    ],
)
def test_an_alert_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    assert str(alert(**changes)) == NAME + sentence


def test_an_alert_can_be_written_and_read() -> None:
    assert msgspec.json.decode(msgspec.json.encode(alert()), type=Alert) == alert()
