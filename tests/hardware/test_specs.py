"""The table is consistent with itself and with figures published elsewhere."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from truemfu.hardware import specs
from truemfu.hardware.specs import DEVICES, DTYPES, DeviceSpec, Peaks

BY_KEY = {spec.key: spec for spec in DEVICES}


def _parts(spec: DeviceSpec) -> list[int | float | None]:
    return [spec.sm_count, spec.boost_clock_hz, spec.tensor_flops_per_cycle_per_sm]


def test_every_line_has_a_cell_for_each_column() -> None:
    """A comma without quotes would cut a source short."""
    with Path(specs.__file__).with_name("chips.csv").open(encoding="utf-8", newline="") as table:
        header, *lines = csv.reader(table)
    assert {len(line) for line in lines} == {len(header)}


def test_keys_are_unique() -> None:
    assert len(BY_KEY) == len(DEVICES)


@pytest.mark.parametrize(
    ("key", "dtype", "tflops"),
    [
        ("v100-sxm2-16gb", "fp16", 125),
        ("v100-pcie-32gb", "fp16", 112),
        ("t4", "fp16", 65),
        ("a10", "bf16", 125),
        ("a10g", "bf16", 70),
        ("a30", "bf16", 165),
        ("a40", "bf16", 149.7),
        ("a100-sxm4-80gb", "bf16", 312),
        ("a100-pcie-40gb", "tf32", 156),
        ("a800-sxm4-80gb", "bf16", 312),
        ("h100-sxm", "bf16", 989.4),
        ("h100-sxm", "fp8", 1978.9),
        ("h100-sxm", "tf32", 494.7),
        ("h100-pcie", "bf16", 756),
        ("h100-nvl", "bf16", 835.5),
        ("h800-sxm", "fp64", 1),
        ("h20", "bf16", 148),
        ("h200", "bf16", 989.4),
        ("h200-nvl", "fp8", 1670.5),
        ("gh200-96gb", "bf16", 989.4),
        ("b100", "bf16", 1750),
        ("b200", "bf16", 2250),
        ("b200", "fp4", 9000),
        ("gb200", "bf16", 2500),
        ("b300", "fp8", 4500),
        ("gb300", "bf16", 2500),
        ("l4", "bf16", 121),
        ("l40", "bf16", 181.05),
        ("l40s", "bf16", 362.05),
        ("rtx-a5000", "bf16", 111.1),
        ("rtx-a6000", "bf16", 154.8),
        ("rtx-6000-ada", "bf16", 364.2),
        ("rtx-pro-6000-blackwell-workstation", "bf16", 503.8),
        ("rtx-3090", "bf16", 71.2),
        ("rtx-4080", "bf16", 97.5),
        ("rtx-4090", "bf16", 165.2),
        ("rtx-4090", "fp32", 82.6),
        ("rtx-5080", "bf16", 112.6),
        ("rtx-5090", "bf16", 209.5),
        ("mi210", "bf16", 181),
        ("mi250x", "bf16", 191.5),
        ("mi300x", "bf16", 1307.4),
        ("mi325x", "fp8", 2614.9),
        ("mi350x", "bf16", 2306.9),
        ("mi355x", "bf16", 2516.6),
        ("gaudi2", "bf16", 432),
        ("gaudi3", "bf16", 1835),
        ("max-1550", "bf16", 838.9),
        ("tpu-v4", "bf16", 275),
        ("tpu-v5e", "bf16", 197),
        ("tpu-v5p", "bf16", 459),
        ("tpu-v6e", "bf16", 918),
    ],
)
def test_dense_peaks_as_published(key: str, dtype: str, tflops: float) -> None:
    assert BY_KEY[key].peak(dtype) == pytest.approx(tflops * 1e12, rel=1e-12)


@pytest.mark.parametrize("spec", [spec for spec in DEVICES if None not in _parts(spec)], ids=lambda s: s.key)
def test_peak_is_sms_times_flops_per_cycle_times_clock(spec: DeviceSpec) -> None:
    """A sparse figure (twice too high) or another chip's row cannot pass this."""
    assert spec.sm_count is not None
    assert spec.boost_clock_hz is not None
    assert spec.tensor_flops_per_cycle_per_sm is not None
    product = spec.sm_count * spec.tensor_flops_per_cycle_per_sm * spec.boost_clock_hz
    assert product == pytest.approx(spec.peak("bf16") or spec.peak("fp16"), rel=0.01)


def test_nearly_every_nvidia_row_can_be_checked_that_way() -> None:
    unchecked = {spec.key for spec in DEVICES if spec.vendor == "nvidia" and None in _parts(spec)}
    assert unchecked == {"h20", "b100", "gb200", "b300", "gb300", "rtx-pro-6000-blackwell-server"}


@pytest.mark.parametrize("spec", DEVICES, ids=lambda s: s.key)
def test_rates_stand_in_the_ratios_silicon_has(spec: DeviceSpec) -> None:
    """Half the bits are twice the rate at most (fp4 on a B300: three times); a mix of dense and sparse
    figures in one row breaks this."""
    rates = spec.peak_flops_per_s
    half = rates.bf16 or rates.fp16
    assert half is not None
    for rate, factors in (
        (rates.tf32, (0.5,)),
        (rates.fp8, (1, 2)),
        (rates.int8, (1, 2, 4)),
        (rates.fp4, (4, 6, 8)),
        (rates.fp16, (1, 2)),
    ):
        if rate is not None:
            assert any(rate == pytest.approx(half * factor, rel=0.03) for factor in factors)


@pytest.mark.parametrize("spec", DEVICES, ids=lambda s: s.key)
def test_rows_are_complete(spec: DeviceSpec) -> None:
    assert spec.device_names
    assert spec.source
    assert spec.memory_bytes is not None
    assert spec.memory_bytes >= 10e9
    assert spec.memory_bandwidth_bytes_per_s is not None
    assert 250e9 < spec.memory_bandwidth_bytes_per_s <= 8e12
    assert all(1 <= sms <= (spec.sm_count or 0) for _, sms in spec.mig_sm_counts)
    assert asdict(spec)["peak_flops_per_s"].keys() == set(DTYPES)


def test_chips_without_bf16_say_none() -> None:
    assert BY_KEY["t4"].peak("bf16") is None
    assert BY_KEY["v100-sxm2-16gb"].peak("tf32") is None
    assert BY_KEY["a100-sxm4-80gb"].peak("fp8") is None
    assert BY_KEY["h100-sxm"].peak("fp4") is None


def test_a_part_scales_arithmetic_and_forgets_memory() -> None:
    part = BY_KEY["h100-sxm"].part(sm_count=66, name="half an H100")
    assert part.peak("bf16") == 494.7e12
    assert part.peak("fp4") is None
    assert (part.sm_count, part.name) == (66, "half an H100")
    assert part.memory_bytes is None
    assert part.memory_bandwidth_bytes_per_s is None


def test_dtypes_are_the_fields_of_peaks() -> None:
    assert DTYPES == ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "fp4")
    assert Peaks(bf16=1.0).times(3) == Peaks(bf16=3.0)


@pytest.mark.parametrize("module", ["truemfu.hardware.specs", "truemfu.hardware", "truemfu.utilization"])
def test_the_table_loads_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
