"""The census of made traces: parts that add up, classes, FLOPs, bytes, limits and bounds."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import msgspec
import pytest
import torch
from made_traces import H200, MadeTrace, kernels_of, training_step

from truemfu.census.annotated import write_annotated
from truemfu.census.census import census_of
from truemfu.census.classes import CLASSES, class_of
from truemfu.census.items import items_of
from truemfu.census.record import Bound, Census, KernelRow
from truemfu.census.timeline import timeline
from truemfu.hardware.detect import find_spec
from truemfu.records import read_record, write_record

SPEC = find_spec("NVIDIA H200")
assert SPEC is not None
BF16, BANDWIDTH = SPEC.peak("bf16"), SPEC.memory_bandwidth_bytes_per_s
assert BF16 is not None
assert BANDWIDTH is not None

NAMES = [
    ("aten::mm", "nvjet_tst_128x256"),
    ("aten::mul", "vectorized_elementwise_kernel"),
    ("aten::sum", "reduce_kernel"),
    ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
    ("aten::copy_", "Memcpy DtoD (Device -> Device)"),
]


def random_program(seed: int) -> MadeTrace:
    """Operators on several streams, of any lengths, with waits of the host between them."""
    draw, trace = random.Random(seed), MadeTrace()
    for number in (1, 2, 3):
        with trace.step(number):
            for _ in range(draw.randrange(5, 40)):
                operator, kernel = draw.choice(NAMES)
                category = "gpu_memcpy" if kernel.startswith("Memcpy") else "kernel"
                with trace.operator(operator, [[64, 64], [64, 64]]):
                    for _ in range(draw.randrange(3)):
                        lasts = draw.choice([0, 1, 5, 30, 200]) + draw.random()
                        trace.launch(kernel, lasts=lasts, stream=draw.choice([7, 13, 20]), category=category)
                trace.wait(draw.choice([0, 0, 1, 50, 400]))
                if draw.random() < 0.1:
                    trace.synchronize()
    return trace


def row(census: Census, operator: str) -> KernelRow:
    return next(one for one in census.kernels if one.operator == operator)


def bound(census: Census, remedy: str) -> Bound:
    return next(one for one in census.bounds if one.remedy == remedy)


@pytest.mark.parametrize("seed", range(40))
def test_the_parts_of_a_step_are_the_step(tmp_path: Path, seed: int) -> None:
    path = random_program(seed).write(tmp_path / "trace.json")
    found = items_of(path)
    gaps = sum(gap.end - gap.start for gap in found.line.gaps)
    assert (
        sum(item.ns for item in found.items) + gaps == found.step.end - found.step.start
    )  # to the nanosecond
    assert sum(item.ns for item in found.items) == found.line.busy
    census = census_of(path)
    assert sum(one.seconds for one in census.classes) == pytest.approx(census.step_s, rel=1e-9)
    assert sum(one.seconds for one in census.kernels) == pytest.approx(census.busy_s, rel=1e-9)
    gaps_s = census.gaps.host_s + census.gaps.data_wait_s + census.gaps.device_s
    assert gaps_s + census.busy_s == pytest.approx(census.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_each_kernel_of_the_step_is_counted_once(tmp_path: Path, seed: int) -> None:
    trace = random_program(seed)
    path = trace.write(tmp_path / "trace.json")
    census = census_of(path)
    assert census.step is not None
    step = next(event for event in trace.events if event["name"] == census.step)
    launched = {
        event["args"]["correlation"]
        for event in trace.events
        if event["cat"] == "cuda_runtime" and step["ts"] <= event["ts"] < step["ts"] + step["dur"]
    }
    own = [kernel for kernel in kernels_of(trace) if kernel["args"]["correlation"] in launched]
    assert census.launches == len(own) == sum(one.launches for one in census.kernels)


def test_a_moment_with_two_kernels_belongs_to_one_and_communication_comes_last(tmp_path: Path) -> None:
    trace = MadeTrace()
    with trace.step(1):
        with trace.operator("c10d::allreduce_", [[64, 64]]):
            trace.launch("ncclDevKernel_AllReduce", lasts=100, stream=20)
        with trace.operator("aten::mul", [[64, 64], [64, 64]]):
            trace.launch("elementwise_kernel", lasts=30, stream=7)
    census = census_of(trace.write(tmp_path / "trace.json"))
    times = {one.key: 1e6 * one.seconds for one in census.classes}
    assert times["elementwise"] == pytest.approx(30)
    assert times["communication"] == pytest.approx(70)
    assert row(census, "c10d::allreduce_").running_s == pytest.approx(100e-6)


@pytest.mark.parametrize(
    ("kernel", "ranges", "kind"),
    [
        ("nvjet_tst_128x256", ["aten::mm"], "products"),
        ("nvjet_tst_128x256", ["aten::addmm", "aten::linear"], "products"),
        ("sm90_xmma_wgrad_implicit_gemm", ["aten::cudnn_convolution", "aten::convolution"], "convolutions"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop",
            ["aten::_scaled_dot_product_cudnn_attention_backward"],
            "attention",
        ),
        ("void flash_fwd_kernel", ["flash_attn::_flash_attn_forward"], "attention"),
        ("vectorized_layer_norm_kernel", ["aten::native_layer_norm"], "normalisation"),
        ("softmax_warp_forward", ["aten::_softmax"], "normalisation"),
        ("elementwise_kernel", ["aten::gelu_backward"], "elementwise"),
        ("elementwise_kernel", ["aten::add_"], "elementwise"),
        ("reduce_kernel", ["aten::sum"], "reductions"),
        ("nll_loss_forward_reduce", ["aten::nll_loss_forward"], "reductions"),
        ("direct_copy_kernel_cuda", ["aten::copy_", "aten::_to_copy"], "copies"),
        ("CatArrayBatchedCopy", ["aten::cat"], "copies"),
        ("multi_tensor_apply_kernel", ["aten::_foreach_mul_", "Optimizer.step#AdamW.step"], "optimizer"),
        ("FillFunctor", ["aten::zero_", "Optimizer.zero_grad#AdamW.zero_grad"], "optimizer"),
        ("embedding_backward_feature_kernel", ["aten::embedding_dense_backward"], "embedding"),
        ("ncclDevKernel_ReduceScatter", ["aten::mm"], "communication"),
        ("triton_poi_fused_add_mul_3", [], "elementwise"),
        ("triton_red_fused_sum_2", [], "reductions"),
        ("triton_per_fused__softmax_1", [], "normalisation"),
        ("triton_per_fused_native_layer_norm_7", ["triton_per_fused_native_layer_norm_7"], "normalisation"),
        ("triton_poi_fused__to_copy_add_bmm_cat_cos_mul_4", [], "elementwise"),
        ("triton_poi_fused_convolution_relu_1", [], "elementwise"),
        ("triton_tem_fused_mm_4", [], "products"),
        ("triton_tem_fused_flex_attention_1", [], "attention"),
        ("nvjet_tst_64x32", [], "products"),
        ("a_kernel_of_nobody", [], "other"),
        ("_rms_norm_forward_kernel", ["LigerRMSNormFunction"], "normalisation"),
    ],
)
def test_the_class_of_a_kernel(kernel: str, ranges: list[str], kind: str) -> None:
    assert class_of(kernel, "kernel", ranges) == kind
    assert kind in CLASSES


def test_a_copy_of_the_device_is_a_memory_copy() -> None:
    assert class_of("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", ["aten::copy_"]) == "memory"


def test_flops_bytes_and_limits_follow_from_the_shapes(tmp_path: Path) -> None:
    trace = MadeTrace()
    training_step(trace, 1, layers=3)
    census = census_of(trace.write(tmp_path / "trace.json"))
    product = next(one for one in census.kernels if one.kernel.startswith("nvjet_tst_192x192"))
    flops = 2 * 4096 * 2048 * 8192
    assert (product.launches, product.flops, product.dtype) == (3, 3 * flops, "bf16")
    assert product.bytes == 3 * 2 * (4096 * 2048 + 2048 * 8192 + 4096 * 8192)
    assert (product.limit, product.limit_s) == ("arithmetic", pytest.approx(3 * flops / BF16))
    multiplied = next(one for one in census.kernels if one.kernel.startswith("void at::native"))
    assert multiplied.bytes == 3 * 3 * 2 * 4096 * 8192  # two read, one written, in three layers
    assert (multiplied.limit, multiplied.limit_s) == ("memory", pytest.approx(multiplied.bytes / BANDWIDTH))
    assert multiplied.module == "layers.*.mlp"
    optimizer = row(census, "aten::_foreach_addcdiv_")
    assert (optimizer.bytes, optimizer.limit) == (None, None)
    assert optimizer.unknown == "its shapes or dtypes are not recorded"


def test_a_backward_kernel_has_the_module_of_its_forward_operator(tmp_path: Path) -> None:
    trace = MadeTrace()
    training_step(trace, 1, layers=2)
    census = census_of(trace.write(tmp_path / "trace.json"))
    backward = next(one for one in census.kernels if one.kernel == "nvjet_tst_256x128")
    assert (backward.module, backward.launches) == ("layers.*.mlp", 2)


def test_kernels_that_wait_for_their_launch_are_limited_by_it(tmp_path: Path) -> None:
    trace = MadeTrace()
    training_step(trace, 1)
    trace.synchronize()
    with trace.step(2):
        for _ in range(20):
            with trace.operator("aten::add", [[8], [8]]):
                trace.launch("elementwise_kernel", lasts=2)
            trace.wait(50)
    census = census_of(trace.write(tmp_path / "trace.json"))
    assert row(census, "aten::add").limit == "launch"
    assert census.gaps.host_s > 0.8 * census.step_s
    assert census.gaps.device_s == 0


def test_a_wait_for_data_is_told_from_other_gaps(tmp_path: Path) -> None:
    trace = MadeTrace()
    training_step(trace, 1)
    trace.synchronize()
    with trace.step(2):
        with trace.range("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"):
            trace.wait(5000)
        with trace.operator("aten::add", [[8], [8]]):
            for _ in range(9):
                trace.launch("elementwise_kernel", lasts=2)
    census = census_of(trace.write(tmp_path / "trace.json"))
    assert census.gaps.data_wait_s == pytest.approx(5002e-6, rel=1e-3)
    loader = bound(census, "loader_workers")
    assert loader.applies
    assert loader.at_most_s == pytest.approx(census.gaps.data_wait_s)


def test_without_shapes_and_device_limits_are_unknown_with_the_reason(tmp_path: Path) -> None:
    trace = MadeTrace(device=None, shapes=False)
    training_step(trace, 1)
    path = trace.write(tmp_path / "trace.json")
    census = census_of(path)
    assert census.device is None
    assert not census.peak_known
    assert all(one.flops is None and one.bytes is None for one in census.kernels)
    assert {one.unknown for one in census.kernels if one.limit is None} == {
        "the rates of this device are not known"
    }
    assert any(note.startswith("recorded without shapes") for note in census.notes)
    assert census_of(path, device_name="NVIDIA H200").peak_known


def one_operator(tmp_path: Path, *operators: tuple[str, list[list[int]], str, str]) -> Census:
    trace = MadeTrace()
    with trace.step(1):
        for operator, dims, dtype, kernel in operators:
            with trace.operator(operator, dims, dtype):
                trace.launch(kernel, lasts=1000)
    return census_of(trace.write(tmp_path / "trace.json"))


def test_bounds_of_fp32_products(tmp_path: Path) -> None:
    shapes = [[4096, 4096], [4096, 4096]]
    flops = 2 * 4096**3
    census = one_operator(tmp_path, ("aten::mm", shapes, "fp32", "ampere_sgemm_128x64_nn"))
    assert SPEC is not None
    tf32 = SPEC.peak("tf32")
    assert tf32 is not None
    assert BF16 is not None
    assert bound(census, "tf32").at_most_s == pytest.approx(1e-3 - flops / tf32)
    assert bound(census, "autocast_bf16").at_most_s == pytest.approx(1e-3 - flops / BF16)
    as_tf32 = one_operator(tmp_path, ("aten::mm", shapes, "fp32", "sm80_xmma_gemm_f32f32_tf32f32_f32"))
    assert (bound(as_tf32, "tf32").applies, bound(as_tf32, "tf32").at_most_s) == (False, None)
    unsure = one_operator(tmp_path, ("aten::mm", shapes, "fp32", "some_gemm"))
    assert "not known" in bound(unsure, "tf32").evidence
    assert not bound(one_operator(tmp_path, ("aten::mm", shapes, "bf16", "nvjet")), "autocast_bf16").applies


def test_bounds_of_a_vocabulary_that_fills_no_tiles(tmp_path: Path) -> None:
    odd = one_operator(tmp_path, ("aten::mm", [[1024, 768], [768, 30522]], "bf16", "nvjet"))
    assert bound(odd, "pad_vocabulary").applies
    assert "30522" in bound(odd, "pad_vocabulary").evidence
    even = one_operator(tmp_path, ("aten::mm", [[1024, 768], [768, 30528]], "bf16", "nvjet"))
    assert not bound(even, "pad_vocabulary").applies


def test_bounds_of_plain_attention(tmp_path: Path) -> None:
    scores = [2, 4, 128, 128]
    census = one_operator(
        tmp_path,
        ("aten::bmm", [[8, 128, 64], [8, 64, 128]], "bf16", "nvjet"),
        ("aten::_softmax", [scores, [], []], "bf16", "softmax_warp_forward"),
        ("aten::mul", [scores, scores], "bf16", "elementwise_kernel"),
        ("aten::mul", [[512, 512], [512, 512]], "bf16", "elementwise_kernel"),
    )
    assert bound(census, "attention").at_most_s == pytest.approx(3e-3)  # all but the last


@pytest.mark.parametrize(
    ("modules", "applies"),
    [
        (("layers.0.mlp", "layers.1.mlp"), True),
        (("model.layers.0.mlp.0.up", "model.layers.1.mlp.0.up"), True),
        (("0", "1", "2"), False),
        (("layers.0.mlp", "layers.1.attention"), False),
        (("Linear_0", "Linear_1"), True),
        ((), True),
    ],
)
def test_blocks_are_compiled_where_modules_do_not_show_that_there_are_none(
    modules: tuple[str, ...], applies: bool, tmp_path: Path
) -> None:
    trace = MadeTrace()
    with trace.step(1):
        for module in modules or ("",):
            name = f"nn.Module: {module}" if module else "no module"
            with trace.range(name), trace.operator("aten::mul", [[8], [8]]):
                trace.launch("elementwise_kernel", lasts=100)
    census = census_of(trace.write(tmp_path / "trace.json"))
    assert bound(census, "compile").applies
    assert bound(census, "compile_blocks").applies is applies


def test_liger_kernels_are_for_language_models_on_gpus(tmp_path: Path) -> None:
    softmax = ("aten::_softmax", [[64, 512], [], []], "bf16", "softmax_warp_forward")
    embedding = ("aten::embedding", [[1024, 64], [64]], "bf16", "indexSelectLargeIndex")
    assert not bound(one_operator(tmp_path, softmax), "liger").applies
    assert bound(one_operator(tmp_path, softmax, embedding), "liger").applies
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.softmax(torch.nn.functional.embedding(torch.zeros(8, dtype=torch.long), torch.randn(9, 4)), 1)
    profile.export_chrome_trace(str(tmp_path / "cpu.json"))
    assert bound(census_of(tmp_path / "cpu.json"), "liger").evidence == "it needs a GPU"


def test_a_fused_optimizer_has_no_bound(tmp_path: Path) -> None:
    for operator, applies in (("aten::_foreach_mul_", True), ("aten::_fused_adamw_", False)):
        trace = MadeTrace()
        with trace.step(1), trace.range("Optimizer.step#AdamW.step"), trace.operator(operator):
            trace.launch("multi_tensor_apply_kernel", lasts=100)
        census = census_of(trace.write(tmp_path / "trace.json"))
        assert bound(census, "fused_optimizer").applies is applies


def test_an_optimizer_of_many_late_launches_could_gain_their_gaps_too(tmp_path: Path) -> None:
    trace = MadeTrace()
    training_step(trace, 1)
    trace.synchronize()
    with trace.step(2), trace.range("Optimizer.step#AdamW.step"):
        for _ in range(50):
            trace.wait(40)
            with trace.operator("aten::mul_", [[8]]):
                trace.launch("elementwise_kernel", lasts=2)
    path = trace.write(tmp_path / "trace.json")
    census = census_of(path)
    assert bound(census, "fused_optimizer").at_most_s == pytest.approx(census.step_s, rel=0.05)
    ordinary = census_of(path, ordinary_step_s=census.busy_s + 1e-4)  # recording made the host slower
    assert bound(ordinary, "fused_optimizer").at_most_s == pytest.approx(ordinary.busy_s + 1e-4)


def test_compiled_code_and_graphs_are_not_recommended_again(tmp_path: Path) -> None:
    trace = MadeTrace()
    with trace.step(1), trace.range("## Call CompiledFxGraph abc ##", "cpu_op"):
        first = trace.launch("triton_poi_fused_add_0", lasts=10, call="cudaGraphLaunch")
        second = trace.launch("triton_red_fused_sum_1", lasts=10)
        second["args"]["correlation"] = first["args"]["correlation"]
    census = census_of(trace.write(tmp_path / "trace.json"))
    assert census.launches == 2
    assert not any(
        bound(census, one).applies for one in ("compile", "compile_blocks", "cuda_graphs", "liger")
    )


def test_operators_that_a_checkpoint_runs_again_are_seen(tmp_path: Path) -> None:
    shapes = [[512, 512], [512, 512]]
    trace = MadeTrace()
    with trace.step(1):
        with trace.operator("aten::mm", shapes, sequence=5):
            trace.launch("nvjet", lasts=100)
        with trace.node("MmBackward0", 5):
            with trace.operator("aten::mm", shapes, sequence=9):  # with gradients: the forward pass again
                trace.launch("nvjet", lasts=100)
            with trace.operator("MmBackward0", [[512, 512]], sequence=5), trace.operator("aten::mm", shapes):
                trace.launch("nvjet", lasts=200)
    census = census_of(trace.write(tmp_path / "trace.json"))
    assert bound(census, "no_checkpointing").at_most_s == pytest.approx(100e-6)


def test_no_bound_is_more_than_the_time_it_could_save(tmp_path: Path) -> None:
    for seed in range(10):
        census = census_of(random_program(seed).write(tmp_path / "trace.json"))
        for one in census.bounds:
            assert one.at_most_s is None or 0 <= one.at_most_s <= census.step_s * (1 + 1e-9)
            assert one.evidence


def test_the_ordinary_step_decides_how_long_gaps_are(tmp_path: Path) -> None:
    path = random_program(3).write(tmp_path / "trace.json")
    recorded = census_of(path)
    census = census_of(path, ordinary_step_s=recorded.busy_s + 1e-4)
    assert census.gaps.in_ordinary_steps_s == pytest.approx(1e-4)
    fewer_s = bound(recorded, "compile").at_most_s, bound(census, "compile").at_most_s
    recorded_gaps_s = recorded.gaps.host_s + recorded.gaps.device_s
    assert fewer_s[0] - fewer_s[1] == pytest.approx(recorded_gaps_s - 1e-4)


def test_a_mode_of_the_compiler_can_gain_what_the_compiler_can(tmp_path: Path) -> None:
    census = census_of(random_program(3).write(tmp_path / "trace.json"))
    assert bound(census, "cuda_graphs").at_most_s == bound(census, "compile").at_most_s
    trace = MadeTrace()
    with trace.step(1), trace.range("## Call CompiledFxGraph abc ##", "cpu_op"):
        trace.launch("triton_poi_fused_add_0", lasts=10)
    compiled = census_of(trace.write(tmp_path / "compiled.json"), ordinary_step_s=30e-6)
    assert bound(compiled, "cuda_graphs").at_most_s == pytest.approx(20e-6)


def test_a_census_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    census = census_of(random_program(1).write(tmp_path / "trace.json"))
    write_record(tmp_path / "census.json", census)
    assert read_record(tmp_path / "census.json", Census) == census
    assert msgspec.to_builtins(census)["version"] == 1


def test_the_trace_is_written_again_with_what_is_known(tmp_path: Path) -> None:
    trace = MadeTrace(device=H200)
    for number in (1, 2):
        training_step(trace, number, layers=1)
    source, target = trace.write(tmp_path / "trace.json"), tmp_path / "again.json.gz"
    write_annotated(source, target, items_of(source))
    again = json.loads(gzip.decompress(target.read_bytes()))
    assert again["deviceProperties"] == [H200]
    assert len(again["traceEvents"]) == len(trace.events)
    named = [event["args"].get("truemfu class") for event in again["traceEvents"] if event["cat"] == "kernel"]
    assert named.count(None) == 5
    assert named.count("products") == 2
    product = next(e["args"] for e in again["traceEvents"] if e["args"].get("truemfu class") == "products")
    assert product["truemfu FLOPs"] == 2 * 4096 * 2048 * 8192
    assert product["truemfu limit"] == "arithmetic"
    plain = json.loads(source.read_text())["traceEvents"]
    for before, after in zip(plain, again["traceEvents"], strict=True):
        assert {k: v for k, v in after["args"].items() if not k.startswith("truemfu")} == before.get("args")


def test_times_of_kernels_without_any_overlap_are_their_own(tmp_path: Path) -> None:
    found = items_of(random_program(5).write(tmp_path / "trace.json"))
    line = timeline(found.step, {id(item.kernel): "elementwise" for item in found.items})
    assert line.busy == found.line.busy  # the order of classes moves time between kernels alone
