"""Small models for the tests of identities. As a program: prints their identities as JSON."""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**changes: Any) -> nn.Module:
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "vocab_size": 128, **changes}))


def gpt2(**changes: Any) -> nn.Module:
    from transformers.models.gpt2 import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(**{"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, **changes})
    )


def mixtral(**changes: Any) -> nn.Module:
    from transformers.models.mixtral import MixtralConfig, MixtralForCausalLM

    extra = {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 128}
    return MixtralForCausalLM(MixtralConfig(**{**SIZES, **extra, **changes}))


def bert(**changes: Any) -> nn.Module:
    from transformers.models.bert import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig(**{**SIZES, "vocab_size": 128, **changes}))


def vit(**changes: Any) -> nn.Module:
    from transformers.models.vit import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**{**SIZES, "image_size": 32, "patch_size": 8, **changes}))


def t5(**changes: Any) -> nn.Module:
    from transformers.models.t5 import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **changes}))


def lora(**changes: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    wanted = {"r": 4, "target_modules": ["q_proj", "v_proj"], **changes}
    return get_peft_model(llama(), LoraConfig(**wanted))


@dataclass
class Settings:
    """What a hand-written model is given."""

    width: int = 32
    names: set[str] = field(default_factory=lambda: {"alpha", "beta", "gamma", "delta"})
    deep: dict[str, Any] = field(default_factory=lambda: {"rates": [0.1, 0.2], "inner": {"kind": "plain"}})


def twice(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        function(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def shifted(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x + by


def mixed(x: torch.Tensor) -> torch.Tensor:
    return shifted(x) * 2 if "alpha" in {"alpha", "beta", "gamma"} else x


class HandWritten(nn.Module):
    """Holds what must not make an identity differ between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.settings.deep["self"] = self.settings  # a cycle
        self.first = nn.Linear(16, self.settings.width)
        self.second = nn.Linear(self.settings.width, 16)
        self.second.weight.requires_grad_(False)
        self.register_buffer("table", torch.zeros(4, dtype=torch.int64))
        self.lock = threading.Lock()
        self.logger = logging.getLogger("hand written")
        self.generator = torch.Generator()
        self.parent = weakref.ref(self)
        self.text = f"made as {object()!r}"
        self.run_ids = [uuid.uuid4(), str(uuid.uuid4()), uuid.uuid4().hex]
        self.began_at = time.time()
        self.own_id = id(self)
        self.by_id = {id(self.first): "first"}
        self.plain = torch.arange(12.0).reshape(3, 4)
        self.act = functools.partial(shifted, by=2.0)
        self.hidden = [nn.Linear(16, 16)]

    @twice
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.act(mixed(self.first(x))))
        return self.hidden[0](y)


MODELS: dict[str, Callable[..., nn.Module]] = {
    "llama": llama,
    "gpt2": gpt2,
    "mixtral": mixtral,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "lora": lora,
    "hand-written": HandWritten,
}


if __name__ == "__main__":
    from truemfu.flops.identity.identity import model_identity

    print(json.dumps({name: model_identity(make()) for name, make in MODELS.items()}))
