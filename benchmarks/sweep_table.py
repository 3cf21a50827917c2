"""The figures of docs/sweep.md, "On an H200", and docs/private.md, from the committed sweep.

    sweep_h200/results ─► the table of the page ─► ratios between trainers and batch shapes

Why: `truemfu summarize` prints means over all points, and the pages name single ones.

    python benchmarks/sweep_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "sweep_h200" / "results"
TRAINERS = {
    "StandardTrainer": "standard",
    "DPBookKeepingTrainer": "book-keeping",
    "DPSGDTrainer": "DP-SGD",
    "DPGhostClippingTrainer": "ghost clipping",
    "DPFastGradientClippingTrainer": "fast gradient clipping",
}
STANDARD, BOOK_KEEPING = list(TRAINERS)[:2]
SHAPES = [(batch, length) for batch in (4, 8) for length in (512, 1024)]


def results() -> dict[str, dict[tuple[int, int], dict[str, Any]]]:
    """Each trainer's results by batch × sequence."""
    found: dict[str, dict[tuple[int, int], dict[str, Any]]] = {name: {} for name in TRAINERS}
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        case = result["case"]
        found[case["trainer"]][case["batch_size"], case["seq_len"]] = result
    return found


def step_s(result: dict[str, Any]) -> float:
    return float(result["measured"]["steps"]["median_s"])


def table() -> list[str]:
    """The rows of the table of the page."""
    found, lines = results(), []
    for shape in sorted(found[STANDARD]):
        for name, text in TRAINERS.items():
            result = found[name][shape]
            flops, error = result["measured"]["flops"], result["measured"]["steps"]["relative_error"]
            cells = [
                f"{shape[0]} × {shape[1]}" if name == STANDARD else "",
                text,
                f"{1e3 * step_s(result):.1f} ms ({100 * error:.1f} %)",
                "" if name == STANDARD else f"{step_s(result) / step_s(found[STANDARD][shape]):.2f}",
                f"{result['memory']['allocated_bytes'] / 2**30:.1f} GiB",
                f"{100 * flops['mfu']:.1f} %",
                f"{100 * flops['hfu']:.1f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def compared() -> list[str]:
    """Ratios between trainers and between shapes."""
    found, lines = results(), []
    ratios = sorted(
        (step_s(found[name][shape]) / step_s(found[BOOK_KEEPING][shape]), TRAINERS[name], shape)
        for name in list(TRAINERS)[2:]
        for shape in SHAPES
    )
    for ratio, name, (batch, length) in ratios:
        lines.append(f"step of Opacus over book-keeping: {ratio:.3f}, {name} at {batch} × {length}")
    small, large = SHAPES[0], SHAPES[-1]
    for name, text in TRAINERS.items():
        of = found[name]
        tokens = of[large]["measured"]["tokens_per_s"] / of[small]["measured"]["tokens_per_s"]
        work = [
            of[shape]["measured"]["flops"]["hardware_flops"]
            / found[STANDARD][shape]["measured"]["flops"]["hardware_flops"]
            for shape in SHAPES
        ]
        memory = [
            of[shape]["memory"]["allocated_bytes"] / found[STANDARD][shape]["memory"]["allocated_bytes"]
            for shape in SHAPES
        ]
        error = of[small]["gate"]["relative_error"]
        lines.append(
            f"{text}: 8 × 1024 over 4 × 512: step {step_s(of[large]) / step_s(of[small]):.2f}, tokens/s "
            f"{tokens:.1f}; over standard: executed work {min(work):.2f} to {max(work):.2f}, peak memory "
            f"{min(memory):.2f} to {max(memory):.2f}; gradient check {error:.1e}"
        )
    needed = [found[STANDARD][shape]["measured"]["flops"]["model_flops"] for shape in (small, large)]
    lines.append(f"the model's work, 8 × 1024 over 4 × 512: {needed[1] / needed[0]:.1f}")
    return lines


if __name__ == "__main__":
    print("\n".join([*table(), "", *compared()]))
