"""How model, step and loss of an unmodified script are found; whole scripts are in test_run.py."""

from __future__ import annotations

import copy
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import TrainingMonitor
from truemfu.integrations.auto import AutoMonitor
from truemfu.integrations.find_models import models_with, parameters_of
from truemfu.integrations.run_settings import RunSettings, python_command, settings_from_environment
from truemfu.integrations.seen_losses import SeenLosses
from truemfu.monitor import created


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


def test_the_outermost_modules_hold_the_parameters() -> None:
    first, second, other = model(), model(), model()
    outer = nn.ModuleDict({"inner": first})
    copied = copy.deepcopy(second)
    assert models_with([first[0].weight]) == [outer]
    assert {id(found) for found in models_with([first[0].weight, copied[1].bias])} == {id(outer), id(copied)}
    assert models_with([nn.Parameter(torch.ones(2))]) == []
    assert models_with(other.parameters()) == [other]


class Around(torch.optim.Optimizer):
    """An optimizer that wraps another one and shares its groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Script:
    """A script whose optimizers are watched, without a wrapped torch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.auto = AutoMonitor(RunSettings(output=str(folder)))

    def optimizer(self, *models: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.5)
        self.made(made)
        return made

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(self.auto._on_step)
        self.auto._guarded(self.auto._optimizer_made, optimizer)

    def rows(self) -> list[dict[str, Any]]:
        self.auto._monitor.close()
        rows: list[dict[str, Any]] = json.loads((self.folder / "training_log.json").read_text())
        return rows


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    made = Script(tmp_path / "run")
    monkeypatch.setattr(created, "listeners", [made.auto._monitor_made])
    yield made
    if made.auto._monitor is not None:
        made.auto._monitor.close()


def train(trained: nn.Module) -> None:
    trained(torch.ones(2, 4)).sum().backward()


def samples(rows: list[dict[str, Any]]) -> list[int]:
    return [round(row["perf/samples_per_second"] * row["perf/step_time"]) for row in rows]


def test_a_step_ends_with_the_optimizer_that_steps_least_often(script: Script) -> None:
    critic, generator = model(), model()
    often, seldom = script.optimizer(critic), script.optimizer(generator)
    for _ in range(3):
        for _ in range(5):
            train(critic)
            often.step()
        train(generator)
        seldom.step()
    rows = script.rows()
    assert [row["global_step"] for row in rows] == [1, 2, 3]
    assert all(row["training/lr"] == 0.5 for row in rows)
    one = 2 * (2 * 2 * 4 * 8) + 3 * (2 * 2 * 8 * 1)
    assert [round(row["perf/mfu"] * row["perf/step_time"] * 1e12) for row in rows] == [6 * one] * 3


def test_an_optimizer_around_another_one_steps_with_it(script: Script) -> None:
    trained = model()
    inner = script.optimizer(trained)
    outer = Around(inner)
    script.made(outer)
    for _ in range(4):
        train(trained)
        outer.step()
    assert samples(script.rows()) == [2] * 4


def test_an_optimizer_that_never_steps_is_not_waited_for(script: Script) -> None:
    trained, unused = model(), model()
    optimizer, never = script.optimizer(trained), script.optimizer(unused)
    for _ in range(25):
        train(trained)
        optimizer.step()
    rows = script.rows()
    assert samples(rows) == [40, *[2] * 5]
    del never  # until here it exists


def test_a_second_training_does_not_wait_for_the_optimizer_of_the_first(script: Script) -> None:
    first, second = model(), model()
    finished = script.optimizer(first)
    for _ in range(3):
        train(first)
        finished.step()
    optimizer = script.optimizer(second)
    for _ in range(4):
        train(second)
        optimizer.step()
    assert samples(script.rows()) == [2] * 7


def test_an_optimizer_that_stops_is_not_waited_for_after_two_cycles(script: Script) -> None:
    goes_on, stops = model(), model()
    first, second = script.optimizer(goes_on), script.optimizer(stops)
    for _ in range(3):
        for trained, optimizer in ((goes_on, first), (stops, second)):
            train(trained)
            optimizer.step()
    for _ in range(6):
        train(goes_on)
        first.step()
    train(stops)
    second.step()
    train(goes_on)
    first.step()
    assert samples(script.rows()) == [2, 2, 2, 8, 2, 2, 2]


def test_models_of_many_trainings_are_found_at_reused_addresses(script: Script) -> None:
    for _ in range(8):
        trained = model()
        optimizer = script.optimizer(trained)
        for _ in range(2):
            train(trained)
            optimizer.step()
        del trained, optimizer
    rows = script.rows()
    assert samples(rows) == [2] * 16


def test_a_model_whose_parameters_are_added_later_is_counted(script: Script) -> None:
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    optimizer = script.optimizer(body)
    optimizer.add_param_group({"params": head.parameters()})
    script.auto._group_added(optimizer)
    for _ in range(3):
        head(body(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    rows = script.rows()
    one = 2 * (2 * 2 * 4 * 8) + 3 * (2 * 2 * 8 * 1)
    assert [round(row["perf/mfu"] * row["perf/step_time"] * 1e12) for row in rows] == [one] * 3


def test_the_model_of_a_copied_optimizer_is_found(script: Script) -> None:
    pair = copy.deepcopy((trained := model(), torch.optim.SGD(trained.parameters(), lr=0.5)))
    copied, optimizer = pair
    optimizer.register_step_post_hook(script.auto._on_step)
    for _ in range(3):
        train(copied)
        optimizer.step()
    rows = script.rows()
    assert not {"perf/mfu", "perf/samples_per_second"} & set(rows[0])  # it is found when it steps first
    assert samples(rows[1:]) == [2] * 2


def test_parameters_of_no_module_are_reported(script: Script) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.warns(match="no model was found"):
        script.made(optimizer)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    rows = script.rows()
    assert len(rows) == 3
    assert not any("perf/mfu" in row for row in rows)


def test_zero_3_is_reported(script: Script) -> None:
    trained = model()
    for parameter in trained.parameters():
        parameter.ds_id = 1  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    with pytest.warns(match="ZeRO-3"):
        script.optimizer(trained)
    assert not trained._forward_pre_hooks


def test_a_script_with_its_own_monitor_is_left_alone(script: Script, tmp_path: Path) -> None:
    trained = model()
    with TrainingMonitor(tmp_path / "own", model=trained) as monitor:
        optimizer = script.optimizer(trained)
        train(trained)
        optimizer.step()
        monitor.log_step(1, 0, 1.0, 1.0, 0.1)
    assert script.auto._monitor is None
    assert not script.folder.exists()


def test_a_script_that_makes_its_own_monitor_later_is_left_alone(script: Script, tmp_path: Path) -> None:
    trained = model()
    optimizer = script.optimizer(trained)
    with TrainingMonitor(tmp_path / "own", model=trained) as monitor:
        train(trained)
        optimizer.step()
        monitor.log_step(1, 0, 1.0, 1.0, 0.1)
    assert script.auto.steps == 0
    assert not (script.folder / "training_log.json").exists()
    assert monitor.summary()["steps"] == 1


def test_the_monitor_passes_its_model_on_without_hooks(script: Script) -> None:
    trained = model()
    optimizer = script.optimizer(trained)

    def hooks_of(saved: dict[str, nn.Module]) -> int:
        return len(saved["model"]._forward_pre_hooks)

    for _ in range(3):
        train(trained)
        assert script.auto._save(hooks_of, {"model": trained}) == 0
        assert len(trained._forward_pre_hooks) == 1
        optimizer.step()
    rows = script.rows()
    assert samples(rows) == [2] * 3
    assert script.auto._monitor.summary()["monitor_cost"]["observed_steps"] == [1, 2]


def test_an_exception_of_ours_stays_away(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("broken")

    trained = model()
    optimizer = script.optimizer(trained)
    script.auto._stepped_by = fails  # type: ignore[method-assign]
    train(trained)
    optimizer.step()
    optimizer.step()
    assert capsys.readouterr().err.count("broken") == 1
    assert not trained._forward_pre_hooks


def test_the_loss_is_what_backward_starts_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    losses = SeenLosses()
    losses.install()
    weight = nn.Parameter(torch.tensor(3.0))
    (2 * weight).backward()
    first = losses.take()
    assert first is not None
    assert (first.item(), first.requires_grad) == (6.0, False)
    assert losses.take() is None
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(4 * weight).backward()
    assert losses.take().item() == 12.0  # type: ignore[union-attr]
    torch.autograd.backward([weight * torch.ones(2)], [torch.ones(2)])
    assert losses.take() is None


def test_losses_of_micro_batches_are_added_until_an_optimizer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    monkeypatch.setattr(torch.amp.GradScaler, "scale", torch.amp.GradScaler.scale)
    losses = SeenLosses()
    losses.install()
    weight = nn.Parameter(torch.tensor(3.0, dtype=torch.bfloat16))

    def backward(*values: float) -> None:
        for value in values:
            (value / 3 * weight).backward()

    backward(2.0, 3.0, 1.0)
    loss = losses.take()
    assert loss is not None
    assert loss.dtype is torch.float32  # many small losses are not lost in a sum of 8 bits
    assert loss.item() == pytest.approx(6.0, rel=0.01)
    backward(4.0)  # a critic, and its optimizer's step
    losses.step_begins()
    losses.step_ended()
    backward(1.0, 2.0)  # then the generator
    losses.step_begins()
    backward(5.0, 8.0)  # its optimizer calls a closure twice
    losses.step_ended()
    assert losses.take().item() == pytest.approx(8.0, rel=0.01)  # type: ignore[union-attr]


generator: nn.Module | None = None


def test_models_of_one_class_are_named_after_the_variables_that_hold_them(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.unfreeze()  # tests freeze what they have imported (tests/conftest.py), and this module's names with it
    monkeypatch.setitem(globals(), "generator", model())
    assert generator is not None

    class Judge:
        def __init__(self) -> None:
            self.critic = model()

    judge = Judge()
    program = locals()
    known = dict(program)
    optimizers = [script.optimizer(generator), script.optimizer(judge.critic)]
    for _ in range(2):
        for trained, optimizer in zip((generator, judge.critic), optimizers, strict=True):
            train(trained)
            optimizer.step()
    assert program == known  # to look at the variables of this function would add those since
    assert [name for name in script.rows()[0] if name.startswith("perf/mfu/")] == [
        "perf/mfu/generator",
        "perf/mfu/critic",
    ]


def test_models_that_no_variable_holds_are_numbered(script: Script) -> None:
    held = [model(), model()]
    optimizers = [script.optimizer(each) for each in held]
    for trained, optimizer in zip(held, optimizers, strict=True):
        train(trained)
        optimizer.step()
    named = {name for name in script.rows()[0] if name.startswith("perf/mfu/")}
    assert named == {"perf/mfu/Sequential_0", "perf/mfu/Sequential_1"}


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = RunSettings(output="/somewhere", mode="estimate", trackers=("tensorboard",), began_s=1.5)
    given = settings.environment({"PYTHONPATH": "/own", "A": "b"})
    assert given["PYTHONPATH"].endswith(":/own")
    assert given["A"] == "b"
    monkeypatch.setenv("TRUEMFU_RUN", given["TRUEMFU_RUN"])
    assert settings_from_environment() == settings
    assert python_command(["train.py", "-x"], "py") == ["py", "train.py", "-x"]
    assert python_command(["torchrun", "train.py"], "py") == ["torchrun", "train.py"]


def test_parameters_of_every_group() -> None:
    trained = model()
    optimizer = torch.optim.SGD([{"params": trained[0].parameters()}, {"params": trained[1].parameters()}])
    assert len(parameters_of(optimizer)) == 4
