"""What makes a result a different one, and what does not."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from truemfu.records import SweepCase
from truemfu.sweep import content_hash as content_hash_module
from truemfu.sweep.content_hash import content_hash, find_module, hashed_environment

CASE = SweepCase(trainer="StandardTrainer", model="tiny", batch_size=2, seq_len=32)
AROUND = hashed_environment("NVIDIA H200", None)


def test_the_same_things_hash_the_same() -> None:
    again = msgspec.structs.replace(CASE)
    assert content_hash(CASE, AROUND) == content_hash(again, hashed_environment("NVIDIA H200", None))


@pytest.mark.parametrize("field", ["batch_size", "seq_len", "seed", "max_steps", "profiled_steps"])
def test_every_setting_counts(field: str) -> None:
    other = msgspec.structs.replace(CASE, **{field: 77})
    assert content_hash(other, AROUND) != content_hash(CASE, AROUND)


def test_device_memory_limit_python_versions_and_sources_count() -> None:
    others = [
        hashed_environment("NVIDIA A100", None),
        hashed_environment("NVIDIA H200", 2**30),
        {**AROUND, "python": "3.99"},
        {**AROUND, "versions": {**AROUND["versions"], "torch": "9.9"}},
        {**AROUND, "sources": "other"},
    ]
    assert len({content_hash(CASE, around) for around in [AROUND, *others]}) == 6


@pytest.mark.parametrize("name", ["records.py", "sweep/worker/measure.py", "cli/sweep.py"])
def test_every_source_of_truemfu_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "truemfu"
    for source in ("records.py", "sweep/worker/measure.py", "cli/sweep.py"):
        file = package / source
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("first")
    monkeypatch.setattr(content_hash_module, "__file__", str(package / "sweep" / "content_hash.py"))
    before = hashed_environment("NVIDIA H200", None)
    assert hashed_environment("NVIDIA H200", None) == before
    (package / name).write_text("second")
    assert hashed_environment("NVIDIA H200", None)["sources"] != before["sources"]


def test_versions_of_what_is_installed_are_known() -> None:
    assert {"truemfu", "torch", "opacus", "transformers"} <= set(AROUND["versions"])


def test_a_change_in_the_users_trainer_or_configuration_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, config = tmp_path / "mine.py", tmp_path / "config.json"
    module.write_text("first")
    config.write_text("first")
    own_trainer = msgspec.structs.replace(CASE, trainer="mine:Trainer")
    own_factory = msgspec.structs.replace(CASE, model="mine:build")
    own_config = msgspec.structs.replace(CASE, model=str(tmp_path))
    cases = [own_trainer, own_factory, own_config]
    before = [content_hash(case, AROUND) for case in cases]
    assert before == [content_hash(case, AROUND) for case in cases]
    module.write_text("second")
    config.write_text("second")
    after = [content_hash(case, AROUND) for case in cases]
    assert not set(before) & set(after)


def test_a_module_is_found_where_python_would_find_it() -> None:
    spec = find_module("truemfu.sweep.cases")
    assert spec is not None
    assert Path(spec.origin or "").name == "cases.py"
    assert find_module("truemfu.sweep.cases.below") is None
    assert find_module("no_such_module") is None


def test_a_peak_of_the_users_own_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "123")
    assert content_hash(CASE, hashed_environment("NVIDIA H200", None)) != content_hash(CASE, AROUND)


def test_a_module_in_the_current_folder_hides_no_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("torch.py", "mine.py"):
        (tmp_path / name).touch()
    for first in (["", *sys.path], [str(tmp_path), *sys.path], sys.path):
        monkeypatch.setattr(sys, "path", list(first))
        torch, mine = find_module("torch"), find_module("mine")
        assert torch is not None
        assert mine is not None
        assert Path(torch.origin or "").parent != tmp_path
        assert Path(mine.origin or "").parent == tmp_path
