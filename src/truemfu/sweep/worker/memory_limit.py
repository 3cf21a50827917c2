"""A limit on the host memory of this process, so that one experiment cannot use up the machine's.

RLIMIT_DATA counts private memory that may be written to, unlike RLIMIT_AS: of address space, CUDA and torch
reserve tens of gigabytes that they never use. Some libraries reserve writable memory as well, a gigabyte for
the matrix products of one on ARM; reserved memory that is unused when the limit is set does not count.
"""

from __future__ import annotations

import os
import resource

from ..process import memory_of

_MIB = 1 << 20


def limit_memory(limit_bytes: int | None) -> None:
    """Limit the private memory of this process, which must be below it now; None removes the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = hard
    if limit_bytes is not None:
        found = memory_of(os.getpid())
        held = found.get("RssAnon", 0)
        reserved = max(0, found.get("VmData", 0) - held) if held else 0
        if held >= limit_bytes:
            raise MemoryError(
                f"the limit of {limit_bytes // _MIB} MiB is below the {held // _MIB} MiB that the worker "
                "uses before it builds anything"
            )
        soft = limit_bytes + reserved
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def is_limited() -> bool:
    """Whether a limit is set now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return soft != resource.RLIM_INFINITY
