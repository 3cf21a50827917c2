"""FlopModel is exact for every batch, and answers from a closed form where one speaks for its sizes."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
from tests.versions import TORCH
from torch import nn

from truemfu import Convention, FlopModel, count_flops
from truemfu.errors import BatchError
from truemfu.flops.batch import documents_of

pytest.importorskip("transformers", minversion="5.22")
cases = pytest.importorskip("benchmarks.cases")

ONE_PER_FAMILY = [
    *("gpt2", "llama-sdpa", "llama-checkpointed", "llama-lora", "llama-padded", "mistral", "gemma3"),
    *("mixtral", "deepseek-v3", "bert", "t5", "vit", "clip", "qwen2.5-vl", "llava", "mamba2", "whisper"),
    "resnet",
]
WITH_MASKS = ["gpt2", "llama-checkpointed", "llama-padded", "gemma3", "qwen2.5-vl", "t5", "whisper"]
CLOSED = ["llama-checkpointed", "llama-lora", "mixtral", "vit"]
PACKED = ["gpt2", "llama-sdpa", "mistral"]
# Older versions of torch run some of these attentions without the fused kernel that recomputes.
FUSED_FOR_ALL = TORCH >= (2, 11)


@cache
def fitted(name: str, attention: str) -> tuple[cases.Case, nn.Module, FlopModel]:
    c = cases.case(name)
    model = c.build()
    batch = c.batch(samples=2, length=24)
    return c, model, FlopModel.fit(model, batch, convention=Convention(attention=attention))


def assert_same(count, other) -> None:
    for name in ("forward", "backward", "recompute"):
        assert getattr(count, name) == getattr(other, name)
    for name in ("by_module", "by_operator", "by_dtype", "uncounted"):
        assert dict(getattr(count, name)) == dict(getattr(other, name))


def assert_true(count, truth) -> None:
    assert (count.forward, count.backward) == (truth.forward, truth.backward)
    assert count.recompute == truth.recompute or not FUSED_FOR_ALL


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "full") for name in ONE_PER_FAMILY), *((name, "causal") for name in WITH_MASKS)],
)
def test_closed_form_equals_the_truth_at_unseen_shapes(name, attention):
    c, model, f = fitted(name, attention)
    extra = {"size": 65} if name == "resnet" else {}
    for samples, length in ((1, 60), (9, 31), (9, 31)):
        batch = c.batch(samples=samples, length=length, **extra)
        assert_true(f(batch), c.truth(model, batch, attention=attention))


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", PACKED)
def test_closed_form_equals_the_truth_for_packed_documents(name, attention):
    c, model, f = fitted(name, attention)
    closed = 0
    for documents in (
        *([10, 22], [5, 20, 7], [30, 3, 4, 5], [25, 25], [8, 40], [6, 9, 6], [11, 23], [13, 19, 2]),
        *([28, 9], [30, 7], [18, 12, 4]),  # the form needs as many until it speaks
    ):
        batch = c.batch(samples=1, length=sum(documents), documents=documents)
        count = f(batch)
        closed += count.method == "closed form"
        assert_true(count, c.truth(model, batch, attention=attention))
    assert closed or name == "mistral"  # whose window is shorter than some of these documents


@pytest.mark.parametrize("name", CLOSED)
def test_closed_form_equals_a_direct_count_in_every_split(name, no_counting):
    c, model, f = fitted(name, "full")
    batch = c.batch(samples=4, length=31)
    direct = count_flops(model, batch)
    no_counting()
    closed = f(batch)
    assert_same(closed, direct)
    assert (closed.method, closed.notes) == ("closed form", direct.notes)


@pytest.mark.parametrize("name", ["llama-padded", "resnet"])
def test_batches_without_values_are_counted_like_real_ones(name):
    c, model, f = fitted(name, "full")

    def without_values(batch):
        return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    g = FlopModel.fit(model, without_values(c.batch(samples=2, length=24)))
    batch = c.batch(samples=3, length=41)
    assert_same(g(without_values(batch)), f(batch))


def test_a_model_of_images_learns_other_numbers_of_samples(no_counting):
    c, model, f = fitted("vit", "full")
    batch = c.batch(samples=7)
    no_counting()
    assert_true(f(batch), c.truth(model, batch))


def test_images_with_grids_are_counted_once_for_each_size(no_counting):
    c, model, f = fitted("qwen2.5-vl", "full")
    first, second = [(1, 4, 6), (1, 8, 2)], [(1, 4, 4), (2, 4, 4)]
    batches = [c.batch(samples=1, length=40, images=grids) for grids in (first, second)]
    for batch in batches:
        assert_true(f(batch), c.truth(model, batch))
    no_counting()
    for batch in batches:
        assert_true(f(batch), c.truth(model, batch))


def test_sizes_beyond_those_counted_are_counted_and_extend_the_form(no_counting):
    c, _, _ = fitted("llama-sdpa", "full")
    model = c.build()
    f = FlopModel.fit(model, c.batch(samples=2, length=8))
    long = c.batch(samples=2, length=300)
    assert f(long).method == "count on fake tensors"
    between = c.batch(samples=5, length=211)
    expected = count_flops(model, between)
    no_counting()
    assert f(long).method == "count on fake tensors"
    assert f(between).method == "closed form"
    assert_same(f(between), expected)


def test_padding_changes_nothing():
    c, _, f = fitted("llama-padded", "full")
    batch = c.batch(samples=3, length=30)
    padded = f(batch)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    assert_same(f(batch), padded)


def test_positional_batches():
    model = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2, padding=1), nn.MaxPool2d(3, 2), nn.Conv2d(5, 7, 2))
    f = FlopModel.fit(model, (torch.zeros(2, 3, 32, 32),))
    for shape in ((1, 3, 47, 33), (5, 3, 64, 90), (5, 3, 32, 32)):
        batch = (torch.zeros(shape),)
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


def test_a_new_kind_of_batch_is_counted_when_it_comes():
    c, model, f = fitted("llama-sdpa", "full")
    batch = c.batch(samples=2, length=13)
    batch["attention_mask"] = torch.ones(2, 13, dtype=torch.long)
    assert_true(f(batch), c.truth(model, batch))
    assert f(batch).method == "count on fake tensors"


def test_formulas_are_written_out():
    _, _, f = fitted("llama-sdpa", "full")
    assert set(f.formulas()) == {"forward", "backward", "recompute"}
    assert f.formulas()["recompute"] == "576·input_ids[0]·input_ids[1]·input_ids[1]"


class Divided(nn.Module):
    """Takes numbers beside its tensors: one that decides the work, and some that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, items: int = 1, scale: float = 1.0, depth: int = 3) -> torch.Tensor:
        for layer in self.layers[:depth]:
            x = layer(x)
        return x.sum() * scale / items


def test_a_number_that_makes_no_difference_is_learned_between_those_counted(no_counting) -> None:
    model = Divided()
    form = FlopModel.fit(model, {"x": torch.ones(2, 4, 8), "items": 5})
    expected = count_flops(model, {"x": torch.ones(3, 5, 8)}).model_flops
    for items in (6, 90, 7):
        assert form({"x": torch.ones(3, 5, 8), "items": items}).model_flops == expected
    no_counting()
    assert form({"x": torch.ones(3, 5, 8), "items": 50}).model_flops == expected


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
    g = FlopModel.fit(whole, wrap(plain))
    other, longer = c.batch(samples=1, length=32, documents=[3, 9, 20]), c.batch(samples=3, length=31)
    for batch in (packed, other):
        assert g(wrap(batch)).model_flops == f(batch).model_flops
    expected = f(longer).model_flops
    no_counting()
    assert g(wrap(longer)).model_flops == expected


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
def test_packed_documents_in_a_flat_row(told_by):
    def batch(*documents):
        ids = torch.zeros(sum(documents), dtype=torch.long)
        if told_by == "position_ids":
            return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in documents])}
        ends = torch.tensor([0, *documents]).cumsum(0).int()
        return {"input_ids": ids, "cu_seqlens": ends, "max_seqlen": max(documents)}

    f = FlopModel.fit(Flat(), batch(10, 22))
    for documents in ((10, 22), (16, 16), (5, 5, 6), (1, 40), (10, 22)):
        tokens, pairs = sum(documents), sum(n * n for n in documents)
        assert f(batch(*documents)).model_flops == 3 * (2 * tokens * 16 * (48 + 50) + 4 * 16 * pairs)


def test_positions_for_all_samples_beside_embeddings():
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
    assert g(batch(3, 24)).model_flops == f(c.batch(samples=3, length=24)).model_flops


class Sized(nn.Module):
    """Takes sizes whose dimensions look like tokens, and works on as many rows as they say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)

    def forward(self, input_ids, image_sizes):
        return self.mix(self.embed(input_ids)[:, : int(image_sizes.max())]).sum()


def test_values_of_a_tensor_of_sizes_are_found_to_matter():
    def batch(samples, length, *sizes):
        return {
            "input_ids": torch.zeros(samples, length, dtype=torch.long),
            "image_sizes": torch.tensor([[size, 2] for size in sizes]),
        }

    f = FlopModel.fit(Sized(), batch(1, 40, 8))
    assert not f.closed
    for samples, length, *sizes in ((1, 40, 8), (1, 40, 16), (2, 30, 5), (2, 30, 7, 3), (1, 40, 8)):
        assert f(batch(samples, length, *sizes)).model_flops == 3 * 2 * samples * max(sizes) * 16 * 16


def test_a_size_that_the_model_refuses_is_an_error():
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
