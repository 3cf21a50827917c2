"""The census of one step as it is written to a file and printed: `census.json`, `truemfu explain --json`.

All times are in seconds of the step that was recorded. Unknown values are None; a reason stands beside them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..errors import RecordError
from ..records import VersionedRecord, read_record
from .classes import GAPS, MATRIX_WORK

CENSUS_FILE = "census.json"
TRACE_FILE = "census_trace.json.gz"


class ClassTime(msgspec.Struct, frozen=True, kw_only=True):
    """A class of kernels. The seconds of all classes, gaps included, add up to the step."""

    key: str
    name: str
    seconds: float
    share: float
    """Of the step."""
    launches: int
    flops: int | None = None
    bytes: int | None = None
    """Of the kernels whose bytes are known."""


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """Kernels of one name, launched by one operator in modules that differ by their numbers alone."""

    kind: str
    """The key of its class."""
    operator: str | None
    kernel: str
    module: str | None
    """`layers.*.mlp`; None where the trace has no modules, or it ran in none."""
    launches: int
    seconds: float
    """While no other kernel, counted before, ran; with all other rows and the gaps it adds up to the step."""
    running_s: float
    """From begin to end, summed over launches."""
    flops: int | None = None
    bytes: int | None = None
    dtype: str | None = None
    limit: str | None = None
    """What binds it: arithmetic, memory or launch."""
    limit_s: float | None = None
    """The least time that arithmetic and memory allow, if known."""
    unknown: str | None = None
    """Why `limit` is not known."""
    waited_s: float = 0.0
    """Without any kernel before it, because the host had not launched it yet."""


class Gaps(msgspec.Struct, frozen=True, kw_only=True):
    """The time without any kernel."""

    host_s: float
    """The host had not launched the next kernel yet."""
    data_wait_s: float
    """Of it not in `host_s`: the host waited for a batch of a DataLoader."""
    device_s: float
    """The next kernel was launched already."""
    in_ordinary_steps_s: float | None = None
    """Per step when nothing is recorded: its time without the kernels' time."""


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    """What a remedy could gain at most."""

    remedy: str
    at_most_s: float | None
    """None: not known, or it does not apply; `evidence` has the reason."""
    applies: bool
    """Whether the census has evidence for it."""
    evidence: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A stream in the picture of the step."""

    stream: str
    segments: list[tuple[int, int, str]]
    """Begin and end in thousandths of the step, and the class that ran longest between them."""


class Census(VersionedRecord, frozen=True, kw_only=True):
    """One step, kernel by kernel."""

    truemfu_version: str | None = None
    source: str
    """The name of the trace."""
    step: str | None = None
    steps_in_trace: int = 0
    device: str | None = None
    """As torch names it; None if the trace does not say."""
    peak_known: bool = False
    """Whether the device's peaks and bandwidth are known."""
    is_host: bool = False
    """The trace is of a CPU: operators stand for kernels."""
    step_s: float
    busy_s: float
    ordinary_step_s: float | None = None
    """The median of the run's steps that were not recorded; None if there is no such run."""
    launches: int
    classes: list[ClassTime]
    gaps: Gaps
    kernels: list[KernelRow]
    bounds: list[Bound]
    lanes: list[Lane]
    notes: list[str]

    def without_tensor(self) -> dict[str, float]:
        """The classes without matrix work by name, as shares of their time together, without gaps."""
        others = [one for one in self.classes if one.key not in (*MATRIX_WORK, GAPS) and one.seconds > 0]
        total = sum(one.seconds for one in others)
        return {one.name: one.seconds / total for one in others}


def stored_census(folder: Path) -> Census | None:
    """The census that the run in a folder wrote; None without a readable one."""
    try:
        return read_record(folder / CENSUS_FILE, Census)
    except RecordError:
        return None
