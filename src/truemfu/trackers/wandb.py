"""Weights & Biases: logs to the open run, or to a new one.

Our metrics have the training step as their x axis, logged as `global_step`; W&B's own step counter, which the
program may use freely, has no meaning for them. `wandb_shared.py` explains how two writers share one counter
without losing a row.

A run created here (project "truemfu", under the output folder) does not become `wandb.run`, so a program that
opens its run later gets its own. Without a login it is stored offline; `wandb sync` uploads it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .base import Names, known, writable
from .wandb_shared import SharedRun

_STEP = "global_step"

# Rows written when the program ends its run, at about a millisecond each: a few seconds at most.
_MAX_WAITING = 5_000


class WandbTracker:
    """Logs to `wandb.run` if there is one, else to a new run.

    `before_end` is called when the program ends its run with the monitor still open: it should return once
    all pending rows have been logged. `at_exit`, if set, is called instead when the process ends, before
    W&B's own exit hook: it may close the monitor, which then calls `finish`.
    """

    def __init__(self, output_dir: Path) -> None:
        self.before_end: Callable[[], None] = lambda: None
        self.at_exit: Callable[[], None] = lambda: self.before_end()
        self._pid = os.getpid()
        self._is_exiting = self._is_over = False
        self._dir = output_dir
        self._run: Any = None
        self._shared: SharedRun | None = None
        self._config: dict[str, Any] = {}
        self._names = Names(_clean)
        self._defined: set[str] = set()

    def start(self, run: Mapping[str, Any]) -> None:
        """Find the open run or start one; the description of the run goes to its configuration."""
        import wandb

        self._config = {"truemfu": dict(run)}
        if wandb.run is None:
            self._open(project="truemfu")
        else:
            self._run = wandb.run
            self._shared = SharedRun(
                wandb.run, before_end=lambda: self.before_end(), at_exit=lambda: self.at_exit()
            )
        self._run.config.update(self._config, allow_val_change=True)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write a row, or hold it until it can be written without losing rows of the program."""
        row = {self._names(key): value for key, value in {_STEP: step, **known(metrics)}.items()}
        if self._is_over:
            raise RuntimeError("the run was already closed when the process ended")
        if self._shared is None:
            self._define(row)
            self._run.log(row)
        elif self._shared.is_over:
            raise RuntimeError("the program finished its W&B run before the monitor; close the monitor first")
        else:
            self._define(row)
            if self._shared.log(row) > _MAX_WAITING:
                self._move_to_second_run()

    def flush(self) -> None:
        """Nothing to do: W&B writes rows itself."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close a run created here; rows waiting in the program's run are written when it ends."""
        if self._is_over or (self._shared is not None and self._shared.is_over):
            return
        self._run.summary.update({"truemfu": dict(summary)})
        if self._shared is not None:
            self._shared.finish()
        elif not self._is_exiting:
            atexit.unregister(self._end_at_exit)
            self._run.finish()

    def _end_at_exit(self) -> None:
        """The process ends with our run open: W&B, which knows the exit status, closes it after this."""
        if os.getpid() == self._pid:
            self._is_exiting = True
            self.at_exit()
            self._is_over = True

    def _define(self, row: Mapping[str, Any]) -> None:
        """Set the x axis of each metric: a pattern would change the program's own metrics too."""
        for key in row.keys() - self._defined:
            self._run.define_metric(key, step_metric=None if key == _STEP else _STEP)
            self._defined.add(key)

    def _open(self, **where: Any) -> None:
        import wandb

        self._dir.mkdir(parents=True, exist_ok=True)
        if "mode" not in where and "WANDB_MODE" not in os.environ and not _is_logged_in():
            wandb.termlog(f"truemfu: not logged in, the run is stored offline under {self._dir}")
            where["mode"] = "offline"
        # W&B's exit hook is registered with its service. Ours is registered after it, so called before it;
        # the monitor's is older and would be called too late.
        wandb.setup()
        atexit.register(self._end_at_exit)
        self._run = wandb.init(
            dir=str(self._dir),
            reinit="create_new",
            config=self._config,
            settings=wandb.Settings(x_disable_meta=True),  # it would include the command line with secrets
            **where,
        )
        # A later `wandb.init` of the program would otherwise return our run, the newest active one.
        session: Any = getattr(self._run, "_wl", None)
        if hasattr(session, "remove_active_run"):
            session.remove_active_run(self._run)
        self._shared = None
        self._defined.clear()

    def _move_to_second_run(self) -> None:
        import wandb

        assert self._shared is not None
        shared, theirs = self._shared, self._run
        name = theirs.name or theirs.id
        wandb.termwarn(
            f"truemfu: this program logs with explicit steps, and {_MAX_WAITING:,} rows are waiting for the "
            f"next step; these and all later rows go to a second run, '{name}-truemfu'",
            repeat=False,
        )
        self._open(
            project=theirs.project,
            entity=theirs.entity or None,
            group=theirs.group or None,
            name=f"{name}-truemfu",
            job_type="truemfu",
            mode="offline" if theirs.offline else "online",
        )
        for row in shared.give_up():
            self._define(row)
            self._run.log(row)


def _clean(name: str) -> str:
    """A name W&B accepts: a star is a wildcard there."""
    return writable(name).replace("*", "_")


def _is_logged_in() -> bool:
    """Whether W&B has a login; checked so that it never prompts on the terminal from this thread."""
    import wandb

    try:
        return bool(wandb.login(prompt=False))
    except TypeError:  # older versions have no `prompt`; they decide themselves
        return True
