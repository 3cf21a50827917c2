"""Reads what other tools logged: lines of text, tables (CSV, JSON lines, JSON), HF Trainer's state.

A new tool is a row of `_LINES` or some keys of `_KEYS`. The last step with a figure to check is taken; of a
table, the last value of every key. An MFU whose unit a key does not tell is not read.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RecordError, UsageError
from ..plain_files import read_given
from .logged import Figure, Logged

_PART = "part:"  # a field that starts so is the time of the part named behind it
_EACH = "tokens_of_each"  # tokens of a step on one device
_HALF_DIGIT = 0.0005
_INTEGERS = ("batch", "seq", "gpus")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ARGUMENTS = {"seq_length": "seq", "world_size": "gpus", "global_batch_size": "batch"}
_ARGUMENT = re.compile(rf"^\s*({'|'.join(_ARGUMENTS)}) \.{{3,}} (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class _Line:
    """How a tool prints a step: a pattern that only its lines have, and field → (pattern, scale)."""

    tool: str
    known_by: str
    fields: Mapping[str, tuple[str, float]]


_LINES = (
    _Line("torchtitan", r"\btps: +[\d,]+ +tflops: ", {
        "tokens_per_s_per_device": (r"\btps: +([\d,]+)", 1), "tflops": (r"\btflops: +([\d,.]+)", 1),
        "mfu": (r"\bmfu: +([\d.]+)%", 0.01),
    }),
    _Line("Megatron-LM", r"elapsed time per iteration \(ms\): .*throughput per GPU", {
        "step_time_s": (r"elapsed time per iteration \(ms\): +([\d.]+)", 1e-3),
        "tflops": (r"throughput per GPU \(TFLOP/s/GPU\): +([\d.]+)", 1),
        "batch": (r"global batch size: +(\d+)", 1),
    }),
    _Line("Megatron-Bridge", r"Step Time ?: ?[\d.]+ ?s GPU utilization:", {
        "step_time_s": (r"Step Time ?: ?([\d.]+) ?s", 1),
        "tflops": (r"GPU utilization: ?([\d.]+) ?(?:MODEL_)?TFLOP/s/GPU", 1),
    }),
    _Line("NeMo", r"train_step_timing in s.*TFLOPS_per_GPU|TFLOPS_per_GPU.*train_step_timing in s", {
        "step_time_s": (r"train_step_timing in s[=:] ?([\d.]+)", 1),
        "tflops": (r"TFLOPS_per_GPU[=:] ?([\d.]+)", 1),
        "batch": (r"global_batch_size[=:] ?(\d+)", 1),
    }),
    _Line("verl", r"step:\d+ - .*perf/mfu/actor:", {
        "mfu": (r"perf/mfu/actor:([\d.]+)", 1), "step_time_s": (r"timing_s/step:([\d.]+)", 1),
        "part:timing_s/update_actor": (r"timing_s/update_actor:([\d.]+)", 1),
        "tokens": (r"perf/total_num_tokens:([\d.]+)", 1), _EACH: (r"global_seqlen/mean:([\d.]+)", 1),
    }),
    _Line("nanochat", r"dt: [\d.]+ms \| tok/sec: [\d,]+ \| .*mfu: ", {
        "step_time_s": (r"dt: ([\d.]+)ms", 1e-3), "tokens_per_s": (r"tok/sec: ([\d,]+)", 1),
        "mfu": (r"mfu: ([\d.]+)", 0.01),
    }),
    _Line("nanoGPT", r"iter \d+: loss [\d.]+, time [\d.]+ms, mfu \d", {
        "step_time_s": (r"time ([\d.]+)ms", 1e-3), "mfu": (r"mfu ([\d.]+)%", 0.01),
    }),
    _Line("prime-rl", r"tokens_per_second: [\d.]+, mfu: ", {
        "tokens_per_s": (r"tokens_per_second: ([\d.]+)", 1), "mfu": (r"mfu: ([\d.]+)", 0.01),
    }),
    _Line("MaxText", r"completed step: \d+, seconds: ", {
        "step_time_s": (r"seconds: ([\d.]+)", 1), "tflops": (r"TFLOP/s/device: ([\d.]+)", 1),
        "tokens_per_s_per_device": (r"Tokens/s/device: ([\d.]+)", 1),
    }),
)  # fmt: skip

_KEYS: Mapping[str, tuple[str, str, float]] = {
    "mfu(%)": ("torchtitan", "mfu", 0.01), "throughput(tps)": ("torchtitan", "tokens_per_s_per_device", 1),
    "tflops": ("torchtitan", "tflops", 1), "time_metrics/end_to_end(s)": ("torchtitan", "step_time_s", 1),
    "perf/mfu/actor": ("verl", "mfu", 1), "timing_s/step": ("verl", "step_time_s", 1),
    "timing_s/update_actor": ("verl", "part:timing_s/update_actor", 1),
    "perf/total_num_tokens": ("verl", "tokens", 1), "global_seqlen/mean": ("verl", _EACH, 1),
    "TFLOPS_per_GPU": ("NeMo", "tflops", 1), "train_step_timing in s": ("NeMo", "step_time_s", 1),
    "global_batch_size": ("NeMo", "batch", 1),
    "throughput": ("Megatron-LM", "tflops", 1), "iteration-time": ("Megatron-LM", "step_time_s", 1),
    "batch-size": ("Megatron-LM", "batch", 1),
    "train/mfu": ("nanochat", "mfu", 0.01), "train/tok_per_sec": ("nanochat", "tokens_per_s", 1),
    "train/dt": ("nanochat", "step_time_s", 1),
    "throughput/device/mfu": ("Composer", "mfu", 1),
    "throughput/device/flops_per_sec": ("Composer", "tflops", 1e-12),
    "throughput/device/tokens_per_sec": ("Composer", "tokens_per_s_per_device", 1),
    "train/device/mfu": ("Lightning", "mfu", 1),
    "train/device/flops_per_sec": ("Lightning", "tflops", 1e-12),
    "train/device/items_per_sec": ("Lightning", "tokens_per_s_per_device", 1),
    "perf/mfu_wall_clock": ("TRL", "mfu", 0.01), "perf/mfu_percent": ("truemfu", "mfu", 0.01),
    "perf/tokens_per_second": ("truemfu", "tokens_per_s", 1), "perf/step_time": ("truemfu", "step_time_s", 1),
}  # fmt: skip


def read_log(path: Path, gpus: int | None) -> Logged:
    """The step to check in a log. `gpus` tells where a log has sums over all devices."""
    try:
        text = _COLOURS.sub("", read_given(path).decode("utf-8", errors="replace"))
    except OSError as error:
        raise RecordError(f"cannot read {str(path)!r}: {error.strerror}") from error
    found = _from_json(text, path, gpus) or _from_lines(text, gpus) or _from_csv(text, gpus)
    if found is None:
        tools = sorted({line.tool for line in _LINES} | {tool for tool, _, _ in _KEYS.values()})
        raise RecordError(
            f"no step with an MFU or TFLOP/s in {path.name!r}; known are logs of {', '.join(tools)}, and"
            " trainer_state.json of transformers. Give the figures as options: --mfu or --tflops"
        )
    return found


def _logged(source: str, texts: Mapping[str, tuple[str, float]], gpus: int | None) -> Logged | None:
    """Field → (text, scale) as `Logged`; None without a figure to check. Only numbers are taken."""
    figures: dict[str, Figure] = {}
    for name, (text, scale) in texts.items():
        try:
            figures[name] = Figure.of(text, scale)
        except UsageError:
            continue
    if not figures.keys() & {"mfu", "tflops"}:
        return None
    parts = {name.removeprefix(_PART): figures.pop(name) for name in [*figures] if name.startswith(_PART)}
    known: dict[str, Any] = {name: int(figures.pop(name).value) for name in _INTEGERS if name in figures}
    each, tokens = figures.pop(_EACH, None), figures.pop("tokens", None)
    known |= figures
    known["tokens"] = tokens.value if tokens else each.value * (gpus or 1) if each else None
    return Logged(source=source, part_times_s=parts, **known)


def _from_lines(text: str, gpus: int | None) -> Logged | None:
    for tool in _LINES:
        lines = [line for line in text.splitlines() if re.search(tool.known_by, line)]
        for line in reversed(lines):
            texts = {}
            for name, (pattern, scale) in tool.fields.items():
                if match := re.search(pattern, line):
                    texts[name] = (match[1], scale)
            for argument, value in _ARGUMENT.findall(text):
                texts.setdefault(_ARGUMENTS[argument], (value, 1))
            if found := re.search(r"tokens per iteration will be: ([\d,]+)", text):
                texts.setdefault("tokens", (found[1], 1))
            if logged := _logged(f"{tool.tool}, its last step", texts, gpus):
                return logged
    return None


def _from_rows(rows: Iterable[Mapping[str, Any]], gpus: int | None) -> Logged | None:
    last: dict[str, str] = {}
    for row in rows:
        last.update({key: str(value) for key, value in row.items() if value not in (None, "")})
    texts = {field: (last[key], scale) for key, (_, field, scale) in _KEYS.items() if key in last}
    tools = {tool for key, (tool, field, _) in _KEYS.items() if key in last and field in ("mfu", "tflops")}
    return _logged(f"{', '.join(sorted(tools))}, its last step", texts, gpus)


def _from_csv(text: str, gpus: int | None) -> Logged | None:
    try:
        return _from_rows(csv.DictReader(io.StringIO(text)), gpus)
    except (csv.Error, AttributeError):
        return None


def _from_json(text: str, path: Path, gpus: int | None) -> Logged | None:
    """A JSON document (rows, or HF Trainer's state), or one row a line."""
    load: Callable[[str], Any] = lambda part: json.loads(part, parse_float=str, parse_int=str)  # noqa: E731
    try:
        content = load(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.startswith("{")]
        try:
            content = [load(line) for line in lines]
        except ValueError:
            return None
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        return _from_trainer_state(content, path, gpus)
    rows = content if isinstance(content, list) else [content]
    return _from_rows([row for row in rows if isinstance(row, dict)], gpus)


def _from_trainer_state(state: Mapping[str, Any], path: Path, gpus: int | None) -> Logged:
    """`total_flos` over `train_runtime`, both of all devices; the batch from two rates."""
    rows = [row for row in state["log_history"] if isinstance(row, dict) and "train_runtime" in row]
    if not rows:
        raise RecordError(
            f"{path.name!r} has no train_runtime: it is a checkpoint's; the one at the end of a training is"
            " written by trainer.save_state()"
        )
    try:
        last = {key: float(value) for key, value in rows[-1].items()}
        rate = last["total_flos"] / last["train_runtime"] / (gpus or 1)
        step_time_s = last["train_runtime"] / last["step"]
        steps_per_s = last["train_steps_per_second"]
        samples = last["train_samples_per_second"] / steps_per_s
        is_exact = samples * _HALF_DIGIT < steps_per_s / 2  # both have three decimals
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise RecordError(f"{path.name!r} is not a complete state of a Trainer: {error}") from error
    return Logged(
        source="transformers' Trainer, the whole run",
        tflops=Figure(value=rate / 1e12),
        step_time_s=Figure(value=step_time_s),
        batch=round(samples) if is_exact else None,
        gpus=gpus,
        notes=("TFLOP/s is total_flos ÷ train_runtime, which has start-up and evaluation in it",),
    )
