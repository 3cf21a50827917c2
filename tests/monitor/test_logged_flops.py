"""The FLOPs behind every logged row, for many kinds of models, batches and modes.

What is expected comes from the public cases' own truth, which shares no code with the counter, or from sizes
worked out by hand.
"""

from __future__ import annotations

import gc
import json
import os
import random as python_random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.versions import TORCH
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", minversion="5.22")

import transformers as hf
from benchmarks.cases import CASES, Case, case
from observed_notes import wait_until_learned

from truemfu import FlopCount, TrainingMonitor, calculate_precise_mfu, count_flops, profile_model_flops
from truemfu.errors import TruemfuWarning
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.step_flops.source import FlopsSource, StepFlops

SLOW = ("mamba", "llama-compiled", "gpt2-compiled", "resnet-compiled")
"""A sequential scan and compilations take up to half a minute each; their counts are held by tests/flops."""
on_newer_torch = pytest.mark.skipif(
    TORCH < (2, 11),
    reason="on a CPU older versions of torch run other kernels than the truth has, and profile otherwise",
)
NEWER = ("mixtral", "qwen3-moe-grouped_mm", "deepseek-v3", "qwen2.5-vl")
PLAIN = [
    pytest.param(c.name, marks=on_newer_torch if c.name in NEWER else ()) for c in CASES if c.name not in SLOW
]
IMAGES: dict[str, dict[str, Any]] = {
    "qwen2.5-vl": {"images": [(1, 4, 10), (2, 6, 6), (1, 12, 4)]},
    "llava": {"images": 3},
    "resnet": {"size": 57},
}
WIDTH, CLASSES = 16, 8


class Run:
    """A finished training run, as its log tells it."""

    def __init__(self, folder: Path) -> None:
        self.rows: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text("utf-8"))
        self.summary = json.loads((folder / "training_run.json").read_text("utf-8"))["summary"]

    @property
    def model_flops(self) -> list[int | None]:
        return [self._flops(row, row.get("perf/tflops_per_gpu")) for row in self.rows]

    @property
    def executed(self) -> list[int | None]:
        return [self._flops(row, row.get("perf/hfu")) for row in self.rows]  # the peak is 1 TFLOP/s

    @property
    def methods(self) -> set[str]:
        return set(self.summary["methods"])

    @staticmethod
    def _flops(row: Mapping[str, Any], tflops_per_s: float | None) -> int | None:
        return None if tflops_per_s is None else round(tflops_per_s * row["perf/step_time"] * 1e12)


def settings(**monitoring: Any) -> dict[str, Any]:
    return {"monitoring": {"peak_tflops": 1, **monitoring}}


def by_name(model: nn.Module, batch: Any) -> Any:
    return model(**batch)


def train(
    model: nn.Module,
    folder: Path,
    steps: Iterable[Any],
    call: Callable[[nn.Module, Any], Any] = by_name,
    before: Callable[[int, TrainingMonitor], None] = lambda step, monitor: None,
    after: Callable[[int, TrainingMonitor], None] = lambda step, monitor: None,
    **monitoring: Any,
) -> Run:
    """Train on steps, each a batch or a list of micro-batches; `call` runs the model and gives its loss."""
    monitor = TrainingMonitor(folder, settings(**monitoring), model=model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step, batches in enumerate(steps, start=1):
        before(step, monitor)
        for batch in batches if isinstance(batches, list) else [batches]:
            output = call(model, batch)
            loss = output if isinstance(output, Tensor) else output.loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log_step(step, 0, loss, 1.0, 1e-4)
        after(step, monitor)
    monitor.save_logs()  # closing gives rows five seconds, which a busy machine may exceed
    monitor.close()
    return Run(folder)


def save(step: int, monitor: TrainingMonitor) -> None:
    monitor.save_logs()  # the row side knows how many steps were observed when the next one begins


def learned(step: int, monitor: TrainingMonitor) -> None:
    wait_until_learned(monitor)


ALL: Mapping[str, Any] = {"after": save, "flops_profile_freq": 1}
"""Every one of a few steps is observed."""


def assert_as_in_truth(
    run: Run, c: Case, model: nn.Module, batches: list[Any], attention: str = "full"
) -> None:
    truths = [c.truth(model, batch, attention=attention) for batch in batches]
    assert run.model_flops == [t.model_flops for t in truths]
    assert run.executed == [t.hardware_flops for t in truths]
    assert run.methods == {OBSERVED}
    assert run.summary["warnings"] == run.summary["lost"] == []


class Mlp(nn.Module):
    """Two linear layers; the first needs no gradient for its input unless that asks for one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def mlp_flops(samples: int, *, input_gradient: bool = False) -> int:
    return 2 * samples * WIDTH * (WIDTH * (3 if input_gradient else 2) + CLASSES * 3)


def rows_of(samples: int, **options: Any) -> Tensor:
    return torch.randn(samples, WIDTH, **options)


@pytest.mark.parametrize("name", PLAIN)
def test_every_case_logs_its_truth_for_batches_of_several_shapes(name: str, tmp_path: Path) -> None:
    c = case(name)
    model = c.build()
    batches = [c.batch(samples=2, length=24), c.batch(samples=3, length=41, **IMAGES.get(name, {}))]
    assert_as_in_truth(train(model, tmp_path, batches), c, model, batches)


@pytest.mark.parametrize("name", ["gemma3"])
def test_allowed_pairs_are_logged_where_they_are_asked_for(name: str, tmp_path: Path) -> None:
    c = case(name)
    model = c.build()
    batches = [c.batch(samples=2, length=24), c.batch(samples=3, length=41)]
    run = train(model, tmp_path, batches, attention="causal")
    assert_as_in_truth(run, c, model, batches, attention="causal")


def test_packed_and_plain_micro_batches_mix_in_one_step(tmp_path: Path) -> None:
    c = case("gpt2")
    model = c.build()
    plain = c.batch(samples=2, length=24)
    packed = [c.batch(samples=2, documents=d) for d in ([10, 9, 5], [12, 12], [23, 1])]
    run = train(model, tmp_path, [[plain, packed[0]], [packed[1], packed[2], plain], packed[2]])
    flops = {id(b): c.truth(model, b).model_flops for b in (plain, *packed)}
    a, b, d = (flops[id(p)] for p in packed)
    assert run.model_flops == [flops[id(plain)] + a, b + d + flops[id(plain)], d]
    assert run.methods == {OBSERVED}


def test_a_batch_is_the_same_by_position_by_name_and_mixed(tmp_path: Path) -> None:
    c = case("llama-sdpa")
    model = c.build()
    batch = c.batch(samples=2, length=24)
    ids, labels = batch["input_ids"], batch["labels"]
    calls = [
        lambda: model(ids, labels=labels),
        lambda: model(ids, None, None, None, None, labels),
        lambda: model(**batch),
    ]
    run = train(model, tmp_path, [0, 1, 2], lambda _, index: calls[index]())
    assert_as_in_truth(run, c, model, [batch] * 3)


def test_padding_on_some_batches_only(tmp_path: Path) -> None:
    c = case("llama-padded")
    model = c.build()
    padded = c.batch(samples=2, length=24)
    plain = {key: value for key, value in padded.items() if key != "attention_mask"}
    flops = c.truth(model, padded).model_flops
    run = train(model, tmp_path, [padded, plain, [padded, plain]], **ALL)
    assert run.model_flops == [flops, flops, 2 * flops]
    assert [row.get("perf/padding_efficiency") for row in run.rows] == [0.5, None, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_decides_the_dtype_of_the_count(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    counted = FlopsSource._counted

    def noted(self: FlopsSource, count: FlopCount, *others: Any) -> StepFlops:
        seen.append(dict(count.by_dtype))
        return counted(self, count, *others)

    monkeypatch.setattr(FlopsSource, "_counted", noted)

    def call(model: nn.Module, enabled: bool) -> Any:
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            return model(rows_of(5)).sum()

    train(Mlp(), tmp_path, [True, False], call)
    half = "bf16" if dtype is torch.bfloat16 else "fp16"
    assert seen == [{half: mlp_flops(5)}, {"fp32": mlp_flops(5)}]


def test_adapters_with_reentrant_checkpointing_and_inputs_that_require_gradients(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    c = case("llama-sdpa")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(c.build(), adapters)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    batches = [c.batch(samples=2, length=24), c.batch(samples=3, length=41)]
    run = train(model, tmp_path, batches)
    counts = [count_flops(model, batch) for batch in batches]
    assert run.model_flops == [count.model_flops for count in counts]
    assert run.executed == [count.hardware_flops for count in counts]
    assert counts[0].recompute > counts[0].forward // 2


def test_what_changes_in_mid_run_is_counted_from_the_next_check(tmp_path: Path) -> None:
    c = case("llama-sdpa")
    model: Any = c.build()
    batch = c.batch(samples=2, length=24)
    expected = []

    def freeze_and_resize() -> None:
        model.model.embed_tokens.requires_grad_(False)
        model.lm_head = nn.Linear(model.config.hidden_size, 200, bias=False)
        model.config.vocab_size = model.vocab_size = 200

    changes = {
        2: lambda: model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        ),
        3: model.gradient_checkpointing_disable,
        4: freeze_and_resize,
        5: lambda: model.set_attn_implementation("eager"),
    }

    def before(step: int, monitor: TrainingMonitor) -> None:
        changes.get(step, lambda: None)()
        count = count_flops(model, batch)
        expected.append((count.model_flops, count.hardware_flops))

    run = train(model, tmp_path, [batch] * 5, before=before, **ALL)
    assert list(zip(run.model_flops, run.executed, strict=True)) == expected
    assert len(set(expected)) == 4


def test_a_loss_outside_the_model_and_a_recurrent_model(tmp_path: Path) -> None:
    run = train(
        Mlp(), tmp_path / "mlp", [5, 6, 5], lambda model, samples: model(rows_of(samples)).pow(2).mean()
    )
    assert run.model_flops == [mlp_flops(5), mlp_flops(6), mlp_flops(5)]
    lstm = nn.LSTM(8, WIDTH, num_layers=2, batch_first=True)
    shapes = [(2, 5), (3, 9)]
    run = train(lstm, tmp_path / "lstm", shapes, lambda model, shape: model(torch.randn(*shape, 8))[0].sum())
    # Forward and weights: both layers, all tokens. Inputs: the second layer's. States: all but the first.
    assert run.model_flops == [
        2 * samples * 4 * WIDTH * (2 * length * (8 + 3 * WIDTH) + length * WIDTH + 2 * (length - 1) * WIDTH)
        for samples, length in shapes
    ]


class WithCompiledPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.compile(Mlp(), backend="eager")
        self.head = nn.Linear(CLASSES, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).sum()  # type: ignore[no-any-return]


@torch.compile(backend="eager")
def compiled_product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).relu()


class CallsCompiledFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return compiled_product(x, self.weight).sum()


def test_compiled_code_inside_a_model(tmp_path: Path) -> None:
    run = train(WithCompiledPart(), tmp_path / "part", [5, 6], lambda model, n: model(rows_of(n)))
    assert run.model_flops == [mlp_flops(n) + 6 * n * CLASSES * 4 for n in (5, 6)]
    run = train(CallsCompiledFunction(), tmp_path / "function", [5, 6], lambda model, n: model(rows_of(n)))
    assert run.model_flops == [4 * n * WIDTH * 4 for n in (5, 6)]
    assert run.methods == {OBSERVED}


@on_newer_torch
def test_profiled_steps_are_warm_up_and_their_recomputation_is_right(tmp_path: Path) -> None:
    c = case("llama-checkpointed")
    model = c.build()
    short, long = c.batch(samples=2, length=24), c.batch(samples=3, length=41)
    batches = [short, short, long, short, long, short, long]
    run = train(
        model, tmp_path, batches, before=learned, mfu_calculation_mode="profiler", flops_profile_freq=0
    )
    assert_as_in_truth(run, c, model, batches)
    marked = {row["global_step"] for row in run.rows if "perf/warmup" in row}
    observed = {row["global_step"] for row in run.rows if "perf/observed" in row}
    assert len(marked - observed - {1, 2, 3}) == 1  # the first step that is not observed is profiled
    assert run.summary["monitor_cost"]["profiling_s"] > 0


@pytest.mark.parametrize("name", [pytest.param("mixtral", marks=on_newer_torch), "resnet"])
def test_the_profiler_finds_executed_what_the_truth_says(name: str, tmp_path: Path) -> None:
    c = case(name)
    model = c.build()
    batch = c.batch(samples=2, length=24)
    run = train(model, tmp_path, [batch] * 5, before=learned, mfu_calculation_mode="profiler")
    assert_as_in_truth(run, c, model, [batch] * 5)
    assert run.summary["monitor_cost"]["profiling_s"] > 0


def test_a_profiler_of_the_user_around_the_run_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.warns(TruemfuWarning, match="HFU is based on the count: another torch.profiler"),
        profile(activities=[ProfilerActivity.CPU]) as users,
    ):
        run = train(
            Mlp(),
            tmp_path,
            [5, 6],
            lambda model, n: model(rows_of(n)).sum(),
            mfu_calculation_mode="profiler",
        )
    assert run.executed == [None, None]
    assert all("a profiler was active" in row["perf/mfu_unknown"] for row in run.rows)
    assert next(event.count for event in users.key_averages() if event.key == "aten::addmm") == 4


@pytest.mark.parametrize(
    ("smart", "methods"),
    [
        ({"initial_profiling": False, "recalibration_frequency": 2}, {"estimate": 2, OBSERVED: 2}),
        ({"calibration_enabled": False}, {"estimate": 4}),
        ({}, {OBSERVED: 4}),
    ],
)
def test_the_switches_of_smart_decide_what_is_counted(
    smart: dict[str, Any], methods: dict[str, int], tmp_path: Path
) -> None:
    run = train(
        Mlp(),
        tmp_path,
        [5] * 4,
        lambda model, n: model(rows_of(n)).sum(),
        performance_monitoring={"smart_mode": smart},
    )
    assert run.model_flops == [mlp_flops(5)] * 4
    assert run.summary["methods"] == methods


@pytest.mark.parametrize("mode", ["smart", "profiler", "estimate"])
def test_mfu_on_demand_is_the_truth(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    c = case("llama-checkpointed")
    model = c.build()
    batch = c.batch(samples=2, length=24)
    flops = c.truth(model, batch).model_flops
    mfu = calculate_precise_mfu(model, 2, 24, 1.0, mode)
    assert mfu is not None
    assert round(mfu * 1e12) == flops
    assert profile_model_flops(model, batch) == flops
    assert calculate_precise_mfu(model, 2, 24, 2.0, mode, actual_flops=5e11) == 0.25


def trained(c: Case, folder: Path | None, mode: str) -> dict[str, Any]:
    """All that training leaves behind, with a monitor or without."""
    torch.manual_seed(0)
    python_random.seed(0)
    np.random.seed(0)
    model = c.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    batches = [c.batch(samples=2, length=24), c.batch(samples=3, length=41), c.batch(samples=2, length=24)]
    losses = []

    def call(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        losses.append((loss.detach().clone(), python_random.random(), np.random.rand()))
        return loss

    if folder is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        for batch in batches:
            call(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:

        def after(step: int, monitor: TrainingMonitor) -> None:
            monitor.save_logs()  # the count runs now, at the latest

        train(model, folder, batches, call, after=after, mfu_calculation_mode=mode, flops_profile_freq=2)
    return {
        "losses": losses,
        "state": dict(model.state_dict()),
        "torch": torch.get_rng_state(),
        "python": python_random.getstate(),
        "numpy": tuple(np.random.get_state())[1:3],
    }


@pytest.mark.filterwarnings("ignore:hybrid mode")
def test_training_is_bit_identical_in_every_mode(tmp_path: Path) -> None:
    c = case("gpt2")
    alone = trained(c, None, "")
    for mode in ("smart", "estimate", "profiler", "hybrid"):
        torch.testing.assert_close(trained(c, tmp_path / mode, mode), alone, rtol=0, atol=0)


def test_the_original_import_path_works_from_another_folder(tmp_path: Path) -> None:
    compat = Path(__file__).parents[2] / "compat"
    folders = os.pathsep.join([str(compat), os.environ.get("PYTHONPATH", "")])
    script = (
        "import torch\n"
        "from training.utils.monitor import calculate_mfu_with_profiler, profile_model_flops\n"
        "from training.utils.monitor import TrainingMonitor\n"
        "print(profile_model_flops(torch.nn.Linear(4, 4), (torch.ones(2, 4),)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": folders, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{2 * (2 * 2 * 4 * 4)}.0\n"


class KeepsItsDraw(nn.Module):
    """Drops layers at random, by a function that it was given."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.draw() < 0.5:
                x = layer(x)
        return x.sum() + 0 * sum(p.sum() for p in self.parameters())


def test_a_model_that_holds_a_shared_generator_trains_as_without_a_monitor(tmp_path: Path) -> None:
    python_random.seed(0)
    monitor = TrainingMonitor(tmp_path, settings(), model=(model := KeepsItsDraw(python_random.random)))
    model(rows_of(5)).backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    before = python_random.getstate()
    monitor.close()
    assert python_random.getstate() == before


class ImportsInForward(KeepsItsDraw):
    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def forward(self, x: Tensor) -> Tensor:
        from random import uniform

        for layer in self.layers:
            if uniform(0, 1) < 0.5:
                x = layer(x)
        return x.sum() + 0 * sum(p.sum() for p in self.parameters())


def test_a_model_that_imports_its_generator_in_forward_trains_as_without_a_monitor(tmp_path: Path) -> None:
    python_random.seed(0)
    monitor = TrainingMonitor(tmp_path, settings(), model=(model := ImportsInForward()))
    model(rows_of(5)).backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    before = python_random.getstate()
    monitor.close()
    assert python_random.getstate() == before


class DropsAll(KeepsItsDraw):
    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if np.random.uniform() < 0:
                x = layer(x)
        return x.sum() + 0 * sum(p.sum() for p in self.parameters())


def test_random_work_is_never_logged_as_zero(tmp_path: Path) -> None:
    run = train(DropsAll(), tmp_path, [5, 6, 7], lambda model, n: model(rows_of(n)))
    assert run.model_flops == [None] * 3
    reason = "no matrix products, convolutions or attention were seen in the step"
    assert [row["perf/mfu_unknown"] for row in run.rows] == [reason] * 3


def test_an_empty_batch_is_no_work(tmp_path: Path) -> None:
    run = train(Mlp(), tmp_path, [5, 0, 5], lambda model, n: model(rows_of(n)).sum())
    assert run.model_flops == [mlp_flops(5), None, mlp_flops(5)]
    assert run.rows[1]["perf/mfu_unknown"].startswith("no matrix products")
    assert not run.summary["warnings"]


def documents(*lengths: int) -> dict[str, Any]:
    """One packed row as transformers' flattening collator makes it."""
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = case("llama-sdpa").batch(samples=1, length=sum(lengths))
    return {**batch, "position_ids": positions, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends}


def test_cumulative_lengths_beside_positions_are_counted_by_document(tmp_path: Path) -> None:
    c = case("llama-sdpa")
    model = c.build()
    batches = [documents(10, 9, 5), documents(12, 12), documents(*[3] * 8)]
    assert_as_in_truth(train(model, tmp_path, batches), c, model, batches)


def test_samples_of_packed_rows_are_their_documents(tmp_path: Path) -> None:
    """A plain batch has its rows; positions of padding, 0 or 1 in each place, are no documents."""
    plain = case("llama-sdpa").batch(samples=3, length=24)
    restarting = {**case("llama-sdpa").batch(samples=2, length=6), "position_ids": torch.tensor(
        [[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
    )}  # fmt: skip
    padded = {**restarting, "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]])}
    whole = {**restarting, "position_ids": torch.arange(6).expand(2, 6)}
    masked = {**restarting, "position_ids": torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
              "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])}  # fmt: skip
    steps = [documents(10, 9, 5), [documents(12, 12), plain], restarting, padded, whole, masked]
    run = train(case("llama-sdpa").build(), tmp_path, steps)
    samples = [round(row["perf/samples_per_second"] * row["perf/step_time"]) for row in run.rows]
    assert samples == [3, 2 + 3, 3, 3, 2, 2]


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.body(batch["x"]).sum()  # type: ignore[no-any-return]


def call_with_dict(model: nn.Module, samples: int) -> Any:
    return model({"x": rows_of(samples)})


def test_a_batch_in_a_dict_is_counted_by_its_shapes(tmp_path: Path) -> None:
    run = train(TakesDict(), tmp_path, [4, 9, 3], call_with_dict, **ALL)
    assert run.model_flops == [mlp_flops(4), mlp_flops(9), mlp_flops(3)]


def test_tensors_in_a_dict_are_not_kept_alive(tmp_path: Path) -> None:
    model, x = TakesDict(), rows_of(4)
    kept = weakref.ref(x)
    monitor = TrainingMonitor(tmp_path, settings(), model=model)
    model({"x": x}).backward()
    monitor.log_step(1, 0, 1.0, 1.0, 1.0)
    monitor.save_logs()
    del x
    gc.collect()
    is_alive = kept() is not None
    monitor.close()
    assert not is_alive


def test_an_input_that_requires_a_gradient_costs_one(tmp_path: Path) -> None:
    run = train(Mlp(), tmp_path, [5, 6], lambda model, n: model(rows_of(n, requires_grad=True)).sum())
    assert run.model_flops == [mlp_flops(n, input_gradient=True) for n in (5, 6)]


def test_a_checkpoint_around_the_model_is_recomputation(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        output: Tensor = checkpoint(model, rows_of(samples), use_reentrant=False)
        return output.sum()

    run = train(Mlp(), tmp_path, [5, 6], call)
    assert run.model_flops == [mlp_flops(5), mlp_flops(6)]
    # The second layer's output is not needed, so it is not run again.
    assert run.executed == [mlp_flops(n) + 2 * n * WIDTH * WIDTH for n in (5, 6)]
    assert run.summary["warnings"] == []


def test_the_profiler_measures_what_a_checkpoint_around_the_model_runs_again(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        output: Tensor = checkpoint(model, rows_of(samples), use_reentrant=False)
        return output.sum()

    run = train(Mlp(), tmp_path, [5] * 5, call, learned, mfu_calculation_mode="profiler")
    again = 2 * 5 * WIDTH * WIDTH  # the second layer's output is not needed, so it is not run again
    assert run.executed == [mlp_flops(5) + again] * 5
    assert run.summary["monitor_cost"]["profiling_s"] > 0


def test_a_reentrant_checkpoint_is_not_profiled_from_inside_the_backward_pass(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        output: Tensor = checkpoint(model, rows_of(samples, requires_grad=True), use_reentrant=True)
        return output.sum()

    run = train(Mlp(), tmp_path, [5] * 6, call, learned, mfu_calculation_mode="profiler")
    forward = 2 * 5 * WIDTH * (WIDTH + CLASSES)
    assert run.model_flops == [mlp_flops(5, input_gradient=True)] * 6
    assert run.executed == [mlp_flops(5, input_gradient=True) + forward] * 6
    assert [row.get("perf/data_wait") for row in run.rows] == [None] * 6
    assert torch.autograd._profiler_enabled() is False


def test_what_was_seen_in_the_backward_pass_alone_is_not_left_out_in_silence(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        plain: Tensor = model(rows_of(5))
        again: Tensor = checkpoint(model, rows_of(samples, requires_grad=True), use_reentrant=True)
        return plain.sum() + again.sum()

    run = train(Mlp(), tmp_path, [50, 50], call)
    assert run.model_flops == [None, mlp_flops(5) + mlp_flops(50, input_gradient=True)]  # seen as a whole
    assert "seen only in the backward pass" in run.rows[0]["perf/mfu_unknown"]
    assert not any("perf/samples_per_second" in row for row in run.rows)


def test_an_input_that_needs_a_gradient_is_another_batch(tmp_path: Path) -> None:
    def call(model: nn.Module, needs_gradient: bool) -> Tensor:
        return model(rows_of(5, requires_grad=needs_gradient)).sum()  # type: ignore[no-any-return]

    run = train(Mlp(), tmp_path, [[False, True], False, True, [True, False]], call, **ALL)
    without, with_gradient = mlp_flops(5), mlp_flops(5, input_gradient=True)
    assert run.model_flops == [without + with_gradient, without, with_gradient, without + with_gradient]


class TakesAWholeBatch(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.inner(**batch).loss  # type: ignore[no-any-return]


def test_documents_and_padding_inside_a_whole_batch_are_seen(tmp_path: Path) -> None:
    c = case("llama-sdpa")
    model = c.build()
    whole = c.batch(samples=1, length=24)
    batches = []
    for first in (4, 12, 20):
        positions = torch.cat([torch.arange(first), torch.arange(24 - first)])[None]
        batches.append({**whole, "position_ids": positions})
    apart = train(model, tmp_path / "apart", batches)
    together = train(TakesAWholeBatch(model), tmp_path / "whole", batches, lambda m, batch: m(batch))
    assert together.model_flops == apart.model_flops
    assert len(set(apart.model_flops)) == 2

    padded = [{**whole, "attention_mask": (torch.arange(24) < n)[None].float()} for n in (6, 24)]
    run = train(TakesAWholeBatch(model), tmp_path / "padded", padded, lambda m, batch: m(batch))
    assert [row["perf/padding_efficiency"] for row in run.rows] == [0.25, 1.0]


def test_a_model_that_leaves_padding_out_has_the_flops_of_its_real_tokens(tmp_path: Path) -> None:
    class Unpads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.mix(self.embed(input_ids)[attention_mask.bool()]).sum()  # type: ignore[no-any-return]

    def batch(length: int, real: int) -> dict[str, Tensor]:
        mask = (torch.arange(length) < real).long().expand(2, length).contiguous()
        return {"input_ids": torch.zeros(2, length, dtype=torch.long), "attention_mask": mask}

    run = train(Unpads(), tmp_path, [batch(16, 4), batch(16, 8), batch(12, 3)])
    assert run.model_flops == [3 * 2 * tokens * WIDTH * WIDTH for tokens in (2 * 4, 2 * 8, 2 * 3)]
    assert run.methods == {OBSERVED}


def test_a_flat_row_of_documents_tells_tokens_and_documents(tmp_path: Path) -> None:
    class Flat(Mlp):
        def forward(self, input_ids: Tensor, cu_seqlens: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(nn.functional.one_hot(input_ids, WIDTH).float()).sum()

    ends = torch.tensor([0, 5, 12])
    run = train(Flat(), tmp_path, [{"input_ids": torch.zeros(12, dtype=torch.long), "cu_seqlens": ends}] * 2)
    for row in run.rows:
        assert round(row["perf/tokens_per_second"] * row["perf/step_time"]) == 12
        assert round(row["perf/samples_per_second"] * row["perf/step_time"]) == 2


@pytest.mark.xfail(strict=True, reason="nodes that functorch's grad makes are taken for unseen ones")
def test_per_sample_gradients_are_counted_for_all_samples(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        weights = dict(model.named_parameters())

        def loss(weights: dict[str, Any], x: Tensor) -> Tensor:
            return functional_call(model, weights, (x[None],)).sum()  # type: ignore[no-any-return]

        gradients = vmap(grad(loss), (None, 0))(weights, rows_of(samples))
        return torch.stack([g.sum() for g in gradients.values()]).sum() * 0 + next(model.parameters()).sum()

    run = train(Mlp(), tmp_path, [5, 6], call)
    assert run.model_flops == [None, mlp_flops(6)]  # the second was observed as a whole
    assert "vmap" in run.rows[0]["perf/mfu_unknown"]


class GrowsDeeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.depth = 2

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.depth]:
            x = layer(x)
        return x.sum()


def test_a_number_that_changes_the_work_is_seen_by_the_next_check(tmp_path: Path) -> None:
    model = GrowsDeeper()

    def before(step: int, monitor: TrainingMonitor) -> None:
        model.depth = 2 if step < 3 else 4

    run = train(model, tmp_path, [5] * 4, lambda model, n: model(rows_of(n)), before, **ALL)
    layer = 2 * 5 * WIDTH * WIDTH
    assert run.model_flops == [layer * (2 + 3 * (depth - 1)) for depth in (2, 2, 4, 4)]


def test_a_number_that_goes_on_changing_the_work_is_seen_each_time(tmp_path: Path) -> None:
    model = GrowsDeeper()
    model.layers.extend([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def before(step: int, monitor: TrainingMonitor) -> None:
        model.depth = step

    run = train(model, tmp_path, [3] * 8, lambda m, n: m(rows_of(n)), before, **ALL)
    one_layer = 2 * 3 * WIDTH * WIDTH
    assert run.model_flops == [(3 * depth - 1) * one_layer for depth in range(1, 9)]


def test_a_number_that_only_counts_calls_is_let_be(tmp_path: Path) -> None:
    class Counts(Mlp):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    run = train(Counts(), tmp_path, [3] * 40, lambda m, n: m(rows_of(n)).sum(), after=save)
    assert run.model_flops == [mlp_flops(3)] * 40
    # The first two, and twice for the number: a step and the next, which begins before that one's row.
    assert len(run.summary["monitor_cost"]["observed_steps"]) <= 6
    assert run.summary["warnings"] == []


def test_a_paused_evaluation_is_not_executed_by_the_step(tmp_path: Path) -> None:
    monitors: list[TrainingMonitor] = []

    def call(model: nn.Module, samples: int) -> Tensor:
        loss: Tensor = model(rows_of(samples)).sum()
        with monitors[-1].pause(), torch.no_grad():
            model(rows_of(100))
        return loss

    def before(step: int, monitor: TrainingMonitor) -> None:
        monitors.append(monitor)
        learned(step, monitor)

    run = train(Mlp(), tmp_path, [5] * 5, call, before, mfu_calculation_mode="profiler")
    assert run.executed == [mlp_flops(5)] * 5


@on_newer_torch
def test_a_profiler_started_within_a_profiled_step_does_not_make_hfu_zero(tmp_path: Path) -> None:
    users = []

    def call(model: nn.Module, samples: int) -> Tensor:
        loss: Tensor = model(rows_of(samples)).sum()
        users.append(profile(activities=[ProfilerActivity.CPU]))
        users[0].__enter__()
        return loss

    def after(*_: object) -> None:
        users[0].__exit__(None, None, None)

    run = train(Mlp(), tmp_path, [5], call, after=after, mfu_calculation_mode="profiler")
    assert run.executed in ([mlp_flops(5)], [None])


def test_a_nested_batch_costs_its_flops_alone(tmp_path: Path) -> None:
    def call(model: nn.Module, samples: int) -> Tensor:
        rows = [rows_of(samples), rows_of(samples + 2)]
        return model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().sum()  # type: ignore[no-any-return]

    run = train(Mlp(), tmp_path, [5, 6], call)
    assert [row["global_step"] for row in run.rows] == [1, 2]
    assert run.model_flops == [None, mlp_flops(2 * 6 + 2)]  # the second was observed as a whole
    assert "nested tensors" in run.rows[0]["perf/mfu_unknown"]


class TakesAnyNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp()

    def forward(self, *inputs: Tensor, target: Tensor) -> Tensor:
        return torch.stack([(self.body(x) - target).pow(2).mean() for x in inputs]).sum()


class TakesByPlace(Mlp):
    def forward(self, x: Tensor, /) -> Tensor:
        return super().forward(x).sum()


def test_keyword_arguments_beside_any_number_of_positional_ones(tmp_path: Path) -> None:
    run = train(
        TakesAnyNumber(),
        tmp_path,
        [5, 6],
        lambda model, n: model(rows_of(n), rows_of(n), target=torch.zeros(n, CLASSES)),
    )
    assert run.model_flops == [None, 2 * mlp_flops(6)]  # the second was observed as a whole


def test_positional_only_arguments(tmp_path: Path) -> None:
    run = train(TakesByPlace(), tmp_path, [5], lambda model, n: model(rows_of(n)))
    assert run.model_flops == [mlp_flops(5)]
    assert run.methods == {OBSERVED}


def test_multiple_choice(tmp_path: Path) -> None:
    sizes = {"hidden_size": 60, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 140}
    model = hf.BertForMultipleChoice(hf.BertConfig(vocab_size=127, **sizes)).train()
    batch = {"input_ids": torch.randint(3, 127, (2, 4, 24)), "labels": torch.tensor([0, 1])}
    run = train(model, tmp_path, [batch])
    assert run.model_flops == [count_flops(model, batch).model_flops]


def test_a_whole_mask_decides_the_allowed_pairs(tmp_path: Path) -> None:
    c = case("llama-sdpa")
    model = c.build()
    batch = c.batch(samples=2, length=24)
    forbidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    mask = torch.zeros(24, 24).masked_fill(forbidden, torch.finfo(torch.float32).min)
    masked = {**batch, "attention_mask": mask.expand(2, 1, 24, 24).contiguous()}
    run = train(model, tmp_path, [masked], attention="causal")
    assert run.model_flops == [c.truth(model, batch, attention="causal").model_flops]
