"""PrivateCallback: private steps in the Trainer of transformers.

    training_step of the trainer ──► PrivateOptimizer.backward, for each micro-batch
    its optimizer's step         ──► noise, by the hook of PrivateOptimizer

The trainer's own loss is a mean over the tokens of a whole batch, so each sample's loss is computed from the
logits instead. Its clipping by `TrainingArguments.max_grad_norm` finds no gradient and does nothing.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor

from ..errors import UsageError
from ..private.batches import losses_by_sample
from ..private.bookkeeping import Losses
from ..private.optimizer import PrivateOptimizer
from .transformers import trainer_that_calls


class PrivateCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Makes the steps of each `trainer.train()` private.

        trainer = Trainer(..., callbacks=[PrivateCallback(max_grad_norm=1.0, noise_multiplier=1.0)])

    Settings are those of `PrivateOptimizer`. The Trainer does not sample by Poisson: an accountant that
    assumes it needs a sampler of your own.
    """

    def __init__(self, *, losses_of: Losses = losses_by_sample, **settings: Any) -> None:
        self._losses_of, self._settings = losses_of, settings
        self.private: PrivateOptimizer | None = None
        """Of the training in progress, or of the last one; None before the first."""
        self._trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()
        trainer = trainer_that_calls(self)
        if trainer is None:
            raise UsageError("PrivateCallback found no Trainer: pass it in callbacks=[…]")
        if trainer.accelerator.scaler is not None:
            raise UsageError("private training does not support loss scaling: use bf16=True in place of fp16")
        self.private = private = PrivateOptimizer(trainer.model_wrapped, trainer.optimizer, **self._settings)

        def losses_of(model: Any, inputs: Any) -> Tensor:
            with trainer.compute_loss_context_manager():
                losses: Tensor = self._losses_of(model, inputs)
            return losses

        def training_step(model: Any, inputs: Any, *_: Any, **__: Any) -> Tensor:
            model.train()
            loss = private.backward(losses_of, trainer._prepare_inputs(inputs))
            return loss / int(trainer.current_gradient_accumulation_steps)

        self._trainer, trainer.training_step = trainer, training_step

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._end()

    def _end(self) -> None:
        """Also of a training that an exception ended."""
        if self._trainer is not None and self.private is not None:
            self.private.remove()
            del self._trainer.training_step
        self._trainer = None
