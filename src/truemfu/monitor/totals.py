"""Sums over a whole run in constant memory, for the closing summary."""

from __future__ import annotations

import random
import statistics
from typing import Any

from .metrics import StepMeasures

_RESERVOIR = 4096


class Reservoir:
    """A fair sample of a stream of numbers, for its median; its own random numbers, not the training's."""

    def __init__(self, size: int = _RESERVOIR) -> None:
        self._size, self._seen = size, 0
        self._kept: list[float] = []
        self._draw = random.Random(0)

    def add(self, value: float) -> None:
        """Take one number in."""
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append(value)
        elif (place := int(self._draw.random() * self._seen)) < self._size:
            self._kept[place] = value

    def median(self) -> float | None:
        """The median of the stream, exact up to the size of the sample."""
        return statistics.median(self._kept) if self._kept else None


class Totals:
    """What a run comes to: medians over the steps after warm-up, or over all where there were no others."""

    def __init__(self) -> None:
        self.steps = self.warmup_steps = self.skipped_steps = 0
        self._names = ("step_time_s", "mfu", "hfu", "tokens_per_second", "samples_per_second")
        self._steady = {name: Reservoir() for name in self._names}
        self._warmup = {name: Reservoir(64) for name in self._names}
        self._tokens = self._useful_tokens = 0.0
        self._time_s = self._data_wait_s = 0.0
        self.methods: dict[str, int] = {}
        self.peak_source: str | None = None
        self.hfu_method: str | None = None
        """What HFU rests on where that is not the count."""

    def add(self, measures: StepMeasures) -> None:
        """Take one step in."""
        self.steps += 1
        self.warmup_steps += measures.warmup
        self.skipped_steps += measures.steps - 1
        elapsed_s = measures.elapsed_s
        into = self._warmup if measures.warmup else self._steady
        for name, value in (
            ("step_time_s", measures.step_time_s),
            ("mfu", measures.mfu),
            ("hfu", measures.hfu if self._is_like_before(measures) else None),
            ("tokens_per_second", _rate(measures.tokens, elapsed_s, measures.world_size)),
            ("samples_per_second", _rate(measures.samples, elapsed_s, measures.world_size)),
        ):
            if value is not None:
                into[name].add(value)
        if elapsed_s is not None and not measures.warmup:
            self._time_s += elapsed_s
            self._data_wait_s += measures.data_wait_s or 0.0
        if measures.tokens is not None and measures.useful_tokens is not None:
            self._tokens += measures.tokens
            self._useful_tokens += measures.useful_tokens
        if measures.flops is not None:
            self.methods[measures.flops.method] = self.methods.get(measures.flops.method, 0) + 1
            self.peak_source = measures.flops.peak_source

    def _is_like_before(self, measures: StepMeasures) -> bool:
        """Whether the HFU of a step was found as those before; what is measured replaces what was counted."""
        method = None if measures.flops is None else measures.flops.executed_method
        if method is not None and self.hfu_method is None:
            self.hfu_method = method
            self._steady["hfu"], self._warmup["hfu"] = Reservoir(), Reservoir(64)
        return method == self.hfu_method

    def as_dict(self) -> dict[str, Any]:
        """The run in plain data; None for what is not known."""
        steady = self._steady["step_time_s"].median() is not None
        source = self._steady if steady else self._warmup
        return {
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "skipped_steps": self.skipped_steps,
            "medians_over": "steps after warm-up" if steady else "all steps (none after warm-up)",
            **{f"median_{name}": source[name].median() for name in self._names},
            "padding_lost": 1 - self._useful_tokens / self._tokens if self._tokens else None,
            "data_wait_share": self._data_wait_s / self._time_s if self._time_s else None,
            "hfu_method": self.hfu_method,
            "method": max(self.methods, key=lambda m: self.methods[m]) if self.methods else None,
            "methods": dict(self.methods),
            "peak_source": self.peak_source,
        }


def _rate(amount: float | None, seconds: float | None, times: int) -> float | None:
    return None if amount is None or not seconds else amount / seconds * times
