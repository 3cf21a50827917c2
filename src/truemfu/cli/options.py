"""Options as people type them: older names that still work, amounts such as `15T`, lists with commas."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

# Names that an option had, or has elsewhere; commands share one name for one thing.
BATCH_NAMES = ("--batch-size", "--batch-sizes")
SEQ_NAMES = ("--seq-len", "--seq-length", "--seq-lengths")
TRAINER_NAMES = ("--trainers",)
MODEL_NAMES = ("--models", "--model-size", "--model-sizes")
DTYPE_NAMES = ("--dtypes",)
GPU_ID_NAMES = ("--gpus",)
RECORD_NAMES, REPLAY_NAMES = ("--save",), ("--csv",)

_AMOUNT = re.compile(r"(?P<number>[\d.]+(?:[eE][+-]?\d+)?)(?P<unit>[kKmMbBgGtT]?)")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


class Option(click.Option):
    """An option that also answers to older names, which help and completion do not show."""

    def __init__(self, *arguments: Any, old_names: Sequence[str] = (), **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.old_names = tuple(old_names)

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *self.old_names]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


class Amount(click.types.FloatParamType):
    """A positive number: 15e12, 15T, 300B or 6900."""

    name = "number"

    def __init__(self, *, most: float = math.inf, example: str = "15e12 or 15T") -> None:
        self._most, self._example = most, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = _AMOUNT.fullmatch(str(value).replace(",", "").replace("_", ""))
        try:
            amount = math.nan if found is None else float(found["number"]) * _UNITS[found["unit"].lower()]
        except ValueError:
            amount = math.nan
        if not (0 < amount < math.inf and amount <= self._most):
            limit = "" if math.isinf(self._most) else f" up to {self._most:g}"
            self.fail(f"{value!r} is not a positive number{limit}, such as {self._example}.", param, ctx)
        return amount


def device_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion of a device: the keys of the table."""
    from ..hardware.specs import DEVICES

    typed = incomplete.casefold()
    return [CompletionItem(spec.key, help=spec.name) for spec in DEVICES if spec.key.startswith(typed)]


def separated(values: Sequence[str]) -> list[str]:
    """The entries of an option that may be repeated and may hold commas; empty entries do not count."""
    return [entry.strip() for value in values for entry in value.split(",") if entry.strip()]
