"""How often something is due: after a number of steps or of seconds, whichever comes first."""

from __future__ import annotations

from ..step_note import StepPosition

DETAILS_S = 30.0
"""Details are logged every `detailed_log_freq` steps and, since steps may be long, after this time."""


class StepsOrSeconds:
    """Due at multiples of `steps`, and with the first step that ends `seconds` after the last time."""

    def __init__(self, steps: int, seconds: float, *, began_s: float) -> None:
        self._steps, self._seconds, self._last_s = steps, seconds, began_s

    def is_due(self, position: StepPosition, ended_s: float) -> bool:
        """Whether it is due with this step; call it once per step, in order."""
        if not position.reaches(self._steps) and ended_s - self._last_s < self._seconds:
            return False
        self._last_s = ended_s
        return True
