"""The trainers: real Opacus, each truly what its name says, and one line where one cannot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from truemfu import count_flops, count_step
from truemfu.errors import ModelError, UsageError
from truemfu.sweep.sizes import ModelSize
from truemfu.sweep.trainers.base import (
    DEFAULT_TRAINERS,
    NEEDS_OPACUS,
    OPTIMIZERS,
    PRIVATE,
    TRAINERS,
    TrainerSettings,
    Unsupported,
    load_trainer,
)
from truemfu.sweep.trainers.standard import StandardTrainer, losses_by_sample, make_optimizer
from truemfu.sweep.worker.models import ReferenceModel

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

SIZE = ModelSize(vocab=40, hidden=16, layers=2, heads=2)


def model() -> ReferenceModel:
    torch.manual_seed(0)
    return ReferenceModel(SIZE)


def batch(samples: int = 3, length: int = 5) -> dict[str, torch.Tensor]:
    ids = torch.randint(SIZE.vocab, (samples, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def norm_samplers_called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The layers whose norms were computed without their gradients."""
    called: list[str] = []
    for kind, sampler in GradSampleModuleFastGradientClipping.NORM_SAMPLERS.items():

        def spy(layer: nn.Module, *args: object, sampler: object = sampler) -> object:
            called.append(type(layer).__name__)
            return sampler(layer, *args)  # type: ignore[operator]

        monkeypatch.setitem(GradSampleModuleFastGradientClipping.NORM_SAMPLERS, kind, spy)
    return called


def test_these_are_the_trainers_and_three_need_opacus() -> None:
    assert list(TRAINERS) == [
        "StandardTrainer",
        "DPSGDTrainer",
        "DPGhostClippingTrainer",
        "DPFastGradientClippingTrainer",
        "DPBookKeepingTrainer",
    ]
    assert set(TRAINERS) - set(DEFAULT_TRAINERS) == {"DPBookKeepingTrainer"}
    assert set(TRAINERS) - NEEDS_OPACUS == {"StandardTrainer", "DPBookKeepingTrainer"}
    assert {name for name in TRAINERS if load_trainer(name).private} == PRIVATE


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "sgd") for name in TRAINERS), ("StandardTrainer", "adamw"), ("DPSGDTrainer", "adamw")],
)
def test_every_trainer_learns_the_same_batch(name: str, optimizer: str) -> None:
    trained = model()
    rate = 0.5 if optimizer == "sgd" else 1e-2
    settings = TrainerSettings(
        optimizer=optimizer, learning_rate=rate, noise_multiplier=0.0, max_grad_norm=10.0
    )
    trainer = load_trainer(name)(trained, settings)
    losses = [trainer.step(batch()) for _ in range(8)]
    assert all(loss.shape == () and not loss.requires_grad for loss in losses)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_a_private_trainer_adds_noise_of_the_promised_size(name: str) -> None:
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    settings = TrainerSettings(learning_rate=1.0, max_grad_norm=1e-3, noise_multiplier=1e5)
    load_trainer(name)(trained, settings).step(batch(samples=4))
    change = torch.cat(
        [(p.detach() - b).flatten() for p, b in zip(trained.parameters(), before, strict=True)]
    )
    assert change.std().item() == pytest.approx(1e5 * 1e-3 / 4, rel=0.1)


def test_ghost_clipping_makes_no_gradient_of_a_linear_layer_and_fast_clipping_does(
    norm_samplers_called: list[str],
) -> None:
    load_trainer("DPFastGradientClippingTrainer")(model(), TrainerSettings()).step(batch())
    assert norm_samplers_called == []
    load_trainer("DPGhostClippingTrainer")(model(), TrainerSettings()).step(batch())
    assert norm_samplers_called.count("Linear") == 6 * SIZE.layers + 1
    assert "Embedding" in norm_samplers_called


def test_only_dp_sgd_holds_a_gradient_of_every_sample() -> None:
    held = {}
    for name in sorted(NEEDS_OPACUS):
        trained = model()
        load_trainer(name)(trained, TrainerSettings()).step(batch())
        held[name] = isinstance(trained.head.weight.grad_sample, torch.Tensor)
    assert held == {
        "DPSGDTrainer": True,
        "DPGhostClippingTrainer": False,
        "DPFastGradientClippingTrainer": False,
    }


def test_private_trainers_execute_more_than_the_model_needs() -> None:
    needed = count_flops(model(), batch()).hardware_flops
    executed = {
        name: count_step(load_trainer(name)(model(), TrainerSettings()).step, batch()).hardware_flops
        for name in TRAINERS
    }
    assert executed["StandardTrainer"] == needed
    assert all(executed[name] > needed for name in PRIVATE)
    assert executed["DPBookKeepingTrainer"] < min(executed[name] for name in NEEDS_OPACUS)
    two_passes = [executed["DPGhostClippingTrainer"], executed["DPFastGradientClippingTrainer"]]
    assert min(two_passes) > executed["DPSGDTrainer"]


def test_a_loss_is_the_mean_over_the_targets_of_its_own_sample() -> None:
    untrained, one = model(), batch(samples=2, length=6)
    one["labels"] = one["labels"].clone()
    one["labels"][1, 3:] = -100
    logits = untrained(one["input_ids"]).logits
    expected = [
        nn.functional.cross_entropy(logits[0, :5], one["labels"][0, 1:]),
        nn.functional.cross_entropy(logits[1, :2], one["labels"][1, 1:3]),
    ]
    torch.testing.assert_close(losses_by_sample(untrained, one), torch.stack(expected))


def test_logits_are_found_in_a_mapping_and_nowhere_else_is_guessed() -> None:
    untrained, one = model(), batch()
    expected = losses_by_sample(untrained, one)
    as_mapping = losses_by_sample(lambda input_ids: {"logits": untrained(input_ids).logits}, one)
    torch.testing.assert_close(as_mapping, expected)
    with pytest.raises(ModelError, match="returned tuple without logits"):
        losses_by_sample(lambda input_ids: (untrained(input_ids).logits,), one)
    with pytest.raises(ModelError, match="returned dict without logits"):
        losses_by_sample(lambda input_ids: {"scores": untrained(input_ids).logits}, one)


def test_logits_that_do_not_fit_the_labels_are_one_clear_error() -> None:
    one = {**batch(), "labels": torch.zeros(3, 4, dtype=torch.long)}
    with pytest.raises(ModelError, match=r"logits of shape \(3, 5, 40\) do not fit labels of shape \(3, 4\)"):
        losses_by_sample(model(), one)


@pytest.mark.parametrize("name", sorted(PRIVATE))
def test_a_private_trainer_cannot_be_compiled(name: str) -> None:
    with pytest.raises(Unsupported, match=f"{name} cannot be compiled"):
        load_trainer(name)(model(), TrainerSettings(compile=True))


@pytest.mark.parametrize("name", sorted(NEEDS_OPACUS))
def test_checkpointed_activations_are_unsupported(name: str) -> None:
    trained = model()
    trained.gradient_checkpointing_enable()
    with pytest.raises(Unsupported, match=f"{name} cannot train ReferenceModel: Opacus"):
        load_trainer(name)(trained, TrainerSettings()).step(batch())


def test_book_keeping_trains_checkpointed_activations_and_tied_weights() -> None:
    trained = model()
    trained.gradient_checkpointing_enable()
    trained.head.weight = trained.tokens.weight
    settings = TrainerSettings(learning_rate=0.5, noise_multiplier=0.0, max_grad_norm=10.0)
    trainer = load_trainer("DPBookKeepingTrainer")(trained, settings)
    losses = [trainer.step(batch()) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.05


def test_what_book_keeping_cannot_train_is_named_before_training() -> None:
    message = r"DPBookKeepingTrainer cannot train LSTM: the model \(LSTM\) is not supported"
    with pytest.raises(Unsupported, match=message):
        load_trainer("DPBookKeepingTrainer")(nn.LSTM(3, 3), TrainerSettings())


def test_the_work_of_book_keeping_is_that_of_its_norms_more() -> None:
    """2 T² (p + q) or 2 T p q for each weight, whichever is less; query, key and value share an input."""
    size, samples, length = ModelSize(vocab=800, hidden=32, layers=2, heads=2), 2, 16
    ids = torch.randint(size.vocab, (samples, length))
    trained = ReferenceModel(size)
    needed = count_flops(trained, {"input_ids": ids, "labels": ids}).hardware_flops
    trainer = load_trainer("DPBookKeepingTrainer")(trained, TrainerSettings())
    count = count_step(trainer.step, {"input_ids": ids, "labels": ids})
    shapes = [(32, 32)] * 4 + [(32, 128)] * 2
    norms = size.layers * sum(
        2 * length * min(length * (p + q), p * q) for p, q in shapes
    ) + 2 * length**2 * (32 + 800 + 32)
    norms -= size.layers * 2 * 2 * length**2 * 32
    extra = count.hardware_flops - needed
    assert needed > 0
    vectors = sum(p.numel() for p in trained.parameters() if p.dim() == 1)
    assert extra == samples * (norms + 2 * vectors)


def test_tied_weights_are_unsupported_under_ghost_clipping() -> None:
    trained = model()
    trained.head.weight = trained.tokens.weight
    with pytest.raises(Unsupported, match="Parameter tying is not supported"):
        load_trainer("DPGhostClippingTrainer")(trained, TrainerSettings()).step(batch())


def test_a_layer_with_buffers_is_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"DPSGDTrainer cannot train Sequential: Opacus .* buffers"):
        load_trainer("DPSGDTrainer")(nn.Sequential(nn.BatchNorm1d(3)), TrainerSettings())


class Outer:
    class Inner(StandardTrainer):
        """A trainer inside another class."""


def test_a_trainer_may_be_named_inside_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "of_mine", sys.modules[__name__])
    assert load_trainer("of_mine:Outer.Inner") is Outer.Inner


@pytest.mark.parametrize("name", TRAINERS)
def test_what_a_trainer_executes_is_what_torch_counts(name: str) -> None:
    """torch's counter knows no attention kernel of a CPU, so attention is in plain products here."""
    trainer = load_trainer(name)(model(), TrainerSettings())
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as torch_count:
            trainer.step(batch())
        count = count_step(trainer.step, batch())
    assert count.hardware_flops == torch_count.get_total_flops()


def test_an_error_of_the_model_itself_stays_what_it_is() -> None:
    class Failing(ReferenceModel):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> object:
            raise RuntimeError("my own mistake")

    with pytest.raises(RuntimeError, match="my own mistake"):
        load_trainer("DPSGDTrainer")(Failing(SIZE), TrainerSettings()).step(batch())


def test_an_out_of_memory_inside_opacus_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(GradSampleModuleFastGradientClipping.NORM_SAMPLERS, nn.Linear, full)
    with pytest.raises(torch.OutOfMemoryError):
        load_trainer("DPGhostClippingTrainer")(model(), TrainerSettings()).step(batch())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Trainer", "cannot import 'no_such_module:Trainer'"),
        ("torch:NoSuchTrainer", "cannot import 'torch:NoSuchTrainer'"),
        ("torch.nn:Linear", r"'torch.nn:Linear' is not a trainer: expected a class with step\(batch\)"),
        ("torch.optim:SGD", "expected a class attribute `private`"),
    ],
)
def test_what_is_no_trainer_is_one_line(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_trainer(name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_has_a_class(name: str) -> None:
    assert type(make_optimizer(model(), TrainerSettings(optimizer=name))).__name__.lower() == name


def test_without_opacus_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['opacus'] = None\n"
        "from truemfu.sweep.trainers.base import load_trainer\n"
        "load_trainer('StandardTrainer')\n"
        "try: load_trainer('DPSGDTrainer')\n"
        "except ValueError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == 'DPSGDTrainer needs Opacus: pip install "truemfu[dp]"\n'


def test_the_names_can_be_read_without_torch() -> None:
    code = (
        "import sys, truemfu.sweep.trainers.base, truemfu.sweep.sizes\n"
        "import truemfu.sweep.order, truemfu.sweep.order\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
