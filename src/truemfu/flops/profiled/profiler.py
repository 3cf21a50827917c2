"""FLOPs of a real step by torch.profiler: its operators, our formulas.

    start ──► the caller's own step ──► stop ──► recorded operators ──► formulas ──► FlopCount
       on the training thread, C++ alone         anywhere, later

`with_flops` of torch.profiler itself knows no attention kernel, no grouped product and miscounts grouped
convolutions, so only its recording is used: operators with the sizes, dtypes and numbers they were called
with, on the CPU side, which is where operators of every device are recorded. Nothing synchronises.

What it sees is what ran, compiled code included; what it cannot see it names in `uncounted`. It does not see
values, so it can read no attention mask, and it does not see which gradients autograd asked of a fused
kernel. Both are said in `notes`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler as torch_profiler

from ...convention import Convention
from ...errors import UsageError
from ...torch_private.profiling import after_failed_start, is_profiler_in_use
from ..flop_count import FlopCount
from .recording import read_recording

_DEFAULT = Convention()


class StepProfiler:
    """Measures one real step, in two halves, so that the caller owns the step.

    `start` and `stop` belong on the training thread, right before and after the step; `stop` belongs into
    a `finally`, for until then the profiler runs.
    """

    def __init__(self, convention: Convention = _DEFAULT) -> None:
        self._convention = convention
        self._profile: Any = None
        self._thread = 0
        self._start_s = 0.0

    def start(self) -> None:
        """Begin to record; UsageError where a profiler is running already, which is left alone."""
        began_s = time.perf_counter()
        if self._profile is not None:
            raise UsageError("this StepProfiler is recording already: call stop() before the next start()")
        if is_profiler_in_use():
            raise UsageError(
                "another torch.profiler is set up or recording in this process, and two at once cannot: "
                "measure a step outside of its `with` block"
            )
        profile = torch_profiler.profile(use_cpu=True, record_shapes=True, use_kineto=True)
        try:
            profile.__enter__()
        except RuntimeError as error:
            after_failed_start()
            raise UsageError(f"torch.profiler cannot record here: {error}") from error
        self._profile, self._thread = profile, threading.get_ident()
        self._start_s = time.perf_counter() - began_s

    def stop(self) -> StepProfile:
        """End the recording, also after a step that failed; what it holds is worked out later."""
        began_s = time.perf_counter()
        if self._profile is None:
            raise UsageError("this StepProfiler is not recording: call start() before the step")
        if self._thread != threading.get_ident():
            raise UsageError("a StepProfiler must be stopped on the thread it was started on")
        profile, self._profile = self._profile, None
        try:
            profile.__exit__(None, None, None)
        except RuntimeError as error:
            raise UsageError(f"the recording was ended by somebody else: {error}") from error
        cost_s = self._start_s + time.perf_counter() - began_s
        return StepProfile(profile.kineto_results, self._convention, cost_s)


class StepProfile:
    """What was recorded of one step; `cost_s` is what recording took from the training thread beside it."""

    def __init__(self, recording: Any, convention: Convention, cost_s: float) -> None:
        self.cost_s = cost_s
        self._recording: Any = recording
        self._convention = convention
        self._count: FlopCount | None = None

    def count(self) -> FlopCount:
        """The FLOPs of the step, on any thread; the recording is dropped as soon as it is read."""
        if self._count is None:
            recording, self._recording = self._recording, None
            self._count = read_recording(recording, self._convention)
        return self._count


def profile_step(
    fn: Callable[..., Any], *args: Any, convention: Convention = _DEFAULT, **kwargs: Any
) -> FlopCount:
    """FLOPs that `fn(*args, **kwargs)` executes, run for real, once, with all its effects, and recorded."""
    if not callable(fn):
        raise UsageError(f"profile_step takes a callable and its arguments; got {type(fn).__name__}")
    profiler = StepProfiler(convention)
    profiler.start()
    try:
        fn(*args, **kwargs)
    finally:
        profile = profiler.stop()
    return profile.count()
