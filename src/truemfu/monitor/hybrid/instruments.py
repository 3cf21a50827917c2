"""What measures some steps beside the monitor: the GPU's counters, an audit, a census.

step_begins ─► passes ─► step_ends ─► cut ─► hand_over ─► wants_pause ─► between_steps
"""

from __future__ import annotations

from ..step_note import StepNote
from ..watching.compilations import compilations
from .audit_step import AuditStep
from .census_step import CensusStep
from .hardware_watch import Cut, HardwareWatch


class Instruments:
    """On the training thread; each of them may be absent."""

    def __init__(
        self, counters: HardwareWatch | None, audit: AuditStep | None, census: CensusStep | None
    ) -> None:
        self.counters, self.audit, self.census = counters, audit, census
        self._nodes: int | None = None
        self._was_quiet = False
        """Of the last step: the autograd nodes that it made, and whether it was an ordinary one."""

    @property
    def is_recording(self) -> bool:
        """Whether the current step is recorded, so that its time is not representative."""
        return self.census is not None and self.census.is_recording

    def step_begins(self, logged: int) -> bool:
        """A step begins with its first forward pass, after so many; whether it is to be observed."""
        return self.audit is not None and self.audit.begin_step(logged, compilations())

    def pass_begins(self) -> None:
        """A forward pass of a watched module begins."""
        if self.census is not None:
            self.census.end_if_long()

    def step_ends(self) -> None:
        """The step ends, before the monitor launches anything for it."""
        if self.audit is not None:
            self.audit.end_step()

    def cut(self, now_s: float, nodes: int | None, *, is_quiet: bool) -> Cut | None:
        """The step has ended: a cut between windows of the counters, if one is due.

        A window excludes steps that are not quiet: those that compile, are profiled or observed.
        """
        self._nodes, self._was_quiet = nodes, is_quiet
        if self.counters is None:
            return None
        if is_quiet:
            return self.counters.cut(now_s)
        self.counters.restart()
        return None

    def hand_over(self, note: StepNote) -> None:
        """The note of the step that has just ended."""
        if self.audit is not None:
            self.audit.hand_over(note)

    def wants_pause(self, logged: int) -> bool:
        """After so many steps, between two: whether the census has something to do."""
        census = self.census
        return census is not None and census.wants(logged, self._nodes, was_quiet=self._was_quiet)

    def between_steps(self, logged: int) -> bool:
        """Let the census do that; whether it took time."""
        return self.census is not None and self.census.between_steps(logged)

    def interrupt(self) -> None:
        """Code outside of the step runs from now on."""
        self.stop_recording()
        if self.audit is not None:
            self.audit.pause()
        if self.counters is not None:
            self.counters.restart()

    def resume(self) -> None:
        """The step continues."""
        if self.audit is not None:
            self.audit.resume()

    def stop_recording(self) -> None:
        """Discard what was recorded of the current step."""
        if self.census is not None:
            self.census.interrupt()
