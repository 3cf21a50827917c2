"""An observed training step: its FLOPs are those of what ran, and nothing in the run changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from truemfu import Convention, count_flops
from truemfu.flops import Observation, StepObserver, register_formula

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
    assert count.method == "count of the step that ran"
    assert not count.uncounted
    assert seen.work().hardware_flops == count.hardware_flops
    return count.forward, count.backward, count.recompute, seen.without_gradients()


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


def checkpointed(*, reentrant: bool) -> Callable[[], None]:
    def step() -> None:
        model = layer()
        first = layer(K, K)
        hidden = first(batch())
        checkpoint(lambda h: model(h).sin(), hidden, use_reentrant=reentrant).sum().backward()

    return step


def reentrant_checkpoint_of_a_function() -> None:
    w = layer().weight
    checkpoint(
        lambda x: Product.apply(x, w).sin(), batch(grad=True), use_reentrant=True
    ).sum().backward()


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
