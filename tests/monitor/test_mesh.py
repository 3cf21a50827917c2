"""Whatever the mesh, each token of the job is counted once, and each product as often as ranks ran it.

sum over ranks of their FLOPs  =  the count of the whole model and batch, layers that are not split by rank
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mesh_jobs
import pytest
import torch
from mesh_jobs import (
    LEFT_OUT,
    LENGTH,
    VOCAB,
    WIDTH,
    WORLD,
    Decoder,
    Experts,
    Mixture,
    rank_process,
    tokens,
)
from rank_processes import free_address, run_ranks
from tests.versions import TORCH

from truemfu import count_flops

SAMPLES = sum(rank + 1 for rank in range(WORLD))
SHARES = {"ddp": SAMPLES, "fsdp": SAMPLES, "hsdp": SAMPLES, "tensor": 3, "sequence": 3}
SHARES |= {"tensor_and_fsdp": 3, "tensor_and_fsdp_of_the_whole": 3}
PIPES = {"pipeline": 8, "pipeline_1f1b": 8, "pipeline_interleaved": 8, "pipeline_and_ddp": 12}
SPLIT_BY = dict.fromkeys(SHARES, 1)
SPLIT_BY |= {"tensor": WORLD, "sequence": WORLD, "tensor_and_fsdp": 2, "tensor_and_fsdp_of_the_whole": 2}
HEAD = 6 * LENGTH * WIDTH * VOCAB
"""Of one sample, which every rank of a tensor-parallel group runs where its head is not split."""
AGAIN = {"tensor_and_fsdp": 3 * HEAD, "tensor_and_fsdp_of_the_whole": 3 * HEAD}
"""What is run more than once in a job: layers that are not split over the ranks that share a batch."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found in each job."""
    folder, store = tmp_path_factory.mktemp("meshes"), free_address()
    names = tuple(name for name in mesh_jobs.JOBS if name not in LEFT_OUT)
    arguments = [(rank, store, str(folder), names) for rank in range(WORLD)]
    codes, written = run_ranks(rank_process, arguments, folder, mesh_jobs.TIME_LIMIT_S)
    assert codes == [0] * WORLD
    ranks = [written[rank] for rank in range(WORLD)]
    errors = {name: rank[name]["error"] for rank in ranks for name in names if "error" in rank[name]}
    assert errors == {}
    return {name: [rank[name] for rank in ranks] for name in names}


def skipped_where_left_out(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(name in LEFT_OUT, reason=LEFT_OUT.get(name, ""))


def jobs(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=skipped_where_left_out(name)) for name in names]


@pytest.mark.skipif(TORCH < (2, 13), reason="an older torch lacks what some jobs need")
def test_newer_versions_of_torch_do_every_job() -> None:
    """A private name by which a job is left out may be renamed."""
    assert LEFT_OUT == {}
    assert mesh_jobs.WAITS_FOR_ALL
    assert hasattr(torch, "_grouped_mm")  # a condition in tests/flops/test_step_work.py


def job_flops(ranks: list[Any]) -> float:
    return sum(rank["flops"] for rank in ranks)


def job_tokens(ranks: list[Any]) -> float:
    """Of several modules on a rank, the first one that gets tokens is the one with the batch."""
    return sum(sum(filter(None, r["tokens"])) / r["shared_by"][1] for r in ranks if r["has_tokens"])


def whole(samples: int, blocks: int = 3) -> int:
    return count_flops(Decoder(0, blocks, of=blocks), (tokens(samples),)).model_flops


@pytest.mark.parametrize("name", jobs(SHARES))
def test_ranks_that_share_layers_or_shard_them(found: dict[str, list[Any]], name: str) -> None:
    ranks = found[name]
    again = AGAIN.get(name, 0)
    if name == "tensor":  # its third block is not split
        again = (WORLD - 1) * (whole(3) - whole(3, blocks=2))
    assert job_flops(ranks) == whole(SHARES[name]) + again
    assert job_tokens(ranks) == SHARES[name] * LENGTH
    assert [rank["shared_by"] for rank in ranks] == [[SPLIT_BY[name]] * 2] * WORLD
    assert [rank["name"] for rank in ranks] == [""] * WORLD
    assert [rank["warned"] for rank in ranks] == [[]] * WORLD


@pytest.mark.parametrize("name", jobs(PIPES))
def test_pipelines(found: dict[str, list[Any]], name: str) -> None:
    ranks = found[name]
    assert job_flops(ranks) == whole(PIPES[name], blocks=8)
    assert job_tokens(ranks) == PIPES[name] * LENGTH
    assert [rank["shared_by"] for rank in ranks] == [[1, 1]] * WORLD
    assert [rank["warned"] for rank in ranks] == [[]] * WORLD


def test_stages_have_names(found: dict[str, list[Any]]) -> None:
    assert [rank["name"] for rank in found["pipeline"]] == [f"pipeline stage {n} of 4" for n in range(4)]
    assert [rank["has_tokens"] for rank in found["pipeline"]] == [True, False, False, False]
    assert [rank["has_tokens"] for rank in found["pipeline_and_ddp"]] == [True, True, False, False]


@skipped_where_left_out("pipeline_interleaved")
def test_stages_of_one_rank_have_one_name(found: dict[str, list[Any]]) -> None:
    names = [rank["name"] for rank in found["pipeline_interleaved"]]
    assert names == [f"pipeline stages {n}, {n + 4} of 8" for n in range(4)]


@pytest.mark.parametrize("name", ["experts", "experts_by_hand", "experts_by_hand_whole"])
def test_experts_on_several_ranks(found: dict[str, list[Any]], name: str) -> None:
    ranks = found[name]
    whole_batch = torch.cat([tokens(rank + 1, seed=rank) for rank in range(WORLD)])
    assert job_flops(ranks) == count_flops(Mixture(Experts()), (whole_batch,)).model_flops
    assert [rank["shared_by"] for rank in ranks] == [[1, 1]] * WORLD
    assert [rank["warned"] for rank in ranks] == [[]] * WORLD


def test_parts_of_a_model_have_the_rows_that_really_came(found: dict[str, list[Any]]) -> None:
    """A rank's experts get more or fewer rows than its tokens have chosen."""
    own = [count_flops(Mixture(Experts()), (tokens(rank + 1),)).model_flops for rank in range(WORLD)]
    for name in ("experts", "experts_by_hand", "experts_by_hand_whole"):
        assert [rank["flops"] for rank in found[name]] != own


def test_layers_split_by_hand(found: dict[str, list[Any]]) -> None:
    ranks = found["tensor_by_hand"]
    assert job_flops(ranks) == 6 * 3 * LENGTH * (2 * WIDTH * 3 * WIDTH)
    assert len({rank["flops"] for rank in ranks}) == 1


def test_split_layers_whose_group_is_hidden_have_flops_but_no_tokens(found: dict[str, list[Any]]) -> None:
    ranks = found["tensor_and_ddp"]
    assert job_flops(ranks) == whole(3) + 3 * HEAD
    for rank in ranks:
        assert rank["total_tokens"] is None
        assert any("local shards of tensor-parallel layers" in note for note in rank["notes"]), rank["notes"]


def test_ranks_that_share_each_product_execute_their_part(found: dict[str, list[Any]]) -> None:
    """A profiled step sees what an observed step of the same rank saw."""
    assert [rank["executed_ratio"] for rank in found["tensor_profiled"]] == [1.0] * WORLD


def test_a_forward_that_holds_the_numbers_of_one_rank(found: dict[str, list[Any]]) -> None:
    ranks = found["local_heads"]
    assert job_flops(ranks) == whole(3) + (WORLD - 1) * 3 * HEAD
    assert [rank["shared_by"] for rank in ranks] == [[WORLD, WORLD]] * WORLD
    assert [rank["warned"] for rank in ranks] == [[]] * WORLD
