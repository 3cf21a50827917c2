"""One ordinary step recorded under Kineto, at a quiet moment: the trace that `truemfu explain` reads.

    begin_next_step ─► start ─► a step ─► the step ─► stop, save ─► own thread: gzip ─► the run's folder
                                                                    at the run's end: census.json

Recording begins and ends between steps; that time is excluded from them, as a pause. A step with a new
compilation, a pause or a capture in it is discarded, and another one is recorded later.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path

import torch

from ...census.record import CENSUS_FILE, TRACE_FILE, Census
from ...census.recording import StepRecording
from ...errors import TruemfuError, one_line
from ...records import write_record
from ...torch_private.profiling import is_profiled
from ..watching.compilations import compilations

_FIRST_STEP = 8
_QUIET_STEPS = 3
"""So many steps in a row were not compiled, observed or interrupted."""
_LONGEST_STEP_S = 3.0
"""Longer steps are only recorded on request."""
_LEADING_S = 1.0
"""Of a shorter step, the one before is recorded too."""
_MOST_NODES = 10_000
"""Saving takes about 0.1 ms a kernel (H200, benchmarks/gpu/explain.py), and a node has about three: steps
with more are only recorded on request."""
_LONGEST_S = 10.0
_MOST_TRIES = 3
_JOIN_S = 20.0
_LONGEST_WAIT_S = 3.0
_now_s = time.perf_counter


class _Phase(Enum):
    WAITING, LEADING, RECORDING, DONE = auto(), auto(), auto(), auto()


class CensusStep:
    """On the training thread; raises nothing. `is_due` is whether a run takes one without being asked."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        is_due: bool,
        modules: Callable[[], Mapping[int, str]],
        notice: Callable[[str], None],
    ) -> None:
        self._folder, self._device, self._modules, self._notice = folder, device, modules, notice
        self._phase = _Phase.WAITING if is_due else _Phase.DONE
        self._is_requested = False
        self._recording: StepRecording | None = None
        self._quiet, self._tries, self._compilations = 0, 0, 0
        self._last_s: float | None = None
        self._step_s: float | None = None
        self._nodes, self._began_s = 0, 0.0
        self._writer: threading.Thread | None = None
        self.cost_s = 0.0
        """Of starting, stopping and saving, outside of steps."""
        self.census: Census | None = None
        """Once the run has ended."""

    @property
    def is_recording(self) -> bool:
        """Whether the current step is recorded, so that its time is not representative."""
        return self._recording is not None

    def request(self) -> None:
        """Record a step soon, whatever was recorded before."""
        if self._phase is _Phase.DONE:
            self._phase, self._tries = _Phase.WAITING, 0
        self._is_requested = True

    def wants(self, logged: int, nodes: int | None, *, was_quiet: bool) -> bool:
        """After so many steps, between two: whether there is something to do.

        `nodes` and `was_quiet` are of the last step: the autograd nodes that it made, if that is known.
        """
        self._nodes = nodes or 0
        self._quiet = self._quiet + 1 if was_quiet else 0
        now_s, last_s = _now_s(), self._last_s
        self._last_s, self._step_s = now_s, None if last_s is None else now_s - last_s
        if self._phase is not _Phase.WAITING:
            return self._phase is not _Phase.DONE
        if logged < _FIRST_STEP or self._quiet < _QUIET_STEPS or self._step_s is None:
            return False
        return self._is_requested or (self._step_s < _LONGEST_STEP_S and self._nodes < _MOST_NODES)

    def between_steps(self, logged: int) -> bool:
        """Begin to record, go on to the next step, or end; where `wants` it. Whether that took time."""
        began_s, was_leading = _now_s(), self._phase is _Phase.LEADING
        try:
            if self._phase is _Phase.WAITING:
                self._start(logged + 1)
            elif self._phase is _Phase.LEADING:
                assert self._recording is not None
                self._recording.next_step(logged + 1)
                self._phase = _Phase.RECORDING
            else:
                self._stop()
        except Exception as error:
            self._fail(error)
        self._last_s = _now_s()
        self.cost_s += self._last_s - began_s
        return not was_leading

    def _start(self, number: int) -> None:
        is_cuda = self._device.type == "cuda"
        if is_profiled() or (is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        self._tries += 1
        self._compilations = compilations()
        recording = StepRecording(self._device, self._modules())
        recording.start(number)
        self._recording = recording
        self._began_s = _now_s()
        has_lead = (self._step_s or 0.0) < _LEADING_S and 2 * self._nodes < _MOST_NODES
        self._phase = _Phase.LEADING if has_lead else _Phase.RECORDING

    def _stop(self) -> None:
        recording, self._recording = self._recording, None
        assert recording is not None
        save = recording.stop()
        if compilations() != self._compilations:
            self._try_again()
            return
        self._phase = _Phase.DONE
        is_saved = threading.Event()
        self._writer = threading.Thread(
            target=self._write, args=(save, is_saved), name="truemfu-census", daemon=True
        )
        self._writer.start()
        # Saving holds the GIL: the next step waits for it here, where its time is known.
        is_saved.wait(_LONGEST_WAIT_S)

    def end_if_long(self) -> None:
        """A forward pass begins: steps may have ended without being logged, as before a long evaluation."""
        if self._recording is not None and _now_s() - self._began_s > _LONGEST_S + 5 * (self._step_s or 0.0):
            self.interrupt()

    def interrupt(self) -> None:
        """Code outside of the step runs now: discard what was recorded, and record another step later."""
        self._quiet = 0
        if self._discarded():
            self._try_again()

    def _discarded(self) -> bool:
        """Stop without a trace; whether a step was recorded."""
        recording, self._recording = self._recording, None
        if recording is not None:
            with suppress(Exception):  # whatever it says, there will be no trace
                recording.stop()
        return recording is not None

    def _try_again(self) -> None:
        self._phase, self._quiet = _Phase.WAITING, 0
        if self._tries >= _MOST_TRIES:
            self._phase = _Phase.DONE
            self._notice(f"no census of a step: each of {_MOST_TRIES} was interrupted or compiled something")

    def _fail(self, error: Exception) -> None:
        self._discarded()
        self._phase = _Phase.DONE
        reason = str(error) if isinstance(error, TruemfuError) else one_line(error)
        self._notice(f"no census of a step: {reason}")

    def _write(self, save: Callable[[Path], None], is_saved: threading.Event) -> None:
        """On its own thread: the trace, compressed, in the run's folder."""
        target = self._folder / TRACE_FILE
        temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        plain = None
        try:
            number, name = tempfile.mkstemp(prefix="truemfu-census-", suffix=".json")
            os.close(number)
            save(plain := Path(name))
            is_saved.set()
            self._folder.mkdir(parents=True, exist_ok=True)
            with plain.open("rb") as source, gzip.open(temporary, "wb", compresslevel=4) as packed:
                shutil.copyfileobj(source, packed, 1 << 20)
            os.replace(temporary, target)
        except Exception as error:
            self._notice(f"no census of a step: its trace could not be written ({one_line(error)})")
            temporary.unlink(missing_ok=True)
        finally:
            is_saved.set()
            if plain is not None:
                plain.unlink(missing_ok=True)

    def finish(self, ordinary_step_s: float | None, padding_lost: float | None) -> None:
        """The run has ended: stop, read the trace, and write the census beside it."""
        self._discarded()
        self._phase = _Phase.DONE
        if self._writer is None:
            return
        self._writer.join(_JOIN_S)
        path = self._folder / TRACE_FILE
        if self._writer.is_alive():
            self._notice(f"no census of a step: its trace was not written within {_JOIN_S:.0f} s")
            return
        if not path.is_file():  # its writer has given the reason
            return
        from ...census.census import census_of

        try:
            self.census = census_of(path, ordinary_step_s=ordinary_step_s, padding_lost=padding_lost)
            write_record(self._folder / CENSUS_FILE, self.census)
        except Exception as error:
            reason = str(error) if isinstance(error, TruemfuError) else one_line(error)
            self._notice(f"no census of a step: {reason}")
