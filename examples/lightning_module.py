"""Lightning with the callback: one argument more than without. Random weights, seconds on a CPU.

python examples/lightning_module.py
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from truemfu.integrations.lightning import TrueMFUCallback
from truemfu.sweep.worker.models import build_reference_model


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_reference_model("tiny", device="cpu", dtype=torch.float32)

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(tokens, labels=tokens).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, tokens: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.model(tokens, labels=tokens).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    tokens = torch.randint(1000, (320, 64))
    trainer = pl.Trainer(
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=20,
        log_every_n_steps=5,
        logger=pl.loggers.CSVLogger("out/lightning_module"),
        callbacks=[TrueMFUCallback()],  # the line
    )
    loader = torch.utils.data.DataLoader(tokens, batch_size=8)
    trainer.fit(LanguageModel(), loader, torch.utils.data.DataLoader(tokens[:16], batch_size=8))
    folder = trainer.logger.log_dir
    print(f"in {folder}: metrics.csv has Lightning's own log, truemfu/training_log.json every step")
    print("a CPU has no peak: set TRUEMFU_PEAK_TFLOPS to see an MFU")


if __name__ == "__main__":
    main()
