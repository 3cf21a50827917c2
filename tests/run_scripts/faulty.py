"""A loop that ends as its argument says: by an exception in step 7, by Ctrl-C, by a kill, or without a step.

`faulty.py crash|interrupt|kill|idle`
"""

import sys
import time

import torch
from torch import nn

BATCH, FEATURES = 4, 10


def build():
    return nn.Sequential(nn.Linear(FEATURES, 20), nn.ReLU(), nn.Linear(20, 1))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


class Trainer:
    def __init__(self):
        torch.manual_seed(0)
        self.model = build()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step = 0

    def train_step(self):
        self.step += 1
        x = torch.randn(BATCH, FEATURES)
        loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
        if sys.argv[1] == "crash" and self.step == 7:
            raise RuntimeError(f"the loss is bad: {loss.item().hex()}")
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item().hex()


def train_until_stopped(trainer):
    for _ in range(8):
        print("loss", trainer.train_step())
    print("ready", flush=True)
    while True:
        trainer.train_step()
        time.sleep(0.01)


def main():
    trainer = Trainer()
    how = sys.argv[1]
    if how == "idle":
        with torch.no_grad():
            print("output", trainer.model(torch.ones(BATCH, FEATURES)).sum().item().hex())
        sys.exit(4)
    if how == "crash":
        while True:
            print("loss", trainer.train_step())
    try:
        train_until_stopped(trainer)
    except KeyboardInterrupt:
        print("interrupted")
        torch.save(trainer.optimizer.param_groups[0]["lr"], "last.pt")
        sys.exit(3)


if __name__ == "__main__":
    main()
