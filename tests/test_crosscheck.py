"""Counted and executed agree, or the difference comes with what is likely, from evidence alone."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from truemfu import crosscheck as module
from truemfu.crosscheck import CAUSAL_SHARE, CrossCheck, KnownWork


def crosscheck(counted: float | None, executed: float | None, **known: Any) -> CrossCheck | None:
    options = {name: known.pop(name) for name in ("exact", "is_upper_bound", "threshold") if name in known}
    return module.crosscheck(counted, executed, KnownWork(**known), **options)


def causes(counted: float, executed: float, **known: Any) -> list[str]:
    result = crosscheck(counted, executed, **known)
    assert result is not None
    assert not result.agrees
    assert result.notice is not None
    assert "\n" not in result.notice
    return [cause.key for cause in result.causes]


@pytest.mark.parametrize("executed", [91.0, 100.0, 109.0])
def test_small_differences_are_agreement(executed: float) -> None:
    result = crosscheck(100.0, executed, uncounted={"mylib::mm": 3}, other_processes=[7])
    assert result is not None
    assert result.agrees
    assert result.causes == ()
    assert result.notice is None


def test_tiles_and_masks_are_taken_out_first() -> None:
    result = crosscheck(
        100.0,
        80 * 1.02 + 20 * CAUSAL_SHARE,
        attention_flops=20.0,
        attention_executed_share=CAUSAL_SHARE,
        tile_factor=1.02,
    )
    assert result is not None
    assert result.ratio == pytest.approx(1)
    assert result.as_metrics() == pytest.approx(
        {"perf/executed_over_counted": 0.9285, "perf/executed_over_expected": 1.0}
    )


@pytest.mark.parametrize(("executed", "agrees"), [(85.0, False), (95.0, True), (343.0, True), (890.0, False)])
def test_smaller_tiles_than_the_model_takes_are_no_alarm(executed: float, agrees: bool) -> None:
    """An H200 executed 3.43 times the count of 8×64×64 products where the model of tiles said 8."""
    result = crosscheck(100.0, executed, tile_factor=8.0)
    assert result is not None
    assert result.agrees is agrees
    if not agrees:
        against = "85 against 100" if executed < 100 else "890 against 800"
        assert against in str(result.notice)
    exact = crosscheck(100.0, executed, tile_factor=8.0, exact=True)
    assert exact is not None
    assert not exact.agrees


def test_tiles_of_large_products_are_known_well_enough() -> None:
    result = crosscheck(100.0, 96.0, tile_factor=1.08)
    assert result is not None
    assert not result.agrees


def test_operators_without_a_formula_are_named() -> None:
    uncounted = {"a::one": 1, "b::two": 8, "c::three": 4, "d::four": 2, "e::five": 1}
    assert causes(100.0, 170.0, uncounted=uncounted) == ["uncounted"]
    result = crosscheck(100.0, 170.0, uncounted=uncounted)
    assert result is not None
    assert result.notice == (
        "the GPU executed 1.70 times what the count expects (170 against 100 FLOP); likely: operators "
        "without a formula do matrix work: b::two, c::three, d::four and 2 more"
    )


def test_another_process_is_named() -> None:
    assert causes(100.0, 170.0, other_processes=[43]) == ["other_process"]
    assert causes(100.0, 170.0) == ["unknown"]


@pytest.mark.parametrize("executed", [50.0, 115.0, 130.0, 133.0, 200.0, 500.0])
@pytest.mark.parametrize("is_upper_bound", [True, False])
def test_a_size_alone_is_no_evidence(executed: float, is_upper_bound: bool) -> None:
    """A third more may be recomputation and twice may be a dtype, but nothing in the count speaks for it."""
    assert causes(100.0, executed, is_upper_bound=is_upper_bound) == ["unknown"]
    result = crosscheck(100.0, executed)
    assert result is not None
    assert str(result.notice).endswith("FLOP); cause unknown: run `truemfu audit`")


def test_an_upper_bound_is_called_one() -> None:
    result = crosscheck(100.0, 130.0, is_upper_bound=True)
    assert result is not None
    assert result.notice == (
        "the GPU executed at most 1.30 times what the count expects (130 against 100 FLOP, an upper bound "
        "without an audit); cause unknown: run `truemfu audit`"
    )


VIT, VIT_PATCHES = 4_141e9, 78.92e9
RESNET, RESNET_FIRST = 2_726e9, 120.85e9


@pytest.mark.parametrize(
    ("counted", "first", "ratio"), [(VIT, VIT_PATCHES, 1.1080), (RESNET, RESNET_FIRST, 1.2778)]
)
def test_a_convolution_of_three_channels_is_named_where_its_amount_fits(
    counted: float, first: float, ratio: float
) -> None:
    """The ratios of Nsight Compute on an H200; by activity without an audit 1.0642 and 1.1269 times these."""
    exact = {"exact": True, "threshold": 0.05}
    assert causes(counted, ratio * counted, few_channel_flops=first, **exact) == ["few_channels"]
    read = {VIT: 1.0642, RESNET: 1.1269}[counted] * ratio
    assert causes(counted, read * counted, few_channel_flops=first, is_upper_bound=True) == ["few_channels"]
    # Without such a convolution, or where it is too small for the difference, nothing is named.
    assert causes(counted, ratio * counted, **exact) == ["unknown"]
    assert causes(counted, ratio * counted, few_channel_flops=first / 20, **exact) == ["unknown"]
    assert causes(counted, 2 * counted, few_channel_flops=first, **exact) == ["unknown"]


def test_grouped_products_are_named_where_their_padding_fits() -> None:
    """64 experts on an H200: 0.3388 of the expected is grouped, padded to 1.25 at most, executed 1.0611."""
    grouped = {"grouped_flops": 33.88, "grouped_padded_flops": 33.88 * 1.248, "threshold": 0.05}
    assert causes(100.0, 106.11, **grouped) == ["grouped_products"]
    assert causes(100.0, 106.11, threshold=0.05) == ["unknown"]
    assert causes(100.0, 130.0, **grouped) == ["unknown"]
    # Few large groups have nothing to pad.
    large = {**grouped, "grouped_padded_flops": 33.88 * 1.01}
    assert causes(100.0, 106.11, **large) == ["unknown"]


def test_older_instructions_are_named_where_sizes_are_no_multiples_of_eight() -> None:
    """4095 × 4095 × 4096 in bf16 on an H200: activity reads 2.0000 of what is executed."""
    assert causes(100.0, 200.0, unaligned_flops=100.0, is_upper_bound=True) == ["unaligned"]
    assert causes(100.0, 140.0, unaligned_flops=40.0, is_upper_bound=True) == ["unaligned"]
    assert causes(100.0, 200.0, unaligned_flops=40.0, is_upper_bound=True) == ["unknown"]
    # An audit has taken that out of the executed.
    assert causes(100.0, 200.0, unaligned_flops=100.0) == ["unknown"]


def test_causal_kernels_under_the_full_convention() -> None:
    executed = 60 + 40 * CAUSAL_SHARE
    result = crosscheck(100.0, executed, attention_flops=40.0)
    assert result is not None
    (cause,) = result.causes
    assert cause.key == "masked_attention"
    assert cause.predicted_ratio == pytest.approx(executed / 100)
    assert "0.5625" in cause.sentence
    # Attention of 40 % cannot explain that half of everything is missing.
    assert causes(100.0, 40.0, attention_flops=40.0) == ["unknown"]
    # It was taken out already.
    assert causes(100.0, 60.0, attention_flops=40.0, attention_executed_share=1.0) == ["unknown"]


def test_plain_fp32_is_not_seen_by_the_tensor_pipe() -> None:
    assert causes(100.0, 70.0, flops_by_dtype={"bf16": 70.0, "fp32": 30.0}) == ["plain_fp32"]


def test_the_best_evidence_comes_first() -> None:
    found = causes(
        100.0,
        130.0,
        uncounted={"mylib::mm": 1},
        other_processes=[9],
        few_channel_flops=5.0,
    )
    assert found == ["other_process", "uncounted", "few_channels"]


@pytest.mark.parametrize("bad", [None, 0.0, -1.0, math.nan, math.inf])
def test_nothing_to_compare_is_none(bad: float | None) -> None:
    assert crosscheck(bad, 100.0) is None
    assert crosscheck(100.0, bad) is None


def test_the_threshold_is_the_callers() -> None:
    result = crosscheck(100.0, 105.0, threshold=0.02)
    assert result is not None
    assert not result.agrees


def test_as_dict_is_ready_for_json() -> None:
    result = crosscheck(100.0, 200.0)
    assert result is not None
    read = json.loads(json.dumps(result.as_dict()))
    assert (read["agrees"], read["causes"][0]["key"]) == (False, "unknown")
