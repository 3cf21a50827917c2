"""Differentially private training with (ε, δ): the sampler and the accountant are those of Opacus.

pip install "truemfu[dp]" && python examples/private_training.py
"""

from __future__ import annotations

import torch
from opacus.accountants import RDPAccountant
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.nn import functional as F

from truemfu.private import PrivateOptimizer

SAMPLES, WORDS, LENGTH = 2048, 32, 12
EXPECTED_BATCH_SIZE, STEPS, DELTA = 64, 150, 1e-5
MICRO_BATCH = 32
"""The most samples in memory at once."""


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of each sample."""
    ids, labels = batch
    return F.cross_entropy(model(ids), labels, reduction="none")


def main() -> tuple[float, float]:
    torch.manual_seed(0)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH))
    labels = (ids > WORDS // 2).float().mean(1).gt(0.5).long()
    inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Flatten())
    model = nn.Sequential(nn.Embedding(WORDS, 32), inner, nn.Linear(64 * LENGTH, 2))

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = PrivateOptimizer(
        model,
        optimizer,
        max_grad_norm=1.0,
        noise_multiplier=0.8,
        expected_batch_size=EXPECTED_BATCH_SIZE,
    )
    rate = EXPECTED_BATCH_SIZE / SAMPLES
    sampler = UniformWithReplacementSampler(num_samples=SAMPLES, sample_rate=rate, steps=STEPS)
    accountant = RDPAccountant()
    for chosen in sampler:
        # A Poisson batch has any size, also 0: micro-batches bound the memory; noise is drawn once.
        for part in torch.tensor(chosen, dtype=torch.long).split(MICRO_BATCH):
            private.backward(losses_of, (ids[part], labels[part]))
        private.step()
        accountant.step(noise_multiplier=0.8, sample_rate=rate)

    with torch.no_grad():
        accuracy = (model(ids).argmax(1) == labels).float().mean().item()
    epsilon = accountant.get_epsilon(DELTA)
    print(f"accuracy {accuracy:.3f}; ε = {epsilon:.2f} at δ = {DELTA}")
    print(f"error of the private gradient at the first step: {private.gradient_error:.1e}")
    return accuracy, epsilon


if __name__ == "__main__":
    main()
