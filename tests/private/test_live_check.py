"""The live check: a wrong private gradient ends a run whose loss looks normal, a right one goes on."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import VOCAB, WIDTH, LoRA, Network, losses_of
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.nn import functional as F

from truemfu import TrainingMonitor
from truemfu.errors import ModelError, TruemfuWarning, UsageError
from truemfu.private import PrivateOptimizer, bookkeeping, gradient_error


def batch(samples: int = 4, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (samples, length), generator=torch.Generator().manual_seed(seed))


def made(model: nn.Module, **options: Any) -> PrivateOptimizer:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return PrivateOptimizer(model, optimizer, **{"max_grad_norm": 0.5, "noise_multiplier": 1.0, **options})


class Dropping(nn.Module):
    """With dropout, Python's random numbers, and a buffer that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.drop = nn.Embedding(VOCAB, WIDTH), nn.Dropout(0.3)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.passes += 1
        random.random()
        return self.head(self.drop(self.tokens(ids)))


def test_a_right_gradient_passes_first_and_every_so_many_steps() -> None:
    private = made(Network(1).double(), check_every=3)
    found = []
    for seed in range(7):
        private.gradient_error = None
        private.backward(losses_of, batch(seed=seed))
        private.backward(losses_of, batch(seed=seed + 100))
        private.step()
        found.append(private.gradient_error)
    assert [error is not None for error in found] == [True, False, False, True, False, False, True]
    assert all(error < 1e-10 for error in found if error is not None)


def test_the_check_leaves_the_training_as_it_would_be() -> None:
    def trained(check_every: int | None) -> tuple[dict[str, Tensor], float, Tensor]:
        model = Dropping()
        private = made(model, check_every=check_every)
        random.seed(4)
        for seed in range(3):
            private.backward(losses_of, batch(seed=seed))
            private.step()
        return model.state_dict(), random.random(), torch.rand(1)

    with_check, without = trained(1), trained(None)
    assert with_check[0].keys() == without[0].keys()
    assert all(torch.equal(with_check[0][name], value) for name, value in without[0].items())
    assert with_check[1] == without[1]
    assert torch.equal(with_check[2], without[2])


def test_dropout_is_off_in_the_check_and_on_behind_it() -> None:
    model = Dropping()
    private = made(model)
    private.backward(losses_of, batch())
    assert private.gradient_error is not None
    assert private.gradient_error < 1e-5
    assert model.drop.p == 0.3


@pytest.mark.parametrize("fault", ["norms", "one parameter", "mixed"])
def test_a_wrong_gradient_raises_at_the_first_step(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = Network(3)
    if fault == "norms":
        monkeypatch.setattr(bookkeeping.BookKeeping, "weights", lambda self, norms: 0.3 / norms)
    elif fault == "one parameter":
        clipped_sum = bookkeeping.BookKeeping.clipped_sum

        def corrupted(*args: Any) -> bookkeeping.ClippedSum:
            found = clipped_sum(*args)
            found.sums["tokens.weight"].mul_(1.01)
            return found

        monkeypatch.setattr(bookkeeping.BookKeeping, "clipped_sum", corrupted)
    else:
        model = Mixing()
    before = {name: p.clone() for name, p in model.named_parameters()}
    private = made(model)
    with pytest.raises(ModelError, match=r"private gradient of step 1 is wrong: .* loop over 3 samples"):
        private.backward(losses_of, batch())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class Mixing(nn.Module):
    """Subtracts the mean of the batch, in plain code that no list of layers knows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(x - x.mean(0, keepdim=True))


class Positions(nn.Module):
    """Looks positions up in one dimension: with as many samples as tokens they are taken for samples."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))


def test_positions_taken_for_samples_are_found_where_their_number_is_equal() -> None:
    with pytest.raises(ModelError, match="private gradient of step 1 is wrong"):
        made(Positions()).backward(losses_of, batch(5, 5))
    with pytest.raises(ModelError, match=r"positions \(Embedding\) saw a tensor of shape \(5,\)"):
        made(Positions()).backward(losses_of, batch(4, 5))


def test_samples_without_a_gradient_are_right() -> None:
    private = made(Network(1), noise_multiplier=0.0)
    private.backward(lambda model, ids: 0 * losses_of(model, ids), batch())
    private.step()
    assert private.gradient_error == 0


def test_a_caught_error_does_not_let_the_next_batch_pass() -> None:
    private = made(Mixing())
    for _ in range(2):
        with pytest.raises(ModelError, match="private gradient of step 1 is wrong"):
            private.backward(losses_of, batch())


def test_an_empty_first_batch_does_not_put_the_check_off() -> None:
    private = made(Network(1), expected_batch_size=4)
    private.backward(losses_of, batch(0))
    private.step()
    assert private.gradient_error is None
    private.backward(losses_of, batch(0))
    private.backward(losses_of, batch())
    assert private.gradient_error is not None


def test_it_warns_by_choice_and_the_limit_can_be_set() -> None:
    private = made(Mixing(), when_wrong="warn")
    with pytest.warns(TruemfuWarning, match="private gradient of step 1 is wrong"):
        private.backward(losses_of, batch())
    private.step()
    made(Mixing(), check_limit=1e3).backward(losses_of, batch())
    with pytest.raises(UsageError, match='"raise" or "warn"'):
        made(Mixing(), when_wrong="ignore")


def test_the_error_is_in_the_monitors_row_and_the_check_is_outside_of_its_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Network(2)
    monitor = TrainingMonitor(tmp_path, trackers=[], model=model)
    private = made(model, check_every=2, monitor=monitor)
    for step in range(1, 5):
        loss = private.backward(losses_of, batch())
        private.step()
        monitor.log_step(step, 0, loss, None, 0.1)
    monitor.close()
    rows = json.loads((tmp_path / "training_log.json").read_text())
    assert ["privacy/gradient_error" in row for row in rows] == [True, False, True, False]
    assert 0 < rows[0]["privacy/gradient_error"] < 1e-4
    # The monitor begins with the first batch outside of a pause, behind the first check.
    assert re.search(r"pauses +[\d.]+ ms \(once, ", capsys.readouterr().err)


class TokensFirst(nn.Module):
    """A frozen model with an adapter whose layers see (tokens, samples, features)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCAB, WIDTH).requires_grad_(False)
        self.adapter, self.head = LoRA(), nn.Linear(WIDTH, VOCAB).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids).transpose(0, 1)
        return self.head(x + self.adapter(x)).transpose(0, 1)


def test_an_adapter_that_opacus_corrupts_in_silence_is_found_by_the_first_check() -> None:
    """As in opacus#820 the loss falls and nothing is raised, though the adapter's gradient is wrong."""
    ids = torch.randint(3, (6, 6), generator=torch.Generator().manual_seed(0))
    model, judged = TokensFirst(), TokensFirst()
    wrapped = GradSampleModule(model, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2),
        noise_multiplier=0.0,
        max_grad_norm=0.05,
        expected_batch_size=6,
    )

    def clipped(among: Any) -> dict[str, Tensor]:
        optimizer.zero_grad()
        losses_of(wrapped, ids).mean().backward()
        optimizer.clip_and_accumulate()
        return {name: p.summed_grad for name, p in model.named_parameters() if p.requires_grad}

    error = gradient_error(judged, losses_of, ids, clipped, max_grad_norm=0.05, samples=6)
    assert error > 0.05
    curve = []
    for _ in range(80):
        optimizer.zero_grad()
        loss = losses_of(wrapped, ids).mean()
        curve.append(loss.item())
        loss.backward()
        optimizer.step()
    assert curve[-1] < 0.8 * curve[0]  # it looks normal
    with pytest.raises(ModelError, match="private gradient of step 1 is wrong"):
        made(TokensFirst()).backward(losses_of, ids)


def test_adapters_of_peft_on_gpt2_are_right() -> None:
    """The model of opacus#820, small."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_layer=2, n_embd=16, n_head=2, vocab_size=VOCAB, n_positions=8, bos_token_id=0, eos_token_id=0
        )
    )
    lora = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["c_attn"])
    model = peft.get_peft_model(base, lora).train()

    def losses(called: nn.Module, ids: Tensor) -> Tensor:
        logits = called(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.mT, ids[:, 1:], reduction="none").mean(1)

    private = made(model, noise_multiplier=0.0, max_grad_norm=0.01, check_every=1)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        private.backward(losses, batch())
        assert private.gradient_error is not None
        assert private.gradient_error < 1e-4
        private.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
