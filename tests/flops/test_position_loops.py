"""Models that loop over positions in Python: short sequences give the exact count of long ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", minversion="5.22")

from transformers import LlamaConfig, Mamba2Config, MambaConfig

from truemfu import Convention, count_flops
from truemfu.flops.closed_form import position_loops
from truemfu.flops.closed_form.position_loops import count_by_short_sequences
from truemfu.flops.models.hf_config import BuildOptions, model_from_config, read_config
from truemfu.flops.models.model_view import BatchRequest
from truemfu.flops.models.targets import count_target, resolve_target

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 8}


def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def totals(count: Any) -> tuple[Any, ...]:
    """All integers of a count; a direct one and a closed form differ in words alone."""
    splits = (dict(split) for split in (count.by_module, count.by_operator, count.by_dtype))
    return count.forward, count.backward, count.recompute, *splits


class Scan(nn.Module):
    """A recurrence that is written out, and a head over all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        state, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, position])
            states.append(state)
        x = torch.stack(states, 1)
        return self.head(torch.softmax(x @ x.transpose(1, 2), -1) @ x).sum()


@pytest.mark.parametrize(("samples", "length"), [(1, 150), (3, 97)])
@pytest.mark.parametrize("name", ["mamba", "scan", "scan, forward alone"])
def test_short_sequences_give_the_direct_count_of_longer_ones(
    name: str, samples: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_loops, "_MAX_OPERATORS", 100)
    model = model_from_config(MambaConfig(**SMALL)) if name == "mamba" else Scan()
    given = batch(samples, length)
    if name != "mamba":
        del given["labels"]
    how: dict[str, Any] = {"convention": Convention(), "backward": "alone" not in name}
    short = count_by_short_sequences(model, given, **how)
    assert short is not None
    assert short.method == "closed form"
    assert totals(short) == totals(count_flops(model, given, **how))
    assert any("loops over positions" in note for note in short.notes)


@pytest.mark.parametrize("kind", [LlamaConfig, Mamba2Config])
def test_what_does_not_loop_over_positions_is_counted_directly(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(position_loops, "_MAX_OPERATORS", 100)
    own = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 64}
    if kind is LlamaConfig:
        own = {"intermediate_size": 64, "num_attention_heads": 4}
    model = model_from_config(kind(**{**SMALL, **own}))
    how: dict[str, Any] = {"convention": Convention(), "backward": True}
    assert count_by_short_sequences(model, batch(2, 600), **how) is None


class Uneven(Scan):
    """Does other work at each position, so that short sequences tell nothing of long ones."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for position in range(input_ids.shape[1]):
            for _ in range(1 + int(position**1.37) % 3):
                total = total + self.step(self.embed(input_ids[:, position])).sum()
        return total


def test_work_that_differs_between_positions_is_counted_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_loops, "_MAX_OPERATORS", 100)
    how: dict[str, Any] = {"convention": Convention(), "backward": True}
    given = {"input_ids": torch.zeros(2, 90, dtype=torch.long)}
    assert count_by_short_sequences(Uneven(), given, **how) is None


def test_a_long_scan_is_counted_from_short_ones(tmp_path: Path) -> None:
    MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    request = BatchRequest(samples=2, length=4096, images=1, image_size=None)
    target = resolve_target(str(tmp_path), request, BuildOptions())
    assert count_target(target, convention=Convention(), backward=True).method == "closed form"


def test_a_saved_configuration_may_hold_infinity(tmp_path: Path) -> None:
    Mamba2Config(num_hidden_layers=1).save_pretrained(tmp_path)
    assert read_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]
    model_from_config(read_config(tmp_path))
