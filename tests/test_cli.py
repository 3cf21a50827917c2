"""The command line: what it prints, and one line and exit code 2 for every wrong call."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import Run, caller

import truemfu
from truemfu import count_flops
from truemfu.cli.console import short
from truemfu.cli.count import _by_module
from truemfu.flops.models.model_view import BatchRequest
from truemfu.flops.models.targets import resolve_target
from truemfu.sweep.worker.models import REFERENCE_MODELS

FACTORIES = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4, bias=False)
    def forward(self, x):
        return self.layer(x)

class Silent(Plain):
    def forward(self, x):
        self.layer(x)
        return "done"

def fits():
    return Plain(), {"x": torch.zeros(5, 8)}

def wrong_shape():
    return Plain(), {"x": torch.zeros(5, 7)}

def wrong_name():
    return Plain(), {"y": torch.zeros(5, 8)}

def no_tensor():
    return Silent(), {"x": torch.zeros(5, 8)}

def frozen():
    return Plain().requires_grad_(False), {"x": torch.zeros(5, 8)}

def raises():
    raise RuntimeError("no weights here")

def leaves():
    raise SystemExit("too late")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process, from a folder that holds factories and configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "clifactories", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    (tmp_path / "clifactories.py").write_text(FACTORIES)
    (tmp_path / "unknown.json").write_text('{"model_type": "lama"}')
    (tmp_path / "broken.json").write_text("{")

    return caller(capsys)


def counted(run: Run, *arguments: str) -> dict[str, Any]:
    result = run("count", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    data: dict[str, Any] = json.loads(result.out)
    return data


def test_json_has_the_attribute_names_as_keys(run: Run) -> None:
    data = counted(run, "tiny", "--batch", "2", "--seq", "16")
    target = resolve_target("tiny", BatchRequest(samples=2, length=16), named=REFERENCE_MODELS)
    expected = count_flops(target.model, target.batch).as_dict()
    head = {"model": "tiny", "model_class": "ReferenceModel", "parameters": 228_096, "batch": 2, "seq": 16}
    assert data == {**head, "shapes": {"input_ids": [2, 16], "labels": [2, 16]}, **expected}


TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = {**TEXT, "image_size": 28, "patch_size": 14}
WORDS = {**TEXT, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "text": {"model_type": "llama", **WORDS},
    "experts": {"model_type": "mixtral", **WORDS, "num_key_value_heads": 2, "num_local_experts": 4},
    "pictures": {"model_type": "vit", **PICTURE},
    "pictures and words contrasted": {
        "model_type": "clip",
        "text_config": {**WORDS, "max_position_embeddings": 16},
        "vision_config": PICTURE,
    },
    "pictures among words": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **WORDS},
        "vision_config": {"model_type": "clip_vision_model", **PICTURE},
        "image_token_index": 98,
        "image_seq_length": 4,
    },
    "sound": {
        "model_type": "whisper",
        "vocab_size": 99,
        "d_model": 32,
        **{f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
           (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))},
        "max_source_positions": 20,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_json_has_all_that_the_text_shows(run: Run, tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", minversion="5.22")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    call = (str(tmp_path), "--batch", "2", "--seq", "16", "--depth", "9")
    data = counted(run, *call)
    text = " ".join(run("count", *call).out.split())
    shapes = ", ".join(f"{key} {'×'.join(map(str, shape))}" for key, shape in data["shapes"].items())
    assert f"{data['model_class']}, {data['parameters']:,} parameters batch: {shapes} one training" in text
    pairs = {"full": "all pairs"}[data["convention"]["attention"]]
    notes = "".join(f" note: {note}" for note in data["notes"])
    assert text.endswith(f"attention counts {pairs}. Method: {data['method']}.{notes}")
    numbers = {int(n.replace(",", "")) for n in re.findall(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d.])", text)}
    told = {data[key] for key in ("parameters", "forward", "backward", "recompute", "model_flops")}
    told |= {data["hardware_flops"], *data["by_dtype"].values(), *data["uncounted"].values()}
    told |= {flops for _, flops in _by_module(data["by_module"], 9).values()}
    assert numbers <= told


def test_forward_of_tiny_is_this_integer(run: Run) -> None:
    tokens, hidden, layers, vocab, length = 2 * 16, 64, 2, 1000, 16
    linear = 2 * tokens * (layers * 12 * hidden * hidden + hidden * vocab)
    attention = layers * 2 * 2 * tokens * length * hidden
    data = counted(run, "tiny", "--batch", "2", "--seq", "16")
    assert data["forward"] == linear + attention
    assert data["backward"] == 2 * data["forward"]


def test_options_reach_the_count(run: Run) -> None:
    shape = ("--batch", "2", "--seq", "16")
    plain = counted(run, "tiny", *shape)
    causal = counted(run, "tiny", *shape, "--attention-convention", "causal")
    forward = counted(run, "tiny", *shape, "--no-backward")
    checkpointed = counted(run, "tiny", *shape, "--checkpointing")
    assert causal["convention"] == {"attention": "causal"}
    assert plain["forward"] - causal["forward"] == 2 * 2 * 2 * 2 * 64 * (16 * 16 - 16 * 17 // 2)
    assert (forward["forward"], forward["backward"]) == (plain["forward"], 0)
    assert checkpointed["model_flops"] == plain["model_flops"]
    assert checkpointed["recompute"] > plain["recompute"]


def test_dtype_is_bf16_unless_said(run: Run) -> None:
    assert set(counted(run, "tiny", "--seq", "8")["by_dtype"]) == {"bf16"}
    assert set(counted(run, "tiny", "--seq", "8", "--dtype", "fp16")["by_dtype"]) == {"fp16"}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_configuration_counts_the_same_under_each_attention(
    run: Run, tmp_path: Path, implementation: str
) -> None:
    config = {
        "model_type": "llama",
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = counted(run, ".", "--batch", "2", "--seq", "16", "--attn-implementation", implementation)
    projections = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    rotary = data["by_module"].get("model.rotary_emb", 0)  # older transformers multiply matrices there
    assert data["forward"] - rotary == 2 * 32 * (2 * projections + 32 * 99) + 2 * 4 * 32 * 16 * 32


def test_a_factory_brings_its_own_batch_and_says_what_is_not_used(run: Run) -> None:
    result = run("count", "clifactories:fits", "--batch", "3", "--json")
    data = json.loads(result.out)
    assert result.code == 0
    assert result.err == "note: clifactories:fits provides its own batch; --batch not used\n"
    assert (data["batch"], data["seq"], data["parameters"]) == (5, None, 32)
    assert (data["forward"], data["backward"]) == (2 * 5 * 8 * 4, 2 * 5 * 8 * 4)


def test_tables_show_the_exact_integers_and_the_convention(run: Run) -> None:
    data = counted(run, "tiny", "--batch", "2", "--seq", "16")
    result = run("count", "tiny", "--batch", "2", "--seq", "16", "--depth", "1")
    assert (result.code, result.err) == (0, "")
    for value in (data["forward"], data["backward"], data["model_flops"], data["by_module"]["blocks"]):
        assert f"{value:,}" in result.out
    assert "228,096 parameters" in result.out
    assert "attention counts all pairs" in result.out
    assert "blocks.*" not in result.out
    assert "\x1b" not in result.out


BAD_CALLS = {
    "a batch that does not fit": (["count", "clifactories:wrong_shape"], "Plain"),
    "an argument the model has not": (["count", "clifactories:wrong_name"], "does not fit Plain"),
    "a model that returns no tensor": (["count", "clifactories:no_tensor"], "tensor"),
    "a loss that needs no gradient": (["count", "clifactories:frozen"], "gradient"),
    "an unknown architecture": (["count", "unknown.json"], "unknown model_type 'lama'"),
    "a file that is no JSON": (["count", "broken.json"], "not a readable JSON file"),
    "a factory that raises": (["count", "clifactories:raises"], "RuntimeError: no weights here"),
    "a factory that exits": (["count", "clifactories:leaves"], "SystemExit: too late"),
    "a factory that is not there": (["count", "clifactories:nothing"], "no attribute 'nothing'"),
    "a module that is not there": (["count", "nowhere:f"], "No module named 'nowhere'"),
    "a model that is not there": (["count", "tinny"], "did you mean 'tiny'?"),
    "a negative batch": (["count", "tiny", "--batch", "-1"], "batch size must be at least 1; got -1"),
    "an empty sequence": (["count", "tiny", "--seq", "0"], "sequence length must be at least 1; got 0"),
    "a negative number of images": (["count", "tiny", "--images", "-2"], "at least 0; got -2"),
    "a negative image size": (["count", "tiny", "--image-size", "-2"], "at least 1; got -2"),
    "a negative depth": (["count", "tiny", "--depth", "-1"], "depth must be at least 0"),
    "a batch that is no number": (["count", "tiny", "--batch", "x"], "'x' is not a valid integer"),
    "an unknown dtype": (["count", "tiny", "--dtype", "bf17"], "did you mean 'bf16'?"),
    "an unknown convention": (["count", "tiny", "--attention-convention", "half"], "'half' is not one of"),
    "an attention that cannot be chosen": (["count", "tiny", "--attn-implementation", "eager"], "tiny"),
    "checkpointing without support": (
        ["count", "clifactories:fits", "--checkpointing"],
        "cannot be checkpointed",
    ),
    "no model": (["count"], "MODEL"),
    "an unknown command": (["cuont"], "Did you mean 'count'?"),
    "an unknown option": (["count", "tiny", "--bach", "4"], "--bach"),
    "an unknown dtype for the ceiling": (["peak", "--dtype", "bf17"], "bf17"),
    "a negative time": (["peak", "--seconds", "-1"], "seconds must be"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_wrong_call_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert message in result.err


def test_libraries_add_nothing_to_that_line(run: Run, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from truemfu.cli import main; main()",
        "count",
        "clifactories:wrong_shape",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_debug_adds_the_traceback(run: Run) -> None:
    result = run("count", "clifactories:raises", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1].startswith("error: the factory")


def test_devices_lists_every_row_and_this_machine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from truemfu.hardware.specs import DEVICES

    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    result = run("devices")
    assert result.code == 0
    assert all(spec.name in result.out for spec in DEVICES)
    assert "this machine: " in result.out
    data = json.loads(run("devices", "--json").out)
    assert [row["key"] for row in data["devices"]] == [spec.key for spec in DEVICES]
    assert set(data["this_machine"]) == {"name", "match", "override_flops_per_s"}


def test_devices_says_that_the_environment_overrides(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "123.5")
    assert "TRUEMFU_PEAK_TFLOPS overrides the table: 123.5 TFLOP/s" in run("devices").out
    assert json.loads(run("devices", "--json").out)["this_machine"]["override_flops_per_s"] == 123.5e12


def test_peak_measures_something(run: Run) -> None:
    (ceiling,) = json.loads(run("peak", "--dtype", "fp32", "--seconds", "0.05", "--json").out)
    assert ceiling["dtype"] == "fp32"
    assert ceiling["burst_flops_per_s"] > 1e8
    assert "fp32" in run("peak", "--dtype", "fp32", "--seconds", "0.05").out


def test_help_teaches_and_version_is_the_packages(run: Run) -> None:
    assert run().out == run("--help").out
    assert "truemfu count 1b --batch 4 --seq 512" in run("--help").out
    assert "package.module:factory" in run("count", "--help").out
    assert run("--version").out == f"truemfu, version {truemfu.__version__}\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = f"{sys.executable} -c 'from truemfu.cli import main; main()' devices"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{program} | head -n 1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1.6344e13, "16.34 T"), (2.5e18, "2.5 E"), (2e22, "2e+04 E")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "x/" * 5000, "\x1b]0;t\x07" * 100])
@pytest.mark.parametrize(
    "arguments",
    [
        ["count", "NAME"],
        ["report", "NAME"],
        ["report", ".", "-o", "NAME"],
        ["summarize", "--logs-dir", "NAME"],
        ["summarize", "--logs-dir", ".", "-o", "NAME"],
        ["sweep", "--config", "NAME"],
        ["sweep", "--output", "NAME", "--trainer", "NAME"],
        ["audit", "--csv", "NAME"],
        ["top", "--replay", "NAME"],
    ],
)
def test_what_cannot_be_a_file_name_is_one_short_line(
    run: Run, arguments: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*(name if argument == "NAME" else argument for argument in arguments))
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"error: .{1,620}\n", result.err)
    assert result.err[:-1].isprintable()
    assert "unexpected" not in result.err


@pytest.mark.parametrize("option", ["--batch", "--seq", "--images", "--image-size"])
@pytest.mark.parametrize("number", ["99999999999999999999", "9" * 10_000])
def test_an_absurd_size_is_one_short_line(run: Run, option: str, number: str) -> None:
    result = run("count", "tiny", option, number)
    assert (result.code, result.out) == (2, "")
    assert re.fullmatch(r"error: .{1,620}\n", result.err)
    assert "C++" not in result.err


def test_commands_are_in_the_order_in_which_they_are_needed(run: Run) -> None:
    help_text = run("--help").out
    listed = re.findall(r"^  ([a-z]+) ", help_text[help_text.index("Commands:") :], re.MULTILINE)
    assert listed[:3] == ["run", "status", "report"]
    assert listed[-1] == "completion"
