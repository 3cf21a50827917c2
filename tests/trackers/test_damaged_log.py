"""A log that was damaged, cut or overwritten: it loads again, its whole rows are kept, and it is said."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truemfu.report.run.load import load_run
from truemfu.trackers.file import JsonArrayFile
from truemfu.trackers.log_scan import find_end, pieces_of

FLIPS = 400


def row(step: int) -> dict[str, Any]:
    return {
        "global_step": step,
        "training/loss": 2.53e-05 * step,
        "perf/mfu": 0.4412,
        "perf/method": "closed form, géschätzt",
        "perf/warmup": step < 4,
        "text": "} ] , \n { \"global_step\"",
    }  # fmt: skip


def write(path: Path, first: int, last: int, said: list[str] | None = None) -> None:
    log = JsonArrayFile(path, notice=pytest.fail if said is None else said.append)
    log.start({})
    for step in range(first, last + 1):
        log.log(step, row(step))
    log.finish({})


def rows_in(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_a_continued_log_loads_after_a_flip_of_any_bit(tmp_path: Path) -> None:
    path, chance = tmp_path / "training_log.json", random.Random(16)
    write(path, 1, 12)
    whole = path.read_bytes()
    said_of = 0
    for _ in range(FLIPS):
        for other in tmp_path.glob("*.damaged*"):
            other.unlink()
        flipped = bytearray(whole)
        at, bit = chance.randrange(len(whole)), chance.randrange(8)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        said: list[str] = []
        write(path, 13, 15, said)
        found = rows_in(path)
        assert found[-3:] == [row(step) for step in (13, 14, 15)], f"bit {bit} of byte {at}"
        # A flip inside a value may leave another value; every other row is as it was.
        changed = [step for step in range(1, 13) if row(step) not in found]
        assert len(changed) <= 1, f"bit {bit} of byte {at}"
        gone = 15 - len(found)
        assert gone == 0 or said, f"bit {bit} of byte {at}: a row is gone and nothing was said"
        if said:
            said_of += 1
            assert len(said) == 1
            assert said[0].startswith(f"training_log.json was damaged: {len(found) - 3} of its rows are kept")
            assert (tmp_path / "training_log.json.damaged").read_bytes() == bytes(flipped)
        report = load_run(tmp_path)
        assert len(report.rows) == len({row["global_step"] for row in found})
        assert not any("The log" in note for note in report.notes), report.notes
    assert FLIPS / 10 < said_of < FLIPS


def test_rows_beside_a_damaged_part_are_kept_wherever_a_piece_of_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log.json"
    write(path, 1, 30)
    whole = path.read_bytes()
    for piece in (7, 64, 100, 1000):
        monkeypatch.setattr("truemfu.trackers.log_scan._PIECE", piece)
        path.write_bytes(whole)
        write(path, 31, 31)
        assert rows_in(path) == [row(step) for step in range(1, 32)]
        path.write_bytes(whole.replace(b'_step":7,', b'_step":7;').replace(b'_step":1,', b'_step":\xff,'))
        said: list[str] = []
        write(path, 31, 31, said)
        assert rows_in(path) == [row(step) for step in range(2, 32) if step != 7]
        assert ["28 of its rows are kept, 2 parts could not be read" in text for text in said] == [True]


@pytest.mark.parametrize("size", [0, 1, 40, 1000, 1500])
def test_a_log_cut_while_it_is_written_loads_and_what_is_gone_is_counted(tmp_path: Path, size: int) -> None:
    path, said = tmp_path / "log.json", []
    log = JsonArrayFile(path, notice=said.append)
    log.start({})
    for step in range(1, 13):
        log.log(step, row(step))
    log.flush()
    os.truncate(path, size)
    left = find_end_of(path)
    for step in range(13, 16):
        log.log(step, row(step))
        log.flush()
    assert rows_in(path) == [row(step) for step in (*range(1, left + 1), 13, 14, 15)]
    assert log.rows_removed == 12 - left
    assert said == [
        f"log.json was truncated or overwritten by another program during this run: {left} of 12 rows are "
        "left in it, and new rows follow them"
    ]
    os.truncate(path, size)
    log.finish({})
    assert rows_in(path) == [row(step) for step in range(1, left + 1)]
    assert log.rows_removed == 12 - left + 3


def find_end_of(path: Path) -> int:
    """How many whole rows there are."""
    file = os.open(path, os.O_RDONLY)
    try:
        found = find_end(pieces_of(file))
    finally:
        os.close(file)
    assert found is not None
    return found.rows


def test_what_another_program_puts_into_the_log_is_no_row(tmp_path: Path) -> None:
    path, said = tmp_path / "log.json", []
    log = JsonArrayFile(path, notice=said.append)
    log.start({})
    log.log(1, row(1))
    log.flush()
    with open(path, "ab") as file:
        file.write(b"a line of another program\n")
    log.log(2, row(2))
    log.finish({})
    assert rows_in(path) == [row(1), row(2)]
    assert len(said) == 2
    assert log.rows_removed == 0
    assert b"a line of another program" in (tmp_path / "log.json.damaged").read_bytes()


LARGE = """
import json, os, resource, sys
from truemfu.trackers.file import JsonArrayFile
path, rows, is_damaged = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "damaged"
values = json.dumps({f"perf/value_{number}": number / 7 for number in range(8)})[1:]
with open(path, "w") as file:
    file.write("[")
    for step in range(rows):
        file.write((",\\n" if step else "\\n") + f'{{"global_step": {step}, {values}')
        if is_damaged and step % 1000 == 500:
            file.write(";")
    file.write("\\n]\\n")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
log = JsonArrayFile(path, notice=lambda text: print(text, file=sys.stderr))
log.start({})
log.log(rows, {})
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
log.finish({})
print(grown * 1024, os.path.getsize(path))
"""


@pytest.mark.parametrize("state", ["whole", "damaged"])
def test_a_restart_over_a_large_log_takes_little_memory(tmp_path: Path, state: str) -> None:
    path, rows = tmp_path / "log.json", 200_000
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(path), str(rows), state],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    grown, size = map(int, done.stdout.split())
    assert size > 40e6
    assert grown < size / 4
    assert ("200,000 of its rows are kept, 200 parts" in done.stderr) is (state == "damaged")
    with open(path, "rb") as file:
        file.seek(-60, os.SEEK_END)
        assert file.read().endswith(b'{"global_step":200000}\n]\n')
