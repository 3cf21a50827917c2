"""A real server, scraped: the last values, under names and labels Prometheus takes."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from math import isnan, nan

import pytest
from prometheus_client.parser import text_string_to_metric_families

from truemfu.trackers.names import rename
from truemfu.trackers.prometheus import PrometheusTracker

LABELS = {"rank": "0", "run": "llama"}


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def started(**run: object) -> PrometheusTracker:
    tracker = PrometheusTracker(run="llama", port=0, address="127.0.0.1")
    tracker.start(run)
    return tracker


def scrape(tracker: PrometheusTracker) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


def key(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return name, tuple(sorted({**LABELS, **labels}.items()))


def test_a_scrape_returns_the_last_values() -> None:
    tracker = started(method="count", world_size=8, nested={"left": "out"})
    tracker.log(1, {"training/loss": 2.5, "perf/mfu": 0.25, "perf/warmup": True})
    tracker.log(2, {"training/loss": nan, "perf/mfu": None, "perf/warmup": False, "perf/method": "count"})
    found = scrape(tracker)
    tracker.finish({})
    assert isnan(found.pop(key("truemfu_training_loss")))
    assert found == {
        key("truemfu_run_info", method="count", world_size="8"): 1.0,
        key("truemfu_global_step"): 2.0,
        key("truemfu_mfu"): 0.25,
        key("truemfu_warmup"): 0.0,
    }


def test_a_flag_lasts_as_long_as_the_values_it_came_with() -> None:
    tracker = started()
    tracker.log(0, {"training/loss": 2.5, "perf/mfu": 0.25, "perf/warmup": True})
    tracker.log(1, {"training/loss": 2.0})
    assert scrape(tracker)[key("truemfu_warmup")] == 1.0
    tracker.log(50, {"training/loss": 1.5, "perf/mfu": 0.5})
    found = scrape(tracker)
    tracker.finish({})
    assert found[key("truemfu_warmup")] == 0.0
    assert found[key("truemfu_mfu")] == 0.5


def test_datasets_are_labels_whatever_their_names() -> None:
    tracker = started()
    tracker.log(1, {"dataset/code/loss": 1.5, 'dataset/a/b "c"/loss': 2.5, "dataset/code/accuracy": 0.5})
    found = scrape(tracker)
    tracker.finish({})
    assert found[key("truemfu_dataset_loss", dataset="code")] == 1.5
    assert found[key("truemfu_dataset_loss", dataset='a/b "c"')] == 2.5
    assert found[key("truemfu_dataset_accuracy", dataset="code")] == 0.5


def test_names_that_would_be_one_time_series_stay_apart() -> None:
    tracker = started(folder="\udcff")
    tracker.log(
        1, {"dataset/a/loss": 1.0, "dataset//loss": 2.0, "dataset/\udcff/loss": 3.0, "dataset/a\nb/loss": 4.0}
    )
    tracker.log(2, {"dataset/loss": 5.0, "perf/a b": 6.0, "perf/a+b": 7.0, "a_b": 8.0})
    found = scrape(tracker)
    tracker.finish({})
    assert {
        dict(labels)["dataset"]: value
        for (name, labels), value in found.items()
        if name == "truemfu_dataset_loss"
    } == {"a": 1.0, "": 2.0, "?": 3.0, "a\nb": 4.0}
    others = {name: value for (name, labels), value in found.items() if value >= 5}
    assert sorted(others.values()) == [5.0, 6.0, 7.0, 8.0]
    assert others["truemfu_a_b"] == 6.0


def test_names_of_other_tools_stay_apart() -> None:
    tracker = started()
    row = {"perf/mfu": 0.5, "perf/mfu_percent": 50.0, "perf/memory_peak_bytes": 2**31}
    tracker.log(1, rename(row, "torchtitan"))
    found = scrape(tracker)
    tracker.finish({})
    assert found[key("truemfu_mfu")] == 0.5
    assert found[key("truemfu_mfu_percent")] == 50.0
    assert found[key("truemfu_memory_max_active_GiB")] == 2.0


def test_the_rank_is_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    tracker = started()
    found = scrape(tracker)
    tracker.finish({})
    assert found == {("truemfu_run_info", (("rank", "3"), ("run", "llama"))): 1.0}


def test_two_trackers_in_one_process_serve_their_own_values() -> None:
    trackers = [started(), started()]
    for value, tracker in enumerate(trackers):
        tracker.log(value, {"perf/mfu": value / 4})
    assert [scrape(tracker)[key("truemfu_mfu")] for tracker in trackers] == [0.0, 0.25]
    for tracker in trackers:
        tracker.finish({})


def test_a_port_in_use_is_said_with_what_to_do() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"port {port}: Address already in use; pass PrometheusTracker\(port="
        ):
            PrometheusTracker(port=port, address="127.0.0.1").start({})


def test_nothing_is_served_after_the_end() -> None:
    tracker = started()
    tracker.finish({})
    with pytest.raises(urllib.error.URLError):
        scrape(tracker)
