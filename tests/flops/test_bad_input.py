"""Bad input from Python: one clear line each, of the right class, and nothing changed in the model.

A message says what was expected, what came, and where it can, what to do. What a model or a loss raised of
its own is passed on in one line, with the name of whoever raised it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from truemfu import Convention, FlopModel, count_flops, count_step, profile_model_flops
from truemfu.errors import BatchError, ModelError, TruemfuError, TruemfuWarning, UsageError
from truemfu.flops.models.model_view import BatchRequest

X = torch.linspace(-1, 1, 24).reshape(3, 8)
IDS = torch.arange(10).reshape(2, 5)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        return self.a(x) * scale


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def returning(make: Callable[[torch.Tensor], Any]) -> type[Net]:
    """A model that turns its last layer's output into something else."""

    class Returning(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
            return make(self.a(x))

    return Returning


def raising(error: BaseException | type[BaseException]) -> type[Net]:
    class Raising(Net):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
            self.a(x)
            raise error

    return Raising


@pytest.fixture(autouse=True)
def torch_says_nothing() -> Iterator[None]:
    """Torch logs a page of traceback for each operator that fails on fake tensors: not to the user."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, keep = logging.getLogger("torch._subclasses.fake_tensor"), Keep()
    logger.addHandler(keep)
    yield
    logger.removeHandler(keep)
    assert not records, f"torch logged an error beside ours: {records[0].getMessage().splitlines()[0]}"


def picture(model: Any) -> Any:
    if not isinstance(model, nn.Module):
        return None
    return (
        [(n, id(p), p._version, p.requires_grad, p.grad) for n, p in model.named_parameters()],
        [(n, m.training, sorted(m.__dict__)) for n, m in model.named_modules()],
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
    )


def complaint(
    kind: type[TruemfuError], call: Callable[..., Any], model: Any, *args: Any, **options: Any
) -> str:
    """The one line that a call ends with; it must be of this kind, and leave the model as it was."""
    before = picture(model)
    with pytest.raises(TruemfuError) as caught:
        call(model, *args, **options)
    assert picture(model) == before
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert message == message.strip()
    assert "\n" not in message
    assert 15 < len(message) < 500
    return message


def says(message: str, words: list[str]) -> bool:
    """Whether all words are in the message; `a|b` is one of the two."""
    return all(any(one in message for one in word.split("|")) for word in words)


CALLS = {"count_flops": count_flops, "FlopModel.fit": FlopModel.fit}
both = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


# -- a batch that does not fit --


@both
@pytest.mark.parametrize(
    ("model", "batch", "words"),
    [
        (Net, {"y": X}, ["Net", "'y'", "x, scale"]),
        (Net, {"x": X, "labels": X}, ["Net", "'labels'", "x, scale"]),
        (Net, {}, ["Net", "'x'"]),
        (Net, (), ["Net", "'x'"]),
        (Net, (X, 1.0, 2.0), ["Net", "positional"]),
        (Net, {"x": X[:, :7]}, ["Net", "3x7|[3, 7]", "8x4|[8, 4]"]),
        (Net, {"x": X[0, :3]}, ["Net"]),
        (Net, {"x": None}, ["Net", "None"]),
        (Net, {"x": X.numpy()}, ["Net", "numpy"]),
        (Net, {"x": X.double()}, ["Net", "dtype"]),
        (Net, {"x": X.long()}, ["Net", "dtype"]),
        (Net, {"x": X.bfloat16()}, ["Net", "dtype"]),
        (Tokens, {"input_ids": torch.rand(2, 5)}, ["Tokens", "indices", "Float|float"]),
        (Tokens, {"input_ids": IDS.tolist()}, ["Tokens", "list"]),
        (Net, {1: X}, ["argument names", "1"]),
        (Net, 3, ["mapping", "tuple", "int"]),
        (Net, None, ["mapping", "tuple", "NoneType"]),
        (Net, "x", ["mapping", "tuple", "str"]),
        (Net, {"x"}, ["mapping", "tuple", "set"]),
    ],
    ids=[
        "unknown key", "one key too many", "missing argument", "no arguments", "too many arguments",
        "wrong shape", "wrong rank", "None", "an array", "double", "integers", "half precision",
        "float token ids", "a list", "a key that is no name", "a number", "no batch", "a string", "a set",
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit(call: Any, model: type[nn.Module], batch: Any, words: list[str]) -> None:
    message = complaint(BatchError, call, model(), batch)
    assert says(message, words), message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_token_ids_that_are_not_integers(dtype: torch.dtype) -> None:
    message = complaint(BatchError, count_flops, Tokens(), {"input_ids": IDS.to(dtype)})
    assert f"indices of an embedding must be integers, got {dtype}" in message


@pytest.mark.parametrize("ids", [IDS + 7, IDS - 3], ids=["too large", "negative"])
def test_token_ids_outside_the_vocabulary(ids: torch.Tensor) -> None:
    message = complaint(BatchError, count_flops, Tokens(), {"input_ids": ids})
    assert "Tokens" in message
    assert "10" in message  # the size of the vocabulary


def _llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    return transformers.LlamaForCausalLM(config)


@both
@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"ids": IDS}, ["LlamaForCausalLM", "input_ids"]),
        ({}, ["LlamaForCausalLM", "input_ids"]),
        ({"input_ids": IDS, "labels": IDS[:, :3]}, ["LlamaForCausalLM", "(10)", "(6)"]),
        ({"input_ids": torch.rand(2, 5), "labels": IDS}, ["LlamaForCausalLM", "indices"]),
    ],
    ids=["unknown key", "empty", "labels of another length", "float token ids"],
)
def test_a_batch_that_does_not_fit_a_language_model(call: Any, batch: Any, words: list[str]) -> None:
    message = complaint(BatchError, call, _llama(), batch)
    assert says(message, words), message


# -- a model that cannot be counted --


class NoForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)


class NotInitialised(nn.Module):
    def __init__(self) -> None:
        self.b = 1


@both
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (returning(lambda y: 3), ["no tensor|without a tensor", "int", "loss_fn"]),
        (returning(lambda y: None), ["no tensor|without a tensor", "NoneType", "loss_fn"]),
        (returning(lambda y: {"a": "b"}), ["no tensor|without a tensor", "dict", "loss_fn"]),
        (returning(lambda y: object()), ["no tensor|without a tensor", "object", "loss_fn"]),
        (returning(lambda y: y.argmax(-1)), ["gradient", "integer|int64"]),
        (returning(lambda y: y.detach()), ["gradient", "backward=False"]),
        (returning(lambda y: {"loss": y.sum().detach(), "y": y}), ["loss", "gradient", "backward=False"]),
        (raising(ValueError("one\ntwo")), ["Raising", "ValueError: one two"]),
        (raising(RuntimeError), ["Raising", "RuntimeError"]),
        (raising(AssertionError()), ["Raising", "AssertionError"]),
        (raising(KeyError("nope")), ["Raising", "KeyError", "nope"]),
        (raising(NotImplementedError("later")), ["Raising", "NotImplementedError: later"]),
        (NoForward, ["NoForward", "forward"]),
        (NotInitialised, ["NotInitialised", "__init__"]),
        (lambda: nn.LazyLinear(4), ["LazyLinear", "initial"]),
        (nn.Identity, ["gradient", "parameter"]),
    ],
    ids=[
        "an int", "None", "strings", "an object", "integers", "detached", "a detached loss", "ValueError",
        "an error without a text", "an assertion", "KeyError", "NotImplementedError", "no forward",
        "not initialised", "lazy", "no parameters",
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_counted(call: Any, model: Callable[[], nn.Module], words: list[str]) -> None:
    made = model()
    if isinstance(made, (NotInitialised, nn.LazyLinear)):  # nothing to take a picture of
        with pytest.raises(ModelError) as caught:
            call(made, (X,))
        message = str(caught.value)
        assert "\n" not in message
    else:
        message = complaint(ModelError, call, made, (X,))
    assert says(message, words), message


@both
@pytest.mark.parametrize("batch", [(X,), {"x": X}], ids=["by place", "by name"])
@pytest.mark.parametrize("model", [NoForward(), nn.ModuleList([nn.Linear(8, 4)])], ids=["own", "a list"])
def test_a_module_without_a_forward_is_named(call: Any, model: nn.Module, batch: Any) -> None:
    message = complaint(ModelError, call, model, batch)
    assert message == (
        f"{type(model).__name__} has no forward method, so it cannot be run for a count: pass the module "
        "that the training calls, or define forward"
    )


def test_an_error_without_a_text_is_named_once() -> None:
    assert complaint(ModelError, count_flops, raising(RuntimeError)(), (X,)).count("RuntimeError") == 1


@both
@pytest.mark.parametrize("model", [Net, _llama], ids=["net", "llama"])
def test_everything_frozen(call: Any, model: Callable[[], nn.Module]) -> None:
    made = model().requires_grad_(False)
    batch: Any = (X,) if isinstance(made, Net) else {"input_ids": IDS, "labels": IDS}
    message = complaint(ModelError, call, made, batch)
    assert "gradient" in message
    assert "backward=False" in message
    call(made, batch, backward=False)


def test_a_model_that_is_interrupted_is_interrupted() -> None:
    with pytest.raises(KeyboardInterrupt):
        count_flops(raising(KeyboardInterrupt)(), (X,))
    with pytest.raises(SystemExit):
        count_flops(raising(SystemExit(3))(), (X,))


def test_torchscript_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Linear(8, 4))
    for model in (scripted, nn.Sequential(scripted, nn.ReLU())):
        with pytest.raises(ModelError, match="TorchScript"):
            count_flops(model, (X,))


# -- the loss --


def _divides(output: Any) -> Any:
    return output.sum() / (1 // 0)


@both
@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (_divides, ["loss_fn", "ZeroDivisionError"]),
        (lambda out: 1.0, ["loss_fn", "tensor", "float"]),
        (lambda out: None, ["loss_fn", "tensor", "NoneType"]),
        (lambda out: out.sum().item(), ["loss_fn", "tensor", "float"]),
        (lambda out: out.detach().sum(), ["loss", "gradient"]),
        (lambda out: out.argmax(), ["loss", "gradient"]),
        (lambda out, labels: out.sum(), ["loss_fn", "labels"]),
        (lambda out: out.loss, ["loss_fn", "AttributeError", "loss"]),
        (lambda out: out.sum() * 1j, ["loss", "complex"]),
    ],
    ids=[
        "raises",
        "float",
        "None",
        "item",
        "detached",
        "integer",
        "two arguments",
        "no such attribute",
        "complex",
    ],
)
def test_a_loss_that_is_none(call: Any, loss_fn: Any, words: list[str]) -> None:
    message = complaint(ModelError, call, Net(), (X,), loss_fn=loss_fn)
    assert says(message, words), message


def test_a_loss_of_several_numbers_is_their_sum() -> None:
    vector = count_flops(Net(), (X,), loss_fn=lambda out: out.sum(0))
    assert vector.backward == count_flops(Net(), (X,)).backward > 0


# -- wrong arguments --


@both
@pytest.mark.parametrize(
    ("model", "got"),
    [(lambda x: x, "function"), (None, "NoneType"), ("gpt2", "str"), ({"x": X}, "dict"), (Net, "Net()")],
    ids=["a function", "None", "a name", "a batch", "a class"],
)
def test_what_is_no_module(call: Any, model: Any, got: str) -> None:
    message = complaint(UsageError, call, model, (X,))
    assert "torch.nn.Module" in message
    assert got in message


@both
@pytest.mark.parametrize(
    "options",
    [{"convention": "causal"}, {"convention": None}, {"backward": "no"}, {"loss_fn": "mse"}],
    ids=lambda options: f"{next(iter(options))} {next(iter(options.values()))}",
)
def test_an_option_of_the_wrong_type(call: Any, options: dict[str, Any]) -> None:
    message = complaint(UsageError, call, Net(), (X,), **options)
    name, value = next(iter(options.items()))
    assert name in message
    assert repr(value) in message or type(value).__name__ in message


@pytest.mark.parametrize(
    ("attention", "hint"),
    [("half", None), ("casual", "'causal'"), ("Full", "'full'"), (None, None), (3, None)],
    ids=str,
)
def test_an_unknown_convention(attention: Any, hint: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        Convention(attention=attention)
    message = str(caught.value)
    assert "full, causal" in message
    assert repr(attention) in message
    assert hint is None or f"did you mean {hint}" in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "sizes",
    [{"samples": -1}, {"samples": 0}, {"samples": 1, "length": -5}, {"samples": 1, "images": -1}],
    ids=str,
)
def test_a_negative_size(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=r"must be at least \d; got (-\d|0)$"):
        BatchRequest(**sizes)


@pytest.mark.parametrize("fn", [3, None, "step"], ids=str)
def test_a_step_that_cannot_be_called(fn: Any) -> None:
    with pytest.raises(UsageError, match=f"callable.*{type(fn).__name__}"):
        count_step(fn)


def test_a_step_that_raises_raises_its_own_error() -> None:
    with pytest.raises(ZeroDivisionError):
        count_step(lambda: _divides(Net()(X)))


# -- a fitted model and a batch of another kind --


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"ids": IDS}, ["Tokens", "'ids'"]),
        ({}, ["Tokens", "'input_ids'"]),
        ({"input_ids": IDS.tolist()}, ["Tokens", "list"]),
        ({"input_ids": torch.rand(2, 5)}, ["Tokens", "indices", "Float|float"]),
        ({"input_ids": None}, ["Tokens", "None"]),
        (3, ["mapping", "int"]),
        (None, ["mapping", "NoneType"]),
    ],
    ids=["unknown key", "empty", "a list", "float token ids", "None", "a number", "no batch"],
)
def test_a_fitted_model_refuses_what_the_model_would(batch: Any, words: list[str]) -> None:
    model = Tokens()
    fitted = FlopModel.fit(model, {"input_ids": IDS})
    with pytest.raises(BatchError) as caught:
        fitted(batch)
    message = str(caught.value)
    assert "\n" not in message
    assert says(message, words), message
    assert fitted({"input_ids": IDS}).forward == 2 * 10 * 8 * 10


# -- no number is None, with one warning --


@pytest.mark.parametrize(
    ("model", "batch"),
    [(Net(), {"wrong": X}), (Net(), 3), ("gpt2", {"x": X}), (raising(OSError("gone"))(), (X,))],
)
def test_profiling_what_cannot_be_counted_gives_none_and_says_why(model: Any, batch: Any) -> None:
    from truemfu import errors

    errors._already_warned.clear()
    with pytest.warns(TruemfuWarning, match="no FLOPs for this model: ") as caught:
        assert profile_model_flops(model, batch) is None
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)
