"""A compiled model, by torch.compile before or after the optimizer is made, or in place: the argument.

The last line is what dynamo counted.
"""

import sys

import torch
from torch import nn

STEPS, BATCH, LENGTH, WIDTH, VOCABULARY = 8, 4, 16, 32, 50


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        return self.head(self.layers(self.embedding(input_ids)))


def build():
    return Net()


def example_batch():
    return (torch.zeros(BATCH, LENGTH, dtype=torch.long),)


def main():
    torch.manual_seed(0)
    how = sys.argv[1]
    compiled = model = build()
    if how == "before":
        compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if how == "after":
        compiled = torch.compile(model)
    elif how == "in_place":
        model.compile()
    elif how == "parts":
        for layer in model.layers:
            layer.compile()
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
        logits = compiled(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item().hex()}")
    torch.save(model.state_dict(), "model.pt")
    print(dynamo_counters())


def dynamo_counters():
    from torch._dynamo.utils import counters

    frames = dict(counters["frames"])
    breaks, recompiles = dict(counters["graph_break"]), dict(counters["recompile_limit"])
    return f"frames {frames} breaks {breaks} limits {recompiles} stats {dict(counters['stats'])}"


if __name__ == "__main__":
    main()
