"""A device's row in the table, and its peak for a dtype.

    device ─► name, memory, SMs ─► row (or a part of one) ─► peak for the dtype
                                     └─ no row: None, and one warning that names the overrides

A name must match a row's name in full, so a laptop part, a "D" variant or a virtual GPU is never mistaken
for the card it is named after. A slice of a card (MIG, or fewer SMs than the row) gets its share of the peak
if the number of its SMs is known, else it is unknown. Nothing is guessed: a wrong peak makes every MFU wrong.

torch is imported inside the functions that need it: the table works without.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import UsageError, closest, warn_once
from .specs import DEVICES, DTYPES, DeviceSpec

if TYPE_CHECKING:
    import torch

PEAK_VARIABLE = "TRUEMFU_PEAK_TFLOPS"

_OVERRIDES = (
    "give the dense peak yourself: the gpu_peak_flops argument, monitoring.peak_tflops in the configuration, "
    f"or {PEAK_VARIABLE} in the environment"
)

# A driver reports a few percent more or less memory than specified; variants differ by a fifth or more.
_MEMORY_TOLERANCE = 0.1

_DTYPE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in DTYPES},
        "float64": "fp64",
        "double": "fp64",
        "float32": "fp32",
        "float": "fp32",
        "tensorfloat32": "tf32",
        "float16": "fp16",
        "half": "fp16",
        "bfloat16": "bf16",
        "float8": "fp8",
        "float8_e4m3fn": "fp8",
        "float8_e4m3fnuz": "fp8",
        "float8_e5m2": "fp8",
        "float8_e5m2fnuz": "fp8",
        "uint8": "int8",
        "float4_e2m1fn_x2": "fp4",
        "nvfp4": "fp4",
        "mxfp4": "fp4",
    }
)


@dataclass(frozen=True, kw_only=True)
class _DeviceFacts:
    """What torch reports about a device; `device_type` is torch's, or "name" for a bare name."""

    device_type: str
    name: str
    memory_bytes: int | None = None
    sm_count: int | None = None


def _plain(name: str) -> str:
    """A device name without case, blanks, trademarks and the prefixes that drivers add or leave out."""
    text = " ".join(name.casefold().replace("(r)", "").replace("(tm)", "").split())
    for prefix in ("nvidia ", "tesla "):
        text = text.removeprefix(prefix)
    return text


def _rows_by_name() -> Mapping[str, tuple[DeviceSpec, ...]]:
    rows: defaultdict[str, list[DeviceSpec]] = defaultdict(list)
    for spec in DEVICES:
        for name in {_plain(text) for text in (spec.key, spec.name, *spec.device_names)}:
            rows[name].append(spec)
    return MappingProxyType({name: tuple(found) for name, found in rows.items()})


_ROWS = _rows_by_name()


def find_spec(name: str, memory_bytes: int | None = None, sm_count: int | None = None) -> DeviceSpec | None:
    """The row for a device name, or the part of a row for a slice of a card; None if not certain.

    `name` is what `torch.cuda.get_device_name()` prints, or a row's key. `memory_bytes` and `sm_count` are
    those of the real device, if there is one: they distinguish chips sold under one name, and `sm_count`
    gives the size of a slice. Without it a MIG slice is identified by its profile, where NVIDIA documents
    that.
    """
    card, is_slice, profile = _plain(name).partition(" mig")
    rows = _ROWS.get(card, ())
    if len(rows) > 1 and sm_count is not None:
        rows = tuple(row for row in rows if row.sm_count == sm_count)
    if len(rows) > 1 and memory_bytes is not None:
        rows = tuple(row for row in rows if _same_memory(row, memory_bytes))
    if len(rows) != 1:
        return None
    row = rows[0]
    if is_slice:
        return _slice(row, profile.strip(), sm_count)
    if sm_count is None or row.sm_count is None or sm_count == row.sm_count:
        return row
    if sm_count > row.sm_count:
        return None
    return row.part(sm_count=sm_count, name=f"{row.name} ({sm_count} of {row.sm_count} SMs)")


def _same_memory(row: DeviceSpec, memory_bytes: int) -> bool:
    return row.memory_bytes is not None and math.isclose(
        memory_bytes, row.memory_bytes, rel_tol=_MEMORY_TOLERANCE
    )


def _slice(row: DeviceSpec, profile: str, sm_count: int | None) -> DeviceSpec | None:
    """The MIG slice of `row` with this profile: 1g.10gb, or 1g.10gb+me (with media engines, the same SMs)."""
    if sm_count is None:
        sm_count = dict(row.mig_sm_counts).get(profile.partition("+")[0])
    if sm_count is None or row.sm_count is None or sm_count > row.sm_count:
        return None
    return row.part(sm_count=sm_count, name=f"{row.name} MIG {profile}".rstrip())


def spec_of(device: torch.device | str | int | None = None) -> DeviceSpec | None:
    """The row of a device (None: the current accelerator); None for a CPU and a device not in the table."""
    facts = _identify(device)
    return find_spec(facts.name, facts.memory_bytes, facts.sm_count)


def device_name(device: torch.device | str | int | None = None) -> str:
    """The name of a device (None: the current accelerator) as torch prints it; cpu if there is none."""
    return _identify(device).name


def known_spec(device: torch.device | str | int | None = None) -> DeviceSpec | None:
    """Like `spec_of`, with one warning for an accelerator without a row, which names the overrides."""
    return _known(_identify(device))


def _known(facts: _DeviceFacts) -> DeviceSpec | None:
    spec = find_spec(facts.name, facts.memory_bytes, facts.sm_count)
    if spec is None and facts.device_type != "cpu":
        warn_once(f"no peak FLOP/s is known for the device {facts.name!r}, so there is no MFU; {_OVERRIDES}")
    return spec


def known_peak(spec: DeviceSpec, dtype: str) -> float | None:
    """The row's peak for one of `DTYPES`; warns once if it is missing, naming the overrides."""
    peak = spec.peak(dtype)
    if peak is None:
        warn_once(f"no {dtype} peak is known for {spec.name}, so there is no MFU; {_OVERRIDES}")
    return peak


def get_gpu_peak_flops(
    device: torch.device | str | int | None = None, dtype: torch.dtype | str | None = None
) -> float | None:
    """The dense peak of a device for a dtype in FLOP/s, from the table; None if it is not known.

    `device` is a torch device, its string ("cuda:0"), an index, or a device name; None is the current
    accelerator. A CPU has no row: None, without a warning.

    `dtype` is a torch dtype or a name ("bf16", "bfloat16", "fp8", "tf32", "torch.float8_e4m3fn"). None is
    bf16, or fp16 (the same tensor rate) on chips that have no bf16. On a CUDA device `torch.float32` and
    "float32" mean what a product of such tensors runs in: tf32 where torch's settings allow it. "fp32" and
    "tf32" name a rate and are taken literally, as is any dtype given with a device *name*, which has no
    settings.

    `TRUEMFU_PEAK_TFLOPS` in the environment overrides the table for every device and dtype.
    """
    rate = None if dtype is None else dtype_name(dtype)
    override = override_flops_per_s()
    if override is not None:
        return override
    facts = _identify(device)
    spec = _known(facts)
    if spec is None:
        return None
    if rate is None:
        rate = "bf16" if spec.peak_flops_per_s.bf16 is not None else "fp16"
    follows_settings = rate == "fp32" and str(dtype).casefold() != "fp32" and facts.device_type == "cuda"
    if follows_settings and spec.peak_flops_per_s.tf32 is not None and tf32_allowed():
        rate = "tf32"
    return known_peak(spec, rate)


def override_flops_per_s() -> float | None:
    """The peak from `TRUEMFU_PEAK_TFLOPS`, in FLOP/s; None if the variable is not set."""
    text = os.environ.get(PEAK_VARIABLE, "").strip()
    if not text:
        return None
    try:
        tflops = float(text)
    except ValueError:
        tflops = math.nan
    if not (math.isfinite(tflops) and tflops > 0):
        raise UsageError(f"{PEAK_VARIABLE} must be a positive number of TFLOP/s, such as 989.4; got {text!r}")
    return tflops * 1e12


def dtype_name(dtype: torch.dtype | str) -> str:
    """One of `DTYPES` for a torch dtype or any usual name of one."""
    text = str(dtype).casefold().removeprefix("torch.")
    if text not in _DTYPE_NAMES:
        hint = closest(text, _DTYPE_NAMES)
        raise UsageError(f"unknown dtype {text!r}; the table has {', '.join(DTYPES)}{hint}")
    return _DTYPE_NAMES[text]


def tf32_allowed() -> bool:
    """Whether torch runs fp32 products on CUDA in TF32 now.

    Since torch 2.9 the setting is `torch.backends.cuda.matmul.fp32_precision`, and reading the older switch
    is an error once the newer one was used; before, it is `allow_tf32`. AMD needs another switch: counted as
    off.
    """
    import torch

    if torch.version.hip is not None:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def _identify(device: torch.device | str | int | None) -> _DeviceFacts:
    """What torch reports about the device; one that torch cannot open is only a name, which is in no row."""
    import torch

    if isinstance(device, str):
        name = device
        try:
            device = torch.device(name)
        except RuntimeError:
            return _DeviceFacts(device_type="name", name=name)
    elif device is None or isinstance(device, int):
        index = device
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if accelerator is None:
            return (
                _DeviceFacts(device_type="cpu", name="cpu")
                if index is None
                else _DeviceFacts(device_type="name", name=f"cuda:{index}")
            )
        device = accelerator if index is None else torch.device(accelerator.type, index)
    elif not isinstance(device, torch.device):
        raise UsageError(
            f"device must be a torch.device, an index, a device name or None; got {type(device).__name__}"
        )
    try:
        return _properties(device)
    except (AssertionError, RuntimeError):
        return _DeviceFacts(device_type=device.type, name=str(device))


def _properties(device: torch.device) -> _DeviceFacts:
    """Query the backend of this device type; one without chips in the table is only known by its type."""
    import torch

    if device.type in ("cuda", "xpu"):
        found = getattr(torch, device.type).get_device_properties(device)
        units = found.multi_processor_count if device.type == "cuda" else found.gpu_subslice_count
        return _DeviceFacts(
            device_type=device.type, name=found.name, memory_bytes=found.total_memory, sm_count=units or None
        )
    if device.type == "hpu" and hasattr(torch, "hpu"):
        return _DeviceFacts(device_type="hpu", name=str(torch.hpu.get_device_name()))
    return _DeviceFacts(device_type=device.type, name=str(device))
