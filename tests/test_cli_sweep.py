"""`truemfu sweep`, `summarize` and `report`: wrong calls start nothing; real sweeps end in the right code."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.command_line import Result, Run, caller

from truemfu.cli.console import output, working
from truemfu.cli.live import Lines
from truemfu.records import CaseResult, Phase, Status, SweepCase, SweepRecord, encode, write_record
from truemfu.sweep.supervisor.state import CaseState

TRAINERS = """
import time

class Raises:
    private = False
    def __init__(self, model, settings):
        raise RuntimeError("this trainer has no wheels")
    def step(self, batch):
        ...

class Waits(Raises):
    def __init__(self, model, settings):
        time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process, from an empty folder, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    return caller(capsys)


def sweep_process(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`truemfu sweep` as a user starts it, on the CPU."""
    return subprocess.Popen(
        [sys.executable, "-m", "truemfu", "sweep", "--device", "cpu", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WRONG_CALLS = {
    "an unknown mode": (["--mode", "profil"], "no mode 'profil' (did you mean 'profile'?)"),
    "an unknown trainer": (["--trainer", "DPSGTrainer"], "did you mean 'DPSGDTrainer'?"),
    "an unknown size": (["--model-size", "smal"], "did you mean 'small'?"),
    "an unknown dtype": (["--dtype", "bf61"], "did you mean 'bf16'?"),
    "an unknown optimizer": (["--optimizer", "adam"], "did you mean 'adamw'?"),
    "an unknown device": (["--device", "gpu"], "device must be one of auto, cuda, cpu"),
    "a device that is not there": (["--device", "cuda"], "no NVIDIA GPU is visible"),
    "a batch of nothing": (["--batch-sizes", "4,0"], "batch_sizes must be a whole number >= 1; got 0"),
    "a negative sequence": (["--seq-len", "-8"], "seq_lengths must be a whole number >= 1; got -8"),
    "a batch that is no number": (
        ["--batch-size", "4x"],
        "--batch takes comma-separated whole numbers",
    ),
    "a flag without a value in it": (["--batch-sizes", ""], "batch_sizes is empty"),
    "a list of nothing": (["--trainers", ","], "trainers is empty"),
    "a GPU that is not there": (["--gpus", "7"], "gpus is 7, but no NVIDIA GPU is visible"),
    "endless memory": (["--memory-limit", "inf"], "memory_limit_gib must be a finite number"),
    "no time at all": (["--timeout", "0"], "timeout_s must be"),
    "negative memory": (["--memory-limit", "-1"], "memory_limit_gib must be"),
    "an unknown kind of rerun": (["--rerun", "faild"], "did you mean 'failed'?"),
    "several at once in single mode": (
        ["--mode", "single", "--batch-sizes", "4,8"],
        "single mode runs one experiment; got several batch_sizes",
    ),
    "a file for the test": (["--mode", "test", "--config", "x.json"], "test mode has its own matrix"),
    "a file that is not there": (["--config", "x.json"], "x.json cannot be read: No such file"),
    "a file with a typo": (
        ["--config", "typo.json"],
        "unknown key 'batch_size' (did you mean 'batch_sizes'?)",
    ),
    "a file that is no JSON": (["--config", "broken.json"], "broken.json is not valid JSON"),
    "a trainer that is nowhere": (["--trainer", "nowhere:Trainer"], "module 'nowhere' is not in"),
    "an output that is a file": (["--output", "typo.json"], "is a file, not a folder"),
    "an output that cannot be made": (["--output", "typo.json/x"], "cannot write to"),
    "an output with other logs": (
        ["--output", "strange"],
        "contains logs/, which does not belong to a sweep",
    ),
    "an output of another sweep": (["--output", "other"], "belongs to another sweep"),
    "a test in the folder of another sweep": (["--mode", "test", "-o", "other"], "belongs to another sweep"),
    "an unknown flag": (["--bach-size", "4"], "--bach-size"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_a_wrong_call_is_one_line_and_starts_nothing(
    run: Run, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "typo.json").write_text('{"batch_size": [4]}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "strange" / "logs").mkdir(parents=True)
    (tmp_path / "strange" / "logs" / "mine.log").touch()
    (tmp_path / "other").mkdir()
    record = SweepRecord(
        sweep_id="1", created_at_s=0.0, truemfu_version="0", cases=[], config={"model_sizes": ["small"]}
    )
    write_record(tmp_path / "other" / "sweep.json", record)
    before = sorted(path for path in tmp_path.rglob("*") if path.suffix in (".log", ".json"))
    result = run("sweep", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert sorted(path for path in tmp_path.rglob("*") if path.suffix in (".log", ".json")) == before
    assert not (tmp_path / "out").exists()


def test_without_opacus_a_private_trainer_names_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    result = run("sweep", "--mode", "single", "--trainer", "DPSGDTrainer", "--model-size", "tiny")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        'error: DPSGDTrainer needs Opacus, which is not installed: pip install "truemfu[dp]"\n'
    )
    assert not (tmp_path / "out").exists()


def listed(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    result = run("sweep", "--dry-run", "--json", *arguments)
    assert (result.code, result.err) == (0, "")
    cases: dict[str, dict[str, Any]] = json.loads(result.out)
    return cases


def test_the_default_matrix_is_the_one_that_was_asked_for(run: Run) -> None:
    cases = listed(run)
    assert len(cases) == 16
    assert {case["trainer"] for case in cases.values()} == {
        "StandardTrainer",
        "DPSGDTrainer",
        "DPGhostClippingTrainer",
        "DPFastGradientClippingTrainer",
    }
    assert {(case["batch_size"], case["seq_len"]) for case in cases.values()} == {
        (4, 512),
        (4, 1024),
        (8, 512),
        (8, 1024),
    }
    assert {case["model"] for case in cases.values()} == {"1b"}


def test_single_is_one_experiment_with_the_defaults_that_were_asked_for(run: Run) -> None:
    assert list(listed(run, "--mode", "single", "--trainer", "DPSGDTrainer")) == ["DPSGDTrainer_bs4_seq512"]
    ((name, case),) = listed(
        run, "--mode=single", "--batch-size=2", "--seq-len=64", "--model-size=tiny"
    ).items()
    assert (name, case["model"]) == ("StandardTrainer_bs2_seq64", "tiny")


def test_flags_override_the_file_and_the_file_the_defaults(run: Run, tmp_path: Path) -> None:
    config = {
        "trainers": ["StandardTrainer"],
        "batch_sizes": [2, 3],
        "model_size": "tiny",
        "optimizer": "adamw",
    }
    (tmp_path / "mine.json").write_text(json.dumps(config))
    cases = listed(
        run, "--config", "mine.json", "--seq-lengths", "16", "--seq-lengths", "32", "--dtype", "bf16"
    )
    assert set(cases) == {f"StandardTrainer_bs{batch}_seq{length}" for batch in (2, 3) for length in (16, 32)}
    assert {(case["optimizer"], case["dtype"], case["model"]) for case in cases.values()} == {
        ("adamw", "bf16", "tiny")
    }


def test_a_configuration_in_the_current_folder_is_taken(run: Run, tmp_path: Path) -> None:
    (tmp_path / "profiling_config.json").write_text('{"trainers": ["StandardTrainer"], "model_size": "tiny"}')
    assert len(listed(run)) == 4
    assert len(listed(run, "--mode", "test")) == 5
    assert list(listed(run, "--mode", "single")) == ["StandardTrainer_bs4_seq512"]


def test_a_dry_run_lists_and_starts_nothing(run: Run, tmp_path: Path) -> None:
    result = run("sweep", "--mode", "test", "--dry-run")
    assert result.code == 0
    assert "DPBookKeepingTrainer_bs2_seq32" in result.out
    assert "experiments: 5; none was started" in result.out
    assert list(tmp_path.iterdir()) == []


class Swept(NamedTuple):
    folder: Path
    result: Result


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """A real sweep of two: one experiment succeeds, one trainer raises."""
    here = tmp_path_factory.mktemp("sweep")
    (here / "sweep_trainers.py").write_text(TRAINERS)
    process = sweep_process(
        here,
        *("--mode", "test", "--output", "out", "--json"),
        *("--trainers", "StandardTrainer,sweep_trainers:Raises"),
    )
    out, err = process.communicate(timeout=300)
    return Swept(here, Result(process.returncode, out, err))


def test_a_failed_experiment_is_exit_code_1_and_touches_no_other(swept: Swept) -> None:
    summary = json.loads(swept.result.out)
    assert swept.result.code == 1
    assert summary["totals"]["ends"] == {"ok": 1, "error": 1}
    ok, failed = summary["experiments"]
    assert (ok["name"], ok["end"], ok["parameters"]) == ("StandardTrainer_bs2_seq32", "ok", 228_096)
    assert ok["step_time_s"] > 0
    assert (failed["name"], failed["end"]) == ("Raises_bs2_seq32", "error")
    assert "this trainer has no wheels" in failed["message"]
    assert summary["failures"][0]["log_tail"]


def test_progress_is_a_line_for_each_event_on_stderr(swept: Swept) -> None:
    lines = swept.result.err.splitlines()
    assert lines[0] == "2 experiments"
    assert "StandardTrainer_bs2_seq32: started on cpu" in lines
    assert any(line.startswith("StandardTrainer_bs2_seq32: ok: ") for line in lines)
    assert any(line.startswith("Raises_bs2_seq32: error: ") and "[2 of 2 done]" in line for line in lines)


def test_a_sweep_called_again_uses_what_is_there(swept: Swept) -> None:
    process = sweep_process(
        swept.folder,
        *("--mode", "test", "--output", "out", "--rerun", "none"),
        *("--trainers", "StandardTrainer,sweep_trainers:Raises"),
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "2 experiments; 2 already have a result\n"
    assert "1 of 2 experiments succeeded (50.0 %): 1 ok, 1 error" in out
    assert out.splitlines()[-1] == f"report: {swept.folder / 'out' / 'report.html'}"


def test_the_page_is_written_beside_the_logs(swept: Swept) -> None:
    page = (swept.folder / "out" / "report.html").read_text(encoding="utf-8")
    assert ">StandardTrainer_bs2_seq32</td>" in page.replace("<wbr>", "")
    assert "this trainer has no wheels" in page


def test_logs_copied_elsewhere_are_summarised(swept: Swept, run: Run, tmp_path: Path) -> None:
    shutil.copytree(swept.folder / "out" / "logs", tmp_path / "copy")
    result = run("summarize", "--logs-dir", "copy", "--output", "results.json", "--format", "markdown")
    assert (result.code, result.err) == (0, "")
    assert "| StandardTrainer | 1 | 1 | 100.0 % |" in result.out
    from_copy = json.loads((tmp_path / "results.json").read_text())
    assert from_copy["totals"] == json.loads(swept.result.out)["totals"]
    printed = run("summarize", "--logs-dir", "copy", "--json")
    assert json.loads(printed.out) == from_copy


def test_report_writes_one_page_where_it_is_told(swept: Swept, run: Run, tmp_path: Path) -> None:
    result = run("report", str(swept.folder / "out"), "-o", "new/page.html")
    assert (result.code, result.out) == (0, f"report: {tmp_path / 'new' / 'page.html'}\n")
    assert "Raises_bs2_seq32" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_ctrl_c_is_exit_code_130_with_a_summary(tmp_path: Path) -> None:
    (tmp_path / "sweep_trainers.py").write_text(TRAINERS)
    process = sweep_process(
        tmp_path, "--mode", "test", "--output", "out", "--trainers", "sweep_trainers:Waits"
    )
    assert process.stderr is not None
    while "started on" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: the same command with --rerun none continues from here" in err
    assert "0 of 1 experiments succeeded" in out


WRONG_SUMMARIES = {
    "a folder that is not there": (["summarize", "--logs-dir", "nowhere"], "nowhere does not exist"),
    "a folder without logs": (["summarize", "--logs-dir", "."], "does not contain a sweep"),
    "no folder": (["summarize"], "truemfu summarize DIR"),
    "an unknown format": (["summarize", "--logs-dir", ".", "--format", "xml"], "'xml' is not one of"),
    "an ending that says nothing": (
        ["summarize", "--logs-dir", ".", "--output", "results.txt"],
        "--output must end in .json, .csv, .md",
    ),
    "a report of nothing": (["report", "nowhere"], "nowhere does not exist"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG_SUMMARIES.values(), ids=WRONG_SUMMARIES)
def test_a_wrong_summary_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def failed_result(name: str = "DPSGDTrainer_bs4_seq512", **fields: Any) -> CaseResult:
    case = SweepCase(trainer="DPSGDTrainer", model="1b", batch_size=4, seq_len=512)
    values: dict[str, Any] = {
        "end": Status.CUDA_OOM,
        "phase": Phase.WARM_UP,
        "message": "out of memory",
        "wall_s": 60.0,
    }
    return CaseResult(name=name, sweep_id="1", content_hash="0", case=case, **{**values, **fields})


@pytest.mark.parametrize("target", ["file.json", "file.json/results.json"])
def test_a_summary_that_cannot_be_written_is_a_wrong_call(run: Run, tmp_path: Path, target: str) -> None:
    (tmp_path / "file.json").mkdir() if target == "file.json" else (tmp_path / "file.json").touch()
    (tmp_path / "DPSGDTrainer_bs4_seq512.log").write_bytes(encode(failed_result()))
    result = run("summarize", "--logs-dir", ".", "--output", target)
    assert result.code == 2
    assert "cannot be written" in result.err


def test_a_summary_of_failures_is_no_failure_and_nothing_in_it_is_cut(run: Run, tmp_path: Path) -> None:
    fits = (
        "not even a batch of 1 of 1b fits at sequence length 512; medium at batch 1 does (measured: 7.9 GiB)"
    )
    (tmp_path / "DPSGDTrainer_bs4_seq512.log").write_bytes(encode(failed_result(fits=fits)))
    result = run("summarize", "--logs-dir", ".")
    assert result.code == 0
    assert "DPSGDTrainer_bs4_seq512: cuda_oom in phase warm_up: out of memory" in result.out
    assert "0 of 1 experiments succeeded" in result.out
    assert sum(fits in line for line in result.out.splitlines()) == 2
    assert "…" not in result.out


def test_a_page_is_not_written_through_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "DPSGDTrainer_bs4_seq512.log").write_bytes(encode(failed_result()))
    (tmp_path / "precious.txt").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "precious.txt")
    result = run("report", ".")
    assert result.code == 2
    assert result.err == "error: report.html is a symbolic link, not a file: give --output another name\n"
    assert (tmp_path / "precious.txt").read_text() == "mine"
    assert run("report", ".", "--output", "other.html").code == 0


DESTROYS = """
import shutil
from pathlib import Path
from truemfu.sweep.trainers.standard import StandardTrainer

class Destroys(StandardTrainer):
    made = 0
    def __init__(self, model, settings):
        super().__init__(model, settings)
        type(self).made += 1
        if self.made == 2:
            shutil.rmtree("out")
            REPLACE
"""


@pytest.mark.parametrize("replace", ["pass", "Path('out').touch()"])
def test_an_experiment_that_destroys_the_folder_is_measured_and_the_exit_code_is_right(
    tmp_path: Path, replace: str
) -> None:
    (tmp_path / "mine.py").write_text(DESTROYS.replace("REPLACE", replace))
    flags = ["--mode", "test", "--trainers", "mine:Destroys", "--output", "out", "--rerun", "none", "--json"]
    process = sweep_process(tmp_path, *flags)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["totals"]["ends"] == {"ok": 1}
    assert summary["experiments"][0]["tokens_per_s"] > 0
    if replace == "pass":
        assert any("was removed and has been created again" in note for note in summary["notes"])
        assert (tmp_path / "out" / "results" / "Destroys_bs2_seq32.json").is_file()
        assert (tmp_path / "out" / "sweep.json").is_file()
    else:
        assert any("could not be written: Not a directory" in note for note in summary["notes"])


def running(slot: str, phase: Phase, elapsed_s: float) -> CaseState:
    return CaseState(slot=slot, phase=phase, elapsed_s=elapsed_s, time_limit_s=900.0)


def test_a_terminal_shows_what_runs_and_the_time_left() -> None:
    shown: list[str] = []
    live = Lines(shown.append)
    names = [f"DPSGDTrainer_bs{batch}_seq512" for batch in (1, 2, 4)]
    live.started(names, [failed_result(names[0])])
    live.changed(names[1], running("gpu0", Phase.GRADIENT_CHECK, 3.0))
    assert shown.pop().splitlines() == [
        "1 of 3 done",
        "DPSGDTrainer_bs2_seq512: gate on gpu0, 3 of 900 s",
    ]
    live.ended(failed_result(names[1]))
    live.changed(names[2], running("gpu0", Phase.TIMED, 20.0))
    assert shown.pop().splitlines()[0] == "2 of 3 done, about 40 s left"
    live.ended(failed_result(names[2]))
    assert shown.pop() == "3 of 3 done"


def test_a_line_of_the_sweep_is_above_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", Terminal(written, "utf-8", write_through=True))
    with working("reading the folder") as show:
        listener = Lines(show)
        listener.message("beginning")  # which draws the text below it, too
        listener.message("warm-up is over")
    assert "reading the folder" in written.getvalue().decode()
    assert "\x1b[2Kwarm-up is over\n" in written.getvalue().decode()


def test_of_many_running_experiments_the_first_are_shown() -> None:
    shown: list[str] = []
    live = Lines(shown.append)
    names = [f"DPSGDTrainer_bs{batch}_seq512" for batch in range(1, 41)]
    live.started(names, [])
    for name in names:
        live.changed(name, running("node", Phase.TIMED, 1.0))
    lines = shown.pop().splitlines()
    assert (len(lines), lines[-1]) == (10, "and 32 more")


def test_an_experiment_begins_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    lines.started(["DPSGDTrainer_bs4_seq512"], [])
    for phase in (Phase.START, Phase.GRADIENT_CHECK, Phase.TIMED):
        state = CaseState(slot="gpu1", phase=phase, elapsed_s=1.0, time_limit_s=9.0)
        lines.changed("DPSGDTrainer_bs4_seq512", state)
    lines.ended(failed_result())
    assert capsys.readouterr().err.splitlines() == [
        "1 experiment",
        "DPSGDTrainer_bs4_seq512: started on gpu1",
        "DPSGDTrainer_bs4_seq512: cuda_oom: out of memory  [1 of 1 done]",
    ]


def test_help_teaches(run: Run) -> None:
    assert "truemfu sweep --mode test" in run("--help").out
    text = run("sweep", "--help").out
    for piece in ("profile", "single", "DPFastGradientClippingTrainer", "package.module:Class", "Exit codes"):
        assert piece in text
    assert "truemfu summarize out/sweep" in run("summarize", "--help").out
    assert "-o report.html" in run("report", "--help").out


def test_nobody_has_to_read_what_a_sweep_says(tmp_path: Path) -> None:
    """`truemfu sweep 2>&1 | head -1`: it goes on, writes its page, and fails if an experiment does."""
    (tmp_path / "sweep_trainers.py").write_text(TRAINERS)
    process = sweep_process(
        tmp_path, *("--mode", "test", "-o", "out", "--trainers", "sweep_trainers:Raises,StandardTrainer")
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.readline() == "2 experiments\n"
    process.stderr.close()
    assert process.wait(timeout=300) == 1
    assert len(list((tmp_path / "out" / "results").iterdir())) == 2
    assert "1 of 2 experiments succeeded" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}])
def test_where_nothing_can_be_drawn_anew_there_are_lines(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: "TERM" in environment)
    with working("counting") as show:
        assert show is None


def test_a_dumb_terminal_cuts_no_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = output()
    assert console.is_dumb_terminal
    assert console.width == 140
