"""What is known of the FLOPs of steps: integers of observed steps, and a form fitted to them.

    observed itself                                      its own integers
    the same batches, as many autograd nodes,            those of the observed step, once repeated
    gradients of the same parameters                     observations have shown that equal batches mean
                                                         equal work in this run
    the same batches, other nodes or gradients           the same, if three such steps agree and enclose it
    other sizes, the same nodes and gradients            the form, which later observations check
    else                                                 pending while it may still be observed, then unknown

Lives on the row side.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from ...flops import FlopCount, MicroBatch, ObservedForm, StepWork, count_of, integers_of
from ..step_note import StepNote
from ..watching.batch_notes import BatchNote
from .watch import StepWatch, kind_of

FORM = "closed form of observed steps"
_FITTED = ("by_dtype", "by_module")
"""Splits of a count that the form gives; operators are left out, since a kernel may depend on the sizes."""
_FEWEST_ALIKE = 3
"""Observed steps with the same batches, and other nodes or gradients, that must agree."""
_MOST_CHANGES, _FEWEST_REPEATS = 2, 8
"""After so many contradictions steps with these batches are known only where they were observed, until so
many observations in a row agree."""
_LONGEST_HOLD_S = 5.0
"""How long after its step a row waits for an observation of its kind."""
_MOST_KEPT = 4096
_MOST_FORMS = 64
"""Forms of a run, and what steps with the same batches ran; the oldest ones are forgotten."""
_STEPS_LISTED = 64
_MOST_PROBLEMS = 3
"""Observations in a row that failed for the same reason, until it is no longer tried again at once."""
_NOT_OBSERVED = (
    "no step with the same batch shapes was observed, and the observed ones do not determine the FLOPs"
)
_OTHER_OPERATORS = "the step ran other operators than the observed steps with the same batches"
_NOT_REPEATED = "no observation was repeated, so equal batches may not mean equal work"
_VARIES = "observed steps with the same batches did different work, so only observed steps have known FLOPs"
_CHANGED = "observed steps before and after this one did different work with the same batches"
_NO_BATCH = (
    "no forward pass of a watched module with gradients was seen in the step, so its batch shapes are "
    "unknown: attach the object you call (the compiled model, the wrapper), or call monitor.observe(batch)"
)

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Unknown:
    """Why the FLOPs of a step are unknown: a clause that every view shows."""

    reason: str


class _Ran(NamedTuple):
    """What shows of the operators that a step ran; None is unknown."""

    nodes: int | None
    gradients: bytes | None

    def is_enclosed(self, others: Sequence[_Ran]) -> bool:
        """Whether it is between others: fewer and more nodes and gradients, and no new parameter has one."""
        known = [other.nodes for other in others if other.nodes is not None]
        if self.nodes is None or len(known) < _FEWEST_ALIKE or not min(known) <= self.nodes <= max(known):
            return False
        found = [other.gradients for other in others if other.gradients is not None]
        own = self.gradients
        if own is None or not found:
            return True
        numbers = [sum(each) for each in found if len(each) == len(own)]
        reached = reduce(or_, [int.from_bytes(each, "big") for each in found if len(each) == len(own)], 0)
        is_new = int.from_bytes(own, "big") & ~reached
        return bool(numbers) and not is_new and min(numbers) <= sum(own) <= max(numbers)


@dataclass
class _Alike:
    """Observed steps with the same batches, by what they ran."""

    counts: dict[_Ran, tuple[int, FlopCount]] = field(default_factory=dict)
    """The last step observed, and its count."""
    work: StepWork | None = None
    changes: int = 0
    repeats: int = 0
    """Contradictions, and observations since that agree."""
    contradicted: tuple[int, int] = (0, 0)
    """The last two observed steps that contradict each other: a step between them may be like either."""
    problem: str | None = None

    def find(self, ran: _Ran) -> tuple[int, FlopCount] | None:
        """The last step that ran the same, as far as is known, or else the last of those that enclose it."""
        found = list(self.counts.items())
        for place, value in enumerate(ran):
            if value is not None and any(other[place] is not None for other, _ in found):
                found = [each for each in found if each[0][place] == value]
        if not found and ran.is_enclosed(list(self.counts)):
            found = list(self.counts.items())
        agrees = len({_totals(count) for _, (_, count) in found}) == 1
        return found[-1][1] if agrees else None


class KnownSteps:
    """Takes observed steps in order, and answers for all."""

    def __init__(
        self,
        watch: StepWatch,
        *,
        notice: Callable[..., None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._watch, self.plan, self.convention = watch, watch.plan, watch.convention
        self._notice, self._clock = notice, clock
        self._agreed = self._contradicted = 0
        """How many observations did the work that was known of such steps before, and how many did not."""
        self._alike: OrderedDict[Key, _Alike] = OrderedDict()
        self._forms: dict[tuple[int, int | None, _Ran], ObservedForm] = {}
        self._has_whole = self._drops_parts = False
        self._problems: Counter[str] = Counter()
        self.number_counted = 0
        self.steps: list[int] = []
        """The first observed steps."""
        self.notes: dict[str, None] = {}

    def take(self, note: StepNote) -> None:
        """Learn from an observed step, once its values are there."""
        observed = note.extras.observed
        assert observed is not None
        observation = observed.observation
        key = key_of(note)
        alike = self._entry(key)
        problem = observation.problem
        if problem is None:
            count = observation.count([batch.documents for batch in note.batches.notes])
            problem = observation.problem
        has_more = observed.is_whole and (observation.before_first_batch or observation.unseen_forward)
        if has_more and not self._drops_parts:
            self._drops_parts = True
            self._watch.observe_whole_steps()
            self._alike.clear()  # what was learned from parts
            self._forms.clear()
            alike = self._entry(key)
        is_part = not observed.is_whole and (self._drops_parts or observation.unseen_forward)
        if problem is not None or is_part:
            if is_part:
                self._watch.observe_whole_steps()
            alike.problem = problem
            self._problems[problem or "part"] += 1
            if self._problems[problem or "part"] <= _MOST_PROBLEMS:
                self.plan.ask("an observation failed")
            return
        alike.problem = None
        self._problems.clear()
        self._has_whole = self._has_whole or observed.is_whole
        self.number_counted += 1
        if len(self.steps) < _STEPS_LISTED:
            self.steps.append(note.position.step)
        observed.count = count
        self.notes.update(dict.fromkeys(count.notes))
        self._learn(note, alike, count)
        alike.work = observation.work()

    def _learn(self, note: StepNote, alike: _Alike, count: FlopCount) -> None:
        ran, step = _Ran(note.nodes, note.gradients), note.position.step
        before, known = alike.find(ran) or (step, None)
        _put(alike.counts, ran, (step, count))
        is_changed = known is not None and _totals(known) != _totals(count)
        if known is not None and is_changed:
            self._contradict(alike)
            alike.contradicted = before, step
            _put(alike.counts, ran, (step, count))
            self._notice(
                f"the work of steps with the same batches changed between steps {before} and {step}, from "
                f"{known.model_flops:,} to {count.model_flops:,} FLOPs: steps between them may have either",
                about="changed work",
            )
        elif known is not None:
            self._agreed += 1
            alike.repeats += 1
            if alike.repeats >= _FEWEST_REPEATS:
                alike.changes = 0
            if self._is_repeatable:
                self._watch.repeats_agree()
        observed = note.extras.observed
        if not self._is_repeatable and observed is not None and observed.is_whole:
            self.plan.ask("no observation was repeated yet")
        if ran.nodes is None or not note.batches.notes or note.batches.missing:
            return
        kind = note.state, note.passes, ran
        form = self._forms.get(kind) or ObservedForm()
        _put(self._forms, kind, form)
        agrees = form.add(micro_batches(note), integers_of(count, _FITTED))
        if not agrees and not is_changed:
            self._notice(
                f"FLOPs from a closed form may be wrong in steps before step {step}: that step was "
                "observed and contradicts the closed form, which is now fitted again",
                about="wrong form",
            )

    def _contradict(self, alike: _Alike) -> None:
        """The work has changed for good, or it varies: the next observation of its kind tells."""
        self._contradicted += 1
        alike.changes += 1
        alike.repeats = 0
        for each in self._alike.values():  # what was observed before the change
            each.counts.clear()
        self._forms.clear()
        self._watch.observe_again()
        if alike.changes < _MOST_CHANGES:
            self.plan.ask("the work changed")

    @property
    def _is_repeatable(self) -> bool:
        """Whether steps with the same batches, nodes and gradients as observed ones do the same work."""
        return self._agreed > 2 * self._contradicted

    def answer(self, note: StepNote) -> FlopCount | Unknown:
        """The FLOPs of a step as far as they are known now."""
        alike = self._found(note)
        observed = note.extras.observed
        is_part = observed is not None and not observed.is_whole
        is_incomplete = is_part and (self._drops_parts or note.batches.missing is not None)
        if observed is not None and observed.count is not None and not is_incomplete:
            return observed.count
        if note.batches.missing is not None:
            return Unknown(note.batches.missing)
        if not note.batches.notes:
            return Unknown(_NO_BATCH)
        if alike is not None:
            if alike.changes >= _MOST_CHANGES:
                return Unknown(_VARIES)
            if alike.contradicted[0] < note.position.step < alike.contradicted[1]:
                return Unknown(_CHANGED)
            ran = _Ran(None if is_part and self._drops_parts else note.nodes, note.gradients)
            known = alike.find(ran)
            if known is not None:
                reason = alike.problem or (_VARIES if self._contradicted else _NOT_REPEATED)
                return known[1] if self._is_repeatable else Unknown(reason)
        if any(batch.lengths is None for batch in note.batches.notes):
            return Unknown("the values of the step's batch were overwritten before they could be read")
        found = self._predicted(note)
        if found is not None and self._contradicted and not self._is_repeatable:
            return Unknown(_VARIES)
        if found is not None:
            return count_of(found, method=FORM, convention=self.convention)
        if alike is not None and alike.problem is not None:
            return Unknown(alike.problem)
        if alike is not None and alike.counts:
            return Unknown(_OTHER_OPERATORS)
        return Unknown(self._watch.hindrance or _NOT_OBSERVED)

    def is_settled(self, note: StepNote) -> bool:
        """Whether the answer is final for the row: an unknown kind may still be observed for some time."""
        observed = note.extras.observed
        if observed is not None and (observed.is_whole or (self._has_whole and not self._drops_parts)):
            return True
        if (observed is None or self._has_whole) and not isinstance(self.answer(note), Unknown):
            self.plan.known_kind(kind_of(note.batches, note.nodes, note.passes, note.gradients))
            return True
        if note.batches.missing is not None or not note.batches.notes:
            return True
        if any(batch.lengths for batch in note.batches.notes):  # the training thread reads no values
            self.plan.ask("lengths of documents or images that were not observed")
        now_s = self._clock()
        return now_s - note.span.end.host_s > _LONGEST_HOLD_S or not self.plan.wants_unknown(now_s)

    def work(self, note: StepNote) -> StepWork | None:
        """An observed step with the same batches, by shape."""
        alike = self._found(note)
        return None if alike is None else alike.work

    def _found(self, note: StepNote) -> _Alike | None:
        """Observed steps with the same batches; the newest ones where the backward passes are unknown."""
        wanted = key_of(note)
        if note.passes is not None:
            return self._alike.get(wanted)
        newest = reversed(self._alike.items())
        return next((alike for key, alike in newest if (key[0], *key[2:]) == (wanted[0], *wanted[2:])), None)

    def _predicted(self, note: StepNote) -> dict[str, int] | None:
        """By the form of steps that ran the same; where the gradients are unknown all forms must agree."""
        kind, sizes = (note.state, note.passes, _Ran(note.nodes, note.gradients)), micro_batches(note)
        exact = self._forms.get(kind)
        found = None if exact is None else exact.predict(sizes)
        if found is not None or note.gradients is not None:
            return found
        others = [
            form.predict(sizes)
            for (state, passes, ran), form in self._forms.items()
            if (state, passes, ran.nodes) == (note.state, note.passes, note.nodes) and form is not exact
        ]
        return others[0] if others and all(each == others[0] for each in others) else None

    def _entry(self, key: Key) -> _Alike:
        found = self._alike.setdefault(key, _Alike())
        self._alike.move_to_end(key)
        if len(self._alike) > _MOST_KEPT:
            self._alike.popitem(last=False)
        return found


def _put(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value as the newest one."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _MOST_FORMS:
        del kept[next(iter(kept))]


def key_of(note: StepNote) -> Key:
    """Equal for steps whose batches, modules and backward passes are the same."""
    return note.state, note.passes, *(batch.key for batch in note.batches.notes)


def micro_batches(note: StepNote) -> Sequence[MicroBatch]:
    """The sizes of a step's batches."""
    return [MicroBatch(batch.template.kind, batch.sizes) for batch in _counted(note.batches.notes)]


def _counted(notes: Sequence[BatchNote]) -> Sequence[BatchNote]:
    return [note for note in notes if note.template.slot is not None] or notes


def _totals(count: FlopCount) -> tuple[Any, ...]:
    return count.forward, count.backward, count.recompute, tuple(sorted(count.by_dtype.items()))
