"""A run as plain data, and the closing summary: a table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..records import UPPER_BOUND
from ..text import printable
from ..torch_private.table import missing as missed
from ..waterfall import between_steps_notes, evaluations
from .config import MonitorConfig
from .totals import Totals

_SMALLEST_SHARE_SHOWN = 0.005
_STEPS_SHOWN = 5
_TENSORS_SHOWN = 4
_RANKS_SHOWN = 16
_STRAGGLERS_SHOWN = 5


@dataclass(frozen=True)
class RunFigures:
    """The figures of a run; only `info` before its first step."""

    info: Mapping[str, Any]
    logged: int = 0
    totals: Totals = field(default_factory=Totals)
    own_time_s: float = 0.0
    """On the training thread, without the times below."""
    own_check_s: float = 0.0
    background_s: float = 0.0
    observing_s: float = 0.0
    observed: int = 0
    observed_steps: Sequence[int] = ()
    profiling_s: float = 0.0
    hardware: Mapping[str, Any] | None = None
    job: Mapping[str, Any] | None = None
    """On rank 0 of a job: what holds for all ranks, in place of this rank's."""
    notes: Sequence[str] = ()
    left_out_last: Mapping[str, float] = field(default_factory=dict)
    """Seconds of pauses after the last step, by what ran in them."""
    held_up_steps: int = 0
    """Lost because the monitor fell behind."""
    failed_steps: int = 0
    """Lost because their metrics could not be computed."""
    stranded_steps: int = 0
    """Lost because the run ended before they were processed."""


def info_of(
    config: MonitorConfig,
    *,
    device: str | None = None,
    time_source: str | None = None,
    world_size: int = 1,
    rank: int = 0,
    model: Mapping[str, Any] | None = None,
    batch_shapes: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The description of a run; None where a value is unknown before the first step."""
    return {
        "mode": config.mode,
        "convention": {"attention": config.attention},
        "device": device,
        "time_source": time_source,
        "world_size": world_size,
        "rank": rank,
        "scope": "one device" if world_size == 1 else f"rank {rank} of {world_size} alone",
        "model": model,
        "batch_shapes": list(batch_shapes),
    }


def summary_of(figures: RunFigures, *, lost: Sequence[str], warnings: Sequence[str]) -> dict[str, Any]:
    """The run as plain data; None where a value is unknown. `lost` is what did not reach a tracker."""
    run = figures.totals.as_dict(figures.left_out_last)
    own_s = figures.own_time_s / figures.logged if figures.logged else None
    step_s = run["median_step_time_s"]
    lost_steps = {
        "the monitor fell behind": figures.held_up_steps,
        "their metrics could not be computed": figures.failed_steps,
        "the run ended before they were processed": figures.stranded_steps,
    }
    return {
        **run,
        **figures.info,
        **(figures.job or {}),
        "monitor_cost": {
            "training_thread_us_per_step": None if own_s is None else own_s * 1e6,
            "share_of_step": None if own_s is None or not step_s else own_s / step_s,
            "checks_s": figures.own_check_s,
            "background_s": figures.background_s,
            "observing_s": figures.observing_s,
            "observed": figures.observed,
            "observed_steps": list(figures.observed_steps),
            "profiling_s": figures.profiling_s,
        },
        "hardware": figures.hardware,
        "notes": [
            *between_steps_notes(run["between_steps_share"], run["forwards_between_steps"]),
            *figures.notes,
        ],
        "lost": [*[f"{steps:,} steps: {why}" for why, steps in lost_steps.items() if steps], *lost],
        "warnings": list(dict.fromkeys((*warnings, *missed.values()))),
    }


def lines_of(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary as labels and texts, unknown values included."""
    return [
        *_model(summary),
        ("steps", _steps(summary)),
        ("step, median", _seconds(summary["median_step_time_s"])),
        ("MFU, median", _share(summary["median_mfu"], _why_no_mfu(summary))),
        *[(f"  {name}", _share(mfu, "")) for name, mfu in summary["median_mfu_by_model"].items()],
        *_estimate(summary),
        ("HFU, median", _hfu(summary)),
        ("peak", summary["peak_source"] or "unknown"),
        ("FLOPs by", _method(summary)),
        ("tokens/s", _rate(summary["median_tokens_per_second"], summary["scope"])),
        ("samples/s", _rate(summary["median_samples_per_second"], summary["scope"])),
        *_total(summary),
        ("padding lost", _share(summary["padding_lost"], "no mask known")),
        (
            "waiting for data",
            _share(summary["data_wait_share"], "no loader seen: see monitor.data")
            + (" (rank 0)" if summary.get("ranks") and summary["data_wait_share"] is not None else ""),
        ),
        ("other, between steps", _between(summary)),
        *[
            (
                f"left out: {kind}",
                f"{_seconds(paused['seconds'])}, {_times(paused['times'])}, "
                f"{_share(paused['share'], '')} of the run",
            )
            for kind, paused in summary["left_out"].items()
        ],
        *_hardware(summary.get("hardware"), summary["scope"]),
        *_ranks(summary.get("ranks", ())),
        *_stragglers(summary.get("stragglers", ())),
        ("monitor's own cost", _cost(summary)),
        *[("note", text) for text in summary["notes"]],
        *[("lost", text) for text in summary["lost"]],
        *[("warning", text) for text in summary["warnings"]],
    ]


def show(summary: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the summary: with rich in a terminal, as plain lines in a file or a pipe."""
    stream = stream or sys.stderr
    lines = [(printable(label), printable(text)) for label, text in lines_of(summary)]
    if stream.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(title="truemfu", title_justify="left", show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in lines:
            table.add_row(Text(label), Text(text, style="yellow" if label in ("warning", "lost") else ""))
        Console(file=stream).print(table)
        return
    width = max(len(label) for label, _ in lines)
    stream.write("truemfu\n" + "".join(f"  {label:{width}}  {text}\n" for label, text in lines))
    stream.flush()


def _model(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The model and the shape of its batches; empty if no model was seen."""
    model, shapes = summary.get("model"), summary.get("batch_shapes")
    lines = []
    if model is not None:
        text = f"{model['name']}, {model['parameters']:,} parameters"
        if model["trainable_parameters"] != model["parameters"]:
            text += f", {model['trainable_parameters']:,} of them trained"
        lines.append(("model", text))
    if shapes:
        named = [f"{name} {'×'.join(map(str, shape)) or '()'}" for name, shape in shapes[-1].items()]
        more = "; the latest of several shapes" if len(shapes) > 1 else ""
        lines.append(("batch", ", ".join(named[:_TENSORS_SHOWN]) + more))
    return lines


def _steps(summary: Mapping[str, Any]) -> str:
    text = f"{summary['steps']:,} logged"
    if summary["skipped_steps"]:
        text += f", {summary['skipped_steps']:,} between them not logged"
    if summary["warmup_steps"]:
        text += f"; {summary['warmup_steps']:,} warm-up"
    return text + f"; medians over {summary['medians_over']}"


def _total(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was processed in all; empty if nothing is known."""
    totals = summary["totals"]
    known = [
        f"{totals[name]:,} {label}"
        for name, label in (("tokens", "tokens"), ("samples", "samples"))
        if totals[name] is not None
    ]
    if totals["model_flops"] is not None:
        known.append(f"{totals['model_flops']:.6g} model FLOPs")
    if not known:
        return []
    more = "" if totals["is_complete"] else " (as far as reported)"
    return [("in all", ", ".join(known) + more)]


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A line for each rank of a small job."""
    if len(ranks) > _RANKS_SHOWN:
        return []
    return [(f"rank {rank['rank']}", _rank(rank)) for rank in ranks]


def _stragglers(stragglers: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """A line for each rank that held up the job, up to a few."""
    return [("late rank", straggler["text"]) for straggler in stragglers[:_STRAGGLERS_SHOWN]]


def _rank(rank: Mapping[str, Any]) -> str:
    if "host" not in rank:
        return str(rank["status"])
    texts = [
        rank["device"] if rank["device"].startswith(rank["host"]) else f"{rank['host']} {rank['device']}"
    ]
    texts.append(f"{rank['steps']:,} steps of {_seconds(rank['step_time_s'])}")
    if rank["data_wait_s"] is not None:
        texts.append(f"{_seconds(rank['data_wait_s'])} of that waiting for data")
    if rank["collective_s"] is not None:
        texts.append(f"{_seconds(rank['collective_s'])} in collectives")
    if rank["clock_mhz"] is not None:
        texts.append(f"{rank['clock_mhz']:,.0f} MHz")
    if rank["memory_bytes"] is not None:
        texts.append(f"{rank['memory_bytes'] / 2**30:.3g} GiB")
    if rank["status"] != "ended":
        texts.append(f"{rank['status']}, last seen {rank['last_seen']}")
    return ", ".join(texts)


def _method(summary: Mapping[str, Any]) -> str:
    if summary["method"] is None:
        return "nothing: no model was counted"
    attention = "all pairs" if summary["convention"]["attention"] == "full" else "pairs the mask allows"
    return f"{summary['method']}; a multiply-add is 2, attention counts {attention}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _share(share: float | None, why_not: str) -> str:
    if share is None:
        return f"unknown ({why_not})"
    return f"{share:.1%}" if share >= 0.01 or share == 0 else f"{100 * share:.2g} %"


def _estimate(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The estimate where FLOPs were not counted, and for how many steps, by reason."""
    lines = []
    if summary["median_mfu_estimate"] is not None:
        text = _share(summary["median_mfu_estimate"], "")
        lines.append(("MFU, estimated", f"{text} (from the model's structure; not a count)"))
    if summary["method"] is not None:
        lines += [
            ("MFU unknown", f"{steps:,} step{'s' * (steps > 1)}: {reason}")
            for reason, steps in summary["mfu_unknown"].items()
        ]
    return lines


def _between(summary: Mapping[str, Any]) -> str:
    seen = evaluations(summary["forwards_between_steps"])
    return _share(summary["between_steps_share"], "no forward pass seen") + (f" ({seen})" if seen else "")


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _hardware(hardware: Mapping[str, Any] | None, scope: str) -> list[tuple[str, str]]:
    """The counters' figures; empty without counters."""
    if hardware is None:
        return []
    lines = [("executed, by counters", _executed(hardware))]
    if hardware["energy_j_per_step"] is not None:
        text = f"{hardware['power_w']:.0f} W this GPU; {hardware['energy_j_per_step']:.3g} J a step"
        if hardware["energy_j_per_million_tokens"] is not None:
            text += f", {hardware['energy_j_per_million_tokens'] / 1e3:.3g} kJ a million tokens"
        lines.append(("energy", f"{text} ({scope})"))
    fall = hardware["waterfall"]
    if fall is not None:
        parts = [part for part in fall["parts"] if abs(part["share"]) >= _SMALLEST_SHARE_SHOWN]
        lines += [("where the peak went", f"{100 * part['share']:5.1f} %  {part['name']}") for part in parts]
        lines += [("note", text) for text in fall["notes"]]
    return lines + [("advice", text) for text in hardware["advice"]]


def _executed(hardware: Mapping[str, Any]) -> str:
    rate, ratio = hardware["executed_flops_per_s"], hardware["executed_over_expected"]
    if rate is None:
        return "unknown (the GPU's FLOP per cycle are not known, or some work is not on the tensor pipe)"
    text = f"{rate / 1e12:.1f} TFLOP/s"
    if hardware["executed_over_activity"] is None:
        text += f" ({UPPER_BOUND})"
    if hardware["executed_hfu"] is not None:
        text += f", HFU {hardware['executed_hfu']:.1%}"
    if ratio is not None:
        text += f", {ratio:.3f} of what the count expects"
    if hardware["clock_hz"] is not None:
        text += f"; clock {hardware['clock_hz'] / 1e6:,.0f} MHz by {hardware['clock_source']}"
    return text


def _hfu(summary: Mapping[str, Any]) -> str:
    why_not = _why_no_mfu(summary) if summary["median_mfu"] is None else "executed FLOPs were not measured"
    text = _share(summary["median_hfu"], why_not)
    method = summary.get("hfu_method")
    return text if method is None or summary["median_hfu"] is None else f"{text} by {method}"


def _why_no_mfu(summary: Mapping[str, Any]) -> str:
    if summary["method"] is None:
        reasons = summary["mfu_unknown"]
        return max(reasons, key=lambda reason: reasons[reason]) if reasons else "no FLOPs known"
    if summary["peak_source"] is None:
        return "no peak known: set monitoring.peak_tflops or TRUEMFU_PEAK_TFLOPS"
    return "no step was measured"


def _rate(rate: float | None, scope: str) -> str:
    return "unknown" if rate is None else f"{rate:,.0f} ({scope})"


def _cost(summary: Mapping[str, Any]) -> str:
    cost = summary["monitor_cost"]
    parts = []
    if cost["training_thread_us_per_step"] is not None:
        text = f"{cost['training_thread_us_per_step']:.0f} µs a step on the training thread"
        profiling_s = cost["profiling_s"]
        parts.append(f"{text} (with profiling, {profiling_s:.1f} s in all)" if profiling_s else text)
    if cost["share_of_step"] is not None:
        parts.append(f"{cost['share_of_step']:.3%} of a step")
    if cost["checks_s"]:
        parts.append(f"{1e3 * cost['checks_s']:.0f} ms in all for setup and checks")
    if cost["observed"]:
        parts.append(_observing(cost))
    return ", ".join(parts) or "nothing measured"


def _observing(cost: Mapping[str, Any]) -> str:
    """How much longer observed steps took, and which they are; no median includes them."""
    steps = [str(step) for step in cost["observed_steps"]]
    where = ", ".join(steps[:_STEPS_SHOWN]) + (" …" if len(steps) > _STEPS_SHOWN else "")
    number = cost["observed"]
    return (
        f"{number:,} step{'s' * (number > 1)} observed to count FLOPs ({where}), which took "
        f"{cost['observing_s']:.2f} s longer in all"
    )
