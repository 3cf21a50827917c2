"""Matches GEMM launches with counted products, by kernel name and executed operations.

    launch: tile in the name, executed operations ─┐
    counted products: m, n, k                      ┴─► the one whose whole tiles give exactly this number

A kernel executes whole tiles, and clusters of tiles where it launches blocks in clusters
(`nvjet_…_192x192_64x4_2x1_…`: two tiles of 192 along one side). With the tile and the shape known, what it
executes beyond 2·m·n·k is arithmetic, so an equal integer is an exact match. Which of several products
with the same padded size a launch was does not matter for the sum. A kernel without a tile in its name
matches where nothing overhangs; split-K and grouped kernels match nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from ..tiles import Shape, Tile, tile_of_kernel

_CLUSTER = re.compile(r"nvjet\w*?_\d+x\d+_\d+x\d+_(\d+)x(\d+)_")


class Match(NamedTuple):
    """The product of a launch, and how many of them if it is batched."""

    shape: Shape
    members: int

    @property
    def needed_flops(self) -> int:
        return self.members * 2 * prod(self.shape)


def matched_products(
    launches: Sequence[tuple[str, int]], flops_by_shape: Mapping[Shape, int]
) -> list[Match | None]:
    """For each launch (kernel name, executed operations) its product; None without a match.

    `flops_by_shape` is the counted work: it is consumed, so that no product matches twice.
    """
    left = dict(flops_by_shape)
    found: list[Match | None] = [None] * len(launches)
    # A batched product is many in one launch. Single ones go first: many small ones can sum to any number.
    for members_allowed in (1, None):
        for index, (name, executed) in enumerate(launches):
            if found[index] is None and executed:
                found[index] = _take(name, executed, left, members_allowed)
    return found


def _take(name: str, executed: int, left: dict[Shape, int], members_allowed: int | None) -> Match | None:
    tiles = list(_tiles(name))
    best: tuple[int, int, Shape] | None = None
    for shape, remaining in left.items():
        needed = 2 * prod(shape)
        for padded in {needed, *(tile.executed_flops(s) for tile in tiles for s in _both_ways(shape))}:
            members, rest = divmod(executed, padded) if padded else (0, 1)
            fits = not rest and 0 < members * needed <= remaining
            if fits and (members_allowed is None or members <= members_allowed):
                best = min(best or (members, padded, shape), (members, padded, shape))
    if best is None:
        return None
    members, _, shape = best
    match = Match(shape, members)
    left[shape] -= match.needed_flops
    return match


def _both_ways(shape: Shape) -> tuple[Shape, Shape]:
    m, n, k = shape
    return (m, n, k), (n, m, k)


def _tiles(name: str) -> Iterator[Tile]:
    """The tile in a kernel's name, and the cluster of such tiles."""
    tile = tile_of_kernel(name)
    if tile is None:
        return
    yield tile
    if cluster := _CLUSTER.search(name):
        yield Tile(m=tile.m * int(cluster[1]), n=tile.n * int(cluster[2]), k=tile.k)
