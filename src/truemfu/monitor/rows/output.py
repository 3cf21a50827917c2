"""Where rows go: the local log gets every complete row, the other trackers what was configured.

Only the first rank writes. A tracker that is not installed, raises or hangs loses its own rows and nothing
else; lost rows are counted. The run's other files have lanes too: its folder may hang, and no caller waits
longer than the timeout of `close`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...errors import UsageError, one_line
from ...provenance import library_versions, redacted_data
from ...records import RUN_FILE
from ...trackers.base import Tracker, known
from ...trackers.file import JsonArrayFile
from ...trackers.lane import Lane
from ..config import MonitorConfig
from ..step_note import StepPosition
from .remote_trackers import RemoteTrackers
from .run_file import SIGNALLED, RunFile

_LOCAL_FLUSH_S = 0.5
"""Rows arrive up to nine seconds after their step, and must be on disk within ten."""
_RUN_FILE_S = 5.0
"""For the run file, which is written after all trackers were closed or timed out."""


class Output:
    """The local log and the other trackers, each with its own lane."""

    def __init__(
        self,
        output_dir: Path,
        log_file: str,
        config: MonitorConfig,
        trackers: Sequence[str | Tracker] | None,
        *,
        finish_rows: Callable[[], None],
        close_monitor: Callable[[], None],
        notice: Callable[[str], None],
    ) -> None:
        self._dir, self._config, self._notice = output_dir, config, notice
        self.last_row: Mapping[str, Any] = {}
        self._log = JsonArrayFile(output_dir / _checked_name(log_file, output_dir), notice=notice)
        self._local: Lane | None = None
        self._run_file: Lane | None = None
        self.other_files: list[Lane] = []
        """Lanes of other files in the run's folder, started and used by their owners."""
        self._slow: set[Lane] = set()
        self._describe: Callable[[], Mapping[str, Any]] | None = None
        """The description of the run, until the run file has what is known with the first rows."""
        self._unsaved = 0
        self.rows_queued = 0
        """Rows that every tracker has in its lane; what becomes of them there is the lane's account."""
        self._started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")

        def finish_rows_of(lane: Lane) -> None:
            self._slow.discard(lane)  # the program ends the run that it writes to: wait for it once more
            finish_rows()

        self._remote = RemoteTrackers(
            output_dir,
            config,
            trackers,
            finish_rows_of=finish_rows_of,
            close_monitor=close_monitor,
            notice=notice,
        )

    def put_all(
        self,
        rows: Sequence[dict[str, Any]],
        steps: Sequence[int],
        skip_remote: Sequence[bool],
        detailed: AbstractSet[int],
    ) -> None:
        """Hand finished rows to the trackers, without unknown values; on the row thread.

        Each row represents a number of `steps`. At the `detailed` ones the trackers' details are due.
        """
        rows = [known(row) if None in row.values() else row for row in rows]
        if not rows:
            return
        self.last_row = rows[-1]
        if self._local is not None:
            self._local.put_all([(row["global_step"], row) for row in rows])
            self._unsaved += len(rows)
        if self._remote.lanes:
            for row, number, is_skipped in zip(rows, steps, skip_remote, strict=True):
                position = StepPosition(row["global_step"], number)
                self._remote.put(
                    position, row, is_detailed=position.step in detailed, is_skipped=bool(is_skipped)
                )
        self.rows_queued += len(rows)
        if self._local is not None and self._unsaved >= self._config.save_freq:
            self._unsaved = 0
            self._local.flush()

    def wake(self) -> None:
        """Rows were added: wake the lanes; with the first rows the run's description is written too."""
        if self._run_file is not None and self._describe is not None:
            described = self._describe()
            self._run_file.put(0, {name: described[name] for name in ("batch_shapes", "loader_workers")})
            self._run_file.flush()
            self._describe = None
        for lane in self._lanes():
            lane.wake()

    def flush(self, timeout_s: float) -> None:
        """Wait until every row so far has been handed to its tracker and written.

        A tracker, other than the local log, that was too slow is not waited for again until it has caught up.
        """
        ends_s = time.monotonic() + timeout_s
        for lane in self._lanes():
            if lane.wait_until_idle(0):
                self._slow.discard(lane)
            lane.flush()
        for lane in self._lanes():
            if lane in self._slow or lane.wait_until_idle(max(ends_s - time.monotonic(), 0)):
                continue
            if lane is not self._local:
                self._slow.add(lane)
            self._notice(f"tracker {lane.name} did not accept its rows within {timeout_s:.0f} s")

    def write_local(self, timeout_s: float) -> None:
        """Flush every tracker, and wait for the files in the run's folder only: a signal has come."""
        ends_s = time.monotonic() + timeout_s
        if self._run_file is not None:
            self._run_file.put(0, {SIGNALLED: time.time()})
            self._run_file.flush()
        for lane in self._lanes():
            lane.flush()
        for waited in (self._local, self._run_file):
            if waited is not None:
                waited.wait_until_idle(max(ends_s - time.monotonic(), 0.0))

    def close(self, summarize: Callable[[], Mapping[str, Any]], timeout_s: float) -> None:
        """Finish every tracker, then write the run file with the final summary."""
        ends_s = time.monotonic() + timeout_s
        summary: Mapping[str, Any] = {}
        try:
            summary = redacted_data(summarize())  # trackers' errors may contain a URL with a password
        except Exception as error:  # the rows are finished anyway
            self._notice(f"the trackers get no summary: {one_line(error)}")
        lanes = [*self._lanes(), *self.other_files]
        for lane in lanes:
            lane.ask_to_finish(summary)
        for lane in lanes:
            lane.close(summary, max(ends_s - time.monotonic(), 0))
        if self._run_file is not None:
            self._run_file.close(summarize(), _RUN_FILE_S)

    def lost(self) -> list[str]:
        """Descriptions of what did not reach a tracker or a file, or was removed from it."""
        removed = self._log.rows_removed
        files = [*([self._run_file] if self._run_file is not None else []), *self.other_files]
        return [
            *(
                f"{lane.lost_rows:,} rows of tracker {lane.name}" + (f": {lane.error}" if lane.error else "")
                for lane in self._lanes()
                if lane.lost_rows or lane.error
            ),
            *(
                [f"{removed:,} rows that were in {self._log.path.name}: it was truncated or overwritten"]
                if removed
                else []
            ),
            *(f"the content of {lane.name}: {lane.error}" for lane in files if lane.error),
        ]

    def _lanes(self) -> list[Lane]:
        return [*([self._local] if self._local is not None else []), *self._remote.lanes]

    def start(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        """Open the trackers when the training begins: the W&B tracker must see all that the user logs."""
        self._remote.open()
        self._describe = describe
        run = self._run(describe())
        self._local = Lane(self._log, "file", flush_every_s=_LOCAL_FLUSH_S, notice=self._notice)
        path = self._dir / RUN_FILE
        self._run_file = Lane(RunFile(path, self._log, notice=self._notice), path.name, notice=self._notice)
        for lane in (*self._lanes(), self._run_file):
            lane.start(run)

    def _run(self, run_info: Mapping[str, Any]) -> dict[str, Any]:
        from ... import __version__

        return {
            "truemfu_version": __version__,
            "versions": library_versions(),
            "python": ".".join(map(str, sys.version_info[:3])),
            "started_at": self._started_at,
            "log_file": self._log.path.name,
            **run_info,
        }


def _checked_name(log_file: str, folder: Path) -> str:
    if "\0" in str(folder) or "\0" in log_file:
        raise UsageError("output_dir and log_file must be valid file names: they contain a NUL character")
    if Path(log_file).name == RUN_FILE:
        raise UsageError(f"log_file must not be {RUN_FILE}, which holds the description of the run")
    return log_file
