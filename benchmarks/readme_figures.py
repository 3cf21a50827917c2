"""The figures on the front page, made from the results that are committed here.

Why: a picture or a table that somebody drew by hand stays as it is when its measurement is repeated. Reads
`benchmarks/results/`, imports nothing outside the standard library and needs no GPU.

    hardware_truth_training.txt ─► docs/pictures/waterfall-light.svg, waterfall-dark.svg
    flops_accuracy.txt          ─► the accuracy table of README.md
    gpu_monitor.txt             ─► the overhead table of docs/monitor.md

Writes the two pictures; prints both tables as Markdown, and a last line of JSON with the runs they are of.
`tests/test_front_page.py` checks that pictures and tables in the repository are the ones made here.

    python benchmarks/readme_figures.py
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.drawing import COLOURS, SCHEMES, WIDTH, picture, text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

RUN = "8×1024, full attention"
"""The run of `hardware_truth_training.txt` in the pictures: a plain training step that the GPU limits.
Without a mask all that is counted is executed, and HFU is above MFU."""

_EXECUTED_AFTER = "below_rate"
"""What is left of the peak after this part was executed: HFU."""

_NAMES = {
    "clock": "Clock below the datasheet's",
    "idle": "GPU idle",
    "no_tensor": "GPU busy, tensor cores not",
    "below_rate": "Tensor cores below full rate",
    "other_executed": "Executed but not counted",
    "tile_padding": "Tile padding",
    "masked_attention": "Counted, skipped by the causal mask",
    "recomputation": "Recomputation",
}
_ROW, _BAR = 34, 22
_NAMES_END, _BARS_END, _FIRST_ROW = 300, 770, 78


@dataclass(frozen=True, kw_only=True)
class MeasuredWaterfall:
    """Parts of the peak in points, in order, `useful` last, with the run and the versions they are of."""

    run: str
    environment: str
    model: str
    parts: dict[str, float]

    @property
    def mfu(self) -> float:
        return self.parts["useful"]

    @property
    def hfu(self) -> float:
        keys = list(self.parts)
        before = keys[: keys.index(_EXECUTED_AFTER) + 1]
        return round(100 - sum(self.parts[key] for key in before), 1)


@dataclass(frozen=True, kw_only=True)
class _Bar:
    name: str
    points: str
    low: float
    high: float
    kind: str


def read_waterfall(run: str = RUN) -> MeasuredWaterfall:
    """The waterfall of one run of `hardware_truth_training.txt`, as the script printed it."""
    printed = (RESULTS / "hardware_truth_training.txt").read_text(encoding="utf-8")
    environment = _found(r"^training: (.+)$", printed)
    model = _found(r"^training, ([^:]+): FLOP a step", printed)
    section = printed.partition("training: where the peak went, in points of it\n")[2]
    line = _found(rf"^{re.escape(run)} {{2,}}(.+); sum 100\.0;", section)
    parts = {key: float(points) for key, points in (part.split() for part in line.split(", "))}
    return MeasuredWaterfall(run=run, environment=environment, model=model, parts=parts)


def draw(measured: MeasuredWaterfall, scheme: str) -> str:
    """The waterfall as an SVG in one colour scheme, with a background of its own."""
    bars, colours = _bars(measured), COLOURS[scheme]
    most = max(bar.high for bar in bars)
    height = _FIRST_ROW + _ROW * len(bars) + 8
    drawn = [
        text(24, 32, _title(measured), colours["text"], size=18, bold=True),
        text(24, 55, _subtitle(measured), colours["soft"], size=13),
    ]
    scale = (_BARS_END - _NAMES_END) / most
    for number, bar in enumerate(bars):
        top = _FIRST_ROW + _ROW * number
        middle, bold = top + _BAR / 2 + 5, bar.kind in ("hfu", "mfu", "largest")
        left, width = _NAMES_END + bar.low * scale, max(1.5, (bar.high - bar.low) * scale)
        drawn += [
            text(_NAMES_END - 14, middle, bar.name, colours["text"], bold=bold, anchor="end"),
            _box(_NAMES_END, top, _BARS_END - _NAMES_END, colours["track"]),
            _box(left, top, width, colours[bar.kind]),
            text(WIDTH - 24, middle, bar.points, colours["text"], bold=bold, anchor="end"),
        ]
    described = "; ".join(f"{bar.name} {bar.points}" for bar in bars)
    return picture(drawn, height, scheme, title=_title(measured), described=described)


def accuracy_table() -> str:
    """How many of the cases each counter gets right, from the last line of `flops_accuracy.txt`."""
    results = accuracy_results()
    lines = [
        f"| counter | exact, of {results['cases']} | within 1 % | failed | worst ratio to the truth |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, tool in sorted(results["tools"].items(), key=lambda item: -item[1]["exact"]):
        mark = " (forward only)" if tool["scope"] == "forward" else ""
        worst = "1" if tool["worst_case"] is None else f"{tool['worst_ratio']:.3g} ({tool['worst_case']})"
        cells = [str(tool["exact"]), str(tool["within_1_percent"]), str(tool["failed"]), worst]
        if name == "truemfu":
            name, cells = "**truemfu**", [f"**{cell}**" for cell in cells]
        lines.append("| " + " | ".join([name + mark, *cells]) + " |")
    return "\n".join(lines)


def accuracy_results() -> dict[str, Any]:
    """The last line of `flops_accuracy.txt`."""
    results: dict[str, Any] = json.loads(_lines("flops_accuracy.txt")[-1])
    return results


def overhead_table() -> str:
    """What the monitor costs on a GPU: the runs of the newest source in `gpu_monitor.txt`."""
    lines = [
        "| run | step | host busy launching | on against off, median (95 % interval) | monitored steps | "
        "training thread, per step | monitor's threads, per step |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, run in overhead_runs()[1].items():
        cost, own = run["overhead"], run["own_costs"]
        low, high = (percent(end) for end in cost["interval_95"])
        cells = [
            name.replace("x", " × ", 1),
            f"{cost['step_ms_off']:.1f} ms",
            f"{run['host_share']:.0%}".replace("%", " %"),
            f"{percent(cost['median'])} % ({low} … {high} %)",
            f"{cost['steps_on']:,}",
            f"{own['mean_us']:.0f} µs",
            f"{own['threads_us']:.0f} µs",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overhead_runs() -> tuple[str, dict[str, Any]]:
    """The newest source in `gpu_monitor.txt` (date and versions), and its runs by name."""
    source, runs = "", {}
    for line in _lines("gpu_monitor.txt"):
        header = re.fullmatch(r"gpu/monitor (.+)", line)
        if header is not None and header[1] != source:
            source, runs = header[1], {}
        elif line.startswith("{"):
            runs.update(json.loads(line))
    return source, runs


def percent(share: float) -> str:
    """A share in percent with three decimals and its sign, without the percent sign."""
    return f"{100 * share:+.3f}".replace("-", "−")


def _bars(measured: MeasuredWaterfall) -> list[_Bar]:
    largest = max(list(measured.parts)[:-1], key=lambda key: measured.parts[key])
    bars, level = [_Bar(name="Peak on the datasheet", points="100.0 %", low=0, high=100, kind="peak")], 100.0
    for key, points in list(measured.parts.items())[:-1]:
        left = level - points
        if points:
            kind = "gain" if points < 0 else "largest" if key == largest else "loss"
            sign = "+" if points < 0 else "−"
            low, high = min(level, left), max(level, left)
            shown = f"{sign}{abs(points):.1f} %"
            bars.append(_Bar(name=_NAMES[key], points=shown, low=low, high=high, kind=kind))
        level = left
        if key == _EXECUTED_AFTER:
            hfu = f"{measured.hfu:.1f} %"
            bars.append(
                _Bar(name="HFU: executed, by GPU counters", points=hfu, low=0, high=level, kind="hfu")
            )
    mfu = f"{measured.mfu:.1f} %"
    return [*bars, _Bar(name="MFU: needed by the model", points=mfu, low=0, high=measured.mfu, kind="mfu")]


def _title(measured: MeasuredWaterfall) -> str:
    return f"Where the peak of an {measured.environment.split(', ')[1]} went"


def _subtitle(measured: MeasuredWaterfall) -> str:
    date, _, driver, torch, *_ = measured.environment.split(", ")
    run = measured.run.replace("×", " × ").replace(", ", " tokens, ")
    return f"GPT of {measured.model} parameters, bf16, {run}; {date}, {torch}, {driver}"


def _box(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{_BAR}" rx="2" fill="{fill}"/>'


def _found(pattern: str, printed: str) -> str:
    found = re.search(pattern, printed, re.MULTILINE)
    if found is None:
        raise ValueError(f"hardware_truth_training.txt has no line like {pattern}")
    return found[1]


def _lines(name: str) -> list[str]:
    return (RESULTS / name).read_text(encoding="utf-8").splitlines()


def main() -> None:
    measured = read_waterfall()
    PICTURES.mkdir(exist_ok=True)
    for scheme in SCHEMES:
        (PICTURES / f"waterfall-{scheme}.svg").write_text(draw(measured, scheme), encoding="utf-8")
    print(accuracy_table(), overhead_table(), sep="\n\n", end="\n\n")
    accuracy = accuracy_results()
    versions = {key: accuracy[key] for key in ("date", "machine", "versions")}
    print(
        json.dumps(
            {"waterfall": asdict(measured), "accuracy": versions, "overhead": overhead_runs()[0]},
            ensure_ascii=False,
        )
    )


if __name__ == "__main__":
    main()
