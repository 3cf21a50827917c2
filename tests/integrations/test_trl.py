"""TrueMFUCallback in TRL's trainers: SFT on padded, packed and padding-free batches, and preferences, rewards
and reinforcement, whose other forward passes (a reference model, generation) are not part of the count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("trl", minversion="1.0")

import datasets
import tokenizers
import torch
import transformers as hf
import trl
from benchmarks import truth
from benchmarks.cases import case
from benchmarks.truth import Truth
from tests.integrations.trainer_runs import (
    CONFIG,
    LENGTHS,
    Batch,
    Run,
    UpToDate,
    assert_logged_as_by_the_trainer,
    grouped,
    samples,
    sum_of,
    tokens_of,
)
from torch import Tensor
from torch._subclasses import FakeTensor

from truemfu.integrations.transformers import TrueMFUCallback

OPTIONS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packing": {"packing": True, "max_length": 32},
    "padding_free": {"padding_free": True, "max_length": None},
    "checkpointing": {"gradient_checkpointing": True},
}


def tokenizer() -> Any:
    words = tokenizers.models.WordLevel({f"word{i}": i for i in range(131)}, unk_token="word3")
    special = {"pad_token": "word0", "bos_token": "word1", "eos_token": "word2", "unk_token": "word3"}
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), **special)


SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
}


def trainer_of(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    args = trl.SFTConfig(str(folder), **SETTINGS | options)
    rows = [{"input_ids": row["input_ids"]} for row in samples(LENGTHS * 4)]
    return trl.SFTTrainer(
        case("llama-sdpa").build(),
        args=args,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def keep_batches(trainer: Any) -> list[Batch]:
    """The batches that the trainer's own collator makes from now on."""
    kept: list[Batch] = []
    collate = trainer.data_collator

    def collate_and_keep(rows: Any) -> Any:
        batch = collate(rows)
        kept.append({name: value.clone() for name, value in batch.items() if isinstance(value, Tensor)})
        return batch

    trainer.data_collator = collate_and_keep
    return kept


def with_fused_head(config: Any, batch: Batch, body: Truth) -> Truth:
    """A Llama's work with TRL's head: no product for the last position of a row, the others made twice.

    On a CPU it scores every other position, whatever its label is.
    """
    rows, length = batch["input_ids"].shape
    whole = truth.linear(rows * length, config.hidden_size, config.vocab_size)
    head = truth.linear(rows * (length - 1), config.hidden_size, config.vocab_size)
    return Truth(
        body.forward - whole.forward + head.forward,
        body.backward - whole.backward + head.backward,
        body.recompute + head.forward,
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_every_step_is_counted(name: str, tmp_path: Path) -> None:
    callback = TrueMFUCallback(config=CONFIG)
    trainer = trainer_of(tmp_path, [callback, UpToDate(callback)], **OPTIONS[name])
    batches = keep_batches(trainer)
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    count = truth.llama_checkpointed if name == "checkpointing" else truth.llama
    config = trainer.model.config
    groups = grouped(batches, 3, 2)
    truths = [
        sum_of([with_fused_head(config, batch, count(config, batch)) for batch in group]) for group in groups
    ]
    assert ("position_ids" in batches[0]) is (name in ("packing", "padding_free"))
    assert run.steps == [1, 2, 3]
    assert run.tokens == [tokens_of(group) for group in groups]
    assert run.model_flops == [step.model_flops for step in truths]
    assert run.executed_flops == [step.hardware_flops for step in truths]
    assert_logged_as_by_the_trainer(run)
    assert run.summary["warnings"] == []


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    def train(name: str, callbacks: list[Any]) -> tuple[list[Any], dict[str, Tensor]]:
        trainer = trainer_of(tmp_path / name, callbacks)
        trainer.train()
        names = ("loss", "grad_norm", "learning_rate", "entropy", "mean_token_accuracy", "num_tokens")
        logs = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
        return logs, trainer.model.state_dict()

    logs, weights = train("alone", [])
    with_logs, with_weights = train("monitored", [TrueMFUCallback(config=CONFIG)])
    assert logs == with_logs
    assert len(logs) == 3
    assert all(weights[name].equal(with_weights[name]) for name in weights)


def texts() -> list[list[str]]:
    return [[f"word{number}" for number in row["input_ids"]] for row in samples(LENGTHS * 4)]


def joined(words: list[str]) -> str:
    return " ".join(words)


def dpo(folder: Path, callbacks: list[Any]) -> Any:
    rows = [{"prompt": joined(t[:4]), "chosen": joined(t[4:]), "rejected": joined(t[5:])} for t in texts()]
    return trl.DPOTrainer(
        case("llama-sdpa").build(),
        ref_model=case("llama-sdpa").build(),
        args=trl.DPOConfig(str(folder), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def kto(folder: Path, callbacks: list[Any]) -> Any:
    rows = [
        {"prompt": joined(t[:4]), "completion": joined(t[4:]), "label": bool(number % 2)}
        for number, t in enumerate(texts())
    ]
    return trl.KTOTrainer(
        case("llama-sdpa").build(),
        ref_model=case("llama-sdpa").build(),
        args=trl.KTOConfig(str(folder), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def grpo(folder: Path, callbacks: list[Any]) -> Any:
    return trl.GRPOTrainer(
        case("llama-sdpa").build(),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        args=trl.GRPOConfig(str(folder), num_generations=2, max_completion_length=6, **SETTINGS),
        train_dataset=datasets.Dataset.from_list([{"prompt": joined(t[:4])} for t in texts()]),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def reward(folder: Path, callbacks: list[Any]) -> Any:
    config = case("llama-sdpa").build().config.to_dict() | {"num_labels": 1, "pad_token_id": 0}
    return trl.RewardTrainer(
        hf.LlamaForSequenceClassification(hf.LlamaConfig(**config)),
        args=trl.RewardConfig(str(folder), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(
            [{"chosen": joined(t), "rejected": joined(t[1:])} for t in texts()]
        ),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def keep_trained_batches(model: Any) -> list[Batch]:
    """What the model is called with for a gradient from now on, without the calls of a count."""
    kept: list[Batch] = []

    def keep(_: Any, __: Any, given: dict[str, Any]) -> None:
        batch = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        if torch.is_grad_enabled() and not any(
            isinstance(value, FakeTensor) or value.is_meta for value in batch.values()
        ):
            kept.append({name: value.clone() for name, value in batch.items()})

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return kept


def with_score_head(config: Any, batch: Batch, body: Truth) -> Truth:
    """A Llama's work with a head of one output at every position instead of the vocabulary's."""
    positions = batch["input_ids"].numel()
    whole = truth.linear(positions, config.hidden_size, config.vocab_size)
    score = truth.linear(positions, config.hidden_size, 1)
    return Truth(
        body.forward - whole.forward + score.forward,
        body.backward - whole.backward + score.backward,
        body.recompute,
    )


@pytest.mark.parametrize("make", [dpo, kto, grpo, reward], ids=lambda make: make.__name__)
def test_of_other_trainers_the_trained_passes_are_counted(make: Any, tmp_path: Path) -> None:
    callback = TrueMFUCallback(config=CONFIG)
    trainer = make(tmp_path, [callback, UpToDate(callback)])
    batches = keep_trained_batches(trainer.model)
    trainer.train()
    run = Run(tmp_path / "truemfu", trainer.state.log_history)
    config, with_head = trainer.model.config, with_score_head if make is reward else with_fused_head
    groups = grouped(batches, 3, 2)
    truths = [
        sum_of([with_head(config, batch, truth.llama(config, batch)) for batch in group]) for group in groups
    ]
    assert run.steps == [1, 2, 3]
    assert run.tokens == [tokens_of(group) for group in groups]
    assert run.model_flops == [step.model_flops for step in truths]
    assert run.executed_flops == [step.hardware_flops for step in truths]
    assert run.summary["warnings"] == []
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all({"perf/mfu", "perf/tokens_per_second"} <= {*entry} for entry in logged)
