"""Formulas that users register: for operators of their own, and for modules no dispatch mode can see into."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from truemfu import (
    Convention,
    TruemfuWarning,
    UsageError,
    count_flops,
    count_step,
    errors,
    register_formula,
    register_module,
)
from truemfu.flops.attention.kernels import AttentionWork
from truemfu.flops.attention.pairs import Band
from truemfu.flops.registry import MODULE_FORMULAS, OPERATOR_FORMULAS, module_formula

ROWS, IN, OUT = 3, 4, 6
ONE = 2 * ROWS * IN * OUT
BEFORE = 2 * ROWS * IN * IN


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    operators, modules, said = dict(OPERATOR_FORMULAS), dict(MODULE_FORMULAS), set(errors._already_warned)
    errors._already_warned.clear()
    yield
    for kept, now in ((operators, OPERATOR_FORMULAS), (modules, MODULE_FORMULAS)):
        now.clear()
        now.update(kept)
    errors._already_warned.clear()
    errors._already_warned.update(said)


# Operators live as long as the process: each is defined once, here.


@torch.library.custom_op("truemfu_tests::linear", mutates_args=())
def fused_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.to(x.dtype).t()


@fused_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("truemfu_tests::linear_backward", mutates_args=())
def fused_linear_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad @ weight, grad.t() @ x


@fused_linear_backward.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


fused_linear.register_autograd(
    lambda ctx, grad: fused_linear_backward(grad, *ctx.saved_tensors), setup_context=_keep
)


@torch.library.custom_op("truemfu_tests::without_a_fake", mutates_args=())
def without_a_fake(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


@torch.library.custom_op("truemfu_tests::gate", mutates_args=())
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y.sigmoid()


@gate.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("truemfu_tests::attention", mutates_args=())
def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@fused_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


class Calls(nn.Module):
    """A plain layer, then an operator with a weight."""

    def __init__(self, operator: Callable[..., torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self.before = nn.Linear(weight.shape[1], weight.shape[1], bias=False)
        self.operator = operator
        if weight.is_floating_point():
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(self.before(x), self.weight)


# -- operators without a formula ---------------------------------------------------------------------------


def test_an_operator_without_a_formula_is_named_with_its_calls_and_in_one_warning() -> None:
    model, batch = Calls(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),)
    with pytest.warns(TruemfuWarning, match=r"truemfu_tests::linear \(1×\)") as caught:
        count = count_flops(model, batch)
    ours = [w for w in caught if issubclass(w.category, TruemfuWarning)]
    assert len(ours) == 1
    assert "truemfu_tests::linear_backward (1×)" in str(ours[0].message)
    assert "register_formula" in str(ours[0].message)
    assert count.uncounted == {"truemfu_tests::linear": 1, "truemfu_tests::linear_backward": 1}
    assert (count.forward, count.backward) == (BEFORE, BEFORE)


def test_the_warning_is_said_once_and_the_count_still_names_the_operator() -> None:
    model, batch = Calls(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),)
    with pytest.warns(TruemfuWarning):
        count_flops(model, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert count_flops(model, batch).uncounted["truemfu_tests::linear"] == 1


def test_calls_are_counted() -> None:
    class Twice(Calls):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.operator(x, self.weight) + self.operator(x, self.weight)

    with pytest.warns(TruemfuWarning, match="2×"):
        count = count_flops(
            Twice(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),), backward=False
        )
    assert count.uncounted == {"truemfu_tests::linear": 2}


def test_an_executed_step_names_the_operator_too() -> None:
    model, x = Calls(fused_linear, torch.randn(OUT, IN)), torch.randn(ROWS, IN)
    with pytest.warns(TruemfuWarning, match="truemfu_tests::linear"):
        count = count_step(lambda: model(x).sum().backward())
    assert count.uncounted == {"truemfu_tests::linear": 1, "truemfu_tests::linear_backward": 1}


def test_an_operator_without_a_fake_implementation_is_named_as_well() -> None:
    model = Calls(without_a_fake, torch.randn(OUT, IN))
    with pytest.warns(TruemfuWarning, match="truemfu_tests::without_a_fake"):
        count = count_flops(model, (torch.randn(ROWS, IN),), backward=False)
    assert count.uncounted == {"truemfu_tests::without_a_fake": 1}
    assert count.forward == BEFORE


def test_a_kernel_on_quantised_weights_is_named() -> None:
    model = Calls(fused_linear, torch.randint(-9, 9, (OUT, IN), dtype=torch.int8))
    with pytest.warns(TruemfuWarning, match="truemfu_tests::linear"):
        count = count_flops(model, (torch.randn(ROWS, IN),), backward=False)
    assert count.uncounted == {"truemfu_tests::linear": 1}


def test_an_attention_kernel_whose_tensors_all_have_one_shape_is_named() -> None:
    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fused_attention(x, x + 1, x + 2)

    with pytest.warns(TruemfuWarning, match="truemfu_tests::attention"):
        count = count_flops(Attends(), (torch.randn(2, ROWS, 5, IN),), backward=False)
    assert count.uncounted == {"truemfu_tests::attention": 1}


def test_a_formula_may_describe_an_attention_kernel() -> None:
    """The convention, not the formula, then decides which pairs count."""

    @register_formula("truemfu_tests::attention")
    def attention(q: Any, k: Any, v: Any, *, out: Any) -> AttentionWork:
        samples, heads, length, head = q.shape
        return AttentionWork(
            samples=samples,
            heads=heads,
            q_len=length,
            k_len=k.shape[2],
            qk_dim=head,
            v_dim=v.shape[3],
            backward=False,
            band=Band(ahead=0),
        )

    class Attends(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fused_attention(x, x + 1, x + 2)

    batch = (torch.randn(2, ROWS, 5, IN),)
    full = count_flops(Attends(), batch, backward=False)
    causal = count_flops(Attends(), batch, backward=False, convention=Convention(attention="causal"))
    assert full.forward == 4 * 2 * ROWS * (5 * 5) * IN
    assert causal.forward == 4 * 2 * ROWS * (5 * 6 // 2) * IN


def test_an_elementwise_operator_is_not_suspected() -> None:
    """All tensors of one shape: taken for elementwise work."""
    count = count_flops(Calls(gate, torch.randn(IN, IN)), (torch.randn(IN, IN),), backward=False)
    assert count.uncounted == {}


# -- operators with one ------------------------------------------------------------------------------------


def test_a_registered_formula_is_counted_forward_and_backward() -> None:
    @register_formula("truemfu_tests::linear")
    def linear(x: Any, weight: Any, *, out: Any) -> int:
        assert out.shape == (x.shape[0], weight.shape[0])
        return 2 * x.numel() * weight.shape[0]

    @register_formula("truemfu_tests::linear_backward")
    def linear_backward(grad: Any, x: Any, weight: Any, *, out: Any) -> int:
        assert [o.shape for o in out] == [x.shape, weight.shape]
        return 2 * (2 * x.numel() * weight.shape[0])

    count = count_flops(Calls(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),))
    assert count.uncounted == {}
    assert (count.forward, count.backward, count.recompute) == (BEFORE + ONE, BEFORE + 2 * ONE, 0)
    assert count.by_operator["truemfu_tests.linear"] == ONE
    assert count.by_operator["truemfu_tests.linear_backward"] == 2 * ONE
    assert count.by_module == {"": 2 * BEFORE + 3 * ONE, "before": 2 * BEFORE}
    assert count.by_dtype == {"fp32": count.model_flops}


def test_a_formula_of_zero_says_there_is_no_matrix_work() -> None:
    register_formula("truemfu_tests::linear")(lambda *args, out: 0)
    count = count_flops(Calls(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),), backward=False)
    assert count.uncounted == {}
    assert count.forward == BEFORE


def test_one_formula_for_several_operators_and_the_last_one_wins() -> None:
    register_formula("truemfu_tests::linear", "truemfu_tests::without_a_fake")(lambda *args, out: 1)
    register_formula("truemfu_tests::linear")(lambda *args, out: 10)
    batch, weight = (torch.randn(ROWS, IN),), torch.randn(OUT, IN)
    assert count_flops(Calls(fused_linear, weight), batch, backward=False).forward == BEFORE + 10
    assert count_flops(Calls(without_a_fake, weight), batch, backward=False).forward == BEFORE + 1


def test_a_formula_for_one_of_torchs_own_operators_replaces_ours() -> None:
    register_formula("aten::mm")(lambda *args, out, **kwargs: 7)
    assert count_flops(nn.Linear(IN, OUT, bias=False), (torch.randn(ROWS, IN),), backward=False).forward == 7


def test_the_decorator_returns_the_function() -> None:
    def formula(*args: Any, out: Any) -> int:
        return 1

    assert register_formula("truemfu_tests::linear")(formula) is formula
    assert register_module(Opaque)(formula) is formula


# -- modules no dispatch mode sees -------------------------------------------------------------------------


class NumpyProduct(torch.autograd.Function):
    """A kernel outside torch: no operator is dispatched for its products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        g = grad.numpy()
        return torch.from_numpy(g @ weight.detach().numpy()), torch.from_numpy(g.T @ x.detach().numpy())


class Opaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(OUT, IN))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return NumpyProduct.apply(x, self.weight) * scale


class Inherits(Opaque):
    pass


class Overrides(Opaque):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return F.linear(F.linear(x, self.weight), self.weight.t())


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(IN, IN, bias=False), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.before(x), scale=2.0)


def plain(module: Any, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    return F.linear(x, module.weight) * scale


@pytest.mark.parametrize("cls", [Opaque, Inherits])
def test_a_registered_module_is_counted_through_plain_torch(cls: type[Opaque]) -> None:
    register_module(Opaque)(plain)
    count = count_flops(Net(cls()), (torch.randn(ROWS, IN),))
    assert (count.forward, count.backward, count.recompute) == (BEFORE + ONE, BEFORE + 2 * ONE, 0)
    assert count.by_module == {"": 2 * BEFORE + 3 * ONE, "before": 2 * BEFORE, "inner": 3 * ONE}


def test_a_frozen_weight_in_a_registered_module_needs_no_gradient() -> None:
    register_module(Opaque)(plain)
    model = Net(Opaque())
    model.inner.weight.requires_grad_(False)
    assert count_flops(model, (torch.randn(ROWS, IN),)).backward == BEFORE + ONE


def test_a_subclass_with_a_forward_of_its_own_keeps_it() -> None:
    register_module(Opaque)(plain)
    assert module_formula(Overrides) is None
    assert count_flops(Net(Overrides()), (torch.randn(ROWS, IN),)).forward == BEFORE + 2 * ONE


def test_the_nearest_registered_class_is_taken() -> None:
    def other(module: Any, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return F.linear(F.linear(F.linear(x, module.weight), module.weight.t()), module.weight)

    register_module(Opaque)(plain)
    register_module(Inherits)(other)
    assert module_formula(Inherits) is other
    assert count_flops(Net(Inherits()), (torch.randn(ROWS, IN),)).forward == BEFORE + 3 * ONE


def test_the_model_itself_runs_its_own_kernel_before_and_after() -> None:
    model, x = Net(Opaque()), torch.randn(ROWS, IN)
    register_module(Opaque)(plain)
    expected = model(x)
    count_flops(model, (x,))
    assert "forward" not in model.inner.__dict__
    assert torch.equal(model(x), expected)
    assert type(model(x).grad_fn).__name__ == "MulBackward0"


def test_the_model_as_a_whole_may_be_registered() -> None:
    register_module(Opaque)(plain)
    count = count_flops(Opaque(), {"x": torch.randn(ROWS, IN), "scale": 3.0})
    assert (count.forward, count.backward) == (ONE, ONE)


# -- wrong registrations -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mm", "aten.mm", "a::b::c", "", 3, None])
def test_an_operator_must_be_named_with_its_library(name: Any) -> None:
    with pytest.raises(UsageError, match="library::operator"):
        register_formula(name)


@pytest.mark.parametrize("cls", [int, "Linear", None, nn.Linear(1, 1)])
def test_only_module_classes_are_registered(cls: Any) -> None:
    with pytest.raises(UsageError, match=r"subclasses of torch\.nn\.Module"):
        register_module(cls)


def test_a_bad_name_among_good_ones_registers_nothing() -> None:
    before = dict(OPERATOR_FORMULAS)
    with pytest.raises(UsageError):
        register_formula("truemfu_tests::linear", "bad")
    assert before == OPERATOR_FORMULAS


@pytest.mark.parametrize("register", [register_formula, register_module])
def test_used_without_a_name_or_a_class_is_an_error(register: Callable[..., Any]) -> None:
    """`@register_formula` without parentheses, or with empty ones, would register nothing, silently."""
    with pytest.raises(UsageError):
        register()
    with pytest.raises(UsageError):
        register(lambda *args, out: 1)


def test_a_formula_that_returns_no_integer_is_an_error_that_names_the_operator() -> None:
    register_formula("truemfu_tests::linear")(lambda *args, out: "many")
    with pytest.raises(UsageError, match="truemfu_tests::linear"):
        count_flops(Calls(fused_linear, torch.randn(OUT, IN)), (torch.randn(ROWS, IN),), backward=False)
