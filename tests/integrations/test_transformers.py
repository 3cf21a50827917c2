"""TrueMFUCallback in the real Trainer, against hand counts and against what the Trainer logs itself."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import peft
import transformers as hf
from benchmarks import truth
from benchmarks.cases import case
from tests.integrations.trainer_runs import (
    CONFIG,
    LENGTHS,
    Packed,
    Padded,
    Run,
    Unpadded,
    UpToDate,
    arguments,
    assert_logged_as_by_the_trainer,
    evaluation_samples,
    grouped,
    samples,
    scalars_in,
    sum_of,
    tokens_of,
)
from tests.monitor.rank_processes import free_address, run_ranks
from tests.monitor.training_clock import TrainingClock

from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning, UsageError
from truemfu.integrations import transformers as integration
from truemfu.integrations.guarded import LOGGED
from truemfu.integrations.transformers import TrueMFUCallback
from truemfu.monitor.rows import row_thread

WRAPPED = {
    "training_step",
    "_get_grad_norm",
    "_get_learning_rate",
    "evaluate",
    "_save_checkpoint",
    "_run_epoch",
}


def llama() -> nn.Module:
    return case("llama-sdpa").build()


def small_gpt2() -> nn.Module:
    """With dropout, so that a single random number more or less changes every later loss."""
    torch.manual_seed(5)
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=131, n_positions=32, n_embd=16, n_layer=2, n_head=2))


def lora() -> nn.Module:
    adapted = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(llama(), adapted)


def monitored(trainer_class: Any = hf.Trainer, *, up_to_date: bool = True, **options: Any) -> tuple[Any, Any]:
    callback = TrueMFUCallback(config=CONFIG)
    callbacks = [callback, UpToDate(callback)] if up_to_date else [callback]
    return trainer_class(callbacks=callbacks, **options), callback


def wrapped_in(trainer: Any) -> set[str]:
    return WRAPPED & set(vars(trainer))


COUNTED: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], type[Padded], int, dict[str, Any]]] = {
    "plain": (llama, truth.llama, Unpadded, 1, {}),
    "accumulation": (llama, truth.llama, Unpadded, 4, {}),
    "padded, of many lengths": (llama, truth.llama, Padded, 4, {}),
    "packed": (llama, truth.llama, Packed, 2, {}),
    "LoRA": (lora, partial(truth.llama_lora, rank=4), Unpadded, 2, {}),
    "checkpointing": (
        llama,
        truth.llama_checkpointed,
        Unpadded,
        2,
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    ),
    "compiled": (
        llama,
        truth.llama,
        Unpadded,
        2,
        {"torch_compile": True},
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_every_step_is_counted(name: str, tmp_path: Path) -> None:
    build, count, collator_class, accumulation, options = COUNTED[name]
    model, collator, steps = build(), collator_class(), 4
    lengths = (16,) * 64 if collator_class is Unpadded else LENGTHS * 4
    trainer, _ = monitored(
        model=model,
        args=arguments(
            tmp_path,
            max_steps=steps,
            gradient_accumulation_steps=accumulation,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=3,
            **options,
        ),
        train_dataset=samples(lengths),
        eval_dataset=evaluation_samples(),
        data_collator=collator,
    )
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    groups = grouped(collator.batches, steps, accumulation)
    truths = [sum_of([count(model.config, batch) for batch in group]) for group in groups]

    assert run.steps == [1, 2, 3, 4]
    assert run.tokens == [tokens_of(group) for group in groups]
    known = copy.copy(run)
    if "torch_compile" in options:  # its first step compiles, so no observation was repeated
        truths = [step for step, row in zip(truths, run.rows, strict=True) if "perf/mfu" in row]
        known.rows = [row for row in run.rows if "perf/mfu" in row]
        assert known.steps[:2] == [1, 2]
    assert known.model_flops == [step.model_flops for step in truths]
    assert known.executed_flops == [step.hardware_flops for step in truths]
    if collator_class is Padded:
        assert run.real_tokens == [sum(int(b["attention_mask"].sum()) for b in group) for group in groups]
    assert_logged_as_by_the_trainer(run)
    assert run.summary["left_out"]["evaluation"]["times"] == 2  # one of them after the last step
    assert run.summary["left_out"]["checkpoint"]["times"] == 2
    assert run.summary["warnings"] == []
    assert not wrapped_in(trainer)


def test_the_trainers_own_loggers_have_the_values(tmp_path: Path) -> None:
    trainer, _ = monitored(
        model=llama(), args=arguments(tmp_path, report_to=["tensorboard"]), train_dataset=samples()
    )
    output = trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    scalars = scalars_in(tmp_path / "runs")
    for name in LOGGED:
        assert scalars[f"train/{name}"] == [
            (row["global_step"], pytest.approx(row[name], rel=1e-6))
            for row in run.rows  # float32 in the file
        ]
    for name in ("median_mfu", "median_hfu", "median_tokens_per_second"):
        value = run.summary[name]
        assert value is not None
        assert run.final is not None
        assert run.final[f"perf/{name}"] == output.metrics[f"perf/{name}"] == value
        assert scalars[f"train/perf/{name}"] == [(4, pytest.approx(value, rel=1e-6))]


def test_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = monitored(model=llama(), args=arguments(tmp_path), train_dataset=samples())
    trainer.train()
    printed = [line for line in capsys.readouterr().out.splitlines() if "'loss'" in line]
    assert len(printed) == 4
    assert all(f"'{name}'" in line for line in printed for name in LOGGED)


def test_without_a_peak_only_tokens_are_logged(tmp_path: Path) -> None:
    callback = TrueMFUCallback(tmp_path / "elsewhere")
    trainer = hf.Trainer(
        llama(), arguments(tmp_path), train_dataset=samples(), callbacks=[callback, UpToDate(callback)]
    )
    trainer.train()
    run = Run(tmp_path / "elsewhere", trainer.state.log_history)
    assert all(entry["perf/tokens_per_second"] > 0 for entry in run.logs)
    assert not any("perf/mfu" in entry or "perf/hfu" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_window_of_logged_steps(accumulation: int, tmp_path: Path) -> None:
    """The Trainer logs the mean loss of the steps since its last log; each row has that of its own step."""
    args = arguments(tmp_path, max_steps=6, logging_steps=3, gradient_accumulation_steps=accumulation)
    trainer, _ = monitored(model=llama(), args=args, train_dataset=samples())
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    losses = torch.tensor([row["training/loss"] for row in run.rows], dtype=torch.float64)
    assert len(set(losses.tolist())) == 6
    assert [entry["loss"] for entry in run.logs] == pytest.approx(
        losses.view(2, 3).mean(1).tolist(), rel=1e-6
    )
    assert [entry["grad_norm"] for entry in run.logs] == [run.rows[i]["training/grad_norm"] for i in (2, 5)]
    assert [entry["learning_rate"] for entry in run.logs] == [run.rows[i]["training/lr"] for i in (2, 5)]
    assert [entry["perf/mfu"] for entry in run.logs] == [run.rows[i]["perf/mfu"] for i in (2, 5)]


def test_the_norm_is_that_before_clipping(tmp_path: Path) -> None:
    trainer, _ = monitored(
        model=llama(), args=arguments(tmp_path, max_grad_norm=1e-3, max_steps=2), train_dataset=samples()
    )
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    assert_logged_as_by_the_trainer(run)
    assert all(row["training/grad_norm"] > 0.1 for row in run.rows)


@pytest.mark.parametrize("compiled", [False, True])
def test_training_is_the_same_to_the_bit(compiled: bool, tmp_path: Path) -> None:
    def train(name: str, callbacks: list[Any]) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, Any]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        args = arguments(
            tmp_path / name,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            torch_compile=compiled,
            torch_compile_backend="inductor" if compiled else None,
        )
        trainer = hf.Trainer(
            small_gpt2(),
            args,
            train_dataset=samples(),
            eval_dataset=evaluation_samples(),
            callbacks=callbacks,
        )
        trainer.train()
        logs = [
            {
                name: entry[name]
                for name in ("loss", "grad_norm", "learning_rate", "eval_loss")
                if name in entry
            }
            for entry in trainer.state.log_history
        ]
        counters = copy.deepcopy(
            {name: dict(torch._dynamo.utils.counters[name]) for name in ("stats", "frames")}
        )
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
        return logs, trainer.model.state_dict(), {**counters, "breaks": breaks}

    train("first", [])  # in a new process dynamo also looks at frames that it skips from then on
    logs, weights, dynamo = train("alone", [])
    with_logs, with_weights, with_dynamo = train("monitored", [TrueMFUCallback(config=CONFIG)])
    assert logs == with_logs
    assert len(logs) == 7
    assert all(torch.equal(weights[name], with_weights[name]) for name in weights)
    assert dynamo == with_dynamo
    assert bool(dynamo["stats"]) is compiled


class WallClock(hf.TrainerCallback):  # type: ignore[misc,name-defined]
    """Seconds from the end of each step to the end of the next."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.ends_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends_s.append(self.now_s())

    @property
    def between_s(self) -> list[float]:
        return [after - before for before, after in zip(self.ends_s, self.ends_s[1:], strict=False)]


def test_slow_evaluations_and_saves_are_in_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time_of_training = TrainingClock()
    time_of_training.install(monkeypatch)

    def slow_metrics(predictions: Any) -> dict[str, float]:
        time_of_training.sleep(0.5)
        return {}

    class SlowSave(hf.Trainer):  # type: ignore[misc,name-defined]
        def _save(self, *args: Any, **kwargs: Any) -> None:
            time_of_training.sleep(0.6)
            super()._save(*args, **kwargs)

    clock, callback = WallClock(time_of_training), TrueMFUCallback(config=CONFIG)
    trainer = SlowSave(
        llama(),
        arguments(
            tmp_path, max_steps=5, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=3
        ),
        train_dataset=samples(),
        eval_dataset=evaluation_samples(),
        compute_metrics=slow_metrics,
        callbacks=[callback, clock],
    )
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    times_s = {row["global_step"]: row["perf/step_time"] for row in run.rows}
    for step, wall_s in enumerate(clock.between_s, start=2):
        slept_s = {3: 0.5, 4: 0.6, 5: 0.5}.get(step, 0.0)
        assert 0 < times_s[step] <= wall_s - slept_s + 0.01
    evaluated = {row["global_step"]: row.get("perf/evaluation_time") for row in run.rows}
    saved = {row["global_step"]: row.get("perf/checkpoint_time") for row in run.rows}
    assert [step for step, seconds in evaluated.items() if seconds is not None and seconds >= 0.5] == [3, 5]
    assert [step for step, seconds in saved.items() if seconds is not None and seconds >= 0.6] == [4]
    left_out = run.summary["left_out"]
    assert left_out["evaluation"]["times"] == 3  # the last one after the last step
    assert left_out["evaluation"]["seconds"] >= 1.5
    assert left_out["checkpoint"]["seconds"] >= 0.6


def test_report_to(tmp_path: Path) -> None:
    trainer = hf.Trainer(llama(), arguments(tmp_path, report_to="truemfu"), train_dataset=samples())
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    assert run.steps == [1, 2, 3, 4]
    assert run.final is not None
    assert run.final["perf/median_tokens_per_second"] == run.summary["median_tokens_per_second"]


def test_a_callback_goes_before_report_to(tmp_path: Path) -> None:
    callback = TrueMFUCallback(tmp_path / "mine", CONFIG)
    trainer = hf.Trainer(
        llama(), arguments(tmp_path, report_to="truemfu"), train_dataset=samples(), callbacks=[callback]
    )
    for _ in range(2):
        trainer.train()
        assert not wrapped_in(trainer)
    run = Run(tmp_path / "mine", trainer.state.log_history)
    assert run.steps == [1, 2, 3, 4] * 2
    assert not (tmp_path / "truemfu").exists()


def test_resumed_training_goes_on_counting_steps(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        return monitored(model=llama(), args=args, train_dataset=samples())[0]

    trainer(2).train()
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    run = Run(tmp_path / "truemfu", resumed.state.log_history)
    assert run.steps == [1, 2, 3, 4]
    assert len(run.logs) == 4  # the first two are from the checkpoint
    assert_logged_as_by_the_trainer(run)


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), KeyboardInterrupt()])
@pytest.mark.parametrize("place", ["forward", "evaluation", "callback"])
def test_a_training_that_raises(error: BaseException, place: str, tmp_path: Path) -> None:
    class Failing(hf.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if place == "callback" and state.global_step == 2:
                raise error

    class FailingTrainer(hf.Trainer):  # type: ignore[misc,name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            if place == "forward" and self.state.global_step == 2:
                raise error
            return super().compute_loss(*args, **kwargs)

        def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
            if place == "evaluation":
                raise error
            return super().evaluation_loop(*args, **kwargs)

    trainer, _ = monitored(
        FailingTrainer,
        model=llama(),
        args=arguments(tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2),
        train_dataset=samples()[:4],  # two steps are an epoch
        eval_dataset=evaluation_samples(),
    )
    trainer.add_callback(Failing())
    with pytest.raises(type(error)) as raised:
        trainer.train()
    assert raised.value is error
    assert not wrapped_in(trainer)
    assert "on_epoch_begin" not in vars(trainer.callback_handler)
    assert Run(tmp_path / "truemfu", []).steps == [1, 2]
    assert trainer.model.forward.__self__ is trainer.model
    assert not trainer.model._forward_pre_hooks


def test_a_method_that_the_user_replaced_is_restored(tmp_path: Path) -> None:
    trainer, _ = monitored(
        model=llama(),
        args=arguments(tmp_path, eval_strategy="steps", eval_steps=2),
        train_dataset=samples(),
        eval_dataset=evaluation_samples(),
    )
    calls, original = [], trainer.evaluate

    def mine(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    trainer.evaluate = mine
    trainer.train()
    assert trainer.evaluate is mine
    assert len(calls) == 2


def test_a_failure_of_the_callback_leaves_the_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("the log is gone")

    trainer, _ = monitored(up_to_date=False, model=llama(), args=arguments(tmp_path), train_dataset=samples())
    monkeypatch.setattr(TrainingMonitor, "log_step", fail)
    with pytest.warns(
        TruemfuWarning, match=r"switched off for this training, which continues: OSError: the log is gone"
    ):
        assert trainer.train().global_step == 4
    assert not wrapped_in(trainer)


def test_an_unsupported_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, callback = monitored(
        up_to_date=False, model=llama(), args=arguments(tmp_path), train_dataset=samples()
    )
    monkeypatch.setattr(integration, "_NEEDED", (*integration._NEEDED, "_clip_by_magic"))
    message = rf"transformers {hf.__version__} \(its Trainer has no _clip_by_magic; tested with 5\.22\)"
    with pytest.warns(TruemfuWarning, match=message) as warned:
        assert trainer.train().global_step == 4
    assert len([one for one in warned if one.category is TruemfuWarning]) == 1
    assert callback.monitor is None
    assert not (tmp_path / "truemfu").exists()


def test_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    trainer, callback = monitored(
        up_to_date=False, model=llama(), args=arguments(tmp_path), train_dataset=samples()
    )

    class Look(hf.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            assert not wrapped_in(trainer)
            assert not trainer.model._forward_pre_hooks

    trainer.add_callback(Look())
    trainer.train()
    assert callback.monitor is None
    assert not (tmp_path / "truemfu").exists()
    assert not any(name.startswith("perf/") for entry in trainer.state.log_history for name in entry)


def test_a_wrong_configuration_is_reported_at_once() -> None:
    with pytest.raises(UsageError, match="peak_tflop"):
        TrueMFUCallback(config={"monitoring": {"peak_tflop": 1}})


def sharded_llama() -> nn.Module:
    """Sharded by FSDP2, and marked as transformers marks a model that it sharded while loading it."""
    torch.distributed.init_process_group("gloo")
    model, mesh = case("llama-sdpa").build(), init_device_mesh("cpu", (2,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    model._is_distributed_loading_by_transformers = True
    return model


def rank_process(rank: int, port: int, folder: Path, build: Callable[[], nn.Module]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    row_thread.SAVE_HOLD_S = 120.0  # a busy machine may need more than the second that a user waits
    collator = Unpadded()
    trainer, _ = monitored(
        model=build(),
        args=arguments(folder, gradient_accumulation_steps=2, ddp_backend="gloo"),
        train_dataset=samples(),
        data_collator=collator,
    )
    trainer.train()
    groups = grouped(collator.batches, 4, 2)
    found = {
        "wrapper": type(trainer.model_wrapped).__name__,
        "tokens": [tokens_of(group) for group in groups],
        "flops": [sum_of([truth.llama(llama(), batch) for batch in group]).model_flops for group in groups],
        "log_history": trainer.state.log_history,
    }
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("build", "wrapper"), [(llama, "DistributedDataParallel"), (sharded_llama, "FSDPLlamaForCausalLM")]
)
def test_two_ranks(build: Callable[[], nn.Module], wrapper: str, tmp_path: Path) -> None:
    port = int(free_address().rpartition(":")[2])
    orders = [(rank, port, tmp_path, build) for rank in (0, 1)]
    codes, found = run_ranks(rank_process, orders, tmp_path, 240)
    assert codes == [0, 0]
    assert found[0]["wrapper"] == wrapper
    run = Run(tmp_path / "truemfu", found[0]["log_history"])
    assert run.steps == [1, 2, 3, 4]
    of_both = zip(found[0]["tokens"], found[1]["tokens"], strict=True)
    assert run.tokens == [one + other for one, other in of_both]
    assert run.model_flops == found[0]["flops"]
    assert [row.get("training/grad_norm") for row in run.rows] == [entry["grad_norm"] for entry in run.logs]
    assert [row["training/lr"] for row in run.rows] == [entry["learning_rate"] for entry in run.logs]
    assert [row["perf/mfu"] for row in run.rows] == [entry["perf/mfu"] for entry in run.logs]
    assert run.summary["warnings"] == []


def test_the_state_of_a_checkpoint_is_plain_json(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer, _ = monitored(model=llama(), args=args, train_dataset=samples())
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text("utf-8"))
    assert [entry["perf/mfu"] for entry in state["log_history"]] == [
        row["perf/mfu"] for row in Run(tmp_path / "truemfu", []).rows
    ]
