"""What is known of a step's work without gradients: reference and reward models, a teacher, an evaluation.

    observed as a whole                                   its own integers, by dtype
    the same batches, passes of the watched models        those of observed steps, once repeated observations
    without gradients, and blocks without gradients       agree; a later one that contradicts them ends that
    other sizes of both                                   the form fitted to observed steps, as for training
    else                                                  unknown, with the reason

No model has to be named: an observed step shows every operator. Between observed steps only passes of the
watched models show, and how many blocks without gradients a step entered. What a block does may change while
these stay the same: that is noticed at the next observation. Lives on the row side.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from ...flops import OBSERVED, MicroBatch, ObservedForm
from ..step_note import StepNote
from ..timing.phases import NO_GRAD
from .generation import GenerationFlops
from .known import FORM, Unknown, key_of, micro_batches
from .plan import ObservationPlan

_MOST_KEPT = 1024
_FEWEST_REPEATS = 3
"""Observations in a row that agree, after one that did not."""
_NOT_SEEN = "the beginning of the step was not seen"
_NOT_OBSERVED = (
    "no step with the same batches, and the same passes without gradients, was observed as a whole"
)
_NOT_REPEATED = (
    "no observation of work without gradients was repeated, so equal batches may not mean equal work"
)
_VARIES = "observed steps with the same batches did different work without gradients"


@dataclass(frozen=True)
class ApartCount:
    """FLOPs of a step's work without gradients, by dtype."""

    by_dtype: Mapping[str, int]
    method: str

    @property
    def flops(self) -> int:
        """Of all dtypes."""
        return sum(self.by_dtype.values())


@dataclass
class _Alike:
    """Observed steps that look the same."""

    by_dtype: Mapping[str, int]
    repeats: int = 0
    """Observations in a row that agree with it."""
    varies: bool = False


class WorkApart:
    """Takes observed steps in order, and answers for all."""

    def __init__(
        self, plan: ObservationPlan, generation: GenerationFlops, notice: Callable[..., None]
    ) -> None:
        self._plan, self.generation, self._notice = plan, generation, notice
        self._alike: OrderedDict[Hashable, _Alike] = OrderedDict()
        self._forms: dict[Hashable, ObservedForm] = {}
        self._agreed = self._contradicted = 0
        self._tried: set[Hashable] = set()
        """Kinds of steps of which one was observed, with whatever result."""
        self.is_there = False
        """Whether any step so far did such work."""

    def take(self, note: StepNote) -> None:
        """Learn from an observed step."""
        observed = note.extras.observed
        if observed is None or not observed.is_whole:
            return
        if len(self._tried) > _MOST_KEPT:
            self._tried.clear()
        for kind in (_key(note), _signs(note)):
            self._tried.add(kind)
            self._plan.known_kind(kind)
        if observed.count is None:
            return
        observed.apart = observed.observation.without_gradients()
        self.is_there = self.is_there or any(observed.apart.values())
        self.generation.take(note.generations, observed.apart)
        found = observed.apart[0]
        if note.batches.missing is not None or not note.batches.notes:
            return
        step, key = note.position.step, _key(note)
        alike = self._alike.setdefault(key, _Alike(found))
        self._alike.move_to_end(key)
        if len(self._alike) > _MOST_KEPT:
            self._alike.popitem(last=False)
        is_new, agrees = alike.by_dtype is found, alike.by_dtype == found
        if not is_new:
            alike.by_dtype, alike.varies = found, alike.varies or not agrees
            alike.repeats = alike.repeats + 1 if agrees else 0
        if all(batch.lengths is not None for batch in note.batches.notes):
            form = self._forms.setdefault((note.state, note.passes, _signs(note)), ObservedForm())
            agrees = form.add(_sizes(note), found) and agrees
        self._agreed += agrees and not is_new
        if self.is_there and not self._agreed:
            self._plan.ask("no observation of work without gradients was repeated yet")
        if not agrees:
            self._contradicted += 1
            self._notice(
                f"work without gradients has changed with the same batches, or follows their sizes no more "
                f"as before: seen at step {step}, and earlier steps may have either",
                about="changed work without gradients",
            )

    def answer(self, note: StepNote) -> ApartCount | Unknown:
        """The FLOPs of a step's work without gradients; steps of an unknown kind are to be observed."""
        found = self._answer(note)
        kind = _key(note) if self.is_there else _signs(note)
        if not isinstance(found, Unknown):
            self._plan.known_kind(kind)
        elif found.reason == _NOT_OBSERVED and kind not in self._tried:
            self._plan.unknown_kind(note.number, kind)
        return found

    def _answer(self, note: StepNote) -> ApartCount | Unknown:
        observed = note.extras.observed
        if observed is not None and observed.apart is not None:
            return ApartCount(sum(observed.apart.values(), Counter()), OBSERVED)
        rest = self._rest(note)
        generated = [self.generation.answer(each, None) for each in note.generations if not each.is_paused]
        unknown = next((each for each in (rest, *generated) if isinstance(each, Unknown)), None)
        if unknown is not None:
            return unknown
        known = [each for each in (rest, *generated) if not isinstance(each, Unknown)]
        found = sum((Counter(each.by_dtype) for each in known), Counter[str]())
        return ApartCount(found, FORM if any(each.method == FORM for each in known) else OBSERVED)

    def _rest(self, note: StepNote) -> ApartCount | Unknown:
        """The same without calls of `generate`."""
        if note.passes is None:
            return Unknown(_NOT_SEEN)
        if note.batches.missing is not None or not note.batches.notes:
            return Unknown(note.batches.missing or _NOT_OBSERVED)
        alike = self._alike.get(_key(note))
        if alike is not None:
            if alike.varies and alike.repeats < _FEWEST_REPEATS:
                return Unknown(_VARIES)
            if self._agreed > 2 * self._contradicted or alike.repeats >= _FEWEST_REPEATS:
                return ApartCount(alike.by_dtype, OBSERVED)
            return Unknown(_VARIES if self._contradicted else _NOT_REPEATED)
        form = self._forms.get((note.state, note.passes, _signs(note)))
        if form is None or any(batch.lengths is None for batch in note.batches.notes):
            return Unknown(_NOT_OBSERVED)
        found = form.predict(_sizes(note))
        return Unknown(_NOT_OBSERVED) if found is None else ApartCount(Counter(found), FORM)


def _key(note: StepNote) -> Hashable:
    return key_of(note), note.apart, _signs(note)


def _signs(note: StepNote) -> Hashable:
    """What shows of such work without the sizes of batches."""
    blocks = sum(phase == NO_GRAD for _, phase in note.span.changes)
    return "without gradients", len(note.apart), len(note.generations), blocks


def _sizes(note: StepNote) -> list[MicroBatch]:
    """The step's batches, and those of its passes without gradients."""
    apart = [
        MicroBatch(
            ("without gradients", tuple(name for name, _ in tensors)),
            tuple((f"{name}.{axis}", n) for name, shape in tensors for axis, n in enumerate(shape)),
        )
        for tensors in note.apart
    ]
    return [*micro_batches(note), *apart]
