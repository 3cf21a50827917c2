"""What reports are made of: recorded experiments (four trainers at two points, one of them out of memory),
and a training run that a real monitor watched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from watched_training import train_watched

from truemfu.records import (
    CaseResult,
    Environment,
    Flops,
    GradientCheck,
    Measured,
    Memory,
    Phase,
    RankFigures,
    Status,
    StepTimes,
    SweepCase,
    SweepRecord,
    encode,
    write_record,
)

GIB = 2**30
SWEEP_ID = "sweep-1"

MakeResult = Callable[..., CaseResult]
WriteSweep = Callable[..., Path]


def _name(case: SweepCase) -> str:
    suffix = f"_{case.parallel}x{case.gpus}" if case.gpus > 1 else ""
    return f"{case.trainer.rpartition(':')[2]}_bs{case.batch_size}_seq{case.seq_len}{suffix}"


def _measured(
    case: SweepCase, step_time_s: float, hardware: float, peak_flops_per_s: float | None
) -> Measured:
    tokens = case.gpus * case.batch_size * case.seq_len
    model_flops = 8_000_000_000 * tokens
    hardware_flops = int(hardware * model_flops)
    return Measured(
        steps=StepTimes(
            times_s=[step_time_s] * 20,
            median_s=step_time_s,
            mean_s=step_time_s,
            p10_s=step_time_s,
            p90_s=step_time_s,
            relative_error=0.002,
            source="CUDA events",
            stable=True,
        ),
        tokens_per_step=tokens,
        tokens_per_s=tokens / step_time_s,
        samples_per_s=case.batch_size / step_time_s,
        flops=Flops(
            model_flops=model_flops,
            hardware_flops=hardware_flops,
            model_method="count on fake tensors",
            hardware_method="count of one real step",
            attention="full",
            peak_flops_per_s=peak_flops_per_s,
            peak_source=None if peak_flops_per_s is None else "the table: NVIDIA H200, bf16",
            mfu=None if peak_flops_per_s is None else model_flops / step_time_s / peak_flops_per_s,
            hfu=None if peak_flops_per_s is None else hardware_flops / step_time_s / peak_flops_per_s,
        ),
        data_wait_s=1e-4,
        final_loss=10.4,
        trace=f"runs/{_name(case)}/{_name(case)}.pt.trace.json.gz",
        ranks=[
            RankFigures(
                rank=rank,
                host="host",
                device_name="NVIDIA H200",
                step_time_s=step_time_s,
                memory=Memory(allocated_bytes=(6 + rank) * GIB),
            )
            for rank in range(case.gpus if case.gpus > 1 else 0)
        ],
    )


@pytest.fixture
def make_result() -> MakeResult:
    """`make_result("DPSGDTrainer", 4, 512, step_time_s=0.15, memory_gib=18.0)`: one experiment."""

    def make(
        trainer: str = "StandardTrainer",
        batch_size: int = 4,
        seq_len: int = 512,
        *,
        end: Status = Status.OK,
        step_time_s: float = 0.036,
        memory_gib: float = 6.0,
        hardware: float = 1.0,
        device: str = "cuda",
        device_name: str = "NVIDIA H200",
        torch_version: str = "2.11.0",
        host: str = "host",
        gpus: int = 1,
        parallel: str | None = None,
        **fields: Any,
    ) -> CaseResult:
        case = SweepCase(
            trainer=trainer,
            model="1b",
            batch_size=batch_size,
            seq_len=seq_len,
            device=device,
            gpus=gpus,
            parallel=parallel,
        )
        ok, on_gpu = end is Status.OK, device == "cuda"
        memory = int(memory_gib * GIB)
        values: dict[str, Any] = {
            "name": _name(case),
            "sweep_id": SWEEP_ID,
            "content_hash": "0123abcd",
            "case": case,
            "end": end,
            "phase": Phase.DONE if ok else Phase.WARM_UP,
            "message": None if ok else f"it ended with {end.value}",
            "exit_code": 0 if ok else 1,
            "began_at_s": 1_790_000_000.0,
            "wall_s": 31.5,
            "parameters": 1_339_674_624,
            "measured": _measured(case, step_time_s, hardware, 989.4e12 if on_gpu else None) if ok else None,
            "memory": Memory(
                allocated_bytes=memory if on_gpu else None,
                reserved_bytes=memory + GIB if on_gpu else None,
                process_bytes=2 * GIB if on_gpu else memory,
            ),
            "gate": GradientCheck(
                passed=True,
                relative_error=3e-7,
                tolerance=1e-4,
                model="reference",
                batch_size=3,
                seq_len=5,
                clipped=trainer.startswith("DP"),
            ),
            "environment": Environment(
                device_name=device_name,
                python="3.12.3",
                versions={"torch": torch_version, "opacus": "1.6.0"},
                host=host,
                git_commit=None,
            ),
        }
        return CaseResult(**{**values, **fields})

    return make


@pytest.fixture
def matrix(make_result: MakeResult) -> list[CaseResult]:
    """Four trainers × two batches at 512 tokens; DP-SGD runs out of memory at batch 8."""
    figures = {
        "StandardTrainer": ((0.036, 6.0), (0.066, 10.0), 1.0),
        "DPSGDTrainer": ((0.144, 18.0), None, 1.3),
        "DPGhostClippingTrainer": ((0.162, 9.0), (0.165, 12.0), 2.0),
        "DPFastGradientClippingTrainer": ((0.162, 9.0), (0.198, 14.0), 2.0),
    }
    results = []
    for trainer, (*points, hardware) in figures.items():
        for batch_size, point in zip((4, 8), points, strict=True):
            if point is None:
                results.append(
                    make_result(
                        trainer,
                        batch_size,
                        end=Status.CUDA_OOM,
                        memory_gib=139.0,
                        message="CUDA out of memory: tried to allocate 2.00 GiB",
                        fits="batch 6 fits (measured: 118.2 GiB of 139.8 GiB); batch 8 does not",
                        log_tail=["building the model", "torch.OutOfMemoryError: CUDA out of memory"],
                    )
                )
            else:
                results.append(
                    make_result(
                        trainer, batch_size, step_time_s=point[0], memory_gib=point[1], hardware=hardware
                    )
                )
    return results


@pytest.fixture
def write_sweep(tmp_path: Path) -> WriteSweep:
    """`write_sweep(results, cases=[…])`: the folder as a sweep leaves it."""

    def write(results: Iterable[CaseResult], cases: list[str] | None = None, **config: Any) -> Path:
        folder = tmp_path / "sweep"
        for part in ("logs", "results", "runs", "running"):
            (folder / part).mkdir(parents=True)
        results = list(results)
        for result in results:
            write_record(folder / "results" / f"{result.name}.json", result)
            log = f"building the model\ntiming\n{encode(result).decode()}\n"
            (folder / "logs" / f"{result.name}.log").write_text(log, encoding="utf-8")
        record = SweepRecord(
            sweep_id=SWEEP_ID,
            created_at_s=1_790_000_000.0,
            truemfu_version="0.1",
            cases=cases if cases is not None else [result.name for result in results],
            config=config,
        )
        write_record(folder / "sweep.json", record)
        return folder

    return write


@pytest.fixture(scope="session")
def monitored_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder a real monitor left behind."""
    folder = tmp_path_factory.mktemp("monitored") / "run"
    train_watched(folder)
    return folder


@pytest.fixture
def run_folder(monitored_folder: Path, tmp_path: Path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(monitored_folder, tmp_path / "run"))


@pytest.fixture
def change_run(run_folder: Path) -> Callable[..., dict[str, Any]]:
    """`change_run(lambda run: run.pop("summary"))`: the run file, changed in place."""

    def change(by: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        path = run_folder / "training_run.json"
        run: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        by(run)
        path.write_text(json.dumps(run), encoding="utf-8")
        return run

    return change
