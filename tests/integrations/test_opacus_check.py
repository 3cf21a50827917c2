"""`truemfu run --check-privacy`: it finds wrong sums of Opacus, passes right ones, changes nothing."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.run_pairs import SCRIPTS, ended, load, watched
from torch import nn
from torch.utils.checkpoint import checkpoint

from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning
from truemfu.integrations.opacus_check import OpacusCheck

SCRIPT = load("opacus_loop")


@pytest.fixture
def monitor(tmp_path: Path) -> Any:
    made = TrainingMonitor(tmp_path, trackers=[])
    yield made
    made.close()


def checked(
    monitor: TrainingMonitor, model: nn.Module, *how: str, steps: int = 3, passes: int = 1
) -> OpacusCheck:
    wrapped, optimizer, loss_of, inner = SCRIPT.private(model, *how)
    check = OpacusCheck()
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    for x, y in SCRIPT.batches(steps):
        optimizer.zero_grad()
        for _ in range(passes):
            loss_of(wrapped(x), y).backward()
        optimizer.step()
    return check


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("how", ["hooks", "ghost"])
def test_right_sums_pass(monitor: Any, how: str, reduction: str) -> None:
    torch.manual_seed(0)
    check = checked(monitor, SCRIPT.Model(), how, reduction)
    assert check.checked == 1
    assert 0 < check.largest_error < 1e-4
    assert "in 1 of 3 steps" in check.result()


@pytest.mark.parametrize("how", ["hooks", "ghost"])
def test_a_model_that_mixes_samples_is_found(monitor: Any, how: str) -> None:
    with pytest.warns(TruemfuWarning, match="private gradient of step 2 is wrong: it differs from a loop"):
        check = checked(monitor, SCRIPT.Model(mixing=True), how)
    assert check.largest_error > 0.01


def test_a_wrong_norm_is_found(monitor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.optimizers import DPOptimizer

    clip = DPOptimizer.clip_and_accumulate

    def too_large(optimizer: Any) -> None:
        optimizer.max_grad_norm *= 2
        clip(optimizer)
        optimizer.max_grad_norm /= 2

    monkeypatch.setattr(DPOptimizer, "clip_and_accumulate", too_large)
    with pytest.warns(TruemfuWarning, match="private gradient of step 2 is wrong"):
        assert checked(monitor, SCRIPT.Model()).largest_error > 0.1


class WithLoss(nn.Module):
    """Returns the mean loss and the logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SCRIPT.Model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.model(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_a_loss_that_the_model_returns_is_the_samples_own(monitor: Any) -> None:
    wrapped, optimizer, _, inner = SCRIPT.private(WithLoss())
    check = OpacusCheck()
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    for x, y in SCRIPT.batches(2):
        optimizer.zero_grad()
        wrapped(x, labels=y)["loss"].backward()
        optimizer.step()
    assert 0 < check.largest_error < 1e-4


class WithHidden(nn.Module):
    """Returns what its logits were computed from as well."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SCRIPT.Model()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.relu(self.model.first(x))
        return self.model.second(hidden), hidden


@pytest.mark.parametrize("uses_both", [False, True])
def test_an_output_behind_another_is_no_false_alarm(monitor: Any, uses_both: bool) -> None:
    wrapped, optimizer, loss_of, inner = SCRIPT.private(WithHidden())
    check = OpacusCheck()
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", TruemfuWarning)
        for x, y in SCRIPT.batches(2):
            optimizer.zero_grad()
            logits, hidden = wrapped(x)
            (loss_of(logits, y) + uses_both * hidden.square().mean()).backward()
            optimizer.step()
    texts = [str(one.message) for one in warned if one.category is TruemfuWarning]
    if uses_both:
        assert not check.checked
        assert any(
            "gradient was not checked: an output of its model is computed from another" in t for t in texts
        )
    else:
        assert 0 < check.largest_error < 1e-4
        assert not texts


def test_a_step_under_autocast_is_compared_under_it(monitor: Any) -> None:
    wrapped, optimizer, loss_of, inner = SCRIPT.private(SCRIPT.Model())
    check = OpacusCheck()
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TruemfuWarning)
        for x, y in SCRIPT.batches(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(wrapped(x).float(), y)
            loss.backward()
            optimizer.step()
    assert check.checked == 1


class RefusesOne(SCRIPT.Model):  # type: ignore[misc, name-defined]
    """Cannot run a sample alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise RuntimeError("a batch of one")
        return super().forward(x)


def test_an_error_of_the_model_in_the_check_ends_nothing(monitor: Any) -> None:
    with pytest.warns(TruemfuWarning, match="gradient was not checked: RuntimeError: a batch of one"):
        check = checked(monitor, RefusesOne())
    assert "no private gradient was checked in 3 steps" in check.result()


class Checkpointed(nn.Module):
    """A re-entrant checkpoint, whose graph ends at its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = SCRIPT.Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.model.first, x.requires_grad_(), use_reentrant=True)
        return self.model.second(torch.relu(hidden))


@pytest.mark.parametrize(
    ("model", "passes", "why"),
    [
        (Checkpointed, 1, "re-entrant checkpoints hide"),
        (lambda: SCRIPT.Model(dropout=0.5), 1, "has dropout"),
        (SCRIPT.Model, 2, "ran 2 forward passes with gradients, expected one"),
    ],
)
def test_what_cannot_be_compared_is_said(monitor: Any, model: Any, passes: int, why: str) -> None:
    with pytest.warns(TruemfuWarning, match=f"gradient was not checked: its model .*{why}|{why}"):
        check = checked(monitor, model(), passes=passes)
    assert not check.checked
    assert check.result() == "no private gradient was checked in 3 steps with Opacus"


class Scaled(SCRIPT.Model):
    """What it gets first is shared by all samples."""

    def forward(self, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * scales.mean())


def test_a_batch_whose_samples_come_later_is_not_compared(monitor: Any) -> None:
    wrapped, optimizer, loss_of, inner = SCRIPT.private(Scaled())
    check = OpacusCheck()
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    for x, y in SCRIPT.batches(1):
        loss_of(wrapped(torch.ones(2), x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.warns(TruemfuWarning, match="first tensor that its model gets does not have one entry for"):
        loss_of(wrapped(torch.ones(2), x), y).backward()
        optimizer.step()


def test_another_clipping_is_not_compared(monitor: Any) -> None:
    from opacus import GradSampleModule
    from opacus.optimizers import DPPerLayerOptimizer

    model = SCRIPT.Model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, check = GradSampleModule(model), OpacusCheck()
    optimizer = DPPerLayerOptimizer(
        inner, noise_multiplier=1.0, max_grad_norm=[0.1] * 4, expected_batch_size=6
    )
    inner.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    with pytest.warns(TruemfuWarning, match="DPPerLayerOptimizer clips in another way"):
        for x, y in SCRIPT.batches(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrapped(x), y).backward()
            optimizer.step()


def test_a_plain_training_is_left_alone(monitor: Any) -> None:
    model, check = SCRIPT.Model(), OpacusCheck()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda one, *_: check.update_begins(one, monitor))
    for x, y in SCRIPT.batches(3):
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert check.result().startswith("no optimizer of Opacus made a step")


@pytest.mark.parametrize("how", ["hooks", "ghost mixing"])
def test_a_script_ends_as_without_the_check(how: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "opacus_loop.py"), *how.split()]
    alone = ended(command, tmp_path / "alone", tmp_path / "no_output")
    output = tmp_path / "output"
    line = watched(command, output)
    line.insert(line.index("--"), "--check-privacy")
    run = ended(line, tmp_path / "watched", output)
    assert (run.code, run.stdout) == (alone.code, alone.stdout) == (0, alone.stdout)
    assert ["privacy/gradient_error" in row for row in run.rows()] == [
        False,
        True,
        False,
        False,
        False,
        False,
    ]
    assert "private gradients were checked in 1 of 6 steps" in run.stderr
    assert ("private gradient of step 2 is wrong" in run.stderr) == ("mixing" in how)
