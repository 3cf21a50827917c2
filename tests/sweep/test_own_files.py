"""What an experiment does to the sweep's own files touches neither its measurement nor the next one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from supervised import UNTIL_WATCHED, Recorder, Watching, last_line, small

from truemfu.records import CaseResult, Status, SweepRecord, read_record
from truemfu.report.sweep.load import load_sweep
from truemfu.sweep.paths import SweepFolder
from truemfu.sweep.supervisor.runner import run_sweep

STAND_IN = (
    """
import json, os, shutil, sys, time
from pathlib import Path

order = json.loads(sys.stdin.readline())
folder, name = Path(order["folder"]), order["name"]
log, progress = Path(order["log_path"]), Path(order["progress_path"])
result_file, marker = folder / "results" / f"{name}.json", folder / "running" / f"{name}.json"
outside = Path(os.environ["TRUEMFU_TEST_FOLDER"]) / "outside"

def phase(which):
    with open(progress, "a") as progress_lines:
        progress_lines.write(json.dumps({"phase": which, "at_s": time.time()}) + "\\n")

def become(path, make):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    make(path)

UNTIL_WATCHED
phase("timed")
if order["case"]["batch_size"] == 1:
    until_watched()
    HARM
    until_watched()
result = {key: order[key] for key in ("name", "sweep_id", "content_hash", "case")}
result |= {"end": "ok", "phase": "done"}
os.write(int(os.environ["TRUEMFU_SWEEP_ANSWER"]), json.dumps(result).encode())
"""
).replace("UNTIL_WATCHED", UNTIL_WATCHED)


BAD, GOOD = "StandardTrainer_bs1_seq16", "StandardTrainer_bs2_seq16"

HARMS = {
    "removes running/": ("shutil.rmtree(folder / 'running')", "running/ was removed"),
    "removes the folder": ("shutil.rmtree(folder)", "logs/, results/, runs/, running/ was removed"),
    "log is a FIFO": ("become(log, os.mkfifo)", f"logs/{BAD}.log became a FIFO"),
    "log is a link": (
        "become(log, lambda path: path.symlink_to(outside / 'file'))",
        f"logs/{BAD}.log became a symbolic link",
    ),
    "logs/ is a link": (
        "become(folder / 'logs', lambda path: path.symlink_to(outside))",
        "logs/ was removed",
    ),
    "result is a folder": ("become(result_file, Path.mkdir)", f"results/{BAD}.json became a folder"),
    "progress is a folder": ("become(progress, Path.mkdir)", None),
    "progress is a FIFO": ("become(progress, os.mkfifo)", None),
    "marker is a folder": ("become(marker, Path.mkdir)", None),
    "sweep.json is removed": ("(folder / 'sweep.json').unlink()", None),
    "sweep.json is a FIFO": ("become(folder / 'sweep.json', os.mkfifo)", None),
    "lock is a folder": ("become(folder / 'running' / 'lock', Path.mkdir)", None),
}


@pytest.mark.parametrize("harm", HARMS)
def test_an_experiment_that_harms_the_sweeps_files_keeps_its_result_and_spares_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_waits: None, harm: str
) -> None:
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine")
    code, note = HARMS[harm]
    folder, heard = SweepFolder(tmp_path / "out"), Watching(tmp_path)
    outcome = run_sweep(
        small(trainers=["StandardTrainer"], batch_sizes=[1, 2]),
        folder.root,
        listener=heard,
        command=[sys.executable, "-c", STAND_IN.replace("HARM", code)],
    )
    bad, good = outcome.results
    assert [(result.name, result.end) for result in outcome.results] == [(BAD, Status.OK), (GOOD, Status.OK)]
    assert [text.partition(" and has been")[0] for text in bad.notes] == ([] if note is None else [note])
    assert good.notes == []
    for result in outcome.results:
        assert read_record(folder.result(result.name), CaseResult) == result
        assert last_line(folder.log(result.name))["end"] == "ok"
    assert read_record(folder.record, SweepRecord).cases == [BAD, GOOD]
    assert [entry.end for entry in load_sweep(folder.root).entries] == ["ok", "ok"]
    assert [path.name for path in folder.running.iterdir()] == ["lock"]
    assert (folder.running / "lock").is_file()
    assert not any(part.is_symlink() for part in folder.parts)
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["file"]
    assert (tmp_path / "outside" / "file").read_text() == "mine"


@pytest.mark.parametrize("what", ["progress", "log"])
def test_the_time_limit_holds_where_a_file_became_a_fifo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_waits: None, what: str
) -> None:
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    harmed = tmp_path / "harmed"
    code = f"become({what}, os.mkfifo); Path({str(harmed)!r}).touch(); time.sleep(600)"
    config = small(trainers=["StandardTrainer"], batch_sizes=[1], timeout_s=100.0)
    (late,) = run_sweep(
        config,
        tmp_path / "out",
        listener=Watching(tmp_path),
        command=[sys.executable, "-c", STAND_IN.replace("HARM", code)],
        clock=lambda: 200.0 if harmed.exists() else 0.0,
    ).results
    assert (late.end, late.phase.value) == (Status.TIMEOUT, "timed")


def test_a_folder_that_cannot_be_written_again_costs_each_experiment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_waits: None
) -> None:
    """A file in the place of the sweep's folder, and no way to make the folder again."""
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = STAND_IN.replace("HARM", "shutil.rmtree(folder); folder.write_text('mine')")
    outcome = run_sweep(
        small(trainers=["StandardTrainer"], batch_sizes=[1, 2]),
        tmp_path / "out",
        listener=Watching(tmp_path),
        command=[sys.executable, "-c", code],
    )
    bad, good = outcome.results
    assert (bad.end, good.end) == (Status.OK, Status.ERROR)
    assert any("could not be written: Not a directory" in note for note in bad.notes)
    assert good.message is not None
    assert "NotADirectoryError" in good.message
    assert (tmp_path / "out").read_text() == "mine"


def test_a_new_lock_keeps_another_sweep_out_of_a_folder_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen: list[str] = []

    class SecondSweep(Watching):
        def ended(self, result: CaseResult) -> None:
            try:
                run_sweep(config, tmp_path / "out", listener=Recorder())
            except ValueError as error:
                seen.append(str(error))

    config = small(trainers=["StandardTrainer"], batch_sizes=[1])
    code = STAND_IN.replace("HARM", "shutil.rmtree(folder)")
    run_sweep(config, tmp_path / "out", listener=SecondSweep(tmp_path), command=[sys.executable, "-c", code])
    assert len(seen) == 1
    assert f"another sweep is running in {tmp_path / 'out'} (process {os.getpid()})" in seen[0]


LEAVE = (sys.executable, "-c", "raise SystemExit(7)")


def test_resume_reads_no_fifo_follows_no_link_and_takes_the_log_where_the_result_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, never_waits: None
) -> None:
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    root, config = tmp_path / "out", small(trainers=["StandardTrainer"], batch_sizes=[1, 2, 3, 4])
    command = [sys.executable, "-c", STAND_IN.replace("HARM", "pass")]
    first = run_sweep(config, root, listener=Watching(tmp_path), command=command)
    folder = SweepFolder(root)
    fifo, loop, flipped, fine = (result.name for result in first.results)
    folder.result(fifo).unlink()
    os.mkfifo(folder.result(fifo))
    folder.result(loop).unlink()
    folder.result(loop).symlink_to(folder.result(loop))
    content = folder.result(flipped).read_text()
    assert content.count('"seq_len": 16') == 1
    folder.result(flipped).write_text(content.replace('"seq_len": 16', '"seq_len": 17'))
    os.mkfifo(folder.marker("fifo"))
    heard = Recorder()
    again = run_sweep(config, root, listener=heard, command=LEAVE)
    assert heard.reused == [fifo, loop, flipped, fine]
    said = "\n".join(heard.lines)
    assert f"{fifo}.json cannot be read: a FIFO, not a file; read from {fifo}.log instead" in said
    assert f"{loop}.json cannot be read: Too many levels of symbolic links; read from" in said
    assert f"{flipped}.json is damaged: its content does not match its checksum; read from" in said
    assert "fifo.json cannot be read: a FIFO, not a file" in said
    assert [result.case for result in again.results] == [result.case for result in first.results]
    for result in first.results:
        assert read_record(folder.result(result.name), CaseResult).case == result.case

    folder.result(fifo).unlink()
    os.mkfifo(folder.result(fifo))
    folder.log(fifo).write_text("nothing\n")
    heard = Recorder()
    (run, *_) = run_sweep(config, root, listener=heard, command=LEAVE).results
    assert (heard.reused, run.exit_code) == ([loop, flipped, fine], 7)
    assert any(line.endswith("ends without a result; running it again") for line in heard.lines)


def test_a_log_that_is_a_link_to_elsewhere_is_replaced_and_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    folder = SweepFolder(tmp_path / "out")
    config = small(trainers=["StandardTrainer"], batch_sizes=[1])
    run_sweep(config, folder.root, listener=Recorder(), command=LEAVE)
    links = [folder.log(BAD), folder.result(BAD)]
    for path in links:
        path.unlink(missing_ok=True)
        path.symlink_to(precious)
    run_sweep(config, folder.root, rerun="all", listener=Recorder(), command=LEAVE)
    assert precious.read_text() == "mine"
    assert not folder.log(BAD).is_symlink()
    assert json.loads(folder.result(BAD).read_text())["exit_code"] == 7
    shutil.rmtree(folder.root)
