"""Count your own model: exact FLOPs of a step, then MFU for any step time, then other batch shapes for free.

python examples/count_a_model.py
"""

from __future__ import annotations

import torch
from torch import nn

from truemfu import Convention, FlopModel, calculate_mfu, count_flops


class Classifier(nn.Module):
    """A small encoder; any module will do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10_000, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(256, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(input_ids)).mean(1))


def main() -> None:
    # On the meta device the model takes no memory; a real one on any device counts just the same.
    with torch.device("meta"):
        model = Classifier()
    batch = {"input_ids": torch.randint(10_000, (8, 128))}

    flops = count_flops(model, batch)
    print(f"forward    {flops.forward:,}")
    print(f"backward   {flops.backward:,}")
    for path in ("encoder", "encoder.layers.0.self_attn", "head"):
        print(f"  {path:27} {flops.by_module.get(path, 0):,}")

    mfu = calculate_mfu(flops.model_flops, 0.005, 312e12)
    print(f"a step of 5 ms on an A100 would be an MFU of {mfu:.1%}")

    formula = FlopModel.fit(model, batch)
    for samples, length in ((8, 128), (32, 512)):
        ids = torch.zeros(samples, length, dtype=torch.long)
        print(f"{samples:3} × {length:3}: {formula({'input_ids': ids}).model_flops:,}")

    causal = count_flops(model, batch, convention=Convention(attention="causal"))
    print(f"this encoder has no mask, so both conventions agree: {causal.model_flops == flops.model_flops}")


if __name__ == "__main__":
    main()
