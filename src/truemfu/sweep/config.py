"""The matrix and its settings: one frozen value, from profiling_config.json and the flags over it.

    profiling_config.json ─► load_config ─► override(flags) ─► SweepConfig ─► cases.cases_of

Every value is checked here, before anything starts: a misspelt name in a matrix of an hour's work is found at
once. Nothing is imported for it but the tables of names: a user's trainer or factory is only looked up.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta, field

from ..convention import Attention
from ..errors import UsageError, brief, closest
from ..plain_files import read_given
from ..records import SweepCase
from ..text import shortened
from .content_hash import find_module, is_path
from .sizes import SIZES
from .trainers.base import NEEDS_OPACUS, OPTIMIZERS, TRAINERS

DTYPES = ("auto", "fp32", "bf16")
DEVICES = ("auto", "cuda", "cpu")
ATTENTION = get_args(Attention)

_MOST = 2**63 - 1  # what JSON and torch hold
_Count = Annotated[int, Meta(ge=1, le=_MOST)]
_CountOrNone = Annotated[int, Meta(ge=0, le=_MOST)]
_Positive = Annotated[float, Meta(gt=0)]


_OF_A_CASE: dict[str, Any] = {entry.name: entry.default for entry in msgspec.structs.fields(SweepCase)}
"""What an experiment takes where nothing is said."""


class SweepConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"models": "model_sizes"}
):
    """A matrix of experiments, how each is run, and what bounds it; by itself the default one."""

    trainers: list[str] = field(default_factory=lambda: list(TRAINERS))
    """Names of `TRAINERS`, or `package.module:Class`."""
    batch_sizes: list[_Count] = field(default_factory=lambda: [4, 8])
    seq_lengths: list[_Count] = field(default_factory=lambda: [512, 1024])
    models: list[str] = field(default_factory=lambda: ["1b"])
    """Names of `SIZES`, Hugging Face configurations, or `package.module:factory`; `model_sizes` in a file."""
    dtypes: list[str] = field(default_factory=lambda: ["auto"])
    """auto is bf16 on a GPU and fp32 on a CPU."""
    optimizer: str = _OF_A_CASE["optimizer"]
    learning_rate: _Positive = _OF_A_CASE["learning_rate"]
    compile: bool = _OF_A_CASE["compile"]
    device: str = "auto"
    attention: str = _OF_A_CASE["attention"]
    """The convention of the FLOP counts."""
    max_grad_norm: _Positive = _OF_A_CASE["max_grad_norm"]
    noise_multiplier: Annotated[float, Meta(ge=0)] = _OF_A_CASE["noise_multiplier"]
    seed: _CountOrNone = _OF_A_CASE["seed"]
    warm_up_steps: _CountOrNone = _OF_A_CASE["warm_up_steps"]
    min_steps: _Count = _OF_A_CASE["min_steps"]
    max_steps: _Count = _OF_A_CASE["max_steps"]
    max_timed_s: _Positive = _OF_A_CASE["max_timed_s"]
    profiled_steps: _CountOrNone = _OF_A_CASE["profiled_steps"]
    timeout_s: _Positive = 1800.0
    """An experiment that takes longer is ended."""
    memory_limit_gib: _Positive | None = None
    """Of the host, for each experiment; None: no limit of our own."""
    prune: bool = False
    """Leave out larger batches after an out-of-memory, and mark them."""
    find_fit: bool = True
    """After an out-of-memory try smaller batches and models until one fits."""
    gpus: list[_CountOrNone] | None = None
    """Numbers among the visible GPUs; None: all of them."""


TEST_CONFIG = SweepConfig(
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

_AXES = ("trainers", "batch_sizes", "seq_lengths", "model_sizes", "dtypes")
_ENDLESS = (
    "learning_rate",
    "max_grad_norm",
    "noise_multiplier",
    "max_timed_s",
    "timeout_s",
    "memory_limit_gib",
)


def load_config(path: Path | str) -> SweepConfig:
    """The configuration in a JSON file; one line that names the file for whatever is wrong with it."""
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
        raise UsageError(f"{path} must hold a JSON object with keys such as trainers and batch_sizes")
    try:
        return parse(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def override(config: SweepConfig, **flags: Any) -> SweepConfig:
    """`config` with the values of the flags that were given: None is a flag that was not."""
    values = as_mapping(config)
    given = {name: value for name, value in flags.items() if value is not None}
    if "models" in given:
        given["model_sizes"] = given.pop("models")
    return parse({**values, **given})


def as_mapping(config: SweepConfig) -> dict[str, Any]:
    """The configuration as profiling_config.json holds it."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    return values


def parse(values: Mapping[str, Any]) -> SweepConfig:
    """A checked configuration from the keys of profiling_config.json, `model_size` understood, too."""
    values = dict(values)
    if "model_size" in values:
        if "model_sizes" in values:
            raise UsageError("model_size and model_sizes are two spellings of one key: give one of them")
        values["model_sizes"] = [values.pop("model_size")]
    for key in values:
        if key not in FIELDS:
            raise UsageError(
                f"unknown key {brief(key)}{closest(key, FIELDS)}; known keys: {', '.join(FIELDS)}"
            )
    for axis in _AXES:
        if isinstance(values.get(axis), (list, tuple)):
            with contextlib.suppress(TypeError):  # a list in the list: `convert` says what is wrong with it
                values[axis] = list(dict.fromkeys(values[axis]))
    try:
        config = msgspec.convert(values, SweepConfig)
    except msgspec.ValidationError as error:
        raise _unfit(values, error) from None
    _check(config)
    return config


def _unfit(values: Mapping[str, Any], error: msgspec.ValidationError) -> UsageError:
    """msgspec's "Expected `int` >= 1 - at `$.batch_sizes[0]`", with the value that came."""
    expected, _, place = str(error).partition(" - at ")
    found = re.fullmatch(r"`\$\.(\w+)(?:\[(\d+|\.\.\.)\])?`", place)
    if found is None:
        return UsageError(shortened(str(error)))
    key, index = found[1], found[2]
    got = values[key]
    if index is not None and index.isdigit():
        got = got[int(index)]
    wanted = re.sub(r", got .*", "", expected.removeprefix("Expected ")).replace("`", "")
    words = {
        "int": "a whole number",
        "float": "a number",
        "str": "text",
        "array": "a list",
        "bool": "true or false",
    }
    wanted = re.sub(r"\b(int|float|str|array|bool)\b", lambda match: words[match[0]], wanted)
    return UsageError(f"{key} must be {wanted.replace('|', 'or')}; got {brief(got)}")


def _check(config: SweepConfig) -> None:
    """What the types do not say: lists are not empty, names are known, limits are in order."""
    for axis, found in zip(
        _AXES,
        (config.trainers, config.batch_sizes, config.seq_lengths, config.models, config.dtypes),
        strict=True,
    ):
        if not found:
            raise UsageError(f"{axis} is empty: there would be nothing to run")
    if config.gpus == []:
        raise UsageError("gpus is empty: leave it out for all visible GPUs")
    for trainer in config.trainers:
        _check_trainer(trainer)
    for model in config.models:
        _check_model(model)
    for dtype in config.dtypes:
        _one_of("dtype", dtype, DTYPES)
    _one_of("optimizer", config.optimizer, OPTIMIZERS)
    _one_of("device", config.device, DEVICES)
    _one_of("attention", config.attention, ATTENTION)
    for name in _ENDLESS:
        if math.isinf(getattr(config, name) or 0.0):
            raise UsageError(f"{name} must be a finite number; got {getattr(config, name)}")
    if config.max_steps < config.min_steps:
        raise UsageError(f"max_steps ({config.max_steps}) must not be below min_steps ({config.min_steps})")


def _one_of(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UsageError(f"{what} must be one of {', '.join(known)}; got {brief(name)}{closest(name, known)}")


def _check_trainer(name: str) -> None:
    if ":" in name:
        _check_importable("trainer", name)
    elif name not in TRAINERS:
        raise UsageError(
            f"no trainer {brief(name)}{_closest_of(name, TRAINERS)}: expected {', '.join(TRAINERS)} or "
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
            raise UsageError(f"the folder {brief(name)} holds no config.json of a Hugging Face model")
    elif ":" in name:
        _check_importable("model", name)
    else:
        raise UsageError(
            f"no model {brief(name)}{_closest_of(name, SIZES)}: expected {', '.join(SIZES)}, a Hugging Face "
            "config.json or its folder, or package.module:factory"
        )


def _closest_of(name: str, known: Iterable[str]) -> str:
    """Like `closest`, without regard to case."""
    lower = {entry.lower(): entry for entry in known}
    match = difflib.get_close_matches(name[:80].lower(), list(lower), n=1)
    return f" (did you mean {lower[match[0]]!r}?)" if match else ""


def _check_importable(what: str, name: str) -> None:
    """The form, and whether there is such a module; it is imported in the worker, not here."""
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*", name):
        raise UsageError(f"{what} {brief(name)} is not of the form package.module:name")
    module = name.partition(":")[0]
    if find_module(module) is None:
        raise UsageError(
            f"{what} {brief(name)}: there is no module {brief(module)} here or on the Python path"
        )
