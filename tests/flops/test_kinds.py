"""Kinds of batches: which batches share a closed form, which are counted, and what is kept of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import truemfu.errors
from truemfu import Convention, FlopModel, count_flops
from truemfu.errors import BatchError, TruemfuWarning
from truemfu.flops.closed_form import kinds

Batch = dict[str, Any]


class Words(nn.Module):
    """Embeddings, causal attention, a head; anything else it is called with is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor, **other: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        mixed = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        return self.head(mixed)


class Bits(nn.Module):
    """Work that is no polynomial of the length: one product for each bit of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for _ in range(bin(input_ids.shape[1]).count("1")):
            x = self.mix(x)
        return x


def words(samples: int, length: int, device: str = "cpu", **other: Any) -> Batch:
    return {"input_ids": torch.zeros(samples, length, dtype=torch.long, device=device), **other}


def packed(*documents: int, **other: Any) -> Batch:
    positions = torch.cat([torch.arange(n) for n in documents])[None]
    return words(1, sum(documents), position_ids=positions, **other)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truemfu.errors, "_already_warned", set())


def is_counted(f: FlopModel, batch: Any) -> bool:
    """Whether the count of this batch needs a step to be run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "run_counted", _refuse)
        try:
            f(batch)
        except AssertionError:
            return True
    return False


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError


def test_each_kind_has_its_form_and_later_batches_need_no_count(no_counting: Callable[[], None]) -> None:
    model = Words()
    f = FlopModel.fit(model, words(2, 9), convention=Convention(attention="causal"))
    plain = {"use_cache": False, "scale": 0.5, "mode": "train", "nothing": None, "sizes": [1, {"a": 2}]}
    f(packed(4, 7))
    f(words(2, 9, **plain))
    batches = [words(5, 33), packed(3, 3, 9), words(1, 4, **plain)]
    expected = [count_flops(model, batch, convention=Convention(attention="causal")) for batch in batches]
    no_counting()
    assert f.closed
    for batch, count in zip(batches, expected, strict=True):
        assert (f(batch).forward, f(batch).backward) == (count.forward, count.backward)


def test_counts_of_single_shapes_are_kept(no_counting: Callable[[], None]) -> None:
    with pytest.warns(TruemfuWarning, match="counted once per shape"):
        f = FlopModel.fit(Bits(), words(2, 9))
    expected = f(words(3, 14))
    no_counting()
    assert not f.closed
    assert f(words(3, 14)) == expected
    assert expected.forward == 3 * 2 * 3 * 14 * 16 * 16
    assert expected.method == "count on fake tensors, counted once per shape"


def test_kinds_of_batches_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MAX_KINDS", 3)
    f = FlopModel.fit(Words(), words(2, 9))
    for number in range(5):
        f(words(2, 9, **{f"option_{number}": True}))
    assert len(f._kinds.all) == 3


def test_a_batch_of_another_kind_is_counted() -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    assert not is_counted(f, words(3, 50))
    for batch in (packed(2, 3), words(3, 50, use_cache=False), (torch.zeros(3, 50, dtype=torch.long),)):
        assert is_counted(f, batch)
    for wrong in (None, "batch"):
        with pytest.raises(BatchError, match="a batch is a mapping"):
            f(wrong)  # type: ignore[arg-type]


def test_a_lone_tensor_is_the_only_argument() -> None:
    model = nn.Linear(4, 6)
    f = FlopModel.fit(model, torch.zeros(3, 4))  # type: ignore[arg-type]
    assert f.closed
    assert f(torch.zeros(5, 4)).forward == 2 * 5 * 4 * 6  # type: ignore[arg-type]
    assert f((torch.zeros(5, 4),)).forward == 2 * 5 * 4 * 6


def test_fitting_keeps_no_tensor_of_the_batch_alive() -> None:
    import gc
    import weakref

    batch = words(2, 9)
    alive = weakref.ref(batch["input_ids"])
    f = FlopModel.fit(Words(), batch)
    f(batch)
    del batch
    gc.collect()
    assert alive() is None


def test_batches_without_values_count_like_real_ones() -> None:
    model = Words()
    f, g = FlopModel.fit(model, words(2, 9)), FlopModel.fit(model, words(2, 9, device="meta"))
    assert g(words(3, 20, device="meta")).as_dict() == f(words(3, 20)).as_dict()
    mixed = packed(4, 7)
    mixed["input_ids"] = mixed["input_ids"].to("meta")
    assert g(mixed).as_dict() == f(packed(4, 7)).as_dict()


def test_a_model_without_closed_form_is_counted_on_a_batch_without_values() -> None:
    with pytest.warns(TruemfuWarning, match="counted once per shape"):
        f = FlopModel.fit(Bits(), words(2, 9, device="meta"))
    assert f(words(3, 14, device="meta")).forward == 3 * 2 * 3 * 14 * 16 * 16


@pytest.mark.parametrize("key", ["cu_seqlens", "image_grid_thw"])
def test_values_that_decide_the_work_must_be_there(key: str) -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    shape = (3,) if key == "cu_seqlens" else (2, 3)
    batch = words(1, 11, **{key: torch.zeros(shape, dtype=torch.int32, device="meta")})
    with pytest.raises(BatchError, match=f"'{key}' has no values .*: pass it as a CPU tensor"):
        f(batch)


def test_the_longest_document_is_no_new_kind_of_batch(no_counting: Callable[[], None]) -> None:
    """Collators for flash attention pass it as a plain number, which changes with every batch."""
    f = FlopModel.fit(Words(), packed(4, 7, max_length_q=7))
    no_counting()
    assert f(packed(3, 3, 12, max_length_q=12)).forward > f(packed(3, 12, max_length_q=12)).forward
    assert f(packed(3, 12, max_length_q=12)).forward == f(packed(3, 12, max_length_q=7)).forward


def test_arguments_are_compared_without_looking_into_tensors() -> None:
    class Unreadable(torch.Tensor):
        def __eq__(self, other: object) -> Any:
            raise AssertionError("a tensor was compared")

        __hash__ = torch.Tensor.__hash__

    def crops() -> list[torch.Tensor]:
        return [torch.zeros(2).as_subclass(Unreadable)]

    f = FlopModel.fit(Words(), words(2, 9, sizes=(1, 2), device_name=torch.device("cpu")))
    assert not is_counted(f, words(2, 9, sizes=(1, 2), device_name=torch.device("cpu")))
    assert is_counted(f, words(2, 9, sizes=(1, 3), device_name=torch.device("cpu")))
    f(words(2, 9, crops=crops()))
    assert is_counted(f, words(2, 9, crops=crops()))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_have_no_closed_form(layout: torch.layout) -> None:
    model = nn.Linear(8, 4)
    nested_batch = (torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=layout),)
    with pytest.raises(BatchError, match=r"0 is a nested tensor, .* count each batch with count_flops"):
        FlopModel.fit(model, nested_batch)
    f = FlopModel.fit(model, (torch.zeros(2, 3, 8),))
    with pytest.raises(BatchError, match="0 is a nested tensor"):
        f(nested_batch)
