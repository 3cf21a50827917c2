"""Gradient accumulation over four micro-batches, gradients clipped, a warm-up of the learning rate."""

import torch
from torch import nn

STEPS, ACCUMULATION, MICRO_BATCH, FEATURES, CLASSES = 8, 4, 2, 24, 5


def build():
    return nn.Sequential(nn.Linear(FEATURES, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, CLASSES))


def example_batch():
    return (torch.zeros(MICRO_BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    model = build()
    dataset = torch.utils.data.TensorDataset(
        torch.randn(STEPS * ACCUMULATION * MICRO_BATCH, FEATURES),
        torch.randint(CLASSES, (STEPS * ACCUMULATION * MICRO_BATCH,)),
    )
    loader = torch.utils.data.DataLoader(dataset, batch_size=MICRO_BATCH, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    optimizer.zero_grad()
    running = 0.0
    for i, (x, y) in enumerate(loader, start=1):
        loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATION
        loss.backward()
        running += loss.item()
        if i % ACCUMULATION == 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"step {i // ACCUMULATION} loss {running.hex()} norm {norm.item().hex()}")
            running = 0.0
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
