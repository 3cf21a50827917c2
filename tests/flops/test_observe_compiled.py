"""Compiled code in observed steps: the same code runs, and the same FLOPs are counted as in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

from truemfu import Convention
from truemfu.flops.flop_count import FlopCount
from truemfu.flops.observe.compiled import RECOMPILES
from truemfu.flops.observe.observation import OTHER_BACKEND
from truemfu.flops.observe.observer import StepObserver
from truemfu.flops.observe.region_graph import RegionError, read_graph
from truemfu.flops.operators.matrix_work import matters
from truemfu.torch_private import compiler

needs_guards = pytest.mark.skipif(
    not compiler.guards_ignore_modes(), reason="this torch compiles code again under a dispatch mode"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def observed(step: Callable[[], Any]) -> tuple[FlopCount, str | None]:
    observer = StepObserver(Convention())
    observer.enter()
    try:
        step()
    finally:
        observation = observer.leave()
    return observation.count(), observation.problem


def sizes(count: FlopCount) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recompute


class Net(nn.Module):
    """Two layers that may be checkpointed, and a head with one output, whose backward inductor rewrites."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 1)
        self.checkpointed = checkpointed

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            y = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        else:
            y = self.block(x)
        return self.head(y).square().mean()


def train(model: nn.Module, call: Callable[..., Any], observe: frozenset[int]) -> tuple[list[float], Any]:
    """Five steps, one of them of another size; the losses and what the compiler did."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for number in range(5):
        x = torch.arange(8.0 * (3 + (number == 3))).view(-1, 8) / 20

        def step(x: torch.Tensor = x) -> None:
            loss = call(x)
            loss.backward()
            losses.append(loss.item())

        if number in observe:
            observed(step)
        else:
            step()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {
        name: dict(counters[name]) for name in ("stats", "frames", "unimplemented", "graph_break")
    }


@needs_guards
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_observed_steps_run_the_same_compiled_code(backend: str) -> None:
    torch.manual_seed(0)
    results = []
    first = Net()
    for observe in (frozenset[int](), frozenset((0, 2, 3, 4))):
        torch._dynamo.reset()
        counters.clear()
        model = copy.deepcopy(first)
        results.append((train(model, torch.compile(model, backend=backend), observe), model.state_dict()))
    (plain, weights), (watched, watched_weights) = results
    assert watched == plain
    assert all(torch.equal(weights[name], watched_weights[name]) for name in weights)


@needs_guards
def test_the_code_of_the_observer_is_not_compiled_in_a_compiled_step() -> None:
    torch.manual_seed(0)
    seen = []
    for observe in (frozenset[int](), frozenset((1, 2))):
        torch._dynamo.reset()
        counters.clear()
        model = nn.Linear(8, 4)

        def step(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward(retain_graph=True)
            return loss

        seen.append(train(model, torch.compile(step, backend="eager"), observe)[1])
    assert seen[0] == seen[1]


@needs_guards
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_counts_as_much_as_eager_code(dynamic: bool) -> None:
    model, x = Net(), torch.zeros(5, 8, requires_grad=True)
    expected, _ = observed(lambda: model(x).backward())
    compiled = torch.compile(model, dynamic=dynamic)
    for _ in range(2):  # the first of them compiles
        count, problem = observed(lambda: compiled(x).backward())
        assert problem is None
        assert sizes(count) == sizes(expected)


@needs_guards
def test_what_compiled_code_computes_again_is_recomputation() -> None:
    model, x = Net(checkpointed=True), torch.zeros(5, 8)
    for parameter in (*model.b.parameters(), *model.head.parameters()):
        parameter.requires_grad_(False)
    expected, _ = observed(lambda: model(x).backward())
    compiled = torch.compile(model)
    compiled(x).backward()
    count, problem = observed(lambda: compiled(x).backward())
    assert problem is None
    assert (count.forward, count.backward) == (expected.forward, expected.backward)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        compiled(x).backward()
    ran = sum(event.name in ("aten::mm", "aten::addmm") for event in recorded.events())
    again = ran - 5  # all three layers, then the gradients of an input and a weight; no call for the head's
    assert again > 0
    assert count.recompute == again * 2 * 5 * 8 * 16


@needs_guards
def test_a_backward_pass_of_another_backend_is_a_reason_for_unknown_flops() -> None:
    model, x = Net(), torch.zeros(5, 8)
    compiled = torch.compile(model, backend="aot_eager")
    assert observed(lambda: compiled(x).backward())[1] == OTHER_BACKEND


def test_where_guards_fail_under_a_mode_no_compiled_step_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "guards_ignore_modes", lambda: False)
    model, x = nn.Linear(8, 4), torch.zeros(5, 8)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.compile(lambda y: y + 1, backend="eager")(x)
    before = dict(counters["stats"])
    assert observed(lambda: compiled(x))[1] == RECOMPILES
    assert before["unique_graphs"] == 1


def products(text: str, inputs: list[Any], *, is_backward: bool = False) -> list[Any]:
    return list(read_graph(text).products(inputs, is_backward=is_backward, matters=matters))


def graph(arguments: str, *lines: str) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return (
        f"class <lambda>(torch.nn.Module):\n    def forward(self, {arguments}):\n{body}\n        return ()\n"
    )


def test_sizes_follow_from_the_inputs() -> None:
    text = graph(
        'n: "Sym(s0)", x: "bf16[s0, 8][8, 1]cuda:0", w: "bf16[8, 4][4, 1]cuda:0"',
        'y: "bf16[(s0//2), 8][8, 1]cuda:0" = torch.ops.aten.slice.Tensor(x, 0, 0, 2)',
        'mm: "bf16[(s0//2), 4][4, 1]cuda:0" = torch.ops.aten.mm.default(y, w);  y = w = None',
    )
    (found,) = products(text, [7, (7, 8), (8, 4)])
    assert (found.args[0].shape, found.args[0].dtype, found.device) == ((3, 8), torch.bfloat16, "cuda:0")


def test_a_size_that_depends_on_values_is_a_reason() -> None:
    text = graph(
        'x: "f32[4, 8][8, 1]cpu", w: "f32[8, 4][4, 1]cpu"',
        'y: "f32[u0, 8][8, 1]cpu" = torch.ops.aten.index.Tensor(x, [x])',
        'mm: "f32[u0, 4][4, 1]cpu" = torch.ops.aten.mm.default(y, w)',
    )
    with pytest.raises(RegionError, match=r"not derived from its inputs \(u0\)"):
        products(text, [(4, 8), (8, 4)])


def test_padding_by_the_compiler_is_executed_but_not_needed() -> None:
    text = graph(
        'x: "bf16[16, 8][8, 1]cuda:0", w: "bf16[8, 5][5, 1]cuda:0"',
        'p: "bf16[8, 8][8, 1]cuda:0" = torch.ops.aten.constant_pad_nd.default(w, [0, 3, 0, 0])',
        'mm: "bf16[16, 8][8, 1]cuda:0" = torch.ops.aten.mm.default(x, p)',
        'cut: "bf16[16, 5][8, 1]cuda:0" = torch.ops.aten.slice.Tensor(mm, 1, 0, -3)',
    )
    (found,) = products(text, [(16, 8), (8, 5)])
    assert found.args[1].shape == (8, 5)
    assert found.executed is not None
    assert found.executed[1].shape == (8, 8)


def test_a_product_written_as_a_sum_of_products_is_found() -> None:
    text = graph(
        'x: "f32[6, 8][8, 1]cuda:0", w: "f32[8, 1][1, 1]cuda:0"',
        'a: "f32[6, 8, 1][8, 1, 1]cuda:0" = torch.ops.aten.unsqueeze.default(x, 2)',
        'b: "f32[1, 8, 1][8, 1, 1]cuda:0" = torch.ops.aten.unsqueeze.default(w, 0)',
        'm: "f32[6, 8, 1][8, 1, 1]cuda:0" = torch.ops.aten.mul.Tensor(a, b)',
        's: "f32[6, 1][1, 1]cuda:0" = torch.ops.aten.sum.dim_IntList(m, [1])',
    )
    (found,) = products(text, [(6, 8), (8, 1)])
    assert [tuple(t.shape) for t in found.args] == [(6, 8), (8, 1)]


def test_an_operator_run_with_a_saved_random_state_is_counted_as_itself() -> None:
    text = graph(
        'x: "f32[6, 8][8, 1]cpu", w: "f32[8, 4][4, 1]cpu"',
        "r = torch.ops.higher_order.run_and_save_rng_state(torch.ops.aten.mm.default, x, w)",
    )
    (found,) = products(text, [(6, 8), (8, 4)])
    assert (found.name, found.args[1].shape) == ("aten::mm", (8, 4))


def test_text_that_is_no_graph_is_a_reason() -> None:
    with pytest.raises(RegionError, match="cannot be read"):
        read_graph("no graph")
