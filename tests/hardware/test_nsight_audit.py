"""What an H200 executed, against what was counted: to the last operation, and why where they differ."""

from __future__ import annotations

import msgspec
import pytest
from fake_ncu import (
    CUBE,
    EXECUTED,
    EXECUTED_ATTENTION,
    EXECUTED_MATMUL,
    FOLDER,
    MATMUL,
    OPERATORS,
    PRODUCTS,
    STEP,
    STEP_COUNT,
)

from truemfu.hardware.nsight.audit import audit_of, kind_of
from truemfu.hardware.nsight.command import StepCount
from truemfu.hardware.nsight.csv_output import KernelLaunch, parse_ncu_csv
from truemfu.hardware.nsight.tile_match import matched_products

BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
NVJET = "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN"


def test_the_counted_step_is_the_executed_one_to_the_last_operation() -> None:
    result = audit_of(parse_ncu_csv(STEP), STEP_COUNT)
    assert result.executed_flops == EXECUTED
    assert result.executed_by_dtype == {"bf16": EXECUTED}
    assert result.executed_by_kind == {"matmul": EXECUTED_MATMUL, "attention": EXECUTED_ATTENTION}
    assert result.counted_by_kind == {"matmul": 2_042_256_949_248, "attention": 51_539_607_552}
    assert result.expected_by_kind == result.executed_by_kind
    assert result.tile_flops == EXECUTED_MATMUL - MATMUL == 21_206_401_024
    assert (result.unmatched_flops, result.unmeasured_launches, result.launches) == (0, 0, 194)


def test_the_kernels_of_the_step() -> None:
    kernels = audit_of(parse_ncu_csv(STEP), STEP_COUNT).kernels
    head = 2 * 2048 * 32_000 * 2048
    assert [(k.name, k.launches, k.executed_flops, k.needed_flops) for k in kernels[:5]] == [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 13, 680_752_316_416, 680_752_316_416),
        ("nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN", 12, 412_316_860_416, 412_316_860_416),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT", 12, 412_316_860_416, 412_316_860_416),
        ("nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NTN", 1, 279_038_656_512, head),
        (NVJET, 1, 279_038_656_512, head),
    ]
    assert [(k.kind, k.launches, k.executed_flops, k.needed_flops) for k in kernels[5:7]] == [
        ("attention", 2, 26_843_545_600, None),
        ("attention", 2, 10_737_418_240, None),
    ]
    assert {k.flops_per_cycle for k in kernels[:7]} == {1024}
    assert not any(k.executed_flops for k in kernels[7:])
    assert [k.non_matrix_cycles for k in kernels[7:10]] == [12_058_624, 10_928_512, 8_030_256]


def test_executed_over_what_the_pipes_activity_reads() -> None:
    result = audit_of(parse_ncu_csv(STEP))
    assert (result.pipe_cycles, result.matrix_cycles) == (2_088_614_782, 2_051_873_238)
    assert result.executed_over_activity == EXECUTED / 1024 / 2_088_614_782
    assert round(result.executed_over_activity, 4) == 0.9824
    assert result.below_usual_rate == ()


@pytest.mark.parametrize(
    ("name", "executed", "flops_per_cycle"),
    [
        ("h200_vit_2_layers", 4_587_872_321_536, 962.19),
        ("h200_resnet18", 3_483_323_334_656, 908.67),
        ("h200_64_experts", 1_452_705_579_008, 979.15),
    ],
)
def test_kernels_below_their_rate_and_without_products_are_in_one_ratio(
    name: str, executed: int, flops_per_cycle: float
) -> None:
    """Activity × clock read 1.0642, 1.1266 and 1.0475 of ncu in `hybrid` on the same H200."""
    result = audit_of(parse_ncu_csv((FOLDER / f"{name}.csv").read_text("utf-8")))
    assert result.executed_flops == executed
    ratio = result.executed_over_activity
    assert ratio is not None
    assert ratio * 1024 == pytest.approx(flops_per_cycle, abs=0.01)
    assert ratio == pytest.approx(executed / 1024 / (result.pipe_cycles or 0), rel=1e-12)


def test_each_dtype_counts_at_its_own_rate() -> None:
    """All operators at their rates but for the old instruction, which takes its cycles twice, and SiLU."""
    result = audit_of(parse_ncu_csv(OPERATORS))
    too_many = CUBE // 1024 + 262_144
    assert result.executed_over_activity == pytest.approx(1 - too_many / (result.pipe_cycles or 0), rel=1e-12)


def test_kernels_below_the_usual_rate_of_their_dtype_are_named() -> None:
    result = audit_of(parse_ncu_csv(OPERATORS))
    rates = {k.dtypes: (k.flops_per_cycle, k.usual_flops_per_cycle) for k in result.kernels if k.dtypes}
    assert rates[("fp16",)] == (1024, 1024)
    assert rates[("tf32",)] == (512, 512)
    assert rates[("fp8",)] == (2048, 2048)
    assert rates[("fp64",)] == (None, None)
    (slow,) = result.below_usual_rate
    assert "cutlass_75_tensorop_bf16_s1688gemm" in slow.name
    assert (slow.flops_per_cycle, slow.usual_flops_per_cycle, slow.executed_flops) == (512, 1024, CUBE)


def test_on_another_chip_nobody_knows_the_usual_rate() -> None:
    ampere = [msgspec.structs.replace(k, compute_capability="8.0") for k in parse_ncu_csv(OPERATORS)]
    result = audit_of(ampere)
    assert {k.usual_flops_per_cycle for k in result.kernels} == {None}
    assert result.below_usual_rate == ()
    assert result.executed_over_activity is None


def test_without_the_cycles_their_share_is_unknown_and_not_zero() -> None:
    launches = [KernelLaunch(name="gemm", metrics={BF16: 1e6})]
    result = audit_of(launches)
    assert result.executed_flops == 10**6
    assert (result.pipe_cycles, result.executed_over_activity) == (None, None)
    assert result.kernels[0].non_matrix_cycles is None


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    launches = [KernelLaunch(name="k", metrics={BF16: None})]
    result = audit_of(launches)
    assert (result.executed_flops, result.unmeasured_launches) == (None, 1)
    assert result.kernels[0].executed_flops is None


def test_only_the_process_that_counted_is_compared() -> None:
    launches = [*parse_ncu_csv(STEP), *parse_ncu_csv(OPERATORS)]
    assert audit_of(launches, STEP_COUNT).executed_flops == EXECUTED
    stranger = msgspec.structs.replace(STEP_COUNT, process_id=1)
    assert audit_of(launches, stranger).launches == 194 + 12


def test_recomputation_is_expected_where_one_kind_of_work_did_it() -> None:
    again = msgspec.structs.replace(STEP_COUNT, hardware_flops=(STEP_COUNT.hardware_flops or 0) + CUBE)
    result = audit_of(parse_ncu_csv(STEP), again)
    assert result.expected_by_kind["matmul"] == EXECUTED_MATMUL + CUBE
    convolution = {**again.model_flops_by_operator, "aten.convolution": 10}
    result = audit_of(
        parse_ncu_csv(STEP), msgspec.structs.replace(again, model_flops_by_operator=convolution)
    )
    assert result.expected_by_kind == {"attention": EXECUTED_ATTENTION}


def test_a_count_without_shapes_expects_nothing() -> None:
    bare = StepCount(model_flops=CUBE, hardware_flops=CUBE, model_flops_by_operator={"aten.mm": CUBE})
    result = audit_of(parse_ncu_csv(STEP), bare)
    assert result.expected_by_kind == {}
    assert (result.tile_flops, result.unmatched_flops) == (None, None)


def test_products_that_were_not_counted_stay_unmatched() -> None:
    fewer = tuple(product for product in PRODUCTS if 32_000 not in (product.m, product.n))
    result = audit_of(parse_ncu_csv(STEP), msgspec.structs.replace(STEP_COUNT, products=fewer))
    assert result.unmatched_flops == 2 * 279_038_656_512
    assert result.tile_flops == 0


def test_tiles_overhang_both_ways_and_in_clusters() -> None:
    shape = (2048, 32_000, 2048)
    executed = 2 * 2112 * 32_256 * 2048  # 11 tiles of 192 by 84 clusters of 2 · 192
    for counted in (shape, (32_000, 2048, 2048)):
        assert matched_products([(NVJET, executed)], {counted: 2 * 2048 * 32_000 * 2048}) == [(counted, 1)]
    alone = 2 * 2112 * 32_064 * 2048
    assert matched_products([(NVJET, alone)], {shape: 2 * 2048 * 32_000 * 2048}) != [None]
    assert matched_products([(NVJET, executed + 2)], {shape: 2 * 2048 * 32_000 * 2048}) == [None]


def test_a_product_is_computed_once() -> None:
    assert matched_products([("some_gemm", 16)] * 3, {(2, 2, 2): 32}) == [
        ((2, 2, 2), 1),
        ((2, 2, 2), 1),
        None,
    ]


def test_a_batched_product_is_one_launch_and_takes_no_other_products_place() -> None:
    small, large = (2, 2, 2), (4, 4, 4)
    launches = [("some_gemm", 128), ("some_gemm", 8 * 16)]
    assert matched_products(launches, {small: 8 * 16, large: 128}) == [(large, 1), (small, 8)]


def test_a_kernel_without_a_tile_in_its_name_matches_what_does_not_overhang() -> None:
    name = "void cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1>(T1::Params)"
    assert matched_products([(name, CUBE)], {(4096, 4096, 4096): CUBE}) == [((4096, 4096, 4096), 1)]
    assert matched_products([(name, CUBE)], {(4095, 4095, 4096): 2 * 4095 * 4095 * 4096}) == [None]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NVJET, "matmul"),
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>(int, T2)", "other"),
        ("void cudnn::convert_dq_to_16bits<1>(const void *, void *)", "other"),
        ("sm80_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("aten._scaled_dot_product_flash_attention_backward", "attention"),
        ("aten.convolution_backward", "convolution"),
        ("aten.mm", "matmul"),
        ("triton_tem_fused_addmm_3", "matmul"),
        ("triton_poi_fused_add_mul_0", "other"),
    ],
)
def test_a_name_tells_the_kind_of_work(name: str, kind: str) -> None:
    assert kind_of(name) == kind
