"""The clipped sum of book-keeping is that of a loop over the samples; what it cannot know is refused."""

from __future__ import annotations

import pytest
import torch
from networks import PARTS, VOCAB, WIDTH, LoRA, Network, loop, losses_of, relative_error
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from truemfu.errors import ModelError, UsageError
from truemfu.private import gradients
from truemfu.private.batches import IGNORED, losses_by_sample
from truemfu.private.bookkeeping import BookKeeping
from truemfu.private.layers import supported_layers

LIMIT = 1e-10


def batch(samples: int = 3, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (samples, length), generator=torch.Generator().manual_seed(seed))


def clipping_norm(model: nn.Module, ids: Tensor) -> float:
    """The median of the samples' own norms: some are clipped and some are not."""
    return BookKeeping(model, 1.0).clipped_sum(losses_of, model, ids).norms.median().item()


def error_of(model: nn.Module, ids: Tensor) -> float:
    norm = clipping_norm(model, ids)
    made = BookKeeping(model, norm).clipped_sum(losses_of, model, ids).sums
    return relative_error(made, loop(model, ids, norm))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_loop_over_samples_for_random_networks(seed: int) -> None:
    model = Network(seed).double()
    samples, length = 2 + seed % 4, 3 + seed % 11
    assert error_of(model, batch(samples, length, seed)) < LIMIT, model.description


@pytest.mark.parametrize("smallest", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_positions_give_the_same_norms(
    smallest: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_SMALLEST_BLOCK", smallest)
    model = Network(seed).double()
    assert error_of(model, batch(2 + seed % 3, 4 + 2 * (seed % 5), seed)) < LIMIT, model.description


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("length", [2, 30])
def test_each_layer_short_and_long(name: str, length: int) -> None:
    """A short sequence takes the ghost norm, a long one the gradient of each sample."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.part = nn.Embedding(VOCAB, WIDTH), PARTS[name]()
            self.head = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            return self.head(x + self.part(x))

    assert error_of(One().double(), batch(length=length)) < LIMIT


def test_norms_accumulate_in_fp32_under_bf16() -> None:
    """10,000 equal terms: a bf16 sum stops growing at 256 of them. A value is rounded to bf16 once."""
    layer = nn.Linear(2, 2, bias=False).bfloat16()
    x = torch.ones(2, 10_000, 2, dtype=torch.bfloat16)
    found = BookKeeping(layer, 1.0).clipped_sum(lambda model, x: model(x).float().sum((1, 2)), layer, x)
    assert found.norms.dtype is torch.float32
    torch.testing.assert_close(found.norms, torch.full((2,), 20_000.0), rtol=2**-8, atol=0)
    norms = nn.LayerNorm(2).bfloat16()
    found = BookKeeping(norms, 1.0).clipped_sum(lambda model, x: model(x).float().sum((1, 2)), norms, x)
    torch.testing.assert_close(found.norms, torch.full((2,), 10_000 * 2**0.5), rtol=2**-8, atol=0)


@pytest.mark.parametrize("share", [1.0, 0.01])
@pytest.mark.parametrize("inside_autocast", [False, True])
def test_positions_that_cancel_in_bf16_leave_no_sample_unclipped(share: float, inside_autocast: bool) -> None:
    """The input is nearly the same at all positions, and the output's gradients add up to nearly zero."""
    torch.manual_seed(1)
    layer = nn.Linear(256, 256, bias=False).bfloat16()
    x = (torch.randn(256) + share * torch.randn(3, 64, 256)).bfloat16()
    grads = torch.randn(3, 64, 256)
    grads = (grads - grads.mean(1, keepdim=True)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside_autocast):
        found = BookKeeping(layer, 1.0).clipped_sum(
            lambda model, x: (model(x).float() * grads).sum((1, 2)), layer, x
        )
    expected = (grads.double().mT @ x.double()).flatten(1).norm(dim=1)
    torch.testing.assert_close(found.norms.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("length", [8, 400])
def test_small_gradients_in_fp16_are_not_of_norm_zero(length: int) -> None:
    layer = nn.Linear(64, 64, bias=False).half()
    x = torch.randn(3, length, 64).half()
    found = BookKeeping(layer, 1.0).clipped_sum(
        lambda model, x: 1e-5 * model(x).float().sum((1, 2)), layer, x
    )
    expected = 1e-5 * 8 * x.double().sum(1).norm(dim=1)
    torch.testing.assert_close(found.norms.double(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("seed", range(4))
def test_autocast_is_the_loop_within_what_bf16_can_hold(seed: int) -> None:
    model, ids = Network(seed), batch(4, 9)

    def losses(called: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = called(ids)
        return F.cross_entropy(logits.float()[:, :-1].mT, ids[:, 1:], reduction="none").mean(1)

    book = BookKeeping(model, 1.0)
    assert relative_error(book.clipped_sum(losses, model, ids).sums, loop(model, ids, 1.0, losses)) < 3e-2


def test_a_layer_is_left_as_it_was() -> None:
    model = Network(7)
    before = {name: (p.clone(), p.requires_grad, p.grad) for name, p in model.named_parameters()}
    BookKeeping(model, 1.0).clipped_sum(losses_of, model, batch())
    for name, parameter in model.named_parameters():
        value, requires_grad, grad = before[name]
        assert torch.equal(parameter, value)
        assert (parameter.requires_grad, parameter.grad) == (requires_grad, grad)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_an_error_in_a_forward_pass_leaves_no_hook_and_no_frozen_parameter() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        BookKeeping(layer, 1.0).clipped_sum(lambda model, x: model(x), layer, torch.ones(2, 4))
    assert layer.weight.requires_grad
    assert not layer._forward_hooks


def test_adapters_alone_have_norms_and_gradients() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH).requires_grad_(False), LoRA(), nn.Linear(WIDTH, VOCAB))
    model[2].requires_grad_(False)
    model.double()
    ids = batch()
    found = BookKeeping(model, 1e9).clipped_sum(losses_of, model, ids)
    assert list(found.sums) == ["1.a.weight", "1.b.weight"]
    assert relative_error(found.sums, loop(model, ids, 1e9)) < LIMIT
    alone = [loop(model, one, 1e9) for one in ids.split(1)]
    norms = [torch.stack([value.norm() for value in own.values()]).norm() for own in alone]
    torch.testing.assert_close(found.norms, torch.stack(norms))


def test_the_cross_terms_of_a_tied_head_count() -> None:
    """Without them the norm would be the root of the two uses' squares."""
    tied = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)).double()
    tied[1].weight = tied[0].weight
    separate = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)).double()
    separate.load_state_dict(dict.fromkeys(("0.weight", "1.weight"), tied[0].weight))
    ids = batch()
    both, apart = (BookKeeping(m, 1.0).clipped_sum(losses_of, m, ids).norms for m in (tied, separate))
    assert not torch.allclose(both, apart, rtol=1e-2)
    assert error_of(tied, ids) < LIMIT


def test_a_parameter_that_no_forward_pass_uses_has_a_zero_sum() -> None:
    class Unused(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, VOCAB)
            self.spare = nn.Linear(2, 2)

    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Unused())
    sums = BookKeeping(model, 1.0).clipped_sum(losses_of, model, batch()).sums
    assert sums["1.spare.weight"].eq(0).all()
    assert sums["1.weight"].ne(0).any()


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, 2))


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.drop = nn.Parameter(torch.ones(2)), nn.Dropout(0.1)


def patched() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.forward = lambda x: 2 * x  # type: ignore[method-assign]
    return layer


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gain = nn.LayerNorm(2), nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(3), r"layer \(BatchNorm1d\) mixes samples"),
        (nn.BatchNorm2d(3, affine=False), "mixes samples"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "keeps statistics of the data"),
        (nn.MultiheadAttention(4, 2), r"layer \(MultiheadAttention\) is not supported"),
        (nn.LSTM(4, 4), r"layer \(LSTM\) is not supported"),
        (nn.ConvTranspose1d(4, 4, 2), r"layer \(ConvTranspose1d\) is not supported"),
        (nn.Bilinear(2, 2, 2), r"layer \(Bilinear\) is not supported"),
        (nn.EmbeddingBag(4, 2), r"layer \(EmbeddingBag\) is not supported"),
        (Scaled(4, 2), r"layer \(Scaled\) is not supported"),
        (Bare(), r"layer \(Bare\) is not supported"),
        (Inside(), r"layer \(Inside\) is not supported"),
        (Dropping(), r"layer \(Dropping\) .* both dropout and trained parameters"),
        (patched(), r"layer \(Linear\) has a forward method of its own"),
        (nn.Linear(2, 2, dtype=torch.complex64), "has complex parameters"),
        (nn.Embedding(4, 2, max_norm=1.0), "has max_norm=1.0"),
        (nn.Embedding(4, 2, scale_grad_by_freq=True), "has scale_grad_by_freq=True"),
        (nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"), "has padding_mode='circular'"),
        (nn.Conv1d(2, 2, 2, padding="same"), "has uneven padding"),
        (
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            "ParametrizedLinear.* is not supported|supported",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_is_not_supported_is_refused_by_name(layer: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        supported_layers(nn.ModuleDict({"layer": layer, "other": nn.Linear(2, 2)}))


def test_a_frozen_batch_norm_in_eval_mode_is_a_layer_like_any_other() -> None:
    model = nn.Sequential(
        nn.Embedding(VOCAB, 5), nn.BatchNorm1d(5).requires_grad_(False), nn.Linear(5, VOCAB)
    )
    model[1].eval()
    book = BookKeeping(model.double(), 1.0)
    assert relative_error(book.clipped_sum(losses_of, model, batch()).sums, loop(model, batch(), 1.0)) < LIMIT
    model.train()
    with pytest.raises(ModelError, match=r"1 \(BatchNorm1d\) mixes samples"):
        book.clipped_sum(losses_of, model, batch())


def test_a_module_whose_vector_does_more_than_scale_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight.mean()

    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), Mean(), nn.Linear(WIDTH, VOCAB))
    nn.init.zeros_(model[0].weight)  # as behind an adapter's first values
    with pytest.raises(ModelError, match=r"1 \(Mean\) is not supported: its parameter 'weight'"):
        BookKeeping(model, 1.0).clipped_sum(losses_of, model, batch())


def test_a_parameter_used_outside_of_its_layer_is_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCAB, WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.tokens(ids), self.tokens.weight)

    model = Tied()
    with pytest.raises(ModelError, match=r"gradients of tokens\.weight are unknown: it is used outside"):
        BookKeeping(model, 1.0).clipped_sum(losses_of, model, batch())
    assert model.tokens.weight.grad is None


def test_a_backward_pass_inside_of_the_losses_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))

    def penalised(called: nn.Sequential, ids: Tensor) -> Tensor:
        x = called[0](ids)
        (slopes,) = torch.autograd.grad(called[1](x).square().sum(), x, create_graph=True)
        return slopes.square().mean((1, 2))

    with pytest.raises(ModelError, match="run a backward pass of their own"):
        BookKeeping(model, 1.0).clipped_sum(penalised, model, batch())


def test_other_tensors_in_place_of_parameters_are_refused() -> None:
    model = Network(1)
    others = {name: 2 * p for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match="runs with other tensors in place of its parameters"):
        BookKeeping(model, 1.0).clipped_sum(
            lambda called, ids: losses_of(lambda ids: functional_call(called, others, (ids,)), ids),
            model,
            batch(),
        )


def test_a_layer_that_does_not_see_samples_first_is_refused() -> None:
    class Flat(nn.Linear):
        pass

    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Flatten(0, 1), Flat(WIDTH, VOCAB))
    with pytest.raises(
        ModelError, match=r"2 \(Flat\) saw a tensor of shape \(15, 8\) in a batch of 3 samples"
    ):
        BookKeeping(model, 1.0).clipped_sum(losses_of, model, batch())


def of_tokens(model: nn.Module, ids: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@pytest.mark.parametrize(("reduction", "shape"), [("mean", r"\(\)"), ("sum", r"\(\)"), ("none", r"\(12,\)")])
def test_a_loss_that_is_not_one_of_each_sample_is_refused(reduction: str, shape: str) -> None:
    model = Network(0)
    with pytest.raises(UsageError, match=rf"one loss per sample, of shape \(3,\); got {shape}"):
        BookKeeping(model, 1.0).clipped_sum(lambda m, ids: of_tokens(m, ids, reduction), model, batch())


def test_tokens_without_a_target_are_left_out_of_their_own_sample_alone() -> None:
    model, ids = Network(2).double(), batch(3, 6)
    labels = ids.clone()
    labels[0, 2:] = IGNORED
    labels[1] = IGNORED  # no target at all: its loss and gradient are zero

    def losses(called: nn.Module, part: Tensor) -> Tensor:
        kept = labels[[next(i for i in range(3) if torch.equal(ids[i], one)) for one in part]]
        return losses_by_sample(lambda input_ids: called(input_ids), {"input_ids": part, "labels": kept})

    found = BookKeeping(model, 0.5).clipped_sum(losses, model, ids)
    assert found.norms[1] == 0
    assert relative_error(found.sums, loop(model, ids, 0.5, losses)) < LIMIT


def test_one_backward_pass_and_the_norms_are_all_that_is_executed() -> None:
    """Of a linear layer: the standard step's three products, and the cheaper norm."""
    for positions, of_norm in ((4, 2 * 4**2 * (16 + 32)), (64, 2 * 64 * 16 * 32)):
        layer = nn.Linear(16, 32, bias=False)
        x = torch.randn(3, positions, 16, requires_grad=True)
        with FlopCounterMode(display=False) as count:
            BookKeeping(layer, 1.0).clipped_sum(lambda m, x: m(x).square().sum((1, 2)), layer, x)
        product = 2 * 3 * positions * 16 * 32
        assert count.get_total_flops() == 3 * product + 3 * of_norm


@pytest.mark.parametrize(("positions", "share"), [(16, 1), (32, 3 / 4), (64, 5 / 8), (128, 9 / 16), (33, 1)])
def test_a_gram_matrix_of_a_long_sequence_is_computed_by_half(
    positions: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "_SMALLEST_BLOCK", 16)
    wide = 512
    layer = nn.Linear(wide, wide, bias=False)
    x = torch.randn(2, positions, wide, requires_grad=True)
    with FlopCounterMode(display=False) as count:
        BookKeeping(layer, 1.0).clipped_sum(lambda m, x: m(x).square().sum((1, 2)), layer, x)
    products = 3 * 2 * 2 * positions * wide**2
    assert count.get_total_flops() == products + share * 2 * 2 * positions**2 * (wide + wide)


def test_layers_with_one_input_share_its_gram_matrix() -> None:
    """Query, key and value: an output gradient each, and one input."""
    layers = nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(3))

    def losses(model: nn.ModuleList, x: Tensor) -> Tensor:
        return torch.stack([layer(x).square().sum((1, 2)) for layer in model]).sum(0)

    x = torch.randn(3, 4, 16, requires_grad=True)
    with FlopCounterMode(display=False) as count:
        BookKeeping(layers, 1.0).clipped_sum(losses, layers, x)
    product = 2 * 3 * 4 * 16 * 32
    assert count.get_total_flops() == 3 * 3 * product + 3 * 2 * 4**2 * (3 * 32 + 16)
