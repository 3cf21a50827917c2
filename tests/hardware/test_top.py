"""`truemfu top`: its screen, its JSON, what it serves, and what it costs."""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from truemfu.cli import main
from truemfu.cli.top import Reading, reading_of, readings, screen
from truemfu.errors import ReplayEnded
from truemfu.hardware.counter_trace import Replay
from truemfu.hardware.counters import CounterSample, CounterWindow, GpuInfo, GpuProcess
from truemfu.hardware.nvml import NvmlSource
from truemfu.hardware.sampler import Health, Sampler

# The package has the command under this name, not the module.
top_module = importlib.import_module("truemfu.cli.top")
ROOT = Path(__file__).parents[2]
TRACES = Path(__file__).parent / "traces"
H200 = str(TRACES / "h200_made_up.jsonl")

SCREEN = """\
GPU      FLOP util   TFLOP/s   "GPU util"   tensor       SM     DRAM     clock MHz     power W   memory GiB   processes
───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
0 H200      67.8 %       671      100.0 %   93.0 %   99.0 %   31.0 %   1335 / 1980   688 / 700     31 / 140   python 30.0, 4301 0.5
1 H200       0.0 %         0        0.0 %    0.0 %    0.0 %    0.0 %    345 / 1980    78 / 700      1 / 140   none
GPU 0: clock held back by power limit 100.0 % of the time
"""  # noqa: E501


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def played(name: str) -> Sampler:
    sampler = Sampler(Replay(TRACES / name))
    while sampler.poll():
        pass
    return sampler


def captured(found: Sequence[Reading], width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(screen(found, width))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


# The screen


def test_the_screen() -> None:
    assert captured(readings(played("h200_made_up.jsonl")), 140) == SCREEN


@pytest.mark.parametrize("width", [140, 120, 100, 80, 60])
def test_a_narrow_window_loses_columns_and_nothing_is_cut(width: int) -> None:
    text = captured(readings(played("h200_made_up.jsonl")), width)
    table = text.splitlines()[:4]
    assert max(map(len, table)) <= width
    assert "FLOP util" in table[0]
    assert '"GPU util"' in table[0]
    assert "67.8 %" in table[2]
    assert "…" not in text


def test_a_gpu_without_counters_says_why_and_shows_the_rest() -> None:
    text = captured(readings(played("a100_no_gpm_made_up.jsonl")), 140)
    row, *notes = text.splitlines()[2:]
    assert row.split()[:4] == ["0", "A100-SXM4-80GB", "-", "-"]
    assert "1410 / 1410" in row
    assert "300 / 400" in row
    assert notes == ["GPU 0: no activity counters: this GPU has no GPM (Hopper and later have it)"]


def test_a_lost_gpu_shows_no_old_figures() -> None:
    sampler = Sampler(Replay(TRACES / "trouble_made_up.jsonl"))
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
    reading = readings(played("h200_made_up.jsonl"))[0]
    assert (reading.peak_flops_per_s, reading.peak_source) == (1e15, "override")


def test_names_of_processes_do_not_write_on_the_terminal() -> None:
    evil = GpuProcess(pid=1, name="\x1b[2Jpython[red]", memory_bytes=2**30)
    many = tuple(GpuProcess(pid=pid, memory_bytes=pid) for pid in (2, 3))
    window = CounterWindow(index=0, begin_s=0.0, end_s=1.0, seconds=1.0, processes=(*many, evil))
    text = captured([reading_of(GpuInfo(index=0, name="NVIDIA H200"), window, Health())], 140)
    assert "\x1b" not in text
    assert "?[2Jpython[red] 1.0, 3 0.0, +1" in text


def test_live_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(record=True, force_terminal=True, width=140, height=30, file=io.StringIO())
    top_module._live(Sampler(Replay(H200)), 0.001, console)
    text = console.export_text()
    assert "671" in text
    assert "clock held back by power limit" in text


# The command


def test_once_as_json_is_the_whole_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--once", "--json", "--replay", H200) == 0
    first, second = json.loads(capsys.readouterr().out)["gpus"]
    window = first["window"]
    assert (first["name"], window["seconds"], window["intervals"]) == ("NVIDIA H200", 7.0, 7)
    assert window["energy_j"] == 3 * 310 + 4 * 688
    assert first["executed_flop_utilisation"] == first["executed_flops_per_s"] / 989.4e12
    assert first["peak_source"] == "datasheet: NVIDIA H200"
    assert first["no_gpm_reason"] is None
    assert second["window"]["tensor_active"] < 0.03


def test_json_without_once_is_a_line_for_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--json", "--interval", "0.01", "--replay", H200) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 7
    assert [line["gpus"][0]["window"]["gpu_utilisation"] for line in lines] == [0.58] * 3 + [1.0] * 4


def test_in_a_pipe_it_prints_a_table_for_each_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--interval", "0.01", "--replay", H200) == 0
    out = capsys.readouterr().out
    assert out.count("FLOP util") == 7
    assert out.endswith(SCREEN)


def test_a_run_can_be_recorded_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.jsonl"
    assert call("--once", "--json", "--replay", H200, "--record", str(copy)) == 0
    recorded = capsys.readouterr().out
    assert call("--once", "--json", "--replay", str(copy)) == 0
    assert capsys.readouterr().out == recorded


def test_leaving_with_control_c_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    assert call("--replay", H200) == 0


def test_a_real_machine_is_read_twice_for_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(top_module, "_open", lambda path: Replay(H200))
    monkeypatch.setattr(time, "sleep", waits.append)
    assert call("--once", "--json", "--interval", "2") == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["window"]["intervals"] == 1
    assert waits == [2.0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nvidia-ml-py: pip install 'truemfu[nvidia]'"),
        (("--once", "--json"), "nvidia-ml-py: pip install 'truemfu[nvidia]'"),
        (("--interval", "0"), "--interval must be from 0.01 to 3600 seconds, got 0"),
        (("--interval", "nan"), "--interval must be from 0.01 to 3600 seconds"),
        (("--replay", "nowhere.jsonl"), "cannot read the trace nowhere.jsonl"),
        (("--replay", H200, "--record", "no/where.jsonl"), "cannot write the trace no/where.jsonl"),
        (("--replay", H200, "--export", "99999"), "cannot serve on port 99999"),
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

    monkeypatch.setattr(top_module, "_open", lambda path: NvmlSource(nvml=NoDriver()))
    assert call() == 2
    assert capsys.readouterr().err == (
        "error: NVML cannot be opened, so no NVIDIA GPU can be read: NVML Shared Library Not Found\n"
    )


# Prometheus and Grafana


def scraped(name: str) -> str:
    pytest.importorskip("prometheus_client")
    from truemfu.cli.top_export import serving

    sampler = played(name)
    with serving(lambda: readings(sampler), 0) as address, urllib.request.urlopen(address) as answer:
        text: str = answer.read().decode()
        return text


def test_prometheus_is_served_the_last_interval() -> None:
    text = scraped("h200_made_up.jsonl")
    labels = r'\{gpu="0",name="NVIDIA H200",uuid="GPU-[-0]+"\}'
    for metric, value in {
        "executed_flops_per_second": 0.93 * 132 * 4096 * 1335e6,
        "driver_utilisation_ratio": 1.0,
        "tensor_active_ratio": 0.93,
        "sm_clock_hertz": 1335e6,
        "power_watts": 688.0,
        "dropped_intervals_total": 0.0,
        "processes": 2.0,
    }.items():
        line = re.search(rf"^truemfu_gpu_{metric}{labels} (\S+)$", text, re.MULTILINE)
        assert line, metric
        assert float(line[1]) == pytest.approx(value)
    assert re.search(
        r'^truemfu_gpu_throttled_ratio\{gpu="0".*reason="power_limit".*\} 1.0$', text, re.MULTILINE
    )


def test_prometheus_is_not_served_what_is_not_known() -> None:
    text = scraped("a100_no_gpm_made_up.jsonl")
    assert "truemfu_gpu_power_watts{" in text
    assert "tensor_active_ratio{" not in text
    assert "executed_flops_per_second{" not in text


def test_serving_through_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("prometheus_client")
    assert call("--replay", H200, "--export", "0", "--interval", "0.01") == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"serving http://localhost:\d+/metrics\n", err)


def test_without_prometheus_client_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert call("--replay", H200, "--export", "0") == 2
    assert "pip install 'truemfu[prometheus]'" in capsys.readouterr().err


def test_the_dashboard_asks_for_what_is_served() -> None:
    dashboard = json.loads((ROOT / "docs" / "grafana" / "truemfu-gpus.json").read_text(encoding="utf-8"))
    asked = {
        metric
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for metric in re.findall(r"truemfu_gpu_\w+", target["expr"])
    }
    served = set(re.findall(r"^(truemfu_gpu_\w+)\{", scraped("h200_made_up.jsonl"), re.MULTILINE))
    assert len(asked) >= 12
    assert asked <= served
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# Cost


class Busy:
    """Eight GPUs that never look the same twice, for some rounds."""

    def __init__(self, rounds: int) -> None:
        trace = Replay(H200)
        self._sample = [trace.read(0) for _ in range(8)][-1]
        self._gpus = [msgspec.structs.replace(trace.gpus()[0], index=index) for index in range(8)]
        self._left = rounds * len(self._gpus)

    def gpus(self) -> Sequence[GpuInfo]:
        return self._gpus

    def read(self, index: int) -> CounterSample:
        if not self._left:
            raise ReplayEnded("enough")
        self._left -= 1
        return msgspec.structs.replace(
            self._sample,
            index=index,
            at_s=-float(self._left),
            energy_j=None,
            sm_clock_hz=1.3e9 + self._left % 97 * 1e6,
        )

    def close(self) -> None: ...


def test_eight_gpus_once_a_second_take_under_a_hundredth_of_a_core() -> None:
    rounds = 50
    for length in (5, rounds):
        sampler = Sampler(Busy(length + 1), keep=1)
        console = Console(file=io.StringIO(), force_terminal=True, width=140, height=40)
        begin_s = time.process_time()
        top_module._live(sampler, 0.0001, console)
        each_s = (time.process_time() - begin_s) / length
        assert sampler.health(7).intervals == length
    assert each_s < 0.01, f"{1e3 * each_s:.2f} ms of processor time for each second"
