"""A DataLoader with two worker processes and the start method as argument: `loader_workers.py fork|spawn`."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EPOCHS, SAMPLES, BATCH, FEATURES = 2, 24, 4, 12


class Squares(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = torch.linspace(0, 1, FEATURES) * (index + 1) / SAMPLES + torch.rand(1) * 0.1
        return x, (x**2).sum(0, keepdim=True)


def build():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Squares(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=sys.argv[1],
        persistent_workers=True,
    )
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} loss {loss.item().hex()}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
