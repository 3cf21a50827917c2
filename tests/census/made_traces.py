"""Traces as Kineto writes them, of programs that tests describe: operators, launches, kernels on streams."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_109_880_320, "numSms": 132}
_FLOATS = {"bf16": "c10::BFloat16", "fp32": "float", "fp16": "c10::Half", "int64": "long int"}


class MadeTrace:
    """A program on one thread of the host; times are in microseconds.

    trace = MadeTrace()
    with trace.step(7):
        with trace.operator("aten::mm", [[8, 8], [8, 8]]):
            trace.launch("nvjet_tst_128x256", lasts=40)
    """

    def __init__(self, *, device: dict[str, Any] | None = H200, shapes: bool = True) -> None:
        self.now = 1_000_000.0
        self.events: list[dict[str, Any]] = []
        self.free: dict[tuple[int, int], float] = {}
        self._device, self._shapes = device, shapes
        self._numbers = itertools.count(1)
        self._open: list[dict[str, Any]] = []
        self.thread = 100

    def range(self, name: str, category: str = "user_annotation", **args: Any) -> _Range:
        return _Range(self, name, category, args)

    def step(self, number: int) -> _Range:
        return self.range(f"ProfilerStep#{number}")

    def operator(
        self,
        name: str,
        dims: Sequence[Any] = (),
        dtype: str = "bf16",
        *,
        sequence: int | None = None,
        concrete: Sequence[str] | None = None,
        types: Sequence[str] | None = None,
    ) -> _Range:
        """An operator; dimensions of its arguments, [] for those that are no tensors with a size."""
        args: dict[str, Any] = {}
        if sequence is not None:
            args["Sequence number"] = sequence
        if self._shapes and dims:
            args["Input Dims"] = list(dims)
            args["Input type"] = list(types or [_FLOATS[dtype] if d else "Scalar" for d in dims])
            args["Concrete Inputs"] = list(concrete or ["" for _ in dims])
        return self.range(name, "cpu_op", **args)

    def node(self, name: str, sequence: int) -> _Range:
        """The evaluation of an autograd node."""
        full = f"autograd::engine::evaluate_function: {name}"
        return self.range(full, "cpu_op", **{"Sequence number": sequence, "Fwd thread id": 1})

    def launch(
        self,
        name: str,
        *,
        lasts: float,
        stream: int = 7,
        device: int = 0,
        category: str = "kernel",
        call: str = "cudaLaunchKernel",
        linked: bool = True,
        **args: Any,
    ) -> dict[str, Any]:
        """Launch a kernel, which begins as soon as it is launched and its stream is free."""
        correlation = next(self._numbers)
        self._add(call, "cuda_runtime", self.now, 2.0, tid=self.thread, args={"correlation": correlation})
        self.now += 2.0
        start = max(self.now + 1.0, self.free.get((device, stream), 0.0))
        self.free[device, stream] = start + lasts
        about: dict[str, Any] = {"device": device, "stream": stream, "correlation": correlation, **args}
        if linked and self._open:
            about["External id"] = self._open[-1]["args"].get("External id", 0)
        return self._add(name, category, start, lasts, pid=device, tid=stream, args=about)

    def wait(self, microseconds: float) -> None:
        """The host does something else."""
        self.now += microseconds

    def synchronize(self) -> None:
        self.now = max([self.now, *self.free.values()])

    def _add(self, name: str, category: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
        event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "ts": round(ts, 3),
            "dur": round(dur, 3),
            **more,
        }
        self.events.append(event)
        return event

    def text(self) -> str:
        header = {"schemaVersion": 1, "deviceProperties": [self._device] if self._device else []}
        lines = ",\n".join(json.dumps(event) for event in self.events)
        return f'{json.dumps(header)[:-1]},\n"traceEvents": [\n{lines}\n], "traceName": "made"}}\n'

    def write(self, path: Path) -> Path:
        data = self.text().encode()
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
        return path


class _Range:
    """A range of the host, entered and left."""

    def __init__(self, trace: MadeTrace, name: str, category: str, args: dict[str, Any]) -> None:
        self._trace = trace
        self._event = {
            "ph": "X",
            "cat": category,
            "name": name,
            "pid": 1,
            "args": {"External id": next(trace._numbers), **args},
        }

    def __enter__(self) -> MadeTrace:
        trace = self._trace
        self._event |= {"ts": round(trace.now, 3), "tid": trace.thread}
        trace.now += 1.0
        trace.events.append(self._event)
        trace._open.append(self._event)
        return trace

    def __exit__(self, *_: object) -> None:
        trace = self._trace
        trace.now += 1.0
        self._event["dur"] = round(trace.now - self._event["ts"], 3)
        trace._open.pop()


def training_step(trace: MadeTrace, number: int, *, layers: int = 2, host_us: float = 0.0) -> None:
    """A step of a small transformer's kernels, as torch 2.11 launches them on a Hopper GPU."""
    sequence = itertools.count(10 * number)
    made: list[tuple[str, int, str]] = []
    with trace.step(number):
        for layer in range(layers):
            with trace.range(f"nn.Module: layers.{layer}.mlp"):
                number_of = next(sequence)
                made.append(("MmBackward0", number_of, "aten::mm"))
                with trace.operator("aten::mm", [[4096, 2048], [2048, 8192]], sequence=number_of):
                    trace.launch("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNN", lasts=250)
                number_of = next(sequence)
                made.append(("MulBackward0", number_of, "aten::mul"))
                with trace.operator("aten::mul", [[4096, 8192], [4096, 8192]], sequence=number_of):
                    trace.launch("void at::native::elementwise_kernel<128, 4>", lasts=60)
                trace.wait(host_us)
        for name, number_of, operator in reversed(made):
            with trace.node(name, number_of), trace.operator(name, [[4096, 8192]], sequence=number_of):
                backward = [[4096, 8192], [8192, 2048] if operator == "aten::mm" else [4096, 8192]]
                with trace.operator(operator, backward):
                    kernel = "nvjet_tst_256x128" if operator == "aten::mm" else "elementwise_kernel"
                    trace.launch(kernel, lasts=200)
        with trace.range("Optimizer.step#AdamW.step"):
            lists = [[[2048, 8192]], [[2048, 8192]], [[2048, 8192]], []]
            types = ["TensorList", "TensorList", "TensorList", "ScalarList"]
            with trace.operator("aten::_foreach_addcdiv_", lists, types=types):
                trace.launch("multi_tensor_apply_kernel<FunctorMetadata>", lasts=120)


def kernels_of(trace: MadeTrace) -> Iterator[dict[str, Any]]:
    yield from (event for event in trace.events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"))
