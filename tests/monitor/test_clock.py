"""Step time: marks, pauses, events that are used again, and steps that need none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from truemfu.monitor.training_side.clock import (
    CudaClock,
    HostClock,
    Mark,
    Span,
    StepClock,
    allow_queries_during_capture,
    clock_for,
    duration_s,
)


def at(monkeypatch: pytest.MonkeyPatch, *moments: float) -> None:
    """What `time.perf_counter` answers, one call after another."""
    left = list(moments)
    monkeypatch.setattr("truemfu.monitor.training_side.clock.time.perf_counter", lambda: left.pop(0))


def test_a_step_lasts_from_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1.0)
    steps = StepClock(HostClock())
    steps.begin()
    assert duration_s(steps.end(3.0)) == 2.0
    assert duration_s(steps.end(7.5)) == 4.5


def test_a_first_step_whose_beginning_nobody_saw_has_no_time() -> None:
    steps = StepClock(HostClock())
    assert duration_s(steps.end(3.0)) is None
    assert duration_s(steps.end(5.0)) == 2.0


def test_later_forward_passes_do_not_begin_the_step_again(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1.0, 2.0)
    steps = StepClock(HostClock())
    steps.begin()
    steps.begin()
    assert duration_s(steps.end(3.0)) == 2.0


def test_pauses_are_left_out_of_the_step_they_fall_into(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 0.0, 10.0, 25.0, 30.0, 31.0)
    steps = StepClock(HostClock())
    steps.begin()
    steps.pause(steps.moment(), "other")  # 10 … 25
    steps.pause(steps.moment(), "other")  # 30 … 31
    assert duration_s(steps.end(40.0)) == 40.0 - 15.0 - 1.0
    assert duration_s(steps.end(41.0)) == 1.0


def test_a_pause_is_taken_off_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1.0, 6.0, 8.0)
    steps = StepClock(HostClock())
    steps.begin()
    spans = [steps.end(3.0), steps.end(5.0)]
    steps.pause(steps.moment(), "other")
    spans += [steps.end(10.0), steps.end(11.0)]
    assert [duration_s(span) for span in spans] == [2.0, 2.0, 3.0, 1.0]


def test_a_cpu_has_the_hosts_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), CudaClock)


class RecordedEvent:
    """Stands for a CUDA event where there is no GPU: what the clock asks of it, answered from a script."""

    def __init__(self, moment_ms: float, passed: bool = True) -> None:
        self.moment_ms, self.passed = moment_ms, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: RecordedEvent) -> float:
        return later.moment_ms - self.moment_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Asked right after each of its marks."""
    device = Device()
    monkeypatch.setattr("truemfu.monitor.training_side.clock._age_s", lambda mark: device.age_s)
    return device


class Device(CudaClock):
    """A CUDA clock whose events say when a device would have been there: `lag_s` after the host."""

    age_s = 0.001

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", 0), thins_out=True)
        self.lag_s = 0.0
        self.events: list[RecordedEvent] = []

    def _marked(self, now_s: float, steps: int | None) -> Mark:
        self.now_s = now_s
        return super()._marked(now_s, steps)

    def _recorded(self) -> Any:
        event = RecordedEvent(1e3 * (self.now_s + self.lag_s))
        self.events.append(event)
        return event


def run(clock: Device, steps: StepClock, count: int, step_s: float = 0.1) -> list[Span]:
    """So many more steps of this length, each asked for as the resolver does."""
    if not clock.events:
        clock.mark(0.0)
        steps._begin = clock._with_event[0]
    spans = []
    for _ in range(count):
        assert steps._begin is not None
        spans.append(steps.end(steps._begin.host_s + step_s, exact=False))
        clock.has_passed(spans[-1].end)
    return spans


def test_an_event_is_asked_for_its_time_only_when_it_has_passed(device: Device) -> None:
    clock = device
    begin, end = clock.mark(0.1), clock.mark(0.194)
    clock.events[1].passed = False
    assert clock.has_passed(begin)
    assert not clock.has_passed(end)
    clock.events[1].passed = True
    assert clock.has_passed(end)
    assert duration_s(Span(begin, end, [])) == pytest.approx(0.094)


def test_events_are_used_again() -> None:
    clock: Any = CudaClock(torch.device("cuda", 0))
    clock._recorded = lambda: clock._free.pop() if clock._free else RecordedEvent(0.0)
    used = set()
    for number in range(50):
        mark = clock.mark(float(number))
        used.add(id(mark.event))
        assert clock.has_passed(mark)
    assert len(used) <= 3


def test_every_step_has_an_event_until_host_and_device_agree(device: Device) -> None:
    clock = device
    steps = StepClock(clock)
    run(clock, steps, 31)
    assert len(clock.events) == 32
    assert clock.source == "CUDA events"
    run(clock, steps, 300)
    assert len(clock.events) == pytest.approx(32 + 30 / 4, abs=2)  # then one in four seconds
    assert clock.source == "CUDA events, the host's clock between them while both agree"


def test_a_device_that_goes_its_own_way_has_an_event_on_every_step(device: Device) -> None:
    clock = device
    steps = StepClock(clock)
    for number in range(100):
        clock.lag_s = 0.01 * (number % 2)
        run(clock, steps, 1)
    assert len(clock.events) == 101


def test_between_two_events_the_time_is_the_devices_and_shared_by_the_hosts(device: Device) -> None:
    clock = device
    steps = StepClock(clock)
    run(clock, steps, 32)  # the last of them has the last event for four seconds
    spans = run(clock, steps, 10, 0.1) + run(clock, steps, 5, 0.2)
    assert [duration_s(span) for span in spans] == [None] * 15
    clock.lag_s = 0.042  # the device needed a fiftieth more
    spans += [steps.end(5.3)]
    for span in spans:
        assert clock.has_passed(span.end)
    assert [duration_s(span) for span in spans] == pytest.approx([0.102] * 10 + [0.204] * 5 + [0.102])


def test_a_device_that_falls_behind_has_an_event_on_every_step_again(device: Device) -> None:
    clock = device
    steps = StepClock(clock)
    run(clock, steps, 100)
    few = len(clock.events)
    clock.lag_s = 0.08  # of a step of 0.1
    run(clock, steps, 20)
    assert clock._every_s == 0.0
    run(clock, steps, 20)
    assert len(clock.events) >= few + 20


def test_a_device_that_is_behind_has_an_event_on_every_step(device: Device) -> None:
    """Host and device agree on the length of steps, but a long one would be taken for a later one."""
    steps = StepClock(device)
    device.age_s = 0.03  # of steps of 0.1
    run(device, steps, 100)
    assert len(device.events) == 101
    device.age_s = 0.02
    run(device, steps, 100)
    assert len(device.events) < 110


def test_a_device_that_was_waited_for_is_not_taken_for_one_that_keeps_up(device: Device) -> None:
    """After a synchronisation, as a save or an evaluation may bring, it has done everything."""
    steps = StepClock(device)
    device.age_s = 0.15  # one and a half steps behind
    run(device, steps, 50)
    device.age_s = 0.0
    device.moment(5.1)
    device.poll()
    device.age_s = 0.15
    steps._begin = device.moment(5.2)
    run(device, steps, 50)
    assert not device._every_s


def test_how_far_the_device_is_can_be_known_before_a_step_is_asked_for(device: Device) -> None:
    """A step's row may wait seconds for its loss, while the newest events tell that the device keeps up."""
    steps = StepClock(device)
    run(device, steps, 40)
    assert device._every_s
    steps.end(4.1)
    device.lag_s = 0.05  # the device needs a twentieth more for the next ten
    spans = [steps.end(4.1 + 0.1 * n, exact=n % 10 == 0) for n in range(1, 41)]
    device.poll()
    assert all(device.has_passed(span.end) for span in spans)
    assert [duration_s(span) for span in spans] == pytest.approx([0.105] * 10 + [0.1] * 30)
    assert len(device._reached) == 1


def test_a_device_that_slips_away_slowly_has_an_event_on_every_step_again(device: Device) -> None:
    steps = StepClock(device)
    run(device, steps, 40)
    for _ in range(12):
        device.lag_s += 0.005  # each ten seconds a twentieth of a step more
        steps.end(device._marked_s + 10.0)
        device.poll()
        if device.lag_s < 0.024:
            assert device._every_s
    assert not device._every_s


def test_steps_that_get_shorter_are_what_the_device_is_measured_by(device: Device) -> None:
    """Being behind by a part of a first, long step may be many of the later ones."""
    steps = StepClock(device)
    run(device, steps, 40, 1.0)
    assert device._every_s
    for _ in range(64):
        run(device, steps, 500, 0.02)
    assert device._step_s == pytest.approx(0.02)
    late = steps.end(device._marked_s + 10.0)
    device.events[-1].passed = False
    device.age_s = 0.02
    assert not device.has_passed(late.end)
    assert not device._every_s


def test_a_long_pause_is_no_step_to_go_by(device: Device) -> None:
    steps = StepClock(device)
    device.age_s = 1.0  # the device is ten steps behind
    run(device, steps, 40)
    steps._begin = device.moment(60.0)
    run(device, steps, 40)
    assert device._step_s == pytest.approx(0.1)
    assert not device._every_s


def test_a_clock_keeps_every_event_unless_it_may_thin_them_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.monitor.training_side.clock._age_s", lambda mark: 0.001)
    device = Device()
    device._thins_out = False
    run(device, StepClock(device), 100)
    assert len(device.events) == 101
    assert device.source == "CUDA events"


def test_an_event_that_has_not_passed_long_after_the_host_brings_all_back(device: Device) -> None:
    steps = StepClock(device)
    run(device, steps, 40)
    assert device._every_s
    late = steps.end(9.0)
    device.events[-1].passed = False
    device.age_s = 0.02
    assert not device.has_passed(late.end)
    assert device._every_s
    device.age_s = 0.03
    assert not device.has_passed(late.end)
    assert not device._every_s


def test_what_nobody_asked_for_is_unknown_not_wrong(device: Device) -> None:
    clock = device
    steps = StepClock(clock)
    run(clock, steps, 40)
    dropped, kept = steps.end(4.1, exact=False), steps.end(4.2, exact=False)
    clock.mark(5.0)
    assert clock.has_passed(kept.end)
    assert duration_s(kept) is None  # its beginning was the dropped one's end
    assert dropped.end.device_s is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_recorded_events_tell_the_devices_time() -> None:
    clock = CudaClock(torch.device("cuda", 0))
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
from truemfu.monitor.row_side import resolver

if "as before" in sys.argv:
    resolver.allow_queries_during_capture = lambda: None
model = torch.nn.Linear(8, 8, device="cuda")
monitor = TrainingMonitor(tempfile.mkdtemp(), model=model)
for step in range(4):
    loss = model(torch.ones(4, 8, device="cuda")).sum()
    loss.backward()
    monitor.log_step(step, 0, loss.detach(), 1.0, 0.1)
monitor.save_logs()
asked = []
poll = monitor._live._clock.clock.poll
monitor._live._clock.clock.poll = lambda: asked.append(poll())
torch.cuda.synchronize()
monitor._live._clock.moment()  # an event that nobody has asked for yet
asked.clear()
x = torch.ones(8, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        x.mul_(2)
        for _ in range(50):
            monitor._live._resolver.wake()
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
