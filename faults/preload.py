"""What every forked process would otherwise load and compute for itself."""

from __future__ import annotations

import gc

import torch

from truemfu import cli, count_flops, sweep
from truemfu.monitor import monitor
from truemfu.report.sweep import page, texts
from truemfu.sweep.supervisor import runner

from .training import Net

_LOADED = (cli, sweep, monitor, page, texts, runner)


def preload() -> None:
    """Load torch and truemfu, and count once; without a thread, which no fork would take along."""
    torch.set_num_threads(1)
    model = Net()
    model(torch.ones(2, 8)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    count_flops(model, (torch.ones(2, 8),))
    gc.freeze()  # a collection in a forked process would copy every page
