"""The step that is marked for Nsight Compute, and the count that is written for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_notes import RowSide, Thread
from torch import nn

from truemfu import Convention, FlopCount, count_flops
from truemfu.flops.count.counted_step import CountedStep
from truemfu.flops.count.step_work import StepWork, work_of
from truemfu.flops.observe.observation import OBSERVED
from truemfu.hardware.nsight.audit import audit_of
from truemfu.hardware.nsight.command import COUNT_VARIABLE, ProductWork, StepCount, read_step_count
from truemfu.hardware.nsight.csv_output import parse_ncu_csv
from truemfu.monitor.hybrid.audit_step import AuditStep, Marks
from truemfu.monitor.ranks.this_rank import ThisRank
from truemfu.monitor.step_flops.source import FlopsSource
from truemfu.monitor.step_note import WARMUP_STEPS, ObservedStep, StepNote
from truemfu.sweep.sizes import SIZES
from truemfu.sweep.worker.models import ReferenceModel

H200_STEP = Path(__file__).parent.parent / "hardware" / "ncu" / "h200_step_2_layers.csv"
CPU = torch.device("cpu")
WIDTH, CLASSES, ROWS = 16, 8, 4


class Recorder:
    """Stands for cudaProfilerStart and Stop."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.can_start = True
        self.error: Exception | None = None

    def start(self) -> bool:
        return self._called("start") and self.can_start

    def stop(self) -> None:
        self._called("stop")

    def _called(self, name: str) -> bool:
        self.calls.append(name)
        if self.error is not None:
            raise self.error
        return True

    @property
    def marks(self) -> Marks:
        return Marks(self.start, self.stop)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "count.json"
    monkeypatch.setenv(COUNT_VARIABLE, str(path))
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def audit(path: Path, said: list[str], recorder: Recorder) -> AuditStep:
    audit = AuditStep.from_environment(alone(), CPU, said.append, marks=recorder.marks)
    assert audit is not None
    return audit


def alone(rank: int = 0, world_size: int = 1) -> ThisRank:
    return ThisRank(rank, world_size, print)


def counting(note: StepNote) -> FlopsSource:
    """The row side, after it has learned from the marked step."""
    flops = RowSide().flops
    flops.learn(note)
    return flops


def step_note(model: nn.Module, *batches: dict[str, Any]) -> StepNote:
    """The third step, which is observed."""
    return Thread().observe(model, *batches, step=3)


class OnFakeTensors:
    """Observation of a step that is too large for the CPU of a test: its count is that on fake tensors."""

    problem, unseen_forward, before_first_batch = None, False, 0

    def __init__(self, model: nn.Module, batch: dict[str, Any]) -> None:
        self._model, self._batch = model, batch

    def count(self, documents: Sequence[Any] = ()) -> FlopCount:
        return count_flops(self._model, self._batch)

    def work(self) -> StepWork:
        tally = CountedStep(self._model, self._batch, Convention(), True, None).run()[0]
        return work_of(tally)


def reason(path: Path) -> str | None:
    count = read_step_count(path)
    assert count is not None
    assert count.process_id == os.getpid()
    return count.reason


def marked(audit: AuditStep, note: StepNote) -> None:
    audit.begin_step(WARMUP_STEPS - 1, 0)
    audit.begin_step(WARMUP_STEPS, 0)
    audit.end_step()
    audit.hand_over(note)


def test_without_the_variable_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(COUNT_VARIABLE, raising=False)
    assert AuditStep.from_environment(alone(), CPU, pytest.fail, marks=Recorder().marks) is None


def test_other_ranks_and_other_monitors_have_none(path: Path, recorder: Recorder) -> None:
    assert AuditStep.from_environment(alone(1, 2), CPU, pytest.fail, marks=recorder.marks) is None
    assert not path.exists()
    path.write_text("somebody else's")
    assert AuditStep.from_environment(alone(), CPU, pytest.fail, marks=recorder.marks) is None
    assert path.read_text() == "somebody else's"


def test_a_job_of_several_processes_is_refused_at_once(
    path: Path, said: list[str], recorder: Recorder
) -> None:
    assert AuditStep.from_environment(alone(0, 2), CPU, said.append, marks=recorder.marks) is None
    assert "a job of 2 processes cannot be audited" in (reason(path) or "")
    assert said == [f"nothing to audit: {reason(path)}"]


def test_without_cuda_there_is_nothing_to_see(path: Path, said: list[str]) -> None:
    assert AuditStep.from_environment(alone(), CPU, said.append) is None
    assert reason(path) == "the model is on cpu: Nsight Compute only profiles CUDA kernels"


def test_the_first_step_after_warm_up_is_marked_and_no_other(audit: AuditStep, recorder: Recorder) -> None:
    seen = []
    for logged in range(8):
        audit.begin_step(logged, 0)
        audit.end_step()
        audit.hand_over(note := Thread().note(step=logged))
        seen.append((list(recorder.calls), audit.wants(note)))
        recorder.calls.clear()
    assert seen == [([], False)] * WARMUP_STEPS + [(["start", "stop"], True)] + [([], False)] * (
        7 - WARMUP_STEPS
    )


def test_a_step_after_a_compilation_is_let_pass(audit: AuditStep, recorder: Recorder) -> None:
    for logged, compilations in enumerate((0, 1, 1, 2, 3)):
        audit.begin_step(logged, compilations)
        assert recorder.calls == []
    audit.begin_step(5, 3)
    assert recorder.calls == ["start"]


def test_a_mark_that_is_not_possible_now_is_set_later(audit: AuditStep, recorder: Recorder) -> None:
    recorder.can_start = False
    audit.begin_step(2, 0)
    audit.begin_step(3, 0)
    audit.end_step()
    recorder.can_start = True
    audit.begin_step(4, 0)
    audit.end_step()
    assert recorder.calls == ["start", "start", "stop"]


def test_what_runs_in_a_pause_is_not_profiled(audit: AuditStep, recorder: Recorder) -> None:
    audit.pause()
    audit.resume()
    assert recorder.calls == []
    audit.begin_step(2, 0)
    audit.begin_step(3, 0)
    audit.pause()
    audit.resume()
    audit.pause()
    audit.end_step()
    audit.resume()
    assert recorder.calls == ["start", "stop", "start", "stop"]


def test_the_count_of_the_marked_step(audit: AuditStep, path: Path, recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False))
    batches = [{"input": torch.randn(rows, WIDTH)} for rows in (ROWS, ROWS, 2 * ROWS)]
    note = step_note(model, *batches)
    marked(audit, note)
    assert (audit.wants(note), audit.patience_s > 0) == (True, True)
    assert not audit.wants(step_note(model, *batches))
    audit.write(counting(note), note)
    square, narrow = 2 * WIDTH * WIDTH, 2 * WIDTH * CLASSES
    rows = 4 * ROWS
    assert read_step_count(path) == StepCount(
        process_id=os.getpid(),
        step=3,
        attention="full",
        method=OBSERVED,
        model_flops=rows * (2 * square + 3 * narrow),  # the input needs no gradient
        hardware_flops=rows * (2 * square + 3 * narrow),
        model_flops_by_operator={"aten.addmm": rows * square, "aten.mm": rows * (square + 3 * narrow)},
        products=products(),
        attention_flops=0,
        attention_blocked_flops=0,
        few_channel_flops=0,
        grouped_flops=0,
        grouped_padded_flops=0,
    )
    assert (audit.wants(note), audit.patience_s) == (False, 0)
    written = path.read_bytes()
    audit.close(10)
    assert path.read_bytes() == written
    assert list(path.parent.iterdir()) == [path]


def products() -> tuple[ProductWork, ...]:
    """Per micro-batch: both layers, their weights' gradients, the second layer's input's."""
    flops: dict[tuple[int, int, int], int] = {}
    for rows in (ROWS, ROWS, 2 * ROWS):
        for m, n, k in (
            (rows, WIDTH, WIDTH),
            (rows, CLASSES, WIDTH),
            (CLASSES, WIDTH, rows),
            (rows, WIDTH, CLASSES),
            (WIDTH, WIDTH, rows),
        ):
            flops[m, n, k] = flops.get((m, n, k), 0) + 2 * m * n * k
    return tuple(ProductWork(m=m, n=n, k=k, flops=done) for (m, n, k), done in flops.items())


def test_the_monitors_count_is_what_an_h200_executed_to_the_last_operation(
    audit: AuditStep, path: Path
) -> None:
    model = ReferenceModel(replace(SIZES["1b"], layers=2), device="meta", dtype=torch.bfloat16)
    ids = torch.zeros(4, 512, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    observation: Any = OnFakeTensors(model, batch)
    note = Thread().note(batch, observed=ObservedStep(observation, is_whole=True), step=3)
    marked(audit, note)
    audit.write(counting(note), note)
    count = read_step_count(path)
    assert count is not None
    assert (count.model_flops, count.hardware_flops) == (2_093_796_556_800, 2_102_386_491_392)
    result = audit_of(parse_ncu_csv(H200_STEP.read_text("utf-8")), count)
    assert result.executed_flops == 2_101_044_314_112
    assert result.expected_by_kind == result.executed_by_kind
    assert result.unmatched_flops == 0


def test_a_step_without_a_count_says_so(audit: AuditStep, path: Path) -> None:
    note = Thread().note({"input": torch.randn(ROWS, WIDTH)})
    marked(audit, note)
    audit.write(RowSide().flops, note)
    assert (reason(path) or "").startswith(
        "the marked step has no count: no step with the same batch shapes was"
    )


def test_what_goes_wrong_in_the_count_goes_no_further(
    audit: AuditStep, path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of\nluck")

    note = step_note(nn.Linear(WIDTH, CLASSES), {"input": torch.randn(ROWS, WIDTH)})
    marked(audit, note)
    counted = counting(note)
    monkeypatch.setattr(FlopsSource, "count", fail)
    audit.write(counted, note)
    assert reason(path) == "the marked step could not be counted: RuntimeError: out of luck"
    assert said == [f"nothing to audit: {reason(path)}"]


def test_what_goes_wrong_at_the_marks_goes_no_further(
    audit: AuditStep, path: Path, recorder: Recorder
) -> None:
    recorder.error = RuntimeError("no driver")
    audit.begin_step(2, 0)
    audit.begin_step(3, 0)
    audit.end_step()
    assert recorder.calls == ["start"]
    assert reason(path) == "a step could not be marked: RuntimeError: no driver"


def test_a_mark_that_cannot_be_ended(audit: AuditStep, path: Path, recorder: Recorder) -> None:
    audit.begin_step(2, 0)
    audit.begin_step(3, 0)
    recorder.error = RuntimeError("gone")
    audit.end_step()
    assert reason(path) == "the marked step could not be ended: RuntimeError: gone"


def test_a_file_that_cannot_be_written_is_said(audit: AuditStep, path: Path, said: list[str]) -> None:
    path.parent.rmdir()
    audit.close(1)
    assert said[-1].startswith("the count for the audit cannot be written: ")


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_that_ends_too_soon(audit: AuditStep, path: Path, steps: int) -> None:
    for logged in range(steps):
        audit.begin_step(logged, 0)
        audit.end_step()
    audit.close(steps)
    assert (reason(path) or "").startswith(f"the run ended after {steps} steps: a step is marked after 3 ")


def test_a_run_that_ends_within_the_marked_step(audit: AuditStep, path: Path, recorder: Recorder) -> None:
    audit.begin_step(2, 0)
    audit.begin_step(3, 0)
    audit.close(3)
    assert recorder.calls == ["start", "stop"]
    assert reason(path) == "the run ended within the marked step"


def test_a_run_that_ends_before_the_count(audit: AuditStep, path: Path) -> None:
    marked(audit, Thread().note())
    audit.close(4)
    assert reason(path) == "the run ended before the marked step was counted"
