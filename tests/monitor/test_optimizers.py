"""Optimizers of every kind: those that skip a step, are not torch's, or step inside the backward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import TrainingMonitor, count_flops

PEAK = 10e12
STEPS = 8
Step = Callable[[int], torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh()).square().mean()


class OnValues(Net):
    """Depends on a weight's value, so that it is counted on real copies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 if self.one.weight.detach().numpy().sum() else 2)


def with_scaler(model: nn.Module) -> Step:
    """Every third step overflows, and GradScaler leaves the weights alone."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(number: int) -> torch.Tensor:
        loss = model(torch.randn(4, 8)) * (float("inf") if number % 3 == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def by_hand(model: nn.Module) -> Step:
    """An optimizer that is not derived from torch.optim.Optimizer."""

    def step(number: int) -> torch.Tensor:
        loss = model(torch.randn(4, 8))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss

    return step


def in_backward(model: nn.Module) -> Step:
    """One optimizer for each parameter, which steps as soon as its gradient is there."""
    optimizers = {p: torch.optim.Adam([p], 0.01) for p in model.parameters()}

    def now(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(now)

    def step(number: int) -> torch.Tensor:
        loss = model(torch.randn(4, 8))
        loss.backward()
        return loss

    return step


def with_closure(model: nn.Module) -> Step:
    """Three forward and backward passes in each step."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=1e-4, max_iter=3, max_eval=3, tolerance_grad=0, tolerance_change=0
    )

    def step(number: int) -> torch.Tensor:
        batch = torch.randn(4, 8)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        return optimizer.step(closure)  # type: ignore[return-value]

    return step


def trained(
    path: Path | None, kind: type[nn.Module], make_step: Callable[[nn.Module], Step]
) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    model = kind()
    config = {"monitoring": {"peak_tflops": PEAK / 1e12}}
    monitor = None if path is None else TrainingMonitor(path, config, model=model)
    step, losses = make_step(model), []
    for number in range(1, STEPS + 1):
        loss = step(number)
        losses.append(float(loss))
        if monitor is not None:
            monitor.log_step(number, 0, loss, None, 0.1)
    if monitor is not None:
        monitor.close()
    return [p.detach().clone() for p in model.parameters()], losses


@pytest.mark.filterwarnings("ignore:operators that may do matrix work .* torch.Tensor.numpy")
@pytest.mark.parametrize("kind", [Net, OnValues])
@pytest.mark.parametrize(
    ("make_step", "passes"), [(with_scaler, 1), (by_hand, 1), (in_backward, 1), (with_closure, 3)]
)
def test_the_work_of_a_step_does_not_depend_on_what_the_optimizer_does(
    tmp_path: Path, kind: type[nn.Module], make_step: Callable[[nn.Module], Step], passes: int
) -> None:
    weights, losses = trained(tmp_path, kind, make_step)
    same_weights, same_losses = trained(None, kind, make_step)
    assert str(losses) == str(same_losses)  # NaN is like NaN
    assert all(torch.equal(a, b) for a, b in zip(weights, same_weights, strict=True))
    rows: list[dict[str, Any]] = json.loads((tmp_path / "training_log.json").read_text())
    wanted = passes * count_flops(kind(), (torch.randn(4, 8),)).model_flops
    assert [round(row["perf/mfu"] * row["perf/step_time"] * PEAK) for row in rows] == [wanted] * STEPS
