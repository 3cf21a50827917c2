"""The matrix and its settings: one frozen value, from profiling_config.json, overridden by flags.

    profiling_config.json ─► load_config ─► override(flags) ─► SweepConfig ─► cases.cases_of

Every value is checked here, before anything starts, so that a misspelt name is reported at once and not an
hour later. Only the tables of names are imported: a user's trainer or factory is located, not imported.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import field

from ..convention import Attention
from ..errors import UsageError, brief, closest
from ..plain_files import read_given
from ..records import MAX_FLOAT, CaseSettings, Count, CountOrZero, Positive
from ..text import shortened
from .content_hash import find_module, is_path
from .launchers.settings import ClusterSettings, check_settings
from .sizes import SIZES
from .trainers.base import DEFAULT_TRAINERS, NEEDS_OPACUS, OPTIMIZERS, TRAINERS

DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cuda", "cpu")
LAUNCHERS = ("local", "slurm", "ray")
PARALLEL = ("ddp", "fsdp2")
ATTENTION = get_args(Attention)


class SweepConfig(
    CaseSettings, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"models": "model_sizes"}
):
    """A matrix of experiments, how each is run, and its limits; the default matrix if nothing is set."""

    trainers: list[str] = field(default_factory=lambda: list(DEFAULT_TRAINERS))
    """Names of `TRAINERS`, or `package.module:Class`."""
    batch_sizes: list[Count] = field(default_factory=lambda: [4, 8])
    seq_lengths: list[Count] = field(default_factory=lambda: [512, 1024])
    models: list[str] = field(default_factory=lambda: ["1b"])
    """Names of `SIZES`, Hugging Face configurations, or `package.module:factory`; `model_sizes` in a file."""
    dtypes: list[str] = field(default_factory=lambda: ["auto"])
    """auto is bf16 on a GPU and fp32 on a CPU."""
    device: str = "auto"
    timeout_s: Positive = 1800.0
    """An experiment that takes longer is killed."""
    memory_limit_gib: Positive | None = None
    """Host memory of each experiment; None: no limit."""
    prune: bool = False
    """After an out-of-memory, skip larger batches and mark them `pruned`."""
    find_fit: bool = True
    """After an out-of-memory, try smaller batches and models until one fits."""
    gpus: list[CountOrZero] | None = None
    """Indices of visible GPUs; None: all of them."""
    launcher: str = "local"
    """One of `LAUNCHERS`: where experiments run."""
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    """What each experiment requests of a cluster."""
    gpus_per_experiment: list[Count] = field(default_factory=lambda: [1])
    """How many GPUs an experiment uses; a file may also give one number."""
    parallel: str | None = None
    """One of `PARALLEL`: how experiments on several GPUs share the training."""


TEST_CONFIG = SweepConfig(
    trainers=list(TRAINERS),
    batch_sizes=[2],
    seq_lengths=[32],
    models=["tiny"],
    warm_up_steps=1,
    min_steps=5,
    max_steps=20,
    max_timed_s=2.0,
    profiled_steps=1,
    timeout_s=300.0,
)
"""Every trainer once, in seconds: checks the environment."""

FIELDS = tuple(entry.encode_name for entry in msgspec.structs.fields(SweepConfig))
"""The keys of profiling_config.json."""

_AXES = ("trainers", "batch_sizes", "seq_lengths", "model_sizes", "dtypes", "gpus_per_experiment")


def load_config(path: Path | str) -> SweepConfig:
    """The configuration in a JSON file; a one-line UsageError that names the file if it is invalid."""
    path = Path(path)
    try:
        content = msgspec.json.decode(read_given(path).removeprefix(codecs.BOM_UTF8))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not valid JSON: {shortened(str(error))}") from error
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} must be a JSON object with keys such as trainers and batch_sizes")
    try:
        return parse(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def override(config: SweepConfig, **flags: Any) -> SweepConfig:
    """`config` with the values of the given flags; a flag of None was not given."""
    values = as_mapping(config)
    given = {name: value for name, value in flags.items() if value is not None}
    if "models" in given:
        given["model_sizes"] = given.pop("models")
    return parse({**values, **given})


def as_mapping(config: SweepConfig) -> dict[str, Any]:
    """The configuration as in profiling_config.json."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return values


def parse(values: Mapping[str, Any]) -> SweepConfig:
    """A checked configuration from the keys of profiling_config.json; `model_size` is accepted too."""
    values = dict(values)
    if "model_size" in values:
        if "model_sizes" in values:
            raise UsageError("model_size and model_sizes are two spellings of one key: give one of them")
        values["model_sizes"] = [values.pop("model_size")]
    if isinstance(values.get("gpus_per_experiment"), int):
        values["gpus_per_experiment"] = [values["gpus_per_experiment"]]
    for axis in _AXES:
        if isinstance(values.get(axis), (list, tuple)):
            with contextlib.suppress(TypeError):  # a nested list: `convert` reports it
                values[axis] = list(dict.fromkeys(values[axis]))
    try:
        config = msgspec.convert(values, SweepConfig)
    except msgspec.ValidationError as error:
        raise _invalid_value(values, error) from None
    _check(config)
    return config


def _invalid_value(values: Mapping[str, Any], error: msgspec.ValidationError) -> UsageError:
    """msgspec's "Expected `int` >= 1 - at `$.batch_sizes[0]`", with the value that was given."""
    expected, _, key_path = str(error).partition(" - at ")
    if unknown := re.search(r"unknown field `(.*)`$", expected, re.DOTALL):
        keys, parent = (ClusterSettings.__struct_fields__, "cluster.") if key_path else (FIELDS, "")
        hint = closest(unknown[1], keys)
        return UsageError(f"unknown key {brief(parent + unknown[1])}{hint}; known keys: {', '.join(keys)}")
    found = re.fullmatch(r"`\$\.(?:(cluster)\.)?(\w+)(?:\[(\d+|\.\.\.)\])?`", key_path)
    if found is None:
        return UsageError(shortened(str(error)))
    key, index = found[2], found[3]
    got = values[key] if found[1] is None else values["cluster"][key]
    key = key if found[1] is None else f"cluster.{key}"
    if index is not None and index.isdigit():
        got = got[int(index)]
    expected_type = re.sub(r", got .*", "", expected.removeprefix("Expected ")).replace("`", "")
    words = {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "array": "a list",
        "bool": "true or false",
        "object": "an object",
    }
    known = rf"\b({'|'.join(words)})\b"
    expected_type = re.sub(known, lambda match: words[match[0]], expected_type)
    expected_type = expected_type.replace(f"a number <= {MAX_FLOAT!r}", "a finite number")
    return UsageError(f"{key} must be {expected_type.replace('|', 'or')}; got {brief(got)}")


def _check(config: SweepConfig) -> None:
    """Checks beyond types: lists are not empty, names are known, limits are consistent."""
    values = as_mapping(config)
    for axis in _AXES:
        if not values[axis]:
            raise UsageError(f"{axis} is empty: nothing to run")
    if config.gpus == []:
        raise UsageError("gpus is empty: leave it out to use all visible GPUs")
    for trainer in config.trainers:
        _check_trainer(trainer)
    for model in config.models:
        _check_model(model)
    for dtype in config.dtypes:
        _check_one_of("dtype", dtype, DTYPES)
    _check_one_of("optimizer", config.optimizer, OPTIMIZERS)
    _check_one_of("device", config.device, DEVICES)
    _check_one_of("attention", config.attention, ATTENTION)
    _check_one_of("launcher", config.launcher, LAUNCHERS)
    check_settings(config.cluster)
    _check_parallel(config)
    if config.max_steps < config.min_steps:
        raise UsageError(f"max_steps ({config.max_steps}) must not be below min_steps ({config.min_steps})")


def _check_parallel(config: SweepConfig) -> None:
    most = max(config.gpus_per_experiment)
    if config.parallel is not None:
        _check_one_of("parallel", config.parallel, PARALLEL)
        if most == 1:
            raise UsageError(
                f"parallel is {config.parallel}, but gpus_per_experiment is 1: leave parallel out, or set "
                "gpus_per_experiment to 2 or more"
            )
    elif most > 1:
        raise UsageError(f"gpus_per_experiment is {most}: set parallel to {' or '.join(PARALLEL)}")


def _check_one_of(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}; got {brief(name)}{closest(name, known)}")


def _check_trainer(name: str) -> None:
    if ":" in name:
        _check_importable("trainer", name)
    elif name not in TRAINERS:
        raise UsageError(
            f"no trainer {brief(name)}{closest(name, TRAINERS)}: expected {', '.join(TRAINERS)} or "
            "package.module:Class"
        )
    if name in NEEDS_OPACUS and find_module("opacus") is None:
        raise UsageError(f'{name} needs Opacus, which is not installed: pip install "truemfu[dp]"')


def _check_model(name: str) -> None:
    if name in SIZES:
        return
    if is_path(name):
        path = Path(name)
        if path.is_dir() and not (path / "config.json").is_file():
            raise UsageError(f"the folder {brief(name)} does not contain a Hugging Face config.json")
    elif ":" in name:
        _check_importable("model", name)
    else:
        raise UsageError(
            f"no model {brief(name)}{closest(name, SIZES)}: expected {', '.join(SIZES)}, a "
            "Hugging Face config.json or its folder, or package.module:factory"
        )


def _check_importable(what: str, name: str) -> None:
    """Check the form and that the module exists; it is imported in the worker, not here."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise UsageError(f"{what} {brief(name)} does not have the form package.module:name")
    module = name.partition(":")[0]
    if find_module(module) is None:
        raise UsageError(
            f"{what} {brief(name)}: module {brief(module)} is not in the current folder or on the Python path"
        )
