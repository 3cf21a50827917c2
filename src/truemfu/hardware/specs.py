"""The table of chips: one line of `chips.csv` per chip, with its datasheet's dense peaks and their source.

A new chip is one line there. What the columns mean:

- `fp64` … `fp4` are TFLOP/s (int8: TOP/s), and every peak is **dense**. Vendors often print the rate "with
  sparsity", which no ordinary training reaches: that figure is halved here.
- `fp32` is the best rate in full fp32: the plain multiply-add units on NVIDIA, the matrix cores on AMD
  (theirs do not round to fewer bits). `tf32` is the tensor-core rate that does.
- `fp64` is the chip's best dense rate: the tensor (matrix) core's where it has one.
- `fp16`, `bf16` and `fp8` accumulate in fp32, as PyTorch does. GeForce cards run that at half the rate of
  fp16 accumulation, which is why their figures are lower than advertised.
- An empty cell is "the chip has no such rate, or it is not known", never zero.
- `memory_gb` is as advertised (10⁹ bytes); a driver reports a few percent more or less.
- `clock_mhz` is the clock at which the datasheet's bf16/fp16 tensor peak holds (989.4 TFLOP/s of an H100 is
  at 1,830 MHz though the chip may run at 1,980), so that SMs × FLOP per cycle × clock gives the peak back; a
  test holds this for every row that has the three.
- `mig_sm_counts` are MIG profiles as `nvidia-smi mig -lgip` lists them: uneven on an H100, not sevenths; 14
  SMs a slice on an A100, which leaves 10 of its 108 out.
- `device_names` are separated by `|`. One row is one device *as torch shows it*: each die of an MI250X is a
  separate device.

Rows to read with care: the 120GB and 480GB in a GH200's names are the CPU's memory. Of the Blackwell data
centre chips, only the B200's clock is published. An L40S's bf16 and fp16 are for 2,490 MHz, its other figures
for 2,520. The datasheet of the RTX PRO 6000 Server gives fp32 = 120 TFLOP/s; its tensor rates follow from the
chip's ratio of 4. By default torch shows each of the two stacks of a Max 1550 as a device (64 Xe cores).

This module only imports the standard library: the table can be read without torch.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

Vendor = Literal["nvidia", "amd", "intel", "google"]


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Dense FLOP/s (OP/s for int8) by dtype; None if there is no such rate or it is not known."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    fp16: float | None = None
    bf16: float | None = None
    fp8: float | None = None
    int8: float | None = None
    fp4: float | None = None

    def times(self, factor: float) -> Peaks:
        """Every known rate multiplied by `factor`."""
        rates = {name: getattr(self, name) for name in DTYPES}
        return Peaks(**{name: None if rate is None else rate * factor for name, rate in rates.items()})


DTYPES: tuple[str, ...] = tuple(field.name for field in fields(Peaks))
"""The dtype names of this package: the fields of `Peaks`, the keys of `FlopCount.by_dtype`."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One chip.

    `device_names` are the names torch prints for it, in full; case, blanks and the words NVIDIA and Tesla in
    front do not matter, everything else does. Two rows may share a name where the maker sells two chips under
    it: then only the SM count or the memory size of a real device decides. `sm_count` counts SMs (NVIDIA),
    compute units (AMD) or Xe cores (Intel); `mig_sm_counts` has the number of them in each MIG profile.
    """

    key: str
    name: str
    vendor: Vendor
    device_names: tuple[str, ...]
    peak_flops_per_s: Peaks
    memory_bytes: int | None
    memory_bandwidth_bytes_per_s: float | None
    sm_count: int | None = None
    boost_clock_hz: float | None = None
    tensor_flops_per_cycle_per_sm: int | None = None
    mig_sm_counts: tuple[tuple[str, int], ...] = ()
    source: str

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s for one of `DTYPES`."""
        assert dtype in DTYPES, dtype
        rate: float | None = getattr(self.peak_flops_per_s, dtype)
        return rate

    def part(self, *, sm_count: int, name: str) -> DeviceSpec:
        """The share of this chip that has `sm_count` of its SMs, under its own name.

        Arithmetic scales with the SMs. Memory does not (a MIG profile's share of it follows other fractions),
        so size and bandwidth become unknown.
        """
        assert self.sm_count is not None
        return replace(
            self,
            name=name,
            sm_count=sm_count,
            peak_flops_per_s=self.peak_flops_per_s.times(sm_count / self.sm_count),
            memory_bytes=None,
            memory_bandwidth_bytes_per_s=None,
            mig_sm_counts=(),
        )


def _devices() -> tuple[DeviceSpec, ...]:
    with Path(__file__).with_name("chips.csv").open(encoding="utf-8", newline="") as table:
        return tuple(_spec(row) for row in csv.DictReader(table, strict=True))


def _spec(row: dict[str, Any]) -> DeviceSpec:
    memory_bytes = _scaled(row["memory_gb"], 9)
    return DeviceSpec(
        key=row["key"],
        name=row["name"],
        vendor=row["vendor"],
        device_names=tuple(row["device_names"].split("|")),
        peak_flops_per_s=Peaks(**{dtype: _scaled(row[dtype], 12) for dtype in DTYPES}),
        memory_bytes=None if memory_bytes is None else int(memory_bytes),
        memory_bandwidth_bytes_per_s=_scaled(row["bandwidth_gb_per_s"], 9),
        sm_count=_integer(row["sm_count"]),
        boost_clock_hz=_scaled(row["clock_mhz"], 6),
        tensor_flops_per_cycle_per_sm=_integer(row["tensor_flops_per_cycle_per_sm"]),
        mig_sm_counts=tuple(_mig_profile(text) for text in row["mig_sm_counts"].split()),
        source=row["source"],
    )


def _scaled(cell: str, exponent: int) -> float | None:
    """`cell` × 10^`exponent`, read as one decimal number so that nothing is rounded twice."""
    return float(f"{cell}e{exponent}") if cell else None


def _integer(cell: str) -> int | None:
    return int(cell) if cell else None


def _mig_profile(text: str) -> tuple[str, int]:
    """The profile and its SMs: ("1g.10gb", 16) from `1g.10gb:16`."""
    profile, sms = text.split(":")
    return profile, int(sms)


DEVICES = _devices()
