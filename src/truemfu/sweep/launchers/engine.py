"""What a cluster engine is for a sweep: it places the node agent, and knows what became of its job.

    engine        Slurm, Ray
    node agent    `supervisor/on_node.py`, started once for each experiment on the node the engine chose

To add one: a class with these methods, and a line in `engine_of` of `supervisor/cluster_batches.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ..process import start_command
from .jobs import Batch, JobsFolder, JobState
from .settings import Request

NODE_AGENT = start_command("truemfu.sweep.supervisor.on_node")
"""Started with the folder of a batch and the number of an experiment in it."""
ENGINE_JOB_VARIABLE = "TRUEMFU_ENGINE_JOB"
"""Tells the node agent what the engine calls its job."""


class Engine(Protocol):
    """Places experiments on a cluster."""

    name: str
    """As in messages: Slurm, Ray."""

    def check(self, request: Request) -> None:
        """A UsageError if the engine is not there or cannot satisfy the request; nothing is submitted."""

    @property
    def runs_batches_in_turn(self) -> bool:
        """Whether two batches at once would use the same devices."""

    def submit(self, batch: Batch, jobs: JobsFolder, numbers: Sequence[int], after: Batch | None) -> str:
        """Place these experiments of a batch and return the engine's name for them; a UsageError if refused.

        `after`: a batch of which no job may run any more when these start, or None.
        """

    def find(self, batch: Batch, jobs: JobsFolder) -> str | None:
        """The engine's name of a batch that is submitted and not over; None if it was never submitted."""

    def job_states(
        self, batch: Batch, jobs: JobsFolder, claimed: Mapping[int, str | None]
    ) -> dict[int, JobState]:
        """The jobs of these experiments; one that the engine does not know is left out.

        `claimed`: for each number the engine's job that has claimed it, or None.
        """

    def cancel(self, batch: Batch, jobs: JobsFolder) -> None:
        """Ask the engine to end all jobs of a batch; a UsageError if it refuses."""


_GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES")
_SLURM_CLIENT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_CLUSTERS")
"""How Slurm's commands find their cluster; other variables of Slurm describe the job that set them."""


def submit_environment() -> dict[str, str]:
    """The environment that experiments inherit: this one, without what another job or GPU choice left."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _GPU_VARIABLES
        and (name in _SLURM_CLIENT or not name.startswith(("SLURM_", "SLURMD_")))
    }


def last_line_of(path: Path) -> str | None:
    """The last line of a small text file that is not empty."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.strip() for line in reversed(lines) if line.strip()), None)
