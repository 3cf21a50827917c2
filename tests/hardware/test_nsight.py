"""Nsight Compute is found, called, and its output read: as an H200 printed it, and in other layouts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_ncu import CUBE, OPERATORS, STEP, STEP_PROCESS

from truemfu.errors import RecordError, UsageError
from truemfu.hardware.nsight import command as nsight
from truemfu.hardware.nsight.command import (
    METRICS,
    StepCount,
    find_ncu,
    ncu_command,
    read_step_count,
    table_command,
)
from truemfu.hardware.nsight.csv_output import (
    MATRIX_METRIC,
    PIPE_METRIC,
    KernelLaunch,
    errors_in,
    parse_count,
    parse_ncu_csv,
)

BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
FP8 = "sm__ops_path_tensor_src_fp8.sum"

# The details page, which nobody here calls for: a row for each metric, between what a program printed.
LONG = f"""loading "model
==PROF== Connected to process 4711 (/usr/bin/python3.12)
step, 1, loss "3.4
==PROF== Disconnected from process 4711
"ID","Process ID","Kernel Name","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","gemm","9.0","Command line profiler metrics","{BF16}","inst","137,438,953,472"
"0","4711","gemm","9.0","Command line profiler metrics","{FP8}","inst","n/a"
"0","4711","gemm","9.0","Command line profiler metrics","gpu__time_duration.sum","us","208.384"
"1","4711","add","9.0","Command line profiler metrics","{BF16}","inst","0"
"2","4712","mystery","9.0","Command line profiler metrics","{BF16}","inst","(!) n/a"
"""


def test_operators_as_the_h200_printed_them() -> None:
    launches = parse_ncu_csv(OPERATORS)
    assert {launch.process_id for launch in launches} == {610}
    assert {launch.compute_capability for launch in launches} == {"9.0"}
    found = [
        (
            {dtype: flops for dtype, flops in (launch.tensor_flops() or {}).items() if flops},
            launch.metrics.get(PIPE_METRIC),
            launch.metrics.get(MATRIX_METRIC),
        )
        for launch in launches
    ]
    assert found == [
        ({"bf16": CUBE}, CUBE // 1024, CUBE // 1024),
        ({"bf16": CUBE}, CUBE // 512, CUBE // 512),  # 4095 × 4095 × 4096 on an old instruction
        ({"bf16": 2 * 2048**3}, 2 * 2048**3 // 1024, 2 * 2048**3 // 1024),
        ({"bf16": 2 * 1024**3}, 2 * 1024**3 // 1024, 2 * 1024**3 // 1024),
        ({"bf16": 2 * 8192 * 32000 * 2048}, 1_048_576_000, 1_048_576_000),
        ({"fp16": CUBE}, CUBE // 1024, CUBE // 1024),
        ({"fp64": 2 * 1024**3}, 0, 0),  # another pipe
        ({"tf32": CUBE}, CUBE // 512, CUBE // 512),
        ({"fp8": CUBE}, CUBE // 2048, CUBE // 2048),
        ({}, 0, 0),  # multiply, add
        ({}, 0, 0),
        ({}, 262_144, 0),  # SiLU
    ]
    assert launches[0].name == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"


def test_a_whole_step_as_the_h200_printed_it() -> None:
    launches = parse_ncu_csv(STEP)
    assert len(launches) == 194
    assert {launch.process_id for launch in launches} == {STEP_PROCESS}
    assert sum((launch.tensor_flops() or {})["bf16"] for launch in launches) == 2_101_044_314_112
    assert sum(launch.metrics.get(PIPE_METRIC) or 0 for launch in launches) == 2_088_614_782
    assert sum(launch.metrics.get(MATRIX_METRIC) or 0 for launch in launches) == 2_051_873_238


def test_a_row_for_each_metric() -> None:
    launches = parse_ncu_csv(LONG)
    assert [(launch.name, launch.process_id) for launch in launches] == [
        ("gemm", 4711),
        ("add", 4711),
        ("mystery", 4712),
    ]
    assert launches[0].metrics == {BF16: CUBE, FP8: None}
    assert [launch.tensor_flops() for launch in launches] == [{"bf16": CUBE}, {"bf16": 0}, None]
    assert launches[0].metrics.get(PIPE_METRIC) is None


def test_tables_of_several_processes_follow_each_other() -> None:
    assert len(parse_ncu_csv(STEP + LONG + OPERATORS)) == 194 + 3 + 12


@pytest.mark.parametrize("text", ["", "hello, world\n", "==ERROR== nothing\n", '"ID","Kernel Name"\n'])
def test_without_a_table_there_are_no_launches(text: str) -> None:
    assert parse_ncu_csv(text) == ()


def test_a_table_that_breaks_off_is_read_as_far_as_it_goes() -> None:
    lines = STEP.splitlines(keepends=True)
    assert len(parse_ncu_csv("".join(lines[:20]) + lines[20][:80])) == 14


def test_the_errors_of_ncu_are_told() -> None:
    assert errors_in("==PROF== x\n==ERROR== No metrics\n==ERROR== Bye\n") == ["No metrics", "Bye"]
    assert errors_in(STEP) == []


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("137438953472", "inst", CUBE),
        ("137,438,953,472", "", CUBE),
        ("137.438.953.472", "inst", CUBE),
        ("137'438'953'472", "inst", CUBE),
        ("137\u202f438\u202f953\u202f472", "inst", CUBE),
        ("137\u00a0438\u00a0953\u00a0472", "", CUBE),
        ("1,234", "cycle", 1234),
        ("1.234", "cycle", 1234),
        ("137.439", "Ginst", 137_439_000_000),
        ("137,439", "Ginst", 137_439_000_000),
        ("1.5", "Kcycle", 1500),
        ("0", "inst", 0),
        ("n/a", "inst", None),
        ("(!) n/a", "inst", None),
        ("(!) nan", "", None),
        ("inf", "", None),
        ("-3", "inst", None),
        ("", "", None),
    ],
)
def test_numbers_of_every_locale(text: str, unit: str, value: int | None) -> None:
    assert parse_count(text, unit) == value


def test_a_locale_with_points_gives_the_same_step() -> None:
    swapped = str.maketrans(",.", ".,")
    german = re.sub(r'"\d[\d,.]*"', lambda number: number[0].translate(swapped), STEP)
    assert '"279.038.656.512"' in german
    ours, theirs = parse_ncu_csv(STEP), parse_ncu_csv(german)
    assert [launch.tensor_flops() for launch in theirs] == [launch.tensor_flops() for launch in ours]
    assert [launch.metrics.get(PIPE_METRIC) for launch in theirs] == [
        launch.metrics.get(PIPE_METRIC) for launch in ours
    ]


def test_overlapping_metrics_are_counted_once() -> None:
    prefix = "sm__ops_path_tensor_src_"
    launch = KernelLaunch(
        name="k",
        metrics={
            f"{prefix}fp8.sum": 10,
            f"{prefix}fp8_dst_fp16.sum": 4,
            f"{prefix}fp8_dst_fp32.sum": 6,
            f"{prefix}fp16_dst_fp16.sum": 1,
            f"{prefix}fp16_dst_fp32.sum": 2,
            f"{prefix}fp16_dst_fp32_sparsity_off.sum": 2,
            f"{prefix}tf32_dst_fp32_sparsity_off.sum": 5,
            f"{prefix}tf32_dst_fp32_sparsity_on.sum": 0,
            f"{prefix}bf16_dst_fp32.sum.per_second": 7,
            f"{prefix}bf16_dst_fp32.avg": 7,
            f"{prefix}int8.sum": None,
        },
    )
    assert launch.tensor_flops() == {"fp8": 10, "fp16": 3, "tf32": 5}


def test_the_count_of_a_process_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "count.json"
    assert read_step_count(path) is None
    path.write_text('{"model_flops": 3, "hardware_flops": 4, "later": "ignored"}')
    assert read_step_count(path) == StepCount(model_flops=3, hardware_flops=4)
    path.write_text('{"model_flops": "many"}')
    with pytest.raises(RecordError, match="is not a valid StepCount"):
        read_step_count(path)


def test_the_call_of_ncu() -> None:
    call = ncu_command("ncu", ["python", "train.py"], report=Path("x.ncu-rep"), log_file=Path("x.log"))
    assert call[-2:] == ["python", "train.py"]
    assert call[call.index("--metrics") + 1] == ",".join(METRICS)
    assert call[call.index("--profile-from-start") + 1] == "off"
    assert call[call.index("--clock-control") + 1] == "none"
    assert "--launch-count" not in call
    assert "--kill" not in call
    assert call[call.index("--export") + 1] == "x.ncu-rep"
    assert "--csv" not in call  # with it ncu says nothing of the kernels it profiles until the end
    assert table_command("ncu", Path("x.ncu-rep"))[1:4] == ["--import", "x.ncu-rep", "--csv"]
    call = ncu_command(
        "ncu",
        ["python"],
        report=Path("x.ncu-rep"),
        log_file=Path("x.log"),
        from_start=True,
        launch_skip=5,
        launch_count=7,
        kernel_name="regex:gemm",
        metrics=["sm__cycles_active.sum"],
    )
    assert call[call.index("--profile-from-start") + 1] == "on"
    assert call[call.index("--launch-skip") + 1] == "5"
    assert call[call.index("--launch-count") + 1] == "7"
    assert call[call.index("--kill") + 1] == "yes"
    assert call[call.index("--kernel-name") + 1] == "regex:gemm"
    assert call[call.index("--metrics") + 1].endswith(",sm__cycles_active.sum")


def test_what_is_collected_is_in_the_recorded_tables() -> None:
    assert set(METRICS) <= set(parse_ncu_csv(STEP)[0].metrics)


def test_ncu_is_found_where_its_installer_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nsight, "_INSTALL_PATTERNS", (f"{tmp_path}/*/ncu",))
    with pytest.raises(UsageError, match="comes with the CUDA toolkit"):
        find_ncu()
    for version in ("2024.1.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    assert find_ncu() == f"{tmp_path}/2025.3.1/ncu"
