"""TrainingMonitor in a job of several ranks: real processes, gloo, ranks that stay away, die or come late."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import free_address, run_ranks
from tests.versions import HAS_FSDP2_ON_CPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import truemfu.monitor.monitor as monitor_module
from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning
from truemfu.flops.observe.observation import OBSERVED

TIME_LIMIT_S = 150
WIDTH = 16


class Layers(nn.Module):
    """3 × 2 × tokens × 16² FLOPs a step for each layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(layers)])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        total: torch.Tensor = x.sum()
        return total


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.down(self.up(x).relu()).sum()
        return total


def flops(layers: int) -> int:
    return layers * 3 * 2 * 16 * WIDTH * WIDTH


def steps(monitor: TrainingMonitor, model: nn.Module, first: int = 1) -> None:
    for step in range(first, first + 4):
        model(torch.zeros(2, 8, dtype=torch.long)).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)


def scenario(name: str, rank: int, world_size: int, init: str, folder: str) -> dict[str, Any]:
    """What one rank does; what it found is written down by `rank_process`."""
    settings = {"monitoring": {"peak_tflops": 10.0}}
    if name == "made before":
        model: nn.Module = Layers(1)
        monitor = TrainingMonitor(folder, settings, model=model)
        start(init, rank, world_size)
    else:
        start(init, rank, world_size)
        if name == "compared":
            return compared(folder)
        if name == "nobody at rank 0" and rank == 0:
            wait_for(Path(folder) / "1.json")
            return {}
        if name == "nobody at rank 0":
            monitor_module._CLOSE_TIMEOUT_S = 5.0
        model = Layers(2)
        if name == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        elif name == "fsdp2":
            mesh = init_device_mesh("cpu", (world_size,))
            for layer in model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif name == "tensor parallel":
            mesh = init_device_mesh("cpu", (world_size,))
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            model = parallelize_module(Pair(), mesh, plan)
        monitor = TrainingMonitor(folder, settings, model=model)
    if name == "rank 0 dies":
        model(torch.zeros(2, 8, dtype=torch.long)).backward()
        if rank == 0:
            os._exit(7)
    if name == "tensor parallel":
        model(torch.ones(8, 16)).backward()
        monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    else:
        steps(monitor, model)
    if name == "another model":
        monitor.save_logs()
        dist.barrier()
        model = Layers(400)
        monitor.attach(model)
        steps(monitor, model, first=5)
    if name == "destroyed":
        dist.barrier()
        dist.destroy_process_group()
    monitor.close()
    return {"last": monitor.last, "summary": monitor.summary()}


def trained(model: nn.Module, monitor: TrainingMonitor | None) -> list[Any]:
    """Weights, losses and the random state after some steps, with a new kind of batch in the sixth."""
    torch.manual_seed(7 + dist.get_rank())
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    if monitor is not None:
        monitor.attach(ddp)
    losses = []
    for step in range(1, 11):
        x = torch.randn(4, 16) if step != 6 else torch.randn(2, 4, 16)
        loss = ddp(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if monitor is not None:
            monitor.log_step(step, 0, loss, 1.0, 1.0)
            if step == 4:
                monitor.save_logs()
    return [losses, [p.tolist() for p in model.parameters()], torch.get_rng_state().tolist()]


class Dropping(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(x, 0.3))


def compared(folder: str) -> dict[str, Any]:
    """The same training on every rank, without a monitor and with one."""
    torch.manual_seed(0)
    models = Dropping(), Dropping()
    models[1].load_state_dict(models[0].state_dict())
    alone = trained(models[0], None)
    monitor = TrainingMonitor(folder, {"monitoring": {"peak_tflops": 10.0}})
    monitored = trained(models[1], monitor)
    dist.barrier()
    monitor.close()
    return {"is_same": alone == monitored, "summary": monitor.summary()}


def start(init: str, rank: int, world_size: int) -> None:
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size)


def rank_process(name: str, rank: int, world_size: int, init: str, folder: str) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", TruemfuWarning)
        found = scenario(name, rank, world_size, init, folder)
    found["warned"] = [str(w.message) for w in warned if issubclass(w.category, TruemfuWarning)]
    partial = Path(folder) / f"{rank}.partial"
    partial.write_text(json.dumps(found))
    partial.rename(Path(folder) / f"{rank}.json")
    if rank == 0:  # it serves the store, so it goes last
        for other in range(1, world_size):
            wait_for(Path(folder) / f"{other}.json")


def wait_for(path: Path) -> None:
    ends = time.monotonic() + TIME_LIMIT_S
    while not path.exists() and time.monotonic() < ends:
        time.sleep(0.02)


def job(folder: Path, name: str, world_size: int = 2) -> tuple[list[int | None], dict[int, Any]]:
    """Exit codes, and what each rank found."""
    init = free_address()
    arguments = [(name, rank, world_size, init, str(folder)) for rank in range(world_size)]
    return run_ranks(rank_process, arguments, folder, TIME_LIMIT_S)


def flops_of(found: dict[str, Any]) -> int:
    row: dict[str, float] = found["last"]
    return round(row["perf/tflops_per_gpu"] * row["perf/step_time"] * 1e12)


@pytest.mark.parametrize(("name", "world_size"), [("ddp", 2), ("ddp", 3), ("fsdp2", 2)])
def test_every_rank_has_its_mfu_and_rank_0_alone_logs(tmp_path: Path, name: str, world_size: int) -> None:
    if name == "fsdp2" and not HAS_FSDP2_ON_CPU:
        pytest.skip("FSDP2 on a CPU needs a newer torch")
    codes, found = job(tmp_path, name, world_size)
    assert codes == [0] * world_size
    for rank in range(world_size):
        assert flops_of(found[rank]) == flops(2)
        assert found[rank]["last"]["perf/mfu"] > 0
        scope = f"rank {rank} of {world_size} alone" if rank else f"job of {world_size} ranks, summed"
        assert found[rank]["summary"]["scope"] == scope
        assert found[rank]["summary"]["warnings"] == []
    names = {path.name for path in tmp_path.iterdir()}
    own = {f"{rank}.json" for rank in range(world_size)}
    assert names - own == {"training_log.json", "training_run.json", "ranks"}
    assert len(list((tmp_path / "ranks").iterdir())) == world_size
    assert len(json.loads((tmp_path / "training_log.json").read_text())) == 4


def test_training_on_two_ranks_is_bit_identical_and_both_observe_the_same_steps(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "compared")
    assert codes == [0, 0]
    for rank in (0, 1):
        summary = found[rank]["summary"]
        assert found[rank]["is_same"]
        assert summary["methods"] == {OBSERVED: 10}
        assert summary["warnings"] == []
        assert summary["warmup_steps"] == 5  # the first three, that of the new kind, and a check
        assert summary["monitor_cost"]["observed_steps"] == [1, 2, 6, 10]


def test_where_rank_0_dies_the_other_goes_on(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "rank 0 dies")
    assert codes == [7, 0]
    summary = found[1]["summary"]
    assert summary["steps"] == 4
    # Its first step has one more batch than the others, so no observation was repeated for certain.
    assert summary["methods"].get(OBSERVED, 0) + sum(summary["mfu_unknown"].values()) == 4
    assert summary["warnings"] == []  # it writes no log: nobody is to read them


def test_a_group_that_is_gone_before_the_end_is_no_trouble(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "destroyed")
    assert codes == [0, 0]
    for rank in (0, 1):
        assert flops_of(found[rank]) == flops(2)
        assert found[rank]["summary"]["warnings"] == found[rank]["warned"] == []


def test_a_monitor_made_before_the_group_knows_its_rank(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "made before")
    assert codes == [0, 0]
    assert [found[rank]["summary"]["world_size"] for rank in (0, 1)] == [2, 2]


def test_without_a_monitor_on_rank_0_the_others_have_their_rows(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "nobody at rank 0")
    assert codes == [0, 0]
    assert found[1]["summary"]["steps"] == 4


def test_a_second_model_is_not_taken_for_the_first(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "another model")
    assert codes == [0, 0]
    assert flops_of(found[0]) == flops(400)
    assert flops_of(found[1]) == flops(400)


def test_ranks_that_share_each_product_count_their_own_part(tmp_path: Path) -> None:
    codes, found = job(tmp_path, "tensor parallel")
    assert codes == [0, 0]
    assert [rank["last"]["perf/method"] for rank in found.values()] == [OBSERVED] * 2
    half = 2 * 8 * 16 * 64 // 2
    assert [flops_of(rank) for rank in found.values()] == [(2 + 3) * half] * 2  # no gradient of the input
