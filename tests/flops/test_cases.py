"""All 29 public cases, exact to the integer, against a truth that shares no code with the counter."""

from __future__ import annotations

import pytest
import torch
from tests.versions import TORCH

pytest.importorskip("transformers", minversion="5.22")

from benchmarks.cases import CASES, Case, case

from truemfu import Convention, count_flops
from truemfu.flops.shadow import tensor_makers

DECODERS = [
    c for c in CASES if c.name.startswith(("gpt2", "llama", "qwen", "mistral", "gemma", "mixtral", "deep"))
]
PACKABLE = [c for c in DECODERS if not c.compiled and c.name not in ("llama-padded", "qwen2.5-vl")]
ALONE = ("gpt2", "llama-sdpa", "llama-eager", "mistral", "gemma3")
ALSO_PACKED = [c for c in PACKABLE if c.name not in ALONE]
"""Their allowed pairs are counted for packed documents; others have every kernel and mask for plain rows."""


# Older versions of torch run some of these attentions, but not all, without the fused kernel that recomputes.
FUSED_FOR_ALL = TORCH >= (2, 11)


def names(cases: list[Case] | tuple[Case, ...]) -> list[str]:
    return [c.name for c in cases]


def assert_exact(c: Case, batch: dict, attention: str = "full") -> None:
    model = c.build()
    truth = c.truth(model, batch, attention=attention)
    count = count_flops(model, batch, convention=Convention(attention=attention))
    assert (count.forward, count.backward) == (truth.forward, truth.backward)
    assert count.model_flops == truth.model_flops
    if FUSED_FOR_ALL:
        assert count.recompute == truth.recompute
        assert count.hardware_flops == truth.hardware_flops
    assert count.by_module[""] == sum(count.by_operator.values()) == sum(count.by_dtype.values())
    assert count.by_module[""] == count.model_flops
    assert not count.uncounted
    if FUSED_FOR_ALL:  # transformers' own grouped product has no fake implementation on older versions
        assert count.method == "count on fake tensors"


def test_there_are_29_cases():
    assert len(CASES) == 29


@pytest.mark.parametrize("name", names(CASES))
def test_case_is_exact(name):
    c = case(name)
    assert_exact(c, c.batch(samples=3, length=41))


@pytest.mark.parametrize("name", names([c for c in CASES if not c.compiled and c not in ALSO_PACKED]))
def test_case_is_exact_for_allowed_pairs(name):
    c = case(name)
    assert_exact(c, c.batch(samples=2, length=37), attention="causal")


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "causal") for name in names(PACKABLE)), ("llama-sdpa", "full"), ("gemma3", "full")],
)
def test_packed_documents_are_counted_one_by_one(name, attention):
    c = case(name)
    assert_exact(c, c.batch(samples=2, length=24, documents=[10, 9, 5]), attention=attention)


def test_images_of_several_sizes():
    c = case("qwen2.5-vl")
    assert_exact(c, c.batch(samples=2, length=20, images=[(1, 4, 10), (2, 6, 6), (1, 12, 4)]))


@pytest.mark.parametrize("size", [40, 57, 96])
def test_images_of_any_size(size):
    c = case("resnet")
    assert_exact(c, c.batch(samples=2, size=size))


def test_model_flops_do_not_depend_on_the_kernel():
    batch = case("llama-sdpa").batch(samples=2, length=24)
    for attention in ("full", "causal"):
        counts = {
            name: count_flops(
                case(name).build(), batch, convention=Convention(attention=attention)
            ).model_flops
            for name in ("llama-sdpa", "llama-eager", "llama-checkpointed", "llama-compiled")
        }
        assert len(set(counts.values())) == 1, counts


def test_model_flops_do_not_depend_on_the_expert_kernel():
    batch = case("qwen3-moe-eager").batch(samples=2, length=24)
    counts = {
        kernel: count_flops(case(f"qwen3-moe-{kernel}").build(), batch).model_flops
        for kernel in ("grouped_mm", "batched_mm", "eager")
    }
    assert len(set(counts.values())) == 1, counts


@pytest.mark.skipif(not FUSED_FOR_ALL, reason="transformers' grouped product cannot run without data there")
@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3", "qwen3-moe-grouped_mm"])
def test_experts_on_another_device_count_as_on_the_cpu(name, monkeypatch):
    """Transformers routes otherwise where the device is not the CPU; `meta` stands for such a one."""
    model, batch = case(name).build().to(torch.bfloat16), case(name).batch(samples=2, length=24)
    here = count_flops(model, batch)
    monkeypatch.setattr(tensor_makers, "device_of", lambda tensor: torch.device("meta"))
    there = count_flops(model, batch)
    assert (there.method, there.notes) == ("count on fake tensors", here.notes)
    assert (there.forward, there.backward) == (here.forward, here.backward)


def test_a_tower_that_needs_no_gradient_costs_forward_alone():
    c = case("llava")
    model = c.build()
    batch = c.batch(samples=2, length=24)
    trained = count_flops(model, batch)
    model.model.vision_tower.requires_grad_(False)
    frozen = count_flops(model, batch)
    assert frozen.forward == trained.forward
    assert frozen.backward < trained.backward
