"""Trainings of one small decoder on meshes of four ranks, as a script would write them, with a monitor."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from tests.versions import HAS_FSDP2_ON_CPU
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    schedules,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning

WORLD = 4
VOCAB, WIDTH, HEADS, LENGTH = 40, 16, 4, 8
EXPERTS, CHOSEN = 8, 2
STEPS = 3
TIME_LIMIT_S = 400
WAITS_FOR_ALL = hasattr(schedules, "_wait_batch_p2p")
"""Whether pipelines wait for all tensors of a batch that is sent and received at once, as 1F1B does. In old
versions of torch they wait for the last alone, and with gloo hang or lose the others; GPipe has one at once.
"""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (
            layer(x).view(b, s, -1, WIDTH // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
        )


class LocalHeads(Attention):
    """Its forward holds the number of heads of one rank."""

    heads = HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        shape = (b, s, self.heads, WIDTH // HEADS)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, -1))


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 3 * WIDTH), "down": nn.Linear(3 * WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp["down"](F.gelu(self.mlp["up"](self.mlp_norm(x))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head; a pipeline's stage holds some of them."""

    def __init__(
        self, first: int = 0, end: int = 3, of: int = 3, attention: type[nn.Module] = Attention
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH) if first == 0 else None
        self.blocks = nn.ModuleList(Block(attention) for _ in range(first, end))
        # without a bias its output is no view: in torch 2.6 the last stage of a pipeline detaches it in place
        self.head = nn.Linear(WIDTH, VOCAB, bias=False) if end == of else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = input_ids if self.embed is None else self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


class Experts(nn.Module):
    """A stack of experts, for rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH))

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        up, down = (p.to_local() if isinstance(p, DTensor) else p for p in (self.up, self.down))
        parts = rows.split(sizes.tolist())
        return torch.cat([F.gelu(part @ a) @ b for part, a, b in zip(parts, up, down, strict=True)])


class Mixture(nn.Module):
    """Each token visits two of eight experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, EXPERTS), experts
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        sizes = chosen.flatten().bincount(minlength=EXPERTS)
        rows = self.experts(x[order // CHOSEN], sizes)
        rows = rows * weights.flatten()[order, None]
        return self.head(torch.zeros_like(x).index_add(0, order // CHOSEN, rows))


class OwnExperts(nn.Module):
    """The experts of this rank, each a module; rows for others are sent to them and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)
            )
            for _ in range(EXPERTS // WORLD)
        )

    def forward(self, rows: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes)
        sent = sizes.view(WORLD, -1).sum(1).tolist()
        received = arriving.view(WORLD, -1).sum(1).tolist()
        group = dist.group.WORLD
        rows = functional.all_to_all_single_autograd(rows, received, sent, group)
        parts = rows.split(arriving.tolist())
        results: list[Any] = [None] * len(parts)
        for index, expert in enumerate(self.own):
            mine = range(index, len(parts), len(self.own))
            done = expert(torch.cat([parts[i] for i in mine])).split([len(parts[i]) for i in mine])
            for i, result in zip(mine, done, strict=True):
                results[i] = result
        return functional.all_to_all_single_autograd(torch.cat(results), sent, received, group)


class OwnShard(nn.Module):
    """Tensor parallelism written by hand: each rank has a slice of the inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH // WORLD), nn.Linear(3 * WIDTH // WORLD, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(self.down(F.gelu(self.up(x))), "sum", dist.group.WORLD)


def tokens(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (samples, LENGTH), generator=torch.Generator().manual_seed(seed))


def plan_of_blocks(blocks: int, *, sequence: bool) -> dict[str, Any]:
    """Tensor parallelism of the first blocks; the others stay whole on each rank."""
    plan: dict[str, Any] = {}
    for index in range(blocks):
        at = f"blocks.{index}"
        out = {"output_layouts": Shard(1)} if sequence else {}
        plan |= {f"{at}.attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {f"{at}.attention.o": RowwiseParallel(**out), f"{at}.mlp.down": RowwiseParallel(**out)}
        plan[f"{at}.mlp.up"] = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
        if sequence:
            plan |= {
                f"{at}.norm": SequenceParallel(),
                f"{at}.mlp_norm": SequenceParallel(use_local_output=True),
            }
            plan[f"{at}.attention"] = PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )
    return plan


def watched(folder: str, model: Any, mode: str = "smart") -> TrainingMonitor:
    settings = {"monitoring": {"peak_tflops": 1.0, "mfu_calculation_mode": mode}}
    return TrainingMonitor(folder, settings, model=model)


def train(
    folder: str, model: nn.Module, inputs: torch.Tensor, *, attached: Any = None, mode: str = "smart"
) -> TrainingMonitor:
    monitor = watched(folder, model if attached is None else attached, mode)
    for step in range(1, STEPS + 1):
        model(inputs).float().mean().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    return monitor


def ddp(rank: int, folder: str) -> TrainingMonitor:
    return train(folder, nn.parallel.DistributedDataParallel(Decoder()), tokens(rank + 1))


def fsdp(rank: int, folder: str) -> TrainingMonitor:
    return train(folder, sharded(Decoder(), init_device_mesh("cpu", (WORLD,))), tokens(rank + 1))


def hsdp(rank: int, folder: str) -> TrainingMonitor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return train(folder, sharded(Decoder(), mesh), tokens(rank + 1))


def sharded(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor(rank: int, folder: str) -> TrainingMonitor:
    """Two blocks of three are split, and the embedding and the head."""
    plan = plan_of_blocks(2, sequence=False)
    plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(Decoder(), init_device_mesh("cpu", (WORLD,)), plan)
    return train(folder, model, tokens(3))


def tensor_profiled(rank: int, folder: str) -> TrainingMonitor:
    """Every product is split over the ranks, and a step is profiled."""
    plan = plan_of_blocks(3, sequence=False)
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    model = parallelize_module(Decoder(), init_device_mesh("cpu", (WORLD,)), plan)
    return train(folder, model, tokens(3), mode="profiler")


def sequence(rank: int, folder: str) -> TrainingMonitor:
    """Activations between the blocks are split too, and so is the loss."""
    plan = plan_of_blocks(3, sequence=True)
    plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(Decoder(), init_device_mesh("cpu", (WORLD,)), plan)
    monitor, inputs = watched(folder, model), tokens(3)
    for step in range(1, STEPS + 1):
        with loss_parallel():
            F.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten()).backward()
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    return monitor


def tensor_and_fsdp(rank: int, folder: str) -> TrainingMonitor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = parallelize_module(Decoder(), mesh["tp"], plan_of_blocks(3, sequence=False))
    return train(folder, sharded(model, mesh["data"]), tokens(rank // 2 + 1))


def tensor_and_fsdp_of_the_whole(rank: int, folder: str) -> TrainingMonitor:
    """All parameters are in one group, which is gathered before the first module runs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = parallelize_module(Decoder(), mesh["tp"], plan_of_blocks(3, sequence=False))
    return train(folder, fully_shard(model, mesh=mesh["data"]), tokens(rank // 2 + 1))


def piped(
    rank: int,
    folder: str,
    cuts: list[int],
    schedule: Any,
    *,
    group: Any = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    inputs: torch.Tensor | None = None,
) -> TrainingMonitor:
    """A pipeline of stages that end before the blocks `cuts`; stages go round the ranks of the group."""
    place, places = dist.get_rank(group), dist.get_world_size(group)
    bounds = list(zip([0, *cuts], [*cuts, 8], strict=True))
    mine = range(place, len(bounds), places)
    modules = [wrap(Decoder(*bounds[index], of=8)) for index in mine]
    stages = [
        PipelineStage(module, index, len(bounds), torch.device("cpu"), group=group)
        for module, index in zip(modules, mine, strict=True)
    ]
    made = schedule(
        stages if schedule is ScheduleInterleaved1F1B else stages[0],
        n_microbatches=4,
        loss_fn=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
    )
    monitor = watched(folder, modules if len(modules) > 1 else modules[0])
    batch = tokens(8) if inputs is None else inputs
    for step in range(1, STEPS + 1):
        given = (batch,) if mine[0] == 0 else ()
        made.step(*given, **({"target": batch} if len(bounds) - 1 in mine else {}))
        monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    return monitor


def pipeline(rank: int, folder: str) -> TrainingMonitor:
    return piped(rank, folder, [1, 4, 7], ScheduleGPipe)


def pipeline_1f1b(rank: int, folder: str) -> TrainingMonitor:
    return piped(rank, folder, [1, 2, 6], Schedule1F1B)


def pipeline_interleaved(rank: int, folder: str) -> TrainingMonitor:
    return piped(rank, folder, [1, 2, 3, 4, 5, 6, 7], ScheduleInterleaved1F1B)


def pipeline_and_ddp(rank: int, folder: str) -> TrainingMonitor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "data"))

    def wrap(module: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("data"))

    inputs = tokens(8 if rank % 2 else 4)
    schedule = Schedule1F1B if WAITS_FOR_ALL else ScheduleGPipe
    return piped(rank, folder, [3], schedule, group=mesh.get_group("pp"), wrap=wrap, inputs=inputs)


def exchanged_experts() -> nn.Module:
    """Experts split over ranks by torch: hooks send the rows to the ranks of their experts and back."""
    mesh = init_device_mesh("cpu", (WORLD,))
    group, kept = dist.group.WORLD, {}

    def split(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def send(module: nn.Module, inputs: Any, mesh: Any) -> Any:
        rows, sizes = inputs
        arriving = torch.empty_like(sizes)
        dist.all_to_all_single(arriving, sizes)
        sent, received = (n.view(WORLD, -1).sum(1).tolist() for n in (sizes, arriving))
        rows = functional.all_to_all_single_autograd(rows, received, sent, group)
        by_expert = torch.arange(EXPERTS).view(WORLD, -1).T.flatten()  # from rank by rank to expert by expert
        parts = rows.split(arriving.tolist())
        kept.update(sent=sent, received=received, order=by_expert, sizes=arriving[by_expert])
        return torch.cat([parts[i] for i in by_expert]), arriving.view(WORLD, -1).sum(0)

    def send_back(module: nn.Module, rows: Any, mesh: Any) -> Any:
        parts = rows.split(kept["sizes"].tolist())
        back = torch.cat([parts[i] for i in kept["order"].argsort()])
        return functional.all_to_all_single_autograd(back, kept["sent"], kept["received"], group)

    return distribute_module(Experts(), mesh, split, send, send_back)


def experts(rank: int, folder: str) -> TrainingMonitor:
    return train(folder, Mixture(exchanged_experts()), tokens(rank + 1, seed=rank))


def experts_by_hand(rank: int, folder: str) -> TrainingMonitor:
    """What is attached: every module that multiplies, each with the rows that it really gets."""
    model = Mixture(OwnExperts())
    parts = [model.embed, model.router, *model.experts.own, model.head]
    named = {f"part {number}": part for number, part in enumerate(parts)}
    return train(folder, model, tokens(rank + 1, seed=rank), attached=named)


def experts_by_hand_whole(rank: int, folder: str) -> TrainingMonitor:
    return train(folder, Mixture(OwnExperts()), tokens(rank + 1, seed=rank))


def tensor_by_hand(rank: int, folder: str) -> TrainingMonitor:
    return train(folder, nn.Sequential(nn.Embedding(VOCAB, WIDTH), OwnShard()), tokens(3))


def tensor_and_ddp(rank: int, folder: str) -> TrainingMonitor:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = parallelize_module(Decoder(), mesh["tp"], plan_of_blocks(3, sequence=False))
    ddp = nn.parallel.DistributedDataParallel(model, device_mesh=mesh["data"])
    return train(folder, ddp, tokens(rank // 2 + 1))


def local_heads(rank: int, folder: str) -> TrainingMonitor:
    plan = plan_of_blocks(3, sequence=False)
    LocalHeads.heads = HEADS // WORLD
    model = parallelize_module(Decoder(attention=LocalHeads), init_device_mesh("cpu", (WORLD,)), plan)
    return train(folder, model, tokens(3))


JOBS = {
    job.__name__: job
    for job in (
        ddp, fsdp, hsdp, tensor, tensor_profiled, sequence, tensor_and_fsdp, tensor_and_fsdp_of_the_whole,
        pipeline, pipeline_1f1b, pipeline_interleaved, pipeline_and_ddp, experts, experts_by_hand,
        experts_by_hand_whole, tensor_by_hand, tensor_and_ddp, local_heads,
    )
}  # fmt: skip
LEFT_OUT: dict[str, str] = {}
"""Jobs that this torch cannot do by itself, each with what it lacks."""
if not HAS_FSDP2_ON_CPU:
    LEFT_OUT |= dict.fromkeys(
        ("fsdp", "hsdp", "tensor_and_fsdp", "tensor_and_fsdp_of_the_whole"),
        "FSDP2 on a CPU needs torch.cpu.Stream.record_event, which this torch lacks",
    )
if not WAITS_FOR_ALL:
    LEFT_OUT |= dict.fromkeys(
        ("pipeline_1f1b", "pipeline_interleaved"),
        "this torch's 1F1B waits for the last of several transfers alone, and hangs with gloo",
    )


def rank_process(rank: int, store: str, folder: str, names: tuple[str, ...]) -> None:
    """One rank that goes through these jobs; what its monitors found goes to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    found: dict[str, Any] = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                monitor = JOBS[name](rank, str(Path(folder) / name))
                found[name] = results(monitor)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        found[name]["warned"] = [str(w.message) for w in caught if issubclass(w.category, TruemfuWarning)]
    dist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    time.sleep(0.5)  # rank 0 serves the store


def results(monitor: TrainingMonitor) -> dict[str, Any]:
    live = monitor._live
    assert live is not None
    dist.barrier()
    monitor.close()
    last = live._flops._last
    role = live._rank.role
    return {
        "flops": None if last is None else last[1].model_flops,
        "has_mfu": "perf/mfu" in monitor.last,
        "total_tokens": monitor.summary()["totals"]["tokens"],
        "method": monitor.last.get("perf/method"),
        "executed_ratio": live._flops.executed_ratio,
        "shared_by": [role.flops_shared_by, role.tokens_shared_by],
        "has_tokens": role.has_tokens,
        "name": role.name,
        "tokens": [note.template.tokens for note in live.steps.batches._last_step.notes],
        "notes": list(monitor.summary()["notes"]) + list(monitor.summary()["warnings"]),
    }
