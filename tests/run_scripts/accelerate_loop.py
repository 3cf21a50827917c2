"""The loop of Accelerate's tutorial, with gradient accumulation; also run by `accelerate launch`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, SAMPLES, FEATURES, ACCUMULATION = 2, 4, 64, 16, 2


def build():
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    set_seed(0)
    x = torch.randn(SAMPLES, FEATURES)
    loader = DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), batch_size=BATCH, shuffle=True)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        model.train()
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.gather(loss.detach()).mean()
            accelerator.print(f"epoch {epoch} loss {mean.item().hex()}")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
