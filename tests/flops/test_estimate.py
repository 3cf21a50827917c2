"""The estimate equals the count where structure tells all, says what it assumes, leaves the model alone."""

from __future__ import annotations

import inspect
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.versions import TORCH
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from truemfu import Convention, ModelError, UsageError, count_flops
from truemfu.errors import BatchError, TruemfuWarning, _already_warned
from truemfu.flops import structure
from truemfu.flops.structure.estimate import Estimator, estimate_flops

hf = pytest.importorskip("transformers", minversion="5.22")
cases = pytest.importorskip("benchmarks.cases")

NAMES = [c.name for c in cases.CASES]
PARTS = ("forward", "backward", "recompute")
# Older versions of torch run some of these attentions without the fused kernel that recomputes.
FUSED_FOR_ALL = TORCH >= (2, 11)


def parts(count: Any) -> tuple[int, ...]:
    return tuple(getattr(count, part) for part in PARTS[: 3 if FUSED_FOR_ALL else 2])


def assert_equal_to_the_count(model: nn.Module, batch: Any, **options: Any) -> None:
    estimate, count = estimate_flops(model, batch, **options), count_flops(model, batch, **options)
    assert parts(estimate) == parts(count)
    assert dict(estimate.by_dtype) == dict(count.by_dtype)


def built(name: str, **shape: Any) -> tuple[nn.Module, dict[str, Any]]:
    c = cases.case(name)
    return c.build(), c.batch(**({"samples": 2, "length": 24} | shape))


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", NAMES)
def test_every_public_case_is_exact_at_several_shapes(name, attention):
    c = cases.case(name)
    model = c.build()
    estimator = Estimator(model, convention=Convention(attention=attention))
    for samples, length in ((2, 24), (3, 41), (1, 64)):
        batch = c.batch(samples=samples, length=length)
        assert parts(estimator(batch)) == parts(c.truth(model, batch, attention=attention))


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
    assert_equal_to_the_count(model, batch, convention=Convention(attention=attention))


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("name", ["gpt2", "llama-eager", "mistral", "gemma3", "mixtral", "deepseek-v3"])
def test_packed_documents_are_counted_one_by_one(name, attention):
    c = cases.case(name)
    model = c.build()
    batch = c.batch(samples=3, documents=[5, 17, 2, 9])
    estimate = estimate_flops(model, batch, convention=Convention(attention=attention))
    assert parts(estimate) == parts(c.truth(model, batch, attention=attention))


def test_one_row_of_positions_stands_for_all_samples():
    model, batch = built("llama-sdpa", documents=[5, 17, 2])
    whole = estimate_flops(model, batch)
    batch["position_ids"] = batch["position_ids"][:1]
    assert parts(estimate_flops(model, batch)) == parts(whole)


@pytest.mark.parametrize(
    "name", ["llama-sdpa", "llama-lora", "mixtral", "t5", "qwen2.5-vl", "resnet", "clip"]
)
def test_modules_have_the_flops_the_count_gives_them(name):
    model, batch = built(name)
    estimate, count = estimate_flops(model, batch), count_flops(model, batch)
    assert dict(estimate.by_module) == dict(count.by_module)
    assert dict(estimate.by_dtype) == dict(count.by_dtype)
    assert sum(estimate.by_operator.values()) == estimate.model_flops == estimate.by_module[""]


def test_the_result_says_how_it_was_found():
    model, batch = built("llama-sdpa")
    estimate = estimate_flops(model, batch, convention=Convention(attention="causal"))
    assert estimate.method == "estimate"
    assert estimate.convention == Convention(attention="causal")
    assert estimate.notes == (
        "a fused attention kernel is assumed, whose backward computes the scores again",
    )
    assert set(estimate.by_operator) == {"linear", "attention"}
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
    assert estimate.notes == ("no weight of a product is trained: there is no backward",)


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
@pytest.mark.parametrize("name", ["llama-sdpa", "mixtral", "llama-checkpointed"])
def test_backward_is_what_the_trained_weights_need(name, freeze):
    model, batch = built(name)
    freeze(model)
    estimate, count = estimate_flops(model, batch), count_flops(model, batch)
    assert (estimate.forward, estimate.backward) == (count.forward, count.backward)


def test_a_frozen_vision_tower_and_a_trained_projector():
    model, batch = built("llava")
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    assert_equal_to_the_count(model, batch)


def test_trained_biases_alone():
    model, batch = built("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    assert_equal_to_the_count(model, batch)


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
    assert_equal_to_the_count(peft.get_peft_model(model, peft.LoraConfig(r=4, **options)), batch)


def test_idle_and_switched_off_adapters_do_not_run():
    peft = pytest.importorskip("peft")
    model, batch = built("llama-sdpa")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    one = parts(estimate_flops(adapted, batch))
    adapted.add_adapter("other", peft.LoraConfig(r=8, target_modules=["q_proj"]))
    assert parts(estimate_flops(adapted, batch)) == one
    adapted.base_model.disable_adapter_layers()
    plain, _ = built("llama-sdpa")
    assert estimate_flops(adapted, batch).forward == estimate_flops(plain, batch).forward


def test_a_hook_that_makes_embeddings_need_a_gradient_is_seen():
    peft = pytest.importorskip("peft")
    model, batch = built("llama-sdpa")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    without = estimate_flops(model, batch).backward
    model.enable_input_require_grads()
    assert estimate_flops(model, batch).backward > without
    assert_equal_to_the_count(model, batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "name", ["gpt2", "qwen3", "gemma2", "mixtral", "deepseek-v3", "bert", "vit", "whisper", "llava", "mamba2"]
)
def test_a_checkpointed_model_runs_its_blocks_again(name, reentrant):
    if not FUSED_FOR_ALL:
        pytest.skip("recomputation by kernels differs in this torch")
    model, batch = built(name)
    before = estimate_flops(model, batch)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert estimate_flops(model, batch).recompute > before.recompute
    assert_equal_to_the_count(model, batch)
    model.eval()
    assert estimate_flops(model, batch).recompute <= before.recompute + before.forward // 10


def test_torchs_own_checkpoint_wrapper():
    model, batch = built("llama-sdpa")
    apply_activation_checkpointing(model, check_fn=lambda m: type(m).__name__ == "LlamaDecoderLayer")
    assert_equal_to_the_count(model, batch)


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
    assert estimate.backward == 2 * rows * (8 * 5 + 2 * (8 * 20 + 2 * 20 * 8))
    assert estimate.by_module["experts"] == 2 * rows * 2 * (8 * 20 * 2 + 20 * 8 * 3)


def test_experts_nobody_says_how_many_of_are_visited_are_an_error():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.empty(5, 8, 40))

    model = nn.Sequential(nn.Embedding(9, 8), Experts())
    with pytest.raises(ModelError, match=r"1 holds 5 experts, and neither .* \(top_k, num_experts_per_tok\)"):
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


class Pictures(nn.Module):
    """A convolution network whose poolings are functions and whose last layers read a flattened picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.hidden, self.out = nn.Linear(16 * 4 * 4, 30), nn.Linear(30, 10)

    def forward(self, x):
        x = F.max_pool2d(self.first(x).relu(), 2)
        x = F.max_pool2d(self.second(x).relu(), kernel_size=(2, 2))
        return self.out(self.hidden(x.flatten(1)))


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
        (Pictures(), (torch.empty(3, 1, 28, 28),)),
        (Joined(), (torch.empty(2, 3, 16, 16),)),
        (nn.LSTM(7, 12, 2, batch_first=True, bidirectional=True), (torch.empty(3, 11, 7),)),
        (nn.LSTM(7, 12, 2, proj_size=5), (torch.empty(11, 3, 7),)),
        (nn.GRU(7, 12, 2, batch_first=True), (torch.empty(3, 11, 7),)),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 40, 0.0, batch_first=True), 2),
            (torch.empty(3, 11, 24),),
        ),
        (nn.Transformer(24, 4, 2, 3, 40, 0.1), (torch.empty(11, 3, 24), torch.empty(7, 3, 24))),
    ],
    ids="perceptron,flattened,hand-written,pictures,joined,lstm,projected lstm,gru,encoder,both".split(","),
)
def test_models_of_plain_torch_are_exact(model, batch):
    assert_equal_to_the_count(model, batch)


def test_a_classifier_sees_one_row_of_each_sample_where_there_is_one_label_each():
    config = hf.BertConfig(
        vocab_size=99,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        max_position_embeddings=64,
    )
    ids = torch.ones(3, 12, dtype=torch.long)
    assert_equal_to_the_count(
        hf.BertForSequenceClassification(config),
        {"input_ids": ids, "labels": torch.zeros(3, dtype=torch.long)},
    )
    assert_equal_to_the_count(
        hf.BertForTokenClassification(config), {"input_ids": ids, "labels": torch.zeros_like(ids)}
    )


TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def test_layers_run_in_a_loop_are_counted_as_often_and_that_is_said():
    model = hf.AlbertForMaskedLM(hf.AlbertConfig(**TEXT | {"num_hidden_layers": 4}, embedding_size=16))
    ids = torch.ones(2, 12, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    assert_equal_to_the_count(model, batch)
    assert "1 layers are assumed to run 4 times" in estimate_flops(model, batch).notes


def test_what_structure_does_not_show_is_named_and_the_rest_is_counted():
    config = hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ids = torch.ones(2, 12, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    model = hf.DebertaV2ForMaskedLM(config)
    estimate, count = estimate_flops(model, batch), count_flops(model, batch)
    assert estimate.uncounted == {
        "what DisentangledSelfAttention does with pos_key_proj": 2,
        "what DisentangledSelfAttention does with pos_query_proj": 2,
    }
    assert round(estimate.model_flops / count.model_flops, 2) == 0.41


def test_layers_that_do_not_fit_one_another_are_said():
    config = hf.PvtConfig(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], image_size=64
    )
    estimate = estimate_flops(
        hf.PvtForImageClassification(config), {"pixel_values": torch.empty(2, 3, 64, 64)}
    )
    assert any("do not fit one another" in note for note in estimate.notes)


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


@pytest.mark.parametrize("name", ["llama-sdpa", "whisper", "vit", "llava", "resnet", "t5"])
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


def test_documents_whose_lengths_cannot_be_read_are_taken_as_equally_long():
    model, batch = built("llama-sdpa", samples=1)
    ends = torch.tensor([0, 8, 16, 24], dtype=torch.int32)
    read = estimate_flops(model, {**batch, "cu_seqlens": ends})
    unread = estimate_flops(model, {**batch, "cu_seqlens": ends.to("meta")})
    assert parts(read) == parts(unread)
    assert unread.notes[-1] == (
        "3 packed documents are assumed to be equally long: their lengths are not on the CPU"
    )


def test_positions_that_cannot_be_read_leave_each_row_one_document():
    model, batch = built("llama-sdpa", documents=[5, 17, 2])
    unread = estimate_flops(model, {**batch, "position_ids": batch["position_ids"].to("meta")})
    del batch["position_ids"]
    assert parts(unread) == parts(estimate_flops(model, batch))
    assert unread.notes[-1] == "each row counts as one document: its position ids are not on the CPU"


def test_a_batch_without_images_leaves_the_tower_out():
    model, batch = built("llava", images=0)
    assert_equal_to_the_count(model, batch)


def test_images_of_unknown_size_count_as_576_patches_with_one_warning():
    model, batch = built("llava")
    batch["pixel_values"] = [object(), object()]
    estimator = Estimator(model)
    _already_warned.clear()
    with pytest.warns(TruemfuWarning, match="size of the images in pixel_values is unknown: 576 visual"):
        estimate = estimator(batch)
    assert estimator(batch).forward == estimate.forward
    width = 2 * 40 * 72 + 2 * 72 * 72
    assert estimate.by_module["model.multi_modal_projector"] == 3 * width * 2 * 576


def test_a_list_of_equal_images_is_read():
    model, batch = built("llava")
    expected = parts(estimate_flops(model, batch))
    batch["pixel_values"] = list(batch["pixel_values"])
    assert parts(estimate_flops(model, batch)) == expected


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
    with pytest.raises(BatchError, match=r"LlamaForCausalLM takes token ids \(input_ids\); the batch has x"):
        estimator({"x": torch.empty(2, 3)})
    with pytest.raises(BatchError, match=r"mapping of keyword arguments or a tuple .* got int"):
        estimator(3)
    with pytest.raises(BatchError, match=r"first layer of Linear takes 7 features; the batch has \(2, 5\)"):
        estimate_flops(nn.Linear(7, 3), (torch.empty(2, 5),))
    with pytest.raises(BatchError, match=r"T5ForConditionalGeneration takes the decoder's token ids"):
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


def test_a_call_costs_no_more_than_writing_a_few_records_and_keeps_nothing():
    model, batch = built("llama-sdpa")
    estimator = Estimator(model)
    record = {f"perf/metric_{i}": i * 1.234567 for i in range(12)}

    def best(action: Any) -> float:
        rounds = []
        for _ in range(40):
            began = time.perf_counter()
            for _ in range(50):
                action()
            rounds.append(time.perf_counter() - began)
        return min(rounds)

    before = set(vars(estimator))
    assert best(lambda: estimator(batch)) < 6 * best(lambda: json.dumps(record))
    assert set(vars(estimator)) == before


def test_no_model_has_its_name_in_the_code():
    """Structure decides: the sources name kinds of layers, none of the models they come from."""
    folder = Path(inspect.getfile(structure)).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py")).lower()
    families = {re.split(r"[-.]", name)[0] for name in NAMES}
    assert not [family for family in sorted(families) if re.search(rf"\b{family}\b", text)]
