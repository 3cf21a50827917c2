"""The experiments of a sweep in groups that may share a chart: like machines, one model, one way to train.

Figures of unlike devices or numbers of GPUs are never in one chart. Hosts with the same device share one: a
cluster spreads a sweep over them, and tables name the host. What is not recorded of an experiment (not run,
or failed early) is what all others have in common, if they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .figures import ExperimentFigures

_MAY_BE_UNKNOWN = ("model", "dtype", "optimizer", "compile", "device")
_FIELDS = (*_MAY_BE_UNKNOWN, "gpus", "parallel")
_Key = tuple[object, ...]


@dataclass(frozen=True, kw_only=True)
class Group:
    """`title` only has what distinguishes it from other groups; empty for a single one."""

    title: str
    experiments: Sequence[tuple[int, ExperimentFigures]]
    """With their position in the summary."""

    @property
    def seq_lens(self) -> list[int]:
        return sorted({row.seq_len for _, row in self.experiments if row.seq_len is not None})

    @property
    def batch_sizes(self) -> list[int]:
        return sorted({row.batch_size for _, row in self.experiments if row.batch_size is not None})

    @property
    def finished(self) -> Iterator[ExperimentFigures]:
        return (row for _, row in self.experiments if row.step_time_s is not None)


def groups_of(experiments: Sequence[ExperimentFigures]) -> list[Group]:
    """The groups in the order of the summary."""
    only = {name: only_value(experiments, name) for name in _MAY_BE_UNKNOWN}
    found: dict[_Key, list[tuple[int, ExperimentFigures]]] = {}
    for at, row in enumerate(experiments):
        own = {name: getattr(row, name) for name in _FIELDS}
        key = tuple(only.get(name) if value is None else value for name, value in own.items())
        found.setdefault(key, []).append((at, row))
    differing = [at for at in range(len(_FIELDS)) if len({key[at] for key in found}) > 1]
    return [Group(title=_title(key, differing), experiments=rows) for key, rows in found.items()]


def only_value(experiments: Iterable[ExperimentFigures], name: str) -> Any:
    """The value that all experiments have in which it is known; None if there are several."""
    known = {getattr(row, name) for row in experiments} - {None}
    return known.pop() if len(known) == 1 else None


def _title(key: Sequence[object], differing: Sequence[int]) -> str:
    return ", ".join(word for at in differing if (word := _word(_FIELDS[at], key[at])))


def _word(name: str, value: object) -> str:
    if name == "compile":
        return "compiled" if value else "not compiled"
    if name == "gpus":
        return f"{value} rank{'' if value == 1 else 's'}"
    if name == "device":
        return str(value or "unknown device")
    return "" if value is None else str(value)
