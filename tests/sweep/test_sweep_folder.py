"""Whose folder it is: taken, continued, added to, or refused with one line and untouched."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import truemfu
from truemfu import plain_files
from truemfu.errors import RecordError, UsageError
from truemfu.plain_files import is_name
from truemfu.records import SweepRecord, read_record
from truemfu.sweep.cases import cases_of, resolved
from truemfu.sweep.config import TEST_CONFIG, override
from truemfu.sweep.folder_claim import claim
from truemfu.sweep.paths import SweepFolder

PACKAGE = Path(truemfu.__file__).parent


def take(root: Path, *, start_over: bool = False, **settings: Any) -> tuple[SweepFolder, SweepRecord]:
    config = resolved(override(TEST_CONFIG, **{"trainers": ["StandardTrainer"], **settings}), "cpu")
    folder, record, lock = claim(root, config, cases_of(config, "cpu"), start_over=start_over)
    lock.release()
    return folder, record


def test_a_new_folder_is_made_and_says_whose_it_is(tmp_path: Path) -> None:
    folder, record = take(tmp_path / "a" / "b")
    assert read_record(folder.record, SweepRecord) == record
    assert record.cases == ["StandardTrainer_bs2_seq32"]
    assert (record.config["device"], record.config["dtypes"]) == ("cpu", ["fp32"])


def test_the_same_matrix_goes_on_with_the_same_sweep(tmp_path: Path) -> None:
    assert take(tmp_path)[1] == take(tmp_path)[1]


def test_what_only_bounds_an_experiment_may_change(tmp_path: Path) -> None:
    first = take(tmp_path)[1]
    again = take(tmp_path, timeout_s=7.0, memory_limit_gib=3.0, prune=True, find_fit=False)[1]
    assert again.sweep_id == first.sweep_id
    assert again.config["timeout_s"] == 7.0


def test_experiments_are_added_and_the_denominator_grows(tmp_path: Path) -> None:
    first = take(tmp_path)[1]
    more = take(tmp_path, batch_sizes=[4], seq_lengths=[16])[1]
    assert more.sweep_id == first.sweep_id
    assert more.cases == ["StandardTrainer_bs2_seq32", "StandardTrainer_bs4_seq16"]
    assert take(tmp_path)[1].cases == more.cases


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": ["small"]}, "model_sizes is tiny there and small here"),
        ({"dtypes": ["bf16"]}, "dtypes is fp32 there and bf16 here"),
        ({"optimizer": "adamw"}, "optimizer is sgd there and adamw here"),
        ({"max_steps": 50}, "max_steps is 20 there and 50 here"),
    ],
)
def test_other_settings_are_another_sweep(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    folder, record = take(tmp_path)
    with pytest.raises(UsageError, match=f"belongs to another sweep: {message}.*--rerun all"):
        take(tmp_path, **settings)
    assert read_record(folder.record, SweepRecord) == record


def test_another_trainer_of_the_same_name_is_another_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("mine", "yours"):
        (tmp_path / f"{module}.py").touch()
    monkeypatch.chdir(tmp_path)
    take(tmp_path / "out", trainers=["mine:Fast"])
    with pytest.raises(UsageError, match="trainer of Fast_bs2_seq32 is mine:Fast there and yours:Fast here"):
        take(tmp_path / "out", trainers=["yours:Fast"])
    with pytest.raises(UsageError, match="trainer of Fast_bs4_seq32 is mine:Fast there and yours:Fast here"):
        take(tmp_path / "out", trainers=["yours:Fast"], batch_sizes=[4])


def test_starting_over_replaces_the_other_sweep_and_its_files_alone(tmp_path: Path) -> None:
    folder, first = take(tmp_path)
    old, stranger = folder.result(first.cases[0]), tmp_path / "notes.txt"
    old.write_text("{}")
    stranger.write_text("mine")
    again = take(tmp_path, start_over=True, batch_sizes=[4], models=["small"])[1]
    assert again.sweep_id != first.sweep_id
    assert again.cases == ["StandardTrainer_bs4_seq32"]
    assert not old.exists()
    assert stranger.read_text() == "mine"


@pytest.mark.parametrize("as_path", [str, lambda path: os.path.relpath(path, path.parent / "out" / "runs")])
def test_starting_over_removes_nothing_that_a_record_names_outside(
    tmp_path: Path, as_path: Callable[[Path], str]
) -> None:
    folder, _ = take(tmp_path / "out")
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    (tmp_path / "home.log").touch()
    record = json.loads(folder.record.read_text())
    record.pop("checksum", None)
    folder.record.write_text(json.dumps({**record, "cases": [as_path(home)]}))
    with pytest.raises(RecordError, match=r"sweep\.json is not a valid SweepRecord: '.*home' is not a valid"):
        take(tmp_path / "out", models=["small"])
    assert take(tmp_path / "out", start_over=True, models=["small"])[1].cases == ["StandardTrainer_bs2_seq32"]
    assert (home / "thesis.tex").exists()
    assert (tmp_path / "home.log").exists()


def test_starting_over_removes_links_and_not_what_they_point_to(tmp_path: Path) -> None:
    folder, record = take(tmp_path / "out")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    (name,) = record.cases
    folder.run(name).symlink_to(tmp_path / "home")
    folder.log(name).symlink_to(tmp_path / "home" / "thesis.tex")
    take(tmp_path / "out", start_over=True, models=["small"])
    assert not os.path.lexists(folder.run(name))
    assert not os.path.lexists(folder.log(name))
    assert (tmp_path / "home" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["logs", "results", "runs", "running"])
def test_a_link_in_the_place_of_one_of_its_folders_is_refused(tmp_path: Path, name: str) -> None:
    take(tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / name)
    (tmp_path / "home").mkdir()
    (tmp_path / "out" / name).symlink_to(tmp_path / "home")
    with pytest.raises(
        UsageError, match=rf"{name} is a symbolic link: a sweep only writes to its own folders"
    ):
        take(tmp_path / "out", start_over=True)
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("trainers", [5, [[1]], [{"a": 1}], "StandardTrainer"])
def test_a_record_with_a_senseless_matrix_is_one_line(tmp_path: Path, trainers: object) -> None:
    folder, _ = take(tmp_path)
    record = json.loads(folder.record.read_text())
    record.pop("checksum", None)
    record["config"]["trainers"] = trainers
    folder.record.write_text(json.dumps(record))
    with pytest.raises((RecordError, UsageError), match=r"^[^\n]+$"):
        take(tmp_path)
    assert take(tmp_path, start_over=True)[1].cases == ["StandardTrainer_bs2_seq32"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(path, path)])
def test_a_lock_or_a_record_that_is_no_file_is_one_line(
    tmp_path: Path, make: Callable[[Path], None], never_waits: None
) -> None:
    folder, _ = take(tmp_path)
    for path in (folder.record, folder.running / "lock"):
        content = path.read_bytes()
        path.unlink()
        make(path)
        with pytest.raises((RecordError, UsageError), match="cannot"):
            take(tmp_path)
        plain_files.remove(path)
        path.write_bytes(content)


def test_other_files_in_the_folder_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "run_profiling.sh").touch()
    assert take(tmp_path)[1].cases


@pytest.mark.parametrize("name", ["logs", "results", "runs", "running"])
def test_a_folder_with_someone_elses_files_under_our_names_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "server.log").touch()
    with pytest.raises(UsageError, match=f"contains {name}/, which does not belong to a sweep"):
        take(tmp_path)
    assert not (tmp_path / "sweep.json").exists()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match="is a file, not a folder"):
        take(tmp_path / "out")
    with pytest.raises(UsageError, match=r"cannot write to .*Not a directory"):
        take(tmp_path / "out" / "below")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that not even root can write to")
def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot write to /proc/sweep"):
        take(Path("/proc/sweep"))


def test_a_record_that_is_none_is_refused_and_can_be_replaced(tmp_path: Path) -> None:
    take(tmp_path)
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(Exception, match=r"sweep\.json is not a valid SweepRecord"):
        take(tmp_path)
    assert take(tmp_path, start_over=True)[1].cases == ["StandardTrainer_bs2_seq32"]


def test_two_supervisors_cannot_share_a_folder(tmp_path: Path) -> None:
    config = resolved(TEST_CONFIG, "cpu")
    cases = cases_of(config, "cpu")
    _, _, lock = claim(tmp_path, config, cases, start_over=False)
    with pytest.raises(UsageError, match=rf"another sweep is running in .* \(process {os.getpid()}\)"):
        claim(tmp_path, config, cases, start_over=True)
    lock.release()
    claim(tmp_path, config, cases, start_over=False)[2].release()


def test_the_longest_name_leaves_room_for_every_file(tmp_path: Path) -> None:
    longest = max(("x" * length for length in range(256)), key=lambda name: len(name) * is_name(name))
    folder = SweepFolder(tmp_path)
    for path in (folder.trace, folder.log, folder.result, folder.marker, folder.progress):
        file = path(longest)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def test_no_other_module_spells_a_name_of_the_folder() -> None:
    folder = SweepFolder(Path("x"))
    names = {path.name for path in (*folder.parts, folder.record, folder.page)}
    spelled = {
        f"{file.relative_to(PACKAGE)}: {node.value}"
        for file in PACKAGE.rglob("*.py")
        if any(name in (text := file.read_text(encoding="utf-8")) for name in names)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and names & {*Path(node.value).parts}
    }
    assert {line.partition(":")[0] for line in spelled} == {"sweep/paths.py"}, sorted(spelled)
