"""How far from the truth is each FLOP counter? All cases, all tools, one run on one machine.

Why: a utilisation figure is no better than its numerator, and counters disagree by factors. This prints
what each tool answers for one training step (forward and backward) of each public case, divided by the
exact analytic truth of `benchmarks/truth.py`. A tool that knows the forward pass alone is held to the
truth's forward pass, and marked †.

Prints: a Markdown table of ratios, case by tool (`exact` where the integers are equal); the reasons behind
each `error`; last, one line of JSON with, per tool, how many cases are exact and within 1 %, how many
failed, the worst ratio, and all versions and the date.

Call, in an environment with the peers of `benchmarks/requirements-peers.txt`:

    PYTHONPATH=src python benchmarks/flops_accuracy.py [--output benchmarks/results/flops_accuracy.txt]
        [--tools truemfu,thop] [--cases llama-sdpa,vit] [--samples 2] [--length 64]

A peer that is not there is shown as not installed. All of it takes four minutes on two cores.

Each tool is asked in its kindest way. Elementwise work, normalisation and pooling are switched off or left
out wherever a tool lets one: in models this narrow they are percents, in real ones nothing. Multiply-adds
(fvcore, ptflops, thop, and the "MACs" of DeepSpeed and calflops) are taken twice. DeepSpeed and calflops
assume that backward is twice forward, so three times that is their answer. `torch.profiler` sees a step
after a first one, so that compilation is not in it. Tokens, for the rules of thumb, are the elements of
`input_ids`; where there are none, labels (Whisper), patches (ViT) or images (ResNet).

Every question is put in a process of its own, forked after the imports: some of these tools patch torch and
leave it so when they fail.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import logging
import math
import multiprocessing
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import CASES, Batch, Case, case

TIME_LIMIT_S = 120
NOT_INSTALLED = "not installed"


class Bound(nn.Module):
    """A model that takes the tensors of one batch in order, as peers without keyword arguments want it."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.model = model
        self.names = [name for name, value in batch.items() if isinstance(value, Tensor)]
        self.constants = {name: value for name, value in batch.items() if name not in self.names}

    def forward(self, *values: Tensor, **named: Tensor) -> Any:
        return self.model(**dict(zip(self.names, values, strict=False)), **named, **self.constants)


def _bound(model: nn.Module, batch: Batch) -> tuple[Bound, list[Tensor]]:
    bound = Bound(model, batch)
    return bound, [batch[name] for name in bound.names]


def _step(model: nn.Module, batch: Batch) -> None:
    model(**batch).loss.backward()


def ask_truemfu(model: nn.Module, batch: Batch) -> dict[str, int]:
    from truemfu import count_flops

    count = count_flops(model, batch)
    return {
        "flops": count.model_flops,
        "forward": count.forward,
        "backward": count.backward,
        "recompute": count.recompute,
    }


def ask_deepspeed(model: nn.Module, batch: Batch) -> float:
    from deepspeed.profiling.flops_profiler import get_model_profile

    bound, values = _bound(model, batch)
    _, macs, _ = get_model_profile(bound, args=values, as_string=False, print_profile=False)
    return 3 * 2 * macs


def ask_fvcore(model: nn.Module, batch: Batch) -> float:
    from fvcore.nn import FlopCountAnalysis

    class Loss(Bound):
        def forward(self, *values: Tensor, **named: Tensor) -> Any:
            return super().forward(*values, **named).loss  # tracing allows tensors alone

    bound = Loss(model, batch)
    analysis = FlopCountAnalysis(bound, tuple(batch[name] for name in bound.names))
    counts = analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).by_operator()
    return 2 * sum(macs for name, macs in counts.items() if not name.endswith("_norm"))


def ask_calflops(model: nn.Module, batch: Batch) -> float:
    from calflops import calculate_flops

    bound, values = _bound(model, batch)
    _, macs, _ = calculate_flops(
        bound, args=values, include_backPropagation=True, output_as_string=False, print_results=False
    )
    return 2 * macs


def ask_ptflops(model: nn.Module, batch: Batch) -> float:
    from ptflops import get_model_complexity_info

    bound, values = _bound(model, batch)
    macs, _ = get_model_complexity_info(
        bound,
        (1,),
        input_constructor=lambda _: dict(zip(bound.names, values, strict=True)),
        as_strings=False,
        print_per_layer_stat=False,
        backend="aten",
    )
    if macs is None:
        raise RuntimeError("ptflops returned None")
    return 2 * macs


def ask_thop(model: nn.Module, batch: Batch) -> float:
    from thop import profile
    from thop.vision.basic_hooks import zero_ops

    bound, values = _bound(model, batch)
    nothing = {nn.LayerNorm: zero_ops, nn.RMSNorm: zero_ops, nn.modules.batchnorm._NormBase: zero_ops}
    macs, _ = profile(bound, inputs=tuple(values), custom_ops=nothing, verbose=False)
    return 2 * macs


def ask_lightning(model: nn.Module, batch: Batch) -> float:
    from lightning.fabric.utilities.throughput import measure_flops

    return measure_flops(model, lambda: model(**batch), lambda output: output.loss)


def ask_flop_counter_mode(model: nn.Module, batch: Batch) -> float:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        _step(model, batch)
    return counter.get_total_flops()


def ask_torch_profiler(model: nn.Module, batch: Batch) -> float:
    from torch.profiler import ProfilerActivity, profile

    _step(model, batch)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as profiler:
        _step(model, batch)
    elementwise = ("aten::mul", "aten::add")
    return sum(event.flops for event in profiler.key_averages() if event.key not in elementwise)


def _tokens(model: nn.Module, batch: Batch) -> int:
    if "input_ids" in batch:
        return int(batch["input_ids"].numel())
    if "input_features" in batch:
        return int(batch["labels"].numel())
    images, _, height, width = batch["pixel_values"].shape
    patch = getattr(model.config, "patch_size", None)
    return int(images * (height // patch) * (width // patch) if patch else images)


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def ask_6n(model: nn.Module, batch: Batch) -> float:
    return 6 * _parameters(model) * _tokens(model, batch)


def ask_2_5n(model: nn.Module, batch: Batch) -> float:
    return 3 * 2.5 * _parameters(model) * _tokens(model, batch)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One counter: how it is asked, and what it can answer."""

    name: str
    ask: Callable[[nn.Module, Batch], Any]
    module: str = "torch"
    """What must be importable."""
    distribution: str | None = None
    """What pip calls it, for its version."""
    forward_only: bool = False

    @property
    def heading(self) -> str:
        return self.name + ("†" if self.forward_only else "")


TOOLS: tuple[Tool, ...] = (
    Tool(name="truemfu", ask=ask_truemfu, module="truemfu", distribution="truemfu"),
    Tool(
        name="DeepSpeed",
        ask=ask_deepspeed,
        module="deepspeed.profiling.flops_profiler",
        distribution="deepspeed",
    ),
    Tool(name="fvcore", ask=ask_fvcore, module="fvcore.nn", distribution="fvcore", forward_only=True),
    Tool(name="calflops", ask=ask_calflops, module="calflops", distribution="calflops"),
    Tool(name="ptflops", ask=ask_ptflops, module="ptflops", distribution="ptflops", forward_only=True),
    Tool(name="thop", ask=ask_thop, module="thop", distribution="ultralytics-thop", forward_only=True),
    Tool(
        name="Lightning",
        ask=ask_lightning,
        module="lightning.fabric.utilities.throughput",
        distribution="lightning",
    ),
    Tool(name="FlopCounterMode", ask=ask_flop_counter_mode),
    Tool(name="torch.profiler", ask=ask_torch_profiler),
    Tool(name="6N", ask=ask_6n),
    Tool(name="2.5N×3", ask=ask_2_5n),
)


def _ratio_text(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio >= 0.01 else f"{ratio:.1g}"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one tool said about one case."""

    ratio: float | None = None
    exact: bool = False
    error: str | None = None
    parts_exact: bool | None = None
    """Whether forward, backward and recompute are each right, where a tool tells them apart."""

    @property
    def text(self) -> str:
        if self.exact:
            return "exact"
        return "error" if self.ratio is None else _ratio_text(self.ratio)

    @property
    def within_1_percent(self) -> bool:
        return self.ratio is not None and abs(self.ratio - 1) <= 0.01

    @property
    def distance(self) -> float:
        """How far the ratio is from 1, by factors: 0.5 and 2 are equally wrong."""
        if self.ratio is None:
            return -1.0
        return abs(math.log(self.ratio)) if self.ratio > 0 else math.inf


def _in_child(work: Callable[[], Any], time_limit_s: float) -> Any:
    """What `work` returns in a forked process; RuntimeError when it fails, dies or takes too long."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(work, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(time_limit_s):
            raise RuntimeError(f"no answer in {time_limit_s:.0f} s")
        reply = receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"process ended with code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
    if reply[0] == "error":
        raise RuntimeError(reply[1])
    return reply[1]


def _report(work: Callable[[], Any], sender: Connection) -> None:
    """Runs `work` with its chatter silenced, and sends back its value or its error."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            try:
                reply = ("value", work())
            except BaseException as error:  # a peer may raise anything: it is the finding, not our failure
                reason = " ".join(str(error).split("\n")[:2]).strip()
                reply = ("error", f"{type(error).__name__}: {reason}"[:200])
    sender.send(reply)


def _judge(tool: Tool, c: Case, shape: Mapping[str, int]) -> Answer:
    """One tool, one case: build, ask, divide."""
    model, batch = c.build(), c.batch(**shape)
    truth = c.truth(model, batch)
    said = tool.ask(model, batch)
    parts = said if isinstance(said, dict) else {"flops": said}
    expected = truth.forward if tool.forward_only else truth.model_flops
    parts_exact = None
    if "forward" in parts:
        parts_exact = all(
            parts[name] == getattr(truth, name) for name in ("forward", "backward", "recompute")
        )
    return Answer(
        ratio=float(parts["flops"]) / expected, exact=parts["flops"] == expected, parts_exact=parts_exact
    )


def _judge_all(tool: Tool, cases: list[Case], shape: Mapping[str, int]) -> dict[str, Answer]:
    """All cases of one tool; runs in a process of its own, so that the tool's imports stay there."""
    try:
        importlib.import_module(tool.module)
    except ImportError as error:
        missing = (error.name or "").split(".")[0] == tool.module.split(".")[0]
        reason = NOT_INSTALLED if missing else f"ImportError: {error}"
        return {c.name: Answer(error=reason) for c in cases}
    answers = {}
    for c in cases:
        try:
            answers[c.name] = _in_child(lambda c=c: _judge(tool, c, shape), TIME_LIMIT_S)  # type: ignore[misc]
        except RuntimeError as error:
            answers[c.name] = Answer(error=str(error))
    return answers


def _table(answers: Mapping[str, Mapping[str, Answer]], tools: list[Tool], cases: list[Case]) -> list[str]:
    """The Markdown table, its totals, and a footnote per reason."""
    reasons: list[str] = []

    def cell(answer: Answer) -> str:
        if answer.error is None:
            return answer.text
        if answer.error == NOT_INSTALLED:
            return NOT_INSTALLED
        if answer.error not in reasons:
            reasons.append(answer.error)
        return f"error [{reasons.index(answer.error) + 1}]"

    rows = [[c.name, *(cell(answers[t.name][c.name]) for t in tools)] for c in cases]
    totals = [_summary(answers[t.name]) for t in tools]
    for label, key in (
        ("**exact**", "exact"),
        ("**within 1 %**", "within_1_percent"),
        ("**failed**", "failed"),
    ):
        rows.append([label, *(f"**{total[key]}**" for total in totals)])
    rows.append(
        [
            "**worst**",
            *("–" if t["worst_ratio"] is None else f"**{_ratio_text(t['worst_ratio'])}**" for t in totals),
        ]
    )
    header = ["case", *(t.heading for t in tools)]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    notes = ["", "† forward pass alone, against the truth's forward pass."]
    notes += [f"[{i}] {reason}" for i, reason in enumerate(reasons, 1)]
    return [line(header), rule, *map(line, rows), *notes]


def _summary(answers: Mapping[str, Answer]) -> dict[str, Any]:
    """The counts of one tool over all cases."""
    worst_case, worst = max(answers.items(), key=lambda item: item[1].distance)
    summary: dict[str, Any] = {
        "exact": sum(a.exact for a in answers.values()),
        "within_1_percent": sum(a.within_1_percent for a in answers.values()),
        "failed": sum(a.error is not None for a in answers.values()),
        "worst_ratio": None if worst.ratio is None else round(worst.ratio, 4),
        "worst_case": worst_case if worst.distance > 0 else None,
    }
    parts = [a.parts_exact for a in answers.values() if a.parts_exact is not None]
    if parts:
        summary["forward_backward_recompute_exact"] = sum(parts)
    return summary


def _versions(tools: list[Tool]) -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for tool in tools:
        if tool.distribution is not None:
            try:
                versions[tool.distribution] = importlib.metadata.version(tool.distribution)
            except importlib.metadata.PackageNotFoundError:
                versions[tool.distribution] = "from source" if tool.name == "truemfu" else NOT_INSTALLED
    return versions


def _chosen(names: str | None, known: Mapping[str, Any], what: str) -> list[Any]:
    if names is None:
        return list(known.values())
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description="accuracy of FLOP counters against an analytic truth")
    parser.add_argument("--tools", help="comma-separated; default: all")
    parser.add_argument("--cases", help="comma-separated; default: all")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, help="also write everything printed to this file")
    options = parser.parse_args()
    tools = _chosen(options.tools, {t.name: t for t in TOOLS}, "tool")
    cases = _chosen(options.cases, {c.name: case(c.name) for c in CASES}, "case")
    shape = {"samples": options.samples, "length": options.length}
    # Children are forked: threads of the parent would not survive in them.
    torch.set_num_threads(1)

    started = time.monotonic()
    answers = {}
    for tool in tools:
        print(f"asking {tool.name} …", file=sys.stderr, flush=True)
        answers[tool.name] = _in_child(
            lambda tool=tool: _judge_all(tool, cases, shape), TIME_LIMIT_S * (len(cases) + 1)
        )
    result = {
        "date": datetime.date.today().isoformat(),
        "cases": len(cases),
        **shape,
        "wall_s": round(time.monotonic() - started),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": _versions(tools),
        "tools": {
            t.name: {"scope": "forward" if t.forward_only else "forward + backward"}
            | _summary(answers[t.name])
            for t in tools
        },
    }
    lines = [*_table(answers, tools, cases), "", json.dumps(result, ensure_ascii=False)]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
