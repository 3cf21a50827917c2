"""One run into five real trackers at once, with the user logging to the same W&B run, all read back.

Then what several trackers at once must not do to each other, with ones that keep what they get.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from tests.waiting import wait_until
from tests.wandb_records import history

from truemfu import TrainingMonitor
from truemfu.errors import TruemfuWarning
from truemfu.trackers.table import TRACKERS, KnownTracker
from truemfu.trackers.wandb import WandbTracker

pytest.importorskip("wandb")
pytest.importorskip("mlflow")
pytest.importorskip("trackio")
pytest.importorskip("tensorboard")
pytest.importorskip("prometheus_client")

STEPS = 60

PROGRAM = """
import json, sys, urllib.request
from pathlib import Path
import torch, wandb
from truemfu import TrainingMonitor
from truemfu.sweep.worker.models import build_reference_model
from truemfu.trackers.prometheus import PrometheusTracker

folder = Path(sys.argv[1])
mine = wandb.init(project="mine", dir=folder, mode="offline")
model = build_reference_model("tiny")
prometheus = PrometheusTracker(run="test", port=0, address="127.0.0.1")
monitor = TrainingMonitor(
    folder / "out", {"monitoring": {"peak_tflops": 1, "detailed_log_freq": 10}}, model=model,
    trackers=["tensorboard", "mlflow", "trackio", prometheus],
)
ids = torch.zeros(2, 16, dtype=torch.long)
for step in range(1, 61):
    loss = model(ids, labels=ids).loss
    loss.backward()
    monitor.log_step(step, 0, step / 2, 1.0, 1e-3)
    mine.log({"mine": step}, step=7 * step)
monitor.save_logs()
with urllib.request.urlopen(f"http://127.0.0.1:{prometheus.port}/metrics", timeout=10) as answer:
    scraped = answer.read().decode()
monitor.close()
mine.finish()
from trackio.sqlite_storage import SQLiteStorage
(project,) = SQLiteStorage.get_projects()
(run,) = SQLiteStorage.get_runs(project)
rows = SQLiteStorage.get_logs(project, run)
print("FOUND" + json.dumps([scraped, rows], default=str))
"""


def run_program(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    # Not with the W&B service of this process, which would not be told that the program has ended.
    environment = {
        **{key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"},
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONSOLE": "off",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "rows of tracker" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("run")
    done = run_program(PROGRAM, folder)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    scraped, trackio_rows = json.loads(line.removeprefix("FOUND"))
    return folder, scraped, trackio_rows


@pytest.fixture(scope="module")
def local(run: tuple[Path, str, list[dict[str, Any]]]) -> dict[int, dict[str, Any]]:
    rows = json.loads((run[0] / "out" / "training_log.json").read_text(encoding="utf-8"))
    assert [row["global_step"] for row in rows] == list(range(1, STEPS + 1))
    return {row["global_step"]: row for row in rows}


DETAILED = range(10, STEPS + 1, 10)


def test_tensorboard_holds_every_step(run: Any, local: dict[int, dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run[0] / "out" / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("training/loss")]
    assert losses == [(step, step / 2) for step in range(1, STEPS + 1)]
    mfus = {event.step: event.value for event in events.Scalars("perf/mfu")}
    assert mfus == {step: pytest.approx(local[step]["perf/mfu"], rel=1e-6) for step in DETAILED}


def test_mlflow_holds_every_step(run: Any, local: dict[int, dict[str, Any]]) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{run[0] / 'out' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("truemfu")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    losses = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, "training/loss"))
    assert losses == [(step, step / 2) for step in range(1, STEPS + 1)]
    mfus = {m.step: m.value for m in client.get_metric_history(found.info.run_id, "perf/mfu")}
    assert mfus == {step: local[step]["perf/mfu"] for step in DETAILED}


def test_trackio_holds_every_step(run: Any, local: dict[int, dict[str, Any]]) -> None:
    assert [(row["step"], row["training/loss"]) for row in run[2]] == [
        (s, s / 2) for s in range(1, STEPS + 1)
    ]
    mfus = {row["step"]: row["perf/mfu"] for row in run[2] if "perf/mfu" in row}
    assert mfus == {step: local[step]["perf/mfu"] for step in DETAILED}


def test_wandb_holds_every_row_of_ours_and_of_the_users(run: Any, local: dict[int, dict[str, Any]]) -> None:
    rows = history(run[0])
    theirs = {row["mine"]: row["_step"] for row in rows if "mine" in row}
    assert theirs == {step: 7 * step for step in range(1, STEPS + 1)}
    ours = {row["global_step"]: row["training/loss"] for row in rows if "global_step" in row}
    assert ours == {step: step / 2 for step in range(1, STEPS + 1)}
    mfus = {row["global_step"]: row["perf/mfu"] for row in rows if "perf/mfu" in row}
    assert mfus == {step: pytest.approx(local[step]["perf/mfu"]) for step in DETAILED}


def test_a_prometheus_scrape_returns_the_last_values(run: Any, local: dict[int, dict[str, Any]]) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(run[1])
        for sample in family.samples
    }
    assert values["truemfu_training_loss"] == STEPS / 2
    assert values["truemfu_mfu"] == pytest.approx(local[STEPS]["perf/mfu"])


JUST_ENDS = """
import sys, time
from pathlib import Path
import torch
from truemfu import TrainingMonitor

folder = Path(sys.argv[1])
model = torch.nn.Linear(4, 4)
monitor = TrainingMonitor(folder / "out", model=model, trackers=["wandb"])
def train(steps):
    for step in steps:
        model(torch.zeros(2, 4)).sum().backward()
        monitor.log_step(step, 0, step / 2, 1.0, 1e-3)
train(range(1, 31))
monitor.save_logs()
train(range(31, 61))
"""


def test_a_program_that_just_ends_loses_no_row_of_a_wandb_run_that_we_opened(tmp_path: Path) -> None:
    run_program(JUST_ENDS, tmp_path)
    rows = history(tmp_path / "out")
    assert [(row["global_step"], row["training/loss"]) for row in rows] == [
        (step, step / 2) for step in range(1, 61)
    ]


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.flushes = 0
        self.summary: Mapping[str, Any] | None = None

    def start(self, run: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        self.rows.append((step, dict(metrics)))

    def flush(self) -> None:
        self.flushes += 1

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.summary = summary


MODEL = torch.nn.Linear(4, 4)


def monitor_of(folder: Path, *trackers: Any, **sections: dict[str, Any]) -> TrainingMonitor:
    config = {"monitoring": {"peak_tflops": 1, **sections.pop("monitoring", {})}, **sections}
    return TrainingMonitor(folder, config, model=MODEL, trackers=trackers)


def train(monitor: TrainingMonitor, steps: range, skip: Callable[[int], bool] = lambda step: False) -> None:
    for step in steps:
        MODEL(torch.zeros(2, 4)).sum().backward()
        monitor.log_step(step, 0, step / 2, 1.0, 1e-3, skip_wandb=skip(step))


def local_steps(folder: Path) -> list[int]:
    return [row["global_step"] for row in json.loads((folder / "training_log.json").read_text())]


def test_a_tracker_that_cannot_be_made_is_left_out_and_the_others_get_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> Any:
        raise KeyError("no home")

    monkeypatch.setitem(TRACKERS, "mlflow", KnownTracker("mlflow", broken))
    kept = Kept()
    monitor = monitor_of(tmp_path, "mlflow", kept)
    with pytest.warns(TruemfuWarning, match="tracker mlflow is left out: KeyError: 'no home'"):
        train(monitor, range(1, 6))
    monitor.close()
    assert local_steps(tmp_path) == [step for step, _ in kept.rows] == [1, 2, 3, 4, 5]


def test_a_tracker_that_changes_what_it_gets_changes_it_for_no_other(tmp_path: Path) -> None:
    class Greedy(Kept):
        def start(self, run: Any) -> None:
            run["convention"].clear()
            run.clear()

        def log(self, step: int, metrics: dict[str, Any]) -> None:
            metrics.clear()

        def finish(self, summary: Any) -> None:
            summary["monitor_cost"].clear()
            summary.clear()

    class Told(Kept):
        def start(self, run: Any) -> None:
            self.run = run

    told = Told()
    monitor = monitor_of(tmp_path, Greedy(), told)
    train(monitor, range(1, 6))
    monitor.close()
    assert told.run["convention"] == {"attention": "full"}
    assert [row["training/loss"] for _, row in told.rows] == [step / 2 for step in range(1, 6)]
    assert told.summary is not None
    assert told.summary["monitor_cost"]
    written = json.loads((tmp_path / "training_run.json").read_text())
    assert written["convention"] == {"attention": "full"}
    assert written["summary"]["monitor_cost"]


def test_the_runs_file_says_what_was_lost_as_the_trackers_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truemfu.monitor.monitor._CLOSE_TIMEOUT_S", 0.5)

    class FailsAtTheEnd(Kept):
        def finish(self, summary: Any) -> None:
            raise OSError("no space")

    class Hangs(Kept):
        def log(self, step: int, metrics: Any) -> None:
            released.wait(60)

    released = Event()
    monitor = monitor_of(tmp_path, FailsAtTheEnd(), Hangs())
    train(monitor, range(1, 6))
    monitor.summary()
    with pytest.warns(TruemfuWarning, match="failed"):
        monitor.close()
    released.set()
    written = json.loads((tmp_path / "training_run.json").read_text())["summary"]
    assert written["lost"] == [
        "5 rows of tracker FailsAtTheEnd: OSError: no space",
        "5 rows of tracker Hangs: it did not finish within 0.5 s",
    ]
    assert [text for text in written["warnings"] if "failed" in text] == [
        "tracker FailsAtTheEnd failed: OSError: no space; it is switched off, its further rows are lost",
        "tracker Hangs failed: it did not finish within 0.5 s; its remaining data is lost",
    ]
    shown = capsys.readouterr().err
    assert shown.count("rows of tracker Hangs") == 1


@pytest.mark.parametrize(
    ("first", "logging_steps", "skip", "detailed"),
    [
        (1, 1, 0, [10, 20, 30, 40]),
        (0, 1, 0, [0, 10, 20, 30, 40]),
        (1, 7, 0, [14, 21, 35, 42]),
        (1, 25, 0, [25]),
        (1, 1, 10, [11, 21, 31, 41]),
    ],
    ids=["every step", "from zero", "more often than details", "less often", "skipped where details are due"],
)
def test_details_come_with_the_first_row_after_they_were_due(
    first: int, logging_steps: int, skip: int, detailed: list[int], tmp_path: Path
) -> None:
    kept = Kept()
    monitor = monitor_of(
        tmp_path, kept, monitoring={"detailed_log_freq": 10}, training={"logging_steps": logging_steps}
    )
    train(monitor, range(first, 46), skip=lambda step: bool(skip) and step % skip == 0)
    monitor.close()
    assert [step for step, row in kept.rows if "training/grad_norm" in row] == detailed
    assert all(("perf/step_time" in row) == (step in detailed) for step, row in kept.rows)
    assert [step for step, _ in kept.rows] == [
        step for step in range(first, 46) if step % logging_steps == 0 and not (skip and step % skip == 0)
    ]


def test_rows_that_mlflow_collects_reach_the_store_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truemfu.monitor.rows.remote_trackers._FLUSH_S", 0.5)
    monitor = monitor_of(tmp_path, "mlflow", training={"logging_steps": 5})
    train(monitor, range(1, 11))

    def steps_in_the_store() -> list[int]:
        with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
            try:
                rows = store.execute("SELECT DISTINCT step FROM metrics ORDER BY step").fetchall()
            except sqlite3.OperationalError:  # the table is not there yet
                return []
        return [step for (step,) in rows]

    wait_until(lambda: (tmp_path / "mlflow.db").exists() and steps_in_the_store() == [5, 10])
    monitor.close()


def test_saving_waits_once_for_a_tracker_that_hangs_and_again_when_it_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(Kept):
        def log(self, step: int, metrics: Any) -> None:
            released.wait(10_000)
            super().log(step, metrics)

    released, slow = Event(), Slow()
    monkeypatch.setattr("truemfu.monitor.monitor._SAVE_TIMEOUT_S", 3.0)
    monitor = monitor_of(tmp_path, slow)
    train(monitor, range(1, 6))
    assert monitor._live._row_thread.finish_pending(60)  # the first step is counted, which takes a while
    with pytest.warns(TruemfuWarning, match="tracker Slow did not accept its rows within 3 s"):
        monitor.save_logs()
    monkeypatch.setattr("truemfu.monitor.monitor._SAVE_TIMEOUT_S", 10_000.0)  # too long for this test
    train(monitor, range(6, 11))
    monitor.save_logs()
    assert local_steps(tmp_path) == list(range(1, 11))
    released.set()
    assert monitor._output._remote.lanes[0].wait_until_idle(30)
    train(monitor, range(11, 16))
    monitor.save_logs()
    assert [step for step, _ in slow.rows] == list(range(1, 16))
    monitor.close()


def test_a_slow_wandb_is_waited_for_when_the_program_ends_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowWandb(Kept, WandbTracker):
        def __init__(self) -> None:
            WandbTracker.__init__(self, tmp_path)
            Kept.__init__(self)

        def log(self, step: int, metrics: Any) -> None:
            released.wait(60)
            super().log(step, metrics)

    released, slow = Event(), SlowWandb()
    monkeypatch.setattr("truemfu.monitor.monitor._SAVE_TIMEOUT_S", 1.0)
    monitor = monitor_of(tmp_path, slow)
    train(monitor, range(1, 6))
    assert monitor._live._row_thread.finish_pending(60)  # the first step is counted, which takes a while
    with pytest.warns(TruemfuWarning, match="tracker SlowWandb did not accept its rows within 1 s"):
        monitor.save_logs()
    monkeypatch.setattr("truemfu.monitor.monitor._SAVE_TIMEOUT_S", 60.0)
    Timer(1.0, released.set).start()
    assert slow.before_end is not None
    slow.before_end()
    assert [step for step, _ in slow.rows] == [1, 2, 3, 4, 5]
    monitor.close()


WITH_A_RUN_OF_THE_USER = """
import sys
from pathlib import Path
import torch, wandb
from truemfu import TrainingMonitor
from truemfu.trackers.wandb import WandbTracker

folder = Path(sys.argv[1])
mine = wandb.init(project="mine", dir=folder, mode="offline")
model = torch.nn.Linear(4, 4)
monitor = TrainingMonitor(folder / "out", model=model, trackers={trackers})
for step in range(1, 21):
    model(torch.zeros(2, 4)).sum().backward()
    monitor.log_step(step, 0, step / 2, 1.0, 1e-3)
monitor.close()
mine.log({{"mine": 1}})
mine.finish()
"""


@pytest.mark.parametrize(
    ("trackers", "each_step"),
    [
        ('["wandb", "wandb", WandbTracker(folder / "out")]', 1),
        ('[WandbTracker(folder / "out")]', 1),
        ("[]", 0),
    ],
    ids=["three", "an object", "none"],
)
def test_a_wandb_run_of_the_user_gets_each_row_once_or_not_at_all(
    trackers: str, each_step: int, tmp_path: Path
) -> None:
    done = run_program(WITH_A_RUN_OF_THE_USER.format(trackers=trackers), tmp_path)
    rows = history(tmp_path)
    assert [row["global_step"] for row in rows if "global_step" in row] == list(range(1, 21)) * each_step
    assert [row["mine"] for row in rows if "mine" in row] == [1]
    says_so = "tracker WandbTracker is left out: there is already one for W&B" in done.stderr
    assert says_so == ("wandb" in trackers)
