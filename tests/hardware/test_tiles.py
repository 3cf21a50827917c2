"""Tiles that overhang: the factor is exact for a known tile, and a modest lower bound where it is chosen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truemfu.hardware.tiles import (
    Tile,
    mean_tile_factor,
    plausible_tile,
    tile_factor,
    tile_of_kernel,
    tiles_of,
)

HOPPER, AMPERE, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (10, 0)
SIZES = st.integers(1, 20_000)


def test_a_known_tile_gives_exact_integers() -> None:
    tile = Tile(m=128, n=256, k=64)
    assert tile.executed_flops((4096, 4096, 4096)) == 137_438_953_472  # as Nsight Compute printed it
    assert tile.executed_flops((4096, 5504, 2048)) == 2 * 4096 * 5632 * 2048
    assert tile.executed_flops((1, 1, 1)) == 2 * 128 * 256 * 64
    assert tile.factor((4096, 5504, 2048)) == 5632 / 5504
    assert tile.tiles((4096, 5504, 2048)) == 32 * 22


@pytest.mark.parametrize("capability", [HOPPER, AMPERE, ADA])
def test_a_product_that_tiles_divide_wastes_nothing(capability: tuple[int, int]) -> None:
    assert tile_factor((4096, 4096, 4096), capability) == 1.0


def test_large_products_take_large_tiles_and_small_ones_any() -> None:
    assert plausible_tile((4096, 4096, 4096), HOPPER) == Tile(m=128, n=256, k=64)
    # 43 × 128 columns: the tile that is 128 wide wastes nothing.
    assert plausible_tile((4096, 5504, 2048), HOPPER) == Tile(m=256, n=128, k=64)
    # 128 tiles for 132 SMs are enough; 32 are not, and 64 × 64 makes 128 of them.
    assert plausible_tile((2048, 2048, 2048), HOPPER) == Tile(m=128, n=256, k=64)
    assert plausible_tile((1024, 512, 2048), HOPPER) == Tile(m=64, n=64, k=64)
    # Not even the smallest fill the chip: least waste of all.
    assert plausible_tile((64, 64, 64), HOPPER) == Tile(m=64, n=64, k=64)


def test_more_sms_ask_for_smaller_tiles() -> None:
    shape = (2048, 2048, 2048)
    assert plausible_tile(shape, HOPPER, sm_count=16) == Tile(m=128, n=256, k=64)
    assert plausible_tile(shape, HOPPER, sm_count=600) == Tile(m=64, n=128, k=64)


@pytest.mark.parametrize(
    ("capability", "dtype", "depth"),
    [
        (HOPPER, "bf16", 64),
        (HOPPER, "fp8", 128),
        (HOPPER, "tf32", 32),
        (ADA, "bf16", 32),
        (AMPERE, "int8", 64),
    ],
)
def test_a_block_is_as_deep_as_its_bytes_allow(capability: tuple[int, int], dtype: str, depth: int) -> None:
    groups = tiles_of(capability, dtype)
    assert groups is not None
    assert {tile.k for group in groups for tile in group} == {depth}


@pytest.mark.parametrize(
    ("capability", "dtype", "shape"),
    [(BLACKWELL, "bf16", (8, 8, 8)), (HOPPER, "fp4", (8, 8, 8)), (HOPPER, "bf16", (8, 0, 8))],
)
def test_what_is_not_known_is_none(
    capability: tuple[int, int], dtype: str, shape: tuple[int, int, int]
) -> None:
    assert plausible_tile(shape, capability, dtype=dtype) is None
    assert tile_factor(shape, capability, dtype=dtype) is None
    assert mean_tile_factor({(dtype, shape): 1.0}, capability) is None


def test_a_vector_pads_nothing() -> None:
    assert tile_factor((1, 4096, 4096), HOPPER) == 1.0
    assert tile_factor((4096, 1, 4096), HOPPER) == 1.0


@settings(deadline=None)
@given(m=SIZES, n=SIZES, k=SIZES, capability=st.sampled_from([HOPPER, AMPERE, ADA]))
def test_the_factor_is_at_least_one_and_the_least_of_its_group(
    m: int, n: int, k: int, capability: tuple[int, int]
) -> None:
    shape = (m, n, k)
    factor, tile, groups = (
        tile_factor(shape, capability),
        plausible_tile(shape, capability),
        tiles_of(capability),
    )
    assert factor is not None
    assert tile is not None
    assert groups is not None
    assert factor >= 1
    group = next(group for group in groups if tile in group)
    assert all(
        tile.factor(shape) <= other.factor(shape) or other.tiles(shape) < 0.75 * 132 for other in group
    )


def test_the_mean_weighs_each_shape_with_its_work() -> None:
    even, odd = (4096, 4096, 4096), (4096, 4097, 4096)
    factor = tile_factor(odd, HOPPER)
    assert factor is not None
    assert factor > 1
    assert mean_tile_factor({("bf16", even): 3.0, ("bf16", odd): 1.0}, HOPPER) == pytest.approx(
        (3 + factor) / 4
    )
    assert mean_tile_factor({("bf16", odd): 1.0}, HOPPER, other_flops=3.0) == pytest.approx((3 + factor) / 4)
    assert mean_tile_factor({}, HOPPER, other_flops=2.0) == 1.0


@pytest.mark.parametrize(
    "weights", [{}, {("bf16", (8, 8, 8)): 0.0}, {("bf16", (8, 8, 8)): -1.0}, {("bf16", (8, 8, 8)): math.inf}]
)
def test_no_work_has_no_mean(weights: dict[tuple[int, int, int], float]) -> None:
    assert mean_tile_factor(weights, HOPPER) is None


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT", Tile(m=128, n=256, k=64)),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_32x6_tn", Tile(m=128, n=64, k=32)),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
            Tile(m=64, n=128, k=64),
        ),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>(T1)",
            Tile(m=256, n=128, k=32),
        ),
        ("void at::native::vectorized_elementwise_kernel<4, 128x256_64x4_>", None),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>", None),
    ],
)
def test_a_kernel_says_its_tile(name: str, tile: Tile | None) -> None:
    assert tile_of_kernel(name) == tile
