"""The ceiling is measured, labelled, split beside its datasheet, and leaves nothing behind."""

from __future__ import annotations

import json
import math

import pytest
import torch

from truemfu.errors import UsageError
from truemfu.hardware.ceiling import ceiling
from truemfu.hardware.ceiling import products as ceiling_products
from truemfu.hardware.ceiling import search as ceiling_search
from truemfu.hardware.ceiling.ceiling import (
    MatmulCeiling,
    limited_by,
    measure_ceiling,
)
from truemfu.hardware.ceiling.products import Shape
from truemfu.hardware.counters.executed import datasheet_clock_hz
from truemfu.hardware.detect import find_spec
from truemfu.hardware.specs import DEVICES, DTYPES, DeviceSpec

NVIDIA_ONLY = "clock, power and throttle reasons are read on NVIDIA GPUs only"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling_search, "_CPU_SHAPES", ((64, 64, 64), (128, 64, 32)))
    monkeypatch.setattr(ceiling_search, "_CPU_SHORT_RUN_S", 0.001)


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured_in_fp32_and_bf16() -> None:
    found = measure_ceiling("cpu", seconds=0.02)
    assert [one.dtype for one in found] == ["fp32", "bf16"]
    for one in found:
        assert one.skipped is None
        assert one.device_name == "cpu"
        assert one.notes == (NVIDIA_ONLY,)
        assert one.datasheet_flops_per_s is None
        assert one.datasheet_clock_hz is None
        assert one.burst is not None
        assert one.sustained is not None
        for run in (one.burst, one.sustained):
            assert run.shape in ((64, 64, 64), (128, 64, 32))
            assert 1e6 < run.flops_per_s < 1e15
            assert run.clock_hz is run.reported_clock_hz is run.power_w is run.throttle is None
            assert run.of_datasheet is run.clock_of_datasheet is run.pipe_of_clock is run.limited_by is None
        assert one.sustained.seconds > 0.005
        assert one.burst_flops_per_s == one.burst.flops_per_s >= one.sustained.flops_per_s
        assert one.sustained_flops_per_s == one.sustained.flops_per_s
        assert one.shape == one.burst.shape


@pytest.mark.usefixtures("small")
def test_a_dtype_that_cannot_run_is_skipped_with_its_reason() -> None:
    fp4, fp64 = measure_ceiling("cpu", dtypes=["fp4", torch.float64], seconds=0.01)
    assert fp4 == MatmulCeiling(
        dtype="fp4", device_name="cpu", skipped="torch has no plain fp4 matrix product", notes=(NVIDIA_ONLY,)
    )
    assert fp4.shape is fp4.burst_flops_per_s is fp4.sustained_flops_per_s is None
    assert fp64.skipped is None


@pytest.mark.usefixtures("small")
def test_a_dtype_asked_for_twice_is_measured_once() -> None:
    assert [one.dtype for one in measure_ceiling("cpu", ["fp32", torch.float32], seconds=0.01)] == ["fp32"]


@pytest.mark.usefixtures("small")
def test_json_has_the_attribute_names_as_keys() -> None:
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=0.01)
    data = json.loads(json.dumps(found.as_dict()))
    assert {
        "dtype",
        "device_name",
        "shape",
        "burst_flops_per_s",
        "sustained_flops_per_s",
        "datasheet_flops_per_s",
        "skipped",
    } <= data.keys()
    for key, value in data.items():
        if key not in ("burst", "sustained"):
            known = getattr(found, key)
            assert value == (list(known) if isinstance(known, tuple) else known)
    assert found.sustained is not None
    assert data["sustained"]["flops_per_s"] == found.sustained.flops_per_s


@pytest.mark.usefixtures("small")
def test_progress_tells_dtype_and_shape_of_all_that_is_measured() -> None:
    told: list[str] = []
    measure_ceiling("cpu", dtypes=["fp32", "fp64"], seconds=0.01, progress=told.append)
    bursts = [text for text in told if "burst" in text]
    assert bursts == [
        f"{dtype}: burst, {shape}" for dtype in ("fp32", "fp64") for shape in ("64×64×64", "128×64×32")
    ]
    held = [text for text in told if "sustained" in text]
    assert [text.split(",")[0] for text in held] == [
        "fp32: sustained for 0.01 s",
        "fp64: sustained for 0.01 s",
    ]
    assert told.index(bursts[-1]) < told.index(held[0]), "a held dtype would heat the chip for a later burst"


@pytest.mark.usefixtures("small")
def test_measuring_leaves_random_state_and_settings_alone() -> None:
    state = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    measure_ceiling("cpu", seconds=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.usefixtures("small")
def test_no_two_shapes_are_held_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operands live as long as their product, and no product outlives the measurement of its shape."""
    import weakref

    alive: weakref.WeakSet[object] = weakref.WeakSet()
    at_once: list[int] = []
    real = ceiling_products.product_of

    def product_of(device: torch.device, dtype: str, shape: Shape) -> ceiling_products.Product:
        product = real(device, dtype, shape)
        alive.add(product)
        at_once.append(len(alive))
        return product

    monkeypatch.setattr(ceiling_search, "product_of", product_of)
    measure_ceiling("cpu", dtypes=["fp32"], seconds=0.01)
    assert len(at_once) >= 3
    assert max(at_once) == 1
    assert not alive


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
def test_a_time_that_is_no_time_is_one_clear_line(seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds must be a positive number"):
        measure_ceiling("cpu", seconds=seconds)


@pytest.mark.parametrize("device", ["gpu please", "xpu", 7])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_device_that_is_not_there_is_one_clear_line(device: str | int) -> None:
    with pytest.raises(UsageError, match="device"):
        measure_ceiling(device)


@pytest.mark.parametrize("device", [2, "cuda:2"])
def test_an_index_too_many_is_one_clear_line(device: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="no device cuda:2: this machine has 2, numbered from 0"):
        measure_ceiling(device)
    assert ceiling._as_device(1) == torch.device("cuda:1")


def test_the_clock_of_a_datasheet_is_that_of_the_dtypes_own_peak() -> None:
    h200 = find_spec("NVIDIA H200")
    assert h200 is not None
    assert datasheet_clock_hz(h200, "bf16") == pytest.approx(1830e6, rel=1e-3)
    assert datasheet_clock_hz(h200, "fp8") == pytest.approx(1830e6, rel=1e-3)
    assert datasheet_clock_hz(h200, "fp64") == pytest.approx(1980e6, rel=1e-3)
    assert datasheet_clock_hz(h200, "fp4") is None
    part = h200.part(sm_count=16, name="a slice")
    assert datasheet_clock_hz(part, "bf16") == pytest.approx(1830e6, rel=1e-3)


@pytest.mark.parametrize("spec", DEVICES, ids=lambda spec: spec.key)
def test_every_rows_clocks_are_near_its_boost_clock(spec: DeviceSpec) -> None:
    """FLOP per cycle as a power of two fits every row: 3 % is rounding, up to 16 % another boost clock."""
    for dtype in DTYPES:
        clock_hz = datasheet_clock_hz(spec, dtype)
        if spec.sm_count is None or spec.boost_clock_hz is None or spec.peak(dtype) is None:
            assert clock_hz is None
            continue
        assert clock_hz is not None
        same = dtype not in ("fp32", "fp64")
        assert clock_hz == pytest.approx(spec.boost_clock_hz, rel=0.03 if same else 0.16), dtype


@pytest.mark.parametrize(
    ("clock", "pipe", "throttle", "what"),
    [
        (0.75, 0.87, {"power_limit": 1.0}, "power_limit"),
        (0.75, 0.87, {"power_limit": 0.2}, "clock"),
        (0.75, 0.87, {"gpu_idle": 1.0}, "clock"),
        (0.75, 0.87, {"power_limit": 0.6, "thermal_limit": 0.9}, "thermal_limit"),
        (0.75, 0.87, None, "clock"),
        (0.95, 0.87, {"power_limit": 1.0}, "pipe"),
        (1.05, 1.06, {}, "pipe"),
        (None, None, {"power_limit": 1.0}, "power_limit"),
        (None, None, {}, None),
        (None, None, None, None),
    ],
)
def test_the_larger_loss_is_named(
    clock: float | None, pipe: float | None, throttle: dict[str, float] | None, what: str | None
) -> None:
    assert limited_by(clock, pipe, throttle) == what


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_comes_near_its_datasheet_and_not_above_its_clock() -> None:
    for one in measure_ceiling("cuda", seconds=1.0):
        if one.skipped is not None or one.datasheet_flops_per_s is None:
            continue
        assert one.burst is not None
        assert one.sustained is not None
        assert one.sustained.of_datasheet is not None
        assert 0.4 < one.sustained.of_datasheet < 1.15
        assert one.sustained.flops_per_s <= one.burst.flops_per_s
        for run in (one.burst, one.sustained):
            if run.clock_of_datasheet is not None and run.pipe_of_clock is not None:
                assert 0.3 < run.clock_of_datasheet < 1.2
                assert 0.5 < run.pipe_of_clock < 1.01
