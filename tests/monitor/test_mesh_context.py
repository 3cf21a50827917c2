"""Context parallelism under torch's fake process group: ring attention has no kernel for a CPU.

So the forward pass ends at its attention with torch's own error; until then batch, mesh and role are real.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_jobs import LENGTH, Decoder, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from truemfu import TrainingMonitor, count_flops
from truemfu.errors import TruemfuWarning
from truemfu.flops import has_whole_sequences, whole_sequences
from truemfu.monitor.ranks.find_role import context_parallel_size, role_of

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
def test_each_pair_of_a_split_sequence_is_counted_once(mesh: Any, tmp_path: Path, logs_inside: bool) -> None:
    model = Decoder()
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    split_step(monitor, model, mesh, logs_inside=logs_inside)
    assert inspect.isbuiltin(F.scaled_dot_product_attention)
    monitor.close()
    live = monitor._live
    assert live is not None
    role = live.role
    assert (role.flops_shared_by, role.tokens_shared_by, role.has_tokens) == (RANKS, 1, True)
    last = live._counting._last
    assert last is not None
    assert last[2] is not None
    whole = count_flops(Decoder(), (tokens(SAMPLES),)).model_flops
    apart = RANKS * count_flops(Decoder(), (tokens(SAMPLES)[:, : LENGTH // RANKS],)).model_flops
    assert RANKS * last[2].model_flops / role.flops_shared_by == whole
    assert apart < whole  # without the pairs of tokens on different ranks
    (note,) = live._batches._last_step.notes
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
    assert role_of([model]).flops_shared_by == 1


def test_sequences_that_may_be_packed_have_no_mfu(mesh: Any, tmp_path: Path) -> None:
    class Packed(Decoder):
        def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            return super().forward(input_ids)

    model, inputs = Packed(), tokens(SAMPLES)
    monitor = TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model)
    with context_parallel(mesh, buffers=[inputs], buffer_seq_dims=[1]):
        with pytest.warns(TruemfuWarning, match="context parallel"), pytest.raises(NotImplementedError):
            model(input_ids=inputs, cu_seqlens=torch.tensor([0, 3, 8]))
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.close()
    assert "perf/mfu" not in monitor.last


def test_a_batch_with_whole_sequences_has_no_values_and_keeps_what_is_not_a_length() -> None:
    batch = {
        "input_ids": torch.zeros(2, 3, dtype=torch.long),
        "position_ids": torch.tensor([[0, 1, 6], [0, 1, 6]]),
        "inputs_embeds": torch.zeros(2, 3, 5, requires_grad=True),
        "use_cache": False,
    }
    whole = whole_sequences(batch, 4)
    shapes = {key: tuple(value.shape) for key, value in whole.items() if isinstance(value, torch.Tensor)}
    assert shapes == {"input_ids": (2, 12), "position_ids": (2, 12), "inputs_embeds": (2, 12, 5)}
    assert all(whole[key].is_meta for key in shapes)
    assert whole["inputs_embeds"].requires_grad
    assert whole["use_cache"] is False
    assert has_whole_sequences(batch)
    assert not has_whole_sequences({"pixel_values": torch.zeros(2, 3, 8, 8)})
