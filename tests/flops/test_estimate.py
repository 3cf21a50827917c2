"""The estimate is close to the count on common models, says what it assumes, and leaves the model alone."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from truemfu import Convention, ModelError, UsageError, count_flops
from truemfu.errors import BatchError, TruemfuWarning, _already_warned
from truemfu.flops import structure
from truemfu.flops.structure.estimate import Estimator, estimate_flops

hf = pytest.importorskip("transformers", minversion="5.22")
cases = pytest.importorskip("benchmarks.cases")

NAMES = [c.name for c in cases.CASES]
EXACT = (
    "gpt2 llama-sdpa llama-eager llama-padded qwen2 qwen3 mistral gemma2 gemma3 mixtral qwen3-moe-grouped_mm "
    "deepseek-v3 bert t5 vit whisper"
).split()
CLOSE = {"llama-lora": 0.06, "llama-checkpointed": 0.06, "clip": 0.15, "llava": 0.05, "qwen2.5-vl": 0.01}
"""Cases whose forward and backward FLOPs are within this share of the truth."""


def parts(count: Any) -> tuple[int, ...]:
    return count.forward, count.backward, count.recompute


def assert_close(model: nn.Module, batch: Any, tolerance: float) -> None:
    estimate, count = estimate_flops(model, batch), count_flops(model, batch)
    assert estimate.forward == pytest.approx(count.forward, rel=tolerance)
    assert estimate.backward == pytest.approx(count.backward, rel=tolerance)


def built(name: str, **shape: Any) -> tuple[nn.Module, dict[str, Any]]:
    c = cases.case(name)
    return c.build(), c.batch(**({"samples": 2, "length": 24} | shape))


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", EXACT)
def test_common_models_are_exact_at_several_shapes(name, attention):
    c = cases.case(name)
    model = c.build()
    estimator = Estimator(model, convention=Convention(attention=attention))
    for samples, length in ((2, 24), (3, 41)):
        batch = c.batch(samples=samples, length=length)
        truth = c.truth(model, batch, attention=attention)
        assert parts(estimator(batch))[:2] == (truth.forward, truth.backward)


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", CLOSE)
def test_adapters_checkpointing_and_images_are_close(name, attention):
    c = cases.case(name)
    model = c.build()
    estimator = Estimator(model, convention=Convention(attention=attention))
    for samples, length in ((2, 24), (2, 64)):
        batch = c.batch(samples=samples, length=length)
        truth, estimate = c.truth(model, batch, attention=attention), estimator(batch)
        assert estimate.forward == pytest.approx(truth.forward, rel=CLOSE[name])
        assert estimate.backward == pytest.approx(truth.backward, rel=CLOSE[name])


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_positions_of_padding_are_no_documents(side, position, attention):
    """As generation and its trainers make them: each padded place has the same position."""
    model, batch = built("llama-sdpa")
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[1, slice(0, 9) if side == "left" else slice(-9, None)] = 0
    batch["attention_mask"] = mask
    batch["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, position)
    convention = Convention(attention=attention)
    estimate = estimate_flops(model, batch, convention=convention)
    count = count_flops(model, batch, convention=convention)
    assert (estimate.forward, estimate.backward) == (count.forward, count.backward)


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", ["gpt2", "llama-eager", "mistral", "gemma3", "mixtral", "deepseek-v3"])
def test_packed_documents_are_counted_one_by_one(name, attention):
    c = cases.case(name)
    model = c.build()
    batch = c.batch(samples=3, documents=[5, 17, 2, 9])
    estimate = estimate_flops(model, batch, convention=Convention(attention=attention))
    truth = c.truth(model, batch, attention=attention)
    assert (estimate.forward, estimate.backward) == (truth.forward, truth.backward)


def test_one_row_of_positions_stands_for_all_samples():
    model, batch = built("llama-sdpa", documents=[5, 17, 2])
    whole = estimate_flops(model, batch)
    batch["position_ids"] = batch["position_ids"][:1]
    assert parts(estimate_flops(model, batch)) == parts(whole)


def test_the_result_says_how_it_was_found():
    model, batch = built("llama-sdpa")
    estimate = estimate_flops(model, batch, convention=Convention(attention="causal"))
    assert estimate.method == "estimate"
    assert estimate.convention == Convention(attention="causal")
    assert estimate.notes == (
        "a fused attention kernel is assumed, whose backward computes the scores again",
    )
    assert dict(estimate.by_dtype) == {"fp32": estimate.model_flops}
    assert not estimate.uncounted


def test_eager_attention_recomputes_nothing_and_needs_no_note():
    model, batch = built("llama-eager")
    estimate = estimate_flops(model, batch)
    assert (estimate.recompute, estimate.notes) == (0, ())


def test_forward_alone_is_left_where_nothing_is_trained():
    model, batch = built("llama-sdpa")
    whole = estimate_flops(model, batch)
    estimate = estimate_flops(model.requires_grad_(False), batch)
    assert (estimate.forward, estimate.backward, estimate.recompute) == (whole.forward, 0, 0)


def frozen_prefix(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].self_attn.requires_grad_(False)


def head_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)


def norms_alone(model: Any) -> None:
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.input_layernorm.requires_grad_(True)


def second_values_alone(model: Any) -> None:
    model.requires_grad_(False)
    model.model.layers[1].self_attn.v_proj.requires_grad_(True)


def embedding_frozen(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)


@pytest.mark.parametrize(
    "freeze", [frozen_prefix, head_alone, norms_alone, second_values_alone, embedding_frozen]
)
@pytest.mark.parametrize("name", ["llama-sdpa", "mixtral"])
def test_backward_is_what_the_trained_weights_need(name, freeze):
    model, batch = built(name)
    freeze(model)
    estimate, count = estimate_flops(model, batch), count_flops(model, batch)
    assert estimate.forward == count.forward
    assert estimate.backward == pytest.approx(count.backward, rel=0.1)


def test_a_frozen_vision_tower_and_a_trained_projector():
    model, batch = built("llava")
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    assert_close(model, batch, 0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear", "lora_dropout": 0.1},
        {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["queries and values", "all", "one of two that read the same input, and a head trained whole"],
)
def test_adapters_on_a_frozen_base(options):
    peft = pytest.importorskip("peft")
    model, batch = built("llama-sdpa")
    assert_close(peft.get_peft_model(model, peft.LoraConfig(r=4, **options)), batch, 0.06)


def test_experts_that_are_modules_count_as_often_as_a_token_visits_them():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(8, 5)
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 8)) for _ in range(5))
            self.top_k = 2

    estimate = estimate_flops(Block(), (torch.empty(3, 7, 8),))
    rows = 3 * 7
    assert estimate.forward == 2 * rows * (8 * 5 + 2 * (8 * 20 + 20 * 8))
    assert estimate.backward == 2 * rows * (8 * 5 + 2 * 2 * (8 * 20 + 20 * 8))


def test_experts_nobody_says_how_many_of_are_visited_are_an_error():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.empty(5, 8, 40))

    model = nn.Sequential(nn.Embedding(9, 8), Experts())
    with pytest.raises(
        ModelError, match=r"Experts holds 5 experts, and neither .* \(top_k, num_experts_per_tok\)"
    ):
        Estimator(model)
    model[1].top_k = 3
    assert estimate_flops(model, (torch.ones(2, 7, dtype=torch.long),)).forward == 2 * 14 * 3 * 8 * 40


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        samples, length, _ = x.shape
        split = self.qkv(x).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*split, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(x.shape))


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(24), Attention(24, 4)) for _ in range(3)])
        self.head = nn.Linear(24, 50, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Joined(nn.Module):
    """Down, up, and a convolution over both."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(2)
        self.below, self.up = nn.Conv2d(8, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.after = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x):
        wide = self.before(x)
        return self.after(torch.cat([wide, self.up(self.below(self.pool(wide)))], 1))


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (nn.Sequential(nn.Linear(7, 13), nn.ReLU(), nn.Linear(13, 5)), (torch.empty(6, 7),)),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 13), nn.Linear(13, 5)), (torch.empty(6, 3, 4, 4),)),
        (HandWritten(), (torch.zeros(3, 11, dtype=torch.long),)),
        (Joined(), (torch.empty(2, 3, 16, 16),)),
        (nn.LSTM(7, 12, 2, batch_first=True, bidirectional=True), (torch.empty(3, 11, 7),)),
        (nn.GRU(7, 12, 2, batch_first=True), (torch.empty(3, 11, 7),)),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, 0.0, batch_first=True), 2),
            (torch.empty(3, 11, 24),),
        ),
        (nn.Transformer(24, 4, 2, 3, 40, 0.1), (torch.empty(11, 3, 24), torch.empty(7, 3, 24))),
    ],
    ids="perceptron,flattened,hand-written,joined,lstm,gru,encoder,both".split(","),
)
def test_models_of_plain_torch_are_close(model, batch):
    assert_close(model, batch, 0.06)


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        ("ConvNextForImageClassification", {}),
        ("EfficientNetForImageClassification", {"image_size": 224}),
        ("ViTForImageClassification", {}),
    ],
)
def test_image_models_of_full_size_are_close(model_class, config):
    with torch.device("meta"):
        cls = getattr(hf, model_class)
        assert_close(cls(cls.config_class(**config)), {"pixel_values": torch.empty(2, 3, 224, 224)}, 0.01)


def test_an_alias_of_a_module_is_not_a_second_layer():
    model = nn.Sequential(nn.Linear(7, 7))
    holder = nn.Module()
    holder.net, holder.alias = model, model[0]
    assert estimate_flops(holder, (torch.empty(5, 7),)).forward == 2 * 5 * 7 * 7


def test_a_layer_listed_twice_runs_twice():
    layer = nn.Linear(7, 7)
    assert estimate_flops(nn.Sequential(layer, layer), (torch.empty(5, 7),)).forward == 2 * 2 * 5 * 7 * 7


def test_autocast_at_construction_decides_the_dtype():
    model, batch = built("llama-sdpa")
    with torch.autocast("cpu", torch.bfloat16):
        estimator = Estimator(model)
    assert set(estimator(batch).by_dtype) == {"bf16"}
    assert set(Estimator(model)(batch).by_dtype) == {"fp32"}
    assert set(Estimator(model.half())(batch).by_dtype) == {"fp16"}


def meta(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("name", ["llama-sdpa", "whisper", "vit", "llava", "t5"])
def test_model_and_batch_may_be_on_meta_or_fake(name):
    model, batch = built(name)
    expected = parts(estimate_flops(model, batch))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    assert parts(estimate_flops(model, fake)) == expected
    assert parts(estimate_flops(model.to("meta"), meta(batch))) == expected


def test_a_tuple_is_told_by_the_names_of_the_arguments():
    model, batch = built("llama-sdpa")
    assert parts(estimate_flops(model, (batch["input_ids"],))) == parts(estimate_flops(model, batch))


def test_images_whose_grids_cannot_be_read_are_taken_as_equally_large():
    model, batch = built("qwen2.5-vl", images=((1, 4, 8), (1, 8, 4)))
    model.config.vision_config.fullatt_block_indexes = [0, 1, 2]
    read = Estimator(model)(batch)
    unread = Estimator(model)({**batch, "image_grid_thw": batch["image_grid_thw"].to("meta")})
    assert parts(unread) == parts(read)
    assert "images in pixel_values are assumed to be equally large: their grids were not read" in unread.notes


def test_positions_that_cannot_be_read_leave_each_row_one_document():
    model, batch = built("llama-sdpa", documents=[5, 17, 2])
    unread = estimate_flops(model, {**batch, "position_ids": batch["position_ids"].to("meta")})
    del batch["position_ids"]
    assert parts(unread) == parts(estimate_flops(model, batch))


def test_a_batch_without_images_leaves_the_tower_out():
    model, batch = built("llava", images=0)
    assert_close(model, batch, 0)


def test_images_of_unknown_size_count_as_576_patches_with_one_warning():
    model, batch = built("llava")
    batch["pixel_values"] = [object(), object()]
    estimator = Estimator(model)
    _already_warned.clear()
    with pytest.warns(TruemfuWarning, match="size of the images in pixel_values is unknown: 576 visual"):
        estimate = estimator(batch)
    assert estimator(batch).forward == estimate.forward
    larger = Estimator(model)({**batch, "pixel_values": torch.empty(2, 3, 24 * 8, 24 * 8)})
    assert estimate.forward == larger.forward  # 24 × 24 patches


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.scale


def test_a_model_of_which_nothing_is_known_is_an_error():
    with pytest.raises(ModelError, match=r"Nothing has no known layer.*count_flops"):
        Estimator(Nothing())


def test_bad_arguments_are_one_clear_error():
    model, _ = built("llama-sdpa")
    estimator = Estimator(model)
    with pytest.raises(BatchError, match=r"the model takes token ids; the batch has x"):
        estimator({"x": torch.empty(2, 3)})
    with pytest.raises(BatchError, match=r"mapping of keyword arguments or a tuple .* got int"):
        estimator(3)
    with pytest.raises(BatchError, match=r"first layer takes 7 features; the batch has \(2, 5\)"):
        estimate_flops(nn.Linear(7, 3), (torch.empty(2, 5),))
    with pytest.raises(BatchError, match=r"the model takes a decoder's token ids"):
        Estimator(built("t5")[0])({"input_ids": torch.ones(2, 5, dtype=torch.long)})
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        Estimator("llama")
    with pytest.raises(UsageError, match="convention must be a Convention"):
        Estimator(model, convention="causal")


@pytest.mark.parametrize("name", ["llama-lora", "qwen2.5-vl", "resnet", "llama-compiled"])
def test_the_model_is_not_touched(name):
    model, batch = built(name)
    inner = getattr(model, "_orig_mod", model)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    def state() -> list[Any]:
        modules = [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in inner.modules()]
        tensors = [(p.data_ptr(), p._version, p.requires_grad, p.grad) for p in inner.parameters()]
        return [modules, tensors, torch.get_rng_state().tolist(), sorted(map(str, vars(inner)))]

    before = state()
    originals = {type(m): type(m).__call__ for m in inner.modules()}
    with pytest.MonkeyPatch.context() as patch:
        for cls in originals:
            patch.setattr(cls, "__call__", forbidden)
        estimator = Estimator(model)
        estimator(batch)
    assert state() == before


def test_an_estimator_keeps_no_model_alive():
    model, batch = built("llama-sdpa")
    estimator, alive = Estimator(model), weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    assert estimator(batch).forward > 0


def test_no_model_has_its_name_in_the_code():
    """Structure decides: the sources name kinds of layers, none of the models they come from."""
    folder = Path(inspect.getfile(structure)).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py")).lower()
    families = {re.split(r"[-.]", name)[0] for name in NAMES}
    assert not [family for family in sorted(families) if re.search(rf"\b{family}\b", text)]
