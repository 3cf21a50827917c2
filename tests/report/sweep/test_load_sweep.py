"""A sweep is read from whatever is left of it, and nothing is skipped."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from truemfu.errors import UsageError
from truemfu.records import Status, encode, write_record
from truemfu.report.folder import load_folder
from truemfu.report.sweep.load import LoadedSweep, load_sweep, with_results
from truemfu.report.sweep.summary import summarize


def ends(sweep: LoadedSweep) -> dict[str, str]:
    return {entry.name: entry.end for entry in sweep.entries}


@pytest.mark.parametrize("part", ["", "logs", "results"])
def test_the_folder_and_each_of_its_parts_tell_the_same(matrix, write_sweep, part: str) -> None:
    folder = write_sweep(matrix)
    loaded = load_sweep(folder / part)
    assert [entry.result for entry in loaded.entries] == matrix
    assert loaded.record is not None
    assert loaded.notes == ()


@pytest.mark.parametrize("part", ["logs", "results"])
def test_a_part_copied_elsewhere_is_enough(matrix, write_sweep, tmp_path: Path, part: str) -> None:
    copy = shutil.copytree(write_sweep(matrix) / part, tmp_path / "copied from afar")
    loaded = load_sweep(copy)
    assert loaded.record is None
    by_name = {entry.name: entry.result for entry in loaded.entries}
    assert by_name == {result.name: result for result in matrix}


def test_a_case_without_any_file_was_not_run_and_keeps_its_place(make_result, write_sweep) -> None:
    done = make_result(batch_size=8)
    folder = write_sweep([done], cases=["StandardTrainer_bs4_seq512", done.name])
    first, second = load_sweep(folder / "logs").entries
    assert (first.name, first.end, first.reason) == (
        "StandardTrainer_bs4_seq512",
        "not run",
        "requested, but never started",
    )
    assert (first.trainer, first.batch_size, first.seq_len) == ("StandardTrainer", 4, 512)
    assert second.result == done


def test_a_case_whose_supervisor_was_killed_is_lost(make_result, write_sweep) -> None:
    folder = write_sweep([make_result()], cases=["StandardTrainer_bs4_seq512", "DPSGDTrainer_bs4_seq512"])
    (folder / "running" / "DPSGDTrainer_bs4_seq512.json").write_text('{"pid": 1}')
    (folder / "logs" / "DPSGDTrainer_bs4_seq512.log").write_text("step 1\nstep 2\n")
    entry = load_sweep(folder).entries[1]
    assert entry.end == "lost"
    assert entry.reason == (
        "DPSGDTrainer_bs4_seq512.log ends without a result; "
        "still running, or the sweep ended before the experiment finished"
    )
    assert entry.log_tail == ("step 1", "step 2")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"importing\nbuilding\n", "ends without a result"),
        (b'importing\n{"version": 1, "name": "Stand', "is not a valid CaseResult"),
        (b"\xff\xfe\x00garbage", "ends without a result"),
        (b'{"version": 1}', "is not a valid CaseResult"),
    ],
)
def test_a_log_without_a_result_is_lost_with_its_reason(
    make_result, tmp_path: Path, content: bytes, reason: str
) -> None:
    (tmp_path / "DPSGDTrainer_bs4_seq512.log").write_bytes(content)
    good = make_result()
    (tmp_path / f"{good.name}.log").write_bytes(encode(good))
    loaded = load_sweep(tmp_path)
    assert ends(loaded) == {"DPSGDTrainer_bs4_seq512": "lost", good.name: "ok"}
    lost = loaded.entries[0]
    assert reason in (lost.reason or "")
    assert (lost.trainer, lost.batch_size, lost.seq_len) == ("DPSGDTrainer", 4, 512)


@pytest.mark.parametrize("other", [{}, {"case": "of another type"}, {"end": "an end that is new"}])
def test_a_record_of_a_newer_version_is_lost_and_says_to_update(
    make_result, tmp_path: Path, other: dict[str, str]
) -> None:
    newer = json.loads(encode(make_result())) | {"version": 99} | other
    (tmp_path / "StandardTrainer_bs4_seq512.log").write_text(json.dumps(newer))
    (entry,) = load_sweep(tmp_path).entries
    assert entry.end == "lost"
    assert "update truemfu" in (entry.reason or "")


def test_a_half_written_result_is_read_from_its_log(matrix, write_sweep) -> None:
    folder = write_sweep(matrix)
    (folder / "results" / f"{matrix[0].name}.json").write_text('{"version": 1')
    assert [entry.result for entry in load_sweep(folder).entries] == matrix


def test_what_a_stray_child_printed_behind_the_result_does_not_hide_it(make_result, tmp_path: Path) -> None:
    result = make_result(message="a line separator \u2028 inside")
    log = tmp_path / f"{result.name}.log"
    log.write_text(f"noise\n{encode(result).decode()}\nchild: still here\n{{not json\n", encoding="utf-8")
    assert load_sweep(tmp_path).entries[0].result == result


def test_the_last_of_two_results_in_a_log_counts(make_result, tmp_path: Path) -> None:
    first, second = make_result(fits=None), make_result(fits="batch 2 fits")
    lines = b"\n".join([encode(first), encode(second)])
    (tmp_path / f"{first.name}.log").write_bytes(lines)
    assert load_sweep(tmp_path).entries[0].result == second


def test_a_very_long_log_is_read_from_its_end(make_result, tmp_path: Path) -> None:
    result = make_result()
    with (tmp_path / f"{result.name}.log").open("wb") as log:
        log.write(b"warning: the same again\n" * 400_000)
        log.write(encode(result))
    assert load_sweep(tmp_path).entries[0].result == result


def test_results_of_another_sweep_in_the_folder_are_left_out_and_named(make_result, write_sweep) -> None:
    own, foreign = make_result(), make_result(batch_size=64, sweep_id="another")
    folder = write_sweep([own])
    write_record(folder / "results" / f"{foreign.name}.json", foreign)
    loaded = load_sweep(folder)
    assert ends(loaded) == {own.name: "ok"}
    assert loaded.notes == (f"ignored, because these are results of another sweep: {foreign.name}",)


def test_a_broken_sweep_json_costs_the_denominator_and_says_so(matrix, write_sweep) -> None:
    folder = write_sweep(matrix)
    (folder / "sweep.json").write_text("{")
    loaded = load_sweep(folder)
    assert len(loaded.entries) == len(matrix)
    assert "experiments that left no file are unknown" in loaded.notes[0]


def test_a_lost_case_of_a_trainer_of_ones_own_belongs_to_it(make_result, write_sweep) -> None:
    folder = write_sweep(
        [make_result("mine.trainers:Fast")],
        cases=["Fast_bs4_seq512", "Fast_bs8_seq512", "Slow_bs4_seq512"],
        trainers=["mine.trainers:Fast", "mine.trainers:Slow"],
    )
    trainers = [entry.trainer for entry in load_sweep(folder).entries]
    assert trainers == ["mine.trainers:Fast", "mine.trainers:Fast", "mine.trainers:Slow"]


def test_results_in_memory_replace_what_the_disk_could_not_take(make_result, write_sweep) -> None:
    kept = make_result()
    unwritten = make_result("DPSGDTrainer", message="the disk is full")
    folder = write_sweep([kept], cases=[kept.name, unwritten.name])
    loaded = with_results(load_sweep(folder), [unwritten])
    assert [entry.result for entry in loaded.entries] == [kept, unwritten]


def test_a_folder_without_a_sweep_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist: expected the folder of a sweep"):
        load_sweep(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="does not contain a sweep: expected logs"):
        load_sweep(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        load_sweep(tmp_path / "file")


def test_a_log_that_cannot_be_read_is_lost(tmp_path: Path) -> None:
    (tmp_path / "StandardTrainer_bs4_seq512.log").mkdir()
    (entry,) = load_sweep(tmp_path).entries
    assert entry.end == "lost"
    assert "cannot be read: Is a directory" in (entry.reason or "")


def test_trainers_whose_short_names_differ_from_their_own_are_told_apart(make_result, write_sweep) -> None:
    """`My_Trainer` is My-Trainer in a file's name, and the second of that name My-Trainer-2."""
    done = make_result("mine:My_Trainer", name="My-Trainer_bs4_seq512")
    names = [done.name, "My-Trainer_bs8_seq512", "My-Trainer-2_bs4_seq512"]
    folder = write_sweep([done], cases=names, trainers=["mine:My_Trainer", "other:My_Trainer"])
    trainers = [entry.trainer for entry in load_sweep(folder).entries]
    assert trainers == ["mine:My_Trainer", "mine:My_Trainer", "other:My_Trainer"]
    (folder / "sweep.json").unlink()
    (folder / "logs" / "My-Trainer_bs8_seq512.log").touch()
    assert [entry.trainer for entry in load_sweep(folder).entries] == ["mine:My_Trainer"] * 2


def test_files_that_are_no_experiments_are_not_counted(make_result, tmp_path: Path) -> None:
    (tmp_path / "package.json").write_text("{}")
    with pytest.raises(UsageError, match="does not contain a sweep"):
        load_sweep(tmp_path)
    result = make_result()
    write_record(tmp_path / f"{result.name}.json", result)
    loaded = load_sweep(tmp_path)
    assert ends(loaded) == {result.name: "ok"}
    assert loaded.notes == ("ignored, because these are not experiments: package",)


def a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nested_too_deeply(path: Path) -> None:
    path.write_text('{"version":' + "[" * 100_000)


DAMAGE = pytest.mark.parametrize("damage", [a_fifo, a_loop, a_folder, nested_too_deeply])


@DAMAGE
def test_a_result_that_is_no_file_is_named_and_read_from_its_log(
    matrix, write_sweep, damage: Callable[[Path], None], never_waits: None
) -> None:
    folder = write_sweep(matrix)
    damage(folder / "results" / f"{matrix[0].name}.json")
    for loaded in (load_sweep(folder), load_folder(folder)):
        assert isinstance(loaded, LoadedSweep)
        assert [entry.result for entry in loaded.entries] == matrix
        (note,) = loaded.notes
        assert note.startswith(str(folder / "results" / f"{matrix[0].name}.json "))
        assert note.endswith(f"; read from {matrix[0].name}.log instead")
        assert len(note) < 600


@DAMAGE
def test_both_copies_damaged_are_lost_with_both_reasons(
    matrix, write_sweep, damage: Callable[[Path], None], never_waits: None
) -> None:
    folder = write_sweep(matrix)
    damage(folder / "results" / f"{matrix[0].name}.json")
    damage(folder / "logs" / f"{matrix[0].name}.log")
    lost, *others = load_sweep(folder).entries
    assert (lost.end, lost.trainer) == ("lost", matrix[0].case.trainer)
    assert f"{matrix[0].name}.json" in (lost.reason or "")
    assert f"{matrix[0].name}.log" in (lost.reason or "")
    assert [entry.result for entry in others] == matrix[1:]


@pytest.mark.parametrize("damage", [a_fifo, a_loop, a_folder])
def test_a_sweep_json_that_is_no_file_is_named(
    matrix, write_sweep, damage: Callable[[Path], None], never_waits: None
) -> None:
    folder = write_sweep(matrix)
    damage(folder / "sweep.json")
    loaded = load_sweep(folder)
    assert len(loaded.entries) == len(matrix)
    assert "sweep.json cannot be read" in loaded.notes[0]


@pytest.mark.parametrize("name", ["../../x", "/home/me", "a/../../b"])
def test_a_name_that_leads_out_of_the_folder_is_not_followed(make_result, write_sweep, name: str) -> None:
    folder = write_sweep([make_result()])
    record = json.loads((folder / "sweep.json").read_text())
    record.pop("checksum", None)
    (folder / "sweep.json").write_text(json.dumps({**record, "cases": [name]}))
    loaded = load_sweep(folder)
    assert [entry.name for entry in loaded.entries] == [make_result().name]
    assert f"'{name}' is not a valid experiment name" in loaded.notes[0]


@pytest.mark.parametrize("copy", ["{}.json.copy.json", "{}_copy.json", "copy of {}.json"])
@pytest.mark.parametrize("with_record", [True, False])
def test_a_copy_of_a_result_is_no_experiment_and_is_named(
    matrix, write_sweep, copy: str, with_record: bool
) -> None:
    folder = write_sweep(matrix)
    if not with_record:
        (folder / "sweep.json").unlink()
    results = folder / "results"
    name = copy.format(matrix[0].name)
    shutil.copy(results / f"{matrix[0].name}.json", results / name)
    loaded = load_sweep(folder)
    assert {entry.name for entry in loaded.entries} == {result.name for result in matrix}
    assert loaded.notes == (f"ignored: {results / name} contains the result of {matrix[0].name}",)


def test_a_copy_of_a_log_is_no_experiment_and_is_named(make_result, tmp_path: Path) -> None:
    result = make_result()
    (tmp_path / f"{result.name}_copy.log").write_bytes(encode(result))
    note = f"ignored: {result.name}_copy.log contains the result of {result.name}"
    with pytest.raises(UsageError, match=f"does not contain a sweep: .*; {note}"):
        load_sweep(tmp_path)
    (tmp_path / f"{result.name}.log").write_bytes(encode(result))
    loaded = load_sweep(tmp_path)
    assert [entry.result for entry in loaded.entries] == [result]
    assert loaded.notes == (note,)


def test_swapped_results_are_not_shown_under_each_others_names(matrix, write_sweep) -> None:
    folder = write_sweep(matrix)
    first, second = (folder / "results" / f"{result.name}.json" for result in matrix[:2])
    (folder / "kept").write_bytes(first.read_bytes())
    second.rename(first)
    (folder / "kept").rename(second)
    loaded = load_sweep(folder)
    assert [entry.result for entry in loaded.entries] == matrix
    assert loaded.notes == (
        f"{first} contains the result of {matrix[1].name}; read from {matrix[0].name}.log instead",
        f"{second} contains the result of {matrix[0].name}; read from {matrix[1].name}.log instead",
    )
    for log in (folder / "logs").iterdir():
        log.unlink()
    ends_without_logs = [entry.end for entry in load_sweep(folder).entries]
    assert ends_without_logs[:2] == ["lost", "lost"]


@pytest.mark.parametrize("part", ["results", "logs"])
def test_no_bit_flip_changes_a_shown_value_silently(make_result, write_sweep, part: str) -> None:
    result = make_result()
    folder = write_sweep([result])
    path = folder / part / (f"{result.name}.json" if part == "results" else f"{result.name}.log")
    whole, shown = path.read_bytes(), summarize(load_sweep(folder))
    generator = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        loaded = load_sweep(folder)
        assert summarize(loaded).experiments == shown.experiments
        alone = load_sweep(folder / part) if part == "results" else loaded
        assert [entry.result for entry in alone.entries] == [result]


def test_a_flip_in_the_only_copy_is_never_shown(make_result, tmp_path: Path) -> None:
    result = make_result()
    path = tmp_path / f"{result.name}.json"
    write_record(path, result)
    whole, generator = path.read_bytes(), random.Random(1)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        (entry,) = load_sweep(tmp_path).entries
        assert entry.result in (None, result)


def without_checksum(data: bytes) -> bytes:
    content = json.loads(data)
    del content["checksum"]
    return json.dumps(content).encode()


def test_records_without_a_checksum_are_read(make_result, write_sweep) -> None:
    result = make_result()
    folder = write_sweep([result])
    path, log = folder / "results" / f"{result.name}.json", folder / "logs" / f"{result.name}.log"
    path.write_bytes(without_checksum(path.read_bytes()))
    log.write_bytes(without_checksum(log.read_bytes().splitlines()[-1]))
    loaded = load_sweep(folder)
    assert (loaded.entries[0].result, loaded.notes) == (result, ())


def test_what_an_exception_says_is_cut_where_it_is_shown(make_result, write_sweep) -> None:
    failed = make_result(
        end=Status.ERROR, message="x" * 50_000, log_tail=["y" * 50_000], notes=["z" * 50_000]
    )
    summary = summarize(load_sweep(write_sweep([failed])))
    (failure,) = summary.failures
    texts = [failure.message, *failure.log_tail, *summary.notes, summary.experiments[0].message or ""]
    assert max(map(len, texts)) < 1100
