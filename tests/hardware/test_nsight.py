"""Nsight Compute's output is read whatever its layout and locale, and `truemfu audit` says what it found."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from truemfu.cli import cli, main
from truemfu.cli.audit import audit
from truemfu.errors import RecordError, UsageError
from truemfu.hardware import nsight
from truemfu.hardware.nsight import (
    KernelLaunch,
    StepCount,
    audit_of,
    find_ncu,
    kind_of,
    ncu_command,
    parse_ncu_csv,
    parse_value,
    read_step_count,
)

CUBE = 2 * 4096**3
BF16 = "sm__ops_path_tensor_src_bf16_dst_fp32.sum"
FP8 = "sm__ops_path_tensor_src_fp8.sum"
FP16 = "sm__ops_path_tensor_src_fp16.sum"
NVJET = "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT"
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, 0, 0, "
    "cutlass::bfloat16_t>, 0, 1, 0, 0, 1, 1, 0, 0>(pytorch_flash::Flash_fwd_params)"
)
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, T2, T3)[wide]"
)

LONG = f"""loading "model
==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "{NVJET}" - 0: 0%....50%....100% - 2 passes
step, 1, loss "3.4
==PROF== Disconnected from process 4711
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","4711","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","{BF16}","inst","137,438,953,472"
"0","4711","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","{FP8}","inst","n/a"
"0","4711","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","gpu__time_duration.sum","ns","208,384"
"1","4711","python3.12","127.0.0.1","{FLASH}","1","7","(128, 1, 1)","(8, 4, 32)","0","9.0",\
"Command line profiler metrics","{BF16}","inst","19,327,352,832"
"2","4711","python3.12","127.0.0.1","{ADD}","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","{BF16}","inst","0"
"3","4711","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0",\
"Command line profiler metrics","{BF16}","inst","137,438,953,472"
"4","4711","python3.12","127.0.0.1","mystery","1","7","(1, 1, 1)","(1, 1, 1)","0","9.0",\
"Command line profiler metrics","{BF16}","inst","(!) n/a"
"""

WIDE = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",\
"Device","CC","gpu__time_duration.sum","{BF16}","{FP8}"
"","","","","","","","","","","","ns","inst","inst"
"0","4711","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","208384",\
"137438953472","0"
"1","4712","python3.12","127.0.0.1","{NVJET}","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","208384",\
"137.438.953.472","n/a"
"""


def test_a_row_for_each_metric() -> None:
    launches = parse_ncu_csv(LONG)
    assert [launch.name for launch in launches] == [NVJET, FLASH, ADD, NVJET, "mystery"]
    first = launches[0]
    assert first.process_id == 4711
    assert first.metrics == {BF16: CUBE, FP8: None, "gpu__time_duration.sum": 208_384}
    assert first.tensor_flops() == {"bf16": CUBE}
    assert launches[2].tensor_flops() == {"bf16": 0}
    assert launches[4].tensor_flops() is None


def test_a_row_for_each_kernel_with_units_below_the_header() -> None:
    launches = parse_ncu_csv(WIDE)
    assert [launch.process_id for launch in launches] == [4711, 4712]
    assert launches[0].metrics == {"gpu__time_duration.sum": 208_384, BF16: CUBE, FP8: 0}
    assert launches[1].tensor_flops() == {"bf16": CUBE}


def test_tables_of_several_processes_follow_each_other() -> None:
    assert len(parse_ncu_csv(LONG + WIDE)) == 6  # process 4711 has its launch 0 in both


@pytest.mark.parametrize("text", ["", "hello, world\n", "==ERROR== nothing\n", '"ID","Kernel Name"\n'])
def test_without_a_table_there_are_no_launches(text: str) -> None:
    assert parse_ncu_csv(text) == ()


@pytest.mark.parametrize(
    ("text", "unit", "whole", "value"),
    [
        ("137438953472", "inst", True, CUBE),
        ("137,438,953,472", "inst", True, CUBE),
        ("137.438.953.472", "inst", True, CUBE),
        ("137'438'953'472", "inst", True, CUBE),
        ("137\u202f438\u202f953\u202f472", "inst", True, CUBE),
        ("137\u00a0438\u00a0953\u00a0472", "", True, CUBE),
        ("1,234", "inst", True, 1234),
        ("1.234", "inst", True, 1234),
        ("1.234", "", True, 1234),
        ("137.439", "Ginst", True, 137.439e9),
        ("137,439", "Ginst", True, 137.439e9),
        ("1.5", "Kinst", True, 1500),
        ("2.5e+11", "inst", True, 2.5e11),
        ("208,384", "ns", False, 208_384),
        ("208.384", "us", False, 208.384),
        ("1,234.5", "us", False, 1234.5),
        ("1.234,5", "us", False, 1234.5),
        ("9,00", "%", False, 9),
        ("99,125", "%", False, 99.125),
        ("0", "inst", True, 0),
        ("n/a", "inst", True, None),
        ("(!) n/a", "inst", True, None),
        ("(!) nan", "", True, None),
        ("nan", "", False, None),
        ("inf", "", False, None),
        ("-3", "inst", True, None),
        ("", "", False, None),
    ],
)
def test_numbers_of_every_locale(text: str, unit: str, whole: bool, value: float | None) -> None:
    found = parse_value(text, unit, whole=whole)
    assert found == (None if value is None else pytest.approx(value))


def test_overlapping_metrics_are_counted_once() -> None:
    prefix = "sm__ops_path_tensor_src_"
    launch = KernelLaunch(
        name="k",
        metrics={
            f"{prefix}fp8.sum": 10.0,
            f"{prefix}fp8_dst_fp16.sum": 4.0,
            f"{prefix}fp8_dst_fp32.sum": 6.0,
            f"{prefix}fp16_dst_fp16.sum": 1.0,
            f"{prefix}fp16_dst_fp32.sum": 2.0,
            f"{prefix}fp16_dst_fp32_sparsity_off.sum": 2.0,
            f"{prefix}tf32_dst_fp32_sparsity_off.sum": 5.0,
            f"{prefix}tf32_dst_fp32_sparsity_on.sum": 0.0,
            f"{prefix}bf16_dst_fp32.sum.per_second": 7.0,
            f"{prefix}bf16_dst_fp32.avg": 7.0,
            f"{prefix}int8.sum": None,
        },
    )
    assert launch.tensor_flops() == {"fp8": 10, "fp16": 3, "tf32": 5}


def test_the_audit_adds_up_by_kernel() -> None:
    result = audit_of(parse_ncu_csv(LONG))
    assert [(kernel.name, kernel.launches, kernel.executed_flops) for kernel in result.kernels] == [
        (NVJET, 2, 2 * CUBE),
        (FLASH, 1, 19_327_352_832),
        ("mystery", 1, None),
        (ADD, 1, 0),
    ]
    assert result.executed_flops == 2 * CUBE + 19_327_352_832
    assert result.executed_by_dtype == {"bf16": result.executed_flops}
    assert result.executed_by_kind == {"matmul": 2 * CUBE, "attention": 19_327_352_832}
    assert (result.launches, result.unmeasured_launches) == (5, 1)


def test_only_the_process_that_counted_is_compared() -> None:
    count = StepCount(model_flops=CUBE, hardware_flops=CUBE, process_id=4712)
    assert audit_of(parse_ncu_csv(WIDE), count).executed_flops == CUBE
    stranger = StepCount(model_flops=CUBE, hardware_flops=CUBE, process_id=1)
    assert audit_of(parse_ncu_csv(WIDE), stranger).executed_flops == 2 * CUBE


def test_nothing_measured_is_unknown_and_not_zero() -> None:
    launches = [KernelLaunch(name="k", metrics={BF16: None})]
    assert audit_of(launches).executed_flops is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (NVJET, "matmul"),
        (FLASH, "attention"),
        (ADD, "other"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("sm80_xmma_fprop_implicit_gemm_bf16", "convolution"),
        ("aten::_scaled_dot_product_flash_attention_backward", "attention"),
        ("aten::convolution_backward", "convolution"),
        ("aten::mm", "matmul"),
        ("triton_poi_fused_add_mul_0", "other"),
    ],
)
def test_a_name_tells_the_kind_of_work(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_the_count_of_a_process_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "count.json"
    assert read_step_count(path) is None
    path.write_text('{"model_flops": 3, "hardware_flops": 4, "later": "ignored"}')
    assert read_step_count(path) == StepCount(model_flops=3, hardware_flops=4)
    path.write_text('{"model_flops": "many"}')
    with pytest.raises(RecordError, match="holds no count of a step"):
        read_step_count(path)


def test_the_call_of_ncu() -> None:
    call = ncu_command("ncu", ["python", "train.py"], log_file=Path("x.csv"))
    assert call[-2:] == ["python", "train.py"]
    assert call[call.index("--metrics") + 1].split(",")[0] == BF16
    assert call[call.index("--profile-from-start") + 1] == "off"
    assert call[call.index("--clock-control") + 1] == "none"
    assert "--launch-count" not in call
    assert "--kill" not in call
    call = ncu_command(
        "ncu",
        ["python"],
        log_file=Path("x.csv"),
        from_start=True,
        launch_skip=5,
        launch_count=7,
        kernel_name="regex:gemm",
        metrics=["sm__cycles_active.sum"],
    )
    assert call[call.index("--launch-skip") + 1] == "5"
    assert call[call.index("--launch-count") + 1] == "7"
    assert call[call.index("--kernel-name") + 1] == "regex:gemm"
    assert call[call.index("--metrics") + 1].endswith(",sm__cycles_active.sum")


# The command line, with a stand-in for ncu on the PATH.

FAKE_NCU = """#!{python}
import os, subprocess, sys
arguments = sys.argv[1:]
log_file = arguments[arguments.index("--log-file") + 1]
command = arguments[arguments.index({python!r}):]
code = subprocess.run(command).returncode
with open(log_file, "w", encoding="utf-8") as file:
    file.write(os.environ.get("FAKE_CSV", ""))
sys.exit(code)
"""

WRITE_COUNT = """
import json, os
print("training")
json.dump({count}, open(os.environ["TRUEMFU_AUDIT"], "w"))
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Call `truemfu audit` in this process, with nothing on the PATH but a fake ncu (or nothing at all)."""
    monkeypatch.setitem(cli.commands, "audit", audit)
    monkeypatch.setattr(nsight, "_USUAL_PLACES", ())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def call(*arguments: str, csv: str | None = None) -> Result:
        if csv is not None:
            fake = folder / "ncu"
            fake.write_text(FAKE_NCU.format(python=sys.executable), encoding="utf-8")
            fake.chmod(0o755)
            monkeypatch.setenv("FAKE_CSV", csv)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["audit", *arguments])
        code = stop.value.code
        assert isinstance(code, int)
        return Result(code, *capfd.readouterr())

    return call


def python(code: str, **values: Any) -> tuple[str, ...]:
    return "--", sys.executable, "-c", code.format(**values)


def test_without_ncu_one_line_says_where_to_get_it(run: Run) -> None:
    result = run("--", "python", "train.py")
    assert result.code == 2
    assert result.out == ""
    assert result.err.count("\n") == 1
    assert "https://developer.nvidia.com/nsight-compute" in result.err
    with pytest.raises(UsageError, match="comes with the CUDA toolkit"):
        find_ncu()


def test_ncu_is_found_where_its_installer_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("2024.1.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nsight, "_USUAL_PLACES", (f"{tmp_path}/*/ncu",))
    assert find_ncu() == f"{tmp_path}/2025.3.1/ncu"


def test_without_a_command_the_call_is_wrong(run: Run) -> None:
    result = run(csv=LONG)
    assert result.code == 2
    assert "truemfu audit -- python train.py" in result.err


def test_a_table_by_kernel_and_the_programs_output_on_stderr(run: Run) -> None:
    result = run(*python("print('training')"), csv=LONG)
    assert result.code == 0
    assert "training" in result.err
    assert "training" not in result.out
    lines = result.out.splitlines()
    (nvjet,) = [line for line in lines if line.startswith(NVJET)]
    assert nvjet.split()[1:] == ["matmul", "2", "274.9", "G", "93.4", "%"]
    assert any(line.startswith("void at::native") and "[wide]" not in line for line in lines)
    assert "executed: 294.2 GFLOP in 5 launches (bf16 294.2 G)" in lines
    assert "not measured: 1 launches; ncu has no value for them" in lines


def test_against_the_count_of_the_process(run: Run) -> None:
    executed = 2 * CUBE + 19_327_352_832
    count = {
        "model_flops": executed,
        "hardware_flops": executed,
        "process_id": 4711,
        "attention": "full",
        "model_flops_by_operator": {"aten::mm": 2 * CUBE, "aten::_flash_attention": 19_327_352_832},
    }
    result = run(*python(WRITE_COUNT, count=count), csv=LONG)
    assert result.code == 0
    assert "counted:  294.2 GFLOP, executed over counted 1.0000" in result.out.splitlines()
    assert "likely" not in result.out
    result = run("--json", *python(WRITE_COUNT, count=count), csv=LONG)
    read = json.loads(result.out)
    assert read["executed_flops"] == executed
    assert read["kernels"][0] == {
        "name": NVJET,
        "kind": "matmul",
        "launches": 2,
        "executed_flops": 2 * CUBE,
    }
    assert read["counted_by_kind"] == {"matmul": 2 * CUBE, "attention": 19_327_352_832}
    assert read["crosscheck"]["ratio"] == 1.0


def test_a_difference_comes_with_what_is_likely(run: Run) -> None:
    count = {"model_flops": CUBE, "hardware_flops": CUBE, "uncounted": {"mylib::matmul": 2}}
    result = run(*python(WRITE_COUNT, count=count), csv=LONG)
    assert result.code == 0
    assert "executed over counted 2.1406" in result.out
    assert "operators without a formula do matrix work: mylib::matmul" in result.out


@pytest.mark.parametrize(
    ("csv", "arguments", "words"),
    [
        ("==PROF== Connected\n", (), "no step was marked"),
        ("", ("--from-start",), "no kernel was launched"),
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n", (), "may not read the GPU's"),
        ("==ERROR== LibraryNotLoaded\n", (), "ncu says: LibraryNotLoaded"),
    ],
)
def test_nothing_profiled_says_why(run: Run, csv: str, arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments, *python("pass"), csv=csv)
    assert result.code == 1
    assert result.err.startswith("error: nothing was profiled; ")
    assert words in result.err


def test_a_command_that_fails_fails_the_audit(run: Run) -> None:
    failed = run(*python("raise SystemExit(7)"), csv="")
    assert (failed.code, failed.err) == (1, "error: nothing was profiled; the command ended with code 7\n")
    late = run(*python("raise SystemExit(7)"), csv=LONG)
    assert late.code == 1
    assert "executed: 294.2 GFLOP" in late.out
    # Ended by ncu at the last launch that was asked for.
    assert run("--launch-count", "5", *python("raise SystemExit(7)"), csv=LONG).code == 0


def test_a_saved_table_is_read_again(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "step.csv")
    assert run("--save", path, *python("pass"), csv=WIDE).code == 0
    result = run("--read", path, "--json")
    assert json.loads(result.out)["executed_flops"] == 2 * CUBE
    assert run("--read", path, "--", "python").code == 2
    missing = run("--read", f"{path}.gone")
    assert missing.code == 2
    assert "cannot be read: No such file" in missing.err


def test_many_kernels_are_cut_to_the_top(run: Run) -> None:
    result = run("--top", "1", *python("pass"), csv=LONG)
    assert "and 3 more kernels with 19.33 GFLOP (--top shows them)" in result.out.splitlines()
