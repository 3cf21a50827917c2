"""The 29 public cases: tiny models of well-known architectures, a batch for each, and its exact truth.

A counter is only as good as the architectures it was tried on. These are 26 models and variants and three
more under `torch.compile`, built from configuration alone with random weights, so nothing is downloaded
and each runs in well under a second on a CPU. Head counts, widths and depths differ from one another
within a model, so that two errors cannot cancel.

    from benchmarks.cases import CASES, case

    c = case("llama-sdpa")
    model = c.build()                             # training mode, the same weights each time
    batch = c.batch(samples=2, length=24)         # keyword arguments; the output has a .loss
    c.truth(model, batch)                         # Truth(forward, backward, recompute), exact integers

Every `batch` takes `samples` and `length` (of which a model of images alone ignores the second). The
decoder language models also take `documents`, the lengths of the documents packed into each row;
`qwen2.5-vl` takes `images`, a list of (t, h, w) grids; `llava` takes `images`, how many there are;
`vit`, `resnet` and `resnet-compiled` take `size`, the side of an image in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from . import truth
from .truth import Truth

Batch = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One model, its batches, and what one training step on such a batch takes."""

    name: str
    build: Callable[[], nn.Module]
    """Makes the model: training mode, deterministic."""
    batch: Callable[..., Batch]
    """`batch(samples=2, length=24)`: keyword arguments of the model, with labels."""
    truth: Callable[..., Truth]
    """`truth(model_or_config, batch, attention="full")`: exact integers, from the dimensions alone."""
    compiled: bool = False
    """Whether `build` returns the model under `torch.compile`."""


def case(name: str) -> Case:
    """The case of this name; a ValueError that lists them all where there is none."""
    for candidate in CASES:
        if candidate.name == name:
            return candidate
    raise ValueError(f"no case {name!r}; the cases are {', '.join(c.name for c in CASES)}")


def _seeded(make: Callable[[], nn.Module], *, compiled: bool = False) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make().train()
        # Dynamo and autograd run for real; only Inductor's C++ compiler is left out, for speed.
        return torch.compile(model, backend="aot_eager") if compiled else model  # type: ignore[return-value]

    return build


def _hf(model_class: Any, config: Any, **options: Any) -> Callable[[], nn.Module]:
    """A factory for this model class; `options` are the attention and expert implementations."""
    return _seeded(lambda: model_class._from_config(config(), **options))


def _generator(*shape: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(shape) + 1)


def _ids(vocab: int, *shape: int, low: int = 3) -> Tensor:
    return torch.randint(low, vocab, shape, generator=_generator(*shape))


def _image(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator(*shape))


def _token_batch(vocab: int, samples: int = 2, length: int = 24) -> Batch:
    ids = _ids(vocab, samples, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _lm_batch(
    vocab: int, samples: int = 2, length: int = 24, documents: Sequence[int] | None = None
) -> Batch:
    """Tokens and labels; with `documents`, rows packed with documents of these lengths."""
    if documents is None:
        return _token_batch(vocab, samples, length)
    positions = torch.cat([torch.arange(n) for n in documents]).expand(samples, -1).contiguous()
    return {**_token_batch(vocab, samples, sum(documents)), "position_ids": positions}


def _half_padded_batch(vocab: int, samples: int = 2, length: int = 24) -> Batch:
    """Rows whose second half is padding."""
    batch = _token_batch(vocab, samples, length)
    mask = torch.ones(samples, length, dtype=torch.long)
    mask[:, (length + 1) // 2 :] = 0
    batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return {**batch, "attention_mask": mask}


def _gpt2() -> Any:
    # Dropout stays at the library's 0.1: it sends SDPA down its plain path, where nothing is recomputed.
    return hf.GPT2Config(
        vocab_size=211,
        n_positions=128,
        n_embd=72,
        n_layer=3,
        n_head=6,
        n_inner=200,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )


_DECODER = {
    "hidden_size": 72,
    "intermediate_size": 148,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 131,
    "max_position_embeddings": 256,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama() -> Any:
    return hf.LlamaConfig(**_DECODER)


def _qwen2() -> Any:
    return hf.Qwen2Config(
        **_DECODER | {"hidden_size": 80, "head_dim": 20, "num_attention_heads": 4, "vocab_size": 151}
    )


def _qwen3() -> Any:
    return hf.Qwen3Config(**_DECODER | {"head_dim": 12, "num_attention_heads": 8, "intermediate_size": 172})


def _mistral() -> Any:
    return hf.MistralConfig(**_DECODER | {"sliding_window": 8, "vocab_size": 167, "intermediate_size": 180})


def _gemma2() -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return hf.Gemma2Config(
        **_DECODER | {"vocab_size": 173, "head_dim": 20, "sliding_window": 10, "layer_types": layers}
    )


def _gemma3() -> Any:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    return hf.Gemma3TextConfig(
        **_DECODER | {"vocab_size": 179, "num_key_value_heads": 3, "sliding_window": 6, "layer_types": layers}
    )


def _mixtral() -> Any:
    return hf.MixtralConfig(
        **_DECODER | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 92}
    )


def _qwen3_moe() -> Any:
    # The second layer is dense, as `decoder_sparse_step` and `mlp_only_layers` of the real models allow.
    return hf.Qwen3MoeConfig(
        **_DECODER
        | {
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "mlp_only_layers": [1],
            "vocab_size": 139,
        }
    )


def _deepseek_v3() -> Any:
    return hf.DeepseekV3Config(
        vocab_size=149,
        hidden_size=64,
        intermediate_size=156,
        moe_intermediate_size=28,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=16,
        max_position_embeddings=256,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


class LoraLinear(nn.Module):
    """A frozen linear layer and a trained low-rank correction: base(x) + scale · up(down(x))."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


LORA_RANK = 4


def _llama_lora() -> nn.Module:
    model = hf.LlamaForCausalLM._from_config(_llama(), attn_implementation="sdpa")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoraLinear(layer.self_attn.q_proj, LORA_RANK)
        layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj, LORA_RANK)
    return model


def _llama_checkpointed() -> nn.Module:
    model = hf.LlamaForCausalLM._from_config(_llama(), attn_implementation="sdpa")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _bert() -> Any:
    return hf.BertConfig(
        vocab_size=127,
        hidden_size=60,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=140,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _t5() -> Any:
    return hf.T5Config(
        vocab_size=137,
        d_model=56,
        d_kv=12,
        d_ff=132,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=5,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )


def _t5_batch(vocab: int, samples: int = 2, length: int = 24) -> Batch:
    return {"input_ids": _ids(vocab, samples, length), "labels": _ids(vocab, samples, length // 2 + 1)}


def _vit() -> Any:
    return hf.ViTConfig(
        hidden_size=60,
        num_hidden_layers=3,
        num_attention_heads=5,
        intermediate_size=132,
        image_size=24,
        patch_size=6,
        num_labels=11,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def _vit_batch(samples: int = 2, length: int = 24, size: int = 24) -> Batch:
    labels = torch.arange(samples) % 11
    batch: Batch = {"pixel_values": _image(samples, 3, size, size), "labels": labels}
    return batch if size == 24 else {**batch, "interpolate_pos_encoding": True}


def _clip() -> Any:
    text = {
        "vocab_size": 113,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 60,
        "intermediate_size": 124,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "image_size": 24,
        "patch_size": 8,
    }
    return hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=36)


def _clip_batch(vocab: int, samples: int = 2, length: int = 24) -> Batch:
    ids = _ids(vocab, samples, length)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": _image(samples, 3, 24, 24), "return_loss": True}


def _qwen2_5_vl() -> Any:
    vision = {
        "depth": 3,
        "hidden_size": 48,
        "intermediate_size": 92,
        "num_heads": 3,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 16,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 72,
    }
    text = _DECODER | {
        "head_dim": 18,
        "num_attention_heads": 4,
        "intermediate_size": 120,
        "vocab_size": 157,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 3]},
    }
    return hf.Qwen2_5_VLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=150,
        video_token_id=151,
        vision_start_token_id=152,
        vision_end_token_id=153,
    )


def _qwen2_5_vl_batch(
    samples: int = 2, length: int = 24, images: Sequence[tuple[int, int, int]] = ((1, 4, 6), (1, 8, 4))
) -> Batch:
    """Rows of text with image placeholders; grids (t, h, w) in patches, h and w even.

    The images are dealt to the rows in order. Every row is `length` tokens, or longer where its
    images need it.
    """
    rows = [
        list(images[len(images) * i // samples : len(images) * (i + 1) // samples]) for i in range(samples)
    ]
    length = max([length, *(sum(t * h * w // 4 + 2 for t, h, w in row) + 4 for row in rows)])
    ids = _ids(150, samples, length)
    for i, row in enumerate(rows):
        at = 1
        for t, h, w in row:
            visual = t * h * w // 4
            ids[i, at] = 152
            ids[i, at + 1 : at + 1 + visual] = 150
            at += visual + 2
    visual_tokens = ids == 150
    batch: Batch = {
        "input_ids": ids,
        "labels": ids.masked_fill(visual_tokens, -100),
        "mm_token_type_ids": visual_tokens.int(),
    }
    if not images:
        return batch
    patches = sum(t * h * w for t, h, w in images)
    return {
        **batch,
        "pixel_values": _image(patches, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([list(grid) for grid in images]),
    }


def _llava() -> Any:
    vision = {
        "model_type": "clip_vision_model",
        "hidden_size": 40,
        "intermediate_size": 84,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "image_size": 24,
        "patch_size": 8,
        "projection_dim": 32,
    }
    text = _DECODER | {"model_type": "llama", "vocab_size": 163}
    return hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=160, image_seq_length=9)


def _llava_batch(samples: int = 2, length: int = 24, images: int | None = None) -> Batch:
    """Rows of text with 9 placeholders per image; one image a row unless told."""
    images = samples if images is None else images
    rows = [images * (i + 1) // samples - images * i // samples for i in range(samples)]
    length = max(length, 9 * max(rows) + 4)
    ids = _ids(160, samples, length)
    for i, count in enumerate(rows):
        ids[i, 1 : 1 + 9 * count] = 160
    batch: Batch = {"input_ids": ids, "labels": ids.masked_fill(ids == 160, -100)}
    return {**batch, "pixel_values": _image(images, 3, 24, 24)} if images else batch


def _mamba() -> Any:
    return hf.MambaConfig(
        vocab_size=109,
        hidden_size=48,
        state_size=12,
        num_hidden_layers=2,
        conv_kernel=4,
        expand=2,
        time_step_rank=5,
        use_cache=False,
    )


def _mamba2() -> Any:
    return hf.Mamba2Config(
        vocab_size=103,
        hidden_size=48,
        state_size=20,
        num_hidden_layers=2,
        num_heads=6,
        head_dim=16,
        n_groups=2,
        conv_kernel=4,
        expand=2,
        chunk_size=10,
        use_cache=False,
    )


def _whisper() -> Any:
    return hf.WhisperConfig(
        vocab_size=141,
        num_mel_bins=20,
        d_model=60,
        encoder_layers=2,
        encoder_attention_heads=5,
        encoder_ffn_dim=116,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=136,
        max_source_positions=30,
        max_target_positions=128,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
    )


def _whisper_batch(vocab: int, samples: int = 2, length: int = 24) -> Batch:
    return {"input_features": _image(samples, 20, 60), "labels": _ids(vocab, samples, length)}


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, width_in: int, width_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or width_in != width_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False), nn.BatchNorm2d(width_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    """ResNet-18's shape, in narrow: 7×7 stem, max pooling, four stages of two blocks, one linear layer."""

    def __init__(self, widths: Sequence[int] = (8, 12, 20, 28), classes: int = 13) -> None:
        super().__init__()
        self.config = SimpleNamespace(widths=tuple(widths), classes=classes)
        self.stem = nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        blocks: list[nn.Module] = []
        for i, (width_in, width_out) in enumerate(zip((widths[0], *widths), widths, strict=False)):
            blocks += [
                ResidualBlock(width_in, width_out, 2 if i else 1),
                ResidualBlock(width_out, width_out, 1),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        x = nn.functional.max_pool2d(self.norm(self.stem(pixel_values)).relu(), 3, stride=2, padding=1)
        logits = self.head(self.blocks(x).mean((-2, -1)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return hf.modeling_outputs.ImageClassifierOutput(loss=loss, logits=logits)


def _resnet_batch(samples: int = 2, length: int = 24, size: int = 40) -> Batch:
    return {"pixel_values": _image(samples, 3, size, size), "labels": torch.arange(samples) % 13}


def _decoder_case(
    name: str, model_class: Any, config: Callable[[], Any], count: Callable[..., Truth], **options: Any
) -> Case:
    """A decoder language model with SDPA unless told otherwise."""
    options = {"attn_implementation": "sdpa"} | options

    def batch(samples: int = 2, length: int = 24, documents: Sequence[int] | None = None) -> Batch:
        return _lm_batch(config().vocab_size, samples, length, documents)

    return Case(name, _hf(model_class, config, **options), batch, count)


_llama_tokens = partial(_lm_batch, _DECODER["vocab_size"])

CASES: tuple[Case, ...] = (
    _decoder_case("gpt2", hf.GPT2LMHeadModel, _gpt2, truth.gpt2),
    _decoder_case("llama-sdpa", hf.LlamaForCausalLM, _llama, truth.llama),
    _decoder_case("llama-eager", hf.LlamaForCausalLM, _llama, truth.llama, attn_implementation="eager"),
    Case("llama-checkpointed", _seeded(_llama_checkpointed), _llama_tokens, truth.llama_checkpointed),
    Case("llama-lora", _seeded(_llama_lora), _llama_tokens, partial(truth.llama_lora, rank=LORA_RANK)),
    Case(
        "llama-padded",
        _hf(hf.LlamaForCausalLM, _llama, attn_implementation="sdpa"),
        partial(_half_padded_batch, _DECODER["vocab_size"]),
        truth.llama,
    ),
    _decoder_case("qwen2", hf.Qwen2ForCausalLM, _qwen2, truth.llama),
    _decoder_case("qwen3", hf.Qwen3ForCausalLM, _qwen3, truth.llama),
    _decoder_case("mistral", hf.MistralForCausalLM, _mistral, truth.llama),
    _decoder_case("gemma2", hf.Gemma2ForCausalLM, _gemma2, truth.llama, attn_implementation="eager"),
    _decoder_case("gemma3", hf.Gemma3ForCausalLM, _gemma3, truth.llama),
    _decoder_case("mixtral", hf.MixtralForCausalLM, _mixtral, truth.mixtral),
    *(
        _decoder_case(
            f"qwen3-moe-{kernel}",
            hf.Qwen3MoeForCausalLM,
            _qwen3_moe,
            truth.qwen3_moe,
            experts_implementation=kernel,
        )
        for kernel in ("grouped_mm", "batched_mm", "eager")
    ),
    _decoder_case("deepseek-v3", hf.DeepseekV3ForCausalLM, _deepseek_v3, truth.deepseek_v3),
    Case(
        "bert",
        _hf(hf.BertForMaskedLM, _bert, attn_implementation="sdpa"),
        partial(_token_batch, 127),
        truth.bert,
    ),
    Case(
        "t5",
        _hf(hf.T5ForConditionalGeneration, _t5, attn_implementation="sdpa"),
        partial(_t5_batch, 137),
        truth.t5,
    ),
    Case("vit", _hf(hf.ViTForImageClassification, _vit, attn_implementation="sdpa"), _vit_batch, truth.vit),
    Case(
        "clip",
        _hf(hf.CLIPModel, _clip, attn_implementation="sdpa"),
        partial(_clip_batch, 113),
        truth.clip,
    ),
    Case(
        "qwen2.5-vl",
        _hf(hf.Qwen2_5_VLForConditionalGeneration, _qwen2_5_vl, attn_implementation="sdpa"),
        _qwen2_5_vl_batch,
        truth.qwen2_5_vl,
    ),
    Case(
        "llava",
        _hf(hf.LlavaForConditionalGeneration, _llava, attn_implementation="sdpa"),
        _llava_batch,
        truth.llava,
    ),
    Case("mamba", _hf(hf.MambaForCausalLM, _mamba), partial(_token_batch, 109), truth.mamba),
    Case("mamba2", _hf(hf.Mamba2ForCausalLM, _mamba2), partial(_token_batch, 103), truth.mamba2),
    Case(
        "whisper",
        _hf(hf.WhisperForConditionalGeneration, _whisper, attn_implementation="sdpa"),
        partial(_whisper_batch, 141),
        truth.whisper,
    ),
    Case("resnet", _seeded(ResNet), _resnet_batch, truth.resnet),
    Case(
        "llama-compiled",
        _seeded(
            lambda: hf.LlamaForCausalLM._from_config(_llama(), attn_implementation="sdpa"), compiled=True
        ),
        _llama_tokens,
        truth.llama,
        compiled=True,
    ),
    Case(
        "gpt2-compiled",
        _seeded(lambda: hf.GPT2LMHeadModel._from_config(_gpt2(), attn_implementation="sdpa"), compiled=True),
        partial(_lm_batch, 211),
        truth.gpt2,
        compiled=True,
    ),
    Case("resnet-compiled", _seeded(ResNet, compiled=True), _resnet_batch, truth.resnet, compiled=True),
)
