"""A sweep's worker without torch. Its figures follow from its case: each can be told from the others.

A progress file, a line in the log, the result on the supervisor's descriptor, in a fraction of a second.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from truemfu.plain_files import append
from truemfu.records import (
    CaseResult,
    Environment,
    Flops,
    GradientCheck,
    Measured,
    Memory,
    Phase,
    Status,
    StepTimes,
    encode,
)
from truemfu.sweep.order import Progress, WorkerOrder, append_progress, decode_order


def measured(order: WorkerOrder) -> CaseResult:
    """The result of an order."""
    case = order.case
    seconds, tokens = 0.01 * case.batch_size, case.batch_size * case.seq_len
    steps = StepTimes(
        times_s=[seconds] * 3,
        median_s=seconds,
        mean_s=seconds,
        p10_s=seconds,
        p90_s=seconds,
        relative_error=0.001,
        source="the host's clock",
        stable=True,
    )
    flops = Flops(
        model_flops=1000 * tokens,
        hardware_flops=1100 * tokens,
        model_method="given",
        hardware_method="given",
        attention="full",
        peak_flops_per_s=None,
        peak_source=None,
        mfu=None,
        hfu=None,
    )
    return CaseResult(
        name=order.name,
        sweep_id=order.sweep_id,
        content_hash=order.content_hash,
        case=case,
        end=Status.OK,
        phase=Phase.DONE,
        parameters=1234,
        measured=Measured(
            steps=steps,
            tokens_per_step=tokens,
            tokens_per_s=tokens / seconds,
            samples_per_s=case.batch_size / seconds,
            flops=flops,
            data_wait_s=0.0,
            final_loss=1.0 / case.batch_size,
            trace=None,
        ),
        memory=Memory(process_bytes=case.batch_size << 20),
        gate=GradientCheck(
            passed=True,
            relative_error=1e-7,
            tolerance=1e-4,
            model="reference",
            batch_size=3,
            seq_len=5,
            clipped=False,
        ),
        environment=Environment(device_name="cpu", python="3", versions={}, host="host", git_commit=None),
    )


def main() -> None:
    """Answer one order."""
    line = sys.stdin.buffer.readline()
    if not line.strip():
        return
    order = decode_order(line)
    run = Path(order.folder) / "runs" / order.name
    for phase in (Phase.GRADIENT_CHECK, Phase.TIMED, Phase.DONE):
        append_progress(Path(order.progress_path), Progress(phase=phase, at_s=time.time()))
        append(Path(order.log_path), f"{phase.value}\n".encode())
        time.sleep(float(os.environ.get("TRUEMFU_FAULTS_PHASE_S", "0")))
    run.mkdir(parents=True, exist_ok=True)
    (run / "events").write_text("events\n")
    os.write(int(os.environ["TRUEMFU_SWEEP_ANSWER"]), encode(measured(order)))


if __name__ == "__main__":
    main()
