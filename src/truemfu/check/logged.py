"""What was logged: figures with the digits they were printed with, and what is known of the run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from ..errors import UsageError

_NUMBER = re.compile(r"[-+]?\d[\d,_]*(?:\.(?P<decimals>\d*))?(?:[eE](?P<exponent>[-+]?\d+))?")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A printed number; the true one is at most `half` away: half a unit of the last printed digit."""

    value: float
    half: float = 0.0

    @classmethod
    def of(cls, text: str, scale: float = 1.0) -> Figure:
        """`32.88` → 32.88 ± 0.005, both times `scale`."""
        found = _NUMBER.fullmatch(text.strip())
        value = math.nan if found is None else float(found[0].replace(",", "").replace("_", ""))
        if found is None or not 0 < value < math.inf:
            raise UsageError(f"expected a positive number, such as 41.2; got {text!r}")
        unit = 10.0 ** (int(found["exponent"] or 0) - len(found["decimals"] or ""))
        return cls(value=value * scale, half=unit * scale / 2)

    @property
    def rounding(self) -> float:
        """The largest relative error by rounding."""
        return self.half / self.value

    def times(self, factor: float) -> Figure:
        """The figure in another unit, or for another number of devices."""
        return Figure(value=self.value * factor, half=self.half * factor)


@dataclass(frozen=True, kw_only=True)
class Logged:
    """One step, or the mean of a run: the figures to check, and what is known beside them.

    `mfu` is a fraction, `tflops` is of one device in TFLOP/s. `batch` counts the samples of a step over all
    devices. `part_times_s` are the times of parts of the step, by name.
    """

    source: str = "options"
    mfu: Figure | None = None
    tflops: Figure | None = None
    tokens_per_s: Figure | None = None
    tokens_per_s_per_device: Figure | None = None
    step_time_s: Figure | None = None
    part_times_s: Mapping[str, Figure] = field(default_factory=dict)
    model: str | None = None
    tokens: float | None = None
    batch: int | None = None
    seq: int | None = None
    gpus: int | None = None
    padding: float | None = None
    notes: tuple[str, ...] = ()

    def updated(self, other: Logged) -> Logged:
        """With what is known in `other`, which wins; the source stays."""
        known = {f.name: getattr(other, f.name) for f in fields(Logged) if f.name not in ("source", "notes")}
        return replace(self, **{name: value for name, value in known.items() if value not in (None, {})})

    @property
    def step_tokens(self) -> float | None:
        """Tokens of a step over all devices, padding included."""
        if self.batch is not None and self.seq is not None:
            return float(self.batch * self.seq)
        return self.tokens

    def rate_by_time(self) -> Figure | None:
        """Tokens per second of one device, from the tokens of a step and its time."""
        if self.step_tokens is None or self.step_time_s is None:
            return None
        value = self.step_tokens / self.step_time_s.value / (self.gpus or 1)
        return Figure(value=value, half=value * self.step_time_s.rounding)

    def rate_as_logged(self) -> Figure | None:
        """Tokens per second of one device, as the log has them."""
        if self.tokens_per_s is not None:
            return self.tokens_per_s.times(1 / (self.gpus or 1))
        return self.tokens_per_s_per_device
