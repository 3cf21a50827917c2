"""The polynomials that FLOPs of real models are: sets of monomials of the varying sizes, smallest first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

Terms = tuple[tuple[int, ...], ...]
"""Monomials, each as the positions of its factors: (0, 1, 1) is the first size times the second squared."""

_MOST_SIZES = 4
_POLYNOMIALS = {
    0: ("1",),
    1: ("a", "1 a", "a aa", "aa", "1 aa", "aa aaaa", "1 a aa", "1 aa aaaa"),
    2: (
        *("ab", "a b", "1 ab", "ab aabb", "1 a b", "a b ab", "1 ab aabb", "1 a b ab"),
        *("a aa b bb ab", "1 a aa b bb ab"),
    ),
    3: ("abc", "1 abc", "abc aabbcc", "a b c", "1 abc aabbcc", "1 a b c"),
    4: ("a b c d", "1 a b c d"),
}
"""By the number of sizes: lengths (a aa), images (ab, and aabb for attention), square images (aa aaaa),
unpadded convolutions (1 a b ab), sums over documents (a b), two lengths (a aa b bb ab), video (abc)."""

_SUMS = ("a b", "1 a b", "a b c", "1 a b c")
"""Polynomials without a product. Sums over a batch have them; the samples of a batch do not multiply them."""


@cache
def candidates(sizes: int) -> tuple[Terms, ...]:
    """Sets of monomials of so many sizes, those with the fewest monomials first.

    Each of the polynomials, of all the sizes or some (FLOPs need not depend on every size), alone or times
    one of the sizes (the samples of a batch).
    """
    if sizes > _MOST_SIZES:
        every = tuple((at,) for at in range(sizes))
        return ((),), every, ((), *every)
    found: dict[frozenset[tuple[int, ...]], Terms] = {}
    for count in range(sizes + 1):
        for chosen in combinations(range(sizes), count):
            for factor in (None, *chosen):
                rest = [at for at in chosen if at != factor]
                for polynomial in _POLYNOMIALS[len(rest)]:
                    if factor is not None and polynomial in _SUMS:
                        continue
                    terms = tuple(_monomial(text, rest, factor) for text in polynomial.split())
                    found.setdefault(frozenset(terms), terms)
    return tuple(sorted(found.values(), key=len))


def values(terms: Terms, sizes: Sequence[int]) -> list[int]:
    """The monomials of a set at given sizes."""
    results = []
    for term in terms:
        value = 1
        for at in term:
            value *= sizes[at]
        results.append(value)
    return results


def _monomial(text: str, sizes: list[int], factor: int | None) -> tuple[int, ...]:
    letters = () if text == "1" else tuple(sizes["abcd".index(letter)] for letter in text)
    return tuple(sorted(letters if factor is None else (factor, *letters)))
