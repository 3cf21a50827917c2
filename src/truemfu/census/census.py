"""The census of one step, from its trace.

trace ─► items: its kernels ─► rows: items that are alike, and what limits them
                            ─► classes, gaps, picture
                            ─► bounds: what each remedy could gain at most
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .. import __version__
from . import classes
from .bounds import StepItems, bounds_of
from .items import Device, Found, Item, items_of
from .record import Census, ClassTime, Gaps, KernelRow
from .timeline import Timeline, lanes
from .trace import HOST, StepTrace

_NS = 1e-9
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_LONGEST_NAME = 160
_MOST_ROWS = 500


def census_of(
    path: Path,
    *,
    device_name: str | None = None,
    found: Found | None = None,
    ordinary_step_s: float | None = None,
    padding_lost: float | None = None,
) -> Census:
    """The census of the last whole step in a trace; RecordError where it has none.

    `ordinary_step_s` is the time of a step that was not recorded, `padding_lost` the share of padding tokens;
    None if unknown. `found` is what `items_of` gave for this trace, if it was read already.
    """
    found = found or items_of(path, device_name)
    step, device, items, line = found.step, found.device, found.items, found.line
    length_s, busy_s = (step.end - step.start) * _NS, line.busy * _NS
    gaps = _gaps(line, busy_s, ordinary_step_s)
    known = StepItems(
        items=items,
        step=step,
        line=line,
        device=device,
        gaps=gaps,
        ordinary_step_s=ordinary_step_s,
        padding_lost=padding_lost,
    )
    rows = _rows(items, device, _slowed(gaps))
    return Census(
        truemfu_version=__version__,
        source=path.name,
        step=step.name,
        steps_in_trace=step.steps,
        device=device.name,
        peak_known=device.spec is not None,
        is_host=step.device == HOST,
        step_s=length_s,
        busy_s=busy_s,
        ordinary_step_s=ordinary_step_s,
        launches=len(items),
        classes=_classes(items, length_s, line),
        gaps=gaps,
        kernels=rows[:_MOST_ROWS],
        bounds=bounds_of(known),
        lanes=lanes(step, {id(item.kernel): item.kind for item in items}),
        notes=[*step.notes, *found.notes, *_about(step, rows)],
    )


def _gaps(line: Timeline, busy_s: float, ordinary_step_s: float | None) -> Gaps:
    host = sum(gap.end - gap.start - gap.data_wait for gap in line.gaps if gap.is_host)
    return Gaps(
        host_s=host * _NS,
        data_wait_s=sum(gap.data_wait for gap in line.gaps) * _NS,
        device_s=sum(gap.end - gap.start for gap in line.gaps if not gap.is_host) * _NS,
        in_ordinary_steps_s=None if ordinary_step_s is None else max(0.0, ordinary_step_s - busy_s),
    )


def _classes(items: Sequence[Item], length_s: float, line: Timeline) -> list[ClassTime]:
    of: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        of[item.kind].append(item)
    found = []
    for key, group in of.items():
        ns = sum(item.ns for item in group)
        flops = [item.work.flops for item in group if item.work is not None]
        moved = [item.bytes for item in group if item.bytes is not None]
        found.append(
            ClassTime(
                key=key,
                name=classes.CLASSES[key],
                seconds=ns * _NS,
                share=ns * _NS / length_s if length_s else 0.0,
                launches=len(group),
                flops=sum(flops) if flops else None,
                bytes=sum(moved) if moved else None,
            )
        )
    found.sort(key=lambda one: -one.seconds)
    gaps = sum(gap.end - gap.start for gap in line.gaps) * _NS
    found.append(
        ClassTime(
            key=classes.GAPS,
            name=classes.CLASSES[classes.GAPS],
            seconds=gaps,
            share=gaps / length_s if length_s else 0.0,
            launches=0,
        )
    )
    return found


def _slowed(gaps: Gaps) -> float:
    """How much of the recorded gaps ordinary steps have: recording slows the host."""
    recorded_s = gaps.host_s + gaps.data_wait_s + gaps.device_s
    ordinary_s = gaps.in_ordinary_steps_s
    return 1.0 if ordinary_s is None or not recorded_s else min(1.0, ordinary_s / recorded_s)


def _rows(items: Sequence[Item], device: Device, slowed: float) -> list[KernelRow]:
    of: defaultdict[tuple[str, str | None, str, str | None, str | None], list[Item]] = defaultdict(list)
    for item in items:
        operator = None if item.operator is None else item.operator.name
        module = None if item.module is None else _NUMBER.sub("*", item.module)
        of[item.kind, operator, item.kernel.name, module, item.dtype].append(item)
    found = []
    for (kind, operator, kernel, module, dtype), group in of.items():
        flops = [item.work.flops for item in group if item.work is not None]
        moved = [item.bytes for item in group if item.bytes is not None]
        waited_s = sum(item.waited_ns for item in group) * _NS
        running_s = sum(item.running_ns for item in group) * _NS
        limit, limit_s, unknown = _limit(group, device, running_s, slowed * waited_s)
        found.append(
            KernelRow(
                kind=kind,
                operator=operator,
                kernel=kernel if len(kernel) <= _LONGEST_NAME else f"{kernel[: _LONGEST_NAME - 1]}…",
                module=module,
                launches=len(group),
                seconds=sum(item.ns for item in group) * _NS,
                running_s=running_s,
                flops=sum(flops) if flops else None,
                bytes=sum(moved) if moved else None,
                dtype=dtype,
                limit=limit,
                limit_s=limit_s,
                unknown=unknown,
                waited_s=waited_s,
            )
        )
    return sorted(found, key=lambda row: -row.seconds)


def _limit(
    group: Sequence[Item], device: Device, running_s: float, waited_s: float
) -> tuple[str | None, float | None, str | None]:
    """What binds kernels, the least time for them, and why that is not known."""
    limit, least = device.limit_of(group) or (None, None)
    if waited_s > running_s:
        return "launch", least, None
    if least is not None:
        return limit, least, None
    if device.spec is None:
        return None, None, f"the rates of {device.name or 'this device'} are not known"
    if group[0].operator is None:
        return None, None, "no operator launched it, so its shapes are not known"
    return None, None, "its shapes or dtypes are not recorded"


def _about(step: StepTrace, rows: Sequence[KernelRow]) -> list[str]:
    notes = []
    if step.other_devices:
        notes.append(f"{step.other_devices} more devices are in the trace: this is the busiest one")
    if step.device == HOST:
        notes.append("a CPU: operators stand for kernels, and what runs beside them counts as gaps")
    if len(rows) > _MOST_ROWS:
        left = sum(row.seconds for row in rows[_MOST_ROWS:])
        notes.append(f"{len(rows) - _MOST_ROWS:,} smaller rows are left out, {1e3 * left:.2f} ms together")
    unknown = Counter(item.kind for item in rows if item.kind == classes.OTHER)
    if unknown:
        notes.append(f"{unknown.total()} rows have no known class: neither operator nor name tells it")
    return notes
