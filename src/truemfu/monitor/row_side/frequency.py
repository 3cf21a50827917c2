"""How often something is due: every so many steps or so many seconds, whichever comes first."""

from __future__ import annotations

from ..training_side.step_note import StepPosition

DETAILS_S = 30.0
"""Steps may be long: what is logged every `detailed_log_freq` steps is logged every so many seconds too."""


class StepsOrSeconds:
    """Due at multiples of so many steps, and with the first step that ends so many seconds after the last."""

    def __init__(self, steps: int, seconds: float, *, began_s: float) -> None:
        self._steps, self._seconds, self._last_s = steps, seconds, began_s

    def is_due(self, position: StepPosition, ended_s: float) -> bool:
        """Whether it is due with this step; asked once for each, in their order."""
        if not position.reaches(self._steps) and ended_s - self._last_s < self._seconds:
            return False
        self._last_s = ended_s
        return True
