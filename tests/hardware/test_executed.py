"""Activity × clock → FLOP/s, against what was measured on an H200 (driver 580, torch 2.11, 2026-11-15)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.hardware.recorded import MATMUL, PRODUCTS, played, window_of

from truemfu.hardware.counters.executed import (
    counted_clock_hz,
    datasheet_clock_hz,
    executed_flops_per_s,
    hmma_rate,
    relative_rate,
)
from truemfu.hardware.counters.samples import CounterWindow, Cycles
from truemfu.hardware.detect import find_spec
from truemfu.hardware.specs import DeviceSpec


@pytest.fixture
def h200() -> DeviceSpec:
    spec = find_spec("NVIDIA H200", None)
    assert spec is not None
    return spec


def window(**values: Any) -> CounterWindow:
    return CounterWindow(index=0, begin_s=0.0, end_s=3.0, seconds=3.0, **values)


@pytest.mark.parametrize(
    ("dtype", "activities", "reported_hz", "counted_hz", "tflops"),
    [
        ("bf16", {"hmma_active": 0.87656}, 1515.9e6, 1367.0e6, 648.0),
        ("tf32", {"hmma_active": 0.89215}, 1541.6e6, 1398.5e6, 336.1),
        ("fp8", {"hmma_active": 0.84975}, 1497.6e6, 1340.2e6, 1214.0),
        ("fp64", {"hmma_active": 0.0, "dfma_active": 0.93945}, 1826.0e6, 1802.7e6, 57.53),
    ],
)
def test_sustained_products_on_an_h200(
    h200: DeviceSpec,
    dtype: str,
    activities: dict[str, float],
    reported_hz: float,
    counted_hz: float,
    tflops: float,
) -> None:
    """`tflops` is 2·8192³ (8192×32000×2048, 4096³) over the time of a product."""
    seen = window(sm_clock_hz=reported_hz, **activities)
    executed = executed_flops_per_s(seen, h200, flops_by_dtype={dtype: 1.0}, clock_hz=counted_hz)
    assert executed == pytest.approx(tflops * 1e12, rel=0.02)
    by_the_driver = executed_flops_per_s(seen, h200, flops_by_dtype={dtype: 1.0})
    assert by_the_driver is not None
    assert executed is not None
    assert by_the_driver / executed == pytest.approx(reported_hz / counted_hz)


def test_rates_are_powers_of_two_though_the_datasheet_has_several_clocks(h200: DeviceSpec) -> None:
    assert {dtype: relative_rate(h200, dtype) for dtype in ("fp8", "fp16", "tf32", "fp64", "int8")} == {
        "fp8": 2.0,
        "fp16": 1.0,
        "tf32": 0.5,
        "fp64": 1 / 16,
        "int8": 2.0,
    }
    assert datasheet_clock_hz(h200) == pytest.approx(1830e6, rel=0.001)


def test_a_mix_of_dtypes_has_the_rate_at_which_cycles_add_up(h200: DeviceSpec) -> None:
    """As many FLOPs in tf32 as in bf16 take three cycles where bf16 alone takes two."""
    assert hmma_rate(h200, {"bf16": 1e12, "tf32": 1e12}) == pytest.approx(2 / 3)
    assert hmma_rate(h200, {"fp32": 1e12}) == 1.0
    assert hmma_rate(h200, {}) == 1.0


def test_every_pipe_adds_its_own(h200: DeviceSpec) -> None:
    both = window(hmma_active=0.5, imma_active=0.25, dfma_active=0.125, sm_clock_hz=1e9)
    assert executed_flops_per_s(both, h200) == pytest.approx(132 * 4096 * 1e9 * (0.5 + 0.25 * 2 + 0.125 / 16))


def test_an_audit_corrects_the_hmma_pipe_alone(h200: DeviceSpec) -> None:
    both = window(hmma_active=0.5, imma_active=0.25, sm_clock_hz=1e9)
    assert executed_flops_per_s(both, h200, executed_over_activity=0.9) == pytest.approx(
        132 * 4096 * 1e9 * (0.45 + 0.5)
    )


@pytest.mark.parametrize(
    "seen",
    [
        window(sm_clock_hz=1e9),
        window(hmma_active=0.5),
    ],
)
def test_without_a_share_or_a_clock_nothing_is_known(h200: DeviceSpec, seen: CounterWindow) -> None:
    assert executed_flops_per_s(seen, h200) is None


def test_a_chip_that_is_not_in_the_table_is_unknown() -> None:
    assert executed_flops_per_s(window(hmma_active=0.5, sm_clock_hz=1e9), None) is None
    assert datasheet_clock_hz(None) is None


def test_the_reported_clock_overstates_what_a_power_limited_gpu_executes(h200: DeviceSpec) -> None:
    """While this trace was taken the products took 642.7 TFLOP/s and the SMs counted 1,375 MHz."""
    seen = window_of(played(MATMUL), 48.7, 52.3)
    assert seen is not None
    executed = executed_flops_per_s(seen, h200)
    assert executed is not None
    assert 1.08 < executed / 642.7e12 < 1.13
    assert executed_flops_per_s(seen, h200, clock_hz=1375.4e6) == pytest.approx(642.7e12, rel=0.015)


@pytest.mark.parametrize("summed_over", [1, 132])
def test_raw_cycles_are_a_clock_whichever_way_they_are_summed(h200: DeviceSpec, summed_over: int) -> None:
    seen = window(hmma_active=0.5, sm_clock_hz=1e9, cycles=Cycles(elapsed=2.7e9 * summed_over))
    assert counted_clock_hz(seen, 132) == pytest.approx(0.9e9)
    assert executed_flops_per_s(seen, h200) == pytest.approx(0.5 * 132 * 4096 * 0.9e9)
    assert executed_flops_per_s(seen, h200, clock_hz=0.8e9) == pytest.approx(0.5 * 132 * 4096 * 0.8e9)


@pytest.mark.parametrize("elapsed", [2.1e9, 3.6e9, 132 * 3.6e9])
def test_raw_cycles_that_make_no_sense_are_left_alone(h200: DeviceSpec, elapsed: float) -> None:
    seen = window(hmma_active=0.5, sm_clock_hz=1e9, cycles=Cycles(elapsed=elapsed))
    assert counted_clock_hz(seen, 132) is None
    assert executed_flops_per_s(seen, h200) == pytest.approx(0.5 * 132 * 4096 * 1e9)


@pytest.mark.parametrize(
    ("dtype", "begin_s", "end_s", "clock_hz", "tflops", "by_ncu"),
    [
        pytest.param("bf16", 45.8, 51.6, 1318.08e6, 657.30, 1.015625, id="8192³"),
        pytest.param("bf16", 83.8, 89.6, 1328.92e6, 622.00, 1.059334, id="4104×4104×4096"),
        pytest.param("fp8", 129.3, 135.1, 1281.23e6, 1246.78, 1.015625, id="fp8 8192³"),
        pytest.param("fp64", 136.8, 142.6, 1791.28e6, 56.876, 1.0, id="fp64 4096³"),
    ],
)
def test_recorded_products_executed_what_nsight_compute_counts(
    h200: DeviceSpec,
    dtype: str,
    begin_s: float,
    end_s: float,
    clock_hz: float,
    tflops: float,
    by_ncu: float,
) -> None:
    """`tflops` is 2·m·n·k over the time of a product, `by_ncu` its executed operations over 2·m·n·k."""
    seen = window_of(played(PRODUCTS), begin_s, end_s)
    assert seen is not None
    executed = executed_flops_per_s(seen, h200, flops_by_dtype={dtype: 1.0}, clock_hz=clock_hz)
    assert executed == pytest.approx(tflops * 1e12 * by_ncu, rel=0.002)
    reported = executed_flops_per_s(seen, h200, flops_by_dtype={dtype: 1.0})
    assert reported is not None
    assert reported > tflops * 1e12 * by_ncu


def test_older_instructions_read_double(h200: DeviceSpec) -> None:
    """4095×4095×4096 runs on a kernel with Turing's mma: 104.597 TFLOP/s, by ncu 1.0005 of 2·m·n·k."""
    seen = window_of(played(PRODUCTS), 106.3, 112.1)
    assert seen is not None
    executed = executed_flops_per_s(seen, h200, clock_hz=1792.22e6)
    assert executed == pytest.approx(2 * 104.597e12 * 1.000488, rel=0.002)
