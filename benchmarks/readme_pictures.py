"""Three more pictures of the front page, made from what is committed here.

    hardware_truth_training.txt ─► docs/pictures/report-*.svg    the report of one run, with what to do next
    docs/top.md                 ─► docs/pictures/top-*.svg       `truemfu top` on recorded traces
    sweep_h200/results          ─► docs/pictures/heatmap-*.svg   MFU of trainers × batch shapes

Why: as in `readme_figures.py`. The screen in docs/top.md is the one that `tests/hardware/test_top_process.py`
reads from a terminal. Writes each picture for a light and a dark page; needs the standard library alone.

    python benchmarks/readme_pictures.py
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.drawing import COLOURS, MONO, SCHEMES, WIDTH, box, picture, text  # noqa: E402
from benchmarks.readme_figures import RUN  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"

_TRAINERS = {
    "StandardTrainer": "Standard",
    "DPBookKeepingTrainer": "DP, book-keeping",
    "DPSGDTrainer": "DP-SGD",
    "DPGhostClippingTrainer": "DP, ghost clipping",
    "DPFastGradientClippingTrainer": "DP, fast gradient clipping",
}
_MARGIN = 24
_MODEL = "the model's FLOPs"


def printed_summary(run: str = RUN) -> list[tuple[str, str]]:
    """The lines of a run's closing summary: name and value."""
    printed = (RESULTS / "hardware_truth_training.txt").read_text(encoding="utf-8")
    found = re.search(rf"^truemfu\n((?:  .+\n)+?)  {re.escape(run)}: [\d.]+ ms$", printed, re.MULTILINE)
    if found is None:
        raise ValueError(f"hardware_truth_training.txt has no summary of {run}")
    lines = (re.split(r" {2,}", line.strip(), maxsplit=1) for line in found[1].splitlines())
    return [(name, value) for name, value in lines]


def report_parts(lines: list[tuple[str, str]]) -> list[tuple[str, float]]:
    """Where the peak went in points, the model's FLOPs last; parts below one point are one."""
    split = [value.strip().split(" %  ") for name, value in lines if name == "where the peak went"]
    parts = [(name, float(points)) for points, name in split]
    small = [(name, points) for name, points in parts[:-1] if points < 1]
    rest = [(", ".join(name for name, _ in small), sum(points for _, points in small))] if small else []
    return [part for part in parts[:-1] if part not in small] + rest + [(_MODEL, parts[-1][1])]


def draw_report(scheme: str) -> str:
    """The report of one run: its figures, where the peak went, and the advice."""
    colours, lines = COLOURS[scheme], printed_summary()
    summary = dict(lines)
    parts = report_parts(lines)
    advice = [value for name, value in lines if name == "advice"]
    environment = (RESULTS / "hardware_truth_training.txt").read_text(encoding="utf-8").splitlines()[0]
    date, device, driver, torch, *_ = environment.removeprefix("training: ").split(", ")
    batch = RUN.partition(",")[0].replace("×", " × ")
    title = "The report of the same run: its figures, and what to do next"
    drawn = [
        text(_MARGIN, 34, title, colours["text"], size=18, bold=True),
        text(
            _MARGIN,
            57,
            f"GPT of 1.3 B parameters, bf16, {batch} tokens on an {device}; {date}, {torch}, {driver}",
            colours["soft"],
            size=13,
        ),
    ]
    tiles = {
        "MFU, median": (summary["MFU, median"].split("%")[0].strip() + " %", "mfu"),
        "HFU, median": (summary["HFU, median"].split("%")[0].strip() + " %", "hfu"),
        "step": (summary["step, median"].split(" (")[0], "text"),
        "tokens/s": (summary["tokens/s"].split(" (")[0], "text"),
        "power": (summary["energy"].split(" this")[0], "text"),
    }
    width = (WIDTH - 2 * _MARGIN - 4 * 12) / 5
    for number, (name, (value, colour)) in enumerate(tiles.items()):
        left = _MARGIN + number * (width + 12)
        drawn += [
            box(left, 76, width, 66, colours["track"], radius=6),
            text(left + 14, 98, name, colours["soft"], size=12),
            text(left + 14, 127, value, colours[colour], size=22, bold=True),
        ]
    drawn.append(text(_MARGIN, 176, "Where the peak went", colours["text"], size=15, bold=True))
    left, y = float(_MARGIN), 242
    for name, points in parts:
        kind = "mfu" if name == _MODEL else "largest" if points == max(p for _, p in parts[:-1]) else "peak"
        long = points / 100 * (WIDTH - 2 * _MARGIN)
        drawn += [
            box(left, 190, long - 2, 30, colours[kind]),
            box(_MARGIN, y - 11, 12, 12, colours[kind]),
            text(_MARGIN + 72, y, f"{points:.1f} %", colours["text"], size=13, bold=True, anchor="end"),
            text(_MARGIN + 84, y, name, colours["text"], size=13),
        ]
        left, y = left + long, y + 21
    y += 14
    drawn.append(text(_MARGIN, y, "What to do", colours["text"], size=15, bold=True))
    for sentence in advice:
        y += 6
        for number, line in enumerate(textwrap.wrap(sentence, 112)):
            y += 19
            drawn.append(text(_MARGIN, y, ("• " if not number else "   ") + line, colours["text"], size=13))
    described = "; ".join(f"{name} {value}" for name, value in lines)
    return picture(drawn, y + 24, scheme, title=title, described=described)


def top_screen() -> list[str]:
    """The screen of `truemfu top` in docs/top.md."""
    page = (ROOT / "docs" / "top.md").read_text(encoding="utf-8")
    found = re.search(r"(?:^    .+\n){6}", page[page.index("    GPU     FLOP util") :], re.MULTILINE)
    if found is None:
        raise ValueError("docs/top.md has no screen of six lines")
    return [line.removeprefix("    ") for line in found[0].splitlines()]


def draw_top(scheme: str) -> str:
    """The screen as a terminal shows it, with the two columns that disagree in colour."""
    colours, screen = COLOURS[scheme], top_screen()
    size, line_height, first = 12.3, 22, 92
    advance = (WIDTH - 2 * _MARGIN) / max(map(len, screen))
    columns = {name: screen[0].index(name) + len(name) for name in ("FLOP util", '"GPU util"')}
    title = "Both GPUs are “100 % busy”; only one multiplies matrices"
    drawn = [
        text(_MARGIN, 34, title, colours["text"], size=18, bold=True),
        text(_MARGIN, 57, "truemfu top, on two recorded traces of an H200", colours["soft"], size=13),
        box(12, 68, WIDTH - 24, line_height * len(screen) + 14, colours["track"], radius=6),
    ]
    for number, line in enumerate(screen):
        y = first + line_height * number
        if set(line) == {"─"}:
            drawn.append(box(_MARGIN, y - 5, WIDTH - 2 * _MARGIN, 1, colours["peak"], radius=0))
            continue
        for found in re.finditer(r"\S+(?: \S+)*", line):
            fill, bold = colours["text" if number < 4 else "soft"], number == 0
            for name, end in columns.items():
                if number in (2, 3) and found.end() == end:
                    low = found[0].startswith("0.0")
                    kind = "peak" if name.startswith('"') else "largest" if low else "mfu"
                    fill, bold = colours[kind if kind != "peak" else "soft"], True
            x, long = _MARGIN + found.start() * advance, len(found[0]) * advance
            shown = text(x, y, found[0], fill, bold=bold)
            drawn.append(
                shown.replace(
                    'font-size="14"',
                    f'font-family="{MONO}" font-size="{size}" textLength="{long:.1f}" '
                    'lengthAdjust="spacingAndGlyphs"',
                )
            )
    height = first + line_height * len(screen) + 8
    return picture(drawn, height, scheme, title=title, described="\n".join(screen))


def sweep_cells() -> dict[str, dict[str, Any]]:
    """Each trainer's experiments of the committed sweep by batch × sequence: MFU, step time and memory."""
    cells: dict[str, dict[str, Any]] = {name: {} for name in _TRAINERS}
    for path in sorted((RESULTS / "sweep_h200" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        case, measured = result["case"], result["measured"]
        cells[case["trainer"]][f"{case['batch_size']} × {case['seq_len']}"] = {
            "tokens": case["batch_size"] * case["seq_len"],
            "mfu": measured["flops"]["mfu"],
            "step_s": measured["steps"]["median_s"],
            "memory_bytes": result["memory"]["allocated_bytes"],
        }
    return cells


def draw_heatmap(scheme: str) -> str:
    """MFU of every experiment of the sweep, darker where more of the peak is used."""
    colours, cells = COLOURS[scheme], sweep_cells()
    shapes = sorted(next(iter(cells.values())), key=lambda name: [int(n) for n in name.split(" × ")])
    names_end, top, row = 230, 104, 66
    width = (WIDTH - names_end - _MARGIN) / len(shapes)
    most = max(cell["mfu"] for found in cells.values() for cell in found.values())
    title = "A sweep: MFU of five ways to train, at four batch shapes"
    drawn = [
        text(_MARGIN, 34, title, colours["text"], size=18, bold=True),
        text(
            _MARGIN,
            57,
            "GPT of 1.3 B parameters, bf16, NVIDIA H200, 2026-11-19; below each MFU: step time, peak memory",
            colours["soft"],
            size=13,
        ),
    ]
    for number, shape in enumerate(shapes):
        middle = names_end + (number + 0.5) * width
        drawn.append(text(middle, 90, f"{shape} tokens", colours["soft"], size=13, anchor="middle"))
    for line, (trainer, found) in enumerate(cells.items()):
        y = top + line * row
        drawn.append(text(names_end - 14, y + 36, _TRAINERS[trainer], colours["text"], anchor="end"))
        for number, shape in enumerate(shapes):
            cell, left = found[shape], names_end + number * width
            share = cell["mfu"] / most
            drawn += [
                box(left + 2, y, width - 4, row - 4, colours["track"], radius=5),
                box(left + 2, y, width - 4, row - 4, colours["mfu"], radius=5).replace(
                    "/>", f' fill-opacity="{share:.2f}"/>'
                ),
            ]
            strong = colours["page"] if share > 0.6 else colours["text"]
            below = f"{1000 * cell['step_s']:.0f} ms, {cell['memory_bytes'] / 2**30:.1f} GiB"
            middle = left + width / 2
            drawn += [
                text(
                    middle, y + 28, f"{100 * cell['mfu']:.1f} %", strong, size=18, bold=True, anchor="middle"
                ),
                text(middle, y + 48, below, strong, size=12, anchor="middle"),
            ]
    described = "; ".join(
        f"{_TRAINERS[trainer]} {shape}: {100 * cell['mfu']:.1f} %"
        for trainer, found in cells.items()
        for shape, cell in found.items()
    )
    return picture(drawn, top + row * len(cells) + 16, scheme, title=title, described=described)


DRAWN: dict[str, Callable[[str], str]] = {
    "report": draw_report,
    "top": draw_top,
    "heatmap": draw_heatmap,
}


def main() -> None:
    for name, draw in DRAWN.items():
        for scheme in SCHEMES:
            (PICTURES / f"{name}-{scheme}.svg").write_text(draw(scheme), encoding="utf-8")


if __name__ == "__main__":
    main()
