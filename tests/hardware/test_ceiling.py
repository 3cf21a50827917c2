"""The ceiling is measured, labelled and leaves nothing behind."""

from __future__ import annotations

import pytest
import torch

from truemfu.errors import UsageError
from truemfu.hardware import ceiling
from truemfu.hardware.ceiling import MatmulCeiling, measure_ceiling


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "_CPU_SHAPES", ((64, 64, 64), (128, 64, 32)))
    monkeypatch.setattr(ceiling, "_WARM_UP_S", 0.001)


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured_in_fp32_and_bf16() -> None:
    found = measure_ceiling("cpu", seconds=0.02)
    assert [one.dtype for one in found] == ["fp32", "bf16"]
    for one in found:
        assert one.skipped is None
        assert one.device_name == "cpu"
        assert one.shape in ((64, 64, 64), (128, 64, 32))
        assert one.datasheet_flops_per_s is None
        assert one.burst_flops_per_s is not None
        assert one.sustained_flops_per_s is not None
        assert 1e6 < one.burst_flops_per_s < 1e15
        assert 1e6 < one.sustained_flops_per_s < 1e15


@pytest.mark.usefixtures("small")
def test_a_dtype_that_cannot_run_is_skipped_with_its_reason() -> None:
    fp4, fp64 = measure_ceiling("cpu", dtypes=["fp4", torch.float64], seconds=0.01)
    assert fp4 == MatmulCeiling(
        dtype="fp4",
        device_name="cpu",
        shape=None,
        burst_flops_per_s=None,
        sustained_flops_per_s=None,
        datasheet_flops_per_s=None,
        skipped="torch has no plain fp4 product",
    )
    assert fp64.skipped is None


def test_figures_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Burst is the best shape's best short run, sustained the mean of the long run's second half."""
    monkeypatch.setattr(ceiling, "_CPU_SHAPES", ((2, 2, 2), (4, 4, 4), (8, 8, 8)))
    burst_s = {16: 1e-3, 128: 2e-3, 1024: 64e-3}
    chunks_s = iter([1.0, 1.0, 4.0, 4.0])
    monkeypatch.setattr(ceiling, "_product", lambda device, dtype, shape: ceiling._flops(shape))
    monkeypatch.setattr(ceiling, "_burst_s", lambda flops, device: burst_s[flops])
    monkeypatch.setattr(ceiling, "_run_s", lambda flops, device, repeats: next(chunks_s))
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=8.0)
    assert found.shape == (4, 4, 4)
    assert found.burst_flops_per_s == pytest.approx(128 / 2e-3)
    repeats = round(8.0 / ceiling._CHUNKS_PER_LONG_RUN / 2e-3)
    assert found.sustained_flops_per_s == pytest.approx(128 * repeats / 4.0)


def test_a_shape_too_large_for_memory_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling, "_CPU_SHAPES", ((1 << 20, 1, 1), (32, 32, 32)))
    real = ceiling._product

    def product(device: torch.device, dtype: str, shape: ceiling.Shape) -> object:
        if shape[0] == 1 << 20:
            raise torch.OutOfMemoryError("no")
        return real(device, dtype, shape)

    monkeypatch.setattr(ceiling, "_product", product)
    (found,) = measure_ceiling("cpu", dtypes=["fp32"], seconds=0.01)
    assert found.shape == (32, 32, 32)


@pytest.mark.usefixtures("small")
def test_measuring_leaves_random_state_and_settings_alone() -> None:
    state = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    measure_ceiling("cpu", seconds=0.01)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_time_that_is_no_time_is_one_clear_line(seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds must be a positive number"):
        measure_ceiling("cpu", seconds=seconds)


@pytest.mark.parametrize("device", ["gpu please", "xpu", 7])
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_a_device_that_is_not_there_is_one_clear_line(device: str | int) -> None:
    with pytest.raises(UsageError, match=r"device|accelerator"):
        measure_ceiling(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_comes_near_its_datasheet_and_not_above_its_clock() -> None:
    for one in measure_ceiling("cuda", seconds=0.5):
        if one.skipped is None and one.datasheet_flops_per_s is not None:
            assert one.burst_flops_per_s is not None
            assert one.sustained_flops_per_s is not None
            assert 0.4 < one.sustained_flops_per_s / one.datasheet_flops_per_s < 1.15
            assert one.sustained_flops_per_s < 1.05 * one.burst_flops_per_s
