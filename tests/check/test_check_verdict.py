"""Explanations: within the rounding of the digits, all that fit, none that is a guess."""

from __future__ import annotations

import pytest

from truemfu.check.conventions import Work
from truemfu.check.logged import Figure, Logged
from truemfu.check.verdict import Opinion, Peak, opinion_of
from truemfu.hardware.detect import find_spec

H100 = find_spec("h100-sxm")
PEAK = Peak(flops_per_s=989.4e12, spec=H100)
WORK = Work(
    model="a model",
    products=45e9,
    attention=13e9,
    causal_attention=6.5e9,
    parameters=8_000_000_000,
    looked_up=500_000_000,
    embeddings=500_000_000,
)
RATE = Figure(value=5000.0)


def opinion(percent: str, *, work: Work | None = WORK, peak: Peak = PEAK, **known: object) -> Opinion:
    logged = Logged(mfu=Figure.of(percent, 0.01), tokens_per_s=RATE, seq=8192, **known)  # type: ignore[arg-type]
    return opinion_of(logged, work, peak)


def keys(found: Opinion) -> list[tuple[str, ...]]:
    return [explanation.keys for explanation in found.verdicts[-1].explanations]


def percent_of(flops_per_token: float, factor: float = 1.0) -> str:
    return f"{100 * flops_per_token * RATE.value / 989.4e12 * factor:.2f}"


@pytest.mark.parametrize(("text", "half"), [("32.88", 0.005), ("5,615", 0.5), ("8.6e-06", 5e-8), ("24", 0.5)])
def test_a_figure_keeps_the_digits_it_was_printed_with(text: str, half: float) -> None:
    assert Figure.of(text).half == pytest.approx(half)
    assert Figure.of(text, 0.01).half == pytest.approx(half / 100)


@pytest.mark.parametrize("attention", [13e9, 6.5e9])
def test_both_conventions_of_attention_agree_unless_one_is_given(attention: float) -> None:
    logged = Logged(mfu=Figure.of(percent_of(45e9 + attention), 0.01), tokens_per_s=RATE)
    assert not opinion_of(logged, WORK, PEAK).disagrees
    assert opinion_of(logged, WORK, PEAK, attention="causal").disagrees == (attention == 13e9)
    assert opinion_of(logged, WORK, PEAK, attention="full").disagrees == (attention != 13e9)


def test_a_figure_within_the_tolerance_agrees() -> None:
    near = percent_of(58e9, 1.008)
    assert opinion(near).verdicts[0].status == "agrees"
    logged = Logged(mfu=Figure.of(near, 0.01), tokens_per_s=RATE)
    assert opinion_of(logged, WORK, PEAK, tolerance=0.001).disagrees


def test_two_faults_at_once_are_both_named() -> None:
    assert keys(opinion(percent_of(48e9, 989.4 / 312))) == [("peak_of_another_chip", "6n")]
    assert ("embeddings", "devices") in keys(opinion(percent_of(61e9), gpus=8))


def test_every_explanation_that_fits_is_given() -> None:
    assert sorted(keys(opinion(percent_of(58e9, 0.5)))) == [("peak_of_another_dtype",), ("sparse_peak",)]


def test_what_nothing_explains_is_unexplained_and_no_nearest_guess_is_made() -> None:
    found = opinion(percent_of(58e9, 0.8137))
    assert (found.verdicts[0].status, keys(found), found.disagrees) == ("unexplained", [], True)


def test_fewer_digits_leave_more_room() -> None:
    printed = percent_of(48e9)  # 24.26
    assert opinion(printed).verdicts[0].status == "explained"
    off = f"{float(printed) * 1.01:.2f}"
    assert opinion(off).verdicts[0].status == "unexplained"
    assert ("6n",) in keys(opinion(f"{float(off):.0f}"))


def test_without_a_model_what_is_missing_is_named_and_100_percent_is_still_a_limit() -> None:
    found = opinion("337.59", work=None, peak=Peak())
    verdict = found.verdicts[0]
    assert (verdict.status, verdict.missing) == ("unknown", ("--model", "--device"))
    assert verdict.notes
    assert found.disagrees
    assert not opinion("33.7", work=None).disagrees
    assert not opinion("33.7", work=None).is_decided


def test_mfu_beside_tflops_tells_the_peak_without_a_model() -> None:
    logged = Logged(mfu=Figure.of("88.32", 0.01), tflops=Figure.of("275.6"))
    found = opinion_of(logged, None, Peak(flops_per_s=2250e12, spec=find_spec("b300")))
    assert found.implied_peak_tflops == pytest.approx(312.05, rel=1e-4)
    assert found.mfu == pytest.approx(0.12249, rel=1e-4)
    assert [verdict.status for verdict in found.verdicts] == ["unknown", "explained"]


def test_the_time_of_a_part_needs_to_be_known_to_be_named() -> None:
    step = {"step_time_s": Figure(value=2.0), "tokens": 10_000.0}
    part = percent_of(58e9, 2.0 / 1.3)
    assert keys(opinion(part, **step)) == []
    assert keys(opinion(part, **step, part_times_s={"forward and backward": Figure(value=1.3)})) == [
        ("part_of_the_step",)
    ]


def test_padding_is_no_work() -> None:
    assert opinion(percent_of(58e9, 0.7), padding=0.3).verdicts[0].status == "agrees"
    assert keys(opinion(percent_of(58e9), padding=0.3)) == [("padding",)]


def test_a_rate_that_is_not_that_of_the_step_is_named() -> None:
    step = {"step_time_s": Figure(value=3.1), "tokens": 10_000.0}  # 3,226 tokens/s; 5,000 are logged
    assert keys(opinion(percent_of(58e9), **step)) == [("rate",)]
