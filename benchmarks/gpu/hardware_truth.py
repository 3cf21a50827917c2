"""Counted, executed by the always-on counters, executed by Nsight Compute: three accounts of the same work.

Why: a count is arithmetic and a counter is silicon; where they differ somebody is wrong, and people who run
fleets want to know who. On one GPU with GPM (Hopper or later) and ncu it prints
  matmuls      products of many shapes and dtypes, each for six seconds: 2MNK, `hybrid`'s FLOPs a product with
               the clock the SMs counted and with the clock the driver reports, and ncu's
  elementwise  kernels that multiply no matrices, and what they leave on the tensor pipe by ncu
  instructions which instructions of some of them do so: ncu's listing, how often each was executed
  halves       a step at 4×512 and its two halves: what the optimizer alone leaves on the tensor pipe
  training     steps of the 1.3 B reference model, launch-bound to compute-bound, with and without causal
               attention, checkpointing and compile, under a TrainingMonitor in `hybrid`
  audited      the launch-bound run again, with `hybrid_mode.audit` set to what `truemfu audit --json`
               says of two of its layers: as a user corrects what activity overstates
  audit_models the same for models whose kernels are others: a ViT, a ResNet-18, a mixture of experts.
               `hybrid` with and without the correction, over what ncu counted in the audited step
  referee      the same steps by ncu, kernel by kernel. It sees models of one and two layers (it needs a tenth
               of a second a kernel); every layer runs the same kernels, so 24 layers follow exactly
  staged       five runs with one known limit each: does the waterfall name it, do its parts add up?
  cost         hybrid against no monitor, interleaved; and what its parts take by the clock
All of it takes about half an hour; parts measured on their own are shown together with `--earlier`.
Exits 1 where a check failed. A run that is stopped (SIGTERM, Ctrl-C) prints what it has.

    python benchmarks/gpu/hardware_truth.py [--parts matmuls training …] [--only 8×1024 …]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import pty
import random
import re
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from truth_cases import (
    DEVICE,
    LEARNING_RATE,
    OTHER_MODELS,
    PRODUCTS,
    RUNS,
    Run,
    Step,
    attention,
    elementwise,
    staged_runs,
    training_step,
    wide_run,
)
from truth_ncu import USES_THE_PIPE, by_kernel, instructions_by_ncu, kernels_of, pieces_by_ncu, under_ncu
from truth_tables import refereed_by, show

import truemfu
from truemfu import TrainingMonitor, count_flops
from truemfu.hardware.counters.cycle_stamps import CycleStamps
from truemfu.hardware.counters.executed import executed_flops_per_s
from truemfu.hardware.counters.nvml import NvmlSource
from truemfu.hardware.counters.sampler import Sampler
from truemfu.hardware.counters.trace import Recorder
from truemfu.hardware.detect import known_spec
from truemfu.hardware.specs import DeviceSpec
from truemfu.monitor.hybrid import hardware_watch
from truemfu.monitor.hybrid.hardware_watch import Cut, HardwareWatch, MeasuredWindow, counters_of

WINDOW_S = 6.0
LONGEST_RUN_S = 90.0
"""A compilation, a count beside the training, two seconds, a window, and until that is worked out."""
STEPS_AHEAD = 3
PAIRS = 8
BLOCK_S = WINDOW_S + 3.5
"""Two seconds before a window in it."""
PARTS = (
    "matmuls",
    "elementwise",
    "instructions",
    "halves",
    "training",
    "audited",
    "audit_models",
    "referee",
    "staged",
    "cost",
)
LISTED = ("bf16 copy, strided", "bf16 GELU", "bf16 fused AdamW, all zero")
WIDE = "wide layers of 8192"
HYBRID = {"monitoring": {"mfu_calculation_mode": "hybrid"}}
AUDITED_RUNS = RUNS[:1]
AUDITED_LAYERS = 2
AUDITED_TURNS = 3


def loop(work: Callable[[], object], seconds: float) -> tuple[int, float]:
    """Run `work` for about this long without letting the queue grow: (calls, seconds on the device)."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    queued: list[torch.cuda.Event] = []
    calls, ends_s = 0, time.monotonic() + seconds
    chunk = 1
    while time.monotonic() < ends_s:
        began_s = time.monotonic()
        for _ in range(chunk):
            work()
        calls += chunk
        mark = torch.cuda.Event()
        mark.record()
        queued.append(mark)
        if len(queued) > 2:
            queued.pop(0).synchronize()
        if time.monotonic() - began_s < 0.005:
            chunk = min(2 * chunk, 4096)
    end.record()
    torch.cuda.synchronize()
    return calls, begin.elapsed_time(end) / 1e3


def cut_now(watch: HardwareWatch) -> Cut:
    """A cut without the wait for steps to follow each other."""
    watch.restart()
    watch.cut(0.0)
    cut = watch.cut(hardware_watch.SETTLE_S)
    assert cut is not None
    return cut


def quick_watch(trace: Path | None = None) -> tuple[HardwareWatch, DeviceSpec]:
    """The counters of the device, read twice a second."""
    found = counters_of(DEVICE)
    assert not isinstance(found, str), found
    source, index = found
    if trace is not None:
        source = Recorder(source, trace, note=f"{torch.cuda.get_device_name()}: {PRODUCTS[0].name} and so on")
    stamps = CycleStamps.open(DEVICE)
    assert isinstance(stamps, CycleStamps), stamps
    spec = known_spec(DEVICE)
    assert spec is not None
    assert spec.sm_count is not None
    return HardwareWatch(source, index, stamps, sm_count=spec.sm_count, period_s=0.5), spec


def watched(watch: HardwareWatch, work: Callable[[], object]) -> tuple[int, float, MeasuredWindow]:
    """A window of this work, with some of it before and after: calls, seconds, what the counters say."""
    loop(work, 0.8)
    begin = cut_now(watch)
    calls, seconds = loop(work, WINDOW_S)
    end = cut_now(watch)
    loop(work, 0.8)  # the read after the end tells of the time before it too
    measured = watch.measured(begin, end)
    assert measured is not None, watch.fault
    return calls, seconds, measured


def halves(rows: list[dict[str, Any]]) -> None:
    """A step at 4×512 and its halves, by the counters: the optimizer alone at two learning rates."""
    watch, spec = quick_watch()
    model, batch, step = RUNS[0].build()

    def forward_backward() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    def measure_one(name: str, has: str, work: Callable[[], object]) -> None:
        calls, seconds, measured = watched(watch, work)
        executed = executed_flops_per_s(
            measured.window, spec, flops_by_dtype={"bf16": 1.0}, clock_hz=measured.clock_hz
        )
        assert executed is not None
        rows.append(
            {
                "name": name,
                "has": has,
                "ms": 1e3 * seconds / calls,
                "executed": executed * seconds / calls,
                "idle": None
                if measured.window.graphics_active is None
                else 1 - measured.window.graphics_active,
            }
        )
        print(f"  {name}: {rows[-1]['executed'] / 1e12:.4f} TFLOP", flush=True)

    for turn in range(2):
        measure_one(f"whole steps, {turn + 1}", "all", step)
        measure_one(f"forward and backward, {turn + 1}", "passes", forward_backward)
    for lr in (LEARNING_RATE, 1e-5):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        learn = training_step(model, batch, optimizer)
        for _ in range(200):
            learn()
        model(**batch).loss.backward()
        measure_one(f"AdamW alone, after 200 steps at a rate of {lr:g}", "optimizer", optimizer.step)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        vanished = sum(int((g.abs() < 1e-14).sum()) for g in gradients)
        rows[-1]["vanished"] = vanished / sum(g.numel() for g in gradients)
        model.zero_grad(set_to_none=True)
        del optimizer, learn
    watch.close()


def matmuls(rows: list[dict[str, Any]], numbers: list[int], trace: Path | None) -> None:
    """Each product for a window: what the counters say a product executed."""
    watch, spec = quick_watch(trace)
    for product in (PRODUCTS[number] for number in numbers):
        calls, seconds, measured = watched(watch, product.make())
        window = measured.window
        by_dtype = {product.dtype: 1.0}
        executed, reported = (
            executed_flops_per_s(window, spec, flops_by_dtype=by_dtype, clock_hz=clock)
            for clock in (measured.clock_hz, window.sm_clock_hz)
        )
        assert executed is not None
        assert reported is not None
        assert measured.clock_hz is not None
        rows.append(
            {
                "name": product.name,
                "counted": product.flops,
                "rate": calls * product.flops / seconds,
                "hybrid": executed * seconds / calls,
                "hybrid_reported_clock": reported * seconds / calls,
                "clock_mhz": measured.clock_hz / 1e6,
                "reported_mhz": (window.sm_clock_hz or 0) / 1e6,
                "power_w": (window.energy_j or 0) / window.seconds,
                "throttle": sorted(window.throttle or {}),
                "seconds": window.seconds,
            }
        )
        print(f"  {product.name}: {rows[-1]['hybrid'] / product.flops:.4f} of 2MNK", flush=True)
    watch.close()


def training(rows: list[dict[str, Any]], numbers: list[int]) -> None:
    """Each run under a monitor in `hybrid`."""
    for number in numbers:
        if number == len(RUNS):
            wide = wide_run()
            model, step = wide.build()
            rows.append({"name": WIDE, **hybrid_row(model, wide.batch, step)})
        else:
            run = RUNS[number]
            with attention(run.causal):
                model, batch, step = run.build()
                rows.append({"name": run.name, **hybrid_row(model, batch, step)})
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] if run.compiled else 0
            assert graphs or not run.compiled
        print(f"  {rows[-1]['name']}: {rows[-1]['step_ms']:.1f} ms", flush=True)
        del model, step
        torch.cuda.empty_cache()
        torch.compiler.reset()


def audited(rows: list[dict[str, Any]], numbers: list[int]) -> None:
    """Runs whose configuration names an audit of a few layers; in turns, since one window says little."""
    for number in numbers:
        run = RUNS[number]
        with tempfile.TemporaryDirectory() as folder:
            file, _ = audit_of(f"runs {number}", Path(folder) / "step.csv")
            for turn in range(AUDITED_TURNS):
                model, batch, step = run.build()
                row = hybrid_row(model, batch, step, corrected_by(file))
                rows.append({"name": f"{run.name}, {turn + 1}", "run": run.name, **row})
                print(f"  {rows[-1]['name']}: {row['step_ms']:.1f} ms", flush=True)
                del model, step
                torch.cuda.empty_cache()


def audit_models(rows: list[dict[str, Any]], numbers: list[int], audits: Path | None) -> None:
    """Other models than the reference model: `hybrid` as an audit corrects it, over that audit's figure."""
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            case = OTHER_MODELS[number]
            csv_file = (audits or Path(folder)) / f"{number}.csv"
            file, audit = audit_of(f"models {number}", csv_file)
            model, _, step = case.build()
            with tempfile.TemporaryDirectory() as run_folder:
                summary = monitored(TrainingMonitor(run_folder, corrected_by(file), model=model), step)
            hardware = summary["hardware"]
            assert hardware is not None, summary["warnings"]
            # The audited step and these are alike, so its count is theirs.
            hybrid = hardware["executed_over_counted"] * audit["count"]["hardware_flops"]
            rows.append(
                {
                    "name": case.name,
                    "ncu": audit["executed_flops"],
                    "counted": audit["count"]["hardware_flops"],
                    "count_method": audit["count"]["method"],
                    "launches": audit["launches"],
                    "flops_per_cycle": audit["executed_flops"] / audit["pipe_cycles"],
                    "corrected": hybrid,
                    "uncorrected": hybrid / audit["executed_over_activity"],
                    "verdict": audit["verdict"],
                    "step_ms": 1e3 * summary["median_step_time_s"],
                    "method": summary["method"],
                    "warnings": summary["warnings"],
                    **hardware,
                }
            )
            print(f"  {case.name}: {hybrid / audit['executed_flops']:.4f} of ncu", flush=True)
            del model, step
            torch.cuda.empty_cache()


def audit_of(what: str, csv_file: Path) -> tuple[Path, dict[str, Any]]:
    """The file for `hybrid_mode.audit`, and what is in it; without ncu where the table was saved before."""
    call = [sys.executable, "-m", "truemfu", "audit", "--json"]
    if csv_file.exists():
        call += ["--csv", str(csv_file)]
    else:
        call += ["--save", str(csv_file), "--", sys.executable, __file__, "--under-audit", what]
    json_file = csv_file.with_suffix(".json")
    with json_file.open("w") as file:
        subprocess.run(call, stdout=file, check=True)
    return json_file, json.loads(json_file.read_text())


def corrected_by(audit: Path) -> dict[str, Any]:
    """The configuration of a hybrid run that an audit corrects."""
    hybrid = {"performance_monitoring": {"hybrid_mode": {"audit": str(audit)}}}
    return {"monitoring": {**HYBRID["monitoring"], **hybrid}}


def under_audit(what: str) -> None:
    """A few layers under a monitor, until the audit has what it wants and ends this process."""
    kind, number = what.split()
    if kind == "runs":
        model, _, step = RUNS[int(number)].build(AUDITED_LAYERS)
    else:
        model, _, step = OTHER_MODELS[int(number)].build()
    with tempfile.TemporaryDirectory() as folder, TrainingMonitor(folder, model=model) as monitor:
        for turn in range(10_000):
            monitor.log_step(turn, 0, step().detach(), 1.0, LEARNING_RATE)


def hybrid_row(
    model: torch.nn.Module, batch: dict[str, Any], step: Step, config: dict[str, Any] = HYBRID
) -> dict[str, Any]:
    """The count of a step beside what `hybrid` says it executed."""
    count = count_flops(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        summary = monitored(TrainingMonitor(folder, config, model=model), step)
    hardware = summary["hardware"]
    assert hardware is not None, summary["warnings"]
    executed = hardware["executed_over_counted"] * count.hardware_flops
    return {
        "model_flops": count.model_flops,
        "counted": count.hardware_flops,
        "hybrid": executed,
        "hybrid_reported_clock": executed * hardware["reported_clock_hz"] / hardware["clock_hz"],
        "step_ms": 1e3 * summary["median_step_time_s"],
        "mfu": summary["median_mfu"],
        **hardware,
    }


def monitored(monitor: TrainingMonitor, step: Step, batches: Iterable[Any] | None = None) -> dict[str, Any]:
    """Train until there is a window; the closing summary."""
    ends_s = time.monotonic() + LONGEST_RUN_S
    looks_s = 0.0
    marks: list[torch.cuda.Event] = []
    for number, _ in enumerate(monitor.data(batches if batches is not None else iter(int, 1))):
        loss = step()
        monitor.log_step(number, 0, loss.detach(), 1.0, 1e-5)
        mark = torch.cuda.Event()
        mark.record()
        marks.append(mark)
        if len(marks) > STEPS_AHEAD:
            marks.pop(0).synchronize()  # else the queue fills, and every launch waits for a place in it
        if (now_s := time.monotonic()) > looks_s:
            looks_s = now_s + 1
            if now_s > ends_s or monitor.summary()["hardware"] is not None:
                break
    torch.cuda.synchronize()
    monitor.save_logs()
    monitor.close()
    return monitor.summary()


def staged(rows: list[dict[str, Any]], only: list[str] | None) -> None:
    """Runs whose limit is known beforehand."""
    for run in staged_runs():
        if only is not None and not any(re.search(text, run.name) for text in only):
            continue
        model, step = run.build()
        with tempfile.TemporaryDirectory() as folder:
            summary = monitored(TrainingMonitor(folder, HYBRID, model=model), step, run.batches())
        hardware = summary["hardware"] or {}
        rows.append({"name": run.name, "expected": run.limiters, "mfu": summary["median_mfu"], **hardware})
        print(f"  {run.name}: {hardware.get('limiter')}", flush=True)
        del model, step
        torch.cuda.empty_cache()


class OnAndOff:
    """A run whose monitor is switched on and off; off, neither its hooks run nor its thread reads."""

    def __init__(self, monitor: TrainingMonitor, model: torch.nn.Module, step: Step) -> None:
        self._monitor, self._model, self._step = monitor, model, step
        self._number = 0
        self._away = contextlib.ExitStack()

    def block(self, *, is_on: bool) -> float:
        """Milliseconds of a step on the device, in a block that holds a whole window."""
        monitor = self._monitor
        if is_on:
            self._away.close()
            monitor.attach(self._model)
            watch_again(monitor)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        ahead: list[torch.cuda.Event] = []
        steps, ends_s = 0, None
        while ends_s is None or time.monotonic() < ends_s:
            if steps == STEPS_AHEAD:
                begin.record()
                ends_s = time.monotonic() + BLOCK_S
            loss = self._step()
            steps += 1
            if is_on:
                self._number += 1
                monitor.log_step(self._number, 0, loss.detach(), 1.0, 1e-5)
            ahead.append(torch.cuda.Event())
            ahead[-1].record()
            if len(ahead) > STEPS_AHEAD:
                ahead.pop(0).synchronize()
        end.record()
        torch.cuda.synchronize()
        if is_on:  # what is still to be worked out must not fall into the next block
            monitor.save_logs()
            monitor.detach()
            self._away.enter_context(monitor.pause())
            assert monitor._live is not None
            assert monitor._live.steps._instruments.counters is not None
            monitor._live.steps._instruments.counters._sampler.stop()
        return begin.elapsed_time(end) / (steps - STEPS_AHEAD)


def watch_again(monitor: TrainingMonitor) -> None:
    """Start the thread that reads; before the first step the monitor has none yet."""
    live = monitor._live
    if live is not None and (watch := live.steps._instruments.counters) is not None:
        watch._sampler = Sampler(watch._source, indices=[watch._index], period_s=1.0)
        watch._sampler.start()


def cost() -> dict[str, Any]:
    """Hybrid on and off in alternating blocks, and its parts by the clock.

    All weights are zero: the kernels are the same and draw little power, so that the clock wanders less than
    what is to be seen.
    """
    model, _, step = Run(8, 1024).build()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, HYBRID, model=model)
        run = OnAndOff(monitor, model, step)
        differences, plain = [], []
        for pair in range(PAIRS + 1):
            order = (True, False) if pair % 2 == 0 else (False, True)
            times = {is_on: run.block(is_on=is_on) for is_on in order}
            if pair:  # in the first the model is counted
                differences.append(times[True] / times[False] - 1)
                plain.append(times[False])
        stamps = CycleStamps.open(DEVICE)
        assert isinstance(stamps, CycleStamps), stamps
        cuts_s, kernel_ms = [], []
        for _ in range(50):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            began_s = time.perf_counter()
            stamps.take()
            cuts_s.append(time.perf_counter() - began_s)
            end.record()
            torch.cuda.synchronize()
            kernel_ms.append(begin.elapsed_time(end))
        monitor.close()
        windows = (monitor.summary()["hardware"] or {}).get("windows", 0)
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(2000))
    return {
        "step_ms": statistics.median(plain),
        "pairs": len(differences),
        "block_s": BLOCK_S,
        "windows": windows,
        "difference": statistics.median(differences),
        "low": medians[50],
        "high": medians[-51],
        "cut_us": 1e6 * statistics.median(cuts_s),
        "stamp_us": 1e3 * statistics.median(kernel_ms),
        "read_us": read_cpu_us(energy=True),
        "read_without_energy_us": read_cpu_us(energy=False),
        "top_of_a_core": (top_cpu_s(22) - top_cpu_s(2)) / 20,
    }


def read_cpu_us(*, energy: bool) -> float:
    """Microseconds of processor time for a read once a second, as the monitor (with energy) and `top` do."""
    source = NvmlSource(energy=energy)
    taken_s = []
    for _ in range(9):
        began_s = time.thread_time()
        source.read(0)
        taken_s.append(time.thread_time() - began_s)
        time.sleep(1)
    source.close()
    return 1e6 * statistics.median(taken_s[1:])


def top_cpu_s(seconds: float) -> float:
    """Processor time of `truemfu top` on a terminal, once a second, for so long; its start included."""
    terminal, end = pty.openpty()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(
        [sys.executable, "-m", "truemfu", "top"], stdin=end, stdout=end, stderr=subprocess.DEVNULL
    )
    os.close(end)
    ends_s = time.monotonic() + seconds
    while (left_s := ends_s - time.monotonic()) > 0:
        if select.select([terminal], [], [], left_s)[0]:
            os.read(terminal, 1 << 16)
    process.send_signal(signal.SIGINT)
    process.wait()
    os.close(terminal)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="REGEX", help="products and runs of these names")
    parser.add_argument("--kernels", default=USES_THE_PIPE, help="referee: kernels whose names match (regex)")
    parser.add_argument("--trace", type=Path, help="record the counters of the products here")
    parser.add_argument(
        "--audits", type=Path, metavar="FOLDER", help="audit_models: keep audits here, and use those kept"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], metavar="FILE", help="parts measured before (--json)"
    )
    parser.add_argument("--under-ncu", help=argparse.SUPPRESS)
    parser.add_argument("--under-audit", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under_audit:
        under_audit(arguments.under_audit)
        return 0
    if arguments.under_ncu:
        under_ncu(arguments.under_ncu)
        return 0
    warnings.simplefilter("ignore")
    hardware_watch.WINDOW_S = WINDOW_S
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result: dict[str, Any] = {"measured": {}}
    broken: list[str] = []
    for part in arguments.parts:
        print(f"{part} …", flush=True)
        result["measured"][part] = where_and_when()
        try:
            measure(part, result, arguments)
        except KeyboardInterrupt:
            broken.append(f"stopped in {part}, the rest was not measured")
            break
        except Exception as error:  # what was measured before is worth printing
            traceback.print_exc()
            broken.append(f"{part}: {type(error).__name__}: {error}")
    for file in arguments.earlier:
        take_in(result, json.loads(file.read_text(encoding="utf-8")))
    failed = broken + show(result)
    print("\nfailed: " + ("; ".join(failed) or "nothing"))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**result, "failed": failed}, indent=1) + "\n")
    return 1 if failed else 0


def where_and_when() -> str:
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    return (
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, driver {driver}, "
        f"torch {torch.__version__}, Python {platform.python_version()}, truemfu {truemfu.__version__}; "
        f"windows of {WINDOW_S:g} s"
    )


def measure(part: str, result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Fill in one part piece by piece, so that a run that is stopped keeps what it has."""

    def wanted(names: Iterable[str]) -> list[int]:
        only = arguments.only
        return [
            n for n, name in enumerate(names) if only is None or any(re.search(text, name) for text in only)
        ]

    runs = [run.name for run in RUNS] + [WIDE]
    if part == "matmuls":
        rows = result[part] = []
        numbers = wanted(product.name for product in PRODUCTS)
        matmuls(rows, numbers, arguments.trace)
        for row, piece in zip(rows, pieces_by_ncu(__file__, _call("products", numbers)), strict=True):
            refereed_by(row, by_kernel((piece, 1)))
    elif part == "elementwise":
        names = list(elementwise())
        pieces = pieces_by_ncu(__file__, _call(part, range(len(names))))
        result[part] = [
            {"name": name, **by_kernel((piece, 1))[0]} for name, piece in zip(names, pieces, strict=True)
        ]
    elif part == "instructions":
        listed = result[part] = {}
        for number, name in enumerate(elementwise()):
            if name in LISTED:
                listed[name] = instructions_by_ncu(__file__, number)
                print(f"  {name}: {len(listed[name])} instructions", flush=True)
    elif part == "halves":
        rows = result[part] = []
        halves(rows)
    elif part == "training":
        rows = result[part] = []
        training(rows, wanted(runs))
    elif part == "audited":
        rows = result[part] = []
        audited(rows, wanted(run.name for run in AUDITED_RUNS))
    elif part == "audit_models":
        rows = result[part] = []
        audit_models(rows, wanted(model.name for model in OTHER_MODELS), arguments.audits)
    elif part == "referee":
        found = result[part] = {}
        for number in wanted(runs):
            found[runs[number]] = kernels_of(__file__, number, arguments.kernels)
            print(f"  {runs[number]}: {len(found[runs[number]])} kernels", flush=True)
    elif part == "staged":
        rows = result[part] = []
        staged(rows, arguments.only)
    else:
        result[part] = cost()


def _call(kind: str, numbers: Iterable[int]) -> str:
    return " ".join([kind, *map(str, numbers)])


def take_in(result: dict[str, Any], earlier: dict[str, Any]) -> None:
    """What an earlier run measured and this one did not: rows by their names, kernels by theirs."""
    taken = set()
    for part in PARTS:
        if part not in earlier:
            continue
        if part not in result:
            result[part] = earlier[part]
            taken.add(part)
        elif part == "referee":
            for name, kernels in earlier[part].items():
                known = result[part].setdefault(name, [])
                new = [k for k in kernels if k["kernel"] not in {other["kernel"] for other in known}]
                known += new
                taken |= {part} if new else set()
        elif part not in ("cost", "instructions"):
            names = {row["name"] for row in result[part]}
            new = [row for row in earlier[part] if row["name"] not in names]
            result[part] += new
            taken |= {part} if new else set()
    for part in taken:
        here, there = result["measured"].get(part, ""), earlier["measured"][part]
        result["measured"][part] = here if there in here else f"{here}; {there}".removeprefix("; ")


if __name__ == "__main__":
    sys.exit(main())
