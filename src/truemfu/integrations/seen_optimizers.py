"""The optimizers of a script, and when a training step of all of them has ended.

    made before any step   D, G               ──► a step ends when both have stepped: D G, or D D D D D G
    made after some steps  a new training     ──► those that have stepped are not waited for, until they step
    passed by              G G G G … alone    ──► D is not waited for any more, until it steps again
    wrapped                SAM around SGD     ──► has stepped when its parameters were updated

Passed by are optimizers that have not stepped in twice the steps of the longest cycle so far, and in the
first cycle after 20 steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .find_models import parameters_of

_FIRST_CYCLE = 20


class SeenOptimizers:
    """By their ids: every step asks for its optimizer, and a set of weak references would take longer."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._stepped: set[int] = set()
        self._ever_stepped: set[int] = set()
        self._steps = self._longest_cycle = 0
        """Steps of optimizers since the last training step ended, and the most that one had."""

    def __contains__(self, optimizer: torch.optim.Optimizer) -> bool:
        return id(optimizer) in self._known

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""
        for number in self._ever_stepped - self._stepped:
            self._forget(number)
        self.follow(optimizer)

    def parameters(self) -> list[torch.Tensor]:
        """What all of them update."""
        return self._parameters_of(self._known)

    def have_stepped(self, optimizer: torch.optim.Optimizer) -> bool:
        """This one, which is followed, steps: whether the training step has ended."""
        number = id(optimizer)
        self._stepped.add(number)
        self._ever_stepped.add(number)
        self._steps += 1
        if len(self._stepped) == len(self._known):
            return True
        missing = self._known.keys() - self._stepped
        if self._steps >= (2 * self._longest_cycle or _FIRST_CYCLE):
            for passed_by in missing:
                self._forget(passed_by)
            self._steps = 0  # not a cycle
            return True
        updated = set(map(id, self._parameters_of(self._stepped)))
        return all(id(p) in updated for p in self._parameters_of(missing))

    def begin_step(self) -> None:
        """The next training step begins."""
        self._longest_cycle = max(self._longest_cycle, self._steps)
        self._steps = 0
        self._stepped.clear()

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Wait for the steps of this one too, as long as it exists."""
        number = id(optimizer)
        self._known[number] = weakref.ref(optimizer, lambda _: self._forget(number))

    def _forget(self, number: int) -> None:
        """It is not waited for, or was freed: its id may be another one's soon."""
        self._known.pop(number, None)
        self._stepped.discard(number)
        self._ever_stepped.discard(number)

    def _parameters_of(self, numbers: Iterable[int]) -> list[torch.Tensor]:
        references = [self._known.get(number) for number in list(numbers)]  # one may be freed meanwhile
        found = [None if reference is None else reference() for reference in references]
        return [p for optimizer in found if optimizer is not None for p in parameters_of(optimizer)]
