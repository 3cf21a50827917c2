"""TrainingMonitor in real training loops: what it logs is what a count and a clock say by hand."""

from __future__ import annotations

import copy
import json
import pickle
import re
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_notes import wait_until_learned
from tests.monitor.training_clock import TrainingClock
from torch import nn

from truemfu import Convention, TrainingMonitor, UsageError, count_flops
from truemfu.errors import TruemfuWarning
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.step_recorder import OwnTime
from truemfu.monitor.summary import ended_by
from truemfu.sweep.worker.models import build_reference_model

PEAK = 10.0  # TFLOP/s, made up


def config(**monitoring: Any) -> dict[str, Any]:
    return {"monitoring": {"peak_tflops": PEAK, **monitoring}}


def ids(samples: int, length: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(samples * length).reshape(samples, length) % 1000
    return {"input_ids": tokens, "labels": tokens}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """The rows of the local log."""
    found: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return build_reference_model("tiny")


def train(
    model: nn.Module,
    folder: Path,
    steps: list[list[Mapping[str, Any]]],
    *,
    first: int = 1,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Train over micro-batches, log every step, and read the log back."""
    monitor = TrainingMonitor(folder, settings or config(), model=model, **options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for step, batches in enumerate(steps, start=first):
        for batch in batches:
            output = model(**batch)
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, output.loss, 1.0, 1e-3)
    monitor.close()
    return rows_in(folder)


def flops_of(row: Mapping[str, Any]) -> float:
    """The FLOPs behind a row: its rate times its time."""
    return round(row["perf/tflops_per_gpu"] * row["perf/step_time"] * 1e12)


def executed_in(row: Mapping[str, Any]) -> float:
    return round(row["perf/hfu"] * row["perf/step_time"] * PEAK * 1e12)


def test_three_lines_log_every_metric_of_every_step(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 32)
    rows = train(model, tmp_path, [[batch]] * 50)
    assert [row["global_step"] for row in rows] == list(range(1, 51))
    expected = count_flops(model, batch)
    for row in rows:
        assert flops_of(row) == expected.model_flops
        assert executed_in(row) == expected.hardware_flops
        assert row["perf/mfu"] == pytest.approx(
            expected.model_flops / (row["perf/step_time"] * PEAK * 1e12), rel=1e-12
        )
        assert row["perf/mfu_percent"] == pytest.approx(100 * row["perf/mfu"])
        assert row["perf/tokens_per_second"] == pytest.approx(64 / row["perf/step_time"])
        assert row["perf/samples_per_second"] == pytest.approx(2 / row["perf/step_time"])
        assert {"training/loss", "training/lr", "training/epoch", "training/grad_norm"} <= set(row)
    assert rows[49]["perf/memory_peak_bytes"] > 0
    assert {"perf/step_time_median", "perf/mfu_median"} <= set(rows[49])
    assert [row["global_step"] for row in rows if "perf/warmup" in row] == [1, 2, 3, 10, 24]


def test_the_method_and_the_convention_are_recorded_with_the_run(model: nn.Module, tmp_path: Path) -> None:
    train(model, tmp_path, [[ids(2, 16)]] * 5, settings=config(attention="causal"))
    run = json.loads((tmp_path / "training_run.json").read_text(encoding="utf-8"))
    assert run["convention"] == {"attention": "causal"}
    assert run["summary"]["method"] == OBSERVED
    assert run["summary"]["peak_source"] == "monitoring.peak_tflops"
    assert run["scope"] == "one device"
    assert run["time_source"] == "host clock"


def test_the_convention_decides_the_count(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 32)
    rows = train(model, tmp_path, [[batch]] * 3, settings=config(attention="causal"))
    causal = count_flops(model, batch, convention=Convention(attention="causal"))
    assert {flops_of(row) for row in rows} == {causal.model_flops}


def test_batches_of_changing_shape_have_their_own_flops(model: nn.Module, tmp_path: Path) -> None:
    shapes = [(1, 8), (2, 17), (3, 33), (2, 64), (5, 9), (1, 8), (2, 17)]
    rows = train(model, tmp_path, [[ids(*shape)] for shape in shapes])
    assert [flops_of(row) for row in rows] == [count_flops(model, ids(*s)).model_flops for s in shapes]


@pytest.mark.parametrize("accumulation", [2, 5])
def test_accumulated_micro_batches_are_one_step(model: nn.Module, tmp_path: Path, accumulation: int) -> None:
    micro = [ids(2, 8 + i) for i in range(accumulation)]
    rows = train(model, tmp_path, [micro] * 3)
    assert len(rows) == 3
    assert {flops_of(row) for row in rows} == {sum(count_flops(model, b).model_flops for b in micro)}
    tokens = sum(b["input_ids"].numel() for b in micro)
    assert rows[2]["perf/tokens_per_second"] * rows[2]["perf/step_time"] == pytest.approx(tokens)


def test_recomputation_is_measured_not_assumed(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 32)
    model.gradient_checkpointing = True  # type: ignore[assignment]
    rows = train(model, tmp_path, [[batch]] * 3)
    counted = count_flops(model, batch)
    model.gradient_checkpointing = False  # type: ignore[assignment]
    assert counted.recompute > count_flops(model, batch).recompute
    assert {flops_of(row) for row in rows} == {counted.model_flops}
    assert {executed_in(row) for row in rows} == {counted.hardware_flops}


def test_layers_frozen_in_mid_run_are_never_counted_as_before(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 32)
    before = count_flops(model, batch).model_flops
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 31):
        if step == 7:
            for parameter in model.blocks[0].parameters():  # type: ignore[union-attr,index]
                parameter.requires_grad_(False)
            model.tokens.requires_grad_(False)  # type: ignore[union-attr]
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    after = count_flops(model, batch).model_flops
    assert after < before
    rows = rows_in(tmp_path)
    known = [flops_of(row) if "perf/tflops_per_gpu" in row else None for row in rows]
    assert known[:6] == [before] * 6
    # Fewer nodes show the change at once: its steps are unknown until one of them was observed.
    assert set(known[6:]) <= {after, None}
    assert known[-1] == after
    assert all("perf/mfu_unknown" in row for row, flops in zip(rows, known, strict=True) if flops is None)
    (said,) = [text for text in monitor.summary()["warnings"] if "the model changed between" in text]
    first, last = (int(number) for number in re.findall(r"\d+", said)[:2])
    assert first <= 6 < last


def test_padding_is_reported_apart(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(tiny_llama(transformers))
    batch = ids(4, 16)
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[:, 8:] = 0
    rows = train(model, tmp_path, [[{**batch, "attention_mask": mask}]] * 4)
    row = rows[3]
    assert row["perf/padding_efficiency"] == 0.5
    assert row["perf/real_tokens_per_second"] == pytest.approx(row["perf/tokens_per_second"] / 2)
    assert flops_of(row) == count_flops(model, {**batch, "attention_mask": mask}).model_flops


def tiny_llama(transformers: Any, **options: Any) -> Any:
    return transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
        **options,
    )


def test_packed_documents_are_counted_one_by_one(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(tiny_llama(transformers))
    batches = []
    for lengths in ((10, 22), (16, 16), (3, 9, 20), (32,), (31, 1)):
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        batches.append({**ids(1, 32), "position_ids": positions, "use_cache": False})
    rows = train(model, tmp_path, [[batch] for batch in batches], settings=config(flops_profile_freq=1))
    assert [flops_of(row) for row in rows] == [count_flops(model, b).model_flops for b in batches]
    assert len({flops_of(row) for row in rows}) == 5


def test_images_of_differing_sizes_are_counted_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.22")
    from benchmarks.cases import case

    qwen = case("qwen2.5-vl")
    model = qwen.build()
    model.train()
    batches = [qwen.batch(2, 64, images=((1, 4, 4), (1, 8, 4))), qwen.batch(2, 96, images=((1, 8, 8),))]
    rows = train(model, tmp_path, [[batch] for batch in batches])
    assert [flops_of(row) for row in rows] == [count_flops(model, b).model_flops for b in batches]


def test_adapters_on_a_frozen_base_are_counted_as_such(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base = transformers.LlamaForCausalLM(tiny_llama(transformers))
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    batch = ids(2, 16)
    rows = train(model, tmp_path, [[batch]] * 3)
    counted = count_flops(model, batch)
    assert counted.backward < 1.5 * counted.forward
    assert {flops_of(row) for row in rows} == {counted.model_flops}


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "model.compile"])
def test_a_compiled_model_is_seen_and_stays_compiled(
    model: nn.Module, tmp_path: Path, in_place: bool
) -> None:
    torch._dynamo.reset()
    batch = ids(2, 16)
    if in_place:
        model.compile(backend="eager", fullgraph=True)
        called = model
    else:
        called = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[assignment]
    called(**batch).loss.backward()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    rows = train(called, tmp_path, [[batch]] * 6)
    assert {flops_of(row) for row in rows} == {count_flops(model, batch).model_flops}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert "perf/warmup" not in rows[5]


def test_a_compilation_marks_its_step(model: nn.Module, tmp_path: Path) -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager", dynamic=False)
    rows = train(compiled, tmp_path, [[ids(2, 16)]] * 5 + [[ids(2, 24)]] * 3)
    marked = [row for row in rows if "perf/warmup" in row]
    assert {1, 2, 3, 6} <= {row["global_step"] for row in marked}
    assert all(row["global_step"] in (1, 2, 3, 6) or row.get("perf/observed") for row in marked)


def test_a_model_compiled_after_attaching_is_said(model: nn.Module, tmp_path: Path) -> None:
    torch._dynamo.reset()
    batch = ids(2, 16)
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    compiled(**batch).loss.backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.close()
    (row,) = rows_in(tmp_path)
    assert "perf/mfu" not in row
    assert "attach the object you call" in row["perf/mfu_unknown"]


def test_skipped_steps_share_the_time_and_lose_no_work(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 16)
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 17):
        model(**batch).loss.backward()
        if step % 3 == 1:
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
            wait_until_learned(monitor)
    monitor.close()
    rows = rows_in(tmp_path)
    one = count_flops(model, batch).model_flops
    work = [
        round(r["perf/tflops_per_gpu"] * r["perf/step_time"] * n * 1e12)
        for r, n in zip(rows, (1, *[3] * 5), strict=True)
    ]
    assert work == [one, *[3 * one] * 5]
    assert monitor.summary()["skipped_steps"] == 10


def test_a_restart_continues_the_log(model: nn.Module, tmp_path: Path) -> None:
    train(model, tmp_path, [[ids(2, 16)]] * 4)
    rows = train(model, tmp_path, [[ids(2, 16)]] * 3, first=5)
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]


def test_evaluations_and_pauses_are_no_part_of_a_step(
    model: nn.Module, tmp_path: Path, clock: TrainingClock
) -> None:
    batch = ids(2, 16)
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 7):
        model(**batch).loss.backward()
        clock.sleep(0.1)
        if step == 5:
            with monitor.pause():
                model(**batch)  # with gradients, and yet no training
                clock.sleep(0.5)
        with torch.no_grad():
            model(**batch)
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    rows = rows_in(tmp_path)
    assert rows[4]["perf/step_time"] == pytest.approx(0.1, abs=0.01)
    assert {flops_of(row) for row in rows} == {count_flops(model, batch).model_flops}


def test_waiting_for_data_is_told_apart(model: nn.Module, tmp_path: Path, clock: TrainingClock) -> None:
    def loader() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(5):
            clock.sleep(0.05)
            yield ids(2, 16)

    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step, batch in enumerate(monitor.data(loader()), start=1):
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    for row in rows_in(tmp_path)[1:]:
        assert 0.05 <= row["perf/data_wait"] < row["perf/step_time"]


def test_without_a_loader_the_gap_before_the_forward_pass_is_not_known_to_be_waiting(
    model: nn.Module, tmp_path: Path, clock: TrainingClock
) -> None:
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 4):
        clock.sleep(0.05)
        model(**ids(2, 16)).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    rows = rows_in(tmp_path)
    assert not any("perf/data_wait" in row for row in rows)
    assert "perf/between_steps" not in rows[0]
    assert all(0.05 <= row["perf/between_steps"] < row["perf/step_time"] for row in rows[1:])


def test_a_watched_loader_is_as_long_as_the_loader() -> None:
    with TrainingMonitor("unused-because-nothing-is-logged") as monitor:
        assert len(monitor.data([1, 2, 3])) == 3
        assert list(monitor.data([1, 2, 3])) == [1, 2, 3]
    assert not Path("unused-because-nothing-is-logged").exists()


def test_observe_replaces_the_hooks(model: nn.Module, tmp_path: Path) -> None:
    batch = ids(2, 16)
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 4):
        monitor.observe(batch)
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert {flops_of(row) for row in rows_in(tmp_path)} == {count_flops(model, batch).model_flops}


def test_positional_arguments_are_known_by_name(model: nn.Module, tmp_path: Path) -> None:
    tokens = ids(2, 16)["input_ids"]
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 4):
        model(tokens, labels=tokens).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert flops_of(rows_in(tmp_path)[0]) == count_flops(model, ids(2, 16)).model_flops


def test_training_is_bit_identical_with_and_without_the_monitor(tmp_path: Path) -> None:
    def run(watched: bool) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = (
            TrainingMonitor(tmp_path / "log", config(flops_profile_freq=3), model=model) if watched else None
        )
        losses = []
        for step in range(20):
            loss = model(torch.randn(16, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if monitor is not None:
                monitor.log_step(step, 0, loss, None, 0.1)
        if monitor is not None:
            monitor.close()
        return losses, [p.detach().clone() for p in (*model.parameters(), *model.buffers())], torch.rand(4)

    plain, watched = run(False), run(True)
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])
    assert len(rows_in(tmp_path / "log")) == 20


def test_copies_of_a_watched_model_are_not_watched(model: nn.Module, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    average = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    batch = ids(2, 16)
    average(**batch).loss.backward()
    loaded(**batch).loss.backward()
    model(**batch).loss.backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert flops_of(rows_in(tmp_path)[0]) == count_flops(model, batch).model_flops


def test_closing_leaves_the_model_as_it_was(model: nn.Module, tmp_path: Path) -> None:
    hooks = len(model._forward_pre_hooks)
    keys = list(model.state_dict())
    with TrainingMonitor(tmp_path, config(), model=model):
        assert list(model.state_dict()) == keys
    assert len(model._forward_pre_hooks) == hooks


def test_no_file_is_written_on_the_step_path(model: nn.Module, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    import threading

    writers = {t.name for t in threading.enumerate() if t.name.startswith("truemfu")}
    model(**ids(1, 8)).loss.backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    assert writers == set()
    assert "truemfu-rows" in {t.name for t in threading.enumerate()}
    monitor.close()


def test_nan_and_infinite_losses_are_logged_as_what_they_are(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    monitor.log_step(1, 0, float("nan"), float("inf"), 1e-3)
    monitor.log_step(2, 0, torch.tensor(float("-inf")), 1.0, 1e-3)
    monitor.close()
    first, second = rows_in(tmp_path)
    assert first["training/loss"] is None
    assert first["non_finite"] == {"training/loss": "nan", "training/grad_norm": "inf"}
    assert second["non_finite"] == {"training/loss": "-inf"}
    assert monitor.summary()["warnings"] == [
        "the loss is nan, first at step 1",
        "the loss is -inf, first at step 2",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"loss": torch.zeros(3)}, r"loss is not logged: got a tensor of shape \(3,\)"),
        ({"loss": "high"}, "loss is not logged: got could not convert string"),
        (
            {"grad_norm": torch.zeros((), device="meta")},
            "grad_norm is not logged: got a tensor without a value",
        ),
        ({"attention_mask": torch.ones(2, 3, 4)}, r"attention_mask is not used: .*got 3 dimensions"),
        ({"attention_mask": [1, 0]}, "attention_mask is not used: .*got list"),
    ],
)
def test_bad_values_cost_a_warning_and_nothing_else(
    tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    monitor = TrainingMonitor(tmp_path)
    values = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1e-3, **arguments}
    with pytest.warns(TruemfuWarning, match=said):
        monitor.log_step(1, 0, **values)
    monitor.log_step(2, 0, **values)
    monitor.close()
    assert len(rows_in(tmp_path)) == 2
    assert len(monitor.summary()["warnings"]) == 1


def test_decreasing_steps_are_said_and_logged(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    monitor.log_step(10, 0, 1.0, 1.0, 1.0)
    with pytest.warns(TruemfuWarning, match="step 9 was logged after step 10"):
        monitor.log_step(9, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert [row["global_step"] for row in rows_in(tmp_path)] == [10, 9]


def test_a_mask_alone_gives_tokens_without_a_model(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    mask = torch.ones(2, 10)
    mask[0, 5:] = 0
    for step in (1, 2):
        monitor.log_step(step, 0, 1.0, 1.0, 1.0, attention_mask=mask)
    monitor.close()
    row = rows_in(tmp_path)[1]
    assert row["perf/padding_efficiency"] == 0.75
    assert row["perf/tokens_per_second"] == pytest.approx(20 / row["perf/step_time"])
    assert "perf/mfu" not in row


def test_a_model_runs_once_for_each_step_and_has_its_mfu_wherever_it_can_run(tmp_path: Path) -> None:
    """Nothing else than the training's own forward passes runs the model's code."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.passes = nn.Linear(3, 3), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            return self.mix(x).sum()  # type: ignore[no-any-return]

    model = Odd()
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    for step in range(1, 13):
        model(torch.ones(2, 3)).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert model.passes == 12
    assert [flops_of(row) for row in rows_in(tmp_path)] == [2 * 2 * 2 * 3 * 3] * 12
    assert monitor.summary()["warnings"] == []


def test_an_mfu_above_one_is_shown_and_explained(model: nn.Module, tmp_path: Path) -> None:
    with pytest.warns(TruemfuWarning, match="above 1"):
        rows = train(model, tmp_path, [[ids(4, 64)]] * 4, settings=config(peak_tflops=1e-6))
    assert all(row["perf/mfu"] > 1 for row in rows)


def test_without_a_peak_there_is_no_mfu_but_all_the_rest(model: nn.Module, tmp_path: Path) -> None:
    rows = train(model, tmp_path, [[ids(2, 16)]] * 3, settings={"monitoring": {}})
    assert all("perf/mfu" not in row for row in rows)
    assert all(row["perf/tflops_per_gpu"] > 0 for row in rows)


def test_warnings_that_are_errors_never_reach_the_training(model: nn.Module, tmp_path: Path) -> None:
    code = f"""
        import warnings; warnings.simplefilter("error")
        import torch
        from truemfu import TrainingMonitor
        from truemfu.sweep.worker.models import build_reference_model
        model = build_reference_model("tiny")
        monitor = TrainingMonitor({str(tmp_path)!r}, {{"monitoring": {{"peak_tflops": 1e-6}}}}, model=model)
        ids = torch.zeros(2, 16, dtype=torch.long)
        for step in (3, 2, 1):
            model(ids, labels=ids).loss.backward()
            monitor.log_step(step, 0, torch.zeros(3), 1.0, 1.0)
        monitor.close()
        print("trained")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "trained", done.stderr
    assert len(rows_in(tmp_path)) == 3


def test_at_exit_everything_is_written_and_summed_up(tmp_path: Path) -> None:
    code = f"""
        import torch
        from truemfu import TrainingMonitor
        from truemfu.sweep.worker.models import build_reference_model
        model = build_reference_model("tiny")
        monitor = TrainingMonitor({str(tmp_path)!r}, {{"monitoring": {{"peak_tflops": 1}}}}, model=model)
        ids = torch.zeros(2, 16, dtype=torch.long)
        for step in range(1, 8):
            model(ids, labels=ids).loss.backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(rows_in(tmp_path)) == 7
    assert "MFU, median" in done.stderr
    assert "monitor's own cost" in done.stderr
    assert f"{OBSERVED}; a multiply-add is 2 FLOPs; attention counts all pairs" in done.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"monitoring": {"flops_profile_frq": 5}}, "flops_profile_freq"),
        ({"monitoring": {"mfu_calculation_mode": "smrt"}}, "smart"),
        ({"monitoring": {"flops_profile_freq": "often"}}, "often"),
        (
            {"monitoring": {"flops_profile_freq": 5}, "monitor": {"freq": {"flops_profile_freq": 6}}},
            "5.*6|6.*5",
        ),
    ],
)
def test_a_wrong_configuration_is_raised_before_training(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainingMonitor(tmp_path, settings)


def test_an_explicit_argument_wins_over_the_file(tmp_path: Path) -> None:
    settings = {"monitoring": {"flops_profile_freq": 7}}
    assert TrainingMonitor(tmp_path, settings).config.flops_profile_freq == 7
    assert TrainingMonitor(tmp_path, settings, flops_profile_freq=500).config.flops_profile_freq == 500
    assert TrainingMonitor(tmp_path).config.flops_profile_freq == 500


def test_phases_set_how_often_is_measured(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    monitor.set_phase("finetune")
    with pytest.warns(TruemfuWarning, match="did you mean 'finetune'"):
        monitor.set_phase("finetun")
    assert monitor._measuring._phase == "finetune"
    monitor.set_phase(None)


def test_an_unknown_tracker_is_raised_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        TrainingMonitor(tmp_path, trackers=["wandbb"])


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ("wandb", r"""trackers must be a list .* such as \["wandb"\], or \[\] for none; got 'wandb'"""),
        (object(), "trackers must be a list .*; got object"),
        ([42], r"int is not a tracker: it has no start\(\)"),
        ([dict], "got the class dict; pass an instance"),
    ],
)
def test_what_is_no_tracker_is_an_error_before_training(tmp_path: Path, trackers: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainingMonitor(tmp_path, trackers=trackers)


class Recording:
    """A tracker of the user's own."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.run: Mapping[str, Any] = {}
        self.summary: Mapping[str, Any] = {}

    def start(self, run: Mapping[str, Any]) -> None:
        self.run = run

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(metrics)))

    def flush(self) -> None:
        pass

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


BASICS = {"training/loss", "training/lr", "training/epoch", "global_step"}


def test_trackers_get_the_basics_each_step_and_the_rest_every_fiftieth(
    model: nn.Module, tmp_path: Path
) -> None:
    tracker = Recording()
    train(model, tmp_path, [[ids(1, 8)]] * 100, trackers=[tracker])
    assert [step for step, _ in tracker.rows] == list(range(1, 101))
    detailed = [step for step, row in tracker.rows if set(row) != BASICS]
    assert detailed == [50, 100]
    assert {"training/grad_norm", "perf/mfu", "perf/step_time"} <= set(tracker.rows[49][1])
    assert tracker.run["mode"] == "smart"
    assert tracker.summary["steps"] == 100


def test_reduced_logging_keeps_the_basics(model: nn.Module, tmp_path: Path) -> None:
    tracker = Recording()
    settings = {**config(detailed_log_freq=1), "wandb": {"reduced_logging": True}}
    train(model, tmp_path, [[ids(1, 8)]] * 5, trackers=[tracker], settings=settings)
    assert all(set(row) == BASICS for _, row in tracker.rows)


def test_logging_steps_thins_the_rows_out(model: nn.Module, tmp_path: Path) -> None:
    tracker = Recording()
    settings = {**config(), "training": {"logging_steps": 4}}
    rows = train(model, tmp_path, [[ids(1, 8)]] * 10, trackers=[tracker], settings=settings)
    assert [step for step, _ in tracker.rows] == [4, 8]
    assert len(rows) == 10


def test_skipping_wandb_skips_every_tracker_but_the_local_log(tmp_path: Path) -> None:
    tracker = Recording()
    monitor = TrainingMonitor(tmp_path, trackers=[tracker])
    for step in (1, 2, 3):
        monitor.log_step(step, 0, 1.0, 1.0, 1.0, skip_wandb=step == 2)
    monitor.close()
    assert [step for step, _ in tracker.rows] == [1, 3]
    assert len(rows_in(tmp_path)) == 3


def test_a_naming_preset_renames_for_the_trackers_alone(model: nn.Module, tmp_path: Path) -> None:
    tracker = Recording()
    rows = train(
        model,
        tmp_path,
        [[ids(1, 8)]] * 2,
        trackers=[tracker],
        settings=config(metric_names="composer", detailed_log_freq=1),
    )
    assert tracker.rows[1][1]["throughput/device/mfu"] == rows[1]["perf/mfu"]


def test_a_tracker_that_fails_loses_its_rows_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(Recording):
        def log(self, step: int, metrics: Mapping[str, Any]) -> None:
            raise ConnectionError("no route to host")

    good = Recording()
    monitor = TrainingMonitor(tmp_path, trackers=[Failing(), good])
    with pytest.warns(TruemfuWarning, match="Failing failed.*no route to host"):
        for step in range(1, 6):
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
        monitor.close()
    assert len(good.rows) == len(rows_in(tmp_path)) == 5
    assert any("Failing" in text and "no route to host" in text for text in monitor.summary()["lost"])
    assert "lost" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_costs_the_local_log_alone(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    tracker = Recording()
    with pytest.warns(TruemfuWarning) as said:
        monitor = TrainingMonitor(blocked / "out", trackers=[tracker])
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
        monitor.close()
    assert any("output folder" in str(w.message) for w in said)
    assert len(tracker.rows) == 1


def test_the_newest_row_is_at_hand(model: nn.Module, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, config(), model=model)
    assert monitor.last == {}
    model(**ids(2, 16)).loss.backward()
    monitor.log_step(1, 0, 2.5, 1.0, 1e-3)
    monitor.save_logs()
    assert monitor.last["training/loss"] == 2.5
    assert monitor.last["perf/mfu"] > 0
    monitor.close()


def test_after_closing_a_step_is_refused_with_one_warning(tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path)
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.close()
    with pytest.warns(TruemfuWarning, match="after close"):
        monitor.log_step(2, 0, 1.0, 1.0, 1.0)
    assert len(rows_in(tmp_path)) == 1


def test_dataset_metrics_come_with_the_step(model: nn.Module, tmp_path: Path) -> None:
    monitor = TrainingMonitor(tmp_path, config(dataset_metrics_freq=2), model=model)
    batch = ids(4, 16)
    named = {**batch, "dataset_names": ["a", "b", "a", "b"]}
    for step in range(1, 6):
        output = model(**batch)
        output.loss.backward()
        monitor.update_dataset_metrics(named, output, output.loss)
        monitor.log_step(step, 0, output.loss, 1.0, 1e-3)
    monitor.close()
    rows = rows_in(tmp_path)
    assert [row["global_step"] for row in rows if "dataset/a/loss" in row] == [1, 2, 4]
    assert {"dataset/a/accuracy", "dataset/b/loss"} <= set(rows[1])


@pytest.mark.parametrize("mode", ["estimate", "profiler", "hybrid"])
def test_every_mode_gives_the_exact_mfu_of_a_dense_model(model: nn.Module, tmp_path: Path, mode: str) -> None:
    import warnings

    batch = ids(2, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruemfuWarning)  # hybrid says that it has no counters
        rows = train(model, tmp_path, [[batch]] * 5, settings=config(mfu_calculation_mode=mode))
    assert {flops_of(row) for row in rows} == {count_flops(model, batch).model_flops}
    assert all("perf/hfu" in row for row in rows)


def test_hybrid_without_a_fallback_has_no_executed_flops(model: nn.Module, tmp_path: Path) -> None:
    settings = config(
        mfu_calculation_mode="hybrid",
        performance_monitoring={"hybrid_mode": {"fallback_to_profiler": False}},
    )
    with pytest.warns(TruemfuWarning, match="no hardware counters"):
        rows = train(model, tmp_path, [[ids(2, 16)]] * 3, settings=settings)
    assert all("perf/mfu" in row and "perf/hfu" not in row for row in rows)


def test_the_estimate_comes_first_where_no_initial_profiling_is_wanted(
    model: nn.Module, tmp_path: Path
) -> None:
    smart = {"initial_profiling": False, "recalibration_frequency": 4}
    settings = config(performance_monitoring={"smart_mode": smart})
    monitor = TrainingMonitor(tmp_path, settings, model=model)
    batch = ids(2, 16)
    for step in range(1, 8):
        model(**batch).loss.backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert monitor.summary()["methods"] == {"estimate": 4, OBSERVED: 3}


def test_the_start_of_the_monitor_is_not_in_the_cost_of_a_step() -> None:
    own = OwnTime()
    for seconds in (5.0, 1.0, 2.0):
        own.add(seconds)
        own.end_step()
    assert (own.first_step_s, own.later_s) == (5.0, 3.0)


def test_a_run_without_a_peak_has_the_rate_of_its_work(tmp_path: Path) -> None:
    model = nn.Linear(4, 2, bias=False)
    monitor = TrainingMonitor(tmp_path, model=model)
    for step in range(1, 7):
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        monitor.log_step(step, 0, loss, 1.0, 0.1)
    monitor.close()
    summary, rows = monitor.summary(), json.loads((tmp_path / "training_log.json").read_text())
    assert summary["median_mfu"] is None
    assert 1e12 * rows[-1]["perf/tflops_per_gpu"] * rows[-1]["perf/step_time"] == pytest.approx(
        2 * 2 * 3 * 4 * 2
    )
    timed = [row["perf/tflops_per_gpu"] for row in rows if not row.get("perf/warmup")]
    assert summary["median_tflops_per_gpu"] == pytest.approx(statistics.median(timed))
    assert summary["monitor_cost"]["first_step_s"] > 0


def test_an_error_shown_before_the_run_did_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    earlier, later = ValueError("earlier"), KeyError("later")
    monkeypatch.setattr(sys, "last_value", earlier, raising=False)
    assert ended_by(None, earlier) is None
    assert ended_by(None, None) == "ValueError: earlier"
    assert ended_by(later, earlier) == "KeyError: 'later'"
