"""A private training with Opacus: `hooks` or `ghost`, and `mixing` for a model that mixes samples."""

import sys

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn

SAMPLES, CLIP = 6, 0.1


class Model(nn.Module):
    def __init__(self, mixing: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.mixing = nn.Linear(8, 16), nn.Linear(16, 4), mixing
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(x))
        return self.second(self.drop(h - h.mean(0, keepdim=True) if self.mixing else h))


def private(model: nn.Module, how: str = "hooks", reduction: str = "mean"):
    """Model, optimizer and loss function as Opacus makes them, and the optimizer inside."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"noise_multiplier": 1.0, "max_grad_norm": CLIP, "expected_batch_size": SAMPLES}
    loss = nn.CrossEntropyLoss(reduction=reduction)
    if how == "ghost":
        wrapped = GradSampleModuleFastGradientClipping(
            model, max_grad_norm=CLIP, use_ghost_clipping=True, loss_reduction=reduction
        )
        optimizer = DPOptimizerFastGradientClipping(inner, loss_reduction=reduction, **settings)
        return wrapped, optimizer, DPLossFastGradientClipping(wrapped, optimizer, loss, reduction), inner
    wrapped = GradSampleModule(model, loss_reduction=reduction)
    return wrapped, DPOptimizer(inner, loss_reduction=reduction, **settings), loss, inner


def batches(steps: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield (
            torch.randn(SAMPLES, 8, generator=generator),
            torch.randint(4, (SAMPLES,), generator=generator),
        )


def main() -> None:
    torch.manual_seed(0)
    model = Model(mixing="mixing" in sys.argv)
    wrapped, optimizer, loss_of, _ = private(model, "ghost" if "ghost" in sys.argv else "hooks")
    for x, y in batches(6):
        optimizer.zero_grad()
        loss_of(wrapped(x), y).backward()
        optimizer.step()
    print([p.double().sum().item() for p in model.parameters()], torch.rand(1).item())


if __name__ == "__main__":
    main()
