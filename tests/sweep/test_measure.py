"""The timed pass, the count beside it, and what is written to a run's folder."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from truemfu.errors import UsageError
from truemfu.records import SweepCase
from truemfu.sweep.trainers.base import PRIVATE, TRAINERS, TrainerSettings, load_trainer
from truemfu.sweep.worker.case_model import build_case_model, endless_batches
from truemfu.sweep.worker.measure import (
    count_needed,
    count_work,
    median_error,
    step_times,
    time_steps,
    warm_up,
)
from truemfu.sweep.worker.models import parameter_count
from truemfu.sweep.worker.run_files import clear_run_folder, write_trace

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

CPU = torch.device("cpu")
CASE = SweepCase(trainer="StandardTrainer", model="tiny", batch_size=2, seq_len=8, dtype="fp32", device="cpu")


class Scripted:
    """A trainer whose steps take as long as it is told, by a clock of its own."""

    private = False

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.steps, self.now_s = seconds, 0, 0.0

    def clock(self) -> float:
        return self.now_s

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        self.now_s += self.seconds[self.steps % len(self.seconds)]
        self.steps += 1
        return torch.tensor(float(self.steps), requires_grad=True)


def nothing() -> Iterator[dict[str, Any]]:
    while True:
        yield {}


def case(**changes: Any) -> SweepCase:
    return msgspec.structs.replace(CASE, **changes)


def test_steady_steps_end_at_the_least_number() -> None:
    trainer = Scripted([0.25])
    limits = case(min_steps=6, max_steps=50, target_spread=0.005)
    timed = time_steps(trainer, nothing(), limits, CPU, now_s=trainer.clock)
    assert timed.steps.times_s == [0.25] * 6
    assert trainer.steps == len(timed.steps.times_s) == len(timed.losses) == 6
    assert timed.steps.stable
    assert timed.steps.source == "host clock"
    assert timed.losses == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


def test_restless_steps_go_on_until_the_largest_number_and_say_so() -> None:
    trainer = Scripted([0.25, 0.5])
    limits = case(min_steps=6, max_steps=20, target_spread=1e-6)
    timed = time_steps(trainer, nothing(), limits, CPU, now_s=trainer.clock)
    assert trainer.steps == 20
    assert not timed.steps.stable


def test_no_step_is_timed_after_the_time_is_up_once_there_are_enough() -> None:
    trainer = Scripted([0.25, 0.5])
    limits = case(min_steps=6, max_steps=1000, target_spread=1e-6, max_timed_s=5.0)
    timed = time_steps(trainer, nothing(), limits, CPU, now_s=trainer.clock)
    # 2.25 s, as many again, one in the 0.5 s that are left, and one in the last 0.25 s.
    assert len(timed.steps.times_s) == 6 + 6 + 1 + 1


def test_the_wait_for_data_is_measured_and_is_part_of_the_step() -> None:
    trainer = Scripted([0.25])

    def slowly() -> Iterator[dict[str, Any]]:
        while True:
            trainer.now_s += 0.125
            yield {}

    limits = case(min_steps=5, max_steps=5)
    timed = time_steps(trainer, slowly(), limits, CPU, now_s=trainer.clock)
    assert (timed.data_wait_s, timed.steps.median_s) == (0.125, 0.375)


def test_statistics_are_those_of_the_steps() -> None:
    steps = step_times([0.3, 0.1, 0.2, 0.5, 0.4], target_spread=10.0, source="host clock")
    assert steps.times_s == [0.3, 0.1, 0.2, 0.5, 0.4]
    assert steps.median_s == pytest.approx(0.3)
    assert steps.mean_s == pytest.approx(0.3)
    assert (steps.p10_s, steps.p90_s) == (pytest.approx(0.14), pytest.approx(0.46))


def test_the_error_of_the_median_is_the_spread_of_medians_of_repeated_runs() -> None:
    draw = random.Random(0)
    runs = [[draw.lognormvariate(0.0, 0.2) for _ in range(40)] for _ in range(2000)]
    truth = statistics.stdev(statistics.median(run) for run in runs)
    told = statistics.fmean(median_error(run) or 0.0 for run in runs)
    assert told == pytest.approx(truth, rel=0.15)


def test_few_steps_have_no_error_and_are_never_stable() -> None:
    assert median_error([0.1, 0.1, 0.1, 0.1]) is None
    assert not step_times([0.1] * 4, target_spread=1.0, source="host clock").stable


def test_batches_are_whole_contiguous_and_the_same_in_every_run() -> None:
    built = build_case_model(CASE, CPU)
    first, second = endless_batches(built, CASE, CPU), endless_batches(built, CASE, CPU)
    drawn = [next(first) for _ in range(40)]
    assert all(one["input_ids"].shape == (2, 8) and one["input_ids"].is_contiguous() for one in drawn)
    assert all(torch.equal(one["input_ids"], one["labels"]) for one in drawn)
    assert not torch.equal(drawn[0]["input_ids"], drawn[1]["input_ids"])
    assert all(torch.equal(one["input_ids"], next(second)["input_ids"]) for one in drawn)


def test_weights_come_from_the_seed() -> None:
    weights = [build_case_model(case(seed=seed), CPU).model.head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_config_is_built_with_weights_in_the_dtype_of_the_case(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 100,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    built = build_case_model(case(model=str(tmp_path), dtype="bf16"), CPU)
    assert {(p.dtype, p.device.type) for p in built.model.parameters()} == {(torch.bfloat16, "cpu")}
    # embedding and head, four attention matrices, three of the MLP, three norms
    assert parameter_count(built.model) == 2 * 100 * 32 + 4 * 32 * 32 + 3 * 32 * 64 + 3 * 32


@pytest.mark.parametrize("name", TRAINERS)
def test_model_flops_are_the_same_under_every_trainer_and_executed_ones_are_not(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    built = build_case_model(CASE, CPU)
    trainer = load_trainer(name)(built.model, TrainerSettings())
    batches = endless_batches(built, CASE, CPU)
    warm_up(trainer, batches, 1, CPU)
    flops = count_work(trainer, next(batches), CASE, CPU, step_time_s=1.0, needed=count_needed(CASE))
    # Per token: 2·parameters of the matrices, and 4·hidden·tokens of attention in each layer; backward twice.
    matrices = 2 * 12 * 64 * 64 + 64 * 1000
    assert flops.model_flops == 3 * 16 * (2 * matrices + 2 * 4 * 64 * 8)
    assert (flops.hardware_flops > 1.01 * flops.model_flops) is (name in PRIVATE)
    assert flops.mfu == pytest.approx(flops.model_flops / 1e12)
    assert flops.hfu == pytest.approx(flops.hardware_flops / 1e12)
    assert flops.uncounted == {}


def test_without_a_peak_there_is_no_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    built = build_case_model(CASE, CPU)
    trainer = load_trainer("StandardTrainer")(built.model, TrainerSettings())
    flops = count_work(
        trainer,
        next(endless_batches(built, CASE, CPU)),
        CASE,
        CPU,
        step_time_s=1.0,
        needed=count_needed(CASE),
    )
    assert (flops.peak_flops_per_s, flops.mfu, flops.hfu) == (None, None, None)


@pytest.fixture
def tiny_steps() -> tuple[Any, Iterator[dict[str, Any]]]:
    built = build_case_model(CASE, CPU)
    return load_trainer("StandardTrainer")(built.model, TrainerSettings()), endless_batches(built, CASE, CPU)


def steps_in(trace: Path) -> int:
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return sum(1 for event in events if str(event.get("name", "")).startswith("ProfilerStep#"))


def test_a_trace_holds_the_steps_that_were_asked_for(tiny_steps: Any, tmp_path: Path) -> None:
    trace = tmp_path / "x.pt.trace.json.gz"
    assert write_trace(*tiny_steps, case(profiled_steps=3), CPU, trace) == (3, None)
    assert steps_in(trace) == 3
    assert list(tmp_path.iterdir()) == [trace]


def test_a_trace_above_the_limit_is_made_again_with_fewer_steps(tiny_steps: Any, tmp_path: Path) -> None:
    trace = tmp_path / "x.pt.trace.json.gz"
    write_trace(*tiny_steps, case(profiled_steps=1), CPU, trace)
    one_step = len(gzip.decompress(trace.read_bytes()))
    limits = case(profiled_steps=4, max_trace_bytes=int(2.5 * one_step))
    steps, note = write_trace(*tiny_steps, limits, CPU, trace)
    assert 1 <= steps < 4
    assert note is not None
    assert note.startswith(f"{steps} of 4 steps in the trace")
    assert steps_in(trace) == steps
    assert len(gzip.decompress(trace.read_bytes())) <= limits.max_trace_bytes


def test_a_trace_that_can_never_fit_is_dropped_with_a_note(tiny_steps: Any, tmp_path: Path) -> None:
    trace = tmp_path / "x.pt.trace.json.gz"
    steps, note = write_trace(*tiny_steps, case(profiled_steps=2, max_trace_bytes=10), CPU, trace)
    assert steps == 0
    assert note is not None
    assert note.startswith("no of 2 steps in the trace")
    assert list(tmp_path.iterdir()) == []


def test_no_trace_where_none_is_asked_for(tiny_steps: Any, tmp_path: Path) -> None:
    assert write_trace(*tiny_steps, case(profiled_steps=0), CPU, tmp_path / "x.gz") == (0, None)


def test_a_trace_that_cannot_be_written_is_a_note(tiny_steps: Any, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "x.pt.trace.json.gz"
    steps, note = write_trace(*tiny_steps, case(profiled_steps=1), CPU, missing)
    assert steps == 0
    assert note is not None
    assert note.startswith("no trace: ")


def test_what_an_earlier_run_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    assert clear_run_folder(folder) is None
    (folder / "old.gz").touch()
    assert clear_run_folder(folder) is None
    assert list(folder.iterdir()) == []
    (tmp_path / "file").touch()
    assert clear_run_folder(tmp_path / "file" / "x") == "x cannot be written to: Not a directory"


def test_a_model_without_tokens_trains_on_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    brought = build_case_model(case(model=f"{Path(__file__).stem}:regressor"), CPU)
    assert brought.brought_batch
    batches = endless_batches(brought, CASE, CPU)
    trainer = load_trainer("StandardTrainer")(brought.model, TrainerSettings(learning_rate=0.1))
    losses = [trainer.step(next(batches)).item() for _ in range(20)]
    assert losses[-1] < losses[0]


def regressor() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return nn.Linear(4, 2), {"input": torch.rand(6, 4)}


def classifier() -> tuple[nn.Module, dict[str, Tensor]]:
    """Takes no labels: they are for the loss."""
    return nn.Sequential(nn.Linear(4, 3)), {"input": torch.rand(6, 4), "labels": torch.arange(6) % 3}


def test_labels_that_the_model_does_not_take_are_no_obstacle_to_its_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    one = case(model=f"{Path(__file__).stem}:classifier")
    built = build_case_model(one, CPU)
    trainer = load_trainer("StandardTrainer")(built.model, TrainerSettings())
    flops = count_work(
        trainer, next(endless_batches(built, one, CPU)), one, CPU, step_time_s=1.0, needed=count_needed(one)
    )
    assert flops.model_flops == flops.hardware_flops == 2 * 2 * 6 * 4 * 3  # no gradient for the input


BERT = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 32}


@pytest.mark.parametrize(
    "config",
    [
        {**BERT, "architectures": ["BertForSequenceClassification"]},
        {**BERT, "architectures": ["BertForTokenClassification"]},
        {**BERT, "architectures": ["BertForMaskedLM"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "num_layers": 1, "d_model": 32},
    ],
    ids=lambda config: config["architectures"][0],
)
def test_heads_of_all_kinds_are_trained_and_counted(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = case(model=str(tmp_path))
    built = build_case_model(one, CPU)
    trainer = load_trainer("StandardTrainer")(built.model, TrainerSettings(learning_rate=0.01))
    batches = endless_batches(built, one, CPU)
    assert trainer.step(next(batches)) > 0
    flops = count_work(trainer, next(batches), one, CPU, step_time_s=1.0, needed=count_needed(one))
    assert 0 < flops.model_flops <= flops.hardware_flops


def test_a_sequence_longer_than_the_positions_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 24, "n_positions": 64}))
    build_case_model(case(model=str(path), seq_len=64), CPU)
    with pytest.raises(
        UsageError, match=r"64 positions \(transformer.wpe\): too few for a sequence length of"
    ):
        build_case_model(case(model=str(path), seq_len=65), CPU)
    path.write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 1,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 64,
            }
        )
    )
    build_case_model(case(model=str(path), seq_len=65), CPU)  # rotary: a habit, not a limit
