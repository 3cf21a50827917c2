"""What the training thread hands over for each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..flops import FlopCount, HostCopy, Observation, StepProfile
from .hybrid.hardware_watch import Cut
from .timing.between_steps import Gap
from .timing.clock import Span
from .values.datasets import PendingDatasetMetrics
from .values.host_values import Number
from .watching.batch_notes import StepBatches, TensorSizes
from .watching.generation import Generation

WARMUP_STEPS = 3
"""The first steps of a run, which are not representative."""


class StepPosition(NamedTuple):
    """Which step of a run it is."""

    step: int
    steps: int
    """How many it represents: more than one if the ones before it were not logged."""

    def reaches(self, frequency: int) -> bool:
        """Whether a multiple of this frequency is reached after the last logged step, up to this one."""
        return self.step % frequency < self.steps


class ObservedStep:
    """An observed step; `count` is set on the row side, once the values it needs have arrived.

    `is_whole`: it was observed from the end of the step before, else from its first forward pass.
    """

    __slots__ = ("apart", "count", "is_whole", "observation")

    def __init__(self, observation: Observation, *, is_whole: bool) -> None:
        self.observation, self.is_whole = observation, is_whole
        self.count: FlopCount | None = None
        self.apart: Mapping[int, Counter[str]] | None = None
        """`Observation.without_gradients`, set with the count of a whole step."""


class StepExtras(NamedTuple):
    """The optional parts of a step."""

    mask_tokens: int | None = None
    mask_useful_tokens: Number = None
    given_flops: float | None = None
    """The step's model FLOPs as given by the caller."""
    profile: StepProfile | None = None
    datasets: Sequence[tuple[PendingDatasetMetrics, HostCopy]] = ()
    metrics: Mapping[str, float] = MappingProxyType({})
    """What the caller adds to the row."""
    cut: Cut | None = None
    """Set if a window of the hardware counters ends with this step."""
    observed: ObservedStep | None = None
    """What was observed of this step; its time is then not representative."""
    skip_remote: bool = False
    """Whether trackers other than the local log get no row."""


NO_EXTRAS = StepExtras()


class StepNote(NamedTuple):
    """All that is known of a step when `log_step` returns; numbers may still be on the device."""

    step: int
    steps: int
    """How many steps it represents."""
    epoch: Number
    loss: Number
    grad_norm: Number
    learning_rate: Number
    batches: StepBatches
    """The same object as the step before has, if the batches are the same."""
    number: int
    """Counts the steps that were logged, from 1."""
    state: int
    """In which state the watched modules were: equal for steps with the same modules, unchanged."""
    nodes: int | None
    """How many autograd nodes its thread made; None if unknown."""
    measured: bool
    warmup: bool
    gap: Gap
    span: Span
    extras: StepExtras
    passes: int | None = 0
    """Equal for steps that started the same backward passes; 0 if none, None if unknown."""
    gradients: bytes | None = None
    """Which parameters its optimizers found with a gradient, a byte for each; None if none stepped."""
    apart: tuple[TensorSizes, ...] = ()
    """The batches of the watched modules' passes without gradients, but for those of `generate`."""
    generations: tuple[Generation, ...] = ()
    """Calls of `generate` since the last step."""

    @property
    def position(self) -> StepPosition:
        """Which step of the run it is."""
        return StepPosition(self.step, self.steps)
