"""Two ranks take the private step of one process with both ranks' samples, and draw its noise once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from networks import Network, losses_of, relative_error
from private_ranks import SEED, batch, convolution, images, losses_of_images, rank_process
from tests.monitor.rank_processes import free_address, run_ranks
from tests.versions import HAS_FSDP2_ON_CPU
from torch import Tensor, nn

from truemfu.private import PrivateOptimizer


def alone(model: nn.Module, losses: Callable[..., Tensor], samples: Tensor) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = PrivateOptimizer(model, optimizer, max_grad_norm=0.5, noise_multiplier=0.0)
    private.backward(losses, samples)
    private.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = ("ddp", "fsdp2") if HAS_FSDP2_ON_CPU else ("ddp",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks wrote, in a folder for each way."""
    folder, address = tmp_path_factory.mktemp("ranks"), free_address()
    for parallel in WAYS:
        (folder / parallel).mkdir()
    codes, _ = run_ranks(rank_process, [(rank, folder, WAYS, address) for rank in range(2)], folder, 200)
    assert codes == [0, 0]
    return folder


@pytest.mark.parametrize("parallel", WAYS)
def test_two_ranks_are_one_process_with_all_samples(parallel: str, folder: Path) -> None:
    found = folder / parallel
    without, noisy = (
        [torch.load(found / f"{noise}_{rank}.pt") for rank in range(2)] for noise in ("0", "10000")
    )
    assert relative_error(without[0], alone(Network(SEED), losses_of, batch())) < 1e-5
    assert relative_error(without[1], without[0]) == 0
    assert relative_error(noisy[1], noisy[0]) == 0
    if parallel == "ddp":
        plain = [torch.load(found / f"plain_{rank}.pt") for rank in range(2)]
        assert relative_error(plain[1], plain[0]) == 0
    noise = torch.cat([value.flatten() for value in noisy[0].values()])
    assert noise.std().item() == pytest.approx(1e4 * 0.5 / 8, rel=0.1)
    whole = [value for value in noisy[0].values() if value.dim() > 1 and len(value) % 2 == 0]
    assert all(not torch.equal(*value.chunk(2)) for value in whole)  # shards do not repeat the same noise


def test_ranks_with_other_layouts_in_memory_have_one_sum(folder: Path) -> None:
    each = [torch.load(folder / f"images_{rank}.pt") for rank in range(2)]
    expected = alone(convolution(), losses_of_images, images())
    assert [relative_error(found, expected) < 1e-5 for found in each] == [True, True]
