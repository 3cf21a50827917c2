"""Device values: kept for a moment, fetched together, never a value that is not the one passed in.

What is kept and when is decided without looking at the device, so CPU tensors show it here.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import torch

from truemfu.monitor.values import host_values
from truemfu.monitor.values.host_values import Held, HostValues, is_there, resolved

_COMPILED_GRAPHS = host_values._COMPILED_GRAPHS


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def values(said: list[str], monkeypatch: pytest.MonkeyPatch) -> HostValues:
    monkeypatch.setattr(host_values, "_COMPILED_GRAPHS", "not imported")  # by another test
    return HostValues(lambda text, about=None: said.append(text))


def keep(values: HostValues, tensor: torch.Tensor, name: str = "loss") -> Held:
    return values._hold(name, tensor, is_input=False)


def test_plain_numbers_are_taken_at_once(values: HostValues) -> None:
    assert values.number("loss", 2.5) == 2.5
    assert values.number("loss", 3) == 3.0
    assert values.number("loss", None) is None
    assert values.number("loss", torch.tensor([[1.5]], requires_grad=True)) == 1.5


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (torch.zeros(2), r"a tensor of shape \(2,\)"),
        (torch.zeros((), device="meta"), "without a value"),
        ([1.0], "list"),
    ],
)
def test_what_is_no_number_is_said(values: HostValues, said: list[str], value: object, problem: str) -> None:
    assert values.number("loss", value) is None
    (text,) = said
    assert re.match(f"loss is not logged: got .*{problem}", text)


def test_kept_numbers_are_there_after_a_flush_and_not_before(values: HostValues) -> None:
    held = [keep(values, torch.tensor(float(i))) for i in range(5)]
    assert not any(is_there(h) for h in held)
    values.flush()
    assert [resolved(h) for h in held] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_one_copy_is_made_for_each_shape_and_dtype(
    values: HostValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Size] = []
    from truemfu.monitor.values import host_values

    own = host_values.HostCopy

    def counted(tensor: torch.Tensor) -> object:
        made.append(tensor.shape)
        return own(tensor)

    monkeypatch.setattr(host_values, "HostCopy", counted)
    losses = [keep(values, torch.tensor(float(i))) for i in range(40)]
    norms = [keep(values, torch.tensor(float(i), dtype=torch.bfloat16), "grad_norm") for i in range(40)]
    values.flush()
    assert made[-2:] == [torch.Size([40]), torch.Size([40])]
    assert len(made) == 2 + 2  # and the first of each kind
    assert [resolved(h) for h in (losses[7], norms[8])] == [7.0, 8.0]


def test_no_graph_is_kept_alive(values: HostValues) -> None:
    held = keep(values, (torch.ones(3, requires_grad=True) * 2).sum())
    kept = values._held[0].tensor
    assert kept is not None
    assert kept.grad_fn is None
    assert not kept.requires_grad
    values.flush()
    assert resolved(held) == 6.0


def test_an_inference_tensor_is_copied(values: HostValues) -> None:
    with torch.inference_mode():
        loss = torch.tensor(1.0)
    held = keep(values, loss)
    with torch.inference_mode():
        loss += 1  # leaves no trace
    values.flush()
    assert resolved(held) == 1.0


def test_a_value_changed_in_place_is_missing_not_wrong(values: HostValues, said: list[str]) -> None:
    loss = torch.tensor(1.0)
    first = keep(values, loss)
    loss.zero_()
    values.flush()
    assert is_there(first)
    assert resolved(first) is None
    assert len(said) == 1
    assert "loss was overwritten" in said[0]


def test_after_that_its_kind_is_copied_at_once(values: HostValues, said: list[str]) -> None:
    total = torch.tensor(0.0)
    held = []
    for _ in range(5):
        total += 1
        held.append(keep(values, total))
    values.flush()
    assert [resolved(h) for h in held] == [None, 2.0, 3.0, 4.0, 5.0]
    assert len(said) == 1


def test_a_place_that_is_written_behind_torchs_back_is_noticed(values: HostValues) -> None:
    static = torch.tensor(1.0)  # the output of a CUDA graph: written by replays, which leave no trace
    first = keep(values, static)
    static.data_ptr()
    static.numpy()[...] = 2.0
    second = keep(values, static)
    static.numpy()[...] = 3.0
    values.flush()
    assert resolved(first) is None
    assert resolved(second) == 2.0


def test_with_graphs_of_torch_compile_every_number_is_copied_at_once(
    values: HostValues, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output lies where another graph has temporaries: it is overwritten before its place comes again."""
    monkeypatch.setattr(host_values, "_COMPILED_GRAPHS", "torch")
    outputs = torch.tensor(1.0), torch.tensor(2.0)
    held = [keep(values, output) for output in outputs]
    for output in outputs:
        output.numpy()[...] = 9.0
    mask = torch.ones(2, 3)
    tokens = values._hold("attention_mask", mask, is_input=True, count=True)
    assert tokens.tensor is not None
    assert tokens.tensor.data_ptr() == mask.data_ptr()  # what a model is given is left where it is
    values.flush()
    assert [resolved(h) for h in held] == [1.0, 2.0]
    assert said == []


def test_torch_still_has_its_compiled_graphs_there() -> None:
    assert importlib.util.find_spec(_COMPILED_GRAPHS) is not None


def test_two_names_may_share_a_tensor(values: HostValues, said: list[str]) -> None:
    loss = torch.tensor(4.0)
    held = keep(values, loss), keep(values, loss, "grad_norm")
    values.flush()
    assert [resolved(h) for h in held] == [4.0, 4.0]
    assert said == []


def test_an_argument_that_comes_again_unchanged_is_kept_once(values: HostValues, said: list[str]) -> None:
    mask = torch.ones(2, 3)
    first = values._hold("attention_mask", mask, is_input=True, count=True)
    assert values._hold("attention_mask", mask, is_input=True, count=True) is first
    mask[0, 0] = 0
    second = values._hold("attention_mask", mask, is_input=True, count=True)
    mask.zero_()
    values.flush()
    assert resolved(first) is None
    assert resolved(second) == 5.0
    assert len(said) == 1


def test_masks_of_one_shape_are_counted_together(values: HostValues) -> None:
    masks = [torch.ones(2, 4, dtype=torch.bool).tril(i) for i in range(-1, 3)]
    held = [values._hold("attention_mask", m, is_input=True, count=True) for m in masks]
    values.flush()
    assert [resolved(h) for h in held] == [float(m.sum()) for m in masks]


def test_a_small_part_of_something_large_is_copied(values: HostValues) -> None:
    losses = torch.zeros(3 << 20)
    held = keep(values, losses[5])
    losses += 1
    values.flush()
    assert resolved(held) == 0.0


def test_what_is_kept_is_bounded(values: HostValues) -> None:
    for i in range(10_000):
        keep(values, torch.tensor(float(i)))
        values.flush_if_due(values._since_s)
        assert len(values._held) <= 257
    big = [torch.ones(1 << 20) for _ in range(8)]
    for tensor in big:
        values._hold("position_ids", tensor, is_input=True)
        values.flush_if_due(values._since_s)
    assert values._bytes <= (16 << 20)


def test_nothing_waits_longer_than_a_few_seconds(values: HostValues) -> None:
    held = keep(values, torch.tensor(1.0))
    values.flush_if_due(values._since_s + 2.5)
    assert not is_there(held)
    values.flush_if_due(values._since_s + 3.1)
    assert is_there(held)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_synchronises_on_a_gpu(values: HostValues) -> None:
    done = torch.cuda.Event()
    mask = torch.ones(4, 512, dtype=torch.long, device="cuda")
    values.number("loss", torch.zeros((), device="cuda"))  # a first step has kernels loaded and memory made
    values.tokens_in(mask)
    values.flush()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        held = [values.number("loss", torch.full((), float(i), device="cuda")) for i in range(8)]
        tokens = values.tokens_in(mask)
        values.flush()
        done.record()
        assert not done.query()
        assert not any(is_there(h) for h in held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert [resolved(h) for h in held] == [float(i) for i in range(8)]
    assert resolved(tokens) == 2048.0


def test_the_first_of_a_kind_goes_all_the_way_at_once(
    values: HostValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes a program wait the first time it is done must not be done first in the middle of a run."""
    sent: list[tuple[int, ...]] = []
    from truemfu.monitor.values import host_values

    copy = host_values.HostCopy
    monkeypatch.setattr(host_values, "HostCopy", lambda t: sent.append(tuple(t.shape)) or copy(t))
    first = keep(values, torch.tensor(1.0))
    assert sent == [(2,)]
    assert not is_there(first)
    keep(values, torch.tensor(2.0))
    values._hold("attention_mask", torch.ones(3, 4), is_input=True, count=True)
    assert sent == [(2,), (2,)]
    values.flush()
    assert resolved(first) == 1.0
    keep(values, torch.tensor(3.0))
    values.flush()
    assert sent == [(2,), (2,), (2,), (1,), (1,)]


_LATER_FLUSH = """
import torch
from truemfu.monitor.values.host_values import HostValues

values = HostValues(print)
mask = torch.ones(4, 512, dtype=torch.long, device="cuda")
losses = torch.arange(40.0, device="cuda").unbind()
values.number("loss", losses[0]), values.tokens_in(mask), values.flush()
torch.cuda.synchronize()
end = torch.cuda.Event()
torch.cuda._sleep(2_000_000_000)
end.record()
for loss in losses:
    values.number("loss", loss)
values.tokens_in(mask.clone())
values.flush()
print("waited" if end.query() else "went on")
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_later_flush_waits_for_nothing_new_on_a_gpu() -> None:
    """In a process of its own: here kernels are loaded and memory is there already."""
    done = subprocess.run([sys.executable, "-c", _LATER_FLUSH], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "went on", done.stderr


_COMPILED_RUN = """
import json, tempfile, torch
from truemfu import TrainingMonitor

torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64)
    def forward(self, ids):
        return torch.nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), ids.flatten())

model = Model().cuda()
model.compile(mode="reduce-overhead", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = [torch.randint(64, (4, length), device="cuda") for length in (16, 32)]
folder, true = tempfile.mkdtemp(), []
monitor = TrainingMonitor(folder, model=model)
for step in range(40):
    loss = model(batches[step // 3 % 2])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    true.append(loss.detach().clone())
    monitor.log_step(step, 0, loss, 1.0, 0.1)
    del loss
monitor.save_logs()
rows = json.load(open(folder + "/training_log.json"))
logged = {row["global_step"]: row["training/loss"] for row in rows}
print(json.dumps([[logged.get(step), value.item()] for step, value in enumerate(true)]))
print(json.dumps(monitor.summary()["warnings"]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_loss_of_a_model_replayed_as_cuda_graphs_is_right_on_every_step() -> None:
    done = subprocess.run([sys.executable, "-c", _COMPILED_RUN], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    pairs, warnings = (json.loads(line) for line in done.stdout.splitlines()[:2])
    assert len(pairs) == 40
    assert all(logged == pytest.approx(true, rel=1e-6) for logged, true in pairs), pairs
    assert warnings == []
