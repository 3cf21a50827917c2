"""The analytic truth of the public cases, held against the operators a real training step executes.

The count here is naive on purpose: real tensors, one formula per operator, forward and backward as they
run. It shares no code with truemfu nor with the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from tests.versions import TORCH
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.22")  # before, rotary angles were a product
if TORCH < (2, 11):
    pytest.skip("the truth is that of the kernels of torch 2.11 and later", allow_module_level=True)
if int(transformers.__version__.split(".")[0]) < 5:
    pytest.skip("the truth describes the pinned transformers 5, not this one", allow_module_level=True)

from benchmarks.cases import CASES, Case, case  # noqa: E402

UNCOMPILED = [c for c in CASES if not c.compiled]
TWO_SHAPES = ({"samples": 2, "length": 24}, {"samples": 3, "length": 17})
NOT_PACKABLE = ("llama-padded", "bert", "t5", "vit", "clip", "qwen2.5-vl", "llava", "whisper")
WITHOUT_ATTENTION = ("mamba", "mamba2", "resnet")
DECODERS = [c.name for c in UNCOMPILED if c.name not in NOT_PACKABLE + WITHOUT_ATTENTION]


def _attention(products_qk: int, products_v: int) -> Callable[..., int]:
    def flops(q: Any, k: Any, v: Any) -> int:
        pairs = prod(q.shape[:-1]) * k.shape[-2]
        return 2 * pairs * (products_qk * q.shape[-1] + products_v * v.shape[-1])

    return flops


EXECUTED: dict[str, Callable[[tuple[Any, ...], Any], int]] = {
    "mm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "bmm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "addmm": lambda a, _: 2 * a[1].numel() * a[2].shape[-1],
    "baddbmm": lambda a, _: 2 * a[1].numel() * a[2].shape[-1],
    "_grouped_mm": lambda a, _: 2 * a[0].numel() * a[1].shape[-1],
    "convolution": lambda a, out: 2 * out.numel() * prod(a[1].shape[1:]),
    "convolution_backward": lambda a, _: 2 * a[0].numel() * prod(a[2].shape[1:]) * sum(a[10][:2]),
    "_scaled_dot_product_flash_attention_for_cpu": lambda a, _: _attention(1, 1)(*a[:3]),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda a, _: _attention(3, 2)(*a[1:4]),
}
SUSPECT = ("mm", "mv", "dot", "conv", "attention", "einsum", "linear", "matmul", "addr", "rnn", "bilinear")


class Executed(TorchDispatchMode):
    """Adds up the products of every operator that runs, and refuses one it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in EXECUTED:
            self.flops += EXECUTED[name](args, out)
        else:
            assert not any(word in name for word in SUSPECT), f"{name} may be a product"
        return out


def _executed(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[int, int]:
    """FLOPs executed by the forward pass, and by the whole step."""
    with Executed() as step:
        loss = model(**batch).loss
        forward = step.flops
        loss.backward()
    return forward, step.flops


def _assert_true(c: Case, **shape: Any) -> None:
    model, batch = c.build(), c.batch(**shape)
    truth = c.truth(model, batch)
    assert _executed(model, batch) == (truth.forward, truth.forward + truth.backward + truth.recompute)


def test_there_are_29_cases_of_which_three_are_compiled() -> None:
    assert len(CASES) == len({c.name for c in CASES}) == 29
    assert len(UNCOMPILED) == 26


@pytest.mark.parametrize("shape", TWO_SHAPES, ids=str)
@pytest.mark.parametrize("c", UNCOMPILED, ids=lambda c: c.name)
def test_truth_is_what_a_real_step_executes(c: Case, shape: dict[str, int]) -> None:
    _assert_true(c, **shape)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("vit", {"size": 30}),
        ("vit", {"size": 54}),
        ("resnet", {"size": 33}),
        ("resnet", {"size": 70}),
        ("llava", {"images": 3}),
        ("llava", {"images": 0}),
        ("qwen2.5-vl", {"images": [(1, 6, 10), (2, 4, 4), (1, 2, 2)]}),
        ("qwen2.5-vl", {"images": []}),
        ("mamba2", {"length": 7}),
        ("mamba2", {"length": 30}),
    ],
    ids=str,
)
def test_truth_follows_the_size_and_number_of_images(name: str, shape: dict[str, Any]) -> None:
    _assert_true(case(name), **shape)


@pytest.mark.parametrize(
    "c", [c for c in UNCOMPILED if c.name not in WITHOUT_ATTENTION], ids=lambda c: c.name
)
def test_eager_attention_executes_the_model_flops_of_the_truth_and_nothing_more(c: Case) -> None:
    """The split between model work and recomputation: eager attention makes only what is needed."""
    model, batch = c.build(), c.batch()
    expected = c.truth(model, batch)
    if c.name == "llama-checkpointed":
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    assert _executed(model, batch) == (expected.forward, expected.forward + expected.backward)


@pytest.mark.parametrize("name", DECODERS)
def test_packed_documents_move_masked_pairs_to_recompute(name: str) -> None:
    c = case(name)
    model, packed, plain = c.build(), c.batch(samples=2, documents=[5, 12, 7]), c.batch(samples=2, length=24)
    truth, unpacked = c.truth(model, packed), c.truth(model, plain)
    assert truth.forward + truth.backward < unpacked.forward + unpacked.backward
    assert _executed(model, packed)[1] == truth.forward + truth.backward + truth.recompute


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", DECODERS)
def test_causal_truth_counts_the_pairs_the_mask_lets_through(name: str, packed: bool) -> None:
    """Pairs with a non-zero attention probability, layer by layer, as the model itself masks them."""
    c = case(name)
    model = c.build()
    plain = c.batch(samples=2, length=24)
    batch = c.batch(samples=2, documents=[5, 12, 7]) if packed else plain
    saved = c.truth(model, plain).forward - c.truth(model, batch, attention="causal").forward
    if name == "llama-checkpointed":
        model.gradient_checkpointing_disable()  # type: ignore[operator]
    model.set_attn_implementation("eager")  # type: ignore[operator]
    attentions = model.eval()(**batch, output_attentions=True).attentions
    config = model.config
    masked = sum(int((probabilities == 0).sum()) for probabilities in attentions)
    widths = {
        "gpt2": lambda: 2 * config.n_embd // config.n_head,
        "deepseek-v3": lambda: config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim,
    }.get(name, lambda: 2 * config.head_dim)()  # type: ignore[operator]
    assert saved == 2 * masked * widths


def test_an_unknown_case_or_convention_is_named() -> None:
    with pytest.raises(ValueError, match="no case 'lama'"):
        case("lama")
    c = case("llama-sdpa")
    with pytest.raises(ValueError, match="got 'half'"):
        c.truth(c.build(), c.batch(), attention="half")
