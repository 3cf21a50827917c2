"""A device finds its own row or none, and the peak follows dtype, settings and overrides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from truemfu.errors import TruemfuWarning, UsageError
from truemfu.hardware.detect import find_spec, get_gpu_peak_flops, spec_of, tf32_allowed
from truemfu.hardware.specs import DEVICES, DeviceSpec

NAMES: list[tuple[str, str | None]] = [
    (name, key)
    for name, key in json.loads((Path(__file__).parent.parent / "data" / "device_names.json").read_text())
]
BY_KEY = {spec.key: spec for spec in DEVICES}


@pytest.mark.parametrize(("name", "key"), NAMES)
def test_real_names_find_their_row_or_none(name: str, key: str | None) -> None:
    spec = find_spec(name)
    assert (None if spec is None else spec.key) == key


def test_the_data_file_covers_every_row_and_many_look_alikes() -> None:
    shared_names = {"rtx-3080-10gb", "rtx-3080-12gb"}
    assert {key for _, key in NAMES if key} == BY_KEY.keys() - shared_names
    assert sum(key is None for _, key in NAMES) >= 100


@pytest.mark.parametrize("spec", DEVICES, ids=lambda s: s.key)
def test_a_row_is_found_by_its_key_and_by_every_device_name(spec: DeviceSpec) -> None:
    assert find_spec(spec.key) is spec
    for name in spec.device_names:
        assert find_spec(name, spec.memory_bytes, spec.sm_count) is spec


def test_case_and_blanks_do_not_matter() -> None:
    assert find_spec("  nvidia   h100 pcie ") is BY_KEY["h100-pcie"]


@pytest.mark.parametrize(
    ("name", "sms", "of"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, 108),
        ("NVIDIA A100-SXM4-40GB MIG 1g.10gb", 14, 108),
        ("NVIDIA A100-SXM4-40GB MIG 2g.10gb", 28, 108),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", 42, 108),
        ("NVIDIA A100-SXM4-80GB MIG 7g.80gb", 98, 108),
        ("NVIDIA A30 MIG 1g.6gb", 14, 56),
        ("NVIDIA A30 MIG 4g.24gb", 56, 56),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", 16, 132),
        ("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 26, 132),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", 32, 132),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, 132),
        ("NVIDIA H100 80GB HBM3 MIG 4g.40gb", 64, 132),
        ("NVIDIA H200 MIG 7g.141gb", 132, 132),
    ],
)
def test_a_mig_slice_has_the_share_of_its_sms(name: str, sms: int, of: int) -> None:
    card = find_spec(name.partition(" MIG")[0])
    part = find_spec(name)
    assert card is not None
    assert part is not None
    assert part.sm_count == sms
    assert part.peak("bf16") == pytest.approx(card.peak("bf16") * sms / of)  # type: ignore[operator]
    assert part.name.endswith(name.partition(" ")[2].partition(" MIG ")[2])


def test_the_sms_of_a_real_slice_win_over_its_profile() -> None:
    part = find_spec("NVIDIA H100 PCIe MIG 1g.10gb", sm_count=14)
    assert part is not None
    assert part.peak("bf16") == pytest.approx(756e12 * 14 / 114)


def test_a_slice_larger_than_its_card_is_unknown() -> None:
    assert find_spec("NVIDIA H100 PCIe MIG 1g.10gb", sm_count=132) is None


def test_fewer_sms_than_the_row_are_a_part_of_the_card() -> None:
    """An MI300X in CPX mode shows each of its eight dies as a device of that name."""
    part = find_spec("AMD Instinct MI300X", sm_count=38)
    assert part is not None
    assert part.peak("bf16") == pytest.approx(1307.4e12 / 8)
    assert part.name == "AMD Instinct MI300X (38 of 304 SMs)"


def test_more_sms_than_the_row_are_another_chip() -> None:
    assert find_spec("NVIDIA H200", sm_count=144) is None


@pytest.mark.parametrize(
    ("compute_units", "key"), [(104, "mi250"), (110, "mi250x"), (96, None), (None, None)]
)
def test_two_chips_of_one_name_differ_by_their_compute_units(
    compute_units: int | None, key: str | None
) -> None:
    spec = find_spec("AMD Instinct MI250X / MI250", sm_count=compute_units)
    assert (None if spec is None else spec.key) == key


@pytest.mark.parametrize(
    ("memory_bytes", "key"),
    [(10_490_000_000, "rtx-3080-10gb"), (12_630_000_000, "rtx-3080-12gb"), (17_000_000_000, None)],
)
def test_two_chips_of_one_name_differ_by_their_memory(memory_bytes: int, key: str | None) -> None:
    spec = find_spec("NVIDIA GeForce RTX 3080", memory_bytes=memory_bytes)
    assert (None if spec is None else spec.key) == key


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", None, 989.4),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "BFloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 80GB HBM3", "half", 989.4),
        ("NVIDIA H100 80GB HBM3", torch.float16, 989.4),
        ("NVIDIA H100 80GB HBM3", "fp8", 1978.9),
        ("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn, 1978.9),
        ("NVIDIA H100 80GB HBM3", "torch.float8_e5m2", 1978.9),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 80GB HBM3", torch.float32, 66.9),
        ("NVIDIA H100 80GB HBM3", torch.float64, 66.9),
        ("NVIDIA H100 80GB HBM3", torch.int8, 1978.9),
        ("NVIDIA B200", "nvfp4", 9000),
        ("Tesla T4", None, 65),
    ],
)
def test_peak_by_name_and_dtype(name: str, dtype: torch.dtype | str | None, tflops: float) -> None:
    assert get_gpu_peak_flops(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("dtype", ["bf61", "", torch.complex64, torch.int64])
def test_an_unknown_dtype_is_one_clear_line(dtype: torch.dtype | str) -> None:
    with pytest.raises(UsageError, match=r"unknown dtype .*the table has fp64, fp32") as error:
        get_gpu_peak_flops("NVIDIA H200", dtype)
    assert "\n" not in str(error.value)


def test_a_misspelt_dtype_gets_a_hint() -> None:
    with pytest.raises(UsageError, match="did you mean 'bfloat16'"):
        get_gpu_peak_flops("NVIDIA H200", "bflot16")


def test_an_unknown_device_is_none_and_one_warning_with_the_overrides() -> None:
    laptop = "NVIDIA GeForce RTX 4090 Laptop GPU"
    with pytest.warns(TruemfuWarning) as said:
        assert get_gpu_peak_flops(laptop) is None
    assert get_gpu_peak_flops(laptop) is None  # a second warning would be an error here
    text = str(said[0].message)
    for part in ("RTX 4090 Laptop GPU", "gpu_peak_flops", "monitoring.peak_tflops", "TRUEMFU_PEAK_TFLOPS"):
        assert part in text


def test_a_dtype_the_chip_lacks_is_none_and_one_warning() -> None:
    with pytest.warns(TruemfuWarning, match="no bf16 peak is known for NVIDIA T4"):
        assert get_gpu_peak_flops("Tesla T4", "bf16") is None


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_cpu_has_no_peak_and_no_warning(device: torch.device | str) -> None:
    assert get_gpu_peak_flops(device) is None
    assert spec_of(device) is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_none_means_the_cpu() -> None:
    assert get_gpu_peak_flops() is None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
@pytest.mark.parametrize("device", ["cuda:0", 0, torch.device("cuda", 0)])
def test_a_device_that_is_not_there_is_none_and_one_warning(device: torch.device | str | int) -> None:
    with pytest.warns(TruemfuWarning, match="'cuda:0'"):
        assert get_gpu_peak_flops(device) is None


def test_a_wrong_kind_of_device_is_one_clear_line() -> None:
    with pytest.raises(UsageError, match=r"device must be a torch.device, .*got float"):
        get_gpu_peak_flops(0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", [None, 0, 1, "cuda", "cuda:1", torch.device("cuda", 1)])
def test_a_cuda_device_is_found_by_what_torch_says_of_it(
    fake_cuda: Callable[..., None], device: torch.device | str | int | None
) -> None:
    fake_cuda("NVIDIA H200", 132, 150_000_000_000)
    assert spec_of(device) is BY_KEY["h200"]
    assert get_gpu_peak_flops(device) == 989.4e12


def test_a_real_slice_is_scaled_by_the_sms_torch_reports(fake_cuda: Callable[..., None]) -> None:
    fake_cuda("NVIDIA H100 80GB HBM3 MIG 1g.20gb", 26)
    assert get_gpu_peak_flops() == pytest.approx(989.4e12 * 26 / 132)


def test_one_die_of_an_mi250x(fake_cuda: Callable[..., None]) -> None:
    fake_cuda("AMD Instinct MI250X / MI250", 110)
    assert get_gpu_peak_flops() == 191.5e12


def test_one_stack_of_a_max_1550(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = SimpleNamespace(
        name="Intel(R) Data Center GPU Max 1550", total_memory=68_000_000_000, gpu_subslice_count=64
    )
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device=None: stack)
    assert get_gpu_peak_flops("xpu:0") == pytest.approx(419.45e12)


@pytest.mark.parametrize(
    ("precision", "flops_per_s"), [("highest", 66.9e12), ("high", 494.7e12), ("medium", 494.7e12)]
)
def test_float32_on_cuda_follows_torchs_tf32_setting(
    fake_cuda: Callable[..., None], precision: str, flops_per_s: float
) -> None:
    fake_cuda("NVIDIA H200", 132)
    torch.set_float32_matmul_precision(precision)
    assert tf32_allowed() == (precision != "highest")
    assert get_gpu_peak_flops(None, torch.float32) == flops_per_s
    assert get_gpu_peak_flops("cuda:0", "float32") == flops_per_s
    assert get_gpu_peak_flops(None, "fp32") == 66.9e12
    assert get_gpu_peak_flops(None, "tf32") == 494.7e12
    assert get_gpu_peak_flops("NVIDIA H200", torch.float32) == 66.9e12


def test_float32_on_a_chip_without_tf32_stays_fp32(fake_cuda: Callable[..., None]) -> None:
    fake_cuda("Tesla V100-SXM2-16GB", 80)
    torch.set_float32_matmul_precision("high")
    assert get_gpu_peak_flops(None, torch.float32) == 15.7e12


def test_the_environment_overrides_every_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "123.5")
    assert get_gpu_peak_flops("NVIDIA H200") == 123.5e12
    assert get_gpu_peak_flops("no such chip", "fp8") == 123.5e12
    assert get_gpu_peak_flops("cpu") == 123.5e12


@pytest.mark.parametrize("text", ["fast", "-1", "0", "nan", "inf", "989.4 TFLOPS"])
def test_a_bad_override_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", text)
    with pytest.raises(UsageError, match="TRUEMFU_PEAK_TFLOPS must be a positive number") as error:
        get_gpu_peak_flops("NVIDIA H200")
    assert repr(text) in str(error.value)


def test_an_empty_override_is_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", " ")
    assert get_gpu_peak_flops("NVIDIA H200") == 989.4e12
