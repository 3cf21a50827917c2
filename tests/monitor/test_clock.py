"""Step time: marks, pauses, and events that are used again."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from truemfu.monitor.clock import (
    CudaClock,
    HostClock,
    Span,
    StepClock,
    clock_for,
    duration_s,
    leave_captures_alone,
)


class ScriptedClock(HostClock):
    """Marks at given moments, and remembers what was recycled."""

    def __init__(self, *moments: float) -> None:
        self._moments = list(moments)
        self.recycled: list[float] = []

    def mark(self) -> float:
        return self._moments.pop(0)

    def recycle(self, mark: float) -> None:
        self.recycled.append(mark)


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    clock = ScriptedClock(1.0, 3.0, 7.5)
    steps = StepClock(clock)
    steps.begin()
    first, second = steps.end(), steps.end()
    assert duration_s(clock, first) == 2.0
    assert duration_s(clock, second) == 4.5


def test_a_first_step_whose_beginning_nobody_saw_has_no_time() -> None:
    clock = ScriptedClock(3.0, 5.0)
    steps = StepClock(clock)
    assert duration_s(clock, steps.end()) is None
    assert duration_s(clock, steps.end()) == 2.0


def test_later_forward_passes_do_not_begin_the_step_again() -> None:
    clock = ScriptedClock(1.0, 3.0, 9.0)
    steps = StepClock(clock)
    steps.begin()
    steps.begin()
    assert duration_s(clock, steps.end()) == 2.0


def test_pauses_are_left_out_of_the_step_they_fall_into() -> None:
    clock = ScriptedClock(0.0, 10.0, 25.0, 30.0, 31.0, 40.0, 41.0)
    steps = StepClock(clock)
    steps.begin()
    steps.pause(clock.mark())  # 10 … 25
    steps.pause(clock.mark())  # 30 … 31
    first, second = steps.end(), steps.end()
    assert duration_s(clock, first) == 40.0 - 15.0 - 1.0
    assert duration_s(clock, second) == 1.0


def test_every_mark_but_a_last_one_is_recycled_once() -> None:
    clock = ScriptedClock(0.0, 1.0, 2.0, 3.0, 4.0)
    steps = StepClock(clock)
    steps.begin()
    steps.pause(clock.mark())
    for span in (steps.end(), steps.end()):
        duration_s(clock, span)
    assert sorted(clock.recycled) == [0.0, 1.0, 2.0, 3.0]


def test_a_cpu_has_the_hosts_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)


class RecordedEvent:
    """Stands for a CUDA event where there is no GPU: what the clock asks of it, answered from a script."""

    def __init__(self, moment_ms: float, passed: bool) -> None:
        self.moment_ms, self.passed = moment_ms, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: RecordedEvent) -> float:
        return later.moment_ms - self.moment_ms


def test_cuda_times_are_seconds_and_ask_only_events_that_have_passed() -> None:
    clock: Any = CudaClock(torch.device("cuda", 0))
    begin, end = RecordedEvent(100.0, True), RecordedEvent(194.0, False)
    span = Span(begin=begin, end=end, pauses=[])
    assert not clock.has_passed(span.end)
    end.passed = True
    assert clock.has_passed(span.end)
    assert duration_s(clock, span) == pytest.approx(0.094)
    assert clock._free == [begin]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_events_tell_the_devices_time() -> None:
    clock = CudaClock(torch.device("cuda", 0))
    begin = clock.mark()
    torch.cuda._sleep(100_000_000)
    end = clock.mark()
    torch.cuda.synchronize()
    assert clock.has_passed(end)
    assert clock.seconds(begin, end) > 0.01


def test_without_a_driver_there_is_no_capture_to_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(name: str) -> object:
        asked.append(name)
        raise OSError("cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    leave_captures_alone()
    assert asked == ["libcuda.so.1"]


_CAPTURE = """
import sys, tempfile, time, torch
from truemfu import TrainingMonitor
from truemfu.monitor import resolver

if "as before" in sys.argv:
    resolver.leave_captures_alone = lambda: None
model = torch.nn.Linear(8, 8, device="cuda")
monitor = TrainingMonitor(tempfile.mkdtemp(), model=model)
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
    monitor.log_step(step, 0, loss.detach(), 1.0, 0.1)
monitor.save_logs()
asked = []
passed = monitor._clock.clock.has_passed
monitor._clock.clock.has_passed = lambda mark: asked.append(mark) or passed(mark)
monitor.log_step(step + 1, 0, loss.detach(), 1.0, 0.1)  # its loss is not fetched yet, so it is asked for
torch.cuda.synchronize()
asked.clear()
x = torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        x.mul_(2)
        for _ in range(50):
            monitor._resolver.wake()
            time.sleep(0.01)
    graph.replay()
    torch.cuda.synchronize()
    print("captured" if asked else "nobody asked", x[0].item())
except Exception as error:
    print("broken:", str(error).splitlines()[0])
sys.stdout.flush()
import os
os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_goes_on_while_marks_are_asked_for() -> None:
    def capture(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _CAPTURE, *words], capture_output=True, text=True, timeout=300
        )
        return done.stdout.strip().splitlines()[0] if done.stdout.strip() else done.stderr

    assert capture() == "captured 2.0"
    assert capture("as before").startswith("broken")  # else this test shows nothing
