"""How often does `truemfu check` explain a figure that has no explanation?

Why: with enough conventions to choose from, some combination fits any number. Random MFUs from a fifth to
three times the right one, printed with two to four digits, stand for figures that are wrong for a reason that
check does not know. Each is checked with the model, the rate and the device known; the work is that of
Llama 3 8B at 8,192 tokens, from its number of parameters.

Prints: date and versions; a Markdown table with the share explained by one fault, by two, and by none.

    PYTHONPATH=src python benchmarks/check_chance.py [--output benchmarks/results/check_chance.txt]
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import platform
import random
from pathlib import Path

import truemfu
from truemfu.check.conventions import Work
from truemfu.check.logged import Figure, Logged
from truemfu.check.verdict import Peak, opinion_of
from truemfu.hardware.detect import find_spec

TRIALS = 1000
PARAMETERS, EMBEDDING = 8_030_261_248, 128_256 * 4_096
ATTENTION = 12.0 * 32 * 4_096 * 8_192
WORK = Work(
    model="Llama 3 8B",
    products=6.0 * (PARAMETERS - EMBEDDING),
    attention=ATTENTION,
    causal_attention=ATTENTION / 2,
    parameters=PARAMETERS,
    looked_up=EMBEDDING,
    embeddings=EMBEDDING,
)
RATE = Figure(value=6000.0)


def shares(digits: int, gpus: int) -> dict[str, float]:
    """Shares of the verdicts on random figures with this many digits."""
    spec = find_spec("h100-sxm")
    assert spec is not None
    peak = Peak(flops_per_s=spec.peak("bf16"), spec=spec)
    right = WORK.flops("full") * RATE.value / (spec.peak("bf16") or math.nan)
    found: collections.Counter[str] = collections.Counter()
    draw = random.Random(0)
    for _ in range(TRIALS):
        percent = 100 * right * math.exp(draw.uniform(math.log(0.2), math.log(3)))
        text = f"{percent:.{max(digits - len(str(int(percent))), 0)}f}"
        logged = Logged(mfu=Figure.of(text, 0.01), tokens_per_s=RATE.times(gpus), gpus=gpus, seq=8192)
        verdict = opinion_of(logged, WORK, peak).verdicts[0]
        faults = len(verdict.explanations[0].keys) if verdict.explanations else 0
        found[f"{faults}" if faults else verdict.status] += 1
    return {name: count / TRIALS for name, count in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    lines = [
        f"check_chance: {datetime.date.today()}, truemfu {truemfu.__version__}, Python"
        f" {platform.python_version()}; {TRIALS:,} random figures a row",
        "",
        "| digits | devices | unexplained | one fault | two faults | agrees |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for gpus in (1, 8):
        for digits in (2, 3, 4):
            found = shares(digits, gpus)
            cells = [f"{100 * found.get(name, 0):.1f} %" for name in ("unexplained", "1", "2", "agrees")]
            lines.append(f"| {digits} | {gpus} | {' | '.join(cells)} |")
    print("\n".join(lines))
    if output is not None:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
