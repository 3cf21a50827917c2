"""Scripting, tracing and exporting an observed model gives what it gives without a monitor."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.versions import TORCH
from torch import nn

from truemfu import TrainingMonitor, count_flops
from truemfu.monitor.watching.watched import CalledModels

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


X = torch.ones(3, 8)


def scripted(model: nn.Module) -> str:
    made = torch.jit.script(model)
    return f"{made.inlined_graph}{made.code}{made._forward_pre_hooks}{made._forward_hooks}"


def traced(model: nn.Module) -> str:
    made = torch.jit.trace(model, X)
    graph = re.sub(r"\.___torch_mangle_\d+", "", str(made.inlined_graph))  # numbers the types of a process
    return f"{graph}{made._forward_pre_hooks}{made._forward_hooks}"


def exported(model: nn.Module) -> str:
    return torch.export.export(model, (X,)).graph_module.code


def traced_by_fx(model: nn.Module) -> str:
    return torch.fx.symbolic_trace(model).code


def traced_inside(model: nn.Module) -> str:
    """The observed model is a part: its hooks are called in the trace."""
    return torch.fx.symbolic_trace(nn.Sequential(model)).code


WAYS = [scripted, traced, exported, traced_by_fx, traced_inside]


def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("makes", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("wrap", "has_stepped"),
    [(lambda m: m, True), (CalledModels, False)],
    ids=["model, after a step", "calls, at once"],
)
def test_an_observed_model_becomes_what_it_becomes_alone(
    tmp_path: Path, makes: Callable[[nn.Module], str], wrap: Callable[[nn.Module], Any], has_stepped: bool
) -> None:
    if makes is exported and TORCH < (2, 7):
        pytest.xfail("torch 2.6 exports a hook of a model as a graph of its own, and refuses several")
    alone = makes(model())
    watched = model()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}).attach(wrap(watched))
    if has_stepped:
        watched(X).sum().backward()
        monitor.log_step(1, None, 0.0, None, None)
    assert makes(watched) == alone
    for step in (2, 3):
        watched(X).sum().backward()
        monitor.log_step(step, None, 0.0, None, None)
    monitor.save_logs()
    assert monitor.last["perf/samples_per_second"] * monitor.last["perf/step_time"] == pytest.approx(3)
    if "perf/mfu" in monitor.last or not (has_stepped and makes in (traced, exported)):
        flops = monitor.last["perf/mfu"] * monitor.last["perf/step_time"] * 1e12
        assert round(flops) == count_flops(model(), (X,)).model_flops
    else:  # step 2 ran other operators than step 1 for the same batch
        assert monitor.summary()["mfu_unknown"]
    assert monitor.summary()["warnings"] == []
    monitor.close()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_observed_model_can_be_scripted(
    tmp_path: Path, copied: Callable[[nn.Module], nn.Module]
) -> None:
    watched = model()
    with TrainingMonitor(tmp_path).attach(watched):
        assert scripted(copied(watched)) == scripted(model())


def doubled(self: nn.Module, x: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (x[0] * 2,)


def test_hooks_of_the_user_are_scripted_and_keep_their_order(tmp_path: Path) -> None:
    watched = model()
    with TrainingMonitor(tmp_path).attach(watched):
        watched.register_forward_pre_hook(doubled)
        before = list(watched._forward_pre_hooks.items())
        made = torch.jit.script(watched)
        assert len(made._forward_pre_hooks) == 1
        assert torch.equal(made(X), model()(2 * X))
        assert list(watched._forward_pre_hooks.items()) == before


def test_a_model_that_cannot_be_scripted_keeps_its_hooks(tmp_path: Path) -> None:
    class Printing(nn.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    watched = Printing(8, 2)
    with TrainingMonitor(tmp_path).attach(watched), warnings.catch_warnings():
        before = list(watched._forward_pre_hooks.items())
        with pytest.raises(Exception, match="variable number of arguments"):
            torch.jit.script(watched)
        assert list(watched._forward_pre_hooks.items()) == before
