"""The names of well-known models, and the numbers behind them."""

from __future__ import annotations

import pytest

from truemfu.errors import UsageError
from truemfu.flops.models.model_view import BatchRequest
from truemfu.flops.models.targets import resolve_target
from truemfu.known_models import KnownModel, known_model, known_models
from truemfu.sweep.worker.models import REFERENCE_MODELS, parameter_count

QUICK = ("gpt2", "bert-base-uncased", "resnet-50")


def parameters(model: KnownModel) -> int:
    pytest.importorskip("transformers")
    return parameter_count(resolve_target(model.hub, BatchRequest(samples=1)).model)


@pytest.mark.parametrize("name", QUICK)
def test_a_known_model_has_the_published_number_of_parameters(name: str) -> None:
    model = known_model(name)
    assert model is not None
    assert parameters(model) == model.parameters


@pytest.mark.long
@pytest.mark.parametrize("model", [model for model in known_models() if model.name not in QUICK], ids=str)
def test_every_other_known_model_has_it_too(model: KnownModel) -> None:
    transformers = pytest.importorskip("transformers")
    if model.config["model_type"] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model.config['model_type']}")
    assert parameters(model) == model.parameters


def test_every_name_stands_for_one_model() -> None:
    for model in known_models():
        assert all(known_model(name) is model for name in model.names)
        assert not set(model.names) & set(REFERENCE_MODELS)


@pytest.mark.parametrize(
    ("text", "hub"),
    [
        ("8b", "meta-llama/Llama-3.1-8B"),
        ("70B", "meta-llama/Llama-3.1-70B"),
        ("llama3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("Llama_3.1_8B", "meta-llama/Llama-3.1-8B"),
        ("qwen/qwen3-8b", "Qwen/Qwen3-8B"),
        ("bert", "google-bert/bert-base-uncased"),
        ("llama3", "meta-llama/Meta-Llama-3-8B"),
        ("gemma", "google/gemma-2-9b"),
    ],
)
def test_names_are_understood_as_people_write_them(text: str, hub: str) -> None:
    model = known_model(text)
    assert model is not None
    assert model.hub == hub


def test_what_was_counted_is_named_by_its_name_on_the_hub() -> None:
    pytest.importorskip("transformers")
    assert resolve_target("GPT-2", BatchRequest(samples=1)).name == "openai-community/gpt2"


def test_a_name_that_is_almost_right_is_suggested() -> None:
    with pytest.raises(UsageError, match=r"no model 'llama-3.1-9b' \(did you mean 'llama-3.1-8b'\?\)"):
        resolve_target("llama-3.1-9b", BatchRequest(samples=1))
