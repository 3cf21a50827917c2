"""What is watched: one model, several, parts of one without a forward, one compiled later; FLOPs given."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from observed_notes import wait_until_learned
from torch import nn

from truemfu import TrainingMonitor, count_flops
from truemfu.errors import TruemfuWarning, UsageError
from truemfu.flops.observe.compiled import RECOMPILES
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.summary import lines_of
from truemfu.monitor.watching.watched import CalledModels
from truemfu.text import share
from truemfu.torch_private.compiler import guards_ignore_modes

PEAK = 10e12


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 32), nn.Linear(32, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(picture).tanh()).mean()


class Parts(nn.Module):
    """As a Lightning module may be: a training step that calls its parts, and no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24, bias=False) for _ in range(2)])
        self.heads = nn.ModuleDict({"main": nn.Linear(24, 3)})
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        x = self.encoder(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.loss(self.heads["main"](x), y)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def monitor_of(path: Path, model: Any, **monitoring: Any) -> TrainingMonitor:
    return TrainingMonitor(path, {"monitoring": {"peak_tflops": PEAK / 1e12, **monitoring}}, model=model)


def rows_in(path: Path) -> list[dict[str, Any]]:
    return json.loads((path / "training_log.json").read_text())


def flops_of(row: dict[str, Any], metric: str = "perf/mfu") -> int | None:
    return None if metric not in row else round(row[metric] * row["perf/step_time"] * PEAK)


def gan_step(generator: nn.Module, critic: nn.Module, samples: int, *, freeze: bool) -> None:
    """The critic learns from real and made pictures, then the generator from the critic."""
    made = generator(torch.randn(samples, 4))
    (critic(torch.randn(samples, 8)) - critic(made.detach())).backward()
    for parameter in critic.parameters():
        parameter.requires_grad_(not freeze)
    critic(made).backward()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)


def gan_flops(samples: int, *, freeze: bool) -> dict[str, int]:
    """By hand, 2MNK each; the backward pass has a product for each gradient that is needed."""
    one, two = 2 * samples * 8 * 32, 2 * samples * 32 * 1
    critic_alone = (one + two) + (one + two) + two  # forward, weights, the hidden layer's input
    weights = 0 if freeze else one + two
    critic_on_made = (one + two) + weights + (one + two)  # down to the picture
    first, last = 2 * samples * 4 * 16, 2 * samples * 16 * 8
    return {
        "Generator": (first + last) + (first + last) + last,
        "Critic": 2 * critic_alone + critic_on_made,
    }


@pytest.mark.parametrize("freeze", [False, True])
def test_several_models_have_one_mfu_for_the_step_and_one_each(tmp_path: Path, freeze: bool) -> None:
    generator, critic = Generator(), Critic()
    with monitor_of(tmp_path, [generator, critic]) as monitor:
        for step, samples in enumerate((5, 5, 7, 5, 5), 1):
            gan_step(generator, critic, samples, freeze=freeze)
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    rows = rows_in(tmp_path)
    assert len(rows) == 5
    for row, samples in zip(rows, (5, 5, 7, 5, 5), strict=True):
        wanted = gan_flops(samples, freeze=freeze)
        assert {name: flops_of(row, f"perf/mfu/{name}") for name in wanted} == wanted
        assert flops_of(row) == sum(wanted.values())
        assert row["perf/method"] == OBSERVED
        assert round(row["perf/samples_per_second"] * row["perf/step_time"]) == samples
    summary = monitor.summary()
    assert summary["model"]["name"] == "Generator, Critic"
    assert summary["model"]["parameters"] == sum(
        p.numel() for m in (generator, critic) for p in m.parameters()
    )
    assert set(summary["median_mfu_by_model"]) == {"Generator", "Critic"}
    lines = dict(lines_of(summary))
    assert (
        lines["MFU of Critic, median"]
        == f"{share(summary['median_mfu_by_model']['Critic'])} (its part of the MFU)"
    )
    assert lines["model"].startswith("Generator, Critic, ")


def test_models_can_be_given_names(tmp_path: Path) -> None:
    actor, value = nn.Linear(4, 4), nn.Linear(4, 1)
    with monitor_of(tmp_path, {"actor": actor, "value": value}) as monitor:
        for step in range(1, 4):
            (actor(torch.randn(2, 4)).sum() + value(torch.randn(2, 4)).sum()).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    row = rows_in(tmp_path)[-1]
    assert flops_of(row, "perf/mfu/actor") == 2 * 2 * 2 * 4 * 4
    assert flops_of(row, "perf/mfu/value") == 2 * 2 * 2 * 4 * 1


def test_models_of_one_class_are_numbered(tmp_path: Path) -> None:
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    with monitor_of(tmp_path, models) as monitor:
        for step in range(1, 4):
            sum(model(torch.randn(2, 4)).sum() for model in models).backward()  # type: ignore[union-attr]
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    summary = monitor.summary()
    assert set(summary["median_mfu_by_model"]) == {"Linear_0", "Linear_1"}
    assert dict(lines_of(summary))["model"].startswith("Linear_0, Linear_1 (Linear, Linear), ")


def test_one_model_has_no_mfu_of_its_own(tmp_path: Path) -> None:
    model = Critic()
    with monitor_of(tmp_path, [model]) as monitor:
        for step in range(1, 4):
            model(torch.randn(2, 8)).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    row = rows_in(tmp_path)[-1]
    assert flops_of(row) == count_flops(model, (torch.randn(2, 8),)).model_flops
    assert not [name for name in row if name.startswith("perf/mfu/")]
    assert monitor.summary()["median_mfu_by_model"] == {}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "got an empty one"),
        ([nn.Linear(1, 1), "critic"], "got str"),
        (3, "got int"),
        (lambda: (lambda m: [m, m])(nn.Linear(1, 1)), "given twice"),
        (lambda: (lambda m: [nn.Sequential(m), m])(nn.Linear(1, 1)), "Linear is part of Sequential"),
        (nn.ModuleList([nn.Tanh()]), "ModuleList has no forward"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path: Path, models: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TrainingMonitor(
            tmp_path, model=models() if callable(models) and not isinstance(models, nn.Module) else models
        )


@pytest.mark.parametrize("observed", [False, True])
def test_a_model_without_a_forward_is_watched_by_its_parts(tmp_path: Path, observed: bool) -> None:
    model = Parts()
    batch = torch.randn(5, 6), torch.randint(3, (5,))
    with monitor_of(tmp_path, model) as monitor:
        for step in range(1, 6):
            for _ in range(2):
                if observed:
                    monitor.observe(batch)
                model.training_step(batch).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
            wait_until_learned(monitor)
    encoder, block, head = 2 * 5 * 6 * 24, 2 * 5 * 24 * 24, 2 * 5 * 24 * 3
    wanted = 2 * (2 * encoder + 2 * 3 * block + 3 * head)  # the encoder's input needs no gradient
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == [wanted] * 5
    assert {round(row["perf/samples_per_second"] * row["perf/step_time"]) for row in rows} == {10}
    assert not [name for name in rows[-1] if name.startswith("perf/mfu/")]
    assert monitor.summary()["warnings"] == []


def trained(
    path: Path, prepare: Callable[[nn.Module, TrainingMonitor | None], object], *, monitored: bool
) -> Any:
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Critic()
    monitor = monitor_of(path, model) if monitored else None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepare(model, None)
    for step in range(1, 9):
        if step == 5:
            prepare(model, monitor)
        loss = model(torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log_step(step, 0, loss, None, 0.1)
    if monitor is not None:
        monitor.close()
    counters = torch._dynamo.utils.counters
    return model.state_dict(), dict(counters["stats"]), dict(counters["graph_break"])


def at_once(model: nn.Module, monitor: TrainingMonitor | None) -> None:
    if monitor is None and model._compiled_call_impl is None:  # type: ignore[truthy-function]
        model.compile(backend="eager")


def in_mid_run(model: nn.Module, monitor: TrainingMonitor | None) -> None:
    if not hasattr(model, "is_prepared"):
        model.is_prepared = True  # type: ignore[assignment]
    elif model._compiled_call_impl is None or monitor is not None:  # type: ignore[truthy-function]
        model.compile(backend="eager")


@pytest.mark.parametrize(("prepare", "without"), [(at_once, 1), (in_mid_run, 5)])
def test_a_model_compiled_after_it_was_attached_is_watched_on(
    tmp_path: Path, prepare: Callable[..., object], without: int
) -> None:
    weights, stats, breaks = trained(tmp_path, prepare, monitored=True)
    same_weights, same_stats, same_breaks = trained(tmp_path, prepare, monitored=False)
    assert stats == same_stats
    assert breaks == same_breaks
    assert all(torch.equal(weights[name], same_weights[name]) for name in weights)
    wanted = count_flops(Critic(), (torch.randn(4, 8),)).model_flops
    rows = rows_in(tmp_path)
    if prepare is at_once and not guards_ignore_modes():
        seen = [row for row in rows if row["global_step"] != without]
        assert {row["perf/mfu_unknown"] for row in seen} == {RECOMPILES}
    else:
        assert [flops_of(row) for row in rows] == [
            None if row["global_step"] == without else wanted for row in rows
        ]
    assert len(rows) == 8


def test_flops_that_the_caller_knows_are_used_as_they_are(tmp_path: Path) -> None:
    model = Critic()
    with monitor_of(tmp_path, model) as monitor:
        for step in range(1, 6):
            model(torch.randn(4, 8)).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=123_456 * step)
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == [123_456 * step for step in range(1, 6)]
    assert {row["perf/method"] for row in rows} == {"given by the caller"}
    assert not [row for row in rows if "perf/hfu" in row]
    summary = monitor.summary()
    assert summary["methods"] == {"given by the caller": 5}
    assert summary["median_samples_per_second"] is not None


def test_given_flops_need_no_model_where_the_peak_is_known(tmp_path: Path) -> None:
    with monitor_of(tmp_path, None) as monitor:
        for step in range(1, 4):
            monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=5e9)
    assert [flops_of(row) for row in rows_in(tmp_path)][1:] == [5e9, 5e9]


def test_given_flops_without_a_known_peak_have_no_mfu(tmp_path: Path) -> None:
    with TrainingMonitor(tmp_path) as monitor:
        for step in range(1, 4):
            monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=5e9)
    rows = rows_in(tmp_path)
    assert not [row for row in rows if "perf/mfu" in row]
    assert "perf/tflops_per_gpu" in rows[-1]


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "1e9", True, torch.tensor(5.0)])
def test_flops_that_are_no_positive_number_are_not_used(tmp_path: Path, wrong: Any) -> None:
    model = Critic()
    with monitor_of(tmp_path, model) as monitor:
        for step in range(1, 4):
            model(torch.randn(4, 8)).backward()
            if step == 1:
                with pytest.warns(TruemfuWarning, match="flops must be a positive number"):
                    monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=wrong)
            else:
                monitor.log_step(step, 0, 1.0, 1.0, 1.0, flops=wrong)
    wanted = count_flops(model, (torch.randn(4, 8),)).model_flops
    assert [flops_of(row) for row in rows_in(tmp_path)] == [wanted] * 3


def test_of_several_models_one_that_is_compiled_later_is_watched_on(tmp_path: Path) -> None:
    torch._dynamo.reset()
    models = {"a": Critic(), "b": Critic()}
    with monitor_of(tmp_path, models) as monitor:
        for step in range(1, 8):
            if step == 4:
                models["a"].compile(backend="eager")
            sum(model(torch.randn(4, 8)) for model in models.values()).backward()  # type: ignore[union-attr]
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    one = count_flops(Critic(), (torch.randn(4, 8),)).model_flops
    rows = rows_in(tmp_path)
    assert [flops_of(row) for row in rows] == [None if step == 4 else 2 * one for step in range(1, 8)]
    assert flops_of(rows[-1], "perf/mfu/a") == one


def test_a_layer_that_is_always_frozen_does_not_hide_that_the_rest_is_frozen_too(tmp_path: Path) -> None:
    generator, critic = Generator(), Critic()
    for parameter in critic.one.parameters():
        parameter.requires_grad_(False)
    with monitor_of(tmp_path, {"generator": generator, "critic": critic}) as monitor:
        for step in range(1, 5):
            made = generator(torch.randn(5, 4))
            critic(made.detach()).backward()
            critic.two.requires_grad_(False)
            critic(made).backward()
            critic.two.requires_grad_(True)
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    one, two = 2 * 5 * 8 * 32, 2 * 5 * 32 * 1
    wanted = (one + two) + two + (one + two) + (one + two)  # the last layer's weights; down to the picture
    assert [flops_of(row, "perf/mfu/critic") for row in rows_in(tmp_path)] == [wanted] * 4


def test_names_are_those_of_the_last_attach(tmp_path: Path) -> None:
    one, two = Critic(), Critic()
    with monitor_of(tmp_path, one) as monitor:
        given: list[Any] = [one, [one, two], {"p": one, "q": two}, one]
        for step, models in enumerate(given, 1):
            monitor.attach(models)
            (one(torch.randn(4, 8)) + two(torch.randn(4, 8))).backward()
            monitor.log_step(step, 0, 1.0, 1.0, 1.0)
    found = [[key.rpartition("/")[2] for key in row if "perf/mfu/" in key] for row in rows_in(tmp_path)]
    assert found == [[], ["Critic_0", "Critic_1"], ["p", "q"], []]


def test_names_of_classes_that_clash_are_refused(tmp_path: Path) -> None:
    clashing = type("Linear_1", (nn.Linear,), {})
    with pytest.raises(UsageError, match="clash"):
        monitor_of(tmp_path, [nn.Linear(1, 1), nn.Linear(1, 1), clashing(1, 1)])


def test_a_module_that_was_found_is_the_same_one_when_its_root_is_attached_again() -> None:
    root = Parts()
    models = CalledModels(root)
    encoder = next(watched for watched in models.candidates() if watched.module is root.encoder)
    assert models.begins(encoder, is_training=True)
    assert models.ends(encoder)
    again = next(watched for watched in models.candidates() if watched.module is root.encoder)
    assert models.begins(again, is_training=True)
    assert models.modules == [encoder]
