"""`truemfu peak`: its table, its JSON, and how to use what it found."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest
from tests.command_line import Run, caller

from truemfu.cli import hardware
from truemfu.hardware.ceiling.ceiling import CeilingRun, MatmulCeiling

BURST = CeilingRun(
    shape=(8192, 8192, 8192),
    seconds=0.01,
    flops_per_s=865.2e12,
    of_datasheet=0.8745,
    clock_of_datasheet=1.0109,
    pipe_of_clock=0.8651,
    clock_hz=1850e6,
    reported_clock_hz=1980e6,
    power_limit_w=700.0,
    throttle={},
    limited_by="pipe",
)
SUSTAINED = CeilingRun(
    shape=(2048, 2048, 2048),
    seconds=1.0,
    flops_per_s=665.04e12,
    of_datasheet=0.6722,
    clock_of_datasheet=0.7514,
    pipe_of_clock=0.8946,
    clock_hz=1375e6,
    reported_clock_hz=1525e6,
    power_w=691.2,
    power_limit_w=700.0,
    throttle={"power_limit": 1.0},
    limited_by="power_limit",
)
BF16 = MatmulCeiling(
    dtype="bf16",
    device_name="NVIDIA H200",
    burst=BURST,
    sustained=SUSTAINED,
    datasheet_flops_per_s=989.4e12,
    datasheet_clock_hz=1830e6,
)
FP4 = MatmulCeiling(dtype="fp4", device_name="NVIDIA H200", skipped="torch has no [plain] fp4 product")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return caller(capsys)


def answer(monkeypatch: pytest.MonkeyPatch, *ceilings: MatmulCeiling) -> None:
    monkeypatch.setattr(hardware, "measure_ceiling", lambda **_: ceilings)


def cells(line: str) -> Sequence[str]:
    return re.split(r"\s{2,}", line.strip())


def test_a_row_for_the_burst_and_one_for_what_is_held(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, BF16, FP4)
    lines = run("peak").out.splitlines()
    assert lines[0].strip() == "NVIDIA H200: large matrix products, reached / datasheet"
    assert cells(lines[1]) == [
        "dtype",
        "TFLOP/s",
        "reached",
        "= clock",
        "× pipe",
        "SM MHz",
        "W / limit",
        "m×n×k",
        "limited by",
    ]
    assert cells(lines[3]) == [
        "bf16 burst",
        "865.2 / 989.4",
        "87.5 %",
        "101.1 %",
        "86.5 %",
        "1850 / 1830",
        "- / 700",
        "8192×8192×8192",
        "pipe",
    ]
    assert cells(lines[4]) == [
        "bf16 sustained",
        "665 / 989.4",
        "67.2 %",
        "75.1 %",
        "89.5 %",
        "1375 / 1830",
        "691 / 700",
        "2048×2048×2048",
        "power limit",
    ]
    assert lines[5] == "fp4 skipped: torch has no [plain] fp4 product"
    assert max(map(len, lines)) <= 120


def test_the_last_line_tells_how_to_use_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = MatmulCeiling(dtype="fp8", device_name="NVIDIA H200", burst=BURST, sustained=SUSTAINED)
    answer(monkeypatch, fp8, BF16)
    last = run("peak").out.splitlines()[-1]
    assert "(bf16, sustained)" in last
    assert last.endswith("monitoring.measured_peak_tflops: 665")
    answer(monkeypatch, fp8)
    assert "(fp8, sustained)" in run("peak").out.splitlines()[-1]
    answer(monkeypatch, FP4)
    nothing = run("peak")
    assert (nothing.code, nothing.out) == (1, "fp4 skipped: torch has no [plain] fp4 product\n")
    assert run("peak", "--json").code == 1


def test_a_clock_that_only_the_driver_tells_is_an_upper_bound(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = CeilingRun(shape=(1, 2, 3), seconds=1.0, flops_per_s=1e12, reported_clock_hz=1525e6)
    note = "the actual clock is not known: libcuda.so.1 cannot be loaded"
    answer(monkeypatch, MatmulCeiling(dtype="bf16", device_name="x", sustained=held, notes=(note,)))
    lines = run("peak").out.splitlines()
    assert cells(lines[1]) == ["dtype", "TFLOP/s", "SM MHz", "m×n×k"]  # and no column without a value
    assert cells(lines[3]) == ["bf16 sustained", "1", "≤1525", "1×2×3"]
    assert lines[4] == f"note: {note}"


def test_json_keeps_its_keys_and_has_all_that_is_known(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, BF16, FP4)
    bf16, fp4 = json.loads(run("peak", "--json").out)
    assert (bf16["dtype"], bf16["device_name"], bf16["skipped"]) == ("bf16", "NVIDIA H200", None)
    assert bf16["shape"] == [8192, 8192, 8192]
    assert (bf16["burst_flops_per_s"], bf16["sustained_flops_per_s"]) == (865.2e12, 665.04e12)
    assert (bf16["datasheet_flops_per_s"], bf16["datasheet_clock_hz"]) == (989.4e12, 1830e6)
    assert bf16["sustained"] == {
        "shape": [2048, 2048, 2048],
        "seconds": 1.0,
        "flops_per_s": 665.04e12,
        "of_datasheet": 0.6722,
        "clock_of_datasheet": 0.7514,
        "pipe_of_clock": 0.8946,
        "clock_hz": 1375e6,
        "reported_clock_hz": 1525e6,
        "power_w": 691.2,
        "power_limit_w": 700.0,
        "throttle": {"power_limit": 1.0},
        "limited_by": "power_limit",
    }
    assert fp4["burst"] is fp4["sustained"] is fp4["shape"] is None
    assert fp4["skipped"] == "torch has no [plain] fp4 product"


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        ("fp4", "torch has no plain fp4 matrix product"),
        ("bf17", "unknown dtype 'bf17'"),
        ("fp5", "unknown dtype"),
    ],
)
def test_only_what_can_be_measured_is_offered(run: Run, dtype: str, words: str) -> None:
    result = run("peak", "--dtype", dtype)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {words}")
    offered = result.err.partition("give one of ")[2]
    assert "bf16, fp8, int8" in offered
    assert "fp4" not in offered


COMMAND = [
    sys.executable,
    "-c",
    "from truemfu.cli import main; main()",
    *("peak", "--dtype", "fp32", "--seconds", "0.02", "--json"),
]


def test_progress_goes_to_a_terminal_and_to_no_pipe() -> None:
    piped = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=end, env=environment) as process:
        os.close(end)
        seen = ""
        with contextlib.suppress(OSError):  # the terminal's last program has ended
            while read := os.read(terminal, 1 << 16):
                seen += read.decode(errors="replace")
        os.close(terminal)
        assert process.stdout is not None
        found = json.load(process.stdout)
    assert process.returncode == 0
    assert found[0]["dtype"] == "fp32"
    assert re.search(r"fp32: .*\d+×\d+×\d+", seen)
