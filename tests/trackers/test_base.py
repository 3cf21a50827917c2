"""Names, objects and missing packages: what becomes a tracker and what is refused."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from truemfu.errors import UsageError
from truemfu.trackers.base import Names
from truemfu.trackers.file import JsonArrayFile
from truemfu.trackers.table import TRACKERS, make_tracker


def test_the_trackers_are_these() -> None:
    assert set(TRACKERS) == {"wandb", "tensorboard", "mlflow", "trackio", "prometheus"}


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_every_name_makes_a_tracker_that_passes_as_an_object(name: str, tmp_path: Path) -> None:
    pytest.importorskip(TRACKERS[name].package)
    tracker = make_tracker(name, tmp_path)
    assert make_tracker(tracker, tmp_path) is tracker


def test_an_object_with_the_four_methods_is_taken_as_it_is(tmp_path: Path) -> None:
    log = JsonArrayFile(tmp_path / "log.json")
    assert make_tracker(log, tmp_path) is log


def test_an_unknown_name_is_refused_with_the_closest(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"unknown tracker 'wandbb'; known: wandb, .* \(did you mean 'wandb'\?\)"
    ):
        make_tracker("wandbb", tmp_path)


def test_an_object_without_a_method_is_refused_by_its_name(tmp_path: Path) -> None:
    class Half:
        finish = "not a method"

        def start(self, run: object) -> None: ...
        def log(self, step: int, metrics: object) -> None: ...

    with pytest.raises(UsageError, match=r"Half is not a tracker: it has no flush\(\) and no finish\(\)"):
        make_tracker(Half(), tmp_path)  # type: ignore[arg-type]


def test_a_class_in_place_of_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got the class JsonArrayFile; pass an instance"):
        make_tracker(JsonArrayFile, tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_a_package_that_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client" if name == "prometheus" else name, None)
    with pytest.raises(UsageError, match=rf"pip install 'truemfu\[{name}\]'"):
        make_tracker(name, tmp_path)


def test_a_stand_in_for_a_package_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    assert make_tracker("wandb", tmp_path) is not None


def test_names_that_come_out_alike_stay_apart_and_each_keeps_its_own() -> None:
    names = Names(str.lower)
    found = [names(name) for name in ("loss", "Loss", "LOSS")]
    assert found[0] == "loss"
    assert len(set(found)) == 3
    assert all(name.startswith("loss_") for name in found[1:])
    assert [names(name) for name in ("loss", "Loss", "LOSS")] == found


def test_making_every_tracker_imports_none_of_their_packages(tmp_path: Path) -> None:
    installed = [name for name, tracker in TRACKERS.items() if importlib.util.find_spec(tracker.package)]
    code = (
        "import sys\nfrom pathlib import Path\nfrom truemfu.trackers.table import make_tracker\n"
        f"for name in {installed}: make_tracker(name, Path({str(tmp_path)!r}))\n"
        "heavy = {'wandb', 'tensorboard', 'mlflow', 'trackio', 'prometheus_client', 'torch'}\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
