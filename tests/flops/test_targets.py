"""MODEL arguments become modules and batches; what cannot is one clear error."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from truemfu.convention import Convention
from truemfu.errors import BatchError, ModelError, TruemfuError, UsageError
from truemfu.flops.count.count import count_flops
from truemfu.flops.flop_count import FlopCount
from truemfu.flops.models.example_batch import example_batch
from truemfu.flops.models.hf_config import BuildOptions, model_from_config
from truemfu.flops.models.model_view import BatchRequest
from truemfu.flops.models.targets import Target, count_target, parse_dtype, resolve_target
from truemfu.sweep.worker.models import REFERENCE_MODELS

TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CLIP_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"patch_size": 14, "spatial_merge_size": 2, "num_heads": 4, "depth": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", **TEXT},
    "LlamaForSequenceClassification": {"model_type": "llama", **TEXT},
    "GPT2LMHeadModel": {"model_type": "gpt2", "vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "BertForMaskedLM": {"model_type": "bert", **TEXT},
    "BertForPreTraining": {"model_type": "bert", **TEXT},
    "BertForTokenClassification": {"model_type": "bert", **TEXT},
    "BertForQuestionAnswering": {"model_type": "bert", **TEXT},
    "BertForMultipleChoice": {"model_type": "bert", **TEXT},
    "RobertaForMaskedLM": {"model_type": "roberta", **TEXT, "pad_token_id": 1},
    "T5ForConditionalGeneration": {
        "model_type": "t5",
        "vocab_size": 99,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    },
    "WhisperForConditionalGeneration": {
        "model_type": "whisper",
        "vocab_size": 99,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 20,
        "max_target_positions": 24,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    "ViTForImageClassification": {"model_type": "vit", **CLIP_VISION},
    "CLIPModel": {
        "model_type": "clip",
        "text_config": {**TEXT, "max_position_embeddings": 20, "eos_token_id": 98, "bos_token_id": 97},
        "vision_config": CLIP_VISION,
    },
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "image_token_index": 98,
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", **CLIP_VISION},
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "image_token_id": 98,
        "video_token_id": 97,
        "vision_start_token_id": 96,
        "vision_end_token_id": 95,
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            **TEXT,
            "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            **QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "image_token_id": 98,
        "video_token_id": 97,
        "vision_start_token_id": 96,
        "vision_end_token_id": 95,
        "text_config": {
            "model_type": "qwen3_vl_text",
            **TEXT,
            "head_dim": 8,
            "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        "vision_config": {
            **QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    },
    "Wav2Vec2ForCTC": {
        "model_type": "wav2vec2",
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "conv_dim": [16, 16],
        "conv_kernel": [10, 3],
        "conv_stride": [5, 2],
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
    },
}


def config(architecture: str) -> dict[str, Any]:
    return {**CONFIGS[architecture], "architectures": [architecture]}


def on_cpu(value: Any) -> Any:
    return torch.randn(value.shape) if isinstance(value, torch.Tensor) and value.is_meta else value


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_kind_of_model_takes_its_batch_and_gives_a_loss(architecture: str) -> None:
    model = model_from_config(config(architecture), BuildOptions(dtype=torch.float32))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    batch = example_batch(model, BatchRequest(samples=2, length=20, images=2, image_size=28))
    assert all(
        v.device.type == "cpu" for v in batch.values() if torch.is_tensor(v) and not v.is_floating_point()
    )

    real = type(model)._from_config(model.config, dtype=torch.float32).train()
    output = real(**{name: on_cpu(value) for name, value in batch.items()})
    assert output.loss.requires_grad
    assert output.loss.dim() == 0 or output.loss.numel() == 1


def test_a_configuration_without_architectures_gets_a_training_head() -> None:
    heads = {
        name: type(model_from_config(CONFIGS[name])).__name__
        for name in ("LlamaForCausalLM", "BertForMaskedLM", "CLIPModel", "ViTForImageClassification")
    }
    assert heads == {name: name for name in heads}


def test_default_lengths_respect_the_model() -> None:
    clip = model_from_config(config("CLIPModel"))
    assert example_batch(clip, BatchRequest(samples=2))["input_ids"].shape == (2, 20)
    llama = model_from_config(config("LlamaForCausalLM"))
    assert example_batch(llama, BatchRequest(samples=2))["input_ids"].shape == (2, 512)


def test_tokens_are_ordinary_and_below_the_vocabulary() -> None:
    model = model_from_config({**config("LlamaForCausalLM"), "pad_token_id": 5})
    ids = example_batch(model, BatchRequest(samples=8, length=512))["input_ids"]
    assert 0 <= int(ids.min()) <= int(ids.max()) < 99
    assert 5 not in ids.unique().tolist()


def test_visual_placeholders_match_the_grid() -> None:
    model = model_from_config(config("Qwen2_5_VLForConditionalGeneration"))
    batch = example_batch(model, BatchRequest(samples=2, length=64, images=3, image_size=112))
    assert batch["image_grid_thw"].tolist() == [[1, 8, 8]] * 6
    assert batch["pixel_values"].shape == (6 * 64, 3 * 2 * 14 * 14)
    assert (batch["input_ids"] == 98).sum(1).tolist() == [3 * 16, 3 * 16]
    assert (batch["labels"] == -100).equal(batch["input_ids"] == 98)


def test_text_alone_is_counted_with_no_images() -> None:
    model = model_from_config(config("Qwen2_5_VLForConditionalGeneration"))
    assert set(example_batch(model, BatchRequest(samples=2, length=8, images=0))) == {"input_ids", "labels"}


def test_images_that_do_not_fit_say_what_would() -> None:
    model = model_from_config(config("LlavaForConditionalGeneration"))
    with pytest.raises(BatchError, match=r"4 visual tokens do not fit .* of 8: use at least 9"):
        example_batch(model, BatchRequest(samples=1, length=8, images=2))


def test_a_405b_configuration_is_built_without_memory(tmp_path: Path) -> None:
    shape = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    target = resolve_target(str(tmp_path), BatchRequest(samples=1, length=8))
    assert sum(parameter.numel() for parameter in target.model.parameters()) == 405_853_388_800
    assert {tensor.device.type for tensor in target.model.state_dict().values()} == {"meta"}


def test_a_reference_model_comes_by_name_in_training_mode() -> None:
    target = resolve_target("tiny", BatchRequest(samples=3, length=7), named=REFERENCE_MODELS)
    assert target.model.training
    assert target.shapes == "input_ids 3×7, labels 3×7"
    assert (target.samples, target.length, target.brought_batch) == (3, 7, False)
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}


def test_checkpointing_reaches_the_model() -> None:
    options = BuildOptions(checkpointing=True)
    target = resolve_target("tiny", BatchRequest(samples=1), options, named=REFERENCE_MODELS)
    assert target.model.gradient_checkpointing


def test_a_model_that_needs_values_is_built_again_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def count_with_values_only(model: nn.Module, batch: Any, **how: Any) -> FlopCount:
        if next(model.parameters()).is_meta:
            raise ModelError("needs real values")
        return count_flops(model, batch, **how)

    def on(device: str) -> Target:
        layer = nn.Linear(8, 4, bias=False, device=device)
        return Target(name="layer", model=layer, batch=(torch.ones(5, 8),))

    monkeypatch.setattr("truemfu.flops.models.targets.count_flops", count_with_values_only)
    again = replace(on("meta"), with_values=lambda: on("cpu"))
    count = count_target(again, convention=Convention(), backward=True)
    assert (count.forward, count.backward) == (2 * 5 * 8 * 4, 2 * 5 * 8 * 4)
    with pytest.raises(ModelError, match="needs real values"):
        count_target(on("meta"), convention=Convention(), backward=True)
    monkeypatch.setattr("truemfu.flops.models.targets._MAX_BYTES_WITH_VALUES", 100)
    with pytest.raises(ModelError, match="needs real values"):
        count_target(again, convention=Convention(), backward=True)


def test_a_configuration_can_be_built_with_values(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("ViTForImageClassification")))
    target = resolve_target(str(tmp_path), BatchRequest(samples=2))
    assert target.batch["pixel_values"].is_meta
    assert target.with_values is not None
    real = target.with_values()
    assert {parameter.device.type for parameter in real.model.parameters()} == {"cpu"}
    assert float(real.batch["pixel_values"].float().abs().sum()) > 0


FACTORIES = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
    def forward(self, x):
        return self.layer(x)

def with_batch():
    return Plain(), {"x": torch.zeros(5, 8)}

def with_tuple():
    return Plain(), (torch.zeros(5, 8),)

def alone():
    return Plain()

def embeds():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(17, 4)
        def forward(self, input_ids):
            return self.table(input_ids)
    return Lookup()

def raises():
    raise RuntimeError("no\\n  weights here")

def wrong():
    return 3

value = 3
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "myfactories", raising=False)
    (tmp_path / "myfactories.py").write_text(FACTORIES)
    (tmp_path / "mybroken.py").write_text("raise RuntimeError('at import')")
    return "myfactories"


def test_a_factory_in_the_current_directory_brings_module_and_batch(factories: str) -> None:
    target = resolve_target(f"{factories}:with_batch", BatchRequest(samples=1))
    assert isinstance(target.model, nn.Module)
    assert (target.samples, target.length, target.brought_batch) == (5, None, True)
    assert next(target.model.parameters()).dtype == torch.float32


def test_a_dtype_converts_a_factory_and_its_batch(factories: str) -> None:
    options = BuildOptions(dtype=torch.float64)
    target = resolve_target(f"{factories}:with_tuple", BatchRequest(samples=1), options)
    assert next(target.model.parameters()).dtype == torch.float64
    assert target.batch[0].dtype == torch.float64


def test_a_factory_without_a_batch_gets_tokens_where_it_takes_them(factories: str) -> None:
    target = resolve_target(f"{factories}:embeds", BatchRequest(samples=2, length=9))
    assert target.shapes == "input_ids 2×9"
    assert int(target.batch["input_ids"].max()) < 17


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("tinny", UsageError, r"no model 'tinny' \(did you mean 'tiny'\?\): expected tiny, small"),
        ("nowhere/config.json", UsageError, "no model 'nowhere/config.json'"),
        (".", UsageError, "no config.json in"),
        ("nomodule:f", UsageError, "cannot import 'nomodule:f': ModuleNotFoundError"),
        ("myfactories:nothing", UsageError, "has no attribute 'nothing'"),
        ("myfactories:value", UsageError, "is not a factory"),
        ("mybroken:f", ModelError, "importing 'mybroken' failed: RuntimeError: at import"),
        ("myfactories:raises", ModelError, r"'myfactories:raises' raised RuntimeError: no weights here$"),
        ("myfactories:wrong", ModelError, "returned int; expected a module"),
        ("myfactories:alone", UsageError, r"let the factory return \(module, batch\)"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_line(
    factories: str, text: str, error: type[TruemfuError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve_target(text, BatchRequest(samples=1), named=REFERENCE_MODELS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["a" * 300, "a" * 100_000, "a/" * 5000, "a\0b", "\udcff", "a" * 300 + ":f"])
def test_what_cannot_be_the_name_of_a_file_is_one_short_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^(no model|cannot import) '") as caught:
        resolve_target(text, BatchRequest(samples=1), named=REFERENCE_MODELS)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) <= 600


def test_a_batch_of_too_many_tokens_is_not_made() -> None:
    with pytest.raises(
        UsageError, match=r"at most 268,435,456 tokens; got 4 × 100,000,000: count fewer samples"
    ):
        BatchRequest(samples=4, length=10**8)


def test_a_batch_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"], **sizes})
    )
    with pytest.raises(
        BatchError, match=r"^a batch of this size cannot be created: RuntimeError: "
    ) as caught:
        resolve_target(str(file), BatchRequest(samples=1, image_size=2**31 - 1))
    assert len(str(caught.value)) <= 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a readable JSON file"),
        ("[]", "expected a JSON object"),
        ("{}", "names no model_type"),
        ('{"model_type": "lama"}', r"unknown model_type 'lama' \(did you mean 'llama'\?\)"),
        ("[" * 100_000, "is not a readable JSON file"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "is not a readable JSON file"),
        ('{"hidden_size": ' + "9" * 10_000 + "}", "is not a readable JSON file"),
        ('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": "x"}', "does not build a model"),
    ],
)
def test_a_bad_configuration_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_target(str(file), BatchRequest(samples=1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("samples", 0, "batch size must be at least 1; got 0"),
        ("length", -1, "sequence length must be at least 1; got -1"),
        ("images", -1, "number of images must be at least 0; got -1"),
        ("image_size", 0, "image size must be at least 1; got 0"),
        ("samples", 2**31, "batch size must be at most 2,147,483,647; got 2,147,483,648"),
        ("length", 10**20, "sequence length must be at most 2,147,483,647; got 100,000"),
        ("images", 10**20, "number of images must be at most 2,147,483,647; got 100,000"),
        ("image_size", 10**20, "image size must be at most 2,147,483,647; got 100,000"),
    ],
)
def test_sizes_must_be_positive(field: str, value: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BatchRequest(**{"samples": 1, field: value})


def test_dtypes_go_by_short_and_by_torch_names() -> None:
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == parse_dtype("torch.bfloat16") == torch.bfloat16
    with pytest.raises(UsageError, match=r"fp64, fp32, fp16, bf16; got 'bf17' \(did you mean 'bf16'\?\)"):
        parse_dtype("bf17")


def test_the_attention_of_a_reference_model_cannot_be_chosen() -> None:
    options = BuildOptions(attn_implementation="eager")
    with pytest.raises(UsageError, match="not for 'tiny'"):
        resolve_target("tiny", BatchRequest(samples=1), options, named=REFERENCE_MODELS)
