"""One model under three conventions: how far apart do the FLOPs of a step get?

Why: two MFUs can only be compared if both count the same pairs of tokens, and the difference grows with the
sequence. Counts the reference model of 1.3 B parameters on fake tensors; needs no GPU.

Prints: date and versions; a Markdown table with the FLOPs of one sample at several lengths with all pairs,
with the pairs of the causal mask, and by 6 × parameters × tokens; last, one line of JSON.

    PYTHONPATH=src python benchmarks/conventions.py [--output benchmarks/results/conventions.txt]
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path

import torch

import truemfu
from truemfu import Convention, count_flops
from truemfu.sweep.worker.models import build_reference_model

LENGTHS = (512, 2048, 8192, 32768)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    with torch.device("meta"):
        model = build_reference_model("1b", device="meta", dtype=torch.bfloat16)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, truemfu {truemfu.__version__}"
    lines = [
        f"conventions: {datetime.date.today()}, {versions}; 1b, {parameters:,} parameters, one sample",
        "",
        "| tokens | all pairs (`full`) | `causal` | causal ÷ full | 6 × parameters × tokens ÷ full |",
        "| --- | --- | --- | --- | --- |",
    ]
    found = {}
    for length in LENGTHS:
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        batch = {"input_ids": tokens, "labels": tokens}
        full, causal = (
            count_flops(model, batch, convention=Convention(attention=attention)).model_flops
            for attention in ("full", "causal")
        )
        rule = 6 * parameters * length
        found[length] = {"full": full, "causal": causal, "6N": rule}
        lines.append(
            f"| {length:,} | {full / 1e12:.2f} TFLOP | {causal / 1e12:.2f} TFLOP | {causal / full:.3f} | "
            f"{rule / full:.3f} |"
        )
    text = "\n".join([*lines, "", json.dumps(found)]) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
