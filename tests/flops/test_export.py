"""A closed form travels as plain data: adopted elsewhere it gives the same counts, and nothing is counted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import truemfu.errors
import truemfu.flops.closed_form.flop_model as closed_form
from truemfu import Convention, FlopModel, count_flops
from truemfu.errors import BatchError, TruemfuError, TruemfuWarning, UsageError

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


def travelled(fitted: FlopModel) -> Any:
    return json.loads(json.dumps(fitted.export()))


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truemfu.errors, "_already_warned", set())


@pytest.fixture
def no_counting(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, a count is an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was counted")

    return lambda: monkeypatch.setattr(closed_form, "run_counted", refuse)


def test_all_kinds_travel_and_nothing_is_counted(no_counting: Callable[[], None]) -> None:
    model = Words()
    f = FlopModel.fit(model, words(2, 9), convention=Convention(attention="causal"))
    f(packed(4, 7))
    f(words(2, 9, use_cache=False, scale=0.5, mode="train", nothing=None, sizes=[1, {"a": 2}]))
    batches = [
        words(5, 33),
        packed(3, 3, 9),
        words(1, 4, use_cache=False, scale=0.5, mode="train", nothing=None, sizes=[1, {"a": 2}]),
    ]
    expected = [f(batch) for batch in batches]
    data = travelled(f)
    no_counting()
    g = FlopModel.from_export(model, data)
    for batch, count in zip(batches, expected, strict=True):
        assert g.knows(batch)
        assert g(batch).as_dict() == count.as_dict()
    assert g.convention == Convention(attention="causal")
    assert g.formulas() == f.formulas()
    assert g.closed
    assert travelled(g) == data


def test_a_kind_that_was_not_exported_is_fitted_when_it_comes() -> None:
    model = Words()
    g = FlopModel.from_export(model, travelled(FlopModel.fit(model, words(2, 9))))
    assert not g.knows(packed(4, 7))
    assert g(packed(4, 7)).model_flops == count_flops(model, packed(4, 7)).model_flops
    assert g.knows(packed(8, 2, 5))


def test_counts_of_single_shapes_travel(no_counting: Callable[[], None]) -> None:
    model = Bits()
    with pytest.warns(TruemfuWarning, match="counted once per shape"):
        f = FlopModel.fit(model, words(2, 9))
    expected = f(words(3, 14))
    g = FlopModel.from_export(model, travelled(f))
    assert not g.closed
    assert g.knows(words(3, 14))
    assert not g.knows(words(3, 15))
    assert g(words(3, 15)).forward == 4 * 2 * 3 * 15 * 16 * 16
    no_counting()
    assert g(words(3, 14)).as_dict() == expected.as_dict()
    assert g(words(3, 14)).method == "count on fake tensors, counted once per shape"


def test_what_another_process_fitted_later_is_adopted(no_counting: Callable[[], None]) -> None:
    model = Words()
    f = FlopModel.fit(model, words(2, 9))
    g = FlopModel.from_export(model, travelled(f))
    expected = f(packed(4, 7))
    no_counting()
    g.adopt(travelled(f))
    g.adopt(travelled(f))
    assert g(packed(4, 7)).as_dict() == expected.as_dict()
    assert travelled(g) == travelled(f)


def test_arguments_that_cannot_travel_stay_behind() -> None:
    model = Words()
    f = FlopModel.fit(model, words(2, 9))
    f(words(2, 9, cache=object()))
    assert len(f.export()["kinds"]) == 1


def test_an_export_and_a_model_must_be_counted_alike() -> None:
    model = Words()
    f = FlopModel.fit(model, words(2, 9), loss_fn=torch.sum)
    with pytest.raises(UsageError, match="counted with a loss_fn: pass the same one"):
        FlopModel.from_export(model, f.export())
    assert FlopModel.from_export(model, f.export(), loss_fn=torch.sum).knows(words(1, 1))
    plain = FlopModel.fit(model, words(2, 9), backward=False)
    with pytest.raises(UsageError, match="counted without a loss_fn: pass none"):
        FlopModel.from_export(model, plain.export(), loss_fn=torch.sum)
    with pytest.raises(
        UsageError, match=r"\('full', False, False\) does not fit one with \('full', True, True\)"
    ):
        f.adopt(plain.export())


@cache
def export() -> Any:
    return FlopModel.fit(Words(), words(2, 9)).export()


def changed(path: str, value: Any) -> Callable[[Any], Any]:
    """A change of the data at a path such as kinds.0.form."""

    def change(data: Any) -> Any:
        *way, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        holder = data
        for step in way:
            holder = holder[step]
        if value is None:
            del holder[last]
        else:
            holder[last] = value
        return data

    return change


def nested(data: Any) -> Any:
    term: Any = ["size", "length"]
    for _ in range(5000):
        term = ["conv", 1, 1, 0, 1, False, 0, False, term]
    return changed("kinds.0.form.terms.0", term)(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: None, "expected an export of a FlopModel, version 2; got NoneType"),
        (lambda data: [data], "expected an export of a FlopModel, version 2; got list"),
        (lambda data: {}, "expected an export of a FlopModel, version 2; got dict"),
        (changed("version", 1), "version 2; got version 1"),
        (changed("kinds", None), "missing required field `kinds`"),
        (changed("attention", "half"), "attention convention must be one of full, causal"),
        (changed("more", 1), "unknown field `more`"),
        (changed("kinds.0.form.parts.0", ["forward"]), r"cannot be read: .*parts"),
        (changed("kinds.0.form.parts.0.0", "sideways"), r"Invalid enum value 'sideways'"),
        (changed("kinds.0.form.parts.0.4", [[1, 99]]), "refers to a term that does not exist"),
        (changed("kinds.0.form.parts.0.4", [[1, -1]]), "refers to a term that does not exist"),
        (changed("kinds.0.form.parts.0.4", [["1/0", 0]]), "'1/0' is not a constant"),
        (changed("kinds.0.form.parts.0.4", [["two", 0]]), "'two' is not a constant"),
        (changed("kinds.0.form.terms.0", ["size", "breadth"]), "needs 'breadth', which the batch lacks"),
        (changed("kinds.0.form.terms.0", ["documents"]), "needs 'documents', which the batch lacks"),
        (changed("kinds.0.form.terms.0", ["eval", "1"]), "is not a term"),
        (changed("kinds.0.layout.tensors.0.2", ["samples", 1.5]), "cannot be read: Expected"),
        (nested, "nest too deeply"),
    ],
)
def test_data_that_is_no_export_is_one_clear_error(change: Callable[[Any], Any], said: str) -> None:
    data = change(copy.deepcopy(export()))
    with pytest.raises(TruemfuError, match=said) as raised:
        FlopModel.from_export(Words(), data)
    assert "\n" not in str(raised.value)


def test_a_repeated_batch_is_looked_up() -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    first = f(words(3, 7))
    assert f(words(3, 7)) is first
    assert f(words(7, 3)) is not first
    assert f(words(3, 7, use_cache=True)).as_dict() == first.as_dict()
    assert f(words(3, 7, use_cache=True)) is f(words(3, 7, use_cache=True))


def test_looking_up_keeps_no_more_than_a_few_hundred() -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    for length in range(1, 1000):
        f(words(1, length))
    assert len(f._repeated) <= 256


def test_kinds_of_batches_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "_MAX_KINDS", 3)
    f = FlopModel.fit(nn.Linear(2, 2), {"input": torch.zeros(3, 2)})
    for _ in range(5):
        f._calibrate({"input": torch.zeros(3, 2)})
    assert len(f._kinds) == 3


def test_knowing_counts_nothing(no_counting: Callable[[], None]) -> None:
    f = FlopModel.fit(Words(), words(2, 9))
    no_counting()
    assert f.knows(words(3, 50))
    assert not f.knows(packed(2, 3))
    assert not f.knows(words(3, 50, use_cache=False))
    assert not f.knows({"input_ids": torch.zeros(3, 50)})
    assert not f.knows((torch.zeros(3, 50),))
    assert not f.knows(None)  # type: ignore[arg-type]
    assert not f.knows(torch.zeros(3))  # type: ignore[arg-type]


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
    assert not f.knows(batch)
    with pytest.raises(BatchError, match=f"'{key}' has no values .*: pass it as a CPU tensor"):
        f(batch)


def test_the_longest_document_is_no_new_kind_of_batch(no_counting: Callable[[], None]) -> None:
    """Collators for flash attention pass it as a plain number, which changes with every batch."""
    f = FlopModel.fit(Words(), packed(4, 7, max_length_q=7))
    no_counting()
    assert f.knows(packed(3, 3, 12, max_length_q=12))
    assert f(packed(3, 12, max_length_q=12)).forward == f(packed(3, 12, max_length_q=7)).forward


def test_arguments_are_compared_without_looking_into_tensors() -> None:
    class Unreadable(torch.Tensor):
        def __eq__(self, other: object) -> Any:
            raise AssertionError("a tensor was compared")

        __hash__ = torch.Tensor.__hash__

    def crops() -> list[torch.Tensor]:
        return [torch.zeros(2).as_subclass(Unreadable)]

    f = FlopModel.fit(Words(), words(2, 9, sizes=(1, 2), device_name=torch.device("cpu")))
    assert f.knows(words(2, 9, sizes=(1, 2), device_name=torch.device("cpu")))
    assert not f.knows(words(2, 9, sizes=(1, 3), device_name=torch.device("cpu")))
    f(words(2, 9, crops=crops()))
    assert not f.knows(words(2, 9, crops=crops()))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_have_no_closed_form(layout: torch.layout) -> None:
    model = nn.Linear(8, 4)
    nested_batch = (torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)], layout=layout),)
    with pytest.raises(BatchError, match=r"0 is a nested tensor, .* count each batch with count_flops"):
        FlopModel.fit(model, nested_batch)
    f = FlopModel.fit(model, (torch.zeros(2, 3, 8),))
    assert not f.knows(nested_batch)
