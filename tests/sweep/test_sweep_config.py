"""The matrix as users write it: what is understood, and one clear line for whatever is not."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from truemfu.errors import UsageError
from truemfu.sweep.config import (
    FIELDS,
    TEST_CONFIG,
    SweepConfig,
    as_mapping,
    load_config,
    override,
    parse,
)


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "profiling_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_default_is_four_trainers_two_batches_two_lengths_of_1b() -> None:
    config = SweepConfig()
    assert config.trainers == [
        "StandardTrainer",
        "DPSGDTrainer",
        "DPGhostClippingTrainer",
        "DPFastGradientClippingTrainer",
    ]
    assert (config.batch_sizes, config.seq_lengths, config.models) == ([4, 8], [512, 1024], ["1b"])


def test_a_file_holds_the_whole_matrix(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            {"trainers": ["StandardTrainer"], "batch_sizes": [2, 1], "model_sizes": ["tiny"], "prune": True},
        )
    )
    assert (config.trainers, config.batch_sizes, config.models) == (["StandardTrainer"], [2, 1], ["tiny"])
    assert config.prune is True
    assert config.seq_lengths == [512, 1024]


def test_one_model_size_may_be_a_plain_string(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {"model_size": "small"})).models == ["small"]


def test_a_configuration_written_out_reads_back_the_same(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, as_mapping(TEST_CONFIG))) == TEST_CONFIG
    assert set(as_mapping(TEST_CONFIG)) == set(FIELDS)


def test_flags_override_and_flags_not_given_do_not() -> None:
    config = override(TEST_CONFIG, models=["small"], batch_sizes=[3], timeout_s=None)
    assert (config.models, config.batch_sizes) == (["small"], [3])
    assert config.timeout_s == TEST_CONFIG.timeout_s


def test_a_value_given_twice_counts_once() -> None:
    assert override(TEST_CONFIG, batch_sizes=[4, 2, 4]).batch_sizes == [4, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": [4]}, r"unknown key 'batch_size' \(did you mean 'batch_sizes'\?\)"),
        ({"model_size": "tiny", "model_sizes": ["tiny"]}, "two spellings of one key"),
        ({"batch_sizes": [0]}, "batch_sizes must be a whole number >= 1; got 0"),
        ({"batch_sizes": [4, -8]}, "batch_sizes must be a whole number >= 1; got -8"),
        ({"seq_lengths": [512.5]}, "seq_lengths must be a whole number; got 512.5"),
        ({"batch_sizes": ["4"]}, "batch_sizes must be a whole number; got '4'"),
        ({"batch_sizes": [True]}, "batch_sizes must be a whole number; got True"),
        ({"batch_sizes": 4}, "batch_sizes must be a list; got 4"),
        ({"batch_sizes": [[4]]}, "batch_sizes must be a whole number"),
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"trainers": []}, "trainers is empty"),
        ({"gpus": []}, "gpus is empty"),
        ({"gpus": [-1]}, "gpus must be a whole number >= 0; got -1"),
        ({"trainers": "StandardTrainer"}, "trainers must be a list; got 'StandardTrainer'"),
        ({"trainers": ["DPSDGTrainer"]}, r"no trainer 'DPSDGTrainer' \(did you mean 'DPSGDTrainer'\?\)"),
        ({"trainers": ["standardtrainer"]}, "did you mean 'StandardTrainer'"),
        ({"trainers": ["mine:"]}, "'mine:' does not have the form package.module:name"),
        ({"trainers": ["no_such_package.mine:Trainer"]}, "module 'no_such_package.mine' is not in"),
        ({"model_sizes": ["1B"]}, r"no model '1B' \(did you mean '1b'\?\)"),
        ({"model_sizes": ["mediun"]}, "did you mean 'medium'"),
        ({"model_sizes": ["no_such_module:build"]}, "module 'no_such_module' is not in"),
        (
            {"dtypes": ["bf61"]},
            r"dtype must be one of auto, fp32, bf16; got 'bf61' \(did you mean 'bf16'\?\)",
        ),
        ({"optimizer": "adam"}, r"optimizer must be one of .*did you mean 'adamw'"),
        ({"device": "gpu"}, "device must be one of auto, cuda, cpu; got 'gpu'"),
        ({"attention": "casual"}, "did you mean 'causal'"),
        ({"timeout_s": 0}, "timeout_s must be a number > 0.0; got 0"),
        ({"timeout_s": math.inf}, "timeout_s must be a finite number; got inf"),
        ({"memory_limit_gib": math.inf}, "memory_limit_gib must be a finite number; got inf"),
        ({"batch_sizes": [10**30]}, "batch_sizes must be a whole number"),
        ({"seed": 10**30}, "seed must be a whole number"),
        ({"model_size": ["1b"]}, r"model_sizes must be text; got \['1b'\]"),
        ({"timeout_s": "1h"}, "timeout_s must be a number; got '1h'"),
        ({"memory_limit_gib": -1}, "memory_limit_gib must be a number > 0.0; got -1"),
        ({"compile": "yes"}, "compile must be true or false; got 'yes'"),
        ({"min_steps": 30, "max_steps": 20}, r"max_steps \(20\) must not be below min_steps \(30\)"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse(values)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"trainers": [}', "is not valid JSON"),
        ("[1, 2]", "must be a JSON object"),
        ({"batch_sizes": [0]}, r"profiling_config.json: batch_sizes must be a whole number >= 1; got 0"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(write(tmp_path, content))


def test_an_editors_byte_order_mark_is_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "profiling_config.json"
    path.write_bytes(b'\xef\xbb\xbf{"batch_sizes": [3]}')
    assert load_config(path).batch_sizes == [3]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there\.json cannot be read: No such file"):
        load_config(tmp_path / "there.json")


def test_a_trainer_in_the_current_folder_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "mine.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    assert parse({"trainers": ["package.mine:Trainer"]}).trainers == ["package.mine:Trainer"]
    with pytest.raises(UsageError, match=r"module 'package\.yours' is not in"):
        parse({"trainers": ["package.yours:Trainer"]})


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"does not contain a Hugging Face config\.json"):
        parse({"model_sizes": [str(tmp_path)]})
    (tmp_path / "config.json").write_text("{}")
    assert parse({"model_sizes": [str(tmp_path)]}).models == [str(tmp_path)]


def test_without_opacus_only_the_standard_trainer_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(
        UsageError, match=r'needs Opacus, which is not installed: pip install "truemfu\[dp\]"'
    ):
        parse({})
    assert parse({"trainers": ["StandardTrainer"]}).trainers == ["StandardTrainer"]


def test_a_supervisor_starts_without_importing_torch() -> None:
    code = (
        "import sys; import truemfu.sweep.supervisor.runner; from truemfu.sweep.config import parse; "
        "parse({}); "
        "assert 'torch' not in sys.modules and 'opacus' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "content",
    [
        '{"trainers": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"trainers": ["' + "x" * 50_000 + '"]}',
        '{"model_sizes": ["' + "x" * 50_000 + ':y"]}',
        '{"' + "x" * 50_000 + '": 1}',
        '{"batch_sizes": [' + "9" * 5_000 + "]}",
        '{"batch_sizes": "' + "x" * 50_000 + '"}',
        '{"optimizer": "' + "x" * 50_000 + '"}',
        '{"timeout_s": [' + "[1]," * 10_000 + "1]}",
    ],
    ids=["deep", "trainer", "model", "key", "digits", "text", "choice", "list"],
)
def test_whatever_a_file_holds_the_message_is_one_short_line(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config(write(tmp_path, content))
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "profiling_config.json"))
    assert "\n" not in message
    assert len(message) < 900
