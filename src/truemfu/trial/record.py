"""The result of a trial, as it stands in trial.json and `--json` prints it; its field names are the keys.

Unknown values are None, with their reason beside them.
"""

from __future__ import annotations

import msgspec

from ..records import VersionedRecord
from ..remedies.facts import Evidence

TRIAL_FILE = "trial.json"
GAINS, LOSES, UNCLEAR = "gains", "loses", "no difference shown"
FAILED, NOT_MEASURED = "failed", "not measured"
NOT_APPLICABLE, NOT_FROM_OUTSIDE = "does not apply", "cannot be applied from outside"
TOGETHER = "together"


class LossDistance(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of a remedy beside those of the first unchanged run, step by step from the first."""

    steps: int
    """That were compared."""
    are_identical: bool
    largest_difference: float
    """Relative: 0.01 is 1 %."""
    unchanged_difference: float | None
    """The same of the other unchanged runs; None with one."""

    @property
    def is_within_unchanged(self) -> bool:
        """Whether unchanged runs differ as much."""
        return self.unchanged_difference is not None and self.largest_difference <= self.unchanged_difference


class TrialRun(msgspec.Struct, frozen=True, kw_only=True):
    """One process."""

    number: int
    """In the order in which they ran, from 1."""
    name: str
    """ "unchanged", a remedy, or "together"."""
    seconds: float
    """From its start to its end."""
    step_times_s: list[float] = []
    """After warm-up."""
    data_waits_s: list[float] = []
    """Of the same steps; shorter if some are unknown."""
    losses: list[float | None] = []
    """Of all steps; None where none was seen, or it is not finite."""
    non_finite_losses: int = 0
    """How many of them are NaN or infinite."""
    padding: float | None = None
    """The share of tokens that are padding."""
    peak_memory_bytes: int | None = None
    """The largest of all ranks."""
    world_size: int | None = None
    failure: str | None = None
    """Why there is no measurement, or no complete one."""
    output_tail: list[str] = []
    """The last lines it printed, where it failed."""


class TrialCase(msgspec.Struct, frozen=True, kw_only=True):
    """A remedy, or all that gained together; figures are None where nothing was measured."""

    name: str
    title: str
    verdict: str
    """One of the constants of this module."""
    reason: str
    """Of the verdict, or why it was tried."""
    changes: str | None = None
    """What it changes in the numbers: nothing, rounding or precision; of "together" the most of all."""
    lines: list[str] = []
    """To write into the script."""
    runs: int = 0
    """That were measured."""
    step_time_s: float | None = None
    gain_s: float | None = None
    """Of a step, against the unchanged runs beside it; negative: it loses."""
    gain_low_s: float | None = None
    gain_high_s: float | None = None
    gain: float | None = None
    """The same as a share of the unchanged step."""
    gain_low: float | None = None
    gain_high: float | None = None
    at_most_s: float | None = None
    """The most it can gain, where that is known: of loader workers the wait for data."""
    peak_memory_bytes: int | None = None
    losses: LossDistance | None = None
    losses_unknown: str | None = None
    """Why losses could not be compared."""
    warning: str | None = None
    """Losses differ by more than `changes` explains."""
    remedies: list[str] = []
    """Of "together": which."""


class Trial(VersionedRecord, frozen=True, kw_only=True):
    """A whole trial."""

    command: list[str]
    """Without the values of secrets."""
    ended: str
    """ "done", "out of time" or "interrupted"."""
    confidence: float
    rounds: int
    steps: int
    """Measured in each process."""
    warm_up_steps: int
    seconds: float
    started_at: str
    """ISO 8601, UTC."""
    truemfu_version: str
    evidence: Evidence
    step_time_s: float
    """Unchanged: the mean of all unchanged runs."""
    peak_memory_bytes: int | None
    unchanged_runs: int
    unchanged_losses_difference: float | None
    """Largest relative difference of losses between unchanged runs; None with one, or without losses."""
    cases: list[TrialCase]
    """Each remedy of the table."""
    together: TrialCase | None
    together_reason: str | None
    """Why nothing was measured together."""
    recommended: list[str]
    """The remedies to use."""
    lines: list[str]
    """To write into the script for them."""
    notes: list[str]
    runs: list[TrialRun]
