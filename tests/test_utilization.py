"""MFU and HFU are plain ratios, None where a part is unknown, and never clamped."""

from __future__ import annotations

import math

import pytest

from truemfu import errors
from truemfu.convention import Convention
from truemfu.errors import TruemfuWarning
from truemfu.flops.flop_count import FlopCount
from truemfu.utilization import Utilization, calculate_mfu


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_already_warned", set())
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)


def _count(**by_dtype: int) -> FlopCount:
    total = sum(by_dtype.values())
    return FlopCount(
        forward=total // 4,
        backward=total - total // 4,
        recompute=total // 2,
        by_dtype=by_dtype,
        method="count",
        convention=Convention(attention="causal"),
    )


def test_mfu_is_the_plain_ratio() -> None:
    assert calculate_mfu(3e14, 1.0, 1e15) == pytest.approx(0.3)
    assert calculate_mfu(3e14, 2.0, 1e15) == pytest.approx(0.15)
    assert calculate_mfu(0, 1.0, 1e15) == 0.0


@pytest.mark.parametrize(
    ("flops", "compute_time", "gpu_peak_flops"),
    [
        (None, 1.0, 1e15),
        (1e14, None, 1e15),
        (1e14, 1.0, None),
        (1e14, 0.0, 1e15),
        (1e14, -1.0, 1e15),
        (1e14, math.nan, 1e15),
        (1e14, math.inf, 1e15),
        (1e14, 1.0, 0.0),
        (1e14, 1.0, -1e15),
        (1e14, 1.0, math.nan),
        (1e14, 1.0, math.inf),
        (math.nan, 1.0, 1e15),
        (-1.0, 1.0, 1e15),
    ],
)
def test_mfu_is_none_when_a_part_is_unknown(
    flops: float | None, compute_time: float | None, gpu_peak_flops: float | None
) -> None:
    assert calculate_mfu(flops, compute_time, gpu_peak_flops) is None


def test_above_one_is_shown_as_it_is_with_one_warning() -> None:
    with pytest.warns(TruemfuWarning, match=r"wrong peak.*not synchronised.*a different dtype"):
        assert calculate_mfu(3e15, 1.0, 1e15) == 3.0
    assert calculate_mfu(4e15, 1.0, 1e15) == 4.0  # a second warning would be an error here


def test_utilization_of_a_count_against_the_datasheet() -> None:
    used = Utilization.of(_count(bf16=400), 2.0, device="NVIDIA H200")
    assert used == Utilization(
        mfu=pytest.approx(200 / 989.4e12),
        hfu=pytest.approx(300 / 989.4e12),
        achieved_flops_per_s=200.0,
        executed_flops_per_s=300.0,
        peak_flops_per_s=pytest.approx(989.4e12),
        peak_source="datasheet: NVIDIA H200",
        step_time_s=2.0,
        method="count",
        convention=Convention(attention="causal"),
    )


def test_the_peak_of_a_mix_makes_the_ideal_times_add_up() -> None:
    used = Utilization.of(_count(bf16=300, fp32=100, fp8=0), 1.0, device="NVIDIA H200")
    assert used.peak_flops_per_s == pytest.approx(400 / (300 / 989.4e12 + 100 / 66.9e12))


def test_a_dtype_without_a_peak_makes_the_whole_unknown() -> None:
    with pytest.warns(TruemfuWarning, match="no fp8 peak is known for NVIDIA A100 SXM4 80GB"):
        used = Utilization.of(_count(bf16=300, fp8=100), 1.0, device="NVIDIA A100-SXM4-80GB")
    assert (used.mfu, used.hfu, used.peak_flops_per_s, used.peak_source) == (None, None, None, None)
    assert used.achieved_flops_per_s == 400.0


def test_a_count_that_knows_no_dtypes_has_no_peak() -> None:
    assert Utilization.of(_count(), 1.0, device="NVIDIA H200").peak_flops_per_s is None


def test_an_unknown_device_gives_no_mfu_and_one_warning() -> None:
    with pytest.warns(TruemfuWarning, match="'NVIDIA A16'"):
        used = Utilization.of(_count(bf16=400), 1.0, device="NVIDIA A16")
    assert used.mfu is None
    assert used.executed_flops_per_s == 600.0


def test_a_cpu_gives_no_mfu_and_no_warning() -> None:
    assert Utilization.of(_count(fp32=400), 1.0, device="cpu").mfu is None


def test_a_given_peak_wins_and_says_where_it_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    given = Utilization.of(_count(bf16=400), 1.0, peak_flops_per_s=1600.0)
    assert (given.mfu, given.hfu, given.peak_source) == (0.25, 0.375, "override")
    measured = Utilization.of(
        _count(bf16=400), 1.0, peak_flops_per_s=800.0, peak_source="measured matmul ceiling"
    )
    assert (measured.mfu, measured.peak_source) == (0.5, "measured matmul ceiling")


def test_the_environment_wins_over_the_datasheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    used = Utilization.of(_count(bf16=400), 1.0, device="NVIDIA H200")
    assert (used.peak_flops_per_s, used.peak_source) == (1e12, "override")


@pytest.mark.parametrize("step_time_s", [None, 0.0, math.nan])
def test_no_step_time_gives_no_rates(step_time_s: float | None) -> None:
    used = Utilization.of(_count(bf16=400), step_time_s, device="NVIDIA H200")
    assert (used.mfu, used.hfu, used.achieved_flops_per_s, used.executed_flops_per_s) == (None,) * 4
    assert used.peak_flops_per_s == pytest.approx(989.4e12)


def test_as_dict_has_the_attribute_names() -> None:
    used = Utilization.of(_count(bf16=400), 1.0, peak_flops_per_s=1600.0)
    assert used.as_dict() == {
        "mfu": 0.25,
        "hfu": 0.375,
        "achieved_flops_per_s": 400.0,
        "executed_flops_per_s": 600.0,
        "peak_flops_per_s": 1600.0,
        "peak_source": "override",
        "step_time_s": 1.0,
        "method": "count",
        "convention": {"attention": "causal"},
    }
