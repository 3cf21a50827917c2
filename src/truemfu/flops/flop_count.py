"""The result of a count: integers, what they cover and how they were obtained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..convention import Convention


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """FLOPs of one step.

    `by_module` (path → integer, a module includes its children, "" is the whole model), `by_operator` and
    `by_dtype` split `model_flops`. `uncounted` names operators that may do matrix work and have no
    formula, and calls that export tensors from torch, with the number of calls; `notes` states, in sentences,
    what limits the accuracy of the count.
    """

    forward: int
    backward: int
    recompute: int
    by_module: Mapping[str, int] = field(default_factory=dict, repr=False)
    by_operator: Mapping[str, int] = field(default_factory=dict, repr=False)
    by_dtype: Mapping[str, int] = field(default_factory=dict)
    uncounted: Mapping[str, int] = field(default_factory=dict)
    method: str
    convention: Convention
    notes: tuple[str, ...] = ()

    @property
    def model_flops(self) -> int:
        """What the model needs: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """What is executed, recomputation included: the numerator of HFU."""
        return self.forward + self.backward + self.recompute

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "recompute": self.recompute,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "by_module": dict(self.by_module),
            "by_operator": dict(self.by_operator),
            "by_dtype": dict(self.by_dtype),
            "uncounted": dict(self.uncounted),
            "method": self.method,
            "convention": {"attention": self.convention.attention},
            "notes": list(self.notes),
        }
