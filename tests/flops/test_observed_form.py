"""The form fitted from observed steps: exact where it answers, silent elsewhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from truemfu.flops.closed_form.form import MicroBatch, ObservedForm

Sizes = dict[str, int]
Draw = Callable[[], Sizes]
Flops = Callable[[Sizes], int]


def batch(kind: str = "model", **sizes: int) -> MicroBatch:
    return MicroBatch(kind, tuple(sizes.items()))


def split(flops: int) -> dict[str, int]:
    """Integers as an observation gives them; a third is not whole everywhere, which a form must reproduce."""
    return {"forward": flops, "backward": 2 * flops, "recompute": 0, "bfloat16": 3 * flops}


def observed(form: ObservedForm, flops: Flops, *steps: Sizes) -> None:
    for sizes in steps:
        assert form.add([batch(**sizes)], split(flops(sizes)))


def language_model(sizes: Sizes) -> int:
    """12 layers of width 64 and a head of 1,000 words, causal attention by pairs."""
    b, s = sizes["ids_0"], sizes["ids_1"]
    return b * (12 * (24 * s * 64 * 64 + 4 * 64 * s * (s + 1) // 2) + 2 * s * 64 * 1000)


def test_a_language_model_of_varying_length_is_predicted_after_four_lengths() -> None:
    form = ObservedForm()
    lengths = (100, 407, 250, 333)
    for count, length in enumerate(lengths):
        assert form.predict([batch(ids_0=4, ids_1=200, labels_1=200)]) is None, count
        assert form.add(
            [batch(ids_0=4, ids_1=length, labels_1=length)],
            split(language_model({"ids_0": 4, "ids_1": length})),
        )
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


def test_steps_without_such_work_have_none_at_other_sizes() -> None:
    form = ObservedForm()
    for b in (30, 26, 37, 29, 41):
        assert form.add([batch(x_0=b, x_1=8)], {})
    assert form.predict([batch(x_0=33, x_1=8)]) == {}


def test_accumulated_micro_batches_add_up() -> None:
    form, draw = ObservedForm(), random.Random(1)

    def step() -> list[Sizes]:
        return [{"ids_0": draw.randint(1, 8), "ids_1": draw.randint(20, 500)} for _ in range(3)]

    for _ in range(8):
        sizes = step()
        assert form.add([batch(**each) for each in sizes], split(sum(map(language_model, sizes))))
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


def convolutions(draw: random.Random) -> Flops:
    """A stack of convolutions and poolings, strided or not, padded or not, in floor or ceil mode."""
    layers = [
        (
            draw.choice((1, 2, 3, 5, 7)),
            draw.choice((1, 1, 2, 2, 3, 4)),
            draw.randint(0, 3),
            draw.choice((0, 1)),
        )
        for _ in range(draw.randint(1, 6))
    ]
    channels = [draw.choice((3, 8, 16)) for _ in range(len(layers) + 1)]

    def flops(sizes: Sizes) -> int:
        h, w, total = sizes["x_2"], sizes["x_3"], 0
        for index, (kernel, stride, padding, ceil) in enumerate(layers):
            h, w = (
                max(0, (size + 2 * padding - kernel + ceil * (stride - 1)) // stride + 1) for size in (h, w)
            )
            total += 2 * kernel**2 * channels[index] * channels[index + 1] * h * w
        return sizes["x_0"] * total

    return flops


def unet(draw: random.Random) -> Flops:
    """Levels that halve (rounding down or up), attention at the lowest, a decoder that pads to the skips."""
    depth, up, heads = draw.randint(1, 4), draw.choice((0, 1)), draw.choice((0, 4))

    def flops(sizes: Sizes) -> int:
        h, w, levels = sizes["x_2"], sizes["x_3"], []
        for level in range(depth):
            levels.append(h * w * 9 * 2 * 8 * 4**level)
            h, w = (h + up) // 2, (w + up) // 2
        return sizes["x_0"] * (3 * sum(levels) + 2 * h * w * 512 + heads * (h * w) ** 2)

    return flops


def vision_transformer(draw: random.Random) -> Flops:
    """Patches, a class token, global attention or windows that are padded to whole ones (Swin)."""
    patch, window, token = draw.choice((4, 8, 14, 16)), draw.choice((0, 0, 7, 8)), draw.choice((0, 1))

    def flops(sizes: Sizes) -> int:
        h, w = sizes["x_2"] // patch, sizes["x_3"] // patch
        if window:
            h, w = -(-h // window) * window, -(-w // window) * window
            return sizes["x_0"] * h * w * (24 * 96**2 + 4 * 96 * window**2)
        n = h * w + token
        return sizes["x_0"] * (24 * n * 96**2 + 4 * 96 * n * n + 2 * 96 * 1000)

    return flops


def text_model(draw: random.Random) -> Flops:
    """Attention over everything, a sliding window or padded chunks; a capacity of experts that rounds up."""
    style, limit = (
        draw.choice(("full", "full", "sliding", "padded", "truncated")),
        draw.choice((16, 64, 100, 256)),
    )
    experts, shift = draw.choice((0, 0, 8)), draw.choice((0, 1))

    def flops(sizes: Sizes) -> int:
        b, s = sizes["ids_0"], sizes["ids_1"]
        pairs = s * s
        if style == "sliding":
            pairs = sum(min(position + 1, limit) for position in range(s))
        elif style == "padded":
            s = -(-s // limit) * limit
            pairs = s * limit
        elif style == "truncated":
            s = min(s, limit)
            pairs = s * (s + 1) // 2
        mlp = experts * -(-b * s * 5 // (4 * experts)) if experts else b * s
        return 2 * b * s * 64 * 64 + 4 * 64 * b * pairs + mlp * 16 * 64 * 64 + 2 * b * (s - shift) * 64 * 1000

    return flops


def encoder_decoder(draw: random.Random) -> Flops:
    """Two lengths; the encoder's may pass a strided convolution first (speech)."""
    stride = draw.choice((1, 1, 2, 4))

    def flops(sizes: Sizes) -> int:
        b, s, t = sizes["ids_0"], (sizes["ids_1"] - 1) // stride + 1, sizes["labels_1"]
        return b * (900 * s + 128 * s * s + 1200 * t + 64 * t * (t + 1) + 128 * s * t)

    return flops


def image_sizes(draw: random.Random) -> Draw:
    unit, square = draw.choice((1, 1, 2, 4, 8, 14, 16, 32, 3)), draw.random() < 0.4
    low, high = draw.choice(((2, 9), (7, 30), (14, 100))) if unit < 8 else draw.choice(((2, 9), (4, 30)))
    batches = draw.choice(((4, 4), (1, 8), (3, 5)))

    def sizes() -> Sizes:
        h = unit * draw.randint(low, high)
        w = h if square else unit * draw.randint(low, high)
        return {"x_0": draw.randint(*batches), "x_1": 3, "x_2": h, "x_3": w, "y_0": 1}

    return sizes


def text_sizes(draw: random.Random) -> Draw:
    unit, batches = draw.choice((1, 1, 2, 8, 64)), draw.choice(((4, 4), (1, 8), (3, 5)))
    low, high = (
        draw.choice(((1, 6), (3, 40), (20, 60))) if unit > 2 else draw.choice(((5, 40), (10, 500), (90, 120)))
    )

    def sizes() -> Sizes:
        s = unit * draw.randint(low, high)
        return {"ids_0": draw.randint(*batches), "ids_1": s, "mask_1": s, "labels_1": draw.randint(5, 90)}

    return sizes


def progression(draw: random.Random, sizes: Draw) -> Draw:
    """Sizes that grow by the same amount from step to step: every choice of a curriculum."""
    first, stride, name = sizes(), draw.randint(1, 40), draw.choice(("x_2", "ids_1"))
    steps = iter(range(10**6))

    def grown() -> Sizes:
        at = next(steps) % 20
        return {key: value + at * stride * (key == name) for key, value in first.items()}

    return grown


def programs(seed: int) -> tuple[Flops, Draw]:
    draw = random.Random(seed)
    make = draw.choice(
        (convolutions, convolutions, unet, unet, vision_transformer, text_model, text_model, encoder_decoder)
    )
    flops = make(draw)
    sizes = (text_sizes if make in (text_model, encoder_decoder) else image_sizes)(draw)
    return flops, progression(draw, sizes) if draw.random() < 0.1 else sizes


def run_of(
    seed: int, steps: int = 24, accumulation: int = 1
) -> Iterator[tuple[dict[str, int] | None, dict[str, int]]]:
    """A run that observes one step in two: what it would have said before each step, and the truth."""
    flops, sizes = programs(seed)
    form, draw = ObservedForm(), random.Random(-seed)
    for _ in range(steps):
        drawn = [sizes() for _ in range(accumulation)]
        truth = split(sum(map(flops, drawn)))
        batches = [batch(**each) for each in drawn]
        yield form.predict(batches), truth
        if draw.random() < 0.5:
            form.add(batches, truth)


FIND_FAULTS = (330, 614, 1086)
"""Of two thousand seeds the only one each that found a fault planted in the form: one observation too few, a
size that seemed to have no effect, coefficients that rest on a single observation."""


def test_no_prediction_is_wrong_on_models_that_round_and_limit() -> None:
    answers = 0
    for seed in (*FIND_FAULTS, *range(150)):
        for answer, truth in run_of(seed, accumulation=1 + seed % 3 // 2):
            assert answer in (None, truth), seed
            answers += answer is not None
    assert answers > 500
