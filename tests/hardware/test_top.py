"""`truemfu top`: its screen, its JSON, what it serves; in this process."""

from __future__ import annotations

import importlib
import json
import re
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.hardware.fake_nvml import GPU_IS_LOST, FakeNvml
from tests.hardware.recorded import (
    EVERY_50_MS,
    MATMUL,
    NO_GPM,
    PIPES,
    TRAINING,
    TROUBLE,
    played,
    rows_of,
    together,
)

from truemfu.cli import main
from truemfu.cli.top import readings
from truemfu.cli.top_screen import Reading, reading_of, screen
from truemfu.hardware.counters.nvml import NvmlSource
from truemfu.hardware.counters.sampler import Health, Sampler
from truemfu.hardware.counters.samples import CounterWindow, GpuInfo, GpuProcess
from truemfu.hardware.counters.trace import Replay

# The package has the command under this name, not the module.
top_module = importlib.import_module("truemfu.cli.top")
ROOT = Path(__file__).parents[2]

SCREEN = """\
GPU     FLOP util  TFLOP/s  "GPU util"  tensor      SM    DRAM  reported MHz    power W  memory GiB  processes
────────────────────────────────────────────────────────────────────────────────────────────────────────────────
0 H200     72.6 %      718     100.0 %  86.4 %  89.8 %  17.0 %   1538 / 1980  688 / 700     2 / 140  python3 1.2
1 H200      0.0 %        0     100.0 %   0.0 %  98.1 %  90.0 %   1980 / 1980  653 / 700     4 / 140  python3 3.0
GPU 0: clock throttled by power limit 100.0 % of the time
FLOP util: driver clock; the real one is 4 to 11 % lower in steady tensor work
"""  # noqa: E501


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPU 0 multiplies matrices at its power limit, GPU 1 multiplies vectors; 40 reads of each."""
    return together(tmp_path_factory.mktemp("traces") / "two.jsonl", MATMUL, PIPES, rounds=40)


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def captured(found: Sequence[Reading], width: int) -> str:
    return screen(found, width).plain + "\n"


# The screen


def test_the_screen(two: Path) -> None:
    assert captured(readings(played(two)), 140) == SCREEN


@pytest.mark.parametrize("width", [140, 120, 100, 80, 60])
def test_a_narrow_window_loses_columns_and_nothing_is_cut(width: int, two: Path) -> None:
    text = captured(readings(played(two)), width)
    assert max(map(len, text.splitlines())) <= width
    table = text.splitlines()[:4]
    assert "FLOP util" in table[0]
    assert '"GPU util"' in table[0]
    assert "72.6 %" in table[2]
    assert "…" not in text
    words = " ".join(text.split())
    assert words.endswith(" ".join(SCREEN.splitlines()[-1].split()))


def test_columns_go_one_by_one(two: Path) -> None:
    found = readings(played(two))
    assert captured(found, 112).splitlines()[0].endswith("memory GiB  processes")
    assert captured(found, 111).splitlines()[0].endswith("power W  memory GiB")


def test_the_standing_note_fits_a_narrow_terminal(two: Path) -> None:
    assert captured(readings(played(two)), 79).splitlines()[-1] == SCREEN.splitlines()[-1]


def test_what_holds_for_several_gpus_is_said_once() -> None:
    window = CounterWindow(
        index=0, begin_s=0.0, end_s=1.0, seconds=1.0, throttle={"power_limit": 0.5, "gpu_idle": 0.9}
    )
    free = CounterWindow(index=0, begin_s=0.0, end_s=1.0, seconds=1.0, throttle={})
    found = [
        reading_of(GpuInfo(index=index, name="NVIDIA H200"), free if index == 3 else window, Health())
        for index in range(6)
    ]
    assert captured(found, 140).splitlines()[-1] == (
        "GPUs 0-2, 4-5: clock throttled by power limit 50.0 % of the time"
    )


def test_a_gpu_without_counters_says_why_and_shows_the_rest() -> None:
    text = captured(readings(played(NO_GPM)), 140)
    row, *notes = text.splitlines()[2:]
    assert row.split()[:4] == ["0", "A100-SXM4-80GB", "-", "-"]
    assert "1410 / 1410" in row
    assert "300 / 400" in row
    assert notes == ["GPU 0: no activity counters: this GPU has no GPM (Hopper and later have it)"]


def test_a_lost_gpu_shows_no_old_figures() -> None:
    sampler = Sampler(Replay(TROUBLE))
    for _ in range(5):
        sampler.poll()
    text = captured(readings(sampler), 140)
    assert text.splitlines()[2].split() == ["0", "H200", *["-"] * 10]
    assert "GPU is lost (2 intervals dropped)" in text


def test_a_chip_without_a_row_has_activity_and_no_peak() -> None:
    window = CounterWindow(index=0, begin_s=0.0, end_s=1.0, seconds=1.0, tensor_active=0.5, sm_clock_hz=1e9)
    reading = reading_of(GpuInfo(index=0, name="NVIDIA X900"), window, Health())
    assert reading.executed_flop_utilisation is None
    text = captured([reading], 140)
    assert "50.0 %" in text
    assert "no peak FLOP/s is known for 'NVIDIA X900'" in text


def test_the_peak_of_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1000")
    (reading,) = readings(played(MATMUL))
    assert (reading.peak_flops_per_s, reading.peak_source) == (1e15, "override")


def test_names_of_processes_do_not_write_on_the_terminal() -> None:
    evil = GpuProcess(pid=1, name="\x1b[2Jpython[red]", memory_bytes=2**30)
    many = tuple(GpuProcess(pid=pid, memory_bytes=pid) for pid in (2, 3))
    window = CounterWindow(index=0, begin_s=0.0, end_s=1.0, seconds=1.0, processes=(*many, evil))
    text = captured([reading_of(GpuInfo(index=0, name="NVIDIA H200"), window, Health())], 140)
    assert "\x1b" not in text
    assert "\\u001b[2Jpython[red] 1.0, 3 0.0, +1" in text


# The command


def test_once_as_json_is_the_whole_trace(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--once", "--json", "--replay", str(two)) == 0
    first, second = json.loads(capsys.readouterr().out)["gpus"]
    window, rows = first["window"], rows_of(MATMUL)[:40]
    assert (first["name"], window["intervals"]) == ("NVIDIA H200", len(rows) - 1)
    assert window["seconds"] == pytest.approx(rows[-1].at_s - rows[0].at_s)
    assert window["energy_j"] == pytest.approx((rows[-1].energy_j or 0) - (rows[0].energy_j or 0))
    assert first["executed_flop_utilisation"] == first["executed_flops_per_s"] / 989.4e12
    assert (first["peak_source"], first["clock_source"]) == ("datasheet: NVIDIA H200", "driver")
    assert (first["no_gpm_reason"], first["fault"], first["dropped_intervals"]) == (None, None, 0)
    assert second["window"]["hmma_active"] < 0.001


def test_json_without_once_is_a_line_for_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--interval", "0.01", "--replay", str(TRAINING)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    shown = [line["gpus"][0]["window"]["sm_clock_hz"] for line in lines]
    assert shown == [part.sm_clock_hz for part in played(TRAINING).intervals(0)]


def test_in_a_pipe_it_prints_a_table_for_each_interval(two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--interval", "0.01", "--replay", str(two)) == 0
    out = capsys.readouterr().out
    assert out.count("processes\n") == 39
    assert out.endswith(SCREEN)


def test_once_is_a_table_of_the_whole_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--once", "--replay", str(TRAINING)) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split()[:8] == ["0", "H200", "38.0", "%", "376", "86.8", "%", "36.5"]


def test_once_tells_of_intervals_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--once", "--replay", str(TROUBLE)) == 0
    dropped = played(TROUBLE).health(0).dropped
    assert dropped > 1
    assert f"GPU 0: {dropped} intervals dropped: no usable counters" in capsys.readouterr().out.splitlines()


def test_the_help_says_what_the_figures_rest_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the clock is the one that the driver requested" in text
    assert "the actual clock is 4 to 11 % lower in steady tensor work" in text
    assert "some kernels without a matrix product use the tensor pipe too" in text
    assert "at least 0.25, since the counters are updated every 0.1 s" in text


def test_a_trace_that_is_recorded_again_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.jsonl"
    assert call("--once", "--json", "--replay", str(TROUBLE), "--record", str(copy)) == 0
    recorded = capsys.readouterr().out
    assert call("--once", "--json", "--replay", str(copy)) == 0
    assert capsys.readouterr().out == recorded
    assert Replay(copy).note == Replay(TROUBLE).note is not None


def test_a_trace_is_not_recorded_over_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, link = tmp_path / "trace.jsonl", tmp_path / "link.jsonl"
    trace.write_bytes(MATMUL.read_bytes())
    link.symlink_to(trace)
    for name in (trace, link):
        assert call("--once", "--replay", str(trace), "--record", str(name)) == 2
        assert capsys.readouterr().err == (
            f"error: --record would overwrite {trace}, which is being replayed: give --record another file\n"
        )
    assert trace.read_bytes() == MATMUL.read_bytes()


def test_what_was_shown_and_recorded_is_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reads every 50 ms, half of them without news and a tenth with an energy reading, until Ctrl-C."""
    nvml = FakeNvml(rows=rows_of(EVERY_50_MS))
    monkeypatch.setattr(
        top_module, "_open", lambda path, energy: NvmlSource(nvml=nvml, clock=nvml.clock, energy=energy)
    )
    left = iter(range(len(nvml.rows) - 1))
    monkeypatch.setattr(time, "sleep", lambda seconds: None if next(left, None) is not None else interrupt())
    trace = tmp_path / "trace.jsonl"
    assert call("--json", "--record", str(trace)) == 0
    live = capsys.readouterr().out
    monkeypatch.undo()
    header = json.loads(trace.read_text().splitlines()[0])
    assert re.fullmatch(r"recorded \d{4}-\d\d-\d\d by truemfu top, every 1 s", header["note"])
    assert call("--json", "--replay", str(trace), "--interval", "0.01") == 0
    assert capsys.readouterr().out == live
    assert len(live.splitlines()) == len(nvml.rows) - 1


def interrupt() -> None:
    raise KeyboardInterrupt


def test_leaving_with_control_c_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: interrupt())
    assert call("--replay", str(MATMUL)) == 0


def test_a_real_machine_is_read_twice_for_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    nvml = FakeNvml(rows=rows_of(MATMUL))
    monkeypatch.setattr(
        top_module, "_open", lambda path, energy: NvmlSource(nvml=nvml, clock=nvml.clock, energy=energy)
    )
    monkeypatch.setattr(time, "sleep", waits.append)
    assert call("--once", "--json", "--interval", "2") == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["window"]["intervals"] == 1
    assert (nvml.reads, waits) == (2, [2.0])


def test_energy_is_read_where_it_is_shown_or_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def opened(path: str | None, *, energy: bool) -> Replay:
        asked.append(energy)
        return Replay(MATMUL)

    monkeypatch.setattr(top_module, "_open", opened)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for arguments in ((), ("--json",), ("--once",), ("--record", str(tmp_path / "trace.jsonl"))):
        assert call(*arguments) == 0
    assert asked == [False, True, False, True]


def test_a_gpu_that_is_lost_on_the_way_is_a_line_below_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml = FakeNvml(gpus=2)

    def lose(reads: int) -> None:
        nvml.errors = {"nvmlGpmSampleGet": GPU_IS_LOST} if reads % 2 and reads > 4 else {}

    nvml.before_read = lose
    left = iter(range(4))
    monkeypatch.setattr(top_module, "_open", lambda path, energy: NvmlSource(nvml=nvml))
    monkeypatch.setattr(time, "sleep", lambda seconds: None if next(left, None) is not None else interrupt())
    assert call() == 0
    *_, row, lost, held, note, clock = capsys.readouterr().out.splitlines()
    assert "688 / 700" in row
    assert lost.split() == ["1", "H200", *["-"] * 10]
    assert held == "GPU 0: clock throttled by power limit 100.0 % of the time"
    assert note == ("GPU 1: GPU 1 (NVIDIA H200): the activity counters: NVML error 15 (3 intervals dropped)")
    assert clock.startswith("FLOP util")


def test_once_gives_up_on_a_driver_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("truemfu.hardware.counters.sampler._HANG_TIMEOUT_S", 0.5)
    monkeypatch.setattr("truemfu.hardware.counters.nvml._CLOSE_S", 0.01)
    answer = threading.Event()
    nvml = FakeNvml()
    nvml.before_read = lambda reads: answer.wait(20)
    monkeypatch.setattr(top_module, "_open", lambda path, energy: NvmlSource(nvml=nvml))
    assert call("--once", "--json") == 1
    answer.set()
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: the driver has not answered for \d s\n", err)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nvidia-ml-py: pip install 'truemfu[nvidia]'"),
        (("--once", "--json"), "nvidia-ml-py: pip install 'truemfu[nvidia]'"),
        (("--interval", "0.2"), "from 0.25 to 3600 seconds, got 0.2; the counters are updated every 0.1 s"),
        (("--interval", "nan"), "--interval must be from 0.25 to 3600 seconds, got nan"),
        (("--interval", "0", "--replay", str(MATMUL)), "--interval must be from 0.01 to 3600 seconds, got 0"),
        (("--replay", "nowhere.jsonl"), "cannot read the trace nowhere.jsonl"),
        (("--once", "--export", "0", "--replay", str(MATMUL)), "leave out --once or --export"),
        (("--replay", str(MATMUL), "--record", "no/where.jsonl"), "cannot write the trace no/where.jsonl"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_machine_without_a_driver_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NoDriver:
        class NVMLError(Exception): ...

        def nvmlInit(self) -> None:
            raise self.NVMLError("NVML Shared Library Not Found")

    monkeypatch.setattr(top_module, "_open", lambda path, energy: NvmlSource(nvml=NoDriver()))
    assert call() == 1
    assert capsys.readouterr().err == (
        "error: NVML cannot be opened, so no NVIDIA GPU can be read: NVML Shared Library Not Found\n"
    )


# Prometheus and Grafana


def scraped(path: Path) -> str:
    pytest.importorskip("prometheus_client")
    from truemfu.cli.top_export import serving

    sampler = played(path)
    with serving(lambda: readings(sampler), 0) as address, urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
        return text


def test_prometheus_is_served_the_last_interval(two: Path) -> None:
    text = scraped(two)
    window = played(two).latest(0)
    assert window is not None
    labels = r'\{gpu="0",name="NVIDIA H200",uuid="GPU-[-0]+"\}'
    for metric, value in {
        "executed_flops_per_second": (window.hmma_active or 0) * 132 * 4096 * (window.sm_clock_hz or 0),
        "driver_utilisation_ratio": 1.0,
        "tensor_active_ratio": window.tensor_active,
        "sm_clock_hertz": window.sm_clock_hz,
        "power_watts": window.power_w,
        "dropped_intervals_total": 0.0,
        "processes": 1.0,
    }.items():
        line = re.search(rf"^truemfu_gpu_{metric}{labels} (\S+)$", text, re.MULTILINE)
        assert line, metric
        assert float(line[1]) == pytest.approx(value)
    assert re.search(
        r'^truemfu_gpu_throttled_ratio\{gpu="0".*reason="power_limit".*\} 1.0$', text, re.MULTILINE
    )
    assert re.search(r'^truemfu_gpu_dram_active_ratio\{gpu="1".*\} 0.90', text, re.MULTILINE)
    (said,) = re.findall(r"^# HELP truemfu_gpu_executed_flops_per_second (.*)$", text, re.MULTILINE)
    assert "upper bound, at the clock the driver reports" in said
    assert re.search(r"^# HELP truemfu_gpu_power_limit_watts power limit w$", text, re.MULTILINE)
    assert re.search(r"^# HELP truemfu_gpu_power_watts .* over the last interval$", text, re.MULTILINE)


def test_an_idle_gpu_is_not_served_as_held_back() -> None:
    from truemfu.cli.top_export import serving

    pytest.importorskip("prometheus_client")
    window = CounterWindow(
        index=0, begin_s=0.0, end_s=1.0, seconds=1.0, throttle={"power_limit": 0.0, "gpu_idle": 1.0}
    )
    found = [reading_of(GpuInfo(index=0, name="NVIDIA H200"), window, Health())]
    with serving(lambda: found, 0) as address, urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    assert 'reason="power_limit"' in text
    assert "gpu_idle" not in text


def test_prometheus_is_not_served_what_is_not_known() -> None:
    text = scraped(NO_GPM)
    assert "truemfu_gpu_power_watts{" in text
    assert "tensor_active_ratio{" not in text
    assert "executed_flops_per_second{" not in text


def test_serving_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert call("--replay", str(MATMUL), "--export", "0", "--interval", "0.01") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"serving http://127\.0\.0\.1:\d+/metrics\n", err)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "127.0.0.2"])
def test_the_address_that_is_printed_is_the_one_it_listens_on(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    assert call("--replay", str(MATMUL), "--export", f"{host}:0", "--interval", "0.01") == 0
    assert re.fullmatch(rf"serving http://{re.escape(host)}:\d+/metrics\n", capsys.readouterr().err)
    from truemfu.cli.top_export import serving

    with serving(list, 0, host) as address:
        port = int(address.split(":")[2].partition("/")[0])
        with socket.create_connection((host, port), timeout=10):
            pass
        if host == "127.0.0.1":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=10)


def test_a_port_that_cannot_be_had_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    for port in ("65536", "-1"):
        assert call("--replay", str(MATMUL), "--export", port) == 2
        err = capsys.readouterr().err
        assert err == f"error: --export takes a port from 0 (any free one) to 65535, got {port}\n"


def test_a_port_that_is_taken_costs_no_old_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    old = tmp_path / "old.jsonl"
    old.write_text("precious")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert call("--replay", str(MATMUL), "--record", str(old), "--export", str(port)) == 2
    assert re.fullmatch(
        rf"error: cannot serve on port {port}: .*; give --export another port or host\n",
        capsys.readouterr().err,
    )
    assert old.read_text() == "precious"


def test_without_prometheus_client_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert call("--replay", str(MATMUL), "--export", "0") == 2
    assert "pip install 'truemfu[prometheus]'" in capsys.readouterr().err


def test_the_dashboard_asks_for_what_is_served() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "truemfu-gpus.json").read_text(encoding="utf-8"))
    asked = {
        metric
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for metric in re.findall(r"truemfu_gpu_\w+", target["expr"])
    }
    variables = dashboard["templating"]["list"]
    asked |= {metric for each in variables for metric in re.findall(r"truemfu_gpu_\w+", each["query"])}
    served = set(re.findall(r"^(truemfu_gpu_\w+)\{", scraped(MATMUL), re.MULTILINE))
    assert len(asked) >= 12
    assert asked <= served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    names = {each["name"] for each in variables}
    used = {word for word in re.findall(r"\$\{?(\w+)", json.dumps(dashboard)) if not word.startswith("__")}
    assert used == names == {"datasource", "instance", "gpu"}
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {"${datasource}"}
