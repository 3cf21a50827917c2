"""A lane hands rows over in order, and whatever its tracker does stays inside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from truemfu.trackers.lane import Lane

FOREVER_S = 600.0


class Recorder:
    """Keeps every call; `fail` raises in the method of this name, at the step `at` where it is `log`."""

    def __init__(self, fail: str = "", at: int = 1, problem: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self.steps: list[int] = []
        self._fail, self._at = fail, at
        self._problem = problem or OSError("disk\n  full")

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if method == self._fail:
            raise self._problem

    def start(self, run: Mapping[str, Any]) -> None:
        self._called("start")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._fail != "log" or step == self._at:
            self._called("log")
        self.steps.append(step)

    def flush(self) -> None:
        self._called("flush")

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._called("finish")


class Stuck(Recorder):
    """Hangs in the first `log` until released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_log, self.release = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.is_in_log.set()
        self.release.wait()
        super().log(step, metrics)


def until(condition: Callable[[], bool], timeout_s: float = FOREVER_S) -> bool:
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def lane_of(tracker: Recorder, notices: list[str], capacity: int = 20_000) -> Lane:
    lane = Lane(tracker, "mine", capacity=capacity, notice=notices.append)
    lane.start({"model": "m"})
    return lane


def test_rows_are_handed_over_in_order_between_start_and_finish() -> None:
    tracker, notices = Recorder(), []
    lane = lane_of(tracker, notices)
    for step in range(1000):
        lane.put(step, {"a": step})
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.steps == list(range(1000))
    assert tracker.calls == ["start", *["log"] * 1000, "finish"]
    assert (lane.lost_rows, lane.error, notices) == (0, None, [])


def test_nothing_is_handed_over_until_the_lane_is_woken() -> None:
    tracker = Recorder()
    lane = lane_of(tracker, [])
    lane.put(1, {})
    assert not until(lambda: bool(tracker.steps), timeout_s=0.2)
    lane.wake()
    assert until(lambda: tracker.steps == [1])
    lane.close({}, timeout_s=FOREVER_S)


def test_a_flush_comes_after_every_row_put_before_it() -> None:
    tracker = Recorder()
    lane = lane_of(tracker, [])
    for round_ in range(50):
        for step in range(20):
            lane.put(20 * round_ + step, {})
        lane.flush()
        assert lane.wait_until_idle(FOREVER_S)
        assert len(tracker.steps) == 20 * (round_ + 1)
        assert tracker.calls[-1] == "flush"
    lane.close({}, timeout_s=FOREVER_S)


def test_a_row_is_flushed_after_a_while_without_being_asked() -> None:
    tracker, now_s = Recorder(), 0.0
    lane = Lane(tracker, "mine", flush_every_s=1000.0, notice=pytest.fail, clock=lambda: now_s)
    lane.start({})

    def is_flushed_later(rows: int) -> bool:
        nonlocal now_s
        now_s += 1000.0
        lane.wake()
        return tracker.calls.count("flush") == rows

    for rows in (1, 2):
        lane.put(rows, {})
        lane.wake()
        assert until(lambda: len(tracker.steps) == rows)  # noqa: B023
        assert tracker.calls.count("flush") == rows - 1
        assert until(lambda: is_flushed_later(rows))  # noqa: B023
    assert is_flushed_later(2)
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.calls.count("flush") == 2
    assert lane.lost_rows == 0


def test_a_full_lane_drops_its_oldest_rows_counts_them_and_says_so_once() -> None:
    tracker, notices = Stuck(), []
    lane = lane_of(tracker, notices, capacity=10)
    lane.put(0, {})
    lane.wake()
    assert tracker.is_in_log.wait(FOREVER_S)
    for step in range(1, 26):
        lane.put(step, {})
        lane.wake()
    tracker.release.set()
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.steps == [0, *range(16, 26)]
    assert lane.lost_rows == 15
    assert notices == [
        "tracker mine cannot keep up: 10 rows are waiting, and the oldest are dropped; "
        "the local log has all rows"
    ]


@pytest.mark.parametrize("problem", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_tracker_that_raises_is_switched_off_and_its_rows_are_counted(problem: BaseException) -> None:
    tracker, notices = Recorder("log", at=3, problem=problem), []
    lane = lane_of(tracker, notices)
    for step in range(1, 6):
        lane.put(step, {})
    lane.wake()
    assert until(lambda: lane.error is not None)
    for step in range(6, 11):
        lane.put(step, {})
        lane.wake()
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.steps == [1, 2]
    assert "finish" not in tracker.calls
    assert lane.lost_rows == 8
    assert lane.error is not None
    assert lane.error.startswith(type(problem).__name__)
    assert notices == [f"tracker mine failed: {lane.error}; it is switched off, its further rows are lost"]


@pytest.mark.parametrize(("method", "lost"), [("start", 4), ("flush", 4), ("finish", 2)])
def test_a_tracker_may_raise_in_any_method(method: str, lost: int) -> None:
    tracker, notices = Recorder(method), []
    lane = lane_of(tracker, notices)
    for step in (1, 2):
        lane.put(step, {})
    lane.flush()
    assert lane.wait_until_idle(FOREVER_S)
    for step in (3, 4):
        lane.put(step, {})
    lane.close({}, timeout_s=FOREVER_S)
    assert lane.lost_rows == lost
    assert lane.error == "OSError: disk full"
    assert len(notices) == 1


def test_a_tracker_that_hangs_holds_up_neither_put_nor_close_nor_another_lane() -> None:
    stuck, fine, notices = Stuck(), Recorder(), []
    lanes = [lane_of(stuck, notices), lane_of(fine, notices)]
    for step in range(100):
        for lane in lanes:
            lane.put(step, {})
            lane.wake()
    assert stuck.is_in_log.wait(FOREVER_S)
    lanes[0].flush()
    assert not lanes[0].wait_until_idle(0.1)
    lanes[0].close({}, timeout_s=0.3)
    lanes[1].close({}, timeout_s=FOREVER_S)
    assert fine.steps == list(range(100))
    assert (lanes[0].lost_rows, lanes[1].lost_rows) == (100, 0)
    assert len(notices) == 1
    assert re.fullmatch(
        r"tracker mine failed: it did not finish within \d[\d.]* s; its remaining data is lost", notices[0]
    )
    stuck.release.set()


def test_a_row_that_the_tracker_is_taking_is_not_lost() -> None:
    tracker = Stuck()
    lane = lane_of(tracker, [])
    for step in (1, 2):
        lane.put(step, {})
    lane.wake()
    assert tracker.is_in_log.wait(FOREVER_S)
    assert lane.lost_rows == 0
    tracker.release.set()
    lane.close({}, timeout_s=FOREVER_S)
    assert lane.lost_rows == 0


def test_a_closed_lane_can_be_closed_again_and_counts_rows_that_come_too_late() -> None:
    tracker = Recorder()
    lane = lane_of(tracker, [])
    lane.close({}, timeout_s=FOREVER_S)
    lane.put(1, {})
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.calls == ["start", "finish"]
    assert lane.lost_rows == 1


def test_a_lane_that_was_never_started_closes_at_once() -> None:
    lane = Lane(Recorder(), "mine", notice=pytest.fail)
    assert lane.wait_until_idle(0)
    lane.close({}, timeout_s=FOREVER_S)
    assert lane.lost_rows == 0


def test_a_forked_process_writes_nothing() -> None:
    tracker = Recorder()
    lane = lane_of(tracker, [])
    lane.put(1, {})
    if (child := os.fork()) == 0:
        lane.put(2, {})
        lane.wake()
        lane.flush()
        idle = lane.wait_until_idle(5)
        lane.close({}, timeout_s=5)
        os._exit(0 if idle and tracker.steps == [] and tracker.calls in ([], ["start"]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    lane.close({}, timeout_s=FOREVER_S)
    assert tracker.steps == [1]


def test_a_tracker_that_hangs_does_not_keep_the_process_alive() -> None:
    code = (
        "import threading, time\nfrom truemfu.trackers.lane import Lane\nis_in = threading.Event()\n"
        "class Hangs:\n    def start(self, run): print('in', flush=True); is_in.set(); time.sleep(600)\n"
        "    log = flush = finish = start\n"
        "lane = Lane(Hangs(), 'hangs', notice=print)\nlane.start({})\nlane.put(1, {})\nis_in.wait()\n"
        "lane.close({}, timeout_s=0.2)\nprint(lane.lost_rows)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=FOREVER_S, check=True
    )
    assert done.stdout.splitlines()[0] == "in"
    assert done.stdout.splitlines()[-1] == "1"
    assert done.stderr == ""


def test_rows_of_a_tracker_that_hangs_while_it_writes_are_lost() -> None:
    class HangsInFlush(Recorder):
        release = threading.Event()

        def flush(self) -> None:
            self.release.wait()

    tracker, notices = HangsInFlush(), []
    lane = lane_of(tracker, notices)
    for step in range(5):
        lane.put(step, {})
    lane.flush()
    assert until(lambda: len(tracker.steps) == 5)
    lane.close({}, timeout_s=0.1)
    assert lane.lost_rows == 5
    tracker.release.set()
