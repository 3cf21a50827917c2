"""Whatever a program does, its phases add up to the step, and each is the device's time in that phase.

So do the parts of a step, which are where the device was in that phase or work. Programs are drawn at random
and run on a simulated device. The truth comes from the device's log of what it worked on and when it was
idle, not from marks.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from tests.simulated_device import SimulatedDevice, SimulatedQueue

from truemfu.monitor.metrics import StepTime
from truemfu.monitor.timing.between_steps import BetweenSteps, Gap
from truemfu.monitor.timing.clock import CudaClock, HostClock, Span, StepClock, TimeMark
from truemfu.monitor.timing.phases import StepPhases, parts_of
from truemfu.monitor.timing.step_times import StepTiming
from truemfu.records import StepPart
from truemfu.run_summary.sums import PHASES

PROGRAMS = 400
Calls = list[tuple[TimeMark, TimeMark]]


class Program:
    """A training loop drawn at random; it says what it does, to the device and to what is tested."""

    def __init__(self, seed: int, kind: str) -> None:
        self.draw = draw = random.Random(seed)
        self.device = device = SimulatedDevice(
            depth=draw.choice([1, 8, 64, 1000]), is_synchronous=kind == "host"
        )
        self.clock = HostClock() if kind == "host" else CudaClock(SimulatedQueue(device))
        self.steps = StepClock(self.clock, now_s=lambda: device.now_s)
        self.between = BetweenSteps(now_s=lambda: device.now_s)
        self.between.mark_with(self.steps)
        self.phases = StepPhases(self.steps, self.between)
        self.between.tell(self.phases)
        self.times, self.notes = StepTiming(has_phases=True), list[tuple[Span, Gap, Calls]]()
        self.rows: list[StepTime] = []
        self.parts: list[list[StepPart]] = []
        self.calls: Calls = []
        """Of `generate`, in the step that goes on."""
        self.excluded_gaps: set[int] = set()
        """Steps of which the gap before them is excluded, as `test_clock_property.py` tests."""
        self.bounds_s: list[float] = []
        self.number, self.phase = 0, "forward"
        self._micro_batches = draw.choice([1, 1, 2, 5])
        self._launch_s, self._kernel_s = draw.choice([(1e-5, 2e-3), (1e-3, 1e-4), (3e-4, 3e-4)])
        self._clips, self._evaluates = draw.random() < 0.5, draw.random() < 0.3
        self._has_closure = draw.random() < 0.3
        self._now("forward")

    def _now(self, phase: str, work: str | None = None) -> str:
        """The program enters this phase, and this work in it; returns the phase before."""
        before, self.phase = self.phase, phase
        self.device.part((self.number, phase, work))
        return before

    @contextlib.contextmanager
    def _in(self, phase: str, *, then: str | None = None) -> Iterator[None]:
        before = self._now(phase)
        yield
        self._now(before if then is None else then)

    def work(self) -> None:
        for _ in range(self.draw.randint(1, 6)):
            self.device.host(self._launch_s * self.draw.uniform(0.5, 2))
            self.device.launch(self._kernel_s * self.draw.uniform(0.5, 2))
        if self.draw.random() < 0.05:
            self.device.item()
        if self.draw.random() < 0.1:
            self.device.launch(self.draw.uniform(0, 0.02), stream="side")
            if self.draw.random() < 0.5:
                self.device.join(self.device.stream, "side")

    def run(self, steps: int) -> Program:
        for _ in range(steps):
            if self._has_closure:
                self.phases.optimizer_begins()
                self._now("optimizer")
                self._passes("optimizer")
                self.work()
                self.phases.optimizer_ended()
            else:
                self._passes("other")
                self.phases.optimizer_begins()
                with self._in("optimizer"):
                    self.work()
                    self.phases.optimizer_ended()
            self._now("other")
            self.sometimes(0.3, self.work)
            self.log_step()
        self.device.synchronize()
        self.read()
        return self

    def _passes(self, outside: str) -> None:
        for _ in range(self._micro_batches):
            if self.number and outside == "other":
                self.sometimes(0.8, self.wait)
            if self.number:
                self.sometimes(0.2, self.without_gradients) if outside == "other" else None
            self.forward()
            self.sometimes(0.2, self.pause)
            self.sometimes(0.3, self.without_gradients)
            self.backward(outside)
            self.sometimes(0.3, self.work)
        if self._clips:
            self.phases.gradients_switched(are_enabled=False, is_clipping=True)
            with self._in("clipping"):
                self.work()
                self.phases.gradients_switched(are_enabled=True, is_clipping=False)
            self.sometimes(0.3, self.work)

    def sometimes(self, share: float, what: Callable[[], None]) -> None:
        if self.draw.random() < share:
            what()

    def wait(self) -> None:
        self.between.wait_begins()
        with self._in("data_wait", then="input"):
            self.device.host(self.draw.uniform(0, 0.03))
            self.sometimes(0.2, lambda: self.nested_in_wait())
            self.between.wait_ends(has_batch=True)
        self.sometimes(0.8, self.work)

    def nested_in_wait(self) -> None:
        """A loader around another one, whose collation works without gradients."""
        self.between.wait_begins()
        self.phases.gradients_switched(are_enabled=False, is_clipping=False)
        self.device.host(1e-3)
        self.phases.gradients_switched(are_enabled=True, is_clipping=False)
        self.between.wait_ends(has_batch=True)

    def forward(self) -> None:
        if not self.number and not self.bounds_s:
            self.steps.begin()
            self.bounds_s.append(self.device.front_s())
        self.between.begun(self.device.now_s)
        self.phases.forward_begins()
        self._now("forward")
        self.work()
        self.phases.gradients_switched(are_enabled=False, is_clipping=False)  # in the module
        self.work()
        self.phases.gradients_switched(are_enabled=True, is_clipping=False)
        self.phases.forward_ends()
        self.phases.forward_begins()  # a second module
        self.phases.forward_ends()
        self.work()

    def without_gradients(self) -> None:
        self.phases.gradients_switched(are_enabled=False, is_clipping=False)
        with self._in("no_grad"):
            self.work()
            self.sometimes(0.5, self.generate)
            self.sometimes(0.5, self.reference_model)
            self.phases.gradients_switched(are_enabled=True, is_clipping=False)

    def generate(self, phase: str = "no_grad", work: str | None = None) -> None:
        begin = self.steps.moment()
        self._now(phase, "generate")
        self.work()
        self.calls.append((begin, self.steps.moment()))
        self._now(phase, work)
        self.sometimes(0.5, self.work)

    def reference_model(self) -> None:
        self.phases.evaluation_begins("reference")
        self._now("no_grad", "reference")
        self.work()
        self.phases.forward_ends()
        self._now("no_grad")
        self.sometimes(0.5, self.work)

    def backward(self, outside: str) -> None:
        self.phases.backward_begins((), (), False)
        with self._in("backward", then=outside):
            self.work()
            self.phases.forward_begins()  # recomputation
            self.phases.forward_ends()
            self.work()
            self.phases.optimizer_begins()  # in a hook of a parameter
            self.phases.optimizer_ended()
            self.phases.backward_ended()

    def pause(self) -> None:
        mark = self.steps.moment()
        self.between.pauses += 1
        with self._in("pause"):
            self._now("pause", "evaluation")
            self.work()
            self.sometimes(0.5, lambda: self.generate("pause", "evaluation"))
            self.phases.evaluation_begins("reference")
            self.phases.forward_begins()
            self.phases.backward_begins((), (), False)
            self.work()
            self.phases.backward_ended()
            self.between.pauses -= 1
            self.steps.pause(mark, "evaluation")

    def log_step(self) -> None:
        self.bounds_s.append(self.device.front_s())
        self.notes.append((self.steps.end(self.device.now_s), self.between.take(), self.calls))
        self.calls = []
        self.number += 1
        self._now("other")
        self.device.host(2e-5)
        self.between.end_s = self.device.now_s
        self.sometimes(0.5, self.work)
        if self._evaluates:
            self.sometimes(0.3, self.pause)
        self.sometimes(0.2, self.read)

    def read(self) -> None:
        self.clock.poll()
        while self.notes and self.clock.has_passed(self.notes[0][0].end):
            span, gap, calls = self.notes.pop(0)
            self.rows.append(self.times.of(1, span, gap))
            assert self.times.last is not None
            self.parts.append(parts_of(self.times.last, calls))
            if self.times.gap_is_excluded:
                self.excluded_gaps.add(len(self.rows) - 1)

    def truth(self) -> list[dict[str, float]]:
        """The device's seconds in each phase, step by step."""
        found: list[dict[str, float]] = [{} for _ in range(self.number)]
        for part, seconds in self.device.spent(self.bounds_s[0], self.bounds_s[-1]).items():
            assert isinstance(part, tuple)
            number, phase, _ = part
            if number < self.number and phase != "pause":
                found[number][phase] = found[number].get(phase, 0.0) + seconds
        return found


@pytest.mark.parametrize("kind", ["cuda", "host"])
@pytest.mark.parametrize("first", range(0, PROGRAMS, 100))
def test_phases_are_the_devices_time_and_add_up_to_the_step(kind: str, first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 100):
        program = Program(seed, kind).run(random.Random(seed).randint(2, 25))
        assert len(program.rows) == program.number
        line_s = program.bounds_s[-1] - program.bounds_s[0]
        for number, (row, true_s) in enumerate(zip(program.rows, program.truth(), strict=True)):
            found = row.phases_s
            if number == 0 and program._has_closure:
                continue  # begins in the middle of its optimizer
            assert isinstance(found, dict), f"program {seed}, step {number}: {found}"
            assert row.elapsed_s is not None
            assert sum(found.values()) == pytest.approx(row.elapsed_s, abs=1e-9 * line_s)
            if number in program.excluded_gaps:
                continue
            seen["steps"] += 1
            for phase in found.keys() | true_s.keys():
                error_s = abs(found.get(phase, 0.0) - true_s.get(phase, 0.0))
                assert error_s <= 1e-9 * line_s, f"program {seed}, step {number}: {phase}"
            seen.update(phase for phase, seconds in found.items() if seconds)
    assert len(seen) == 1 + len(PHASES)
    assert min(seen.values()) > 100, seen


@pytest.mark.parametrize("kind", ["cuda", "host"])
def test_the_parts_of_a_step_are_where_the_device_did_it_and_add_up(kind: str) -> None:
    seen: Counter[tuple[str, str | None]] = Counter()
    for seed in range(PROGRAMS, PROGRAMS + 60):
        program = Program(seed, kind).run(random.Random(seed).randint(2, 25))
        line_s = program.bounds_s[-1] - program.bounds_s[0]
        for number, (row, parts) in enumerate(zip(program.rows, program.parts, strict=True)):
            where = f"program {seed}, step {number}"
            begin_s, end_s = program.bounds_s[number : number + 2]
            assert all(part.seconds > 0 for part in parts), where
            assert sum(part.seconds for part in parts) == pytest.approx(end_s - begin_s, abs=1e-9 * line_s)
            assert row.elapsed_s is not None
            own_s = sum(part.seconds for part in parts if part.phase != "pause")
            assert own_s == pytest.approx(row.elapsed_s, abs=1e-9 * line_s), where
            assert isinstance(row.phases_s, dict)
            for phase, seconds in row.phases_s.items():
                of_phase_s = sum(part.seconds for part in parts if part.phase == phase)
                assert of_phase_s == pytest.approx(seconds, abs=1e-9 * line_s), f"{where}: {phase}"
        number = random.Random(seed).randrange(program.number)
        if number in program.excluded_gaps or (number == 0 and program._has_closure):
            continue
        begin_s = program.bounds_s[number]
        for part in program.parts[number]:
            spent = program.device.spent(begin_s, begin_s + part.seconds)
            other_s = sum(s for what, s in spent.items() if what != (number, part.phase, part.work))
            assert other_s <= 1e-9 * line_s, f"program {seed}, step {number}: {part}, {spent}"
            seen[part.phase, part.work] += 1
            begin_s += part.seconds
    assert seen.keys() >= {(phase, None) for phase in PHASES}
    for phase, work in ("no_grad", "generate"), ("no_grad", "reference"), ("pause", "generate"):
        assert seen[phase, work] > 10, seen
