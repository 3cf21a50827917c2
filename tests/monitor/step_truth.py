"""What each step of a program really executes: a dispatch mode of the tests, with formulas of its own.

The referee of the monitor, so it shares nothing with it. A program runs twice, each time from the same seed:
once under `Truth`, once with a monitor. Outside of backward grad mode decides nothing: the program itself
says, with `apart()`, which pass is one without gradients. `higher_order()` is a backward pass that is itself
differentiated, where grad mode does not tell recomputation from backward.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

TOLERANCE = 1e-6
"""Relative: a row holds FLOP/s and seconds, whose product is rounded in its last digits alone."""


_REASON = re.compile("MFU|FLOPs|count|different work")
"""What a note that explains an unknown or changed figure speaks of; others are about time and data."""


class Work:
    """FLOPs of one step."""

    def __init__(self) -> None:
        self.forward = self.backward = self.recompute = 0

    @property
    def model_flops(self) -> int:
        return self.forward + self.backward


def _product(a: Tensor, b: Tensor) -> int:
    """2·M·K·N, or for a sparse operand 2 for each stored element and column of the other."""
    for one, width in ((a, b.shape[-1]), (b, a.shape[0])):
        if one.layout is torch.sparse_coo:
            return 2 * int(one._nnz()) * width
        if one.layout is not torch.strided:
            return 2 * int(one.values().numel()) * width
    return 2 * prod(a.shape) * b.shape[-1]


def _grouped(a: Tensor, b: Tensor) -> int:
    """Rows sorted by group times a matrix for each; or the gradient of those matrices, a sum over rows."""
    return 2 * prod(a.shape) * b.shape[-1]


def _convolution(x: Tensor, weight: Tensor, output: Tensor, *, transposed: bool) -> int:
    """Each output element is a sum over weight[0]; a transposed one scatters each input element over it."""
    return 2 * (x if transposed else output).numel() * weight[0].numel()


def _flops(name: str, args: tuple[Any, ...], output: Any) -> tuple[int, int]:
    """Of one operator: what the model needs, and what its kernel executes beyond that."""
    if name in ("mm", "bmm"):
        return _product(args[0], args[1]), 0
    if name in ("addmm", "baddbmm", "_sparse_addmm"):
        return _product(args[1], args[2]), 0
    if name in ("mv", "dot"):
        return 2 * args[0].numel(), 0
    if name == "_grouped_mm":
        return _grouped(args[0], args[1]), 0
    if name == "convolution":
        return _convolution(args[0], args[1], output, transposed=args[6]), 0
    if name == "convolution_backward":
        once = _convolution(args[1], args[2], args[0], transposed=args[7])
        return once * (args[10][0] + args[10][1]), 0
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        q, k, v = args[:3]
        return 2 * prod(q.shape[:3]) * k.shape[2] * (q.shape[3] + v.shape[3]), 0
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        q, k, v = args[1:4]
        pairs = 2 * prod(q.shape[:3]) * k.shape[2]
        return 2 * pairs * (q.shape[3] + v.shape[3]), pairs * q.shape[3]
    return 0, 0


class Truth(TorchDispatchMode):
    """Adds up what runs on this thread from one `log` to the next; also the `run` a program gets."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Work] = []
        self._now = Work()
        self._is_apart = self._is_higher_order = False
        self._expected: int | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        flops, beyond = _flops(func._opname, args, output)
        if self._is_apart or not flops:
            return output
        is_backward = torch._C._current_graph_task_id() != -1
        if not is_backward:
            self._now.forward += flops
        elif torch.is_grad_enabled() and not self._is_higher_order:
            self._now.recompute += flops
        else:
            self._now.backward += flops
        self._now.recompute += beyond
        return output

    def watch(self, model: nn.Module) -> None:
        """Steps begin here: what was run before belongs to none."""
        self._now = Work()

    def log(self, loss: Tensor | float = 0.0) -> None:
        if self._expected is not None:
            self._now = Work()
            self._now.forward, self._expected = self._expected, None
        self.steps.append(self._now)
        self._now = Work()

    def expect(self, flops: int) -> None:
        """The model FLOPs of this step by hand, where operators do not tell them."""
        self._expected = flops

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        self._is_apart = True
        with torch.no_grad():
            yield
        self._is_apart = False

    @contextlib.contextmanager
    def higher_order(self) -> Iterator[None]:
        self._is_higher_order = True
        yield
        self._is_higher_order = False


class Monitored:
    """The same program with a monitor: the `run` it gets then."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._step = folder, 0
        self._monitor: Any = None

    def watch(self, model: nn.Module) -> None:
        from truemfu import TrainingMonitor

        self._monitor = TrainingMonitor(self._folder, {"monitoring": {"peak_tflops": 1}}, model=model)

    def log(self, loss: Tensor | float = 0.0) -> None:
        self._step += 1
        self._monitor.log_step(self._step, 0, loss, 1.0, 1e-3)

    def expect(self, flops: int) -> None:
        pass

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @contextlib.contextmanager
    def higher_order(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self._monitor.save_logs()
        self._monitor.close()


@dataclass
class Verdict:
    """The rows of a monitored run, each against the step it speaks of."""

    exact: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    """Without FLOPs."""
    stale: list[int] = field(default_factory=list)
    """Another count than the truth, between a change of the work and the next observation, and named."""
    wrong: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step → (logged, true)."""
    reasons: list[str] = field(default_factory=list)
    """All that the summary says about unknown figures and changes."""

    def __str__(self) -> str:
        counts = (
            f"{len(self.exact)} exact, {len(self.unknown)} unknown, {len(self.stale)} stale, "
            f"{len(self.wrong)} wrong"
        )
        ratios = ", ".join(f"step {n}: × {a / b if b else 0:.4g}" for n, (a, b) in self.wrong.items())
        return f"{counts}; {ratios or 'no row is wrong'}; {self.reasons}"


def true_steps(program: Callable[[Any], None]) -> list[Work]:
    """Every step of a program, by the operators it runs."""
    torch.manual_seed(0)
    truth = Truth()
    with truth:
        program(truth)
    return truth.steps


def judge(program: Callable[[Any], None], folder: Path, *, changes: bool = False) -> Verdict:
    """Run a program under the truth, then monitored. `changes`: its work changes while its batches do not."""
    true = true_steps(program)
    torch.manual_seed(0)
    run = Monitored(folder)
    program(run)
    run.close()
    rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text("utf-8"))
    summary = json.loads((folder / "training_run.json").read_text("utf-8"))["summary"]
    found = Verdict(reasons=[t for t in (*summary["notes"], *summary["warnings"]) if _REASON.search(t)])
    assert [row["global_step"] for row in rows] == list(range(1, len(true) + 1)), "a row is missing"
    names_a_change = any("different work" in text or "changed" in text for text in found.reasons)
    for row, work in zip(rows, true, strict=True):
        step, rate = row["global_step"], row.get("perf/tflops_per_gpu")
        if rate is None:
            found.unknown.append(step)
            assert row["perf/mfu_unknown"], "an unknown row says why"
            found.reasons.append(row["perf/mfu_unknown"])
            continue
        logged = round(rate * row["perf/step_time"] * 1e12)
        if abs(logged - work.model_flops) <= TOLERANCE * work.model_flops:
            found.exact.append(step)
        elif changes and names_a_change and not row.get("perf/observed"):
            found.stale.append(step)
        else:
            found.wrong[step] = logged, work.model_flops
    return found
