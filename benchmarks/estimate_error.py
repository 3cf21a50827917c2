"""How far is the estimate from the count? Every public case, then architectures it was not made for.

Why: `estimate` runs nothing, so it can only be as good as a model's structure is plain. This prints what it
gives for one training step, divided by what `count_flops` gives, beside the two rules of thumb it replaces.

Prints: date and versions; a Markdown table for the 29 public cases (counted FLOPs; estimate / count for
forward, backward and hardware FLOPs; 6·N·tokens and 2.5·N·tokens×3 over the count; microseconds of a call);
the same for other architectures, most of which are there because the estimate is off on them, with what it
says of itself; last, one line of JSON.

    PYTHONPATH=src python benchmarks/estimate_error.py [--samples 2] [--length 64]
        [--output benchmarks/results/estimate_error.txt]

It takes two minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cases import CASES, Batch, Case
from benchmarks.flops_accuracy import ask_2_5n, ask_6n
from truemfu import __version__, count_flops
from truemfu.flops.models.example_batch import example_batch
from truemfu.flops.models.model_view import BatchRequest
from truemfu.flops.structure.estimate import Estimator
from truemfu.flops.wrappers import unwrap

CALLS = 300
_TEXT = {"vocab_size": 131, "hidden_size": 60, "num_hidden_layers": 3, "max_position_embeddings": 128}
_ENCODER = _TEXT | {"num_attention_heads": 5, "intermediate_size": 132}
_DECODER = _ENCODER | {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}
_VISION = {
    "hidden_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "intermediate_size": 132,
    "image_size": 24,
    "patch_size": 6,
}
_STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}


def _blip2() -> Any:
    query = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    text = {"model_type": "opt", "hidden_size": 64, "ffn_dim": 140, "num_hidden_layers": 2}
    return hf.Blip2Config(
        vision_config=_VISION,
        qformer_config=query | {"encoder_hidden_size": 60},
        text_config=text
        | {
            "num_attention_heads": 4,
            "vocab_size": 131,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
        },
        num_query_tokens=8,
        image_token_index=120,
    )


def _siglip() -> Any:
    text = _ENCODER | {"hidden_size": 48, "num_attention_heads": 4, "max_position_embeddings": 64}
    return hf.SiglipConfig(
        text_config=text, vision_config=_VISION | {"hidden_size": 48, "num_attention_heads": 4}
    )


def _qwen3_next() -> Any:
    return hf.Qwen3NextConfig(
        **_DECODER | {"num_hidden_layers": 4},
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=52,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )


def _llama4() -> Any:
    return hf.Llama4TextConfig(
        **_DECODER,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        head_dim=16,
        intermediate_size_mlp=120,
        attn_temperature_tuning=False,
    )


def _wav2vec2() -> Any:
    sound = {k: v for k, v in _ENCODER.items() if "max" not in k}
    return hf.Wav2Vec2Config(
        **sound,
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
        num_conv_pos_embedding_groups=4,
        num_conv_pos_embeddings=16,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )


OTHERS: Mapping[str, tuple[str, Callable[[], Any]]] = {
    "albert": ("AlbertForMaskedLM", lambda: hf.AlbertConfig(embedding_size=32, **_ENCODER)),
    "gpt-neox": ("GPTNeoXForCausalLM", lambda: hf.GPTNeoXConfig(**_ENCODER)),
    "phi3": ("Phi3ForCausalLM", lambda: hf.Phi3Config(**_DECODER, pad_token_id=0)),
    "gpt-oss": (
        "GptOssForCausalLM",
        lambda: hf.GptOssConfig(num_local_experts=6, num_experts_per_tok=2, head_dim=16, **_DECODER),
    ),
    "swin": (
        "SwinForImageClassification",
        lambda: hf.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
        ),
    ),
    "efficientnet": (
        "EfficientNetForImageClassification",
        lambda: hf.EfficientNetConfig(
            image_size=64, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320
        ),
    ),
    "wav2vec2": ("Wav2Vec2ForCTC", _wav2vec2),
    "siglip": ("SiglipModel", _siglip),
    "blip-2": ("Blip2ForConditionalGeneration", _blip2),
    "longformer": (
        "LongformerForMaskedLM",
        lambda: hf.LongformerConfig(attention_window=8, **_ENCODER),
    ),
    "squeezebert": (
        "SqueezeBertForMaskedLM",
        lambda: hf.SqueezeBertConfig(
            **_ENCODER | {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128},
            embedding_size=64,
        ),
    ),
    "qwen3-next": ("Qwen3NextForCausalLM", _qwen3_next),
    "deberta-v2": (
        "DebertaV2ForMaskedLM",
        lambda: hf.DebertaV2Config(relative_attention=True, pos_att_type=["p2c", "c2p"], **_ENCODER),
    ),
    "llama4": ("Llama4ForCausalLM", _llama4),
    "git": ("GitForCausalLM", lambda: hf.GitConfig(vision_config=_VISION, use_cache=False, **_ENCODER)),
    "vit-mae": (
        "ViTMAEForPreTraining",
        lambda: hf.ViTMAEConfig(
            **_VISION,
            decoder_hidden_size=48,
            decoder_num_hidden_layers=2,
            decoder_num_attention_heads=4,
            decoder_intermediate_size=96,
        ),
    ),
    "pvt": (
        "PvtForImageClassification",
        lambda: hf.PvtConfig(**_STAGES, num_attention_heads=[1, 2, 3, 4], image_size=64),
    ),
    "bit": (
        "BitForImageClassification",
        lambda: hf.BitConfig(
            embedding_size=8, hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], num_groups=4
        ),
    ),
    "poolformer": ("PoolFormerForImageClassification", lambda: hf.PoolFormerConfig(**_STAGES)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model: the count, and what the estimate and the rules of thumb make of it."""

    name: str
    counted: int
    exact: bool
    forward: float
    backward: float
    hardware: float
    call_us: float
    says: str

    @property
    def within_1_percent(self) -> bool:
        return all(abs(ratio - 1) <= 0.01 for ratio in (self.forward, self.backward, self.hardware))


def _row(name: str, model: nn.Module, batch: Batch) -> Row:
    count, estimator = count_flops(model, batch), Estimator(model)
    said = estimator(batch)
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        estimator(batch)
        times.append(time.perf_counter() - began)
    parts = ("forward", "backward", "recompute")
    return Row(
        name=name,
        counted=count.model_flops,
        exact=all(getattr(said, part) == getattr(count, part) for part in parts),
        forward=said.forward / count.forward,
        backward=said.backward / count.backward,
        hardware=said.hardware_flops / count.hardware_flops,
        call_us=statistics.median(times) * 1e6,
        says="; ".join([*said.uncounted, *(note for note in said.notes if "far off" in note)]),
    )


def _line(row: Row, *more: str) -> str:
    def ratio(value: float) -> str:
        return "exact" if row.exact else f"{value:.3f}"

    ratios = [ratio(value) for value in (row.forward, row.backward, row.hardware)]
    return "| " + " | ".join([row.name, f"{row.counted:,}", *ratios, *more]) + " |"


def _case_line(c: Case, shape: Mapping[str, int]) -> tuple[Row, str]:
    model, batch = c.build(), c.batch(**shape)
    row, inner = _row(c.name, model, batch), unwrap(model)
    thumbs = [f"{ask(inner, batch) / row.counted:.3f}" for ask in (ask_6n, ask_2_5n)]
    return row, _line(row, *thumbs, f"{row.call_us:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="error of the estimate against the count")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--output", type=Path, help="also write everything printed to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)

    shape = {"samples": options.samples, "length": options.length}
    lines_of_cases = [_case_line(c, shape) for c in CASES]
    cases = [row for row, _ in lines_of_cases]
    others = []
    for name, (model_class, config) in OTHERS.items():
        torch.manual_seed(0)
        model = getattr(hf, model_class)(config()).train()
        request = BatchRequest(**shape)
        others.append(_row(name, model, dict(example_batch(model, request))))

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": hf.__version__,
        "truemfu": __version__,
    }
    date = datetime.date.today().isoformat()
    head = ", ".join(f"{name} {version}" for name, version in versions.items())
    ratios = "estimate / count: forward | backward | hardware"
    lines = [
        f"{date}; {head}; {platform.machine()}, {os.cpu_count()} cores; "
        f"{options.samples} samples of {options.length} tokens",
        "",
        f"| case | counted FLOPs | {ratios} | 6N | 2.5N×3 | call, µs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(line for _, line in lines_of_cases),
        "",
        "Other architectures, most of them chosen because the estimate is off:",
        "",
        f"| model | counted FLOPs | {ratios} | what the estimate says of itself |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_line(row, row.says or "nothing") for row in others),
        "",
    ]
    summary = {
        "date": date,
        "versions": versions,
        "cases": len(cases),
        "exact": sum(row.exact for row in cases),
        "within_1_percent": sum(row.within_1_percent for row in cases),
        "call_us_median": round(statistics.median(row.call_us for row in cases), 1),
        "call_us_worst": round(max(row.call_us for row in cases), 1),
        "others": {row.name: round(row.hardware, 3) for row in others},
    }
    text = "\n".join([*lines, json.dumps(summary, ensure_ascii=False)]) + "\n"
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
