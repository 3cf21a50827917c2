"""FLOPs of a real step from torch.profiler: its recorded operators, our formulas.

    start ──► the caller's own step ──► stop ──► recorded operators ──► formulas ──► FlopCount
       on the training thread, only in C++       on any thread, later

`with_flops` of torch.profiler itself has no formula for attention kernels or grouped products and miscounts
grouped convolutions, so only its recording is used: operators with the sizes, dtypes and numbers they were
called with, on the CPU side, where operators of every device are recorded. Nothing synchronises.

It counts what ran, including compiled code; what it cannot see is named in `uncounted`. It has no values, so
it cannot read attention masks, nor which gradients autograd requested from a fused kernel. Both are stated in
`notes`.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ...convention import Convention
from ...errors import UsageError
from ...torch_private.profiling import start_recording, stop_recording
from ..flop_count import FlopCount
from .recording import Recording

_DEFAULT = Convention()


class StepProfiler:
    """Measures one real step, in two calls, so that the caller runs the step.

    Call `start` and `stop` on the training thread, right before and after the step; put `stop` into a
    `finally`, since the profiler runs until then.
    """

    def __init__(self, convention: Convention = _DEFAULT) -> None:
        self._convention = convention
        self._profile: Any = None
        self._thread = 0
        self._start_s = 0.0

    def start(self) -> None:
        """Start recording; raises UsageError if another profiler is running, which is left alone."""
        began_s = time.perf_counter()
        if self._profile is not None:
            raise UsageError("this StepProfiler is already recording: call stop() before the next start()")
        self._profile, self._thread = start_recording(), threading.get_ident()
        self._start_s = time.perf_counter() - began_s

    def stop(self) -> StepProfile:
        """Stop recording, also after a step that failed; the recording is evaluated later."""
        began_s = time.perf_counter()
        if self._profile is None:
            raise UsageError("this StepProfiler is not recording: call start() before the step")
        if self._thread != threading.get_ident():
            raise UsageError("a StepProfiler must be stopped on the thread it was started on")
        profile, self._profile = self._profile, None
        recording = stop_recording(profile)
        cost_s = self._start_s + time.perf_counter() - began_s
        return StepProfile(recording, self._convention, cost_s)


class StepProfile:
    """The recording of one step; `cost_s` is the training thread's time spent on starting and stopping it."""

    def __init__(self, recording: Any, convention: Convention, cost_s: float) -> None:
        self.cost_s = cost_s
        self._recording: Any = recording
        self._convention = convention
        self._count: FlopCount | None = None

    def count(self) -> FlopCount:
        """The FLOPs of the step, on any thread; the recording is freed as soon as it is read."""
        if self._count is None:
            recording, self._recording = self._recording, None
            self._count = Recording(recording, self._convention).count()
        return self._count
