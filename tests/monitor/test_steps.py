"""Every step is a row with its own numbers, whatever comes between two of them.

Here a host clock plays the events of a GPU and CPU tensors those of the device, so that every decision is
made as it would be there.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import random
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.training_clock import TrainingClock
from tests.waiting import FOREVER_S, wait_until
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from truemfu import TrainingMonitor
from truemfu.flops.observe.compiled import RECOMPILES
from truemfu.monitor import live_run
from truemfu.monitor.rows import row_thread
from truemfu.monitor.rows import rows as rows_module
from truemfu.monitor.timing.clock import CudaClock, HostClock, Span, StepClock, TimeMark
from truemfu.monitor.values import host_values, sending
from truemfu.monitor.values.host_values import HostValues
from truemfu.monitor.watching import attachment
from truemfu.monitor.watching import batch_notes as observe
from truemfu.monitor.watching.compilations import compilations
from truemfu.records import RUN_FILE
from truemfu.torch_private.compiler import guards_ignore_modes

SETTLE_STEPS = 6


class HostEvent:
    """A CUDA event of a device that is never behind."""

    at_s = 0.0

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        return 1e3 * (later.at_s - self.at_s)


class HostQueue:
    """The queue of such a device, whose clock is the training thread's."""

    def __init__(self) -> None:
        self._now_s = live_run._now_s

    def record(self, event: HostEvent | None) -> HostEvent:
        event = event or HostEvent()
        event.at_s = self._now_s()
        return event

    on_other_thread = HostClock.on_other_thread


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    held = HostValues._number

    def number(self: HostValues, name: str, value: Any) -> Any:
        is_scalar = type(value) is torch.Tensor and value.dim() == 0
        return self._hold(name, value, is_input=False) if is_scalar else held(self, name, value)

    monkeypatch.setattr(HostValues, "_number", number)
    monkeypatch.setattr("truemfu.monitor.live_run.clock_for", lambda device: CudaClock(HostQueue()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


FLOPS = 2 * 2 * 4 * 8 * 8
"""Of a step: forward and the weight's gradient, of four samples."""


def flops(row: dict[str, Any]) -> float:
    return float(1e12 * row["perf/tflops_per_gpu"] * row["perf/step_time"])


class Run:
    """A training under a monitor, with what was logged by hand beside it."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.model = folder, Model()
        self.monitor = TrainingMonitor(folder, model=self.model, **options)
        self.losses: dict[int, float] = {}
        self.micro_batches: dict[int, int] = {}
        self.number = 0

    def step(self, samples: int = 4, *, micro_batches: int = 1) -> None:
        for _ in range(micro_batches):
            loss = self.model(x=torch.randn(samples, 8))
            loss.backward()
        self.log(loss, samples * micro_batches)

    def log(self, loss: Any, samples: int) -> None:
        self.number += 1
        self.losses[self.number] = float(loss.detach())
        self.micro_batches[self.number] = samples
        self.monitor.log_step(self.number, 0, loss, loss.detach(), 0.1)

    def settle(self) -> None:
        """Train until the model is counted and rows are written."""
        for _ in range(SETTLE_STEPS + 5):
            self.step()
        self.monitor.save_logs()
        self.step()
        self.step()

    @property
    def values(self) -> HostValues:
        return self.monitor._live.steps.intake.values

    def step_of(self, **batch: Any) -> None:
        """A step of one batch that is given by name; nothing is known of its samples."""
        loss = self.model(**batch)
        loss.backward()
        self.log(loss, 0)

    def rows(self) -> list[dict[str, Any]]:
        self.monitor.save_logs()
        rows: list[dict[str, Any]] = json.loads((self.folder / "training_log.json").read_text())
        return rows

    def check(self, *, missing: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """Every step once and in order, with its own loss and samples."""
        rows = self.rows()
        assert [row["global_step"] for row in rows] == list(self.losses)
        for row in rows:
            number = row["global_step"]
            expected = None if number in missing else pytest.approx(self.losses[number])
            assert row.get("training/loss") == expected, number
            if number > 1 and self.micro_batches[number]:  # nobody saw where the first began
                samples = row["perf/samples_per_second"] * row["perf/step_time"]
                assert samples == pytest.approx(self.micro_batches[number]), number
        return rows


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    # Not taken out of `sys.modules`: torch would import it again, and free what the first one keeps.
    monkeypatch.setattr(host_values, "_COMPILED_GRAPHS", "not imported")  # by another test
    run = Run(tmp_path)
    run.settle()
    yield run
    run.monitor.close()


def test_each_step_is_a_row_with_its_own_numbers(run: Run) -> None:
    for _ in range(40):
        run.step()
    rows = run.check()
    assert [flops(row) for row in rows[-40:]] == pytest.approx([FLOPS] * 40)
    assert all("perf/step_time" in row and "perf/between_steps" in row for row in rows[-40:])
    assert all(row["training/epoch"] == 0.0 and row["training/lr"] == 0.1 for row in rows)


def steps_on_disk(run: Run) -> int:
    return len(json.loads((run.folder / "training_log.json").read_text()))


def wait_until_on_disk(run: Run) -> None:
    wait_until(lambda: steps_on_disk(run) == run.number)


def test_steps_are_on_disk_later_where_no_other_follows(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that hangs: the training thread does nothing more."""
    monkeypatch.setattr(sending, "_MAX_HOLD_S", 0.1)
    for _ in range(40):
        run.step()
    wait_until_on_disk(run)
    run.step()
    run.step()
    run.check()


def test_long_steps_are_on_disk_before_the_next_ends(
    tmp_path: Path, clock: TrainingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truemfu.monitor.rows.row_thread._WAKE_EVERY_S", 0.02)
    run = Run(tmp_path)
    run.settle()
    monkeypatch.setattr(sending, "_MAX_HOLD_S", FOREVER_S)  # the training thread must send them
    for _ in range(3):
        loss = run.model(x=torch.randn(4, 8))
        clock.sleep(1.1)
        loss.backward()
        run.log(loss, 4)
        wait_until_on_disk(run)
    run.monitor.close()


def test_a_signal_has_the_steps_written_that_the_training_thread_holds(tmp_path: Path) -> None:
    noted: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
    try:
        run = Run(tmp_path)
        run.settle()
        for _ in range(40):
            run.step()
        signal.raise_signal(signal.SIGTERM)
        assert noted == [signal.SIGTERM]
        assert steps_on_disk(run) == run.number
        run.step()
        run.check()
        run.monitor.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_is_between_steps_is_told_apart(clock: TrainingClock, run: Run) -> None:
    loader = iter(DataLoader([torch.ones(8)] * 20, collate_fn=lambda batch: clock.sleep(0.02)))
    for number in range(4):
        next(loader)
        for _ in range(2):
            run.model(x=torch.randn(4, 8)).backward()
            next(loader)
        with torch.no_grad():
            run.model(x=torch.randn(4, 8))  # in the step, after its forward passes
        run.step()
        if number == 2:
            next(loader)
            with torch.inference_mode():
                run.model(x=torch.randn(4, 8))
            clock.sleep(0.4)
    rows = run.rows()[-4:]
    assert all("perf/forwards_between_steps" not in row for row in rows)
    assert all(0.04 <= row["perf/data_wait"] < 0.041 for row in rows)
    assert all(row["perf/between_steps"] < 0.01 for row in rows)
    assert rows[3]["perf/evaluation_time"] >= 0.42  # with the wait of the evaluation


def test_a_steps_time_is_between_the_events_at_its_ends(
    tmp_path: Path, clock: TrainingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[TimeMark] = []
    end = StepClock.end

    def noted(self: StepClock, now_s: float) -> Span:
        span = end(self, now_s)
        marks.append(span.end)
        return span

    run = Run(tmp_path)
    run.settle()
    monkeypatch.setattr(StepClock, "end", noted)
    for _ in range(30):
        run.step()
    rows = run.check()[-29:]
    assert all(mark.device_s is not None for mark in marks)
    times = [b.device_s - a.device_s for a, b in pairwise(marks)]  # type: ignore[operator]
    assert [row["perf/step_time"] for row in rows] == pytest.approx(times)
    run.monitor.close()
    assert run.monitor.summary()["time_source"] == "CUDA events"


def test_warm_up_steps_are_marked_as_such(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        run.step()
        run.monitor.save_logs()
    for _ in range(5):
        run.step()
    assert [row.get("perf/warmup", False) for row in run.check()] == [True] * 3 + [False] * 5
    run.monitor.close()


def test_their_times_add_up(clock: TrainingClock, run: Run) -> None:
    run.monitor.save_logs()
    before_s = clock()
    run.step()
    began_s = clock()
    for _ in range(30):
        clock.sleep(0.002)
        last_began_s = clock()
        run.step()
    ended_s = clock()
    times = [row["perf/step_time"] for row in run.check()[-30:]]
    # The marks of the first and the last step are somewhere in their calls.
    assert last_began_s - began_s < sum(times) < ended_s - before_s
    assert min(times) > 0.002


def test_accumulation_is_one_step(run: Run) -> None:
    for _ in range(10):
        run.step(micro_batches=3)
    run.check()


def test_a_batch_of_another_shape_is_seen_in_its_place(run: Run) -> None:
    for number in range(12):
        run.step(samples=6 if number % 4 == 3 else 4)
    run.check()


def test_another_shape_in_the_middle_of_a_step_is_seen(run: Run) -> None:
    run.step()
    run.model(x=torch.randn(4, 8)).backward()
    loss = run.model(x=torch.randn(2, 8))
    loss.backward()
    run.log(loss, 6)
    run.step()
    run.check()


def test_autocast_and_evaluation_are_seen(run: Run) -> None:
    run.step()
    with torch.no_grad():
        run.model(x=torch.randn(4, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        run.step()
    run.step()
    rows = run.check()
    assert [flops(row) for row in rows[-3:]] == pytest.approx([FLOPS] * 3)
    # On a busy machine the pass takes so long that it is left out of the step, as an evaluation.
    seen = ("perf/forwards_between_steps", "perf/evaluation_time")
    assert [any(name in row for name in seen) for row in rows[-3:]] == [False, True, False]
    assert len(run.monitor.summary()["batch_shapes"]) == 2  # one of them under autocast


def test_another_dtype_of_autocast_is_another_kind_of_batch(run: Run) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            run.step()
            run.step()
    assert len(run.monitor.summary()["batch_shapes"]) == 3
    run.check()


def test_a_batch_inside_vmap_has_no_mfu(run: Run) -> None:
    run.step()
    torch.vmap(lambda x: run.model(x=x))(torch.zeros(3, 4, 8))
    run.log(torch.zeros(()), 0)
    run.step()
    rows = run.check()
    assert "perf/tflops_per_gpu" not in rows[-2]
    assert "vmap" in rows[-2]["perf/mfu_unknown"]
    assert "perf/samples_per_second" not in rows[-2]
    assert flops(rows[-1]) == pytest.approx(FLOPS)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"x": torch.nested.nested_tensor([x])},
        lambda x: {"x": [x]},
        lambda x: {"y": x},
        lambda x: {"x": x, "y": None},
        lambda x: {},
    ],
    ids=["nested", "a list", "another name", "one more", "nothing"],
)
def test_a_batch_that_looks_otherwise_is_taken_for_no_other(run: Run, make: Any) -> None:
    odd = make(torch.ones(4, 8))

    class Odd(Model):
        def forward(self, x: Any = None, y: Any = None) -> torch.Tensor:
            return super().forward(x if type(x) is torch.Tensor and not x.is_nested else torch.ones(4, 8))

    run.model = Odd()
    run.monitor.attach(run.model)
    run.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a nested tensor cannot be counted, which is said
        run.step_of(**odd)
        run.step()
        rows = run.check()
    is_nested = any(isinstance(value, torch.Tensor) and value.is_nested for value in odd.values())
    assert len(run.monitor.summary()["batch_shapes"]) == (1 if is_nested else 2)
    assert flops(rows[-1]) == pytest.approx(FLOPS)


def test_arguments_by_place_are_taken_for_what_they_were_by_place(run: Run) -> None:
    """Of a forward(x, y) a first argument by place is x, whatever came by name before."""

    class Two(Model):
        def forward(self, x: Any = None, y: Any = None) -> torch.Tensor:
            return super().forward(y if x is None else x)

    run.model = Two()
    run.monitor.attach(run.model)
    for samples, by_name in enumerate((True, False, True), start=5):
        x = torch.randn(samples, 8)
        for _ in range(3):
            loss = run.model(y=x) if by_name else run.model(x)
            loss.backward()
            run.log(loss, samples)
        assert run.monitor.summary()["batch_shapes"][-1] == {"y" if by_name else "x": [samples, 8]}
    run.check()


def test_arguments_by_name_may_come_in_any_order(run: Run) -> None:
    """Their shapes are those of their names, also where they come by place later."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return self.one(a).mean() + self.two(b).mean()

    run.model = model = Two()
    run.monitor.attach(model)
    a, b = torch.randn(3, 8), torch.randn(5, 4)
    for call in [lambda: model(b=b, a=a)] * 3 + [lambda: model(a, b)] * 3:
        call().backward()
        run.log(torch.zeros(()), 0)
    by_name, by_place = run.monitor.summary()["batch_shapes"][-2:]
    assert by_name == by_place == {"a": [3, 8], "b": [5, 4]}
    rows = run.check()[-6:]
    assert [flops(row) for row in rows] == pytest.approx([2 * 2 * (3 * 8 * 8 + 5 * 4 * 4)] * 6)


def test_one_row_that_fails_takes_no_other_with_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    while run.number < 44:
        run.step()
    run.rows()
    while run.number < 54:
        run.step()
    reached = run.monitor.config.detailed_log_freq  # what that row has more cannot be had
    assert reached == 50

    def failing(device: torch.device) -> int:
        raise RuntimeError("once")

    monkeypatch.setattr(rows_module, "peak_memory_bytes", failing)
    with pytest.warns(
        UserWarning, match="a step could not be processed and is not logged: RuntimeError: once"
    ):
        rows = run.rows()
        time.sleep(0.1)
    assert [row["global_step"] for row in rows] == [number for number in run.losses if number != reached]
    assert run.monitor.summary()["steps"] == run.number - 1


def test_complex_numbers_are_missing_and_said(run: Run) -> None:
    run.step()
    run.step()
    loss = torch.tensor(1 + 2j)
    run.model(x=torch.randn(4, 8)).backward()
    with pytest.warns(UserWarning, match="loss is not logged: got complex"):
        run.monitor.log_step(run.number + 1, 0, loss, torch.ones(()), 0.1)
        run.number += 1
        rows = run.rows()
    assert [row["global_step"] for row in rows] == list(range(1, run.number + 1))
    assert "training/loss" not in rows[-1]
    assert rows[-1]["training/grad_norm"] == 1.0


def test_what_was_sent_is_not_kept(run: Run) -> None:
    run.monitor.save_logs()
    for _ in range(5):
        run.step()
    kept = [weakref.ref(held.tensor) for held in run.values._held]
    assert len(kept) == 10
    run.monitor.save_logs()
    assert not [ref for ref in kept if ref() is not None]


def test_an_interrupt_inside_log_step_loses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        run.step()

    def interrupt() -> None:
        raise KeyboardInterrupt

    loss = run.model(x=torch.randn(4, 8))
    loss.backward()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "detach", lambda self: interrupt())
        with pytest.raises(KeyboardInterrupt):
            run.monitor.log_step(run.number + 1, 0, loss, loss, 0.1)
    run.check()


def test_a_place_that_is_used_again_is_no_overwriting(run: Run) -> None:
    """Numbers that were sent are freed, and the next may come to lie where they were."""
    for _ in range(20):
        for _ in range(10):
            run.step()
        run.values.flush()  # as after some seconds
    run.check()
    assert run.monitor.summary()["warnings"] == []


def test_a_step_that_goes_back_is_said(run: Run) -> None:
    run.step()
    loss = run.model(x=torch.randn(4, 8))
    with pytest.warns(UserWarning, match="steps should increase"):
        run.monitor.log_step(1, 0, loss, loss, 0.1)
    run.number += 1


@pytest.mark.parametrize("what", ["lr", "grad_norm", "epoch", "step", "mask"])
def test_arguments_of_another_kind_are_taken_as_ever(run: Run, what: str) -> None:
    run.step()
    loss = run.model(x=torch.randn(4, 8))
    run.number += 1
    run.losses[run.number], run.micro_batches[run.number] = float(loss.detach()), 4
    given: dict[str, Any] = {"epoch": 0, "grad_norm": loss, "lr": 0.1, "step": run.number, "mask": None}
    given[what] = {
        "lr": torch.tensor(0.1),
        "grad_norm": 2.0,
        "epoch": None,
        "step": torch.tensor(run.number),
        "mask": torch.ones(4, 1),
    }[what]
    run.monitor.log_step(given["step"], given["epoch"], loss, given["grad_norm"], given["lr"], given["mask"])
    run.step()
    rows = run.check()
    if what == "grad_norm":
        assert rows[-2]["training/grad_norm"] == 2.0


def test_steps_that_are_not_logged_are_counted(run: Run) -> None:
    run.step()
    run.number += 4
    run.step()
    one, five = run.rows()[-2:]
    assert (one["global_step"], five["global_step"]) == (run.number - 5, run.number)
    assert five["perf/samples_per_second"] * 5 * five["perf/step_time"] == pytest.approx(4)


def test_a_pause_is_no_part_of_a_step(clock: TrainingClock, run: Run) -> None:
    run.step()
    with run.monitor.pause():
        run.model(x=torch.randn(4, 8)).backward()
        clock.sleep(0.3)
    run.step()
    assert all(0 < row["perf/step_time"] < 0.01 for row in run.check()[1:])


@pytest.mark.parametrize("where", ["end", "moment"])
def test_what_fails_in_a_step_costs_no_step_before_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    run.step()
    run.step()
    run.monitor.save_logs()
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="switched off"):
        patched.setattr(StepClock, where, fail)
        if where == "end":
            run.model(x=torch.randn(4, 8)).backward()
            run.monitor.log_step(run.number + 1, 0, 1.0, 1.0, 0.1)
        else:
            with run.monitor.pause():
                pass
    run.model(x=torch.randn(4, 8)).backward()
    run.monitor.log_step(run.number + 2, 0, 1.0, 1.0, 0.1)  # it is switched off
    run.check()


def test_what_is_kept_is_bounded(run: Run) -> None:
    for _ in range(700):
        run.step()
        assert len(run.values._held) <= 258
    run.check()


def test_a_frozen_layer_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.settle()
    while run.number < 25:
        run.step()
    run.model.layer.bias.requires_grad_(False)
    run.model.layer.weight.requires_grad_(False)
    extra = nn.Parameter(torch.ones(()))
    for _ in range(40):
        loss = run.model(x=torch.randn(4, 8)) * extra
        loss.backward()
        run.log(loss, 4)
    rows = run.check()
    assert [flops(row) for row in rows[1:25]] == pytest.approx([FLOPS] * 24)
    changed = [flops(row) for row in rows[25:] if "perf/tflops_per_gpu" in row]
    assert changed == pytest.approx([FLOPS / 2] * len(changed))  # forward alone
    assert "perf/tflops_per_gpu" in rows[-1]
    run.monitor.close()


def test_a_compilation_is_a_warm_up_step(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That step and no other, whether the model is compiled or something else."""
    before = compilations()  # of other tests in this process
    counters: dict[str, dict[str, int]] = {"stats": {"unique_graphs": before}}
    monkeypatch.setattr("truemfu.monitor.watching.compilations._counters", counters)
    for _ in range(4):
        run.step()
    counters["stats"]["unique_graphs"] = before + 1
    run.step()
    compiled = run.number
    run.step()
    run.step()
    warm = [row["global_step"] for row in run.check() if "perf/warmup" in row]
    assert warm == [1, 2, 3, 10, compiled]  # 10 is observed
    assert run.monitor.summary()["warmup_steps"] == 5


def test_a_loss_changed_in_place_is_missing_not_wrong(run: Run) -> None:
    run.step()
    other = run.model(x=torch.randn(4, 8))
    kept = other.detach()
    other.backward()
    run.number += 1
    run.losses[run.number], run.micro_batches[run.number] = float(kept), 4
    run.monitor.log_step(run.number, 0, kept, kept.clone(), 0.1)
    kept.zero_()
    with pytest.warns(UserWarning, match="loss was overwritten"):
        run.monitor.save_logs()
    missing = run.number
    for _ in range(3):  # from now on it is copied at once
        run.number += 1
        run.model(x=torch.randn(4, 8)).backward()
        run.losses[run.number], run.micro_batches[run.number] = float(run.number), 4
        run.monitor.log_step(run.number, 0, kept.fill_(run.number), 1.0, 0.1)
    run.check(missing=(missing,))


def test_a_loss_that_comes_at_the_same_place_is_missing_not_wrong(run: Run) -> None:
    """As the outputs of CUDA graphs do that take turns: written by replays, which leave no trace."""
    static = torch.zeros(()), torch.zeros(())
    numbers = []
    for turn in range(6):
        run.model(x=torch.randn(4, 8)).backward()
        run.number += 1
        numbers.append(run.number)
        static[turn % 2].numpy()[...] = turn
        run.losses[run.number], run.micro_batches[run.number] = turn, 4
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.monitor.log_step(run.number, 0, static[turn % 2], static[turn % 2], 0.1)
    run.check(missing=tuple(numbers[:2]))  # from then on they are copied at once
    assert any("loss was overwritten" in text for text in run.monitor.summary()["warnings"])


def test_tensors_that_are_no_number_are_said(run: Run) -> None:
    with pytest.warns(UserWarning, match=r"loss is not logged: got a tensor of shape \(2,\)"):
        for shape in ((), (2,), ()):
            loss = run.model(x=torch.randn(4, 8)).detach().expand(shape).clone()
            run.number += 1
            run.monitor.log_step(run.number, 0, loss, loss.sum(), 0.1)
    rows = run.rows()
    assert ["training/loss" in row for row in rows[-3:]] == [True, False, True]
    assert all("training/grad_norm" in row for row in rows[-3:])


def test_an_inference_tensor_is_copied(run: Run) -> None:
    run.step()
    run.model(x=torch.randn(4, 8)).backward()
    with torch.inference_mode():
        loss = torch.tensor(3.0)
    run.log(loss, 4)
    with torch.inference_mode():
        loss += 1
    run.check()


def test_no_graph_is_kept_alive(run: Run) -> None:
    saved = torch.randn(8, requires_grad=True) * 1
    kept = weakref.ref(saved)
    loss = run.model(x=torch.randn(4, 8)) * saved.square().sum()
    del saved
    assert kept() is not None
    run.log(loss, 4)
    del loss
    assert kept() is None
    run.check()


def test_a_model_that_is_attached_again_and_a_phase_change_nothing(run: Run) -> None:
    run.step()
    run.monitor.detach()
    run.monitor.attach(run.model)
    run.step()
    run.step()
    run.monitor.set_phase(None)
    run.step()
    run.check()


def test_a_batch_told_by_hand_counts_instead_of_what_hooks_see(run: Run) -> None:
    run.step()
    run.monitor.observe({"x": torch.zeros(6, 8)})
    run.log(run.model(x=torch.randn(4, 8)), 6)
    run.monitor.observe({"x": torch.zeros(4, 8)})
    run.step()
    run.check()


def test_nothing_is_lost_at_the_end(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.settle()
    for _ in range(17):
        run.step()
    run.monitor.close()
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert [row["global_step"] for row in rows] == list(run.losses)
    assert run.monitor.summary()["lost"] == []
    assert json.loads((tmp_path / RUN_FILE).read_text())["time_source"] == "CUDA events"


@pytest.mark.parametrize(
    ("owner", "within"),
    [(observe, "functorch_level"), (torch.Tensor, "detach"), (attachment, "_is_grad_enabled")],
)
def test_a_handler_of_a_signal_may_save_in_the_middle(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: Any, within: str
) -> None:
    """It runs between any two lines of the training thread; here in a note, in `log_step`, in a hook."""
    own = getattr(owner, within)
    saved = []
    is_inside = False

    def interrupted(*arguments: Any) -> Any:
        nonlocal is_inside
        if not is_inside:
            is_inside = True
            saved.append(run.number)
            run.monitor.save_logs()
            is_inside = False
        return own(*arguments)

    run.step()
    monkeypatch.setattr(owner, within, interrupted)
    for _ in range(40):
        run.step(micro_batches=2)
    monkeypatch.setattr(owner, within, own)
    assert len(saved) >= 3
    run.check()


@pytest.mark.parametrize(("owner", "within"), [(observe, "functorch_level"), (torch.Tensor, "detach")])
def test_a_handler_of_a_signal_may_close_in_the_middle(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: Any, within: str
) -> None:
    """The steps before the one it falls into are logged, and whatever comes after it does no harm."""
    own = getattr(owner, within)
    closed_in = []

    def interrupted(*arguments: Any) -> Any:
        if not closed_in and run.number > 25:
            closed_in.append(run.number)
            run.monitor.close()
        return own(*arguments)

    monkeypatch.setattr(owner, within, interrupted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # steps after the end are said
        for _ in range(40):
            run.step()
    rows = json.loads((run.folder / "training_log.json").read_text())
    assert [row["global_step"] for row in rows][: closed_in[0] - 1] == list(range(1, closed_in[0]))
    assert all("perf/tflops_per_gpu" in row for row in rows[1:])
    said = run.monitor.summary()["warnings"]
    assert said == ["log_step was called after close(): the step is not logged"]


def test_another_thread_may_save_at_any_moment(run: Run) -> None:
    ends = threading.Event()

    def save() -> None:
        while not ends.is_set():
            run.monitor.save_logs()

    thread = threading.Thread(target=save)
    thread.start()
    for _ in range(400):
        run.step()
    ends.set()
    thread.join()
    run.check()


def test_the_hook_sends_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run inside the capture of a CUDA graph."""
    run.step()
    sent = []
    send = HostValues.flush
    monkeypatch.setattr(HostValues, "flush", lambda self: sent.append(self) or send(self))
    loss = run.model(x=torch.randn(2, 8))
    assert not sent
    loss.backward()
    run.log(loss, 2)
    run.check()
    assert sent


def test_a_loss_and_a_norm_may_differ_in_shape(run: Run) -> None:
    for _ in range(6):
        loss = run.model(x=torch.randn(4, 8))
        loss.backward()
        run.number += 1
        run.losses[run.number], run.micro_batches[run.number] = float(loss.detach()), 4
        run.monitor.log_step(run.number, 0, loss, loss.detach().reshape(1), 0.1)
    assert all("training/grad_norm" in row for row in run.check())


def test_a_norm_that_is_not_known_is_left_out(run: Run) -> None:
    for _ in range(4):
        run.model(x=torch.randn(4, 8)).backward()
        run.number += 1
        run.losses[run.number], run.micro_batches[run.number] = 2.0, 4
        run.monitor.log_step(run.number, 0, 2.0, None, 0.1)
    assert "training/grad_norm" not in run.check()[-1]


def test_a_device_that_fails_takes_no_row_that_was_worked_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.settle()
    run.monitor.save_logs()

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(HostEvent, "query", fails)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            run.step()
        run.monitor.close()
    said = " ".join(run.monitor.summary()["warnings"])
    assert "steps cannot be processed: RuntimeError: CUDA error: device-side assert triggered" in said
    assert "the last steps were not processed in time and are lost" in said
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert len(rows) == run.number - 5
    assert "summary" in json.loads((tmp_path / RUN_FILE).read_text())


def test_parts_of_large_storages_are_not_kept(run: Run) -> None:
    for _ in range(6):
        run.model(x=torch.randn(4, 8)).backward()
        large = torch.zeros(3 << 20)
        run.log(large[run.number], 4)
        storage = weakref.ref(large)
        del large
        assert storage() is None
        assert all(held.tensor.untyped_storage().nbytes() < 1000 for held in run.values._held if held.tensor)
    run.check()


CALL = "_compiled_call_impl"
"""Where torch has what a module calls instead of its own code, and where calls are watched from outside."""


def test_a_model_that_is_not_compiled_has_a_hook_and_nothing_else(run: Run) -> None:
    run.step()
    assert len(run.model._forward_pre_hooks) == 1
    assert CALL not in run.model.__dict__
    run.monitor.detach()
    assert not run.model._forward_pre_hooks
    assert run.model.__dict__.keys() == Model().__dict__.keys()


def test_a_copy_of_the_model_is_watched_by_nobody(run: Run) -> None:
    run.step()
    copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    run.step()
    for other in copies:
        other.layer = nn.Linear(8, 8)
        nn.init.zeros_(other.layer.weight)
        nn.init.ones_(other.layer.bias)
        assert other(x=torch.randn(4, 8)) == 1.0
    run.step()
    run.check()


class TakesAllAlong(Model):
    """Its copies are made of all its attributes, as a LightningModule's are."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class CopiesItself(Model):
    def __deepcopy__(self, memo: Any) -> Model:
        other = Model()
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other


class CopiesItsAttributes(Model):
    def __copy__(self) -> Model:
        other = Model()
        other.__dict__.update(self.__dict__, _modules=dict(self._modules))
        return other


def test_a_copy_that_shares_the_models_attributes_is_run_itself(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.model = CopiesItsAttributes()
    run.monitor.attach(run.model)
    run.settle()
    other = copy.copy(run.model)
    other.layer = nn.Linear(8, 8)
    nn.init.zeros_(other.layer.weight)
    nn.init.ones_(other.layer.bias)
    with torch.no_grad():
        assert other(x=torch.randn(4, 8)) == 1.0
    run.step()
    run.check()
    run.monitor.close()


@pytest.mark.parametrize("kind", [TakesAllAlong, CopiesItself])
def test_a_model_may_be_copied_in_its_own_way(tmp_path: Path, kind: type[Model]) -> None:
    run = Run(tmp_path)
    run.model = kind()
    run.monitor.attach(run.model)
    run.settle()
    for _ in range(20):
        run.step()
    other = copy.deepcopy(run.model)
    nn.init.zeros_(other.layer.weight)
    nn.init.ones_(other.layer.bias)
    assert other(x=torch.randn(4, 8)) == 1.0
    run.check()
    run.monitor.close()


def test_copies_that_run_in_its_place_are_run_themselves(tmp_path: Path) -> None:
    """DataParallel runs copies that share the model's attributes: nothing may call the model instead."""
    run = Run(tmp_path)
    model = run.model

    class Parallel:
        def __call__(self, x: torch.Tensor) -> Any:
            replica = model._replicate_for_data_parallel()
            replica.__dict__["layer"] = lambda x: model.layer(x) * 0 + 1
            loss = replica(x=x)
            assert loss == 1.0
            return loss

    run.model = Parallel()  # type: ignore[assignment]
    run.settle()
    for _ in range(20):
        run.step()
    run.check()
    run.monitor.close()


def test_a_hook_of_somebody_else_stays_before_ours(run: Run) -> None:
    """A batch is what comes out of the hooks before ours."""

    def doubled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return args, {"x": torch.cat([kwargs["x"], kwargs["x"]])}

    run.monitor.detach()
    run.model.register_forward_pre_hook(doubled, with_kwargs=True)
    run.monitor.attach(run.model)
    for _ in range(30):
        loss = run.model(x=torch.randn(4, 8))
        loss.backward()
        run.log(loss, 8)
    run.check()


def test_a_model_that_is_dropped_is_freed(tmp_path: Path) -> None:
    """At once, as without the monitor: not when Python next looks for cycles, for it may fill the GPU."""
    gc.collect()
    gc.disable()
    try:
        run = Run(tmp_path)
        run.settle()
        gone = weakref.ref(run.model.layer)
        del run.model
        wait_until(lambda: gone() is None)  # a row under way may have it in its hands
        run.monitor.close()
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["wrapper", "method", "original"])
def test_a_compiled_model_stays_as_it_was_compiled(tmp_path: Path, how: str) -> None:
    torch._dynamo.reset()
    run = Run(tmp_path)
    original = run.model
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    if how == "method":
        run.monitor.detach()
        original.compile(backend=backend)
        run.monitor.attach(original)
    else:
        run.model = torch.compile(original, backend=backend)  # type: ignore[assignment]
        if how == "wrapper":
            run.monitor.attach(run.model)
    if how == "original":  # its hook may be compiled away with it, which is said
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(40):
                run.step()
            run.rows()
    else:
        run.settle()
        for _ in range(40):
            run.step()
        assert not original._forward_pre_hooks
        run.check()
    assert len(graphs) == 1
    run.monitor.close()
    torch._dynamo.reset()


def test_saving_in_the_middle_of_a_step_leaves_nothing_for_the_next(run: Run) -> None:
    run.step()
    run.model(x=torch.randn(2, 8)).backward()
    run.monitor.save_logs()
    run.model(x=torch.randn(4, 8)).backward()
    loss = run.model(x=torch.randn(6, 8))
    loss.backward()
    run.log(loss, 12)
    run.step()
    run.check()


def test_a_batch_inside_a_transform_of_the_parameters_has_no_mfu(run: Run) -> None:
    """Also where only the parameters are transformed."""
    params, _ = torch.func.stack_module_state([Model() for _ in range(5)])
    x = torch.randn(4, 8)
    run.step()
    out = torch.vmap(lambda p: torch.func.functional_call(run.model, p, (), {"x": x}))(params)
    run.log(out.sum(), 0)
    run.step()
    row = run.check()[-2]
    assert "perf/tflops_per_gpu" not in row
    assert "vmap" in row["perf/mfu_unknown"]


def test_a_model_that_is_exported_meanwhile_ran_no_more_for_it(run: Run) -> None:
    x = torch.randn(4, 8)
    run.step()
    loss = run.model(x=x)
    loss.backward()
    torch.export.export(run.model, (), {"x": x}, strict=False)
    run.log(loss, 4)
    run.step()
    before, exported, after = run.check()[-3:]
    assert [flops(before), flops(after)] == pytest.approx([FLOPS] * 2)
    # The export made nodes of its own, as more work of the step would have.
    assert "the step ran other operators" in exported["perf/mfu_unknown"]


def test_a_checkpoint_around_the_model_is_seen_among_other_steps(tmp_path: Path) -> None:
    run = Run(tmp_path, config={"monitoring": {"peak_tflops": 1.0}})
    run.settle()
    run.step()
    for _ in range(6):
        loss = checkpoint(lambda x: run.model(x=x), torch.randn(4, 8), use_reentrant=False)
        loss.backward()
        run.log(loss, 4)
    run.step()
    rows = run.check()
    executed = [
        round(1e12 * row["perf/hfu"] * row["perf/step_time"]) if "perf/hfu" in row else None
        for row in rows[-8:]
    ]
    assert (executed[0], executed[-1]) == (FLOPS, FLOPS)
    # More nodes show that it is another step; once observed, it has its recomputation.
    assert set(executed[1:-1]) <= {None, 3 * FLOPS // 2}
    assert executed[-2] == 3 * FLOPS // 2
    run.monitor.close()


def test_what_the_user_compiles_stays_compiled(run: Run) -> None:
    """Whether calls are noted by a hook, or already those of a compiled model."""
    loss = run.model(x=torch.randn(4, 8))
    loss.backward()
    for backend in ("eager", "aot_eager"):
        run.model.compile(backend=backend)
        mine = run.model.__dict__[CALL]
        run.log(loss, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model that is compiled later may not be seen
            for _ in range(5):
                run.step()
            loss = run.model(x=torch.randn(4, 8))
            loss.backward()
            run.monitor.detach()
            assert run.model.__dict__[CALL] is mine
            run.monitor.attach(run.model)
            for _ in range(5):
                run.step()
        row = run.rows()[-1]
        if backend == "eager":
            assert flops(row) == pytest.approx(FLOPS)
        else:
            why = "a backend other than inductor" if guards_ignore_modes() else RECOMPILES
            assert why in row["perf/mfu_unknown"]
    run.monitor.detach()
    assert run.model.__dict__[CALL] is mine
    torch._dynamo.reset()


def test_a_batch_that_is_part_of_a_graph_is_not_kept(run: Run) -> None:
    before = nn.Linear(8, 8)
    for _ in range(20):
        x = before(torch.randn(4, 8))
        loss = run.model(x=x)
        loss.backward()
        graph = weakref.ref(x)
        del x
        run.log(loss, 4)
        del loss
        assert graph() is None
    run.check()


def test_one_row_that_fails_takes_no_remote_one_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Remote:
        def __init__(self) -> None:
            self.rows: dict[int, Any] = {}

        def start(self, run: Any) -> None: ...
        def log(self, step: int, metrics: Any) -> None:
            self.rows[step] = metrics

        def flush(self) -> None: ...
        def finish(self, summary: Any) -> None: ...

    remote = Remote()
    run = Run(tmp_path, trackers=[remote])
    run.settle()
    while run.number < 44:
        run.step()
    run.rows()
    while run.number < 54:
        run.step()
    monkeypatch.setattr(rows_module, "peak_memory_bytes", lambda device: 1 / 0)
    with pytest.warns(UserWarning, match="is not logged: ZeroDivisionError"):
        run.rows()
    run.monitor.close()
    assert list(remote.rows) == [number for number in run.losses if number != 50]
    assert run.monitor.summary()["steps"] == run.number - 1


def test_a_flag_of_another_kind_is_taken_as_ever(run: Run) -> None:
    run.step()
    loss = run.model(x=torch.randn(4, 8))
    run.number += 1
    run.losses[run.number], run.micro_batches[run.number] = float(loss.detach()), 4
    with pytest.warns(UserWarning, match="skip_wandb is treated as false"):
        run.monitor.log_step(run.number, 0, loss, loss, 0.1, skip_wandb=torch.tensor([1, 0]))  # type: ignore[arg-type]
    run.step()
    run.check()


@pytest.mark.parametrize("epoch", [2.0**60, float("inf"), float("nan"), -1.5])
def test_odd_epochs_are_logged_as_ever(run: Run, epoch: float) -> None:
    for _ in range(4):
        loss = run.model(x=torch.randn(4, 8))
        run.number += 1
        run.losses[run.number], run.micro_batches[run.number] = float(loss.detach()), 4
        run.monitor.log_step(run.number, epoch, loss, loss, 0.1)
    for row in run.check()[-4:]:
        if isfinite(epoch):
            assert row["training/epoch"] == epoch
        else:
            assert row["non_finite"] == {"training/epoch": str(epoch)}


@pytest.mark.parametrize("samples", [4, 20_000])
def test_no_batch_outlives_its_forward_pass(run: Run, samples: int) -> None:
    for _ in range(10):
        x = torch.randn(samples, 8)
        loss = run.model(x=x)
        kept = weakref.ref(x)
        loss.backward()
        del x
        assert kept() is None
        run.log(loss, samples)
    run.step()
    run.check()


def test_a_step_may_have_many_micro_batches(run: Run) -> None:
    for _ in range(12):
        run.step(micro_batches=70)
    rows = run.check()
    assert [flops(row) for row in rows[-12:]] == pytest.approx([70 * FLOPS] * 12)


def test_a_model_that_runs_again_in_the_backward_pass_is_counted_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for _ in range(SETTLE_STEPS + 8):
        loss = checkpoint(run.model, torch.randn(4, 8, requires_grad=True), use_reentrant=False)
        loss.backward()
        run.log(loss, 4)
    rows = run.check()
    run.monitor.close()
    forward_and_two_gradients = 3 * 2 * 4 * 8 * 8
    assert [flops(row) for row in rows[1:]] == pytest.approx([forward_and_two_gradients] * (len(rows) - 1))


class Masked(Model):
    def forward(self, x: Any = None, input_ids: Any = None, attention_mask: Any = None) -> torch.Tensor:
        return super().forward(input_ids.float() if x is None else x)


@pytest.mark.parametrize("is_written_over", [False, True])
def test_a_mask_is_read_as_the_model_got_it_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written_over: bool
) -> None:
    """It is kept where it is until it is sent with others."""
    monkeypatch.setattr(
        HostValues,
        "tokens_in",
        lambda self, mask: self._hold("attention_mask", mask, is_input=True, count=True),
    )
    run = Run(tmp_path)
    run.model = Masked()
    run.monitor.attach(run.model)
    run.settle()
    run.step()
    mask = torch.nn.functional.pad(torch.ones(4, 6, dtype=torch.long), (0, 2))
    loss = run.model(input_ids=torch.ones(4, 8, dtype=torch.long), attention_mask=mask)
    loss.backward()
    run.log(loss, 4)
    if is_written_over:
        mask.zero_()
        with pytest.warns(UserWarning, match="attention_mask was overwritten"):
            row = run.check()[-1]
    else:
        row = run.check()[-1]
    assert row.get("perf/padding_efficiency") == (None if is_written_over else 0.75)
    assert flops(row) == pytest.approx(2 * FLOPS / 2)
    run.monitor.close()


class Watch:
    """Stands for the hardware counters: when a cut was asked for, and when it was due."""

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.cuts_s: list[float] = []

    def cut(self, now_s: float) -> None:
        if now_s >= self.due_s:
            self.cuts_s.append(now_s)
            self.due_s = now_s + 0.2

    def restart(self) -> None:
        raise AssertionError("nothing was compiled, and nothing is counted")

    def close(self) -> None:
        pass


def test_a_window_of_the_counters_ends_with_the_first_step_after_it_is_due(run: Run) -> None:
    begin_s = time.perf_counter()
    watch, live = Watch(begin_s + 0.2), run.monitor._live
    live.steps._instruments.counters = watch  # type: ignore[assignment]
    steps_s = [begin_s + 0.03 * number for number in range(1, 51)]
    for now_s in steps_s:
        loss = run.model(x=torch.randn(4, 8))
        loss.backward()
        run.number += 1
        run.losses[run.number], run.micro_batches[run.number] = float(loss.detach()), 0
        ended = live.steps.end_step()
        live.steps.log_step(run.number, 0, loss, loss.detach(), 0.1, None, False, None, ended, (), now_s)
    due = [steps_s[n] for n in (6, 13, 20, 27, 34, 41, 48)]  # each 0.2 s, with the first step after that
    assert watch.cuts_s == due
    run.check()


def test_whatever_comes_between_steps_each_has_its_own_numbers(run: Run) -> None:
    """Shapes, accumulation, saves, pauses, evaluations, autocast and attachments in any order."""
    draw = random.Random(0)
    for _ in range(1500):
        match draw.randrange(40):
            case 0:
                run.monitor.save_logs()
            case 1:
                with run.monitor.pause():
                    run.model(x=torch.randn(2, 8)).backward()
            case 2:
                with torch.no_grad():
                    run.model(x=torch.randn(3, 8))
            case 3:
                run.monitor.attach(run.model)
            case 4:
                run.values.flush()
            case 5:
                run.monitor.set_phase(None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=draw.random() < 0.05):
            run.step(draw.choice((4, 4, 4, 4, 2, 6)), micro_batches=draw.choice((1, 1, 1, 2, 3)))
    rows = run.check()
    known = [row for row in rows[1:] if "perf/tflops_per_gpu" in row]
    expected = [FLOPS / 4 * run.micro_batches[row["global_step"]] for row in known]
    assert [flops(row) for row in known] == pytest.approx(expected)
    assert all("perf/mfu_unknown" in row for row in rows[1:] if "perf/tflops_per_gpu" not in row)
    assert len(known) > 0.9 * len(rows)
    assert run.monitor.summary()["lost"] == []


def test_a_burst_of_rows_lets_the_training_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own interval, after which a thread must release the GIL, is out of the question here.

    A busy machine may not run this thread at all during a burst, so there are several.
    """
    monkeypatch.setattr(row_thread, "_WAKE_EVERY_S", 1000.0)
    model = nn.Linear(4, 4)
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    interval_s = sys.getswitchinterval()
    seen: set[int] = set()
    try:
        for burst in range(20):
            for step in range(400):
                model(torch.ones(2, 4)).sum().backward()
                monitor.log_step(400 * burst + step, 0, 0.5, None, 0.1)
            live = monitor._live
            assert live is not None
            queue, seen = live._rows.queue, set()
            sys.setswitchinterval(1000.0)
            live._row_thread._wake.set()
            while queue.processed < queue.taken:
                time.sleep(1e-4)  # as an operation of torch does, this releases the GIL
                seen.add(queue.processed)
            sys.setswitchinterval(interval_s)
            if len(seen) > 3:
                break
    finally:
        sys.setswitchinterval(interval_s)
        monitor.close()
    assert len(seen) > 3, seen
