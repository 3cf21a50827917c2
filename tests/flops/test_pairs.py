"""Pairs of query and key: a band's closed form against counting one by one, and bands read off masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from truemfu.flops.attention.pairs import CAUSAL, FULL, Band, band_of_mask, document_ids

LENGTH = 8
sides = st.none() | st.integers(0, 12)
bands = st.builds(Band, behind=sides, ahead=sides)


def allowed(band: Band, q_len: int, k_len: int) -> torch.Tensor:
    """The band as a mask, query by query."""
    return torch.tensor(
        [
            [
                (band.behind is None or i - j <= band.behind) and (band.ahead is None or j - i <= band.ahead)
                for j in range(k_len)
            ]
            for i in range(q_len)
        ],
        dtype=torch.bool,
    ).reshape(q_len, k_len)


def by_documents(mask: torch.Tensor, documents: list[int]) -> torch.Tensor:
    ids = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents))
    return mask & (ids[:, None] == ids[None, :])


# -- pairs of a band ------------------------------------------------------------------------------------


@given(bands, st.integers(0, 12))
def test_pairs_of_a_square(band: Band, length: int) -> None:
    assert band.pairs(length) == int(allowed(band, length, length).sum())


@given(bands, st.integers(0, 12), st.integers(0, 12))
def test_pairs_of_queries_and_keys(band: Band, q_len: int, k_len: int) -> None:
    assert band.pairs(q_len, k_len) == int(allowed(band, q_len, k_len).sum())


def test_well_known_bands() -> None:
    n, window = 1_000_000, 4096
    assert FULL.pairs(n) == n * n
    assert CAUSAL.pairs(n) == n * (n + 1) // 2
    # the first `window` queries see a triangle, every later one the whole window
    assert Band(behind=window - 1, ahead=0).pairs(n) == window * (window + 1) // 2 + (n - window) * window
    assert Band(behind=0, ahead=0).pairs(n) == n


# -- bands of masks -------------------------------------------------------------------------------------


@given(bands, st.integers(1, 12))
def test_the_band_read_off_a_mask_allows_the_same_pairs(band: Band, length: int) -> None:
    mask = allowed(band, length, length)
    found = band_of_mask(mask, [length])
    assert found is not None
    assert torch.equal(allowed(found, length, length), mask)


@given(bands, st.integers(1, 12), st.integers(1, 12))
def test_of_queries_and_keys_likewise_but_for_keys_that_nobody_sees(
    band: Band, q_len: int, k_len: int
) -> None:
    mask = allowed(band, q_len, k_len)
    found = band_of_mask(mask, [k_len])
    if found is not None:
        seen = mask.any(0)
        assert torch.equal(allowed(found, q_len, k_len)[:, seen], mask[:, seen])


@pytest.mark.parametrize(
    "band",
    [FULL, CAUSAL, Band(behind=0), Band(behind=2, ahead=0), Band(behind=2, ahead=2), Band(behind=0, ahead=3)],
)
def test_a_band_that_shows_is_read_as_it_is(band: Band) -> None:
    assert band_of_mask(allowed(band, LENGTH, LENGTH), [LENGTH]) == band


@pytest.mark.parametrize("window", [LENGTH - 1, LENGTH, LENGTH + 5])
def test_a_side_that_reaches_the_end_is_unbounded(window: int) -> None:
    assert band_of_mask(allowed(Band(behind=window, ahead=0), LENGTH, LENGTH), [LENGTH]) == CAUSAL


@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(behind=1, ahead=0), Band(behind=1, ahead=1)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("padding", [1, 3])
@pytest.mark.parametrize("blind", [False, True], ids=["padding looks on", "padding sees nothing"])
def test_padding_is_looked_past(band: Band, side: str, padding: int, blind: bool) -> None:
    mask = allowed(band, LENGTH, LENGTH)
    gone = slice(0, padding) if side == "left" else slice(LENGTH - padding, LENGTH)
    mask[:, gone] = False
    if blind:
        mask[gone] = False
    assert band_of_mask(mask, [LENGTH]) == band


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from([FULL, CAUSAL, Band(behind=1, ahead=0), Band(behind=1, ahead=1)]),
)
def test_documents_are_looked_past(documents: list[int], band: Band) -> None:
    length = sum(documents)
    found = band_of_mask(by_documents(allowed(band, length, length), documents), documents)
    assert found is not None
    # what the documents are too short to show may be read as unbounded, but pairs never change
    for n in documents:
        assert found.pairs(n) == band.pairs(n)


def test_a_window_across_documents_shows_in_the_long_one() -> None:
    documents = [2, 6]
    band = Band(behind=2, ahead=0)
    assert band_of_mask(by_documents(allowed(band, LENGTH, LENGTH), documents), documents) == band


def test_documents_the_mask_does_not_keep_apart_are_no_band_of_documents() -> None:
    assert band_of_mask(allowed(CAUSAL, LENGTH, LENGTH), [3, 5]) is None


def _prefix() -> torch.Tensor:
    mask = allowed(CAUSAL, LENGTH, LENGTH)
    mask[:, :3] = True
    return mask


def _blocks() -> torch.Tensor:
    return by_documents(torch.ones(LENGTH, LENGTH, dtype=torch.bool), [4, 4])


def _hole() -> torch.Tensor:
    mask = allowed(CAUSAL, LENGTH, LENGTH)
    mask[5, 2] = False
    return mask


def _strided() -> torch.Tensor:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]
    return (distance >= 0) & (distance % 2 == 0)


def _sinks() -> torch.Tensor:
    mask = allowed(Band(behind=2, ahead=0), LENGTH, LENGTH)
    mask[:, 0] = True
    return mask & allowed(CAUSAL, LENGTH, LENGTH)


@pytest.mark.parametrize("make", [_prefix, _blocks, _hole, _strided, _sinks], ids=lambda f: f.__name__[1:])
def test_a_mask_that_is_no_band_is_none(make: object) -> None:
    mask = make()  # type: ignore[operator]
    assert band_of_mask(mask, [LENGTH]) is None


def test_an_empty_mask_is_none() -> None:
    assert band_of_mask(torch.zeros(LENGTH, LENGTH, dtype=torch.bool), [LENGTH]) is None


@given(st.integers(1, 2**16 - 1))
def test_whatever_the_mask_a_band_is_never_made_up(bits: int) -> None:
    """Any 4×4 mask: a band is returned only if it explains every pair that is not padding."""
    mask = torch.tensor([bits >> i & 1 for i in range(16)], dtype=torch.bool).reshape(4, 4)
    found = band_of_mask(mask, [4])
    if found is not None:
        seen = mask.any(0)
        assert torch.equal(mask[seen][:, seen], allowed(found, 4, 4)[seen][:, seen])


def test_document_ids() -> None:
    assert document_ids([2, 1, 3], 6).tolist() == [0, 0, 1, 2, 2, 2]
