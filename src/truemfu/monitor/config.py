"""The user's mapping or file, turned into one frozen value before training starts.

    mapping, YAML or JSON file ─► keys of `SCHEMA` ─► checked values ─► `MonitorConfig`

The sections `monitoring` and `monitor` belong to truemfu: an unknown key there is an error, since ignoring a
misspelt one would waste a run. Every other section is the user's: from `wandb` and `training` only the keys
in `SCHEMA` are read, and one of them, or `monitor`, that is not a mapping (`wandb: true`, a trainer's
`monitor: val_loss`) is ignored.
"""

from __future__ import annotations

import json
import numbers
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from ..convention import Attention
from ..errors import RecordError, UsageError, brief, closest, one_line, warn_once
from ..hardware.detect import dtype_name, find_spec
from ..hardware.nsight.audited import read_audit
from ..hardware.search import search_devices
from ..plain_files import read_given
from ..text import shortened
from ..trackers.prometheus import DEFAULT_PORT
from ..trackers.prometheus_server import parse_address
from .server_counters import ServerSetting, checked_url

MODES = ("smart", "profiler", "estimate", "hybrid")
AUTO = "auto"
"""`hybrid` on a GPU whose counters can be read, else `smart`: the default of `truemfu run`."""
METRIC_NAMES = ("truemfu", "composer", "torchtitan")
PHASES: Mapping[str, int] = {"warmup": 1000, "main": 500, "finetune": 200}


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Every setting of the monitor; frequencies are in effective (optimizer) steps.

    `flops_profile_freq`, `recalibration_frequency`, `dataset_metrics_freq` and the values of `phases` may be
    0: never. `logging_steps`, `peak_tflops` and `trackers` are None where the user did not set them.
    `census` is whether one step is recorded kernel by kernel; None: in mode `hybrid`.
    `phases` is a plain dict, so that the object can be pickled and written with `dataclasses.asdict`.
    """

    flops_profile_freq: int = 500
    mode: str = "smart"
    peak_tflops: float | None = None
    measured_peak_tflops: float | None = None
    attention: str = "full"
    detailed_log_freq: int = 50
    dataset_metrics_freq: int = 10
    save_freq: int = 200
    phases: Mapping[str, int] = field(default_factory=lambda: dict(PHASES))
    initial_profiling: bool = True
    calibration_enabled: bool = True
    recalibration_frequency: int = 1000
    hardware_counters_enabled: bool = True
    fallback_to_profiler: bool = True
    audit: str | None = None
    census: bool | None = None
    step_phases: bool = True
    generation_servers: tuple[ServerSetting, ...] | None = None
    trackers: tuple[str, ...] | None = None
    prometheus_address: str = "127.0.0.1:9464"
    metric_names: str = "truemfu"
    log_dataset_metrics: bool = True
    reduced_logging: bool = False
    logging_steps: int | None = None

    @property
    def estimates_only(self) -> bool:
        """Whether FLOPs are only ever estimated."""
        return self.mode == "estimate" or not self.calibration_enabled


def load_config(
    config: MonitorConfig | Mapping[str, Any] | str | os.PathLike[str] | None,
    *,
    flops_profile_freq: int | None = None,
    default_mode: str = "smart",
) -> MonitorConfig:
    """The settings in a mapping, a YAML or JSON file, or the defaults; an explicit frequency wins.

    Raises a one-line UsageError for an unknown key, a wrong type or value, two spellings that disagree,
    and a file that cannot be read.
    """
    if isinstance(config, MonitorConfig):
        return config
    if isinstance(config, (str, os.PathLike)):
        content = _read(Path(config))
        try:
            values = _values(content)
        except UsageError as error:
            raise UsageError(f"{config}: {error}") from None
    else:
        values = _values(config)
    if flops_profile_freq is not None:
        values["flops_profile_freq"] = _steps_or_never("flops_profile_freq", flops_profile_freq)
    return MonitorConfig(**{"mode": default_mode, **values})


def _invalid(path: str, expected: str, value: Any, hint: str = "") -> UsageError:
    got = "null" if value is None else f"{brief(value)} ({type(value).__name__})"
    return UsageError(f"{path} must be {expected}; got {got}{hint}")


# No device reaches an exaFLOP/s: a number this large is in another unit, most likely FLOP/s.
_TOO_MANY_TFLOPS = 1e6

# YAML 1.1 readers return 5e2 and 1e3, written without a dot, as text.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def _number(value: Any) -> float | None:
    """A real number, or None for anything else, true and false included."""
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _whole(path: str, value: Any, least: int, expected: str) -> int:
    number = _number(value)
    if number is None or (isinstance(number, float) and not number.is_integer()) or number < least:
        raise _invalid(path, expected, value)
    return int(number)


def _steps(path: str, value: Any) -> int:
    return _whole(path, value, 1, "a whole number of steps, 1 or more, without quotes")


def _steps_or_never(path: str, value: Any) -> int:
    return _whole(path, value, 0, "a whole number of steps, 0 (never) or more, without quotes")


def _steps_or_unset(path: str, value: Any) -> int | None:
    return None if value is None else _steps(path, value)


def _switch(path: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(path, "a bool, true or false, without quotes", value)
    return value


def _switch_or_unset(path: str, value: Any) -> bool | None:
    return None if value is None else _switch(path, value)


def _tflops(path: str, value: Any) -> float | None:
    number = _number(value)
    if value is not None and (number is None or not 0 < number < _TOO_MANY_TFLOPS):
        raise _invalid(path, "a positive number of TFLOP/s such as 989.4, or null", value)
    return None if number is None else float(number)


def _audit(path: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise _invalid(path, "the path of a file with the output of `truemfu audit --json`", value)
    try:
        read_audit(Path(os.fspath(value)))
    except RecordError as error:
        raise UsageError(
            f"{path}: {error}; write the output of `truemfu audit --json -- …` to a file"
        ) from None
    return str(os.fspath(value))


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def check(path: str, value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            hint = closest(value, known) if isinstance(value, str) else ""
            raise _invalid(path, f"one of {', '.join(known)}", value, hint)
        return value

    return check


def _phases(path: str, value: Any) -> dict[str, int]:
    """The default phases, updated with the user's."""
    phases = dict(PHASES)
    for name, steps in _section(path, value, "phase names and their steps").items():
        if not isinstance(name, str) or not name:
            raise _invalid(f"a name in {path}", "text (quote a number)", name)
        phases[name] = _steps_or_never(f"{path}.{name}", steps)
    return phases


def _names(path: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    if not is_list or not all(isinstance(name, str) and name for name in value):
        raise _invalid(path, "a list of names such as [wandb, tensorboard], or [] for none", value)
    names = tuple(value)
    if len(set(names)) < len(names):
        raise _invalid(path, "a list without repeated names", value)
    return names


def _address(path: str, value: Any) -> str:
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    if not text:
        raise _invalid(path, "text such as 0.0.0.0:9464, a host or a port alone", value)
    parse_address(text, path, port=DEFAULT_PORT)
    return text


def _servers(path: str, value: Any) -> tuple[ServerSetting, ...] | None:
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise _invalid(path, 'a list of addresses such as ["http://host:8000"]', value)
    servers = tuple(_server(f"{path}[{number}]", entry) for number, entry in enumerate(value))
    if len({server.url for server in servers}) < len(servers):
        raise _invalid(path, "a list without repeated addresses", value)
    return servers


def _server(path: str, entry: Any) -> ServerSetting:
    """One server: its address, or a mapping with it and what it runs on."""
    given = {"url": entry} if isinstance(entry, str) else _section(path, entry, "url, device, dtype")
    for key, value in given.items():
        if key not in ("url", "device", "dtype"):
            raise UsageError(f"unknown key {path}.{brief(key)}; known here: url, device, dtype")
        if not isinstance(value, str) and (key == "url" or value is not None):
            raise _invalid(f"{path}.{key}", "text", value)
    if "url" not in given:
        raise _invalid(path, "an address, or a mapping with url", entry)
    device, dtype = given.get("device"), given.get("dtype")
    try:
        if device is not None and find_spec(device) is None:
            keys = ", ".join(spec.key for spec in search_devices(device))
            raise UsageError(f"{brief(device)} is not the name of one device: give one of {keys}")
        return ServerSetting(checked_url(given["url"]), device, dtype if dtype is None else dtype_name(dtype))
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


SCHEMA: Mapping[str, tuple[str, Callable[[str, Any], Any]]] = {
    "monitoring.flops_profile_freq": ("flops_profile_freq", _steps_or_never),
    "monitoring.performance_monitoring.measure_flops_frequency": ("flops_profile_freq", _steps_or_never),
    "monitor.freq.flops_profile_freq": ("flops_profile_freq", _steps_or_never),
    "monitoring.mfu_calculation_mode": ("mode", _one_of(AUTO, *MODES)),
    "monitoring.peak_tflops": ("peak_tflops", _tflops),
    "monitoring.measured_peak_tflops": ("measured_peak_tflops", _tflops),
    "monitoring.attention": ("attention", _one_of(*get_args(Attention))),
    "monitoring.detailed_log_freq": ("detailed_log_freq", _steps),
    "monitoring.dataset_metrics_freq": ("dataset_metrics_freq", _steps_or_never),
    "monitoring.save_freq": ("save_freq", _steps),
    "monitoring.phases": ("phases", _phases),
    "monitoring.performance_monitoring.smart_mode.initial_profiling": ("initial_profiling", _switch),
    "monitoring.performance_monitoring.smart_mode.calibration_enabled": ("calibration_enabled", _switch),
    "monitoring.performance_monitoring.smart_mode.recalibration_frequency": (
        "recalibration_frequency",
        _steps_or_never,
    ),
    "monitoring.performance_monitoring.hybrid_mode.hardware_counters_enabled": (
        "hardware_counters_enabled",
        _switch,
    ),
    "monitoring.performance_monitoring.hybrid_mode.fallback_to_profiler": ("fallback_to_profiler", _switch),
    "monitoring.performance_monitoring.hybrid_mode.audit": ("audit", _audit),
    "monitoring.census": ("census", _switch_or_unset),
    "monitoring.step_phases": ("step_phases", _switch),
    "monitoring.generation_servers": ("generation_servers", _servers),
    "monitoring.trackers": ("trackers", _names),
    "monitoring.prometheus_address": ("prometheus_address", _address),
    "monitoring.metric_names": ("metric_names", _one_of(*METRIC_NAMES)),
    "wandb.log_dataset_metrics": ("log_dataset_metrics", _switch),
    "wandb.reduced_logging": ("reduced_logging", _switch),
    "training.logging_steps": ("logging_steps", _steps_or_unset),
}
"""Each setting's key path in the user's configuration → field of `MonitorConfig`, and its check.
Several paths to one field are spellings of one setting."""

_SECTIONS = {path.rsplit(".", n)[0] for path in SCHEMA for n in range(1, path.count(".") + 1)}
_OWN = sorted(path for path in {*SCHEMA, *_SECTIONS} if path.startswith("monitor"))

# Names specific to truemfu: at the top level they were meant for the section `monitoring`.
_UNMISTAKABLE = ("flops_profile_freq", "mfu_calculation_mode", "peak_tflops", "performance_monitoring")


def _values(config: Any) -> dict[str, Any]:
    """The checked value of every field that the configuration names."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        hint = "; pass a namespace as vars(namespace)" if hasattr(config, "__dict__") else ""
        raise _invalid("the configuration", "a mapping of sections", config, hint)
    for key in _UNMISTAKABLE:
        if key in config:
            warn_once(f"{key!r} at the top level of the configuration is ignored: put it under 'monitoring'")
    found: dict[str, tuple[str, Any]] = {}
    for path, raw in _entries(config):
        name, check = SCHEMA[path]
        value = check(path, raw)
        first_path, first = found.setdefault(name, (path, value))
        if value != first:
            raise UsageError(
                f"{first_path} is {brief(first)} and {path} is {brief(value)}, but they are two spellings of "
                "one setting: keep one of them"
            )
    return {name: value for name, (_, value) in found.items()}


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every path of `SCHEMA` in the configuration, with its unchecked value."""
    if "monitoring" in config:
        yield from _own_entries("monitoring", config["monitoring"])
    if "monitor" in config and isinstance(config["monitor"], Mapping):
        yield from _own_entries("monitor", config["monitor"])
    for path in SCHEMA:
        section, _, key = path.partition(".")
        if section in ("wandb", "training") and section in config:
            content = config[section]
            if isinstance(content, Mapping) and key in content:
                yield path, content[key]


def _own_entries(path: str, section: Any) -> Iterator[tuple[str, Any]]:
    keys = [known.removeprefix(f"{path}.") for known in _OWN if known.rpartition(".")[0] == path]
    for key, value in _section(path, section, ", ".join(keys)).items():
        here = f"{path}.{key}"
        if key not in keys:
            shown = here if len(here) < 100 and here.isprintable() else f"{path}.{brief(key)}"
            raise UsageError(
                f"unknown key {shown} in the configuration{_did_you_mean(key, keys)}; "
                f"known here: {', '.join(keys)}"
            )
        if here in SCHEMA:
            yield here, value
        else:
            yield from _own_entries(here, value)


def _did_you_mean(key: Any, siblings: Sequence[str]) -> str:
    """A hint for a key in the wrong section, or misspelt in the right one."""
    for known in _OWN:
        if known.rpartition(".")[2] == key:
            return f" (did you mean {known!r}?)"
    return closest(str(key).casefold(), siblings)


def _section(path: str, value: Any, holds: str) -> Mapping[Any, Any]:
    """A section's content; an empty section is null in YAML."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid(path, f"a mapping ({holds})", value)
    return value


def _read(path: Path) -> Any:
    """The content of a YAML or JSON file."""
    try:
        content = read_given(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"cannot read the configuration file {brief(str(path))}: {reason}; "
            "give a mapping or the path of a YAML or JSON file"
        ) from None
    # JSON has its own reader: YAML's rejects tabs, and this needs no extra package.
    return _json(path, content) if path.suffix.lower() == ".json" else _yaml(path, content)


def _json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not valid JSON: line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not valid JSON: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits
        raise UsageError(f"{path} is not valid JSON: {one_line(error)}") from None


def _yaml(path: Path, content: bytes) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise UsageError(
            f"reading {path} needs PyYAML: pip install 'truemfu[yaml]', or pass the content as a mapping"
        ) from None
    try:
        loader = yaml.SafeLoader(content)
        # Custom tags (!include, !env) occur in the user's own sections: the tag's name is enough.
        loader.yaml_constructors = {**loader.yaml_constructors, None: lambda _, node: node.tag}
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UsageError(f"{path} is not valid YAML: {line}{shortened(problem)}") from None
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
