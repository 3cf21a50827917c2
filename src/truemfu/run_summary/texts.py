"""A run in facts and figures: the same texts at the end of a run, in its report and beside other runs.

Unknown values are "unknown", with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ..records import UPPER_BOUND, GenerationServer, MonitorCost, RunHardware, RunRecord, RunSummary
from ..text import counted, duration, flop_rate, number, percent_text, share, size
from ..training_plan import per_million_tokens
from ..waterfall import BETWEEN_STEPS, NO_TENSOR, evaluations
from .phases import PASSES_LABEL, passes_share, phases_text, why_no_phases

UNKNOWN = "unknown"
NO_SUMMARY = "known only when a run has ended and written its summary"
NO_ROWS = "the log has no rows"
_NO_MODEL = "no model was counted"
NO_LOADER = "batches did not come from a torch DataLoader"
NO_RATE = "tensor pipe activity, the clock or the chip's FLOP per cycle is unknown"
_NO_TOKENS = "no batch had a known number of tokens"
_NOT_TIMED = "no step was timed"
_RATE_REMARK = "of one device"
_STEPS_SHOWN = 5
_SMALLEST_KIND = 0.01


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """What is known of a run."""

    record: RunRecord
    summary: RunSummary
    """The monitor's, or that of the log so far."""
    log_steps: tuple[int, int] | None = None
    """The first and the last step of its log, where that was read."""
    peak_flops_per_s: float | None = None
    """Of one device, by the last row that shows it."""
    peak_memory_bytes: float | None = None
    """The highest of its log."""

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a summary nor a row of a log."""
        return self.record.summary is None and self.log_steps is None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its label, and a remark: what it means here, or why it is not known."""

    label: str
    value: str
    remark: str = ""
    number: float | None = None
    """The value itself, where the text is of one number."""

    @property
    def is_known(self) -> bool:
        return self.value != UNKNOWN

    @property
    def text(self) -> str:
        """The value with its remark in brackets."""
        return f"{self.value} ({self.remark})" if self.remark else self.value


def facts(run: RunResults) -> list[tuple[str, str]]:
    """What was run, on what, and how it was measured."""
    record, cost = run.record, run.summary.monitor_cost
    versions = {"truemfu": record.truemfu_version, **record.versions, "Python": record.python}
    return [
        *_trained(record, run.summary),
        ("device", record.device or UNKNOWN),
        ("peak", peak_text(run)),
        ("FLOPs by", _method(run)),
        ("mode", record.mode or UNKNOWN),
        ("step times by", record.time_source or UNKNOWN),
        ("steps", _steps(run)),
        ("monitor, one-time cost", UNKNOWN if cost is None else _cost_once(cost)),
        *_totals(run.summary),
        ("ranks", UNKNOWN if record.world_size is None else f"{record.world_size:,}"),
        ("versions", ", ".join(f"{name} {text}" for name, text in versions.items() if text) or UNKNOWN),
        ("started", started(record) or UNKNOWN),
        *([("command", " ".join(record.command))] if record.command else []),
        *([("git commit", record.git_commit)] if record.git_commit else []),
    ]


def _totals(summary: RunSummary) -> list[tuple[str, str]]:
    """What was processed in all, where the summary has it."""
    totals = summary.totals
    if totals is None:
        return []
    known = [
        f"{amount:,.0f} {name}"
        for amount, name in ((totals.tokens, "tokens"), (totals.samples, "samples"))
        if amount is not None
    ]
    if totals.model_flops is not None:
        known.append(f"{totals.model_flops:.6g} model FLOPs{estimate_mark(summary)}")
    more = "" if totals.is_complete else " (as far as its ranks reported)"
    return [("total", ", ".join(known) + more)] if known else []


def _trained(record: RunRecord, summary: RunSummary) -> list[tuple[str, str]]:
    """The model and its batches, where the record has them; several models by the names in the rows."""
    model, lines = record.model, []
    if model is not None and model.parameters is not None:
        names = ", ".join(summary.median_mfu_by_model)
        text = f"{names} ({model.name})" if names and names != model.name else str(model.name)
        text += f", {model.parameters:,} parameters"
        if model.trainable_parameters not in (None, model.parameters):
            text += f", {model.trainable_parameters:,} of them trained"
        lines.append(("model", text))
    if record.batch_shapes:
        lines.append(("batches", "; ".join(map(shapes_text, record.batch_shapes))))
    return lines


def shapes_text(tensors: Mapping[str, Sequence[int]]) -> str:
    """The tensors of a batch: `input_ids 4×16, attention_mask 4×16`."""
    return ", ".join(f"{name} {'×'.join(map(str, shape)) or '()'}" for name, shape in tensors.items())


def figures(run: RunResults) -> list[Figure]:
    """The results of the run."""
    found = _figures(run)
    if run.is_empty:
        return [Figure(label=figure.label, value=UNKNOWN, remark=NO_ROWS) for figure in found]
    return found


def _figures(run: RunResults) -> list[Figure]:
    summary, why_not, scope = run.summary, why_no_utilization(run), run.record.scope or ""
    executed_by = f"by {summary.hfu_method}{_measured_in(summary)}" if summary.hfu_method else _basis(summary)
    why_no_hfu = why_not if summary.median_mfu is None else "the executed FLOPs are not known"
    rate, samples = summary.median_tokens_per_second, summary.median_samples_per_second
    waited_of = "of rank 0's time" if summary.ranks else "of the time"
    why_no_rate = why_not if summary.method is None else "no step has both a time and a count"
    between = evaluations(summary.forwards_between_steps) or "of the time"
    no_forward = "no forward pass was seen"
    return [
        _figure("step, median", duration, summary.median_step_time_s, summary.medians_over, _NOT_TIMED),
        _figure(
            "MFU, median", lambda _: mfu_text(summary), summary.median_mfu, _mfu_remark(summary), why_not
        ),
        *[
            Figure(label=f"MFU of {name}, median", value=share(mfu), remark="its part of the MFU", number=mfu)
            for name, mfu in summary.median_mfu_by_model.items()
            if mfu is not None
        ],
        *_own_mfus(summary),
        *_estimate(summary),
        _figure(
            "model FLOP/s, median",
            lambda tflops: flop_rate(1e12 * tflops) + estimate_mark(summary),
            summary.median_tflops_per_gpu,
            _rate_remark(summary),
            why_no_rate,
        ),
        _figure(
            "HFU, median",
            lambda _: hfu_text(summary),
            summary.median_hfu,
            f"the executed work, {executed_by}",
            why_no_hfu,
        ),
        _figure("tokens/s", number, rate, scope, _NO_TOKENS),
        _figure("samples/s", number, samples, scope, "no batch was seen"),
        _figure("padding", share, summary.padding_lost, "of all tokens", "no attention mask was seen"),
        _figure("waiting for data", share, summary.data_wait_share, waited_of, NO_LOADER),
        _figure(BETWEEN_STEPS, share, summary.between_steps_share, between, no_forward),
        *_phases(run),
        *map(_server, summary.generation_servers),
        *[
            Figure(
                label="pauses" if kind == "other" else kind,
                value=duration(paused.seconds),
                remark=f"{_times(paused.times)}{share(paused.share)} of the run, not counted in step times",
            )
            for kind, paused in summary.left_out.items()
            if paused.share is not None
        ],
        _cost(summary.monitor_cost),
    ]


def _phases(run: RunResults) -> list[Figure]:
    """The phases of a step; empty for a run that was not divided into phases."""
    phases_s, why_not = run.summary.phases_s, why_no_phases(run.summary)
    passes = passes_share(phases_s)
    if passes is None and why_not is None:
        return []
    return [_figure(PASSES_LABEL, share, passes, f"of a step: {phases_text(phases_s)}", why_not or "")]


SERVER_LABEL = "generation server"


def _server(server: GenerationServer) -> Figure:
    """The utilisation of a generation server, or what else is known of it."""
    shares = {"MFU": server.mfu, "MBU": server.mbu}
    rates = [f"{name} {share(of)}" for name, of in shares.items() if of is not None]
    remarks = [server.method, server.device if rates else None, server.url]
    if server.time is not None and server.prompt_tokens is not None and server.generated_tokens is not None:
        tokens = f"{server.generated_tokens:,} tokens generated, prompts of {server.prompt_tokens:,} tokens"
        remarks.insert(0, f"{tokens} in {duration(server.time)}")
    if server.mfu_unknown is not None:
        remarks.append(f"MFU unknown: {server.mfu_unknown}" if rates else server.mfu_unknown)
    return Figure(
        label=f"{SERVER_LABEL} {server.number}",
        value=", ".join(rates) or UNKNOWN,
        remark="; ".join(filter(None, remarks)),
        number=server.mfu,
    )


def memory(run: RunResults) -> Figure:
    """The highest peak memory of any rank."""
    found = [run.peak_memory_bytes, *(rank.memory_bytes for rank in run.summary.ranks)]
    highest = max((each for each in found if each is not None), default=None)
    of = "of the process" if run.record.device == "cpu" else "allocated on a GPU"
    return _figure("memory, peak", size, highest, of, NO_ROWS if run.is_empty else "not in the log")


def cost(run: RunResults, price_per_gpu_hour: float) -> Figure:
    """What a million tokens cost at the median rate, evaluations and checkpoints not included."""
    record, label, gpus = run.record, "a million tokens", run.record.world_size
    if record.device in (None, "cpu"):
        return Figure(label=label, value=UNKNOWN, remark="the run used no GPU, or its device is unknown")
    if gpus is None:
        return Figure(label=label, value=UNKNOWN, remark="the number of ranks is not known")
    if gpus > 1 and "alone" in (record.scope or ""):
        return Figure(label=label, value=UNKNOWN, remark="tokens/s is only known for one rank of the job")
    price = f"${price_per_gpu_hour:,.4g} an hour for each of {gpus:,} GPUs, at the median tokens/s"
    return _figure(
        label,
        lambda value: f"${value:,.4g}",
        per_million_tokens(price_per_gpu_hour, run.summary.median_tokens_per_second, gpus=gpus),
        price if gpus > 1 else f"${price_per_gpu_hour:,.4g} an hour, at the median tokens/s",
        _NO_TOKENS,
    )


def without_tensor_work(summary: RunSummary) -> str | None:
    """The kernels behind "busy without tensor work", by the census of a step; None without one."""
    if not summary.without_tensor:
        return None
    fall = summary.waterfall
    parts = [] if fall is None else [part for part in fall.parts if part.key == NO_TENSOR]
    points = parts[0].share if parts else None
    found = [
        f"{name} {percent_text(of)}" if points is None else f"{name} {100 * points * of:.1f}"
        for name, of in summary.without_tensor.items()
        if of >= _SMALLEST_KIND
    ]
    whole = "the time without matrix work" if points is None else f"{100 * points:.1f} points of the peak"
    return f"{', '.join(found)} (of {whole}; kernels of one recorded step)"


def hardware_figures(hardware: RunHardware, scope: str | None) -> list[Figure]:
    """Figures of the counters; the remark compares them with the count or the driver.

    `scope` is what the energy covers; everything else is for this GPU.
    """
    not_read = "the counters did not report it"
    no_ratio = "the counted or the executed work is not known"
    counted = ""
    if hardware.executed_hfu is not None and hardware.executed_over_counted:
        counted = f"by the count {share(hardware.executed_hfu / hardware.executed_over_counted)}"
    is_corrected = hardware.executed_over_activity is not None
    kind = f"corrected by an audit: {hardware.executed_over_activity:.4f}" if is_corrected else UPPER_BOUND

    def remark(*texts: str) -> str:
        return "; ".join(text for text in (kind, *texts) if text)

    return [
        _figure("executed", flop_rate, hardware.executed_flops_per_s, remark(_windows(hardware)), NO_RATE),
        _figure(
            "HFU by the counters", share, hardware.executed_hfu, remark(counted), f"{NO_RATE}, or the peak"
        ),
        _figure("executed over counted", _ratio, hardware.executed_over_counted, remark(), no_ratio),
        _figure(
            "executed over expected",
            _ratio,
            hardware.executed_over_expected,
            remark("expected: the count with tile padding and without masked work that kernels skip"),
            no_ratio,
        ),
        _figure("SM clock", _clock, hardware.clock_hz, _clock_remark(hardware), not_read),
        _figure("tensor pipe active", share, hardware.tensor_active, "of the cycles", not_read),
        _figure("SMs active", share, hardware.sm_active, "of the cycles", not_read),
        _figure("memory active", share, hardware.dram_active, "of the cycles", not_read),
        _figure("power", lambda watt: f"{watt:,.0f} W", hardware.power_w, "mean of this GPU", not_read),
        _figure("energy of a step", _energy, hardware.energy_j_per_step, scope, not_read),
        _figure(
            "energy of a million tokens",
            _energy,
            hardware.energy_j_per_million_tokens,
            scope,
            not_read if hardware.energy_j_per_step is None else _NO_TOKENS,
        ),
    ]


def waterfall_basis(hardware: RunHardware) -> str:
    """What the parts of a waterfall are of, as opposed to the medians of the run."""
    return (
        f"the parts are means over what the counters measured ({', '.join(_covered(hardware))}); MFU is the "
        "median of all steps, so the model's share differs from it"
    )


def why_no_waterfall(run: RunResults) -> str:
    """The line in place of a waterfall: why there is none, and how to get one."""
    record, needs = run.record, "an NVIDIA GPU with GPM counters (Hopper or newer)"
    if run.summary.hardware is not None:
        return "Not known: GPU counters were read, but the device's peak or the model's FLOPs are unknown."
    if record.mode == "hybrid":
        since = "were read" if record.summary is not None else "have been read so far"
        return f"Not known: no GPU counters {since}; they need {needs} and permission to read them."
    mode = "" if record.mode is None else f" (mode {record.mode})"
    return (
        f"Not known: no GPU counters were read{mode}. `truemfu run` reads them on {needs}; a TrainingMonitor "
        "needs `mfu_calculation_mode: hybrid`."
    )


def started(record: RunRecord) -> str | None:
    """When the run began."""
    if record.started_at is None:
        return None
    try:
        began = datetime.fromisoformat(record.started_at).astimezone(timezone.utc)
    except ValueError:
        return record.started_at
    return f"{began:%Y-%m-%d %H:%M} UTC"


def _figure(
    label: str, text: Callable[[float], str], value: float | None, remark: str | None, why_not: str
) -> Figure:
    if value is None:
        return Figure(label=label, value=UNKNOWN, remark=why_not)
    return Figure(label=label, value=text(value), remark=remark or "", number=value)


def peak_text(run: RunResults) -> str:
    """The peak with its source."""
    fall, source = run.summary.waterfall, run.summary.peak_source
    peak = None if fall is None else fall.peak_flops_per_s
    peak = run.peak_flops_per_s if peak is None else peak
    source = "set by the user" if source == "override" else source
    if peak is None:
        return source or UNKNOWN
    return flop_rate(peak) + (f" ({source})" if source else "")


def _method(run: RunResults) -> str:
    if run.summary.method is None:
        return f"{UNKNOWN}: {NO_ROWS if run.is_empty else _NO_MODEL}"
    words = [methods_text(run.summary), "a multiply-add is 2 FLOPs"]
    attention = {"full": "all pairs", "causal": "the pairs the mask allows"}
    if pairs := attention.get(str(run.record.convention.get("attention"))):
        words.append(f"attention counts {pairs}")
    return "; ".join(words)


_COUNTED = "by the count"
_NOT_COUNTED = {"estimate": "estimated from its structure", "given by the caller": "as given by the caller"}


PARTLY_ESTIMATED = " (partly estimated)"


def mfu_text(summary: RunSummary) -> str:
    """The median MFU, marked where the FLOPs of some of its steps are estimated."""
    return share(summary.median_mfu) + estimate_mark(summary)


def hfu_text(summary: RunSummary) -> str:
    """The median HFU; marked likewise, unless it was measured."""
    return share(summary.median_hfu) + ("" if summary.hfu_method else estimate_mark(summary))


def estimate_mark(summary: RunSummary) -> str:
    """A mark behind a figure that is not wholly a count; empty for a count."""
    if "estimate" not in _methods(summary):
        return ""
    return " (estimated)" if len(_methods(summary)) == 1 else PARTLY_ESTIMATED


def _methods(summary: RunSummary) -> dict[str, int]:
    """How the FLOPs of steps were found, and of how many."""
    return summary.methods or ({} if summary.method is None else {summary.method: summary.steps or 0})


def methods_text(summary: RunSummary) -> str:
    """How the FLOPs of steps were found; of several methods with the steps of each. Empty if unknown."""
    methods = _methods(summary)
    if len(methods) < 2:
        return "".join(methods)
    return ", ".join(f"{method} ({counted(steps, 'step')})" for method, steps in methods.items())


def _basis(summary: RunSummary) -> str:
    """How the FLOPs of a step were found, in words."""
    methods = _methods(summary)
    if len(methods) < 2:
        return "".join(_NOT_COUNTED.get(method, _COUNTED) for method in methods) or _COUNTED
    words = [
        f"{text} in {methods[method]:,} of {sum(methods.values()):,} steps"
        for method, text in _NOT_COUNTED.items()
        if method in methods
    ]
    return ", ".join([*words, f"else {_COUNTED}"]) if words else _COUNTED


def _rate_remark(summary: RunSummary) -> str:
    """What the model FLOP/s cover, and their basis if that is not a count alone."""
    basis = _basis(summary)
    return _RATE_REMARK if basis == _COUNTED else f"{_RATE_REMARK}; the model's work, {basis}"


def _measured_in(summary: RunSummary) -> str:
    """In how many of the steps a measured HFU is known, if not in all."""
    of, steps = summary.median_steps.get("hfu"), summary.median_steps.get("step_time_s")
    return "" if of is None or steps is None or of >= steps else f", measured in {of:,} of {steps:,} steps"


def _mfu_remark(summary: RunSummary) -> str:
    """What an MFU is based on, and for how many steps it is unknown."""
    remark = f"the model's work, {_basis(summary)}"
    unknown = sum(summary.mfu_unknown.values())
    return f"{remark}; unknown for {unknown:,} of {summary.steps or 0:,} steps" if unknown else remark


def _own_mfus(summary: RunSummary) -> list[Figure]:
    """In runs with work without gradients: MFU of whole steps, and of their training alone."""
    whole, training = summary.median_mfu_whole_step, summary.median_mfu_training
    if whole is None:
        return []
    of_whole = "all counted work, also without gradients, over all time of a step"
    of_training = "training's work over a step's time without data wait and blocks without gradients"
    return [
        _figure("MFU, whole step", share, whole, of_whole, UNKNOWN),
        _figure("MFU of training", share, training, of_training, "the phases of steps are not known"),
    ]


def _estimate(summary: RunSummary) -> list[Figure]:
    """The estimate for steps whose FLOPs were not counted; empty without such steps."""
    if summary.median_mfu_estimate is None:
        return []
    steps = sum(summary.mfu_unknown.values())
    remark = f"not a count: from the model's structure, for {steps:,} steps whose work is unknown"
    return [Figure(label="MFU, estimated", value=share(summary.median_mfu_estimate), remark=remark)]


def _steps(run: RunResults) -> str:
    summary = run.summary
    words = [UNKNOWN if summary.steps is None else f"{summary.steps:,} logged"]
    if summary.skipped_steps:
        words.append(f"{summary.skipped_steps:,} not logged")
    if summary.warmup_steps:
        words.append(f"{summary.warmup_steps:,} of them warm-up")
    if summary.observed_steps:
        words.append(f"{summary.observed_steps:,} observed to count FLOPs, not in the medians")
    if run.log_steps is not None:
        first, last = run.log_steps
        words.append(f"the log covers {first:,} to {last:,}")
    return "; ".join(words)


def why_no_utilization(run: RunResults) -> str:
    """The reason for an unknown MFU."""
    summary = run.summary
    if summary.method is None:
        reasons = summary.mfu_unknown
        return max(reasons, key=lambda reason: reasons[reason]) if reasons else _NO_MODEL
    if summary.peak_source is None and run.peak_flops_per_s is None:
        return "no peak is known for this device: set TRUEMFU_PEAK_TFLOPS to its TFLOP/s"
    return "no step has both a time and a count"


def _times(number: int | None) -> str:
    return "" if number is None else "once, " if number == 1 else f"{number:,} times, "


def _cost(cost: MonitorCost | None) -> Figure:
    label = "monitor's own cost"
    if cost is None:
        return Figure(label=label, value=UNKNOWN, remark=NO_SUMMARY)
    us = cost.training_thread_us_per_step
    remark = "of a step" if us is None else f"of a step: {us:,.0f} µs on the training thread"
    return _figure(label, share, cost.share_of_step, remark, _NOT_TIMED)


def _cost_once(cost: MonitorCost) -> str:
    """The cost of the monitor outside of usual steps."""
    listed = [str(step) for step in cost.observed_steps]
    where = ", ".join(listed[:_STEPS_SHOWN]) + (" …" if len(listed) > _STEPS_SHOWN else "")
    steps = counted(cost.observed or len(listed), "step") + (f" ({where})" if where else "")
    parts = (
        (cost.first_step_s, "start-up"),
        (cost.checks_s, "setup and checks"),
        (cost.observing_s, f"observing {steps}"),
        (cost.profiling_s, "profiling"),
        (cost.census_s, "recording a step for `truemfu explain`"),
    )
    return ", ".join(f"{what} {duration(seconds)}" for seconds, what in parts if seconds) or "nothing"


def _windows(hardware: RunHardware) -> str:
    words = _covered(hardware)
    return f"over {', '.join(words)}" if words else ""


def _covered(hardware: RunHardware) -> list[str]:
    """How many windows, steps and seconds the counters measured, where that is known."""
    amounts = ((hardware.windows, "window"), (hardware.steps, "step"))
    words = [counted(amount, what) for amount, what in amounts if amount is not None]
    return words if hardware.seconds is None else [*words, f"{hardware.seconds:,.0f} s"]


def _clock_remark(hardware: RunHardware) -> str:
    if hardware.clock_source == "driver" or hardware.clock_hz == hardware.reported_clock_hz:
        return (
            "the driver reports the clock it requested; in steady tensor work on an H200 the actual clock "
            "is 4 to 11 % lower"
        )
    words = [f"by {hardware.clock_source}"] if hardware.clock_source else []
    if hardware.reported_clock_hz is not None:
        words.append(f"the driver reports {_clock(hardware.reported_clock_hz)}")
    return "; ".join(words) or "the log does not say how the clock was measured"


def _clock(hertz: float) -> str:
    return f"{hertz / 1e6:,.0f} MHz"


def _energy(joules: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((1e6, "MJ"), (1e3, "kJ")) if joules >= size), (1, "J"))
    return f"{joules / size:,.4g} {unit}"


def _ratio(value: float) -> str:
    return f"{value:.3f}"
