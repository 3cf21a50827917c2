"""What a rank reports of itself every few seconds: one small row, the same in the store and in its file.

Means are over the window since the rank's row before, warm-up steps left out. None: not known on this rank.
"""

from __future__ import annotations

import msgspec


class RankRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One window of one rank."""

    rank: int
    world_size: int
    host: str
    device: str
    """The GPU's UUID; on a CPU the host and the process' place on it. With `host` it identifies the rank
    across restarts, in which rank numbers change."""
    role: str = ""
    """`RankRole.name`: only ranks of equal role are compared."""
    restart: int = 0
    """How often an elastic launcher has restarted the job."""
    number: int
    """Rows of this process so far, this one included."""
    at_s: float
    """Unix time at which the window ended."""
    window_s: float | None = None
    """How long the window was."""
    is_last: bool = False
    """Whether the rank has ended in order."""
    step: int | None = None
    """The last step of the window."""
    steps: int = 0
    """Steps in the window that are no warm-up."""
    step_time_s: float | None = None
    data_wait_s: float | None = None
    """Per step, as the step time."""
    host_s: float | None = None
    """Per step: the training thread on a processor or waiting for one. Not for a GPU's rank, whose thread
    may spin while it waits for the device."""
    outside_s: float | None = None
    """Per step: at least so long the training thread was not in a collective, on a processor or not. Not for
    a GPU's rank."""
    busy_share: float | None = None
    """The share of time in which a kernel ran on the GPU."""
    collective_s: dict[str, float] | None = None
    """Per step, by process group; only where the backend times its collectives."""
    clock_mhz: float | None = None
    """By the cycle counters."""
    tensor_activity: float | None = None
    throttle: str | None = None
    """Why the GPU's clock is limited, as the driver reports it."""
    memory_bytes: int | None = None
    """The largest allocation of the device so far."""
    model_flops: float | None = None
    """Per step, this rank's share (`RankRole`)."""
    tokens: float | None = None
    """Per step, this rank's share."""
