"""Terms are functions of a batch's sizes, told apart by their data."""

from __future__ import annotations

import pytest

from truemfu.flops.attention.pairs import Band
from truemfu.flops.closed_form import terms
from truemfu.flops.closed_form.matcher import Matcher
from truemfu.flops.operators.conv_sizes import SizeStep

SIZES = {
    "samples": 3,
    "length": 70,
    "frames": 5,
    "height": 33,
    "documents": [[7, 3], [10]],
    "grids": [(1, 4, 6), (2, 9, 5)],
}
POOLED = terms.after_step(SizeStep(3, 2, 1, ceil_mode=True), terms.size("height"))
VALUES = [
    (terms.ONE, 1),
    (terms.size("length"), 70),
    (terms.chunks("length", 64), 2),
    (terms.band_pairs("length", Band(ahead=0)), 70 * 71 // 2),
    (terms.band_pairs("length", Band(behind=1, ahead=0)), 70 + 69),
    (terms.document_pairs(Band()), 49 + 9 + 100),
    (terms.document_pairs(Band(ahead=0)), 28 + 6 + 55),
    (terms.documents(), 3),
    (terms.window_pairs(4), 1 * 16 * (16 + 4) + 2 * (16 + 16 + 1) * (16 + 1)),
    (POOLED, 17),
    (terms.after_step(SizeStep(2, 2, 0, transposed=True, output_padding=1), POOLED), 35),
    (terms.size("samples").times(terms.size("length")).times(POOLED.times(POOLED)), 3 * 70 * 17 * 17),
    *zip(terms.grid_terms([]), (24 + 90, 24**2 + 2 * 45**2, 24**2 + 90**2, 2, 3), strict=True),
]


@pytest.mark.parametrize(("term", "value"), VALUES, ids=lambda v: v.name if isinstance(v, terms.Term) else "")
def test_a_term_has_the_value_worked_out_by_hand(term: terms.Term, value: int) -> None:
    assert term.of(SIZES) == value


def test_no_two_of_these_terms_are_the_same() -> None:
    assert len({term for term, _ in VALUES}) == len(VALUES)


def test_a_product_with_one_is_the_term_itself() -> None:
    length = terms.size("length")
    assert terms.ONE.times(length) is length
    assert length.times(terms.ONE) is length


def test_terms_of_one_name_are_not_taken_for_each_other() -> None:
    """A pooling that rounds up, and a convolution that does not, are written alike."""
    plain, ceil = (
        terms.after_step(SizeStep(2, 2, 0, ceil_mode=up), terms.size("height")) for up in (False, True)
    )
    assert plain.name == ceil.name
    runs = [{"height": n} for n in (5, 9, 13, 8)]
    matcher = Matcher(runs, [plain, ceil], [])
    assert matcher.match((20, 40, 60, 40)) == ((10, plain),)
    assert matcher.match((30, 50, 70, 40)) == ((10, ceil),)
