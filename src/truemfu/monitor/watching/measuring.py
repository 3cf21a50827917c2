"""When a step measures more than time: the frequency of the training phase, and the profiled step.

    every flops_profile_freq steps, or at the phase's frequency   a step is profiled, if the mode does that
    recalibration_frequency steps                                 FLOPs are counted, if they were not before

Lives on the training thread. Which steps are observed is decided in `step_flops/plan.py`.
"""

from __future__ import annotations

from ...convention import Convention
from ...errors import closest
from ...flops import StepProfile, StepProfiler
from ..config import MonitorConfig
from ..notices import Notices
from ..step_note import StepPosition


class Measuring:
    """Decides which steps are profiled, and from when on FLOPs are counted."""

    def __init__(self, config: MonitorConfig, notices: Notices) -> None:
        self._config, self._notices = config, notices
        self.profiles = config.mode == "profiler"
        """Whether this run profiles real steps."""
        self._phase: str | None = None
        self.profiler: StepProfiler | None = None
        """That of the current step, if it is profiled."""
        self._profile_is_due = True
        self.is_counted = config.initial_profiling
        """Whether steps are counted already; before, they are estimated."""
        self._steps = 0

    def set_phase(self, name: str | None) -> None:
        """Measure at the frequency of this phase."""
        known = self._config.phases
        if name is None or (isinstance(name, str) and name in known):
            self._phase = name
            return
        hint = closest(str(name), known)
        self._notices(f"unknown phase {name!r}, the phase is unchanged; known: {', '.join(known)}{hint}")

    @property
    def frequency(self) -> int:
        """Steps between measurements in this phase; 0: never again."""
        return self._config.flops_profile_freq if self._phase is None else self._config.phases[self._phase]

    def add_steps(self, steps: int) -> None:
        """So many more steps are done."""
        self._steps += steps
        done, recalibration = StepPosition(self._steps, steps), self._config.recalibration_frequency
        if self.frequency and done.reaches(self.frequency):
            self._profile_is_due = True
        if self.frequency and recalibration and done.reaches(recalibration):
            self.is_counted = True

    def begin_step(self, convention: Convention) -> None:
        """Profile the step that begins, if that is due; to be called where this run `profiles`."""
        if not self._profile_is_due:
            return
        self._profile_is_due = False
        profiler = StepProfiler(convention)
        try:
            profiler.start()
        except Exception as error:
            self._cannot_profile(error)
        else:
            self.profiler = profiler

    def end_step(self) -> StepProfile | None:
        """The profile of the step that ends; None where it has none."""
        if self.profiler is None:
            return None
        profiler, self.profiler = self.profiler, None
        try:
            return profiler.stop()
        except Exception as error:
            self._cannot_profile(error)
            return None

    def interrupt(self) -> None:
        """Code outside of the step runs now: discard its profile and take another one later."""
        if self.end_step() is not None:
            self._profile_is_due = True

    def _cannot_profile(self, error: Exception) -> None:
        self._notices(f"this step could not be profiled, HFU is based on the count: {error}")

    def go_without_counters(self, reason: str | None) -> None:
        """`hybrid` has no hardware counters: profile instead, if configured. A reason becomes a warning."""
        self.profiles = self._config.fallback_to_profiler
        if reason is not None:
            result = "come from torch.profiler" if self.profiles else "and HFU are unknown"
            self._notices(f"hybrid mode: no hardware counters ({reason}); executed FLOPs {result}")
