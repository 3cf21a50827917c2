"""A real server, scraped: the last values, under names and labels Prometheus takes."""

from __future__ import annotations

import os
import socket
import urllib.error
import urllib.request
from math import isnan, nan
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from truemfu.errors import UsageError
from truemfu.trackers.metric_aliases import rename
from truemfu.trackers.prometheus import PrometheusTracker
from truemfu.trackers.prometheus_server import (
    MOST_CONNECTIONS,
    REQUEST_LIMIT_S,
    MetricsServer,
    parse_address,
)
from truemfu.trackers.table import make_tracker

FOREVER_S = 600.0
LABELS = {"rank": "0", "run": "llama"}


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


def started(**run: object) -> PrometheusTracker:
    tracker = PrometheusTracker(run="llama", port=0, address="127.0.0.1")
    tracker.start(run)
    return tracker


def scrape(tracker: PrometheusTracker) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{tracker.port}/metrics", timeout=FOREVER_S) as answer:
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


def test_what_a_silent_rank_costs_is_not_that_of_the_rank_before_it() -> None:
    tracker = started()
    tracker.log(1, {"perf/straggler_rank": 3, "perf/straggler_share": 0.5})
    tracker.log(2, {"perf/mfu": 0.4})
    assert scrape(tracker)[key("truemfu_straggler_share")] == 0.5
    tracker.log(3, {"perf/straggler_rank": 7})
    found = scrape(tracker)
    tracker.finish({})
    assert found[key("truemfu_straggler_rank")] == 7.0
    assert isnan(found[key("truemfu_straggler_share")])


def test_datasets_are_labels_whatever_their_names() -> None:
    tracker = started()
    tracker.log(1, {"dataset/code/loss": 1.5, 'dataset/a/b "c"/loss': 2.5, "dataset/code/accuracy": 0.5})
    found = scrape(tracker)
    tracker.finish({})
    assert found[key("truemfu_dataset_loss", dataset="code")] == 1.5
    assert found[key("truemfu_dataset_loss", dataset='a/b "c"')] == 2.5
    assert found[key("truemfu_dataset_accuracy", dataset="code")] == 0.5


def test_a_rank_is_a_label_of_its_figures() -> None:
    tracker = started()
    tracker.log(1, {"perf/rank/0/step_time": 0.5, "perf/rank/12/step_time": 0.75, "perf/step_time": 0.5})
    values = scrape(tracker)
    assert values[key("truemfu_rank_step_time", of_rank="12")] == 0.75
    assert values[key("truemfu_rank_step_time", of_rank="0")] == 0.5
    tracker.finish({})


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
            OSError,
            match=rf"port {port}: Address already in use; pass another port to PrometheusTracker\(port=",
        ):
            PrometheusTracker(port=port, address="127.0.0.1").start({})


def test_nothing_is_served_after_the_end() -> None:
    tracker = started()
    tracker.finish({})
    with pytest.raises(urllib.error.URLError):
        scrape(tracker)


def listening_on(port: int) -> set[str]:
    """The local addresses (hexadecimal, as the kernel lists them) on which a port of this machine listens."""
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {
        row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port
    }


LOOPBACK, EVERYWHERE = "0100007F", "00000000"


def test_it_listens_on_this_machine_alone_unless_an_address_is_given(tmp_path: Path) -> None:
    for tracker, expected in (
        (PrometheusTracker(port=0), LOOPBACK),
        (make_tracker("prometheus", tmp_path, address="0"), LOOPBACK),
        (make_tracker("prometheus", tmp_path, address="0.0.0.0:0"), EVERYWHERE),
        (PrometheusTracker(port=0, address="0.0.0.0"), EVERYWHERE),
    ):
        assert isinstance(tracker, PrometheusTracker)
        tracker.start({})
        assert listening_on(tracker.port) == {expected}
        tracker.finish({})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("gpu-7.example:65535", ("gpu-7.example", 65535)),
        ("[::1]:9400", ("::1", 9400)),
        ("0.0.0.0", ("0.0.0.0", 1234)),
        ("[::]", ("::", 1234)),
    ],
)
def test_an_address_is_a_port_a_host_or_both(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text, "it", port=1234) == expected


@pytest.mark.parametrize("text", ["", ":9400", "::1:9400", "a b:1", "host:", "host:x", "http://host:1"])
def test_what_is_no_address_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^it takes PORT, HOST:PORT or \[IPV6\]:PORT; got '"):
        parse_address(text, "it", port=1234)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_idle_connections_cost_few_descriptors_and_no_scrape() -> None:
    tracker = started()
    tracker.log(1, {"perf/mfu": 0.5})
    before = open_files()
    idle = [socket.create_connection(("127.0.0.1", tracker.port), timeout=FOREVER_S) for _ in range(300)]
    try:
        assert scrape(tracker)[key("truemfu_mfu")] == 0.5
        # The 300 ends of this test are open; of the server's own only so many.
        assert open_files() - before - len(idle) <= MOST_CONNECTIONS
        assert scrape(tracker)[key("truemfu_mfu")] == 0.5
    finally:
        for connection in idle:
            connection.close()
        tracker.finish({})


def test_a_connection_that_sends_too_slowly_is_closed() -> None:
    now_s = 0.0
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, clock=lambda: now_s)
    try:
        slow, slower = (
            socket.create_connection(("127.0.0.1", server.port), timeout=FOREVER_S) for _ in range(2)
        )
        with slow, slower:
            urllib.request.urlopen(server.url, timeout=FOREVER_S).close()  # so both are accepted
            now_s = REQUEST_LIMIT_S - 0.1
            slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert slow.recv(4) == b"HTTP"
            now_s = REQUEST_LIMIT_S
            assert slower.recv(1) == b""
    finally:
        server.close()


def test_a_connection_that_breaks_is_not_told_on_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    tracker = started()
    for request in (b"GET", b"\xff\x1b]0;x\x07 / HTTP/1.0\r\n\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", tracker.port), timeout=FOREVER_S) as broken:
            broken.send(request)
            broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    scrape(tracker)
    tracker.finish({})
    assert capfd.readouterr() == ("", "")


def test_connections_that_are_open_at_the_end_are_closed() -> None:
    tracker = started()
    with socket.create_connection(("127.0.0.1", tracker.port), timeout=FOREVER_S) as idle:
        scrape(tracker)
        tracker.finish({})
        assert idle.recv(1) == b""
