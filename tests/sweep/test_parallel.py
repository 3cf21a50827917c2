"""Experiments on several GPUs: real ranks on gloo, a rank that fails, names, hashes and wrong settings."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch
from supervised import HERE, Recorder, processes_of_sweeps, small
from tests.versions import HAS_FSDP2_ON_CPU

from truemfu.errors import UsageError
from truemfu.flops import count_step
from truemfu.records import CaseResult, Flops, Phase, Status, SweepCase
from truemfu.sweep.cases import cases_of
from truemfu.sweep.config import SweepConfig, override, parse
from truemfu.sweep.content_hash import content_hash, hashed_environment
from truemfu.sweep.folder_claim import claim
from truemfu.sweep.supervisor.memory_fit import propose
from truemfu.sweep.supervisor.runner import SweepOutcome, run_sweep
from truemfu.sweep.supervisor.state import CaseState
from truemfu.sweep.trainers.base import TrainerSettings
from truemfu.sweep.trainers.standard import StandardTrainer
from truemfu.sweep.worker.case_model import build_case_model, endless_batches
from truemfu.sweep.worker.measure import TimedPass, count_needed, step_times, summed, together

CPU = torch.device("cpu")
MARK = "TRUEMFU_TEST_FOLDER"


def two(parallel: str = "ddp", **settings: object) -> SweepConfig:
    return small(gpus_per_experiment=[2], parallel=parallel, batch_sizes=[4], **settings)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    monkeypatch.setenv(MARK, str(tmp_path))


def ran(config: SweepConfig, folder: Path, listener: Recorder | None = None) -> SweepOutcome:
    return run_sweep(config, folder / "sweep", listener=listener or Recorder())


@pytest.mark.usefixtures("here")
def test_book_keeping_runs_on_several_ranks_and_passes_its_check_there(tmp_path: Path) -> None:
    parallel = "fsdp2" if HAS_FSDP2_ON_CPU else "ddp"
    (result,) = ran(two(parallel, trainers=["DPBookKeepingTrainer"]), tmp_path).results
    assert (result.end, result.message) == (Status.OK, None)
    assert result.gate is not None
    assert result.gate.passed
    assert result.gate.clipped


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_together_have_the_flops_of_as_many_single_processes(parallel: str, tmp_path: Path) -> None:
    if parallel == "fsdp2" and not HAS_FSDP2_ON_CPU:
        pytest.skip("FSDP2 on a CPU needs a newer torch")
    (result,) = ran(two(parallel, trainers=["StandardTrainer"], profiled_steps=1), tmp_path).results
    assert (result.end, result.message, result.notes) == (Status.OK, None, [])
    assert result.name == f"StandardTrainer_bs4_seq16_{parallel}x2"
    case, measured = result.case, result.measured
    assert (case.gpus, case.parallel) == (2, parallel)
    assert measured is not None
    assert measured.flops is not None
    built = build_case_model(case, CPU)
    trainer = StandardTrainer(built.model, TrainerSettings())
    executed = count_step(trainer.step, next(endless_batches(built, case, CPU)))
    assert measured.flops.model_flops == 2 * count_needed(case).model_flops
    assert measured.flops.hardware_flops == 2 * executed.hardware_flops
    assert measured.flops.peak_flops_per_s == 2e12
    step_time_s = measured.steps.median_s
    assert measured.flops.mfu == pytest.approx(measured.flops.model_flops / step_time_s / 2e12)
    assert measured.tokens_per_step == 2 * 4 * 16
    assert measured.tokens_per_s == pytest.approx(2 * 4 * 16 / step_time_s)
    assert [rank.rank for rank in measured.ranks] == [0, 1]
    assert step_time_s == max(rank.step_time_s for rank in measured.ranks)
    peaks = [rank.memory.process_bytes or 0 for rank in measured.ranks]
    assert result.memory is not None
    assert result.memory.process_bytes == max(peaks)
    assert min(peaks) > 0
    assert measured.trace is not None
    assert (tmp_path / "sweep" / measured.trace).is_file()
    assert result.gate is not None
    assert result.gate.passed
    assert result.parameters == sum(parameter.numel() for parameter in built.model.parameters())
    assert processes_of_sweeps(f"{MARK}={tmp_path}") == []


RANK_FAULTS = {
    "Raises": (Status.ERROR, 1, None, "rank 1: RuntimeError: the loss has exploded"),
    "OutOfGpuMemory": (Status.CUDA_OOM, 1, None, "rank 1: OutOfMemoryError: CUDA out of memory."),
    "KillsItself": (Status.SIGNAL, None, "SIGKILL", "rank 1: ended by SIGKILL in phase warm_up"),
    "Exits": (Status.ERROR, 3, None, "rank 1: exited with code 3 in phase warm_up without a result: "),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("fault", RANK_FAULTS)
def test_ranks_end_with_the_cause_of_the_one_that_failed(fault: str, tmp_path: Path) -> None:
    status, exit_code, signal_name, message = RANK_FAULTS[fault]
    (result,) = ran(two(trainers=[f"failing_ranks:{fault}"], find_fit=False), tmp_path).results
    assert (result.end, result.exit_code, result.signal) == (status, exit_code, signal_name)
    assert result.phase is Phase.WARM_UP
    assert (result.message or "").startswith(message)
    assert result.environment is not None
    assert result.environment.host
    assert processes_of_sweeps(f"{MARK}={tmp_path}") == []


@pytest.mark.usefixtures("here")
def test_ranks_without_a_profiler_have_no_trace_and_go_on(tmp_path: Path) -> None:
    (result,) = ran(two(trainers=["failing_ranks:StartsNoProfiler"], profiled_steps=1), tmp_path).results
    assert (result.end, result.message) == (Status.OK, None)
    assert result.measured is not None
    assert result.measured.trace is None
    assert result.measured.trace_note == "no trace: RuntimeError: the profiler is in use"


@pytest.mark.usefixtures("here")
def test_ranks_that_do_not_share_their_gradients_are_incorrect(tmp_path: Path) -> None:
    (result,) = ran(two(trainers=["failing_ranks:TrainsAlone"]), tmp_path).results
    assert (result.end, result.phase, result.measured) == (Status.INCORRECT, Phase.GRADIENT_CHECK, None)
    assert "differs from the mean per-sample gradient" in (result.message or "")


@pytest.mark.usefixtures("here")
def test_ranks_of_a_private_trainer_are_unsupported(tmp_path: Path) -> None:
    trainer = "DPGhostClippingTrainer"
    (result,) = ran(two(trainers=[trainer]), tmp_path).results
    assert result.end is Status.UNSUPPORTED
    assert result.message == (
        f"{trainer} runs on one GPU: per-sample clipping and noise over several ranks are not supported; "
        "set gpus_per_experiment to 1"
    )


class _StopsOnceItHangs(Recorder):
    """Presses Ctrl-C twice as soon as a rank hangs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._file = folder / "hangs"

    def changed(self, name: str, state: CaseState) -> None:
        if self._file.exists():
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("here")
def test_ranks_that_hang_and_ignore_term_are_ended_by_an_interrupt(tmp_path: Path) -> None:
    outcome = ran(two(trainers=["failing_ranks:Hangs"]), tmp_path, _StopsOnceItHangs(tmp_path))
    assert (outcome.interrupted, outcome.results) == (True, [])
    assert processes_of_sweeps(f"{MARK}={tmp_path}") == []


def test_names_have_a_suffix_only_on_several_gpus() -> None:
    several = small(trainers=["StandardTrainer"], gpus_per_experiment=[4, 1, 2], parallel="fsdp2")
    assert list(cases_of(several, "cpu")) == [
        "StandardTrainer_bs2_seq16",
        "StandardTrainer_bs2_seq16_fsdp2x2",
        "StandardTrainer_bs2_seq16_fsdp2x4",
    ]
    assert cases_of(several, "cpu")["StandardTrainer_bs2_seq16"].parallel is None


def test_one_number_of_gpus_needs_no_list() -> None:
    assert parse({"gpus_per_experiment": 2, "parallel": "ddp"}).gpus_per_experiment == [2]


def test_how_many_gpus_and_how_they_share_the_training_count_in_the_hash() -> None:
    environment = hashed_environment("cpu", None)
    case = SweepCase(trainer="StandardTrainer", model="tiny", batch_size=4, seq_len=16)
    on_two = msgspec.structs.replace(case, gpus=2, parallel="ddp")
    hashes = {content_hash(one, environment) for one in (case, on_two)}
    hashes.add(content_hash(msgspec.structs.replace(on_two, parallel="fsdp2"), environment))
    assert len(hashes) == 3


WRONG = {
    "no GPU": ({"gpus_per_experiment": 0}, "gpus_per_experiment must be a whole number >= 1; got 0"),
    "no number": ({"gpus_per_experiment": ["two"]}, "gpus_per_experiment must be a whole number; got 'two'"),
    "none at all": ({"gpus_per_experiment": []}, "gpus_per_experiment is empty: nothing to run"),
    "an unknown way": (
        {"gpus_per_experiment": 2, "parallel": "fsdp"},
        "parallel must be one of ddp, fsdp2; got 'fsdp' (did you mean 'fsdp2'?)",
    ),
    "one GPU": (
        {"parallel": "ddp"},
        "parallel is ddp, but gpus_per_experiment is 1: leave parallel out, or set "
        "gpus_per_experiment to 2 or more",
    ),
    "no way": ({"gpus_per_experiment": [1, 4]}, "gpus_per_experiment is 4: set parallel to ddp or fsdp2"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_settings_are_one_line(wrong: str) -> None:
    settings, message = WRONG[wrong]
    with pytest.raises(UsageError) as caught:
        parse(settings)
    assert str(caught.value) == message


def test_a_folder_takes_more_gpus_but_not_another_way_to_use_them(tmp_path: Path) -> None:
    one = small(trainers=["StandardTrainer"])

    def claimed(config: SweepConfig) -> list[str]:
        _, record, lock = claim(tmp_path, config, cases_of(config, "cpu"), start_over=False)
        lock.release()
        return record.cases

    one = msgspec.structs.replace(one, dtypes=["fp32"])
    assert claimed(one) == ["StandardTrainer_bs2_seq16"]
    both = ["StandardTrainer_bs2_seq16", "StandardTrainer_bs2_seq16_ddpx2"]
    assert claimed(override(one, gpus_per_experiment=[1, 2], parallel="ddp")) == both
    assert claimed(one) == both
    with pytest.raises(UsageError, match="parallel is ddp there and fsdp2 here"):
        claimed(override(one, gpus_per_experiment=[2], parallel="fsdp2"))


def test_memory_that_does_not_suffice_on_two_gpus_says_nothing_about_one() -> None:
    def result(gpus: int, batch_size: int, end: Status) -> CaseResult:
        case = SweepCase(
            trainer="T", model="tiny", batch_size=batch_size, seq_len=16, gpus=gpus, parallel="ddp"
        )
        name = f"T_bs{batch_size}_seq16_{gpus}"
        return CaseResult(name=name, sweep_id="s", content_hash="c", case=case, end=end, phase=Phase.DONE)

    tried: list[tuple[int, int]] = []

    def probe(case: SweepCase) -> CaseResult:
        tried.append((case.gpus, case.batch_size))
        return result(case.gpus, case.batch_size, Status.OK if case.batch_size <= 2 else Status.CUDA_OOM)

    results = [result(1, 3, Status.OK), result(2, 4, Status.CUDA_OOM)]
    assert dict(propose(results, probe)) == {"T_bs4_seq16_2": "batch 2 fits; batch 3 does not"}
    assert tried == [(2, 2), (2, 3)]


def test_a_job_has_the_step_time_of_its_slowest_rank() -> None:
    quick = TimedPass(
        steps=step_times([1.0, 1.0, 9.0], 0.1, "host clock"), losses=[4.0, 2.0], data_wait_s=0.1
    )
    slow = TimedPass(steps=step_times([2.0, 2.0, 2.0], 0.1, "host clock"), losses=[2.0, 4.0], data_wait_s=0.2)
    assert together([quick, slow]) == TimedPass(steps=slow.steps, losses=[3.0, 3.0], data_wait_s=0.2)


def test_mfu_is_over_the_peak_of_all_devices() -> None:
    def flops(model: int, peak: float | None) -> Flops:
        return Flops(
            model_flops=model,
            hardware_flops=2 * model,
            model_method="m",
            hardware_method="h",
            attention="full",
            peak_flops_per_s=peak,
            peak_source="s",
            mfu=None,
            hfu=None,
        )

    both = summed([flops(100, 50.0), flops(300, 150.0)], 4.0)
    assert (both.model_flops, both.hardware_flops, both.peak_flops_per_s) == (400, 800, 200.0)
    assert (both.mfu, both.hfu) == (0.5, 1.0)
    assert summed([flops(100, 50.0), flops(300, None)], 4.0).mfu is None
