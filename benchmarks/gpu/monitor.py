"""The monitor on a real GPU: what it costs, that it never waits, and that its MFU is right.

Why: "free to leave on" is a claim about a real run. For the 1.3 B reference model at each shape it prints
  start-up    how long the one count holds the training, the steps before it and after it, and that it
              adds no waiting call
  overhead    monitor on against off, in alternating blocks over at least 2,000 monitored steps with the
              default settings, in which recalibrations fall: the median of the pairs' differences, a 95 %
              interval from resampling the pairs, and the spread; the median step on against the median
              step off, likewise. With --pairs single steps take turns instead of blocks, for runs that wait
              for the host, whose speed wanders
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


class Block(NamedTuple):
    """Some steps with or without the monitor, by a mark on the device's timeline at the end of each."""

    is_on: bool
    marks: list[torch.cuda.Event]

    def steps_s(self) -> list[float]:
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(self.marks)]

    def step_s(self) -> float:
        return float(self.marks[0].elapsed_time(self.marks[-1])) / 1e3 / (len(self.marks) - 1)


def run_block(training: Training, monitor: TrainingMonitor | None, steps: int) -> Block:
    """Lead-in and timed steps; the queue stays full, and as short as a loop's that reads its loss.

    The monitor is detached before the last timed step, which is a plain one. What it sends to the host every
    three seconds falls into a block of long steps, and else into what is done after it.
    """
    marks = []
    if monitor is not None:
        monitor.attach(training.model)
    last = LEAD_IN_STEPS + steps - 1
    for number in range(last + 1):
        if number == last and monitor is not None:
            monitor.detach()
        training.step(monitor if number < last else None)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if number >= STEPS_AHEAD:
            marks[-1 - STEPS_AHEAD].synchronize()
    return Block(monitor is not None, marks[LEAD_IN_STEPS - 1 :])


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
    on = [block for block in blocks if block.is_on]
    off = [block for block in blocks if not block.is_on]
    on_s, off_s = [block.step_s() for block in on], [block.step_s() for block in off]
    return {
        "steps_on": on_steps,
        "steps_off": len(off) * (off_steps + LEAD_IN_STEPS),
        "block_steps": [ON_STEPS, off_steps],
        **compared(on_s, off_s, [(a.steps_s(), b.steps_s()) for a, b in zip(on, off, strict=True)]),
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
    calls: dict[bool, list[float]] = {True: [], False: []}
    logs: list[float] = []
    threads = 0.0

    def step(stamped: Stamped, is_on: bool) -> None:
        began_s = time.perf_counter()
        loss = training.forward_backward()
        calls[is_on].append(stamped.began_s - began_s)
        if is_on:
            began_s = time.perf_counter()
            monitor.log_step(training.next_step(), 0, loss, loss, 1e-5)
            logs.append(time.perf_counter() - began_s)

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
            for _ in range(COST_STEPS):
                step(stamped, False)
            torch.cuda.synchronize()
    call, log = (statistics.median(calls[True]) - statistics.median(calls[False])), statistics.median(logs)
    log_mean = statistics.fmean(logs)
    return {
        "call_us": call * 1e6,
        "log_step_us": log * 1e6,
        "log_step_mean_us": log_mean * 1e6,
        "mean_us": (call + log_mean) * 1e6,
        "threads_us": threads / len(logs) * 1e6,
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
    found: dict[bool, list[float]] = {True: [], False: []}
    gc.collect()
    gc.disable()
    ends_s = time.monotonic() + limit_s
    while len(found[True]) < steps and time.monotonic() < ends_s:
        for is_on in draw.choice(((False, True), (True, False))):
            ours, call = dict(hooks), model.__dict__.pop(CALL, None)
            hooks.clear()
            if is_on:  # as the monitor left it after its last step
                hooks.update(ours)
                model.__dict__.update({} if call is None else {CALL: call})
            else:
                model.__dict__.update({} if plain_call is None else {CALL: plain_call})
            began_s = time.perf_counter()
            training.step(monitor if is_on else None)
            found[is_on].append(time.perf_counter() - began_s)
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
    monitor.save_logs()
    on_s, off_s = found[True], found[False]
    return {
        "steps_on": len(on_s),
        "steps_off": len(off_s),
        "block_steps": [1, 1],
        **compared(on_s, off_s, [([on], [off]) for on, off in zip(on_s, off_s, strict=True)]),
    }


def start_up(training: Training, folder: str) -> dict[str, Any]:
    """What the one count of a run costs, and what it leaves alone: steps before it and after it.

    All of it runs under sync debug mode "error". A step is timed on the device from its first kernel to its
    last, so that what `log_step` does between two steps is outside.
    """

    def steps(
        number: int, monitor: TrainingMonitor | None
    ) -> list[tuple[torch.cuda.Event, torch.cuda.Event]]:
        marks = []
        for _ in range(number):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            loss = training.forward_backward()
            end.record()
            if monitor is not None:
                monitor.log_step(training.next_step(), 0, loss, loss, 1e-5)
            marks.append((begin, end))
        return marks

    torch.cuda.synchronize()
    first, error = training.step_number + 1, None
    monitor = TrainingMonitor(folder)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = steps(START_UP_STEPS, None)
        monitor.attach(training.model)
        after = steps(START_UP_STEPS, monitor)
        monitor.detach()
        plain = steps(START_UP_STEPS, None)
    except RuntimeError as raised:
        error = str(raised)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    monitor.close()
    cost = monitor.summary()["monitor_cost"]
    found: dict[str, Any] = {
        "error": error or " | ".join(monitor.summary()["warnings"]) or None,
        "counting_s": cost["counting_s"],
        "counts": cost["counts"],
        "at_steps": [step - first + 1 for step in cost["counted_after_steps"]],
        "methods": monitor.summary()["methods"],
    }
    if error is None:
        counted = max(found["at_steps"], default=0)
        found["before_ms"], found["after_ms"], found["plain_after_ms"] = (
            statistics.median(begin.elapsed_time(end) for begin, end in marks)
            for marks in (before, after[counted:], plain)
        )
    return found


def waiting_calls(
    training: Training, monitor: TrainingMonitor | None, *, with_count: bool = False
) -> Counter[str]:
    """Calls in a Kineto trace of ten steps that wait, query or copy, and how often.

    The first monitored steps hold the count: they are in the trace `with_count`, else before it.
    """
    if monitor is not None:
        monitor.attach(training.model)
        if not with_count:
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
    """The median MFU of 50 logged steps, and count ÷ (event time × peak) of the same 50."""
    monitor.attach(training.model)
    training.step(monitor)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    first = training.step_number + 1
    for _ in range(50):
        training.step(monitor)
    end.record()
    torch.cuda.synchronize()
    monitor.detach()
    monitor.save_logs()
    seconds = begin.elapsed_time(end) / 1e3 / 50
    flops = count_flops(training.model, training.batch).model_flops
    peak = get_gpu_peak_flops("cuda", torch.bfloat16)
    assert peak is not None
    rows = json.loads((monitor.output_dir / "training_log.json").read_text(encoding="utf-8"))
    logged = [row["perf/mfu"] for row in rows if row["global_step"] >= first]
    harmonic = len(logged) / sum(1 / m for m in logged)
    by_hand = flops / (seconds * peak)
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
                check(
                    "start-up under sync debug mode 'error'",
                    started["error"] is None and started["counts"] == 1,
                    started["error"]
                    or f"counting took {started['counting_s']:.2f} s, {started['counts']} time(s), after "
                    f"step {started['at_steps']} of the run; a step took {started['before_ms']:.2f} ms "
                    f"before it, {started['after_ms']:.2f} ms after it with the monitor, "
                    f"{started['plain_after_ms']:.2f} ms without; rows by {started['methods']}",
                )
                check(
                    "a count takes at most 5 s", started["counting_s"] <= 5, f"{started['counting_s']:.2f} s"
                )
                off = waiting_calls(training, None)
                traced = TrainingMonitor(f"{folder}/traced")
                on = waiting_calls(training, traced, with_count=True)
                traced.close()
                check(
                    "no further waiting call in the traced start-up",
                    not further_waiting(on, off),
                    f"off {dict(off)}, on {dict(on)}",
                )
            monitor = TrainingMonitor(folder)
            monitor.attach(training.model)
            training.step(monitor)
            monitor.save_logs()
            if "waiting" in options.parts:
                error = without_waiting(training, monitor)
                check(
                    "sync debug mode 'error'",
                    error is None,
                    error or "20 steps, nothing raised",
                )
                off, on = waiting_calls(training, None), waiting_calls(training, monitor)
                check(
                    "no further waiting call in ten traced steps",
                    not further_waiting(on, off),
                    f"off {dict(off)}, on {dict(on)}",
                )
            if "truth" in options.parts:
                hand = result["mfu"] = mfu_by_hand(training, monitor)
                check(
                    "MFU logged against by hand",
                    abs(hand["difference"]) <= 0.005,
                    f"{hand['logged']:.4%} against {hand['by_hand']:.4%} ({hand['difference']:+.3%})",
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
