"""What reports cost, and how large they are: sweeps of 64 and 1,000 experiments, a run of a million steps.

Each report is made by `truemfu report` in a process of its own on two cores; its time and its peak memory are
those of that process, start-up included. The inputs are made up: experiments and rows with all the values
that a monitor writes.

    python benchmarks/report_size.py > benchmarks/results/report_size.txt

The last line is JSON, with the limits that the figures are compared with.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import msgspec

from truemfu.records import (
    CaseResult,
    Environment,
    Flops,
    Measured,
    Memory,
    Phase,
    Status,
    StepTimes,
    SweepCase,
    SweepRecord,
    write_record,
)

LIMIT_S, LIMIT_MB, LIMIT_PAGE_KB = 10, 500, 300
STEPS = 1_000_000
CORES = 2
TRAINERS = ("StandardTrainer", "DPSGDTrainer", "DPGhostClippingTrainer", "DPFastGradientClippingTrainer")
PEAK_FLOPS_PER_S = 989.4e12
GIB = 2**30


def result_of(case: SweepCase, chance: random.Random) -> CaseResult:
    """A finished experiment, or one that ran out of memory if it is large."""
    slowness = 1 + TRAINERS.index(case.trainer)
    seconds = 1e-5 * slowness * case.batch_size * case.seq_len * chance.uniform(0.9, 1.1)
    memory = int(slowness * case.batch_size * case.seq_len * 4e5)
    name = f"{case.trainer}_bs{case.batch_size}_seq{case.seq_len}"
    is_ok = memory < 139 * GIB
    model_flops = 8_000_000_000 * case.batch_size * case.seq_len
    times = [seconds * chance.uniform(0.98, 1.05) for _ in range(50)]
    measured = Measured(
        steps=StepTimes(
            times_s=times,
            median_s=sorted(times)[25],
            mean_s=sum(times) / 50,
            p10_s=sorted(times)[5],
            p90_s=sorted(times)[45],
            relative_error=0.004,
            source="CUDA events",
            stable=True,
        ),
        tokens_per_step=case.batch_size * case.seq_len,
        tokens_per_s=case.batch_size * case.seq_len / seconds,
        samples_per_s=case.batch_size / seconds,
        flops=Flops(
            model_flops=model_flops,
            hardware_flops=2 * model_flops,
            model_method="count on fake tensors",
            hardware_method="count of one real step",
            attention="full",
            peak_flops_per_s=PEAK_FLOPS_PER_S,
            peak_source="datasheet: NVIDIA H200",
            mfu=model_flops / seconds / PEAK_FLOPS_PER_S,
            hfu=2 * model_flops / seconds / PEAK_FLOPS_PER_S,
        ),
        data_wait_s=1e-4,
        final_loss=10.4,
        trace=None,
    )
    return CaseResult(
        name=name,
        sweep_id="made-up",
        content_hash="0",
        case=case,
        end=Status.OK if is_ok else Status.CUDA_OOM,
        phase=Phase.DONE if is_ok else Phase.WARM_UP,
        message=None if is_ok else "CUDA out of memory: tried to allocate 2.00 GiB",
        log_tail=[] if is_ok else ["torch.OutOfMemoryError: CUDA out of memory"] * 10,
        parameters=1_339_674_624,
        measured=measured if is_ok else None,
        memory=Memory(allocated_bytes=memory, reserved_bytes=memory + GIB, process_bytes=2 * GIB),
        environment=Environment(
            device_name="NVIDIA H200",
            python="3.12",
            versions={"torch": "2.11.0"},
            host="host",
            git_commit=None,
        ),
    )


def write_sweep(folder: Path, batches: int, lengths: int) -> int:
    """A sweep over all trainers; the number of its experiments."""
    chance = random.Random(0)
    cases = [
        SweepCase(trainer=trainer, model="1b", batch_size=2 * batch, seq_len=128 * length)
        for trainer in TRAINERS
        for length in range(1, lengths + 1)
        for batch in range(1, batches + 1)
    ]
    results = [result_of(case, chance) for case in cases]
    (folder / "results").mkdir(parents=True)
    for result in results:
        write_record(folder / "results" / f"{result.name}.json", result)
    record = SweepRecord(
        sweep_id="made-up",
        created_at_s=0.0,
        truemfu_version="0.1",
        cases=[result.name for result in results],
        config={},
    )
    write_record(folder / "sweep.json", record)
    return len(results)


def write_run(folder: Path, steps: int) -> None:
    """A run that has not ended: its figures must come from its log. A checkpoint every 1,000 steps."""
    chance = random.Random(0)
    folder.mkdir()
    encode = msgspec.json.Encoder().encode
    with open(folder / "training_log.json", "wb") as file:
        for step in range(1, steps + 1):
            seconds = 0.3 * chance.uniform(0.98, 1.05)
            row = {
                "global_step": step,
                "training/loss": 2 + 9 / (1 + step / 1000),
                "training/lr": 1e-4,
                "training/epoch": step / steps,
                "training/grad_norm": 1.0,
                "perf/padding_efficiency": 0.875,
                "perf/method": "closed form",
                "perf/step_time": seconds,
                "perf/steps_per_second": 1 / seconds,
                "perf/tokens_per_second": 16384 / seconds,
                "perf/real_tokens_per_second": 14336 / seconds,
                "perf/samples_per_second": 8 / seconds,
                "perf/mfu": 0.12 / seconds,
                "perf/mfu_percent": 12 / seconds,
                "perf/hfu": 0.15 / seconds,
                "perf/hfu_percent": 15 / seconds,
                "perf/tokens_per_second_per_gpu": 16384 / seconds,
                "perf/real_tokens_per_second_per_gpu": 14336 / seconds,
                "perf/samples_per_second_per_gpu": 8 / seconds,
                "perf/tflops_per_gpu": 118.7 / seconds,
                "perf/data_wait": 0.001,
                "perf/between_steps": 0.002,
                "perf/memory_peak_bytes": 61 * GIB,
            }
            if step % 1000 == 0:
                row["perf/checkpoint_time"] = 6.0
            file.write((b"[\n" if step == 1 else b",\n") + encode(row))
        file.write(b"\n]\n")


def measure(source: Path) -> dict[str, float]:
    """Seconds, peak memory and size of the report of a folder."""
    page = source / "page.html"
    before = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "truemfu", "report", str(source), "-o", str(page)],
        stdout=subprocess.DEVNULL,
        preexec_fn=_on_two_cores,
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.monotonic() - before
    assert status == 0, status
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "page_kb": round(page.stat().st_size / 1e3),
    }


def _on_two_cores() -> None:
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    print(f"{date.today()}; Python {sys.version.split()[0]}, msgspec {msgspec.__version__}, {CORES} cores")
    print(f"{'report of':36}{'seconds':>9}{'CPU s':>8}{'peak MB':>9}{'page kB':>9}")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for batches, lengths in ((4, 4), (10, 25)):
            sweep = Path(folder) / f"sweep{batches}"
            count = write_sweep(sweep, batches, lengths)
            found[f"sweep of {count:,} experiments"] = measure(sweep)
        run = Path(folder) / "run"
        write_run(run, STEPS)
        size_mb = (run / "training_log.json").stat().st_size / 1e6
        found[f"run of {STEPS:,} steps ({size_mb:,.0f} MB)"] = measure(run)
    for name, one in found.items():
        print(f"{name:36}{one['seconds']:9}{one['cpu_seconds']:8}{one['peak_mb']:9}{one['page_kb']:9}")
    limits = {"seconds": LIMIT_S, "peak_mb": LIMIT_MB, "page_kb_of_64_experiments": LIMIT_PAGE_KB}
    load = os.getloadavg()[0]
    print(f"load of the machine meanwhile: {load:.1f} processes; the seconds include waiting for a core")
    print(f"limits: {LIMIT_S} s, {LIMIT_MB} MB; {LIMIT_PAGE_KB} kB for the page of 64 experiments")
    print(json.dumps({"found": found, "limits": limits}))


if __name__ == "__main__":
    main()
