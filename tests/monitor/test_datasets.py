"""Loss and accuracy per dataset are those of a loop over the samples, and training never waits for them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import truemfu.monitor.values.datasets as datasets
from truemfu.errors import TruemfuWarning
from truemfu.monitor.values.datasets import EXTRA_BYTES, DatasetMetrics, dataset_metrics, shifts_labels


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("truemfu.errors._already_warned", set())


def mixed_batch(
    names: list[str], length: int, vocabulary: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[dict[str, Any], Tensor]:
    """A batch with a third of its labels ignored, and logits for it that are right about half of the time."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (len(names), length), generator=generator)
    logits = torch.randn((len(names), length, vocabulary), generator=generator)
    strength = 5 * torch.rand(labels.shape, generator=generator)
    right = F.one_hot(labels.roll(-1, 1), vocabulary) * strength[..., None]
    labels[torch.rand(labels.shape, generator=generator) < 0.34] = -100
    return {"dataset_names": names, "labels": labels}, (logits + right).to(dtype)


def by_a_loop(names: list[str], labels: Tensor, logits: Tensor, shift: bool) -> dict[str, float | int]:
    """The same metrics, one token after the other, in float64."""
    rows: dict[str, list[tuple[float, bool]]] = {name: [] for name in names}
    ahead = 1 if shift else 0
    for i, name in enumerate(names):
        for t in range(labels.shape[1] - ahead):
            label = int(labels[i, t + ahead])
            if label != -100:
                loss = F.cross_entropy(logits[i, t].double(), torch.tensor(label)).item()
                rows[name].append((loss, int(logits[i, t].argmax()) == label))
    metrics: dict[str, float | int] = {}
    for name, tokens in rows.items():
        if tokens:
            metrics[f"dataset/{name}/loss"] = sum(loss for loss, _ in tokens) / len(tokens)
            metrics[f"dataset/{name}/accuracy"] = sum(right for _, right in tokens) / len(tokens)
        metrics[f"dataset/{name}/samples"] = names.count(name)
        metrics[f"dataset/{name}/tokens"] = len(tokens)
    return metrics


def measured(batch: Any, outputs: Any, loss: Any = None, shift: bool = True) -> dict[str, float | int]:
    pending = DatasetMetrics(shift=shift).measure(batch, outputs, loss)
    assert pending is not None
    return dataset_metrics(pending.names, pending.sums)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("names", ["abba", "a", "abcdefg", "aaaa", "aaab"])
def test_a_mixed_batch_gives_what_a_loop_over_its_tokens_gives(
    names: str, dtype: torch.dtype, shift: bool
) -> None:
    batch, logits = mixed_batch(list(names), 17, 31, dtype)
    expected = by_a_loop(batch["dataset_names"], batch["labels"], logits, shift)
    result = measured(batch, SimpleNamespace(logits=logits), shift=shift)
    assert result == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-5)
    assert list(result) == list(expected)
    if shift:
        assert 0.2 < result["dataset/a/accuracy"] < 0.8
    for name in set(names):
        assert type(result[f"dataset/{name}/samples"]) is type(result[f"dataset/{name}/tokens"]) is int


@pytest.mark.parametrize("piece_numbers", [1, 31, 31 * 5, 31 * 17, 31 * 40, 10**6])
@pytest.mark.parametrize("layout", ["plain", "transposed", "padded vocabulary", "cut off"])
def test_the_size_and_layout_of_the_pieces_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, piece_numbers: int, layout: str
) -> None:
    monkeypatch.setattr(datasets, "_PIECE_NUMBERS", piece_numbers)
    batch, logits = mixed_batch(["a", "b", "a", "c", "b"], 17, 31)
    expected = by_a_loop(batch["dataset_names"], batch["labels"], logits, True)
    if layout == "transposed":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "padded vocabulary":
        logits = F.pad(logits, (0, 5))[..., :31]
    elif layout == "cut off":
        logits = F.pad(logits, (0, 0, 0, 1))[:, :-1]
    assert layout == "plain" or not logits.is_contiguous()
    assert measured(batch, {"logits": logits}) == pytest.approx(expected, rel=1e-5)


def test_a_classification_is_not_shifted() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.0]])
    batch = {"labels": torch.tensor([0, 0, -100]), "dataset_names": ("x", "y", "y")}
    losses = F.cross_entropy(logits[:2], batch["labels"][:2], reduction="none")
    assert measured(batch, logits) == pytest.approx(
        {
            "dataset/x/loss": losses[0].item(),
            "dataset/x/accuracy": 1.0,
            "dataset/x/samples": 1,
            "dataset/x/tokens": 1,
            "dataset/y/loss": losses[1].item(),
            "dataset/y/accuracy": 0.0,
            "dataset/y/samples": 2,
            "dataset/y/tokens": 1,
        }
    )


def test_a_dataset_without_a_counted_token_has_no_loss_and_no_accuracy() -> None:
    batch, logits = mixed_batch(["a", "b"], 5, 7)
    batch["labels"][1] = -100
    batch["labels"][1, 0] = 3  # nothing predicts the first position
    result = measured(batch, SimpleNamespace(logits=logits))
    assert {name for name in result if "/b/" in name} == {"dataset/b/samples", "dataset/b/tokens"}
    assert (result["dataset/b/samples"], result["dataset/b/tokens"]) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
def test_labels_outside_the_vocabulary_are_not_counted(dtype: torch.dtype) -> None:
    outside = 200 if dtype == torch.uint8 else -1
    labels = torch.tensor([[0, 1, outside, 31, 2]], dtype=dtype)
    logits = torch.zeros(1, 5, 31)
    result = measured({"dataset_names": ["a"], "labels": labels}, SimpleNamespace(logits=logits))
    assert result["dataset/a/tokens"] == 2
    assert result["dataset/a/loss"] == pytest.approx(math.log(31))


def test_what_stands_at_an_ignored_position_does_not_matter() -> None:
    batch, logits = mixed_batch(["a", "b"], 6, 7)
    before = measured(batch, {"logits": logits})
    ignored = batch["labels"].roll(-1, 1) == -100
    ignored[:, -1] = True
    logits[ignored] = torch.nan
    assert measured(batch, {"logits": logits}) == before


def test_a_loss_that_is_not_finite_is_shown_as_it_is() -> None:
    batch, logits = mixed_batch(["a", "b"], 6, 7)
    logits[1] = torch.nan
    result = measured(batch, {"logits": logits})
    assert math.isfinite(result["dataset/a/loss"])
    assert math.isnan(result["dataset/b/loss"])


def test_the_rows_of_several_batches_add_up_to_those_of_one() -> None:
    batch, logits = mixed_batch(["a", "b", "b", "c", "a", "d"], 9, 11)
    whole = measured(batch, {"logits": logits})
    metrics = DatasetMetrics()
    halves = [
        metrics.measure(
            {"dataset_names": batch["dataset_names"][part], "labels": batch["labels"][part]},
            {"logits": logits[part]},
            None,
        )
        for part in (slice(0, 2), slice(2, 6))
    ]
    names = [name for half in halves if half for name in half.names]
    sums = torch.cat([half.sums for half in halves if half])
    assert dataset_metrics(names, sums) == pytest.approx(whole)


def test_no_graph_is_kept_and_nothing_is_changed() -> None:
    batch, logits = mixed_batch(["a", "b"], 6, 7)
    labels, values, state = batch["labels"].clone(), logits.clone(), torch.get_rng_state()
    pending = DatasetMetrics().measure(batch, {"logits": logits.requires_grad_()}, None)
    assert pending is not None
    assert not pending.sums.requires_grad
    assert pending.names == ("a", "b")
    assert pending.sums.shape == (2, 3)
    assert torch.is_grad_enabled()
    assert torch.equal(batch["labels"], labels)
    assert torch.equal(logits, values)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("loss", [2.5, 2, torch.tensor(2.5), torch.tensor([2.5]).requires_grad_()])
@pytest.mark.parametrize("outputs", [None, {"loss": 1}, SimpleNamespace(logits=None), (1, 2)])
def test_without_logits_a_single_dataset_has_the_aggregated_loss(loss: Any, outputs: Any) -> None:
    batch, _ = mixed_batch(["a"] * 3, 9, 11)
    tokens = int((batch["labels"][:, 1:] >= 0).sum())
    assert measured(batch, outputs, loss) == pytest.approx(
        {"dataset/a/loss": 2 if loss == 2 else 2.5, "dataset/a/samples": 3, "dataset/a/tokens": tokens}
    )


def test_an_infinite_aggregated_loss_stays_infinite_beside_a_sample_without_tokens() -> None:
    batch, _ = mixed_batch(["a"] * 3, 9, 11)
    batch["labels"][1] = -100
    assert measured(batch, None, float("inf"))["dataset/a/loss"] == float("inf")


@pytest.mark.parametrize("batch", [{}, {"dataset_names": None}, {"dataset_names": []}, (1, 2), None])
def test_a_batch_without_names_is_passed_over_in_silence(batch: Any) -> None:
    assert DatasetMetrics().measure(batch, SimpleNamespace(logits=torch.zeros(1, 2, 3)), 1.0) is None


LABELS, LOGITS = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, 7)


@pytest.mark.parametrize(
    ("names", "labels", "logits", "loss", "message"),
    [
        ("ab", LABELS, LOGITS, 1.0, "dataset_names must be a list of strings, one per sample; got str"),
        ([1, 2], LABELS, LOGITS, 1.0, "dataset_names must be a list of strings"),
        (torch.tensor([0, 1]), LABELS, LOGITS, 1.0, "dataset_names must be a list .* got Tensor"),
        (["a"], LABELS, LOGITS, 1.0, r"one per sample; got labels of shape \(2, 5\) and 1 names"),
        (["a", "b"], None, LOGITS, 1.0, "labels must be a tensor with values; got none"),
        (["a", "b"], [[1], [2]], LOGITS, 1.0, "labels must be a tensor with values; got list"),
        (["a", "b"], LABELS.float(), LOGITS, 1.0, r"labels must be integers; got torch\.float32"),
        (["a", "b"], LABELS[..., None], LOGITS, 1.0, r"labels must have .* got labels of shape \(2, 5, 1\)"),
        (["a", "b"], LABELS, LOGITS[:, :3], 1.0, r"logits must be .* logits of shape \(2, 3, 7\)"),
        (["a", "b"], LABELS, LOGITS[..., None], 1.0, r"logits must be .* logits of shape \(2, 5, 7, 1\)"),
        (["a", "b"], LABELS, LOGITS[0, 0, 0], 1.0, r"logits must be .* logits of shape \(\)"),
        (["a", "b"], LABELS, LOGITS.long(), 1.0, r"logits must be floating-point .*int64"),
        (["a", "b"], LABELS, LOGITS.to("meta"), 1.0, "logits must be a tensor with values; got Tensor"),
        (["a", "b"], LABELS, "logits", 1.0, "logits must be a tensor with values; got str"),
        (["a", "b"], LABELS, LOGITS.to_sparse(), 1.0, "no dataset metrics for this batch .*Error: "),
        (["a", "b"], LABELS, None, 1.0, "several datasets needs logits .* got no logits and 2 datasets"),
        (["a", "a"], LABELS, None, None, "without logits aggregated_loss must be one number; got none"),
        (["a", "a"], LABELS, None, "1", "without logits aggregated_loss must be one number; got str"),
        (["a", "a"], LABELS, None, torch.ones(2), r"aggregated_loss must be one number, .* got shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_one_warning_and_no_metrics(
    names: Any, labels: Any, logits: Any, loss: Any, message: str
) -> None:
    metrics = DatasetMetrics()
    batch = {"dataset_names": names, "labels": labels}
    with pytest.warns(TruemfuWarning, match=message) as said:
        results = [metrics.measure(batch, SimpleNamespace(logits=logits), loss) for _ in range(3)]
    assert results == [None, None, None]
    assert len(said) == 1
    assert len(str(said[0].message).splitlines()) == 1


def test_a_problem_is_said_once_though_its_shapes_change_at_every_step() -> None:
    metrics = DatasetMetrics()
    batch = {"dataset_names": ["a", "b"], "labels": LABELS}
    with pytest.warns(TruemfuWarning, match="logits must be") as said:
        results = [metrics.measure(batch, {"logits": LOGITS[:, :length]}, None) for length in range(1, 5)]
    assert results == [None] * 4
    assert len(said) == 1
    assert metrics.measure(batch, {"logits": LOGITS}, None) is not None


def test_an_error_from_anywhere_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 64 MiB")

    monkeypatch.setattr(datasets, "sums_of_logits", full)
    batch = {"dataset_names": ["a", "b"], "labels": LABELS}
    with pytest.warns(TruemfuWarning, match=r"OutOfMemoryError: CUDA out of memory\. Tried to allocate 64 M"):
        assert DatasetMetrics().measure(batch, LOGITS, None) is None


class Queued(TorchDispatchMode):
    """Fails on anything that waits for a device, moves between devices or draws random numbers.

    `peak_bytes` is the most that was alive at once of what the operators made, and `operators` how many ran.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.peak_bytes = 0
        self.operators = 0
        self._alive: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
        assert not waits, f"{func} waits for values"
        assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func} draws random numbers"
        by_mask = func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_)
        assert not by_mask or all(x.dtype != torch.bool for x in inputs[1:]), f"{func} waits for a mask"
        assert func.namespace == "aten", f"{func} is no plain operator"
        for tensor in [*inputs, *made]:
            assert tensor.device.type == self.device, f"{func} has a tensor on {tensor.device}"
        given = {StorageWeakRef(x.untyped_storage()) for x in inputs}
        for tensor in made:
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage not in given:
                self._alive[storage] = tensor.untyped_storage().nbytes()
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
        self.operators += 1
        return out


@pytest.fixture
def _meta_has_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meta tensor stands for one on a device: there too a value read or a copy from the host shows."""
    monkeypatch.setattr(datasets, "is_readable", lambda tensor: isinstance(tensor, Tensor))


def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[dict[str, Any], Tensor]:
    labels = torch.empty(shape[:-1], dtype=torch.int32, device="meta")
    return {"dataset_names": ["a"] * shape[0], "labels": labels}, torch.empty(
        shape, dtype=dtype, device="meta"
    )


@pytest.mark.usefixtures("_meta_has_values")
@pytest.mark.parametrize("shape", [(4, 9, 31), (3, 1, 5), (1, 2, 100), (4, 31)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [None, 2.5, torch.empty((), device="meta")])
def test_a_measurement_only_queues_work_on_the_device(
    shape: tuple[int, ...], dtype: torch.dtype, loss: Any
) -> None:
    batch, logits = on_meta(shape, dtype)
    with Queued("meta") as queued:
        pending = DatasetMetrics().measure(batch, logits if loss is None else None, loss)
    assert pending is not None
    assert pending.sums.shape == (shape[0], 3)
    assert queued.operators > 5


@pytest.mark.usefixtures("_meta_has_values")
def test_tensors_on_different_devices_are_one_warning() -> None:
    batch = {"dataset_names": ["a", "a"], "labels": LABELS}
    with pytest.warns(
        TruemfuWarning, match="labels must be on the device of the logits.* on cpu, .* on meta"
    ):
        assert DatasetMetrics().measure(batch, LOGITS.to("meta"), None) is None
    with pytest.warns(TruemfuWarning, match=r"aggregated_loss must be one number, .* on meta, labels on cpu"):
        assert DatasetMetrics().measure(batch, None, torch.empty((), device="meta")) is None


@pytest.mark.usefixtures("_meta_has_values")
def test_a_loss_on_the_host_may_go_with_labels_on_a_device() -> None:
    batch, _ = on_meta((2, 5, 7), torch.float32)
    assert DatasetMetrics().measure(batch, None, torch.tensor(2.5)) is not None


@pytest.mark.parametrize(
    ("device", "bad"),
    [
        ("cpu", lambda x: x.sum().item()),
        ("cpu", lambda x: x[x > 0]),
        ("cpu", lambda x: x.masked_select(x > 0)),
        ("cpu", lambda x: x.nonzero()),
        ("cpu", lambda x: x.to("meta")),
        ("cpu", torch.rand_like),
        ("meta", lambda x: torch.tensor([1.0, 2.0, 3.0]) + x.shape[0]),
    ],
)
def test_the_watch_sees_what_waits(device: str, bad: Any) -> None:
    x = torch.ones(3, device=device)
    expected = "waits for|draws random numbers|has a tensor on"
    with pytest.raises(AssertionError, match=expected), Queued(device):
        bad(x)


@pytest.mark.usefixtures("_meta_has_values")
@pytest.mark.parametrize(
    ("shape", "dtype", "layout"),
    [
        ((8, 1024, 128_256), torch.bfloat16, "plain"),
        ((8, 1024, 128_256), torch.bfloat16, "transposed"),
        ((8, 1024, 128_256), torch.bfloat16, "cut off"),
        ((8, 1024, 128_256), torch.float64, "plain"),
        ((1, 32_768, 151_936), torch.bfloat16, "cut off"),
        ((512, 33, 50_257), torch.float16, "transposed"),
        ((64, 33, 50_257), torch.float16, "cut off"),
        ((4096, 1, 1000), torch.float32, "plain"),
    ],
)
def test_the_memory_of_the_pass_is_bounded_whatever_the_size_of_the_logits(
    shape: tuple[int, int, int], dtype: torch.dtype, layout: str
) -> None:
    batch, logits = on_meta(shape, dtype)
    if layout == "transposed":
        logits = logits.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "cut off":
        logits = F.pad(logits, (0, 0, 0, 1))[:, :-1]
    with Queued("meta") as queued:
        assert DatasetMetrics().measure(batch, logits, None) is not None
    labels = batch["labels"]
    per_token = 64 * labels.numel()
    assert queued.peak_bytes < EXTRA_BYTES + per_token
    assert per_token <= 8 * 2**20
    pieces = math.ceil(labels.numel() / (datasets._PIECE_NUMBERS // shape[2]))
    rows = shape[0] if layout == "cut off" and 1 not in shape else 0
    assert queued.operators < 40 + 5 * pieces + 8 * rows


def test_the_watch_sees_a_copy_of_all_logits() -> None:
    logits = torch.empty((8, 1024, 128_256), dtype=torch.bfloat16, device="meta")
    with Queued("meta") as queued:
        logits.float().logsumexp(-1)
    assert queued.peak_bytes >= 4 * logits.numel()


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_logits_that_are_spread_over_ranks_are_left_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    logits = distribute_tensor(LOGITS, init_device_mesh("cpu", (1,)), [Shard(2)])
    batch = {"dataset_names": ["a", "b"], "labels": LABELS}
    expected = "logits must be a plain tensor with the whole vocabulary; got DTensor"
    with pytest.warns(TruemfuWarning, match=expected), Queued("cpu") as queued:
        assert DatasetMetrics().measure(batch, SimpleNamespace(logits=logits), None) is None
    assert queued.operators == 0


def small_model(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = torch.randint(0, 50, (3, 8))
    batch = {"input_ids": ids, "labels": torch.where(torch.rand(3, 8) < 0.3, -100, ids)}
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, intermediate_size=32)), batch
    if kind == "gpt2":
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)), batch
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=32)), batch
    if kind == "tokens":
        config = hf.BertConfig(**sizes, intermediate_size=32, num_labels=50)
        return hf.BertForTokenClassification(config), batch
    if kind == "sequence":
        config = hf.BertConfig(**sizes, intermediate_size=32, num_labels=4)
        return hf.BertForSequenceClassification(config), {**batch, "labels": torch.tensor([0, 3, 1])}
    t5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    config = hf.T5Config(vocab_size=50, **t5)
    return hf.T5ForConditionalGeneration(config), batch


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("kind", "shift"),
    [("llama", True), ("gpt2", True), ("bert", False), ("tokens", False), ("sequence", False), ("t5", False)],
)
def test_a_single_dataset_has_the_loss_of_the_model_itself(kind: str, shift: bool, wrapped: bool) -> None:
    model, batch = small_model(kind)
    model.eval()
    outputs = model(**batch)
    assert shifts_labels(nn.DataParallel(model) if wrapped else model) is shift  # it moves to a GPU, if any
    result = measured({**batch, "dataset_names": ["a"] * 3}, outputs, outputs.loss, shift=shift)
    assert result["dataset/a/loss"] == pytest.approx(outputs.loss.item(), rel=1e-5)


def test_a_model_that_says_nothing_is_taken_to_be_causal() -> None:
    assert shifts_labels(nn.Linear(2, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_is_not_waited_for_and_its_memory_is_bounded() -> None:
    names = list("abcaabbc")
    batch, logits = mixed_batch(names, 64, 1000, torch.bfloat16)
    expected = measured(batch, {"logits": logits})
    batch, logits = {**batch, "labels": batch["labels"].cuda()}, logits.cuda()
    large = torch.zeros((8, 1024, 128_256), dtype=torch.bfloat16, device="cuda")
    large_batch = {"dataset_names": names, "labels": torch.zeros((8, 1024), dtype=torch.int64, device="cuda")}
    metrics = DatasetMetrics()
    for warm_up in ((batch, logits), (large_batch, large)):  # loading a kernel for the first time waits
        metrics.measure(warm_up[0], {"logits": warm_up[1]}, None)
    metrics.measure({**batch, "dataset_names": ["a"] * 8}, None, logits.float().sum())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    done = torch.cuda.Event()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        done.record()
        pending = metrics.measure(batch, {"logits": logits}, None)
        metrics.measure(large_batch, {"logits": large}, None)
        metrics.measure({**batch, "dataset_names": ["a"] * 8}, None, logits.float().sum())
        assert not done.query(), "the pass waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < EXTRA_BYTES
    assert pending is not None
    assert dataset_metrics(pending.names, pending.sums.cpu()) == pytest.approx(expected, rel=1e-4)
