"""Kept closed forms come back as they were, or not at all."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import FlopModel
from truemfu.flops.identity.identity import model_identity
from truemfu.monitor.training_side import kept_forms
from truemfu.monitor.training_side.kept_forms import (
    FORMS_FILE,
    MAX_FORMS,
    KeptForms,
    KeptInBackground,
    form_key,
)

DATA = {"version": 2, "flops": 2**70, "ratio": 0.1, "kinds": [{"b": None, "a": "ünïcode"}, True, []]}


def read(kept: KeptForms, key: str) -> dict[str, Any] | None:
    kept.read_ahead()
    return kept.load(key)


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def kept(tmp_path: Path, notices: list[str]) -> KeptForms:
    return KeptForms(tmp_path / "run", notices.append)


def test_what_was_saved_is_loaded_in_its_order(kept: KeptForms, tmp_path: Path, notices: list[str]) -> None:
    assert read(kept, "a") is None
    kept.save("a", DATA)
    kept.save("b", {"other": 1})
    again = KeptForms(tmp_path / "run", notices.append)
    assert json.dumps(read(again, "a")) == json.dumps(DATA)
    assert read(again, "b") == {"other": 1}
    assert read(again, "c") is None
    assert [path.name for path in (tmp_path / "run").iterdir()] == [FORMS_FILE]
    assert notices == []


def test_a_fitted_form_survives_and_counts_the_same(kept: KeptForms) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    fitted = FlopModel.fit(model, (torch.ones(4, 8),))
    identity = model_identity(model)
    assert identity is not None
    key = form_key(identity, autocast="", attention="full")
    kept.save(key, fitted.export())
    loaded = FlopModel.from_export(model, read(kept, key))
    batch = (torch.ones(32, 8),)
    assert loaded.knows(batch)
    assert loaded(batch) == fitted(batch)


def test_saving_again_replaces_and_the_newest_remain(kept: KeptForms) -> None:
    for number in range(MAX_FORMS + 3):
        kept.save(f"key {number}", {"number": number})
    kept.save("key 3", {"number": -3})
    kept.save("one more", {"number": 99})
    found = [number for number in range(MAX_FORMS + 3) if read(kept, f"key {number}") is not None]
    assert found == [3, *range(5, MAX_FORMS + 3)]
    assert read(kept, "key 3") == {"number": -3}
    assert read(kept, "one more") == {"number": 99}


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80, 0xFF])
def test_a_flipped_bit_anywhere_never_gives_other_data(kept: KeptForms, tmp_path: Path, flip: int) -> None:
    path = tmp_path / "run" / FORMS_FILE
    kept.save("first", {"flops": 123456, "b": [1, 2]})
    kept.save("second", {"flops": 654321})
    whole = path.read_bytes()
    lost = 0
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
        first, second = read(kept, "first"), read(kept, "second")
        assert first in (None, {"flops": 123456, "b": [1, 2]})
        assert second in (None, {"flops": 654321})
        lost += first is None or second is None
    assert lost == len(whole)  # nothing in the file is there for nothing


def test_a_file_cut_anywhere_is_ignored_and_then_replaced(
    kept: KeptForms, tmp_path: Path, notices: list[str]
) -> None:
    path = tmp_path / "run" / FORMS_FILE
    kept.save("a", DATA)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert read(kept, "a") is None
    kept.save("a", DATA)
    assert path.read_bytes() == whole
    assert notices == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'{"entries": []}',
        b'{"format": "another", "version": 1, "entries": []}',
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"format":"truemfu closed forms","version":2,"entries":[]}',
    ],
)
def test_a_foreign_file_is_ignored(kept: KeptForms, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FORMS_FILE).write_bytes(content)
    assert read(kept, "a") is None
    kept.save("a", DATA)
    assert read(kept, "a") == DATA


def test_tuples_come_back_as_lists(kept: KeptForms) -> None:
    kept.save("a", {"sizes": (1, (2, 3))})
    assert read(kept, "a") == {"sizes": [1, [2, 3]]}


def test_data_under_another_key_is_not_taken(kept: KeptForms, tmp_path: Path) -> None:
    kept.save("aaaa", DATA)
    path = tmp_path / "run" / FORMS_FILE
    path.write_bytes(path.read_bytes().replace(b"aaaa", b"bbbb"))
    assert read(kept, "bbbb") is None


def test_a_huge_file_is_not_read(kept: KeptForms, tmp_path: Path) -> None:
    kept.save("a", DATA)
    with open(tmp_path / "run" / FORMS_FILE, "r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b" ")
        assert read(kept, "a") == DATA
        file.truncate(kept_forms.MAX_FILE_BYTES + 1)
    assert read(kept, "a") is None


def test_old_forms_make_room_for_new_ones(
    kept: KeptForms, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    monkeypatch.setattr(kept_forms, "MAX_FILE_BYTES", 2000)
    for key in ("a", "b", "c"):
        kept.save(key, {"text": "x" * 700})
    assert [read(kept, key) is not None for key in ("a", "b", "c")] == [False, True, True]
    kept.save("d", {"text": "x" * 3000})
    assert read(kept, "d") is None
    assert read(kept, "c") is not None
    assert len(notices) == 1


def make_folder(path: Path) -> None:
    path.mkdir()


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pipes and devices with a path on Windows")
@pytest.mark.parametrize("make", [make_folder, make_pipe, make_device])
def test_what_is_no_file_neither_blocks_nor_breaks(
    make: Callable[[Path], None], kept: KeptForms, tmp_path: Path, notices: list[str]
) -> None:
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / FORMS_FILE
    make(path)
    kind = stat.S_IFMT(path.lstat().st_mode)
    assert read(kept, "a") is None
    kept.save("a", DATA)
    kept.save("a", DATA)
    assert read(kept, "a") is None
    assert stat.S_IFMT(path.lstat().st_mode) == kind
    assert len(notices) == 1
    assert notices[0].startswith("closed_forms.json was not written, a restart will count again: ")
    assert [other.name for other in (tmp_path / "run").iterdir()] == [FORMS_FILE]


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege on Windows")
def test_a_link_to_itself_is_replaced(kept: KeptForms, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    make_loop(tmp_path / "run" / FORMS_FILE)
    assert read(kept, "a") is None
    kept.save("a", DATA)
    assert read(kept, "a") == DATA


def test_a_folder_that_cannot_be_made_is_one_notice(tmp_path: Path, notices: list[str]) -> None:
    (tmp_path / "file").write_text("")
    kept = KeptForms(tmp_path / "file" / "run", notices.append)
    assert read(kept, "a") is None
    kept.save("a", DATA)
    kept.save("b", DATA)
    assert len(notices) == 1


@pytest.mark.parametrize(
    "data", [{"x": float("nan")}, {"x": object()}, {"x": {1, 2}}, {1: 2}, {"x": [float("inf")]}, "nested"]
)
def test_data_that_json_would_change_is_not_kept(kept: KeptForms, data: Any, notices: list[str]) -> None:
    if data == "nested":
        data = {}
        data["itself"] = data
    kept.save("a", data)
    assert read(kept, "a") is None
    assert len(notices) == 1


def test_savers_on_several_threads_lose_nothing(kept: KeptForms) -> None:
    threads = [threading.Thread(target=kept.save, args=(f"key {n}", {"n": n})) for n in range(16)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read(kept, "key 0") in (None, {"n": 0})
    assert [read(kept, f"key {n}") for n in range(16)] == [{"n": n} for n in range(16)]


def test_a_key_depends_on_everything_it_is_made_of() -> None:
    keys = {
        form_key("a", autocast="", attention="full"),
        form_key("b", autocast="", attention="full"),
        form_key("a", autocast="cuda bfloat16", attention="full"),
        form_key("a", autocast="", attention="causal"),
        form_key("a", autocast="", attention="full", backward=True),
        form_key("a", autocast="", attention="full", backward=False),
        form_key("a", autocast="", attention="full", batch="input_ids"),
    }
    assert len(keys) == 7
    assert form_key("a", autocast="", attention="full", x=1, y=2) == form_key(
        "a", y=2, x=1, attention="full", autocast=""
    )


def test_a_file_that_does_not_answer_is_waited_for_once_and_shortly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    answers, read_file = threading.Event(), kept_forms._read

    def blocked(path: Path) -> Any:
        assert answers.wait(60)
        return read_file(path)

    monkeypatch.setattr(kept_forms, "_read", blocked)
    monkeypatch.setattr(kept_forms, "_LONGEST_READ_S", 0.5)
    kept = KeptInBackground(tmp_path / "run", notices.append)
    began_s = time.monotonic()
    kept.start()
    for _ in range(100):
        assert kept.load("a") is None
    kept.save("a", DATA)
    assert not (tmp_path / "run" / FORMS_FILE).exists()
    assert time.monotonic() - began_s < 20
    answers.set()
    kept.lane.close({}, timeout_s=30)
    assert read(KeptForms(tmp_path / "run", notices.append), "a") == DATA
    assert notices == []


def test_after_a_while_a_form_is_counted_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notices: list[str]
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(kept_forms, "_read", lambda path: answers.wait(60) and [])
    monkeypatch.setattr(kept_forms, "_LONGEST_READ_S", 0.05)
    kept = KeptInBackground(tmp_path / "run", notices.append)
    kept.start()
    assert kept.load("a") is None
    kept.save("a", DATA)
    kept.lane.close({}, timeout_s=0.1)
    assert kept.lane.lost_rows == 1
    assert notices == [
        "tracker closed_forms.json failed: it did not finish within 0.1 s; its remaining data is lost"
    ]
    answers.set()
