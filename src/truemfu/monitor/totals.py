"""Sums over all steps that this process has logged, for the closing summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..run_summary.sums import HFU, MEDIANS, NO_PAUSES, STEP_TIME, RunSums
from .metrics import StepAmounts, StepTime
from .ranks.amounts import TOTALS, Exact

_RATES = {f"perf/{name}" for name in MEDIANS if name not in (STEP_TIME, HFU)}
_OWN_MFUS = {"mfu_whole_step": StepAmounts.whole_step_mfu, "mfu_training": StepAmounts.training_mfu}


class StepTotals:
    """The figures of a run so far, and the exact amounts that it processed."""

    def __init__(self) -> None:
        self._sums = RunSums()
        self._amounts: dict[str, tuple[int, Exact]] = {}
        """By amount: over how many steps it is known, and its sum."""
        self._peak_source: str | None = None

    def add(self, amounts: StepAmounts, times: Sequence[StepTime]) -> None:
        """Add steps with the same amounts, each with its own time."""
        sums, number = self._sums, len(times)
        sums.steps += number
        sums.skipped_steps += sum([time.steps - 1 for time in times])
        sums.warmup_steps += number if amounts.warmup else 0
        sums.observed_steps += number if amounts.observed else 0
        own = amounts.own
        for name in TOTALS:
            if name in own:
                known, total = self._amounts.get(name, (0, 0))
                self._amounts[name] = known + number, total + number * own[name]
        if amounts.tokens is not None and amounts.useful_tokens is not None:
            sums.add_tokens(amounts.tokens * number, amounts.useful_tokens * number)
        if amounts.flops is not None:
            sums.methods[amounts.flops.method] += number
            self._peak_source = amounts.flops.peak_source
        elif amounts.unknown is not None:
            sums.add_unknown(amounts.unknown.reason, number)
        self._add_times(amounts, times)

    def _add_times(self, amounts: StepAmounts, times: Sequence[StepTime]) -> None:
        sums, is_warmup = self._sums, amounts.warmup
        for time in times:
            for kind, paused_s in time.left_out_s.items():
                sums.add_pauses(kind, [paused_s])
        timed = [
            (time, time.elapsed_s) for time in times if time.elapsed_s is not None and time.elapsed_s > 0
        ]
        seconds = [elapsed_s for _, elapsed_s in timed]
        sums.add_time(sum(seconds), is_warmup=is_warmup)
        if not is_warmup:
            sums.add_between(
                [time.data_wait_s for time, _ in timed if time.data_wait_s is not None],
                [time.between_s for time, _ in timed if time.between_s is not None],
                sum([time.forwards for time, _ in timed]),
            )
            for time, _ in timed:
                if isinstance(time.phases_s, str):
                    sums.add_phases_unknown(time.phases_s, time.steps)
                elif time.phases_s is not None:
                    sums.add_phases(time.phases_s, time.steps)
        if amounts.observed:  # an observed step's time is not a measurement
            return
        sums.add_values(STEP_TIME, [elapsed_s / time.steps for time, elapsed_s in timed], is_warmup=is_warmup)
        for name, mfu_of in _OWN_MFUS.items():
            mfus = [mfu_of(amounts, time) for time, _ in timed]
            sums.add_values(name, [mfu for mfu in mfus if mfu is not None], is_warmup=is_warmup)
        for metric, rate in amounts.rates:
            name = metric.removeprefix("perf/")
            if metric in _RATES or name.startswith("mfu/"):
                sums.add_values(name, [rate / s for s in seconds], is_warmup=is_warmup)
            elif name == HFU:
                sums.add_hfu([rate / s for s in seconds], amounts.hfu_method, is_warmup=is_warmup)

    def as_dict(self, last_pauses: Mapping[str, float] = NO_PAUSES) -> dict[str, Any]:
        """The run as plain data; None where a value is unknown. `last_pauses` came after the last step."""
        steps = self._sums.steps
        return {
            **self._sums.as_dict(last_pauses),
            "totals": {
                "steps": steps,
                "ranks": 1,
                "is_complete": True,
                **{name: self._amount(name) for name in TOTALS},
            },
            "peak_source": self._peak_source,
        }

    def _amount(self, name: str) -> float | None:
        """The sum of an amount; None if it is unknown for a step."""
        known, total = self._amounts.get(name, (0, 0))
        if known != self._sums.steps or not known:
            return None
        return total if isinstance(total, int) else float(total)
