"""`truemfu run` and TraceML on the same unmodified script, taking turns with the script alone.

The script is transformers' Trainer with a Llama of 1.3 B parameters in bf16, at 4 × 512 and at 8 × 1024. It
times its own steps by CUDA events in a callback. Three processes train at once, one alone, one under each
tool, and take turns of a few steps, in an order drawn for each turn: whatever the machine does meets all of
them. Several rounds, each with new processes, whose constant differences are seen between the rounds. Prints
  turns         each tool against the script alone: the median over the turns, with a 95 % interval
  in one process  under `truemfu run` only: single steps with its hooks and without, in an order drawn for
                each pair; the same figures without the differences of processes
  by the clock  what its hooks and its part of `optimizer.step` take of the training thread, per step
Steps that the log marks as observed are left out (`gpu/observe.py` measures those), and counted.
TraceML is left out where it is not installed.

    python benchmarks/gpu/run.py [--rounds 2] [--turns 25] [--pairs 120] [--shapes 4x512 8x1024] [--tiny]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from source_id import source_id

SHAPES = ("4x512", "8x1024")
LEAD_IN = 2
"""Steps at the head of a turn that fill the device's queue and are not timed."""
TURN = 8
FIRST_STEPS = 12
"""Before the first turn: the observed steps of the monitor, and whatever else happens once."""
CLOCK_STEPS = 100
PLAIN, OURS, TRACEML = "alone", "truemfu run", "traceml run"
Numbered = list[tuple[int, float]]
"""Seconds of steps, each with its number in the log of `truemfu run`."""


class Turns:
    """The pipes through which a training process is given its orders, at either end."""

    def __init__(self, folder: Path, *, gives: bool) -> None:
        if gives:
            folder.mkdir(parents=True)
            for name in ("orders", "results"):
                os.mkfifo(folder / name)
        self._folder, self._gives = folder, gives
        self._orders: Any = None
        self._results: Any = None

    def open(self) -> None:
        """Wait for the other end."""
        self._orders = (self._folder / "orders").open("w" if self._gives else "r", encoding="ascii")
        self._results = (self._folder / "results").open("r" if self._gives else "w", encoding="ascii")

    def give(self, order: str) -> Any:
        """Have the process carry this out: its result."""
        print(order, file=self._orders, flush=True)
        return self.result()

    def end(self) -> None:
        """Let the process end its training."""
        print("end", file=self._orders, flush=True)

    def result(self) -> Any:
        line = self._results.readline()
        if not line:
            raise SystemExit("a training process has ended early")
        return json.loads(line)

    def take(self) -> list[str]:
        """The next order of this process, in words."""
        return self._orders.readline().split()

    def done(self, result: Any = None) -> None:
        print(json.dumps(result), file=self._results, flush=True)


class Marks:
    """When steps ended, on the device's timeline."""

    def __init__(self) -> None:
        import torch

        self._cuda = torch.cuda if torch.cuda.is_available() else None
        self._marks: list[Any] = []

    def add(self) -> None:
        if self._cuda is None:
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(self._cuda.Event(enable_timing=True))
            self._marks[-1].record()

    def take_s(self) -> list[float]:
        """The seconds between the marks so far, once the device has reached the last."""
        marks, self._marks = self._marks, []
        pairs = pairwise(marks)
        if self._cuda is None:
            return [end - begin for begin, end in pairs]
        self._cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]


def monitor_here() -> Any:
    """The monitor that `truemfu run` made in this process."""
    from truemfu import TrainingMonitor

    return next(found for found in gc.get_objects() if isinstance(found, TrainingMonitor))


def observed_steps(logged: int) -> list[int]:
    """The steps that the log of `truemfu run` marks as observed, of those logged so far."""
    monitor = monitor_here()
    monitor.save_logs()
    rows = json.loads((Path(monitor.output_dir) / "training_log.json").read_text(encoding="utf-8"))
    assert rows[-1]["global_step"] == logged, "steps are numbered as in the log"
    return [row["global_step"] for row in rows if row.get("perf/observed")]


class Switch:
    """The hooks that `truemfu run` has in this process, taken out and put back for single steps.

    Its monitor is paused meanwhile, so that these steps belong to none of its own.
    """

    def __init__(self, model: Any) -> None:
        import torch
        from torch.optim import optimizer

        names = "_forward_pre_hooks", "_forward_hooks"
        self._tables = [getattr(module, name) for module in model.modules() for name in names]
        self._tables.append(optimizer._global_optimizer_post_hooks)
        self._ours = [dict(table) for table in self._tables]
        self._autograd, self._backward = torch.autograd, torch.autograd.backward
        self._monitor, self._paused = monitor_here(), contextlib.ExitStack()

    def turn(self, *, on: bool) -> None:
        self._paused.close()
        if not on:
            self._paused.enter_context(self._monitor.pause())
        for table, ours in zip(self._tables, self._ours, strict=True):
            table.clear()
            table.update(ours if on else {})
        self._autograd.backward = self._backward if on else self._backward.__wrapped__

    def timed(self) -> list[float]:
        """Put hooks in their place that add the seconds of each call to the list that is returned."""
        seconds: list[float] = []

        def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                began_s = time.perf_counter()
                result = hook(*args, **kwargs)
                seconds.append(time.perf_counter() - began_s)
                return result

            return call

        for table in self._tables:
            for key, hook in table.items():
                table[key] = timed(hook)
        return seconds


class Trained:
    """How many steps of this process the monitor has logged, if there is one."""

    def __init__(self) -> None:
        self.steps = 0


def steps(model: Any, turns: Turns, trained: Trained) -> Iterator[None]:
    """What happens between the steps of the training; each `yield` is one of them."""
    marks = Marks()

    def train(number: int) -> Iterator[None]:
        for _ in range(number):
            yield
            trained.steps += 1
            marks.add()

    yield from train(FIRST_STEPS)
    turns.done()
    while (order := turns.take())[0] != "end":
        marks.take_s()
        if order[0] == "turn":
            yield from train(LEAD_IN + TURN)
            turns.done(list(enumerate(marks.take_s()[LEAD_IN - 1 :], trained.steps - TURN + 1)))
        elif order[0] == "pairs":
            switch, draw, numbers = Switch(model), random.Random(0), []
            drawn = [on for _ in range(int(order[1])) for on in draw.sample((True, False), 2)]
            yield from train(LEAD_IN)
            for on in drawn:
                switch.turn(on=on)
                marks.add()
                yield
                marks.add()
                trained.steps += on
                numbers.append(trained.steps)
            switch.turn(on=True)
            times = list(zip(drawn, numbers, marks.take_s()[LEAD_IN::2], strict=True))
            turns.done([[(n, s) for on, n, s in times if on == wanted] for wanted in (True, False)])
        elif order[0] == "clock":
            switch, found = Switch(model), []
            seconds = switch.timed()
            for _ in range(CLOCK_STEPS):
                yield from train(1)
                found.append((trained.steps, sum(seconds)))
                seconds.clear()
            switch.turn(on=True)
            turns.done(found)
        else:
            turns.done(observed_steps(trained.steps))


def script(shapes: list[str], *, tiny: bool, folder: Path) -> None:
    """The training script; apart from the callback that takes turns it is one like any other."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class InTurns(TrainerCallback):
        def __init__(self, turns: Turns) -> None:
            self._steps = steps(model, turns, trained)
            next(self._steps)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = next(self._steps, "ended") == "ended"

    on_gpu, trained = torch.cuda.is_available(), Trained()
    torch.manual_seed(0)
    size = {
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
    }
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**(small if tiny else size), vocab_size=512 if tiny else 32000)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for shape in shapes:
        samples, length = map(int, shape.split("x"))
        ids = torch.randint(512, (samples * 20, 32 if tiny else length))
        turns = Turns(folder / shape, gives=False)
        turns.open()
        arguments = TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=samples,
            max_steps=100_000,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            optim="adamw_torch_fused",
            use_cpu=not on_gpu,
        )
        Trainer(
            model=model,
            args=arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            callbacks=[InTurns(turns)],
        ).train()
        if on_gpu:
            torch.cuda.empty_cache()


def command(name: str, folder: Path, flags: list[str]) -> list[str]:
    """How the script is started."""
    file = str(Path(__file__).resolve())
    if name == OURS:
        return [
            sys.executable,
            "-m",
            "truemfu",
            "run",
            "-o",
            str(folder / "run"),
            "--",
            sys.executable,
            file,
            *flags,
        ]
    if name == TRACEML:
        launcher = [sys.executable, "-m", "traceml_ai.launcher.cli", "run", "--mode", "summary"]
        return [*launcher, "--logs-dir", str(folder / "traceml"), file, "--args", *flags]
    return [sys.executable, file, *flags]


def interval_95(values: list[float]) -> list[float]:
    """Between which the median lies in 95 % of resamplings."""
    draw = random.Random(0)
    found = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return [found[50], found[1949]]


def compared(ratios: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(ratios), "interval_95": interval_95(ratios), "number": len(ratios)}


def in_words(found: dict[str, Any]) -> str:
    low, high = found["interval_95"]
    return f"{found['median']:+.3%} (95 %: {low:+.3%} … {high:+.3%})"


def one_round(names: list[str], options: argparse.Namespace, draw: random.Random, say: Any) -> dict[str, Any]:
    """New processes, both shapes, all turns."""
    folder = Path(tempfile.mkdtemp())
    ends = {
        name: {shape: Turns(folder / name / shape, gives=True) for shape in options.shapes} for name in names
    }
    processes, results = [], {}
    for name in names:
        flags = ["--script", str(folder / name), *(["--tiny"] if options.tiny else [])]
        flags += ["--shapes", *options.shapes]
        with (folder / f"{name}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(command(name, folder, flags), stdout=log, stderr=subprocess.STDOUT)
            )
    for shape in ends[PLAIN]:
        turns = {name: ends[name][shape] for name in names}
        for name in names:
            turns[name].open()
        for name in names:
            turns[name].result()
        taken: dict[str, list[Numbered]] = {name: [] for name in names}
        for _ in range(options.turns):
            for name in draw.sample(names, len(names)):
                taken[name].append(turns[name].give("turn"))
        on, off = turns[OURS].give(f"pairs {options.pairs}")
        clock = turns[OURS].give("clock")
        observed = set(turns[OURS].give("observed"))
        medians = {
            name: [
                statistics.median(s for number, s in turn if name != OURS or number not in observed)
                for turn in taken[name]
            ]
            for name in names
        }
        for name in names:
            texts = f"  {shape}, {name}: {1e3 * statistics.median(medians[name]):.3f} ms"
            if name != PLAIN:
                pairs = zip(medians[name], medians[PLAIN], strict=True)
                found = compared([own / alone - 1 for own, alone in pairs])
                results[f"{name} {shape}"] = found
                texts += f", against alone {in_words(found)}, {found['number']} turns"
            say(texts)
        both = [(a, b) for (number, a), (_, b) in zip(on, off, strict=True) if number not in observed]
        found = compared([a / b - 1 for a, b in both])
        found["of_medians"] = (
            statistics.median(a for a, _ in both) / statistics.median(b for _, b in both) - 1
        )
        results[f"in one process {shape}"] = found
        say(
            f"  {shape}, {OURS}, in one process: on against off {in_words(found)}, "
            f"{found['number']} pairs; of the medians {found['of_medians']:+.3%}"
        )
        clock_us = [1e6 * s for number, s in clock if number not in observed]
        mean_us, median_us = statistics.fmean(clock_us), statistics.median(clock_us)
        results[f"by the clock {shape}"] = {"mean_us": mean_us, "median_us": median_us}
        say(
            f"  {shape}, {OURS}, by the clock: {mean_us:.0f} µs of the training thread a step in the mean, "
            f"{median_us:.0f} µs in the median, {len(clock_us)} steps; observed so far: {sorted(observed)}"
        )
        for name in names:
            turns[name].end()
    for name, process in zip(names, processes, strict=True):
        if process.wait(timeout=120):
            say(f"  {name} ended with {process.returncode}: {(folder / f'{name}.log').read_text()[-2000:]}")
    summary = json.loads((folder / "run" / "training_run.json").read_text(encoding="utf-8"))["summary"]
    cost = summary["monitor_cost"]
    results["own_us"] = cost["training_thread_us_per_step"]
    say(
        f"  {OURS}: {cost['training_thread_us_per_step']:.0f} µs a step by its own clock, {cost['observed']} "
        f"observed steps took {cost['observing_s']:.2f} s longer, {summary['steps']} steps, FLOPs by "
        f"{summary['methods']}"
    )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--turns", type=int, default=25, help="of each process at each shape")
    parser.add_argument("--pairs", type=int, default=120, help="of single steps with and without the hooks")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script on a CPU")
    parser.add_argument("--script", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.script:
        script(options.shapes, tiny=options.tiny, folder=options.script)
        return 0
    import torch

    import truemfu

    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.output:
            options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")

    has_traceml = importlib.util.find_spec("traceml_ai") is not None
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    say(
        f"gpu/run {datetime.date.today()}  truemfu {truemfu.__version__} ({source_id()}), torch "
        f"{torch.__version__}, Python {platform.python_version()}, {device}, TraceML "
        f"{importlib.metadata.version('traceml-ai') if has_traceml else 'not installed'}"
    )
    names, draw = [PLAIN, OURS, *([TRACEML] if has_traceml else [])], random.Random(0)
    rounds = []
    for number in range(options.rounds):
        say(f"round {number + 1}")
        rounds.append(one_round(names, options, draw, say))
    say(json.dumps(rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
