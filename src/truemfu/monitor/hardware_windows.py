"""The resolver's part of `hybrid`: steps between two cuts become a window, windows become the run's figures.

The ratio of executed to counted FLOPs of the last window is what HFU of the following steps rests on, so
that every step has one. Memory is constant: a run's counters are merged, not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..crosscheck import CrossCheck
from ..hardware.counter_windows import combine
from ..hardware.specs import DeviceSpec
from .hardware_figures import HardwareFigures, StepDetail, StepSums, figures_of
from .hardware_watch import FROM_CYCLES, Cut, HardwareWatch, Measured
from .metrics import StepMeasures

_WINDOWS_IN_TROUBLE = 2
DATASHEET = "datasheet"


class HardwareWindows:
    """Follows the steps of a run on the resolver's thread."""

    def __init__(
        self,
        watch: HardwareWatch,
        *,
        spec: DeviceSpec | None,
        non_matrix_share: float,
        world_size: int,
        notice: Callable[[str], None],
    ) -> None:
        self._watch, self._spec, self._notice = watch, spec, notice
        self._non_matrix_share, self._world_size = non_matrix_share, world_size
        self._begin: Cut | None = None
        self._sums = StepSums()
        self._disagreeing = self._unread = 0
        self._windows = 0
        self._run_sums = StepSums()
        self._run_measured: Measured | None = None
        self._detail = StepDetail()
        self._is_datasheet_peak = False
        self.executed_ratio: float | None = None
        """Executed over counted FLOPs of the last window."""
        self.latest: HardwareFigures | None = None

    def add(
        self, measures: StepMeasures, cut: Cut | None, detail: Callable[[], StepDetail]
    ) -> HardwareFigures | None:
        """Take in a step with its counted FLOPs; the figures of a window that ends with it."""
        self._sums.add(measures)
        if cut is None:
            return None
        begin, sums = self._begin, self._sums
        self._begin, self._sums = cut, StepSums()
        if begin is None or not cut.ends_window:
            return None
        measured = self._watch.measured(begin, cut)
        if measured is None:
            self._nothing_read()
            return None
        self._unread = 0
        self._detail = detail()
        source = None if measures.flops is None else measures.flops.peak_source
        self._is_datasheet_peak = bool(source and source.startswith(DATASHEET))
        figures = self._figures(sums, measured)
        self._remember(sums, measured, figures)
        return figures

    def as_dict(self) -> dict[str, Any] | None:
        """The run so far, for the closing summary; None before the first window."""
        if self._run_measured is None:
            return None
        figures = self._figures(self._run_sums, self._run_measured)
        return {"windows": self._windows, **figures.as_dict()}

    def _figures(self, sums: StepSums, measured: Measured) -> HardwareFigures:
        return figures_of(
            sums,
            measured,
            self._detail,
            spec=self._spec,
            non_matrix_share=self._non_matrix_share,
            world_size=self._world_size,
            is_datasheet_peak=self._is_datasheet_peak,
        )

    def _remember(self, sums: StepSums, measured: Measured, figures: HardwareFigures) -> None:
        self.latest = figures
        self._windows += 1
        self._run_sums.merge(sums)
        self._run_measured = measured if self._run_measured is None else merged(self._run_measured, measured)
        check = figures.check
        if check is None:
            return
        self.executed_ratio = check.executed_flops / check.counted_flops
        self._disagreeing = 0 if check.agrees else self._disagreeing + 1
        if self._disagreeing == _WINDOWS_IN_TROUBLE:  # one alone may be a checkpoint or an evaluation
            self._notice(cross_check_notice(check))

    def _nothing_read(self) -> None:
        self._unread += 1
        if self._unread == _WINDOWS_IN_TROUBLE:
            self.executed_ratio = None
            why = self._watch.fault or "no interval of theirs lies in a window"
            self._notice(f"the hardware counters cannot be read any more, HFU rests on the count: {why}")


def merged(one: Measured, other: Measured) -> Measured:
    """Two windows as one; the clock is the mean over their time."""
    window = combine([one.window, other.window])
    assert window is not None
    clocks = [(m.clock_hz, m.window.seconds) for m in (one, other) if m.clock_hz is not None]
    seconds = sum(s for _, s in clocks)
    return Measured(
        window=window,
        clock_hz=sum(clock * s for clock, s in clocks) / seconds if seconds else None,
        clock_source=one.clock_source if one.clock_source != FROM_CYCLES else other.clock_source,
    )


def cross_check_notice(check: CrossCheck) -> str:
    """What there is to say of a window in which counted and executed differ."""
    notice = check.notice
    assert notice is not None
    return f"hybrid mode: {notice}"
