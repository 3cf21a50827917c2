"""PrivateCallback: the Trainer of transformers takes the steps of PrivateOptimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from truemfu.errors import UsageError
from truemfu.private import PrivateOptimizer, losses_by_sample

transformers = pytest.importorskip("transformers")

SETTINGS: dict[str, Any] = {"max_grad_norm": 0.5, "noise_multiplier": 0.7}


def made() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=11, n_positions=8, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def test_the_trainer_takes_the_steps_of_a_bare_loop(tmp_path: Path) -> None:
    """One step has all rows, in two micro-batches, so their order does not matter."""
    from truemfu.integrations.private_transformers import PrivateCallback

    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    callback = PrivateCallback(**SETTINGS, generator=torch.Generator().manual_seed(3))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=3,
        lr_scheduler_type="constant", report_to=[], use_cpu=True, save_strategy="no", logging_steps=1,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows(), optimizers=(optimizer, None), callbacks=[callback]
    )
    trainer.train()

    expected = made().train()
    by_hand = torch.optim.SGD(expected.parameters(), lr=0.5)
    private = PrivateOptimizer(expected, by_hand, **SETTINGS, generator=torch.Generator().manual_seed(3))
    ids = torch.stack([row["input_ids"] for row in rows()])
    losses = []
    for _ in range(3):
        losses.append(private.backward(losses_by_sample, {"input_ids": ids, "labels": ids}).item())
        private.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(expected.named_parameters())[name], rtol=1e-4, atol=1e-5)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-3)
    assert callback.private is not None
    assert callback.private.gradient_error is not None
    assert callback.private.gradient_error < 1e-4
    assert "training_step" not in vars(trainer)


def test_loss_scaling_is_refused(tmp_path: Path) -> None:
    from truemfu.integrations.private_transformers import PrivateCallback

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(
        model=made(), args=arguments, train_dataset=rows(), callbacks=[PrivateCallback(**SETTINGS)]
    )
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UsageError, match="does not support loss scaling: use bf16=True"):
        trainer.train()
