"""One step of a Kineto trace: its kernels, and the operators and calls that launched them.

    first reading    `ProfilerStep#n` ranges, how much each launched ─► which step
    second reading   the events of that step ─► StepTrace

A trace is read twice, so that of a file of any size only one step is ever held. The step is the last one that
launched at least half as much as the largest; without ranges it is the whole trace. On the device it lasts
from the end of the last kernel that an earlier step launched until the end of its own last kernel, so that
the steps of a trace add up to its time. All times are integers in nanoseconds.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import RecordError
from .classes import of_operator
from .json_stream import EventStream

STEP = "ProfilerStep#"
ON_DEVICE = frozenset(("kernel", "gpu_memcpy", "gpu_memset"))
_CALLS = frozenset(("cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"))
_RANGES = frozenset(("cpu_op", "user_annotation", "python_function"))
HOST = "cpu"
"""The kind and the device of what a CPU ran."""
MODULE = "nn.Module: "
"""How ranges of modules are named, by torch (`with_stack`) and by our own census step."""
_LAST = "Record Window End"
"""The last event that torch writes."""
_MOST_EVENTS = 4_000_000
"""Of one step, which is held in memory; a step of a large model has some ten thousand."""
_SKEW_NS = 1_000_000
"""By how much the clocks of host and device may differ."""


@dataclass(slots=True, eq=False)
class Range:
    """An operator, or another named range of time on a thread of the host."""

    name: str
    kind: str
    thread: int
    start: int
    end: int
    external: int | None
    args: Mapping[str, Any]
    parent: Range | None = None
    children: list[Range] = field(default_factory=list)

    @property
    def sequence(self) -> int | None:
        """The number of the autograd node that it made or runs."""
        number: int | None = self.args.get("Sequence number")
        return number

    def up(self) -> Iterator[Range]:
        """This range and those around it, from the inside."""
        at: Range | None = self
        while at is not None:
            yield at
            at = at.parent


@dataclass(slots=True, eq=False)
class Kernel:
    """Something that ran on a device: a kernel, a copy, a fill."""

    name: str
    kind: str
    device: int | str
    stream: int | str
    start: int
    end: int
    correlation: int | None
    external: int | None
    bytes: int | None
    launched: int | None = None
    """When the host had launched it; None if that is not in the trace."""
    within: Range | None = None
    """The innermost range that launched it."""


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """What a trace has of one step."""

    name: str | None
    """`ProfilerStep#7`; None where the trace is not divided into steps."""
    steps: int
    """How many steps with work the trace has; 0 if it is not divided."""
    start: int
    """On the device, in nanoseconds; so is `end`."""
    end: int
    device: int | str
    kernels: Sequence[Kernel]
    """Of this device, by their start, each clipped to the step."""
    ranges: Sequence[Range]
    """By thread and start, linked to those around them."""
    waits: Sequence[tuple[int, int]]
    """When the host waited for a batch of a DataLoader."""
    other_devices: int
    properties: Mapping[str, Any]
    """Of the device, as torch recorded them."""
    ranks: int | None
    notes: Sequence[str]


def read_step(path: Path) -> StepTrace:
    """The step of a trace; RecordError if it is none, or has no operator of a step."""
    survey = _Survey(path)
    return _Reading(path, survey).result()


@dataclass(frozen=True, slots=True)
class _Span:
    name: str
    start: int
    end: int
    thread: int


class _Survey:
    """The first reading: which step to take."""

    def __init__(self, path: Path) -> None:
        spans: dict[str, _Span] = {}
        launches, operators = array("q"), array("q")
        last_call, last_operators = 0, Counter[int]()
        """When the last that was read began; of operators by thread: one thread is written after another."""
        self.has_kernels = has_end = False
        stream = EventStream(path)
        for event in stream:
            category = event.get("cat")
            if category in _CALLS:
                last_call = max(last_call, start := _start(event))
                if "aunch" in event.get("name", "") or "emcpy" in event.get("name", ""):
                    launches.append(start)
            elif category == "cpu_op":
                operators.append(start := _start(event))
                thread = event.get("tid", 0)
                last_operators[thread] = max(last_operators[thread], start)
            elif event.get("name") == _LAST:
                has_end = True
            elif category == "user_annotation" and str(event.get("name")).startswith(STEP):
                start = _start(event)
                spans[event["name"]] = _Span(
                    event["name"], start, start + _length(event), event.get("tid", 0)
                )
            self.has_kernels = self.has_kernels or category in ON_DEVICE
        self.cut, self.header = stream.cut, stream.header
        is_short = self.cut is not None and not has_end
        if not operators and not self.has_kernels:
            cut = f" ({self.cut})" if self.cut else ""
            raise RecordError(
                f"{path} has no operators and no kernels, so there is nothing to explain{cut}: record a step "
                "with torch.profiler.profile(record_shapes=True) and export_chrome_trace"
            )
        if not self.has_kernels and (launches or (is_short and self.header.get("deviceProperties"))):
            raise RecordError(
                f"{path} has no kernels, only what the host did for them"
                + (
                    f": {self.cut}"
                    if self.cut
                    else ": record with ProfilerActivity.CUDA among the activities of torch.profiler"
                )
            )
        work = sorted(launches if self.has_kernels and launches else operators)
        amounts = {
            name: bisect_left(work, span.end) - bisect_left(work, span.start) for name, span in spans.items()
        }
        with_work = [span for span in spans.values() if amounts[span.name]]
        self.steps = len(with_work)
        enough = max(amounts.values(), default=0) / 2
        whole = [span for span in with_work if amounts[span.name] >= enough]
        if is_short and with_work:  # a step is whole if something after it was read
            whole = [
                span
                for span in whole
                if span.end <= (last_call if self.has_kernels else last_operators[span.thread])
            ]
            if not whole:
                raise RecordError(f"{path} has no whole step: {self.cut}")
        self.step = max(whole, key=lambda span: span.start, default=None)
        if self.step is None and len(operators) + len(launches) > _MOST_EVENTS:
            raise _too_many(path)


def _too_many(path: Path) -> RecordError:
    return RecordError(
        f"{path}: more than {_MOST_EVENTS:,} events in one step: record fewer steps, or mark them with the "
        "profiler's step()"
    )


class _Reading:
    """The second reading: the events of the step."""

    def __init__(self, path: Path, survey: _Survey) -> None:
        self._path, self._survey = path, survey
        self._step = survey.step
        self._kernels: list[Kernel] = []
        self._ranges: list[Range] = []
        self._launches: dict[int, tuple[int, int, int]] = {}
        """Of each correlation id: start and end of the call, and its thread."""
        self._later: set[int] = set()
        self._before: dict[int | str, int] = {}
        """Of each device: when work of earlier steps that began before the step on the host had ended."""
        events = 0
        for event in EventStream(path):
            events += self._take(event)
            if events > _MOST_EVENTS:
                raise _too_many(path)

    def _take(self, event: Mapping[str, Any]) -> bool:
        """Keep an event if it may belong to the step; whether it was kept."""
        category, step = event.get("cat"), self._step
        is_kernel = category in ON_DEVICE
        if event.get("ph") != "X" or not (is_kernel or category in _RANGES or category in _CALLS):
            return False
        start = _start(event)
        end = start + _length(event)
        args = event.get("args") or {}
        if is_kernel:
            device = args.get("device", event.get("pid", 0))
            if step is not None and start < step.start - _SKEW_NS:
                self._before[device] = max(self._before.get(device, 0), end)
                return False
            self._kernels.append(_kernel(event, category, device, start, end, args))
            return True
        if step is not None and start < step.start:
            return False
        is_later = step is not None and start >= step.end
        if category in _CALLS:
            if (correlation := args.get("correlation")) is None:
                return False
            if is_later:
                self._later.add(correlation)
            else:
                self._launches[correlation] = start, end, event.get("tid", 0)
            return True
        name = str(event.get("name"))
        if is_later or (category == "python_function" and not name.startswith(MODULE)):
            return False
        kept = {key: args[key] for key in _KEPT if key in args}
        thread = event.get("tid", 0)
        self._ranges.append(Range(name, str(category), thread, start, end, args.get("External id"), kept))
        return True

    def result(self) -> StepTrace:
        survey, step = self._survey, self._step
        _nest(self._ranges)
        notes = [survey.cut] if survey.cut else []
        is_host = not survey.has_kernels
        if is_host and survey.header.get("deviceProperties"):
            notes.append(
                "the trace names a GPU and has no kernels of it: if the training used it, record with "
                "ProfilerActivity.CUDA"
            )
        kernels = _operators_as_kernels(self._ranges) if is_host else self._linked()
        if not kernels:
            raise RecordError(
                f"{self._path} has no kernel that {'the step' if step is None else step.name} launched"
                + (f" ({survey.cut})" if survey.cut else "")
            )
        busy: Counter[int | str] = Counter()
        for kernel in kernels:
            busy[kernel.device] += kernel.end - kernel.start
        device = max(busy, key=lambda one: busy[one])
        own = sorted((k for k in kernels if k.device == device), key=lambda kernel: kernel.start)
        end = max(kernel.end for kernel in own)
        start = self._before.get(device)
        if is_host and step is not None:
            start, end = step.start, step.end
        elif start is None:
            start = own[0].start
            if step is not None:
                notes.append("the trace begins with this step: the time before its first kernel is unknown")
        start = min(start, own[-1].start)
        for kernel in own:
            kernel.start, kernel.end = max(kernel.start, start), max(min(kernel.end, end), start)
        waits = [(r.start, r.end) for r in self._ranges if r.name.startswith("enumerate(DataLoader)")]
        return StepTrace(
            name=None if step is None else step.name,
            steps=survey.steps,
            start=start,
            end=end,
            device=device,
            kernels=own,
            ranges=self._ranges,
            waits=waits,
            other_devices=len(busy) - 1,
            properties=_properties(survey.header, device),
            ranks=_ranks(survey.header),
            notes=notes,
        )

    def _linked(self) -> list[Kernel]:
        """The kernels that the step launched, each with its launch and the range it was launched in."""
        by_external = {r.external: r for r in self._ranges if r.kind == "cpu_op" and r.external is not None}
        threads: defaultdict[int, list[Range]] = defaultdict(list)
        for one in self._ranges:
            threads[one.thread].append(one)
        found = []
        for kernel in self._kernels:
            launch = None if kernel.correlation is None else self._launches.get(kernel.correlation)
            if launch is None and self._step is not None:
                is_known = bool(self._launches)
                if kernel.correlation not in self._later and is_known:  # of an earlier step
                    before = self._before.get(kernel.device, 0)
                    self._before[kernel.device] = max(before, kernel.end)
                if is_known or not self._step.start <= kernel.start < self._step.end:
                    continue
            if launch is not None:
                start, kernel.launched, thread = launch
                kernel.within = _innermost(threads[thread], start)
            by_id = None if kernel.external is None else by_external.get(kernel.external)
            kernel.within = by_id or kernel.within
            found.append(kernel)
        return found


_KEPT = ("Sequence number", "Input Dims", "Input type", "Input Strides", "Concrete Inputs", "Fwd thread id")


def _start(event: Mapping[str, Any]) -> int:
    return round(float(event.get("ts") or 0) * 1000)


def _length(event: Mapping[str, Any]) -> int:
    return max(0, round(float(event.get("dur") or 0) * 1000))


def _kernel(
    event: Mapping[str, Any], kind: Any, device: Any, start: int, end: int, args: Mapping[str, Any]
) -> Kernel:
    stream = args.get("stream", event.get("tid", 0))
    moved = args.get("bytes")
    return Kernel(
        str(event.get("name")),
        str(kind),
        device if isinstance(device, (int, str)) else str(device),
        stream if isinstance(stream, (int, str)) else str(stream),
        start,
        end,
        args.get("correlation"),
        args.get("External id"),
        int(moved) if isinstance(moved, (int, float)) else None,
    )


def _nest(ranges: list[Range]) -> None:
    """Order ranges by thread and start, and link each to the one around it."""
    ranges.sort(key=lambda r: (r.thread, r.start, -r.end))
    open_ranges: list[Range] = []
    for one in ranges:
        while open_ranges and (open_ranges[-1].thread != one.thread or open_ranges[-1].end <= one.start):
            open_ranges.pop()
        if open_ranges:
            one.parent = open_ranges[-1]
            one.parent.children.append(one)
        open_ranges.append(one)


def _innermost(ranges: Sequence[Range], at: int) -> Range | None:
    """The innermost range of a thread at a time: that of the last to begin, or one around it."""
    index = bisect_left(ranges, at + 1, key=lambda one: one.start) - 1
    if index < 0:
        return None
    return next((one for one in ranges[index].up() if one.end > at), None)


def _operators_as_kernels(ranges: Sequence[Range]) -> list[Kernel]:
    """What a CPU ran, on a stream for each thread: operators of a known class without one of the same class
    directly in them, and the innermost of the others."""
    found, stack = [], [one for one in ranges if one.parent is None]
    while stack:
        one = stack.pop()
        operators = [child for child in one.children if child.kind == "cpu_op"]
        kind = of_operator(one.name) if one.kind == "cpu_op" else None
        is_last = kind is not None and all(of_operator(child.name) != kind for child in operators)
        if one.kind == "cpu_op" and "::" in one.name and (not operators or is_last):
            kernel = Kernel(one.name, HOST, HOST, one.thread, one.start, one.end, None, None, None)
            kernel.within = one
            found.append(kernel)
        else:
            stack += one.children
    return found


def _properties(header: Mapping[str, Any], device: int | str) -> Mapping[str, Any]:
    known = header.get("deviceProperties")
    for one in known if isinstance(known, list) else ():
        if isinstance(one, dict) and one.get("id") == device:
            return one
    return {}


def _ranks(header: Mapping[str, Any]) -> int | None:
    """How many ranks the recorded job had."""
    job = header.get("distributedInfo")
    size = job.get("world_size") if isinstance(job, dict) else None
    return size if isinstance(size, int) else None
