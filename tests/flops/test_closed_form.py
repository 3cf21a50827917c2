"""A closed form is exact for shapes it never saw: every public case, against direct counts and the truth."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.versions import TORCH
from torch import nn

from truemfu import Convention, FlopModel, count_flops
from truemfu.errors import BatchError, TruemfuWarning
from truemfu.flops.batch import documents_of
from truemfu.flops.closed_form import kinds

pytest.importorskip("transformers", minversion="5.22")
cases = pytest.importorskip("benchmarks.cases")

UNCOMPILED = [c.name for c in cases.CASES if not c.compiled]
PACKABLE = [
    name
    for name in UNCOMPILED
    if name.startswith(("gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma", "mixtral", "deep"))
    and name not in ("llama-padded", "qwen2.5-vl")
]
QUICK = settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def fitted(name: str, attention: str) -> tuple[cases.Case, nn.Module, FlopModel]:
    c = cases.case(name)
    model = c.build()
    return (
        c,
        model,
        FlopModel.fit(model, c.batch(samples=2, length=24), convention=Convention(attention=attention)),
    )


def assert_same(count, other) -> None:
    assert (count.forward, count.backward, count.recompute) == (
        other.forward,
        other.backward,
        other.recompute,
    )


# Older versions of torch run some of these attentions without the fused kernel that recomputes.
FUSED_FOR_ALL = TORCH >= (2, 11)


def assert_true(count, truth) -> None:
    assert (count.forward, count.backward) == (truth.forward, truth.backward)
    assert count.recompute == truth.recompute or not FUSED_FOR_ALL


def extras(name: str) -> st.SearchStrategy[dict]:
    """What else may vary in a case: numbers and sizes of images."""
    side = st.integers(1, 8).map(lambda n: 2 * n)
    if name == "qwen2.5-vl":
        grids = st.lists(st.tuples(st.integers(1, 3), side, side), min_size=1, max_size=3)
        return grids.map(lambda images: {"images": images})
    if name == "llava":
        return st.integers(1, 5).map(lambda n: {"images": n})
    if name.startswith("resnet"):
        return st.integers(33, 130).map(lambda n: {"size": n})
    return st.just({})


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", UNCOMPILED)
def test_closed_form_equals_the_truth_at_unseen_shapes(name, attention):
    c, model, f = fitted(name, attention)
    assert f.closed, "counted once per shape"

    @QUICK
    @given(st.integers(1, 9), st.integers(5, 60), extras(name))
    def holds(samples, length, extra):
        if name == "llava":
            length += 9 * extra["images"]
        batch = c.batch(samples=samples, length=length, **extra)
        assert_true(f(batch), c.truth(model, batch, attention=attention))

    holds()


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", PACKABLE)
def test_closed_form_equals_the_truth_for_packed_documents(name, attention):
    c, model, f = fitted(name, attention)

    @QUICK
    @given(st.integers(1, 4), st.lists(st.integers(1, 20), min_size=2, max_size=5))
    def holds(samples, documents):
        batch = c.batch(samples=samples, length=sum(documents), documents=documents)
        assert_true(f(batch), c.truth(model, batch, attention=attention))

    holds()


@pytest.mark.parametrize("name", ["llama-sdpa", "mistral", "t5", "resnet", "mamba2", "clip", "whisper"])
def test_closed_form_equals_a_direct_count_in_every_split(name):
    c, model, f = fitted(name, "full")
    batch = c.batch(samples=4, length=31)
    direct, closed = count_flops(model, batch), f(batch)
    assert_same(closed, direct)
    assert dict(closed.by_module) == dict(direct.by_module)
    assert dict(closed.by_dtype) == dict(direct.by_dtype)
    assert dict(closed.by_operator) == dict(direct.by_operator)
    assert closed.method == "closed form"


def without_values(batch):
    """As a monitor has it: images, sounds and tokens without values, what decides the work with them."""
    return {
        key: value.to("meta") if isinstance(value, torch.Tensor) and key != "image_grid_thw" else value
        for key, value in batch.items()
    }


@pytest.mark.parametrize("name", ["llama-sdpa", "qwen2.5-vl", "llava", "t5", "clip", "whisper", "resnet"])
def test_batches_without_values_are_fitted_and_counted_alike(name):
    c, model, f = fitted(name, "full")
    g = FlopModel.fit(model, without_values(c.batch(samples=2, length=24)))
    batch = c.batch(samples=3, length=41)
    assert g.closed
    assert g(without_values(batch)).as_dict() == f(batch).as_dict()


def test_positions_in_three_dimensions_vary_with_the_tokens(no_counting):
    """Time, height and width of each token, as collators of image models pass them."""
    c, model, f = fitted("qwen2.5-vl", "full")

    def batch(samples, length):
        plain = c.batch(samples=samples, length=length)
        return {**plain, "position_ids": torch.zeros(3, *plain["input_ids"].shape, dtype=torch.long)}

    g = FlopModel.fit(model, batch(2, 24))
    assert g.closed
    expected = f(c.batch(samples=3, length=61))
    no_counting()
    assert_same(g(batch(3, 61)), expected)


def test_padding_changes_nothing():
    c, _, f = fitted("llama-padded", "full")
    batch = c.batch(samples=3, length=30)
    padded = f(batch)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    assert_same(f(batch), padded)


def test_a_fixed_size_may_not_vary_but_a_batch_may():
    c, model, f = fitted("vit", "full")
    batch = c.batch(samples=7)
    assert_true(f(batch), c.truth(model, batch))


def test_positional_batches():
    model = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.MaxPool2d(3, 2), nn.Conv2d(5, 7, 2))
    f = FlopModel.fit(model, (torch.zeros(2, 3, 32, 32),))
    for shape in ((1, 3, 47, 33), (5, 3, 64, 90)):
        batch = (torch.zeros(shape),)
        assert f.closed
        assert_same(f(batch), count_flops(model, batch))


def test_sequence_of_vectors():
    model = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    f = FlopModel.fit(model, (torch.zeros(2, 9, 16),))
    batch = (torch.zeros(3, 21, 16),)
    assert_same(f(batch), count_flops(model, batch))


class Prefixed(nn.Module):
    """Learned prefix tokens before the sequence: lengths enter as (length + 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.zeros(1, 5, 16))
        self.embed = nn.Embedding(50, 16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, input_ids):
        x = torch.cat([self.prefix.expand(len(input_ids), -1, -1), self.embed(input_ids)], 1)
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        return scores.softmax(-1) @ self.v(x)


def test_sums_of_terms_are_found():
    model = Prefixed()
    f = FlopModel.fit(model, {"input_ids": torch.zeros(2, 9, dtype=torch.long)})
    assert f.closed
    for shape in ((1, 3), (4, 50)):
        batch = {"input_ids": torch.zeros(shape, dtype=torch.long)}
        assert_same(f(batch), count_flops(model, batch))


class Sorter(nn.Module):
    """Work that is no polynomial of the length: one product for each bit of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for _ in range(bin(input_ids.shape[1]).count("1")):
            x = self.mix(x)
        return x


def test_a_model_without_closed_form_is_counted_once_per_shape_and_says_so():
    model = Sorter()
    with pytest.warns(TruemfuWarning, match="counted once per shape"):
        f = FlopModel.fit(model, {"input_ids": torch.zeros(2, 9, dtype=torch.long)})
    assert not f.closed
    batch = {"input_ids": torch.zeros(3, 14, dtype=torch.long)}
    assert_same(f(batch), count_flops(model, batch))
    assert "counted once per shape" in f(batch).method


def test_a_new_kind_of_batch_is_calibrated_when_it_comes():
    c, model, f = fitted("llama-sdpa", "full")
    batch = c.batch(samples=2, length=13)
    batch["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
    assert_true(f(batch), c.truth(model, batch))
    assert f(batch).method == "closed form"


def test_formulas_are_written_out():
    _, _, f = fitted("llama-sdpa", "full")
    assert set(f.formulas()) == {"forward", "backward", "recompute"}
    assert "samples·length·length" in f.formulas()["recompute"]


class Divided(nn.Module):
    """Takes numbers beside its tensors: one that decides the work, and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, items: int = 1, scale: float = 1.0, depth: int = 3) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.sum() * scale / items


def test_a_number_that_makes_no_difference_is_looked_at_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Divided()
    form = FlopModel.fit(model, {"x": torch.ones(2, 4, 8), "items": 5, "scale": 0.5})
    expected = count_flops(model, {"x": torch.ones(3, 5, 8)}).model_flops
    assert form({"x": torch.ones(3, 5, 8), "items": 6, "scale": 0.25}).model_flops == expected
    runs, run = [], kinds.run_counted
    monkeypatch.setattr(kinds, "run_counted", lambda *args, **kw: runs.append(args) or run(*args, **kw))
    for items in range(7, 2000):
        batch = {"x": torch.ones(3, 5, 8), "items": items, "scale": 1 / items}
        assert form(batch).model_flops == expected
    assert 0 < len(runs) < 15


class Late(nn.Module):
    """Has another head from the fifth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(16, 8), nn.Linear(16, 64)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        loss = self.first(x).sum()
        return loss + self.late(x).sum() if step >= 5 else loss


def test_a_number_that_makes_a_difference_later_is_noticed() -> None:
    form = FlopModel.fit(Late(), {"x": torch.zeros(5, 16), "step": 0})
    for step in (*range(1, 12), 3, 100, 1):
        expected = 2 * 2 * 5 * 16 * (8 + (64 if step >= 5 else 0))
        assert form({"x": torch.zeros(5, 16), "step": step}).model_flops == expected


def test_a_number_that_decides_the_work_stays_part_of_the_kind() -> None:
    model = Divided()
    form = FlopModel.fit(model, {"x": torch.ones(2, 4, 8), "depth": 3})
    for depth in (1, 2, 3, 2):
        batch = {"x": torch.ones(3, 5, 8), "depth": depth}
        assert form(batch).model_flops == count_flops(model, batch).model_flops


def test_an_input_that_needs_a_gradient_is_another_kind_of_batch() -> None:
    """A discriminator on real samples, and on those it has to pass gradients on for."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    for first in (False, True):
        f = FlopModel.fit(model, (torch.zeros(5, 16, requires_grad=first),))
        for needed in (False, True, False):
            expected = 2 * 7 * 16 * (16 * (3 if needed else 2) + 8 * 3)
            assert f((torch.zeros(7, 16, requires_grad=needed),)).model_flops == expected
        assert f.closed


class TakesBatches(nn.Module):
    """A model whose forward takes the batch whole, as collators make it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch).loss


@pytest.mark.parametrize("wrap", [lambda b: (b,), lambda b: {"batch": b}], ids=["by place", "by name"])
def test_a_batch_that_is_passed_whole_is_looked_into(wrap, no_counting):
    c, model, f = fitted("llama-sdpa", "full")
    whole = TakesBatches(model)
    packed, plain = c.batch(samples=1, length=32, documents=[10, 22]), c.batch(samples=2, length=9)
    assert count_flops(whole, wrap(packed)).model_flops == f(packed).model_flops
    g = FlopModel.fit(whole, wrap(packed))
    g(wrap(plain))
    assert g.closed
    batches = (
        c.batch(samples=1, length=32, documents=[3, 9, 20]),
        c.batch(samples=1, length=17, documents=[1, 16]),
        c.batch(samples=3, length=41),
    )
    expected = [f(batch).model_flops for batch in batches]
    no_counting()
    assert [g(wrap(batch)).model_flops for batch in batches] == expected


def test_packed_documents_are_found_beside_other_arguments():
    c, model, f = fitted("llama-sdpa", "full")

    class Scaled(TakesBatches):
        def forward(self, scale, batch):
            return super().forward(batch) * scale

    packed = c.batch(samples=1, length=32, documents=[10, 22])
    assert count_flops(Scaled(model), (2.0, packed)).model_flops == f(packed).model_flops
    g = FlopModel.fit(Scaled(model), {"scale": torch.ones(()), "batch": packed})
    other = c.batch(samples=1, length=32, documents=[3, 9, 20])
    for batch in (packed, other):
        assert g({"scale": torch.ones(()), "batch": batch}).model_flops == f(batch).model_flops


class Flat(nn.Module):
    """Packed documents in a row without a dimension for samples, told apart by their ends or positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)

    def forward(self, input_ids, cu_seqlens=None, position_ids=None, max_seqlen=None):
        if cu_seqlens is None:
            cu_seqlens = torch.cat([(position_ids == 0).nonzero().flatten(), torch.tensor([len(input_ids)])])
        q, k, v = (t[None, None] for t in self.qkv(self.embed(input_ids)).chunk(3, -1))
        attend = nn.functional.scaled_dot_product_attention
        ends = cu_seqlens.tolist()
        mixed = [attend(*(t[:, :, a:b] for t in (q, k, v))) for a, b in itertools.pairwise(ends)]
        return self.head(torch.cat(mixed, 2)).sum()


@pytest.mark.parametrize("told_by", ["cu_seqlens", "position_ids"])
def test_packed_documents_in_a_flat_row(told_by, no_counting):
    def batch(*documents):
        ids = torch.zeros(sum(documents), dtype=torch.long)
        if told_by == "position_ids":
            return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in documents])}
        ends = torch.tensor([0, *documents]).cumsum(0).int()
        return {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": max(documents)}

    f = FlopModel.fit(Flat(), batch(10, 22))
    assert f.closed
    no_counting()
    for documents in ((10, 22), (16, 16), (5, 5, 6), (1, 40)):
        tokens, pairs = sum(documents), sum(n * n for n in documents)
        assert f(batch(*documents)).model_flops == 3 * (2 * tokens * 16 * (48 + 50) + 4 * 16 * pairs)


def test_positions_for_all_samples_beside_embeddings(no_counting):
    c, model, f = fitted("llama-sdpa", "full")

    def batch(samples, length):
        plain = c.batch(samples=samples, length=length)
        embedded = torch.zeros(samples, length, model.config.hidden_size, requires_grad=True)
        return {
            "inputs_embeds": embedded,
            "labels": plain["labels"],
            "position_ids": torch.arange(length)[None],
        }

    g = FlopModel.fit(model, batch(2, 16))
    assert g.closed
    expected = f(c.batch(samples=3, length=24)).model_flops
    no_counting()
    assert g(batch(3, 24)).model_flops == expected


class Sized(nn.Module):
    """Takes sizes whose dimensions look like tokens, and works on as many rows as they say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, input_ids, image_sizes):
        return self.mix(self.embed(input_ids)[:, : int(image_sizes.max())]).sum()


def test_dimensions_that_contradict_each_other_are_counted_once_per_shape_and_values():
    def batch(samples, length, *sizes):
        return {
            "input_ids": torch.zeros(samples, length, dtype=torch.long),
            "image_sizes": torch.tensor([[size, 2] for size in sizes]),
        }

    with pytest.warns(TruemfuWarning, match="'image_sizes' has 2 length where .*: counted once per shape"):
        f = FlopModel.fit(Sized(), batch(1, 40, 8))
    assert not f.closed
    for samples, length, *sizes in ((1, 40, 8), (1, 40, 16), (2, 30, 5), (2, 30, 7, 3), (1, 40, 8)):
        count = f(batch(samples, length, *sizes))
        assert count.model_flops == 3 * 2 * samples * max(sizes) * 16 * 16
        assert count.method == "count on fake tensors, counted once per shape and values"


def test_a_size_that_cannot_change_is_fixed_and_another_one_is_another_kind():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    f = FlopModel.fit(model, (torch.zeros(2, 3, 8, 8),))
    assert f.closed
    assert f((torch.zeros(7, 3, 8, 8),)).forward == 2 * 7 * 3 * 8 * 8 * 5
    with pytest.raises(BatchError, match="cannot run on this batch"):
        f((torch.zeros(7, 3, 8, 9),))


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        ([0, 1, 2, 0, 1], [[3, 2]]),
        ([0, 0, 0, 1], [[1, 1, 2]]),
        ([5, 6, 0, 1], [[2, 2]]),
        ([1, 1, 1, 0, 1, 2], None),
        ([0, 1, 2, 1, 1, 1], None),
        ([0, 1, 2, 2, 2], None),
        ([1, 1, 0, 1, 2, 0, 1, 1], [[5, 3]]),
        ([1, 1, 1], None),
        ([4], None),
    ],
)
def test_padding_between_positions_is_no_document(positions, documents):
    assert documents_of({"position_ids": torch.tensor([positions])}) == documents


@pytest.mark.parametrize(
    ("positions", "documents"),
    [
        ([0, 0, 0, 1, 2], None),
        ([0, 1, 2, 0, 0], None),
        ([0, 0, 0, 1, 0, 1, 2], [[4, 3]]),
        ([0, 1, 2, 0, 1, 0, 0], [[3, 4]]),
        ([0, 0, 0], None),
    ],
)
def test_with_a_mask_padding_may_have_position_0(positions, documents):
    batch = {"position_ids": torch.tensor([positions]), "attention_mask": torch.ones(1, len(positions))}
    assert documents_of(batch) == documents


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_positions_counts_as_padding_without(side, position):
    c, model, f = fitted("llama-padded", "full")
    batch = c.batch(samples=2, length=24)
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    batch |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).masked_fill(mask == 0, position)}
    expected = f(c.batch(samples=2, length=24)).model_flops
    assert count_flops(model, batch).model_flops == expected
    assert f(batch).model_flops == expected
    assert f.closed
