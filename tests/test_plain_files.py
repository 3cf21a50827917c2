"""Files of our own: nothing in their place blocks, or leads elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from truemfu import plain_files


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Everything that can stand in the place of a file."""
    found = {name: tmp_path / name for name in ("fifo", "folder", "loop", "outside", "link")}
    os.mkfifo(found["fifo"])
    found["folder"].mkdir()
    found["loop"].symlink_to(found["loop"])
    found["outside"].write_bytes(b"mine")
    found["link"].symlink_to(found["outside"])
    return found


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fifo", "a FIFO, not a file"),
        ("folder", "Is a directory"),
        ("loop", "Too many levels of symbolic links"),
    ],
)
def test_what_is_no_file_is_not_read_and_never_waited_for(
    odd: dict[str, Path], kind: str, words: str, never_waits: None
) -> None:
    with pytest.raises(OSError, match=words):
        plain_files.read(odd[kind])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("fifo", "a FIFO or a socket, not a file"),
        ("folder", "Is a directory"),
        ("loop", "a symbolic link, not a file"),
        ("link", "a symbolic link, not a file"),
    ],
)
def test_what_is_no_file_of_ours_is_not_written(
    odd: dict[str, Path], kind: str, words: str, never_waits: None
) -> None:
    with pytest.raises(OSError, match=words):
        plain_files.append(odd[kind], b"x")
    assert odd["outside"].read_bytes() == b"mine"


@pytest.mark.parametrize("kind", ["fifo", "loop", "link"])
def test_a_file_takes_the_place_of_a_link_and_leaves_its_target(odd: dict[str, Path], kind: str) -> None:
    path = odd[kind]
    planted = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    planted.symlink_to(odd["outside"])
    plain_files.replace(path, b"new")
    assert path.read_bytes() == b"new"
    assert not path.is_symlink()
    assert odd["outside"].read_bytes() == b"mine"


def test_removing_a_link_leaves_what_it_points_to(odd: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").touch()
    to_folder = tmp_path / "to_folder"
    to_folder.symlink_to(target)
    inside = odd["folder"] / "inside"
    inside.symlink_to(target)
    for path in (to_folder, odd["folder"], odd["fifo"], odd["loop"], tmp_path / "nothing"):
        plain_files.remove(path)
        assert not os.path.lexists(path)
    assert (target / "file").exists()


def test_a_folder_takes_the_place_of_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "elsewhere")
    assert plain_files.make_folder(tmp_path / "logs")
    assert not plain_files.make_folder(tmp_path / "logs")
    assert not (tmp_path / "logs").is_symlink()
    assert (tmp_path / "elsewhere").is_dir()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/home/me", "a/b", "a\\b", "a\0b", "a\nb", "x" * 250]
)
def test_a_name_that_leads_elsewhere_names_no_file(name: str) -> None:
    assert not plain_files.is_name(name)


@pytest.mark.parametrize("name", ["StandardTrainer_bs4_seq512", "..x", "Ümläut", "x" * 200])
def test_any_other_name_does(name: str) -> None:
    assert plain_files.is_name(name)
