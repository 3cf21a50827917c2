"""Which batches are counted, which have another one's count or a closed form, and what is kept of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import Convention, FlopModel, count_flops
from truemfu.errors import BatchError
from truemfu.flops.closed_form import flop_model
from truemfu.flops.closed_form.batch_key import BatchKey
from truemfu.flops.count.counted_step import CountedStep

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


def is_counted(f: FlopModel, batch: Any) -> bool:
    """Whether the count of this batch needs a step to be run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CountedStep, "run", _refuse)
        try:
            f(batch)
        except AssertionError:
            return True
    return False


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError


def test_each_kind_of_batch_is_counted_exactly_and_once(no_counting: Callable[[], None]) -> None:
    model = Words()
    causal = Convention(attention="causal")
    f = FlopModel.fit(model, words(2, 9), convention=causal)
    plain = {"use_cache": False, "scale": 0.5, "mode": "train", "nothing": None, "sizes": [1, {"a": 2}]}
    batches = [words(5, 33), packed(4, 7), packed(3, 3, 9), words(2, 9, **plain), words(1, 4, **plain)]
    expected = [count_flops(model, batch, convention=causal) for batch in batches]
    found = [f(batch) for batch in batches]
    no_counting()
    for batch, first, count in zip(batches, found, expected, strict=True):
        assert f(batch) == first
        assert (first.forward, first.backward) == (count.forward, count.backward)


def test_counts_of_single_shapes_are_kept(no_counting: Callable[[], None]) -> None:
    f = FlopModel.fit(Bits(), words(2, 9))
    expected = f(words(3, 14))
    no_counting()
    assert not f.closed
    assert f(words(3, 14)) == expected
    assert expected.forward == 3 * 2 * 3 * 14 * 16 * 16
    assert expected.method == "count on fake tensors"


def test_kinds_of_batches_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flop_model, "_MOST_KINDS", 3)
    f = FlopModel.fit(Words(), words(2, 9))
    for number in range(5):
        f(words(2, 9, **{f"option_{number}": True}))
    assert len(f._kinds) == 3


def test_a_batch_of_another_kind_is_counted() -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    assert not is_counted(f, words(3, 30))
    for batch in (packed(2, 3), words(3, 30, use_cache=False), (torch.zeros(3, 50, dtype=torch.long),)):
        assert is_counted(f, batch)
    for wrong in (None, "batch"):
        with pytest.raises(BatchError, match="a batch is a mapping"):
            f(wrong)  # type: ignore[arg-type]


def test_a_lone_tensor_is_the_only_argument() -> None:
    model = nn.Linear(4, 6)
    f = FlopModel.fit(model, torch.zeros(3, 4))  # type: ignore[arg-type]
    assert f.closed
    assert not is_counted(f, torch.zeros(5, 4))
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
    f = FlopModel.fit(Bits(), words(2, 9, device="meta"))
    assert f(words(3, 14, device="meta")).forward == 3 * 2 * 3 * 14 * 16 * 16


@pytest.mark.parametrize("key", ["cu_seqlens", "image_grid_thw"])
def test_values_that_decide_the_work_must_be_there(key: str) -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    shape = (3,) if key == "cu_seqlens" else (2, 3)
    batch = words(1, 11, **{key: torch.zeros(shape, dtype=torch.int32, device="meta")})
    with pytest.raises(BatchError, match=f"'{key}' has no values .*: pass it as a CPU tensor"):
        f(batch)


def test_packed_documents_get_a_form_that_waits_for_longer_ones(no_counting: Callable[[], None]) -> None:
    """The longest document is a plain number for flash attention, and changes with every batch."""

    class ByDocument(Words):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, **other: Any) -> torch.Tensor:
            x = self.embed(input_ids)[0, None, None]
            starts = [*(position_ids[0] == 0).nonzero().flatten().tolist(), x.shape[2]]
            parts = [x[:, :, first:last] for first, last in itertools.pairwise(starts)]
            attend = nn.functional.scaled_dot_product_attention
            return self.head(torch.cat([attend(self.q(d), self.k(d), self.v(d)) for d in parts], 2))

    def batch(*documents: int) -> Batch:
        return packed(*documents, max_length_q=max(documents))

    def forward(*documents: int) -> int:
        return 2 * sum(documents) * 16 * (48 + 50) + 4 * 16 * sum(length**2 for length in documents)

    f = FlopModel.fit(ByDocument(), batch(4, 7))
    for seen in (
        *((9, 30, 2), (12, 12), (3, 40), (5, 6, 7, 8), (20, 20, 9), (17, 1), (2, 2, 33), (25, 8)),
        (6, 31, 6),
    ):
        assert f(batch(*seen)).forward == forward(*seen)
    assert is_counted(f, batch(41, 1))
    no_counting()
    assert f(batch(20, 13, 5)).method == "closed form"
    assert f(batch(20, 13, 5)).forward == forward(20, 13, 5)


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
    assert is_counted(f, words(2, 9, sizes=(1, 2), device_name=torch.device("meta")))
    f(words(2, 9, crops=crops()))
    assert is_counted(f, words(2, 9, crops=crops()))


class Holder:
    """An argument whose tensor is out of sight."""

    def __init__(self, rows: int) -> None:
        self.x = torch.zeros(rows, 8)


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, held: Holder) -> torch.Tensor:
        return self.layer(held.x)


def test_arguments_that_may_hide_tensors_are_counted_each_time() -> None:
    f = FlopModel.fit(Holding(), {"held": Holder(3)})
    for rows in (3, 5):
        assert f({"held": Holder(rows)}).forward == 2 * rows * 8 * 4


def test_nested_tensors_are_counted_each_time() -> None:
    f = FlopModel.fit(nn.Linear(8, 4), (torch.zeros(2, 3, 8),))
    for rows in (3, 5):
        nested = torch.nested.nested_tensor([torch.zeros(rows, 8), torch.zeros(5, 8)], layout=torch.jagged)
        assert f((nested,)).forward == 2 * (rows + 5) * 8 * 4


def test_a_sparse_tensor_is_not_compared_by_its_shape() -> None:
    assert BatchKey.of((torch.eye(3),)) is not None
    assert BatchKey.of((torch.eye(3).to_sparse(),)) is None


def test_documents_with_equal_sums_are_not_taken_for_each_other() -> None:
    """1 + 5 + 6 = 2 + 3 + 7, and the sums of their squares are equal too; only one has a seventh position."""

    class Beyond(Words):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids)[:, (position_ids == 6).flatten()])

    model = Beyond()
    f = FlopModel.fit(model, packed(1, 5, 6))
    for documents in ((1, 5, 6), (2, 3, 7)):
        assert f(packed(*documents)).forward == count_flops(model, packed(*documents)).forward


def test_autocast_at_the_call_is_another_kind_of_batch() -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        assert "bf16" in f(words(3, 12)).by_dtype
    assert set(f(words(3, 12)).by_dtype) == {"fp32"}
