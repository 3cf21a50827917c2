"""The trackers by name.

    make_tracker("wandb", output_dir) ─► a Tracker ─► Lane (its own thread) ─► W&B

A new tracker is one file and one line in `TRACKERS`. Constructors are cheap and never import the tracker's
package: `start` does that, on the lane's thread.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UsageError, closest
from .base import Tracker
from .mlflow import MlflowTracker
from .prometheus import DEFAULT_PORT, PrometheusTracker
from .prometheus_server import parse_address
from .tensorboard import TensorBoardTracker
from .trackio import TrackioTracker
from .wandb import WandbTracker

_METHODS = ("start", "log", "flush", "finish")


def _prometheus(output_dir: Path, address: str = "127.0.0.1") -> Tracker:
    host, port = parse_address(address, "the tracker prometheus", port=DEFAULT_PORT)
    run = Path(os.path.abspath(output_dir)).name  # no disk access: this is the training thread
    return PrometheusTracker(run=run, address=host, port=port)


class KnownTracker(NamedTuple):
    """A named tracker: the package it needs, and its factory for an output folder."""

    package: str
    make: Callable[..., Tracker]


TRACKERS = {
    "wandb": KnownTracker("wandb", WandbTracker),
    "tensorboard": KnownTracker("tensorboard", TensorBoardTracker),
    "mlflow": KnownTracker("mlflow", MlflowTracker),
    "trackio": KnownTracker("trackio", TrackioTracker),
    "prometheus": KnownTracker("prometheus_client", _prometheus),
}
"""By name, which is also the name of the extra that installs the package."""


def make_tracker(name_or_object: str | Tracker, output_dir: Path, **settings: Any) -> Tracker:
    """The tracker of this name, writing under `output_dir`; a tracker object is returned unchanged.

    `settings` are specific to the tracker: `address` for Prometheus.
    """
    check_tracker(name_or_object)
    if isinstance(name_or_object, str):
        tracker = TRACKERS[name_or_object]
        _require(tracker.package, extra=name_or_object)
        return tracker.make(Path(output_dir), **settings)
    return name_or_object


def check_tracker(name_or_object: Any) -> None:
    """Raise UsageError for an unknown name and an object without the four methods."""
    if isinstance(name_or_object, str):
        if name_or_object not in TRACKERS:
            raise UsageError(
                f"unknown tracker {name_or_object!r}; known: {', '.join(TRACKERS)}"
                f"{closest(name_or_object, TRACKERS)}"
            )
        return
    if isinstance(name_or_object, type):
        raise UsageError(
            f"expected a tracker, got the class {name_or_object.__name__}; pass an instance of it"
        )
    missing = [method for method in _METHODS if not callable(getattr(name_or_object, method, None))]
    if missing:
        raise UsageError(
            f"{type(name_or_object).__name__} is not a tracker: "
            f"it has no {' and no '.join(f'{method}()' for method in missing)}; "
            f"a tracker has {', '.join(f'{method}()' for method in _METHODS)}"
        )


def _require(package: str, *, extra: str) -> None:
    # An imported module may be a substitute without a spec, for which find_spec raises.
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise UsageError(f"the tracker {extra!r} needs {package}: pip install 'truemfu[{extra}]'")
