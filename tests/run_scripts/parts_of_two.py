"""One optimizer over the last layers of two models, whose first layers are frozen; both see every batch."""

import torch
from torch import nn

STEPS, BATCH, FEATURES = 8, 4, 10


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, width), nn.Linear(width, 3)
        self.body.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def build():
    return Encoder(16), Encoder(24)


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    image, text = build()
    optimizer = torch.optim.AdamW([*image.head.parameters(), *text.head.parameters()], lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(BATCH, FEATURES)
        loss = 1 - nn.functional.cosine_similarity(image(x), text(x + 0.1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")
    torch.save({"image": image.state_dict(), "text": text.state_dict()}, "both.pt")


if __name__ == "__main__":
    main()
