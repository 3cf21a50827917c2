"""Clock, power and throttle reasons of a device while it runs matrix products.

    Watch.open ─► stamps: the SMs' own cycle counters ─► the actual clock
               └► NVML: the requested clock, power and its limit, throttle reasons

The driver is queried by the thread that queues the products, right after it has queued them: the device then
runs nothing else, and no second thread competes for the interpreter. Each reading represents the run during
which it was taken; shares between two readings are not needed here, so there is no `Sampler`.

What cannot be read (another vendor, no driver, no nvidia-ml-py) is None, with the reason in `Watch.notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import CounterError
from ..counters.cycle_stamps import CycleStamps, Stamp
from ..counters.nvml import NvmlSource
from ..counters.samples import CounterSample, CounterSource, find_gpu
from ..counters.windows import GPM_LAG_S, fault_of, last_of, mean_of, throttle_of

if TYPE_CHECKING:
    import torch

POWER_MEAN_S = 1.0
"""NVML's power is the mean of the last second on most chips: it does not represent a shorter load."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive products: their time, clock, and the driver's reading meanwhile."""

    products: int
    seconds: float
    clock_hz: float | None = None
    sample: CounterSample | None = None


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Clock, power and throttle reasons of some runs. `throttle`: the share of readings with each reason."""

    clock_hz: float | None = None
    reported_clock_hz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttle: dict[str, float] | None = None


class Watch:
    """Reads clock, power and throttle reasons of one device; without arguments nothing."""

    def __init__(
        self,
        *,
        stamps: CycleStamps | None = None,
        source: CounterSource | None = None,
        index: int = 0,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.notes = notes
        self._stamps, self._source, self._index = stamps, source, index
        self._last: CounterSample | None = None

    @classmethod
    def open(cls, device: torch.device) -> Watch:
        import torch

        if device.type != "cuda" or torch.version.cuda is None:
            return cls(notes=("clock, power and throttle reasons are read on NVIDIA GPUs only",))
        notes: list[str] = []
        stamps = CycleStamps.open(device)
        if isinstance(stamps, str):
            notes.append(f"the actual clock is not known: {stamps}")
        found = _find(str(torch.cuda.get_device_properties(device).uuid))
        if isinstance(found, str):
            notes.append(f"power and throttle reasons are not known: {found}")
        source, index = (None, 0) if isinstance(found, str) else found
        return cls(
            stamps=None if isinstance(stamps, str) else stamps, source=source, index=index, notes=tuple(notes)
        )

    def stamp(self) -> Stamp | None:
        """The cycle counters at this point of the stream."""
        return None if self._stamps is None else self._stamps.take()

    def read_driver(self) -> CounterSample | None:
        """The driver's reading now; None if it fails or is implausible this time.

        The driver updates it ten times a second: until then the last reading is returned, but not for longer.
        """
        if self._source is None:
            return None
        try:
            sample = self._source.read(self._index)
        except CounterError:
            self._last = None  # the run's other figures are still valid
            return None
        if sample.fresh:
            self._last = sample if fault_of(sample, shares=()) is None else None
        elif self._last is not None and sample.at_s - self._last.at_s > 2 * GPM_LAG_S:
            self._last = None
        return self._last

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def conditions_of(runs: Sequence[Run], loaded_s: float) -> Conditions:
    """Consecutive runs combined; `loaded_s` is how long the device had been under load at their end.

    The clock is the mean over the time of the runs. The driver's own clock and the throttle reasons are means
    of its readings; power is the last reading, once it represents the load.
    """
    samples = [run.sample for run in runs if run.sample is not None]
    return Conditions(
        clock_hz=mean_of([run.clock_hz for run in runs], [run.seconds for run in runs]),
        reported_clock_hz=mean_of([sample.sm_clock_hz for sample in samples], [1.0] * len(samples)),
        power_w=last_of(samples, "power_w") if loaded_s >= POWER_MEAN_S else None,
        power_limit_w=last_of(samples, "power_limit_w"),
        throttle=throttle_of(samples),
    )


def _find(uuid: str) -> tuple[CounterSource, int] | str:
    """NVML and its index of the GPU with torch's UUID; or the reason why there is none."""
    try:
        source = NvmlSource(energy=False)
    except CounterError as problem:
        return str(problem)
    gpu = find_gpu(source.gpus(), uuid)
    if gpu is not None:
        return source, gpu.index
    source.close()
    return f"NVML lists no GPU with the UUID {uuid} (MIG slices are not listed there)"
