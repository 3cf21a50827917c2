"""Two models of the same size that teach each other (deep mutual learning), one optimizer over both."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

STEPS, BATCH, FEATURES, CLASSES = 8, 4, 10, 3


def build():
    def one():
        return nn.Sequential(nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, CLASSES))

    return one(), one()


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    first, second = build()
    optimizer = torch.optim.SGD(itertools.chain(first.parameters(), second.parameters()), lr=0.05)
    for step in range(STEPS):
        x, y = torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,))
        a, b = first(x), second(x)
        loss = F.cross_entropy(a, y) + F.cross_entropy(b, y)
        loss = loss + F.kl_div(a.log_softmax(1), b.softmax(1).detach(), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")
    torch.save([first.state_dict(), second.state_dict()], "students.pt")


if __name__ == "__main__":
    main()
