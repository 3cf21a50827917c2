"""Time between steps: data wait where that is known, and the rest."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.training_clock import TrainingClock
from torch import nn
from torch.utils.data import DataLoader, Dataset, dataloader

from truemfu import TrainingMonitor
from truemfu.monitor.summary import lines_of
from truemfu.monitor.timing.between_steps import (
    Between,
    BetweenSteps,
    Gap,
    UsualGaps,
    Wait,
)
from truemfu.monitor.timing.clock import HostClock, Span, StepClock, TimeMark

SLEEP_S = 0.05
FORWARD_S = 0.001
WARMUP = 3


CLOCK = TrainingClock()
sleep = CLOCK.sleep


@pytest.fixture(autouse=True)
def training_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    CLOCK.install(monkeypatch)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(FORWARD_S)
        return self.layer(x).square().mean()


class Slow(Dataset[torch.Tensor]):
    def __init__(self, length: int, sleep_s: float = SLEEP_S) -> None:
        self._length, self._sleep_s = length, sleep_s

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> torch.Tensor:
        if number >= self._length:
            raise IndexError
        sleep(self._sleep_s)
        return torch.ones(8)


Run = tuple[list[dict[str, Any]], dict[str, Any]]


def trained(
    folder: Path,
    batches: Callable[[TrainingMonitor], Any],
    between_steps: Callable[[TrainingMonitor, nn.Module], None] = lambda monitor, model: None,
) -> Run:
    """The rows and the summary of a run that does something after each step."""
    model = Model()
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    for step, batch in enumerate(batches(monitor), start=1):
        model(batch).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        between_steps(monitor, model)
    monitor.close()
    return json.loads((folder / "training_log.json").read_text()), monitor.summary()


def fast(monitor: TrainingMonitor) -> DataLoader[torch.Tensor]:
    return DataLoader(Slow(8, sleep_s=0.0), batch_size=1)


def means(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Seconds of data wait and of other time between steps, in the mean of the steps after warm-up."""
    steady = rows[WARMUP:]
    found = [sum(row[f"perf/{name}"] for row in steady) for name in ("data_wait", "between_steps")]
    return found[0] / len(steady), found[1] / len(steady)


def test_an_evaluation_is_other_and_its_forward_passes_are_named(tmp_path: Path) -> None:
    def evaluate(monitor: TrainingMonitor, model: nn.Module) -> None:
        for batch in DataLoader(Slow(3, sleep_s=0.02), batch_size=1):
            with torch.no_grad():
                model(batch)

    rows, summary = trained(tmp_path, fast, evaluate)
    data_wait_s, other_s = means(rows)
    assert data_wait_s < 0.02
    assert other_s > 0.06
    assert [row.get("perf/forwards_between_steps") for row in rows] == [None, *[3] * 7]
    assert summary["data_wait_share"] < 0.2
    assert summary["between_steps_share"] > 0.7
    assert summary["forwards_between_steps"] == 3 * (8 - summary["warmup_steps"])
    text = dict(lines_of(summary))["between steps, not waiting for data"]
    assert text.endswith(
        f"({summary['forwards_between_steps']} forward passes without gradients: evaluation or generation)"
    )
    passes = f"passed between steps ({summary['forwards_between_steps']} forward passes"
    assert any(passes in note for note in summary["notes"])


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_of_another_model_is_other_where_gradients_are_disabled(
    tmp_path: Path, context: Any
) -> None:
    other = Model()

    def evaluate(monitor: TrainingMonitor, model: nn.Module) -> None:
        with context():
            for batch in DataLoader(Slow(2), batch_size=1):
                other(batch)

    data_wait_s, other_s = means(trained(tmp_path, fast, evaluate)[0])
    assert data_wait_s < 0.02
    assert other_s > 2 * SLEEP_S


def test_generation_is_other(tmp_path: Path) -> None:
    def generate(monitor: TrainingMonitor, model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(5):
                model(torch.ones(1, 8))
                sleep(0.01)

    rows, summary = trained(tmp_path, fast, generate)
    assert means(rows)[0] < 0.02
    assert means(rows)[1] > SLEEP_S
    assert summary["forwards_between_steps"] == 5 * (8 - summary["warmup_steps"])


def test_a_checkpoint_is_other(tmp_path: Path) -> None:
    def save(monitor: TrainingMonitor, model: nn.Module) -> None:
        torch.save(model.state_dict(), tmp_path / "checkpoint.pt")
        sleep(SLEEP_S)

    rows, summary = trained(tmp_path, fast, save)
    assert means(rows)[0] < 0.02
    assert means(rows)[1] > SLEEP_S
    assert "perf/forwards_between_steps" not in rows[-1]
    assert dict(lines_of(summary))["between steps, not waiting for data"].endswith("% (of the time)")


def test_waiting_for_a_process_that_loads_is_data_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get_data = dataloader._MultiProcessingDataLoaderIter._get_data

    def waits(iterator: Any) -> Any:
        sleep(SLEEP_S)
        return get_data(iterator)

    monkeypatch.setattr(dataloader._MultiProcessingDataLoaderIter, "_get_data", waits)
    rows, _ = trained(tmp_path, lambda monitor: DataLoader(Slow(8, sleep_s=0.0), batch_size=1, num_workers=1))
    assert SLEEP_S < means(rows)[0] < 1.1 * SLEEP_S


def test_waiting_for_a_loader_is_data_wait(tmp_path: Path) -> None:
    rows, summary = trained(tmp_path, lambda monitor: DataLoader(Slow(8), batch_size=1))
    data_wait_s, other_s = means(rows)
    assert data_wait_s > 0.8 * SLEEP_S
    assert other_s < 0.02
    assert summary["data_wait_share"] > 0.5
    assert summary["between_steps_share"] < 0.2
    assert not any("between steps" in note for note in summary["notes"])


def test_a_loader_that_is_watched_too_is_waited_for_once(tmp_path: Path) -> None:
    rows, summary = trained(tmp_path, lambda monitor: monitor.data(DataLoader(Slow(8), batch_size=1)))
    assert SLEEP_S < means(rows)[0] < 1.9 * SLEEP_S
    assert summary["data_wait_share"] <= 1


def test_a_plain_generator_is_not_known_to_be_data(tmp_path: Path) -> None:
    def batches(monitor: TrainingMonitor) -> Iterator[torch.Tensor]:
        for _ in range(8):
            sleep(SLEEP_S)
            yield torch.ones(1, 8)

    rows, summary = trained(tmp_path, batches)
    assert all("perf/data_wait" not in row for row in rows)
    assert all(row["perf/between_steps"] > SLEEP_S for row in rows[1:])
    assert summary["data_wait_share"] is None
    assert dict(lines_of(summary))["waiting for data"].startswith("unknown")


def test_generation_before_each_forward_pass_keeps_the_wait_that_was_told(tmp_path: Path) -> None:
    model = Model()
    monitor = TrainingMonitor(tmp_path, model=model)
    for step, batch in enumerate(monitor.data(DataLoader(Slow(6), batch_size=1)), start=1):
        with torch.no_grad():
            model(batch)
        model(batch).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert all(row["perf/data_wait"] > SLEEP_S for row in rows)
    assert all(row["perf/forwards_between_steps"] == 1 for row in rows[1:])


def test_what_is_paused_is_neither(tmp_path: Path) -> None:
    def evaluate(monitor: TrainingMonitor, model: nn.Module) -> None:
        with monitor.pause():
            for batch in DataLoader(Slow(2), batch_size=1):
                with torch.no_grad():
                    model(batch)

    rows, summary = trained(tmp_path, fast, evaluate)
    assert sum(means(rows)) < SLEEP_S
    assert summary["forwards_between_steps"] == 0


def test_waits_between_micro_batches_are_data_wait_and_not_taken_off_the_rest() -> None:
    waits = [Wait(10.4, 0.3, False), Wait(11.0, 0.2, False)]
    assert Gap(10.0, 10.5, waits, 2).between() == Between(pytest.approx(0.5), pytest.approx(0.2), 2)
    assert Gap(None, 10.5, waits, 2).between() == Between(pytest.approx(0.5), None, 0)
    assert Gap(10.0, 10.5, [], 0).between() == Between(None, pytest.approx(0.5), 0)


def test_a_loader_that_is_read_without_an_end_keeps_no_memory() -> None:
    noted = BetweenSteps(now_s=iter(range(10_000)).__next__)
    for _ in range(1000):
        noted.wait_begins()
        noted.wait_ends(has_batch=True)
    assert len(noted.waits) == 64
    assert sum(wait.seconds for wait in noted.waits) == 1000


def test_a_wait_of_another_thread_is_not_the_trainings() -> None:
    noted = BetweenSteps()

    def wait() -> None:
        noted.wait_begins()
        noted.wait_ends(has_batch=True)

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    assert noted.waits == []


def test_loaders_are_left_as_they_were(tmp_path: Path) -> None:
    kind = torch.utils.data.dataloader._BaseDataLoaderIter
    before = kind.__next__
    first, second = (TrainingMonitor(tmp_path / name, model=Model()) for name in "ab")
    for monitor in (first, second):
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    assert kind.__next__ is not before
    first.close()
    assert kind.__next__ is not before
    second.close()
    assert kind.__next__ is before


def test_an_error_of_a_loader_passes(tmp_path: Path) -> None:
    class Broken(Slow):
        def __getitem__(self, number: int) -> torch.Tensor:
            raise ValueError("of the dataset")

    with TrainingMonitor(tmp_path, model=Model()) as monitor:
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
        with pytest.raises(ValueError, match="of the dataset"):
            next(iter(DataLoader(Broken(3))))


def test_evaluation_in_the_trainer_of_transformers_is_other(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            if not torch.is_grad_enabled():
                sleep(SLEEP_S)
            return {"loss": self.layer(x).square().mean(), "logits": x}

    class Rows(Dataset[dict[str, torch.Tensor]]):
        def __init__(self, length: int, sleep_s: float) -> None:
            self._length, self._sleep_s = length, sleep_s

        def __len__(self) -> int:
            return self._length

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            sleep(self._sleep_s)
            return {"x": torch.ones(8), "labels": torch.zeros(8)}

    model = Net()
    monitor = TrainingMonitor(tmp_path / "out", {"monitoring": {"peak_tflops": 1.0}}, model=model)

    class Callback(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            monitor.log_step(state.global_step, 0.0, 1.0, 1.0, 1.0)

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        max_steps=10,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(10, 0.02),
        eval_dataset=Rows(3, 0.03),
        callbacks=[Callback()],
    ).train()
    monitor.close()
    rows = json.loads((tmp_path / "out" / "training_log.json").read_text())
    steady = rows[WARMUP:-1]
    assert all(row["perf/forwards_between_steps"] == 3 for row in steady)
    for row in steady:
        assert row["perf/between_steps"] > 3 * (SLEEP_S + 0.03) * 0.9
        assert row["perf/data_wait"] < 0.08
    assert sum(row["perf/data_wait"] for row in steady) > 0.02 * len(steady) * 0.8


def test_the_end_of_an_evaluation_is_no_wait_of_the_training(tmp_path: Path) -> None:
    """An evaluation between the training's loading and its step leaves what was waited for unknown, not 0."""
    model = nn.Linear(4, 4)
    other = torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2)
    with TrainingMonitor(tmp_path, model=model) as monitor:
        for step, x in enumerate(torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2), 1):
            for y in other:
                with torch.no_grad():
                    model(y)
            model(x).sum().backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert len(rows) == 6
    assert not [row for row in rows if row.get("perf/data_wait") == 0]


def some_steps(folder: Path, steps: int, after: Callable[[TrainingMonitor, nn.Module, int], None]) -> Run:
    """A run on batches that take no time, with something after each step."""
    model = Model()
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    for step in range(1, steps + 1):
        loss = model(torch.ones(2, 8))
        loss.backward()
        monitor.log_step(step, 0, loss, 1.0, 1.0)
        after(monitor, model, step)
    monitor.close()
    rows = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    return rows, monitor.summary()


def test_an_evaluation_now_and_then_is_no_part_of_a_step(tmp_path: Path) -> None:
    def evaluate(monitor: TrainingMonitor, model: nn.Module, step: int) -> None:
        if step % 5 == 0 and step < 20:
            with torch.no_grad():
                model(torch.ones(2, 8))
            sleep(SLEEP_S)

    rows, summary = some_steps(tmp_path, 20, evaluate)
    after = [row for row in rows if "perf/evaluation_time" in row]
    assert [row["global_step"] for row in after] == [6, 11, 16]
    assert all(row["perf/evaluation_time"] >= SLEEP_S for row in after)
    assert all(row["perf/step_time"] < SLEEP_S for row in after)
    left_out = summary["left_out"]
    assert list(left_out) == ["evaluation"]
    assert left_out["evaluation"]["times"] == 3
    assert left_out["evaluation"]["seconds"] == pytest.approx(
        sum(row["perf/evaluation_time"] for row in after)
    )
    steps_s = sum(row["perf/step_time"] for row in rows)
    assert left_out["evaluation"]["share"] == pytest.approx(
        left_out["evaluation"]["seconds"] / (left_out["evaluation"]["seconds"] + steps_s)
    )
    assert "evaluation" in dict(lines_of(summary))


def test_a_checkpoint_now_and_then_is_no_part_of_a_step_and_is_not_named(tmp_path: Path) -> None:
    rows, summary = some_steps(
        tmp_path, 12, lambda monitor, model, step: sleep(SLEEP_S if step in (6, 9) else 0)
    )
    assert [row["global_step"] for row in rows if "perf/other_pause_time" in row] == [7, 10]
    assert summary["left_out"]["other"]["times"] == 2


def test_what_happens_in_most_steps_belongs_to_them(tmp_path: Path) -> None:
    rows, summary = some_steps(tmp_path, 12, lambda monitor, model, step: sleep(SLEEP_S if step % 4 else 0))
    assert summary["left_out"] == {}
    assert sum(row.get("perf/step_time", 0.0) >= SLEEP_S for row in rows) == 9


def unusual(gaps: list[tuple[float, int]]) -> list[int]:
    """The gaps, of seconds and forward passes, that are excluded."""
    rule, clock, found = UsualGaps(), HostClock(), []
    for step, (seconds, forwards) in enumerate(gaps):
        gap = Gap(0.0, seconds, (), forwards, clock.mark(seconds))
        if rule.excluded(gap, Span(clock.mark(0.0), clock.mark(seconds + 0.1), ())):
            found.append(step)
    return found


def test_an_evaluation_in_each_step_belongs_to_it_however_long_it_takes_at_times() -> None:
    assert unusual([(0.002, 3)] * 8 + [(0.4, 3)] + [(0.002, 3)] * 8 + [(0.4, 5)]) == []
    assert unusual([(0.002, 3)] * 8 + [(0.4, 30)]) == [8]
    assert unusual([(0.002, 0)] * 8 + [(0.4, 3)]) == [8]
    assert unusual([(0.4, 0)] * 8 + [(0.3, 0), (0.9, 0)]) == [9]


def test_a_gap_of_unknown_length_makes_the_steps_time_unknown() -> None:
    clock = HostClock()
    gap = Gap(0.0, 1.0, (), 0, TimeMark(1.0, None))
    assert UsualGaps().excluded(gap, Span(clock.mark(0.0), clock.mark(2.0), ()))


def test_a_step_without_waits_does_not_get_those_of_the_next() -> None:
    noted = BetweenSteps(now_s=iter(range(100)).__next__)
    first = noted.take()
    noted.wait_begins()
    noted.wait_ends(has_batch=True)
    assert (first.waits, len(noted.take().waits)) == ((), 1)


def test_a_device_that_fails_at_a_mark_does_not_fail_in_the_loader() -> None:
    class Broken(HostClock):
        def mark(self, now_s: float) -> TimeMark:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    noted = BetweenSteps(now_s=iter(range(100)).__next__)
    noted.end_s = 0.0
    noted.mark_with(StepClock(Broken()))
    noted.wait_begins()
    noted.wait_ends(has_batch=True)
    assert [wait.marks for wait in noted.take().waits] == [None]


def test_a_wait_for_data_after_an_evaluation_stays_in_the_step(tmp_path: Path) -> None:
    model = Model()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    for step, batch in enumerate(monitor.data(DataLoader(Slow(12), batch_size=2)), 1):
        loss = model(batch)
        loss.backward()
        monitor.log_step(step, 0, loss, 1.0, 1.0)
        if step == 5:
            with torch.no_grad():
                model(batch)
            sleep(4 * SLEEP_S)
    monitor.close()
    row = json.loads((tmp_path / "training_log.json").read_text(encoding="utf-8"))[5]
    assert row["perf/evaluation_time"] >= 4 * SLEEP_S
    assert 2 * SLEEP_S <= row["perf/data_wait"] <= row["perf/step_time"] < 4 * SLEEP_S
    assert row["perf/between_steps"] < SLEEP_S


@pytest.mark.parametrize("kind", ["evaluation", "checkpoint", "generation", "other"])
def test_each_kind_of_pause_has_its_own_time(tmp_path: Path, kind: str) -> None:
    def pause(monitor: TrainingMonitor, model: nn.Module, step: int) -> None:
        if step == 2:
            with monitor.pause(kind):
                sleep(SLEEP_S)

    rows, summary = some_steps(tmp_path, 4, pause)
    name = "other_pause" if kind == "other" else kind
    assert [row.get(f"perf/{name}_time", 0.0) >= SLEEP_S for row in rows] == [False, False, True, False]
    assert {kind: paused["times"] for kind, paused in summary["left_out"].items()} == {kind: 1}


@pytest.mark.filterwarnings("ignore:pause expects")
def test_a_pause_of_another_name_is_other(tmp_path: Path) -> None:
    def pause(monitor: TrainingMonitor, model: nn.Module, step: int) -> None:
        with monitor.pause("lunch"):
            pass

    _, summary = some_steps(tmp_path, 3, pause)
    assert list(summary["left_out"]) == ["other"]
    assert [text for text in summary["warnings"] if "lunch" in text and "evaluation" in text]


def test_everything_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    model, folder = Model(), tmp_path / "out"
    with TrainingMonitor(folder, model=model) as monitor:
        assert not model._forward_pre_hooks
        for step, batch in enumerate(monitor.data([torch.ones(2, 8)] * 3)):
            monitor.observe({"x": batch})
            with monitor.pause("evaluation"):
                loss = model(batch)
            monitor.log_step(step, 0, loss, 1.0, 1.0)
        monitor.save_logs()
        summary = monitor.summary()
    assert (summary["steps"], summary["warnings"], folder.exists()) == (0, [], False)
