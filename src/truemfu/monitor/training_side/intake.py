"""What `log_step` is given, read without waiting: a step's number, numbers that may be on a device, a mask.

Nothing here raises for what a user passes: what cannot be used is left out and said once.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from typing import Any

import torch

from ...errors import one_line
from ..notices import Notices
from .host_values import HostValues
from .step_note import StepPosition

LARGEST_STEP = 2**63 - 1
"""Beyond it a row cannot be written."""


def is_tensor(value: Any) -> bool:
    """Whether this is one; an object may raise even when it is asked for its class."""
    try:
        return isinstance(value, torch.Tensor)
    except Exception:
        return False


class Intake:
    """Lives on the training thread; remembers the last step's number and nothing else."""

    def __init__(self, values: HostValues, notices: Notices) -> None:
        self._values, self._notices = values, notices
        self.last_step: int | None = None
        self._stride = 1

    def step_number(self, step: Any) -> int:
        """The number of a step that is no small integer; where it cannot be read, one more than the last."""
        if not is_tensor(step) or step.device.type == "cpu":
            with contextlib.suppress(Exception):  # whatever an object does that is to be a number
                number = int(step)
                if abs(number) <= LARGEST_STEP:
                    return number
        self._notices(
            f"step cannot be read ({type(step).__name__}: a device tensor, not a number, or one of more than "
            "64 bits): steps are counted instead"
        )
        return 0 if self.last_step is None else self.last_step + 1

    def steps_since_last(self, step: int) -> int:
        """How many steps this one stands for; steps that do not increase are said."""
        last, self.last_step = self.last_step, step
        if last is not None and step > last:
            self._stride = step - last
            return self._stride
        if last is not None:
            self._notices(
                f"step {step} was logged after step {last}: steps should increase; it is logged as it is",
                about="steps that do not increase",
            )
        return 1

    def next_position(self) -> StepPosition | None:
        """Which step comes next, if it is as far from the last as that was; None before the first."""
        return None if self.last_step is None else StepPosition(self.last_step + self._stride, self._stride)

    def number(self, name: str, value: Any) -> Any:
        """A number that is there or on its way; None for what is none."""
        try:
            return self._values.number(name, value)
        except Exception as error:  # there are many kinds of tensors
            self._notices(f"{name} is not logged: got {' '.join(str(error).split())}", about=name)
            return None

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
            return mask.numel(), self._values.tokens_in(mask)
        except Exception as error:
            self._notices(f"attention_mask is not used: {one_line(error)}", about="attention_mask")
            return None, None

    def flops(self, value: Any) -> float | None:
        """FLOPs as the caller knows them; None for anything but a positive number on the host."""
        with contextlib.suppress(Exception):  # whatever an object does that is to be a number
            if isinstance(value, numbers.Real) and not isinstance(value, bool):
                flops = int(value) if isinstance(value, numbers.Integral) else float(value)
                if math.isfinite(flops) and flops > 0:
                    return flops
        got = repr(value) if type(value) in (int, float) else type(value).__name__
        self._notices(
            f"flops must be a positive number, the model FLOPs of this rank's step; got {got[:40]}: "
            "it is not used",
            about="flops",
        )
        return None

    def flag(self, name: str, value: Any) -> bool:
        """True or false; false for what is neither."""
        try:
            return bool(value)
        except Exception as error:
            self._notices(f"{name} is taken for false: {one_line(error)}", about=name)
            return False
