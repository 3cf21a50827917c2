"""A model that is only called inside a compiled function, which also computes the loss."""

import torch
from torch import nn

STEPS, BATCH, FEATURES, CLASSES = 8, 6, 20, 4


def build():
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, CLASSES))


def example_batch():
    return (torch.zeros(BATCH, FEATURES),)


def main():
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.compile(backend="aot_eager")
    def loss_of(x, y):
        return nn.functional.cross_entropy(model(x), y)

    for step in range(STEPS):
        loss = loss_of(torch.randn(BATCH, FEATURES), torch.randint(CLASSES, (BATCH,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item().hex()}")

    from torch._dynamo.utils import counters

    frames = dict(counters["frames"])
    breaks, recompiles = dict(counters["graph_break"]), dict(counters["recompile_limit"])
    print(f"frames {frames} breaks {breaks} limits {recompiles} stats {dict(counters['stats'])}")


if __name__ == "__main__":
    main()
