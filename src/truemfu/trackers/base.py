"""What a tracker is, and which ones there are.

    make_tracker("wandb", output_dir) ─► a Tracker ─► Lane (a thread of its own) ─► W&B

A tracker is any object with the four methods of `Tracker`: pass one of your own in place of a name. A lane
calls it from one thread, so it needs no lock, may be slow, and may raise.

A new tracker is one file and one line in `TRACKERS`. Constructors are light and never import the package they
are for: that happens in `start`, on the lane's thread.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from ..errors import UsageError, closest


class Tracker(Protocol):
    """Takes the rows of a run: `start` once, `log` and `flush` many times, `finish` once."""

    def start(self, run: Mapping[str, Any]) -> None:
        """Once, before the first row: what is known of the run, as plain JSON data."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One row: numbers, strings, booleans, or None where unknown; a number may be NaN or infinite."""

    def flush(self) -> None:
        """Write what was logged so far."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Once, after the last row: write everything, close."""


class WriteLater(Exception):
    """Raised by `flush`: the rows cannot be written now, are kept by the tracker and wait for the next."""


_METHODS = ("start", "log", "flush", "finish")


def _wandb(output_dir: Path) -> Tracker:
    from .wandb import WandbTracker

    _require("wandb", extra="wandb")
    return WandbTracker(output_dir)


def _tensorboard(output_dir: Path) -> Tracker:
    from .tensorboard import TensorBoardTracker

    _require("tensorboard", extra="tensorboard")
    return TensorBoardTracker(output_dir)


def _mlflow(output_dir: Path) -> Tracker:
    from .mlflow import MlflowTracker

    _require("mlflow", extra="mlflow")
    return MlflowTracker(output_dir)


def _trackio(output_dir: Path) -> Tracker:
    from .trackio import TrackioTracker

    _require("trackio", extra="trackio")
    return TrackioTracker(output_dir)


def _prometheus(output_dir: Path, address: str = "127.0.0.1") -> Tracker:
    from .prometheus import DEFAULT_PORT, PrometheusTracker
    from .prometheus_server import parse_address

    _require("prometheus_client", extra="prometheus")
    host, port = parse_address(address, "the tracker prometheus", port=DEFAULT_PORT)
    run = Path(os.path.abspath(output_dir)).name  # without a look at the disk: the training thread is here
    return PrometheusTracker(run=run, address=host, port=port)


TRACKERS: dict[str, Callable[..., Tracker]] = {
    "wandb": _wandb,
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "prometheus": _prometheus,
}


def make_tracker(name_or_object: str | Tracker, output_dir: Path, **settings: Any) -> Tracker:
    """The tracker of this name, writing under `output_dir`; an object with the four methods as it is.

    `settings` are those of this tracker alone: `address` of Prometheus.
    """
    check_tracker(name_or_object)
    if isinstance(name_or_object, str):
        return TRACKERS[name_or_object](Path(output_dir), **settings)
    return name_or_object


def check_tracker(name_or_object: Any) -> None:
    """Raise UsageError for a name nobody knows and an object without the four methods."""
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
            f"{type(name_or_object).__name__} is no tracker: "
            f"it has no {' and no '.join(f'{method}()' for method in missing)}; "
            f"a tracker has {', '.join(f'{method}()' for method in _METHODS)}"
        )


def _require(package: str, *, extra: str) -> None:
    # What is imported already may be somebody's stand-in without a spec, which cannot be looked up.
    if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
        raise UsageError(f"the tracker {extra!r} needs {package}: pip install 'truemfu[{extra}]'")


def known(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The row without what is unknown: no tracker draws None."""
    return {key: value for key, value in metrics.items() if value is not None}


def writable(text: str) -> str:
    """The text without halves of surrogate pairs, as undecodable file names hold: they cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


class Names:
    """Metric names as a tracker takes them: each of ours has one, and no two have the same.

    The name of a dataset is part of some, and a user may call one whatever they like. `clean` makes a name
    acceptable; a second name that would come out like an earlier one gets a checksum behind it.
    """

    def __init__(self, clean: Callable[[str], str]) -> None:
        self._clean = clean
        self._theirs: dict[str, str] = {}
        self._taken: set[str] = set()

    def __call__(self, name: str) -> str:
        if name not in self._theirs:
            cleaned = self._clean(name)
            self._theirs[name] = cleaned if cleaned not in self._taken else f"{cleaned}_{checksum(name)}"
            self._taken.add(self._theirs[name])
        return self._theirs[name]


def checksum(name: str) -> str:
    """Eight letters that tell this name from others."""
    return f"{crc32(name.encode('utf-8', 'surrogatepass')):08x}"
