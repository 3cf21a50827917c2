"""Which engines there are, by the name of their launcher."""

from __future__ import annotations

from .engine import Engine
from .ray_engine import Ray
from .settings import ClusterSettings
from .slurm import Slurm


def engine_of(launcher: str, settings: ClusterSettings) -> Engine:
    """The engine of this launcher, slurm or ray."""
    return Slurm(settings) if launcher == "slurm" else Ray(settings)
