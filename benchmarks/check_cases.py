"""What `truemfu check` says of figures that others logged.

Why: an explanation is only worth something if it holds on figures that nobody made for it. Most cases are
figures of public issues, some are runs of other tools on a CPU, and three are made in a tool's format
(tests/check/logs/README.md has the source of every file).

Prints: date and versions; for every case its source, the call, and what it prints; last, one line of JSON.

    PYTHONPATH=src python benchmarks/check_cases.py [--output benchmarks/results/check_cases.txt]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

import truemfu
from truemfu.cli import main as truemfu_main

LOGS = Path(__file__).parents[1] / "tests" / "check" / "logs"


@dataclass(frozen=True)
class Case:
    """A call of `truemfu check` in the folder of logs; `expected` are keys of faults, or a status."""

    name: str
    source: str
    call: str
    expected: str
    environment: Mapping[str, str] = field(default_factory=dict)


_8B = "--model llama-3-8b --seq 8192"
CASES = (
    Case(
        "olmo-core-817",
        "allenai/OLMo-core#817: mean of a run on B300",
        "--mfu 88.32 --tflops 275.6 --device B300",
        "peak_of_another_chip",
    ),
    Case(
        "olmo-core-817-instant",
        "allenai/OLMo-core#817: one step of it",
        "--mfu 105.70 --tflops 329.8 --device B300",
        "peak_of_another_chip",
    ),
    Case(
        "fms-fsdp-89",
        "foundation-model-stack/fms-fsdp#89: 480 of 1,979 TFLOP/s on H100",
        "--mfu 24.3 --tflops 480 --device h100-sxm",
        "sparse_peak",
    ),
    Case(
        "megatron-1565",
        "NVIDIA/Megatron-LM#1565: 420 of 1,979 TFLOP/s on H200",
        "--mfu 21.2 --tflops 420 --device h200",
        "sparse_peak",
    ),
    Case(
        "prime-rl-20",
        "PrimeIntellect-ai/prime-rl#20, before: the thread names neither model nor device",
        "prime_rl_20.log --model qwen2.5-7b --seq 1024 --gpus 8 --device h100-sxm",
        "devices",
    ),
    Case(
        "prime-rl-20-fixed",
        "PrimeIntellect-ai/prime-rl#20, after",
        "prime_rl_20_fixed.log --model qwen2.5-7b --seq 1024 --gpus 8 --device h100-sxm",
        "agrees",
    ),
    Case(
        "nanochat-157",
        "karpathy/nanochat#157: depth 20 on an RTX 4090",
        "nanochat_157.log --model nanochat_d20_config.json --batch 256 --seq 2048 --gpus 1 --device rtx-4090",
        "peak_of_another_chip",
    ),
    Case(
        "nanochat-147",
        "karpathy/nanochat#147: depth 20 on 8 A100, with their peak",
        "nanochat_147.log --model nanochat_d20_config.json --batch 256 --seq 2048 --gpus 8"
        " --device a100-sxm4-80gb",
        "agrees",
    ),
    Case(
        "nanogpt-466",
        "karpathy/nanoGPT#466: GPT-2 on two TITAN Xp, which have no row: 12.15 TFLOP/s in fp32",
        "nanogpt_466.log --model nanogpt_466_config.json --seq 512 --gpus 2",
        "peak_of_another_chip",
        {"TRUEMFU_PEAK_TFLOPS": "12.15"},
    ),
    Case(
        "torchtitan-1884",
        "pytorch/torchtitan#1884: Llama 3 8B on H100",
        f"torchtitan_1884.log {_8B} --device h100-sxm",
        "agrees",
    ),
    Case(
        "torchtitan-1884-causal",
        "the same, where the pairs of the mask should count",
        f"torchtitan_1884.log {_8B} --device h100-sxm --attention-convention causal",
        "attention_all_pairs",
    ),
    Case(
        "nemo-347",
        "NVIDIA/NeMo-Framework-Launcher#347: Llama 3 8B, 11,879 tokens/s per GPU",
        f"--tflops 688 --tokens-per-second 11879 {_8B}",
        "agrees",
    ),
    Case(
        "megatron-756",
        "NVIDIA/Megatron-LM#756: Mixtral 8x7B on 16 H100; the length is assumed",
        "megatron_756.log --model mixtral-8x7b --seq 2048 --gpus 16",
        "agrees",
    ),
    Case(
        "hf-blog-1649",
        "huggingface/blog#1649: 70 B parameters on 16 A100, 500 steps in 13.5 h",
        "--tflops 142 --parameters 70e9 --batch 16 --seq 2048 --step-time 97.2 --gpus 16",
        "devices",
    ),
    Case(
        "verl-1208",
        "verl-project/verl#1208: Qwen2.5 0.5B on 4 GH200, time of the actor's update, mean length",
        "verl_1208.log --model qwen2.5-0.5b --seq 427 --gpus 4 --device gh200-96gb --step-time 14.302",
        "unexplained",
    ),
    Case(
        "verl-formula",
        "verl's formula on Qwen3-0.6B, made in its format",
        "verl_history.jsonl --model qwen3-0.6b --seq 1024 --gpus 8 --device h100-sxm",
        "embeddings+part_of_the_step",
    ),
    Case(
        "trainer",
        "transformers' Trainer, a run on a CPU",
        "trainer_state.json --model trainer_config.json --seq 128",
        "no_attention",
    ),
    Case(
        "trainer-padded",
        "transformers' Trainer, a run on a CPU: 40 of 128 tokens are padding, the head shares its weight",
        "trainer_state_padded.json --model trainer_padded_config.json --seq 128 --padding 31.25",
        "no_head+padding",
    ),
    Case(
        "trl",
        "TRL's SFTTrainer, a run on a CPU",
        "trl_trainer_state.json --model trl_config.json --batch 8 --seq 256",
        "no_head",
    ),
    Case(
        "lightning",
        "Lightning's ThroughputMonitor, a run on a CPU",
        "lightning_metrics.csv --model lightning_config.json --seq 512",
        "agrees",
    ),
    Case(
        "composer-recompute",
        "an HFU logged as MFU, made in Composer's format",
        f"composer_recompute.csv {_8B} --device h100-sxm",
        "recompute",
    ),
    Case(
        "composer-6n",
        "6 × parameters × tokens, made in Composer's format",
        f"composer_6n.csv {_8B} --device h100-sxm",
        "6n",
    ),
)


def called(case: Case, *more: str) -> tuple[int, str]:
    """Exit code and output of `truemfu check`, in the folder of logs."""
    before, kept = Path.cwd(), dict(os.environ)
    said, code = io.StringIO(), 0
    try:
        os.chdir(LOGS)
        os.environ.update(case.environment)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
            truemfu_main(["check", *shlex.split(case.call), *more])
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(kept)
    return code, said.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    output: Path | None = parser.parse_args().output
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    lines = [
        f"check_cases: {datetime.date.today()}, {versions}, Python {platform.python_version()},"
        f" truemfu {truemfu.__version__}"
    ]
    codes = {}
    for case in CASES:
        codes[case.name], text = called(case)
        variables = "".join(f"{name}={value} " for name, value in case.environment.items())
        shown = [line.rstrip() for line in text.rstrip().splitlines()]
        lines += ["", f"## {case.name}", case.source, f"$ {variables}truemfu check {case.call}", *shown]
        lines += [f"exit code {codes[case.name]}"]
    lines += ["", json.dumps({"exit_codes": codes})]
    print("\n".join(lines))
    if output is not None:
        output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
