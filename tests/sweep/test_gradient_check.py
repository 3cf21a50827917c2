"""The gradient check: the trainers pass it, and every kind of wrong trainer we know of does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from truemfu.errors import ModelError, UsageError
from truemfu.private import bookkeeping, gradients
from truemfu.private.check import NAN_RELATIVE_ERROR
from truemfu.records import GradientCheck, SweepCase
from truemfu.sweep.sizes import ModelSize
from truemfu.sweep.trainers.base import (
    NEEDS_OPACUS,
    PRIVATE,
    TRAINERS,
    Trainer,
    TrainerSettings,
    Unsupported,
    load_trainer,
)
from truemfu.sweep.trainers.standard import StandardTrainer, losses_by_sample, make_optimizer
from truemfu.sweep.worker import gradient_check_model as model_module
from truemfu.sweep.worker.gradient_check import TOLERANCE, check_trainer
from truemfu.sweep.worker.models import ReferenceModel, ReferenceOutput

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

CPU = torch.device("cpu")


def check_of(trainer: type[Trainer], model: str = "tiny", **sizes: int) -> GradientCheck:
    sizes = {"batch_size": 4, "seq_len": 4, **sizes}
    case = SweepCase(trainer=trainer.__name__, model=model, dtype="fp32", device="cpu", **sizes)
    return check_trainer(trainer, case, CPU)


class ClippingLoop:
    """A right private trainer, one sample at a time; the wrong ones below change one thing each."""

    private = True

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        self.model, self.settings = model.train(), settings
        self.optimizer = make_optimizer(model, settings)

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        return losses_by_sample(self.model, batch)

    def scale(self, norm: Tensor) -> Tensor:
        return (self.settings.max_grad_norm / norm).clamp(max=1.0)

    def divisor(self, count: int) -> float:
        return count

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([gradient.norm() for gradient in gradients]).norm()

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        parameters = list(self.model.parameters())
        losses = self.losses(batch)
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for loss in losses:
            own = torch.autograd.grad(loss, parameters, retain_graph=True)
            scale = self.scale(self.norm(list(own)))
            total = [so_far + scale * gradient for so_far, gradient in zip(total, own, strict=True)]
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient / self.divisor(len(losses))
        self.optimizer.step()
        return losses.detach().mean()


class NoClipping(ClippingLoop):
    def scale(self, norm: Tensor) -> Tensor:
        return torch.ones_like(norm)


class ScalesAllToTheNorm(ClippingLoop):
    """Also those that are small enough already."""

    def scale(self, norm: Tensor) -> Tensor:
        return self.settings.max_grad_norm / norm


class ClipsTheBatch(StandardTrainer):
    """Clips the gradient of the mean loss, as ordinary training does."""

    private = True

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        super().__init__(model, settings)
        self.parameters, self.max_grad_norm = list(model.parameters()), settings.max_grad_norm

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        self._optimizer.zero_grad()
        loss = losses_by_sample(self._forward, batch).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self._optimizer.step()
        return loss.detach()


class ForgetsToDivide(ClippingLoop):
    def divisor(self, count: int) -> float:
        return 1.0


class DividesByAnotherBatch(ClippingLoop):
    def divisor(self, count: int) -> float:
        return count + 1


class ForgetsOneParameterInTheNorm(ClippingLoop):
    def norm(self, gradients: list[Tensor]) -> Tensor:
        return super().norm(gradients[1:])


class SamplesAlongTheOtherAxis(ClippingLoop):
    """Takes positions for samples: no error is raised where the two are equal in number."""

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits = self.model(batch["input_ids"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets).mean(dim=0)


class DoesNothing(ClippingLoop):
    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.losses(batch).detach().mean()


class MakesNaN(ClippingLoop):
    def scale(self, norm: Tensor) -> Tensor:
        return norm * float("nan")


class FreezesTheHead(StandardTrainer):
    """A plain trainer that is faster because it leaves something out."""

    def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
        super().__init__(model, settings)
        model.head.weight.requires_grad_(False)


class Refuses(ClippingLoop):
    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("no attention, please")


class Breaks(ClippingLoop):
    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize("name", TRAINERS)
def test_our_trainers_pass(name: str) -> None:
    trainer = load_trainer(name)
    check = check_of(trainer)
    assert check.passed
    assert 0 < check.relative_error < TOLERANCE / 5
    assert not check.stands_in
    assert check.batch_size != check.seq_len
    assert check.clipped is trainer.private is (name in PRIVATE)


def test_a_right_trainer_of_the_users_own_passes() -> None:
    assert check_of(ClippingLoop).passed


@pytest.mark.parametrize(
    "wrong",
    [
        NoClipping,
        ScalesAllToTheNorm,
        ClipsTheBatch,
        ForgetsToDivide,
        DividesByAnotherBatch,
        ForgetsOneParameterInTheNorm,
        SamplesAlongTheOtherAxis,
        DoesNothing,
        FreezesTheHead,
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_a_wrong_trainer_fails_by_far(wrong: type[Trainer]) -> None:
    check = check_of(wrong)
    assert not check.passed
    assert check.relative_error > 10 * TOLERANCE


@pytest.mark.parametrize("fault", ["ghost norms", "weighted sums", "clipping", "cross terms"])
def test_a_wrong_book_keeping_fails_by_far(
    fault: str, factories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its formulas is needed: one changed line of it, and the check says so."""
    book_keeping = load_trainer("DPBookKeepingTrainer")
    if fault == "ghost norms":
        norms = gradients._ghost_norms
        monkeypatch.setattr(gradients, "_ghost_norms", lambda uses, *rest: norms(uses[:1], *rest) / 2)
    elif fault == "weighted sums":
        sums = gradients.SmallParameters.weighted_sums
        monkeypatch.setattr(
            gradients.SmallParameters,
            "weighted_sums",
            lambda self, weights: sums(self, torch.ones_like(weights)),
        )
    elif fault == "clipping":
        monkeypatch.setattr(bookkeeping.BookKeeping, "weights", lambda self, norms: torch.ones_like(norms))
    else:
        together = bookkeeping.squared_norms

        def apart(uses: list[Any], samples: int, inputs: Any) -> Tensor:
            return sum((together([use], samples, inputs) for use in uses), start=torch.zeros(samples))

        monkeypatch.setattr(bookkeeping, "squared_norms", apart)
    check = check_of(book_keeping, f"{factories}:TiedEmbedding")
    assert not check.passed
    assert check.relative_error > 10 * TOLERANCE


def test_a_step_that_makes_nan_fails_with_an_error_json_can_hold() -> None:
    check = check_of(MakesNaN)
    assert not check.passed
    assert check.relative_error == NAN_RELATIVE_ERROR


def test_a_trainer_that_says_it_cannot_is_unsupported_and_one_that_breaks_is_not() -> None:
    with pytest.raises(
        Unsupported, match="Refuses cannot train reference model, 2 layers: no attention, please"
    ):
        check_of(Refuses)
    with pytest.raises(ZeroDivisionError):
        check_of(Breaks)


@pytest.mark.parametrize("loss", [0.5, torch.zeros(3)])
def test_a_step_that_does_not_return_one_loss_is_one_clear_line(loss: object) -> None:
    class Returns(StandardTrainer):
        def step(self, batch: Mapping[str, Tensor]) -> Tensor:
            super().step(batch)
            return loss  # type: ignore[return-value]

    with pytest.raises(UsageError, match=r"Returns: step\(batch\) must return the mean loss, as a tensor"):
        check_of(Returns)


def test_the_gradient_check_does_not_make_later_compilation_dynamic() -> None:
    """A second shape would make torch.compile compile the experiment's model for dynamic shapes."""
    compiled: list[list[object]] = []

    class Compiles(StandardTrainer):
        def __init__(self, model: nn.Module, settings: TrainerSettings) -> None:
            super().__init__(model, settings)
            self._forward = torch.compile(model, backend=self.note)

        @staticmethod
        def note(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
            compiled.append([size for value in inputs for size in getattr(value, "shape", [value])])
            return graph

    assert check_of(Compiles).passed
    compiled.clear()
    trainer = Compiles(ReferenceModel(ModelSize(vocab=50, hidden=32, layers=1, heads=4)), TrainerSettings())
    ids = torch.zeros(4, 7, dtype=torch.long)
    trainer.step({"input_ids": ids, "labels": ids})
    assert compiled
    assert all(type(size) is int for sizes in compiled for size in sizes)


def test_fp32_is_not_rounded_to_tf32_in_the_gradient_check_and_is_as_before_behind_it() -> None:
    seen = []

    class Looks(StandardTrainer):
        def step(self, batch: Mapping[str, Tensor]) -> Tensor:
            seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32))
            return super().step(batch)

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        check_of(Looks)
        assert seen == [("highest", False)]
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32 == before[1]
    finally:
        torch.set_float32_matmul_precision(before[0])


def test_random_state_is_left_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_of(load_trainer("DPSGDTrainer"))
    assert torch.equal(torch.get_rng_state(), before)


class Bigram(nn.Module):
    """The smallest language model there is."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)

    def features(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> ReferenceOutput:
        return ReferenceOutput(None, self.head(self.features(input_ids)))


class Positions(Bigram):
    """Looks positions up once for all samples: per-sample gradients are silently wrong where B equals T."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(64, 16)

    def features(self, input_ids: Tensor) -> Tensor:
        return self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1])[None])


class TiedEmbedding(Bigram):
    """With a layer norm, and one weight for embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.head.weight = self.tokens.weight

    def features(self, input_ids: Tensor) -> Tensor:
        return self.norm(self.tokens(input_ids))


class Dropping(Bigram):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def features(self, input_ids: Tensor) -> Tensor:
        return self.drop(self.tokens(input_ids))


class DropsInForward(Bigram):
    """With a probability that nobody can set to zero from outside."""

    def features(self, input_ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.tokens(input_ids), 0.5, self.training)


class Large(Bigram):
    """Too large to be looped over."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(5_000, 5_000))


def pictures() -> tuple[nn.Module, dict[str, Tensor]]:
    """A classifier that brings its own batch, with batch normalisation."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 5)
            )

        def forward(self, pixels: Tensor) -> Tensor:
            return self.layers(pixels)

    return Classifier(), {"pixels": torch.rand(8, 3, 8, 8), "labels": torch.arange(8) % 5}


def normalised_rows() -> tuple[nn.Module, dict[str, Tensor]]:
    """Batch normalisation that refuses a single sample."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    return layers, {"input": torch.rand(6, 4), "labels": torch.arange(6) % 3}


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, scale: Tensor, rows: Tensor, shift: Tensor) -> Tensor:
        return scale * self.layer(rows) + shift


def shared_inputs() -> tuple[nn.Module, dict[str, Tensor]]:
    """Some tensors of the batch belong to all samples."""
    rows, labels = torch.rand(6, 4), torch.arange(6) % 3
    return Shifted(), {
        "scale": torch.tensor(2.0),
        "rows": rows,
        "shift": torch.rand(1, 3),
        "labels": labels,
    }


def nothing_to_learn() -> tuple[nn.Module, dict[str, Tensor]]:
    return nn.Linear(4, 1), {"input": torch.rand(6, 4), "labels": torch.zeros(6, dtype=torch.long)}


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> str:
    """This file as a module that a case can name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return Path(__file__).stem


@pytest.mark.parametrize("name", sorted(NEEDS_OPACUS))
def test_positions_shared_by_all_samples_are_unsupported_not_silently_wrong(
    name: str, factories: str
) -> None:
    with pytest.raises(Unsupported, match=r"cannot train Positions: Opacus .* equal size"):
        check_of(load_trainer(name), f"{factories}:Positions")


def test_positions_shared_by_all_samples_are_right_under_book_keeping(factories: str) -> None:
    assert check_of(load_trainer("DPBookKeepingTrainer"), f"{factories}:Positions").passed


def test_a_small_model_of_a_factory_is_checked_itself_without_its_dropout(factories: str) -> None:
    check = check_of(load_trainer("DPSGDTrainer"), f"{factories}:Dropping")
    assert check.passed
    assert check.model == f"{factories}:Dropping"


def test_a_large_model_of_a_factory_is_not_checked_itself_and_the_gradient_check_says_so(
    factories: str,
) -> None:
    check = check_of(load_trainer("StandardTrainer"), f"{factories}:Large")
    assert check.passed
    assert check.stands_in
    assert check.model == f"reference model, 2 layers ({factories}:Large has 25,001,320 parameters)"


def test_batch_normalisation_trains_plainly_but_has_no_gradient_per_sample(factories: str) -> None:
    check = check_of(load_trainer("StandardTrainer"), f"{factories}:pictures")
    assert check.passed
    assert check.batch_size == 2  # three would be as many as channels
    with pytest.raises(Unsupported, match="because a sample's loss alone differs from its loss in the batch"):
        check_of(load_trainer("DPSGDTrainer"), f"{factories}:pictures")


def test_a_model_that_cannot_take_one_sample_is_compared_on_the_batch(factories: str) -> None:
    assert check_of(load_trainer("StandardTrainer"), f"{factories}:normalised_rows").passed
    with pytest.raises(
        Unsupported, match="because a single sample raises ValueError: Expected more than 1 value"
    ):
        check_of(load_trainer("DPSGDTrainer"), f"{factories}:normalised_rows")


def test_what_a_model_draws_at_random_is_drawn_alike_for_plain_training(factories: str) -> None:
    assert check_of(load_trainer("StandardTrainer"), f"{factories}:DropsInForward").passed
    with pytest.raises(Unsupported, match="or randomness"):
        check_of(load_trainer("DPSGDTrainer"), f"{factories}:DropsInForward")


@pytest.mark.parametrize("name", TRAINERS)
def test_tensors_that_belong_to_all_samples_are_not_cut(name: str, factories: str) -> None:
    check = check_of(load_trainer(name), f"{factories}:shared_inputs")
    assert check.passed
    assert check.batch_size == 2


def test_a_loss_without_a_gradient_is_one_clear_line(factories: str) -> None:
    with pytest.raises(ModelError, match="nothing_to_learn has no gradient"):
        check_of(load_trainer("StandardTrainer"), f"{factories}:nothing_to_learn")


def test_equal_batch_and_sequence_need_a_check_of_the_very_model(factories: str) -> None:
    """A large model that looks positions up once for all samples runs there, and is silently wrong."""
    with pytest.raises(Unsupported, match=r"cannot be checked on \w+:Large itself"):
        check_of(load_trainer("DPSGDTrainer"), f"{factories}:Large", batch_size=4, seq_len=4)
    assert check_of(load_trainer("DPSGDTrainer"), f"{factories}:Large", batch_size=4, seq_len=5).passed


def llama(path: Path) -> str:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "attention_dropout": 0.1,
    }
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_hugging_face_config_is_checked_on_a_small_copy_of_itself(name: str, tmp_path: Path) -> None:
    check = check_of(load_trainer(name), llama(tmp_path / "config.json"))
    assert check.passed
    assert check.model.endswith("config.json, shrunk")


def test_tied_gpt2_is_unsupported_by_opacus_and_right_by_book_keeping(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    assert check_of(load_trainer("StandardTrainer"), str(path)).passed
    for name in NEEDS_OPACUS:
        with pytest.raises(Unsupported, match=f"{name} cannot train GPT2LMHeadModel"):
            check_of(load_trainer(name), str(path))
    assert check_of(load_trainer("DPBookKeepingTrainer"), str(path)).passed


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("opt", "OPTForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("bert", "BertForMaskedLM"),
        ("deepseek_v3", "DeepseekV3ForCausalLM"),
    ],
)
def test_other_architectures_are_checked_on_a_small_copy_too(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    if kind == "deepseek_v3":
        pytest.importorskip("transformers", minversion="5.0")  # before it, a small copy is not small enough
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    check = check_of(load_trainer("StandardTrainer"), str(path))
    assert check.passed
    assert check.relative_error < TOLERANCE / 10
    assert check.model.endswith("config.json, shrunk")


def test_tied_weights_are_right_where_the_gradients_are_made(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    path.write_text(json.dumps({**config, "vocab_size": 1000}))
    assert check_of(load_trainer("DPSGDTrainer"), str(path)).passed
    assert check_of(load_trainer("DPFastGradientClippingTrainer"), str(path)).passed
    assert check_of(load_trainer("DPBookKeepingTrainer"), str(path)).passed
    with pytest.raises(Unsupported, match="Parameter tying is not supported with Ghost Clipping"):
        check_of(load_trainer("DPGhostClippingTrainer"), str(path))


def test_a_config_that_stays_large_is_not_built_for_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    build = model_module.model_from_config

    def note(*args: Any, device: str = "meta") -> nn.Module:
        built.append(device)
        return build(*args, device=device)

    monkeypatch.setattr(model_module, "model_from_config", note)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "vocab_size": 1_000_000}))
    assert "cannot be made small" in check_of(load_trainer("StandardTrainer"), str(path)).model
    assert built == ["meta", "meta"]
