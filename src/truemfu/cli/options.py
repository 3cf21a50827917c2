"""Options as people type them: older names that still work, amounts such as `15T`, lists with commas."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from ..errors import UsageError
from ..hardware.search import named_device
from ..hardware.specs import DEVICES
from .console import FilePath, say

_AMOUNT = re.compile(r"(?P<number>[\d.]+(?:[eE][+-]?\d+)?)(?P<unit>[kKmMbBgGtT]?)")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


SIZE_NAMES = {
    "batch-size": "batch",
    "batch-sizes": "batch",
    "seq-len": "seq",
    "seq-length": "seq",
    "seq-lengths": "seq",
}
"""Names that options had, or have elsewhere, and the one that commands share for it."""


def older_names(names: Mapping[str, str]) -> dict[str, Any]:
    """Settings of a command whose options also answer to older names, which help does not show."""
    return {"token_normalize_func": lambda name: names.get(name, name)}


def format_option(*formats: str) -> Callable[..., Any]:
    """`--format`: tables, or one of these."""
    return click.option(
        "--format",
        "shown_as",
        type=click.Choice(["table", *formats]),
        default="table",
        show_default=True,
        help="Output format.",
    )


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
    typed = incomplete.casefold()
    return [CompletionItem(spec.key, help=spec.name) for spec in DEVICES if spec.key.startswith(typed)]


def device_of_table(text: str) -> str:
    """The device of the table that a name means; notes on stderr which variant is assumed."""
    name, others = named_device(text)
    if others:
        say(f"note: {text} is taken as {name}; its other variants: {', '.join(others)}", err=True)
    return name


def list_option(*names: str, of: Callable[[str], Any] = str, **settings: Any) -> Callable[..., Any]:
    """An option that may be repeated and may hold commas, as a tuple of texts or of whole numbers.

    None if it was not given; empty entries do not count.
    """

    def convert(
        context: click.Context, option: click.Parameter, values: Sequence[str]
    ) -> tuple[Any, ...] | None:
        entries = (entry.strip() for value in values for entry in value.split(","))
        try:
            return tuple(of(entry) for entry in entries if entry) if values else None
        except ValueError:
            given = ",".join(values)
            raise UsageError(f"{names[0]} takes comma-separated whole numbers; got {given!r}") from None

    return click.option(*names, multiple=True, callback=convert, **settings)


def output_option(
    parameter: str, help: str, *, metavar: str | None = None, is_file: bool = False
) -> Callable[..., Any]:
    """`--output`, the path of what a command writes."""
    return click.option(
        "--output", "-o", parameter, type=FilePath(dir_okay=not is_file), metavar=metavar, help=help
    )
