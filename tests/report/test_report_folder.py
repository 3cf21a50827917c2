"""`truemfu report` finds out by itself what a folder holds; neither or both is one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.command_line import Run, caller

from truemfu.records import CaseResult
from truemfu.report.folder import load_folder
from truemfu.report.run.load import LoadedRun
from truemfu.report.sweep.load import LoadedSweep


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return caller(capsys)


def test_a_run_is_reported_as_a_run(run: Run, run_folder: Path, tmp_path: Path) -> None:
    result = run("report", str(run_folder), "-o", str(tmp_path / "new" / "page.html"))
    assert (result.code, result.out, result.err) == (0, f"report: {tmp_path / 'new' / 'page.html'}\n", "")
    assert "<h1>Training run run</h1>" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_the_page_lies_in_the_folder_where_none_is_named(run: Run, run_folder: Path) -> None:
    assert run("report", str(run_folder / "training_run.json")).code == 0
    assert "Training run run" in (run_folder / "report.html").read_text(encoding="utf-8")


def test_a_sweep_is_reported_as_a_sweep(run: Run, matrix: list[CaseResult], write_sweep) -> None:
    folder = write_sweep(matrix)
    assert run("report", str(folder)).code == 0
    assert "<h1>Profiling sweep</h1>" in (folder / "report.html").read_text(encoding="utf-8")
    for part in ("logs", "results"):
        assert isinstance(load_folder(folder / part), LoadedSweep)


def test_both_in_one_folder_is_a_line_that_says_how_to_go_on(
    run: Run, matrix: list[CaseResult], write_sweep, run_folder: Path
) -> None:
    both = write_sweep(matrix)
    shutil.copytree(run_folder, both, dirs_exist_ok=True)
    result = run("report", str(both))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"give {both / 'training_run.json'} for the run, {both / 'results'} or" in result.err
    assert isinstance(load_folder(both / "training_run.json"), LoadedRun)
    assert isinstance(load_folder(both / "results"), LoadedSweep)


@pytest.mark.parametrize(
    ("gone", "told"),
    [(("results",), ["logs"]), (("logs",), ["results"]), (("logs", "results"), ["sweep.json"])],
)
def test_only_what_is_there_is_recommended(
    run: Run, matrix: list[CaseResult], write_sweep, run_folder: Path, gone: tuple[str, ...], told: list[str]
) -> None:
    both = write_sweep(matrix)
    shutil.copytree(run_folder, both, dirs_exist_ok=True)
    for name in gone:
        shutil.rmtree(both / name)
    named = run("report", str(both)).err.partition("for the run, ")[2].removesuffix(" for the sweep\n")
    assert named == " or ".join(str(both / name) for name in told)
    assert isinstance(load_folder(both / told[0]), LoadedSweep)


def test_a_run_beside_a_sweep_leaves_the_page_of_the_sweep_alone(
    run: Run, matrix: list[CaseResult], write_sweep, run_folder: Path
) -> None:
    both = write_sweep(matrix)
    shutil.copytree(run_folder, both, dirs_exist_ok=True)
    (both / "report.html").write_text("the sweep's")
    result = run("report", str(both / "training_run.json"))
    assert (result.code, result.out) == (0, f"report: {both / 'run_report.html'}\n")
    assert (both / "report.html").read_text() == "the sweep's"
    assert "Training run" in (both / "run_report.html").read_text(encoding="utf-8")


def link(way: str, target: Path, folder: Path) -> Path:
    """The target under another name."""
    if way == "itself":
        return target
    other = folder / "page.html"
    other.symlink_to(target) if way == "symbolic link" else other.hardlink_to(target)
    return other


@pytest.mark.parametrize("way", ["itself", "symbolic link", "hard link"])
@pytest.mark.parametrize("name", ["training_run.json", "training_log.json", "mine.json"])
def test_a_page_never_goes_over_a_file_of_its_run(
    run: Run, run_folder: Path, change_run, tmp_path: Path, name: str, way: str
) -> None:
    if name == "mine.json":
        (run_folder / "training_log.json").rename(run_folder / name)
        change_run(lambda run: run.update(log_file=name))
    before = (run_folder / name).read_bytes()
    result = run("report", str(run_folder), "-o", str(link(way, run_folder / name, tmp_path)))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "is an input file of this report: give --output another name" in result.err
    assert (run_folder / name).read_bytes() == before


@pytest.mark.parametrize("given", ["", "logs", "results"])
@pytest.mark.parametrize("kind", ["sweep.json", "results/*.json", "logs/*.log"])
def test_a_page_never_goes_over_a_file_of_its_sweep(
    run: Run, matrix: list[CaseResult], write_sweep, given: str, kind: str
) -> None:
    folder = write_sweep(matrix)
    target = next(folder.glob(kind))
    before = target.read_bytes()
    assert run("report", str(folder / given), "-o", str(target)).code == 2
    assert target.read_bytes() == before


def test_a_page_may_be_written_again(run: Run, run_folder: Path) -> None:
    for _ in range(2):
        assert run("report", str(run_folder)).code == 0


def test_garbage_in_both_files_is_one_line_and_no_page(run: Run, run_folder: Path) -> None:
    for name in ("training_run.json", "training_log.json"):
        (run_folder / name).write_bytes(b"\0\xff garbage")
    result = run("report", str(run_folder))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "does not contain a readable run: The run file training_run.json is not a valid" in result.err
    assert "this report is based on" not in result.err
    assert not (run_folder / "report.html").exists()


def test_a_run_may_have_logs_of_its_own_beside_it(run_folder: Path) -> None:
    (run_folder / "logs").mkdir()
    (run_folder / "logs" / "train.log").write_text("step 1\nstep 2\n")
    (run_folder / "results").mkdir()
    (run_folder / "results" / "eval.json").write_text(json.dumps({"accuracy": 0.5}))
    assert isinstance(load_folder(run_folder), LoadedRun)


WRONG = {
    "an empty folder": (".", "contains neither a run (training_run.json, training_log.json) nor a sweep"),
    "no folder": ("nowhere", "nowhere does not exist: expected a folder with a run"),
    "a file": ("some.txt", "some.txt is a file: expected a folder with a run"),
    "foreign logs": ("foreign", "foreign contains neither a run"),
}


@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_neither_is_one_line_and_exit_code_2(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.txt").touch()
    (tmp_path / "foreign" / "logs").mkdir(parents=True)
    (tmp_path / "foreign" / "logs" / "server.log").write_text("hello\n")
    result = run("report", given)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_a_page_that_cannot_be_written_is_a_wrong_call(run: Run, run_folder: Path) -> None:
    result = run("report", str(run_folder), "-o", str(run_folder / "training_log.json" / "page.html"))
    assert result.code == 2
    assert "cannot be written" in result.err


def test_help_names_both(run: Run) -> None:
    text = run("report", "--help").out
    assert "truemfu report out/run -o report.html" in text
    assert "truemfu report out/sweep -o report.html" in text
