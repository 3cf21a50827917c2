"""Every operator that does matrix work, in small modules: exact integers, derived by hand.

A product of M×K by K×N is 2·M·K·N. The expectations are written out as the arithmetic they come from, so a
wrong formula and a wrong expectation cannot agree by accident.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from truemfu import FlopCount, TruemfuWarning, count_flops, count_step, errors
from truemfu.flops.registry import OPERATOR_FORMULAS

B, M, K, N = 2, 3, 5, 7
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _warnings_said_anew() -> Iterator[None]:
    said = set(errors._already_warned)
    errors._already_warned.clear()
    yield
    errors._already_warned.clear()
    errors._already_warned.update(said)


class Apply(nn.Module):
    """A function of the module's weights and its inputs."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(weights)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(*inputs, *self.weights)


def flops(count: FlopCount) -> tuple[int, int, int]:
    assert not count.uncounted
    return count.forward, count.backward, count.recompute


def randn(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def frozen(module: nn.Module, *names: str) -> nn.Module:
    """The module with the parameters whose names contain one of these frozen (without names: all)."""
    for name, parameter in module.named_parameters():
        if not names or any(part in name for part in names):
            parameter.requires_grad_(False)
    return module


# -- matrix products -----------------------------------------------------------------------------------------

# name: (function of input and weights, shape of the input, shapes of the weights,
#        forward, backward for the weights, backward for the input)
PRODUCTS: dict[str, tuple[Callable[..., Any], tuple[int, ...], list[tuple[int, ...]], int, int, int]] = {
    "mm": (torch.mm, (M, K), [(K, N)], 2 * M * K * N, 2 * M * K * N, 2 * M * K * N),
    "addmm": (
        lambda x, w, b: torch.addmm(b, x, w),
        (M, K),
        [(K, N), (N,)],
        2 * M * K * N,
        2 * M * K * N,
        2 * M * K * N,
    ),
    "addmm_": (
        lambda x, w: torch.zeros(M, N).addmm_(x, w),
        (M, K),
        [(K, N)],
        2 * M * K * N,
        2 * M * K * N,
        2 * M * K * N,
    ),
    "bmm": (torch.bmm, (B, M, K), [(B, K, N)], 2 * B * M * K * N, 2 * B * M * K * N, 2 * B * M * K * N),
    "baddbmm": (
        lambda x, w, b: torch.baddbmm(b, x, w),
        (B, M, K),
        [(B, K, N), (M, N)],
        2 * B * M * K * N,
        2 * B * M * K * N,
        2 * B * M * K * N,
    ),
    "addbmm": (
        lambda x, w, b: torch.addbmm(b, x, w),
        (B, M, K),
        [(B, K, N), (M, N)],
        2 * B * M * K * N,
        2 * B * M * K * N,
        2 * B * M * K * N,
    ),
    # the matrix's gradient is an outer product: elementwise
    "mv": (lambda x, w: torch.mv(w, x), (K,), [(M, K)], 2 * M * K, 0, 2 * M * K),
    "addmv": (lambda x, w, b: torch.addmv(b, w, x), (K,), [(M, K), (M,)], 2 * M * K, 0, 2 * M * K),
    # both gradients are a vector times a number: elementwise
    "dot": (torch.dot, (K,), [(K,)], 2 * K, 0, 0),
    "vdot": (torch.vdot, (K,), [(K,)], 2 * K, 0, 0),
    "linear, three dimensions": (
        F.linear,
        (B, M, K),
        [(N, K), (N,)],
        2 * B * M * K * N,
        2 * B * M * K * N,
        2 * B * M * K * N,
    ),
    "linear, one dimension": (F.linear, (K,), [(N, K), (N,)], 2 * K * N, 2 * K * N, 2 * K * N),
    "matmul, broadcast on both sides": (
        torch.matmul,
        (B, M, K),
        [(4, 1, K, N)],
        2 * (4 * B) * M * K * N,
        2 * (4 * B) * M * K * N,
        2 * (4 * B) * M * K * N,
    ),
    "matmul, one matrix for all": (
        torch.matmul,
        (4, B, M, K),
        [(K, N)],
        2 * (4 * B) * M * K * N,
        2 * (4 * B) * M * K * N,
        2 * (4 * B) * M * K * N,
    ),
    # the input's gradient is an outer product
    "matmul by a vector": (torch.matmul, (B, M, K), [(K,)], 2 * B * M * K, 2 * B * M * K, 0),
    "tensordot": (
        lambda x, w: torch.tensordot(x, w, 2),
        (M, K, 4),
        [(K, 4, N)],
        2 * M * (K * 4) * N,
        2 * M * (K * 4) * N,
        2 * M * (K * 4) * N,
    ),
    # x (w u): 140 + 60 FLOPs, where (x w) u would take 210 + 84
    "multi_dot": (
        lambda x, w, u: torch.linalg.multi_dot([x, w, u]),
        (M, K),
        [(K, N), (N, 2)],
        2 * K * N * 2 + 2 * M * K * 2,
        2 * M * K * 2 + 2 * K * N * 2 + 2 * K * N * 2,
        2 * M * K * 2,
    ),
    "einsum ij,jk->ik": (
        lambda x, w: torch.einsum("ij,jk->ik", x, w),
        (M, K),
        [(K, N)],
        2 * M * K * N,
        2 * M * K * N,
        2 * M * K * N,
    ),
    "einsum bij,jk->bik": (
        lambda x, w: torch.einsum("bij,jk->bik", x, w),
        (B, M, K),
        [(K, N)],
        2 * B * M * K * N,
        2 * B * M * K * N,
        2 * B * M * K * N,
    ),
    "einsum bhqd,bhkd->bhqk": (
        lambda x, w: torch.einsum("bhqd,bhkd->bhqk", x, w),
        (B, 4, M, K),
        [(B, 4, N, K)],
        2 * (B * 4) * M * K * N,
        2 * (B * 4) * M * K * N,
        2 * (B * 4) * M * K * N,
    ),
    "einsum over two dimensions, permuted": (
        lambda x, w: torch.einsum("bqhd,hdo->obq", x, w),
        (B, M, 4, K),
        [(4, K, N)],
        2 * (B * M) * (4 * K) * N,
        2 * (B * M) * (4 * K) * N,
        2 * (B * M) * (4 * K) * N,
    ),
    # left to right: i is summed in the first product, j in the second
    "einsum of three": (
        lambda x, w, u: torch.einsum("bi,ij,jk->bk", x, w, u),
        (B, M),
        [(M, K), (K, N)],
        2 * B * M * K + 2 * B * K * N,
        2 * B * M * K + 2 * B * K * N + 2 * B * K * N,
        2 * B * M * K,
    ),
    "einsum, an outer product": (lambda x, w: torch.einsum("bi,bj->bij", x, w), (B, M), [(B, N)], 0, 0, 0),
    "einsum, a trace": (lambda x, w: torch.einsum("ii->", x * w), (M, M), [(M, M)], 0, 0, 0),
    "outer": (torch.outer, (M,), [(N,)], 0, 0, 0),
}


@pytest.mark.parametrize("grad", [False, True], ids=["data", "input with a gradient"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, grad: bool) -> None:
    function, shape, weights, forward, for_weights, for_input = PRODUCTS[name]
    model = Apply(function, *(randn(*w) for w in weights))
    count = count_flops(model, (randn(*shape, grad=grad),))
    assert flops(count) == (forward, for_weights + grad * for_input, 0)


# in a chain of products the gradient of the input passes through the later weights
@pytest.mark.parametrize("name", sorted(PRODUCTS.keys() - {"multi_dot", "einsum of three"}))
def test_products_with_frozen_weights(name: str) -> None:
    function, shape, weights, forward, _, for_input = PRODUCTS[name]
    model = frozen(Apply(function, *(randn(*w) for w in weights)))
    assert flops(count_flops(model, (randn(*shape, grad=True),))) == (forward, for_input, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.mm(x, w, out=torch.empty(M, N)),
        lambda x, w: torch.addmm(torch.zeros(N), x, w, out=torch.empty(M, N)),
        lambda x, w: torch.bmm(x[None], w[None], out=torch.empty(1, M, N)),
        lambda x, w: torch.matmul(x, w, out=torch.empty(M, N)),
        lambda x, w: torch.baddbmm(torch.zeros(N), x[None], w[None], out=torch.empty(1, M, N)),
    ],
    ids=["mm", "addmm", "bmm", "matmul", "baddbmm"],
)
def test_products_written_into_a_tensor(function: Callable[..., Any]) -> None:
    count = count_flops(Apply(function, randn(K, N)), (randn(M, K),), backward=False)
    assert flops(count) == (2 * M * K * N, 0, 0)
    assert "fake" in count.method


@pytest.mark.parametrize("grads", [0, 1, 2])
def test_bilinear_is_one_product_over_both_inputs_for_each_gradient(grads: int) -> None:
    one = 2 * B * N * M * K  # y[b, n] = Σ x[b, m] w[n, m, k] z[b, k]
    x, z = randn(B, M, grad=grads > 0), randn(B, K, grad=grads > 1)
    assert flops(count_flops(nn.Bilinear(M, K, N), (x, z))) == (one, one * (1 + grads), 0)


def test_complex_multiply_add_is_eight_real_flops() -> None:
    model = Apply(torch.mm, randn(K, N, dtype=torch.complex64))
    count = count_flops(model, (randn(M, K, dtype=torch.complex64),), loss_fn=lambda y: y.abs().sum())
    assert flops(count) == (8 * M * K * N, 8 * M * K * N, 0)
    assert count.by_dtype == {"fp32": 16 * M * K * N}


# -- convolutions --------------------------------------------------------------------------------------------

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    # 2 · samples · out channels · out size · (in channels / groups) · kernel
    "1d": (lambda: nn.Conv1d(4, 6, 3), (B, 4, 10), 2 * B * 6 * 8 * 4 * 3),
    "1d, one sample without a batch": (lambda: nn.Conv1d(4, 6, 3), (4, 10), 2 * 6 * 8 * 4 * 3),
    "1d, depthwise and causal": (
        lambda: nn.Conv1d(4, 4, 3, groups=4, padding=2),
        (B, 4, 10),
        2 * B * 4 * 12 * 1 * 3,
    ),
    "2d": (lambda: nn.Conv2d(4, 6, (3, 2)), (B, 4, 9, 8), 2 * B * 6 * (7 * 7) * 4 * (3 * 2)),
    "2d, stride": (lambda: nn.Conv2d(4, 6, 3, stride=2), (B, 4, 9, 9), 2 * B * 6 * (4 * 4) * 4 * 9),
    "2d, padding": (lambda: nn.Conv2d(4, 6, 3, padding=1), (B, 4, 9, 9), 2 * B * 6 * (9 * 9) * 4 * 9),
    "2d, same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), (B, 4, 9, 9), 2 * B * 6 * (9 * 9) * 4 * 9),
    "2d, dilation": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (B, 4, 9, 9), 2 * B * 6 * (5 * 5) * 4 * 9),
    "2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (B, 4, 9, 9), 2 * B * 6 * (7 * 7) * 2 * 9),
    "2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (B, 4, 9, 9), 2 * B * 4 * (7 * 7) * 1 * 9),
    "2d, depthwise with a multiplier": (
        lambda: nn.Conv2d(4, 12, 3, groups=4),
        (B, 4, 9, 9),
        2 * B * 12 * (7 * 7) * 1 * 9,
    ),
    "2d, channels last, no bias": (
        lambda: nn.Conv2d(4, 6, 3, bias=False).to(memory_format=torch.channels_last),
        (B, 4, 9, 9),
        2 * B * 6 * (7 * 7) * 4 * 9,
    ),
    "3d": (lambda: nn.Conv3d(2, 3, (1, 2, 3)), (B, 2, 3, 4, 5), 2 * B * 3 * (3 * 3 * 3) * 2 * (1 * 2 * 3)),
    "3d, groups, stride, dilation": (
        lambda: nn.Conv3d(4, 2, 2, groups=2, stride=2, dilation=2),
        (B, 4, 5, 5, 5),
        2 * B * 2 * (2 * 2 * 2) * 2 * (2 * 2 * 2),
    ),
    # transposed: every input element meets the kernel of its (out channels / groups)
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3), (B, 4, 10), 2 * B * 4 * 10 * 6 * 3),
    "transposed 2d, all options": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
        (B, 4, 5, 6),
        2 * B * 4 * (5 * 6) * 3 * 9,
    ),
    "transposed 3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, stride=2),
        (B, 2, 3, 3, 3),
        2 * B * 2 * (3 * 3 * 3) * 3 * (2 * 2 * 2),
    ),
    "transposed 1d, depthwise": (
        lambda: nn.ConvTranspose1d(4, 4, 3, groups=4),
        (B, 4, 10),
        2 * B * 4 * 10 * 1 * 3,
    ),
}


@pytest.mark.parametrize("grad", [False, True], ids=["data", "input with a gradient"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: str, grad: bool) -> None:
    make, shape, one = CONVOLUTIONS[name]
    assert flops(count_flops(make(), (randn(*shape, grad=grad),))) == (one, one * (1 + grad), 0)


@pytest.mark.parametrize("name", ["2d, groups", "transposed 2d, all options", "1d, depthwise and causal"])
def test_convolution_with_a_frozen_weight_and_a_trained_bias(name: str) -> None:
    make, shape, one = CONVOLUTIONS[name]
    model = frozen(make(), "weight")
    assert flops(count_flops(model, (randn(*shape),))) == (one, 0, 0)
    assert flops(count_flops(model, (randn(*shape, grad=True),))) == (one, one, 0)


def test_convolution_as_unfolding_and_a_product_is_the_same_integer() -> None:
    unfolded = Apply(lambda x, w: F.unfold(x, 3).mT @ w, randn(4 * 9, 6))
    one = 2 * B * 6 * (7 * 7) * 4 * 9
    assert flops(count_flops(unfolded, (randn(B, 4, 9, 9),))) == (one, one, 0)
    assert flops(count_flops(nn.Conv2d(4, 6, 3), (randn(B, 4, 9, 9),))) == (one, one, 0)


# -- recurrent layers ----------------------------------------------------------------------------------------

STEPS, SAMPLES, FEATURES, HIDDEN = 3, 5, 4, 6


class Cells(nn.Module):
    """An LSTM written out with LSTMCell, step by step, with the same parameters frozen."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.layers, self.directions = lstm.num_layers, 1 + lstm.bidirectional
        self.batch_first, self.hidden = lstm.batch_first, lstm.hidden_size
        self.cells = nn.ModuleList()
        for layer in range(self.layers):
            for suffix in (f"l{layer}", f"l{layer}_reverse")[: self.directions]:
                cell = nn.LSTMCell(getattr(lstm, f"weight_ih_{suffix}").shape[1], lstm.hidden_size)
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
                    getattr(cell, name).requires_grad_(getattr(lstm, f"{name}_{suffix}").requires_grad)
                self.cells.append(cell)

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, ...] | None = None) -> torch.Tensor:
        x = x.transpose(0, 1) if self.batch_first else x
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                index = layer * self.directions + direction
                zeros = torch.zeros(x.shape[1], self.hidden, dtype=x.dtype)
                now = (zeros, zeros) if state is None else tuple(s[index] for s in state)
                seen = []
                for row in x.unbind(0) if not direction else x.flip(0).unbind(0):
                    now = self.cells[index](row, now)
                    seen.append(now[0])
                outputs.append(torch.stack(seen[::-1] if direction else seen))
            x = torch.cat(outputs, -1)
        return x


def recurrent(gates: int, layers: int, directions: int, *, input_grad: bool) -> tuple[int, int]:
    """Forward and needed backward FLOPs of a recurrent stack, all weights trained."""
    forward = backward = 0
    for layer in range(layers):
        features = HIDDEN * directions if layer else FEATURES
        by_input = 2 * (STEPS * SAMPLES) * (gates * HIDDEN) * features
        by_state = 2 * (STEPS * SAMPLES) * (gates * HIDDEN) * HIDDEN
        first_state = 2 * SAMPLES * (gates * HIDDEN) * HIDDEN  # the initial state needs no gradient
        forward += directions * (by_input + by_state)
        backward += directions * (by_input + by_state)  # the weights
        backward += directions * by_input * (layer > 0 or input_grad)
        backward += directions * (by_state - first_state)
    return forward, backward


def first_output(out: Any) -> torch.Tensor:
    return (out[0] if isinstance(out, tuple) else out).sum()


@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("cls", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(cls: type, gates: int, layers: int, bidirectional: bool, input_grad: bool) -> None:
    model = cls(FEATURES, HIDDEN, layers, bidirectional=bidirectional)
    count = count_flops(model, (randn(STEPS, SAMPLES, FEATURES, grad=input_grad),), loss_fn=first_output)
    forward, backward = recurrent(gates, layers, 1 + bidirectional, input_grad=input_grad)
    assert (count.forward, count.backward) == (forward, backward)
    fused = cls is nn.LSTM  # one kernel on CPU, which computes every gradient
    assert count.recompute == (2 * forward - backward if fused else 0)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lstm_layout_and_dtype_change_nothing(batch_first: bool, dtype: torch.dtype) -> None:
    model = nn.LSTM(FEATURES, HIDDEN, 2, batch_first=batch_first, dtype=dtype)
    shape = (SAMPLES, STEPS, FEATURES) if batch_first else (STEPS, SAMPLES, FEATURES)
    count = count_flops(model, (randn(*shape, dtype=dtype),), loss_fn=first_output)
    assert (count.forward, count.backward) == recurrent(4, 2, 1, input_grad=False)


FROZEN = {
    "nothing": (),
    "all, the input needs a gradient": ("_",),
    "the first layer": ("_l0",),
    "the second layer": ("_l1",),
    "the weights, biases are trained": ("weight",),
    "the biases": ("bias",),
    "the weights of the input": ("weight_ih",),
    "the weights of the state": ("weight_hh",),
    "the weights of the input and all biases": ("weight_ih", "bias"),
}


def partly_frozen(what: str, bidirectional: bool) -> tuple[nn.LSTM, torch.Tensor]:
    lstm = nn.LSTM(FEATURES, HIDDEN, 2, bidirectional=bidirectional)
    if FROZEN[what]:
        frozen(lstm, *FROZEN[what])
    return lstm, randn(STEPS, SAMPLES, FEATURES, grad=what.startswith("all"))


@functools.cache
def written_out(what: str, bidirectional: bool) -> tuple[int, int, int]:
    lstm, x = partly_frozen(what, bidirectional)
    return flops(count_flops(Cells(lstm), (x,)))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("what", FROZEN)
def test_fused_lstm_equals_the_same_lstm_written_out(what: str, bidirectional: bool) -> None:
    lstm, x = partly_frozen(what, bidirectional)
    fused = count_flops(lstm, (x,), loss_fn=first_output)
    assert "aten.mkldnn_rnn_layer" in fused.by_operator
    assert (fused.forward, fused.backward, 0) == written_out(what, bidirectional)


@pytest.mark.parametrize(("hidden", "cell"), [(False, False), (True, False), (False, True), (True, True)])
def test_fused_lstm_with_an_initial_state(hidden: bool, cell: bool) -> None:
    lstm = nn.LSTM(FEATURES, HIDDEN)
    state = (randn(1, SAMPLES, HIDDEN, grad=hidden), randn(1, SAMPLES, HIDDEN, grad=cell))
    batch = (randn(STEPS, SAMPLES, FEATURES), state)
    fused, plain = (count_flops(m, batch, loss_fn=first_output) for m in (lstm, Cells(lstm)))
    assert (fused.forward, fused.backward) == (plain.forward, plain.backward)


def test_lstm_on_packed_sequences_counts_the_steps_each_sample_has() -> None:
    lengths = [3, 3, 2, 1, 1]
    packed = nn.utils.rnn.pack_padded_sequence(randn(STEPS, SAMPLES, FEATURES), torch.tensor(lengths))
    count = count_flops(nn.LSTM(FEATURES, HIDDEN), (packed,), loss_fn=lambda out: out[0].data.sum())
    rows = sum(lengths)
    by_input, by_state = 2 * rows * (4 * HIDDEN) * FEATURES, 2 * rows * (4 * HIDDEN) * HIDDEN
    first = 2 * SAMPLES * (4 * HIDDEN) * HIDDEN
    assert (count.forward, count.backward) == (by_input + by_state, by_input + 2 * by_state - first)


def test_lstm_with_a_projection() -> None:
    small = 2
    count = count_flops(
        nn.LSTM(FEATURES, HIDDEN, proj_size=small), (randn(STEPS, SAMPLES, FEATURES),), loss_fn=first_output
    )
    rows = STEPS * SAMPLES
    by_input = 2 * rows * (4 * HIDDEN) * FEATURES
    by_state = 2 * rows * (4 * HIDDEN) * small
    projection = 2 * rows * HIDDEN * small
    first = 2 * SAMPLES * (4 * HIDDEN) * small
    assert count.forward == by_input + by_state + projection
    assert count.backward == by_input + (2 * by_state - first) + 2 * projection


def test_executed_lstm_equals_the_fake_one() -> None:
    model, x = nn.LSTM(FEATURES, HIDDEN, 2), randn(STEPS, SAMPLES, FEATURES)
    executed = count_step(lambda: model(x)[0].sum().backward())
    assert flops(executed) == flops(count_flops(model, (x,), loss_fn=first_output))


def cudnn(module: nn.RNNBase, x: torch.Tensor, sizes: list[int] | None = None) -> tuple[int, int]:
    """Forward and needed backward by the formulas of cuDNN's kernels, called with their real arguments."""
    weights = list(module._flat_weights)
    known = {
        "input": x,
        "weight": weights,
        "weight_stride0": len(weights) // (module.num_layers * (1 + module.bidirectional)),
        "hidden_size": module.hidden_size,
        "proj_size": module.proj_size,
        "num_layers": module.num_layers,
        "batch_first": module.batch_first,
        "bidirectional": module.bidirectional,
        "batch_sizes": sizes or [],
    }
    works = []
    for name in ("aten::_cudnn_rnn", "aten::_cudnn_rnn_backward"):
        (schema,) = (s for s in torch._C._jit_get_schemas_for_operator(name) if not s.overload_name)
        works.append(OPERATOR_FORMULAS[name](*(known.get(a.name) for a in schema.arguments), out=None))
    edges = [x.requires_grad, *(w.requires_grad for w in weights), False, False]
    return works[0].forward_flops(), works[1].needed_backward_flops(edges)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("input_grad", [False, True])
@pytest.mark.parametrize(("cls", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_cudnn_recurrent_formulas(
    cls: type, gates: int, layers: int, bidirectional: bool, input_grad: bool
) -> None:
    module = cls(FEATURES, HIDDEN, layers, bidirectional=bidirectional, batch_first=True)
    x = randn(SAMPLES, STEPS, FEATURES, grad=input_grad)
    assert cudnn(module, x) == recurrent(gates, layers, 1 + bidirectional, input_grad=input_grad)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("what", FROZEN)
def test_cudnn_formulas_with_frozen_weights(what: str, bidirectional: bool) -> None:
    assert (*cudnn(*partly_frozen(what, bidirectional)), 0) == written_out(what, bidirectional)


def test_cudnn_formulas_on_packed_sequences() -> None:
    module, lengths = nn.LSTM(FEATURES, HIDDEN, 2, bidirectional=True), [3, 3, 2, 1, 1]
    packed = nn.utils.rnn.pack_padded_sequence(randn(STEPS, SAMPLES, FEATURES), torch.tensor(lengths))
    count = count_flops(module, (packed,), loss_fn=lambda out: out[0].data.sum())
    assert cudnn(module, packed.data, packed.batch_sizes.tolist()) == (count.forward, count.backward)


def test_cudnn_formulas_with_a_projection() -> None:
    module, x = nn.LSTM(FEATURES, HIDDEN, 2, proj_size=2), randn(STEPS, SAMPLES, FEATURES)
    count = count_flops(module, (x,), loss_fn=first_output)
    assert cudnn(module, x) == (count.forward, count.backward)


# -- what needs a gradient -----------------------------------------------------------------------------------


class TiedLanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(ids)))


def test_tied_weights_count_where_they_multiply() -> None:
    vocabulary, width = 11, 6
    count = count_flops(TiedLanguageModel(vocabulary, width), (torch.zeros(B, M, dtype=torch.long),))
    head = 2 * (B * M) * width * vocabulary
    assert flops(count) == (head, 2 * head, 0)  # the embedding is a look-up
    assert count.by_module == {"": 3 * head, "head": 3 * head}


def test_a_parameter_used_twice_is_counted_twice() -> None:
    one = 2 * M * K * K
    model = Apply(lambda x, w: (x @ w).relu() @ w, randn(K, K))
    assert flops(count_flops(model, (randn(M, K),))) == (2 * one, one + one + one, 0)


def test_a_module_called_twice_is_counted_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(K, K)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x))

    one = 2 * M * K * K
    count = count_flops(Twice(), (randn(M, K),))
    assert flops(count) == (2 * one, 3 * one, 0)
    assert count.by_module == {"": 5 * one, "inner": 5 * one}


def test_frozen_lower_layers_need_no_backward() -> None:
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K))
    frozen(model, "0.", "1.")
    one = 2 * M * K * K
    assert flops(count_flops(model, (randn(M, K),))) == (3 * one, one, 0)


def test_frozen_upper_layers_still_pass_the_gradient_down() -> None:
    model = nn.Sequential(nn.Linear(K, K), nn.Linear(K, K), nn.Linear(K, K))
    frozen(model, "1.", "2.")
    one = 2 * M * K * K
    assert flops(count_flops(model, (randn(M, K),))) == (3 * one, one + 2 * one, 0)


class Adapter(nn.Module):
    """A frozen base with a trained low-rank pair beside it."""

    def __init__(self, base: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Int8Linear(nn.Module):
    """A base weight kept in int8 and dequantised for each product."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-9, 9, (outputs, inputs), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(outputs, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("quantised", [False, True])
def test_adapters_on_a_frozen_base(quantised: bool) -> None:
    width, rank, rows = 8, 2, 6

    def base() -> nn.Module:
        return Int8Linear(width, width) if quantised else frozen(nn.Linear(width, width, bias=False))

    model = nn.Sequential(Adapter(base(), width, rank), Adapter(base(), width, rank))
    wide, narrow = 2 * rows * width * width, 2 * rows * width * rank
    forward = 2 * (wide + 2 * narrow)
    first = 2 * narrow + narrow  # both adapter weights, and through `up`; nothing for the data
    second = 2 * narrow + narrow + (narrow + wide)  # and its input's gradient, through `down` and the base
    assert flops(count_flops(model, (randn(rows, width),))) == (forward, first + second, 0)


def test_weight_packed_in_int8() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randint(-9, 9, (48, 32), dtype=torch.int8))
            self.register_buffer("scales", torch.rand(48, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch._weight_int8pack_mm(x, self.weight, self.scales)

    count = count_flops(Packed(), (randn(16, 32, dtype=torch.bfloat16),), backward=False)
    assert flops(count) == (2 * 16 * 32 * 48, 0, 0)
    assert count.by_operator == {"aten._weight_int8pack_mm": 2 * 16 * 32 * 48}


def test_integer_product() -> None:
    model = Apply(lambda x: torch._int_mm(x, x.t()))
    x = torch.randint(-9, 9, (32, 24), dtype=torch.int8)
    count = count_flops(model, (x,), backward=False)
    assert flops(count) == (2 * 32 * 24 * 32, 0, 0)
    assert count.by_dtype == {"int8": 2 * 32 * 24 * 32}


class Fp8Product(torch.autograd.Function):
    """Float8 training: three scaled products."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _scaled(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_input = _scaled(grad, weight) if ctx.needs_input_grad[0] else None
        return for_input, _scaled(grad.t(), x)


def _scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    one = torch.ones(())
    column_major = b.t().contiguous().to(FP8).t()
    a = a.contiguous().to(FP8)
    return torch._scaled_mm(a, column_major, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def test_scaled_product_in_fp8() -> None:
    one = 2 * 16 * 32 * 48
    model = Apply(Fp8Product.apply, randn(48, 32, dtype=torch.bfloat16))
    count = count_flops(model, (randn(16, 32, dtype=torch.bfloat16),), backward=False)
    assert flops(count) == (one, 0, 0)
    for grad in (False, True):
        count = count_flops(model, (randn(16, 32, dtype=torch.bfloat16, grad=grad),))
        assert flops(count) == (one, one * (1 + grad), 0)
        assert count.by_dtype == {"fp8": one * (2 + grad)}
        assert count.by_operator == {"aten._scaled_mm": one * (2 + grad)}


@pytest.mark.skipif(not hasattr(torch, "_scaled_addmm"), reason="torch before 2.15")
@pytest.mark.parametrize("name", ["_scaled_addmm", "_scaled_addmm_"])
def test_scaled_product_with_a_sum_in_fp8(name: str) -> None:
    """The sum comes first among the arguments, as in `addmm`; its dtype is not that of the product."""

    def run(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scale, added = [torch.ones(())], torch.zeros(16, 48)
        column_major = b.t().contiguous().to(FP8).t()
        return getattr(torch, name)(added, a.to(FP8), column_major, scale, [0], [0], scale, [0], [0])

    count = count_flops(Apply(run, randn(32, 48)), (randn(16, 32),), backward=False)
    assert flops(count) == (2 * 16 * 32 * 48, 0, 0)
    assert count.by_operator == {f"aten.{name}": 2 * 16 * 32 * 48}
    assert count.by_dtype == {"fp8": 2 * 16 * 32 * 48}


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch before 2.8")
def test_scaled_product_in_fp4() -> None:
    """An element holds two numbers, so rows of 64 numbers have 32 elements."""
    fp4 = torch.float4_e2m1fn_x2

    def run(a: torch.Tensor, b: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scale = scales.to(FP8)
        return torch._scaled_mm(a.view(fp4), b.view(fp4).t(), scale, scale, out_dtype=torch.bfloat16)

    packed = torch.zeros(128, 32, dtype=torch.uint8)
    count = count_flops(Apply(run), (packed, packed.clone(), torch.ones(128 * 4)), backward=False)
    assert flops(count) == (2 * 128 * 64 * 128, 0, 0)
    assert count.by_dtype == {"fp4": 2 * 128 * 64 * 128}


# -- grouped products ----------------------------------------------------------------------------------------

GROUPS, ROWS, IN, OUT = 3, 16, 16, 24
ENDS = torch.tensor([5, 6, 16], dtype=torch.int32)


needs_grouped_mm = pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="torch before 2.8")


@needs_grouped_mm
@pytest.mark.parametrize("grad", [False, True], ids=["data", "input with a gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["2d by 3d", "3d by 2d", "3d by 3d"])
def test_grouped_products(kind: str, dtype: torch.dtype, grad: bool) -> None:
    if kind == "2d by 3d":  # each row meets the matrix of its group; the weights' gradient is 2-D by 2-D
        model = Apply(
            lambda x, ends, w: torch._grouped_mm(x, w, offs=ends), randn(GROUPS, IN, OUT, dtype=dtype)
        )
        batch: tuple[torch.Tensor, ...] = (randn(ROWS, IN, dtype=dtype, grad=grad), ENDS)
        one = 2 * ROWS * IN * OUT
    elif kind == "3d by 2d":
        model = Apply(
            lambda x, ends, w: torch._grouped_mm(w, x, offs=ends), randn(GROUPS, OUT, IN, dtype=dtype)
        )
        batch = (randn(IN, ROWS, dtype=dtype, grad=grad), ENDS)
        one = 2 * ROWS * IN * OUT
    else:
        model = Apply(torch._grouped_mm, randn(GROUPS, IN, OUT, dtype=dtype))
        batch = (randn(GROUPS, ROWS, IN, dtype=dtype, grad=grad),)
        one = 2 * GROUPS * ROWS * IN * OUT
    count = count_flops(model, batch)
    assert flops(count) == (one, one * (1 + grad), 0)
    assert count.by_operator == {"aten._grouped_mm": one * (2 + grad)}
    assert count.by_dtype == {"bf16" if dtype is torch.bfloat16 else "fp32": one * (2 + grad)}


@needs_grouped_mm
def test_grouped_products_equal_a_loop_over_experts() -> None:
    def loop(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        pieces = x.split([5, 1, 10])
        return torch.cat([piece @ w[i] for i, piece in enumerate(pieces)])

    weight = randn(GROUPS, IN, OUT)
    grouped = Apply(lambda x, ends, w: torch._grouped_mm(x, w, offs=ends), weight)
    x = randn(ROWS, IN)
    assert flops(count_flops(grouped, (x, ENDS))) == flops(count_flops(Apply(loop, weight), (x,)))


# -- what is not counted -------------------------------------------------------------------------------------


def test_elementwise_work_normalisation_softmax_and_embeddings_are_not_counted() -> None:
    class NoProducts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.bag = nn.Embedding(9, 4), nn.EmbeddingBag(9, 4)
            self.norms = nn.Sequential(
                nn.LayerNorm(4), nn.RMSNorm(4), nn.SiLU(), nn.Softmax(-1), nn.Dropout()
            )
            self.batch_norm, self.group_norm = nn.BatchNorm1d(M), nn.GroupNorm(1, M)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.group_norm(self.batch_norm(self.norms(self.words(ids))))
            return x.cumsum(-1) * x.exp() + self.bag(ids)[:, None]

    count = count_flops(NoProducts(), (torch.zeros(B, M, dtype=torch.long),))
    assert flops(count) == (0, 0, 0)
    assert count.by_module == {"": 0}
    assert count.by_operator == {}


def test_distances_are_never_silently_zero() -> None:
    """`cdist` of more than 25 points is one matrix product inside one operator."""
    model = Apply(lambda x, w: torch.cdist(x, w), randn(30, K))
    try:
        count = count_flops(model, (randn(40, K),), backward=False)
    except TruemfuWarning as warning:
        assert "cdist" in str(warning) or "euclidean" in str(warning)  # noqa: PT017
    else:
        assert count.forward > 0


# -- dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float64, "fp64"), (torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")],
)
def test_products_are_booked_by_dtype(dtype: torch.dtype, name: str) -> None:
    count = count_flops(nn.Linear(K, N, dtype=dtype), (randn(M, K, dtype=dtype),))
    assert count.by_dtype == {name: 2 * (2 * M * K * N)}


class Mixed(nn.Module):
    """One product under autocast, one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(K, N), nn.Linear(N, N)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.low(x)
        return self.high(y.float())


def test_autocast_inside_the_model_decides_the_dtype() -> None:
    count = count_flops(Mixed(), (randn(M, K),))
    assert count.by_dtype == {"bf16": 2 * (2 * M * K * N), "fp32": 3 * (2 * M * N * N)}


def test_autocast_around_the_count_decides_the_dtype() -> None:
    model = nn.Linear(K, N)
    with torch.autocast("cpu", torch.bfloat16):
        count = count_flops(model, (randn(M, K),))
        assert torch.is_autocast_enabled("cpu")
    assert count.by_dtype == {"bf16": 2 * (2 * M * K * N)}


# -- views of the total --------------------------------------------------------------------------------------


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(K, K, 3, padding=1)
        self.body = nn.Sequential(nn.Sequential(nn.Linear(K, N), nn.ReLU()), nn.Linear(N, K))
        self.recurrent = nn.LSTM(K, K)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.stem(x).mT)
        z = self.recurrent(y)[0]
        return torch.einsum("bmk,bnk->bmn", z, z)


def test_views_add_up_to_the_total() -> None:
    count = count_flops(Tree(), (randn(B, K, M),))
    assert not count.uncounted
    assert sum(count.by_operator.values()) == count.model_flops
    assert sum(count.by_dtype.values()) == count.model_flops
    assert count.by_module[""] == count.model_flops == count.forward + count.backward
    assert count.hardware_flops == count.model_flops + count.recompute
    own_product = 3 * (2 * B * M * M * K)
    parts = ("stem", "body", "recurrent")
    assert count.by_module[""] == sum(count.by_module[part] for part in parts) + own_product
    assert count.by_module["body"] == count.by_module["body.0"] + count.by_module["body.1"]
    assert count.by_module["body.0"] == count.by_module["body.0.0"] == 3 * (2 * B * M * K * N)
    assert count.by_module["stem"] == 2 * (2 * B * K * M * K * 3)


def test_forward_alone() -> None:
    model = frozen(Tree())  # nothing to train: forward can still be counted
    alone, whole = (
        count_flops(model, (randn(B, K, M),), backward=False),
        count_flops(Tree(), (randn(B, K, M),)),
    )
    assert flops(alone) == (whole.forward, 0, 0)


# -- a whole step that runs ----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])
def test_executed_training_step_equals_the_count(how: str | None) -> None:
    model = nn.Sequential(nn.Conv1d(M, M, 1), Block(how), Block(how), nn.Linear(K, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    x = randn(B, M, K)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    counted = count_flops(model, (x,), loss_fn=lambda out: out.square().mean())
    executed = count_step(step)
    assert flops(executed) == flops(counted)
    assert executed.hardware_flops == counted.hardware_flops
    assert executed.by_operator == counted.by_operator
    assert executed.by_module == counted.by_module

    convolution, one = 2 * B * M * K * M, 2 * (B * M) * K * N
    head = 2 * (B * M) * K
    forward = convolution + 4 * one + head
    # non-reentrant checkpoints stop once the last saved tensor is there: before the last product
    again = {None: 0, "reentrant": 4 * one, "non-reentrant": 2 * one}[how]
    assert flops(counted) == (forward, 2 * forward - convolution, again)


@pytest.mark.parametrize(("kept", "again"), [("up", 1), ("both", 0)])
def test_selective_checkpointing_runs_again_what_was_not_kept(kept: str, again: int) -> None:
    """Both layers are `addmm`; the policy keeps the first, or both."""
    up, down = nn.Linear(K, N), nn.Linear(N, K)
    seen = {"forward": 0, "recompute": 0}

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is not torch.ops.aten.addmm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        phase = "recompute" if ctx.is_recompute else "forward"
        seen[phase] += 1
        keep = kept == "both" or seen[phase] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = up, down

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                lambda x: F.gelu(self.down(F.gelu(self.up(x)))),
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(policy),
            )

    one = 2 * M * K * N
    assert flops(count_flops(Selective(), (randn(M, K),))) == (2 * one, 3 * one, again * one)


class OwnProduct(torch.autograd.Function):
    """A product with a backward of its own, as kernel libraries write them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.mT, x.mT @ grad


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_autograd_functions_run_again_by_a_checkpoint_are_recomputation(reentrant: bool) -> None:
    """Inside such a function gradients are off, in the first run and in the second."""

    def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return OwnProduct.apply(OwnProduct.apply(x, w).relu(), w).relu()

    model = Apply(lambda x, w: checkpoint(inner, x, w, use_reentrant=reentrant), randn(K, K))
    one = 2 * M * K * K
    x = randn(M, K, grad=True)
    assert flops(count_flops(model, (x,))) == (2 * one, 4 * one, 2 * one)
    assert flops(count_step(lambda: model(x).sum().backward())) == (2 * one, 4 * one, 2 * one)


def test_gradient_accumulation_adds_up() -> None:
    model, x = nn.Linear(K, N), randn(M, K)

    def step() -> None:
        for _ in range(3):
            model(x).sum().backward()

    assert flops(count_step(step)) == (3 * 2 * M * K * N, 3 * 2 * M * K * N, 0)


class Energy(nn.Module):
    """A model that differentiates its own output: forces from an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N, bias=False), nn.Linear(N, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        energy = self.down(torch.tanh(self.up(x))).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()


def test_gradients_of_gradients_are_backward_not_recomputation() -> None:
    wide, narrow = 2 * M * K * N, 2 * M * N
    forces = wide + narrow
    # of the force: through `up`, to both weights; of tanh: to `up` and x; of the energy: to `down` and tanh
    second = (wide + wide + narrow) + (wide + wide) + (narrow + narrow)
    assert flops(count_flops(Energy(), (randn(M, K),))) == (wide + narrow, forces + second, 0)


def test_per_sample_gradients_are_backward_not_recomputation() -> None:
    model, x = nn.Linear(K, N, bias=False), randn(B, K)
    weights = {"weight": model.weight.detach()}

    def loss(weights: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (row[None],)).square().sum()

    count = count_step(torch.func.vmap(torch.func.grad(loss), (None, 0)), weights, x)
    assert flops(count) == (2 * B * K * N, 2 * B * K * N, 0)
