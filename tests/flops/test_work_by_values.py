"""Work that depends on the values of a batch, or changes with its sizes, is found and counted each time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from truemfu import FlopModel, count_flops
from truemfu.flops.count.counted_step import CountedStep


class Unpads(nn.Module):
    """Runs on the tokens that are no padding, as models with their own unpadding do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(100, 16), nn.Linear(16, 64)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.mix(self.embed(input_ids)[attention_mask.bool()]).sum()

    @staticmethod
    def flops(tokens: int) -> int:
        return 3 * 2 * tokens * 16 * 64


def padded(real: int, samples: int = 2, length: int = 16, device: str = "cpu") -> dict[str, torch.Tensor]:
    mask = (torch.arange(length) < real).long().expand(samples, length).contiguous()
    return {"input_ids": torch.ones(samples, length, dtype=torch.long), "attention_mask": mask.to(device)}


@pytest.mark.parametrize("first", [16, 4], ids=["first without padding", "first with padding"])
def test_a_model_that_leaves_padding_out_is_counted_by_values(first: int) -> None:
    model = Unpads()
    f = FlopModel.fit(model, padded(first))
    assert not f.closed
    for real in (16, 4, 8, 4):
        count = f(padded(real))
        assert count.model_flops == Unpads.flops(2 * real)
        assert any("may depend on the values" in note for note in count.notes)


def test_values_once_counted_are_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    f = FlopModel.fit(Unpads(), padded(4))
    f(padded(4))
    runs, run = [], CountedStep.run
    monkeypatch.setattr(CountedStep, "run", lambda step: runs.append(step) or run(step))
    assert f(padded(4)).model_flops == Unpads.flops(2 * 4)
    assert len(runs) == 0
    assert f(padded(5)).model_flops == Unpads.flops(2 * 5)
    assert len(runs) == 1


def test_a_mask_without_values_is_taken_to_have_no_padding() -> None:
    f = FlopModel.fit(Unpads(), padded(4))
    assert f(padded(4, samples=3, length=9, device="meta")).model_flops == Unpads.flops(3 * 9)


class Labelled(nn.Module):
    """Makes logits for the tokens that have a label alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        has_label = labels != -100
        return nn.functional.cross_entropy(self.head(self.embed(input_ids)[has_label]), labels[has_label])


@pytest.mark.parametrize("first", [14, 3])
def test_a_head_for_labelled_tokens_is_counted_by_values(first: int) -> None:
    model = Labelled()

    def batch(labels: int) -> dict[str, torch.Tensor]:
        ids = torch.ones(2, 7, dtype=torch.long)
        return {"input_ids": ids, "labels": torch.where(torch.arange(14).view(2, 7) < labels, ids, -100)}

    f = FlopModel.fit(model, batch(first))
    assert [f(batch(n)).model_flops for n in (14, 3, 9)] == [3 * 2 * n * 16 * 100 for n in (14, 3, 9)]


class Tasks(nn.Module):
    """One head of several, by a number in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 800)])

    def forward(self, x: torch.Tensor, task: torch.Tensor) -> torch.Tensor:
        return self.heads[int(task)](x).sum()


@pytest.mark.parametrize("first", [0, 1])
def test_a_head_chosen_by_a_tensor_is_counted_by_values(first: int) -> None:
    f = FlopModel.fit(Tasks(), (torch.zeros(5, 16), torch.tensor(first)))
    for task in (0, 1, 1, 0):
        flops = f((torch.zeros(5, 16), torch.tensor(task))).model_flops
        assert flops == 2 * 2 * 5 * 16 * (8, 800)[task]


class Branches(nn.Module):
    """Another layer for sequences beyond a length."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(100, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.length = length

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.a(self.embed(input_ids))
        return (self.b(x) if input_ids.shape[1] > self.length else x).sum()


def tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.zeros(2, length, dtype=torch.long)}


@pytest.mark.parametrize("limit", [3, 12, 20, 1500])
def test_a_branch_on_a_length_shows_wherever_the_example_is(limit: int) -> None:
    model = Branches(limit)
    f = FlopModel.fit(model, tokens(limit if limit < 100 else limit + 1))
    for length in (limit - 1, limit + 1, 30):
        assert f(tokens(length)).model_flops == count_flops(model, tokens(length)).model_flops


@pytest.mark.parametrize("limit", [6, 20])
def test_a_branch_on_a_short_length_shows_though_the_example_is_long(limit: int) -> None:
    model = Branches(limit)
    f = FlopModel.fit(model, tokens(30))
    assert f(tokens(5)).model_flops == count_flops(model, tokens(5)).model_flops


class Plain(nn.Module):
    """Reads its mask, its labels and a number, and does the same work whatever they say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor, items: torch.Tensor
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        if not bool(attention_mask.all()):
            x = x * attention_mask[..., None]
        loss = nn.functional.cross_entropy(self.mix(x).flatten(0, 1), labels.flatten(), reduction="sum")
        return loss / int(items)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_that_are_read_and_change_nothing_leave_the_closed_form(device: str) -> None:
    def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
        made = padded(3, samples, length, device)
        return {**made, "labels": made["input_ids"], "items": torch.tensor(length)}

    f = FlopModel.fit(Plain(), batch(2, 9))
    assert f.closed
    assert f(batch(3, 20)).method == "closed form"
    assert f(batch(3, 20)).notes == ()
    assert f(batch(3, 20)).model_flops == 3 * 2 * 3 * 20 * 16 * 100
