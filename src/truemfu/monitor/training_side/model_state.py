"""The model's state at a forward pass, and the counts made for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from ...flops import AutocastState, Estimator, FlopModel, StepWork, model_identity, snapshot, unwrap
from .batch_notes import Template
from .fingerprint import fingerprint, structure

_MAX_IDLE_CHANGES = 2


@dataclass(eq=False, kw_only=True)
class ModelState:
    """A copy without data of the model as it was when a count became due, and the forms fitted to it."""

    number: int
    """The number of this state, from 0."""
    fingerprint: tuple[int, int]
    structure: str
    model: nn.Module
    forms: dict[AutocastState, FlopModel | None] = field(default_factory=dict)
    """None if it cannot be counted."""
    estimators: dict[AutocastState, Estimator | None] = field(default_factory=dict)
    works: dict[Template, StepWork | str] = field(default_factory=dict)
    """Micro-batches by shape where that was requested, or why it is unknown."""

    idle_changes: int = 0
    """How often in a row only a number of the model changed, and its count did not."""
    forms_before: Mapping[AutocastState, FlopModel | None] = field(default_factory=dict)
    """The forms of the state before, if only a number has changed since."""

    def still_holds(self, model: nn.Module) -> bool:
        """Whether the model is unchanged; a number that does not affect the count is ignored."""
        now = fingerprint(model)
        return now == self.fingerprint or (
            now[0] == self.fingerprint[0] and self.idle_changes >= _MAX_IDLE_CHANGES
        )

    @classmethod
    def of(cls, model: nn.Module, *, number: int, last: ModelState | None) -> ModelState:
        """The model's new state after `last`; taken in its forward pass, in milliseconds."""
        now = fingerprint(model)
        before = last if last is not None and last.fingerprint[0] == now[0] else None
        idle_changes = 0 if before is None else before._idle_changes_so_far()
        forms = {} if before is None else dict(before.forms)
        return cls(
            number=number,
            fingerprint=now,
            structure=structure(model),
            model=snapshot(model),
            forms=forms if idle_changes >= _MAX_IDLE_CHANGES else {},
            idle_changes=idle_changes,
            forms_before=forms,
        )

    @cached_property
    def identity(self) -> str | None:
        """Identifies this state across processes; None if the model's code cannot be read."""
        return model_identity(self.model)

    def _idle_changes_so_far(self) -> int:
        if not self.forms_before or not self.forms:  # the first of its kind, or not yet counted
            return self.idle_changes
        is_same = all(
            autocast in self.forms_before and _is_same_form(form, self.forms_before[autocast])
            for autocast, form in self.forms.items()
        )
        return self.idle_changes + 1 if is_same else 0


States = tuple[ModelState | None, ...]
"""The states of all models of a step, indexed by the slot of their batches; None where unknown."""


def state_in(states: States, slot: int) -> ModelState | None:
    """The state of one slot; None if none was taken yet."""
    return states[slot] if slot < len(states) else None


def _is_same_form(one: FlopModel | None, other: FlopModel | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.export() == other.export()


def facts_of(models: Sequence[nn.Module]) -> dict[str, Any] | None:
    """Class and parameters of the models of a run, for its description; None without a model."""
    if not models:
        return None
    every = {id(p): p for model in models for p in model.parameters() if not nn.parameter.is_lazy(p)}
    parameters = [(p.numel(), p.requires_grad) for p in every.values()]
    return {
        "name": ", ".join(type(unwrap(model)).__name__ for model in models),
        "parameters": sum(count for count, _ in parameters),
        "trainable_parameters": sum(count for count, is_trained in parameters if is_trained),
        "dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in every.values()}),
    }
