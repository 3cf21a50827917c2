"""Sums over a whole run in constant memory, for the closing summary."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .metrics import NOTHING_LEFT_OUT, PAUSES, StepAmounts, StepTime
from .ranks.amounts import TOTALS, Exact

_RESERVOIR_SIZE = 4096
_MOST_REASONS = 16
_RATES = {
    "mfu": "perf/mfu",
    "hfu": "perf/hfu",
    "tokens_per_second": "perf/tokens_per_second",
    "samples_per_second": "perf/samples_per_second",
    "mfu_estimate": "perf/mfu_estimate",
}
"""Medians in the summary → the metrics they are computed from."""


class Reservoir:
    """A uniform sample of a stream of numbers, for its median; with its own random generator."""

    def __init__(self, size: int = _RESERVOIR_SIZE) -> None:
        self._size, self._seen = size, 0
        self._sample: list[float] = []
        self._draw = random.Random(0)

    def add(self, values: Sequence[float]) -> None:
        """Add numbers to the stream."""
        room = self._size - len(self._sample)
        self._sample += values[:room]
        self._seen += min(room, len(values))
        for value in values[room:]:
            self._seen += 1
            if (index := int(self._draw.random() * self._seen)) < self._size:
                self._sample[index] = value

    def median(self) -> float | None:
        """The median of the stream; exact while the stream fits in the sample."""
        return statistics.median(self._sample) if self._sample else None


class Totals:
    """The figures of a run: medians over the steps after warm-up, or over all if there are none."""

    def __init__(self) -> None:
        self.steps = self.warmup_steps = self.skipped_steps = 0
        self._names = ("step_time_s", *_RATES)
        self._steady = {name: Reservoir() for name in self._names}
        self._warmup = {name: Reservoir(64) for name in self._names}
        self._steady_by_model: dict[str, Reservoir] = {}
        self._warmup_by_model: dict[str, Reservoir] = {}
        self._tokens = self._useful_tokens = 0.0
        self._time_s = 0.0
        self._data_wait_s: float | None = None
        self._between_s: float | None = None
        self._forwards = 0
        self._run_s = 0.0
        """The time of all steps, warm-up included, and what was left out of them."""
        self._left_out: dict[str, tuple[int, float]] = {}
        """How often something other than steps ran, and its seconds."""
        self._sums: dict[str, tuple[int, Exact]] = {}
        """By amount: over how many steps it is known, and its sum."""
        self.methods: dict[str, int] = {}
        self.unknown: dict[str, int] = {}
        """Why the FLOPs of steps are unknown, and of how many."""
        self.observed_steps = 0
        self.peak_source: str | None = None
        self.hfu_method: str | None = None
        """How HFU was measured, where it is not based on the count."""

    def add(self, amounts: StepAmounts, times: Sequence[StepTime]) -> None:
        """Add steps with the same amounts, each with its own time."""
        self.steps += len(times)
        self.skipped_steps += sum([time.steps - 1 for time in times])
        shares = amounts.own
        for name in TOTALS:
            if name in shares:
                known, total = self._sums.get(name, (0, 0))
                self._sums[name] = known + len(times), total + len(times) * shares[name]
        into = self._steady
        if amounts.warmup:
            into = self._warmup
            self.warmup_steps += len(times)
        self.observed_steps += len(times) if amounts.observed else 0
        timed = [time for time in times if time.elapsed_s is not None]
        seconds = [time.elapsed_s for time in timed if time.elapsed_s is not None and time.elapsed_s > 0]
        if amounts.observed:  # an observed step's time is not a measurement
            into = {name: Reservoir(1) for name in self._names}
        into["step_time_s"].add([time.elapsed_s / time.steps for time in timed if time.elapsed_s is not None])
        rates = {} if amounts.observed else dict(amounts.rates)
        if not self._has_same_hfu_method(amounts):
            rates.pop(_RATES["hfu"], None)
        for name, metric in _RATES.items():
            if metric in rates:
                amount = rates[metric]
                into[name].add([amount / s for s in seconds])
        by_model = self._warmup_by_model if amounts.warmup else self._steady_by_model
        for name in () if amounts.flops is None else amounts.flops.by_model:
            if (mfu := rates.get(f"perf/mfu/{name}")) is not None:
                by_model.setdefault(name, Reservoir()).add([mfu / s for s in seconds])
        self._run_s += sum(seconds)
        for time in times:
            for kind, paused_s in time.left_out_s.items():
                number, sum_s = self._left_out.get(kind, (0, 0.0))
                self._left_out[kind] = number + 1, sum_s + paused_s
                self._run_s += paused_s
        if not amounts.warmup:
            self._time_s += sum(seconds)
            self._data_wait_s = _plus(self._data_wait_s, [time.data_wait_s for time in timed])
            self._between_s = _plus(self._between_s, [time.between_s for time in timed])
            self._forwards += sum([time.forwards for time in timed])
        if amounts.tokens is not None and amounts.useful_tokens is not None:
            self._tokens += amounts.tokens * len(times)
            self._useful_tokens += amounts.useful_tokens * len(times)
        if amounts.flops is not None:
            method = amounts.flops.method
            self.methods[method] = self.methods.get(method, 0) + len(times)
        elif amounts.unknown is not None:
            reason = amounts.unknown.reason
            if reason in self.unknown or len(self.unknown) < _MOST_REASONS:
                self.unknown[reason] = self.unknown.get(reason, 0) + len(times)
        if amounts.flops is not None:
            self.peak_source = amounts.flops.peak_source

    def _has_same_hfu_method(self, amounts: StepAmounts) -> bool:
        """Whether a step's HFU has the method of those before; measured HFU replaces counted HFU."""
        method = None if amounts.flops is None else amounts.flops.executed_method
        if method is not None and self.hfu_method is None:
            self.hfu_method = method
            self._steady["hfu"], self._warmup["hfu"] = Reservoir(), Reservoir(64)
        return method == self.hfu_method

    def _share(self, seconds: float | None) -> float | None:
        """As a share of the time of the steps after warm-up."""
        return None if seconds is None or not self._time_s else seconds / self._time_s

    def _sum(self, name: str) -> float | None:
        """The sum of an amount; None if it is unknown for a step."""
        known, total = self._sums.get(name, (0, 0))
        if known != self.steps or not known:
            return None
        return total if isinstance(total, int) else float(total)

    def as_dict(self, left_out_last: Mapping[str, float] = NOTHING_LEFT_OUT) -> dict[str, Any]:
        """The run as plain data; None where a value is unknown. `left_out_last` came after the last step."""
        left_out = {
            kind: (
                self._left_out.get(kind, (0, 0.0))[0] + (kind in left_out_last),
                self._left_out.get(kind, (0, 0.0))[1] + left_out_last.get(kind, 0.0),
            )
            for kind in PAUSES
            if kind in self._left_out or kind in left_out_last
        }
        run_s = self._run_s + sum(left_out_last.values())
        steady = self._steady["step_time_s"].median() is not None
        source = self._steady if steady else self._warmup
        return {
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "observed_steps": self.observed_steps,
            "skipped_steps": self.skipped_steps,
            "medians_over": "steps after warm-up" if steady else "all steps (none after warm-up)",
            **{f"median_{name}": source[name].median() for name in self._names},
            "median_mfu_by_model": {
                name: mfus.median()
                for name, mfus in (self._steady_by_model if steady else self._warmup_by_model).items()
            },
            "padding_lost": 1 - self._useful_tokens / self._tokens if self._tokens else None,
            "data_wait_share": self._share(self._data_wait_s),
            "between_steps_share": self._share(self._between_s),
            "forwards_between_steps": self._forwards,
            "left_out": {
                kind: {"times": number, "seconds": sum_s, "share": sum_s / run_s}
                for kind, (number, sum_s) in left_out.items()
                if run_s
            },
            "totals": {
                "steps": self.steps,
                "ranks": 1,
                "is_complete": True,
                **{name: self._sum(name) for name in TOTALS},
            },
            "hfu_method": self.hfu_method,
            "method": max(self.methods, key=lambda m: self.methods[m]) if self.methods else None,
            "methods": dict(self.methods),
            "mfu_unknown": dict(self.unknown),
            "peak_source": self.peak_source,
        }


def _plus(total: float | None, amounts: Sequence[float | None]) -> float | None:
    """The sum of the known amounts; None if there are none."""
    known = [amount for amount in amounts if amount is not None]
    return total if not known else (total or 0.0) + sum(known)
