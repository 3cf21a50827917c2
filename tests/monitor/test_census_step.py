"""One step of a run is recorded: when, what it costs the run, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from truemfu import TrainingMonitor
from truemfu.census.record import CENSUS_FILE, TRACE_FILE, Census
from truemfu.records import RUN_FILE, RunRecord, read_record
from truemfu.report.run.load import load_run
from truemfu.report.run.page import write_run_page


def train(
    folder: Path, census: bool | None, *, steps: int = 30, mode: str = "smart", during: Any = None
) -> tuple[dict[str, torch.Tensor], TrainingMonitor]:
    """Train a small model; its weights, and the closed monitor. `during` is called with monitor and step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"monitoring": {"census": census, "mfu_calculation_mode": mode, "peak_tflops": 1}}
    with TrainingMonitor(folder, config, model=model, trackers=[]) as monitor:
        for step in range(1, steps + 1):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if during is not None:
                during(monitor, step)
            monitor.log_step(step, None, loss.detach(), None, None)
    return model.state_dict(), monitor


def recorded_step(folder: Path) -> int:
    """The number of the step whose census is in the folder: others may have been observed before it."""
    step = read_record(folder / CENSUS_FILE, Census).step
    assert step is not None
    return int(step.removeprefix("ProfilerStep#"))


def test_a_run_has_the_census_of_one_step(tmp_path: Path) -> None:
    _, monitor = train(tmp_path, True)
    census = read_record(tmp_path / CENSUS_FILE, Census)
    assert recorded_step(tmp_path) >= 10  # after eight steps, and one before it
    assert (tmp_path / TRACE_FILE).is_file()
    assert census.is_host
    assert {one.key for one in census.classes} >= {"products", "normalisation", "optimizer", "gaps"}
    assert {one.module for one in census.kernels if one.kind == "products"} == {"*"}
    flops = 3 * 2 * 4 * (16 * 32 + 32 * 8) - 2 * 4 * 16 * 32  # none for the gradient of the input
    assert sum(one.flops or 0 for one in census.classes) == flops
    assert sum(one.seconds for one in census.classes) == pytest.approx(census.step_s)
    summary = monitor.summary()
    assert summary["warnings"] == []
    assert summary["monitor_cost"]["census_s"] > 0
    assert sum(summary["without_tensor"].values()) == pytest.approx(1)
    run = read_record(tmp_path / RUN_FILE, RunRecord)
    assert run.summary is not None
    assert run.summary.without_tensor == summary["without_tensor"]


def test_the_report_of_a_run_has_the_census(tmp_path: Path) -> None:
    train(tmp_path, True)
    text = write_run_page(tmp_path / "report.html", load_run(tmp_path)).read_text(encoding="utf-8")
    section = text.partition("<h2>One step, kernel by kernel</h2>")[2].partition("<h2>")[0]
    assert "Busy without tensor work: " in section
    assert section.count("<svg") == 1
    assert "aten::native_layer_norm" in section.replace("<wbr>", "")


def test_recorded_steps_are_not_representative(tmp_path: Path) -> None:
    train(tmp_path, True)
    rows = json.loads((tmp_path / "training_log.json").read_text())
    warm_up = {row["global_step"] for row in rows if row.get("perf/warmup")}
    step = recorded_step(tmp_path)
    assert {step - 1, step} <= warm_up
    assert step - 2 not in warm_up


def test_the_weights_are_those_of_a_run_without_it(tmp_path: Path) -> None:
    with_census, _ = train(tmp_path / "with", True)
    without, _ = train(tmp_path / "without", False)
    assert all(torch.equal(with_census[name], without[name]) for name in without)
    assert not torch_modules._global_forward_hooks
    assert not torch_modules._global_forward_pre_hooks


@pytest.mark.parametrize(("census", "mode"), [(None, "smart"), (False, "hybrid")])
def test_there_is_none_where_it_is_not_wanted(tmp_path: Path, census: bool | None, mode: str) -> None:
    _, monitor = train(tmp_path, census, mode=mode)
    assert not list(tmp_path.glob("census*"))
    assert monitor.summary()["without_tensor"] == {}


def test_one_is_recorded_on_request(tmp_path: Path) -> None:
    def request(monitor: TrainingMonitor, step: int) -> None:
        if step == 12:
            monitor.record_census()

    train(tmp_path, None, during=request)
    assert recorded_step(tmp_path) >= 14


def test_a_pause_within_the_step_discards_it(tmp_path: Path) -> None:
    def pause(monitor: TrainingMonitor, step: int) -> None:
        if step == 10:
            with monitor.pause("evaluation"):
                torch.ones(3) + 1

    train(tmp_path, True, during=pause)
    assert recorded_step(tmp_path) >= 14  # after three quiet steps, and one before it


def test_another_profiler_is_left_alone(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(tmp_path, True)
    assert any(event.name == "aten::addmm" for event in profiler.events())
    assert not (tmp_path / TRACE_FILE).exists()


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    def block(monitor: TrainingMonitor, step: int) -> None:
        if step == 1:
            (tmp_path / TRACE_FILE).mkdir()

    _, monitor = train(tmp_path, True, during=block)
    assert any("no census of a step" in text for text in monitor.summary()["warnings"])
    assert monitor.summary()["steps"] == 30
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
