"""Which phase each part of a real program is, and that torch and the program stay as they are."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.versions import TORCH
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.utils import clip_grad, clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from truemfu import TrainingMonitor
from truemfu.monitor import forks
from truemfu.monitor.live_run import _watched_phases
from truemfu.monitor.timing import clock as clocks
from truemfu.monitor.timing.between_steps import BetweenSteps
from truemfu.monitor.timing.clock import HostClock, Pause, Span, StepClock, TimeMark
from truemfu.monitor.timing.phases import phases_of
from truemfu.torch_private import loading
from truemfu.torch_private.replacing import replace

WIDTH = 8
imported_early = clip_grad_norm_


class Steps:
    """A loop whose phases are followed; `take` has those of the step so far."""

    def __init__(self, leave: contextlib.ExitStack) -> None:
        self.clock, self.between = StepClock(HostClock()), BetweenSteps()
        self.phases = _watched_phases(self.clock, self.between, leave)
        leave.callback(loading.listen(self.between))
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.model.register_forward_pre_hook(self._forward)
        self.model.register_forward_hook(lambda *_: self.phases.forward_ends(), always_call=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.clock.begin()

    def _forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # as the monitor's own hook does
            self.phases.forward_begins()

    def loss(self) -> torch.Tensor:
        return self.model(torch.ones(2, WIDTH)).sum()  # type: ignore[no-any-return]

    def take(self) -> list[str]:
        return [phase for _, phase in self.clock.end(time.perf_counter()).changes]


@pytest.fixture
def steps() -> Iterator[Steps]:
    with contextlib.ExitStack() as leave:
        yield Steps(leave)


def test_a_plain_step(steps: Steps) -> None:
    for _ in DataLoader(TensorDataset(torch.ones(2, WIDTH)), batch_size=2):
        steps.loss().backward()
        torch.nn.utils.clip_grad_norm_(steps.model.parameters(), 1.0)
        steps.optimizer.step()
        steps.optimizer.zero_grad()
        assert steps.take() == [
            "data_wait", "input", "forward", "backward", "other", "clipping", "other", "optimizer", "other",
        ]  # fmt: skip
    assert steps.take() == ["data_wait", "other"]  # the loader is exhausted


def test_micro_batches(steps: Steps) -> None:
    for _ in DataLoader(TensorDataset(torch.ones(3, WIDTH)), batch_size=1):
        steps.loss().backward()
    assert steps.take() == [*["data_wait", "input", "forward", "backward", "other"] * 3, "data_wait", "other"]


def test_work_without_gradients_returns_to_what_it_interrupts(steps: Steps) -> None:
    with torch.no_grad():
        steps.model(torch.ones(2, WIDTH))
    loss = steps.loss()
    with torch.inference_mode():
        steps.model(torch.ones(2, WIDTH))
    torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)
    loss.backward()
    assert steps.take() == [
        "no_grad", "other", "forward", "no_grad", "forward", "no_grad", "forward", "backward", "other",
    ]  # fmt: skip


def test_work_without_gradients_inside_the_model_belongs_to_its_forward_pass(steps: Steps) -> None:
    inner = steps.model[1]
    inner.forward = torch.no_grad()(inner.forward)  # type: ignore[method-assign]
    steps.loss()
    with torch.no_grad():
        steps.loss()
    assert steps.take() == ["forward", "no_grad", "forward"]


def test_training_inside_a_block_without_gradients(steps: Steps) -> None:
    with torch.no_grad():
        with torch.enable_grad():
            steps.loss().backward()
        steps.optimizer.step()
    assert steps.take() == ["no_grad", "forward", "backward", "other", "optimizer", "other"]


def test_a_backward_pass_without_gradient_mode(steps: Steps) -> None:
    loss = steps.loss()
    with torch.no_grad():
        loss.backward()
    assert steps.take() == ["forward", "no_grad", "backward", "no_grad", "forward"]


def test_a_closure_is_told_apart_from_its_optimizer(steps: Steps) -> None:
    def closure() -> float:
        steps.optimizer.zero_grad()
        loss = steps.loss()
        loss.backward()
        torch.nn.utils.clip_grad_value_(steps.model.parameters(), 1.0)
        return float(loss)

    steps.optimizer.step(closure)  # type: ignore[call-overload]
    assert steps.take() == [
        "optimizer", "forward", "backward", "optimizer", "clipping", "optimizer", "other",
    ]  # fmt: skip


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_backward(steps: Steps, use_reentrant: bool) -> None:
    batch = torch.ones(2, WIDTH, requires_grad=True)
    steps.phases.forward_begins()
    checkpoint(steps.model, batch, use_reentrant=use_reentrant).sum().backward()
    found = steps.take()
    assert found[-2:] == ["backward", "other"]
    assert found.count("backward") == 1


def test_a_gradient_penalty_is_part_of_the_forward_pass(steps: Steps) -> None:
    batch = torch.ones(2, WIDTH, requires_grad=True)
    out = steps.model(batch).sum()
    (gradient,) = torch.autograd.grad(out, batch, create_graph=True)
    gradient.pow(2).sum().backward()
    assert steps.take() == ["forward", "backward", "forward", "backward", "other"]


def test_an_optimizer_inside_the_backward_pass_belongs_to_it(steps: Steps) -> None:
    for parameter in steps.model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    steps.loss().backward()
    assert steps.take() == ["forward", "backward", "other"]


def test_clipping_that_was_imported_before_is_seen(steps: Steps) -> None:
    steps.loss().backward()
    imported_early(steps.model.parameters(), 1.0)
    assert steps.take() == ["forward", "backward", "other", "clipping", "other"]


def test_an_error_of_the_program_ends_its_phase(steps: Steps) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    with pytest.raises(ZeroDivisionError), torch.no_grad():
        _ = 1 / 0
    next(steps.model.parameters()).grad = torch.full((WIDTH, WIDTH), float("nan"))
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(steps.model.parameters(), 1.0, error_if_nonfinite=True)
    assert steps.take() == ["backward", "other", "no_grad", "other", "clipping", "other"]


def test_other_threads_pauses_and_forked_processes_are_ignored(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        steps.loss().backward()
        steps.optimizer.step()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    steps.between.pauses += 1
    work()
    steps.between.pauses -= 1
    monkeypatch.setattr(forks, "number", forks.number + 1)
    work()
    assert steps.take() == []


def test_a_step_with_too_many_changes_is_unknown(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MOST_CHANGES", 4)
    for _ in range(10):
        steps.loss().backward()
    assert len(steps.take()) == 4


def replaced() -> list[object]:
    return [
        torch.set_grad_enabled.__init__, torch.set_grad_enabled.__exit__, torch.inference_mode.__enter__,
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
    ]  # fmt: skip


def test_torch_is_left_as_it_was() -> None:
    before = replaced()
    with contextlib.ExitStack() as leave:
        Steps(leave)
        assert not any(new is old for new, old in zip(replaced(), before, strict=True))
    assert replaced() == before


def test_followers_may_end_in_the_order_in_which_they_began() -> None:
    before, leaves = replaced(), [contextlib.ExitStack(), contextlib.ExitStack()]
    both = [Steps(leave) for leave in leaves]
    both[0].take()  # the second model's initial values
    with torch.no_grad():
        clip_grad_norm_(both[0].model.parameters(), 1.0)
    both[0].loss().backward()
    clip_grad_norm_(both[0].model.parameters(), 1.0)
    assert both[0].take() == ["no_grad", "other", "forward", "backward", "other", "clipping", "other"]
    for leave in leaves:
        leave.close()
    assert replaced() == before


def test_a_decorator_and_an_object_that_is_entered_later_switch_gradients_too(steps: Steps) -> None:
    @torch.set_grad_enabled(False)
    def measured() -> None:
        pass

    assert steps.take() == ["no_grad", "other"]
    measured()
    assert steps.take() == ["no_grad", "other"]
    later = torch.set_grad_enabled(False)
    torch.set_grad_enabled(True)
    assert steps.take() == ["no_grad", "other"]
    with later:
        pass
    assert steps.take() == ["no_grad", "other"]


def test_an_optimizer_around_another_one_is_one_phase(steps: Steps) -> None:
    class Around(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            steps.optimizer.step()
            with torch.no_grad():  # its own part of the update
                pass

    steps.loss().backward()
    Around(steps.model.parameters(), lr=0.1).step()
    assert steps.take() == ["forward", "backward", "other", "optimizer", "other"]


def test_what_is_below_the_decorators_of_a_function_stays_there() -> None:
    before = torch.optim.SGD.step.__wrapped__  # type: ignore[attr-defined]
    end = replace(torch.optim.SGD, "step", lambda original, *args: original(*args))
    assert torch.optim.SGD.step.__wrapped__ is before  # type: ignore[attr-defined]
    end()


@pytest.mark.xfail(
    TORCH < (2, 7),
    reason="torch 2.6 compiles code again whose model has its hooks replaced, once in a run",
    strict=True,
)
def test_code_that_is_compiled_in_parts_is_not_compiled_again(tmp_path: Path) -> None:
    """Dynamo raises at the first call that compiles anything a second time."""
    torch._dynamo.reset()
    model = nn.Linear(WIDTH, 1)

    @torch.compile(backend="eager")
    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = model(batch).sum()
            torch._dynamo.graph_break()
            target = target * 2
        with torch.inference_mode():
            torch._dynamo.graph_break()
        return (model(batch) * target).sum()

    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        TrainingMonitor(tmp_path, {"monitoring": {"trackers": []}}, model=model) as monitor,
    ):
        for step in range(5):
            loss_of(torch.ones(2, WIDTH)).backward()
            monitor.log_step(step, None, None, None, None)


# What marks make of it.


def span(*changes: tuple[float, str], end_s: float = 10.0, pauses: tuple[Pause, ...] = ()) -> Span:
    marks = [(TimeMark(at_s, None, at_s), phase) for at_s, phase in changes]
    return Span(TimeMark(0.0, None, 0.0), TimeMark(end_s, None, end_s), pauses, marks)


WHOLE = ((1.0, "data_wait"), (2.0, "input"), (3.0, "forward"), (5.0, "backward"), (9.0, "other"))


def test_phases_are_the_time_between_marks_less_pauses() -> None:
    pause = Pause(TimeMark(0.0, None, 4.0), TimeMark(0.0, None, 6.5), "evaluation")
    found = phases_of(span(*WHOLE, pauses=(pause,)), has_compiled_code=False)
    assert found == {"other": 2, "data_wait": 1, "input": 1, "forward": 1, "backward": 2.5}


@pytest.mark.parametrize(
    ("changes", "compiled", "reason"),
    [
        (WHOLE[:2], False, "no forward pass"),
        (WHOLE[:3], False, "no backward pass"),
        (WHOLE, True, "no optimizer"),
        ((*WHOLE, (float("nan"), "optimizer")), True, "a mark could not be placed"),
    ],
)
def test_what_cannot_be_separated_is_said(
    changes: tuple[tuple[float, str], ...], compiled: bool, reason: str
) -> None:
    found = span(*changes)
    found.changes[-1][0].device_s = None if reason.startswith("a mark") else 1.0
    answer = phases_of(found, has_compiled_code=compiled)
    assert isinstance(answer, str)
    assert answer.startswith(reason)


# In the rows of a run.


def trained(folder: Path, config: dict[str, Any], *, compiled: str = "") -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if compiled == "model":
        model.compile(backend="aot_eager")
    if compiled == "optimizer":
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    monitor = TrainingMonitor(folder, {"monitoring": config}, model=model)
    for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(12, 64)), batch_size=2)):
        monitor.log_step(step, None, update(batch), None, None)
    monitor.close()
    rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text())
    return rows


def phases_in(row: dict[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("perf/phase/"): value
        for name, value in row.items()
        if name.startswith("perf/phase/")
    }


@pytest.mark.parametrize("compiled", ["", "model"])
def test_the_phases_of_a_row_add_up_to_its_step(tmp_path: Path, compiled: str) -> None:
    rows = trained(tmp_path, {"trackers": []}, compiled=compiled)
    assert len(rows) == 6
    for row in rows[1:]:
        assert set(phases_in(row)) == {"data_wait", "input", "forward", "backward", "optimizer", "other"}
        assert sum(phases_in(row).values()) == pytest.approx(row["perf/step_time"], rel=1e-9)
        assert min(phases_in(row).values()) >= 0


def test_a_compiled_optimizer_cannot_be_told_apart(tmp_path: Path) -> None:
    last = trained(tmp_path, {"trackers": []}, compiled="optimizer")[-1]
    has_phase, reason = "optimizer" in phases_in(last), last.get("perf/phases_unknown", "")
    assert has_phase != reason.startswith("no optimizer")


def test_one_key_switches_them_off(tmp_path: Path) -> None:
    rows = trained(tmp_path, {"trackers": [], "step_phases": False})
    assert not any(phases_in(row) or "perf/phases_unknown" in row for row in rows)


def test_phases_change_nothing_that_is_trained(tmp_path: Path) -> None:
    losses = [
        [
            row["training/loss"]
            for row in trained(tmp_path / str(is_on), {"trackers": [], "step_phases": is_on})
        ]
        for is_on in (True, False)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("has_pause", [False, True])
def test_compiled_code_around_the_model_is_compiled_as_without_phases(
    tmp_path: Path, has_pause: bool
) -> None:
    graphs = []
    for is_on in (True, False):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = nn.Linear(WIDTH, 1)
        compiled = torch.compile(lambda batch, model=model: model(batch).sum(), backend=counter)
        config = {"monitoring": {"step_phases": is_on, "trackers": []}}
        with TrainingMonitor(tmp_path / str(is_on), config, model=model) as monitor:
            for step in range(6):
                compiled(torch.ones(2, WIDTH)).backward()
                monitor.log_step(step, None, None, None, None)
                if has_pause:
                    with monitor.without_hooks():
                        pass
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[1]


@pytest.mark.xfail(
    TORCH < (2, 7),
    reason="torch 2.6 compiles code again whose model has its hooks replaced, once in a run",
    strict=True,
)
def test_a_step_that_is_compiled_whole_is_compiled_as_without_a_monitor(tmp_path: Path) -> None:
    graphs = []
    for is_watched in (True, False):
        torch._dynamo.reset()
        counter = CompileCounter()
        model = nn.Linear(WIDTH, 1)

        def step(batch: torch.Tensor, model: nn.Module = model) -> None:
            with torch.no_grad():
                target = model(batch).sum()
            (model(batch).sum() - target).backward()
            clip_grad.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)

        compiled = torch.compile(step, backend=counter)
        monitor = (
            TrainingMonitor(tmp_path, {"monitoring": {"trackers": []}}, model=model) if is_watched else None
        )
        for number in range(6):
            compiled(torch.ones(2, WIDTH))
            if monitor is not None:
                monitor.log_step(number, None, None, None, None)
        if monitor is not None:
            monitor.close()
        graphs.append((counter.frame_count, counter.op_count))
    assert graphs[0] == graphs[1]
