"""Steps between two cuts of the counters become a window, and windows the figures of the run.

Lives on the row thread.

The HFU of the following steps uses the last window's ratio of executed to counted FLOPs, so that every step
has one. Memory is constant: a run's counters are merged, not stored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from time import monotonic
from typing import Any

from ...crosscheck import CrossCheck
from ...errors import one_line
from ...hardware.counters.executed import CYCLE_COUNTERS, has_rate
from ...hardware.counters.windows import combine
from ...hardware.nsight.audited import AuditedKernels
from ...hardware.specs import DeviceSpec
from ..metrics import StepAmounts, StepTime
from ..step_note import StepNote
from . import hardware_watch
from .hardware_figures import HardwareFigures, StepSums, figures_of
from .hardware_watch import Cut, HardwareWatch, MeasuredWindow
from .step_detail import StepDetails

_WINDOWS_BEFORE_WARNING = 2
_DATASHEET = "datasheet"


class HardwareWindows:
    """Follows the steps of a run on the row thread."""

    def __init__(
        self,
        watch: HardwareWatch,
        *,
        spec: DeviceSpec | None,
        audited: AuditedKernels | None,
        world_size: int,
        details: StepDetails,
        collective_share: Callable[[], float | None],
        notice: Callable[[str], None],
    ) -> None:
        self._watch, self._notice = watch, notice
        self.details, self._collective_share = details, collective_share
        self._figures_of = functools.partial(figures_of, spec=spec, audited=audited, world_size=world_size)
        self._begin: Cut | None = None
        self._sums = StepSums()
        self._unread = 0
        self._has_read = False
        self._run, self._disagreement = _RunWindows(), _Disagreement(notice)
        self.is_left_out = False
        """Whether processing failed, with a warning: further windows are ignored."""
        self.measures_executed = has_rate(spec)
        """Whether executed FLOPs can be computed; if not, it gives only energy and activity."""
        self.latest: HardwareFigures | None = None
        """The last window, while the counters can be read."""
        self._latest_at_s = 0.0
        """When that was set, by `time.monotonic`."""

    @property
    def executed_ratio(self) -> float | None:
        """Executed over counted FLOPs of the last window."""
        check = None if self.latest is None else self.latest.check
        return None if check is None else check.executed_flops / check.counted_flops

    def counted_clock_hz(self, longest_s: float) -> float | None:
        """The clock by cycle counters in the last window, unless that is over for so long."""
        measured = None if self.latest is None else self.latest.measured
        if measured is None or measured.clock_source != CYCLE_COUNTERS:
            return None
        return measured.clock_hz if monotonic() - self._latest_at_s < longest_s else None

    def can_take(self, cut: Cut | None) -> bool:
        """Whether the window that ends here was read completely; rows wait for that, for seconds at most."""
        if cut is None or self.is_left_out:
            return True
        try:
            return self._watch.has_read_past(cut) or not cut.ends_window
        except Exception as error:
            self._leave_out(error)
            return True

    def add(self, note: StepNote, amounts: StepAmounts, time: StepTime) -> None:
        """Add a step with its counted FLOPs, and finish the window that ends with it."""
        if self.is_left_out:
            return
        try:
            self._sums.add(amounts, time)
            if note.extras.cut is not None:
                self._cut(note, note.extras.cut, amounts)
        except Exception as error:
            self._leave_out(error)

    def _cut(self, note: StepNote, cut: Cut, amounts: StepAmounts) -> None:
        """A window begins after this step, and the one before ends with it."""
        begin, sums = self._begin, self._sums
        self._begin, self._sums = cut, StepSums()
        if begin is None or not cut.ends_window:
            return
        measured = self._watch.measured(begin, cut)
        if measured is None:
            self._nothing_read()
            return
        self._unread, self._has_read = 0, True
        share = self._collective_share()
        if share is not None:
            sums.collective_s, sums.timed_s = share * sums.elapsed_s, sums.elapsed_s
        source = None if amounts.flops is None else amounts.flops.peak_source
        typical: dict[str, Any] = {
            "work": self.details.of(note),
            "is_datasheet_peak": bool(source and source.startswith(_DATASHEET)),
        }
        self.latest, self._latest_at_s = self._figures_of(sums, measured, **typical), monotonic()
        self._run.add(sums, measured, typical)
        self._disagreement.note(self.latest.check)

    def interrupted(self) -> None:
        """Time before the next step is excluded from it: the current window ends without a figure."""
        self._begin = None
        self._watch.restart()

    def _leave_out(self, error: Exception) -> None:
        """Ignore further windows, and drop the last one."""
        self.is_left_out, self.latest = True, None
        self._notice(f"the hardware counters are ignored from now on: {one_line(error)}")

    def as_dict(self) -> dict[str, Any] | None:
        """The run so far, for the closing summary; None before a first window of steps with FLOPs."""
        run = self._run
        if run.measured is None:
            return None
        figures = self._figures_of(run.sums, run.measured, **run.typical)
        return {"windows": run.windows, "windows_left_out": run.left_out, **figures.as_dict()}

    def close(self) -> None:
        """The run has ended: release the counters, with a warning if they measured nothing."""
        if (why := self._why_nothing()) is not None:
            self._notice(why)
        try:
            self._watch.close()
        except Exception as error:
            self._notice(f"the hardware counters could not be closed: {one_line(error)}")

    def _why_nothing(self) -> str | None:
        """Why the counters measured nothing; None if they did, or after a warning."""
        if self._has_read or self.is_left_out or self._unread >= _WINDOWS_BEFORE_WARNING:
            return None
        if self._unread:
            return f"hybrid mode: the only window of the run was not read: {self._why_unread()}"
        needed_s = hardware_watch.SETTLE_S + hardware_watch.WINDOW_S
        return (
            f"hybrid mode: the counters measured nothing: they need {needed_s:.0f} seconds of steps "
            "without a pause, a compilation or an observed step"
        )

    def _nothing_read(self) -> None:
        self._unread += 1
        if self._unread == _WINDOWS_BEFORE_WARNING:
            self.latest = None
            any_more = " any more, so HFU no longer comes from them" if self._has_read else ""
            self._notice(f"the hardware counters cannot be read{any_more}: {self._why_unread()}")

    def _why_unread(self) -> str:
        return self._watch.fault or "too little of the measuring window was read"


class _RunWindows:
    """The windows of a run so far, added up."""

    def __init__(self) -> None:
        self.windows = self.left_out = 0
        self.sums = StepSums()
        self.measured: MeasuredWindow | None = None
        self.typical: dict[str, Any] = {}
        """What the steps of the last window were."""

    def add(self, sums: StepSums, measured: MeasuredWindow, typical: dict[str, Any]) -> None:
        """Add a window, unless the FLOPs of some of its steps are unknown."""
        self.typical = typical
        if not sums.is_complete:
            self.left_out += 1
            return
        self.windows += 1
        self.sums.merge(sums)
        self.measured = measured if self.measured is None else merged(self.measured, measured)


class _Disagreement:
    """Windows in a row in which counters and count differ: a warning, once per set of causes."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice
        self._windows = 0
        self._warned_causes: set[frozenset[str]] = set()

    def note(self, check: CrossCheck | None) -> None:
        """The next window; one alone may be a checkpoint or an evaluation."""
        if check is None:
            return
        self._windows = 0 if check.agrees else self._windows + 1
        causes = frozenset(cause.key for cause in check.causes)
        if self._windows >= _WINDOWS_BEFORE_WARNING and causes not in self._warned_causes:
            self._warned_causes.add(causes)
            self._notice(f"hybrid mode: {check.notice}")


def merged(one: MeasuredWindow, other: MeasuredWindow) -> MeasuredWindow:
    """Two windows as one; the clock is the mean over their time."""
    window = combine([one.window, other.window])
    assert window is not None
    clocks = [(m.clock_hz, m.window.seconds) for m in (one, other) if m.clock_hz is not None]
    seconds = sum(s for _, s in clocks)
    sources = (one.clock_source, other.clock_source)
    return MeasuredWindow(
        window=window,
        clock_hz=sum(clock * s for clock, s in clocks) / seconds if seconds else None,
        clock_source=sources[0] if len(set(sources)) == 1 else " and ".join(sorted({*sources})),
    )
