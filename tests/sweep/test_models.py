"""The reference models: their sizes, and the three details the private trainers need."""

from __future__ import annotations

import math

import pytest
import torch

from truemfu.sweep.worker.models import SIZES, build_reference_model, parameter_count


def tokens(samples: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(0, SIZES["tiny"].vocab, (samples, length))


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("tiny", 228_096), ("small", 7_255_552), ("medium", 41_604_096), ("1b", 1_339_674_624)],
)
def test_sizes_have_these_parameters_and_are_built_on_the_meta_device(size: str, parameters: int) -> None:
    with torch.device("meta"):
        model = build_reference_model(size, dtype=torch.bfloat16)
    assert parameter_count(model) == parameters
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


def test_first_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    ids = tokens()
    output = build_reference_model("tiny")(ids, labels=ids)
    assert output.logits.shape == (3, 16, SIZES["tiny"].vocab)
    assert output.loss.item() == pytest.approx(math.log(SIZES["tiny"].vocab), rel=0.02)


def test_without_labels_there_is_no_loss() -> None:
    assert build_reference_model("tiny")(tokens()).loss is None


def test_logits_of_a_token_do_not_depend_on_later_ones() -> None:
    model, ids = build_reference_model("tiny").eval(), tokens(1, 8)
    changed = ids.clone()
    changed[0, -1] = (changed[0, -1] + 1) % SIZES["tiny"].vocab
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_the_only_embedding_is_looked_up_with_the_batch_itself() -> None:
    model = build_reference_model("tiny")
    assert [m for m in model.modules() if isinstance(m, torch.nn.Embedding)] == [model.tokens]


def test_every_linear_sees_samples_first_and_no_weight_is_shared() -> None:
    model = build_reference_model("tiny")
    shapes: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    model(tokens(3, 16))
    assert len(shapes) == 2 * 6 + 1
    assert all(len(shape) == 3 and shape[:2] == (3, 16) for shape in shapes)
    assert model.head.weight is not model.tokens.weight


def test_checkpointing_changes_neither_loss_nor_gradients() -> None:
    torch.manual_seed(0)
    model, ids = build_reference_model("tiny"), tokens()
    model(ids, labels=ids).loss.backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], plain)


def test_positions_matter_and_any_length_will_do() -> None:
    torch.manual_seed(0)
    model = build_reference_model("tiny").eval()
    turned = model(torch.tensor([[5, 7, 9]])).logits[0, -1]
    swapped = model(torch.tensor([[7, 5, 9]])).logits[0, -1]
    assert not torch.allclose(turned, swapped)
    assert model(torch.zeros(1, 3000, dtype=torch.long)).logits.shape == (1, 3000, SIZES["tiny"].vocab)
