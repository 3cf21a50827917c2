"""The monitor on a real GPU: what it costs, that it never waits, and that its MFU is right.

Why: "free to leave on" is a claim about a real run. For the 1.3 B reference model at each shape it prints
  start-up    how much longer the observed steps take (the first two), plain steps before and after them,
              and that observing adds no waiting call
  overhead    monitor on against off, in alternating blocks over at least 2,000 monitored steps with the
              default settings: the median of the pairs' differences, a 95 % interval from resampling the
              pairs, and the spread; the median step on against the median step off, likewise. Steps that
              the log marks as observed are left out, and their number is printed. With --pairs single steps
              take turns instead of blocks, for runs that wait for the host, whose speed wanders
  by the clock  what the model's call takes more until its forward pass begins, what log_step takes, and the
              processor time of the monitor's threads, which share Python's lock with the training
  waiting     synchronising calls and blocking copies in a Kineto trace of the same steps, off and on, and a
              run under torch.cuda.set_sync_debug_mode("error")
  truth       the MFU it logs against count ÷ (time between CUDA events × peak) by hand
Ends with one line of JSON; exits 1 where a check failed.

    python benchmarks/gpu/monitor.py [--shapes 4x512 8x1024] [--compile [MODE]] [--llama] [--mask]
                                     [--pairs] [--parts start-up waiting truth cost]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

import truemfu
from truemfu import TrainingMonitor, count_flops, get_gpu_peak_flops
from truemfu.sweep.worker.models import build_reference_model, parameter_count
from truemfu.torch_private.watching import CALL

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

LEAD_IN_STEPS = 3
ON_STEPS = 64
STEPS_AHEAD = 3
COST_STEPS = 120
COST_ROUNDS = 2
LIMIT = 0.0005
FEWEST_PAIRS = 20
"""From which an interval tells anything."""
START_UP_STEPS = 30
OBSERVED_AT_FIRST = [1, 2, 10, 24]
"""The steps of a run of `START_UP_STEPS` equal batches that are observed."""
TRUTH_STEPS = 50
PARTS = ("start-up", "waiting", "truth", "cost")
WAITING = (
    "Synchronize",
    "cudaMemcpy",
    "cudaEventQuery",
    "cudaStreamQuery",
    "cudaFree",
    "cudaHostAlloc",
    "cudaMalloc",
)


class Training:
    """The run that is measured."""

    def __init__(self, samples: int, length: int, *, llama: bool, masked: bool, compiled: str | None) -> None:
        torch.manual_seed(0)
        if llama:
            from transformers import LlamaConfig, LlamaForCausalLM

            config = LlamaConfig(
                hidden_size=2048,
                intermediate_size=5504,
                num_hidden_layers=24,
                num_attention_heads=32,
                vocab_size=32000,
                max_position_embeddings=4096,
            )
            with torch.device("cuda"):
                self.model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
        else:
            self.model = build_reference_model("1b", device="cuda", dtype=torch.bfloat16)
        if compiled is not None:
            self.model.compile(mode=compiled)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        ids = torch.randint(32000, (samples, length), device="cuda")
        self.batch = {"input_ids": ids, "labels": ids}
        if masked:
            self.batch["attention_mask"] = torch.ones_like(ids)
        self.step_number = 0

    def forward_backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def next_step(self) -> int:
        self.step_number += 1
        return self.step_number

    def step(self, monitor: TrainingMonitor | None) -> None:
        loss = self.forward_backward()
        if monitor is not None:
            monitor.log_step(self.next_step(), 0, loss, loss, 1e-5)


def step_time_s(training: Training, steps: int) -> float:
    """Seconds of a plain step on the device's timeline; the first steps fill its queue and are not timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(LEAD_IN_STEPS):
        training.step(None)
    begin.record()
    for _ in range(steps):
        training.step(None)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def observed_steps(monitor: TrainingMonitor) -> set[int]:
    """The steps that the log marks as observed, up to now."""
    monitor.save_logs()
    return {row["global_step"] for row in logged_rows(monitor) if row.get("perf/observed")}


def logged_rows(monitor: TrainingMonitor) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((monitor.output_dir / "training_log.json").read_text("utf-8"))
    return rows


class Block(NamedTuple):
    """Some steps with or without the monitor, by a mark on the device's timeline at the end of each."""

    is_on: bool
    marks: list[torch.cuda.Event]
    numbers: list[int]
    """Those of the monitor's steps into which the timed steps fall; none without the monitor."""

    def steps_s(self, observed: set[int]) -> list[float]:
        times_s = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self.marks)]
        if not self.is_on:
            return times_s
        return [s for s, number in zip(times_s, self.numbers, strict=True) if number not in observed]


def run_block(training: Training, monitor: TrainingMonitor | None, steps: int) -> Block:
    """Lead-in and timed steps; the queue stays full, and as short as a loop's that reads its loss.

    The monitor is detached and paused before the last timed step, which is a plain one. What it sends to the
    host every three seconds falls into a block of long steps, and else into what is done after it.
    """
    marks, numbers = [], []
    with contextlib.ExitStack() as stack:
        if monitor is not None:
            monitor.attach(training.model)
        last = LEAD_IN_STEPS + steps - 1
        for number in range(last + 1):
            if number == last and monitor is not None:
                monitor.detach()
                stack.enter_context(monitor.pause())
            numbers.append(training.step_number + 1)
            training.step(monitor if number < last else None)
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            if number >= STEPS_AHEAD:
                marks[-1 - STEPS_AHEAD].synchronize()
    return Block(monitor is not None, marks[LEAD_IN_STEPS - 1 :], numbers[LEAD_IN_STEPS:])


def overhead(
    training: Training, monitor: TrainingMonitor, steps: int, off_steps: int, limit_s: float
) -> dict[str, Any]:
    """Pairs of blocks, off-on and on-off in turn; the relative difference of each pair, and of all steps."""
    blocks: list[Block] = []
    on_steps = 0
    ends_s = time.monotonic() + limit_s
    while on_steps < steps and (time.monotonic() < ends_s or len(blocks) < 4):
        for is_on in ((False, True), (True, False))[len(blocks) // 2 % 2]:
            if is_on:
                blocks.append(run_block(training, monitor, ON_STEPS))
                monitor.save_logs()  # what its own thread has left to do must not fall into the next block
                on_steps += ON_STEPS + LEAD_IN_STEPS - 1
            else:
                with monitor.pause():
                    blocks.append(run_block(training, None, off_steps))
    torch.cuda.synchronize()
    observed = observed_steps(monitor)
    on = [block.steps_s(observed) for block in blocks if block.is_on]
    off = [block.steps_s(observed) for block in blocks if not block.is_on]
    on_s, off_s = ([statistics.fmean(block) for block in found] for found in (on, off))
    return {
        "steps_on": on_steps,
        "steps_off": len(off) * (off_steps + LEAD_IN_STEPS),
        "observed_left_out": len(on) * ON_STEPS - sum(map(len, on)),
        "block_steps": [ON_STEPS, off_steps],
        **compared(on_s, off_s, list(zip(on, off, strict=True))),
        "differences": [round(a / b - 1, 6) for a, b in zip(on_s, off_s, strict=True)],
    }


def compared(
    on_s: list[float], off_s: list[float], steps_s: list[tuple[list[float], list[float]]]
) -> dict[str, Any]:
    """The seconds of a step in each pair, with the monitor and without; and of every step in it."""
    differences = [on / off - 1 for on, off in zip(on_s, off_s, strict=True)]
    ordered = sorted(differences)
    return {
        "pairs": len(differences),
        "step_ms_off": statistics.median(off_s) * 1e3,
        "step_ms_on": statistics.median(on_s) * 1e3,
        "median": statistics.median(differences),
        "interval_95": interval_95(differences, statistics.median),
        "of_means": statistics.fmean(on_s) / statistics.fmean(off_s) - 1,
        "of_median_steps": of_median_steps(steps_s),
        "of_median_steps_95": interval_95(steps_s, of_median_steps),
        "spread": [ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]],
    }


def of_median_steps(pairs: list[tuple[list[float], list[float]]]) -> float:
    """The median of all steps on against that of all steps off."""
    on, off = (statistics.median(s for pair in pairs for s in pair[which]) for which in (0, 1))
    return on / off - 1


def interval_95(values: list[Any], figure: Callable[[list[Any]], float]) -> list[float]:
    """Between which the figure lies in 95 % of resamplings."""
    draw = random.Random(0)
    found = sorted(figure(draw.choices(values, k=len(values))) for _ in range(1000))
    return [found[25], found[974]]


def host_share(training: Training) -> float:
    """Time the host needs to launch a step over the time the device needs to run it, queue empty at first.

    Near 1 the run waits for Python, and what a monitor takes there is lost; well below 1 it is hidden.
    """
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    shares = []
    for _ in range(10):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        begin.record()
        training.step(None)
        launched_s = time.perf_counter() - began_s
        end.record()
        torch.cuda.synchronize()
        shares.append(launched_s / (begin.elapsed_time(end) / 1e3))
    return statistics.median(shares)


class Stamped:
    """A model whose forward pass notes when it begins."""

    def __init__(self, model: Any) -> None:
        self._model, self.began_s = model, 0.0
        self._name = "forward" if model.__dict__.get(CALL) is None else CALL
        self._call = getattr(model, self._name)

    def __enter__(self) -> Stamped:
        call = self._call

        def stamped(*args: Any, **kwargs: Any) -> Any:
            self.began_s = time.perf_counter()
            return call(*args, **kwargs)

        self._model.__dict__[self._name] = stamped
        return self

    def __exit__(self, *_: object) -> None:
        if self._name == CALL:
            self._model.__dict__[CALL] = self._call
        else:
            del self._model.__dict__[self._name]


def threads_s() -> float:
    """Processor time of the monitor's threads so far."""
    own = [thread for thread in threading.enumerate() if thread.name.startswith("truemfu-")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in own)


def own_costs(training: Training, monitor: TrainingMonitor, rounds: int) -> dict[str, float]:
    """What the monitor takes of a step by the clock, in microseconds."""
    plain_calls: list[float] = []
    monitored: dict[int, tuple[float, float]] = {}
    threads = 0.0

    def step(stamped: Stamped, is_on: bool) -> None:
        began_s = time.perf_counter()
        loss = training.forward_backward()
        call_s = stamped.began_s - began_s
        if not is_on:
            plain_calls.append(call_s)
            return
        began_s = time.perf_counter()
        monitor.log_step(training.next_step(), 0, loss, loss, 1e-5)
        monitored[training.step_number] = call_s, time.perf_counter() - began_s

    with Stamped(training.model) as stamped:
        for _ in range(rounds):
            monitor.attach(training.model)
            for _ in range(5):
                training.step(monitor)
            before_s = threads_s()
            for _ in range(COST_STEPS):
                step(stamped, True)
            monitor.detach()
            monitor.save_logs()
            threads += threads_s() - before_s
            with monitor.pause():
                for _ in range(COST_STEPS):
                    step(stamped, False)
                torch.cuda.synchronize()
    steps, observed = len(monitored), observed_steps(monitor)
    calls, logs = zip(*(found for step, found in monitored.items() if step not in observed), strict=True)
    call, log = (statistics.median(calls) - statistics.median(plain_calls)), statistics.median(logs)
    log_mean = statistics.fmean(logs)
    return {
        "call_us": call * 1e6,
        "log_step_us": log * 1e6,
        "log_step_mean_us": log_mean * 1e6,
        "mean_us": (call + log_mean) * 1e6,
        "threads_us": threads / steps * 1e6,
        "observed_left_out": steps - len(logs),
    }


def pairs(training: Training, monitor: TrainingMonitor, steps: int, limit_s: float) -> dict[str, Any]:
    """Single steps on and off, in an order drawn for each pair, timed on the host; no garbage collection.

    What the monitor's threads do falls into both and is not seen here, only by the clock.
    """
    model, draw = training.model, random.Random(0)
    plain_call = model.__dict__.get(CALL)
    monitor.attach(model)
    for _ in range(20):
        training.step(monitor)
    hooks, marks = model._forward_pre_hooks, []
    times_s: list[dict[bool, float]] = []
    numbers: list[int] = []
    gc.collect()
    gc.disable()
    ends_s = time.monotonic() + limit_s
    while len(times_s) < steps and time.monotonic() < ends_s:
        times_s.append({})
        numbers.append(training.step_number + 1)
        for is_on in draw.choice(((False, True), (True, False))):
            ours, call = dict(hooks), model.__dict__.pop(CALL, None)
            hooks.clear()
            if is_on:  # as the monitor left it after its last step
                hooks.update(ours)
                model.__dict__.update({} if call is None else {CALL: call})
            else:
                model.__dict__.update({} if plain_call is None else {CALL: plain_call})
            with contextlib.nullcontext() if is_on else monitor.pause():
                began_s = time.perf_counter()
                training.step(monitor if is_on else None)
                times_s[-1][is_on] = time.perf_counter() - began_s
            if not is_on:
                hooks.update(ours)
                model.__dict__.pop(CALL, None)
                model.__dict__.update({} if call is None else {CALL: call})
            marks.append(torch.cuda.Event())
            marks[-1].record()
            if len(marks) > STEPS_AHEAD:
                marks.pop(0).synchronize()
    gc.enable()
    monitor.detach()
    observed = observed_steps(monitor)
    kept = [found for found, number in zip(times_s, numbers, strict=True) if number not in observed]
    on_s, off_s = [found[True] for found in kept], [found[False] for found in kept]
    return {
        "steps_on": len(times_s),
        "steps_off": len(times_s),
        "observed_left_out": len(times_s) - len(kept),
        "block_steps": [1, 1],
        **compared(on_s, off_s, [([on], [off]) for on, off in zip(on_s, off_s, strict=True)]),
    }


def start_up(training: Training, folder: str) -> dict[str, Any]:
    """How much longer the observed first steps of a run take, beside plain steps before and after them.

    All of it runs under sync debug mode "error". A step lasts on the device from its begin to that of the
    next one, so that the attachment of the monitor and its `log_step` are inside.
    """

    def steps(number: int, monitor: TrainingMonitor | None) -> list[torch.cuda.Event]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        marks[0].record()
        if monitor is not None:
            monitor.attach(training.model)
        for mark in marks[1:]:
            training.step(monitor)
            mark.record()
        return marks

    torch.cuda.synchronize()
    first, error = training.step_number + 1, None
    monitor = TrainingMonitor(folder)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = steps(START_UP_STEPS, None)
        monitored = steps(START_UP_STEPS, monitor)
        monitor.detach()
        plain = steps(START_UP_STEPS, None)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    monitor.close()
    summary = monitor.summary()
    observed = sorted(observed_steps(monitor))
    found: dict[str, Any] = {
        "error": error or " | ".join(summary["warnings"]) or None,
        "observed_steps": [step - first + 1 for step in observed],
        "observing_s": summary["monitor_cost"]["observing_s"],
        "methods": summary["methods"],
    }
    if error is None:
        before_ms, monitored_ms, plain_ms = (
            [begin.elapsed_time(end) for begin, end in pairwise(marks)]
            for marks in (before, monitored, plain)
        )
        others_ms = [ms for step, ms in enumerate(monitored_ms, first) if step not in observed]
        found["before_ms"], found["after_ms"], found["plain_after_ms"] = map(
            statistics.median, (before_ms, others_ms, plain_ms)
        )
        found["extra_ms"] = [monitored_ms[step - first] - found["before_ms"] for step in observed]
    return found


def waiting_calls(training: Training, monitor: TrainingMonitor | None) -> Counter[str]:
    """Calls in a Kineto trace of ten steps that wait, query or copy, and how often.

    No step is observed while a profiler is active: the first monitored ones are before the trace.
    """
    if monitor is not None:
        monitor.attach(training.model)
        training.step(monitor)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(10):
            training.step(monitor)
        time.sleep(4)  # the monitor's own thread works on these steps inside the trace
    if monitor is not None:
        monitor.detach()
    calls: Counter[str] = Counter()
    for event in recorded.events():
        if any(word in event.name for word in WAITING):
            calls[event.name] += 1
    return calls


def without_waiting(training: Training, monitor: TrainingMonitor) -> str | None:
    """None if twenty steps ran under sync debug mode "error"; else what was said."""
    monitor.attach(training.model)
    before = len(monitor.summary()["warnings"])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            training.step(monitor)
        time.sleep(4)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        monitor.detach()
    said = monitor.summary()["warnings"][before:]
    return None if not said else " | ".join(said)


def mfu_by_hand(training: Training, monitor: TrainingMonitor) -> dict[str, float]:
    """The mean MFU of 50 logged steps less observed ones, and count ÷ (event time × peak) of the same."""
    monitor.attach(training.model)
    for _ in range(LEAD_IN_STEPS):
        training.step(monitor)
    first = training.step_number + 1
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TRUTH_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        training.step(monitor)
        mark.record()
    torch.cuda.synchronize()
    monitor.detach()
    monitor.save_logs()
    with monitor.pause():
        flops = count_flops(training.model, training.batch).model_flops
    peak = get_gpu_peak_flops("cuda", torch.bfloat16)
    assert peak is not None
    times_s = {step: a.elapsed_time(b) / 1e3 for step, (a, b) in enumerate(pairwise(marks), first)}
    rows = [row for row in logged_rows(monitor) if row["global_step"] in times_s]
    logged = {row["global_step"]: row["perf/mfu"] for row in rows if not row.get("perf/observed")}
    harmonic = len(logged) / sum(1 / mfu for mfu in logged.values())
    by_hand = flops / (statistics.fmean(times_s[step] for step in logged) * peak)
    return {"logged": harmonic, "by_hand": by_hand, "difference": harmonic / by_hand - 1, "rows": len(logged)}


def further_waiting(on: Counter[str], off: Counter[str]) -> dict[str, int]:
    """Waiting calls with the monitor that are not there without it; a query and this copy do not wait."""
    return {k: v for k, v in (on - off).items() if "Query" not in k and k != "cudaMemcpyAsync"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", default=["4x512", "8x1024"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument(
        "--off", type=int, default=ON_STEPS, help="timed steps of a block without the monitor"
    )
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="compare no longer than this, also with fewer steps"
    )
    parser.add_argument("--pairs", action="store_true", help="let single steps take turns, not blocks")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these")
    parser.add_argument(
        "--compile",
        nargs="?",
        const="default",
        metavar="MODE",
        help="torch.compile the model; with reduce-overhead it is replayed as CUDA graphs",
    )
    parser.add_argument("--llama", action="store_true", help="transformers' Llama of that size, launch-bound")
    parser.add_argument("--mask", action="store_true", help="batches with an attention_mask, all ones")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines: list[str] = []
    failed: list[str] = []

    def say(text: str = "") -> None:
        print(text, flush=True)
        lines.append(text)

    def check(name: str, passed: bool, text: str) -> None:
        say(f"  {'PASS' if passed else 'FAIL'}  {name}: {text}")
        if not passed:
            failed.append(name)

    warnings.simplefilter("default")
    say(
        f"gpu/monitor {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), "
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.cuda.get_device_name()}"
    )
    results: dict[str, Any] = {}
    for shape in options.shapes:
        samples, length = (int(n) for n in shape.split("x"))
        training = Training(
            samples, length, llama=options.llama, masked=options.mask, compiled=options.compile
        )
        name = type(training.model).__name__
        how = f"compiled ({options.compile})" if options.compile else "eager"
        how += ", attention_mask" if options.mask else ""
        size = f"{parameter_count(training.model):,} parameters"
        say(f"\n{name}, {size}, {samples} × {length}, AdamW, bf16, {how}")
        for _ in range(10):
            training.step(None)
        plain_s = statistics.median(step_time_s(training, 10) for _ in range(5))
        share = host_share(training)
        say(f"  plain step {plain_s * 1e3:.2f} ms; the host launches one in {share:.0%} of its time")
        with tempfile.TemporaryDirectory() as folder:
            result = results[f"{name} {shape} {how}"] = {"host_share": share}
            before_bytes = torch.cuda.memory_allocated()
            if "start-up" in options.parts:
                started = result["start_up"] = start_up(training, f"{folder}/first")
                extra = ", ".join(f"{ms:.1f}" for ms in started.get("extra_ms", []))
                check(
                    "start-up under sync debug mode 'error'",
                    started["error"] is None and started["observed_steps"] == OBSERVED_AT_FIRST,
                    started["error"]
                    or f"observed steps {started['observed_steps']} took {extra} ms longer; a step took "
                    f"{started['before_ms']:.2f} ms before them, {started['after_ms']:.2f} ms after them "
                    f"with the monitor, {started['plain_after_ms']:.2f} ms without; rows by "
                    f"{started['methods']}",
                )
            monitor = TrainingMonitor(folder)
            monitor.attach(training.model)
            training.step(monitor)
            monitor.detach()
            monitor.save_logs()
            if "waiting" in options.parts:
                error = without_waiting(training, monitor)
                check(
                    "sync debug mode 'error'",
                    error is None,
                    error or "20 steps, nothing raised",
                )
                with monitor.pause():
                    off = waiting_calls(training, None)
                on = waiting_calls(training, monitor)
                check(
                    "no further waiting call in ten traced steps",
                    not further_waiting(on, off),
                    f"off {dict(off)}, on {dict(on)}",
                )
            if "truth" in options.parts:
                hand = result["mfu"] = mfu_by_hand(training, monitor)
                check(
                    "MFU logged against by hand",
                    abs(hand["difference"]) <= 0.005 and hand["rows"] >= TRUTH_STEPS - 2,
                    f"{hand['logged']:.4%} against {hand['by_hand']:.4%} ({hand['difference']:+.3%}), "
                    f"{hand['rows']} steps",
                )
            if "cost" in options.parts:
                own = result["own_costs"] = own_costs(training, monitor, COST_ROUNDS if options.pairs else 1)
                say(
                    f"  by the clock: the model's call +{own['call_us']:.1f} µs, log_step "
                    f"{own['log_step_us']:.1f} µs (medians; mean {own['log_step_mean_us']:.1f} µs), together "
                    f"{own['mean_us']:.1f} µs a step, {own['mean_us'] / plain_s / 1e6:.4%} of one; the "
                    f"monitor's threads {own['threads_us']:.1f} µs a step, "
                    f"{own['threads_us'] / plain_s / 1e6:.4%}"
                )
                say(f"  step times by {monitor.summary()['time_source']}")
                if options.pairs:
                    cost = pairs(training, monitor, options.steps, options.limit_s)
                else:
                    cost = overhead(training, monitor, options.steps, options.off, options.limit_s)
                result["overhead"] = cost
                low, high = cost["interval_95"]
                check(
                    "monitor on against off",
                    cost["median"] <= LIMIT and cost["steps_on"] >= options.steps,
                    f"{cost['median']:+.4%}, 95 % interval {low:+.4%} … {high:+.4%}; 5th to 95th percentile "
                    f"of the pairs {cost['spread'][0]:+.3%} … {cost['spread'][1]:+.3%}; of the means "
                    f"{cost['of_means']:+.4%}; of the median steps {cost['of_median_steps']:+.4%}, "
                    f"95 % interval {cost['of_median_steps_95'][0]:+.4%} … "
                    f"{cost['of_median_steps_95'][1]:+.4%}; "
                    f"{cost['steps_on']:,} steps on and {cost['steps_off']:,} off, "
                    f"{cost['observed_left_out']} observed ones left out, "
                    f"in blocks of {' and '.join(map(str, cost['block_steps']))}, "
                    f"{cost['step_ms_off']:.2f} ms a step off",
                )
                is_shown = cost["pairs"] >= FEWEST_PAIRS and max(high, cost["of_median_steps_95"][1]) <= LIMIT
                say(f"  this {'shows' if is_shown else 'does not show'} that it is at most {LIMIT:.2%}")
                result["added_bytes"] = added = torch.cuda.memory_allocated() - before_bytes
                say(f"  GPU memory added: {added:,} bytes")
            for text in monitor.summary()["warnings"]:
                say(f"  said: {text}")
            monitor.close()
        del training, monitor
        torch.cuda.empty_cache()
    say()
    say("all checks passed" if not failed else f"failed: {', '.join(failed)}")
    say(json.dumps(results))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
