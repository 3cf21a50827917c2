"""The arguments of `log_step` other than its numbers, read without waiting: the step, a mask, a flag.

No argument makes this raise: one that cannot be used is ignored, with one warning.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

import torch

from ...errors import one_line
from ..notices import Notices
from ..step_note import StepPosition
from .host_values import HostValues

LARGEST_STEP = 2**63 - 1
"""A row with a larger number cannot be written."""


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor; an object may raise even in `isinstance`."""
    try:
        return isinstance(value, torch.Tensor)
    except Exception:
        return False


class Intake:
    """Lives on the training thread; its only state is the last step's number."""

    def __init__(self, values: HostValues, notices: Notices) -> None:
        self.values, self._notices = values, notices
        self.last_step: int | None = None
        self._stride = 1

    def step_number(self, step: Any) -> int:
        """The number of a step that is not a plain int of 64 bits; if unreadable, the last plus one."""
        if not is_tensor(step) or step.device.type == "cpu":
            with contextlib.suppress(Exception):  # an arbitrary object may raise anything
                number = int(step)
                if abs(number) <= LARGEST_STEP:
                    return number
        self._notices(
            f"step cannot be read ({type(step).__name__}: a device tensor, not a number, or over 64 bits): "
            "steps are numbered consecutively instead"
        )
        return 0 if self.last_step is None else self.last_step + 1

    def steps_since_last(self, step: int) -> int:
        """How many steps this one represents; warns if steps do not increase."""
        last, self.last_step = self.last_step, step
        if last is not None and step > last:
            self._stride = step - last
            return self._stride
        if last is not None:
            self._notices(
                f"step {step} was logged after step {last}: steps should increase; it is logged unchanged",
                about="steps that do not increase",
            )
        return 1

    def next_position(self) -> StepPosition | None:
        """The next step, assuming the same stride as the last; None before the first."""
        return None if self.last_step is None else StepPosition(self.last_step + self._stride, self._stride)

    def mask(self, mask: Any) -> tuple[int | None, Any]:
        """Tokens of a mask, and how many of them are real."""
        if not is_tensor(mask) or mask.dim() != 2:
            got = f"{mask.dim()} dimensions" if is_tensor(mask) else type(mask).__name__
            self._notices(
                f"attention_mask is not used: expected a tensor of samples × length, got {got}",
                about="attention_mask",
            )
            return None, None
        try:
            return mask.numel(), self.values.tokens_in(mask)
        except Exception as error:
            self._notices(f"attention_mask is not used: {one_line(error)}", about="attention_mask")
            return None, None

    def flops(self, value: Any) -> float | None:
        """The FLOPs given by the caller; None for anything but a positive number on the host."""
        with contextlib.suppress(Exception):  # an arbitrary object may raise anything
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                flops = int(value) if isinstance(value, numbers.Integral) else float(value)
                if math.isfinite(flops) and flops > 0:
                    return flops
        got = repr(value) if type(value) in (int, float) else type(value).__name__
        self._notices(
            f"flops must be a positive number, the model FLOPs of this rank's step; got {got[:40]}: "
            "it is ignored",
            about="flops",
        )
        return None

    def flag(self, name: str, value: Any) -> bool:
        """True or false; false for what is neither."""
        try:
            return bool(value)
        except Exception as error:
            self._notices(f"{name} is treated as false: {one_line(error)}", about=name)
            return False
