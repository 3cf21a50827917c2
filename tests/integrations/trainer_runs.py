"""Trainings with the real Trainer of transformers, and what they left in its logs and in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from benchmarks.truth import Truth
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from truemfu.integrations.transformers import TrueMFUCallback

Batch = dict[str, Tensor]
LENGTHS = (9, 24, 5, 17, 12, 30, 7, 21, 14, 11, 26, 6, 19, 8, 23, 16)
CONFIG = {"monitoring": {"peak_tflops": 1}}


EVALUATION_TOKEN = 2


def samples(lengths: Sequence[int] = (16,) * 64, *, vocab: int = 131) -> list[dict[str, Any]]:
    """A dataset of random token sequences of these lengths."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def evaluation_samples() -> list[dict[str, Any]]:
    """Sequences that no training batch contains: of one token."""
    return [{"input_ids": [EVALUATION_TOKEN] * 16, "labels": [EVALUATION_TOKEN] * 16}] * 4


class Padded:
    """Collates to the longest sequence, with a mask, and keeps every batch that is trained on."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        longest = max(len(row["input_ids"]) for row in rows)
        batch = {
            "input_ids": self._padded(rows, "input_ids", longest, 0),
            "labels": self._padded(rows, "labels", longest, -100),
        }
        batch["attention_mask"] = (batch["labels"] != -100).long()
        return self.keep(batch)

    def keep(self, batch: Batch) -> Batch:
        if not (batch["input_ids"] == EVALUATION_TOKEN).any():
            self.batches.append({name: tensor.clone() for name, tensor in batch.items()})
        return batch

    @staticmethod
    def _padded(rows: list[dict[str, Any]], name: str, longest: int, value: int) -> Tensor:
        return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in rows])


class Unpadded(Padded):
    """Sequences of one length, without a mask."""

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        return self.keep(
            {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
        )


class Packed(Padded):
    """All sequences in one row, whose positions restart."""

    def __init__(self) -> None:
        super().__init__()
        self._flatten = hf.DataCollatorWithFlattening(return_tensors="pt")

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        batch = self._flatten(rows)
        return self.keep({name: batch[name] for name in ("input_ids", "labels", "position_ids")})


class UpToDate(hf.TrainerCallback):
    """Finishes the row of each step before its log, which otherwise has the newest one there is."""

    def __init__(self, callback: TrueMFUCallback) -> None:
        self._callback = callback

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self._callback.monitor is not None
        self._callback.monitor.save_logs()


def arguments(folder: Path, **options: Any) -> hf.TrainingArguments:
    defaults = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 11,
    }
    return hf.TrainingArguments(str(folder), **defaults | options)


class Run:
    """A finished training, as its own files and the Trainer's log have it."""

    def __init__(self, folder: Path, log_history: list[dict[str, Any]]) -> None:
        self.rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text("utf-8"))
        self.summary = json.loads((folder / "training_run.json").read_text("utf-8"))["summary"]
        self.logs = [entry for entry in log_history if "loss" in entry]
        self.final = next((entry for entry in log_history if "train_runtime" in entry), None)

    @property
    def steps(self) -> list[int]:
        return [row["global_step"] for row in self.rows]

    @property
    def tokens(self) -> list[int]:
        return self._per_step("perf/tokens_per_second")

    @property
    def real_tokens(self) -> list[int]:
        return self._per_step("perf/real_tokens_per_second")

    @property
    def model_flops(self) -> list[int]:
        return self._per_step("perf/mfu", 1e12)  # the peak is 1 TFLOP/s

    @property
    def executed_flops(self) -> list[int]:
        return self._per_step("perf/hfu", 1e12)

    def _per_step(self, name: str, unit: float = 1) -> list[int]:
        return [round(row[name] * row["perf/step_time"] * unit) for row in self.rows]


def grouped(batches: Sequence[Batch], steps: int, accumulation: int) -> list[list[Batch]]:
    """The micro-batches of each step; the loader may have made more, ahead of the training."""
    return [list(batches[i * accumulation : (i + 1) * accumulation]) for i in range(steps)]


def tokens_of(group: Sequence[Batch]) -> int:
    return sum(batch["input_ids"].numel() for batch in group)


def sum_of(truths: Sequence[Truth]) -> Truth:
    return sum(truths, start=Truth())


def assert_logged_as_by_the_trainer(run: Run) -> None:
    """Each log has the very numbers of its row: those of the Trainer, and those that the callback adds."""
    names = {
        "loss": "training/loss",
        "grad_norm": "training/grad_norm",
        "learning_rate": "training/lr",
        "epoch": "training/epoch",
        "step": "global_step",
        "perf/mfu": "perf/mfu",
        "perf/hfu": "perf/hfu",
        "perf/tokens_per_second": "perf/tokens_per_second",
    }
    assert [{name: entry.get(name) for name in names} for entry in run.logs] == [
        {name: row.get(ours) for name, ours in names.items()} for row in run.rows
    ]


def scalars_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """TensorBoard's event files below a folder: steps and values of each tag."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return found
