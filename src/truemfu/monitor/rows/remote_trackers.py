"""The trackers other than the local log: which there are, and which rows they get.

every step           loss, learning rate, epoch, global_step (and dataset metrics where measured)
detailed_log_freq    also the gradient norm and everything under perf/, 30 s after the last at the latest;
                     if that step sends them no row, with the next one that does
reduced_logging      only the metrics of every step
logging_steps        no rows in between
skip_wandb           no row for this step
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...errors import UsageError, one_line
from ...trackers.base import Tracker
from ...trackers.lane import Lane
from ...trackers.metric_aliases import rename
from ...trackers.table import check_tracker, make_tracker
from ...trackers.wandb import WandbTracker
from ..config import MonitorConfig
from ..step_note import StepPosition

_BASICS = frozenset({"training/loss", "training/lr", "training/epoch", "global_step"})
_FLUSH_S = 10.0
"""The longest time a tracker may buffer rows."""


class RemoteTrackers:
    """The lanes of the trackers that were asked for, and of W&B if a run of it is active.

    `finish_rows_of` is called before a W&B run that the user ends is closed, and `close_monitor` at exit,
    while W&B can still be written to.
    """

    def __init__(
        self,
        output_dir: Path,
        config: MonitorConfig,
        trackers: Sequence[str | Tracker] | None,
        *,
        finish_rows_of: Callable[[Lane], None],
        close_monitor: Callable[[], None],
        notice: Callable[[str], None],
    ) -> None:
        self._dir, self._config, self._notice = output_dir, config, notice
        self._finish_rows_of, self._close_monitor = finish_rows_of, close_monitor
        self._wanted = _wanted(trackers, config)
        self._has_wandb = self._details_are_due = False
        self.lanes: list[Lane] = []

    def put(
        self, position: StepPosition, row: dict[str, Any], *, is_detailed: bool, is_skipped: bool
    ) -> None:
        """Hand a row over, or what of it is wanted."""
        self._details_are_due |= is_detailed
        if not is_skipped and position.reaches(self._config.logging_steps or 1):
            wanted = rename(self._part_of(row), self._config.metric_names)
            for lane in self.lanes:
                lane.put(position.step, wanted)

    def _part_of(self, row: dict[str, Any]) -> dict[str, Any]:
        """The complete row if details are due, and they stay due until a row with them was sent."""
        is_reduced = self._config.reduced_logging
        if self._details_are_due and not is_reduced:
            self._details_are_due = False
            return row
        return {
            key: value
            for key, value in row.items()
            if key in _BASICS or (key.startswith(("dataset/", "privacy/")) and not is_reduced)
        }

    def open(self) -> None:
        """Give each tracker a lane."""
        for tracker in self._wanted or ():
            self._open(tracker)
        if _wandb_is_active() and self._wanted != () and not self._has_wandb:
            self._open("wandb")

    def _open(self, wanted: str | Tracker) -> None:
        """Give a tracker a lane; one that cannot be created is left out, with a warning."""
        name = wanted if isinstance(wanted, str) else type(wanted).__name__
        try:
            settings = {"address": self._config.prometheus_address} if wanted == "prometheus" else {}
            tracker = make_tracker(wanted, self._dir, **settings)
        except Exception as error:
            self._notice(f"tracker {name} is left out: {one_line(error)}")
            return
        lane = Lane(tracker, name, flush_every_s=_FLUSH_S, notice=self._notice)
        if isinstance(tracker, WandbTracker):
            if self._has_wandb:
                self._notice(f"tracker {name} is left out: there is already one for W&B")
                return
            self._has_wandb = True
            tracker.before_end = lambda: self._finish_rows_of(lane)
            tracker.at_exit = self._close_monitor
        self.lanes.append(lane)


def _wanted(
    trackers: Sequence[str | Tracker] | None, config: MonitorConfig
) -> tuple[str | Tracker, ...] | None:
    """The requested trackers, each once; None if not configured. Raises if one is not a tracker."""
    if trackers is None:
        trackers = config.trackers
    if trackers is None:
        return None
    if isinstance(trackers, str) or not isinstance(trackers, Iterable):
        got = repr(trackers) if isinstance(trackers, str) else type(trackers).__name__
        raise UsageError(
            f'trackers must be a list of names and trackers such as ["wandb"], or [] for none; got {got}'
        )
    wanted: dict[str | int, str | Tracker] = {}
    for tracker in trackers:
        check_tracker(tracker)
        wanted[tracker if isinstance(tracker, str) else id(tracker)] = tracker
    return tuple(wanted.values())


def _wandb_is_active() -> bool:
    """Whether the user has a W&B run open: it is then used automatically."""
    return getattr(sys.modules.get("wandb"), "run", None) is not None
