"""Step time: marks, pauses, and events that are read once they have passed and used again."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.simulated_device import LAUNCH_S, SimulatedDevice, SimulatedQueue

from truemfu.monitor.timing.clock import (
    CudaClock,
    CudaQueue,
    HostClock,
    Span,
    StepClock,
    allow_queries_during_capture,
    clock_for,
    duration_s,
    seconds_between,
)


def steps_at(*moments: float) -> StepClock:
    """Steps by a host clock that shows these times, one call after another."""
    return StepClock(HostClock(), now_s=iter(moments).__next__)


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    steps = steps_at(1.0)
    steps.begin()
    assert duration_s(steps.end(3.0)) == 2.0
    assert duration_s(steps.end(7.5)) == 4.5


def test_a_first_step_whose_beginning_nobody_saw_has_no_time() -> None:
    steps = steps_at()
    assert duration_s(steps.end(3.0)) is None
    assert duration_s(steps.end(5.0)) == 2.0


def test_later_forward_passes_do_not_begin_the_step_again() -> None:
    steps = steps_at(1.0, 2.0)
    steps.begin()
    steps.begin()
    assert duration_s(steps.end(3.0)) == 2.0


def test_pauses_are_left_out_of_the_step_they_fall_into() -> None:
    steps = steps_at(0.0, 10.0, 25.0, 30.0, 31.0)
    steps.begin()
    steps.pause(steps.moment(), "other")  # 10 … 25
    steps.pause(steps.moment(), "other")  # 30 … 31
    assert steps.left_out_since_last_step() == {"other": 16.0}
    assert duration_s(steps.end(40.0)) == 40.0 - 15.0 - 1.0
    assert duration_s(steps.end(41.0)) == 1.0


def test_a_pause_is_taken_off_no_other_step() -> None:
    steps = steps_at(1.0, 6.0, 8.0)
    steps.begin()
    spans = [steps.end(3.0), steps.end(5.0)]
    steps.pause(steps.moment(), "other")
    spans += [steps.end(10.0), steps.end(11.0)]
    assert [duration_s(span) for span in spans] == [2.0, 2.0, 3.0, 1.0]


def test_a_cpu_has_the_hosts_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice()
    device.part("training")
    return device


def test_an_event_is_asked_for_its_time_only_when_it_has_passed(device: SimulatedDevice) -> None:
    clock = CudaClock(SimulatedQueue(device))
    begin = clock.mark(device.now_s)
    device.launch(0.094)
    end = clock.mark(device.now_s)
    assert clock.has_passed(begin)
    assert not clock.has_passed(end)
    assert duration_s(Span(begin, end, [])) is None
    device.item()
    assert clock.has_passed(end)
    assert duration_s(Span(begin, end, [])) == pytest.approx(0.094 + LAUNCH_S)


def test_events_are_used_again(device: SimulatedDevice) -> None:
    queue = SimulatedQueue(device)
    clock = CudaClock(queue)
    for _ in range(50):
        device.launch(0.01)
        mark = clock.mark(device.now_s)
        device.item()
        assert clock.has_passed(mark)
    assert len(queue.events) <= 3


def test_a_mark_that_cannot_be_placed_keeps_no_event(device: SimulatedDevice) -> None:
    queue = SimulatedQueue(device)
    clock = CudaClock(queue)
    for _ in range(3):
        clock.mark(device.now_s)
        clock.poll()
    device.is_capturing = True
    marks = [clock.mark(device.now_s) for _ in range(10)]
    assert all(clock.has_passed(mark) and mark.device_s is None for mark in marks)
    device.is_capturing = False
    assert clock.has_passed(clock.mark(device.now_s))
    assert len(queue.events) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_events_tell_the_devices_time() -> None:
    clock = CudaClock(CudaQueue(torch.device("cuda", 0)))
    begin = clock.mark(0.0)
    torch.cuda._sleep(100_000_000)
    end = clock.mark(1.0)
    torch.cuda.synchronize()
    assert clock.has_passed(end)
    assert (duration_s(Span(begin, end, [])) or 0.0) > 0.01


def test_without_a_driver_there_is_no_capture_to_leave_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def missing(name: str) -> object:
        asked.append(name)
        raise OSError("cannot open shared object file")

    monkeypatch.setattr("ctypes.CDLL", missing)
    allow_queries_during_capture()
    assert asked == ["libcuda.so.1"]


_CAPTURE = """
import sys, tempfile, time, torch
from truemfu import TrainingMonitor
from truemfu.monitor.rows import row_thread

if "as before" in sys.argv:
    row_thread.allow_queries_during_capture = lambda: None
model = torch.nn.Linear(8, 8, device="cuda")
monitor = TrainingMonitor(tempfile.mkdtemp(), model=model)
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
    monitor.log_step(step, 0, loss.detach(), 1.0, 0.1)
monitor.save_logs()
asked = []
poll = monitor._live.steps._clock.clock.poll
monitor._live.steps._clock.clock.poll = lambda: asked.append(poll())
torch.cuda.synchronize()
monitor._live.steps._clock.moment()  # an event that was not read yet
asked.clear()
x = torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        x.mul_(2)
        for _ in range(50):
            monitor._live._row_thread._wake.set()
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
def test_a_stream_that_is_captured_gets_no_event() -> None:
    clock = CudaClock(CudaQueue(torch.device("cuda", 0)))
    x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    begin = clock.mark(0.0)
    with torch.cuda.graph(graph):
        x.mul_(2)
        inside = clock.mark(1.0)
    end = clock.mark(2.0)
    torch.cuda.synchronize()
    assert clock.has_passed(end)
    assert (inside.event, inside.device_s) == (None, None)
    assert seconds_between(begin, end) is not None


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
