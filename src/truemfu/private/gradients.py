"""Per-sample gradients that are never stored: their norms, and their weighted sum.

    Outer     weights of a product: the gradient of sample i is the sum over positions t of l[i,t] r[i,t]ᵀ
    Sums      small parameters (biases, norms): the gradient of each sample itself; all of them side by side
              are one matrix, since a model has many of them

Of the two formulas for the norm of an outer product the cheaper one is used, by its products:

    ghost norm           ‖Σ_t l_t r_tᵀ‖² = Σ_t Σ_s (l_t·l_s)(r_t·r_s)        T² (p + q)
    per-sample gradient  ‖Lᵀ R‖²                                            T p q

Both Gram matrices of a use are symmetric: the positions are cut into blocks, and each pair of blocks is
computed once. Long sequences so take (1 + 1/n) / 2 of the ghost norm's products, with n blocks.

A parameter that is used several times has the sum of its uses as its gradient. The uses of one parameter are
therefore measured together: Gram matrices are taken between all pairs of uses, which gives the cross terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_ELEMENTS = 2**27
"""Of a temporary tensor: samples are measured a few at a time."""
_SMALLEST_BLOCK = 512
"""Positions of a block: products of smaller ones leave a GPU partly empty."""


class Sums(NamedTuple):
    """A use of a parameter that is no weight of a product."""

    per_sample: Tensor
    """The gradient of each sample, (samples, *shape of the parameter), in at least fp32."""

    @property
    def dtype(self) -> torch.dtype:
        return self.per_sample.dtype


class SmallParameters:
    """The gradients of each sample of all parameters that are not weights of products."""

    def __init__(self, uses: Mapping[str, Sequence[Sums]]) -> None:
        totals = {
            name: functools.reduce(torch.add, [one.per_sample for one in of_one])
            for name, of_one in uses.items()
        }
        self._shapes = {name: total.shape[1:] for name, total in totals.items()}
        self._all = torch.cat([total.flatten(1) for total in totals.values()], dim=1)

    def squared_norms(self) -> Tensor:
        return _squares(self._all)

    def weighted_sums(self, weights: Tensor) -> dict[str, Tensor]:
        """Of each parameter the sum of the samples' gradients, each times its weight."""
        sums = weights.to(self._all.dtype) @ self._all
        parts = sums.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(self._shapes[name]) for name, part in zip(self._shapes, parts, strict=True)}


class SampleWeights:
    """What each sample's gradient is multiplied by."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._repeated = values

    def times(self, rows: Tensor) -> Tensor:
        """Rows (samples, …), each times the weight of its sample.

        A product with a number for each sample takes a GPU longer than one of two whole tensors, and
        most layers of a model have rows of one shape.
        """
        if self._repeated.shape != rows.shape or self._repeated.dtype != rows.dtype:
            each = self.values.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))
            self._repeated = each.expand_as(rows).contiguous()
        return rows * self._repeated


class Outer:
    """A use of a weight (p, q) of a product: left (samples, positions, p), right (samples, positions, q)."""

    groups = 1
    keeps_factors = True
    """Whether its factors exist for as long as it does."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right, self.dtype = left, right, right.dtype
        self.positions, self.p, self.q = left.shape[1], left.shape[2], right.shape[2]

    def factors(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Both of these samples, (samples × groups, positions, p or q)."""
        return self.left[samples], self.right[samples]

    def left_gram(self, other: Outer) -> Gram:
        """How the left factors of this use and another one are multiplied."""
        return _of_rows_and_lookup if isinstance(other, Lookup) else _gram

    def weighted_sum(self, weights: SampleWeights) -> Tensor:
        """The sum of the samples' gradients, each times its weight, in the shape of the parameter."""
        left, right = self.left, self.right
        left, right = (weights.times(left), right) if self.p < self.q else (left, weights.times(right))
        found: Tensor = left.flatten(0, 1).T @ right.flatten(0, 1)
        return found


class Lookup(Outer):
    """An embedding: `left` has the index of the one row that each position looks up."""

    def __init__(self, ids: Tensor, right: Tensor, rows: int) -> None:
        super().__init__(ids[:, :, None], right)
        self.p = rows

    def left_gram(self, other: Outer) -> Gram:
        return _of_lookups if isinstance(other, Lookup) else _of_lookup_and_rows

    def weighted_sum(self, weights: SampleWeights) -> Tensor:
        scaled = weights.times(self.right)
        # Unlike index_add_, it sums in fp32 under bf16.
        found: Tensor = torch.ops.aten.embedding_dense_backward(scaled, self.left[:, :, 0], self.p, -1, False)
        return found


class Convolution(Outer):
    """A convolution's weight: positions of the output, and the patch of the input that each one sees."""

    keeps_factors = False

    def __init__(self, x: Tensor, grad: Tensor, shape: torch.Size, settings: ConvolutionSettings) -> None:
        self.x, self.grad, self.shape, self.settings = x, grad, shape, settings
        self.groups, self.dtype = settings.groups, grad.dtype
        self.positions = grad.shape[2:].numel()
        self.p, self.q = shape[0] // self.groups, shape[1:].numel()

    def factors(self, samples: slice) -> tuple[Tensor, Tensor]:
        settings, sizes = self.settings, self.shape[2:]
        x = torch.nn.functional.pad(
            self.x[samples], [width for one in reversed(settings.padding) for width in (one, one)]
        )
        for at, size in enumerate(sizes):
            reach = settings.dilation[at] * (size - 1) + 1
            x = x.unfold(2 + at, reach, settings.stride[at])[..., :: settings.dilation[at]]
        dims = len(sizes)  # x: (samples, channels, *positions, *patch)
        patches = x.unflatten(1, (self.groups, -1)).movedim(2, 2 + dims)
        right = patches.reshape(len(x) * self.groups, self.positions, self.q)
        left = self.grad[samples].reshape(len(x) * self.groups, self.p, self.positions).mT
        return left, right

    def weighted_sum(self, weights: SampleWeights) -> Tensor:
        settings = self.settings
        scaled = weights.times(self.grad)
        weight = self.grad.new_empty(1).expand(self.shape)
        spatial = len(self.shape) - 2
        found: Tensor = torch.ops.aten.convolution_backward(
            *(scaled, self.x, weight, None, settings.stride, settings.padding, settings.dilation),
            *(False, [0] * spatial, self.groups, [False, True, False]),
        )[1]
        return found


class ConvolutionSettings:
    """Stride, padding and dilation of each spatial dimension, and the number of groups."""

    def __init__(
        self, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
    ) -> None:
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups


Gradient = Outer | Sums
"""What one use of a parameter adds to the gradient of each sample; its `dtype` is what it was computed in."""


def squared_norms(uses: Sequence[Outer], samples: int, inputs: InputGrams) -> Tensor:
    """The squared norm of each sample's gradient of one parameter, over all its uses, in at least fp32."""
    first = uses[0]
    positions = sum(use.positions for use in uses)
    pairs = positions**2 - sum(_pairs_left_out(use.positions) for use in uses)
    ghost, direct = pairs * (first.p + first.q), positions * first.p * first.q
    is_ghost = ghost <= direct or any(isinstance(use, Lookup) for use in uses)
    each = first.groups * (positions**2 if is_ghost else first.p * first.q)
    parts = _parts(samples, each)
    if is_ghost:
        return torch.cat([_ghost_norms(uses, part, inputs) for part in parts])
    return torch.cat([_norms_of_gradients(uses, part) for part in parts])


def _parts(samples: int, elements: int) -> Iterator[slice]:
    at_once = max(1, _MOST_ELEMENTS // max(1, elements))
    return (slice(begin, min(begin + at_once, samples)) for begin in range(0, samples, at_once))


def _norms_of_gradients(uses: Sequence[Outer], part: slice) -> Tensor:
    products = (_product(left.mT, right) for left, right in (use.factors(part) for use in uses))
    gradient = next(products)
    for product in products:
        gradient = gradient + product
    return _squares(gradient.unflatten(0, (-1, uses[0].groups)))


class InputGrams:
    """The Gram matrices of the last input: query, key and value have the same one."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._grams: list[Tensor] = []

    def of(self, rows: Tensor) -> list[Tensor]:
        last = self._input
        if last is None or not (last.is_set_to(rows) and last.dtype == rows.dtype):
            self._input, self._grams = rows, _own_grams(rows)
        return self._grams


def _ghost_norms(uses: Sequence[Outer], part: slice, inputs: InputGrams) -> Tensor:
    factors = [use.factors(part) for use in uses]
    samples = len(factors[0][0]) // uses[0].groups
    squares = []
    for at, (use, (left, right)) in enumerate(zip(uses, factors, strict=True)):
        lefts = _own_grams(left, use.left_gram(use))
        rights = inputs.of(right) if use.keeps_factors else _own_grams(right)
        of_blocks, *crossed = (_sums(each, other, samples) for each, other in zip(lefts, rights, strict=True))
        squares += [of_blocks, *(2 * one for one in crossed)]
        for other, (other_left, other_right) in zip(uses[:at], factors, strict=False):
            common = torch.promote_types(right.dtype, other_right.dtype)  # they may differ under autocast
            between = use.left_gram(other)(left, other_left)
            squares.append(2 * _sums(between, _gram(right.to(common), other_right.to(common)), samples))
    total: Tensor = functools.reduce(torch.add, squares)
    return total.clamp(min=0)


Gram = Callable[[Tensor, Tensor], Tensor]
"""Rows of two blocks of positions ─► (samples, positions, other positions), the product of each pair."""


def _gram(one: Tensor, other: Tensor) -> Tensor:
    return _product(one, other.mT)


def _of_lookups(one: Tensor, other: Tensor) -> Tensor:
    """Their rows are one-hot."""
    return one == other.mT


def _of_lookup_and_rows(one: Tensor, other: Tensor) -> Tensor:
    return other.gather(2, one.mT.expand(-1, other.shape[1], -1)).mT


def _of_rows_and_lookup(one: Tensor, other: Tensor) -> Tensor:
    return one.gather(2, other.mT.expand(-1, one.shape[1], -1))


def _own_grams(rows: Tensor, gram: Gram = _gram) -> list[Tensor]:
    """Of each block of positions with itself; then of each half with the other, which counts twice."""
    if not _has_halves(rows.shape[1]):
        return [gram(rows, rows)]
    first, second = rows.chunk(2, dim=1)
    return [*_own_grams(rows.unflatten(1, (2, -1)).flatten(0, 1), gram), gram(first, second)]


def _has_halves(positions: int) -> bool:
    return positions >= 2 * _SMALLEST_BLOCK and positions % 2 == 0


def _pairs_left_out(positions: int) -> int:
    """Pairs of positions that symmetry spares."""
    left_out, blocks = 0, 1
    while _has_halves(positions):
        positions //= 2
        left_out += blocks * positions**2
        blocks *= 2
    return left_out


def _sums(lefts: Tensor, rights: Tensor, samples: int) -> Tensor:
    """Of each sample the sum over all pairs of positions; `lefts` is overwritten."""
    products = lefts.to(rights.dtype).mul_(rights)
    found: Tensor = products.unflatten(0, (samples, -1)).sum((1, 2, 3))
    return found


def _product(one: Tensor, other: Tensor) -> Tensor:
    """In at least fp32: positions may cancel each other, and then a norm of rounded products is mostly
    rounding. A sample whose norm is found too small is not clipped.
    """
    dtype = at_least_fp32(one)
    if dtype == one.dtype:
        return one @ other
    if one.is_cuda and torch.version.cuda and "dtype" in torch.ops.aten.bmm.overloads():
        found: Tensor = torch.ops.aten.bmm.dtype(one, other, dtype)  # without copies in fp32
        return found
    return one.to(dtype) @ other.to(dtype)


def _squares(gradients: Tensor) -> Tensor:
    dtype = at_least_fp32(gradients)
    norms: Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=dtype)
    return norms.square()


def at_least_fp32(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)
