"""FLOPs of the operators that do matrix work: one decorated function each.

A product of M×K by K×N is 2·M·K·N. Convolutions count every output element with the whole kernel
(including positions in the padding, which the hardware computes). Formulas use only shapes. Attention kernels
are in `attention/`, since how many query-key pairs count depends on the convention, the mask and the batch's
documents, which are not operator arguments.

Deliberately left out: elementwise work, normalisation, softmax, reductions, embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from ..registry import register_formula
from .sparse import is_sparse, stored_elements

# Operators whose matrix work this package does not count or cannot inspect: they appear in `uncounted` when
# they run.
MATRIX_WORK_WITHOUT_FORMULA = frozenset(
    f"aten::{name}"
    for name in (
        "_native_multi_head_attention _triton_multi_head_attention _triton_scaled_dot_attention "
        "_transformer_encoder_layer_fwd _sparse_mm _sparse_sparse_matmul "
        "hspmm sspaddmm smm _cslt_sparse_mm "
        "_sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear "
        "_convolution_double_backward conv_tbc conv_tbc_backward "
        "_dyn_quant_matmul_4bit _wrapped_quantized_linear_prepacked linalg_cholesky_ex linalg_eigh "
        "_linalg_eigh linalg_eig _linalg_svd linalg_qr linalg_inv_ex _linalg_solve_ex _linalg_det "
        "_linalg_slogdet linalg_lu_factor_ex linalg_lu linalg_lu_solve linalg_ldl_factor_ex linalg_lstsq "
        "linalg_solve_triangular triangular_solve cholesky cholesky_solve cholesky_inverse "
        "linalg_matrix_exp linalg_matrix_sqrth linalg_polar linalg_householder_product geqrf ormqr "
        "_pdist_forward _pdist_backward _foreach_mm _linalg_eigvals linalg_ldl_solve mkldnn_linear_backward "
        "mkldnn_linear_backward_input mkldnn_linear_backward_weights conv_depthwise3d _conv_depthwise2d "
        "_slow_conv2d_forward _slow_conv2d_backward slow_conv3d_forward slow_conv_dilated2d "
        "slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d cudnn_convolution_relu "
        "cudnn_convolution_add_relu miopen_convolution_relu miopen_convolution_add_relu"
    ).split()
)


def _row(a: Any) -> int:
    """The number of values in a row of a product's first factor: an fp4 element, for example, holds two."""
    return int(a.shape[-1]) * (2 if str(a.dtype).endswith("_x2") else 1)


def _sparse_mm(a: Any, b: Any) -> int | None:
    """2 × stored elements × columns (or rows) of the dense factor; None if both factors are dense."""
    if is_sparse(a):
        return int(2 * stored_elements(a) * b.shape[-1])
    return int(2 * stored_elements(b) * a.shape[-2]) if is_sparse(b) else None


def _mm(a: Any, b: Any) -> int:
    sparse = _sparse_mm(a, b)
    return int(2 * a.shape[-2] * _row(a) * b.shape[-1]) if sparse is None else sparse


@register_formula("aten::mm", "aten::_int_mm", "aten::_scaled_mm", "aten::_scaled_mm_v2")
def mm(a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by K×N."""
    return _mm(a, b)


@register_formula(
    "aten::addmm",
    "aten::addmm_",
    "aten::_addmm_activation",
    "aten::_scaled_addmm",
    "aten::_scaled_addmm_",
    "aten::_sparse_addmm",
)
def addmm(bias: Any, a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by K×N; adding the bias is elementwise."""
    return _mm(a, b)


@register_formula("aten::sparse_sampled_addmm")
def sampled_addmm(sampled: Any, a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by K×N at the stored elements of `sampled` only."""
    return int(2 * stored_elements(sampled) * a.shape[-1])


@register_formula("aten::_sparse_mm_reduce_impl")
def sparse_mm_reduce(a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """A sparse M×K by K×N; taking the mean or the largest term instead of the sum changes nothing."""
    return int(2 * stored_elements(a) * b.shape[-1])


@register_formula("aten::_sparse_mm_reduce_impl_backward")
def sparse_mm_reduce_backward(
    a: Any, grad: Any, weight: Any, reduce: str, indices: Any, output_mask: Sequence[bool], *, out: Any
) -> int:
    """The forward product, once for each requested gradient."""
    return int(2 * stored_elements(a) * weight.shape[-1]) * (int(output_mask[0]) + int(output_mask[1]))


@register_formula("aten::bmm")
def bmm(a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """B products of M×K by K×N."""
    sparse = _sparse_mm(a, b)
    return int(a.shape[0]) * _mm(a, b) if sparse is None else sparse


@register_formula("aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::addbmm_")
def baddbmm(bias: Any, a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """B products of M×K by K×N; `addbmm` also sums them, which does not count."""
    return int(a.shape[0]) * _mm(a, b)


@register_formula("aten::mv", "aten::dot", "aten::vdot")
def mv(a: Any, vector: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by K, or K by K."""
    return int(2 * (stored_elements(a) if is_sparse(a) else a.numel()))


@register_formula("aten::addmv", "aten::addmv_")
def addmv(bias: Any, a: Any, vector: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by K."""
    return int(2 * (stored_elements(a) if is_sparse(a) else a.numel()))


@register_formula("aten::linear", "aten::mkldnn_linear", "mkl::_mkl_linear", "mkldnn::_linear_pointwise")
def linear(x: Any, weight: Any, *_: Any, out: Any, **__: Any) -> int:
    """Rows of x by the transposed N×K weight. Recorded as such only for nested tensors and compiled code."""
    return int(2 * x.numel() * weight.shape[0])


@register_formula("aten::linear_backward")
def linear_backward(x: Any, grad: Any, weight: Any, output_mask: Sequence[bool], *, out: Any) -> int:
    """One product for the input's gradient, one for the weight's, as requested by `output_mask`."""
    return int(2 * x.numel() * weight.shape[0]) * (int(output_mask[0]) + int(output_mask[1]))


def _matmul(a: Any, b: Any) -> int:
    if a.is_nested and b.is_nested:
        sizes = zip(a._nested_tensor_size().tolist(), b._nested_tensor_size().tolist(), strict=True)
        return sum(2 * prod(left) * right[-1] for left, right in sizes)
    return int(2 * a.numel() * (b.shape[-1] if b.dim() > 1 else 1))


@register_formula("aten::matmul")
def matmul(a: Any, b: Any, *, out: Any, **__: Any) -> int:
    """Each element of `a` is multiplied by a row of `b`. Recorded only for nested tensors, per sample."""
    return _matmul(a, b)


@register_formula("aten::matmul_backward")
def matmul_backward(grad: Any, a: Any, b: Any, mask: Sequence[bool], *, out: Any) -> int:
    """The forward product, once for each requested gradient."""
    return _matmul(a, b) * (int(mask[0]) + int(mask[1]))


@register_formula("aten::_euclidean_dist")
def euclidean_dist(a: Any, b: Any, *, out: Any) -> int:
    """Distances of M by N points of K coordinates: one product, with the squared norms as two more."""
    return int(2 * out.numel() * (a.shape[-1] + 2))


@register_formula("aten::_trilinear")
def trilinear(
    i1: Any,
    i2: Any,
    i3: Any,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
    *,
    out: Any,
) -> int:
    """Σ i1·i2·i3 over `sumdim`, evaluated as torch does: i1·i2 elementwise, then one product with i3.

    The product has one multiply and one add for each element of the full broadcast space.
    """
    sizes: list[int] = []
    for tensor, expanded in ((i1, expand1), (i2, expand2), (i3, expand3)):
        shape = list(tensor.shape)
        for dim in sorted(expanded):
            shape.insert(dim, 1)
        sizes = shape if not sizes else [max(a, b) for a, b in zip(sizes, shape, strict=True)]
    return 2 * prod(sizes)


@register_formula(
    "aten::_weight_int8pack_mm",
    "aten::_weight_int4pack_mm",
    "aten::_weight_int4pack_mm_for_cpu",
    "aten::_weight_int4pack_mm_with_scales_and_zeros",
    "aten::_mixed_dtypes_linear",
    "bitsandbytes::gemv_4bit",
    "bitsandbytes::gemm_4bit",
    "bitsandbytes::int8_mixed_scaled_mm",
    "bitsandbytes::int8_linear_matmul",
    "bitsandbytes::int8_scaled_mm",
)
def packed_weight_mm(x: Any, *_: Any, out: Any, **__: Any) -> int:
    """M×K by a packed weight whose N is taken from the result."""
    return int(2 * x.numel() * out.shape[-1])


@register_formula("aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::_scaled_grouped_mm_v2")
def grouped_mm(a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """Groups of rows, each with its own matrix: every row is multiplied by one matrix only.

    2-D by 3-D: T rows of K by G matrices of K×N, 2·T·K·N. 3-D by 2-D: the mirror image. 2-D by 2-D: the
    groups split K, one M×N product per group, 2·M·K·N in all. 3-D by 3-D: G full products.
    """
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return int(groups * _mm(a, b))


@register_formula("transformers::grouped_mm_fallback")
def transformers_grouped_mm(a: Any, b: Any, *_: Any, out: Any, **__: Any) -> int:
    """Transformers' own grouped product: T rows of K by the K×N matrix of their group."""
    return int(2 * a.shape[-2] * a.shape[-1] * b.shape[-1])


def _convolution(x: Any, weight: Any, y: Any, transposed: bool) -> int:
    """Each element on the narrow side is multiplied by one kernel of `weight.shape[1:]`.

    The weight is (C_out, C_in/groups, k…), or (C_in, C_out/groups, k…) when transposed; in both cases its
    trailing sizes are the work of one output (or, transposed, input) element.
    """
    return int(2 * (x if transposed else y).numel() * prod(weight.shape[1:]))


@register_formula("aten::convolution", "aten::_convolution", "aten::convolution_overrideable")
def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> int:
    """Any dimension, groups, stride, dilation, transposed or not."""
    return _convolution(x, weight, out, transposed)


@register_formula("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(
    grad: Any,
    x: Any,
    weight: Any,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    *,
    out: Any,
) -> int:
    """The same multiply-adds as forward, once for the input's gradient and once for the weight's."""
    return _convolution(x, weight, grad, transposed) * (int(output_mask[0]) + int(output_mask[1]))


@register_formula("aten::cudnn_convolution", "aten::mkldnn_convolution", "aten::miopen_convolution")
def backend_convolution(x: Any, weight: Any, *_: Any, out: Any, **__: Any) -> int:
    """A backend's own convolution, called by name."""
    return _convolution(x, weight, out, transposed=False)


@register_formula("aten::cudnn_convolution_transpose", "aten::miopen_convolution_transpose")
def backend_convolution_transpose(x: Any, weight: Any, *_: Any, out: Any, **__: Any) -> int:
    """A backend's own transposed convolution, called by name."""
    return _convolution(x, weight, out, transposed=True)


#
# Forward: at each step the input is multiplied by W_ih and the state by W_hh. Backward needs the gradients of
# both weights, of the input if a layer below needs it, and of the state at every step but the first (at the
# first only if the initial state itself needs one). `RecurrentWork` keeps these parts separate.


class Direction(NamedTuple):
    """FLOPs of one direction of one recurrent layer over all steps: products with W_ih, W_hh and, if the
    state is projected, W_hr; `first` is the state's product at the first step only."""

    by_input: int
    by_state: int
    projection: int
    first: int


class RecurrentWork:
    """Products of a recurrent kernel: its layers from the bottom up, each with its directions."""

    def __init__(self, layers: Sequence[Sequence[Direction]], *, backward: bool) -> None:
        self.layers, self.backward = layers, backward

    def forward_flops(self) -> int:
        """All products of every layer."""
        return sum(d.by_input + d.by_state + d.projection for layer in self.layers for d in layer)

    def needed_backward_flops(self, edges: Sequence[bool]) -> int:
        """What autograd would compute on the same layers written out step by step.

        `edges` states which inputs of the kernel need a gradient: the sequence, the tensors of each layer and
        direction (W_ih and W_hh first, W_hr last), the initial hidden state, the initial cell state.
        """
        below, hidden_grad = edges[0], edges[-2]
        stride = (len(edges) - 3) // sum(len(layer) for layer in self.layers)
        weights = iter(range(1, len(edges) - 2, stride))
        total = 0
        for layer in self.layers:
            needs_gradient = []
            for d in layer:
                start = next(weights)
                own = edges[start : start + stride]
                total += d.by_input * own[0] + d.by_state * own[1] + d.projection * own[-1]
                needs_gradient.append(below or any(own) or hidden_grad)
                if needs_gradient[-1]:
                    state = d.by_state if hidden_grad else d.by_state - d.first
                    total += d.by_input * below + d.projection + state
            below = any(needs_gradient)
        return total

    def executed_backward_flops(self) -> int:
        """What the kernel computes: every gradient, needed or not."""
        return 2 * self.forward_flops()


def _mkldnn_layer(x: Any, w_ih: Any, w_hh: Any) -> list[list[Direction]]:
    """One layer, one direction; x is (steps, samples, features)."""
    steps, samples = x.shape[:2]
    rows = steps * samples
    by_state = 2 * w_hh.numel()
    return [[Direction(2 * rows * w_ih.numel(), rows * by_state, 0, samples * by_state)]]


@register_formula("aten::mkldnn_rnn_layer")
def mkldnn_rnn_layer(x: Any, w_ih: Any, w_hh: Any, *_: Any, out: Any, **__: Any) -> RecurrentWork:
    """One LSTM layer, one direction, on CPU."""
    return RecurrentWork(_mkldnn_layer(x, w_ih, w_hh), backward=False)


@register_formula("aten::mkldnn_rnn_layer_backward")
def mkldnn_rnn_layer_backward(x: Any, w_ih: Any, w_hh: Any, *_: Any, out: Any, **__: Any) -> RecurrentWork:
    """The layer's gradients, all of them in one kernel."""
    return RecurrentWork(_mkldnn_layer(x, w_ih, w_hh), backward=True)


class _RnnSettings(NamedTuple):
    """Arguments that both of cuDNN's operators take, in their order."""

    mode: int
    hidden_size: int
    proj_size: int
    num_layers: int
    batch_first: bool
    dropout: float
    train: bool
    bidirectional: bool
    batch_sizes: Sequence[int]


def _cudnn_layers(
    x: Any, weights: Sequence[Any], stride: int, settings: _RnnSettings
) -> list[list[Direction]]:
    """cuDNN holds W_ih and W_hh first among the `stride` tensors of a layer and direction, W_hr last."""
    packed, bidirectional = settings.batch_sizes, settings.bidirectional
    rows = sum(packed) if packed else x.shape[0] * x.shape[1]
    directions = []
    for i in range(0, len(weights), stride):
        backwards = bidirectional and i // stride % 2 == 1
        samples = packed[-1 if backwards else 0] if packed else x.shape[0 if settings.batch_first else 1]
        w_ih, w_hh, last = weights[i], weights[i + 1], weights[i + stride - 1]
        by_state = 2 * w_hh.numel()
        projection = 2 * rows * last.numel() if settings.proj_size > 0 else 0
        directions.append(Direction(2 * rows * w_ih.numel(), rows * by_state, projection, samples * by_state))
    each = 2 if bidirectional else 1
    return [directions[i : i + each] for i in range(0, len(directions), each)]


@register_formula("aten::_cudnn_rnn", "aten::miopen_rnn")
def cudnn_rnn(
    x: Any, weight: Sequence[Any], stride: int, buffer: Any, hx: Any, cx: Any, *rest: Any, out: Any
) -> RecurrentWork:
    """All layers and directions of an RNN, LSTM or GRU at once."""
    return RecurrentWork(_cudnn_layers(x, weight, stride, _RnnSettings(*rest[:9])), backward=False)


@register_formula("aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward")
def cudnn_rnn_backward(
    x: Any,
    weight: Sequence[Any],
    stride: int,
    buffer: Any,
    hx: Any,
    cx: Any,
    output: Any,
    grad_output: Any,
    grad_hy: Any,
    grad_cy: Any,
    *rest: Any,
    out: Any,
) -> RecurrentWork:
    """The gradients of all layers."""
    return RecurrentWork(_cudnn_layers(x, weight, stride, _RnnSettings(*rest[:9])), backward=True)
