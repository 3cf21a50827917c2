"""Logs of other tools: each format, the last step, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from truemfu.check.logged import Logged
from truemfu.check.readers import read_log
from truemfu.errors import RecordError

LINES = {
    "torchtitan": "\x1b[36m[titan] step: 9  loss: 3.1  tps: 5,615  tflops: 325.20  mfu: 32.88%\x1b[39m",
    "Megatron-LM": "iteration 43/ 100 | elapsed time per iteration (ms): 5444.9 | "
    "throughput per GPU (TFLOP/s/GPU): 239.8 | global batch size:   128 |",
    "Megatron-Bridge": "Step Time : 12.78s GPU utilization: 528.1MODEL_TFLOP/s/GPU",
    "NeMo": "iteration 19/99 | global_batch_size: 128 | train_step_timing in s: 12.64 | "
    "TFLOPS_per_GPU: 533.9",
    "verl": "step:2 - global_seqlen/mean:547190.500 - perf/mfu/actor:0.318 - "
    "timing_s/update_actor:14.302 - timing_s/step:96.551",
    "nanochat": "step 00004/21400 (0.02%) | loss: 8.8 | dt: 989.44ms | tok/sec: 529,882 | mfu: 74.13 | "
    "total time: 0.00m",
    "nanoGPT": "iter 390: loss 4.6022, time 33637.29ms, mfu 0.96%",
    "prime-rl": "step: 8, loss: 975.9991, tokens_per_second: 76957.79, mfu: 42.46",
    "MaxText": "completed step: 9, seconds: 5.667, TFLOP/s/device: 134.924, Tokens/s/device: 8672.758",
}  # fmt: skip
EXPECTED = {
    "torchtitan": {"mfu": 0.3288, "tflops": 325.2, "tokens_per_s_per_device": 5615.0},
    "Megatron-LM": {"tflops": 239.8, "step_time_s": 5.4449},
    "Megatron-Bridge": {"tflops": 528.1, "step_time_s": 12.78},
    "NeMo": {"tflops": 533.9, "step_time_s": 12.64},
    "verl": {"mfu": 0.318, "step_time_s": 96.551},
    "nanochat": {"mfu": 0.7413, "tokens_per_s": 529_882.0, "step_time_s": 0.98944},
    "nanoGPT": {"mfu": 0.0096, "step_time_s": 33.63729},
    "prime-rl": {"mfu": 0.4246, "tokens_per_s": 76957.79},
    "MaxText": {"tflops": 134.924, "step_time_s": 5.667, "tokens_per_s_per_device": 8672.758},
}
FIGURES = ("mfu", "tflops", "tokens_per_s", "tokens_per_s_per_device", "step_time_s")


def figures(logged: Logged) -> dict[str, float]:
    return {name: figure.value for name in FIGURES if (figure := getattr(logged, name)) is not None}


def read(tmp_path: Path, text: str, gpus: int | None = None) -> Logged:
    path = tmp_path / "train.log"
    path.write_text(text, encoding="utf-8")
    return read_log(path, gpus)


@pytest.mark.parametrize("tool", LINES)
def test_a_line_of_every_tool_is_read(tmp_path: Path, tool: str) -> None:
    logged = read(tmp_path, f"some start-up: mfu\n{LINES[tool]}\nthe end\n", gpus=4)
    assert logged.source.startswith(f"{tool},")
    assert figures(logged) == pytest.approx(EXPECTED[tool])
    if tool == "verl":
        assert logged.step_tokens == 4 * 547190.5
        assert {name: part.value for name, part in logged.part_times_s.items()} == {
            "timing_s/update_actor": 14.302
        }
    assert logged.batch == (128 if tool in ("Megatron-LM", "NeMo") else None)


def test_the_last_step_counts_and_arguments_are_read(tmp_path: Path) -> None:
    arguments = (
        "  seq_length ...................................... 2048\n  world_size ........................ 16\n"
    )
    logged = read(
        tmp_path, arguments + LINES["Megatron-LM"] + "\n" + LINES["Megatron-LM"].replace("239.8", "41")
    )
    assert logged.tflops is not None
    assert (logged.tflops.value, logged.seq, logged.gpus, logged.batch) == (41.0, 2048, 16, 128)
    tokens = read(tmp_path, "tokens per iteration will be: 262,144\n" + LINES["nanoGPT"])
    assert tokens.step_tokens == 262_144


def test_sparse_rows_of_a_history_are_put_together(tmp_path: Path) -> None:
    rows = [
        {"mfu(%)": 30.1, "tflops": 298.0},
        {"throughput(tps)": 5000},
        {"mfu(%)": 32.88, "val_loss": "NaN"},
    ]
    expected = {"mfu": 0.3288, "tflops": 298.0, "tokens_per_s_per_device": 5000.0}
    for text in ("\n".join(map(json.dumps, rows)), json.dumps(rows)):
        assert figures(read(tmp_path, text)) == pytest.approx(expected)
    table = "step,mfu(%),tflops,throughput(tps)\n1,30.1,298.0,\n2,,,5000\n3,32.88,,\n"
    assert figures(read(tmp_path, table)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no step with an MFU or TFLOP/s"),
        ("loss 3.1\nloss 3.0\n", "no step with an MFU or TFLOP/s"),
        ('{"mfu": 41.0}', "no step with an MFU or TFLOP/s"),  # a fraction or percent? not known
        ('{"perf/mfu/actor": "NaN"}', "no step with an MFU or TFLOP/s"),
        ('{"log_history": [], "total_flos": 1}', "has no train_runtime"),
        ('{"log_history": [{"train_runtime": 1.0}]}', "not a complete state"),
        ("[[[[", "no step with an MFU or TFLOP/s"),
        ("\x00\x01\x02,\x00", "no step with an MFU or TFLOP/s"),
    ],
)
def test_a_file_without_a_figure_is_one_clear_error(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*gone.log.*No such file"):
        read_log(tmp_path / "gone.log", None)


def test_a_batch_that_three_decimals_cannot_tell_is_not_guessed(tmp_path: Path) -> None:
    row = {"step": 6, "total_flos": 7e9, "train_runtime": 600.0, "train_samples_per_second": 0.08,
           "train_steps_per_second": 0.01}  # fmt: skip
    assert read(tmp_path, json.dumps({"log_history": [row]})).batch == 8
    row["train_samples_per_second"], row["train_steps_per_second"] = 0.64, 0.01
    assert read(tmp_path, json.dumps({"log_history": [row]})).batch is None
