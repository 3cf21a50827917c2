"""The callback in Lightning's own Trainer: steps, tokens and FLOPs by hand, its loggers, an unchanged fit."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch")

from torch._dynamo.convert_frame import ConvertFrameAssert  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

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
from truemfu import count_flops  # noqa: E402
from truemfu.errors import TruemfuWarning, UsageError  # noqa: E402
from truemfu.integrations.lightning import TrueMFUCallback, callbacks_by_environment  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec:FutureWarning",
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
)


class Lit(pl.LightningModule):
    """`calls` is what training_step calls: self, or the model inside, also a compiled one."""

    def __init__(self, calls: str = "self", model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = Language() if model is None else model
        self.calls, self.losses = calls, []
        if calls == "compiled":
            self.model = torch.compile(self.model, backend="eager")
        elif calls == "compiled in place":
            self.model.compile(backend="eager")

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self(**batch) if self.calls == "self" else self.model(**batch)
        self.losses.append(loss.detach())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        self.log("val_loss", self(**batch))

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def fit(
    folder: Path,
    module: Any,
    batches: list[Any],
    *callbacks: Any,
    val_batches: list[Any] | None = None,
    **options: Any,
) -> Any:
    settings: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": pl.loggers.CSVLogger(folder, flush_logs_every_n_steps=1),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    trainer = pl.Trainer(callbacks=list(callbacks), **{**settings, **options})
    trainer.fit(module, loader(batches), None if val_batches is None else loader(val_batches))
    return trainer


def loader(batches: list[Any]) -> Any:
    return torch.utils.data.DataLoader(batches, batch_size=None)


def logged_in(trainer: Any) -> list[dict[str, str]]:
    with open(Path(trainer.logger.log_dir) / "metrics.csv") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("accumulated", [1, 4])
@pytest.mark.parametrize("calls", ["self", "model", "compiled", "compiled in place"])
def test_steps_tokens_and_flops_are_those_of_a_hand_count(
    tmp_path: Path, calls: str, accumulated: int
) -> None:
    batches, module = padded_batches(10), Lit(calls)
    fit(tmp_path, module, batches, TrueMFUCallback(tmp_path, CONFIG), accumulate_grad_batches=accumulated)
    rows, steps = rows_in(tmp_path), groups(batches, accumulated)  # the last step is a shorter one
    assert [row["global_step"] for row in rows] == list(range(1, len(steps) + 1))
    truths = [counted(Language(), step) for step in steps]
    assert_flops(rows, truths, may_be_unknown=accumulated > 1)  # the last step has fewer micro-batches
    assert list(map(tokens_of, rows)) == [sum(batch["input_ids"].numel() for batch in step) for step in steps]
    assert list(map(real_tokens_of, rows)) == [
        sum(int(batch["attention_mask"].sum()) for batch in step) for step in steps
    ]


@pytest.mark.parametrize("accumulated", [1, 4])
def test_loss_norm_and_learning_rate_are_lightnings(tmp_path: Path, accumulated: int) -> None:
    norms = []

    class Seen(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients = [p.grad for p in pl_module.parameters()]
            norms.append(torch.nn.utils.get_total_norm(gradients).item())

    torch.manual_seed(0)
    module, batches = Lit(), padded_batches(8)
    fit(
        tmp_path,
        module,
        batches,
        Seen(),
        TrueMFUCallback(tmp_path, CONFIG),
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.1,
    )
    rows = rows_in(tmp_path)
    assert [row["training/lr"] for row in rows] == [
        1e-2 * (1 / (1 + step)) for step in range(8 // accumulated)
    ]
    assert [row["training/grad_norm"] for row in rows] == norms
    losses = [sum(loss / accumulated for loss in step).item() for step in groups(module.losses, accumulated)]
    assert [row["training/loss"] for row in rows] == losses


def test_without_clipping_the_norm_is_unknown(tmp_path: Path) -> None:
    fit(tmp_path, Lit(), padded_batches(3), TrueMFUCallback(tmp_path, CONFIG))
    assert not any("training/grad_norm" in row for row in rows_in(tmp_path))


@pytest.fixture
def compiled_code(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all code that dynamo was asked to compile."""
    names = []
    convert = ConvertFrameAssert.__call__

    def named(self: Any, frame: FrameType, *args: Any, **kwargs: Any) -> Any:
        names.append(f"{frame.f_code.co_name} of {frame.f_code.co_filename}")
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(ConvertFrameAssert, "__call__", named)
    return names


@pytest.mark.parametrize("calls", ["self", "compiled"])
def test_training_is_the_same_to_the_bit(tmp_path: Path, calls: str, compiled_code: list[str]) -> None:
    results = []
    for name in ("without", "with"):
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        compiled_code.clear()
        module = Lit(calls)
        callbacks = [TrueMFUCallback(tmp_path / "run", CONFIG)] if name == "with" else []
        fit(
            tmp_path / name,
            module,
            padded_batches(8),
            *callbacks,
            val_batches=padded_batches(2, seed=3),
            val_check_interval=2,
            enable_checkpointing=True,
            gradient_clip_val=0.1,
        )
        compiled = {kind: dict(counters[kind]) for kind in ("stats", "graph_break", "recompiles")}
        compiled["frames"] = list(compiled_code)
        results.append((module.losses, weights_of(module), compiled))
    (losses, weights, compiled), (losses_with, weights_with, compiled_with) = results
    assert are_equal(losses, losses_with)
    assert are_equal(weights, weights_with)
    assert compiled == compiled_with
    assert bool(compiled["stats"]) == (calls == "compiled")
    assert len(rows_in(tmp_path / "run")) == 8


def test_the_values_are_in_lightnings_own_log(tmp_path: Path) -> None:
    class Slow(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            if seen.monitor is not None:
                seen.monitor.save_logs()  # the rows so far are finished

    seen = TrueMFUCallback(tmp_path, CONFIG)
    trainer = fit(tmp_path, Lit(), padded_batches(6), Slow(), seen, log_every_n_steps=2)
    logged = {int(line["step"]): line for line in logged_in(trainer) if line["perf/mfu"]}
    rows = {row["global_step"] - 1: row for row in rows_in(tmp_path)}
    assert len(logged) >= 3  # every second step
    assert max(logged) == 5
    for step, line in logged.items():
        for name in ("perf/mfu", "perf/hfu", "perf/tokens_per_second"):
            assert float(line[name]) == rows[step][name]
    assert float(trainer.callback_metrics["perf/mfu"]) == pytest.approx(rows[5]["perf/mfu"])
    assert trainer.progress_bar_metrics["mfu"] == rows[5]["perf/mfu"]


def test_validation_and_checkpoints_are_left_out_of_the_step(tmp_path: Path) -> None:
    class Paused(pl.Callback):
        """Whether the monitor is paused while Lightning validates and saves."""

        def on_validation_batch_start(self, *args: Any) -> None:
            if seen.monitor is not None:
                states.append(("evaluation", seen.monitor._between.pauses))

        def on_save_checkpoint(self, *args: Any) -> None:
            states.append(("checkpoint", seen.monitor._between.pauses))

    states: list[tuple[str, int]] = []
    seen = TrueMFUCallback(tmp_path / "run", CONFIG)
    trainer = fit(
        tmp_path,
        Lit(),
        padded_batches(6),
        Paused(),
        seen,
        pl.callbacks.ModelCheckpoint(tmp_path / "saved", save_top_k=-1, every_n_train_steps=2),
        val_batches=padded_batches(2, seed=3),
        val_check_interval=3,
        num_sanity_val_steps=1,
        enable_checkpointing=True,
    )
    assert {kind for kind, _ in states} == {"evaluation", "checkpoint"}
    assert {pauses for _, pauses in states} == {1}
    assert list((tmp_path / "saved").iterdir())
    left_out = seen.monitor.summary()["left_out"]
    assert left_out["evaluation"]["times"] == 2  # one of them after the last step
    assert left_out["checkpoint"]["times"] == 3
    rows = rows_in(tmp_path / "run")
    assert [row["global_step"] for row in rows if "perf/checkpoint_time" in row] == [3, 5]
    assert [row["global_step"] for row in rows if "perf/evaluation_time" in row] == [4]
    assert not any(row.get("perf/forwards_between_steps") for row in rows)
    assert "save_checkpoint" not in vars(trainer)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    assert "clip_grad_by_norm" not in vars(trainer.precision_plugin)


class Generative(pl.LightningModule):
    """Two optimizers; the generator is called by the module's forward, the critic by training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.generator(noise)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for_generator, for_critic = self.optimizers()
        self.toggle_optimizer(for_generator)
        loss = -self.critic(self(batch[:, :4])).mean()
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        made = self(batch[:, :4]).detach()
        critic_loss = self.critic(made).mean() - self.critic(batch).mean()
        self.manual_backward(critic_loss)
        for_critic.step()
        for_critic.zero_grad()
        self.untoggle_optimizer(for_critic)
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (self.generator, self.critic)]


def test_two_optimizers_step_once_per_batch_with_both_models_counted(tmp_path: Path) -> None:
    samples = 5
    fit(
        tmp_path,
        Generative(),
        [torch.randn(samples, 8) for _ in range(4)],
        TrueMFUCallback(tmp_path, CONFIG),
    )
    rows = rows_in(tmp_path)
    g_one, g_two = 2 * samples * 4 * 16, 2 * samples * 16 * 8
    c_one, c_two = 2 * samples * 8 * 32, 2 * samples * 32
    generator = (g_one + g_two) + (g_one + g_two) + g_two  # forward, weights, the hidden layer's input
    frozen_critic = 2 * (c_one + c_two)  # forward, and down to the picture
    critic = (c_one + c_two) + (c_one + c_two) + c_two
    detached_generator = g_one + g_two  # frozen by toggle_optimizer: forward alone
    assert [row["global_step"] for row in rows] == [1, 2, 3, 4]
    expected = generator + detached_generator + frozen_critic + 2 * critic
    assert {flops_of(row) for row in rows} == {expected}
    assert {flops_of(row, "perf/mfu/critic") for row in rows} == {frozen_critic + 2 * critic}
    assert {flops_of(row, "perf/mfu/generator") for row in rows} == {generator + detached_generator}


def test_a_part_called_beside_the_modules_own_forward(tmp_path: Path) -> None:
    class Projected(Lit):
        """Two calls that are not nested, of a module and of a part of it."""

        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(64, 3)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            del batch["labels"]
            return self.projection(self(**batch)).square().mean()

    batches = padded_batches(4)
    fit(tmp_path, Projected(), [dict(batch) for batch in batches], TrueMFUCallback(tmp_path, CONFIG))
    without_labels = [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    projection, logits = nn.Linear(64, 3), [batch["input_ids"].numel() for batch in batches]
    expected = [
        counted(Language(), [batch])
        + count_flops(projection, (torch.zeros(tokens, 64, requires_grad=True),)).model_flops
        for batch, tokens in zip(without_labels, logits, strict=True)
    ]
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == expected
    assert list(map(tokens_of, rows)) == logits


def test_recomputed_layers_are_not_other_models(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Language):
        def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> torch.Tensor:
            hidden = checkpoint(self.qkv, self.embedding(input_ids), use_reentrant=False)
            logits = self.head(checkpoint(self.out, hidden.chunk(3, -1)[0], use_reentrant=False))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    batches = padded_batches(4)
    fit(tmp_path, Lit("model", Checkpointed()), batches, TrueMFUCallback(tmp_path, CONFIG))
    counts = [count_flops(Checkpointed(), batch) for batch in batches]
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == [count.model_flops for count in counts]
    assert [flops_of(row, "perf/hfu") for row in rows] == [count.hardware_flops for count in counts]


def test_adapters_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        return peft.get_peft_model(Language(), peft.LoraConfig(r=2, target_modules=["qkv", "out"]))

    batches, model = padded_batches(6), adapted()
    fit(
        tmp_path,
        Lit("model", model),
        batches,
        TrueMFUCallback(tmp_path, CONFIG),
        accumulate_grad_batches=2,
    )
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == [counted(adapted(), step) for step in groups(batches, 2)]


def test_closures_that_run_several_times(tmp_path: Path) -> None:
    class Closures(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3)

    batches, module = padded_batches(3), Closures()
    fit(tmp_path, module, batches, TrueMFUCallback(tmp_path, CONFIG))
    rows = rows_in(tmp_path)
    assert [row["global_step"] for row in rows] == [1, 2, 3]
    flops = [counted(Language(), [batch]) for batch in batches]
    passes = [flops_of(row) / count for row, count in zip(rows, flops, strict=True)]
    assert sum(passes) == len(module.losses)
    assert all(number > 1 for number in passes)


def test_a_fit_that_raises_and_a_second_fit(tmp_path: Path) -> None:
    class Fails(Lit):
        fails = True

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == 3 and self.fails:
                raise RuntimeError("out of luck")
            return super().training_step(batch, index)

    module, callback = Fails(), TrueMFUCallback(tmp_path, CONFIG)
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, module, padded_batches(6), callback)
    assert len(rows_in(tmp_path)) == 3
    module.fails = False
    module.losses.clear()
    fit(tmp_path / "other", module, padded_batches(2), TrueMFUCallback(tmp_path / "second", CONFIG))
    fit(tmp_path / "other", module, padded_batches(4), TrueMFUCallback(tmp_path / "third", CONFIG))
    assert len(rows_in(tmp_path / "second")) == 2
    assert len(rows_in(tmp_path / "third")) == 4
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in module.modules())


def test_one_trainer_fits_twice(tmp_path: Path) -> None:
    callback, module = TrueMFUCallback(config=CONFIG), Lit()
    trainer = fit(tmp_path, module, padded_batches(3), callback)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(padded_batches(3)))
    folder = Path(trainer.logger.log_dir) / "truemfu"  # the default folder
    assert [row["global_step"] for row in rows_in(folder)] == [1, 2, 3, 4, 5, 6]


def test_without_a_logger_the_files_are_below_the_root(tmp_path: Path) -> None:
    fit(tmp_path, Lit(), padded_batches(2), TrueMFUCallback(config=CONFIG), logger=False)
    assert len(rows_in(tmp_path / "truemfu")) == 2


def test_an_invalid_configuration_raises_at_once() -> None:
    with pytest.raises(UsageError, match="monitoring"):
        TrueMFUCallback(config={"monitoring": {"no_such_setting": 1}})


def test_a_failure_of_the_callback_is_one_warning(tmp_path: Path) -> None:
    class Broken(pl.loggers.CSVLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "perf/mfu" in metrics:
                raise OSError("no space")
            super().log_metrics(metrics, step)

    callback = TrueMFUCallback(tmp_path / "run", CONFIG)
    with pytest.warns(TruemfuWarning, match="switched off for this training.*no space"):
        trainer = fit(tmp_path, Lit(), padded_batches(8), callback, logger=Broken(tmp_path))
    assert trainer.global_step == 8
    assert "save_checkpoint" not in vars(trainer)


def test_switched_off_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU", "1")
    assert len(callbacks_by_environment()) == 1
    monkeypatch.setenv("TRUEMFU_DISABLED", "1")
    assert callbacks_by_environment() == []
    callback = TrueMFUCallback(tmp_path / "run", CONFIG)
    trainer = fit(tmp_path, Lit(), padded_batches(2), callback)
    assert callback.monitor is None
    assert not (tmp_path / "run").exists()
    assert not any("perf/mfu" in line for line in logged_in(trainer))


def test_the_factory_imports_nothing_unless_asked(tmp_path: Path) -> None:
    code = (
        "import sys; from truemfu.integrations.lightning import callbacks_by_environment as made\n"
        "assert made() == []; print(*{'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules))"
    )
    without = {name: value for name, value in os.environ.items() if name != "TRUEMFU"}
    done = subprocess.run([sys.executable, "-c", code], env=without, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "")


SCRIPT = """
import sys
import torch
import {package} as pl


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, index):
        return self(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=sys.argv[1], **{options},
    )
    trainer.fit(Lit(), torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=2))
"""


def run_script(folder: Path, package: str, options: str, **environment: str) -> None:
    """A script without a line about truemfu, beside a package that declares the entry point."""
    info = folder / "installed" / "truemfu_declared-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: truemfu-declared\nVersion: 1\n")
    project = Path(__file__).parents[2].joinpath("pyproject.toml").read_text()
    declared = re.findall(r'^\[project.entry-points."(.+)"\]\ntruemfu = "(.+)"$', project, re.MULTILINE)
    assert len(declared) == 2
    (info / "entry_points.txt").write_text(
        "".join(f"[{group}]\ntruemfu = {factory}\n" for group, factory in declared)
    )
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(package=package, options=options)))
    path = os.pathsep.join([str(info.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(script), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "TRUEMFU_PEAK_TFLOPS": "10", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_by_the_environment_without_a_line_of_code(tmp_path: Path, package: str) -> None:
    pytest.importorskip(package)
    run_script(tmp_path, package, "dict(devices=1)", TRUEMFU="1")
    rows = rows_in(tmp_path / "truemfu")
    assert len(rows) == 6
    assert {flops_of(row) for row in rows} == {2 * 2 * 2 * 8 * 4}


def test_without_the_variable_nothing_is_added(tmp_path: Path) -> None:
    run_script(tmp_path, "lightning.pytorch", "dict(devices=1)", TRUEMFU="0")
    assert not (tmp_path / "truemfu").exists()


def test_two_ranks_of_ddp(tmp_path: Path) -> None:
    run_script(tmp_path, "lightning.pytorch", "dict(devices=2, strategy='ddp')", TRUEMFU="1")
    rows = rows_in(tmp_path / "truemfu")
    assert len(rows) == 3
    assert {flops_of(row) for row in rows} == {2 * 2 * 2 * 8 * 4}
    samples = [row["perf/samples_per_second"] * row["perf/step_time"] for row in rows]
    assert list(map(round, samples)) == [4, 4, 4]


def test_a_module_compiled_as_a_whole_trains_unchanged_and_only_observed_steps_have_an_mfu(
    tmp_path: Path,
) -> None:
    class Silent(Lit):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.model(**batch)

    results = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()
        module = Silent()
        compiled = torch.compile(module, backend="eager")
        if is_watched:
            fit(tmp_path, compiled, padded_batches(6), TrueMFUCallback(tmp_path, CONFIG))
        else:
            fit(tmp_path, compiled, padded_batches(6))
        results.append((weights_of(module), dict(counters["stats"]), dict(counters["graph_break"])))
    (weights, *compiled_without), (weights_with, *compiled_with) = results
    assert are_equal(weights, weights_with)
    assert compiled_without == compiled_with
    rows = rows_in(tmp_path)
    assert len(rows) == 6
    assert not any("perf/mfu" in row for row in rows if "perf/observed" not in row)
    assert all("perf/mfu" in row or "no forward pass" in row["perf/mfu_unknown"] for row in rows)
