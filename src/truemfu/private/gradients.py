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
from collections.abc import Iterator, Mapping, Sequence
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

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right, self.dtype = left, right, right.dtype
        self.positions, self.p, self.q = left.shape[1], left.shape[2], right.shape[2]

    def factors(self, samples: slice) -> tuple[Tensor, Tensor]:
        """Both of these samples, (samples × groups, positions, p or q)."""
        return self.left[samples], self.right[samples]

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

    def weighted_sum(self, weights: SampleWeights) -> Tensor:
        scaled = weights.times(self.right)
        # Unlike index_add_, it sums in fp32 under bf16.
        found: Tensor = torch.ops.aten.embedding_dense_backward(scaled, self.left[:, :, 0], self.p, -1, False)
        return found


class Convolution(Outer):
    """A convolution's weight: positions of the output, and the patch of the input that each one sees."""

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


def squared_norms(uses: Sequence[Outer], samples: int) -> Tensor:
    """The squared norm of each sample's gradient of one parameter, over all its uses, in at least fp32."""
    first = uses[0]
    positions = sum(use.positions for use in uses)
    pairs = positions**2 - sum(_pairs_left_out(use) for use in uses)
    ghost, direct = pairs * (first.p + first.q), positions * first.p * first.q
    is_ghost = ghost <= direct or any(isinstance(use, Lookup) for use in uses)
    each = first.groups * (positions**2 if is_ghost else first.p * first.q)
    norms = _ghost_norms if is_ghost else _norms_of_gradients
    return torch.cat([norms(uses, part) for part in _parts(samples, each)])


def _parts(samples: int, elements: int) -> Iterator[slice]:
    at_once = max(1, _MOST_ELEMENTS // max(1, elements))
    return (slice(begin, min(begin + at_once, samples)) for begin in range(0, samples, at_once))


def _norms_of_gradients(uses: Sequence[Outer], part: slice) -> Tensor:
    products = (_product(left.mT, right) for left, right in (use.factors(part) for use in uses))
    gradient = next(products)
    for product in products:
        gradient = gradient + product
    return _squares(gradient.unflatten(0, (-1, uses[0].groups)))


class _Factors(NamedTuple):
    """Both factors of one use, or of a block of its positions."""

    left: Tensor
    right: Tensor
    is_lookup: bool


def _ghost_norms(uses: Sequence[Outer], part: slice) -> Tensor:
    rows = [_Factors(*use.factors(part), isinstance(use, Lookup)) for use in uses]
    groups = uses[0].groups
    squares = []
    for at, one in enumerate(rows):
        squares.append(_with_itself(one, groups))
        squares += [2 * _between(one, other, groups) for other in rows[:at]]
    total: Tensor = functools.reduce(torch.add, squares)
    return total.clamp(min=0)


def _with_itself(rows: _Factors, groups: int) -> Tensor:
    """Σ_t Σ_s (l_t·l_s)(r_t·r_s) of each sample: two halves with themselves, and twice one with the other."""
    left, right, is_lookup = rows
    if not _has_halves(left.shape[1], is_lookup):
        return _between(rows, rows, groups)
    both = _Factors(_halved(left), _halved(right), is_lookup)
    (first, second), (its_first, its_second) = left.chunk(2, dim=1), right.chunk(2, dim=1)
    crossed = _between(_Factors(first, its_first, is_lookup), _Factors(second, its_second, is_lookup), groups)
    return _with_itself(both, 2 * groups) + 2 * crossed


def _halved(values: Tensor) -> Tensor:
    found: Tensor = values.unflatten(1, (2, -1)).flatten(0, 1)
    return found


def _has_halves(positions: int, is_lookup: bool) -> bool:
    return positions >= 2 * _SMALLEST_BLOCK and positions % 2 == 0 and not is_lookup


def _pairs_left_out(use: Outer) -> int:
    """Pairs of positions that symmetry spares."""
    left_out, positions, blocks = 0, use.positions, 1
    while _has_halves(positions, isinstance(use, Lookup)):
        positions //= 2
        left_out += blocks * positions**2
        blocks *= 2
    return left_out


def _between(one: _Factors, other: _Factors, groups: int) -> Tensor:
    """The same over the positions of two uses or blocks, (samples,)."""
    common = torch.promote_types(one.right.dtype, other.right.dtype)  # they may differ under autocast
    rights = _product(one.right.to(common), other.right.to(common).mT)
    lefts = _left_gram(one.left, other.left, one.is_lookup, other.is_lookup)
    products = lefts.to(rights.dtype).mul_(rights)
    found: Tensor = products.unflatten(0, (-1, groups)).sum((1, 2, 3))
    return found


def _left_gram(left: Tensor, other: Tensor, is_lookup: bool, is_other_lookup: bool) -> Tensor:
    """(samples, positions, other positions); the rows of a lookup are one-hot."""
    if is_lookup and is_other_lookup:
        return left == other.mT
    if is_lookup:
        return other.gather(2, left.mT.expand(-1, other.shape[1], -1)).mT
    if is_other_lookup:
        return left.gather(2, other.mT.expand(-1, left.shape[1], -1))
    return _product(left, other.mT)


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
