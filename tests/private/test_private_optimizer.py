"""PrivateOptimizer: one draw of noise for a step, whatever it was summed from, and no step without it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from networks import VOCAB, WIDTH, Network, loop, losses_of, relative_error
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional as F

from truemfu.errors import ModelError, UsageError
from truemfu.private import PrivateOptimizer, losses_by_sample


def batch(samples: int = 4, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (samples, length), generator=torch.Generator().manual_seed(seed))


def made(model: nn.Module, **options: float | None) -> PrivateOptimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    settings = {"max_grad_norm": 0.5, "noise_multiplier": 0.0, **options}
    return PrivateOptimizer(model, optimizer, **settings)  # type: ignore[arg-type]


def gradients(private: PrivateOptimizer) -> dict[str, Tensor]:
    return {
        name: p.grad for name, p in private.model.named_parameters() if p.requires_grad and p.grad is not None
    }


def test_a_step_is_the_mean_of_the_clipped_gradients() -> None:
    model, ids = Network(1).double(), batch()
    expected = {name: value / 4 for name, value in loop(model, ids, 0.5).items()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    private = made(model)
    loss = private.backward(losses_of, ids)
    torch.testing.assert_close(loss, losses_of(model, ids).mean().detach())
    assert not gradients(private)
    private.step()
    assert relative_error(gradients(private), expected) < 1e-10
    change = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert relative_error(change, expected) < 1e-6


def test_micro_batches_add_up_to_the_batch() -> None:
    ids = batch(6)
    found = []
    for parts in (ids.split(6), ids.split(2), [ids[:1], ids[1:1], ids[1:]]):
        private = made(Network(3).double())
        for part in parts:
            private.backward(losses_of, part)
        private.step()
        found.append(gradients(private))
    assert relative_error(found[1], found[0]) < 1e-10
    assert relative_error(found[2], found[0]) < 1e-10


def test_noise_is_drawn_once_for_all_micro_batches_and_is_of_the_promised_size() -> None:
    wide = nn.Sequential(nn.Embedding(VOCAB, 300), nn.Linear(300, 300), nn.Linear(300, VOCAB))
    private = made(wide, max_grad_norm=1e-6, noise_multiplier=3e6)
    for part in batch(8).split(2):
        private.backward(losses_of, part)
    private.step()
    noise = torch.cat([value.flatten() for value in gradients(private).values()])
    assert noise.std().item() == pytest.approx(3 / 8, rel=0.01)
    assert abs(noise.mean().item()) < 0.01


def test_it_divides_by_the_expected_batch_size() -> None:
    model, ids = Network(4).double(), batch(3)
    private = made(model, expected_batch_size=10)
    private.backward(losses_of, ids)
    expected = {name: value / 10 for name, value in loop(model, ids, 0.5).items()}
    private.step()
    assert relative_error(gradients(private), expected) < 1e-10


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    model = Network(5)
    private = made(model, noise_multiplier=1.0, expected_batch_size=4)
    private.backward(losses_of, batch())
    private.step()
    assert private.backward(losses_of, batch(0)).isnan()
    private.step()
    noise = torch.cat([value.flatten() for value in gradients(private).values()])
    assert noise.std().item() == pytest.approx(0.5 / 4, rel=0.15)


def test_the_same_generator_gives_the_same_noise() -> None:
    def once() -> dict[str, Tensor]:
        private = made(Network(6), noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
        private.backward(losses_of, batch())
        private.step()
        return gradients(private)

    assert relative_error(once(), once()) == 0


def test_secure_noise_is_of_the_same_size() -> None:
    from truemfu.private.noise import noise_like

    secure, plain = (
        noise_like(torch.zeros(300_000), torch.float64, 2.0, torch.Generator().manual_seed(0), secure=secure)
        for secure in (True, False)
    )
    assert secure.std().item() == pytest.approx(2.0, rel=0.01)
    assert not torch.allclose(plain, secure)


def test_the_optimizers_own_step_is_private_too() -> None:
    model = Network(7)
    private = made(model, noise_multiplier=1e6)
    private.backward(losses_of, batch())
    private.optimizer.step()
    assert min(value.std().item() for value in gradients(private).values() if value.numel() > 8) > 1e4


def test_a_step_without_a_private_gradient_is_an_error() -> None:
    model = Network(8)
    private = made(model)
    with pytest.raises(UsageError, match=r"needs backward\(losses_of, batch\)"):
        private.optimizer.step()
    private.backward(losses_of, batch())
    losses_of(model, batch()).mean().backward()
    with pytest.raises(ModelError, match=r"tokens\.weight has a gradient that is not private"):
        private.step()


def test_a_gradient_from_before_is_not_part_of_a_step() -> None:
    model, ids = Network(9).double(), batch()
    losses_of(model, ids).sum().backward()
    private = made(model)
    expected = {name: value / 4 for name, value in loop(model, ids, 0.5).items()}
    private.backward(losses_of, ids)
    private.step()
    assert relative_error(gradients(private), expected) < 1e-10


def step(private: PrivateOptimizer) -> None:
    private.backward(losses_of, batch())
    private.step()


def unfreeze(model: nn.Sequential, private: PrivateOptimizer) -> None:
    model[1].requires_grad_(True)


def freeze(model: nn.Sequential, private: PrivateOptimizer) -> None:
    model[2].requires_grad_(False)


def add(model: nn.Sequential, private: PrivateOptimizer) -> None:
    model.append(nn.Linear(VOCAB, VOCAB))
    private.optimizer.add_param_group({"params": list(model[3].parameters())})


def mix(model: nn.Sequential, private: PrivateOptimizer) -> None:
    model.insert(1, nn.BatchNorm1d(5, affine=False))


def of_a_frozen_layer(model: nn.Sequential, private: PrivateOptimizer) -> None:
    model[1].weight.grad = torch.ones(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unfreeze, r"1\.bias was frozen, unfrozen, added or removed"),
        (freeze, r"2\.bias was frozen, unfrozen, added or removed"),
        (add, r"3\.bias was frozen, unfrozen, added or removed"),
        (mix, r"1 \(BatchNorm1d\) mixes samples"),
        (of_a_frozen_layer, r"of shape \(8, 8\) has a gradient that is not private"),
    ],
)
def test_a_change_between_steps_is_refused(
    change: Callable[[nn.Sequential, PrivateOptimizer], None], message: str
) -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB))
    model[1].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)  # with the frozen layer
    private = PrivateOptimizer(model, optimizer, max_grad_norm=0.5, noise_multiplier=1.0)
    step(private)
    change(model, private)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ModelError, match=message):
        step(private)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_parameter_that_the_model_does_not_have_gets_no_step() -> None:
    model, temperature = Network(1), nn.Parameter(torch.ones(()))
    private = made(model)
    private.optimizer.add_param_group({"params": [temperature]})
    private.backward(lambda called, ids: losses_of(called, ids) * temperature, batch())
    with pytest.raises(ModelError, match=r"of shape \(\) has a gradient that is not private"):
        private.step()
    assert temperature == 1


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    model = Network(1)
    private = PrivateOptimizer(model, kind(model.parameters()), max_grad_norm=1.0, noise_multiplier=1.0)
    private.backward(losses_of, batch())

    def closure() -> float:
        loss = losses_of(model, batch()).mean()
        loss.backward()
        return loss.item()

    with pytest.raises(UsageError, match="takes no closure"):
        private.optimizer.step(closure)


def test_a_copy_without_noise_cannot_be_made() -> None:
    private = made(Network(1))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(UsageError, match="cannot be copied or pickled"):
            copied(private)


def test_a_scheduler_and_a_loaded_state_keep_the_noise() -> None:
    model = Network(1)
    optimizer = torch.optim.Adam(model.parameters())
    private = PrivateOptimizer(model, optimizer, max_grad_norm=0.5, noise_multiplier=1e6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 10)
    for _ in range(2):
        private.backward(losses_of, batch())
        optimizer.step()
        scheduler.step()
        noise = torch.cat([value.flatten() for value in gradients(private).values()])
        assert noise.std().item() == pytest.approx(1e6 * 0.5 / 4, rel=0.15)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_a_sum_of_many_micro_batches_does_not_stop_growing_in_bf16() -> None:
    private = made(nn.Linear(1, 1, bias=False).bfloat16(), max_grad_norm=1.0, expected_batch_size=1)
    for _ in range(1000):
        private.backward(lambda model, x: model(x).float().sum(1), torch.full((1, 1), 2.0).bfloat16())
    private.step()
    assert gradients(private)["weight"].item() == 1000


def test_the_optimizer_of_accelerate_takes_private_steps() -> None:
    model = Network(1)
    optimizer = (
        pytest.importorskip("accelerate")
        .Accelerator(cpu=True)
        .prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    )
    private = PrivateOptimizer(model, optimizer, max_grad_norm=0.5, noise_multiplier=1e6)
    private.backward(losses_of, batch())
    optimizer.step()
    assert min(value.std().item() for value in gradients(private).values() if value.numel() > 8) > 1e4


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    model = Network(10)
    stale = torch.optim.SGD([p.detach().clone().requires_grad_() for p in model.parameters()], lr=1.0)
    with pytest.raises(UsageError, match=r"does not have the trained parameter tokens\.weight"):
        PrivateOptimizer(model, stale, max_grad_norm=1.0, noise_multiplier=1.0)
    more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3, 2))], lr=1.0)
    with pytest.raises(UsageError, match=r"a parameter of shape \(3, 2\) that the model does not have"):
        PrivateOptimizer(model, more, max_grad_norm=1.0, noise_multiplier=1.0)


def test_wrong_settings_are_one_line() -> None:
    with pytest.raises(UsageError, match="max_grad_norm above 0"):
        made(Network(0), max_grad_norm=0.0)
    for name, value in (
        *(
            ("max_grad_norm", float("nan")),
            ("max_grad_norm", float("inf")),
            ("noise_multiplier", float("nan")),
        ),
        *(("noise_multiplier", float("inf")), ("expected_batch_size", 0), ("expected_batch_size", -4)),
        *(("check_every", 0), ("check_samples", 0), ("check_limit", float("nan"))),
    ):
        with pytest.raises(UsageError, match=name):
            made(Network(0), **{name: value})
    with pytest.raises(ModelError, match="does not support DataParallel"):
        made(nn.DataParallel(Network(0)))
    with pytest.raises(UsageError, match="torchcsprng, as in Opacus"):
        made(Network(0), secure_mode=True)


def test_a_batch_that_is_no_dict_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"needs a dict of the model's arguments, and labels; got Tensor"):
        losses_by_sample(Network(0), torch.ones(2, 3))  # type: ignore[arg-type]


class Classifier(nn.Module):
    """Small enough for Opacus: no shared positions, no module it has no rule for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.head = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.inner(self.norm(self.tokens(ids)))).mean(1))


def test_it_trains_as_opacus_does_with_the_same_noise() -> None:
    """Whether a text has more words above the middle than below it: the same batches and noise."""
    every = torch.randint(VOCAB, (512, 12), generator=torch.Generator().manual_seed(1))
    labels = every.gt(VOCAB // 2).float().mean(1).gt(0.5).long()

    def losses(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(part["ids"]), part["labels"], reduction="none")

    settings = {"max_grad_norm": 0.5, "noise_multiplier": 0.8}
    curves = {}
    for name in ("ours", "opacus", "opacus, other noise"):
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        generator = torch.Generator().manual_seed(7 if name.endswith("noise") else 5)
        if name == "ours":
            private = PrivateOptimizer(model, optimizer, **settings, generator=generator)  # type: ignore[arg-type]
        else:
            wrapped = GradSampleModuleFastGradientClipping(
                model, loss_reduction="mean", max_grad_norm=0.5, use_ghost_clipping=True
            )
            theirs = DPOptimizerFastGradientClipping(
                optimizer, **settings, expected_batch_size=64, loss_reduction="mean", generator=generator
            )
        curve = []
        for step in range(60):
            rows = torch.arange(64 * step, 64 * (step + 1)) % 512
            part = {"ids": every[rows], "labels": labels[rows]}
            if name == "ours":
                curve.append(private.backward(losses, part).item())
                private.step()
            else:
                theirs.zero_grad()
                found = losses(wrapped, part)
                curve.append(found.mean().item())
                DPTensorFastGradientClipping(wrapped, theirs, found, "mean").backward()
                theirs.step()
        curves[name] = torch.tensor(curve)
    assert curves["ours"][-8:].mean() < 0.9 * curves["ours"][:8].mean()
    own = (curves["ours"] - curves["opacus"]).abs().max()
    spread = (curves["opacus, other noise"] - curves["opacus"]).abs().max()
    print(f"\nlargest difference {own:.2e}, with other noise {spread:.2e}")
    assert own < spread / 100
