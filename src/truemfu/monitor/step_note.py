"""What the training thread hands over for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..flops.host_copy import HostCopy
from ..flops.profiler import StepProfile
from .between_steps import Gap
from .clock import Span
from .datasets import PendingDatasetMetrics
from .hardware_watch import Cut
from .host_values import Number
from .model_state import States
from .observe import StepBatches

WARMUP_STEPS = 3
"""The first steps of a run, which are no measure of it."""


class StepPlace(NamedTuple):
    """Which step of a run it is."""

    step: int
    steps: int
    """How many it stands for: more than one where those before it were not logged."""

    def reaches(self, frequency: int) -> bool:
        """Whether a multiple of this frequency lies between the last logged step and this one."""
        return self.step % frequency < self.steps


class StepNote(NamedTuple):
    """All that is known of a step when `log_step` returns; numbers may still be on their way."""

    place: StepPlace
    epoch: Number
    loss: Number
    grad_norm: Number
    learning_rate: Number
    mask_tokens: int | None
    mask_useful_tokens: Number
    batches: StepBatches
    given_flops: float | None
    """What the caller says the step needs."""
    states: States
    measured: bool
    gap: Gap
    warmup: bool
    profile: StepProfile | None
    datasets: Sequence[tuple[PendingDatasetMetrics, HostCopy]]
    skip_remote: bool
    span: Span
    cut: Cut | None
