"""The class of each kernel: by the operator that launched it, or by its name where no operator is known.

    communication      collectives, whatever launched them
    operator           innermost first: `aten::_softmax`, then what it ran in: `Optimizer.step#AdamW.step`
    kernel's name      compiled code, CUDA graphs, kernels that no operator launched

The two tables below are read from the top: the first row that matches decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

PRODUCTS = "products"
CONVOLUTIONS = "convolutions"
ATTENTION = "attention"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise"
REDUCTIONS = "reductions"
COPIES = "copies"
OPTIMIZER = "optimizer"
EMBEDDING = "embedding"
COMMUNICATION = "communication"
MEMORY = "memory"
OTHER = "other"
GAPS = "gaps"

CLASSES = {
    PRODUCTS: "products",
    CONVOLUTIONS: "convolutions",
    ATTENTION: "attention",
    NORMALISATION: "normalisation and softmax",
    ELEMENTWISE: "elementwise",
    REDUCTIONS: "reductions",
    COPIES: "copies and casts",
    OPTIMIZER: "optimizer",
    EMBEDDING: "embedding",
    COMMUNICATION: "communication",
    MEMORY: "memory copies",
    OTHER: "other kernels",
    GAPS: "gaps",
}
"""Every class, and how it is called in texts. Gaps are the time without any kernel."""

FUSIBLE = frozenset((NORMALISATION, ELEMENTWISE, REDUCTIONS, COPIES))
"""What a compiler can fuse with its neighbours."""
MATRIX_WORK = frozenset((PRODUCTS, CONVOLUTIONS, ATTENTION))

_OPERATORS = (
    (
        COMMUNICATION,
        r"^c10d::|^_c10d_functional|^record_param_comms|nccl|^fsdp::.*(all_gather|reduce_scatter)",
    ),
    (ATTENTION, r"scaled_dot_product|_attention|flash_attn|flex_attention|FlashAttn"),
    (CONVOLUTIONS, r"conv(olution|\d?d|_transpose|_depthwise)"),
    (
        PRODUCTS,
        r"^aten::(_?addmm|mm|bmm|baddbmm|addbmm|addmv|addr|mv|dot|vdot|matmul|linear|einsum|inner|outer|_scaled_mm"
        r"|_grouped_mm|_scaled_grouped_mm|_int_mm|_addmm_activation|_sparse_mm|sspaddmm)\b|^mkldnn::.*linear"
        r"|aten::(_cudnn_rnn|_thnn_fused|lstm|gru|mkldnn_rnn|mkldnn_linear)",
    ),
    (
        NORMALISATION,
        r"(layer|batch|group|instance|rms)_?norm|LayerNorm|RMSNorm|GroupNorm|BatchNorm|[sS]oftmax"
        r"|cross_?entropy|CrossEntropy",
    ),
    (OPTIMIZER, r"^aten::_fused_(adam|adamw|sgd|adagrad)"),
    (EMBEDDING, r"^aten::_?embedding"),
    (
        COPIES,
        r"^aten::(copy_|_to_copy|_copy|clone|contiguous|cat|stack|fill_|zero_|full|zeros|ones|arange|index_select"
        r"|gather|scatter|scatter_|index|index_put|_index_put_impl_|index_copy|slice_backward|select_backward"
        r"|as_strided_|roll|flip|repeat|_foreach_copy_|constant_pad_nd|masked_fill|masked_select|tril|triu"
        r"|_amp_foreach|pad|im2col|col2im|_chunk_cat|split_with_sizes_copy|_local_scalar_dense)\b",
    ),
    (
        REDUCTIONS,
        r"^aten::(sum|mean|var|std|var_mean|max|min|amax|amin|argmax|argmin|norm|linalg_vector_norm|any|all|prod"
        r"|logsumexp|cumsum|cumprod|topk|sort|unique\w*|histc|bincount|nonzero|nll_loss\w*|mse_loss\w*|l1_loss"
        r"|_foreach_norm|count_nonzero|(adaptive_|_adaptive_)?(avg|max)_pool\w*|median|kthvalue|equal)\b",
    ),
    (
        ELEMENTWISE,
        r"^aten::(add|sub|rsub|mul|div|neg|pow|exp|log|sqrt|rsqrt|reciprocal|abs|sign|sin|cos|tanh|sigmoid|relu"
        r"|gelu|silu|mish|elu|leaky_relu|hardswish|hardtanh|hardsigmoid|softplus|clamp|clamp_min|clamp_max|where"
        r"|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|maximum|minimum|addcmul|addcdiv|lerp|erf|native_dropout"
        r"|dropout|bernoulli|threshold|threshold_backward|isnan|isinf|floor|round|ceil|remainder|fmod|normal"
        r"|uniform|random|upsample\w*|glu|prelu|log1p|expm1|square|isfinite|_foreach_\w+)(_backward|_backward_data"
        r"|_scale)?_?$",
    ),
)

_KERNELS = (
    # of the compiler, which names kernels after all operators that it fused
    (ATTENTION, r"^triton_tem_.*attention"),
    (PRODUCTS, r"^triton_(tem|mm)_"),
    (NORMALISATION, r"^triton_(red|per)_.*(norm|softmax)"),
    (REDUCTIONS, r"^triton_(red|per)_"),
    (ELEMENTWISE, r"^triton_(poi|for)"),
    (COMMUNICATION, r"nccl|rccl|nvshmem|one_shot_all_reduce|two_shot_all_reduce"),
    (MEMORY, r"^Memcpy|^Memset"),
    (ATTENTION, r"flash|fmha|flex_attention|attention|mha_"),
    (CONVOLUTIONS, r"conv|wgrad|dgrad|fprop|implicit_gemm|winograd|nchwToNhwc|nhwcToNchw|nchwTo|nhwcTo"),
    (PRODUCTS, r"gemm|nvjet|cublas|xmma|cutlass|gemv|splitK|Cijk_|_mm_"),
    (OPTIMIZER, r"multi_tensor_apply|[aA]dam|FusedSgd|FusedOptim|lamb"),
    (
        NORMALISATION,
        r"[lL]ayer_?[nN]orm|[rR][mM][sS]_?[nN]orm|GroupNorm|group_norm|[bB]atch_?[nN]orm|bn_[fb]w|[sS]oft_?[mM]ax"
        r"|cross_entropy",
    ),
    (EMBEDDING, r"embedding|indexing_backward"),
    (REDUCTIONS, r"reduce|Reduce|cunn_|nll_loss|argmax|RadixSort|Scan|pool"),
    (COPIES, r"copy|CatArray|transpose|Fill|fill|index|gather|scatter|cast|convert|arange|triu|tril"),
    (
        ELEMENTWISE,
        r"elementwise|dropout|vectorized|pointwise|distribution|glu|rope|rotary",
    ),
)

_OPTIMIZER_RANGE = re.compile(r"^Optimizer\.(step|zero_grad)#")
_WRAPPER = re.compile(r"^autograd::engine::evaluate_function: |^## |^Torch-Compiled|^CompiledF|^triton_")


def _first(table: Sequence[tuple[str, str]], name: str) -> str | None:
    return next((found for found, pattern in table if re.search(pattern, name)), None)


@lru_cache(maxsize=16384)
def of_operator(name: str) -> str | None:
    """The class of an operator's or a range's name; None if it does not tell."""
    if _OPTIMIZER_RANGE.match(name):
        return OPTIMIZER
    return None if _WRAPPER.match(name) else _first(_OPERATORS, name)


@lru_cache(maxsize=16384)
def of_kernel(name: str) -> str | None:
    """The class of a kernel's name; None if it does not tell."""
    return _first(_KERNELS, name)


def class_of(kernel: str, kind: str, ranges: Sequence[str]) -> str:
    """The class of a kernel, by the names of the ranges that launched it, the innermost first."""
    named = of_kernel(kernel)
    if named == COMMUNICATION or any(of_operator(name) == COMMUNICATION for name in ranges):
        return COMMUNICATION
    if kind in ("gpu_memcpy", "gpu_memset"):
        return MEMORY
    if any(of_operator(name) == OPTIMIZER for name in ranges):
        return OPTIMIZER
    operator = next((name for name in ranges if "::" in name or of_operator(name) is not None), None)
    known = None if operator is None else of_operator(operator)
    if known is None or (operator is not None and known in FUSIBLE and named in MATRIX_WORK):
        return named or known or OTHER
    return known
