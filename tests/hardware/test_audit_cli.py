"""`truemfu audit` on what an H200 printed: tables, JSON, verdict, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from fake_ncu import CUBE, EXECUTED, FOLDER, OPERATORS, STEP, STEP_COUNT, STEP_FILE, install_fake_ncu

from truemfu.cli import main, progress
from truemfu.hardware.nsight import command as nsight
from truemfu.hardware.nsight.command import StepCount

COUNTED = msgspec.json.encode(STEP_COUNT).decode()
ACTIVITY_ALONE = (
    "executed over activity: 0.9824 (activity counters read 1.0179 times as much); "
    "no matrix work: 36.74 M of 2.089 G active cycles of the tensor pipe"
)
ACTIVITY = (
    f"{ACTIVITY_ALONE}; to correct for this, save the output of --json and set "
    "`monitoring.performance_monitoring.hybrid_mode.audit` to that file"
)
WRITE = """
import os, pathlib
print("training")
pathlib.Path(os.environ["TRUEMFU_AUDIT"]).write_text({count!r})
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Call `truemfu audit` in this process, with nothing on the PATH but a fake ncu (or nothing at all)."""
    monkeypatch.setattr(nsight, "_INSTALL_PATTERNS", ())
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def call(*arguments: str, prints: str | None = None) -> Result:
        if prints is not None:
            install_fake_ncu(folder)
            printed = tmp_path / "prints.csv"
            printed.write_text(prints, encoding="utf-8")
            monkeypatch.setenv("FAKE_NCU_PRINTS", str(printed))
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["audit", *arguments])
        assert isinstance(stop.value.code, int)
        return Result(stop.value.code, *capfd.readouterr())

    return call


def python(code: str) -> tuple[str, ...]:
    return "--", sys.executable, "-c", code


def counting(count: StepCount = STEP_COUNT) -> tuple[str, ...]:
    return python(WRITE.format(count=msgspec.json.encode(count).decode()))


def row(result: Result, begins: str) -> list[str]:
    (line,) = [line for line in result.out.splitlines() if line.startswith(begins)]
    return line.split()


def test_a_step_against_its_count(run: Run) -> None:
    result = run(*counting(), prints=STEP)
    assert result.code == 0
    assert "training" in result.err
    assert "training" not in result.out
    lines = result.out.splitlines()
    assert row(result, "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")[1:] == (
        "matmul 13 680.8 G 32.4 % 1,024 0".split()
    )
    assert row(result, "at::…<at::BinaryFunctor<c10::BFloat16, binary")[-6:] == "32 0 - - 12.06 M".split()
    assert row(result, "attention")[1:] == "37.58 G 51.54 G 0.7292 37.58 G 1.0000".split()
    assert row(result, "matmul")[1:] == "2.063 T 2.042 T 1.0104 2.063 T 1.0000".split()
    assert "executed: 2.101 TFLOP in 194 launches (bf16 2.101 T)" in lines
    assert lines[-2] == (
        "agrees: the GPU executed 1.0000 times what the count expects, after tile padding "
        "(21.21 GFLOP more) and skipped blocks of the mask (0.6250 of the counted attention is left); "
        "counted with recomputation 2.102 TFLOP"
    )
    assert lines[-1] == ACTIVITY


def test_json_has_the_attributes_as_keys(run: Run) -> None:
    result = run("--json", *counting(), prints=STEP)
    read: dict[str, Any] = json.loads(result.out)
    assert read["executed_flops"] == EXECUTED
    assert read["expected_by_kind"] == read["executed_by_kind"]
    assert read["executed_over_activity"] == EXECUTED / 1024 / 2_088_614_782
    assert read["tile_flops"] == 21_206_401_024
    assert read["count"]["model_flops"] == STEP_COUNT.model_flops
    assert read["kernels"][0] == {
        "name": "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
        "kind": "matmul",
        "launches": 13,
        "executed_flops": 680_752_316_416,
        "needed_flops": 680_752_316_416,
        "dtypes": ["bf16"],
        "pipe_cycles": 664_797_184,
        "matrix_cycles": 664_797_184,
        "non_matrix_cycles": 0,
        "flops_per_cycle": 1024.0,
        "usual_flops_per_cycle": 1024.0,
        "share_of_usual_rate": 1.0,
        "is_below_usual_rate": False,
    }
    assert read["crosscheck"]["ratio"] == 1.0
    assert read["crosscheck"]["agrees"] is True
    assert read["verdict"].startswith("agrees: ")
    assert read["is_a_step"] is True


def test_kernels_below_their_rate_are_named(run: Run) -> None:
    result = run(*python("pass"), prints=OPERATORS)
    assert result.code == 0
    assert (
        "below the usual rate: cutlass::Kernel2<cutlass_75_tensorop_bf16_s1688gemm_bf16_256x12… executes 512 "
        "FLOP per active cycle, other kernels in bf16 1,024: activity counters read 2.00 times its work"
    ) in result.out.splitlines()
    assert (
        "executed over activity: 0.9307 (activity counters read 1.0745 times as much)"
        in result.out.splitlines()[-1]
    )
    assert "agrees" not in result.out


def test_a_difference_comes_with_what_is_likely(run: Run) -> None:
    half = msgspec.structs.replace(
        STEP_COUNT,
        hardware_flops=EXECUTED // 2,
        model_flops=EXECUTED // 2,
        uncounted={"mylib::matmul": 2},
        products=(),
        attention_flops=None,
        attention_blocked_flops=None,
    )
    result = run(*counting(half), prints=STEP)
    assert result.code == 0
    assert result.out.splitlines()[-2] == (
        "differs: the GPU executed 2.0000 times what the count expects (2.101 TFLOP against 1.051 TFLOP); "
        "likely: operators without a formula do matrix work: mylib::matmul"
    )


@pytest.mark.parametrize(
    ("name", "likely"),
    [
        (
            "h200_vit_2_layers",
            "1.1080 times what the count expects (4.588 TFLOP against 4.141 TFLOP); likely: convolutions "
            "with fewer than 8 input channels (2.0% of the count) execute 5 to 8 times their count: kernels "
            "pad the channels",
        ),
        (
            "h200_resnet18",
            "1.2778 times what the count expects (3.483 TFLOP against 2.726 TFLOP); likely: convolutions "
            "with fewer than 8 input channels (4.4% of the count) execute 5 to 8 times their count: kernels "
            "pad the channels",
        ),
        (
            "h200_64_experts",
            "1.0611 times what the count expects (1.453 TFLOP against 1.369 TFLOP); likely: grouped products "
            "(33.2% of the count) round the rows of each expert up to whole tiles (up to 1.25 times their "
            "count)",
        ),
    ],
)
def test_the_cause_is_the_one_in_the_count(run: Run, name: str, likely: str) -> None:
    """As an H200 executed them; attention and plain products are the expected ones to the last operation."""
    result = run("--replay", str(FOLDER / f"{name}.csv"))
    assert f"differs: the GPU executed {likely}" in result.out.splitlines()
    if name != "h200_resnet18":
        assert row(result, "attention")[-1] == "1.0000"
    if name != "h200_64_experts":
        assert row(result, "matmul")[-1] == "1.0000"


SLOW_RUN = """
import os, pathlib, sys, time
print("training", flush=True)
time.sleep(1.2)
pathlib.Path(os.environ["TRUEMFU_AUDIT"]).write_text({count!r})
time.sleep(0.3)
"""


def test_how_far_the_audit_is_goes_to_stderr_and_not_into_json(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_NCU_KERNELS", "1208")
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.5)
    result = run("--json", *python(SLOW_RUN.format(count=COUNTED)), prints=STEP)
    assert json.loads(result.out)["launches"] == 194
    lines = [line for line in result.err.splitlines() if line.startswith("audit: ")]
    assert lines
    assert re.fullmatch(r"audit: 1,208 kernels profiled, \d s", lines[-1])
    assert "\x1b" not in result.err


def test_the_saved_table_has_no_line_for_each_kernel(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_NCU_KERNELS", "3")
    run("--record", str(tmp_path / "step.csv"), *counting(), prints=STEP)
    assert (tmp_path / "step.csv").read_text("utf-8") == STEP


def test_a_percent_is_a_difference_where_every_effect_is_known(run: Run) -> None:
    more = msgspec.structs.replace(STEP_COUNT, hardware_flops=(STEP_COUNT.hardware_flops or 0) + 3 * 10**10)
    result = run("--json", *counting(more), prints=STEP)
    read = json.loads(result.out)
    assert (read["crosscheck"]["threshold"], read["crosscheck"]["agrees"]) == (0.01, False)
    assert read["verdict"].endswith("; cause unknown: the tables above show it by kernel")
    unknown = msgspec.structs.replace(more, products=())
    check = json.loads(run("--json", *counting(unknown), prints=STEP).out)["crosscheck"]
    assert (check["threshold"], check["agrees"]) == (0.05, True)


def test_a_step_that_was_not_counted_is_not_compared(run: Run) -> None:
    result = run(*counting(StepCount(process_id=749, reason="no model is attached")), prints=STEP)
    assert result.code == 0
    assert "not compared: no model is attached" in result.out.splitlines()
    assert "by kind of work" not in result.out


LONG_RUN = """
import os, pathlib, time
counted = {count!r}.replace('"process_id":749', f'"process_id":{{os.getpid()}}')
part = pathlib.Path(os.environ["TRUEMFU_AUDIT"] + ".tmp")
part.write_text(counted)
part.rename(os.environ["TRUEMFU_AUDIT"])
time.sleep({seconds})
"""


def test_the_run_is_ended_when_its_step_is_counted(run: Run) -> None:
    result = run(*python(LONG_RUN.format(count=COUNTED, seconds=600)), prints=STEP)
    assert result.code == 0
    assert result.err == "the marked step is counted: ending the run (--keep-running lets it go on)\n"
    assert "executed: 2.101 TFLOP in 194 launches (bf16 2.101 T)" in result.out.splitlines()


def test_the_run_may_go_on_and_its_failure_is_told(run: Run) -> None:
    code = LONG_RUN.format(count=COUNTED, seconds=0.6) + "raise SystemExit(7)"
    result = run("--keep-running", *python(code), prints=STEP)
    assert result.code == 1
    assert result.err == "error: the command ended with code 7; showing what was profiled\n"
    assert "agrees: " in result.out


def test_from_the_start_no_step_is_marked_and_none_compared(run: Run) -> None:
    code = "import os; assert 'TRUEMFU_AUDIT' not in os.environ"
    result = run("--from-start", *python(code), prints=STEP)
    assert result.code == 0
    assert result.out.splitlines()[-1] == ACTIVITY_ALONE


def test_a_part_of_a_step_is_not_compared(run: Run) -> None:
    result = run("--launch-count", "194", *counting(), prints=STEP)
    assert "agrees" not in result.out
    assert "by kind of work" not in result.out


def test_what_was_profiled_of_a_run_that_failed_before_it_counted_is_no_step(run: Run) -> None:
    result = run(*python("raise SystemExit(7)"), prints=STEP)
    assert result.out.splitlines()[-1] == ACTIVITY_ALONE


@pytest.mark.parametrize(
    "arguments",
    [("--kernel-name", "regex:gemm"), ("--launch-skip", "3"), ("--launch-count", "194"), ("--from-start",)],
)
def test_a_part_that_was_saved_is_a_part_when_it_is_read_again(
    run: Run, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    path = tmp_path / "part.csv"
    command = python("pass") if arguments == ("--from-start",) else counting()
    run("--record", str(path), *arguments, *command, prints=STEP)
    again = run("--replay", str(path))
    assert again.code == 0
    assert "agrees" not in again.out
    assert "by kind of work" not in again.out
    assert again.out.splitlines()[-1] == ACTIVITY_ALONE
    read = json.loads(run("--json", "--replay", str(path)).out)
    assert (read["verdict"], read["crosscheck"], read["count"]["is_whole_step"]) == (None, None, False)
    assert read["is_a_step"] is False


def test_a_step_that_was_marked_by_hand_is_one_when_it_is_read_again(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    first = run("--record", str(path), *python("pass"), prints=STEP)
    assert first.out.splitlines()[-1] == ACTIVITY
    assert run("--replay", str(path)).out == first.out


def test_without_ncu_one_line_says_where_to_get_it(run: Run) -> None:
    result = run("--", sys.executable, "train.py")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert "https://developer.nvidia.com/nsight-compute" in result.err


def test_a_command_that_is_not_there(run: Run) -> None:
    result = run("--", "no-such-python", "train.py", prints="")
    assert (result.code, result.err) == (2, "error: no-such-python: command not found, or not executable\n")


def test_without_a_command_the_call_is_wrong(run: Run) -> None:
    result = run(prints=STEP)
    assert result.code == 2
    assert "truemfu audit -- python train.py" in result.err


@pytest.mark.parametrize(
    ("prints", "arguments", "words"),
    [
        ("==PROF== Connected to process 1\n", (), "no step was marked: use a TrainingMonitor"),
        ("", ("--from-start",), "no kernel was launched"),
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access counters\n",
            (),
            "this user has no permission to read the GPU's counters: https://developer.nvidia.com/ERR_NVGPUCTRPERM",
        ),
        ("==ERROR== LibraryNotLoaded\n", (), "ncu reports: LibraryNotLoaded"),
        (
            "",
            ("--from-start", "--kernel-name", "sgemm"),
            "no kernel that matches --kernel-name sgemm was launched by the command",
        ),
    ],
)
def test_nothing_profiled_says_why(run: Run, prints: str, arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments, *python("pass"), prints=prints)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"error: nothing was profiled; {words}")
    assert result.err.count("\n") == 1


def test_what_the_process_says_of_it_is_told(run: Run) -> None:
    result = run(*counting(StepCount(reason="the model is on cpu")), prints="==WARNING== No kernels\n")
    assert result.code == 1
    assert "error: nothing was profiled; the model is on cpu\n" in result.err


def test_where_ncu_fails_its_words_come_first(run: Run) -> None:
    failing = "==ERROR== Failed to profile\n==ERROR== The application returned an error code (9).\n"
    code = counting(StepCount(reason="the run ended within the marked step"))[-1] + "raise SystemExit(9)"
    result = run(*python(code), prints=failing)
    assert result.code == 1
    assert result.err.endswith("error: nothing was profiled; ncu reports: Failed to profile\n")
    late = run(*python("raise SystemExit(9)"), prints=failing + STEP)
    assert late.err == "error: ncu reports: Failed to profile; showing what was profiled\n"


def test_no_kernel_of_a_marked_step_is_of_that_name(run: Run) -> None:
    result = run("--kernel-name", "sgemm", *counting(), prints="==WARNING== No kernels\n")
    assert result.code == 1
    assert result.err.endswith(
        "error: nothing was profiled; no kernel that matches --kernel-name sgemm was launched "
        "in the marked step\n"
    )


def test_a_run_without_a_count_is_ended_and_not_called_counted(run: Run) -> None:
    given_up = msgspec.json.encode(StepCount(process_id=749, reason="the model is on cpu")).decode()
    result = run(*python(LONG_RUN.format(count=given_up, seconds=600)), prints="==WARNING== No kernels\n")
    assert result.code == 1
    assert result.err == (
        "there will be no count: ending the run (--keep-running lets it go on)\n"
        "error: nothing was profiled; the model is on cpu\n"
    )


def test_an_ncu_that_cannot_be_started_is_one_line(run: Run, tmp_path: Path) -> None:
    fake = tmp_path / "bin" / "ncu"
    fake.write_text("#!/no/such/interpreter\n")
    fake.chmod(0o755)
    result = run(*python("pass"))
    assert (result.code, result.err) == (
        2,
        f"error: {fake} cannot be started: No such file or directory\n",
    )


def test_a_command_that_fails_fails_the_audit(run: Run) -> None:
    failed = run(*python("raise SystemExit(7)"), prints="==ERROR== The application returned an error code\n")
    assert (failed.code, failed.err) == (1, "error: nothing was profiled; the command ended with code 7\n")
    late = run(*python("raise SystemExit(7)"), prints=STEP)
    assert late.code == 1
    assert "executed: 2.101 TFLOP" in late.out
    # Ended by ncu at the last launch that was asked for.
    assert run("--launch-count", "194", *python("raise SystemExit(7)"), prints=STEP).code == 0


def test_a_count_nobody_can_read_is_told(run: Run) -> None:
    result = run(*python(WRITE.format(count="{")), prints=STEP)
    assert result.code == 2
    assert "is not a valid StepCount" in result.err


def test_what_was_saved_is_read_again_with_its_count(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    first = run("--record", str(path), *counting(), prints=STEP)
    assert path.read_text("utf-8") == STEP
    again = run("--replay", str(path))
    assert (again.code, again.out) == (first.code, first.out)
    # What an earlier run has left is not taken for this one's.
    assert "agrees" not in run("--record", str(path), *python("pass"), prints=STEP).out


def test_a_table_from_elsewhere_is_read_and_nobody_knows_of_what_it_is(run: Run) -> None:
    result = run("--replay", str(STEP_FILE))
    assert result.code == 0
    assert result.out.splitlines()[-1] == ACTIVITY_ALONE


@pytest.mark.parametrize(
    "option",
    [
        ("--record", "x.csv"),
        ("--from-start",),
        ("--keep-running",),
        ("--launch-skip", "1"),
        ("--launch-count", "1"),
        ("--kernel-name", "x"),
        ("--metrics", "x"),
    ],
)
def test_what_a_saved_table_has_no_use_for_is_refused(run: Run, option: tuple[str, ...]) -> None:
    result = run("--replay", str(STEP_FILE), *option)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: --replay runs nothing: leave out {option[0]}, or leave out --replay\n"


def test_nothing_but_a_regular_file_is_saved_to_and_nothing_else_removed(run: Run, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run("--record", str(pipe), *python("pass"), prints=STEP)
    assert result.code == 2
    assert result.err == (f"error: {pipe} is not a regular file; give --record a regular or a new file\n")
    assert pipe.is_fifo()
    kept, link = tmp_path / "kept.csv", tmp_path / "link.csv"
    kept.write_text("old" * len(STEP))
    link.symlink_to(kept)
    assert run("--record", str(link), *python("pass"), prints=STEP).code == 0
    assert link.is_symlink()
    assert kept.read_text("utf-8") == STEP


def test_a_count_file_that_is_a_folder_is_one_line(run: Run, tmp_path: Path) -> None:
    table, folder = tmp_path / "step.csv", tmp_path / "step.csv.count.json"
    table.write_text(STEP, encoding="utf-8")
    folder.mkdir()
    read = run("--replay", str(table))
    assert (read.code, read.err) == (2, f"error: {folder} cannot be read: Is a directory\n")
    saved = run("--record", str(table), *python("pass"), prints=STEP)
    assert saved.code == 2
    assert saved.err.startswith(f"error: {folder} is not a regular file")
    assert table.read_text("utf-8") == STEP


def test_wrong_calls_with_a_saved_table(run: Run, tmp_path: Path) -> None:
    assert run("--replay", str(STEP_FILE), "--", "python").code == 2
    missing = run("--replay", str(tmp_path / "gone.csv"))
    assert (missing.code, missing.out) == (2, "")
    assert missing.err == f"error: {tmp_path}/gone.csv cannot be read: No such file or directory\n"
    nowhere = run("--record", str(tmp_path / "no" / "x.csv"), *python("pass"), prints=STEP)
    assert nowhere.code == 2
    assert nowhere.err == f"error: {tmp_path}/no/x.csv cannot be written: No such file or directory\n"


def test_a_file_without_a_table_has_nothing(run: Run, tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("==ERROR== Unknown metric\n")
    result = run("--replay", str(empty))
    assert (result.code, result.err) == (1, "error: nothing was profiled; ncu reports: Unknown metric\n")


def test_a_file_that_ncu_has_not_printed_is_a_wrong_call(run: Run, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("# Kernels, and more\n\nKernel Name and ID, in a text\n" + "x" * 200_000 + ",\n")
    result = run("--replay", str(readme))
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: {readme} does not contain a table of Nsight Compute\n"


def test_names_give_way_on_a_narrow_terminal(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "100")
    wide = run("--replay", str(STEP_FILE)).out.splitlines()
    assert max(map(len, wide[:20])) > 100
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    narrow = run("--replay", str(STEP_FILE)).out.splitlines()
    assert max(map(len, narrow[:20])) == 100
    assert [line.split()[-3:] for line in narrow[3:20]] == [line.split()[-3:] for line in wide[3:20]]
    for columns in ("80", "60"):  # the table is divided, and each kernel has a line in every part
        monkeypatch.setenv("COLUMNS", columns)
        first, second = run("--replay", str(STEP_FILE), "--top", "4").out.split("\n\n")[:2]
        assert all("…" in line for line in (*first.splitlines()[3:], *second.splitlines()[2:6]))
        assert len(first.splitlines()) == 3 + 4


LEAVING = """
import os, pathlib, signal, sys, time
def leave(*_):
    pathlib.Path(sys.argv[1] + ".left").write_text("in order")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
pathlib.Path(sys.argv[1]).write_text("here")
time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
def test_a_term_is_passed_on_and_leaves_nothing_behind(tmp_path: Path) -> None:
    binaries, temporary, here = tmp_path / "bin", tmp_path / "tmp", tmp_path / "here"
    binaries.mkdir()
    temporary.mkdir()
    install_fake_ncu(binaries)
    environment = {**os.environ, "TMPDIR": str(temporary), "FAKE_NCU_PRINTS": str(STEP_FILE)}
    environment["PATH"] = f"{binaries}{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "truemfu", "audit", *python(LEAVING), str(here)]
    with subprocess.Popen(command, env=environment) as audit:
        until_s = time.monotonic() + 60
        while not here.exists() and time.monotonic() < until_s:
            time.sleep(0.05)
        assert len(list(temporary.iterdir())) == 1
        audit.send_signal(signal.SIGTERM)
        assert audit.wait(60) == 143
    assert (tmp_path / "here.left").read_text() == "in order"
    assert list(temporary.iterdir()) == []


def test_debug_behind_the_dashes_is_the_commands_own(run: Run) -> None:
    behind = run("--", "no-such-python", "--debug", prints="")
    assert "Traceback" not in behind.err
    assert "Traceback" in run("--debug", "--", "no-such-python", prints="").err


def test_one_more_kernel(run: Run) -> None:
    result = run("--top", "40", "--replay", str(STEP_FILE))
    assert "and 1 more kernel with 0 FLOP (--top shows it)" in result.out.splitlines()


def test_many_kernels_are_cut_to_the_top(run: Run) -> None:
    result = run("--top", "5", "--replay", str(STEP_FILE))
    assert "and 36 more kernels with 37.58 GFLOP (--top shows them)" in result.out.splitlines()


def test_cubes_are_exact(run: Run) -> None:
    read = json.loads(run("--json", *python("pass"), prints=OPERATORS).out)
    assert read["executed_by_dtype"]["fp8"] == CUBE == 137_438_953_472
    assert read["crosscheck"] is None
    assert read["verdict"] is None
