"""The experiments of a sweep in groups that may share a chart: like machines, one model, one way to train.

Figures of unlike devices or numbers of GPUs are never in one chart. Hosts with the same device share one: a
cluster spreads a sweep over them, and tables name the host. An experiment without a recorded device (not run,
or failed early) belongs to the sweep's only device, or else to the only group that it fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .figures import ExperimentFigures

_FIELDS = ("model", "dtype", "optimizer", "compile", "device", "gpus", "parallel")
_DEVICE = _FIELDS.index("device")
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
    devices = {row.device for row in experiments if row.device is not None}
    only = next(iter(devices)) if len(devices) == 1 else None
    found: dict[_Key, list[tuple[int, ExperimentFigures]]] = {}
    without: list[tuple[_Key, tuple[int, ExperimentFigures]]] = []
    for at, row in enumerate(experiments):
        key = tuple(getattr(row, name) if name != "device" else row.device or only for name in _FIELDS)
        if None in (key[_DEVICE], row.model):
            without.append((key, (at, row)))
        else:
            found.setdefault(key, []).append((at, row))
    for key, each in without:
        fitting = [known for known in found if _fits(key, known)]
        found.setdefault(fitting[0] if len(fitting) == 1 else key, []).append(each)
    differing = [at for at in range(len(_FIELDS)) if len({key[at] for key in found}) > 1]
    return [
        Group(title=_title(key, differing), experiments=sorted(rows, key=lambda each: each[0]))
        for key, rows in found.items()
    ]


def _fits(key: _Key, known: _Key) -> bool:
    """Whether what is known of an experiment agrees with a group."""
    return all(own in (None, of_group) for own, of_group in zip(key, known, strict=True))


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
