"""Where the peak went: a window of training split into parts that add up to the datasheet's peak.

Everything is a share of peak × time. From the top, each line goes down to the share left after it:

    left after it        part               equation        based on
    1                                                       the datasheet's peak P, at its clock f₀
    g = f / f₀           clock              1 − g           mean SM clock f; negative: the chip ran faster
    g·b                  idle               g·(1 − b)       share b of the cycles in which the GPU was busy
    g·t                  no_tensor          g·(b − t)       share t of the cycles with an active tensor pipe
    e = E / P            below_rate         g·t − e         executed FLOP/s E, by counters or Nsight Compute
    τ·h − s              other_executed     e − (τ·h − s)   counted executed FLOP/s H: h = H / P
    h − s                tile_padding       (τ − 1)·h       tile factor τ: a model (`hardware.tiles`)
    h                    masked_attention   −s              counted attention S that masks skip: s = S / P
    m = M / P            recomputation      h − m           counted model FLOP/s M: m is the MFU
    m·p                  padding_tokens     m·(1 − p)       share p of tokens that are not padding
                         useful             m·p             what is left: the model's useful FLOPs

Because every line starts where the one above ended, the sum is always 1. The order is a choice: a share of
the cycles is relative to the peak at the actual clock, so the clock comes first.

- Within `idle`, "of which": waiting for data, other time between steps (evaluation, checkpoints), gaps
  between launches, each limited to the idle time still left, because time that the GPU's work
  covers costs nothing.
- Within `no_tensor`: `unfilled`, cycles of SMs that were empty while a kernel ran elsewhere.
- p is by tokens; attention's padding grows with their squares, which is ignored.
- A negative `other_executed` is counted work that was not executed: causal kernels under the full convention,
  if s is not given.

An unknown value is not guessed. Its part is merged into the next one, and the part's key and name show that:
`idle_or_no_tensor`. More than three merged parts are `unexplained`.

f₀, b and t only apply if P is the datasheet's peak for the pipe that t measures: with a custom peak, or for
plain fp32, leave them out.

This module only imports the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from typing import Any

LARGE = 0.05
"""A part above this share of the peak gets a sentence of advice."""

USEFUL = "useful"
NO_TENSOR = "no_tensor"
COMMUNICATION = "no_tensor_communication"
"""It shows when peak was lost, not why, so it is never the limiter."""
_OF_THE_PIPE = ("clock", "idle", "no_tensor")
_OVERSHOOT = 0.01
_MERGED_KEYS = 3
_OR, _UNEXPLAINED = "_or_", "unexplained"

BETWEEN_STEPS = "between steps, not waiting for data"
_NAMES = {
    "clock": "clock below the datasheet's",
    "idle": "GPU idle",
    "no_tensor": "busy without tensor work",
    "below_rate": "tensor pipe below full rate",
    "other_executed": "executed beyond the count",
    "tile_padding": "tile padding",
    "masked_attention": "attention counted but skipped by masks",
    "recomputation": "recomputation",
    "padding_tokens": "padding tokens",
}
_INNER_NAMES = {
    "idle_data_wait": "waiting for data",
    "idle_between_steps": BETWEEN_STEPS,
    "idle_launch_gaps": "gaps between launches",
    "idle_other": "other",
    COMMUNICATION: "while a collective ran, at least",
    "no_tensor_unfilled": "SMs empty while a kernel ran",
    "no_tensor_other": "other",
}
"""Parts of a part."""
_IN_OTHER = ("idle_data_wait", "idle_launch_gaps")
"""Where one of these is unknown, the rest of its part has its name too."""
_METRIC = "perf/loss/"
_MISSING = {
    "clock": "the SM clock or the datasheet's",
    "idle": "how long the GPU was busy",
    "no_tensor": "the tensor pipe's activity",
    "below_rate": "the executed FLOPs",
    "other_executed": "the tile factor",
    "tile_padding": "the counted executed FLOPs",
    "recomputation": "the model's FLOPs",
    "padding_tokens": "the padding",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the peak. `of` splits it further if known; `missing` names unknown values."""

    key: str
    name: str
    share: float
    of: tuple[Part, ...] = ()
    missing: tuple[str, ...] = ()


def limiter_of(losses: Sequence[Part]) -> str | None:
    """The key of the largest loss, or of the largest part of it; None if nothing was lost."""
    largest = max(losses, key=lambda loss: loss.share, default=None)
    if largest is None or largest.share <= 0:
        return None
    inner = max(largest.of, key=lambda part: part.share, default=largest)
    return largest.key if inner.key == COMMUNICATION else inner.key


@dataclass(frozen=True, kw_only=True)
class Waterfall:
    """Parts in the order of the module's table, the useful FLOPs last; their shares add up to 1."""

    parts: tuple[Part, ...]
    peak_flops_per_s: float
    throttle_reasons: tuple[str, ...] = ()
    dram_active_share: float | None = None
    notes: tuple[str, ...] = ()
    world_size: int = 1
    left_out: str | None = None

    @property
    def losses(self) -> tuple[Part, ...]:
        """All parts but the useful FLOPs."""
        return self.parts[:-1]

    @property
    def limiter(self) -> str | None:
        """The key of the largest loss: `clock`, `idle_data_wait`; None if nothing was lost."""
        return limiter_of(self.losses)

    def as_metrics(self) -> dict[str, float]:
        """`perf/loss/<key>` for every part, `useful` too, so that a stacked chart ends at 1.

        A nested part has its parent's key in front: `perf/loss/idle_data_wait` is within `perf/loss/idle`.
        """
        flat = [inner for part in self.parts for inner in (part, *part.of)]
        return {f"perf/loss/{part.key}": part.share for part in flat}

    def advice(self) -> tuple[str, ...]:
        """One sentence for every loss above five points of the peak, the largest first."""
        large = sorted((part for part in self.losses if part.share > LARGE), key=lambda part: -part.share)
        return tuple(_sentence(part, self) for part in large)

    def as_dict(self) -> dict[str, Any]:
        """Plain data with the attribute names as keys, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class WaterfallInputs:
    """The known values of one window on one device; None is unknown. All rates are over the same seconds.

    Shares are of the window's time or cycles, from 0 to 1.
    """

    peak_flops_per_s: float | None
    """The peak that every part is a share of."""
    model_flops_per_s: float | None
    """Counted model FLOPs per second: the numerator of MFU."""
    hardware_flops_per_s: float | None = None
    """Counted FLOPs per second with recomputation: the numerator of HFU."""
    executed_flops_per_s: float | None = None
    """Measured FLOPs per second, by counters or Nsight Compute."""
    datasheet_clock_hz: float | None = None
    """The SM clock at which the datasheet states its peak."""
    mean_clock_hz: float | None = None
    """The SM clock in the mean over the window."""
    throttle: Mapping[str, float] | None = None
    """The share of the time for which each reason limited the clock, as in `CounterWindow.throttle`."""
    gpu_busy_share: float | None = None
    """Cycles in which a kernel ran; `sm_active_share` is used if this is unknown."""
    sm_active_share: float | None = None
    """Cycles in which an SM had work, in the mean over all SMs."""
    tensor_active_share: float | None = None
    """Cycles in which the tensor pipe was active."""
    dram_active_share: float | None = None
    """Cycles in which device memory was read or written; used for advice only."""
    data_wait_share: float | None = None
    """Time for which training waited for its data loader."""
    between_steps_share: float | None = None
    """Time between steps that is not data wait: evaluation, checkpoints."""
    forwards_between_steps: int = 0
    """Forward passes without gradients that were seen between steps."""
    launch_gap_share: float | None = None
    """Time without a kernel because the host had not launched the next one."""
    tile_factor: float | None = None
    """FLOPs with matrices padded to whole tiles, over those without padding: at least 1."""
    masked_flops_per_s: float | None = None
    """Attention FLOPs per second counted under the full convention that the kernels skipped."""
    padding_efficiency: float | None = None
    """The share of tokens that are not padding."""
    collective_share: float | None = None
    """Time for which a collective ran, by the backend's own timing, whether other kernels ran or not."""
    left_out: str | None = None
    """Why clock, busy share and tensor activity are not given although known: they do not apply to this
    peak."""
    world_size: int = 1
    """The number of ranks. With several, communication kernels keep a GPU busy without tensor work."""


def waterfall(inputs: WaterfallInputs) -> Waterfall | None:
    """The waterfall of one window on one device; None without a peak or without the model's FLOP/s.

    An invalid value (negative, not finite, a share above 1) is left out, with a note.
    """
    known = _Known()
    peak = known.amount("peak", inputs.peak_flops_per_s)
    model = known.amount("model FLOP/s", inputs.model_flops_per_s)
    if not peak or model is None or not math.isfinite(m := model / peak):
        return None

    def of_peak(what: str, flops_per_s: float | None) -> float | None:
        amount = known.amount(what, flops_per_s)
        return None if amount is None else known.amount(what, amount / peak)

    clock = known.amount("mean clock", inputs.mean_clock_hz)
    sheet_clock = known.amount("clock", inputs.datasheet_clock_hz)
    g = clock / sheet_clock if clock and sheet_clock else None
    busy = known.share("GPU busy", inputs.gpu_busy_share)
    sm = known.share("SM activity", inputs.sm_active_share)
    b = busy if busy is not None else sm
    t = known.share("tensor activity", inputs.tensor_active_share)
    if b is not None and t is not None and t > b:
        if t - b > _OVERSHOOT:
            known.notes.append(
                f"tensor activity of {100 * t:.1f} % is above the busy share of {100 * b:.1f} %"
            )
        b = t
    e = of_peak("executed FLOP/s", inputs.executed_flops_per_s)
    h = of_peak("hardware FLOP/s", inputs.hardware_flops_per_s)
    if h is not None and h < m * (1 - 1e-9):
        known.notes.append(
            "fewer executed FLOPs than model FLOPs were counted: the executed FLOPs are left out"
        )
        h = None
    s = of_peak("masked FLOP/s", inputs.masked_flops_per_s)
    tau = known.amount("tile factor", inputs.tile_factor)
    if tau is not None and tau < 1:
        known.notes.append(f"a tile factor of {tau:g} is below 1: ignored")
        tau = None
    p = known.share("padding efficiency", inputs.padding_efficiency)
    c = known.share("time in collectives", inputs.collective_share)
    gt = None if g is None or t is None else g * t
    if e is not None and gt is not None and e > gt + 2 * _OVERSHOOT:
        known.notes.append(
            "more was executed than the tensor pipe's activity allows: clock, dtype or peak is wrong"
        )

    after_tiles = None if h is None else h - (s or 0)
    steps: list[tuple[str, float | None]] = [
        ("clock", g),
        ("idle", None if g is None or b is None else g * b),
        ("no_tensor", gt),
        ("below_rate", e),
        ("other_executed", None if h is None or tau is None else tau * h - (s or 0)),
        ("tile_padding", after_tiles),
    ]
    if s is not None and h is not None:
        steps.append(("masked_attention", h))
    steps += [("recomputation", m), ("padding_tokens", None if p is None else m * p)]

    inner: dict[str, tuple[Part, ...]] = {}
    if g is not None and b is not None:
        waits = {
            "idle_data_wait": known.share("data wait", inputs.data_wait_share),
            "idle_between_steps": known.share("time between steps", inputs.between_steps_share),
            "idle_launch_gaps": known.share("launch gaps", inputs.launch_gap_share),
        }
        inner["idle"] = _of_which("idle", g * (1 - b), waits, g, evaluations(inputs.forwards_between_steps))
        if t is not None:
            inner["no_tensor"] = _of_which(
                "no_tensor", g * (b - t), _without_tensor_work(b, busy, sm, t, c), g
            )
    if inputs.world_size > 1 and inputs.collective_share is None:
        known.notes.append(_NOT_TIMED)
    elif c is not None:
        known.notes.append(
            f"collectives ran {100 * c:.1f} % of the time by NCCL's timing, "
            "with or without other kernels at the same time"
        )
    reasons = _reasons(inputs.throttle or {})
    values = (g, b, t, e, tau, h, m, p)
    missing = {key for key, value in zip(_MISSING, values, strict=True) if value is None}
    return Waterfall(
        parts=_parts(steps, inner, {**_NAMES, "clock": _clock_name(g, reasons)}, missing, inputs.left_out),
        peak_flops_per_s=peak,
        throttle_reasons=reasons,
        dram_active_share=known.share("DRAM activity", inputs.dram_active_share),
        notes=tuple(known.notes),
        world_size=inputs.world_size,
        left_out=inputs.left_out,
    )


def parts_of_metrics(metrics: Mapping[str, float]) -> list[Part]:
    """The parts of `as_metrics`, named as far as their keys tell; empty without a waterfall."""
    shares = {key.removeprefix(_METRIC): share for key, share in metrics.items() if key.startswith(_METRIC)}
    if USEFUL not in shares:
        return []
    names = {**_NAMES, "clock": _clock_name(1 - shares.get("clock", 0.0), ())}
    parts = [
        Part(
            key=key,
            name="not separated"
            if key == _UNEXPLAINED
            else _either([names.get(one, one.replace("_", " ")) for one in key.split(_OR)]),
            share=share,
            of=_inner_of(key, shares),
        )
        for key, share in shares.items()
        if key not in _INNER_NAMES and key != USEFUL
    ]
    return [*parts, _useful(shares[USEFUL], has_padding="padding_tokens" in shares)]


def _inner_of(parent: str, shares: Mapping[str, float]) -> tuple[Part, ...]:
    inner = {key: name for key, name in _INNER_NAMES.items() if key.startswith(f"{parent}_")}
    rest = {f"{parent}_other": _name_of_rest(parent, set(shares))} if inner else {}
    return tuple(
        Part(key=key, name=name, share=shares[key]) for key, name in (inner | rest).items() if key in shares
    )


class _Known:
    """Passes valid values through, and notes invalid ones."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def amount(self, what: str, value: float | None) -> float | None:
        if value is None:
            return None
        if math.isfinite(value) and value >= 0:
            return float(value)
        self.notes.append(f"{what} was given as {value!r}: ignored")
        return None

    def share(self, what: str, value: float | None) -> float | None:
        """Counters round: slightly above 1 is 1."""
        share = self.amount(what, value)
        if share is None or share <= 1 + _OVERSHOOT:
            return None if share is None else min(share, 1.0)
        self.notes.append(f"{what} was given as {value!r}, which is above 1: ignored")
        return None


def _parts(
    steps: Sequence[tuple[str, float | None]],
    inner: Mapping[str, tuple[Part, ...]],
    names: Mapping[str, str],
    unknown: AbstractSet[str],
    left_out: str | None,
) -> tuple[Part, ...]:
    """One part from each known level to the next; steps without a level are merged into the next part."""
    parts: list[Part] = []
    level, merged = 1.0, list[str]()
    for key, left in steps:
        merged.append(key)
        if left is None:
            continue
        parts.append(
            Part(
                key=_UNEXPLAINED if len(merged) > _MERGED_KEYS else _OR.join(merged),
                name=_either([names[key] for key in merged]),
                share=level - left,
                of=inner.get(key, ()) if len(merged) == 1 else (),
                missing=_missing([key for key in merged[:-1] if key in unknown], left_out),
            )
        )
        level, merged = left, []
    missing = tuple(_MISSING[key] for key in merged)
    return (*parts, _useful(level, has_padding=not merged, missing=missing))


def _useful(share: float, *, has_padding: bool, missing: tuple[str, ...] = ()) -> Part:
    """What is left at the end; `has_padding`: padding tokens are a part of their own."""
    name = "the model's useful FLOPs" if has_padding else "the model's FLOPs, padding tokens included"
    return Part(key=USEFUL, name=name, share=share, missing=missing)


def _missing(keys: Sequence[str], left_out: str | None) -> tuple[str, ...]:
    """The unknown values of some parts, or why they were not used."""
    if left_out is None:
        return tuple(_MISSING[key] for key in keys)
    rest = tuple(_MISSING[key] for key in keys if key not in _OF_THE_PIPE)
    return (left_out, *rest) if len(rest) < len(keys) else rest


def _of_which(
    parent: str, whole: float, shares: Mapping[str, float | None], clock: float, evaluated: str = ""
) -> tuple[Part, ...]:
    """The known parts of a part, each limited to what is left of it, and the rest.

    `shares` are shares of the cycles; at this clock one is worth `clock` of the peak. `evaluated` is what ran
    between steps.
    """
    parts: list[Part] = []
    left = whole
    for key, share in shares.items():
        if share is None:
            continue
        taken = min(share * clock, left)
        left -= taken
        name = _INNER_NAMES[key]
        if evaluated and key == "idle_between_steps":
            name = f"{name} ({evaluated})"
        parts.append(Part(key=key, name=name, share=taken))
    if not parts:
        return ()
    known = {part.key for part in parts}
    return (*parts, Part(key=f"{parent}_other", name=_name_of_rest(parent, known), share=left))


def _name_of_rest(parent: str, known: AbstractSet[str]) -> str:
    unknown = [key for key in _IN_OTHER if key.startswith(parent) and key not in known]
    return _either([*(_INNER_NAMES[key] for key in unknown), _INNER_NAMES[f"{parent}_other"]])


def _without_tensor_work(
    b: float, busy: float | None, sm: float | None, t: float, c: float | None
) -> dict[str, float]:
    """What is known of the busy cycles without tensor work.

    A collective ran in c of all cycles, and t of them had tensor work, so at least c − t of the cycles with a
    collective had none. That includes stalls of products that ran beside it. SMs that were empty meanwhile
    belong to it.
    """
    communication = 0.0 if c is None else min(max(0.0, c - t), b - t)
    parts: dict[str, float] = {}
    if c is not None:
        parts[COMMUNICATION] = communication
    if busy is not None and sm is not None:
        parts["no_tensor_unfilled"] = max(0.0, b - max(sm, t) - communication)
    return parts


_NOT_TIMED = (
    "communication between ranks is not separated from the time without tensor work: collectives were not "
    "timed; set TORCH_NCCL_ENABLE_TIMING=1 and TORCH_NCCL_TRACE_BUFFER_SIZE=2000 to time them"
)


def evaluations(forwards: int | None) -> str:
    """A text about forward passes without gradients between steps; empty if there were none."""
    if not forwards:
        return ""
    passes = "forward pass" if forwards == 1 else "forward passes"
    return f"{forwards:,} {passes} without gradients: evaluation or generation"


def between_steps_notes(share: float | None, forwards: int | None) -> list[str]:
    """A note if much of a run's time was spent between steps."""
    if share is None or share <= LARGE:
        return []
    seen = evaluations(forwards)
    cause = f" ({seen})" if seen else ""
    return [
        f"{100 * share:.1f} % of the time passed between steps{cause}, not waiting for a DataLoader: "
        f"{_HINTS['idle_between_steps']}"
    ]


def _either(names: Sequence[str]) -> str:
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


_REASONS = {
    "power_limit": "the power limit",
    "thermal_limit": "the temperature limit",
    "hardware_thermal_limit": "the hardware's temperature limit",
    "hardware_slowdown": "a hardware slowdown",
    "power_brake": "an external power brake",
    "application_clocks": "the clock set for applications",
    "sync_boost": "the slowest GPU of a sync-boost group",
    "board_limit": "the board's limit",
    "reliability": "the voltage limit",
}
_SELDOM = 0.1


def _reasons(throttle: Mapping[str, float]) -> tuple[str, ...]:
    """The frequent throttle reasons, most frequent first; idling is not a reason."""
    frequent = [name for name, share in throttle.items() if share >= _SELDOM and name != "gpu_idle"]
    return tuple(sorted(frequent, key=lambda name: -throttle[name]))


def _clock_name(g: float | None, reasons: Sequence[str]) -> str:
    if g is not None and g > 1:
        return "gain from a clock above the datasheet's"
    held = " and ".join(_REASONS.get(name, name) for name in reasons)
    return f"{_NAMES['clock']} ({held})" if held else _NAMES["clock"]


_HINTS = {
    "clock": "look for a locked clock (nvidia-smi -q -d CLOCK)",
    "idle": "the host is too slow for the GPU: look for synchronisations and many tiny kernels",
    "idle_data_wait": "more loader workers, prefetching or faster storage",
    "idle_between_steps": (
        "evaluation, checkpoints, logging, or batches from another source than a torch DataLoader; to tell "
        "them apart, the script needs a TrainingMonitor and its lines `with monitor.pause('evaluation'):` "
        "and `for batch in monitor.data(batches):` (docs/monitor.md)"
    ),
    "idle_launch_gaps": "torch.compile, CUDA graphs or a larger batch leave fewer, longer kernels",
    "idle_other": (
        "the launch queue runs dry: torch.compile, CUDA graphs or a larger batch; no .item() within the step"
    ),
    "no_tensor": (
        "elementwise work, normalisation, the optimizer (torch.compile and fused AdamW reduce it), and "
        "products that wait for memory (a larger batch or wider layers)"
    ),
    "no_tensor_unfilled": "kernels too small for this many SMs: a larger batch or fewer, larger products",
    "below_rate": "kernels without a product on the tensor pipe, or products in a slower dtype",
    "other_executed": "cause unknown: run `truemfu audit`",
    "tile_padding": "make sizes multiples of 128, above all the vocabulary size",
    "recomputation": "checkpoint fewer layers, or only what is cheap to recompute, where memory allows",
    "padding_tokens": "pack sequences or batch by length",
}


def _sentence(part: Part, fall: Waterfall) -> str:
    text = f"{part.name}: {100 * part.share:.0f} points of the peak"
    if part.missing:
        if fall.left_out in part.missing:
            return f"{text}, not separated: {fall.left_out}."
        return f"{text}, not separated; unknown: {', '.join(part.missing)}."
    if part.key == "clock" and fall.throttle_reasons:
        return f"{text}: not caused by the program; `truemfu peak` shows what this chip can reach."
    inner = max(part.of, key=lambda of: of.share, default=part)
    if inner is not part and inner.name != "other":
        text += f", {100 * inner.share:.0f} of them {inner.name}"
    hint = _HINTS.get(inner.key) or _HINTS[part.key]
    if part.key == "no_tensor" and fall.world_size > 1:
        return (
            f"{text}: this includes communication between ranks without overlap; otherwise "
            f"{_HINTS[part.key]}."
        )
    memory = fall.dram_active_share
    if part.key == "no_tensor" and inner.key != "no_tensor_unfilled" and memory is not None and memory > 0.5:
        hint = f"memory is busy {100 * memory:.0f} % of the time; {hint}"
    return f"{text}: {hint}."
