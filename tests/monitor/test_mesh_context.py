"""Context parallelism under torch's fake process group: ring attention has no kernel for a CPU.

So the forward pass ends at its attention with torch's own error; until then batch, mesh and role are real.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from mesh_jobs import LENGTH, Decoder, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from truemfu import TrainingMonitor, count_flops
from truemfu.monitor.ranks.find_role import context_parallel_size, role_of
from truemfu.monitor.ranks.role import RankRole
from truemfu.monitor.step_flops.source import GIVEN

RANKS, SAMPLES = 4, 3


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        yield init_device_mesh("cpu", (RANKS,))
    finally:
        dist.destroy_process_group()


def split_step(monitor: TrainingMonitor, model: nn.Module, mesh: Any, *, logs_inside: bool) -> None:
    inputs = tokens(SAMPLES)
    with context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1]):
        assert inputs.shape == (SAMPLES, LENGTH // RANKS)
        with pytest.raises(NotImplementedError, match="attention"):
            model(inputs)
        if logs_inside:
            monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    if not logs_inside:
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("logs_inside", [False, True], ids=["logged after", "logged inside"])
def test_split_sequences_have_no_mfu_but_their_tokens(mesh: Any, tmp_path: Path, logs_inside: bool) -> None:
    model = Decoder()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    split_step(monitor, model, mesh, logs_inside=logs_inside)
    assert inspect.isbuiltin(F.scaled_dot_product_attention)
    monitor.close()
    live = monitor._live
    assert live is not None
    assert live._rank.role == RankRole(splits_sequences=True)
    assert not any(name in monitor.last for name in ("perf/mfu", "perf/tflops_per_gpu", "perf/mfu_estimate"))
    assert monitor.last["perf/mfu_unknown"].startswith("sequences are split over ranks (context parallel)")
    (note,) = live.steps.batches._last_step.notes
    assert RANKS * note.template.tokens == SAMPLES * LENGTH


def test_a_count_leaves_the_attention_of_an_active_context(mesh: Any) -> None:
    inputs, model = tokens(SAMPLES), Decoder()
    expected = count_flops(model, (tokens(SAMPLES),)).model_flops
    with context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1]):
        exchanging = F.scaled_dot_product_attention
        assert count_flops(model, (tokens(SAMPLES),)).model_flops == expected
        assert F.scaled_dot_product_attention is exchanging
        assert context_parallel_size([model]) == RANKS
    assert context_parallel_size([model]) == 1
    assert role_of([model]) == RankRole()


def test_flops_that_the_caller_gives_are_used_for_split_sequences(mesh: Any, tmp_path: Path) -> None:
    model, inputs = Decoder(), tokens(SAMPLES)
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    for step in (1, 2):
        with context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1]), suppress(NotImplementedError):
            model(inputs)
        monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=5e9)
    monitor.close()
    assert "perf/mfu_unknown" not in monitor.last
    assert monitor.summary()["methods"] == {GIVEN: 2}
