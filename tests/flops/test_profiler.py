"""A real step under torch.profiler, against the counter, an independent truth and arithmetic by hand."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from profiled_step import profile_step
from tests.versions import TORCH
from torch import Tensor, nn
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from truemfu import Convention, count_step, register_formula
from truemfu.errors import UsageError
from truemfu.flops.profiled.profiler import StepProfiler
from truemfu.flops.registry import OPERATOR_FORMULAS

CPU = [ProfilerActivity.CPU]
X = torch.linspace(-1, 1, 120).reshape(3, 5, 8)

# Cases whose split differs from the truth, and why; what is executed is the same for all.
NOT_NEEDED_BUT_COUNTED = {
    "llama-lora": "the first layer's keys need no gradient, which a fused kernel computes and no event tells",
}


def parts(count: Any) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recompute


def linear(inputs: int = 8, outputs: int = 8, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.fixture(scope="module")
def cases() -> Any:
    pytest.importorskip("transformers", minversion="5.22")
    from benchmarks import cases

    return cases


CASES = (
    "gpt2 llama-sdpa llama-eager llama-checkpointed llama-lora llama-padded qwen2 qwen3 mistral gemma2 "
    "gemma3 mixtral qwen3-moe-grouped_mm qwen3-moe-batched_mm qwen3-moe-eager deepseek-v3 bert t5 vit clip "
    "qwen2.5-vl llava mamba mamba2 whisper resnet llama-compiled gpt2-compiled resnet-compiled"
).split()


def test_all_public_cases_are_here(cases: Any) -> None:
    assert [c.name for c in cases.CASES] == CASES


@pytest.mark.parametrize("name", CASES)
def test_case_executes_what_the_counter_says(cases: Any, name: str) -> None:
    c = cases.case(name)
    model, batch = c.build(), c.batch(samples=2, length=17)

    def step() -> None:
        model(**batch).loss.backward()

    profiled = profile_step(step)  # of a compiled case the first step, in which it is compiled
    counted, truth = count_step(step), c.truth(model, batch)
    assert profiled.hardware_flops == counted.hardware_flops
    assert profiled.forward == truth.forward
    if name in NOT_NEEDED_BUT_COUNTED:
        assert profiled.backward > truth.backward
    else:
        assert profiled.model_flops == truth.model_flops
        assert profiled.recompute == counted.recompute
        assert profiled.by_operator == counted.by_operator
        assert profiled.by_dtype == counted.by_dtype
    assert profiled.by_module == {"": profiled.model_flops}
    assert not profiled.uncounted
    assert profiled.method == "torch.profiler"


def _mixed_products() -> None:
    a, b = torch.ones(5, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    total = torch.mv(a, b).sum() + torch.dot(b, b) + torch.einsum("bij,kj->bik", X, a).sum()
    total = total + torch.addbmm(torch.zeros(5, 5), X, X.transpose(1, 2)).sum() + torch.cdist(X, X).sum()
    total = total + F.bilinear(a, a, torch.ones(3, 8, 8, requires_grad=True)).sum()
    (total + torch.linalg.multi_dot([a, a.T, a]).sum()).backward()


def _convolutions() -> None:
    image = torch.ones(2, 4, 9, 9)
    stack = nn.Sequential(
        nn.Conv2d(4, 8, 3, groups=2, stride=2),
        nn.ConvTranspose2d(8, 6, 3, stride=2, output_padding=1, groups=2),
        nn.Conv2d(6, 6, 3, dilation=2, padding=1, groups=6),
    )
    (stack(image).sum() + nn.Conv1d(4, 4, 4, padding="same")(image[:, :, 0]).sum()).backward()


def _out_variants() -> None:
    out = torch.empty(5, 5)
    torch.mm(X[0], X[0].T, out=out)
    torch.addmm(out, X[0], X[0].T, out=out)
    out.addmm_(X[0], X[0].T)
    torch.matmul(X[0], X[0].T, out=out)


def _autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (linear()(X).sum() + torch.mm(X[0], linear().weight).sum()).backward()


def _per_sample_gradients() -> None:
    weight = torch.ones(8, 4)
    torch.func.vmap(torch.func.grad(lambda w, x: (x @ w).pow(2).sum()), (None, 0))(weight, X)


def _twice_differentiated() -> None:
    w = torch.ones(8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad((X @ w @ w).pow(2).sum(), w, create_graph=True)
    gradient.pow(2).sum().backward()


def _complex() -> None:
    a = torch.ones(4, 4, dtype=torch.complex64, requires_grad=True)
    (a @ a).abs().sum().backward()


def _grouped_queries() -> None:
    q, k = torch.ones(2, 4, 6, 8, requires_grad=True), torch.ones(2, 2, 6, 8, requires_grad=True)
    F.scaled_dot_product_attention(q, k, k, enable_gqa=True).sum().backward()


def _jagged() -> None:
    ragged = torch.nested.nested_tensor([X[0], X[1][:3]], layout=torch.jagged)
    linear()(ragged).values().sum().backward()


def _whole_training_step() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear())
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "step",
    [
        _mixed_products,
        _convolutions,
        _out_variants,
        _autocast,
        _per_sample_gradients,
        _twice_differentiated,
        _complex,
        _grouped_queries,
        _jagged,
        _whole_training_step,
        lambda: nn.GRU(8, 6)(X)[0].sum().backward(),
        lambda: nn.LSTM(8, 6, num_layers=2)(X.clone().requires_grad_())[0].sum().backward(),
        lambda: nn.MultiheadAttention(8, 2, batch_first=True)(X, X, X)[0].sum().backward(),
        lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
    ],
)
def test_step_is_split_as_the_counter_splits_it(step: Callable[[], Any]) -> None:
    profiled, counted = profile_step(step), count_step(step)
    assert counted.hardware_flops > 0
    assert parts(profiled) == parts(counted)
    assert profiled.by_dtype == counted.by_dtype
    assert not profiled.uncounted


def test_a_linear_layer_by_hand() -> None:
    count = profile_step(lambda: linear(8, 4)(X).sum().backward())
    assert parts(count) == (2 * 15 * 8 * 4, 2 * 15 * 8 * 4, 0)  # the input needs no gradient
    assert count.by_operator == {"aten.addmm": 960, "aten.mm": 960}
    assert count.by_dtype == {"fp32": 1920}
    assert count.notes == ()


def test_attention_executes_a_fifth_product_in_backward() -> None:
    q = torch.ones(2, 3, 5, 8, requires_grad=True)
    count = profile_step(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
    product = 2 * (2 * 3) * 5 * 5 * 8
    assert parts(count) == (2 * product, 4 * product, product)
    assert count.notes == ("all gradients that a fused attention kernel computes are counted as needed",)


def test_a_causal_kernel_counts_the_pairs_it_allows_if_asked() -> None:
    q = torch.ones(2, 3, 5, 8, requires_grad=True)

    def step() -> None:
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    product = 2 * (2 * 3) * 15 * 8  # 15 of 25 pairs
    assert parts(profile_step(step, convention=Convention(attention="causal"))) == (
        2 * product,
        4 * product,
        product,
    )


def test_a_mask_is_not_read_and_that_is_said() -> None:
    q, mask = torch.ones(1, 1, 4, 8), torch.ones(4, 4).tril().bool()

    def step() -> None:
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    full = profile_step(step)
    causal = profile_step(step, convention=Convention(attention="causal"))
    assert full.forward == causal.forward == 2 * 2 * 16 * 8
    assert any("packed into one row" in note for note in full.notes)
    assert any("could not be read" in note for note in causal.notes)


def test_attention_written_out_is_counted_in_full_and_that_is_said() -> None:
    q = torch.ones(2, 5, 8)
    causal = Convention(attention="causal")
    count = profile_step(lambda: (q @ q.mT).softmax(-1) @ q, convention=causal)
    assert count.forward == 2 * 2 * (2 * 5 * 5 * 8)
    assert any("plain operators" in note for note in count.notes)


@pytest.mark.parametrize(
    ("reentrant", "early_stop", "again"),
    [(False, True, 1), (False, False, 2), (True, True, 2)],
    ids=["stops at the last product", "runs all again", "reentrant"],
)
def test_what_a_checkpoint_runs_again_is_recomputation(reentrant: bool, early_stop: bool, again: int) -> None:
    a, b = linear(bias=False), linear(bias=False)
    x = X.clone().requires_grad_()

    def step() -> None:
        with set_checkpoint_early_stop(early_stop):
            checkpoint(lambda x: b(a(x)), x, use_reentrant=reentrant).sum().backward()

    product = 2 * 15 * 8 * 8
    assert parts(profile_step(step)) == (2 * product, 4 * product, again * product)


def test_checkpoints_inside_a_checkpoint() -> None:
    layer = linear(bias=False)

    def inner(x: Tensor) -> Tensor:
        return checkpoint(layer, torch.tanh(layer(x)), use_reentrant=False)  # type: ignore[no-any-return]

    def step() -> None:
        outer = checkpoint(lambda x: layer(torch.tanh(inner(x))), X, use_reentrant=False)
        outer.sum().backward()

    product = 2 * 15 * 8 * 8
    count = profile_step(step)
    assert (count.forward, count.backward) == (3 * product, 5 * product)
    assert count.hardware_flops == count_step(step).hardware_flops


def test_gradients_a_recurrent_kernel_computes_in_vain_are_executed() -> None:
    cell = nn.LSTM(8, 6)
    count = profile_step(lambda: cell(X)[0].sum().backward())
    forward = 2 * 15 * (4 * 6) * (8 + 6)
    assert (count.forward, count.hardware_flops) == (forward, 3 * forward)
    assert any("recurrent" in note for note in count.notes)


def test_steps_inside_a_label_are_counted() -> None:
    def step() -> None:
        with record_function("train step"):
            torch.mm(X[0], X[0].T)

    assert profile_step(step).forward == 2 * 5 * 8 * 5


def test_work_on_the_meta_device_is_not_executed() -> None:
    layer = nn.Linear(8, 8, device="meta")
    assert profile_step(lambda: layer(X.to("meta")).sum().backward()).hardware_flops == 0


def test_a_cold_compile_is_said_and_not_counted() -> None:
    layer = linear(8, 4)
    compiled = torch.compile(layer, backend="aot_eager")

    def step() -> None:
        compiled(X).sum().backward()

    cold, warm = profile_step(step), profile_step(step)
    assert parts(cold) == parts(warm) == (960, 960, 0)
    assert any("operators that the compiler ran are not counted" in note for note in cold.notes)
    assert not any("operators that the compiler ran are not counted" in note for note in warm.notes)
    assert any("inside compiled code" in note for note in warm.notes)


@pytest.fixture(scope="module")
def library() -> Any:
    """Operators from outside torch: one that hides its product, one that shows it, one without any."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.from_numpy(a.numpy() @ b.numpy())

    made = torch.library.Library("truemfu_profiler", "DEF")
    made.define("hidden(Tensor a, Tensor b, float scale=1.0) -> Tensor")
    made.impl("hidden", lambda a, b, scale=1.0: product(a, b) * scale, "CPU")
    made.define("shown(Tensor a, Tensor b) -> Tensor")
    made.impl("shown", lambda a, b: a @ b, "CPU")
    made.define("rows(Tensor a, Tensor b) -> Tensor")
    made.impl("rows", lambda a, b: a + b, "CPU")
    made.impl("rows", lambda a, b: torch.empty_like(a), "Meta")
    yield torch.ops.truemfu_profiler
    made._destroy()


def test_an_operator_nobody_knows_is_named(library: Any) -> None:
    count = profile_step(lambda: library.hidden(X[0], X[0].T.contiguous()))
    assert count.uncounted == {"truemfu_profiler::hidden": 1}
    assert count.hardware_flops == 0


def test_an_operator_nobody_knows_counts_by_what_it_calls(library: Any) -> None:
    count = profile_step(lambda: library.shown(X[0], X[0].T.contiguous()))
    assert (count.forward, dict(count.uncounted)) == (2 * 5 * 8 * 5, {})


def test_an_operator_of_equal_shapes_is_not_suspected(library: Any) -> None:
    assert not profile_step(lambda: library.rows(X[0], X[1])).uncounted


def test_a_registered_formula_is_asked_as_the_counter_asks_it(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATOR_FORMULAS, "truemfu_profiler::hidden", None)

    @register_formula("truemfu_profiler::hidden")
    def hidden(a: Any, b: Any, *, out: Any) -> int:
        return int(2 * a.numel() * b.shape[1])

    def step() -> None:
        library.hidden(X[0], X[0].T.contiguous())

    assert profile_step(step).forward == count_step(step).forward == 2 * 5 * 8 * 5


def test_a_formula_that_fails_leaves_its_operator_uncounted(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, out: Any) -> int:
        return int(out.shape[0])  # there is no result: the operator does not run on the meta device

    monkeypatch.setitem(OPERATOR_FORMULAS, "truemfu_profiler::hidden", broken)
    count = profile_step(lambda: library.hidden(X[0], X[0].T.contiguous()))
    assert count.uncounted == {"truemfu_profiler::hidden": 1}
    assert any("truemfu_profiler::hidden is not counted" in note for note in count.notes)


class HiddenProduct(torch.autograd.Function):
    """A function that runs a kernel of its own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return torch.from_numpy(a.detach().numpy() @ b.detach().numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None


def test_a_function_with_a_kernel_of_its_own_is_named() -> None:
    count = profile_step(lambda: HiddenProduct.apply(X[0], X[0].T.clone().requires_grad_()))
    assert count.uncounted == {"HiddenProduct": 1}


@pytest.mark.parametrize("name", ["triton_tem_fused_mm_0", "cudaGraphLaunch"])
def test_kernels_that_compiled_code_launches_by_itself_are_named(name: str) -> None:
    def step() -> None:
        torch.mm(X[0], X[0].T)
        with record_function(name):  # as the compiled code's own event is recorded on a GPU
            pass

    count = profile_step(step)
    assert (count.forward, count.uncounted) == (400, {name: 1})


def test_an_encoder_fused_into_one_operator_is_named() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

    def step() -> None:
        with torch.no_grad():
            layer(X)

    assert profile_step(step).uncounted == {"aten::_transformer_encoder_layer_fwd": 1}


def test_packed_attention_counts_for_one_document_and_is_named_for_several() -> None:
    made = torch.library.Library("flash_attn", "DEF")
    made.define("_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q) -> Tensor")
    made.impl("_flash_attn_varlen_forward", lambda q, k, v, c: q.clone(), "CPU")
    q = torch.ones(6, 2, 8)
    try:
        kernel = torch.ops.flash_attn._flash_attn_varlen_forward
        one = profile_step(lambda: kernel(q, q, q, torch.tensor([0, 6])))
        two = profile_step(lambda: kernel(q, q, q, torch.tensor([0, 2, 6])))
    finally:
        made._destroy()
    assert (one.forward, dict(one.uncounted)) == (2 * 2 * 36 * (8 + 8), {})
    assert (two.forward, two.uncounted) == (0, {"flash_attn::_flash_attn_varlen_forward": 1})
    assert any("lengths are not recorded" in note for note in two.notes)


def _step(layer: nn.Module) -> None:
    layer(X).sum().backward()


def test_the_two_halves_around_a_step_of_the_caller() -> None:
    layer, profiler = linear(8, 4), StepProfiler()
    profiler.start()
    _step(layer)
    recorded = profiler.stop()
    _step(layer)  # not recorded
    assert parts(recorded.count()) == (960, 960, 0)
    assert 0 < recorded.cost_s < 60


def test_a_recording_is_read_on_another_thread_and_dropped() -> None:
    profiler = StepProfiler()
    profiler.start()
    _step(linear(8, 4))
    recorded = profiler.stop()
    recording = recorded._recording
    counts: list[Any] = []
    reader = threading.Thread(target=lambda: counts.append(recorded.count()))
    reader.start()
    reader.join()
    assert sys.getrefcount(recording) == 2  # ours and the call's: nobody else holds it
    assert recorded.count() is counts[0]
    assert parts(counts[0]) == (960, 960, 0)


def test_one_profiler_measures_many_steps() -> None:
    layer, profiler = linear(8, 4), StepProfiler()
    for _ in range(3):
        profiler.start()
        _step(layer)
        assert profiler.stop().count().model_flops == 1920


def test_a_step_that_fails_leaves_no_profiler_running() -> None:
    def step() -> None:
        _step(linear())
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        profile_step(step)
    assert not torch._C._autograd._profiler_enabled()
    assert not torch_profiler._is_profiler_enabled


@pytest.mark.skipif(
    TORCH < (2, 12),
    reason="torch before 2.12 cannot profile any more in a process in which a start failed",
)
def test_a_start_that_fails_leaves_no_profiler_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("no tracing today")

    monkeypatch.setattr(torch_profiler, "_enable_profiler", refuse)
    with pytest.raises(UsageError, match=r"torch\.profiler cannot record here: no tracing today"):
        StepProfiler().start()
    assert not torch_profiler._is_profiler_enabled


def test_a_profiler_of_the_user_is_left_alone() -> None:
    with profile(activities=CPU) as theirs:
        with pytest.raises(UsageError, match=r"another torch\.profiler is set up or recording"):
            profile_step(_step, linear())
        _step(linear())
    assert sum(event.count for event in theirs.key_averages() if event.key == "aten::addmm") == 1


def test_a_profiler_on_another_thread_is_left_alone() -> None:
    started, done = threading.Event(), threading.Event()

    def other() -> None:
        with profile(activities=CPU):
            started.set()
            done.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(60)
    try:
        with pytest.raises(UsageError, match=r"another torch\.profiler"):
            profile_step(_step, linear())
    finally:
        done.set()
        thread.join()


def test_a_scheduled_profiler_is_left_alone_from_its_first_step() -> None:
    seen: list[int] = []

    def ready(theirs: Any) -> None:
        seen.append(sum(event.count for event in theirs.key_averages() if event.key == "aten::addmm"))

    plan = schedule(wait=1, warmup=1, active=2, repeat=1)
    with profile(activities=CPU, schedule=plan, on_trace_ready=ready) as theirs:
        for _ in range(5):
            with pytest.raises(UsageError, match=r"another torch\.profiler"):
                profile_step(_step, linear())
            _step(linear())
            theirs.step()
    assert seen == [2]
    assert profile_step(_step, linear(8, 4)).model_flops == 1920


def test_a_recording_that_another_profiler_took_over_is_no_zero() -> None:
    profiler = StepProfiler()
    profiler.start()
    with profile(activities=CPU) as theirs:
        _step(linear())
    assert any(event.key == "aten::addmm" for event in theirs.key_averages())
    with pytest.raises(UsageError, match=r"no operator was recorded|has stopped the recording"):
        profiler.stop().count()


def test_halves_in_the_wrong_order() -> None:
    profiler = StepProfiler()
    with pytest.raises(UsageError, match="not recording: call start"):
        profiler.stop()
    profiler.start()
    try:
        with pytest.raises(UsageError, match="already recording: call stop"):
            profiler.start()
    finally:
        profiler.stop()


def test_a_recording_ends_on_the_thread_it_began_on() -> None:
    profiler = StepProfiler()
    profiler.start()
    errors: list[Exception] = []

    def stop() -> None:
        try:
            profiler.stop()
        except UsageError as error:
            errors.append(error)

    thread = threading.Thread(target=stop)
    thread.start()
    thread.join()
    _step(linear(8, 4))
    assert profiler.stop().count().model_flops == 1920
    assert "stopped on the thread" in str(errors[0])
