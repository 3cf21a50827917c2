"""One attention, every kernel: the same integer, whatever runs it.

The model is four projections around an attention core. With data that needs no gradient, its backward pass
is one product for each projection's weight, one through the output projection, and four products for each
pair of query and key (values, probabilities, queries, keys).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.versions import TORCH
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from truemfu import Convention, FlopCount, count_flops, count_step
from truemfu.flops.attention.kernels import KERNELS, AttentionWork, work_of_flex, work_of_kernel
from truemfu.flops.attention.pairs import CAUSAL, FULL, Band

IS_OLD = TORCH < (2, 10)
if not IS_OLD:
    from torch.nn.attention.varlen import varlen_attn

FULL_PAIRS, CAUSAL_PAIRS = Convention(), Convention(attention="causal")
SAMPLES, LENGTH, HEADS, HEAD = 2, 12, 4, 8
WIDTH = HEADS * HEAD
ALL = SAMPLES * LENGTH * LENGTH
TRIANGLE = SAMPLES * LENGTH * (LENGTH + 1) // 2
Core = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Projections around a core that maps q, k, v of (samples, heads, length, head size) to the same."""

    def __init__(self, core: Core, *, heads: int = HEADS, kv_heads: int = HEADS, head: int = HEAD) -> None:
        super().__init__()
        self.core, self.heads, self.kv_heads, self.head = core, heads, kv_heads, head
        width = heads * head
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * head, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, **extra: Any) -> torch.Tensor:
        q = self.q(x).unflatten(-1, (self.heads, self.head)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (self.kv_heads, self.head)).transpose(1, 2)
        return self.o(self.core(q, k, v, **extra).transpose(1, 2).flatten(-2))


def expected(
    pairs: int,
    *,
    tokens: int = SAMPLES * LENGTH,
    heads: int = HEADS,
    kv_heads: int = HEADS,
    head: int = HEAD,
) -> tuple[int, int]:
    """Forward and needed backward FLOPs, for this many pairs in all samples."""
    width = heads * head
    wide, narrow = 2 * tokens * width * width, 2 * tokens * width * (kv_heads * head)
    projections = 2 * wide + 2 * narrow
    one = 2 * pairs * heads * head
    return projections + 2 * one, projections + wide + 4 * one


def model_flops(count: FlopCount) -> tuple[int, int]:
    assert not count.uncounted
    return count.forward, count.backward


def batch(head: int = HEAD, heads: int = HEADS, *, grad: bool = False) -> tuple[torch.Tensor]:
    return (torch.randn(SAMPLES, LENGTH, heads * head, requires_grad=grad),)


# -- cores -------------------------------------------------------------------------------------------------


def triangle(length: int = LENGTH) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def blocked(mask: torch.Tensor) -> torch.Tensor:
    """The mask as something to add to the scores."""
    return torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)


def sloped() -> torch.Tensor:
    """A bias that grows with the distance, more in one head than in another, and looks back only."""
    slopes = torch.linspace(0.1, 0.5, HEADS)[:, None, None]
    return blocked(triangle()) - slopes * distance()


def distance() -> torch.Tensor:
    return torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None, :]


def shared(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def eager(mask: torch.Tensor | None = None) -> Core:
    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ shared(q, k).mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ shared(q, v)

    return core


def sdpa(**options: Any) -> Core:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def forced(backend: SDPBackend, **options: Any) -> Core:
    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **options)

    return core


def flex(
    mask: Callable[..., Any] | None = None, samples: int | None = None, score: Any = None, gqa: bool = False
) -> Core:
    block_mask = mask and create_block_mask(mask, samples, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
    return lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=gqa)


def _causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


FUSED_CPU = "aten._scaled_dot_product_flash_attention_for_cpu"
EVERY_PAIR: dict[str, Core] = {
    "eager": eager(),
    "sdpa": sdpa(),
    "sdpa, flash": forced(SDPBackend.FLASH_ATTENTION),
    "sdpa, math": forced(SDPBackend.MATH),
    "sdpa, dropout": sdpa(dropout_p=0.1),
    "sdpa, a mask of ones": sdpa(attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool)),
    "flex": flex(),
    "flex, a score function": flex(score=lambda score, b, h, i, j: score + (i - j)),
}


def _where(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * HEAD**-0.5
    return torch.where(triangle(), scores, torch.finfo(scores.dtype).min).softmax(-1) @ v


def _added(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * HEAD**-0.5 + torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
    return F.dropout(scores.softmax(-1, dtype=torch.float64).to(q.dtype), 0.1) @ v


def _in_place(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT
    scores *= HEAD**-0.5
    return scores.masked_fill_(~triangle(), -1e9).softmax(-1) @ v


def _capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = 50 * torch.tanh(q @ k.mT * HEAD**-0.5 / 50)
    return (scores + (1 - triangle().float()) * -1e9).softmax(-1) @ v


def _flat(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    bias = blocked(triangle())
    scores = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=HEAD**-0.5)
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).unflatten(0, (SAMPLES, HEADS))


def _einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * HEAD**-0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.masked_fill(~triangle(), -torch.inf).softmax(-1), v)


def _einsum_length_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD**-0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~triangle(), -torch.inf).softmax(-1), v)
    return out.transpose(1, 2)


def _keys_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (k @ q.mT).mT * HEAD**-0.5 + blocked(triangle())
    return (v.mT @ scores.softmax(-1).mT).mT


def _written_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.mT * HEAD**-0.5
    scores[:, :, ~triangle()] = -torch.inf
    return scores.softmax(-1) @ v


LOWER_TRIANGLE: dict[str, Core] = {
    "eager": eager(triangle()),
    "eager, where": _where,
    "eager, added, softmax in fp64, dropout": _added,
    "eager, in place": _in_place,
    "eager, capped scores": _capped,
    "eager, heads folded into the batch": _flat,
    "eager, einsum": _einsum,
    "eager, einsum with the length first": _einsum_length_first,
    "eager, keys first": _keys_first,
    "eager, mask written by index": _written_mask,
    "sdpa": sdpa(is_causal=True),
    "sdpa, flash": forced(SDPBackend.FLASH_ATTENTION, is_causal=True),
    "sdpa, math": forced(SDPBackend.MATH, is_causal=True),
    "sdpa, dropout": sdpa(is_causal=True, dropout_p=0.1),
    "sdpa, boolean mask": sdpa(attn_mask=triangle()),
    "sdpa, added mask": sdpa(attn_mask=blocked(triangle())),
    "sdpa, a mask for each sample": sdpa(attn_mask=triangle().expand(SAMPLES, 1, LENGTH, LENGTH)),
    "sdpa, a bias for each head": sdpa(attn_mask=sloped()),
    "sdpa, a bias for each head and sample": sdpa(attn_mask=sloped().expand(SAMPLES, -1, -1, -1)),
    "sdpa, math, boolean mask": forced(SDPBackend.MATH, attn_mask=triangle()),
    "flex": flex(_causal),
}


@pytest.mark.parametrize("convention", [FULL_PAIRS, CAUSAL_PAIRS], ids=["full", "causal"])
@pytest.mark.parametrize("name", EVERY_PAIR)
def test_attention_without_a_mask(name: str, convention: Convention) -> None:
    count = count_flops(Attention(EVERY_PAIR[name]), batch(), convention=convention)
    assert model_flops(count) == expected(ALL)


@pytest.mark.parametrize("convention", [FULL_PAIRS, CAUSAL_PAIRS], ids=["full", "causal"])
@pytest.mark.parametrize("name", LOWER_TRIANGLE)
def test_causal_attention(name: str, convention: Convention) -> None:
    count = count_flops(Attention(LOWER_TRIANGLE[name]), batch(), convention=convention)
    assert model_flops(count) == expected(ALL if convention is FULL_PAIRS else TRIANGLE)


@pytest.mark.parametrize("convention", [FULL_PAIRS, CAUSAL_PAIRS], ids=["full", "causal"])
def test_a_fused_kernel_recomputes_the_scores(convention: Convention) -> None:
    pairs = ALL if convention is FULL_PAIRS else TRIANGLE
    fused = count_flops(Attention(sdpa(is_causal=True)), batch(), convention=convention)
    assert fused.recompute == 2 * pairs * HEADS * HEAD
    assert fused.by_operator[FUSED_CPU] == 2 * (2 * pairs * HEADS * HEAD)
    assert fused.by_operator[f"{FUSED_CPU}_backward"] == 4 * (2 * pairs * HEADS * HEAD)
    for name in ("eager", "sdpa, math"):
        assert count_flops(Attention(LOWER_TRIANGLE[name]), batch(), convention=convention).recompute == 0


def test_forward_alone() -> None:
    for core in (EVERY_PAIR["eager"], EVERY_PAIR["sdpa"], EVERY_PAIR["flex"]):
        count = count_flops(Attention(core), batch(), backward=False)
        assert (count.forward, count.backward, count.recompute) == (expected(ALL)[0], 0, 0)


@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa, math"])
def test_the_executed_step_is_the_counted_one(name: str) -> None:
    model, (x,) = Attention(LOWER_TRIANGLE[name]), batch()
    for convention in (FULL_PAIRS, CAUSAL_PAIRS):
        counted = count_flops(model, (x,), convention=convention)
        executed = count_step(lambda: model(x).sum().backward(), convention=convention)
        assert (executed.forward, executed.backward, executed.recompute) == (
            counted.forward,
            counted.backward,
            counted.recompute,
        )


# -- shapes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "core",
    [
        eager(triangle()),
        sdpa(is_causal=True, enable_gqa=True),
        forced(SDPBackend.FLASH_ATTENTION, is_causal=True, enable_gqa=True),
        forced(SDPBackend.MATH, is_causal=True, enable_gqa=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, shared(q, k), shared(q, v), is_causal=True),
        flex(_causal, gqa=True),
    ],
    ids=["eager", "sdpa", "flash", "math", "sdpa on repeated keys", "flex"],
)
def test_shared_keys_and_values(core: Core, kv_heads: int, request: pytest.FixtureRequest) -> None:
    if IS_OLD and kv_heads < HEADS and request.node.callspec.id.startswith("flash"):
        pytest.skip("no such kernel on a CPU in older versions of torch")
    model = Attention(core, kv_heads=kv_heads)
    for convention, pairs in ((FULL_PAIRS, ALL), (CAUSAL_PAIRS, TRIANGLE)):
        count = count_flops(model, batch(), convention=convention)
        assert model_flops(count) == expected(pairs, kv_heads=kv_heads)


@pytest.mark.parametrize("head", [1, 3, 7, 20])
@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa, math", "flex"])
def test_head_sizes_that_kernels_pad(name: str, head: int) -> None:
    if IS_OLD and name == "flex":
        pytest.skip("powers of two alone in older versions of torch")
    for convention, pairs in ((FULL_PAIRS, ALL), (CAUSAL_PAIRS, TRIANGLE)):
        count = count_flops(Attention(LOWER_TRIANGLE[name], head=head), batch(head), convention=convention)
        assert model_flops(count) == expected(pairs, head=head)


TORCH_PADS = torch.jit.CompilationUnit("""
def attention(x):
    padded = torch.constant_pad_nd(x, [0, 3])
    return torch._scaled_dot_product_flash_attention_for_cpu(padded, padded, padded)[0]
""").attention
"""As torch does it on a GPU: padding and kernel within one call from Python."""


def program_pads(x: torch.Tensor) -> torch.Tensor:
    padded = F.pad(x, [0, 3])
    return F.scaled_dot_product_attention(padded, padded, padded)


@pytest.mark.parametrize(
    ("core", "head", "recomputed"),
    [
        (TORCH_PADS, 5, 0),
        (lambda x: checkpoint(TORCH_PADS, x, use_reentrant=True), 5, 2),
        (program_pads, 8, 0),
    ],
    ids=["by torch", "by torch, in a checkpoint", "by the program"],
)
def test_heads_that_torch_pads_count_by_their_own_size(
    core: Callable[[torch.Tensor], torch.Tensor], head: int, recomputed: int
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return core(x * self.scale)

    model, x = Model(), torch.randn(2, 3, 4, 5)
    product = 2 * (2 * 3 * 4 * 4) * head
    expected = 2 * product, 4 * product, (1 + recomputed) * product
    for count in (count_flops(model, (x,)), count_step(lambda: model(x).sum().backward())):
        assert (count.forward, count.backward, count.recompute) == expected


class Bare(nn.Module):
    """Attention alone: three tensors in, each scaled by a parameter so that it needs a gradient."""

    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core, self.scale = core, nn.Parameter(torch.ones(()))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.core(q * self.scale, k * self.scale, v * self.scale)


def _eager_top_left(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("core", [_eager_top_left, sdpa(is_causal=True)], ids=["eager", "sdpa"])
@pytest.mark.parametrize(
    ("q", "k", "v", "pairs", "triangle_pairs"),
    [
        # fewer queries than keys: query i sees keys 0 … i
        ((2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 8), 8 * 6 * 10, 8 * 21),
        ((2, 4, 10, 8), (2, 4, 6, 8), (2, 4, 6, 8), 8 * 10 * 6, 8 * (21 + 4 * 6)),
        # values wider than keys
        ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 12), 8 * 6 * 6, 8 * 21),
        # without heads, with two batch dimensions, without any
        ((2, 6, 8), (2, 6, 8), (2, 6, 8), 2 * 6 * 6, 2 * 21),
        ((3, 2, 4, 6, 8), (3, 2, 4, 6, 8), (3, 2, 4, 6, 8), 24 * 6 * 6, 24 * 21),
        ((6, 8), (6, 8), (6, 8), 6 * 6, 21),
    ],
    ids=["few queries", "many queries", "wide values", "no heads", "five dimensions", "two dimensions"],
)
def test_other_shapes(
    core: Core,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    pairs: int,
    triangle_pairs: int,
) -> None:
    tensors = tuple(torch.randn(shape) for shape in (q, k, v))
    for convention, counted in ((FULL_PAIRS, pairs), (CAUSAL_PAIRS, triangle_pairs)):
        count = count_flops(Bare(core), tensors, convention=convention)
        one = 2 * counted * (q[-1] + v[-1])
        assert model_flops(count) == (one, 2 * one)


# -- masks -------------------------------------------------------------------------------------------------


WINDOW = 4
# the first WINDOW queries see a triangle, the others WINDOW keys
WINDOW_PAIRS = SAMPLES * (WINDOW * (WINDOW + 1) // 2 + (LENGTH - WINDOW) * WINDOW)
# both ways, WINDOW − 1 to each side: two triangles are missing
BOTH_WAYS = SAMPLES * (LENGTH * LENGTH - (LENGTH - WINDOW) * (LENGTH - WINDOW + 1))


def _flex_window(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i >= j) & (i - j < WINDOW)


def _flex_both_ways(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j < WINDOW) & (j - i < WINDOW)


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "math", "flex"])
@pytest.mark.parametrize("both", [False, True], ids=["behind", "both ways"])
def test_sliding_windows(both: bool, kernel: str) -> None:
    mask = (distance().abs() < WINDOW) & (triangle() | both)
    core = {
        "eager": eager(mask),
        "sdpa": sdpa(attn_mask=mask),
        "math": forced(SDPBackend.MATH, attn_mask=blocked(mask)),
        "flex": flex(_flex_both_ways if both else _flex_window),
    }[kernel]
    assert model_flops(count_flops(Attention(core), batch())) == expected(ALL)
    count = count_flops(Attention(core), batch(), convention=CAUSAL_PAIRS)
    assert model_flops(count) == expected(BOTH_WAYS if both else WINDOW_PAIRS)


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "math", "flex"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_counted(side: str, kernel: str) -> None:
    kept = torch.ones(SAMPLES, LENGTH, dtype=torch.bool)
    kept[0, slice(0, 3) if side == "left" else slice(-3, None)] = False
    mask = triangle() & kept[:, None, None, :]

    def padded(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & kept[b, j]

    core = {
        "eager": eager(mask),
        "sdpa": sdpa(attn_mask=mask),
        "math": forced(SDPBackend.MATH, attn_mask=blocked(mask)),
        "flex": flex(padded, SAMPLES),
    }[kernel]
    for convention, pairs in ((FULL_PAIRS, ALL), (CAUSAL_PAIRS, TRIANGLE)):
        assert model_flops(count_flops(Attention(core), batch(), convention=convention)) == expected(pairs)


@pytest.mark.parametrize("kernel", ["eager", "sdpa", "math", "flex"])
def test_a_mask_that_is_no_band_counts_what_it_allows(kernel: str) -> None:
    prefix = 3
    mask = triangle() | (torch.arange(LENGTH) < prefix)

    def prefixed(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) | (j < prefix)

    core = {
        "eager": eager(mask),
        "sdpa": sdpa(attn_mask=mask),
        "math": forced(SDPBackend.MATH, attn_mask=mask),
        "flex": flex(prefixed),
    }[kernel]
    count = count_flops(Attention(core), batch(), convention=CAUSAL_PAIRS)
    assert model_flops(count) == expected(TRIANGLE + SAMPLES * (2 + 1))
    assert any("neither causal nor a window" in note for note in count.notes)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_heads_with_masks_of_their_own(kernel: str) -> None:
    """One head looks back, the others look everywhere."""
    mask = triangle().repeat(HEADS, 1, 1)
    mask[1:] = True
    core = eager(mask) if kernel == "eager" else sdpa(attn_mask=mask)
    per_head = (TRIANGLE + (HEADS - 1) * ALL) // HEADS
    count = count_flops(Attention(core), batch(), convention=CAUSAL_PAIRS)
    assert model_flops(count) == expected(per_head)


# -- packed documents --------------------------------------------------------------------------------------

DOCUMENTS = [[5, 7], [12]]
POSITIONS = torch.tensor([[*range(5), *range(7)], [*range(12)]])
DOCUMENT_PAIRS = 5 * 5 + 7 * 7 + 12 * 12
DOCUMENT_TRIANGLES = (5 * 6 + 7 * 8 + 12 * 13) // 2


class Packed(nn.Module):
    """Builds the mask of its documents from the positions, as models do."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.kernel = kernel
        self.inner = Attention(self.core)

    def core(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, ids: torch.Tensor) -> torch.Tensor:
        if self.kernel == "flex":

            def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (i >= j) & (ids[b, i] == ids[b, j])

            blocks = create_block_mask(allowed, SAMPLES, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
            return flex_attention(q, k, v, block_mask=blocks)
        order = torch.arange(LENGTH)
        mask = ((ids[:, :, None] == ids[:, None, :]) & (order[:, None] >= order[None, :]))[:, None]
        if self.kernel == "eager":
            return eager(mask)(q, k, v)
        backend = SDPBackend.MATH if self.kernel == "math" else SDPBackend.FLASH_ATTENTION
        return forced(backend, attn_mask=mask)(q, k, v)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.inner(x, ids=(position_ids == 0).cumsum(-1))


@pytest.mark.parametrize("kernel", ["eager", "flash", "math", "flex"])
def test_packed_documents_are_counted_one_by_one(kernel: str) -> None:
    data = {"x": batch()[0], "position_ids": POSITIONS}
    one = 2 * HEADS * HEAD
    for convention, pairs, executed in (
        (FULL_PAIRS, DOCUMENT_PAIRS, ALL),
        (CAUSAL_PAIRS, DOCUMENT_TRIANGLES, TRIANGLE),
    ):
        count = count_flops(Packed(kernel), data, convention=convention)
        assert model_flops(count) == expected(pairs)
        fused = kernel in ("flash", "flex")
        between_documents = 6 * one * (executed - pairs)  # two products forward, four backward
        assert count.recompute == between_documents + fused * one * executed


@pytest.mark.parametrize("given_as", ["closure", "argument"])
@pytest.mark.parametrize("flip", [False, True], ids=["packed row first", "packed row last"])
def test_flex_with_a_document_mask_made_beforehand(flip: bool, given_as: str) -> None:
    positions = POSITIONS.flip(0) if flip else POSITIONS
    ids = (positions == 0).cumsum(-1)

    def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (ids[b, i] == ids[b, j])

    blocks = create_block_mask(allowed, SAMPLES, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)

    class Given(Attention):
        def forward(
            self, x: torch.Tensor, position_ids: torch.Tensor, block_mask: Any = None
        ) -> torch.Tensor:
            return super().forward(x, block_mask=block_mask or blocks)

    data = {"x": batch()[0], "position_ids": positions}
    if given_as == "argument":
        data["block_mask"] = blocks
    for convention, pairs in ((FULL_PAIRS, DOCUMENT_PAIRS), (CAUSAL_PAIRS, DOCUMENT_TRIANGLES)):
        assert model_flops(count_flops(Given(flex_attention), data, convention=convention)) == expected(pairs)


class Varlen(nn.Module):
    """Documents in one row, kept apart by their cumulative lengths."""

    def __init__(self, *, kv_heads: int = HEADS, window: tuple[int, int] = (-1, 0)) -> None:
        if IS_OLD:
            pytest.skip("torch before 2.10 has no such attention")
        if kv_heads != HEADS and "enable_gqa" not in inspect.signature(varlen_attn).parameters:
            pytest.skip("this torch has no shared keys and values in such attention")
        super().__init__()
        self.options = {"window_size": window} | ({} if kv_heads == HEADS else {"enable_gqa": True})
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)) for p in (self.q, self.k, self.v))
        out = varlen_attn(q, k, v, ends, ends, longest, longest, **self.options)
        return self.o(out.flatten(-2))


ENDS = torch.tensor([0, 5, 12], dtype=torch.int32)
ROW_PAIRS, ROW_TRIANGLES = 5 * 5 + 7 * 7, (5 * 6 + 7 * 8) // 2


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_varlen_attention(kv_heads: int) -> None:
    data = (torch.randn(12, WIDTH), ENDS, 7)
    for convention, pairs in ((FULL_PAIRS, ROW_PAIRS), (CAUSAL_PAIRS, ROW_TRIANGLES)):
        count = count_flops(Varlen(kv_heads=kv_heads), data, convention=convention)
        assert model_flops(count) == expected(pairs, tokens=12, kv_heads=kv_heads)
        assert count.recompute == 2 * pairs * HEADS * HEAD


def test_varlen_attention_with_windows() -> None:
    data = (torch.randn(12, WIDTH), ENDS, 7)
    behind = count_flops(Varlen(window=(2, 0)), data, convention=CAUSAL_PAIRS)
    assert model_flops(behind) == expected((1 + 2 + 3 * 3) + (1 + 2 + 5 * 3), tokens=12)
    both = count_flops(Varlen(window=(1, 1)), data, convention=CAUSAL_PAIRS)
    assert model_flops(both) == expected((2 + 3 * 3 + 2) + (2 + 5 * 3 + 2), tokens=12)
    assert model_flops(count_flops(Varlen(window=(2, 0)), data)) == expected(ROW_PAIRS, tokens=12)


def _varlen_out(out: torch.Tensor, qkv: Sequence[torch.Tensor], ends: torch.Tensor) -> None:
    from torch.nn.attention.varlen import varlen_attn_out

    varlen_attn_out(out, *qkv, ends, ends, 7, 7, window_size=(-1, 0))


def _flash_out(out: torch.Tensor, qkv: Sequence[torch.Tensor], ends: torch.Tensor) -> None:
    kernel = torch.ops.aten._flash_attention_forward_no_dropout_inplace
    kernel(out, *qkv, ends, ends, 7, 7, 0.0, True, False)


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"),
    reason="this torch has no attention into a given tensor",
)
@pytest.mark.parametrize(
    ("write", "name"),
    [
        (_varlen_out, "torch_attn._varlen_attn_out"),
        (_flash_out, "aten._flash_attention_forward_no_dropout_inplace"),
    ],
)
def test_attention_into_a_given_tensor(write: Callable[..., None], name: str) -> None:
    """Such kernels have no gradient; each is counted once, although one calls the other."""

    class Given(nn.Module):
        def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
            out = torch.empty(12, HEADS, HEAD)
            with torch.no_grad():
                write(out, [x.detach().unflatten(-1, (HEADS, HEAD))] * 3, ends)
            return x + out.flatten(-2)

    data = (torch.randn(12, WIDTH, requires_grad=True), ENDS)
    for convention, pairs in ((FULL_PAIRS, ROW_PAIRS), (CAUSAL_PAIRS, ROW_TRIANGLES)):
        count = count_flops(Given(), data, convention=convention)
        assert model_flops(count) == (4 * pairs * WIDTH, 0)
        assert count.by_operator == {name: 4 * pairs * WIDTH}


class Jagged(Attention):
    """The same on nested tensors; `values` are the rows of all documents."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).values()


class JaggedInside(Attention):
    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(torch.nested.nested_tensor_from_jagged(x, offsets)).values()


def test_linear_layers_on_nested_tensors() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, HEAD)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).values()

    documents = [torch.randn(5, WIDTH), torch.randn(7, WIDTH)]
    count = count_flops(Layer(), (torch.nested.nested_tensor(documents, layout=torch.jagged),))
    assert model_flops(count) == (2 * 12 * WIDTH * HEAD, 2 * 12 * WIDTH * HEAD)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("where", ["given", "made inside"])
def test_attention_on_nested_tensors(where: str, is_causal: bool) -> None:
    values = torch.randn(12, WIDTH)
    if where == "given":
        nested = torch.nested.nested_tensor([values[:5], values[5:]], layout=torch.jagged)
        model: nn.Module = Jagged(sdpa(is_causal=is_causal))
        data: tuple[Any, ...] = (nested,)
    else:
        model, data = JaggedInside(sdpa(is_causal=is_causal)), (values, ENDS.long())
    assert model_flops(count_flops(model, data)) == expected(ROW_PAIRS, tokens=12)
    count = count_flops(model, data, convention=CAUSAL_PAIRS)
    assert model_flops(count) == expected(ROW_TRIANGLES if is_causal else ROW_PAIRS, tokens=12)


# -- gradients nobody needs --------------------------------------------------------------------------------


def needed(pairs: int, *, q: bool, k: bool, v: bool, tokens: int = SAMPLES * LENGTH) -> int:
    """Backward FLOPs where only these projections (and the output's) are trained."""
    projection, one = 2 * tokens * WIDTH * WIDTH, 2 * pairs * HEADS * HEAD
    inner = v + (q or k) + q + k  # dV, dP, dQ, dK
    return projection * (q + k + v + 2) + one * inner


@pytest.mark.parametrize("trained", ["q", "k", "v", "qk", "qv", "kv", "qkv"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "math", "flex", "varlen"])
def test_gradients_that_nothing_needs_are_recomputation(kernel: str, trained: str) -> None:
    if kernel == "varlen":
        model: nn.Module = Varlen()
        data: tuple[Any, ...] = (torch.randn(12, WIDTH), ENDS, 7)
        pairs, tokens = ROW_PAIRS, 12
    else:
        name = "sdpa, math" if kernel == "math" else kernel
        model, data, pairs, tokens = Attention(LOWER_TRIANGLE[name]), batch(), ALL, SAMPLES * LENGTH
    for name in "qkv":
        getattr(model, name).weight.requires_grad_(name in trained)
    q, k, v = (name in trained for name in "qkv")
    count = count_flops(model, data)
    assert count.backward == needed(pairs, q=q, k=k, v=v, tokens=tokens)
    one = 2 * pairs * HEADS * HEAD
    executed = 5  # a fused kernel: scores again, dV, dP, dQ, dK
    surplus = executed - (v + (q or k) + q + k)
    assert count.recompute == (0 if kernel in ("eager", "math") else one * surplus)


def test_an_attention_nothing_trains_has_no_backward() -> None:
    model = Attention(sdpa(is_causal=True))
    for name in "qkv":
        getattr(model, name).weight.requires_grad_(False)
    count = count_flops(model, batch())
    assert (count.backward, count.recompute) == (2 * SAMPLES * LENGTH * WIDTH * WIDTH, 0)


# -- checkpointing and compilation -------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, core: Core, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = Attention(core), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("convention", [FULL_PAIRS, CAUSAL_PAIRS], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["eager", "sdpa", "sdpa, math", "sdpa, dropout", "flex"])
def test_checkpointing_changes_recomputation_alone(
    name: str, convention: Convention, reentrant: bool
) -> None:
    core, data = LOWER_TRIANGLE[name], batch(grad=True)  # a reentrant checkpoint wants such an input
    plain = count_flops(Attention(core), data, convention=convention)
    count = count_flops(Checkpointed(core, reentrant=reentrant), data, convention=convention)
    assert model_flops(count) == model_flops(plain)
    output = 2 * SAMPLES * LENGTH * WIDTH * WIDTH
    # a non-reentrant checkpoint stops once the last saved tensor is there: before the output projection
    assert count.recompute == plain.recompute + plain.forward - (0 if reentrant else output)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_of_varlen_attention(reentrant: bool) -> None:
    """Its forward runs inside an autograd function, where gradients are off even when it is run again."""

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Varlen()

        def forward(self, *args: Any) -> torch.Tensor:
            return checkpoint(self.inner, *args, use_reentrant=reentrant)

    data = (torch.randn(12, WIDTH, requires_grad=True), ENDS, 7)
    plain, count = count_flops(Varlen(), data), count_flops(Again(), data)
    assert model_flops(count) == model_flops(plain)
    output = 2 * 12 * WIDTH * WIDTH
    assert count.recompute == plain.recompute + plain.forward - (0 if reentrant else output)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flex"])
def test_compiled_models_count_the_same(name: str, backend: str) -> None:
    plain = Attention(LOWER_TRIANGLE[name])
    for convention in (FULL_PAIRS, CAUSAL_PAIRS):
        count = count_flops(torch.compile(plain, backend=backend), batch(), convention=convention)
        expected_count = count_flops(plain, batch(), convention=convention)
        assert (count.forward, count.backward, count.recompute) == (
            expected_count.forward,
            expected_count.backward,
            expected_count.recompute,
        )


def test_a_compiled_core_counts_the_same() -> None:
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), backend="aot_eager")
    assert model_flops(count_flops(Attention(compiled), batch())) == expected(ALL)


def test_a_compiled_flex_attention_counts_the_same() -> None:
    compiled = torch.compile(flex_attention, backend="aot_eager")
    assert model_flops(count_flops(Attention(compiled), batch())) == expected(ALL)


# -- the property ------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    samples=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(2, 9),
    head=st.integers(1, 9),
    kind=st.sampled_from(["none", "causal", "window", "both ways"]),
    window=st.integers(1, 10),
    convention=st.sampled_from([FULL_PAIRS, CAUSAL_PAIRS]),
)
def test_eager_and_fused_attention_agree(
    samples: int,
    kv_heads: int,
    group: int,
    length: int,
    head: int,
    kind: str,
    window: int,
    convention: Convention,
) -> None:
    order = torch.arange(length)
    far = order[:, None] - order[None, :]
    bands = {
        "none": FULL,
        "causal": CAUSAL,
        "window": Band(behind=window - 1, ahead=0),
        "both ways": Band(behind=window - 1, ahead=window - 1),
    }
    masks = {
        "none": torch.ones(length, length, dtype=torch.bool),
        "causal": far >= 0,
        "window": (far >= 0) & (far < window),
        "both ways": far.abs() < window,
    }
    heads, mask = kv_heads * group, masks[kind]
    data = (torch.randn(samples, length, heads * head),)
    pairs = samples * (bands[kind] if convention is CAUSAL_PAIRS else FULL).pairs(length)
    right = expected(pairs, tokens=samples * length, heads=heads, kv_heads=kv_heads, head=head)
    options: dict[str, Any] = {"is_causal": True} if kind == "causal" else {"attn_mask": mask}
    for core in (
        eager(mask),
        sdpa(enable_gqa=True, **options),
        sdpa(enable_gqa=True, attn_mask=blocked(mask)),
    ):
        model = Attention(core, heads=heads, kv_heads=kv_heads, head=head)
        assert model_flops(count_flops(model, data, convention=convention)) == right


# -- kernels that do not run here --------------------------------------------------------------------------

OPERATORS_HERE = [name for name in KERNELS if torch._C._jit_get_schemas_for_operator(name)]
SHAPES = {"samples": 2, "heads": 6, "kv_heads": 2, "q_len": 5, "k_len": 7, "qk_dim": 8, "v_dim": 16}


def call_by_schema(schema: Any, *, heads_first: bool, **given: Any) -> dict[str, Any]:
    """Arguments for an attention kernel by the names of its schema: meta tensors, given values, defaults."""

    def tensor(heads: int, length: int, size: int) -> torch.Tensor:
        shape = (heads, length) if heads_first else (length, heads)
        return torch.empty(SHAPES["samples"], *shape, size, device="meta")

    q = tensor(SHAPES["heads"], SHAPES["q_len"], SHAPES["qk_dim"])
    known = {
        "query": q,
        "key": tensor(SHAPES["kv_heads"], SHAPES["k_len"], SHAPES["qk_dim"]),
        "value": tensor(SHAPES["kv_heads"], SHAPES["k_len"], SHAPES["v_dim"]),
        **given,
    }
    call = {}
    for argument in schema.arguments:
        if argument.name in known:
            call[argument.name] = known[argument.name]
        elif argument.has_default_value():
            call[argument.name] = argument.default_value
        elif str(argument.type) == "Tensor":  # what a kernel does not use arrives empty
            call[argument.name] = torch.empty(0, device="meta")
        else:
            call[argument.name] = None if "Optional" in str(argument.type) else 0
    assert known.keys() <= call.keys() | {"is_causal", "custom_mask_type"}
    return call


def test_the_table_covers_the_kernels_of_this_torch() -> None:
    attention = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("aten::", "torch_attn::"))
        and ("attention" in schema.name or "_attn" in schema.name)
    }
    composite = {
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_attention_math",  # its products are seen one by one
        "aten::_fused_sdp_choice",
        "aten::_triton_scaled_dot_attention",
        "aten::_triton_multi_head_attention",
        "aten::_native_multi_head_attention",
    }
    assert attention - composite <= set(KERNELS)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", OPERATORS_HERE)
def test_every_kernel_binds_by_its_real_schema(name: str, causal: bool) -> None:
    kernel = KERNELS[name]
    assert kernel.backward == name.endswith("backward")
    for schema in torch._C._jit_get_schemas_for_operator(name):
        flag = {"custom_mask_type": int(causal)} if "efficient_attention_" in name else {"is_causal": causal}
        if "scaled_dot_product_efficient" in name:
            flag = {"is_causal": causal}
        work = work_of_kernel(name, call_by_schema(schema, heads_first=kernel.heads_first, **flag))
        assert replace(work, mask=None) == AttentionWork(  # whether masks are equal is no yes or no
            samples=2,
            heads=6,
            q_len=5,
            k_len=7,
            qk_dim=8,
            v_dim=16,
            backward=kernel.backward,
            band=CAUSAL if causal else FULL,
        )
        assert work.mask is None or work.mask.numel() == 0


def test_the_integers_of_a_kernel() -> None:
    pairs, heads, qk, v = 2 * 5 * 7, 6, 8, 16
    work = work_of_kernel(
        "aten::_scaled_dot_product_flash_attention",
        {
            k: torch.empty(2, 6, n, d, device="meta")
            for k, n, d in (("query", 5, 8), ("key", 7, 8), ("value", 7, 16))
        },
    )
    assert work.forward_flops(pairs) == 2 * pairs * heads * qk + 2 * pairs * heads * v
    everything = {"q": True, "k": True, "v": True}
    # dV and dP are as wide as the values, dQ and dK as the keys
    assert work.needed_backward_flops(pairs, **everything) == 2 * pairs * heads * (2 * v + 2 * qk)
    assert work.needed_backward_flops(pairs, q=True, k=False, v=True) == 2 * pairs * heads * (2 * v + qk)
    assert work.needed_backward_flops(pairs, q=False, k=True, v=False) == 2 * pairs * heads * (v + qk)
    assert work.needed_backward_flops(pairs, q=False, k=False, v=True) == 2 * pairs * heads * v
    assert work.needed_backward_flops(pairs, q=False, k=False, v=False) == 0
    # and the scores once more
    assert (
        work.executed_backward_flops(pairs) == 2 * pairs * heads * (2 * v + 2 * qk) + 2 * pairs * heads * qk
    )


@pytest.mark.parametrize("kind", ["flash", "cudnn"])
def test_a_kernel_that_writes_into_a_given_tensor_counts_like_the_one_that_does_not(kind: str) -> None:
    plain = f"aten::_{kind}_attention_forward"
    in_place = f"{plain}_no_dropout_inplace"
    if in_place not in OPERATORS_HERE:
        pytest.skip(f"torch {torch.__version__} has no {in_place}")
    sizes = {"query": (6, 8), "key": (2, 8), "value": (2, 16), "out": (6, 16)}  # heads and their size
    tensors = {n: torch.empty(12, *size, device="meta") for n, size in sizes.items()}
    ends = {"cum_seq_q": ENDS, "cum_seq_k": ENDS}
    for causal in (False, True):
        works = []
        for name in (plain, in_place):
            schema = torch._C._jit_get_schemas_for_operator(name)[0]
            given = {n: t for n, t in tensors.items() if n != "out" or name == in_place}
            call = call_by_schema(schema, heads_first=False, **given, **ends, is_causal=causal)
            works.append(work_of_kernel(name, call))
        assert works[0] == works[1]
        assert works[1].band == (CAUSAL if causal else FULL)
        pairs = ROW_TRIANGLES if causal else ROW_PAIRS
        assert works[1].forward_flops(pairs) == 2 * pairs * 6 * 8 + 2 * pairs * 6 * 16


@pytest.mark.parametrize("name", [n for n in OPERATORS_HERE if not KERNELS[n].heads_first])
def test_packed_calls_hand_over_their_cumulative_lengths(name: str) -> None:
    (schema, *_) = torch._C._jit_get_schemas_for_operator(name)
    names = {argument.name for argument in schema.arguments}
    ends = dict.fromkeys((n for n in names if n.startswith(("cum_seq_", "cu_seqlens_", "cu_seq_"))), ENDS)
    assert len(ends) == 2
    packed = {n: torch.empty(12, 4, 8, device="meta") for n in ("query", "key", "value")}
    if "efficient" in name:  # packed rows in a batch of one
        packed = {n: t[None] for n, t in packed.items()}
    work = work_of_kernel(name, call_by_schema(schema, heads_first=False, **packed, **ends))
    assert work.cumulative is not None
    assert all(c is ENDS for c in work.cumulative)
    assert (work.heads, work.qk_dim, work.v_dim) == (4, 8, 8)


def _flash(**given: Any) -> Mapping[str, Any]:
    tensors = {n: torch.empty(2, 9, 4, 8, device="meta") for n in ("q", "k", "v")}
    return {"dropout_p": 0.0, "softmax_scale": 0.3, "causal": False, "softcap": 0.0, **tensors, **given}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    ("flags", "band"),
    [
        ({"causal": False, "window_size_left": -1, "window_size_right": -1}, FULL),
        ({"causal": True, "window_size_left": -1, "window_size_right": -1}, CAUSAL),
        ({"causal": True, "window_size_left": -1, "window_size_right": 0}, CAUSAL),
        ({"causal": True, "window_size_left": 3, "window_size_right": 0}, Band(behind=3, ahead=0)),
        ({"causal": False, "window_size_left": 2, "window_size_right": 1}, Band(behind=2, ahead=1)),
        ({"causal": False, "window_size_left": 0, "window_size_right": -1}, Band(behind=0)),
    ],
)
def test_the_flash_attention_package(flags: dict[str, Any], band: Band, varlen: bool, backward: bool) -> None:
    """By the argument names of flash-attn 2.8's operators."""
    call = _flash(**flags)
    if varlen:
        ends = torch.tensor([0, 4, 9], dtype=torch.int32)
        packed = {n: torch.empty(9, 4, 8, device="meta") for n in ("q", "k", "v")}
        lengths = {"max_seqlen_q": 5, "max_seqlen_k": 5, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        call = _flash(**flags, **packed, **lengths)
    if backward:
        grads = {n: torch.empty_like(call["q"]) for n in ("dout", "out", "dq", "dk", "dv")}
        call = {**grads, "softmax_lse": torch.empty(2, 4, 9, device="meta"), **call, "deterministic": False}
    name = f"flash_attn::_flash_attn_{'varlen_' if varlen else ''}{'backward' if backward else 'forward'}"
    work = work_of_kernel(name, call)
    assert (work.heads, work.qk_dim, work.v_dim, work.backward) == (4, 8, 8, backward)
    assert work.band == band
    if varlen:
        assert work.cumulative is not None
    else:
        assert (work.samples, work.q_len, work.k_len, work.cumulative) == (2, 9, 9, None)


def test_windows_of_the_memory_efficient_kernel_are_counts_of_keys() -> None:
    name = "aten::_efficient_attention_forward"
    (schema,) = torch._C._jit_get_schemas_for_operator(name)
    call = call_by_schema(schema, heads_first=False, custom_mask_type=1, window_size=3)
    assert work_of_kernel(name, call).band == Band(behind=2, ahead=0)


@pytest.mark.parametrize("backward", [False, True])
def test_a_flex_call_is_read_by_position(backward: bool) -> None:
    q, k = torch.empty(2, 6, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    v = torch.empty(2, 2, 7, 16, device="meta")
    blocks = (5, 7, torch.empty(1), None, _causal)
    if backward:
        out, sums = torch.empty(2, 6, 5, 16, device="meta"), torch.empty(2, 6, 5, device="meta")
        args: tuple[Any, ...] = (q, k, v, out, sums, out, sums, _causal, _causal, blocks, 0.3, {}, (), ())
    else:
        args = (q, k, v, _causal, blocks, 0.3, {}, (), ())
    work = work_of_flex("higher_order::flex_attention" + ("_backward" if backward else ""), args)
    assert work == AttentionWork(
        samples=2,
        heads=6,
        device=q.device,
        q_len=5,
        k_len=7,
        qk_dim=8,
        v_dim=16,
        backward=backward,
        mask_function=_causal,
    )


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_has_the_dtype_of_its_inputs_whatever_kernel_a_cpu_takes(
    dropout: float, device: str
) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).view(2, 16, 4, 16).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout).sum()

    is_allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    model = Attention().to(device, torch.bfloat16)
    counted = count_flops(model, (torch.zeros(2, 16, 64, dtype=torch.bfloat16, device=device),))
    linear, attention = 2 * 2 * 32 * 64 * 64, 3 * 2 * 2 * 2 * 16 * 16 * 64
    assert counted.by_dtype == {"bf16": linear + attention}
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == is_allowed
