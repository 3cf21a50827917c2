"""Counted, executed by the always-on counters, executed by Nsight Compute: three accounts of the same work.

Why: a count is arithmetic and a counter is silicon; where they differ somebody is wrong, and people who run
fleets want to know who. On one GPU with GPM (Hopper or later) and ncu it prints
  matmuls      products of many shapes and dtypes, each for six seconds: 2MNK, `hybrid`'s FLOPs a product with
               the clock the SMs counted and with the clock the driver reports, and ncu's
  elementwise  kernels that multiply no matrices, and what they leave on the tensor pipe by ncu
  training     steps of the 1.3 B reference model, launch-bound to compute-bound, with and without causal
               attention, checkpointing and compile, under a TrainingMonitor in `hybrid`
  referee      the same steps by ncu, kernel by kernel. It sees models of one and two layers (it needs a tenth
               of a second a kernel); every layer runs the same kernels, so 24 layers follow exactly
  staged       five runs with one known limit each: does the waterfall name it, do its parts add up?
  cost         hybrid against no monitor, interleaved; and what its parts take by the clock
All of it takes about 20 minutes; parts measured on their own are shown together with `--earlier`.
Exits 1 where a check failed. A run that is stopped (SIGTERM, Ctrl-C) prints what it has.

    python benchmarks/gpu/hardware_truth.py [--parts matmuls training …] [--only 8×1024 …]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from truth_cases import DEVICE, PRODUCTS, RUNS, Run, Step, attention, elementwise, staged_runs, wide_run
from truth_ncu import USES_THE_PIPE, added_up, by_kernel, kernels_of, pieces_by_ncu, under_ncu

import truemfu
from truemfu import TrainingMonitor, count_flops
from truemfu.hardware.counter_trace import Recorder
from truemfu.hardware.cycle_stamps import CycleStamps
from truemfu.hardware.detect import known_spec
from truemfu.hardware.executed import executed_flops_per_s
from truemfu.hardware.sampler import Sampler
from truemfu.monitor import hardware_watch
from truemfu.monitor.hardware_watch import Cut, HardwareWatch, counters_of

WINDOW_S = 6.0
RUN_S = WINDOW_S + 4.5
"""Two seconds before a window, and more than one after it."""
WITHIN = 0.02
STEPS_AHEAD = 3
PAIRS = 25
PARTS = ("matmuls", "elementwise", "training", "referee", "staged", "cost")
WIDE = "wide layers of 8192"
HYBRID = {"monitoring": {"mfu_calculation_mode": "hybrid"}}
OLD_INSTRUCTIONS = ("cutlass_75", "s1688")


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


def matmuls(rows: list[dict[str, Any]], numbers: list[int], trace: Path | None) -> None:
    """Each product for a window: what the counters say a product executed."""
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
    watch = HardwareWatch(source, index, stamps, sm_count=spec.sm_count, period_s=0.5)
    for product in (PRODUCTS[number] for number in numbers):
        work = product.make()
        loop(work, 0.8)
        begin = cut_now(watch)
        calls, seconds = loop(work, WINDOW_S)
        end = cut_now(watch)
        loop(work, 0.8)  # the read after the end tells of the time before it too
        measured = watch.measured(begin, end)
        assert measured is not None, watch.fault
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


def hybrid_row(model: torch.nn.Module, batch: dict[str, Any], step: Step) -> dict[str, Any]:
    """The count of a step beside what `hybrid` says it executed."""
    count = count_flops(model, batch)
    with tempfile.TemporaryDirectory() as folder:
        summary = monitored(TrainingMonitor(folder, HYBRID, model=model), step, RUN_S)
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


def monitored(
    monitor: TrainingMonitor, step: Step, seconds: float, batches: Iterable[Any] | None = None
) -> dict[str, Any]:
    """Train for this long after a warm-up; the closing summary."""
    ends_s = None
    marks: list[torch.cuda.Event] = []
    for number, _ in enumerate(monitor.data(batches if batches is not None else iter(int, 1))):
        loss = step()
        monitor.log_step(number, 0, loss.detach(), 1.0, 1e-5)
        mark = torch.cuda.Event()
        mark.record()
        marks.append(mark)
        if len(marks) > STEPS_AHEAD:
            marks.pop(0).synchronize()  # else the queue fills, and every launch waits for a place in it
        if number == 3:
            torch.cuda.synchronize()
            ends_s = time.monotonic() + seconds
        if ends_s is not None and time.monotonic() > ends_s:
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
            summary = monitored(TrainingMonitor(folder, HYBRID, model=model), step, RUN_S, run.batches())
        hardware = summary["hardware"] or {}
        rows.append({"name": run.name, "expected": run.limiters, "mfu": summary["median_mfu"], **hardware})
        print(f"  {run.name}: {hardware.get('limiter')}", flush=True)
        del model, step
        torch.cuda.empty_cache()


def switch(monitor: TrainingMonitor, model: torch.nn.Module, is_on: bool) -> None:
    """Without the monitor, its hooks must not run and its thread must not read either."""
    watch = monitor._watch
    if watch is not None:
        watch._sampler.stop()
    if not is_on:
        monitor.detach()
        return
    monitor.attach(model)
    if watch is not None:
        watch._sampler = Sampler(watch._source, indices=[watch._index], period_s=1.0)
        watch._sampler.start()


def cost() -> dict[str, Any]:
    """Hybrid on and off in alternating blocks, and its parts by the clock.

    All weights are zero: the kernels are the same and draw little power, so that its limit does not make the
    clock wander by more than what is to be seen.
    """
    run = Run(8, 1024)
    model, _, step = run.build()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        monitor = TrainingMonitor(folder, HYBRID, model=model)
        number = 0
        differences, plain = [], []
        for pair in range(PAIRS):
            times = {}
            for is_on in (True, False) if pair % 2 else (False, True):
                switch(monitor, model, is_on)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                for place in range(14):
                    if place == 2:
                        begin.record()
                    loss = step()
                    if is_on:
                        monitor.log_step(number, 0, loss.detach(), 1.0, 1e-5)
                        number += 1
                end.record()
                torch.cuda.synchronize()
                times[is_on] = begin.elapsed_time(end) / 12
            if pair:  # the first pair counts the model
                differences.append(times[True] / times[False] - 1)
                plain.append(times[False])
        watch = monitor._watch
        assert watch is not None
        assert watch._stamps is not None
        stamps = watch._stamps
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
        source = watch._source
        reads_s, reads_cpu_s = [], []
        for _ in range(20):
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            source.read(watch._index)
            reads_s.append(time.perf_counter() - began_s)
            reads_cpu_s.append(time.thread_time() - began_cpu_s)
            time.sleep(0.15)
        monitor.close()
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(2000))
    return {
        "step_ms": statistics.median(plain),
        "pairs": len(differences),
        "difference": statistics.median(differences),
        "low": medians[50],
        "high": medians[-51],
        "cut_us": 1e6 * statistics.median(cuts_s),
        "stamp_us": 1e3 * statistics.median(kernel_ms),
        "read_us": 1e6 * statistics.median(reads_s),
        "read_cpu_us": 1e6 * statistics.median(reads_cpu_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="REGEX", help="products and runs of these names")
    parser.add_argument("--kernels", default=USES_THE_PIPE, help="referee: kernels whose names match (regex)")
    parser.add_argument("--trace", type=Path, help="record the counters of the products here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument(
        "--earlier", type=Path, nargs="+", default=[], metavar="FILE", help="parts measured before (--json)"
    )
    parser.add_argument("--under-ncu", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under_ncu:
        under_ncu(arguments.under_ncu)
        return 0
    warnings.simplefilter("ignore")
    hardware_watch.WINDOW_S = WINDOW_S
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    result: dict[str, Any] = {"measured": {}}
    try:
        for part in arguments.parts:
            print(f"{part} …", flush=True)
            result["measured"][part] = where_and_when()
            measure(part, result, arguments)
    except KeyboardInterrupt:
        print("stopped: the rest was not measured")
    for file in arguments.earlier:
        take_in(result, json.loads(file.read_text(encoding="utf-8")))
    failed = show(result)
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
    elif part == "training":
        rows = result[part] = []
        training(rows, wanted(runs))
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
    """Parts of an earlier run that this one lacks; of the referee, runs and kernels that it lacks."""
    for part, line in earlier.pop("measured").items():
        lines = result["measured"].setdefault(part, line)
        result["measured"][part] = lines if line in lines else f"{lines}\n  and {line}"
    for name, kernels in earlier.pop("referee", {}).items():
        known = result.setdefault("referee", {}).setdefault(name, [])
        names = {kernel["kernel"] for kernel in known}
        known += [kernel for kernel in kernels if kernel["kernel"] not in names]
    for part in PARTS:
        if part in earlier:
            result.setdefault(part, earlier[part])


def refereed_by(row: dict[str, Any], kernels: list[dict[str, Any]]) -> None:
    """Put what ncu saw beside a row."""
    pipe, matrix = (sum(kernel[key] for kernel in kernels) for key in ("pipe", "matrix"))
    row["ncu"] = sum(kernel["ops"] for kernel in kernels)
    row["non_matrix_share"] = 1 - matrix / pipe if pipe else None
    row["kernels"] = [kernel for kernel in added_up(kernels) if kernel["ops"] or kernel["pipe"]]


def show(result: dict[str, Any]) -> list[str]:
    """The tables; the checks that failed."""
    failed = []
    for part, line in result["measured"].items():
        print(f"{part}: {line}")
    for row in result.get("training", []):
        if row["name"] in result.get("referee", {}):
            refereed_by(row, result["referee"][row["name"]])
    if "matmuls" in result:
        print("\nmatmuls: FLOP a product as a ratio to 2MNK")
        print(
            f"{'product':28} {'TFLOP/s':>8} {'ncu':>8} {'hybrid':>8} {'hyb/ncu':>8} "
            f"{'rep. clock':>10} {'MHz':>6} {'reported':>8} {'W':>5}  kernel"
        )
        for row in result["matmuls"]:
            ncu, counted = row.get("ncu"), row["counted"]
            ratio = row["hybrid"] / ncu if ncu else float("nan")
            print(
                f"{row['name']:28} {row['rate'] / 1e12:8.1f} {(ncu or float('nan')) / counted:8.4f} "
                f"{row['hybrid'] / counted:8.4f} {ratio:8.4f} {row['hybrid_reported_clock'] / counted:10.4f} "
                f"{row['clock_mhz']:6.0f} {row['reported_mhz']:8.0f} {row['power_w']:5.0f}  "
                f"{', '.join(kernel['kernel'][:60] for kernel in row.get('kernels', []))}"
            )
            old = any(
                word in kernel["kernel"] for word in OLD_INSTRUCTIONS for kernel in row.get("kernels", [])
            )
            if ncu and not old and abs(ratio - 1) > WITHIN:
                failed.append(f"{row['name']}: hybrid {ratio:.4f} of ncu")
    if "elementwise" in result:
        print("\nelementwise kernels by ncu: the tensor pipe's cycles, those of products, HFMA2 instructions")
        for row in result["elementwise"]:
            print(
                f"{row['name']:28} {row['pipe']:>12,} {row['matrix']:>12,} {row['hfma2']:>12,}  "
                f"{row['kernel'][:80]}"
            )
    if "training" in result:
        print("\ntraining, 1.3 B: FLOP a step as a ratio to the count (recomputation included, all pairs)")
        print(
            f"{'run':32} {'ms':>6} {'mean':>6} {'MFU':>6} {'ncu':>8} {'hybrid':>8} {'hyb/ncu':>8} "
            f"{'corrected':>9} {'rep. clock':>10} {'no matrix':>9} {'MHz':>6} {'reported':>8} {'W':>4}"
        )
        for row in result["training"]:
            ncu, counted = row.get("ncu"), row["counted"]
            ratio = row["hybrid"] / ncu if ncu else float("nan")
            share = row.get("non_matrix_share") or 0.0
            print(
                f"{row['name']:32} {row['step_ms']:6.1f} {1e3 * row['seconds'] / row['steps']:6.1f} "
                f"{row['mfu']:6.1%} "
                f"{(ncu or float('nan')) / counted:8.4f} {row['hybrid'] / counted:8.4f} {ratio:8.4f} "
                f"{ratio * (1 - share):9.4f} "
                f"{row['hybrid_reported_clock'] / counted:10.4f} {share:9.2%} {row['clock_hz'] / 1e6:6.0f} "
                f"{row['reported_clock_hz'] / 1e6:8.0f} {row['power_w']:4.0f}"
            )
            if ncu and abs(ratio * (1 - share) - 1) > WITHIN:
                failed.append(f"training {row['name']}: hybrid {ratio * (1 - share):.4f} of ncu")
        for row in result["training"]:
            if "kernels" not in row:
                continue
            print(f"\n{row['name']}: kernels; share of the count, of the pipe's cycles beyond products")
            pipe = sum(kernel["pipe"] for kernel in row["kernels"])
            for kernel in row["kernels"]:
                beyond = (kernel["pipe"] - kernel["matrix"]) / pipe
                if kernel["ops"] / row["counted"] > 0.001 or beyond > 0.0002:
                    print(
                        f"  {kernel['ops'] / row['counted']:7.2%} {beyond:7.3%} "
                        f"{kernel['launches']:5} launches  {kernel['kernel'][:90]}"
                    )
    for part in ("training", "staged"):
        if part in result:
            print(f"\n{part}: where the peak went, in points of it")
            for row in result[part]:
                fall = row.get("waterfall")
                if fall is None:
                    failed.append(f"{part} {row['name']}: no waterfall")
                    continue
                total = 100 * sum(piece["share"] for piece in fall["parts"])
                said = ", ".join(f"{piece['key']} {100 * piece['share']:.1f}" for piece in fall["parts"])
                print(f"{row['name']:32} {said}; sum {total:.1f}; limiter {row['limiter']}")
                if abs(total - 100) > 1:
                    failed.append(f"{part} {row['name']}: parts add up to {total:.1f}")
                if "expected" in row and row["limiter"] not in row["expected"]:
                    failed.append(f"{row['name']}: limiter {row['limiter']}, expected {row['expected']}")
                for sentence in row["advice"]:
                    print(f"{'':34}{sentence}")
    if "cost" in result:
        row = result["cost"]
        print(
            f"\ncost: hybrid against no monitor at 8×1024, all weights zero ({row['step_ms']:.1f} ms a step, "
            f"{row['pairs']} pairs of blocks of 12 steps): "
            f"{row['difference']:+.3%} (95 % {row['low']:+.3%} … {row['high']:+.3%}); a cut "
            f"{row['cut_us']:.0f} µs on the training thread and {row['stamp_us']:.0f} µs on the GPU "
            f"every ten seconds, a read {row['read_us']:.0f} µs ({row['read_cpu_us']:.0f} µs of CPU) "
            "every second on a thread of its own"
        )
    print("\nfailed: " + ("; ".join(failed) or "nothing"))
    return failed


if __name__ == "__main__":
    sys.exit(main())
