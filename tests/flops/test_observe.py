"""An observed training step: its FLOPs are those of what ran, and nothing in the run changes."""

from __future__ import annotations

import gc
import importlib
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from truemfu import Convention, count_flops
from truemfu.flops import Observation, StepObserver, register_formula
from truemfu.flops.observe.observer import OTHER_THREAD

N, K, M = 8, 16, 32
"""Samples, inputs and outputs of the layer that most programs use."""
P = 2 * N * K * M
"""FLOPs of one product of that layer."""


def observed(step: Callable[[], Any], convention: Convention | None = None) -> Observation:
    observer = StepObserver(convention or Convention())
    observer.enter()
    try:
        step()
    finally:
        seen = observer.leave()
    assert stack() == []
    return seen


def stack() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return _get_current_dispatch_mode_stack()


def split(seen: Observation) -> tuple[int, int, int, int]:
    assert seen.problem is None
    assert seen.ready()
    count = seen.count()
    assert seen.problem is None
    assert count.method == "count of observed steps"
    assert not count.uncounted
    assert seen.work().hardware_flops == count.hardware_flops
    return (
        count.forward,
        count.backward,
        count.recompute,
        sum(c.total() for c in seen.without_gradients().values()),
    )


def layer(inputs: int = K, outputs: int = M) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs)


def batch(*, grad: bool = False) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(1), requires_grad=grad)


class Product(torch.autograd.Function):
    """x @ w.T with a context in its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (grad @ w if ctx.needs_input_grad[0] else None), grad.t() @ x


class SetUpProduct(torch.autograd.Function):
    """The same with `setup_context`."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w.t())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


class CheckpointLikeName(Product):
    """Its name contains "Checkpoint", but it recomputes nothing."""


class CastProduct(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x


def plain() -> None:
    layer()(batch()).sum().backward()


def needs_input_gradient() -> None:
    layer()(batch(grad=True)).sum().backward()


def frozen_first_layer() -> None:
    first, second = layer(), layer(M, K)
    first.requires_grad_(False)
    second(first(batch())).sum().backward()


def two_micro_batches() -> None:
    model = layer()
    for _ in range(2):
        model(batch()).sum().backward()


def second_backward_with_retain_graph() -> None:
    loss = layer()(batch()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def backward_with_inputs() -> None:
    x, model = batch(grad=True), layer()
    model(x).sum().backward(inputs=[x])


def output_outside_the_loss() -> None:
    model = layer()
    model(batch())
    model(batch()).sum().backward()


def product_outside_of_modules() -> None:
    w = torch.randn(K, M, requires_grad=True)
    (batch() @ w).sum().backward()


def gradient_penalty() -> None:
    x, model = batch(grad=True), layer()
    loss = model(x).tanh().sum()
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + grad.square().sum()).backward()


def reference_model() -> None:
    model, reference = layer(), layer()
    with torch.no_grad():
        target = reference(batch())
    (model(batch()) - target).square().sum().backward()


def evaluation_in_inference_mode() -> None:
    model = layer()
    with torch.inference_mode():
        model(batch())
    model(batch()).sum().backward()


def products_of_the_optimizer() -> None:
    model = layer()
    model(batch()).sum().backward()
    with torch.no_grad():
        model.weight @ model.weight.grad.t()  # type: ignore[union-attr]


def custom_function() -> None:
    Product.apply(batch(grad=True), layer().weight).sum().backward()


def custom_function_without_gradients() -> None:
    with torch.no_grad():
        Product.apply(batch(), layer().weight)


def custom_function_with_set_up() -> None:
    SetUpProduct.apply(batch(grad=True), layer().weight).sum().backward()


def custom_function_with_set_up_without_gradients() -> None:
    with torch.no_grad():
        y = SetUpProduct.apply(batch(), layer().weight)
    y.clone()


def custom_function_with_set_up_reference_in_a_loss() -> None:
    model = layer()
    with torch.no_grad():
        target = SetUpProduct.apply(batch(), layer().weight)
    (model(batch()) - target).sum().backward()


def custom_function_in_autocast() -> None:
    CastProduct.apply(batch(grad=True), layer().weight).sum().backward()


def function_named_checkpoint() -> None:
    CheckpointLikeName.apply(batch(grad=True), layer().weight).sum().backward()


def nested_function() -> None:
    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return Product.apply(x, w)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            x, w = ctx.saved_tensors
            return grad @ w, grad.t() @ x

    Outer.apply(batch(grad=True), layer().weight).sum().backward()


@pytest.fixture(autouse=True, scope="module")
def _compiler_is_loaded() -> None:
    """The first checkpoint loads torch's compiler, which in torch 2.6 multiplies two small vectors."""
    checkpoint(torch.sin, torch.ones(1), use_reentrant=False)


def checkpointed(*, reentrant: bool) -> Callable[[], None]:
    def step() -> None:
        model = layer()
        first = layer(K, K)
        hidden = first(batch())
        checkpoint(lambda h: model(h).sin(), hidden, use_reentrant=reentrant).sum().backward()

    return step


def reentrant_checkpoint_of_a_function() -> None:
    w = layer().weight
    checkpoint(lambda x: Product.apply(x, w).sin(), batch(grad=True), use_reentrant=True).sum().backward()


def checkpoint_inside_a_checkpoint() -> None:
    model, x = layer(), batch(grad=True)

    def inner(h: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: model(h).sin(), h, use_reentrant=False).sin()  # type: ignore[no-any-return]

    checkpoint(inner, x, use_reentrant=False).sum().backward()


def recomputing_unpack_hook() -> None:
    x, w = batch(grad=True), layer().weight

    def unpack(packed: Any) -> torch.Tensor:
        with torch.enable_grad():
            return (x @ w.t()).detach()

    y = x @ w.t()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: None, unpack):
        z = y.sin()
    z.sum().backward()


def hook_that_multiplies() -> None:
    model = layer()
    model.weight.register_hook(lambda grad: grad @ torch.eye(K))
    model(batch()).sum().backward()


def functorch_grad() -> None:
    model = layer()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    x = batch()
    torch.func.grad(lambda w: torch.func.functional_call(model, w, x).sum())(weights)


def per_sample_gradients() -> None:
    model = layer()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(w: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, w, x[None]).sum()  # type: ignore[no-any-return]

    torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, batch())


def forward_mode() -> None:
    import torch.autograd.forward_ad as forward_ad

    w = layer().weight
    with forward_ad.dual_level():
        x = forward_ad.make_dual(batch(), torch.ones(N, K))
        x @ w.t()


def lbfgs() -> None:
    model = layer()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def scripted() -> None:
    torch.jit.script(layer())(batch()).sum().backward()


def traced() -> None:
    torch.jit.trace(layer(), (batch(),))(batch()).sum().backward()


def parameter_subclass() -> None:
    class Marked(nn.Parameter):
        pass

    model = layer()
    model.weight = Marked(model.weight.detach())
    model(batch()).sum().backward()


def fake_tensors_inside() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        nn.Linear(K, M)(mode.from_tensor(batch())).sum().backward()
    plain()


def meta_tensors_inside() -> None:
    nn.Linear(K, M, device="meta")(torch.empty(N, K, device="meta")).sum().backward()
    plain()


def complex_product() -> None:
    w = torch.randn(K, M, dtype=torch.complex64, requires_grad=True)
    (batch().to(torch.complex64) @ w).abs().sum().backward()


def sparse_coo() -> None:
    w = torch.randn(K, M, requires_grad=True)
    torch.sparse.mm(torch.eye(N, K).to_sparse(), w).sum().backward()


def sparse_csr() -> None:
    w = torch.randn(K, M, requires_grad=True)
    (torch.eye(N, K).to_sparse_csr() @ w).sum().backward()


def sparse_addmm() -> None:
    w = torch.randn(K, M, requires_grad=True)
    torch.sparse.addmm(torch.zeros(N, M), torch.eye(N, K).to_sparse(), w).sum().backward()


def sampled_addmm() -> None:
    a, b = torch.randn(N, K, requires_grad=True), torch.randn(K, N)
    torch.sparse.sampled_addmm(torch.eye(N).to_sparse_csr(), a, b).to_dense().sum().backward()


S = 2 * N * M
"""A sparse product of N stored elements with M columns."""

PROGRAMS: list[tuple[Callable[[], None], tuple[int, int, int, int]]] = [
    (plain, (P, P, 0, 0)),
    (needs_input_gradient, (P, 2 * P, 0, 0)),
    (frozen_first_layer, (2 * P, P, 0, 0)),
    (two_micro_batches, (2 * P, 2 * P, 0, 0)),
    (second_backward_with_retain_graph, (P, 2 * P, 0, 0)),
    (backward_with_inputs, (P, P, 0, 0)),
    (output_outside_the_loss, (2 * P, P, 0, 0)),
    (product_outside_of_modules, (P, P, 0, 0)),
    (gradient_penalty, (P, 5 * P, 0, 0)),
    (reference_model, (P, P, 0, P)),
    (evaluation_in_inference_mode, (P, P, 0, P)),
    (products_of_the_optimizer, (P, P, 0, 2 * M * K * M)),
    (custom_function, (P, 2 * P, 0, 0)),
    (custom_function_without_gradients, (0, 0, 0, P)),
    (custom_function_with_set_up, (P, 2 * P, 0, 0)),
    (custom_function_with_set_up_without_gradients, (0, 0, 0, P)),
    (custom_function_with_set_up_reference_in_a_loss, (P, P, 0, P)),
    (custom_function_in_autocast, (P, 2 * P, 0, 0)),
    (function_named_checkpoint, (P, 2 * P, 0, 0)),
    (nested_function, (P, 2 * P, 0, 0)),
    (checkpointed(reentrant=True), (P + P // 2, 2 * P + P // 2, P, 0)),
    (checkpointed(reentrant=False), (P + P // 2, 2 * P + P // 2, P, 0)),
    (reentrant_checkpoint_of_a_function, (P, 2 * P, P, 0)),
    (checkpoint_inside_a_checkpoint, (P, 2 * P, 2 * P, 0)),
    (recomputing_unpack_hook, (P, 2 * P, P, 0)),
    (hook_that_multiplies, (P, P + 2 * M * K * K, 0, 0)),
    (functorch_grad, (P, P, 0, 0)),
    (per_sample_gradients, (P, P, 0, 0)),
    (forward_mode, (3 * P, 0, 0, 0)),  # torch also multiplies by the weight's zero tangent
    (scripted, (P, P, 0, 0)),
    (parameter_subclass, (P, P, 0, 0)),
    (fake_tensors_inside, (P, P, 0, 0)),
    (meta_tensors_inside, (P, P, 0, 0)),
    (complex_product, (4 * P, 4 * P, 0, 0)),
    (sparse_coo, (S, S, 0, 0)),
    (sparse_csr, (S, S, 0, 0)),
    (sparse_addmm, (S, S, 0, 0)),
    (sampled_addmm, (2 * N * K, 2 * N * K, 0, 0)),
]


def name_of(value: Any) -> str:
    return getattr(value, "__qualname__", "").replace(".<locals>.step", "") if callable(value) else ""


@pytest.mark.parametrize(("step", "expected"), PROGRAMS, ids=name_of)
def test_a_step_counts_what_ran(step: Callable[[], None], expected: tuple[int, int, int, int]) -> None:
    assert split(observed(step)) == expected


def test_lbfgs_counts_each_evaluation_of_its_closure() -> None:
    seen = observed(lbfgs)
    forward, backward, recompute, apart = split(seen)
    assert (forward, backward, recompute) == (P, P, 0)
    assert apart > 0  # dot products of the optimizer


class Eager(nn.Module):
    """Attention in plain operators, masked by `fill`, `add` or `where`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("causal", torch.ones(6, 6).tril().bool())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / 8**0.5
        length = x.shape[1]
        if self.how == "fill":
            scores = scores.masked_fill(self.causal[:length, :length] == 0, float("-inf"))
        elif self.how == "fill with a tensor":
            scores = scores.masked_fill(~self.causal[:length, :length], torch.tensor(-1e9))
        elif self.how == "where":
            scores = torch.where(self.causal[:length, :length], scores, torch.tensor(-1e9))
        elif self.how == "add":
            scores = scores + (~self.causal[:length, :length]).float() * -1e9
        elif self.how == "add the size of the scores":
            mask = ((~self.causal[:length, :length]).float() * -1e9).repeat(x.shape[0], 2, 1, 1)
            scores = scores + mask
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2)) + x  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])  # type: ignore[no-any-return]


class Sdpa(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, **self.options)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "eager, filled": (lambda: Eager("fill"), (3, 6, 16)),
    "eager, filled with a tensor": (lambda: Eager("fill with a tensor"), (3, 6, 16)),
    "eager, where": (lambda: Eager("where"), (3, 6, 16)),
    "eager, added": (lambda: Eager("add"), (3, 6, 16)),
    "eager, added at full size": (lambda: Eager("add the size of the scores"), (3, 6, 16)),
    "eager, no mask": (lambda: Eager("none"), (3, 6, 16)),
    "SDPA, causal": (lambda: Sdpa(is_causal=True), (3, 6, 16)),
    "SDPA, mask": (lambda: Sdpa(attn_mask=torch.ones(6, 6).tril().bool()), (3, 6, 16)),
    "SDPA, additive mask": (lambda: Sdpa(attn_mask=torch.ones(6, 6).triu(1) * -1e9), (3, 6, 16)),
    "recurrent": (Recurrent, (3, 6, 16)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 6, 16)),
    "decoder layer": (lambda: Twice(nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)), (3, 6, 16)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2), nn.Conv2d(4, 4, 3, groups=2)
        ),
        (2, 3, 15, 17),
    ),
    "bilinear": (lambda: Twice(nn.Bilinear(16, 16, 8)), (3, 16)),
}


class Twice(nn.Module):
    """A module of two inputs, given the same one twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", MODELS)
def test_an_observed_model_has_the_flops_of_its_count(name: str, attention: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    convention = Convention(attention=attention)  # type: ignore[arg-type]
    counted = count_flops(model, (x,), convention=convention)
    seen = observed(lambda: model(x).sum().backward(), convention)
    assert split(seen) == (counted.forward, counted.backward, counted.recompute, 0)
    assert seen.count().by_operator == counted.by_operator
    assert seen.count().by_dtype == counted.by_dtype


def test_values_are_those_at_the_time_of_the_call() -> None:
    model = Sdpa(attn_mask=torch.ones(6, 6).tril().bool())
    x = torch.randn(3, 6, 16)
    causal = Convention(attention="causal")
    expected = count_flops(model, (x,), convention=causal)

    def step() -> None:
        loss = model(x).sum()
        model.options["attn_mask"].data.fill_(True)  # autograd does not see this write
        loss.backward()

    seen = observed(step, causal)
    assert seen.count().forward == expected.forward


def test_a_mask_that_is_gone_before_the_softmax_makes_the_flops_unknown() -> None:
    q = torch.randn(2, 5, 8, requires_grad=True)

    def step() -> None:
        scores = q @ q.transpose(-1, -2) + torch.zeros(2, 5, 5)
        (scores.softmax(-1) @ q).sum().backward()

    assert observed(step).problem is None
    seen = observed(step, Convention(attention="causal"))
    seen.count()
    assert seen.problem == "an attention mask could not be read"


def test_masks_too_large_to_copy_make_the_flops_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    from truemfu.flops.observe import copies

    monkeypatch.setattr(copies, "LIMIT_BYTES", 35)
    model = Sdpa(attn_mask=torch.ones(6, 6).tril().bool())
    seen = observed(lambda: model(torch.randn(3, 6, 16)).sum(), Convention(attention="causal"))
    assert seen.problem is not None
    assert "larger than" in seen.problem


def test_a_training_pass_without_gradients_inside_is_forward() -> None:
    model, x = layer(), batch()

    def step(observer: StepObserver, *, is_training: bool) -> None:
        observer.pass_begins(is_training=is_training)
        with torch.no_grad():
            model(x)
        observer.pass_ends()
        with torch.no_grad():
            model(x)

    for is_training, expected in ((True, (P, 0, 0, P)), (False, (0, 0, 0, 2 * P))):
        observer = StepObserver(Convention())
        observer.enter()
        step(observer, is_training=is_training)
        assert split(observer.leave()) == expected


def test_work_before_the_first_micro_batch_is_told_apart() -> None:
    observer = StepObserver(Convention())
    observer.enter()
    plain()
    observer.batch_begins()
    plain()
    observer.batch_begins()
    seen = observer.leave()
    assert seen.before_first_batch == 2 * P
    assert seen.count().model_flops == 4 * P


def test_nothing_inside_a_pause_is_seen() -> None:
    observer = StepObserver(Convention())
    observer.enter()
    observer.suspend()
    plain()
    observer.resume()
    plain()
    assert split(observer.leave()) == (P, P, 0, 0)


@pytest.mark.parametrize("when", ["earlier", "other thread"])
def test_a_forward_pass_that_was_not_seen_makes_the_flops_unknown(when: str) -> None:
    model, x, losses = nn.Sequential(layer(), nn.ReLU(), layer(M, K)), batch(), []
    if when == "earlier":
        losses.append(model(x).sum())

    def step() -> None:
        if when == "other thread":
            thread = threading.Thread(target=lambda: losses.append(model(x).sum()))
            thread.start()
            thread.join()
        losses[0].backward()

    seen = observed(step)
    assert seen.unseen_forward
    assert seen.problem is not None
    assert "another thread" in seen.problem


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


EVENTS = ("enter", "leave", "a+", "a-", "b+", "b-")


def is_possible(order: Sequence[str]) -> bool:
    """Modes are a stack: of two that are active together, the one entered later is left earlier."""
    at = {event: order.index(event) for event in EVENTS}
    if not (
        at["enter"] < at["leave"] and at["a+"] < at["a-"] and at["b+"] < at["b-"] and at["a+"] < at["b+"]
    ):
        return False
    return at["a-"] < at["b+"] or at["b-"] < at["a-"]


ORDERS = [order for order in itertools.permutations(EVENTS) if is_possible(order)]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_modes_of_the_program_come_and_go_in_any_order(order: tuple[str, ...]) -> None:
    model, x = layer(), batch()

    def run(*, observe: bool) -> tuple[list[str], list[str], list[torch.Tensor]]:
        observer, modes = StepObserver(Convention()), {"a": Seen(), "b": Seen()}
        losses, seen = [], None
        for event in order:
            if event == "enter":
                observer.enter() if observe else None
            elif event == "leave":
                seen = observer.leave() if observe else None
            elif event[1] == "+":
                modes[event[0]].__enter__()
            else:
                modes[event[0]].__exit__(None, None, None)
            losses.append(model(x).sum())
        assert stack() == []
        if seen is not None:
            assert split(seen)[0] == P * (order.index("leave") - order.index("enter"))
        return modes["a"].operators, modes["b"].operators, losses

    assert run(observe=True) == run(observe=False)


def test_a_mode_that_is_left_before_the_observer_does_not_take_it_off() -> None:
    mode, observer = Seen(), StepObserver(Convention())
    mode.__enter__()
    observer.enter()
    mode.__exit__(None, None, None)
    plain()
    assert split(observer.leave()) == (P, P, 0, 0)
    assert stack() == []


def test_an_exception_of_the_program_passes_through() -> None:
    observer = StepObserver(Convention())
    observer.enter()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        layer()(torch.randn(3, 3))
    plain()
    assert split(observer.leave()) == (P, P, 0, 0)


def test_an_exception_in_a_hook_of_the_backward_pass_passes_through() -> None:
    def stop(grad: torch.Tensor) -> None:
        raise KeyError("stop")

    def step() -> None:
        x = batch(grad=True)
        x.register_hook(stop)
        with pytest.raises(KeyError, match="stop"):
            layer()(x).sum().backward()

    assert split(observed(step)) == (P, 2 * P, 0, 0)


def test_an_exception_while_counting_makes_the_flops_unknown_and_nothing_else() -> None:
    @register_formula("observed::failing")
    def failing(*args: Any, out: Any) -> int:
        raise ZeroDivisionError("by zero")

    library = torch.library.Library("observed", "FRAGMENT")
    library.define("failing(Tensor x, Tensor y) -> Tensor")
    library.impl("failing", lambda x, y: x @ y, "CPU")
    results = []
    seen = observed(lambda: results.append(torch.ops.observed.failing(torch.eye(2), torch.eye(2))))
    assert torch.equal(results[0], torch.eye(2))
    assert seen.problem is not None
    assert "by zero" in seen.problem


def test_an_operator_without_a_formula_is_named() -> None:
    library = torch.library.Library("observed", "FRAGMENT")
    library.define("fused(Tensor x, Tensor y) -> Tensor")
    library.impl("fused", lambda x, y: x @ y, "CPU")
    seen = observed(lambda: torch.ops.observed.fused(torch.ones(2, 3), torch.ones(3, 4)))
    assert seen.count().uncounted == {"observed::fused": 1}


def test_an_observer_left_on_another_thread_is_taken_off_by_the_next_one() -> None:
    observer = StepObserver(Convention())
    observer.enter()
    plain()
    seen: list[Observation] = []
    thread = threading.Thread(target=lambda: seen.append(observer.leave()))
    thread.start()
    thread.join()
    plain()
    assert seen[0].problem == OTHER_THREAD
    assert len(stack()) == 1
    assert split(observed(plain)) == (P, P, 0, 0)


def test_an_observer_left_inside_a_backward_pass_counts_nothing_more() -> None:
    observer, seen = StepObserver(Convention()), []
    model, x = nn.Sequential(layer(), layer(M, K)), batch()
    observer.enter()
    hidden = model[0](x)
    hidden.register_hook(lambda grad: seen.append(observer.leave()))
    model[1](hidden).sum().backward()
    assert seen[0].count().backward == P + P  # both gradients of the second layer
    assert split(observed(plain)) == (P, P, 0, 0)


def test_functions_of_the_program_see_the_same_calls() -> None:
    class Calls(TorchFunctionMode):
        def __init__(self) -> None:
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    def run() -> list[str]:
        with Calls() as calls:
            w = layer().weight
            Product.apply(batch(grad=True), w).sum().backward()
        return calls.names

    alone, with_us = run(), []
    observed(lambda: with_us.extend(run()))
    assert with_us == alone


def train(model: nn.Module, x: torch.Tensor, *, observe: bool) -> list[Any]:
    """Losses, weights, gradients, optimizer and random states of three steps, the second observed."""
    torch.manual_seed(3)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []

    def step() -> None:
        optimizer.zero_grad()
        loss = F.dropout(model(x), 0.2).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())

    step()
    if observe:
        assert observed(step).problem is None
    else:
        step()
    step()
    tensors = [t for p in model.parameters() for t in (p, p.grad)]
    return [*losses, *tensors, torch.get_rng_state()]


@pytest.mark.parametrize("name", MODELS)
def test_losses_weights_gradients_and_random_states_are_identical(name: str) -> None:
    build, shape = MODELS[name]
    results = []
    for observe in (True, False):
        torch.manual_seed(0)
        results.append(train(build(), torch.randn(shape), observe=observe))
    assert all(map(torch.equal, *results))


class Lifetimes(TorchDispatchMode):
    """Records, after each operator, which earlier results still exist."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[torch.UntypedStorage]] = []
        self.alive: list[list[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive.append([i for i, result in enumerate(self.results) if result() is not None])
        if isinstance(out, torch.Tensor):
            self.results.append(weakref.ref(out.untyped_storage()))
        return out


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", [*MODELS, "custom Function", "reference"])
def test_every_tensor_dies_at_the_same_operator(name: str, attention: str) -> None:
    gc.disable()
    try:
        alive = []
        for observe in (True, False):
            torch.manual_seed(0)
            if name in MODELS:
                model, x = MODELS[name][0](), torch.randn(MODELS[name][1])
                step = lambda model=model, x=x: model(x).sin().sum().backward()  # noqa: E731
            else:
                step = custom_function if name == "custom Function" else reference_model
            with Lifetimes() as lifetimes:
                if observe:
                    observer = StepObserver(Convention(attention=attention))  # type: ignore[arg-type]
                    observer.enter()
                step()
                if observe:
                    assert observer.leave().problem is None
            alive.append(lifetimes.alive)
        assert alive[0] == alive[1]
    finally:
        gc.enable()


@pytest.mark.parametrize("compiler", ["not loaded", "loaded"])
def test_heads_that_torch_padded_have_their_own_size(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler == "loaded":
        importlib.import_module("torch._dynamo")
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    unit = torch.jit.CompilationUnit("""
def attention(x):
    padded = torch.constant_pad_nd(x, [0, 3])
    return torch._scaled_dot_product_flash_attention_for_cpu(padded, padded, padded)[0]
""")
    attention = unit.attention
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    forward = 2 * 2 * (2 * 3 * 4 * 4) * 5
    seen = observed(lambda: attention(x).sum().backward())
    assert seen.count().forward == forward
    assert seen.count().backward == 2 * forward

    def padded_by_the_program() -> None:
        y = F.pad(x, [0, 3])
        F.scaled_dot_product_attention(y, y, y).sum().backward()

    assert observed(padded_by_the_program).count().forward == forward // 5 * 8


@pytest.fixture
def fake_ranks() -> Iterator[Any]:
    """A mesh of two ranks whose collectives do nothing."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def test_a_rank_of_tensor_parallel_counts_its_own_share(fake_ranks: Any) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(nn.Sequential(layer(), nn.ReLU(), layer(M, K)), fake_ranks, plan)
    assert split(observed(lambda: model(batch()).sum().backward())) == (P, P + P // 2, 0, 0)


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch cannot train with FSDP on a CPU"
)
def test_a_rank_of_fsdp_counts_its_whole_model(fake_ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(layer(), nn.ReLU(), layer(M, K))
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=fake_ranks)
    assert split(observed(lambda: model(batch()).sum().backward())) == (2 * P, 3 * P, 0, 0)


def test_attention_on_jagged_tensors_counts_each_sample() -> None:
    layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
    samples = torch.nested.nested_tensor([torch.randn(n, 16) for n in (3, 5)], layout=torch.jagged)

    def step() -> None:
        q, k, v = (layer(samples).unflatten(-1, (2, 8)).transpose(1, 2) for layer in layers)
        F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values().sum().backward()

    linear, attention = 3 * 2 * 8 * 16 * 16, 2 * 2 * (3 * 3 + 5 * 5) * 16
    assert split(observed(step)) == (linear + attention, linear + 2 * attention, 0, 0)
