"""A sliding window under the convention that counts all pairs: a note gives the share of the pairs inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command_line import caller
from torch import nn

pytest.importorskip("transformers", minversion="5.22")

from transformers import GemmaConfig, LlamaConfig, MistralConfig, ModernBertConfig, Phi3Config

from truemfu import Convention, FlopModel, TrainingMonitor, count_flops
from truemfu.flops.attention.pairs import Band
from truemfu.flops.models.hf_config import model_from_config

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def small(kind: Any, **more: Any) -> nn.Module:
    return model_from_config(kind(**{**SMALL, **more}), device="cpu")


def batch(length: int, samples: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def about_windows(notes: Any) -> list[str]:
    return [note for note in notes if "sliding window" in note]


@pytest.mark.parametrize(("kind", "how"), [(Phi3Config, "count_flops"), (MistralConfig, "FlopModel")])
def test_a_window_smaller_than_the_sequence_is_noted_with_its_share_of_the_pairs(kind: Any, how: str) -> None:
    model = small(kind, sliding_window=20)
    given = batch(100)
    count = count_flops(model, given) if how == "count_flops" else FlopModel.fit(model, given)(given)
    share = Band(behind=19, ahead=0).pairs(100) / 100**2
    assert about_windows(count.notes) == [
        "attention counts all pairs, also those outside a sliding window: in 4 of 4 attention layers a token "
        f"sees at most 20 tokens (itself and those before it), and the mask allows {share:.1%} of the pairs "
        "of sequences of 100 tokens; the causal convention counts only those"
    ]
    causal = count_flops(model, given, convention=Convention(attention="causal"))
    full, allowed = (
        sum(flops for name, flops in c.by_operator.items() if "attention" in name) for c in (count, causal)
    )
    assert allowed == share * full > 0
    assert about_windows(causal.notes) == []


def test_a_form_notes_the_window_for_longer_sequences_alone() -> None:
    formula = FlopModel.fit(small(Phi3Config, sliding_window=50), batch(30))
    assert about_windows(formula(batch(50)).notes) == []
    assert len(about_windows(formula(batch(51)).notes)) == 1


@pytest.mark.parametrize("kind", [LlamaConfig, GemmaConfig])
def test_without_a_window_there_is_no_note(kind: Any) -> None:
    assert about_windows(count_flops(small(kind), batch(64)).notes) == []


def test_a_window_to_both_sides_is_named_so() -> None:
    model = small(ModernBertConfig, local_attention=16, global_attn_every_n_layers=2)
    (note,) = about_windows(count_flops(model, batch(64)).notes)
    share = Band(behind=8, ahead=8).pairs(64) / 64**2
    assert "in 2 of 4 attention layers" in note
    assert f"at most 9 tokens to each side, and the mask allows {share:.1%}" in note


def test_packed_documents_are_held_against_the_window_one_by_one() -> None:
    model = small(Phi3Config, sliding_window=20)
    positions = torch.cat([torch.arange(30), torch.arange(10), torch.arange(10)])[None]
    count = count_flops(model, {**batch(50, 1), "position_ids": positions})
    (note,) = about_windows(count.notes)
    share = sum(Band(behind=19, ahead=0).pairs(n) for n in (30, 10, 10)) / (30**2 + 2 * 10**2)
    assert f"{share:.1%} of the pairs of sequences of up to 30 tokens" in note
    short = torch.cat([torch.arange(20), torch.arange(20), torch.arange(10)])[None]
    assert about_windows(count_flops(model, {**batch(50, 1), "position_ids": short}).notes) == []


def test_the_command_and_the_monitor_show_the_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = caller(capsys)
    Phi3Config(**SMALL, sliding_window=20).save_pretrained(tmp_path)
    call = ["count", str(tmp_path), "--batch", "1", "--seq", "64"]
    text = " ".join(run(*call).out.split())
    assert "note: attention counts all pairs, also those outside a sliding window" in text
    found = json.loads(run(*call, "--json").out)
    assert len(about_windows(found["notes"])) == 1
    model = small(Phi3Config, sliding_window=20).float()
    with TrainingMonitor(tmp_path / "run", {"monitoring": {"peak_tflops": 1}}, model=model) as monitor:
        for step in (1, 2):
            model(**batch(64)).loss.backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    assert about_windows(monitor.summary()["notes"]) == about_windows(found["notes"])
