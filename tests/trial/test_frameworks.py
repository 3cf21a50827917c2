"""Twelve scripts, of frameworks and of loops of their own, under `truemfu try`, with more steps alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.trial.trials import longer, tried, written

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EPOCHS = ("= 2, 4, ", "= 200, 4, ")
NANOGPT = ("= 4, 20, 5, 10", "= 4, 20000, 15, 10")
SCRIPTS = {
    "nanogpt": (longer("nanogpt", NANOGPT), "fused_optimizer", ()),
    "hf_trainer": (longer("hf_trainer", ("= 8, 2, 2, 16, 48", "= 500, 2, 2, 16, 48")), "autocast_bf16", ()),
    "trl_sft": (longer("trl_sft", ("= 6, 2", "= 500, 2")), "autocast_bf16", ()),
    "lightning_module": (longer("lightning_module", EPOCHS), "foreach_optimizer", ()),
    "accelerate_loop": (longer("accelerate_loop", EPOCHS), "autocast_bf16", ()),
    "ddp": (longer("ddp", EPOCHS), "autocast_bf16", TORCHRUN),
    "lora": (longer("lora", ("= 6, 2", "= 500, 2")), "autocast_bf16", ()),
    "rnn_lm": (longer("rnn_lm", ("= 40, 16, 4, 8, 0", "= 40, 16, 4, 500, 0")), "foreach_optimizer", ()),
    "image_classification": (
        longer("image_classification", ("= 3, 8, 64, 128", "= 300, 8, 64, 128")),
        "channels_last",
        (),
    ),
    "accumulation": (longer("accumulation", ("= 8, 4, 2", "= 500, 4, 2")), "foreach_optimizer", ()),
    "dcgan": (longer("dcgan", ("= 8, 4, 16", "= 500, 4, 16")), "foreach_optimizer", ()),
    "actor_critic": (longer("actor_critic", ("= 10, 8, 6", "= 500, 8, 6")), "foreach_optimizer", ()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_framework_is_tried(tmp_path: Path, name: str) -> None:
    text, remedy, launcher = SCRIPTS[name]
    written(tmp_path, text)
    done = tried(tmp_path, "--only", remedy, "--rounds", "1", call=[sys.executable, *launcher, "train.py"])
    assert done.code == 0, done.stderr
    case = done.case(remedy)
    assert case["verdict"] in ("gains", "loses", "no difference shown")
    assert case["gain_low_s"] < case["gain_s"] < case["gain_high_s"]
    assert case["losses"]["steps"] == 23
    assert case["losses"]["unchanged_difference"] == 0
    assert case["losses"]["are_identical"] == (remedy == "foreach_optimizer")
    assert [len(run["step_times_s"]) for run in done.trial["runs"]] == [20, 20, 20]
    assert done.trial["runs"][0]["world_size"] == (2 if launcher else 1)
    assert not (tmp_path / "truemfu-runs").exists()
