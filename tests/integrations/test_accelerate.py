"""`watch` on a real accelerator: steps, tokens and FLOPs by hand, an unchanged training."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.optim.optimizer import _global_optimizer_post_hooks  # noqa: E402

from integrations.runs import (  # noqa: E402
    CONFIG,
    Language,
    are_equal,
    assert_flops,
    counted,
    flops_of,
    groups,
    padded_batches,
    real_tokens_of,
    rows_in,
    tokens_of,
    weights_of,
)
from truemfu.errors import TruemfuWarning  # noqa: E402
from truemfu.integrations.accelerate import watch  # noqa: E402


@pytest.fixture(autouse=True)
def accelerator_of_its_own() -> Iterator[None]:
    def reset() -> None:
        AcceleratorState._reset_state(True)
        PartialState._reset_state()
        GradientState._reset_state()

    reset()
    torch.manual_seed(0)
    yield
    reset()


def train(
    accelerator: Any,
    folder: Path | None,
    batches: list[dict[str, torch.Tensor]],
    *,
    model: nn.Module | None = None,
    is_after: bool = False,
    evaluates: bool = False,
    saves: Path | None = None,
) -> Any:
    """As Accelerate's own examples are written; `folder` is None without a monitor."""
    model = Language() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    monitor = watch(accelerator, folder, CONFIG) if folder is not None and not is_after else None
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if is_after:
        monitor = watch(accelerator, folder, CONFIG)
    losses, norms = [], []
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if evaluates and index % 4 == 3:
            model.eval()
            with torch.no_grad():
                model(**batches[0])
            model.train()
        if saves is not None and index % 4 == 3:
            accelerator.save_state(str(saves / str(index)))
    accelerator.end_training()
    return monitor, losses, norms, weights_of(model)


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("is_after", [False, True])
def test_steps_tokens_and_flops_are_those_of_a_hand_count(
    tmp_path: Path, is_after: bool, accumulated: int
) -> None:
    batches = padded_batches(10)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulated)
    _, losses, norms, _ = train(accelerator, tmp_path, batches, is_after=is_after)
    rows, steps = rows_in(tmp_path), groups(batches, accumulated)  # the last step is a shorter one
    assert [row["global_step"] for row in rows] == list(range(1, len(steps) + 1))
    truths = [counted(Language(), step) for step in steps]
    assert_flops(rows, truths, may_be_unknown=accumulated > 1)  # the last step has fewer micro-batches
    assert list(map(tokens_of, rows)) == [sum(batch["input_ids"].numel() for batch in step) for step in steps]
    assert list(map(real_tokens_of, rows)) == [
        sum(int(batch["attention_mask"].sum()) for batch in step) for step in steps
    ]
    means = [(sum(step) / len(step)).item() for step in groups(losses, accumulated)]
    assert [row["training/loss"] for row in rows] == means
    assert [row["training/grad_norm"] for row in rows] == [norm.item() for norm in norms]
    assert [row["training/lr"] for row in rows] == [1e-2 * (1 / (1 + step)) for step in range(len(steps))]


@pytest.mark.parametrize("backend", ["no", "eager"])
def test_training_is_the_same_to_the_bit(tmp_path: Path, backend: str) -> None:
    results = []
    for folder in (None, tmp_path / "run"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend=backend)
        _, losses, _, weights = train(
            accelerator, folder, padded_batches(8), evaluates=True, saves=tmp_path / str(folder is None)
        )
        compiled = {kind: dict(counters[kind]) for kind in ("stats", "graph_break", "recompiles", "frames")}
        results.append((losses, weights, compiled))
    (losses, weights, compiled), (losses_with, weights_with, compiled_with) = results
    assert are_equal(losses, losses_with)
    assert are_equal(weights, weights_with)
    assert compiled == compiled_with
    assert bool(compiled["stats"]) == (backend == "eager")
    rows = rows_in(tmp_path / "run")
    assert [flops_of(row) for row in rows] == [counted(Language(), [batch]) for batch in padded_batches(8)]


def test_mixed_precision_has_the_same_flops(tmp_path: Path) -> None:
    batches = padded_batches(4)
    train(accelerate.Accelerator(cpu=True, mixed_precision="bf16"), tmp_path, batches)
    assert [flops_of(row) for row in rows_in(tmp_path)] == [counted(Language(), [batch]) for batch in batches]


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        return peft.get_peft_model(Language(), peft.LoraConfig(r=2, target_modules=["qkv", "out"]))

    batches = padded_batches(4)
    train(accelerate.Accelerator(cpu=True), tmp_path, batches, model=adapted())
    assert [flops_of(row) for row in rows_in(tmp_path)] == [counted(adapted(), [batch]) for batch in batches]


def test_checkpoints_are_left_out_of_the_step(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    monitor, *_ = train(accelerator, tmp_path / "run", padded_batches(10), saves=tmp_path)
    assert (tmp_path / "3").is_dir()
    assert monitor.summary()["left_out"]["checkpoint"]["times"] == 2
    rows = rows_in(tmp_path / "run")
    assert [row["global_step"] for row in rows if "perf/checkpoint_time" in row] == [5, 9]


def test_after_the_training_the_accelerator_is_as_it_was(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    before = set(vars(accelerator))
    hooks = len(_global_optimizer_post_hooks)
    monitor, *_ = train(accelerator, tmp_path, padded_batches(3))
    replaced = {"backward", "prepare", "prepare_model", "save_state", "end_training", "clip_grad_norm_"}
    assert not replaced & set(vars(accelerator))
    assert before <= set(vars(accelerator))
    assert len(_global_optimizer_post_hooks) == hooks
    assert monitor.last["global_step"] == 3


def test_other_optimizers_end_no_step(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    monitor = watch(accelerator, tmp_path, CONFIG)
    model, other = nn.Linear(4, 3), nn.Linear(2, 2)
    own, foreign = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    model, own = accelerator.prepare(model, own)
    for _ in range(3):
        other(torch.ones(1, 2)).sum().backward()
        foreign.step()
        accelerator.backward(model(torch.ones(5, 4)).sum())
        own.step()
        own.zero_grad()
    monitor.close()
    rows = rows_in(tmp_path)
    assert len(rows) == 3
    # What ran in a step belongs to it, whichever model it trained.
    assert {flops_of(row) for row in rows} - {None} == {2 * 2 * 5 * 4 * 3 + 2 * 2 * 2 * 2}
    assert all("perf/mfu_unknown" in row for row in rows if "perf/mfu" not in row)


def test_two_models_and_two_optimizers_are_one_step(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    monitor = watch(accelerator, tmp_path, CONFIG, first_step=11)
    first, second = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 6))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (first, second)]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    for _ in range(2):
        accelerator.backward(second(first(torch.ones(5, 4))).sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    rows = rows_in(tmp_path)
    assert [row["global_step"] for row in rows] == [11, 12]
    assert [flops_of(row, "perf/mfu/Linear") for row in rows] == [2 * 2 * 5 * 4 * 3] * 2
    assert [flops_of(row, "perf/mfu/Sequential") for row in rows] == [3 * 2 * 5 * 3 * 6] * 2


def test_switched_off_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    accelerator = accelerate.Accelerator(cpu=True)
    monitor = watch(accelerator, tmp_path / "run", CONFIG)
    assert not {"backward", "prepare", "save_state"} & set(vars(accelerator))
    _, optimizer = accelerator.prepare(nn.Linear(2, 2), torch.optim.SGD([torch.zeros(1)], lr=0.1))
    optimizer.step()
    monitor.close()
    assert not (tmp_path / "run").exists()


def test_a_failure_is_one_warning(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    watch(accelerator, tmp_path, CONFIG)
    outer = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(TruemfuWarning, match="switched off for this training.*part of Sequential"):
        accelerator.prepare(outer, outer[0])
    accelerator.backward(outer(torch.ones(1, 2)).sum())
    assert "backward" not in vars(accelerator)


LAUNCHED = """
import sys
import torch
from accelerate import Accelerator
from truemfu.integrations.accelerate import watch

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
watch(accelerator, sys.argv[1], {"monitoring": {"peak_tflops": 10.0}})
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
assert accelerator.num_processes == 2
accelerator.end_training()
"""


def test_two_launched_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command = [*launcher, "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run(
        [*command, "--main_process_port", "0", str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path / "run")
    assert [row["global_step"] for row in rows] == [1, 2]
    assert [flops_of(row) for row in rows] == [2 * (2 * 2 * 3 * 8 * 4)] * 2
    samples = [row["perf/samples_per_second"] * row["perf/step_time"] for row in rows]
    assert list(map(round, samples)) == [12, 12]  # two micro-batches of three on two ranks
