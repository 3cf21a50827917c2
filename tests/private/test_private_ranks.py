"""Two ranks take the private step of one process with both ranks' samples, and draw its noise once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import Network, losses_of, relative_error
from private_ranks import SEED, batch
from tests.monitor.rank_processes import free_address
from tests.versions import HAS_FSDP2_ON_CPU
from torch import Tensor

from truemfu.private import PrivateOptimizer


def alone() -> dict[str, Tensor]:
    model = Network(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = PrivateOptimizer(model, optimizer, max_grad_norm=0.5, noise_multiplier=0.0)
    private.backward(losses_of, batch())
    private.step()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_two_ranks_are_one_process_with_all_samples(parallel: str, tmp_path: Path) -> None:
    if parallel == "fsdp2" and not HAS_FSDP2_ON_CPU:
        pytest.skip("FSDP2 on a CPU needs a newer torch")
    program = Path(__file__).parent / "private_ranks.py"
    address = free_address()
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), tmp_path, parallel, address], stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=200)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    without, noisy = (
        [torch.load(tmp_path / f"{noise}_{rank}.pt") for rank in range(2)] for noise in ("0", "10000")
    )
    assert relative_error(without[0], alone()) < 1e-5
    assert relative_error(without[1], without[0]) == 0
    assert relative_error(noisy[1], noisy[0]) == 0
    if parallel == "ddp":
        plain = [torch.load(tmp_path / f"plain_{rank}.pt") for rank in range(2)]
        assert relative_error(plain[1], plain[0]) == 0
    noise = torch.cat([value.flatten() for value in noisy[0].values()])
    assert noise.std().item() == pytest.approx(1e4 * 0.5 / 8, rel=0.1)
    whole = [value for value in noisy[0].values() if value.dim() > 1 and len(value) % 2 == 0]
    assert all(not torch.equal(*value.chunk(2)) for value in whole)  # shards do not repeat the same noise
