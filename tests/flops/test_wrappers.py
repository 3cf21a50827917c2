"""A wrapper changes how a model runs, not what it computes: the count inside equals the count of the model.

Compiled, checkpointed, wrapped for many ranks, with adapters on a frozen base. Two processes stand for a
job: one counts, the other does nothing at all, so a collective would hang, and the sequence numbers of the
process groups tell whether one was started.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.monitor.rank_processes import free_address, run_ranks
from tests.waiting import wait_until
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from truemfu import FlopCount, FlopModel, count_flops, count_step

WIDTH, INNER, HEADS, VOCAB, LAYERS = 16, 24, 2, 50, 2
SAMPLES, LENGTH = 3, 7
ROWS = SAMPLES * LENGTH
LINEAR = 2 * ROWS * (4 * WIDTH * WIDTH + 2 * WIDTH * INNER)
ATTENTION = 2 * SAMPLES * LENGTH * LENGTH * 2 * WIDTH
HEAD = 2 * ROWS * WIDTH * VOCAB
FORWARD = LAYERS * (LINEAR + ATTENTION) + HEAD
BACKWARD = 2 * FORWARD
SCORES_AGAIN = LAYERS * ATTENTION // 2
TIME_LIMIT_S = 240
"""For one job of two processes."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """A small decoder whose blocks may run under a checkpoint."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.options = options

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, **self.options) if self.options else block(x)
        logits = self.head(x)
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return out


def batch() -> dict[str, torch.Tensor]:
    ids = torch.arange(ROWS).reshape(SAMPLES, LENGTH) % VOCAB
    return {"input_ids": ids, "labels": ids}


def numbers(count: FlopCount) -> tuple[int, int, int]:
    return count.forward, count.backward, count.recompute


def test_the_plain_model_counts_what_its_dimensions_say() -> None:
    assert numbers(count_flops(Model(), batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)


# -- torch.compile --


@pytest.mark.parametrize("first", ["counted first", "run first"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_counts_as_the_plain_one(backend: str, first: str) -> None:
    torch._dynamo.reset()
    model = torch.compile(Model(), backend=backend)
    if first == "run first":
        model(**batch())["loss"].backward()
    assert numbers(count_flops(model, batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)
    model(**batch())["loss"].backward()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_a_model_compiled_by_inductor_counts_as_the_plain_one() -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)))
    x = torch.ones(4, 8)
    model(x).sum().backward()
    forward = 2 * 4 * (8 * 8 + 8 * 4)
    assert numbers(count_flops(model, (x,))) == (forward, 2 * forward - 2 * 4 * 8 * 8, 0)
    assert count_step(lambda: model(x).sum().backward()).model_flops == 3 * forward - 2 * 4 * 8 * 8


@pytest.mark.parametrize("where", ["blocks", "in place", "forward", "function"])
def test_a_compiled_part_counts_as_the_plain_one(where: str) -> None:
    torch._dynamo.reset()
    model = Model()
    if where == "blocks":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    elif where == "in place":
        model.compile(backend="eager")
    elif where == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        loss = torch.compile(lambda out: out["loss"] * 1, backend="eager")
        assert numbers(count_flops(model, batch(), loss_fn=loss)) == (FORWARD, BACKWARD, SCORES_AGAIN)
    assert numbers(count_flops(model, batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)
    assert numbers(FlopModel.fit(model, batch())(batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)


# -- activation checkpointing --

LAST_LINEAR = 2 * ROWS * INNER * WIDTH


@pytest.mark.parametrize(
    ("options", "early_stop", "again"),
    [
        ({"use_reentrant": True}, True, LINEAR + ATTENTION),
        ({"use_reentrant": False}, False, LINEAR + ATTENTION),
        # the last product's result is no input of any gradient: recomputing stops before it
        ({"use_reentrant": False}, True, LINEAR + ATTENTION - LAST_LINEAR),
        ({"use_reentrant": True, "preserve_rng_state": False}, True, LINEAR + ATTENTION),
    ],
    ids=["reentrant", "whole", "early stop", "without random state"],
)
def test_a_checkpoint_adds_recompute_and_no_model_flops(
    options: dict[str, bool], early_stop: bool, again: int
) -> None:
    with set_checkpoint_early_stop(early_stop):
        count = count_flops(Model(**options), batch())
    assert (count.forward, count.backward) == (FORWARD, BACKWARD)
    assert count.recompute == SCORES_AGAIN + LAYERS * again
    assert sum(count.by_operator.values()) == count.model_flops


def test_a_checkpoint_that_keeps_its_products_recomputes_none() -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    count = count_flops(Model(use_reentrant=False, context_fn=contexts), batch())
    assert numbers(count) == (FORWARD, BACKWARD, SCORES_AGAIN + LAYERS * ATTENTION)


def test_checkpoints_inside_a_checkpoint_recompute_twice() -> None:
    class Nested(Model):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return checkpoint(super().forward, input_ids, labels, use_reentrant=False)

    model = Nested(use_reentrant=False)
    with set_checkpoint_early_stop(False):
        count = count_flops(model, batch())
        executed = count_step(lambda: model(**batch())["loss"].backward())
    again = SCORES_AGAIN + FORWARD + LAYERS * (LINEAR + ATTENTION)
    assert numbers(count) == numbers(executed) == (FORWARD, BACKWARD, again)


@pytest.mark.parametrize("outer", [False, True], ids=["in non-reentrant", "in reentrant"])
@pytest.mark.parametrize("inner", [False, True], ids=["non-reentrant", "reentrant"])
def test_nested_checkpoints_change_no_model_flops_of_a_step_that_runs(inner: bool, outer: bool) -> None:
    up, down = nn.Linear(4, 6), nn.Linear(6, 4)
    x = torch.ones(3, 4, requires_grad=True)

    def part(h: torch.Tensor) -> Any:
        return F.relu(down(F.relu(up(h))))

    def whole(h: torch.Tensor) -> Any:
        for _ in range(2):
            h = checkpoint(part, h, use_reentrant=inner)
        return h

    with set_checkpoint_early_stop(False):
        count = count_step(lambda: checkpoint(whole, x, use_reentrant=outer).sum().backward())
    forward = 2 * 2 * (2 * 3 * 4 * 6)
    assert numbers(count) == (forward, 2 * forward, 2 * forward)


# -- one process --


def test_data_parallel_counts_the_model_inside() -> None:
    assert numbers(count_flops(nn.DataParallel(Model()), batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)


def test_averaged_weights_count_as_the_model_inside() -> None:
    averaged = torch.optim.swa_utils.AveragedModel(Model())
    assert numbers(count_flops(averaged, batch())) == (FORWARD, BACKWARD, SCORES_AGAIN)


def test_a_traced_graph_counts_as_the_model() -> None:
    traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    forward = 2 * 4 * (8 * 8 + 8 * 4)
    assert count_flops(traced, (torch.ones(4, 8),)).forward == forward


# -- adapters --

RANK = 2


def _llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
    )
    return transformers.LlamaForCausalLM._from_config(config, **options)


def _adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"]))


def _adapted_truth() -> tuple[int, int]:
    """Forward and backward of the Llama with adapters on queries and values, gradient by gradient."""
    pytest.importorskip("transformers", minversion="5.22")  # before it, rotary angles were a matrix product
    square, wide = 2 * ROWS * WIDTH * WIDTH, 2 * ROWS * WIDTH * INNER
    adapter = 2 * ROWS * (WIDTH * RANK + RANK * WIDTH)
    layer = 4 * square + 3 * wide + ATTENTION + 2 * adapter
    forward = LAYERS * layer + HEAD
    inputs_first = 2 * ROWS * RANK * WIDTH  # of an adapter: the first product's input needs no gradient
    # below the first layer nothing asks for a gradient: not its input, not its keys
    first = 2 * (adapter + inputs_first) + (square + 3 * wide) + 3 * ATTENTION // 2
    other = 4 * square + 3 * wide + 2 * ATTENTION + 2 * 2 * adapter
    return forward, first + (LAYERS - 1) * other + HEAD


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_adapters_on_a_frozen_base_count_only_the_gradients_they_need(attention: str) -> None:
    model = _adapted(_llama(attn_implementation=attention))
    count = count_flops(model, batch())
    assert (count.forward, count.backward) == _adapted_truth()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_adapters_count_the_same_model_flops(reentrant: bool) -> None:
    plain = _adapted(_llama())
    plain.enable_input_require_grads()
    expected = count_flops(plain, batch())
    model = _adapted(_llama())
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    count = count_flops(model, batch())
    assert (count.forward, count.backward) == (expected.forward, expected.backward)
    assert count.recompute > expected.recompute
    forward, backward = _adapted_truth()
    square = 2 * ROWS * WIDTH * WIDTH
    adapter_inputs = 2 * (2 * ROWS * RANK * WIDTH)
    # the embeddings' output now asks for a gradient: so do the first layer's input and keys
    below = 3 * square + ATTENTION // 2 + adapter_inputs
    assert (expected.forward, expected.backward) == (forward, backward + below)


def test_merged_adapters_count_as_the_base() -> None:
    base = count_flops(_llama(), batch(), backward=False)
    merged = _adapted(_llama()).merge_and_unload()
    assert count_flops(merged, batch(), backward=False).forward == base.forward


def _quantised_counts(quantise: Any) -> tuple[FlopCount, FlopCount]:
    """Adapters on the plain base, and on the base after `quantise(base)`."""
    return count_flops(_adapted(_llama()), batch()), count_flops(_adapted(quantise(_llama())), batch())


@pytest.mark.parametrize("bits", ["4-bit", "8-bit"])
def test_a_base_quantised_by_bitsandbytes_counts_as_the_plain_one(bits: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")

    def quantise(model: nn.Module) -> nn.Module:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and "lm_head" not in name:
                kind = bnb.nn.Linear4bit if bits == "4-bit" else bnb.nn.Linear8bitLt
                options = {"compute_dtype": torch.float32} if bits == "4-bit" else {"has_fp16_weights": False}
                made = kind(module.in_features, module.out_features, bias=False, **options)
                made.load_state_dict(module.state_dict())
                model.set_submodule(name, made.to("cpu"))
        model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == "4-bit", bits == "8-bit"
        return model.requires_grad_(False)

    plain, quantised = _quantised_counts(quantise)
    assert (quantised.forward, quantised.backward) == (plain.forward, plain.backward)
    assert not quantised.uncounted


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_base_quantised_by_torchao_counts_as_the_plain_one(config: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")

    def quantise(model: nn.Module) -> nn.Module:
        quantization.quantize_(model, getattr(quantization, config)())
        return model.requires_grad_(False)

    plain, quantised = _quantised_counts(quantise)
    assert (quantised.forward, quantised.backward) == (plain.forward, plain.backward)
    assert not quantised.uncounted


# -- two processes --


def _collectives() -> int:
    """Collectives started so far on this rank, in all its process groups."""
    groups = torch.distributed.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


def _wrap(kind: str) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = Model(use_reentrant=False) if "checkpointed" in kind else Model()
    if kind.startswith("fsdp"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if "bf16" in kind else None)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return torch.compile(model, backend="eager") if "compiled" in kind else model
    if kind.startswith("old fsdp"):
        options = {"use_orig_params": "original" in kind, "device_id": torch.device("cpu")}
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FullyShardedDataParallel(block, **options)
        return FullyShardedDataParallel(model, **options)
    if kind == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model
    if kind == "ddp of compiled":
        return DistributedDataParallel(torch.compile(model, backend="eager"))
    model = DistributedDataParallel(model)
    return torch.compile(model, backend="eager") if kind == "compiled ddp" else model


KINDS = (
    "ddp",
    "ddp of compiled",
    "compiled ddp",
    "ddp checkpointed",
    "fsdp",
    "fsdp bf16",
    "fsdp checkpointed",
    "fsdp compiled",
)
OTHERS = ("old fsdp", "old fsdp, original parameters", "tensor parallel")
"""Wrappers that may be refused, in one clear line; never counted wrong, and never harmed."""


def _rank(rank: int, address: str, folder: Path, kinds: tuple[str, ...]) -> None:
    """One rank: the first counts while the second waits for a file; then both train."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    found: dict[str, Any] = {}
    models = {kind: _wrap(kind) for kind in kinds}
    torch.distributed.barrier()
    if rank == 0:
        for kind, model in models.items():
            before = _collectives()
            try:
                count, fitted = count_flops(model, batch()), FlopModel.fit(model, batch())(batch())
                found[kind] = {
                    "numbers": numbers(count),
                    "fitted": numbers(fitted),
                    "dtypes": dict(count.by_dtype),
                    "modules": count.by_module.get("blocks.1.up"),
                }
            except Exception as error:
                found[kind] = {"error": f"{type(error).__name__}: {error}"}
            found[kind]["collectives"] = _collectives() - before
            found[kind]["grads"] = [n for n, p in model.named_parameters() if p.grad is not None]
        (folder / "counted").touch()
    else:
        wait_until((folder / "counted").exists, within_s=TIME_LIMIT_S)
    for kind, model in models.items():
        before = _collectives()
        for _ in range(2):
            model(**batch())["loss"].backward()
        bad = [n for n, p in model.named_parameters() if p.grad is None and p.numel()]
        found.setdefault(kind, {})["trained"] = {"without grad": bad, "collectives": _collectives() - before}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _job(folder: Path, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Two processes; what each of them found, or a failure that says where they hung."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    address = free_address()
    arguments = [(rank, address, folder, kinds) for rank in range(2)]
    codes, found = run_ranks(_rank, arguments, folder, TIME_LIMIT_S)
    counted = (folder / "counted").exists()
    assert codes == [0, 0], (
        f"a rank {'hung or failed in training, after' if counted else 'hung while'} one counted"
    )
    return [found[rank] for rank in range(2)]


def _wrong(kind: str, first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """What is wrong with what the two ranks found for one kind of wrapper."""
    bf16, checkpointed = "bf16" in kind, "checkpointed" in kind
    again = LAYERS * (LINEAR + ATTENTION - LAST_LINEAR) if checkpointed else 0
    expected = [FORWARD, BACKWARD, SCORES_AGAIN + again]
    checks = {
        f"collectives were started: {first['collectives']}": first["collectives"] == 0,
        f"gradients are left: {first['grads']}": first["grads"] == [],
        "the first rank does not train": first["trained"]["without grad"] == [],
        "the second rank does not train": second["trained"]["without grad"] == [],
        "training starts no collective: the first check could not fail": second["trained"]["collectives"] > 0,
    }
    if "error" not in first:
        dtypes = {"bf16" if bf16 else "fp32": FORWARD + BACKWARD}
        checks |= {
            f"counted {first['numbers']}, not {expected}": first["numbers"] == expected,
            f"fitted {first['fitted']}, not {expected}": first["fitted"] == expected,
            f"dtypes {first['dtypes']}": first["dtypes"] == dtypes,
            f"modules {first['modules']}": first["modules"] == 3 * 2 * ROWS * WIDTH * INNER,
        }
    return [complaint for complaint, holds in checks.items() if not holds]


def test_one_rank_counts_alone_and_then_both_train(tmp_path: Path) -> None:
    first, second = _job(tmp_path, KINDS)
    assert {kind: first[kind]["error"] for kind in KINDS if "error" in first[kind]} == {}
    wrong = {kind: _wrong(kind, first[kind], second[kind]) for kind in KINDS}
    assert wrong == {kind: [] for kind in KINDS}


def test_other_wrappers_are_counted_or_refused_and_never_harmed(tmp_path: Path) -> None:
    first, second = _job(tmp_path, OTHERS)
    for kind in OTHERS:
        assert _wrong(kind, first[kind], second[kind]) == [], kind
        if "error" in first[kind]:
            assert first[kind]["error"].startswith("ModelError: "), first[kind]["error"]
            assert "parallel" in first[kind]["error"].lower(), first[kind]["error"]
