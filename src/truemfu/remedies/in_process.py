"""A process of a trial: applies its remedies, collects losses and evidence, and ends after its steps.

    torch imported ─► switches, arguments ─► step 1 ─► what is applied to models ─► … ─► the last step:
        the monitor writes its rows ─► this rank's result ─► every rank's result is there ─► os._exit(0)

Ending is `os._exit`: no code of the script that would run after training (a final checkpoint, `atexit`,
`finally`) runs after a training that was cut short, and the other ranks are not left waiting, since each has
ended the same step. Workers of loaders are terminated before. A script that ends earlier leaves its result at
its own end, and one that raises leaves the exception.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import one_line
from ..plain_files import make_folder
from ..records import write_record
from ..torch_private.dispatch import hidden_from_modes
from . import at_construction, at_first_pass, at_import
from .at_first_pass import Training
from .collect import Collector, SteppedOptimizers
from .facts import TrialOrder, TrialResult, order_from, result_file

_OTHER_RANKS_S = 15.0
_POLL_S = 0.02


class TrialProcess:
    """One for a process that `truemfu try` has started."""

    def __init__(self, order: TrialOrder) -> None:
        self._order, self._folder, self._pid = order, Path(order.folder), os.getpid()
        self._losses: list[torch.Tensor | None] = []
        self._collector = None if order.remedies else Collector()
        self._optimizers = SteppedOptimizers()
        self._device = torch.device("cpu")
        self._is_written = False

    @classmethod
    def in_environment(cls) -> TrialProcess | None:
        """That of this process, in which torch has just been imported; None outside of a trial."""
        order = order_from(os.environ)
        if order is None:
            return None
        process = cls(order)
        try:
            process._install()
        except Exception as error:
            process._end(1, error)
        return process

    def _install(self) -> None:
        atexit.register(self._at_exit)
        before = sys.excepthook

        def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            with contextlib.suppress(Exception):
                self._write(error=error)
            before(kind, error, trace)

        sys.excepthook = note
        if self._collector is not None:
            self._collector.install()
        self._apply([at_import.APPLY, at_construction.APPLY])

    def _apply(self, tables: Sequence[dict[str, Callable[..., None]]], *given: Any) -> None:
        """Apply what these tables have."""
        for table in tables:
            for name, option in self._order.remedies.items():
                if name in table:
                    table[name](*given, option)

    def kept(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """Note the loss of the step that ends; a copy of it, since a CUDA graph overwrites its own."""
        with hidden_from_modes():
            copy = None if loss is None else loss.clone()
        self._losses.append(copy)
        return copy

    def step_ended(self, modules: Sequence[nn.Module], close_monitor: Callable[[], None]) -> None:
        """A step was logged, in which these modules were called."""
        try:
            self._step_ended(modules, close_monitor)
        except Exception as error:
            self._end(1, error)

    def fail(self, why: str) -> None:
        """The process cannot be measured."""
        self._end(1, RuntimeError(why))

    def _step_ended(self, modules: Sequence[nn.Module], close_monitor: Callable[[], None]) -> None:
        steps = len(self._losses)
        if steps == 1:
            self._first_step_ended(modules)
        if steps == self._order.warm_up_steps and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        if steps == self._order.all_steps:
            close_monitor()
            self._end(0)

    def _first_step_ended(self, modules: Sequence[nn.Module]) -> None:
        devices = [p.device for module in modules for p in module.parameters()]
        self._device = next(iter(devices), self._device)
        training = Training(modules=modules, optimizers=self._optimizers.take(), device=self._device)
        if self._collector is not None:
            self._collector.first_step_ended(training)
        elif not modules and any(name in at_first_pass.APPLY for name in self._order.remedies):
            self.fail("the step calls no model that was found")
        self._apply([at_first_pass.APPLY], training)

    def _end(self, code: int, error: Exception | None = None) -> None:
        try:
            self._write(error=error)
        except Exception as second:
            sys.stderr.write(f"truemfu: no result could be written: {one_line(second)}\n")
        if error is None:
            self._await_other_ranks()
        for child in multiprocessing.active_children():
            child.terminate()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)

    def _await_other_ranks(self) -> None:
        """Until each rank has its result: the launcher ends the others when one has failed."""
        until = time.monotonic() + _OTHER_RANKS_S
        files = [result_file(self._folder, rank) for rank in range(_rank_and_world()[1])]
        while not all(file.exists() for file in files) and time.monotonic() < until:
            time.sleep(_POLL_S)

    def _at_exit(self) -> None:
        """The script ends by itself: its result, if it has trained."""
        if self._losses and os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                self._write()

    def _write(self, error: BaseException | None = None) -> None:
        """This rank's result, once."""
        rank, world_size = _rank_and_world()
        file = result_file(self._folder, rank)
        if self._is_written or file.exists():
            return
        self._is_written = True
        if error is None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        make_folder(self._folder)
        has_evidence = error is None and self._collector is not None and rank == 0
        losses = [] if error is not None else [None if loss is None else float(loss) for loss in self._losses]
        finite = [loss if loss is not None and math.isfinite(loss) else None for loss in losses]
        result = TrialResult(
            rank=rank,
            world_size=world_size,
            steps=len(self._losses),
            losses=finite,
            non_finite_losses=finite.count(None) - losses.count(None),
            peak_memory_bytes=None if error is not None else self._peak_memory_bytes(),
            evidence=self._collector.evidence() if has_evidence and self._collector else None,
            error=None if error is None else _cause(error),
            is_out_of_memory=isinstance(error, (torch.OutOfMemoryError, MemoryError)),
            is_complete=error is None and len(self._losses) >= self._order.all_steps,
        )
        write_record(file, result)

    def _peak_memory_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cause(error: BaseException) -> str:
    return str(error) if type(error) is RuntimeError and not error.__traceback__ else one_line(error)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
