"""Two writers in one W&B run: the program and the monitor, which logs later and from another thread.

A run has one step counter. A row logged without a step uses and increments the counter; W&B drops a row with
an explicit step below the counter, no matter which writer has advanced it. So:

    no explicit step seen        our rows are logged separately, without a step
    the program logs with        we never advance the counter. Our newest waiting row is merged into each row
    explicit steps               that the program logs at a new step; the remaining ones are written when the
                                 run ends, after the program's last row
    a row of the program is      because of rows we wrote before the first explicit step. W&B would drop it,
    below the counter            so it is written at the counter, with its own step as `truemfu/user_step`

For this, `log` of the open run is replaced by a function that reads the step and calls the original.

Limits:
- The last rule moves a row. It affects programs whose steps advance more slowly than training steps (epochs)
  and whose first explicit step comes after our first rows; all others keep every row at its step.
- If a program uses the name of one of our metrics, `global_step` included, our rows cannot be merged: they
  are written at the end.
- Calls of a `run.log` that the program stored before the monitor started are not seen.
- Waiting rows are lost if the process is killed; the local log has every row.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Any

_USER_STEP = "truemfu/user_step"

# The newest row is held until the next one comes: if a program counts from 0 and the monitor from 1, the
# counter is then not beyond the program's first explicit step.
_HELD_ROWS = 1

# The longest the program waits for a row of ours; W&B takes about a millisecond.
_LONGEST_WAIT_S = 1.0


class SharedRun:
    """The program's run, with its `log` wrapped; rows are dictionaries that contain their own step.

    `before_end` is called when the program ends the run, `at_exit` when the process does: once they return,
    every row should have been logged.
    """

    def __init__(self, run: Any, *, before_end: Callable[[], None], at_exit: Callable[[], None]) -> None:
        self.is_over = False
        self._run = run
        self._before_end, self._at_exit = before_end, at_exit
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[dict[str, Any]] = deque()
        self._is_left = False
        self._has_explicit_steps = False
        self._has_open_row = False
        self._their_counter = run.step
        self._their_keys: set[str] = set()
        self._merged_step = -1
        self._plain_log: Callable[..., None] = run.log
        self._watch()

    def log(self, row: dict[str, Any]) -> int:
        """Write the row, or let it wait; returns how many are waiting."""
        with self._lock:
            self._waiting.append(row)
            if not self._has_explicit_steps and not self._has_open_row:
                while len(self._waiting) > _HELD_ROWS:
                    self._plain_log(self._waiting.popleft())
            return len(self._waiting)

    def finish(self) -> None:
        """There are no further rows; with explicit steps the waiting ones are written at the run's end."""
        with self._lock:
            if not self._has_explicit_steps:
                self._write_waiting()

    def give_up(self) -> list[dict[str, Any]]:
        """Stop using the run; returns the waiting rows."""
        with self._lock:
            rows = list(self._waiting)
            self._waiting.clear()
            self._is_left = True
            return rows

    def _watch(self) -> None:
        import wandb

        module: Any = wandb
        if module.log == self._run.log:
            module.log = self._watched_log
        self._run.log = self._watched_log
        # Called first however a run is finished, `with` included; there is no public API for it.
        hooks = getattr(self._run, "_teardown_hooks", None)
        if hooks is not None:
            hooks.append(SimpleNamespace(call=self._end, stage=1))
        # An unfinished run is closed by W&B's exit hook, registered before this one and so called after it.
        atexit.register(self._end_at_exit)

    def _watched_log(self, data: Any, step: Any = None, commit: bool | None = None, **options: Any) -> None:
        """`run.log` as the program calls it."""
        if os.getpid() != self._pid or self.is_over or self._is_left:
            self._plain_log(data, step, commit, **options)
            return
        has_lock = self._lock.acquire(timeout=_LONGEST_WAIT_S)
        try:
            if has_lock and isinstance(data, Mapping):
                data, step = self._prepare(data, step, commit)
            self._plain_log(data, step, commit, **options)
        finally:
            if has_lock:
                self._lock.release()

    def _prepare(
        self, data: Mapping[str, Any], step: Any, commit: bool | None
    ) -> tuple[Mapping[str, Any], Any]:
        """The program's row and step as they are logged; updates our copy of its counter."""
        self._their_keys |= data.keys()
        at_step = step
        if isinstance(step, Integral):
            self._has_explicit_steps = True
            at = int(step)
            if at >= self._run.step:
                data = self._with_ours(data, at)
            elif at >= self._their_counter:
                self._warn_moved(at)
                data, at_step = {**data, _USER_STEP: at}, None
            else:  # W&B drops it, as it would without the monitor
                return data, step
            self._their_counter = at
        self._has_open_row = at_step is None and commit is False
        if commit or (step is None and commit is None):
            self._their_counter += 1
        return data, at_step

    def _with_ours(self, data: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """The row merged with our newest one, if this step has none yet and no name is used twice."""
        if step <= self._merged_step or not self._waiting or self._their_keys & self._waiting[-1].keys():
            return data
        self._merged_step = step
        return {**data, **self._waiting.pop()}

    def _warn_moved(self, step: int) -> None:
        import wandb

        wandb.termwarn(
            f"truemfu: the monitor's rows have advanced this run to step {self._run.step}, but the program "
            f"logs at step {step}: its row goes to the run's step, its own step is kept as '{_USER_STEP}'",
            repeat=False,
        )

    def _end(self) -> None:
        self._write_rest(self._before_end)

    def _end_at_exit(self) -> None:
        self._write_rest(self._at_exit)

    def _write_rest(self, rows_come: Callable[[], None]) -> None:
        """The run ends: the program logs nothing more, so waiting rows can be written."""
        if self.is_over or self._is_left or os.getpid() != self._pid:
            return
        rows_come()
        with self._lock:
            self._write_waiting()
            self.is_over = True
        atexit.unregister(self._end_at_exit)

    def _write_waiting(self) -> None:
        """Write waiting rows, each at its own step: the row at the counter may be open, with one of ours."""
        step = self._run.step
        while self._waiting:
            step += 1
            self._plain_log(self._waiting.popleft(), step)
