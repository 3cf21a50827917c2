"""TrueMFUCallback in TRL's SFTTrainer: padded, packed and padding-free batches, with its fused head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.22")
pytest.importorskip("trl", minversion="1.0")

import datasets
import tokenizers
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


def trainer_of(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    args = trl.SFTConfig(
        str(folder),
        **{
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
        | options,
    )
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
