"""A limit on the host memory of this process, so that one experiment cannot take the machine's.

RLIMIT_DATA counts private memory that is written to, unlike RLIMIT_AS: of address space, CUDA and torch
reserve tens of gigabytes that they never use.
"""

from __future__ import annotations

import re
import resource
from pathlib import Path

_MIB = 1 << 20


def limit_memory(limit_bytes: int | None) -> None:
    """Limit the private memory of this process, which must be below it now; None lifts the limit again."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard
    if limit_bytes is not None:
        held = _held_bytes()
        if held is not None and held >= limit_bytes:
            raise MemoryError(
                f"the limit of {limit_bytes // _MIB} MiB is below the {held // _MIB} MiB that the worker "
                "holds before it has built anything"
            )
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_limited() -> bool:
    """Whether a limit holds now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return soft != resource.RLIM_INFINITY


def _held_bytes() -> int | None:
    """What counts against the limit; None where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"^VmData:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
