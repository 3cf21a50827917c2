"""Counted and executed agree, or the difference comes with what is likely, from evidence alone."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from truemfu.crosscheck import CAUSAL_SHARE, OtherProcess, crosscheck


def causes(counted: float, executed: float, **evidence: Any) -> list[str]:
    result = crosscheck(counted, executed, **evidence)
    assert result is not None
    assert not result.agrees
    assert result.notice is not None
    assert "\n" not in result.notice
    return [cause.key for cause in result.causes]


@pytest.mark.parametrize("executed", [91.0, 100.0, 109.0])
def test_small_differences_are_agreement(executed: float) -> None:
    result = crosscheck(100.0, executed, uncounted={"mylib::mm": 3}, other_processes=[OtherProcess(pid=7)])
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
    assert causes(100.0, 170.0, other_processes=[OtherProcess(pid=43)]) == ["other_process"]
    assert causes(100.0, 170.0) == ["unknown"]


def test_recomputation_beyond_what_was_counted_is_named() -> None:
    """A fused attention backward counts a little; checkpointing that nobody saw is still possible."""
    assert causes(100.0, 130.0, forward_flops=32.0, recompute_flops=0.6) == ["recomputation"]
    assert causes(100.0, 130.0, forward_flops=25.0, recompute_flops=25.0) == ["unknown"]


@pytest.mark.parametrize(
    ("executed", "words"),
    [(200.0, r"half the rate.*tf32"), (205.0, r"half the rate"), (50.0, r"twice the rate.*fp8")],
)
def test_a_factor_of_two_is_a_dtype(executed: float, words: str) -> None:
    assert causes(100.0, executed) == ["dtype"]
    result = crosscheck(100.0, executed)
    assert result is not None
    assert re.search(words, str(result.notice))
    # Operations that were counted one by one know their dtype.
    assert causes(100.0, executed, exact=True) == ["unknown"]


def test_recomputation_is_likely_up_to_one_more_forward() -> None:
    assert causes(300.0, 400.0) == ["recomputation"]
    assert causes(300.0, 380.0, forward_flops=100.0) == ["recomputation"]
    assert causes(300.0, 450.0) == ["unknown"]
    # A small forward (adapters, frozen parts) cannot explain that much.
    assert causes(300.0, 400.0, forward_flops=30.0) == ["unknown"]
    # It was seen and counted already.
    assert causes(300.0, 400.0, recompute_flops=80.0) == ["unknown"]


def test_a_counter_that_ticks_for_elementwise_work_may_be_a_little_high() -> None:
    assert causes(100.0, 115.0, recompute_flops=1.0) == ["elementwise"]
    assert causes(100.0, 115.0, recompute_flops=1.0, exact=True) == ["unknown"]
    assert causes(100.0, 150.0, recompute_flops=1.0) == ["unknown"]


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
        other_processes=[OtherProcess(pid=9)],
    )
    assert found == ["other_process", "uncounted", "recomputation"]


def test_without_evidence_nothing_is_guessed() -> None:
    result = crosscheck(100.0, 500.0)
    assert result is not None
    assert [cause.key for cause in result.causes] == ["unknown"]
    assert result.notice is not None
    assert "truemfu audit" in result.notice


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
    assert (read["agrees"], read["causes"][0]["key"]) == (False, "dtype")
