"""`truemfu count` as people call it: models from the Hugging Face cache, LoRA, fp8, MFU, days and cost."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import truth
from tests.command_line import Run, caller
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from truemfu import count_flops
from truemfu.flops import BatchRequest, BuildOptions, model_from_config, parse_lora
from truemfu.flops.models.example_batch import example_batch
from truemfu.hardware.specs import DEVICES
from truemfu.training_plan import TrainingPlan

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NAME = "some-org/Tiny-Llama-1.5"
SHAPE = ("--batch", "2", "--seq", "16")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.delenv("TRUEMFU_PEAK_TFLOPS", raising=False)
    return caller(capsys)


@pytest.fixture
def config(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "tiny-llama"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(LLAMA))
    return str(path)


def in_cache(home: Path, name: str, config: dict[str, Any]) -> None:
    """A model's configuration as huggingface_hub leaves it: a link from the snapshot to a blob."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for made in (folder / "blobs", folder / "refs", snapshot):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    (folder / "blobs" / "fedcba").write_text(json.dumps(config))
    (snapshot / "config.json").symlink_to("../../blobs/fedcba")


def counted(run: Run, *arguments: str) -> dict[str, Any]:
    result = run("count", *arguments, "--json")
    assert result.code == 0, result.err
    data: dict[str, Any] = json.loads(result.out)
    return data


def one_error(run: Run, *arguments: str) -> str:
    result = run("count", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    return result.err


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; huggingface_hub reads HF_HOME once, when it is imported."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "hf"


def test_a_name_of_the_hub_is_its_configuration_in_the_cache(run: Run, cache: Path, config: str) -> None:
    in_cache(cache, NAME, LLAMA)
    data, from_file = counted(run, NAME, *SHAPE), counted(run, config, *SHAPE)
    assert data.pop("model") == NAME
    assert from_file.pop("model") == config
    assert data == from_file
    assert data["model_class"] == "LlamaForCausalLM"


def test_a_name_without_an_organisation_is_found_too(run: Run, cache: Path) -> None:
    in_cache(cache, "tinyllama", LLAMA)
    assert counted(run, "tinyllama", *SHAPE)["model_class"] == "LlamaForCausalLM"


def test_the_cache_is_that_of_hf_home(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    in_cache(tmp_path / "elsewhere", NAME, LLAMA)
    done = subprocess.run(
        [sys.executable, "-m", "truemfu", "count", NAME, *SHAPE, "--json"],
        env={**os.environ, "HF_HOME": str(tmp_path / "elsewhere")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["model_class"] == "LlamaForCausalLM"


def test_what_is_not_cached_is_one_line_with_the_command_that_downloads_it(run: Run, cache: Path) -> None:
    assert "hf download some-org/Other config.json" in one_error(run, "some-org/Other")
    folder = cache / "hub" / "models--some-org--Other"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    (folder / ".no_exist" / "abc").mkdir(parents=True)
    (folder / ".no_exist" / "abc" / "config.json").touch()
    assert "hf download some-org/Other config.json" in one_error(run, "some-org/Other")


def test_the_command_that_downloads_is_one_that_the_installed_hub_has() -> None:
    program = Path(sys.executable).with_name("hf")
    if not program.exists():
        pytest.skip("huggingface_hub has no `hf` here")
    done = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert re.search(r"\brepo_id \[filenames\b", done.stdout, re.IGNORECASE)


def test_without_huggingface_hub_nothing_is_cached(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "hf download" in one_error(run, NAME)


@pytest.mark.parametrize("name", ["a/b/c", "folder/config.json", "../up", "-a/b c", "org/--x--" + "y" * 200])
def test_what_is_no_name_of_the_hub_is_not_offered_for_download(run: Run, cache: Path, name: str) -> None:
    assert "hf download" not in one_error(run, "--", name)


LORA = ("--lora", "r=4,targets=q_proj+v_proj")


def built(dtype: torch.dtype) -> tuple[torch.nn.Module, Any]:
    model = model_from_config(LLAMA, BuildOptions(dtype=dtype))
    return model, example_batch(model, BatchRequest(samples=2, length=16))


def has_fused_grouped_queries() -> bool:
    """Whether attention with fewer keys than queries is fused on a CPU; torch 2.6 multiplies in fp32."""
    queries, keys = torch.zeros(2, 4, 16, 8), torch.zeros(2, 2, 16, 8)
    chosen = torch._fused_sdp_choice(queries, keys, keys, is_causal=True, enable_gqa=True)
    return chosen == SDPBackend.FLASH_ATTENTION.value


def rotary_multiplies(model: Any) -> bool:
    """Whether the rotary embedding of this transformers is a product of matrices, in fp32."""
    rotary = copy.deepcopy(model.model.rotary_emb).to_empty(device="cpu")
    with FlopCounterMode(display=False) as counter:
        rotary(torch.zeros(1, 16, 8), torch.arange(16)[None])
    return counter.get_total_flops() > 0


def test_lora_counts_what_a_model_of_peft_does(run: Run, config: str) -> None:
    peft = pytest.importorskip("peft")
    data = counted(run, config, *SHAPE, *LORA)
    base, batch = built(torch.bfloat16)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    expected = count_flops(adapted, batch)
    for part in ("forward", "backward", "recompute"):
        assert data[part] == getattr(expected, part)
    trained, total = adapted.get_nb_trainable_parameters()
    assert (data["trained_parameters"], data["parameters"]) == (trained, total)
    has_fp32 = rotary_multiplies(base) or not has_fused_grouped_queries()
    assert set(data["by_dtype"]) == ({"bf16", "fp32"} if has_fp32 else {"bf16"})


def test_lora_counts_the_analytic_truth(run: Run, config: str) -> None:
    pytest.importorskip("peft")
    data = counted(run, config, *SHAPE, *LORA, "--dtype", "fp32")
    model, batch = built(torch.float32)
    expected = truth.llama_lora(model, batch, rank=4)
    rotary = data["by_module"].get("model.rotary_emb", 0)  # older transformers multiply matrices there
    assert data["forward"] - rotary == expected.forward
    recompute = expected.recompute if has_fused_grouped_queries() else 0
    assert (data["backward"], data["recompute"]) == (expected.backward, recompute)


@pytest.mark.parametrize("targets", ["", ",targets=all-linear"])
def test_lora_without_names_is_pefts_choice(run: Run, config: str, targets: str) -> None:
    peft = pytest.importorskip("peft")
    data = counted(run, config, *SHAPE, "--lora", f"r=4{targets}")
    base, batch = built(torch.bfloat16)
    chosen = peft.LoraConfig(r=4, target_modules="all-linear" if targets else None, task_type="CAUSAL_LM")
    assert data["model_flops"] == count_flops(peft.get_peft_model(base, chosen), batch).model_flops


def test_lora_with_checkpointing_trains_every_layer(run: Run, config: str) -> None:
    peft = pytest.importorskip("peft")
    data = counted(run, config, *SHAPE, *LORA, "--checkpointing")
    base, batch = built(torch.bfloat16)
    base.gradient_checkpointing_enable()
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    expected = count_flops(adapted, batch)
    assert (data["model_flops"], data["recompute"]) == (expected.model_flops, expected.recompute)


def test_lora_works_on_any_model(run: Run) -> None:
    pytest.importorskip("peft")
    data = counted(run, "tiny", *SHAPE, "--lora", "r=4,targets=query+value")
    assert data["trained_parameters"] == 2 * 2 * 2 * 4 * 64
    assert "512 trained" not in run("count", "tiny", *SHAPE).out
    assert "2,048 trained" in run("count", "tiny", *SHAPE, "--lora", "r=4,targets=query+value").out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("16", "r=16,targets=q_proj+v_proj; got '16'"),
        ("r=0", "at least 1"),
        ("r=x", "at least 1"),
        ("targets=q_proj", "at least 1"),
        ("r=4,target=q_proj", "did you mean 'targets'?"),
        ("r=4,r=8", "got 'r=8'"),
        ("r=4,targets=a++b", "empty name"),
        ("r=4,targets=nothing", "query+key+value+out+up+down+head"),
        ("r=4", "query+key+value+out+up+down+head"),
    ],
)
def test_a_wrong_lora_is_one_line(run: Run, text: str, message: str) -> None:
    pytest.importorskip("peft")
    assert message in one_error(run, "tiny", "--lora", text)


def test_lora_options_are_read() -> None:
    options = parse_lora(" r = 8 , targets = a + b.c ")
    assert (options.rank, options.targets) == (8, ("a", "b.c"))


H100 = next(spec for spec in DEVICES if spec.key == "h100-sxm")


def test_tokens_per_second_on_a_device_give_the_mfu(run: Run) -> None:
    result = run("count", "tiny", *SHAPE, "--device", "H100", "--tokens-per-second", "1e6", "--json")
    data = json.loads(result.out)
    assert result.err == "note: H100 is taken as h100-sxm; its other variants: h100-pcie, h100-nvl\n"
    plan, per_token = data["plan"], data["model_flops"] / 32
    assert plan["flops_per_token"] == per_token
    assert plan["peak_flops_per_s"] == pytest.approx(H100.peak("bf16"))
    assert plan["mfu"] == pytest.approx(per_token * 1e6 / H100.peak("bf16"))
    assert plan["hfu"] is None
    assert plan["days"] is plan["cost"] is plan["tokens"] is None
    on_eight = counted(
        run, "tiny", *SHAPE, "--device", "h100-sxm", "--gpus", "8", "--tokens-per-second", "1M"
    )
    assert on_eight["plan"]["mfu"] == pytest.approx(plan["mfu"] / 8)


def test_fp8_has_the_same_flops_and_another_peak(run: Run) -> None:
    call = ("tiny", *SHAPE, "--device", "h100-sxm", "--tokens-per-second", "1e6")
    plain, fp8 = counted(run, *call), counted(run, *call, "--dtype", "fp8")
    assert fp8["model_flops"] == plain["model_flops"]
    assert plain["plan"]["peak_flops_per_s"] == pytest.approx(H100.peak("bf16"))
    assert fp8["plan"]["peak_flops_per_s"] == pytest.approx(H100.peak("fp8"))
    assert fp8["plan"]["mfu"] == pytest.approx(plain["plan"]["mfu"] * H100.peak("bf16") / H100.peak("fp8"))
    assert "the peak is the fp8 peak" in run("count", *call, "--dtype", "float8_e4m3fn").out


def test_an_mfu_above_the_peak_has_a_note(run: Run) -> None:
    found = run("count", "tiny", "--device", "H100", "--tokens-per-second", "1e12")
    assert found.code == 0
    assert "note: an MFU above 100 % is impossible" in " ".join(found.out.split())


def test_a_chip_without_fp8_has_no_mfu_in_it(run: Run) -> None:
    call = (
        "count",
        "tiny",
        *SHAPE,
        "--device",
        "a100-sxm4-80gb",
        "--dtype",
        "fp8",
        "--tokens-per-second",
        "1",
    )
    result = run(*call)
    assert result.code == 0
    assert (
        "MFU               unknown: no fp8 peak is known for NVIDIA A100 SXM4 80GB; it has fp64,"
        in result.out
    )


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("h-100", "h100"), ("rtx_4090", "rtx-4090"), ("MI-300X", "mi300x"), ("a1000", "a100"), ("1080", None)],
)
def test_a_device_that_is_not_in_the_table_gets_the_name_it_is_most_like(
    run: Run, typed: str, hint: str | None
) -> None:
    found = re.search(r"did you mean '(.*?)'", run("count", "tiny", "--device", typed).err)
    assert (found and found[1]) == hint


def test_a_sequence_that_is_too_long_is_one_clear_line(run: Run) -> None:
    result = run("count", "gpt2", "--seq", "2000")
    assert result.code == 2
    assert result.err == "error: 2,000 tokens per sample are too many: GPT2LMHeadModel has 1,024 positions\n"


def test_days_and_cost_follow_from_tokens_gpus_mfu_and_price(run: Run) -> None:
    call = ("tiny", *SHAPE, "--device", "h100-sxm", "--gpus", "1024", "--tokens", "15e12", "--mfu", "0.4")
    data = counted(run, *call, "--price", "2.5")
    plan = data["plan"]
    seconds = 15e12 * data["model_flops"] / 32 / (1024 * 0.4 * H100.peak("bf16"))
    assert plan["days"] == pytest.approx(seconds / 86_400)
    assert plan["gpu_hours"] == pytest.approx(1024 * seconds / 3600)
    assert plan["cost"] == pytest.approx(1024 * seconds / 3600 * 2.5)
    assert plan["cost_per_million_tokens"] == pytest.approx(plan["cost"] / 15e6)
    assert plan["total_flops"] == pytest.approx(15e12 * data["model_flops"] / 32)
    assert counted(run, *call)["plan"]["cost"] is None
    text = run("count", *call).out
    assert "unknown: give --price" in text
    assert "Assumed: every step is like this one, of sequences of 16 tokens" in text


def test_days_follow_from_a_rate_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: False)  # whose peak would tell the MFU
    plan = counted(run, "tiny", *SHAPE, "--tokens", "1B", "--tokens-per-second", "1e6")["plan"]
    assert plan["days"] == pytest.approx(1000 / 86_400)
    assert plan["mfu"] is plan["peak_flops_per_s"] is None
    unknown = counted(run, "tiny", *SHAPE, "--tokens", "1B")["plan"]
    assert unknown["days"] is unknown["mfu"] is unknown["gpu_hours"] is None


def test_the_environment_overrides_the_peak_here_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    plan = counted(run, "tiny", *SHAPE, "--tokens-per-second", "1000")["plan"]
    assert (plan["peak_flops_per_s"], plan["peak_source"]) == (1e12, "override")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "--gpus must be at least 1; got 0"),
        (["--gpus", "8"], "need one of --tokens"),
        (["--price", "2"], "need one of --tokens"),
        (["--mfu", "40"], "'40' is not a positive number up to 1, such as 0.4"),
        (["--mfu", "0"], "'0' is not a positive number"),
        (["--tokens", "15X"], "'15X' is not a positive number, such as 15e12 or 15T"),
        (["--tokens", "nan"], "not a positive number"),
        (["--tokens", "1e999"], "not a positive number"),
        (["--tokens", "1.2.3"], "not a positive number"),
        (["--price", "-1"], "not a positive number"),
        (["--tokens-per-second", "fast"], "such as 6900"),
        (["--mfu", "0.4", "--tokens-per-second", "1"], "leave out --mfu"),
        (["--device", "H1000"], "no device 'H1000' in the table"),
        (["--device", "rtx"], "could be several devices"),
        (["--device", "6000"], "could be several devices"),
        (["--device", ""], "could be several devices"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_line(run: Run, arguments: list[str], message: str) -> None:
    assert message in one_error(run, "tiny", *arguments)


def test_a_batch_without_tokens_has_no_plan(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    vit = {"model_type": "vit", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    (tmp_path / "vit.json").write_text(json.dumps({**vit, "num_attention_heads": 4, "image_size": 32}))
    assert "has no tokens in its batch" in one_error(run, "vit.json", "--device", "h200")


@pytest.mark.parametrize(
    ("text", "amount"), [("15e12", 15e12), ("15T", 15e12), ("1.5b", 1.5e9), ("6,900", 6900)]
)
def test_amounts_are_read_as_people_write_them(run: Run, text: str, amount: float) -> None:
    assert counted(run, "tiny", *SHAPE, "--tokens", text)["plan"]["tokens"] == amount


def test_a_plan_at_a_rate_and_at_its_mfu_is_the_same() -> None:
    known = {"flops_per_token": 6e9, "gpus": 8, "peak_flops_per_s": 1e15, "peak_source": "x", "tokens": 1e12}
    by_rate = TrainingPlan(**known, tokens_per_second=5e5, price_per_gpu_hour=3.0).completed()
    by_mfu = TrainingPlan(**known, mfu=by_rate.mfu, price_per_gpu_hour=3.0).completed()
    assert by_rate.mfu == pytest.approx(6e9 * 5e5 / 8e15)
    for key, value in by_rate.as_dict().items():
        if isinstance(value, float):
            assert math.isclose(by_mfu.as_dict()[key], value)


def test_a_device_that_is_named_has_its_own_peak(
    run: Run, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRUEMFU_PEAK_TFLOPS", "1")
    named = json.loads(run("count", config, *SHAPE, "--device", "h100-sxm", "--mfu", "0.4", "--json").out)[
        "plan"
    ]
    here = json.loads(run("count", config, *SHAPE, "--mfu", "0.4", "--json").out)["plan"]
    assert named["peak_source"].startswith("datasheet: NVIDIA H100")
    assert (here["peak_flops_per_s"], here["peak_source"]) == (1e12, "override")
