"""Generation servers beside a training, read over real sockets: figures by hand, faults, threads.

The texts in `data/server_metrics` are what the metrics classes of vLLM 0.33.0 (`PrometheusStatLogger`, two
engines) and SGLang 0.5.23 (`SchedulerMetricsCollector`, `TokenizerMetricsCollector`) export, without help
lines and histograms.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from rank_processes import free_address, run_ranks
from tests.waiting import wait_until

from truemfu import TrainingMonitor
from truemfu.cli import cli
from truemfu.errors import TruemfuWarning, UsageError
from truemfu.hardware.detect import find_spec
from truemfu.monitor import generation_servers, server_counters
from truemfu.monitor.config import load_config
from truemfu.monitor.generation_servers import GenerationServers
from truemfu.monitor.server_counters import CannotRead, ServerSetting, ServerWork, parsed, work_between

prometheus_client = pytest.importorskip("prometheus_client")

TEXTS = Path(__file__).parents[1] / "data" / "server_metrics"
H100 = find_spec("NVIDIA H100 80GB HBM3")
PEAK_TFLOPS = 2.0
FAR_APART_S = 3600.0

Answer = Callable[[BaseHTTPRequestHandler], None]


class Engine:
    """Counters under the names of a server, in a registry of their own."""

    def __init__(self, prefix: str = "vllm", registry: Any = None, **labels: str) -> None:
        self.registry = registry if registry is not None else prometheus_client.CollectorRegistry()
        self.labels = {"model_name": "tiny", **labels}
        self.counters = {
            name: prometheus_client.Counter(
                f"{prefix}:{name}_total", name, list(self.labels), registry=self.registry
            )
            for name in server_counters._COUNTERS
        }

    def work(self, prompt: int, generated: int, flops: float = 0.0, read: float = 0.0, **labels: str) -> None:
        for counter, amount in zip(self.counters.values(), (prompt, generated, flops, read), strict=True):
            counter.labels(**self.labels | labels).inc(amount)

    def text(self) -> bytes:
        found: bytes = prometheus_client.generate_latest(self.registry)
        return found

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        send(request, self.text())


def send(request: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[SimpleNamespace]:
    """A real HTTP server of this host, and the paths that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass

    server = Server(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}", asked=asked)
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are read all the time."""
    monkeypatch.setattr(generation_servers, "READ_EVERY_S", 0.02)


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are read at the beginning and when they are stopped."""
    monkeypatch.setattr(generation_servers, "READ_EVERY_S", FAR_APART_S)
    monkeypatch.setattr(generation_servers, "_STOP_S", 60.0)


def watched(url: str, warnings: list[str], *, peak: float | None = None, **options: str) -> GenerationServers:
    return GenerationServers(
        [ServerSetting(server_counters.checked_url(url), **options)],
        device=torch.device("cpu"),
        configured_flops_per_s=peak,
        notice=lambda text, about=None: warnings.append(text),
    )


def summary_of(url: str, engine: Engine, asked: list[str], *, work: dict[str, Any], **options: Any) -> Any:
    """The figures of a server that does some work between its first reading and its last."""
    warnings: list[str] = []
    servers = watched(url, warnings, **options)
    wait_until(lambda: asked)
    wait_until(lambda: servers._servers[0]._last)
    engine.work(**work)
    servers.stop()
    assert warnings == []
    (found,) = servers.summary()
    return found


def test_the_counters_of_vllm_are_read() -> None:
    reading = parsed((TEXTS / "vllm-0.33.0.txt").read_bytes(), 1.0)
    assert reading.source == "vLLM"
    assert reading.started is not None
    assert sorted(reading.values.items())[:2] == [
        (("estimated_flops_per_gpu", b'{engine="0",model_name="tiny"}'), 2e12),
        (("estimated_flops_per_gpu", b'{engine="1",model_name="tiny"}'), 4e12),
    ]
    assert len(reading.values) == 8
    assert work_between(reading._replace(values={}), reading._replace(at_s=3.0)) == ServerWork(
        2.0, 200.0, 60.0, 2.0, 3e12, 1e9
    )


def test_the_counters_of_sglang_are_read() -> None:
    reading = parsed((TEXTS / "sglang-0.5.23.txt").read_bytes(), 1.0)
    assert reading.source == "SGLang"
    assert reading.started is None
    assert work_between(reading._replace(values={}), reading._replace(at_s=3.0)) == ServerWork(
        2.0, 200.0, 60.0, 2.0, 2e12, 1e9
    )


def test_the_code_of_vllm_exports_what_is_read() -> None:
    """With vLLM on the path; its class registers all metrics with prometheus_client itself."""
    loggers = pytest.importorskip("vllm.v1.metrics.loggers")
    from unittest import mock

    from vllm.v1.metrics.perf import PerfStats
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats

    settings = mock.MagicMock(speculative_config=None, kv_transfer_config=None, ec_transfer_config=None)
    settings.configure_mock(watermark_config=None, lora_config=None)
    settings.observability_config.custom_histogram_buckets = None
    settings.model_config.max_model_len, settings.model_config.served_model_name = 1024, "tiny"
    logger = loggers.PrometheusStatLogger(settings, [0, 1])
    try:
        before, _ = server_counters.read_server("this process")
        for engine, flops in enumerate((2 * 10**12, 4 * 10**12)):
            done = IterationStats()
            done.num_generation_tokens, done.prompt_token_stats.total = 30, 100
            logger.record(SchedulerStats(perf_stats=PerfStats(flops, 10**9, 10**8)), done, engine_idx=engine)
        after, is_here = server_counters.read_server("this process")
    finally:
        unregister_vllm_metrics()
    work = work_between(before, after)
    assert is_here
    assert not before.has_worked
    assert work is not None
    assert work[1:3] == (200.0, 60.0)
    assert work[4:] == (3e12, 1e9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"vllm:prompt_tokens_total 7.0", b"vllm:prompt_tokens_total 6.0"),
        (b'vllm:prompt_tokens_total{engine="1"} 7.0', b'vllm:prompt_tokens_total{engine="0"} 9.0'),
        (
            b"process_start_time_seconds 1.0\nvllm:prompt_tokens_total 7.0",
            b"process_start_time_seconds 2.0\nvllm:prompt_tokens_total 9.0",
        ),
        (b"vllm:prompt_tokens_total 7.0", b"sglang:prompt_tokens_total 9.0"),
    ],
    ids=["less than before", "a series is gone", "another process", "another server"],
)
def test_what_a_restarted_server_did_is_unknown(before: bytes, after: bytes) -> None:
    assert work_between(parsed(before, 0.0), parsed(after, 1.0)) is None


def test_an_engine_that_begins_to_work_began_at_zero() -> None:
    before = parsed(b'sglang:estimated_flops_per_gpu_total{dp_rank="0"} 4.0', 0.0)
    after = parsed(
        b'sglang:estimated_flops_per_gpu_total{dp_rank="0"} 8.0\n'
        b'sglang:estimated_flops_per_gpu_total{dp_rank="1"} 2.0',
        2.0,
    )
    assert work_between(before, after) == ServerWork(2.0, estimated_s=2.0, flops=3.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"<html>welcome</html>", "no metrics of vLLM or SGLang"),
        (b"", "no metrics of vLLM or SGLang"),
        (b"vllm:prompt_tokens_total seven", "not a number"),
        (b"vllm:prompt_tokens_total NaN", "negative, too large or NaN"),
        (b"vllm:prompt_tokens_total 1e308", "negative, too large or NaN"),
        (b"vllm:prompt_tokens_total -1", "negative, too large or NaN"),
        (b"\xff\xfe\x00vllm", "no metrics of vLLM or SGLang"),
    ],
)
def test_a_text_without_counters_is_refused(text: bytes, why: str) -> None:
    with pytest.raises(CannotRead, match=why):
        parsed(text, 0.0)


def test_figures_of_a_vllm_server_by_hand(rarely: None) -> None:
    assert H100 is not None
    engine = Engine(engine="0")
    engine.work(5, 5, 1e12, 1e9)
    engine.work(5, 5, 1e12, 1e9, engine="1")
    with serving(engine.answer) as server:
        found = summary_of(
            server.url,
            engine,
            server.asked,
            work={"prompt": 100, "generated": 30, "flops": 6e14, "read": 2e12},
            device="NVIDIA H100 80GB HBM3",
            dtype="fp8",
        )
    assert set(server.asked) == {"/metrics"}
    assert (found.prompt_tokens, found.generated_tokens) == (100, 30)
    assert found.method == "vLLM's own estimate"
    assert found.device == H100.name
    assert H100.peak_flops_per_s.fp8
    assert H100.memory_bandwidth_bytes_per_s
    assert found.mfu == pytest.approx(3e14 / found.time / H100.peak_flops_per_s.fp8)
    assert found.tflops_per_gpu == pytest.approx(3e14 / found.time / 1e12)
    assert found.read_bytes_per_gpu == 1e12
    assert found.mbu == pytest.approx(1e12 / found.time / H100.memory_bandwidth_bytes_per_s)
    assert (found.mfu_unknown, found.mbu_unknown) == (None, None)


def test_sglang_has_no_mbu_since_it_counts_weights_for_each_token(rarely: None) -> None:
    engine = Engine("sglang")
    engine.work(1, 1, 1e12, 1e9)
    with serving(engine.answer) as server:
        work = {"prompt": 100, "generated": 30, "flops": 6e12, "read": 2e13}
        found = summary_of(server.url, engine, server.asked, work=work, device="H100-SXM")
    assert found.method == "SGLang's own estimate"
    assert found.mfu is not None
    assert (found.mbu, found.read_bytes_per_gpu) == (None, None)
    assert found.mbu_unknown == generation_servers._PER_TOKEN


def test_without_its_option_a_server_has_tokens_alone(rarely: None) -> None:
    engine = Engine()
    with serving(engine.answer) as server:
        found = summary_of(
            server.url, engine, server.asked, work={"prompt": 100, "generated": 30}, device="H100-SXM"
        )
    assert (found.prompt_tokens, found.generated_tokens) == (100, 30)
    assert (found.mfu, found.mbu, found.tflops_per_gpu, found.method) == (None, None, None, None)
    assert "started without --enable-mfu-metrics" in found.mfu_unknown


def test_a_server_that_has_done_nothing_has_no_mfu(rarely: None) -> None:
    engine = Engine()
    engine.work(0, 0)
    with serving(engine.answer) as server:
        found = summary_of(
            server.url, engine, server.asked, work={"prompt": 0, "generated": 0}, device="H100-SXM"
        )
    assert (found.mfu, found.mfu_unknown) == (None, generation_servers._NO_WORK)


def test_a_server_on_this_host_has_the_peak_of_this_process(rarely: None) -> None:
    engine = Engine()
    engine.work(1, 1, 1e9, 1e9)
    with serving(engine.answer) as server:
        work = {"prompt": 1, "generated": 1, "flops": 1e12, "read": 1e9}
        found = summary_of(server.url, engine, server.asked, work=work, peak=1e12)
    assert found.mfu == pytest.approx(1 / found.time)
    assert found.mbu_unknown == "the peaks of cpu are not known"


def test_the_peak_of_another_host_is_not_assumed(rarely: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = server_counters._fetched
    monkeypatch.setattr(server_counters, "_fetched", lambda url: (*fetched(url)[:2], False))
    engine = Engine()
    engine.work(1, 1, 1e9, 1e9)
    with serving(engine.answer) as server:
        work = {"prompt": 1, "generated": 1, "flops": 1e12, "read": 1e9}
        found = summary_of(server.url, engine, server.asked, work=work, peak=1e12)
    assert (found.mfu, found.mbu, found.tflops_per_gpu is None) == (None, None, False)
    assert "give its `device` in monitoring.generation_servers" in found.mfu_unknown


def test_a_share_above_one_is_kept_and_explained(rarely: None) -> None:
    engine, warnings = Engine(), list[str]()
    engine.work(1, 1, 1e9, 1e9)
    with serving(engine.answer) as server:
        servers = watched(server.url, warnings, peak=1.0)
        wait_until(lambda: servers._servers[0]._last)
        engine.work(1, 1, 1e12, 1e9)
        servers.stop()
    assert servers.metrics()["perf/server/0/mfu"] > 1
    assert len(warnings) == 1
    assert "above 1: its `device` or `dtype` is another one" in warnings[0]


def test_a_compressed_answer_is_read(rarely: None) -> None:
    engine = Engine()
    engine.work(1, 1, 1e9, 1e9)

    def compressed(request: BaseHTTPRequestHandler) -> None:
        send(request, gzip.compress(engine.text()), Content_Encoding="gzip")

    with serving(compressed) as server:
        found = summary_of(server.url, engine, server.asked, work={"prompt": 7, "generated": 9})
    assert (found.prompt_tokens, found.generated_tokens) == (7, 9)


def hangs(request: BaseHTTPRequestHandler) -> None:
    time.sleep(5)


def dribbles(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.end_headers()
    for _ in range(100):
        request.wfile.write(b"# TYPE vllm:prompt_tokens_total counter\n")
        request.wfile.flush()
        time.sleep(0.05)


def ends_early(request: BaseHTTPRequestHandler) -> None:
    """Less than it has announced, and a number cut in two."""
    request.send_response(200)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b"vllm:generation_tokens_total 12")
    request.connection.close()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ends_early, "ended early|IncompleteRead"),
        (lambda request: send(request, b"vllm:generation_tokens_total 12"), "ended early"),
        (lambda request: send(request, gzip.compress(b"vllm:a 1\n" * 9)[:-9]), "ended early"),
        (hangs, "TimeoutError|timed out"),
        (dribbles, "takes longer than|TimeoutError"),
        (lambda request: send(request, b"", 404), "HTTP status 404"),
        (lambda request: send(request, b"", 307, Location="/metrics/"), "HTTP status 307"),
        (lambda request: send(request, b"<html>hello</html>"), "no metrics of vLLM or SGLang"),
        (lambda request: send(request, b"\x1f\x8bgarbage"), "error"),
        (lambda request: request.wfile.write(b"\0" * 100_000), "BadStatusLine|LineTooLong|Remote"),
        (lambda request: request.connection.close(), "RemoteDisconnected|Connection|BadStatusLine|OSError"),
    ],
    ids=[
        "ends early",
        "no last line",
        "cut gzip",
        "hangs",
        "dribbles",
        "404",
        "307",
        "a page",
        "broken gzip",
        "no HTTP",
        "closes",
    ],
)
def test_a_server_that_cannot_be_read_is_unknown_with_one_warning_a_run(
    often: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Answer, why: str
) -> None:
    if answer in (hangs, dribbles):
        monkeypatch.setattr(server_counters, "_TIMEOUT_S", 0.3)
    with serving(answer) as server, pytest.warns(TruemfuWarning) as given:
        rows, found, text = trained(tmp_path, server.url, until=lambda: len(server.asked) > 2)
    warnings = [str(one.message) for one in given if "generation server" in str(one.message)]
    assert len(warnings) == 1
    assert server.url in warnings[0]
    assert any(row.get("perf/mfu") for row in rows)
    reasons = {row.get("perf/server/0/mfu_unknown") for row in rows} - {None}
    assert reasons
    assert all(re.search(why, reason) for reason in reasons), reasons
    assert not any("perf/server/0/mfu" in row for row in rows)
    assert found["mfu_unknown"] in reasons
    assert "unknown" in text


def test_a_server_that_hangs_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_counters, "_TIMEOUT_S", 600.0)
    is_over = threading.Event()
    with serving(lambda request: is_over.wait() and None) as server:
        servers = watched(server.url, [])
        wait_until(lambda: server.asked)
        began_s = time.monotonic()
        servers.stop()
        took_s = time.monotonic() - began_s
        (found,) = servers.summary()
        is_over.set()
    assert took_s < 60
    assert found.mfu_unknown == generation_servers._NOT_TWICE


def test_a_server_that_is_down_and_comes_up_later_is_read_from_then_on(often: None, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine, warnings = Engine(), list[str]()
    servers = watched(f"http://127.0.0.1:{port}", warnings)
    wait_until(lambda: warnings)
    assert "ConnectionRefusedError" in warnings[0]
    assert "ConnectionRefusedError" in servers.metrics()["perf/server/0/mfu_unknown"]
    engine.work(10, 10)
    with serving(engine.answer, port):
        wait_until(lambda: servers._servers[0]._last)
        engine.work(3, 4)
        wait_until(lambda: servers._servers[0]._work.generated_tokens == 4)
        servers.stop()
    assert servers.metrics()["perf/server/0/prompt_tokens"] == 3


def test_a_restart_is_unknown_and_the_time_after_it_is_not(often: None) -> None:
    engines, warnings = [Engine()], list[str]()
    engines[0].work(100, 100, 1e12, 1e9)
    with serving(lambda request: engines[-1].answer(request)) as server:
        servers = watched(server.url, warnings, device="H100-SXM")
        one = servers._servers[0]
        wait_until(lambda: one._last)
        engines[0].work(1, 2, 1e12, 1e9)
        wait_until(lambda: one._work.generated_tokens == 2)
        again = Engine()
        again.work(50, 60, 1e12, 1e9)
        engines.append(again)
        wait_until(lambda: warnings)
        again.work(3, 4, 1e12, 1e9)
        wait_until(lambda: one._work.generated_tokens == 6)
        servers.stop()
    assert warnings == [f"generation server {server.url}/metrics: {generation_servers._RESTARTED}"]
    (found,) = servers.summary()
    assert (found.prompt_tokens, found.generated_tokens) == (4, 6)
    assert found.mfu is not None


def trained(
    folder: Path, *servers: Any, until: Callable[[], object], each_step: Callable[[int], object] = id
) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """The rows, the first server of the summary, and what `status` says of a run beside servers."""
    monitoring = {"peak_tflops": PEAK_TFLOPS, "detailed_log_freq": 1, "generation_servers": list(servers)}
    model = torch.nn.Linear(8, 8)
    monitor = TrainingMonitor(folder, config={"monitoring": monitoring}, model=model, trackers=[])
    step = 0
    ends_s = time.monotonic() + 60
    while step < 5 or not until():
        assert time.monotonic() < ends_s
        step += 1
        model(torch.randn(4, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
        each_step(step)
        monitor.save_logs()
    for _ in range(2):  # with what was read last
        time.sleep(0.1)
        step += 1
        model(torch.randn(4, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
        monitor.save_logs()
    running = CliRunner().invoke(cli, ["status", str(folder)]).output
    monitor.close()
    rows = json.loads((folder / "training_log.json").read_text())
    return rows, monitor.summary()["generation_servers"][0], running


def test_rows_have_what_servers_did_and_no_socket_is_used_on_the_training_thread(
    often: None, tmp_path: Path
) -> None:
    vllm, sglang = Engine(engine="0"), Engine("sglang")
    vllm.work(1, 1, 1e9, 1e6)
    training = threading.get_ident()
    used_by: list[int] = []
    is_on = True

    def hear(event: str, _: Any) -> None:
        if is_on and event in ("socket.connect", "socket.getaddrinfo", "socket.__new__"):
            used_by.append(threading.get_ident())

    with serving(vllm.answer) as first, serving(sglang.answer) as second:
        given = {"url": second.url, "device": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}
        sys.addaudithook(hear)
        vllm_steps = 0

        def work(step: int) -> None:
            nonlocal vllm_steps
            if len(first.asked) and len(second.asked) > 1:
                vllm_steps += 1
                vllm.work(10, 20, 1e9, 1e6)
                sglang.work(30, 40, 1e9, 1e6)
            time.sleep(0.01)

        rows, found, running = trained(
            tmp_path,
            first.url,
            given,
            until=lambda: vllm_steps > 4 and min(len(first.asked), len(second.asked)) > 6,
            each_step=work,
        )
        is_on = False
    assert used_by
    assert training not in used_by

    with_first = [row for row in rows if "perf/server/0/time" in row]
    assert with_first
    for name, in_all in (("prompt_tokens", 10), ("generated_tokens", 20)):
        assert sum(row[f"perf/server/0/{name}"] for row in with_first) == vllm_steps * in_all
    flops = sum(row["perf/server/0/tflops_per_gpu"] * row["perf/server/0/time"] for row in with_first)
    assert flops * 1e12 == pytest.approx(vllm_steps * 1e9)
    for row in with_first:
        assert row["perf/server/0/mfu"] == pytest.approx(row["perf/server/0/tflops_per_gpu"] / PEAK_TFLOPS)
        assert row["perf/server/0/method"] == "vLLM's own estimate"
        assert "perf/server/0/mbu" not in row
        assert row["perf/server/0/mbu_unknown"] == "the peaks of cpu are not known"
    assert sum(row.get("perf/server/1/generated_tokens", 0) for row in rows) == vllm_steps * 40
    assert any("perf/server/1/mfu" in row for row in rows)
    assert found["url"] == f"{first.url}/metrics"
    assert found["generated_tokens"] == vllm_steps * 20

    assert "generation server 0" in running
    assert "vLLM's own estimate" in running
    runner = CliRunner()
    ended = runner.invoke(cli, ["status", str(tmp_path), "--json"])
    assert json.loads(ended.output)["generation_servers"][0] == found
    page = tmp_path / "report.html"
    assert runner.invoke(cli, ["report", str(tmp_path), "-o", str(page)]).exit_code == 0
    assert "SGLang&#39;s own estimate" in page.read_text() or "SGLang's own estimate" in page.read_text()


def job_rank(rank: int, store: str, url: str, folder: str) -> None:
    """One of two ranks that train beside a server, which each would ask under a path of its own."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    monitoring = {"peak_tflops": PEAK_TFLOPS, "generation_servers": [f"{url}/rank{rank}"]}
    model = torch.nn.Linear(8, 8)
    monitor = TrainingMonitor(folder, config={"monitoring": monitoring}, model=model, trackers=[])
    for step in range(1, 4):
        model(torch.randn(4, 8)).sum().backward()
        monitor.log_step(step, 0, 1.0, 1.0, 0.1)
    dist.barrier()
    monitor.close()
    found = len(monitor.summary()["generation_servers"])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_the_first_rank_of_a_job_alone_reads_servers(tmp_path: Path) -> None:
    engine, store = Engine(), free_address()
    with serving(engine.answer) as server:
        arguments = [(rank, store, server.url, str(tmp_path)) for rank in range(2)]
        codes, found = run_ranks(job_rank, arguments, tmp_path, 120.0)
    assert codes == [0, 0]
    assert found == {0: 1, 1: 0}
    assert set(server.asked) == {"/rank0"}


def test_an_engine_in_this_process_is_read_from_its_registry(rarely: None) -> None:
    engine = Engine(registry=prometheus_client.REGISTRY, engine="0")
    try:
        engine.work(1, 1, 1e9, 1e9)
        servers = watched("this process", [], peak=1e12)
        wait_until(lambda: servers._servers[0]._last)
        engine.work(3, 4, 1e9, 1e9)
        servers.stop()
    finally:
        for counter in engine.counters.values():
            prometheus_client.REGISTRY.unregister(counter)
    (found,) = servers.summary()
    assert (found.prompt_tokens, found.generated_tokens, found.url) == (3, 4, "this process")
    assert found.mfu == pytest.approx(1e-3 / found.time)


def test_without_an_engine_in_this_process_its_figures_are_unknown(rarely: None) -> None:
    warnings: list[str] = []
    servers = watched("this process", warnings)
    wait_until(lambda: warnings)
    servers.stop()
    assert "disable_log_stats=False" in warnings[0]
    assert "disable_log_stats=False" in servers.metrics()["perf/server/0/mfu_unknown"]


def test_engines_in_other_processes_of_this_one_are_read_from_their_files(tmp_path: Path) -> None:
    """As SGLang's engine has them: its scheduler is a process of its own."""
    writes = (
        "import prometheus_client as p;"
        "p.Counter('sglang:estimated_flops_per_gpu_total', '', ['tp_rank']).labels('0').inc(5e9)"
    )
    reads = (
        "import prometheus_client; from truemfu.monitor.server_counters import read_server;"
        "print(read_server('this process')[0].values)"
    )
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for code in (writes, reads):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    assert "{('estimated_flops_per_gpu', b'{tp_rank=\"0\"}'): 5000000000.0}" in done.stdout


def test_the_configuration_of_servers() -> None:
    config = load_config(
        {
            "monitoring": {
                "generation_servers": [
                    "http://host:8000",
                    {
                        "url": "https://[::1]:30000/own/metrics",
                        "device": "H100-SXM",
                        "dtype": "torch.bfloat16",
                    },
                    "this process",
                ]
            }
        }
    )
    assert config.generation_servers == (
        ServerSetting("http://host:8000/metrics"),
        ServerSetting("https://[::1]:30000/own/metrics", "H100-SXM", "bf16"),
        ServerSetting("this process"),
    )


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ("http://host:8000", "must be a list of addresses"),
        (["host:8000"], r"generation_servers\[0\]: the address of a server is http://HOST:PORT"),
        (["http://host:99999"], "the address of a server"),
        (["http://host:0"], "the address of a server"),
        (["http://user:word@host:8000"], "must not have a password"),
        (["ftp://user:word@host:99999"], "must not have a password"),
        (["http://host:8000/metrics?key=1"], "must not have a password, a query"),
        (["http://host:8000", {"url": "http://host:8000/"}], "without repeated addresses"),
        ([{"device": "H100-SXM"}], "an address, or a mapping with url"),
        (
            [{"url": "http://host", "chip": "H100-SXM"}],
            r"unknown key monitoring.generation_servers\[0\].'chip'",
        ),
        (
            [{"url": "http://host", "device": "H100"}],
            "'H100' is not the name of one device: give one of h100",
        ),
        ([{"url": "http://host", "device": "H-100"}], "no device 'H-100' in the table"),
        ([{"url": "http://host", "dtype": "bf17"}], "unknown dtype 'bf17'"),
        ([{"url": 8000}], r"generation_servers\[0\].url must be text"),
        ([8000], "a mapping"),
    ],
)
def test_a_wrong_configuration_of_servers_is_an_error(servers: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config({"monitoring": {"generation_servers": servers}})


def test_a_damaged_row_of_servers_leaves_the_run_readable(tmp_path: Path) -> None:
    row = {"global_step": 1, "perf/server/0/time": "long", "perf/server/x/mfu": 1, "perf/server/0/mfu": []}
    (tmp_path / "training_log.json").write_text(json.dumps([row]))
    shown = CliRunner().invoke(cli, ["status", str(tmp_path), "--json"])
    assert json.loads(shown.output)["generation_servers"] == []
