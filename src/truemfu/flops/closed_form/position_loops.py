"""Models that loop over positions in Python: short sequences give the exact count of long ones.

    two short forward passes ──► operators per position ──► too many at the requested length?
                                                              └─► counts of short sequences ──► polynomial

Each operator of a count takes about 0.1 ms, so a scan that is written as a loop (a state-space model without
its kernels) would take minutes. Its work is the same at each position, which the fit confirms part by part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ...convention import Convention
from ...errors import TruemfuError
from ..attention.windows import Windows
from ..count.counted_step import CountedStep
from ..flop_count import FlopCount
from ..wrappers import unwrap
from .copies import Example, with_values
from .flop_model import CLOSED_FORM
from .integers import count_of, integers_of
from .linear import solve
from .terms import candidates, values

_PROBED = (2, 3)
_LENGTHS = (3, 4, 5, 7, 9, 11, 13)
_MAX_OPERATORS = 60_000
"""Operators of a forward pass beyond which the closed form is quicker."""
_LIMITS = ("chunk", "block_size", "bucket", "window")
"""Names of settings that make long sequences differ from short ones."""


def count_by_short_sequences(
    model: nn.Module, batch: Any, *, convention: Convention, backward: bool
) -> FlopCount | None:
    """The count of a batch with too many positions to loop over; None if it can be counted directly.

    Also None if short sequences do not predict the work of long ones: chunks of positions, no closed form.
    """
    example, inner = Example(with_values(batch)), unwrap(model)
    if example.length is None or example.length <= max(_LENGTHS) or _has_limits(inner):
        return None

    def counted(length: int, backward: bool) -> tuple[FlopCount, int]:
        copy = example.copy(None, length)
        tally, _, notes = CountedStep(model, copy, convention, backward, None).run()
        return tally.result(method=CLOSED_FORM, notes=notes), tally.operators

    try:
        short, longer = (counted(length, False)[1] for length in _PROBED)
        if longer <= short or longer + (longer - short) * example.length <= _MAX_OPERATORS:
            return None
        counts = {length: counted(length, backward)[0] for length in _LENGTHS}
    except (TruemfuError, IndexError):
        return None
    integers = _extrapolated({length: integers_of(count) for length, count in counts.items()}, example.length)
    if integers is None:
        return None
    note = f"the model loops over positions: its closed form was fitted on sequences of up to {max(_LENGTHS)}"
    notes = (*counts[_LENGTHS[-1]].notes, note, *Windows(inner, convention).notes_for_batch(batch))
    return count_of(integers, method=CLOSED_FORM, convention=convention, notes=notes)


def _extrapolated(observed: Mapping[int, Mapping[str, int]], length: int) -> dict[str, int] | None:
    """The integers at another length by the polynomial that reproduces all observed ones."""
    names = sorted({name for integers in observed.values() for name in integers})
    targets = [[integers.get(name, 0) for name in names] for integers in observed.values()]
    for terms in candidates(1):
        rows = [values(terms, [each]) for each in observed]
        solution = solve(len(terms), zip(rows, targets, strict=True))
        if solution is not None:
            found = solution.integers(values(terms, [length]))
            return None if found is None else dict(zip(names, found, strict=True))
    return None


def _has_limits(model: nn.Module) -> bool:
    """Whether the model's configuration or one of its modules states chunks or windows of positions."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", dict)
    return _states_limit(to_dict()) or any(_states_limit(vars(module)) for module in model.modules())


def _states_limit(settings: Mapping[str, Any]) -> bool:
    return any(
        (type(value) is int and value > 1 and any(word in str(name) for word in _LIMITS))
        or (isinstance(value, dict) and not str(name).startswith("_") and _states_limit(value))
        for name, value in settings.items()
    )
