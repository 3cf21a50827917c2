"""What tests of integrations share: a small language model, padded batches, and the rows of a run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from truemfu import count_flops

PEAK = 10e12
CONFIG = {"monitoring": {"peak_tflops": PEAK / 1e12}}
WORDS = 64


class Language(nn.Module):
    """Embedding, one attention layer, head; takes a batch as Hugging Face models do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, WORDS)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embedding(input_ids)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        mask = attention_mask[:, None, None, :].bool()
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)
        logits = self.head(x + self.dropout(self.out(attended)))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def padded_batches(number: int, *, rows: int = 2, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Batches of different lengths, with padding at the end of all rows but the first."""
    draws = torch.Generator().manual_seed(seed)
    batches = []
    for index in range(number):
        length = 5 + index % 3
        ids = torch.randint(WORDS, (rows, length), generator=draws)
        mask = torch.ones_like(ids)
        mask[1:, length - 1 - index % 2 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.clone()})
    return batches


def rows_in(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "training_log.json").read_text())


def flops_of(row: Mapping[str, Any], metric: str = "perf/mfu") -> int | None:
    return None if metric not in row else round(row[metric] * row["perf/step_time"] * PEAK)


def assert_flops(
    rows: Sequence[Mapping[str, Any]], truths: Sequence[int], *, may_be_unknown: int = 0
) -> None:
    """Each row has its true FLOPs; so many of the last may be unknown instead, with a reason.

    Which steps after the second are observed depends on how soon the rows before them are finished.
    """
    certain = len(truths) - may_be_unknown
    found = [flops_of(row) for row in rows]
    assert found[:certain] == truths[:certain]
    for row, flops, truth in zip(rows[certain:], found[certain:], truths[certain:], strict=True):
        assert flops == truth or (flops is None and "perf/mfu_unknown" in row)


def tokens_of(row: Mapping[str, Any]) -> int:
    return round(row["perf/tokens_per_second"] * row["perf/step_time"])


def real_tokens_of(row: Mapping[str, Any]) -> int:
    return round(row["perf/real_tokens_per_second"] * row["perf/step_time"])


def groups(items: list[Any], size: int) -> list[list[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def counted(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> int:
    return sum(count_flops(model, batch).model_flops for batch in batches)


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))
