"""A finished sweep whose files are damaged, replaced or swapped: every path × every kind of damage.

After each, `summarize`, `report` and a resumed sweep must end soon, with one clear line where they cannot go
on. A figure that is shown is the one that was measured, or is missing with a reason; nothing outside of the
folder changes.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.sweep.supervised import Recorder, small

from truemfu import plain_files
from truemfu.cli import main
from truemfu.errors import TruemfuError
from truemfu.sweep.config import SweepConfig
from truemfu.sweep.supervisor.runner import run_sweep

from .attack import Attack

COMMAND = (sys.executable, str(Path(__file__).with_name("quick_worker.py")))
_COMMAND_LIMIT_S = 60.0
_TRACEBACK = "Traceback (most recent call last)"
_IDENTITY = (
    "name",
    "trainer",
    "batch_size",
    "seq_len",
    "end",
    "phase",
    "message",
    "fits",
    "stable",
    "memory_kind",
)
_DEPENDS_ON_TIME = ("wall_s",)


def config() -> SweepConfig:
    """Three experiments."""
    return small(trainers=["StandardTrainer"], batch_sizes=[1, 2, 3], find_fit=False)


@contextlib.contextmanager
def source_on_path() -> Iterator[None]:
    """The worker is a script: it finds truemfu where this process did."""
    import truemfu

    source = str(Path(truemfu.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    yield


@functools.cache
def template() -> Path:
    """A finished sweep, made once by the process that all others are forked from, and removed at its end."""
    import atexit
    import subprocess

    root = Path(tempfile.mkdtemp(prefix="truemfu-faults-sweep-"))
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(root, ignore_errors=True) if os.getpid() == owner else None)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    subprocess.run(
        [sys.executable, "-m", "faults.sweep_folder", str(root / "sweep")],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    return root / "sweep"


def resume(folder: Path, *, rerun: str = "none") -> str | None:
    """Go on with the sweep; the one line it was refused with, or None."""
    with source_on_path():
        try:
            run_sweep(config(), folder, rerun=rerun, listener=Recorder(), command=COMMAND)
        except TruemfuError as error:
            return str(error)
    return None


def call(*arguments: str) -> tuple[int, str, str]:
    """A command of truemfu in this process: its exit code and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    began = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as stop:
            code = int(stop.code or 0)
    took_s = time.monotonic() - began
    assert took_s < _COMMAND_LIMIT_S, f"{arguments} took {took_s:.0f} s"
    said = err.getvalue()
    assert _TRACEBACK not in said, said
    assert _TRACEBACK not in out.getvalue(), out.getvalue()
    assert "unexpected" not in said, f"{arguments}: {said}"
    if code:
        errors = [line for line in said.splitlines() if line.startswith("error:")]
        assert len(errors) == 1, f"{arguments} exits with {code} and says {said!r}"
    return code, out.getvalue(), said


def shown(folder: Path) -> tuple[dict[str, dict[str, Any]], str] | None:
    """The experiments `summarize` shows, and everything else it says; None where it refused the folder."""
    code, out, err = call("summarize", "--logs-dir", str(folder), "--json")
    if code:
        return None
    summary = json.loads(out)
    experiments = {entry["name"]: entry for entry in summary.pop("experiments")}
    return experiments, json.dumps(summary) + err


def check_shown(folder: Path, truth: dict[str, dict[str, Any]]) -> None:
    """Every figure shown is the one that was measured; a missing one has a reason."""
    answer = shown(folder)
    if answer is None:
        return
    experiments, said = answer
    for name, entry in experiments.items():
        assert name in truth, f"{name} is shown, and was never run"
        expected = truth[name]
        differing = {
            key: (value, expected[key])
            for key, value in entry.items()
            if value != expected[key] and key not in _DEPENDS_ON_TIME
        }
        if entry["end"] == "ok":
            assert not differing, f"{name} shows figures nobody measured: {differing}"
        else:
            wrong = {
                key: pair for key, pair in differing.items() if key not in _IDENTITY and pair[0] is not None
            }
            assert not wrong, f"{name} failed and shows figures nobody measured: {wrong}"
            assert entry["message"] or name in said, f"{name} is {entry['end']} without a reason"
    for name in set(truth) - set(experiments):
        assert "sweep.json" in said or name in said, f"{name} is missing, and nothing says so: {said[-500:]}"


Damage = Callable[[Path, random.Random], None]


def _gone(path: Path) -> None:
    plain_files.remove(path)


def _as(make: Callable[[Path], Any], path: Path, chance: random.Random) -> None:
    _gone(path)
    make(path)


def _loop(path: Path) -> None:
    path.symlink_to(path)


def _outside(path: Path) -> None:
    """A link to something of the user's."""
    foreign = _beside(path)
    path.symlink_to(foreign / "file")


def _outside_folder(path: Path) -> None:
    path.symlink_to(_beside(path))


def _beside(path: Path) -> Path:
    for parent in path.parents:
        if (parent / "outside").is_dir():
            return parent / "outside"
    raise FileNotFoundError("outside")


def _truncated(path: Path, chance: random.Random) -> None:
    if path.is_file():
        os.truncate(path, chance.randrange(max(path.stat().st_size, 1)))


def _flipped(path: Path, chance: random.Random) -> None:
    if path.is_file() and path.stat().st_size:
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(data))


def _swapped(path: Path, chance: random.Random) -> None:
    others = sorted(other for other in path.parent.iterdir() if other != path)
    if others:
        other, aside = chance.choice(others), path.with_name("aside")
        path.rename(aside)
        other.rename(path)
        aside.rename(other)


def _copied(path: Path, chance: random.Random) -> None:
    name = chance.choice(
        (f"{path.name}.copy{path.suffix}", f"copy of {path.name}", f"{path.stem}_2{path.suffix}")
    )
    if path.is_dir():
        shutil.copytree(path, path.with_name(name))
    else:
        shutil.copy(path, path.with_name(name))


def _overwritten(path: Path, chance: random.Random) -> None:
    """Another file's content."""
    files = sorted(other for other in path.parent.iterdir() if other.is_file() and other != path)
    if path.is_file() and files:
        shutil.copy(chance.choice(files), path)


def _zeros(path: Path, chance: random.Random) -> None:
    if path.is_file():
        path.write_bytes(bytes(path.stat().st_size))


def _deep(path: Path, chance: random.Random) -> None:
    if path.is_file():
        path.write_bytes(b'{"a":' * 100_000)


def _other_text(path: Path, chance: random.Random) -> None:
    if path.is_file():
        path.write_bytes(
            chance.choice((b"", b"[]", b"null", b"\xff\xfe\x00", b'{"version": 99}', b"{}\n" * 3))
        )


DAMAGES: dict[str, Damage] = {
    "a folder": partial(_as, Path.mkdir),
    "a FIFO": partial(_as, os.mkfifo),
    "a loop": partial(_as, _loop),
    "a link to a file outside": partial(_as, _outside),
    "a link to a folder outside": partial(_as, _outside_folder),
    "an empty file": partial(_as, Path.touch),
    "deleted": partial(_as, lambda path: None),
    "truncated": _truncated,
    "flipped": _flipped,
    "swapped": _swapped,
    "copied": _copied,
    "overwritten by another": _overwritten,
    "zeros": _zeros,
    "100,000 levels deep": _deep,
    "other text": _other_text,
}
_OFTEN = {"truncated": 4, "flipped": 8, "swapped": 2, "copied": 2, "other text": 3}
"""These differ with chance."""


def _attack(inside: Path, *, where: str, damage: str, seed: int) -> None:
    folder, outside = inside / "sweep", inside / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    shutil.copytree(template(), folder)
    intact = shown(folder)
    assert intact is not None
    truth = intact[0]
    DAMAGES[damage](folder / where, random.Random(seed))
    check_shown(folder, truth)
    call("summarize", "--logs-dir", str(folder))
    code, _, _ = call("report", str(folder), "-o", str(inside / "page.html"))
    assert code == 0 or not (inside / "page.html").exists()
    refused = resume(folder)
    assert refused is None or "\n" not in refused, refused
    check_shown(folder, truth)
    if refused is None:
        answer = shown(folder)
        assert answer is not None
        ends = {name: entry["end"] for name, entry in answer[0].items()}
        assert ends == dict.fromkeys(truth, "ok"), f"after a resumed sweep: {ends}"
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_text() == "mine"
    allowed = {"sweep", "outside", "page.html"}
    assert {path.name for path in inside.iterdir()} <= allowed, list(inside.iterdir())


def attacks(chance: random.Random) -> list[Attack]:
    """Every path of a finished sweep × every kind of damage."""
    root = template()
    paths = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    found = []
    for where in paths:
        for damage in DAMAGES:
            for _ in range(_OFTEN.get(damage, 1) if (root / where).is_file() else 1):
                run = partial(_attack, where=where, damage=damage, seed=chance.randrange(2**31))
                found.append(Attack(f"{where}: {damage}", lambda inside, run=run: run(inside)))
    return found


if __name__ == "__main__":
    problem = resume(Path(sys.argv[1]))
    assert problem is None, problem
