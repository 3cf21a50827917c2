"""Which choices give the logged figure within its rounding, and so what is wrong with it.

    right figure = FLOPs of a token × tokens per second of a device (÷ peak)

Every combination of a formula, a peak, a number of devices, a time and a number of tokens is tried. Those
with the fewest faults are the explanation; several may be, and then all are given. None is: unexplained.
Combinations of more than two faults would fit many figures by chance, so they are not looked for, and a
fault that no tool is known for (the peak of any chip of the table) counts as two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..convention import Attention
from ..hardware.specs import DeviceSpec
from ..utilization import ratio
from .choices import RIGHT, Choice, of_devices, of_peak, of_time, of_tokens
from .conventions import CONSTANTS, Work, formulas
from .logged import Figure, Logged

Status = Literal["agrees", "explained", "unexplained", "unknown"]

TOLERANCE = 0.01
"""How far a figure may be from ours and still agree."""
_MOST_FAULTS = 2
_ABOVE = "above 100 %, which no training can be: the work, the time, the peak or the devices are wrong"


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The peak to check against: of a row of the table, or given; both None where it is unknown."""

    flops_per_s: float | None = None
    spec: DeviceSpec | None = None
    dtype: str = "bf16"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Faults, by key and in words, that together give the logged figure, or almost."""

    keys: tuple[str, ...]
    texts: tuple[str, ...]
    gives: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Of one logged figure: `mfu` as a fraction, `tflops` in TFLOP/s of a device.

    `expected` is what it should be (of an MFU beside a logged TFLOP/s: by that), None where something is
    missing; `missing` names the options that give it. `notes` say what no run can have.
    """

    figure: Literal["mfu", "tflops"]
    logged: float
    expected: float | None
    status: Status
    explanations: tuple[Explanation, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Opinion:
    """All that is said of one log: what it held, what was computed, and the verdicts."""

    logged: Logged
    work: Work | None
    peak: Peak
    attention: Attention
    tokens_per_s_per_device: float | None
    flops_per_token: float | None
    tflops: float | None
    mfu: float | None
    implied_peak_tflops: float | None
    verdicts: tuple[Verdict, ...]

    @property
    def disagrees(self) -> bool:
        return any(v.status in ("explained", "unexplained") or v.notes for v in self.verdicts)

    @property
    def is_decided(self) -> bool:
        return all(v.status != "unknown" for v in self.verdicts)


def opinion_of(
    logged: Logged,
    work: Work | None,
    peak: Peak,
    *,
    attention: Attention | None = None,
    tolerance: float = TOLERANCE,
) -> Opinion:
    """Check every logged figure. Without `attention`, either convention is right."""
    rate = logged.rate_by_time() or logged.rate_as_logged()
    real = None if rate is None else rate.value * (1 - (logged.padding or 0.0))
    flops = None if work is None else work.flops(attention or "full")
    ours = None if flops is None or real is None else flops * real / 1e12
    peak_tflops = None if peak.flops_per_s is None else peak.flops_per_s / 1e12
    peaks = of_peak(peak.flops_per_s, peak.spec, peak.dtype)
    devices = of_devices(logged.gpus)
    missing = _missing(logged, work, rate)
    no_peak = [] if peak_tflops is not None else ["--device"]
    others = [_formulas(work, attention, tolerance), devices, of_time(logged, tolerance), of_tokens(logged)]
    near = CONSTANTS + (0.0 if rate is None else rate.rounding)
    verdicts = []
    achieved = ours
    if logged.tflops is not None:
        verdicts.append(_verdict("tflops", logged.tflops, ours, others, near, tolerance, missing))
        # Beside it, an MFU tells which peak was used, whatever the model.
        achieved, missing, others = logged.tflops.value, [], [devices]
        near = CONSTANTS + logged.tflops.rounding
    if logged.mfu is not None:
        expected = ratio(achieved, peak_tflops)
        verdicts.append(
            _verdict("mfu", logged.mfu, expected, [peaks, *others], near, tolerance, [*missing, *no_peak])
        )
    return Opinion(
        logged=logged,
        work=work,
        peak=peak,
        attention=attention or "full",
        tokens_per_s_per_device=real,
        flops_per_token=flops,
        tflops=ours,
        mfu=ratio(achieved if ours is None else ours, peak_tflops),
        implied_peak_tflops=None if logged.mfu is None else ratio(achieved, logged.mfu.value),
        verdicts=tuple(verdicts),
    )


def _formulas(work: Work | None, attention: Attention | None, tolerance: float) -> list[Choice]:
    """Ways to count the model; one that gives a right count is no fault, whatever its name."""
    if work is None:
        return [RIGHT]
    right = work.flops(attention or "full")
    accepted = [right] if attention is not None else [right, work.flops("causal")]
    found = []
    for formula in formulas(work):
        is_right = any(abs(formula.flops / value - 1) <= tolerance for value in accepted)
        key = None if is_right else formula.key
        found.append(Choice(factor=formula.flops / right, key=key, text=formula.text))
    return found


def _verdict(
    figure: Literal["mfu", "tflops"],
    logged: Figure,
    expected: float | None,
    choices: Sequence[Sequence[Choice]],
    near: float,
    tolerance: float,
    missing: Sequence[str],
) -> Verdict:
    status: Status = "unknown"
    explanations: list[Explanation] = []
    if expected is not None:
        found = _explanations(logged.value / expected, choices, near + logged.rounding, tolerance)
        fewest = min(map(_cost, found), default=None)
        status = "unexplained" if fewest is None else "explained" if fewest else "agrees"
        explanations = [
            Explanation(
                keys=tuple(str(fault.key) for fault in faults),
                texts=tuple(fault.text for fault in faults),
                gives=factor * expected,
            )
            for faults, factor in found.items()
            if faults and _cost(faults) == fewest
        ]
    return Verdict(
        figure=figure,
        logged=logged.value,
        expected=expected,
        status=status,
        explanations=tuple(explanations),
        missing=tuple(missing) if expected is None else (),
        notes=(_ABOVE,) if figure == "mfu" and logged.value > 1 else (),
    )


def _explanations(
    wanted: float, choices: Sequence[Sequence[Choice]], near: float, tolerance: float
) -> dict[tuple[Choice, ...], float]:
    """Faults → factor of all combinations that give the wanted factor on the right figure."""
    found = {}
    for combination in itertools.product(*choices):
        faults = tuple(choice for choice in combination if choice.key is not None)
        if _cost(faults) > _MOST_FAULTS:
            continue
        factor = math.prod(choice.factor for choice in combination)
        if abs(wanted / factor - 1) <= (near if faults else max(near, tolerance)):
            found[faults] = factor
    return found


def _cost(faults: Sequence[Choice]) -> int:
    return sum(fault.cost for fault in faults)


def _missing(logged: Logged, work: Work | None, rate: Figure | None) -> list[str]:
    """The options that would give our own TFLOP/s."""
    missing = []
    if work is None:
        missing.append("--model" if logged.model is None else "--seq")
    if rate is None:
        missing.append("--tokens-per-second, or --batch, --seq and --step-time")
    return missing
