"""Records steps of this process under Kineto, with ranges for steps and modules, as a trace for any reader.

    start ─► a step before it, if there is one ─► next_step ─► the step itself ─► stop ─► save

The step before shows where the device was when the step began. Modules get ranges by global hooks of torch
that exist only while this records, and only where nothing was compiled, since compiled code checks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler
from torch.nn.modules import module as torch_modules

from ..torch_private.compiler import has_compiled
from ..torch_private.profiling import start_recording, stop_recording
from .trace import MODULE, STEP


class StepRecording:
    """Lives on the training thread, outside of autograd and of captures; one at a time."""

    def __init__(self, device: torch.device, modules: Mapping[int, str]) -> None:
        self._device, self._modules = device, modules
        self._profile: Any = None
        self._step: Any = None
        self._open: list[tuple[int, Any]] = []
        self._hooks: list[Any] = []

    def start(self, number: int) -> None:
        """Begin to record with the step of this number; UsageError where another profiler is in use."""
        self._profile = start_recording(None if self._device.type == "cpu" else self._device.type)
        if self._modules and not has_compiled():
            self._hooks = [
                torch_modules.register_module_forward_pre_hook(self._module_begins),
                torch_modules.register_module_forward_hook(self._module_ends, always_call=True),
            ]
        self._begin(number)

    def next_step(self, number: int) -> None:
        """One step has ended, the next one begins."""
        self._end()
        self._begin(number)

    def stop(self) -> Callable[[Path], None]:
        """Stop recording, which waits for the device; what writes the trace to a path."""
        self._end()
        for hook in self._hooks:
            hook.remove()
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        profile, self._profile = self._profile, None
        results = stop_recording(profile)
        return lambda path: results.save(str(path))

    def _begin(self, number: int) -> None:
        self._step = torch_profiler.record_function(f"{STEP}{number}")
        self._step.__enter__()

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _module_begins(self, module: torch.nn.Module, _: Any) -> None:
        name = self._modules.get(id(module))
        if name is not None and not torch.compiler.is_compiling():
            named = torch_profiler.record_function(f"{MODULE}{name}")
            named.__enter__()
            self._open.append((id(module), named))

    def _module_ends(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._open and self._open[-1][0] == id(module):
            self._open.pop()[1].__exit__(None, None, None)
