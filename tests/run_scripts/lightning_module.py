"""A LightningModule with validation each epoch, accumulation, a checkpoint and a log in CSV."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, SAMPLES, FEATURES, ACCUMULATION = 2, 4, 48, 12, 2


class LitModel(pl.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("train_loss", loss)
        print(f"batch {batch_idx} loss {loss.item().hex()}")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self(x), y))

    def on_validation_epoch_end(self):
        print("val_loss", self.trainer.callback_metrics["val_loss"].item().hex())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def build():
    return LitModel()


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    pl.seed_everything(0, verbose=False)
    x = torch.randn(SAMPLES, FEATURES)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    train = DataLoader(data, batch_size=BATCH, shuffle=True)
    validation = DataLoader(TensorDataset(x[:8], x[:8].sum(1, keepdim=True)), batch_size=BATCH)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=ACCUMULATION,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=pl.loggers.CSVLogger("."),
    )
    trainer.fit(build(), train, validation)


if __name__ == "__main__":
    main()
