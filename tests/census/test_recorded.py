"""Traces that Kineto wrote on an H200 (torch 2.11, benchmarks/gpu/explain.py), of small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from truemfu.census.census import census_of
from truemfu.census.items import items_of
from truemfu.census.record import Bound, Census

TRACES = Path(__file__).parent / "traces"
KINDS = {
    "bert": (147, 29506404352),
    "checkpointed": (379, 38625902592),
    "compiled": (115, 34191998976),
    "convnext": (303, 24647344128),
    "experts": (488, 46568865792),
    "llama": (302, 33256144896),
    "u_net": (270, 27745320960),
}
"""Kernels of the step, and FLOPs by the shapes that were recorded."""


@pytest.fixture(scope="module")
def censuses() -> dict[str, Census]:
    return {kind: census_of(TRACES / f"{kind}.json.gz") for kind in KINDS}


def bound(census: Census, remedy: str) -> Bound:
    return next(one for one in census.bounds if one.remedy == remedy)


def knows_operators(kind: str) -> bool:
    """Whether this torch has every operator of the trace, whose schema a formula needs."""
    return kind != "experts" or hasattr(torch.ops.aten, "_grouped_mm")


def test_every_recorded_trace_is_tested() -> None:
    assert {path.name.partition(".")[0] for path in TRACES.iterdir()} == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_step_is_whole_and_its_parts_add_up(kind: str, censuses: dict[str, Census]) -> None:
    census = censuses[kind]
    assert (census.step, census.steps_in_trace, census.device) == ("ProfilerStep#10", 2, "NVIDIA H200")
    assert sum(one.seconds for one in census.classes) == pytest.approx(census.step_s, rel=1e-9)
    assert sum(one.seconds for one in census.kernels) == pytest.approx(census.busy_s, rel=1e-9)
    if knows_operators(kind):
        assert census.notes == []
    else:
        assert census.notes == ["FLOPs of aten::_grouped_mm are unknown (12 calls)"]


@pytest.mark.parametrize(("kind", "launches", "flops"), [(kind, *known) for kind, known in KINDS.items()])
def test_kernels_and_flops(kind: str, launches: int, flops: int, censuses: dict[str, Census]) -> None:
    census = censuses[kind]
    assert census.launches == launches
    if not knows_operators(kind):
        pytest.skip("this torch has no _grouped_mm")
    assert sum(one.flops or 0 for one in census.classes) == flops
    assert sum(row.flops or 0 for row in census.kernels) == flops


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_has_a_class_and_an_operator(kind: str, censuses: dict[str, Census]) -> None:
    census = censuses[kind]
    assert "other" not in {row.kind for row in census.kernels}
    assert all(row.operator is not None for row in census.kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_no_kernel_is_faster_than_its_least_time(kind: str) -> None:
    found = items_of(TRACES / f"{kind}.json.gz")
    for item in found.items:
        arithmetic_s = found.device.arithmetic_s(item)
        assert arithmetic_s is None or arithmetic_s <= 1e-9 * item.running_ns, item.kernel.name


def test_recomputation_is_what_a_checkpoint_adds(censuses: dict[str, Census]) -> None:
    """Two layers of Llama with and without checkpoints: the forward products of the layers run twice."""
    without, with_checkpoints = censuses["llama"], censuses["checkpointed"]
    assert not bound(without, "no_checkpointing").applies
    again_s = bound(with_checkpoints, "no_checkpointing").at_most_s
    assert again_s == pytest.approx(with_checkpoints.busy_s - without.busy_s, rel=0.25)


@pytest.mark.parametrize(
    ("kind", "applies"),
    [
        ("llama", {"compile", "fused_optimizer", "cuda_graphs", "attention", "liger"}),
        ("bert", {"compile", "fused_optimizer", "pad_vocabulary"}),
        ("u_net", {"compile", "channels_last", "cudnn_benchmark"}),
        ("compiled", {"cuda_graphs", "fused_optimizer"}),
        ("checkpointed", {"compile", "no_checkpointing"}),
    ],
)
def test_remedies_with_evidence(kind: str, applies: set[str], censuses: dict[str, Census]) -> None:
    found = {one.remedy for one in censuses[kind].bounds if one.applies}
    assert applies <= found
    never = {"tf32", "autocast_bf16", "loader_workers", "pin_memory", "packing"}
    if kind == "compiled":
        never |= {"compile", "compile_blocks", "liger"}
    assert not found & never


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_bound_is_first_and_a_larger_batch_last(kind: str, censuses: dict[str, Census]) -> None:
    bounds = censuses[kind].bounds
    shown = [one for one in bounds if one.applies]
    assert bounds[: len(shown)] == shown
    seconds = [one.at_most_s or 0.0 for one in shown if one.remedy != "larger_batch"]
    assert seconds == sorted(seconds, reverse=True)
    assert shown[-1].remedy == "larger_batch"
    assert all(one.at_most_s is None for one in bounds if "no " in one.evidence[:3])


def test_modules_of_forward_and_backward_kernels(censuses: dict[str, Census]) -> None:
    modules = {row.module for row in censuses["llama"].kernels if row.kind == "products"}
    names = [f"model.layers.*.self_attn.{name}_proj" for name in "qkvo"]
    assert modules >= {*names, "model.layers.*.mlp.down_proj", "lm_head"}
    backward = [row for row in censuses["llama"].kernels if "backward" in (row.operator or "")]
    assert len(backward) > 5
    assert all(row.module for row in backward)
    assert {row.module for row in censuses["compiled"].kernels} == {None}
