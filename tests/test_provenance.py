"""What a record says of its origin: versions, commit and command, and none of the secrets around them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from truemfu.provenance import HIDDEN, library_versions, redacted, redacted_arguments

PLANTED = {
    "after a flag": ["--hf_token", "plantedAAA111222"],
    "behind an equals sign": ["--api-key=plantedBBB111222"],
    "an environment assignment": ["WANDB_API_KEY=0123456789abcdef0123456789abcdefplanted1"],
    "an override": ["+logger.wandb.api_key=plantedCCC111222"],
    "a known form": ["hf_plantedDDDabcdefghijkl"],
    "another known form": ["--note", "sk-plantedEEEabcdefghijkl"],
    "in a URL": ["--store", "https://user:plantedFFF@host/path"],
    "in JSON": ['{"lr": 0.1, "password": "plantedGGG 111"}'],
    "in YAML": ["secret: plantedHHH111"],
    "a header": ["Authorization: Bearer plantedIII111222"],
    "base64 behind a key": ["--private_key", "cGxhbnRlZEpKSg==plantedJJJ"],
    "the environment's value": ["plantedKKK-from-environment"],
    "a short password": ["--db-password=73519264plantedLLL"],
}
HARMLESS = [
    "--max-tokens", "512", "--pad_token_id", "0", "--tokenizer=gpt2", "--key-value-heads=8", "--lr=1e-3",
    "https://host/path", "--model", "meta-llama/Llama-3.1-8B", "--keyboard=us", "--authors", "Smith",
]  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_secrets_in_arguments_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_TOKEN", "plantedKKK-from-environment")
    shown = " ".join(redacted_arguments(["train.py", *PLANTED[name], "--lr", "0.1"]))
    assert "planted" not in shown
    assert HIDDEN in shown
    assert shown.startswith("train.py")
    assert shown.endswith("--lr 0.1")


def test_a_password_may_be_a_number() -> None:
    assert redacted_arguments(["--password", "1234", "--pwd=77"]) == ["--password", HIDDEN, f"--pwd={HIDDEN}"]


def test_other_arguments_stay_as_they_are() -> None:
    assert redacted_arguments(HARMLESS) == HARMLESS


def test_a_text_keeps_what_is_around_a_secret() -> None:
    assert redacted("mlflow: https://me:pw123@host/x failed") == f"mlflow: https://{HIDDEN}@host/x failed"


def test_versions_are_those_of_imported_libraries() -> None:
    code = (
        "import numpy, json, sys; from truemfu.provenance import library_versions; "
        "print(json.dumps([library_versions(), 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    versions, has_torch = json.loads(done.stdout)
    assert set(versions) == {"numpy"}
    assert not has_torch
    import torch

    assert library_versions()["torch"] == str(torch.__version__)


@pytest.mark.parametrize(
    ("given", "secrets"),
    [
        (["--password=hunter2 with spaces"], ["hunter2", "with spaces"]),
        (["--password", "-hunter2"], ["hunter2"]),
        (["--secret", "--abc123xyz"], ["abc123xyz"]),
        (["--hftoken", "xyzzy-plugh"], ["xyzzy-plugh"]),
        (["--authToken", "xyzzy-plugh"], ["xyzzy-plugh"]),
        (["--pass", "xyzzy-plugh"], ["xyzzy-plugh"]),
        (["--pw=xyzzy-plugh"], ["xyzzy-plugh"]),
        (["HF_TOKEN", "abcdefg"], ["abcdefg"]),
        (["postgres://u:p@ss@host/db"], ["p@ss", "ss@"]),
        (['{"password":["a1b2c3","e5f6g7"]}'], ["a1b2c3", "e5f6g7"]),
        (['token="a\\"bcdefg"'], ["bcdefg"]),
        (["https://x.org/?sig=abcdef123"], ["abcdef123"]),
        (["0123456789abcdef0123456789abcdef01234567"], ["0123456789abcdef"]),
    ],
)
def test_odd_spellings_of_secrets_are_hidden(given: list[str], secrets: list[str]) -> None:
    shown = " ".join(redacted_arguments(given))
    assert HIDDEN in shown
    assert not [secret for secret in secrets if secret in shown]


@pytest.mark.parametrize(
    "given",
    [
        ["--max-tokens", "4096", "--tokenizer", "gpt2", "--use-auth-token", "--lr", "0.1"],
        ["--pad_token=50256", "--keys", "a,b", "--num-passes", "3", "--monkey", "see"],
        ["--passes=3", "--author", "me", "https://example.org/a@b"],
    ],
)
def test_what_is_no_secret_is_shown(given: list[str]) -> None:
    assert redacted_arguments(given) == given


TRAINING = """
    import sys, torch
    from torch import nn
    from truemfu import TrainingMonitor

    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    monitor = TrainingMonitor(sys.argv[1], model=model, trackers=TRACKERS)
    for step in range(1, 4):
        loss = model(torch.randn(4, 8)).sum()
        loss.backward()
        monitor.log_step(step, 0, loss, 1.0, 1e-3)
    monitor.close()
"""


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_no_file_of_a_run_holds_a_secret(tracker: str, tmp_path: Path) -> None:
    pytest.importorskip(tracker)
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(textwrap.dedent(TRAINING).replace("TRACKERS", repr([tracker])))
    secrets = {"SOME_SERVICE_TOKEN": "plantedKKK-from-environment", "MY_API_KEY": "plantedMMM-in-environment"}
    arguments = [argument for planted in PLANTED.values() for argument in planted]
    environment = {**os.environ, **secrets, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    done = subprocess.run(
        [sys.executable, str(script), str(out), *arguments, "--lr", "0.5"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = [path for path in out.rglob("*") if path.is_file()]
    assert any(tracker in str(path.relative_to(out)) for path in files)
    assert [str(path) for path in files if b"planted" in path.read_bytes()] == []
    run = json.loads((out / "training_run.json").read_text())
    assert run["command"][:2] == [str(script), str(out)]
    assert run["command"][-2:] == ["--lr", "0.5"]
    assert run["model"] == {
        "name": "Sequential",
        "parameters": 212,
        "trainable_parameters": 68,
        "dtypes": ["float32"],
    }
    assert run["batch_shapes"] == [{"input": [4, 8]}]
    assert run["git_commit"] is None or len(run["git_commit"]) >= 40
    assert run["versions"]["torch"]
    assert "numpy" in run["versions"]
    assert "Sequential, 212 parameters, 68 of them trained" in done.stderr
    assert "input 4×8" in done.stderr
