"""Which sizes of a kind of inputs vary independently, and for which values observed steps speak."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from math import gcd
from operator import le

from .linear import Linear, solve

_Points = Sequence[tuple[int, ...]]


class SizeRange:
    """The values from the smallest observed one to the largest, on the grid that all observed ones share.

    What rounds (strides, patches, windows, padding) is a polynomial on a grid of its own period:
    values off the observed grid may be rounded where the observed ones were not.
    """

    def __init__(self, observed: Sequence[int]) -> None:
        self._low, self._high = min(observed), max(observed)
        self._stride = gcd(*(value - self._low for value in observed))

    def __contains__(self, value: int) -> bool:
        is_between = self._low <= value <= self._high
        return is_between and (self._stride == 0 or (value - self._low) % self._stride == 0)


class Varying:
    """The sizes of one kind of inputs: a basis of independent ones, and how the others follow from it."""

    def __init__(self, names: tuple[str, ...], steps: Sequence[_Points]) -> None:
        points = sorted({point for step in steps for point in step})
        columns = list(zip(*points, strict=True))
        self.names = names
        self._count = SizeRange([len(step) for step in steps])
        self._ranges = [SizeRange(column) for column in columns]
        self._sums: list[tuple[int, Linear]] = []
        self._products: list[tuple[int, int, int, int, int]] = []
        self.basis: list[int] = []
        """Positions of the sizes that vary independently of each other."""
        for index, column in enumerate(columns):
            as_sum = solve(1 + len(self.basis), ((self._affine(point), (point[index],)) for point in points))
            if as_sum is not None:
                if len(set(column)) > 1:
                    self._sums.append((index, as_sum))
            elif as_product := _product(columns, index):
                self._products.append(as_product)
            else:
                self.basis.append(index)
        bases = {tuple(point[at] for at in self.basis) for point in points}
        self._largest = [
            one for one in bases if not any(one != other and all(map(le, one, other)) for other in bases)
        ]

    def covers(self, points: _Points) -> bool:
        """Whether observed steps speak for micro-batches of these sizes."""
        return len(points) in self._count and all(map(self._covers, points))

    def _covers(self, point: tuple[int, ...]) -> bool:
        for size, value in zip(self._ranges, point, strict=True):
            if value not in size:
                return False
        for index, linear in self._sums:
            row = self._affine(point)[: 1 + sum(at < index for at in self.basis)]
            if linear.integers(row) != [point[index]]:
                return False
        for index, first, second, numerator, denominator in self._products:
            if point[index] * denominator != point[first] * point[second] * numerator:
                return False
        return True

    def is_below_an_observed(self, point: tuple[int, ...]) -> bool:
        """Whether one observed micro-batch had each of the independent sizes at least as large as here."""
        sizes = [point[at] for at in self.basis]
        return any(all(map(le, sizes, largest)) for largest in self._largest)

    def _affine(self, point: tuple[int, ...]) -> list[int]:
        return [1, *(point[at] for at in self.basis)]


def _product(columns: Sequence[tuple[int, ...]], index: int) -> tuple[int, int, int, int, int] | None:
    """The two earlier sizes whose product this size is a multiple of, with numerator and denominator."""
    column = columns[index]
    varying = [at for at in range(index) if len(set(columns[at])) > 1]
    for first, second in combinations_with_replacement(varying, 2):
        products = [one * other for one, other in zip(columns[first], columns[second], strict=True)]
        pairs = zip(column, products, strict=True)
        if products[0] and all(value * products[0] == column[0] * other for value, other in pairs):
            return index, first, second, column[0], products[0]
    return None
