"""One step of a run for its picture: which one, and its parts.

The marks of the last few steps are kept as they are, and parts are made of one of them when a summary is. In
reinforcement learning some steps generate and others only train: the picture is of one that does more kinds
of work, if such steps are no rare exception.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ...records import TypicalStep
from ...run_summary.sums import GENERATE
from ..metrics import StepTime
from ..step_note import StepNote, StepPosition
from ..timing.clock import Span
from ..timing.phases import NO_GRAD, OTHER, parts_of
from ..watching.generation import Generation

_KINDS = (GENERATE, NO_GRAD, OTHER)
"""Of steps, by the work they do besides training, the most first."""
_RECENT_STEPS = 16
"""Of each kind."""
_MOST_CHANGES = 1000
"""Steps with more changes of phase have no picture."""
_RARE = 0.01
"""The share of steps below which a kind does not show what a step does."""
_Kept = tuple[float, StepPosition, Span, Sequence[Generation]]


class TypicalSteps:
    """Gets steps on the row thread; `as_dict` may be called on any."""

    def __init__(self) -> None:
        self._recent: Mapping[str, deque[_Kept]] = {kind: deque(maxlen=_RECENT_STEPS) for kind in _KINDS}
        self._steps: Counter[str] = Counter()

    def add(self, note: StepNote, took: StepTime, span: Span) -> None:
        """A step was read; one without phases, and one whose time is not representative, is not kept."""
        if note.warmup or not isinstance(took.phases_s, Mapping) or took.elapsed_s is None:
            return
        kind = NO_GRAD if NO_GRAD in took.phases_s else OTHER
        if "generation" in took.left_out_s or any(not call.is_paused for call in note.generations):
            kind = GENERATE
        self._steps[kind] += 1
        if len(span.changes) <= _MOST_CHANGES:
            self._recent[kind].append((took.elapsed_s / took.steps, note.position, span, note.generations))

    def as_dict(self) -> dict[str, Any] | None:
        """A `TypicalStep` as plain data; None without a step after warm-up."""
        steps = self._steps.copy()
        for kind in _KINDS:
            recent = sorted(self._recent[kind].copy(), key=lambda kept: kept[0])
            if recent and steps[kind] >= _RARE * steps.total():
                _, position, span, generations = recent[(len(recent) - 1) // 2]
                calls = [(call.begin, call.end) for call in generations if call.end is not None]
                counts = {"like": steps[kind], "of": steps.total()}
                found = TypicalStep(**position._asdict(), **counts, parts=parts_of(span, calls))
                return dict(msgspec.to_builtins(found))
        return None
