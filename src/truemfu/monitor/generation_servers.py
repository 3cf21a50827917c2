"""What generation servers do beside a training: MFU, MBU and tokens for its rows and summary.

    every 5 s, a thread for each server: Reading ─► ServerWork in all ──► rows, summary

A thread of its own for each: an answer may take seconds, a name that does not resolve longer, and the row
thread must write all rows within two seconds of a signal. It holds no lock that another thread waits for: it
replaces the work in all, from which a row subtracts what earlier rows had.

FLOPs and bytes are the server's own estimates (vLLM 0.33.0 `v1/metrics/perf.py`, SGLang 0.5.23
`metrics_reporter.py`). vLLM's bytes have each weight once for a step. SGLang's have it once for each token:
they are not what must be read, so there is no MBU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..errors import one_line
from ..hardware.detect import find_spec, override_flops_per_s, spec_of
from ..records import GenerationServer
from ..trackers.wake import Wake
from .server_counters import SGLANG, CannotRead, Reading, ServerSetting, ServerWork, read_server, work_between

READ_EVERY_S = 5.0
_STOP_S = 1.0
_NO_DEVICE = "the server is on another host: give its `device` in monitoring.generation_servers"
_NO_WORK = "the server has done nothing so far"
_NO_ESTIMATE = (
    "the server counts no FLOPs: started without --enable-mfu-metrics, or it has no estimate for its model"
)
_PER_TOKEN = "SGLang's estimate reads all weights once for each token, not once for each step"
_RESTARTED = "the server was restarted: its counters began again"
_ABOVE_ONE = (
    "MFU or MBU is above 1: its `device` or `dtype` is another one, or its own estimate is too high (SGLang "
    "0.5.23 does not divide the MLP by the tensor-parallel size)"
)
_NOT_TWICE = "the server was not read twice"


class _Peaks(NamedTuple):
    """What the device of a server can do, and why that is unknown."""

    device: str | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    why_unknown: str = _NO_DEVICE


class GenerationServers:
    """All servers of a run."""

    def __init__(
        self,
        settings: Sequence[ServerSetting],
        *,
        device: torch.device,
        configured_flops_per_s: float | None,
        notice: Callable[..., None],
    ) -> None:
        self._servers = [
            _Server(number, setting, device, configured_flops_per_s, notice)
            for number, setting in enumerate(settings)
        ]

    def metrics(self) -> dict[str, Any]:
        """For a row: what they did since the last call; on the row thread."""
        return {name: value for server in self._servers for name, value in server.metrics().items()}

    def summary(self) -> list[GenerationServer]:
        """What they did so far."""
        return [server.summary() for server in self._servers]

    def stop(self) -> None:
        """Read all once more. A thread that waits for an answer is left behind: it only reads."""
        for server in self._servers:
            server.ask_to_stop()
        ends_s = time.monotonic() + _STOP_S
        for server in self._servers:
            server.thread.join(max(ends_s - time.monotonic(), 0.0))


class _Server:
    """Read on a thread of its own, asked for figures on others."""

    def __init__(
        self,
        number: int,
        setting: ServerSetting,
        device: torch.device,
        configured_flops_per_s: float | None,
        notice: Callable[..., None],
    ) -> None:
        self._number, self._setting, self._own_device, self._notice = number, setting, device, notice
        self._configured_flops_per_s = configured_flops_per_s
        self._last: Reading | None = None
        self._peaks = _Peaks()
        self._work, self._in_rows = ServerWork(), ServerWork()
        self._fault: str | None = None
        """Of the last reading."""
        self._wake, self._is_stopping = Wake(), False
        self.thread = threading.Thread(target=self._run, name=f"truemfu-server-{number}", daemon=True)
        self.thread.start()

    def ask_to_stop(self) -> None:
        self._is_stopping = True
        self._wake.set()

    def metrics(self) -> dict[str, Any]:
        """The metrics of its work since the last call."""
        fault, work = self._fault, self._work
        new, self._in_rows = work.without(self._in_rows), work
        found: dict[str, Any] = {} if fault is None else {"mfu_unknown": fault}
        if new.seconds > 0:
            found = self._figures(new)
            if max(found.get("mfu", 0.0), found.get("mbu", 0.0)) > 1:
                self._warn(_ABOVE_ONE)
        return {
            f"perf/server/{self._number}/{name}": value for name, value in found.items() if value is not None
        }

    def summary(self) -> GenerationServer:
        """Its work so far."""
        found = self._figures(self._work) if self._work.seconds > 0 else {}
        found.setdefault("mfu_unknown", self._fault or _NOT_TWICE)
        return GenerationServer(
            number=self._number, url=self._setting.url, device=self._peaks.device, **found
        )

    def _figures(self, work: ServerWork) -> dict[str, Any]:
        """The fields of a `GenerationServer` for some work."""
        last, peaks = self._last, self._peaks
        assert last is not None
        found: dict[str, Any] = {
            "time": work.seconds,
            "prompt_tokens": round(work.prompt_tokens),
            "generated_tokens": round(work.generated_tokens),
            "mfu_unknown": None,
        }
        if not work.estimated_s:
            return found | {"mfu_unknown": _NO_ESTIMATE if last.has_worked else _NO_WORK}
        flops_per_s, bytes_per_s = work.flops / work.estimated_s, work.read_bytes / work.estimated_s
        found |= {"method": f"{last.source}'s own estimate", "tflops_per_gpu": flops_per_s / 1e12}
        if peaks.flops_per_s is None:
            found["mfu_unknown"] = peaks.why_unknown
        else:
            found["mfu"] = flops_per_s / peaks.flops_per_s
        if last.source == SGLANG:
            return found | {"mbu_unknown": _PER_TOKEN}
        found["read_bytes_per_gpu"] = work.read_bytes
        if peaks.bytes_per_s is None:
            return found | {"mbu_unknown": peaks.why_unknown}
        return found | {"mbu": bytes_per_s / peaks.bytes_per_s}

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_stopping
            try:
                self._fault = self._read()
            except CannotRead as error:
                self._fault = f"the server cannot be read: {error}"
            except Exception as error:
                self._fault = f"the server cannot be read: {one_line(error)}"
            if self._fault is not None:
                self._warn(self._fault, _RESTARTED if self._fault == _RESTARTED else "cannot be read")
            if not is_last:
                self._wake.wait(READ_EVERY_S)

    def _warn(self, text: str, about: str = "") -> None:
        """Once for each server, and for what it is about."""
        self._notice(
            f"generation server {self._setting.url}: {text}", about=f"{self._number} {about or text}"
        )

    def _read(self) -> str | None:
        """Add what it did since the last reading; why that is unknown, if it is."""
        before, (after, is_here) = self._last, read_server(self._setting.url)
        work = None if before is None else work_between(before, after)
        self._peaks, self._last = self._peaks_of(is_here), after
        if work is not None:
            self._work = self._work.plus(work)
        return _RESTARTED if before is not None and work is None else None

    def _peaks_of(self, is_here: bool) -> _Peaks:
        name, dtype, flops_per_s = self._setting.device, self._setting.dtype, override_flops_per_s()
        if name is None and not is_here:
            return _Peaks()
        if name is None and self._configured_flops_per_s is not None:
            flops_per_s = self._configured_flops_per_s
        spec = spec_of(self._own_device) if name is None else find_spec(name)
        if spec is None:
            device = name or self._own_device.type
            return _Peaks(device, flops_per_s, None, f"the peaks of {device} are not known")
        if flops_per_s is None:
            flops_per_s = spec.peak(dtype or ("fp16" if spec.peak_flops_per_s.bf16 is None else "bf16"))
        why = f"a peak of {spec.name} is not known" + ("" if dtype is None else f" ({dtype})")
        return _Peaks(spec.name, flops_per_s, spec.memory_bandwidth_bytes_per_s, why)
