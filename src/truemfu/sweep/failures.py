"""Why an experiment failed: the only place that judges it, running out of memory included.

    it raised                                  status_of          asked by its worker
    its process ended without a result         status_of_exit     asked by its supervisor
    its job on a cluster ended without one     the engine reports it (`launchers/jobs.py: JobState`)

torch is imported only to judge an error, in a worker, which has it: a supervisor starts without.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import one_line, text_of
from ..records import OUT_OF_MEMORY, Phase, Status
from .order import Progress, last_phase
from .trainers.base import Unsupported
from .worker.memory_limit import is_limited

# GPU memory allocated outside torch's allocator fails with an error of the library that requested it.
_CUDA_OOM_TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
# oneDNN's error if it gets no memory for the code it generates, and for other reasons.
_NO_PRIMITIVE = "could not create a primitive"
_HOST_OOM_TEXTS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How a worker's process ended, and its progress until then."""

    exit_code: int | None = None
    signal_name: str | None = None
    began_at_s: float
    wall_s: float
    progress: list[Progress]
    peak_bytes: int | None = None
    """The peak of its host memory."""
    timed_out: bool = False
    interrupted: bool = False
    kernel_killed: bool = False
    """Whether the kernel's OOM killer killed a process meanwhile."""
    unkillable: list[int]
    """Processes that could not be killed."""

    @property
    def phase(self) -> Phase:
        return last_phase(self.progress)

    @property
    def rank(self) -> int | None:
        """The rank of several that ended without a result, and the worker with it."""
        return self.progress[-1].rank if self.progress else None


def status_of(error: BaseException) -> tuple[Status, str]:
    """The status of an experiment that raised this error, and the reason in one line."""
    if any(map(_is_cuda_oom, _with_causes(error))):
        return Status.CUDA_OOM, one_line(error)
    if any(map(_is_host_oom, _with_causes(error))):
        return Status.HOST_OOM, one_line(error)
    if isinstance(error, Unsupported):
        return Status.UNSUPPORTED, one_line(error)
    return Status.ERROR, one_line(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU or the host ran out of memory."""
    return status_of(error)[0] in OUT_OF_MEMORY


def status_of_exit(end: WorkerEnd, log_tail: Sequence[str], folder: Path) -> tuple[Status, str]:
    """The status of a worker that left no result, and the reason in one line."""
    where = f"in phase {end.phase.value}"
    last = f": {log_tail[-1]}" if log_tail else ""
    if end.timed_out:
        return (
            Status.TIMEOUT,
            f"did not finish within its time limit, ended after {end.wall_s:.1f} s {where}",
        )
    if end.signal_name == "SIGKILL" and end.kernel_killed:
        peak = end.peak_bytes if end.rank is None else None  # that of the worker is not the rank's
        held = "" if peak is None else f"; it used at least {peak / 2**30:.1f} GiB"
        return Status.HOST_OOM, f"killed by the kernel because memory ran out {where}{held}"
    if end.signal_name == "SIGABRT" and any("bad_alloc" in line for line in log_tail):
        return Status.HOST_OOM, f"a native library ran out of memory {where}{last}"
    if end.signal_name is not None:
        return Status.SIGNAL, f"ended by {end.signal_name} {where}"
    if _disk_is_full(folder):
        last += f"; the disk of {folder} is full: {os.strerror(errno.ENOSPC)}"
    return Status.ERROR, f"exited with code {end.exit_code} {where} without a result{last}"


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: a model that does not fit may be reported by a wrapping error."""
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def _is_cuda_oom(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in text_of(error) for text in _CUDA_OOM_TEXTS)


def _is_host_oom(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if not isinstance(error, RuntimeError):
        return False
    text = text_of(error)
    return any(known in text for known in _HOST_OOM_TEXTS) or (_NO_PRIMITIVE in text and is_limited())


def _disk_is_full(folder: Path) -> bool:
    try:
        return os.statvfs(folder).f_bavail == 0
    except OSError:
        return False
