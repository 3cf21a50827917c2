"""The form fitted from observed steps: exact where it answers, silent elsewhere."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from truemfu.monitor.step_flops.form import MicroBatch, ObservedForm

Sizes = dict[str, int]
Draw = Callable[[], Sizes]
Flops = Callable[[Sizes], int]


def batch(kind: str = "model", **sizes: int) -> MicroBatch:
    return MicroBatch(kind, tuple(sizes.items()))


def split(flops: int) -> dict[str, int]:
    """Integers as an observation gives them; a third is not whole everywhere, which a form must reproduce."""
    return {"forward": flops, "backward": 2 * flops, "recompute": 0, "bfloat16": 3 * flops}


def observed(form: ObservedForm, flops: Flops, *steps: Sizes) -> None:
    for number, sizes in enumerate(steps, 1):
        assert form.add(number, [batch(**sizes)], split(flops(sizes)))


def language_model(sizes: Sizes) -> int:
    """12 layers of width 64 and a head of 1,000 words, causal attention by pairs."""
    b, s = sizes["ids_0"], sizes["ids_1"]
    return b * (12 * (24 * s * 64 * 64 + 4 * 64 * s * (s + 1) // 2) + 2 * s * 64 * 1000)


def test_a_language_model_of_varying_length_is_predicted_after_four_lengths() -> None:
    form = ObservedForm()
    lengths = (100, 407, 250, 333)
    for count, length in enumerate(lengths):
        assert form.predict([batch(ids_0=4, ids_1=200, labels_1=200)]) is None, count
        assert form.add(count, [batch(ids_0=4, ids_1=length, labels_1=length)], split(
            language_model({"ids_0": 4, "ids_1": length})))
    for length in range(100, 408):
        expected = split(language_model({"ids_0": 4, "ids_1": length}))
        assert form.predict([batch(ids_0=4, ids_1=length, labels_1=length)]) == expected


def test_varying_batch_and_length_are_predicted_after_four_steps() -> None:
    form = ObservedForm()
    seen = [{"ids_0": b, "ids_1": s} for b, s in ((8, 100), (2, 407), (3, 250), (5, 333))]
    observed(form, language_model, *seen)
    for b, s in ((2, 100), (8, 407), (4, 180)):
        sizes = {"ids_0": b, "ids_1": s}
        assert form.predict([batch(**sizes)]) == split(language_model(sizes))


def test_accumulated_micro_batches_add_up() -> None:
    form, draw = ObservedForm(), random.Random(1)

    def step() -> list[Sizes]:
        return [{"ids_0": draw.randint(1, 8), "ids_1": draw.randint(20, 500)} for _ in range(3)]

    for number in range(8):
        sizes = step()
        assert form.add(number, [batch(**each) for each in sizes], split(sum(map(language_model, sizes))))
    answers = 0
    for _ in range(50):
        sizes = step()
        answer = form.predict([batch(**each) for each in sizes])
        answers += answer is not None
        assert answer in (None, split(sum(map(language_model, sizes))))
    assert answers > 25


def documents(sizes: Sizes) -> int:
    return 24 * sizes["sum"] * 4096 + 2 * 64 * (sizes["sum_of_squares"] + sizes["sum"])


def packed(draw: random.Random) -> Sizes:
    lengths = [draw.randint(10, 300) for _ in range(draw.randint(3, 12))]
    return {
        "ids_0": 1,
        "ids_1": sum(lengths),
        "documents": len(lengths),
        "sum": sum(lengths),
        "sum_of_squares": sum(length**2 for length in lengths),
    }


def test_packed_documents_are_predicted_after_four_steps() -> None:
    form, draw = ObservedForm(), random.Random(3)
    observed(form, documents, *(packed(draw) for _ in range(4)))
    answers = 0
    for _ in range(200):
        sizes = packed(draw)
        answer = form.predict([batch(**sizes)])
        answers += answer is not None
        assert answer in (None, split(documents(sizes)))
    assert answers > 30
