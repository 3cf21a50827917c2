"""An optimizer that is not one of torch.optim: sign descent, written out."""

import torch
from torch import nn

STEPS, BATCH, FEATURES = 8, 4, 10


class SignDescent:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.params:
            p.sub_(p.grad.sign(), alpha=self.lr)


def build():
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 1))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    model = build()
    optimizer = SignDescent(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(BATCH, FEATURES)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
