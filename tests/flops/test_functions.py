"""Custom autograd Functions: products are filed by data flow, and what leaves torch in them is named."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from profiled_step import profile_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from truemfu import FlopModel, TruemfuWarning, count_flops, count_step, errors
from truemfu.flops.registry import OPERATOR_FORMULAS

ROWS, WIDTH, VOCABULARY = 24, 24, 24
"""All alike: no shape tells one product of the head from another."""
ONE = 2 * ROWS * WIDTH * VOCABULARY
"""FLOPs of each product of the model: two forward, and three backward, as the batch needs no gradient."""

Head = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer and a head with a loss."""

    def __init__(self, head: Head, *, is_trained: bool = True) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH, bias=False), _Head(head)
        self.head.weight.requires_grad_(is_trained)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.body(x), targets)


class _Head(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(VOCABULARY, WIDTH)), head

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.function(x, self.weight, targets)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_already_warned", set())


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.arange(rows) % VOCABULARY


def both_counts(model: nn.Module, given: tuple[Any, ...]) -> Iterator[Any]:
    """The count on fake tensors, and that of the step as it runs."""
    counted = count_flops(model, given)
    assert counted.method == "count on fake tensors"
    yield counted
    yield count_step(lambda: model(*given).sum().backward())


def parts(count: Any, one: int = ONE) -> tuple[float, float, float]:
    """Forward, backward and recompute in products."""
    return count.forward / one, count.backward / one, count.recompute / one


# -- heads --


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(x @ weight.t(), targets)


class Recomputing(torch.autograd.Function):
    """Keeps no logits: computes them again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        return F.cross_entropy(x @ weight.t(), targets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, targets = ctx.saved_tensors
        logits = (x @ weight.t()).softmax(-1)
        logits -= F.one_hot(targets, len(weight))
        logits *= grad / len(x)
        return logits @ weight, logits.t() @ x, None


class Chunked(torch.autograd.Function):
    """The same tile by tile in one buffer, as TRL's SFTTrainer does: products into views of the buffer, the
    tile overwritten by its gradient, sums in place. The last tiles are narrower."""

    @staticmethod
    def tiles(x: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        buffer = torch.empty((10, 7), dtype=x.dtype, device=x.device)
        for row in range(0, len(x), 10):
            rows = slice(row, min(row + 10, len(x)))
            for column in range(0, len(weight), 7):
                columns = slice(column, min(column + 7, len(weight)))
                tile = buffer[: rows.stop - rows.start, : columns.stop - columns.start]
                torch.mm(x[rows], weight[columns].t(), out=tile)
                yield rows, columns, tile

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        total, picked = torch.zeros(len(x)), torch.zeros(len(x))
        for rows, columns, tile in Chunked.tiles(x, weight):
            total[rows] += tile.exp().sum(-1)
            local = targets[rows] - columns.start
            is_inside = (local >= 0) & (local < tile.shape[1])
            value = tile.gather(1, local.clamp(0, tile.shape[1] - 1)[:, None])[:, 0]
            picked[rows] = torch.where(is_inside, value, picked[rows])
        normaliser = total.log()
        ctx.save_for_backward(x, weight, targets, normaliser)
        return normaliser - picked

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, targets, normaliser = ctx.saved_tensors
        grad_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for rows, columns, tile in Chunked.tiles(x, weight):
            is_target = torch.arange(columns.start, columns.stop) == targets[rows, None]
            tile.copy_(grad[rows, None] * ((tile - normaliser[rows, None]).exp() - is_target.float()))
            if grad_x is not None:
                grad_x[rows].addmm_(tile, weight[columns])
            if grad_weight is not None:
                grad_weight[columns].addmm_(tile.t(), x[rows])
        return grad_x, grad_weight, None


class Early(torch.autograd.Function):
    """Computes the gradients in forward, chunk by chunk, as Liger does; backward scales them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        grad_x, grad_weight = torch.zeros_like(x), torch.zeros_like(weight)
        losses = torch.zeros(len(x))
        for row in range(0, len(x), 10):
            rows = slice(row, row + 10)
            logits = x[rows] @ weight.t()
            losses[rows] = F.cross_entropy(logits, targets[rows], reduction="none")
            logits = (logits.softmax(-1) - F.one_hot(targets[rows], len(weight))) / len(x)
            grad_x[rows] = logits @ weight
            torch.addmm(grad_weight, logits.t(), x[rows], out=grad_weight)
        ctx.save_for_backward(grad_x.detach(), grad_weight.detach())
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad, grad_weight.mul_(grad), None


def recomputing(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return Recomputing.apply(x, weight, targets)


def chunked(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return Chunked.apply(x, weight, targets).mean()


def early(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return Early.apply(x, weight, targets)


HEADS = {"recomputing": (recomputing, 1), "chunked": (chunked, 1), "early": (early, 0)}
"""Each head, and how many products it computes again."""
heads = pytest.mark.parametrize("name", HEADS)


@heads
def test_a_fused_head_has_the_plain_heads_integers(name: str) -> None:
    head, again = HEADS[name]
    for expected, count in zip(
        both_counts(Model(plain), batch()), both_counts(Model(head), batch()), strict=True
    ):
        assert parts(expected) == (2, 3, 0)
        assert parts(count) == (2, 3, again)
        assert count.by_module == expected.by_module == {"": 5 * ONE, "body": 2 * ONE, "head": 3 * ONE}
        assert not count.uncounted


@heads
def test_the_heads_gradients_are_those_of_the_plain_one(name: str) -> None:
    """Else what they compute would not be what they are counted for."""
    torch.manual_seed(0)
    given, model = batch(), Model(plain)
    other = Model(HEADS[name][0])
    other.load_state_dict(model.state_dict())
    for one in (model, other):
        one(*given).backward()
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(("name", "again"), [("recomputing", 2), ("chunked", 1), ("early", 1)])
def test_the_gradient_of_a_frozen_weight_is_no_model_work(name: str, again: int) -> None:
    """Two of the heads compute it anyway; torch drops it."""
    for count in both_counts(Model(HEADS[name][0], is_trained=False), batch()):
        assert parts(count) == (2, 2, again)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@heads
def test_a_checkpoint_around_a_head_changes_no_model_flops(name: str, reentrant: bool) -> None:
    head, again = HEADS[name]
    model = Model(lambda x, w, t: checkpoint(head, x, w, t, use_reentrant=reentrant))
    for count in both_counts(model, batch()):
        assert count.model_flops == 5 * ONE
        assert count.recompute == (3 if name == "early" else 1 + again) * ONE


@heads
def test_a_closed_form_has_the_plain_heads_integers(name: str) -> None:
    form, expected = FlopModel.fit(Model(HEADS[name][0]), batch()), count_flops(Model(plain), batch(50))
    count = form(batch(50))
    assert (count.forward, count.backward) == (expected.forward, expected.backward)
    assert count.recompute == HEADS[name][1] * 2 * 50 * WIDTH * VOCABULARY


def test_casts_are_followed() -> None:
    # Where oneDNN fails at such sizes, torch switches it off for the whole process.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        for count in both_counts(Model(recomputing), batch()):
            assert parts(count) == (2, 3, 1)


@heads
def test_compiled_heads_count_as_they_are_written(name: str) -> None:
    count = count_flops(torch.compile(Model(HEADS[name][0])), batch())
    assert parts(count) == (2, 3, HEADS[name][1])


def test_a_forward_pass_alone_is_forward() -> None:
    assert parts(count_flops(Model(recomputing), batch(), backward=False)) == (2, 0, 0)


def test_trls_head_has_the_plain_heads_integers() -> None:
    pytest.importorskip("trl.trainer.utils", reason="needs trl", exc_type=ImportError)
    try:
        from trl.kernels import ChunkedLogProbFunction
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        pytest.skip("the kernels of this trl import triton")
    except ImportError:
        pytest.skip("this trl has no such head")

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            x, weight, None, targets, 1.0, 7, None, 1.0, ("entropy",)
        )
        return entropy.detach().mean() - logprobs.mean()

    for is_trained in (True, False):
        for count in both_counts(Model(head, is_trained=is_trained), batch()):
            assert parts(count) == (2, 2 + is_trained, 1)


# -- other designs --


class Mlp(torch.autograd.Function):
    """Saves one product and computes the other again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        middle = x @ up
        ctx.save_for_backward(x, up, down, middle)
        return middle.tanh() @ down

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, up, down, middle = ctx.saved_tensors
        again = (x @ up).tanh()
        grad_middle = (grad @ down.t()) * (1 - middle.tanh() ** 2)
        return grad_middle @ up.t(), x.t() @ grad_middle, again.t() @ grad


class WithContext(torch.autograd.Function):
    """With `setup_context` and a rule for vmap that torch makes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad * (1 - (x @ weight).tanh() ** 2)
        return grad @ weight.mT, x.mT @ grad


class InnerGraph(torch.autograd.Function):
    """Runs its forward again with gradients and differentiates that, then goes on with the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh() @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            inner = (x @ weight).tanh()
        grad_inner = grad @ weight.t()
        grad_middle, grad_weight = torch.autograd.grad(inner, (x, weight), grad_inner)
        return grad_middle, grad_weight + inner.detach().t() @ grad


class Rotated(torch.autograd.Function):
    """Multiplies what a backward pass of its own has found."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ((x @ weight) @ weight).tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        middle = (x @ weight).requires_grad_()
        with torch.enable_grad():
            out = (middle @ weight.detach()).tanh()
        (grad_middle,) = torch.autograd.grad(out, middle, grad)
        return grad_middle @ weight.t(), None


class Wrapping(torch.autograd.Function):
    """A Function that calls another in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return WithContext.apply(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        out = WithContext.apply(x, weight)
        grad = grad * (1 - out**2)
        return grad @ weight.t(), x.t() @ grad


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Tensor], weights: int = 1) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(weights))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.weights)


@pytest.mark.parametrize(
    ("function", "weights", "expected", "shape"),
    [
        pytest.param(Mlp.apply, 2, (2, 4, 1), (ROWS, WIDTH), id="partly"),
        pytest.param(WithContext.apply, 1, (1, 2, 1), (ROWS, WIDTH), id="setup_context"),
        pytest.param(
            torch.vmap(WithContext.apply, in_dims=(0, None)), 1, (1, 2, 1), (2, ROWS // 2, WIDTH), id="vmap"
        ),
        pytest.param(InnerGraph.apply, 1, (2, 4, 1), (ROWS, WIDTH), id="inner graph"),
        pytest.param(Rotated.apply, 1, (2, 2, 2), (ROWS, WIDTH), id="inner gradient"),
        pytest.param(Wrapping.apply, 1, (1, 2, 1), (ROWS, WIDTH), id="nested"),
    ],
)
def test_recomputation_is_told_by_data_flow(function: Any, weights: int, expected: Any, shape: Any) -> None:
    x = torch.randn(shape, requires_grad=True)
    for count in both_counts(Apply(function, weights), (x,)):
        assert parts(count) == expected


def test_a_gradient_of_a_gradient_is_backward() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)

    def step() -> None:
        (grad,) = torch.autograd.grad(WithContext.apply(x, weight).sum(), x, create_graph=True)
        grad.square().sum().backward()

    # first: the product again, and both gradients, of which the one of the weight is returned and unused;
    # second: two gradients of each of the two products that `grad` was made from
    assert parts(count_step(step)) == (1, 2 + 4, 1)


class Unseen(torch.autograd.Function):
    """An extension in C fills a tensor behind torch's back, and torch multiplies it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        filled, grad = torch.empty_like(grad), grad.contiguous()
        pointers = [t.untyped_storage().data_ptr() for t in (filled, grad)]
        ctypes.memmove(*pointers, grad.numel() * grad.element_size())
        return filled @ weight.t(), None


def test_what_unseen_code_has_written_may_depend_on_the_gradient() -> None:
    x, weight = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(WIDTH, WIDTH)
    assert parts(count_step(lambda: Unseen.apply(x, weight).sum().backward())) == (1, 1, 0)


def test_the_profiler_notes_that_it_cannot_tell() -> None:
    model, given = Model(recomputing), batch()
    count = profile_step(lambda: model(*given).backward())
    assert parts(count) == (2, 4, 0)
    assert any("inside a custom Function's backward counts as backward" in note for note in count.notes)
    plain_count = profile_step(lambda: Model(plain)(*given).backward())
    assert not any("custom Function" in note for note in plain_count.notes)


# -- what leaves torch --


class NumpyProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = (t.detach().numpy() for t in ctx.saved_tensors)
        found = grad.numpy()
        return torch.from_numpy(found @ weight.T), torch.from_numpy(x.T @ found)


class Between(nn.Module):
    """A layer before something else."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(WIDTH, WIDTH, bias=False), function

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.function(self.layer(x), lengths)


LENGTHS = torch.tensor([10, 14])


def named(model: nn.Module, given: tuple[Any, ...]) -> dict[str, int]:
    """What is named as uncounted, by a count and by a step that runs; both warn."""
    found = []
    for count in (
        lambda: count_flops(model, given),
        lambda: count_step(lambda: model(*given).sum().backward()),
    ):
        errors._already_warned.clear()
        with pytest.warns(TruemfuWarning, match="are not counted"):
            found.append(dict(count().uncounted))
    assert found[0] == found[1]
    return found[0]


def test_a_product_by_numpy_is_named_in_both_passes() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model = Between(lambda x, lengths: NumpyProduct.apply(x, weight))
    assert named(model, (torch.randn(ROWS, WIDTH), LENGTHS)) == {"torch.Tensor.numpy": 5}


def test_a_product_by_numpy_is_named_in_a_loss_outside_the_model() -> None:
    class Loss(torch.autograd.Function):
        """One whose forward does not get its context."""

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return torch.tensor(x.detach().numpy().sum())

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.shape = inputs[0].shape

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.expand(ctx.shape)

    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with pytest.warns(TruemfuWarning, match="are not counted"):
        count = count_step(lambda: Loss.apply(model(x)).backward())
    assert dict(count.uncounted) == {"torch.Tensor.numpy": 1}


@pytest.mark.skipif(
    not hasattr(torch.autograd.function.BackwardCFunction, "apply_boxed"),
    reason="this torch hands gradients over one by one",
)
def test_gradients_that_come_in_a_list_are_followed() -> None:
    class Boxed(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grads: list[Tensor]) -> Any:
            x, weight = ctx.saved_tensors
            again, grad = x @ weight, grads.pop()
            return grad @ weight.T, x.T @ (grad + 0 * again.sum())

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model = Between(lambda x, lengths: Boxed.apply(x, weight))
    for count in both_counts(model, (torch.randn(ROWS, WIDTH), LENGTHS)):
        assert (count.forward, count.backward, count.recompute) == (2 * ONE, 3 * ONE, ONE)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("numpy", lambda x: torch.from_numpy(x.detach().numpy())),
        ("__array__", lambda x: torch.from_numpy(np.asarray(x.detach()))),
        ("__dlpack__", lambda x: torch.from_numpy(np.from_dlpack(x.detach()))),
        ("data_ptr", lambda x: x + (x.data_ptr() == 0)),
    ],
)
def test_numbers_that_leave_torch_are_named(name: str, function: Callable[[Tensor], Tensor]) -> None:
    model = Between(lambda x, lengths: x * function(x))
    assert named(model, (torch.randn(ROWS, WIDTH), LENGTHS)) == {f"torch.Tensor.{name}": 1}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, lengths: torch.cat([part * 2 for part in x.split(lengths.tolist())]),
        lambda x, lengths: x[: int(lengths.numpy().sum())],
        lambda x, lengths: x[: int(np.asarray(lengths).max())],
        lambda x, lengths: x[torch.from_numpy((lengths > 10).numpy()).nonzero()[0]],
        lambda x, lengths: x * x.detach().abs().max().item(),
        lambda x, lengths: x * x.detach().sum().tolist(),
        lambda x, lengths: x * float(x.detach().mean().numpy()),
        lambda x, lengths: x * torch.tensor(np.arange(2.0).sum()),
    ],
    ids=["split", "numpy", "asarray", "mask", "item", "tolist", "one number", "a constant"],
)
def test_indices_and_single_numbers_are_no_alarm(function: Any) -> None:
    model, given = Between(function), (torch.randn(ROWS, WIDTH), LENGTHS)
    assert not count_flops(model, given).uncounted
    assert not count_step(lambda: model(*given).sum().backward()).uncounted


def test_integers_are_read_by_numpy_on_fake_tensors() -> None:
    model = Between(lambda x, lengths: F.linear(x[: lengths.numpy()[0]], torch.ones(WIDTH, WIDTH)))
    count = count_flops(model, (torch.randn(ROWS, WIDTH), LENGTHS))
    assert count.method == "count on fake tensors"
    assert count.forward == ONE + 2 * 10 * WIDTH * WIDTH


def test_metrics_outside_the_model_are_no_alarm() -> None:
    model, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)

    def step() -> None:
        out = model(x)
        out.detach().numpy().mean()
        out.register_hook(lambda grad: grad.numpy().mean() and None)
        out.sum().backward()

    assert not count_step(step).uncounted


# -- Triton --


@contextlib.contextmanager
def one_kernel() -> Iterator[Any]:
    """A Triton kernel that doubles numbers in place."""
    triton = pytest.importorskip("triton", reason="needs triton")
    from tests.flops.triton_kernels import double_kernel

    yield lambda x: double_kernel[(triton.cdiv(x.numel(), 64),)](x, x.numel(), BLOCK=64)


def test_a_triton_kernel_is_named_and_passed_over_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_kernel() as double:

        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(x, weight)
                out = x @ weight
                double(out)
                return out

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                x, weight = ctx.saved_tensors
                again, grad = x @ weight, grad.clone()
                double(again)
                double(grad)
                return grad @ weight.t() + again, x.t() @ grad

        model, given = Apply(Doubled.apply), (torch.randn(ROWS, WIDTH, requires_grad=True),)
        with pytest.warns(TruemfuWarning, match="triton::double_kernel"):
            count = count_flops(model, given)
        monkeypatch.setitem(OPERATOR_FORMULAS, "triton::double_kernel", lambda x, n, *, BLOCK, out: n)
        registered = count_flops(model, given)
    assert not registered.uncounted
    assert registered.forward == ONE + ROWS * WIDTH
    assert (registered.backward, registered.recompute) == (2 * ONE + ROWS * WIDTH, ONE + ROWS * WIDTH)
    assert count.method == "count on fake tensors"
    assert parts(count) == (1, 2, 1)
    assert count.uncounted == {"triton::double_kernel": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("is_trained", [True, False])
def test_ligers_head_has_the_plain_heads_integers(reduction: str, is_trained: bool) -> None:
    """Liger computes gradients in forward; for a loss token by token, the logits again in backward."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ops = pytest.importorskip(
        "liger_kernel.ops.fused_linear_cross_entropy", reason="needs liger_kernel", exc_type=ImportError
    )
    liger = ops.LigerFusedLinearCrossEntropyFunction

    def head(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return liger.apply(x, weight, targets, None, None, -100, 0.0, 0.0, reduction)[0].mean()

    model = Model(head, is_trained=is_trained).cuda()
    given = tuple(t.cuda() for t in batch())
    with pytest.warns(TruemfuWarning, match="triton::liger_cross_entropy_kernel"):
        counts = list(both_counts(model, given))
    for count in counts:
        assert parts(count) == (2, 2 + is_trained, int(reduction == "none"))
        assert set(count.uncounted) <= {"triton::liger_cross_entropy_kernel", "triton::element_mul_kernel"}


class _KeepsGradient(torch.autograd.Function):
    """As Megatron does: the weight's gradient is left in a tensor of the weight's own, not returned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        ctx.weight.main_grad = gradient.t() @ x
        return gradient @ ctx.weight.detach(), None


class _ForNothing(_KeepsGradient):
    """The same product, with a result that nobody gets."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gradient.t().matmul(x)
        return gradient @ ctx.weight.detach(), None


@pytest.mark.parametrize(("function", "recomputed"), [(_KeepsGradient, 0), (_ForNothing, 1)])
def test_a_gradient_that_is_kept_beside_the_weight_is_backward(function: Any, recomputed: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.weight = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return function.apply(self.first(x), self.weight)

    one = 2 * 4 * 8 * 8
    count = count_flops(Net(), (torch.randn(4, 8),))
    assert (count.forward, count.backward) == (2 * one, (3 - recomputed) * one)
    assert count.recompute == recomputed * one
