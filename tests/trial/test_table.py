"""When each remedy applies, by the evidence, and that each has what applies it."""

from __future__ import annotations

import msgspec
import pytest

from truemfu.remedies import at_construction, at_first_pass, at_import
from truemfu.remedies.facts import Evidence, SeenLoader, SeenOptimizer
from truemfu.remedies.table import BY_NAME, REMEDIES

GPU = Evidence(
    device="cuda",
    device_name="NVIDIA H200",
    capability=[9, 0],
    device_memory_bytes=100,
    peak_memory_bytes=25,
    cpus=16,
    ranks=1,
    models=["Model"],
    is_compiled=False,
    products={"float32": 3},
    convolutions=2,
    convolutions_2d=2,
    are_channels_last=False,
    attention_calls=2,
    attention_kernels=["ScaledDotProductCudnnAttentionBackward0"],
    vocabulary=50257,
    matmul_precision="highest",
    cudnn_benchmark=False,
    checkpoints=True,
    repeated_blocks={"encoder.layers": 12, "decoder": 6},
    is_transformers_model=True,
    has_liger=True,
    optimizers=[
        SeenOptimizer(name="AdamW", is_fused=False, foreach=False, takes_fused=True, takes_foreach=True)
    ],
    loaders=[SeenLoader(workers=0, pins_memory=False, is_stream=False)],
    step_time_s=0.1,
    data_wait_s=0.02,
    padding=0.25,
)


def changed(**values: object) -> Evidence:
    return msgspec.structs.replace(GPU, **values)


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.name)
def test_each_remedy_applies_to_a_script_that_has_all_faults_and_to_none_without_evidence(remedy) -> None:
    found = remedy.judge(GPU)
    assert found.applies, found.reason
    line = remedy.line_for(found.option, GPU)
    assert "{" not in line
    nothing = remedy.judge(Evidence())
    assert not nothing.applies
    assert nothing.reason


@pytest.mark.parametrize(
    ("name", "evidence", "reason"),
    [
        ("compile", changed(is_compiled=True), "compiled already"),
        ("compile", changed(models=[]), "no call of a model"),
        ("compile_blocks", changed(repeated_blocks={}), "no list of blocks"),
        ("cuda_graphs", changed(device="cpu"), "cpu"),
        ("autocast_bf16", changed(products={"bfloat16": 3}), "fp32"),
        ("autocast_bf16", changed(products=None), "not known"),
        ("autocast_bf16", changed(capability=[7, 0]), "no bf16"),
        ("tf32", changed(matmul_precision="high"), "already"),
        ("tf32", changed(device="cpu"), "cpu"),
        ("loader_workers", changed(data_wait_s=0.0001), "0.10 %"),
        ("loader_workers", changed(data_wait_s=None), "not known"),
        (
            "loader_workers",
            changed(loaders=[SeenLoader(workers=0, pins_memory=False, is_stream=True)]),
            "stream",
        ),
        (
            "loader_workers",
            changed(loaders=[SeenLoader(workers=4, pins_memory=False, is_stream=False)]),
            "workers already",
        ),
        ("pin_memory", changed(loaders=[]), "no DataLoader"),
        ("no_checkpointing", changed(checkpoints=False), "nothing is checkpointed"),
        ("attention", changed(attention_kernels=[]), "not known"),
        ("attention", changed(attention_calls=0), "not called"),
        ("channels_last", changed(are_channels_last=True), "already"),
        ("channels_last", changed(convolutions_2d=None), "not known"),
        ("cudnn_benchmark", changed(cudnn_benchmark=True), "already"),
        ("liger", changed(has_liger=False), "not installed"),
        ("foreach_optimizer", changed(optimizers=[]), "no optimizer"),
        ("pad_vocabulary", changed(vocabulary=50304), "multiple of 64"),
        ("packing", changed(padding=0.0), "no padding"),
    ],
)
def test_a_remedy_that_does_not_apply_says_why(name: str, evidence: Evidence, reason: str) -> None:
    found = BY_NAME[name].judge(evidence)
    assert not found.applies
    assert reason in found.reason


def test_optimizers_are_judged_by_their_flags() -> None:
    def of(**flags: object) -> Evidence:
        known = {"is_fused": False, "foreach": None, "takes_fused": True, "takes_foreach": True}
        return changed(optimizers=[SeenOptimizer(name="AdamW", **{**known, **flags})])

    fused, foreach = BY_NAME["fused_optimizer"], BY_NAME["foreach_optimizer"]
    assert fused.judge(of()).applies
    assert not foreach.judge(of()).applies  # the default on CUDA
    assert foreach.judge(of(foreach=False)).applies
    assert not fused.judge(of(is_fused=True)).applies
    assert not foreach.judge(of(is_fused=True, foreach=False)).applies
    assert not fused.judge(of(takes_fused=False, takes_foreach=False)).applies
    on_cpu = msgspec.structs.replace(of(), device="cpu")
    assert foreach.judge(on_cpu).applies


def test_lines_are_those_of_the_script() -> None:
    def line(name: str, evidence: Evidence = GPU) -> str:
        return BY_NAME[name].line_for(BY_NAME[name].judge(evidence).option, evidence)

    assert line("compile_blocks") == "for block in [*model.encoder.layers, *model.decoder]: block.compile()"
    assert "num_workers=8," in line("loader_workers")
    assert "num_workers=2," in line("loader_workers", changed(ranks=8))
    assert line("attention") == "torch.backends.cuda.enable_cudnn_sdp(False)"
    eager = changed(attention_implementation="eager", device="cpu")
    assert line("attention", eager) == 'model.set_attn_implementation("sdpa")'
    assert line("pad_vocabulary") == "a vocabulary of 50304"
    assert '"cuda"' in line("autocast_bf16")


def test_each_remedy_from_outside_has_what_applies_it_and_no_other_has() -> None:
    tables = (at_import.APPLY, at_construction.APPLY, at_first_pass.APPLY)
    known = {name for table in tables for name in table}
    assert known == {remedy.name for remedy in REMEDIES if remedy.from_outside}
