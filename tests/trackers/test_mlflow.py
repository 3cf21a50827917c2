"""A real MLflow store on disk, read back through MLflow's client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import isnan, nan
from pathlib import Path

import pytest

from truemfu.trackers.mlflow import MlflowTracker

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(autouse=True)
def _no_address_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)


def our_client(folder: Path) -> mlflow.MlflowClient:
    return mlflow.MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def the_run(client: mlflow.MlflowClient) -> mlflow.entities.Run:
    experiment = client.get_experiment_by_name("truemfu")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def values(client: mlflow.MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, key))


def test_rows_are_in_a_store_of_our_own_at_their_steps(tmp_path: Path) -> None:
    tracker = MlflowTracker(tmp_path / "out")
    tracker.start({"method": "count", "convention": {"attention": "full"}})
    for step in range(500):
        tracker.log(step, {"training/loss": step / 2, "perf/mfu": 0.25, "perf/hfu": None, "mfu(%)": 25.0})
    tracker.log(
        500, {"training/loss": nan, "perf/warmup": True, "dataset/my set/loss": 1.5, "perf/method": "count"}
    )
    tracker.finish({"mfu": 0.25})
    client = our_client(tmp_path / "out")
    run = the_run(client)
    losses = values(client, run.info.run_id, "training/loss")
    assert losses[:500] == [(step, step / 2) for step in range(500)]
    assert losses[500][0] == 500
    assert isnan(losses[500][1])
    assert values(client, run.info.run_id, "mfu_percent") == [(step, 25.0) for step in range(500)]
    assert values(client, run.info.run_id, "perf/warmup") == [(500, 1.0)]
    assert values(client, run.info.run_id, "dataset/my set/loss") == [(500, 1.5)]
    assert values(client, run.info.run_id, "perf/hfu") == []
    tags = run.data.tags
    assert tags["truemfu.method"] == "count"
    assert tags["truemfu.convention"] == "{'attention': 'full'}"
    assert tags["truemfu.summary.mfu"] == "0.25"
    assert tags["perf/method"] == "count"
    assert run.info.status == "FINISHED"


def test_a_flush_writes_what_was_logged_so_far(tmp_path: Path) -> None:
    tracker = MlflowTracker(tmp_path / "out")
    tracker.start({})
    tracker.log(3, {"training/loss": 0.5})
    tracker.flush()
    client = our_client(tmp_path / "out")
    assert values(client, the_run(client).info.run_id, "training/loss") == [(3, 0.5)]
    tracker.finish({})


def test_the_programs_run_is_found_from_another_thread_and_left_open(tmp_path: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'theirs.db'}")
    theirs = mlflow.start_run()
    tracker = MlflowTracker(tmp_path / "out")

    def lane() -> None:
        tracker.start({})
        tracker.log(3, {"training/loss": 0.5})
        tracker.finish({})

    thread = threading.Thread(target=lane)
    thread.start()
    thread.join()
    client = mlflow.MlflowClient()
    assert values(client, theirs.info.run_id, "training/loss") == [(3, 0.5)]
    assert client.get_run(theirs.info.run_id).info.status == "RUNNING"
    assert not (tmp_path / "out").exists()


def test_an_address_the_program_has_set_is_used(tmp_path: Path) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'theirs.db'}")
    tracker = MlflowTracker(tmp_path / "out")
    tracker.start({})
    tracker.log(3, {"training/loss": 0.5})
    tracker.finish({})
    client = mlflow.MlflowClient()
    assert values(client, the_run(client).info.run_id, "training/loss") == [(3, 0.5)]
    assert not (tmp_path / "out").exists()


def test_datasets_may_be_called_anything(tmp_path: Path) -> None:
    names = ["/data/c4.jsonl", "./data/c4", "../x", "a/", "", "c4*", "50%", "50percent", "\udcff", "a+b",
             "a_b", "x" * 300, "x" * 301]  # fmt: skip
    tracker = MlflowTracker(tmp_path / "out")
    tracker.start({})
    tracker.log(1, {f"dataset/{name}/loss": float(at) for at, name in enumerate(names)})
    tracker.log(2, {"training/loss": 0.5, "/method": "count"})
    tracker.finish({})
    client = our_client(tmp_path / "out")
    found = the_run(client).data
    assert sorted(found.metrics.values()) == sorted([*map(float, range(len(names))), 0.5])
    assert found.metrics["dataset/_/data/c4.jsonl/loss"] == 0.0
    assert found.metrics["dataset/_/data/c4/loss"] == 1.0
    assert found.tags["_/method"] == "count"
