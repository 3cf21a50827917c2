"""Every operator of torch that multiplies matrices has a formula or is named as uncounted: none is missed."""

from __future__ import annotations

import re

import pytest
import torch
from tests.versions import TORCH
from torch import nn

from truemfu import TruemfuWarning, count_flops
from truemfu.flops.attention.kernels import KERNELS
from truemfu.flops.operators.formulas import MATRIX_WORK_WITHOUT_FORMULA
from truemfu.flops.registry import OPERATOR_FORMULAS

# Words of an operator's name that speak of products, convolutions or solving systems of equations.
MATRIX_WORDS = re.compile(
    r"(?:^|_)(?:\w*mm|\w*mv|matmul|linear|linalg|solve|cholesky|\w*qr|convolution|conv\w*|gemm|svd|eigh?)(?:_|$)"
)

# Those that do none of it, or do it inside an operator that is seen first.
OTHERS = frozenset(
    f"aten::{name}"
    for name in (
        "_compute_linear_combination _cholesky_solve_helper _cslt_sparse_mm_search _linalg_check_errors "
        "linalg__powsum linalg_cross linalg_vector_norm linalg_eigvals linalg_pinv mvlgamma mvlgamma_ "
        "_convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack "
        "_convert_weight_to_int4pack_for_cpu mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight "
        "_mps_convolution _mps_convolution_transpose mps_convolution_backward "
        "mps_convolution_transpose_backward _nnpack_spatial_convolution miopen_depthwise_convolution _spsolve"
    ).split()
)


def is_composite(schema: object) -> bool:
    """Whether an operator is always taken apart into others, which are counted."""
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")  # type: ignore[attr-defined]
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:  # known to TorchScript alone
        return True


def test_every_operator_of_this_torch_that_multiplies_matrices_is_known() -> None:
    found = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("aten::")
        and MATRIX_WORDS.search(schema.name.removeprefix("aten::"))
        and not is_composite(schema)
    }
    assert len(found) > 100
    assert found - OTHERS - MATRIX_WORK_WITHOUT_FORMULA - OPERATOR_FORMULAS.keys() - KERNELS.keys() == set()


@pytest.mark.skipif(TORCH < (2, 15), reason="torch before 2.15 has no such functions")
@pytest.mark.parametrize("name", ["linalg_polar", "linalg_matrix_sqrth"])
def test_factorisations_of_torch_2_15_are_named_as_uncounted(name: str) -> None:
    class Factorised(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = getattr(torch.ops.aten, name)(self.weight @ self.weight.T)
            return super().forward(x) + (out[0] if isinstance(out, tuple) else out).sum()

    with pytest.warns(TruemfuWarning, match=f"aten::{name}"):
        count = count_flops(Factorised(8, 8, bias=False), (torch.randn(4, 8),), backward=False)
    assert count.uncounted == {f"aten::{name}": 1}
    assert count.forward == 2 * 8 * 8 * 8 + 2 * 4 * 8 * 8
