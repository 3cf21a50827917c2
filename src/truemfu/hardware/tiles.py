"""Tile quantisation: how much more than 2·M·N·K a matrix product executes, because tiles overhang its edges.

A GEMM kernel covers its output with tiles and its inner dimension with blocks. Whole tiles are multiplied,
also beyond the edge, where the work of the tensor cores is wasted:

    factor = ⌈M/tm⌉·tm · ⌈N/tn⌉·tn · ⌈K/tk⌉·tk / (M·N·K)

**This is a model, not a measurement.** A library chooses its tile by an undocumented heuristic, so the one
with the least waste among the plausible ones is assumed: the largest tiles that still keep three quarters of
the SMs busy, else smaller ones. It is therefore a lower bound in most cases.
Nsight Compute measured 1.9 % more than 2·M·N·K over all products of a 2-layer Llama (hidden 2048, batch
4 × 1024) on an H200, and exactly 2·M·N·K for 4096³. If a kernel's name is known, `tile_of_kernel` gives
its actual tile. Left out: split-K, products grouped into one kernel, and the
fused attention kernels, which are not plain products.

This module only imports the standard library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Shape = tuple[int, int, int]
"""m, n, k of a product of m×k by k×n: 2·m·n·k FLOP. Batched products count once per member."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile of the output (m×n), and the block of the inner dimension that is multiplied at a time (k)."""

    m: int
    n: int
    k: int

    def executed_flops(self, shape: Shape) -> int:
        """FLOP of a product covered with whole tiles of this size."""
        m, n, k = shape
        return 2 * _up(m, self.m) * _up(n, self.n) * _up(k, self.k)

    def factor(self, shape: Shape) -> float:
        """Executed over needed FLOP of a product, at least 1."""
        m, n, k = shape
        return self.executed_flops(shape) / (2 * m * n * k)

    def tiles(self, shape: Shape) -> int:
        """How many tiles cover the output: one SM works on one at a time."""
        return -(-shape[0] // self.m) * -(-shape[1] // self.n)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


@dataclass(frozen=True, kw_only=True)
class _Family:
    """The output tiles of one generation's GEMM kernels, by size, and how deep a block is in bytes."""

    outputs: tuple[tuple[tuple[int, int], ...], ...]
    block_bytes: int
    usual_sm_count: int


_HOPPER = _Family(
    # As the names of cuBLAS' kernels (nvjet, sm90_xmma) and CUTLASS' give them.
    outputs=(
        ((128, 256), (256, 128), (192, 192), (128, 192), (192, 128)),
        ((128, 128), (64, 256), (256, 64), (64, 192), (192, 64)),
        ((64, 128), (128, 64), (64, 64)),
    ),
    block_bytes=128,
    usual_sm_count=132,
)
_AMPERE = _Family(
    # As in ampere_…gemm… and cutlass_80_tensorop_…; Ada runs these same kernels.
    outputs=(
        ((128, 256), (256, 128)),
        ((128, 128), (64, 256), (256, 64)),
        ((64, 128), (128, 64), (64, 64)),
    ),
    block_bytes=64,
    usual_sm_count=108,
)

_ENOUGH = 0.75
_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1}

_FAMILIES: Mapping[tuple[int, int], _Family] = {
    (8, 0): _AMPERE,
    (8, 6): _AMPERE,
    (8, 7): _AMPERE,
    (8, 9): _AMPERE,
    (9, 0): _HOPPER,
}


def tiles_of(compute_capability: tuple[int, int], dtype: str = "bf16") -> tuple[tuple[Tile, ...], ...] | None:
    """The tiles GEMM kernels of this generation use, in groups of like size, the largest first.

    None if they are not known.
    """
    family, size = _FAMILIES.get(compute_capability), _BYTES.get(dtype)
    if family is None or size is None:
        return None
    depth = family.block_bytes // size
    return tuple(tuple(Tile(m=m, n=n, k=depth) for m, n in group) for group in family.outputs)


def plausible_tile(
    shape: Shape, compute_capability: tuple[int, int], *, dtype: str = "bf16", sm_count: int | None = None
) -> Tile | None:
    """The tile with the least waste among the largest that keep enough SMs busy.

    The first group with tiles for three quarters of the SMs decides; if none has that many (a small
    product), every tile is plausible. At equal waste the first one is used. `sm_count` defaults to the
    usual chip of the generation. None for a generation, dtype or shape that is not known.
    """
    groups = tiles_of(compute_capability, dtype)
    if groups is None or min(shape) < 1:
        return None
    sms = sm_count or _FAMILIES[compute_capability].usual_sm_count
    for group in groups:
        filling = [tile for tile in group if tile.tiles(shape) >= _ENOUGH * sms]
        if filling:
            return min(filling, key=lambda tile: tile.factor(shape))
    return min((tile for group in groups for tile in group), key=lambda tile: tile.factor(shape))


def tile_factor(
    shape: Shape, compute_capability: tuple[int, int], *, dtype: str = "bf16", sm_count: int | None = None
) -> float | None:
    """Executed over needed FLOP of one product, by the model of this module; None if it does not apply.

    A matrix times a single vector runs outside the tensor cores: nothing is padded, the factor is 1.
    """
    tile = plausible_tile(shape, compute_capability, dtype=dtype, sm_count=sm_count)
    if tile is None:
        return None
    return 1.0 if min(shape[:2]) == 1 else tile.factor(shape)


def mean_tile_factor(
    flops_by_product: Mapping[tuple[str, Shape], float],
    compute_capability: tuple[int, int],
    *,
    sm_count: int | None = None,
    other_flops: float = 0.0,
    audited: Mapping[Shape, float] = MappingProxyType({}),
) -> float | None:
    """The factor over products by dtype and shape, each weighted by its FLOP: Σ flops·factor / Σ flops.

    `audited` are factors that were measured (`audited.py`); they take precedence over the model's.
    `other_flops` is counted work without tiles of its own here: it counts with factor 1. None if one
    product has no factor, a weight is not a valid amount, or there is no work.
    """
    needed = executed = float(other_flops)
    if min(flops_by_product.values(), default=0) < 0 or other_flops < 0:
        return None
    for (dtype, shape), flops in flops_by_product.items():
        factor = audited.get(shape)
        if factor is None:
            factor = tile_factor(shape, compute_capability, dtype=dtype, sm_count=sm_count)
        if factor is None:
            return None
        needed += flops
        executed += flops * factor
    return executed / needed if math.isfinite(executed) and needed > 0 else None


_IN_NAMES = (
    re.compile(r"tilesize(\d+)x(\d+)x(\d+)"),  # sm90_xmma_gemm_…_tilesize128x256x64_…
    re.compile(r"_(\d+)x(\d+)_(\d+)x\d+(?:_|$)"),  # nvjet_tst_128x256_64x4_…, cutlass_…_256x128_32x3_…
    re.compile(
        r"_(\d+)x(\d+)_.*?stages_(\d+)x\d+"
    ),  # ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5
)
_GEMM = re.compile(r"gemm|nvjet|xmma|cutlass", re.IGNORECASE)


def tile_of_kernel(name: str) -> Tile | None:
    """The tile that a GEMM kernel of cuBLAS or CUTLASS has in its name; None without one.

    Its m and n are those of the kernel's own problem. cuBLAS is column-major, so for torch's row-major
    product they are n and m: compare both ways.
    """
    if not _GEMM.search(name):
        return None
    for pattern in _IN_NAMES:
        if found := pattern.search(name):
            m, n, k = map(int, found.groups())
            return Tile(m=m, n=n, k=k)
    return None
