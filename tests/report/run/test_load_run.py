"""A run is read as far as it can be, whatever happened to its files; what could not be read is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from watched_training import PADDING_LOST, PEAK_TFLOPS, RUN_STEPS

from truemfu.errors import UsageError
from truemfu.report.run.load import load_run
from truemfu.report.run.log_summary import peak_flops_per_s, summary_of_log


def test_what_a_monitor_wrote_is_read_whole(monitored_folder: Path) -> None:
    run = load_run(monitored_folder)
    assert run.notes == ()
    assert [row.global_step for row in run.rows] == list(range(1, RUN_STEPS + 1))
    assert run.record is not None
    assert (run.record.device, run.record.world_size, run.record.mode) == ("cpu", 1, "smart")
    assert run.record.summary is not None
    assert (run.record.summary.steps, run.record.summary.padding_lost) == (RUN_STEPS, PADDING_LOST)
    assert run.record.summary.monitor_cost is not None


def test_the_log_alone_gives_the_figures_of_the_monitor(monitored_folder: Path) -> None:
    run = load_run(monitored_folder)
    assert run.record is not None
    told = run.record.summary
    assert told is not None
    found = summary_of_log(run.rows)
    names = (
        "steps warmup_steps medians_over median_step_time_s median_mfu median_hfu method padding_lost".split()
    )
    assert [getattr(found, name) for name in names] == pytest.approx([getattr(told, name) for name in names])
    assert found.data_wait_share == told.data_wait_share
    assert found.between_steps_share == pytest.approx(told.between_steps_share)
    assert found.median_tokens_per_second == pytest.approx(told.median_tokens_per_second)
    assert peak_flops_per_s(run.rows) == pytest.approx(PEAK_TFLOPS * 1e12)


@pytest.mark.parametrize("bytes_lost", [1, 2, 3, 40, 700])
def test_a_log_cut_off_anywhere_gives_its_whole_rows(run_folder: Path, bytes_lost: int) -> None:
    path = run_folder / "training_log.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-bytes_lost])
    run = load_run(run_folder)
    lost = 0 if bytes_lost <= 3 else RUN_STEPS - len(run.rows)
    assert len(run.rows) == RUN_STEPS - lost
    assert [row.global_step for row in run.rows] == list(range(1, RUN_STEPS - lost + 1))
    if bytes_lost > 1:  # a line feed is no loss
        assert f"training_log.json is cut off: {len(run.rows)} rows were read" in run.notes[0]
    else:
        assert run.notes == ()


def test_a_row_that_is_damaged_costs_no_other(run_folder: Path) -> None:
    path = run_folder / "training_log.json"
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:50] + "\0\0\0"
    lines[9] = lines[9].replace('"global_step":9', '"global_step":"nine"')
    path.write_text("\n".join(lines))
    run = load_run(run_folder)
    assert {row.global_step for row in run.rows} == set(range(1, RUN_STEPS + 1)) - {5, 9}
    assert run.notes == ("The log training_log.json is damaged: 18 rows were read, 2 could not be read.",)


def test_of_two_rows_of_a_step_the_last_counts(run_folder: Path) -> None:
    path = run_folder / "training_log.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([*rows, {"global_step": 3, "training/loss": 77.0}, {"global_step": 21}]))
    run = load_run(run_folder)
    assert [row.global_step for row in run.rows] == list(range(1, 22))
    assert run.rows[2].loss == 77.0
    assert run.notes == (
        "1 row was replaced by a later row of the same step: the run was restarted, or several runs share "
        "this folder.",
        "The log has 21 steps, and the summary covers the 20 since the last start.",
    )


def test_each_replaced_row_counts(run_folder: Path) -> None:
    """Three runs of 20 steps in one folder."""
    path = run_folder / "training_log.json"
    path.write_text(json.dumps(3 * json.loads(path.read_text())))
    run = load_run(run_folder)
    assert len(run.rows) == 20
    assert run.notes[0].startswith("40 rows were replaced by a later row of the same step")


def test_a_run_that_has_not_ended_says_so(run_folder: Path, change_run) -> None:
    change_run(lambda run: run.pop("summary"))
    run = load_run(run_folder)
    assert run.record is not None
    assert run.record.summary is None
    assert "no summary yet" in run.notes[0]
    assert len(run.rows) == RUN_STEPS


def test_half_a_run_file_leaves_the_log(run_folder: Path) -> None:
    path = run_folder / "training_run.json"
    path.write_bytes(path.read_bytes()[:200])
    run = load_run(run_folder)
    assert run.record is None
    assert run.notes[0].startswith("The run file training_run.json is not a valid RunRecord")
    assert len(run.rows) == RUN_STEPS


def test_what_others_add_to_the_run_file_is_left_alone(run_folder: Path, change_run) -> None:
    change_run(lambda run: (run.update(more=1), run["summary"].update(more=[1], median_mfu=None)))
    run = load_run(run_folder)
    assert run.notes == ()
    assert run.record is not None
    assert run.record.summary is not None
    assert run.record.summary.median_mfu is None


def test_a_newer_run_file_is_refused_with_a_reason(run_folder: Path, change_run) -> None:
    change_run(lambda run: run.update(version=99))
    assert "written by a newer truemfu" in load_run(run_folder).notes[0]


def test_a_log_of_another_name_is_found_beside_the_run_file(run_folder: Path, change_run) -> None:
    (run_folder / "training_log.json").rename(run_folder / "mine.json")
    change_run(lambda run: run.update(log_file="mine.json"))
    assert len(load_run(run_folder).rows) == RUN_STEPS


def test_a_name_cannot_lead_out_of_the_folder(run_folder: Path, change_run) -> None:
    change_run(lambda run: run.update(log_file="../../training_log.json"))
    assert len(load_run(run_folder).rows) == RUN_STEPS


@pytest.mark.parametrize("name", ["training_run.json", "training_log.json"])
def test_either_file_alone_is_a_run(run_folder: Path, name: str) -> None:
    (run_folder / name).unlink()
    run = load_run(run_folder)
    assert len(run.notes) == 1
    assert name in run.notes[0]
    assert (run.record is None, len(run.rows)) == (
        (True, RUN_STEPS) if name == "training_run.json" else (False, 0)
    )


UNREADABLE = {
    "nothing": b"",
    "no text": b"\xff\xfe\0 garbage",
    "text that breaks off": b'{"device": "\xff"}',
    "too deep": b'{"convention": {"a":' + b"[" * 100_000,
    "the log of nobody": b"[1, 2]",
}


@pytest.mark.parametrize("garbage", UNREADABLE.values(), ids=UNREADABLE)
def test_where_nothing_can_be_read_there_is_no_run(run_folder: Path, garbage: bytes) -> None:
    for name in ("training_run.json", "training_log.json"):
        (run_folder / name).write_bytes(garbage)
    with pytest.raises(UsageError, match=r"does not contain a readable run: The run file training_run.json"):
        load_run(run_folder)


@pytest.mark.parametrize("garbage", UNREADABLE.values(), ids=UNREADABLE)
def test_a_run_file_of_garbage_leaves_the_log(run_folder: Path, garbage: bytes) -> None:
    (run_folder / "training_run.json").write_bytes(garbage)
    run = load_run(run_folder)
    assert (run.record, len(run.rows)) == (None, RUN_STEPS)


def test_every_note_is_a_sentence(run_folder: Path, change_run) -> None:
    change_run(lambda run: run.pop("summary"))
    log = run_folder / "training_log.json"
    log.write_bytes(log.read_bytes()[:-40] + b'\n{"global_step": 3}')
    notes = list(load_run(run_folder).notes)
    log.unlink()
    notes += load_run(run_folder).notes
    assert len(notes) == 5
    assert all(note[0] in "T1" and note.endswith(".") for note in notes), notes


def test_an_empty_folder_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"does not contain a run: expected training_run.json or training_log.json"
    ):
        load_run(tmp_path)
