"""GPM, the activity counters of Hopper and later: activity between two samples, as computed by the driver.

The driver updates these counters ten times a second. Two samples within one update are equal: compared, every
share is 0 and one is NaN (0 of 0). Such a read is stale, neither an idle GPU nor a fault, and the previous
sample stays, so that the next comparison covers the whole time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .samples import Cycles

# The driver's own numbers, the same in every release; older versions of the Python module lack some names.
_PERCENT_IDS: Mapping[str, int] = MappingProxyType(
    {
        "graphics_active": 1,
        "sm_active": 2,
        "sm_occupancy": 3,
        "integer_active": 4,
        "tensor_active": 5,
        "dfma_active": 6,
        "hmma_active": 7,
        "dmma_active": 8,
        "imma_active": 9,
        "dram_active": 10,
        "fp64_active": 11,
        "fp32_active": 12,
        "fp16_active": 13,
    }
)
_CYCLE_IDS: Mapping[str, int] = MappingProxyType({"elapsed": 248})
# Errors that are permanent: invalid argument, not supported, no permission,
# function not found, argument version, deprecated.
NEVER = frozenset({2, 3, 4, 13, 25, 26})

# On an H200 samples changed at least every 0.10 s; after this long the counters are not updated any more.
_STANDSTILL_S = 0.2


class Compared(NamedTuple):
    """Shares since the sample before, and raw cycles where the driver counts them; empty if unknown."""

    shares: Mapping[str, Any] = MappingProxyType({})
    cycles: Cycles | None = None


class Gpm:
    """Two samples in the driver's memory, compared and swapped at every read."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._before, self._after = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        self._percents = self._request(_PERCENT_IDS)
        self._counts: Any = self._request(_CYCLE_IDS)
        self._moved_at_s: float | None = None
        self.has_worked = False
        self.standstill_s = 0.0

    def read(self, at_s: float) -> Compared | None:
        """Activity since the previous read; empty the first time, None if there is no update yet.

        Counters without an update for long are unknown; `standstill_s` is the time since their last update.
        """
        self._nvml.nvmlGpmSampleGet(self._handle, self._after)
        if self._moved_at_s is None:
            self._keep(at_s)
            return Compared()
        percents = self._compare(self._percents, _PERCENT_IDS)
        self.has_worked = True
        if _unchanged(percents.values()):
            since_s = at_s - self._moved_at_s
            if since_s < _STANDSTILL_S:
                return None
            self.standstill_s = since_s
            return Compared()
        cycles = self._read_cycles()
        self._keep(at_s)
        return Compared({name: None if v is None else v / 100 for name, v in percents.items()}, cycles)

    def reset(self) -> None:
        """The next read is a first one: no interval covers the failure."""
        self._moved_at_s = None
        self.standstill_s = 0.0

    def close(self) -> None:
        for sample in (self._before, self._after):
            self._nvml.nvmlGpmSampleFree(sample)

    def _keep(self, at_s: float) -> None:
        """The next sample is compared with the one just taken."""
        self._before, self._after = self._after, self._before
        self._moved_at_s = at_s
        self.standstill_s = 0.0

    def _read_cycles(self) -> Cycles | None:
        if self._counts is None:
            return None
        try:
            counts = self._compare(self._counts, _CYCLE_IDS)
        except self._nvml.NVMLError as problem:
            if problem.value not in NEVER:
                raise
            counts = {}
        elapsed = counts.get("elapsed")
        if elapsed is None:  # driver 580 answers "invalid argument"
            self._counts = None
            return None
        return Cycles(elapsed=elapsed)

    def _request(self, ids: Mapping[str, int]) -> Any:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(ids)
        for place, metric in enumerate(ids.values()):
            request.metrics[place].metricId = metric
        return request

    def _compare(self, request: Any, ids: Mapping[str, int]) -> dict[str, float | None]:
        request.sample1, request.sample2 = self._before, self._after
        self._nvml.nvmlGpmMetricsGet(request)
        answers = (request.metrics[place] for place in range(len(ids)))
        return {
            name: None if answer.nvmlReturn else float(answer.value)
            for name, answer in zip(ids, answers, strict=True)
        }


def _unchanged(percents: Iterable[float | None]) -> bool:
    known = [percent for percent in percents if percent is not None]
    return any(map(math.isnan, known)) and not any(percent > 0 for percent in known)
