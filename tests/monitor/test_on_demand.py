"""MFU when asked for: every mode, what it leaves untouched, and what it does where there is no number."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from truemfu.errors import TruemfuWarning, UsageError
from truemfu.flops.count.count import count_flops
from truemfu.monitor import on_demand
from truemfu.monitor.on_demand import calculate_mfu_with_profiler, calculate_precise_mfu
from truemfu.monitor.step_flops.source import dominant_dtype

MODES = ("smart", "profiler", "estimate")
PEAK_TFLOPS = 2
SAMPLES, LENGTH, STEP_S = 3, 7, 0.25
VOCAB, WIDTH = 11, 8
LAYER = 2 * (SAMPLES * LENGTH) * WIDTH * WIDTH
HEAD = 2 * (SAMPLES * LENGTH) * WIDTH * VOCAB
STEP_FLOPS = 3 * LAYER + 3 * HEAD
"""Forward, and twice that backward: the embedding below the first layer is trained."""


class Model(nn.Module):
    """Token ids in, a loss out; draws dropout, keeps running statistics, may checkpoint its layer."""

    def __init__(self, *, reentrant: bool | None = None) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.reentrant = reentrant

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x: Any = self.embedding(input_ids)
        if self.reentrant is None:
            x = self.layer(x)
        else:
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        x = self.norm(self.dropout(x).flatten(0, 1)).unflatten(0, input_ids.shape)
        logits = self.head(x)
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, logits=logits)


@pytest.fixture(autouse=True)
def peak(no_peak: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", str(PEAK_TFLOPS))


def by_hand(flops: float) -> float:
    return flops / STEP_S / (PEAK_TFLOPS * 1e12)


def mfu(model: Any, mode: str = "smart", **given: Any) -> float | None:
    asked = {"batch_size": SAMPLES, "seq_length": LENGTH, "step_time": STEP_S, **given}
    return calculate_precise_mfu(model, measurement_mode=mode, **asked)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_number_worked_out_by_hand(mode: str) -> None:
    assert mfu(Model(), mode) == pytest.approx(by_hand(STEP_FLOPS), rel=1e-12)


def test_with_profiler_is_the_profiler_mode() -> None:
    assert calculate_mfu_with_profiler(Model(), SAMPLES, LENGTH, STEP_S) == pytest.approx(by_hand(STEP_FLOPS))


def test_hybrid_without_counters_is_the_profiler_and_says_so() -> None:
    with pytest.warns(TruemfuWarning, match="no hardware counters .*on cpu.*: torch.profiler is used"):
        assert mfu(Model(), "hybrid") == pytest.approx(by_hand(STEP_FLOPS))
    assert mfu(Model(), "hybrid") == pytest.approx(by_hand(STEP_FLOPS))  # and says it once


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_does_not_raise_mfu(mode: str, reentrant: bool) -> None:
    assert mfu(Model(reentrant=reentrant), mode) == pytest.approx(by_hand(STEP_FLOPS))


@pytest.mark.parametrize("mode", MODES)
def test_frozen_weights_lower_it(mode: str) -> None:
    model = Model()
    model.embedding.requires_grad_(False)
    model.layer.requires_grad_(False)
    assert mfu(model, mode) == pytest.approx(by_hand(LAYER + 3 * HEAD))  # the norm between them is trained


@pytest.mark.parametrize("mode", MODES)
def test_a_public_language_model(mode: str) -> None:
    pytest.importorskip("transformers", minversion="5.22")
    from benchmarks.cases import case

    c = case("llama-sdpa")
    model = c.build()
    truth = c.truth(model, c.batch(samples=SAMPLES, length=24))
    assert mfu(model, mode, seq_length=24) == pytest.approx(by_hand(truth.model_flops))


def test_a_compiled_model_is_counted_and_stays_as_it_is() -> None:
    model = Model()
    compiled = torch.compile(model, backend="eager")
    torch._dynamo.utils.counters.clear()
    for mode in MODES:
        assert mfu(compiled, mode) == pytest.approx(by_hand(STEP_FLOPS))
    assert not torch._dynamo.utils.counters["frames"]


def test_actual_flops_are_taken_as_they_are() -> None:
    assert mfu(Model(), actual_flops=1e11) == pytest.approx(by_hand(1e11))
    assert mfu(Model(), actual_flops=1e11, batch_size=0, seq_length="long") == pytest.approx(by_hand(1e11))


def test_a_value_above_one_is_shown_and_explained() -> None:
    with pytest.warns(TruemfuWarning, match="utilisation above 1"):
        assert mfu(Model(), actual_flops=1e12) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("dtypes", "autocast", "expected"),
    [
        ((torch.float32, torch.bfloat16), None, torch.bfloat16),
        ((torch.float16, torch.float64), None, torch.float64),
        ((torch.float32, torch.float32), torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_of_actual_flops_is_the_one_most_of_the_model_runs_in(
    dtypes: Any, autocast: torch.dtype | None, expected: torch.dtype
) -> None:
    small, large = dtypes
    model = nn.Sequential(nn.Linear(2, 2, dtype=small), nn.Linear(4, 4, dtype=large))
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        assert dominant_dtype(model, torch.device("cpu")) is expected


def picture(model: nn.Module) -> dict[str, Any]:
    """All that training could notice."""
    seen: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "grad mode": torch.is_grad_enabled(),
        "stance": torch._dynamo.eval_frame._stance.stance,
    }
    for name, p in model.named_parameters():
        grad = None if p.grad is None else (id(p.grad), p.grad.tolist())
        seen[name] = (id(p), p._version, p.tolist(), grad, p.requires_grad)
    for name, b in model.named_buffers():
        seen[name] = (id(b), b._version, b.tolist())
    for name, module in model.named_modules():
        hooks = [len(v) for k, v in vars(module).items() if k.endswith("_hooks") and v is not None]
        seen[f"module {name}"] = (module.training, sorted(vars(module)), hooks)
    return seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_the_model_and_the_process_are_left_as_they_were(mode: str, reentrant: bool | None) -> None:
    model = Model(reentrant=reentrant)
    ids = torch.arange(6).reshape(2, 3)
    model(input_ids=ids, labels=ids).loss.backward()
    model.head.weight.grad = None  # one parameter without a gradient
    model.dropout.eval()
    before = picture(model)
    assert mfu(model, mode) is not None
    assert picture(model) == before


def test_a_measurement_runs_no_optimizer_that_hangs_on_gradients() -> None:
    model, calls = Model(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p))
        p.register_hook(lambda grad: calls.append(grad))
    assert mfu(model, "profiler") == pytest.approx(by_hand(STEP_FLOPS))
    assert calls == []


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off(surroundings: Any) -> None:
    model = Model()
    with surroundings():
        assert [mfu(model, mode) for mode in MODES] == [pytest.approx(by_hand(STEP_FLOPS))] * 3


def test_smart_counts_once_and_again_when_the_model_changed() -> None:
    model = Model()
    assert mfu(model) == pytest.approx(by_hand(STEP_FLOPS))
    first = on_demand._cached_forms[model]
    assert mfu(model, batch_size=2 * SAMPLES) == pytest.approx(by_hand(2 * STEP_FLOPS))
    assert on_demand._cached_forms[model] is first
    model.head.requires_grad_(False)
    assert mfu(model) == pytest.approx(by_hand(STEP_FLOPS - HEAD))
    second = on_demand._cached_forms[model]
    assert second is not first
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mfu(model) == pytest.approx(by_hand(STEP_FLOPS - HEAD))
    assert on_demand._cached_forms[model] is not second


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_was_measured_can_be_freed(mode: str) -> None:
    on_demand._cached_forms.clear()
    model = Model()
    mfu(model, mode)
    gone = weakref.ref(model)
    assert len(on_demand._cached_forms) == (1 if mode == "smart" else 0)
    del model
    gc.collect()
    assert gone() is None
    assert len(on_demand._cached_forms) == 0


class Bits(Model):
    """Has no closed form: one more product for each bit of the length."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embedding(input_ids)
        for _ in range(input_ids.shape[1].bit_count()):
            x = self.layer(x)
        return self.head(x)


def test_smart_without_a_closed_form_counts_each_length_and_the_model_can_be_freed() -> None:
    on_demand._cached_forms.clear()
    model = Bits()
    assert mfu(model, seq_length=7) == pytest.approx(by_hand(3 * 3 * LAYER + 3 * HEAD))
    assert mfu(model, seq_length=8) == pytest.approx(by_hand((3 * LAYER + 3 * HEAD) * 8 / 7))
    assert len(on_demand._cached_forms) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(on_demand._cached_forms) == 0


def test_an_unknown_mode_is_an_error_with_the_closest_name() -> None:
    with pytest.raises(UsageError, match=r"smart, profiler, estimate, hybrid; got 'profiling'.*'profiler'"):
        mfu(Model(), "profiling")


@pytest.mark.parametrize("step_time", [0, -0.1, float("nan"), float("inf"), "0.1", None, True])
def test_a_wrong_time_gives_no_number_and_one_warning(step_time: Any) -> None:
    with pytest.warns(TruemfuWarning, match="step_time must be a positive number of seconds; got"):
        assert mfu(Model(), step_time=step_time) is None
    assert mfu(Model(), step_time=step_time) is None


def test_a_thousand_wrong_times_make_one_warning() -> None:
    model = Model()
    with pytest.warns(TruemfuWarning, match="got a negative number") as said:
        for step in range(1, 1000):
            assert mfu(model, step_time=-step / 1000) is None
    assert len(said) == 1


@pytest.mark.parametrize("name", ["batch_size", "seq_length"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "4", float("nan"), None, True])
def test_a_wrong_size_gives_no_number_and_one_warning(name: str, value: Any) -> None:
    with pytest.warns(TruemfuWarning, match=f"{name} must be a positive integer; got"):
        assert mfu(Model(), **{name: value}) is None


@pytest.mark.parametrize("value", [0, -1e9, float("nan"), "many"])
def test_wrong_actual_flops_give_no_number_and_one_warning(value: Any) -> None:
    with pytest.warns(TruemfuWarning, match="actual_flops must be a positive number; got"):
        assert mfu(Model(), actual_flops=value) is None


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"batch_size": np.int64(SAMPLES), "seq_length": np.int32(LENGTH), "step_time": np.float32(STEP_S)}
    assert mfu(Model(), **given) == pytest.approx(by_hand(STEP_FLOPS))


def test_something_that_is_no_model_gives_no_number_and_one_warning() -> None:
    with pytest.warns(TruemfuWarning, match=r"model must be a torch\.nn\.Module; got str"):
        assert mfu("llama") is None


def test_a_cpu_has_no_peak_and_nothing_is_run_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS")
    model = Model()
    assert [mfu(model, mode) for mode in MODES] == [None] * 3
    assert mfu(model, actual_flops=1e11) is None
    assert model not in on_demand._cached_forms


def test_a_wrong_override_of_the_peak_is_said_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "fast")
    with pytest.warns(TruemfuWarning, match="must be a positive number of TFLOP/s"):
        assert mfu(Model()) is None


def test_a_model_no_batch_can_be_made_for_is_sent_to_actual_flops() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(TruemfuWarning, match=r"no batch can be generated for Sequential: pass actual_flops"):
        assert mfu(model) is None
    flops = count_flops(model, (torch.ones(2, 4),)).model_flops
    assert mfu(model, actual_flops=flops) == pytest.approx(by_hand(flops))


class Undifferentiable(Model):
    """Runs forward, and has no backward."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, labels).logits.detach()


def test_a_model_that_cannot_be_run_is_estimated_and_each_step_down_is_said() -> None:
    with pytest.warns(TruemfuWarning) as said:
        assert mfu(Undifferentiable(), "profiler") == pytest.approx(by_hand(STEP_FLOPS))
    texts = [str(w.message) for w in said]
    assert len(texts) == 2
    assert "mode 'profiler' cannot find the FLOPs of Undifferentiable" in texts[0]
    assert "so mode 'smart' is used" in texts[0]
    assert "mode 'smart' cannot find the FLOPs" in texts[1]
    assert "so mode 'estimate' is used" in texts[1]


def test_a_model_without_products_has_no_mfu() -> None:
    class Nothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(VOCAB, 1)

        def forward(self, input_ids: Tensor) -> Tensor:
            out: Tensor = self.table(input_ids)
            return out

    with pytest.warns(TruemfuWarning) as said:
        assert mfu(Nothing()) is None
    assert [str(w.message).rpartition(", ")[2] for w in said] == [
        "so mode 'estimate' is used",
        "so there is no MFU",
    ]


def test_a_profiler_of_the_user_is_left_alone_and_smart_takes_over() -> None:
    model = Model()
    with profile(activities=[ProfilerActivity.CPU]) as theirs:
        with pytest.warns(TruemfuWarning, match=r"another torch\.profiler .* so mode 'smart' is used"):
            assert mfu(model, "profiler") == pytest.approx(by_hand(STEP_FLOPS))
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert any(event.key == "aten::mm" for event in theirs.key_averages())


def test_a_model_without_values_is_counted_instead() -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.warns(TruemfuWarning, match=r"sharded tensors cannot run here\), so mode 'smart' is used"):
        assert mfu(model, "profiler") == pytest.approx(by_hand(STEP_FLOPS))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_in_a_job_of_several_ranks_nothing_is_run() -> None:
    with pytest.warns(TruemfuWarning, match="could wait for the others.*so mode 'smart' is used"):
        assert mfu(Model(), "profiler") == pytest.approx(by_hand(STEP_FLOPS))
