"""A matrix multiplied out: names, order, and what `auto` becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from truemfu.plain_files import is_name
from truemfu.sweep.cases import cases_of
from truemfu.sweep.config import TEST_CONFIG, SweepConfig, override, parse


def test_the_default_matrix_has_sixteen_cases_in_order() -> None:
    names = list(cases_of(SweepConfig(), "cuda"))
    assert len(names) == 16
    assert names[:5] == [
        "StandardTrainer_bs4_seq512",
        "StandardTrainer_bs4_seq1024",
        "StandardTrainer_bs8_seq512",
        "StandardTrainer_bs8_seq1024",
        "DPSGDTrainer_bs4_seq512",
    ]


def test_batches_run_in_ascending_order() -> None:
    config = parse({"trainers": ["StandardTrainer"], "batch_sizes": [8, 2, 4], "seq_lengths": [32]})
    assert [case.batch_size for case in cases_of(config, "cpu").values()] == [2, 4, 8]


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "bf16"), ("cpu", "fp32")])
def test_auto_is_bf16_on_a_gpu_and_fp32_on_a_cpu(device: str, dtype: str) -> None:
    cases = cases_of(SweepConfig(), device).values()
    assert {(case.device, case.dtype) for case in cases} == {(device, dtype)}


def test_names_go_on_where_there_are_several_models_or_dtypes() -> None:
    axes = {"trainers": ["StandardTrainer"], "batch_sizes": [4], "seq_lengths": [512]}
    config = parse({**axes, "model_sizes": ["tiny", "1b"], "dtypes": ["bf16", "fp32"]})
    assert list(cases_of(config, "cuda")) == [
        "StandardTrainer_bs4_seq512_tiny_bf16",
        "StandardTrainer_bs4_seq512_tiny_fp32",
        "StandardTrainer_bs4_seq512_1b_bf16",
        "StandardTrainer_bs4_seq512_1b_fp32",
    ]


def test_auto_and_the_dtype_it_becomes_are_one() -> None:
    assert len(cases_of(parse({"dtypes": ["auto", "bf16"]}), "cuda")) == 16


def test_trainers_of_the_same_class_name_keep_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("mine", "yours"):
        (tmp_path / f"{module}.py").touch()
    monkeypatch.chdir(tmp_path)
    config = parse({"trainers": ["mine:Fast", "yours:Fast"], "batch_sizes": [4], "seq_lengths": [512]})
    cases = cases_of(config, "cuda")
    assert {name: case.trainer for name, case in cases.items()} == {
        "Fast_bs4_seq512": "mine:Fast",
        "Fast-2_bs4_seq512": "yours:Fast",
    }


def test_a_configuration_on_disk_is_called_by_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Llama 3.1 (8B)").mkdir()
    (tmp_path / "Llama 3.1 (8B)" / "config.json").write_text("{}")
    (tmp_path / "shapes.py").touch()
    monkeypatch.chdir(tmp_path)
    axes = {"trainers": ["StandardTrainer"], "batch_sizes": [4], "seq_lengths": [512]}
    config = parse({**axes, "model_sizes": ["Llama 3.1 (8B)/config.json", "shapes:build_wide"]})
    assert list(cases_of(config, "cuda")) == [
        "StandardTrainer_bs4_seq512_Llama-3.1-8B",
        "StandardTrainer_bs4_seq512_build-wide",
    ]


def test_every_setting_reaches_the_case() -> None:
    config = parse(
        {"optimizer": "adamw", "seed": 7, "max_grad_norm": 0.5, "attention": "causal", "max_steps": 33}
    )
    case = next(iter(cases_of(config, "cpu").values()))
    assert (case.optimizer, case.seed, case.max_grad_norm, case.attention, case.max_steps) == (
        "adamw",
        7,
        0.5,
        "causal",
        33,
    )


def test_names_longer_than_a_file_may_be_called_are_cut_and_stay_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").touch()
    monkeypatch.chdir(tmp_path)
    long = ["mine:" + "A" * 300, "mine:" + "A" * 301]
    most = 2**63 - 1
    config = override(TEST_CONFIG, trainers=long, models=long, batch_sizes=[most], seq_lengths=[most])
    names = list(cases_of(override(config, dtypes=["fp32", "bf16"]), "cpu"))
    assert len(set(names)) == 8
    assert all(is_name(name) for name in names)
