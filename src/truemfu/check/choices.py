"""What decides a logged figure besides the FLOPs of a token: the peak, the devices, the time, the tokens.

A choice is what a tool may have used, as a factor on the right figure. The first of each list is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..hardware.specs import DEVICES, DTYPES, DeviceSpec
from ..text import flop_rate
from .logged import Logged

_HARD_CODED = ("a100-sxm4-80gb", "h100-sxm", "h20")
"""Chips whose peak tools take for others: as a constant, for a name that is unknown, or a part of one."""
_SPARSE = 2.0


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A factor on the right figure; `key` and `text` say what is wrong with it, None if nothing is.

    `cost` is 1 for what tools are known to do, and 2 for what is only possible: two faults of the first kind
    are as likely.
    """

    factor: float
    key: str | None = None
    text: str = ""
    cost: int = 1


RIGHT = Choice(factor=1.0)


def peak_of(spec: DeviceSpec, dtype: str) -> float | None:
    """The dense peak; a chip without bf16 is used in fp16."""
    return spec.peak(dtype) or (spec.peak("fp16") if dtype == "bf16" else None)


def of_peak(peak: float | None, spec: DeviceSpec | None, dtype: str) -> list[Choice]:
    """The right peak, the same with sparsity, that of another dtype, and those of all other chips."""
    if peak is None:
        return [RIGHT]
    found = [RIGHT]
    right = f"{flop_rate(peak)} is right" if spec is None else f"{spec.name} has {flop_rate(peak)} in {dtype}"
    found.append(
        Choice(
            factor=1 / _SPARSE,
            key="sparse_peak",
            text=f"the peak with sparsity ({flop_rate(_SPARSE * peak)}), which dense products cannot reach",
        )
    )
    if spec is not None:
        for other in DTYPES:
            rate = spec.peak(other)
            if rate and other not in (dtype, "int8") and rate != peak:
                text = f"the peak of {other} ({flop_rate(rate)}): {right}"
                found.append(Choice(factor=peak / rate, key="peak_of_another_dtype", text=text))
    by_rate: dict[float, list[DeviceSpec]] = {}
    for chip in DEVICES:
        if rate := peak_of(chip, dtype):
            by_rate.setdefault(rate, []).append(chip)
    for rate, chips in by_rate.items():
        is_common = any(chip.key in _HARD_CODED for chip in chips)
        for factor, sparse in ((1.0, ""), (_SPARSE, " with sparsity"))[: 1 + is_common]:
            shown = f"{flop_rate(rate * factor)}: {_names(chips)}"
            if rate != peak:
                text = f"the peak{sparse} of another chip ({shown}); {right}"
                cost = 1 if is_common and factor == 1 else 2
                choice = Choice(
                    factor=peak / (rate * factor), key="peak_of_another_chip", text=text, cost=cost
                )
                found.append(choice)
    return found


def _names(chips: Sequence[DeviceSpec]) -> str:
    first = next((chip for chip in chips if chip.key in _HARD_CODED), chips[0])
    return first.name + (f" and {len(chips) - 1} more" if len(chips) > 1 else "")


def of_devices(gpus: int | None) -> list[Choice]:
    if gpus is None or gpus < 2:
        return [RIGHT]
    return [
        RIGHT,
        Choice(factor=gpus, key="devices", text=f"not divided by the {gpus:,} devices"),
        Choice(factor=1 / gpus, key="devices", text=f"divided by the {gpus:,} devices twice"),
    ]


def of_time(logged: Logged, tolerance: float) -> list[Choice]:
    """The whole step, or a part of it; and the log's own rate where that is another one."""
    found = [RIGHT]
    if (step := logged.step_time_s) is not None:
        for name, part in logged.part_times_s.items():
            text = f"divided by {name} alone ({part.value:.4g} s of a step of {step.value:.4g} s)"
            found.append(Choice(factor=step.value / part.value, key="part_of_the_step", text=text))
    by_time, as_logged = logged.rate_by_time(), logged.rate_as_logged()
    if by_time is not None and as_logged is not None:
        factor = as_logged.value / by_time.value
        if abs(factor - 1) > tolerance + as_logged.rounding:
            text = (
                f"the logged rate of {as_logged.value:,.4g} tokens/s per device is not that of the step,"
                f" {by_time.value:,.4g}"
            )
            found.append(Choice(factor=factor, key="rate", text=text))
    return found


def of_tokens(logged: Logged) -> list[Choice]:
    if not logged.padding:
        return [RIGHT]
    text = f"padding counted as work ({logged.padding:.0%} of the tokens)"
    return [RIGHT, Choice(factor=1 / (1 - logged.padding), key="padding", text=text)]
