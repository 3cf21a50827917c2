"""The figures of a run from its steps, for the monitor as steps end and for a report from the rows of a log.

    monitor/totals.py           steps with equal amounts ─┐
    report/run/log_summary.py   columns of a log         ─┴► RunSums ─► the figures of a `RunSummary`

Medians are over the steps after warm-up, or over all that were not observed if there are none after it.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

PAUSES = ("evaluation", "checkpoint", "generation", "other")
"""What runs between and inside steps without belonging to them."""
PHASES = ("data_wait", "input", "forward", "no_grad", "backward", "clipping", "optimizer", "other")
"""What a step does one after the other."""
PAUSE, GENERATE = "pause", "generate"
"""Of the parts of a step: the phase of what is left out of its time, and the work of calls of `generate`."""
STEP_TIME, HFU = "step_time_s", "hfu"
MEDIANS = (
    STEP_TIME,
    "mfu",
    HFU,
    "tokens_per_second",
    "samples_per_second",
    "mfu_estimate",
    "tflops_per_gpu",
    "mfu_whole_step",
    "mfu_training",
)
"""The values that a summary has a median of, as `median_<name>`."""
NO_PAUSES: Mapping[str, float] = MappingProxyType({})
_RESERVOIR_SIZE = 4096
_MOST_REASONS = 16


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

    @property
    def seen(self) -> int:
        """How many numbers were added."""
        return self._seen

    def median(self) -> float:
        """The median of the stream; exact while the stream fits in the sample."""
        return statistics.median(self._sample)


class RunSums:
    """Sums over a run in constant memory; `sample` is the number of values that a median is taken of."""

    def __init__(self, sample: int = _RESERVOIR_SIZE) -> None:
        self.steps = self.warmup_steps = self.observed_steps = self.skipped_steps = 0
        self.methods: Counter[str] = Counter()
        """How the FLOPs of steps were found, and of how many."""
        self._unknown: Counter[str] = Counter()
        self._sample = sample
        self._values: dict[bool, dict[str, Reservoir]] = {False: {}, True: {}}
        """By whether they are of warm-up, and by name."""
        self._hfu_method: str | None = None
        self._tokens = self._useful_tokens = 0.0
        self._seconds = {False: 0.0, True: 0.0}
        """The time of steps, by whether they are of warm-up."""
        self._between_s: dict[str, float] = {}
        """What is known of the time between steps after warm-up, by what it was spent on."""
        self._forwards = 0
        self._pauses: dict[str, tuple[int, float]] = {}
        """How often something other than steps ran, and its seconds."""
        self._phases_s: dict[str, float] = {}
        self._phase_steps = 0
        """Steps whose phases are known, after warm-up."""
        self._phases_unknown: Counter[str] = Counter()

    def add_values(self, name: str, values: Sequence[float], *, is_warmup: bool) -> None:
        """Add known values of `MEDIANS`, or of `mfu/<model>`, of steps that were not observed."""
        if values:
            found = self._values[is_warmup]
            found.setdefault(name, Reservoir(self._sample)).add(values)

    def add_hfu(self, values: Sequence[float], method: str | None, *, is_warmup: bool) -> None:
        """Add values of HFU; measured ones have a `method` and replace those by the count."""
        if method is not None and self._hfu_method is None:
            self._hfu_method = method
            for found in self._values.values():
                found.pop(HFU, None)
        if method == self._hfu_method:
            self.add_values(HFU, values, is_warmup=is_warmup)

    def add_time(self, seconds: float, *, is_warmup: bool) -> None:
        """Add the time of steps."""
        self._seconds[is_warmup] += seconds

    def add_between(self, data_wait_s: Sequence[float], between_s: Sequence[float], forwards: int) -> None:
        """Add the known time between steps after warm-up, and forward passes without gradients in it."""
        for name, seconds in (("data_wait", data_wait_s), ("between_steps", between_s)):
            if seconds:
                self._between_s[name] = self._between_s.get(name, 0.0) + sum(seconds)
        self._forwards += forwards

    def add_pauses(self, kind: str, seconds: Sequence[float]) -> None:
        """Add what ran without belonging to a step: one of `PAUSES`."""
        if seconds:
            times, sum_s = self._pauses.get(kind, (0, 0.0))
            self._pauses[kind] = times + len(seconds), sum_s + sum(seconds)

    def add_phases(self, phases_s: Mapping[str, float], steps: int) -> None:
        """Add seconds by phase of steps after warm-up."""
        self._phase_steps += steps
        for phase, seconds in phases_s.items():
            self._phases_s[phase] = self._phases_s.get(phase, 0.0) + seconds

    def add_phases_unknown(self, reason: str, steps: int) -> None:
        """Add steps after warm-up whose phases are unknown."""
        if reason in self._phases_unknown or len(self._phases_unknown) < _MOST_REASONS:
            self._phases_unknown[reason] += steps

    def add_tokens(self, tokens: float, useful_tokens: float) -> None:
        """Add the tokens of steps whose padding is known."""
        self._tokens += tokens
        self._useful_tokens += useful_tokens

    def add_unknown(self, reason: str, steps: int) -> None:
        """Add steps whose FLOPs are unknown; reasons beyond the first few are not kept."""
        if reason in self._unknown or len(self._unknown) < _MOST_REASONS:
            self._unknown[reason] += steps

    def as_dict(self, last_pauses: Mapping[str, float] = NO_PAUSES) -> dict[str, Any]:
        """The fields of a `RunSummary`; None where a value is unknown. `last_pauses` came after all steps."""
        is_steady = STEP_TIME in self._values[False]
        values = self._values[not is_steady]
        medians = {name: found.median() for name, found in values.items()}
        return {
            "steps": self.steps,
            "warmup_steps": self.warmup_steps,
            "observed_steps": self.observed_steps,
            "skipped_steps": self.skipped_steps,
            "medians_over": "steps after warm-up" if is_steady else "all steps (none after warm-up)",
            "median_steps": {name: values[name].seen for name in MEDIANS if name in values},
            **{f"median_{name}": medians.get(name) for name in MEDIANS},
            "median_mfu_by_model": {
                name.removeprefix("mfu/"): mfu for name, mfu in medians.items() if name.startswith("mfu/")
            },
            "padding_lost": 1 - self._useful_tokens / self._tokens if self._tokens else None,
            "data_wait_share": self._share("data_wait"),
            "between_steps_share": self._share("between_steps"),
            "forwards_between_steps": self._forwards,
            "left_out": self._left_out(last_pauses),
            "phases_s": {
                phase: self._phases_s[phase] / self._phase_steps
                for phase in PHASES
                if phase in self._phases_s
            },
            "phases_unknown": dict(self._phases_unknown),
            "hfu_method": self._hfu_method,
            "method": self.methods.most_common(1)[0][0] if self.methods else None,
            "methods": dict(self.methods),
            "mfu_unknown": dict(self._unknown),
        }

    def _share(self, spent_on: str) -> float | None:
        """As a share of the time of the steps after warm-up."""
        seconds, steady_s = self._between_s.get(spent_on), self._seconds[False]
        return seconds / steady_s if seconds is not None and steady_s else None

    def _left_out(self, last: Mapping[str, float]) -> dict[str, dict[str, float]]:
        found = dict(self._pauses)
        for kind, seconds in last.items():
            times, sum_s = found.get(kind, (0, 0.0))
            found[kind] = times + 1, sum_s + seconds
        run_s = sum(self._seconds.values()) + sum(seconds for _, seconds in found.values())
        return {
            kind: {"times": found[kind][0], "seconds": found[kind][1], "share": found[kind][1] / run_s}
            for kind in PAUSES
            if kind in found and run_s
        }
