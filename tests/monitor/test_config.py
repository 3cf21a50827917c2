"""Every key of the configuration is read, from wherever it may stand; anything wrong is one clear line."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from truemfu.errors import TruemfuWarning, UsageError
from truemfu.monitor.config import SCHEMA, MonitorConfig, load_config
from truemfu.monitor.server_counters import ServerSetting

EVERYTHING = """
monitoring:
  flops_profile_freq: 70
  mfu_calculation_mode: hybrid
  peak_tflops: 989.4
  measured_peak_tflops: 655.5
  attention: causal
  detailed_log_freq: 51
  dataset_metrics_freq: 11
  save_freq: 201
  census: false
  step_phases: false
  generation_servers: [{url: "http://host:8000", device: H100-SXM, dtype: fp8}]
  trackers: [wandb, tensorboard]
  prometheus_address: 0.0.0.0:9465
  metric_names: composer
  phases: {warmup: 10, cooldown: 0}
  performance_monitoring:
    measure_flops_frequency: 70
    smart_mode:
      initial_profiling: false
      calibration_enabled: false
      recalibration_frequency: 0
    hybrid_mode:
      hardware_counters_enabled: false
      fallback_to_profiler: false
      audit: AUDIT_FILE
monitor: {freq: {flops_profile_freq: 70}}
wandb:
  project: mine
  log_dataset_metrics: false
  reduced_logging: true
training:
  learning_rate: 1e-4
  logging_steps: 100
"""
AUDIT = Path(__file__).parent / "audit.json"
EVERYTHING = EVERYTHING.replace("AUDIT_FILE", str(AUDIT))
READ = MonitorConfig(
    flops_profile_freq=70,
    mode="hybrid",
    peak_tflops=989.4,
    measured_peak_tflops=655.5,
    attention="causal",
    detailed_log_freq=51,
    dataset_metrics_freq=11,
    save_freq=201,
    phases={"warmup": 10, "main": 500, "finetune": 200, "cooldown": 0},
    initial_profiling=False,
    calibration_enabled=False,
    recalibration_frequency=0,
    hardware_counters_enabled=False,
    fallback_to_profiler=False,
    audit=str(AUDIT),
    census=False,
    step_phases=False,
    generation_servers=(ServerSetting("http://host:8000/metrics", "H100-SXM", "fp8"),),
    trackers=("wandb", "tensorboard"),
    prometheus_address="0.0.0.0:9465",
    metric_names="composer",
    log_dataset_metrics=False,
    reduced_logging=True,
    logging_steps=100,
)


def nested(path: str, value: Any) -> dict[str, Any]:
    """A configuration that holds `value` at a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(*configs: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            whole[key] = merged(whole[key], value) if key in whole else value
    return whole


def file(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.errors._already_warned", set())


def test_every_key_of_a_yaml_file_is_read(tmp_path: Path) -> None:
    assert load_config(file(tmp_path, EVERYTHING)) == READ
    assert load_config(str(file(tmp_path, EVERYTHING))) == READ


def test_the_example_holds_every_key_and_no_field_at_its_default() -> None:
    for path in SCHEMA:
        assert re.search(rf"\b{path.rpartition('.')[2]}: ", EVERYTHING), path
    default = MonitorConfig()
    for name in (field.name for field in dataclasses.fields(MonitorConfig)):
        assert getattr(READ, name) != getattr(default, name), name


def test_every_field_has_a_key_and_every_key_a_field() -> None:
    fields = {field.name for field in dataclasses.fields(MonitorConfig)}
    assert {name for name, _ in SCHEMA.values()} == fields


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        {"monitoring": None},
        {"monitoring": {}},
        {"monitoring": {"phases": None, "peak_tflops": None, "trackers": None}},
        {"monitoring": {"performance_monitoring": {"smart_mode": None, "hybrid_mode": {}}}},
        {"monitor": None},
        {"monitor": {"freq": None}},
        {"monitor": "val_loss"},
        {"wandb": True},
        {"wandb": None, "training": None},
        {"wandb": "online", "training": ["sft", "dpo"]},
        {"training": {"logging_steps": None}},
        {"model": {"flops_profile_freq": "mine"}, "mode": 3},
    ],
)
def test_what_says_nothing_to_us_gives_the_defaults(config: dict[str, Any] | None) -> None:
    assert load_config(config) == MonitorConfig()


def test_the_defaults_are_those_of_the_specification() -> None:
    assert dataclasses.asdict(MonitorConfig()) == {
        "flops_profile_freq": 500,
        "mode": "smart",
        "peak_tflops": None,
        "measured_peak_tflops": None,
        "attention": "full",
        "detailed_log_freq": 50,
        "dataset_metrics_freq": 10,
        "save_freq": 200,
        "phases": {"warmup": 1000, "main": 500, "finetune": 200},
        "initial_profiling": True,
        "calibration_enabled": True,
        "recalibration_frequency": 1000,
        "hardware_counters_enabled": True,
        "fallback_to_profiler": True,
        "audit": None,
        "census": None,
        "step_phases": True,
        "generation_servers": None,
        "trackers": None,
        "prometheus_address": "127.0.0.1:9464",
        "metric_names": "truemfu",
        "log_dataset_metrics": True,
        "reduced_logging": False,
        "logging_steps": None,
    }


def test_a_config_can_be_pickled_and_written_as_json() -> None:
    assert pickle.loads(pickle.dumps(READ)) == READ
    assert json.loads(json.dumps(dataclasses.asdict(READ)))["phases"]["cooldown"] == 0


def test_two_configs_do_not_share_their_phases() -> None:
    assert MonitorConfig().phases is not MonitorConfig().phases


SPELLINGS = [path for path, (field, _) in SCHEMA.items() if field == "flops_profile_freq"]


@pytest.mark.parametrize("path", SPELLINGS)
def test_each_spelling_of_the_measuring_frequency_is_understood(path: str) -> None:
    assert len(SPELLINGS) == 3
    assert load_config(nested(path, 50)).flops_profile_freq == 50


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(SPELLINGS, 2)))
def test_two_spellings_must_agree_and_both_are_quoted_where_they_do_not(first: str, second: str) -> None:
    assert load_config(merged(nested(first, 50), nested(second, 50.0))).flops_profile_freq == 50
    config = merged(nested(first, 50), nested(second, 60))
    with pytest.raises(UsageError, match="two spellings of one setting: keep one of them") as error:
        load_config(config, flops_profile_freq=7)
    assert f"{first} is 50" in str(error.value)
    assert f"{second} is 60" in str(error.value)


def test_an_explicit_argument_wins_over_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "monitoring: {flops_profile_freq: 50}")
    assert load_config(path, flops_profile_freq=0).flops_profile_freq == 0
    assert load_config(path).flops_profile_freq == 50
    assert load_config(None, flops_profile_freq=3) == MonitorConfig(flops_profile_freq=3)


@pytest.mark.parametrize("value", [-1, True, 2.5, "50"])
def test_an_explicit_argument_is_checked_too(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^flops_profile_freq must be a whole number of steps, 0 \(never\)"):
        load_config(None, flops_profile_freq=value)


MAY_BE_NEVER = [
    *SPELLINGS,
    "monitoring.dataset_metrics_freq",
    "monitoring.phases.main",
    "monitoring.phases.mine",
    "monitoring.performance_monitoring.smart_mode.recalibration_frequency",
]
AT_LEAST_ONE = ["monitoring.detailed_log_freq", "monitoring.save_freq", "training.logging_steps"]


def value_at(config: MonitorConfig, path: str) -> Any:
    if path.startswith("monitoring.phases."):
        return config.phases[path.rpartition(".")[2]]
    return getattr(config, SCHEMA[path][0])


@pytest.mark.parametrize("path", [*MAY_BE_NEVER, *AT_LEAST_ONE])
@pytest.mark.parametrize("value", [5, 5.0, np.int64(5), np.float32(5.0), "5e0", "0.5e+1", 10**30])
def test_a_frequency_may_be_any_whole_number(path: str, value: Any) -> None:
    read = value_at(load_config(nested(path, value)), path)
    assert read == (10**30 if value == 10**30 else 5)
    assert type(read) is int


@pytest.mark.parametrize("path", MAY_BE_NEVER)
def test_zero_means_never_where_there_is_a_never(path: str) -> None:
    assert value_at(load_config(nested(path, 0)), path) == 0


@pytest.mark.parametrize("path", AT_LEAST_ONE)
def test_zero_is_an_error_where_there_is_no_never(path: str) -> None:
    expected = (
        rf"^{re.escape(path)} must be a whole number of steps, 1 or more, without quotes; got 0 \(int\)$"
    )
    with pytest.raises(UsageError, match=expected):
        load_config(nested(path, 0))


@pytest.mark.parametrize("path", [*MAY_BE_NEVER, *AT_LEAST_ONE])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True (bool)"),
        (-1, "-1 (int)"),
        (2.5, "2.5 (float)"),
        (float("nan"), "nan (float)"),
        (float("inf"), "inf (float)"),
        ("500", "'500' (str)"),
        ("5e-1", "'5e-1' (str)"),
        ([500], "[500] (list)"),
        ({}, "{} (dict)"),
    ],
)
def test_a_wrong_frequency_names_its_path_and_what_came(path: str, value: Any, shown: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(path)} must be a whole number") as error:
        load_config(nested(path, value))
    assert str(error.value).endswith(f"; got {shown}")


@pytest.mark.parametrize("path", [path for path in MAY_BE_NEVER if "phases" not in path])
def test_null_is_no_frequency_since_it_might_mean_never(path: str) -> None:
    with pytest.raises(UsageError, match=r"0 \(never\) or more, without quotes; got null$"):
        load_config(nested(path, None))


SWITCHES = [path for path, (field, _) in SCHEMA.items() if isinstance(getattr(MonitorConfig(), field), bool)]


@pytest.mark.parametrize("path", SWITCHES)
@pytest.mark.parametrize(
    ("value", "shown"), [("yes", "'yes' (str)"), (1, "1 (int)"), (0, "0 (int)"), (None, "null")]
)
def test_a_switch_is_true_or_false_and_nothing_like_it(path: str, value: Any, shown: str) -> None:
    assert len(SWITCHES) == 7
    with pytest.raises(UsageError, match=rf"^{re.escape(path)} must be a bool, true or false") as error:
        load_config(nested(path, value))
    assert str(error.value).endswith(f"; got {shown}")


@pytest.mark.parametrize(
    ("path", "known", "typo", "meant"),
    [
        (
            "monitoring.mfu_calculation_mode",
            ["auto", "smart", "profiler", "estimate", "hybrid"],
            "smrt",
            "smart",
        ),
        ("monitoring.attention", ["full", "causal"], "casual", "causal"),
        ("monitoring.metric_names", ["truemfu", "composer", "torchtitan"], "torch_titan", "torchtitan"),
    ],
)
def test_a_choice_is_one_of_its_names(path: str, known: list[str], typo: str, meant: str) -> None:
    for name in known:
        assert value_at(load_config(nested(path, name)), path) == name
    with pytest.raises(
        UsageError, match=rf"^{re.escape(path)} must be one of {', '.join(known)}; got"
    ) as error:
        load_config(nested(path, typo))
    assert str(error.value).endswith(f"got {typo!r} (str) (did you mean {meant!r}?)")
    with pytest.raises(UsageError, match=r"got False \(bool\)$"):
        load_config(nested(path, False))


@pytest.mark.parametrize("value", [989.4, "9.894e2", np.float64(989.4)])
def test_a_peak_is_a_number_of_tflops(value: Any) -> None:
    assert load_config({"monitoring": {"peak_tflops": value}}).peak_tflops == 989.4
    assert load_config({"monitoring": {"peak_tflops": 300}}).peak_tflops == 300.0


@pytest.mark.parametrize("value", [0, -1, True, "989", float("nan"), float("inf"), 989.4e12, 10**400])
def test_a_peak_that_is_none_is_an_error(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^monitoring\.peak_tflops must be a positive number of TFLOP/s"):
        load_config({"monitoring": {"peak_tflops": value}})


def test_an_audit_is_read_when_the_run_begins(tmp_path: Path) -> None:
    path = "monitoring.performance_monitoring.hybrid_mode.audit"
    for value, problem in (
        (3, "must be the path of a file"),
        (str(tmp_path / "none.json"), "cannot be read: No such"),
    ):
        with pytest.raises(UsageError, match=problem):
            load_config(nested(path, value))
    with pytest.raises(UsageError, match=r"is not an audit: .*; write the output of `truemfu audit --json"):
        load_config(nested(path, file(tmp_path, "{}", "audit.json")))
    assert load_config(nested(path, AUDIT)).audit == str(AUDIT)
    assert load_config(nested(path, None)).audit is None


@pytest.mark.parametrize(("value", "names"), [([], ()), (["wandb"], ("wandb",)), (("a", "b"), ("a", "b"))])
def test_trackers_are_a_list_of_names(value: Any, names: tuple[str, ...]) -> None:
    assert load_config({"monitoring": {"trackers": value}}).trackers == names


@pytest.mark.parametrize(("value", "text"), [(9465, "9465"), ("0.0.0.0", "0.0.0.0"), ("[::1]:1", "[::1]:1")])
def test_the_address_of_prometheus_is_a_host_a_port_or_both(value: Any, text: str) -> None:
    assert load_config({"monitoring": {"prometheus_address": value}}).prometheus_address == text


@pytest.mark.parametrize("value", [None, True, "", ["0.0.0.0"], "a b", 70000, -1, "::1:9464"])
def test_what_is_no_address_of_prometheus_is_an_error(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^monitoring\.prometheus_address (must be|takes) "):
        load_config({"monitoring": {"prometheus_address": value}})


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n" for before, here in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    "key", ["trackers", "prometheus_address", "phases", "save_freq", "mfu_calculation_mode", "peak_tflops"]
)
def test_an_error_is_short_however_large_the_value(key: str, tmp_path: Path) -> None:
    path = file(tmp_path, f"{BOMB}monitoring: {{{key}: *i}}\n")
    with pytest.raises(UsageError) as raised:
        load_config(path)
    assert len(str(raised.value)) < 600
    assert f"monitoring.{key} must be" in str(raised.value)


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
@pytest.mark.parametrize("value", ["[" * 10_000, "9" * 10_000])
def test_a_file_that_nests_without_an_end_or_with_too_long_a_number_is_one_line(
    name: str, value: str, tmp_path: Path
) -> None:
    content = f'{{"monitoring": {{"save_freq": {value}}}}}'
    with pytest.raises(UsageError) as raised:
        load_config(file(tmp_path, content, name))
    assert len(str(raised.value)) < 600
    assert "\n" not in str(raised.value)


def test_what_an_error_quotes_does_not_steer_the_terminal() -> None:
    for config in ({"monitoring": {"a\x1b]52;c;aGk=\x07b": 1}}, {"monitoring": {"trackers": "\x9b2J"}}):
        with pytest.raises(UsageError) as raised:
            load_config(config)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize("value", ["wandb", b"wandb", [None], [""], {"wandb": True}, False, 3])
def test_trackers_that_are_no_list_of_names_are_an_error(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^monitoring\.trackers must be a list of names such as"):
        load_config({"monitoring": {"trackers": value}})


def test_a_tracker_named_twice_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"^monitoring\.trackers must be a list without repeated names"):
        load_config({"monitoring": {"trackers": ["wandb", "file", "wandb"]}})


@pytest.mark.parametrize("name", [1, None, "", True])
def test_a_phase_has_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match=r"^a name in monitoring\.phases must be text"):
        load_config({"monitoring": {"phases": {name: 10}}})


@pytest.mark.parametrize(
    "path",
    [
        "monitoring",
        "monitoring.phases",
        "monitoring.performance_monitoring",
        "monitoring.performance_monitoring.smart_mode",
        "monitor.freq",
    ],
)
@pytest.mark.parametrize("value", [True, 500, "on", ["a"]])
def test_a_section_of_ours_is_a_mapping(path: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^{re.escape(path)} must be a mapping \(.+\); got .+$"):
        load_config(nested(path, value))


OWN_KEYS = sorted(
    {
        ".".join(path.split(".")[: depth + 1])
        for path in SCHEMA
        if path.startswith("monitor")
        for depth in range(1, path.count(".") + 1)
    }
)


@st.composite
def typos(draw: st.DrawFn) -> tuple[str, str]:
    """A known path of ours, and the same one with one letter of its last part gone, changed or added."""
    path = draw(st.sampled_from(OWN_KEYS))
    section, _, name = path.rpartition(".")
    at = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from("abcxyz_-"))
    kept = draw(st.sampled_from([name[at + 1 :], letter + name[at + 1 :], letter + name[at:]]))
    typo = name[:at] + kept
    assume(typo != name)
    return path, f"{section}.{typo}"


@given(typos(), st.sampled_from([None, 5, True, "smart", {}]))
def test_a_typo_is_an_error_that_names_its_path_and_the_key_that_was_meant(
    pair: tuple[str, str], value: Any
) -> None:
    path, typo = pair
    with pytest.raises(UsageError) as error:
        load_config(nested(typo, value))
    meant = path.rpartition(".")[2]
    assert str(error.value).startswith(
        f"unknown key {typo} in the configuration (did you mean {meant!r}?); known here: "
    )


@settings(max_examples=30)
@given(st.text(max_size=30), st.sampled_from(["monitoring", "monitor", "monitoring.performance_monitoring"]))
def test_any_key_nobody_knows_is_one_line(key: str, section: str) -> None:
    assume(f"{section}.{key}" not in OWN_KEYS)
    config = nested(section, {key: 1})
    with pytest.raises(UsageError, match="known here: ") as error:
        load_config(config)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", [np.zeros((50, 50)), "a\nb" * 1000, {"a": "b\nc"}, [0] * 1000])
def test_a_long_value_is_shown_on_one_short_line(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^monitoring\.save_freq must be a whole number") as error:
        load_config({"monitoring": {"save_freq": value}})
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 200


READ_AT_THE_TOP = {path.split(".")[0] for path in SCHEMA} | {path.split(".")[1] for path in SCHEMA}


@given(
    st.dictionaries(
        st.text(max_size=12).filter(lambda key: key not in READ_AT_THE_TOP),
        st.none() | st.booleans() | st.integers() | st.dictionaries(st.text(max_size=5), st.integers()),
    )
)
def test_every_other_section_is_the_users(config: dict[str, Any]) -> None:
    assert load_config(config) == MonitorConfig()


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (
            "monitoring.initial_profiling",
            "(did you mean 'monitoring.performance_monitoring.smart_mode.initial_profiling'?)",
        ),
        ("monitor.flops_profile_freq", "(did you mean 'monitor.freq.flops_profile_freq'?)"),
        ("monitoring.SAVE_FREQ", "(did you mean 'save_freq'?)"),
    ],
)
def test_a_key_in_the_wrong_section_or_case_is_told_its_place(path: str, hint: str) -> None:
    with pytest.raises(UsageError, match=rf"^unknown key {re.escape(path)} in the configuration") as error:
        load_config(nested(path, 5))
    assert hint in str(error.value)


@pytest.mark.parametrize("key", [1, True, None, ("a", "b")])
def test_a_key_that_is_no_text_is_unknown(key: Any) -> None:
    with pytest.raises(UsageError, match=r"^unknown key monitoring\."):
        load_config({"monitoring": {key: 1}})


def test_a_key_of_ours_at_the_top_level_is_said_not_to_be_read() -> None:
    with pytest.warns(TruemfuWarning, match="'flops_profile_freq' at the top level .* under 'monitoring'"):
        assert load_config({"flops_profile_freq": 50}) == MonitorConfig()


def test_only_our_sections_and_keys_are_touched() -> None:
    class Touchy(UserDict[str, Any]):
        """Fails where a value of the user's is read, as an interpolation that cannot be resolved does."""

        def __getitem__(self, key: str) -> Any:
            if key.startswith("mine"):
                raise RuntimeError(f"{key} was read")
            return super().__getitem__(key)

    wandb = Touchy({"mine": 1, "reduced_logging": True})
    config = Touchy({"mine_too": 2, "wandb": wandb, "monitoring": UserDict({"save_freq": 9})})
    assert load_config(config) == MonitorConfig(save_freq=9, reduced_logging=True)


def test_settings_that_were_read_before_are_used_as_they_are() -> None:
    settings = MonitorConfig(save_freq=7)
    assert load_config(settings) is settings


@pytest.mark.parametrize("config", [["monitoring"], 5, b"config.yaml"])
def test_what_is_neither_mapping_nor_path_is_an_error(config: Any) -> None:
    with pytest.raises(UsageError, match=r"^the configuration must be a mapping of sections; got"):
        load_config(config)


def test_a_namespace_is_told_how_to_become_a_mapping() -> None:
    namespace = argparse.Namespace(monitoring={"save_freq": 9})
    with pytest.raises(UsageError, match=r"got Namespace\(.*; pass a namespace as vars\(namespace\)$"):
        load_config(namespace)  # type: ignore[arg-type]
    assert load_config(vars(namespace)) == MonitorConfig(save_freq=9)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}"])
def test_an_empty_file_gives_the_defaults(tmp_path: Path, text: str) -> None:
    assert load_config(file(tmp_path, text)) == MonitorConfig()


def test_numbers_in_exponent_form_are_read_from_yaml(tmp_path: Path) -> None:
    text = "monitoring: {flops_profile_freq: 5e2, save_freq: 1.0e+2, peak_tflops: 1e3}"
    config = load_config(file(tmp_path, text))
    assert (config.flops_profile_freq, config.save_freq, config.peak_tflops) == (500, 100, 1000.0)


def test_a_json_file_is_read_with_tabs_and_without_pyyaml(tmp_path: Path) -> None:
    path = file(tmp_path, '{\n\t"monitoring": {\n\t\t"save_freq": 9, "peak_tflops": 1e3}\n}', "config.JSON")
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from truemfu.monitor.config import load_config\n"
        f"config = load_config({str(path)!r})\n"
        "print(config.save_freq, config.peak_tflops, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["9", "1000.0", "False"]


def test_without_pyyaml_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, EVERYTHING)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(UsageError, match=r"needs PyYAML: pip install 'truemfu\[yaml\]', or pass"):
        load_config(path)


def test_a_tag_of_the_users_own_is_no_obstacle_unless_it_stands_in_our_place(tmp_path: Path) -> None:
    text = "model: !include model.yaml\nseed: !!python/tuple [1, 2]\nmonitoring: {save_freq: 9}"
    assert load_config(file(tmp_path, text)) == MonitorConfig(save_freq=9)
    with pytest.raises(UsageError, match=r"monitoring must be a mapping \(.*\); got '!include' \(str\)"):
        load_config(file(tmp_path, "monitoring: !include monitoring.yaml"))


@pytest.mark.parametrize("name", ["config.yaml", "config.json"])
def test_a_file_nested_too_deeply_is_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    depth = 1500 if name.endswith("yaml") else 100_000  # Python 3.12 reads JSON of several thousand levels
    path.write_text('{"monitoring": ' + "[" * depth + "]" * depth + "}")
    with pytest.raises(UsageError, match=r"^\S+ is nested too deeply$"):
        load_config(path)


@pytest.mark.parametrize("path", ["trackers", "phases", "flops_profile_freq", "peak_tflops", "nonsense"])
def test_aliases_that_stand_for_billions_of_values_are_one_short_line(
    tmp_path: Path, path: str, never_waits: None
) -> None:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    file = tmp_path / "config.yaml"
    file.write_text("\n".join([*lines, f"monitoring: {{{path}: *a11}}"]))
    with pytest.raises(UsageError) as caught:
        load_config(file)
    assert len(str(caught.value)) < 900
    assert "\n" not in str(caught.value)


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    load_config(file(tmp_path, f"x: !!python/object/apply:os.mkdir [{json.dumps(str(trace))}]"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "monitoring:\n  a: 1\n b: 2\n", r"a\.yaml is not valid YAML: line 3: "),
        ("a.yaml", "a: 1\nmonitoring: {save_freq: 9", r"a\.yaml is not valid YAML: line 2: "),
        ("a.yaml", "monitoring: {}\n---\nmonitoring: {}\n", r"a\.yaml is not valid YAML: line 2: "),
        ("a.yaml", "born: 2024-13-45", r"a\.yaml is not valid YAML: month must be in 1\.\.12"),
        ("a.yaml", "a: \x01", r"a\.yaml is not valid YAML: unacceptable character"),
        ("a.yaml", "- monitoring", r"a\.yaml: the configuration must be a mapping of sections; got \["),
        ("a.yaml", "monitoring", r"a\.yaml: the configuration must be a mapping of sections; got 'mon"),
        ("a.yaml", "monitoring: {save_freq: 0}", r"a\.yaml: monitoring\.save_freq must be a whole number"),
        ("a.json", '{\n"monitoring": {,}}', r"a\.json is not valid JSON: line 2: "),
        ("a.json", "", r"a\.json is not valid JSON: line 1: "),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as error:
        load_config(file(tmp_path, text, name))
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b'{"a": "\xff\xfe\x80"}')
    with pytest.raises(UsageError, match=rf"{re.escape(name)} is not valid (YAML|JSON): .*byte") as error:
        load_config(tmp_path / name)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("path", ["no/such.yaml", ".", "monitoring:\n  save_freq: 9\n", "a\0b", "x" * 5000])
def test_a_path_that_cannot_be_read_is_one_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"^cannot read the configuration file '") as error:
        load_config(path)
    assert str(error.value).endswith("; give a mapping or the path of a YAML or JSON file")
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 250


def test_a_path_object_of_any_kind_will_do(tmp_path: Path) -> None:
    class Somewhere(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(file(tmp_path, "monitoring: {save_freq: 9}"))

    assert load_config(Somewhere()) == MonitorConfig(save_freq=9)
