"""Two writers in one W&B run: the program, and us, late and from another thread.

A run has one step counter. A row logged without a step takes the counter's and moves it on by one; a row
logged with an explicit step below the counter is dropped by W&B, whoever moved it there. So:

    no explicit step seen        our rows are rows of their own, without a step
    the program logs with        we never move the counter. Each row the program logs at a new step takes our
    explicit steps               newest waiting row along; what still waits is written when the run ends,
                                 behind the program's last row
    a row of the program lies    because of rows we wrote before we knew. W&B would drop it: it is written at
    below the counter            the counter instead, with the step it was meant for as `truemfu/user_step`

To know all this, `log` of the open run is replaced by a function that looks at the step and calls the
original.

Limits:
- The last rule moves a row. It is for programs whose steps run slower than training steps (epochs) and whose
  first explicit step comes after our first rows; all others keep every row where they put it.
- A program that uses the name of one of our metrics, `global_step` too, cannot take our rows along: they wait
  for the end.
- A program that kept `run.log` from before we came is not seen.
- A process that is killed takes what waits with it; the local log has every row.
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

# The newest row is held back until the next one comes: a program that counts from 0 where the monitor counts
# from 1 then finds the counter no further than its own first explicit step.
_HELD_BACK = 1

# The program never waits longer for one row of ours; W&B takes about a millisecond.
_LONGEST_WAIT_S = 1.0


class SharedRun:
    """The program's run, with its `log` watched; rows are plain dictionaries that hold their own step.

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
        self._ridden_step = -1
        self._plain_log: Callable[..., None] = run.log
        self._watch()

    def log(self, row: dict[str, Any]) -> int:
        """Write the row, or let it wait; how many wait now."""
        with self._lock:
            self._waiting.append(row)
            if not self._has_explicit_steps and not self._has_open_row:
                while len(self._waiting) > _HELD_BACK:
                    self._plain_log(self._waiting.popleft())
            return len(self._waiting)

    def finish(self) -> None:
        """No row comes any more; with explicit steps the rest waits for the run's end."""
        with self._lock:
            if not self._has_explicit_steps:
                self._write_behind()

    def give_up(self) -> list[dict[str, Any]]:
        """Leave the run alone from here on; the rows that wait."""
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
        # Called first in every way a run can be finished, `with` included; there is no public name for it.
        hooks = getattr(self._run, "_teardown_hooks", None)
        if hooks is not None:
            hooks.append(SimpleNamespace(call=self._end, stage=1))
        # A run nobody finishes is closed by W&B's exit hook, set before this one and so called after it.
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
        """The program's row as it is to be logged, and our picture of its counter brought up to date."""
        self._their_keys |= data.keys()
        at_step = step
        if isinstance(step, Integral):
            self._has_explicit_steps = True
            at = int(step)
            if at >= self._run.step:
                data = self._with_ours(data, at)
            elif at >= self._their_counter:
                self._tell_moved(at)
                data, at_step = {**data, _USER_STEP: at}, None
            else:  # W&B drops it, as it would without us, and its counter stays where it is
                return data, step
            self._their_counter = at
        self._has_open_row = at_step is None and commit is False
        if commit or (step is None and commit is None):
            self._their_counter += 1
        return data, at_step

    def _with_ours(self, data: Mapping[str, Any], step: int) -> Mapping[str, Any]:
        """The row with our newest one, if this step has none yet and no name is used twice."""
        if step <= self._ridden_step or not self._waiting or self._their_keys & self._waiting[-1].keys():
            return data
        self._ridden_step = step
        return {**data, **self._waiting.pop()}

    def _tell_moved(self, step: int) -> None:
        import wandb

        wandb.termwarn(
            f"truemfu: rows of the monitor have brought this run to step {self._run.step}, and the program "
            f"logs at step {step}; its row is kept at the run's step, with its own as '{_USER_STEP}'",
            repeat=False,
        )

    def _end(self) -> None:
        self._write_rest(self._before_end)

    def _end_at_exit(self) -> None:
        self._write_rest(self._at_exit)

    def _write_rest(self, rows_come: Callable[[], None]) -> None:
        """The run ends: nothing of the program's can come after, so what waits may be written."""
        if self.is_over or self._is_left or os.getpid() != self._pid:
            return
        rows_come()
        with self._lock:
            self._write_behind()
            self.is_over = True
        atexit.unregister(self._end_at_exit)

    def _write_behind(self) -> None:
        """All that waits, each at a step of its own: the row at the counter may be open, with one of ours."""
        step = self._run.step
        while self._waiting:
            step += 1
            self._plain_log(self._waiting.popleft(), step)
