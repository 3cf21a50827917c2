"""Whatever a program does, its steps and what is excluded from them add up to the device's time line.

Programs are drawn at random and run on a simulated device, with the clock, the gaps and the step times of the
monitor. The truth comes from the device's log of what it worked on and when it was idle, not from marks.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from tests.simulated_device import LAUNCH_S, SimulatedDevice, SimulatedQueue

from truemfu.monitor.metrics import StepTime
from truemfu.monitor.timing.between_steps import BetweenSteps, Gap
from truemfu.monitor.timing.clock import CudaClock, HostClock, Span, StepClock
from truemfu.monitor.timing.step_times import StepTiming

PROGRAMS = 1000
LOG_STEP_S = 2e-5


class Training:
    """Drives a device as a training loop does, and notes which part of the program is what.

    Parts are numbered; `kinds` says which step each belongs to and what it is: "step", "gap", "wait", or the
    kind of a pause.
    """

    def __init__(self, device: SimulatedDevice, clock: HostClock | CudaClock) -> None:
        self.device, self.clock = device, clock
        self.steps = StepClock(clock, now_s=lambda: device.now_s)
        self.between = BetweenSteps(now_s=lambda: device.now_s)
        self.between.mark_with(self.steps)
        self.times = StepTiming()
        self.notes: list[tuple[Span, Gap]] = []
        self.rows: list[StepTime] = []
        self.kinds: list[tuple[int, str]] = []
        self.host_steps_s: list[float] = []
        self.looked_at: dict[int, int] = {}
        """Steps whose gap is looked at: how many forward passes without gradients it has."""
        self.number = 0
        self._near: tuple[float, int] | None = None
        self._waits: list[tuple[int, bool]] = []
        self.begin_s = self.end_s = 0.0
        self.enter("step")

    def enter(self, kind: str) -> int:
        """A part of the program begins."""
        self.kinds.append((self.number, kind))
        self.device.part(len(self.kinds) - 1)
        return len(self.kinds) - 1

    def forward(self) -> None:
        """The first training forward pass of a step."""
        device, between = self.device, self.between
        if between.end_s is not None and (device.now_s - between.end_s > 0.005 or between.forwards):
            self.looked_at[self.number] = between.forwards
        between.begun(device.now_s)
        if not self.number:
            self.steps.begin()
            self.begin_s = device.front_s()
        self.enter("step")

    def log_step(self) -> None:
        device = self.device
        self.end_s = device.front_s()
        gap = self.between.take()
        span = self.steps.end(device.now_s)
        self.notes.append((span, gap))
        self.host_steps_s.append(0.0 if span.begin is None else span.end.host_s - span.begin.host_s)
        self.number += 1
        self._near, self._waits = (device.now_s, self.enter("gap")), []
        device.host(LOG_STEP_S)
        self.between.end_s = device.now_s
        self.read()

    def wait(self, seconds: float, *, is_given: bool, gradients: bool = True) -> None:
        """A wait for data before the first forward pass. It begins at the mark before if that is near."""
        device = self.device
        if gradients and (self._near is None or device.now_s - self._near[0] >= 0.001):
            self._near = device.now_s, len(self.kinds)
        with nullcontext() if gradients else torch.no_grad():
            self.between.wait_begins()
            self.enter("gap")
            device.host(seconds)
            self.between.wait_ends(has_batch=True, is_given=is_given)
        if gradients and seconds >= 0.001:
            assert self._near is not None
            for part in range(self._near[1], len(self.kinds)):
                self.kinds[part] = self.number, "wait"
                self._waits.append((part, is_given))
            self._near = device.now_s, len(self.kinds)
        self.enter("gap")

    def evaluate(self) -> None:
        """A forward pass without gradients before the first training forward pass."""
        for part, is_given in self._waits:
            if not is_given:
                self.kinds[part] = self.number, "gap"
        self._near = None
        self.between.evaluated()

    def pause(self, kind: str, inside: Callable[[], None], *, then: str) -> None:
        began_s = self.device.now_s
        mark = self.steps.moment()
        self.between.pauses += 1
        self.enter(kind)
        inside()
        self.between.pauses -= 1
        self.steps.pause(mark, kind)
        self.between.shift(self.device.now_s - began_s)
        self._near = self.device.now_s, self.enter(then)

    def read(self) -> None:
        """What the resolver does: time the steps that the device has passed, in order."""
        self.clock.poll()
        while self.notes and self.clock.has_passed(self.notes[0][0].end):
            span, gap = self.notes.pop(0)
            self.rows.append(self.times.of(1, span, gap))

    def finish(self) -> None:
        """Read all steps."""
        self.device.synchronize()
        self.read()
        assert not self.notes

    def truth(self) -> list[tuple[float, dict[str, float]]]:
        """The time of each step, and what is excluded from it, by the device's log."""
        spent: list[dict[str, float]] = [defaultdict(float) for _ in range(self.number)]
        for part, seconds in self.device.spent(self.begin_s, self.end_s).items():
            step, kind = self.kinds[part]
            spent[step][kind] += seconds
        gaps: dict[int, tuple[float, int]] = {}
        found = []
        for step, by_kind in enumerate(spent):
            step_s = by_kind.pop("step", 0.0) + by_kind.pop("wait", 0.0)
            gap_s = by_kind.pop("gap", 0.0)
            forwards = self.looked_at.get(step)
            if forwards is not None and self._is_unusual(step, gap_s, forwards, gaps):
                kind = "evaluation" if forwards else "other"
                by_kind[kind] = by_kind.get(kind, 0.0) + gap_s
            else:
                step_s += gap_s
            found.append((step_s, {kind: s for kind, s in by_kind.items() if s}))
        return found

    @staticmethod
    def _is_unusual(step: int, gap_s: float, forwards: int, gaps: dict[int, tuple[float, int]]) -> bool:
        recent = min(step, 20)
        alike = [
            s
            for s in range(step - recent + 1, step)
            if s in gaps and (gaps[s][0] >= gap_s / 2 or 2 * gaps[s][1] >= forwards > 0)
        ]
        is_long = gap_s >= (0.005 if forwards else 0.02)
        if is_long or forwards:
            gaps[step] = gap_s, forwards
        return is_long and recent >= 4 and len(alike) < recent / 2


class Program:
    """A training loop drawn at random."""

    def __init__(self, draw: random.Random, training: Training) -> None:
        self._draw, self._training, self._device = draw, training, training.device
        self._item_before, self._item_after = (draw.choice([0, 0, 1, 7, 20]) for _ in range(2))
        self._habits = [name for name in GAPS if draw.random() < 0.35]
        """What the loop does after each step, or now and then."""
        self._share = {name: draw.choice([0.05, 0.1, 0.5, 1.0]) for name in self._habits}
        self._joins = draw.random() < 0.5

    def run(self, steps: int) -> None:
        draw, device, training = self._draw, self._device, self._training
        for number in range(1, steps + 1):
            if number == 1 or draw.random() < 0.1:  # from host-bound to device-bound, or back
                self._launch_s, self._kernel_s = draw.choice(
                    [(1e-5, 2e-3), (1e-3, 1e-4), (3e-4, 3e-4), (1e-5, 1e-5)]
                )
                self._kernels = draw.randint(1, 12)
            training.forward()
            self._work(self._kernels)
            for name in ("side", "replay", "capture", "switch", "wait", "pause"):
                if draw.random() < 0.04:
                    getattr(self, f"_{name}_in_step")()
            self._work(self._kernels)
            if self._item_before and number % self._item_before == 0:
                device.item()
            training.log_step()
            if self._item_after and number % self._item_after == 0:
                device.item()
            for name in draw.sample(self._habits, len(self._habits)):
                if draw.random() < self._share[name]:
                    GAPS[name](self)
            if draw.random() < 0.2:
                training.read()
        training.finish()

    def _work(self, kernels: int) -> None:
        for _ in range(kernels):
            self._device.host(self._launch_s * self._draw.uniform(0.5, 2))
            self._device.launch(self._kernel_s * self._draw.uniform(0.5, 2))

    def _side_in_step(self) -> None:
        self._device.launch(self._draw.uniform(0, 0.02), stream="side")
        if self._joins:
            self._work(1)
            self._device.join(self._device.stream, "side")

    def _replay_in_step(self) -> None:
        self._device.launch(*(self._kernel_s for _ in range(20)))

    def _capture_in_step(self) -> None:
        self._device.is_capturing = True
        self._work(3)
        self._device.is_capturing = False

    def _switch_in_step(self) -> None:
        self._device.switch(self._draw.choice(["main", "second"]))

    def _wait_in_step(self) -> None:
        between = self._training.between
        between.wait_begins()
        self._device.host(self._draw.uniform(0, 0.03))
        between.wait_ends(has_batch=True)

    def _pause_in_step(self) -> None:
        self._training.pause(self._draw.choice(["evaluation", "checkpoint"]), self._other, then="step")

    def _other(self) -> None:
        """Something that is no training: work for the device, a wait for it, work on the host."""
        if self._draw.random() < 0.6:
            self._work(self._draw.randint(1, 30))
        if self._draw.random() < 0.5:
            self._device.item()
        if self._draw.random() < 0.5:
            self._device.host(self._draw.uniform(0, 0.2))

    def _wait(self) -> None:
        is_short = self._draw.random() < 0.2
        seconds = self._draw.uniform(0, 0.0009) if is_short else self._draw.uniform(0.0015, 0.05)
        self._device.host(self._draw.choice([0.0, 0.002]))
        self._training.wait(seconds, is_given=self._draw.random() < 0.5)

    def _evaluation(self) -> None:
        has_loader, gradients = self._draw.random() < 0.5, self._draw.random() < 0.5
        for _ in range(self._draw.randint(1, 4)):
            if has_loader:
                self._training.wait(self._draw.uniform(0.0015, 0.02), is_given=False, gradients=gradients)
            self._training.evaluate()
            self._other()

    def _pause(self) -> None:
        kind = self._draw.choice(["evaluation", "checkpoint", "generation", "other"])
        self._training.pause(kind, self._other, then="gap")

    def _zero_gradients(self) -> None:
        self._work(1)

    def _queue_only(self) -> None:
        self._device.launch(self._draw.uniform(0.01, 0.1))


GAPS: dict[str, Callable[[Program], None]] = {
    "wait": Program._wait,
    "evaluation": Program._evaluation,
    "pause": Program._pause,
    "zero_gradients": Program._zero_gradients,
    "queue_only": Program._queue_only,
    "other": Program._other,
}


def trained(seed: int, kind: str) -> Training:
    """A program that was run to its end."""
    draw = random.Random(seed)
    device = SimulatedDevice(depth=draw.choice([1, 8, 64, 1000]), is_synchronous=kind == "host")
    clock = HostClock() if kind == "host" else CudaClock(SimulatedQueue(device))
    training = Training(device, clock)
    Program(draw, training).run(draw.randint(5, 60))
    return training


@pytest.mark.parametrize("kind", ["cuda", "host"])
@pytest.mark.parametrize("first", range(0, PROGRAMS, 100))
def test_steps_and_what_is_excluded_are_the_devices_time_line(kind: str, first: int) -> None:
    for seed in range(first, first + 100):
        check(trained(seed, kind), f"program {seed}")


def check(training: Training, name: str) -> None:
    """Each step has its true time, and nothing of the time line is missing or counted twice."""
    line_s = training.end_s - training.begin_s
    steps_s = excluded_s = 0.0
    for number, (row, (true_s, excluded)) in enumerate(zip(training.rows, training.truth(), strict=True)):
        assert row.elapsed_s is not None
        errors_s = [row.elapsed_s - true_s]
        for kind in row.left_out_s.keys() | excluded.keys():
            errors_s.append(row.left_out_s.get(kind, 0.0) - excluded.get(kind, 0.0))
        assert max(map(abs, errors_s)) <= 1e-9 * line_s, f"{name}, step {number}"
        steps_s += row.elapsed_s
        excluded_s += sum(row.left_out_s.values())
    assert steps_s + excluded_s == pytest.approx(line_s, rel=1e-9), name


def test_programs_have_what_the_clock_must_tell_apart() -> None:
    """Else the test above shows less than it says."""
    found: Counter[str] = Counter()
    for seed in range(100):
        training = trained(seed, "cuda")
        truth = training.truth()
        found["steps"] += len(truth)
        found["excluded"] += sum(bool(excluded) for _, excluded in truth)
        found["usual gaps"] += sum(
            step in training.looked_at and not excluded for step, (_, excluded) in enumerate(truth)
        )
        found["waits in gaps"] += sum(kind == "wait" for _, kind in training.kinds)
        found["host waited or ran ahead"] += sum(
            abs(row.elapsed_s - host_s) > 0.1 * row.elapsed_s
            for row, host_s in zip(training.rows, training.host_steps_s, strict=True)
            if row.elapsed_s
        )
    assert min(found.values()) > 200, found


@pytest.mark.parametrize("every", [1, 7, 20, 50])
@pytest.mark.parametrize("after_log_step", [True, False])
def test_a_host_that_waits_for_the_device_takes_nothing_off_a_step(every: int, after_log_step: bool) -> None:
    """Device 16.6 ms a step, host 5 ms; first the host waits in each step, then now and then."""
    device = SimulatedDevice(depth=100)
    training = Training(device, CudaClock(SimulatedQueue(device)))
    for step in range(1, 401):
        training.forward()
        device.host(0.005 - LOG_STEP_S - 10 * LAUNCH_S)
        for _ in range(10):
            device.launch(0.00166)
        if step <= 60 or (step % every == 0 and not after_log_step):
            device.item()
        training.log_step()
        if step > 60 and step % every == 0 and after_log_step:
            device.item()
    training.finish()
    check(training, f"item() every {every} steps")
    steady = [row.elapsed_s for row in training.rows[60:] if row.elapsed_s is not None]
    if every > 1:  # else the device waits for the host in each step
        assert statistics.median(steady) == pytest.approx(0.0166, rel=1e-9)
    assert sum(sum(row.left_out_s.values()) for row in training.rows) == 0


def test_a_stream_that_is_less_far_does_not_turn_time_back() -> None:
    """A program that changes its stream without joining the one before."""
    device = SimulatedDevice()
    training = Training(device, CudaClock(SimulatedQueue(device)))
    ends_s = []
    for step in range(8):
        training.forward()
        device.host(0.001)
        device.launch(0.01)
        device.stream = "second" if step % 2 else "main"
        ends_s.append(device.front_s())
        training.log_step()
    assert ends_s != sorted(ends_s)
    training.finish()
    steps_s = [row.elapsed_s for row in training.rows]
    assert all(s is not None and s >= 0 for s in steps_s)
    assert sum(s for s in steps_s if s is not None) == pytest.approx(max(ends_s) - training.begin_s)


def test_a_mark_in_a_capture_is_unknown_and_costs_the_steps_it_is_part_of() -> None:
    device = SimulatedDevice()
    queue = SimulatedQueue(device)
    training = Training(device, CudaClock(queue))
    for step in range(10):
        training.forward()
        device.host(0.001)
        device.launch(0.01)
        device.is_capturing = step == 4
        training.log_step()
        device.is_capturing = False
    training.finish()
    known = [row.elapsed_s for row in training.rows]
    assert [step for step, seconds in enumerate(known) if seconds is None] == [4, 5]
    assert known[6:] == pytest.approx([0.01] * 4)


def test_marks_beyond_the_limit_are_unknown_and_later_ones_known_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("truemfu.monitor.timing.clock._MAX_EVENTS", 4)
    device = SimulatedDevice()
    queue = SimulatedQueue(device)
    training = Training(device, CudaClock(queue))

    def step() -> None:
        training.forward()
        device.host(0.001)
        device.launch(0.01)
        training.log_step()

    for _ in range(8):  # nothing is read: the device is too far behind
        step()
    device.synchronize()
    training.read()
    for _ in range(3):
        step()
        device.synchronize()
    training.finish()
    known = [row.elapsed_s for row in training.rows]
    assert [step for step, seconds in enumerate(known) if seconds is None] == [4, 5, 6, 7, 8]
    assert known[1:4] == pytest.approx([0.01] * 3)
    assert len(queue.events) <= 5
