"""`generate` of transformers in a training run: tokens, FLOPs and bytes against a count by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.22")

import torch
import transformers as hf
from observed_notes import wait_until_learned

from truemfu import Convention, TrainingMonitor
from truemfu.flops.observe.observation import OBSERVED
from truemfu.monitor.step_flops import generate_calls
from truemfu.monitor.step_flops.generation import (
    NOT_KNOWN,
    NOT_SEEN,
    GenerationCount,
    GenerationFlops,
)
from truemfu.monitor.step_flops.known import FORM, Unknown
from truemfu.monitor.timing.clock import TimeMark
from truemfu.monitor.watching.generation import CacheLayer, Generation, Pass, Weights

LAYERS, WIDTH, INNER, VOCABULARY, HEADS, KV_HEADS = 2, 16, 24, 50, 4, 2
HEAD_DIM = WIDTH // HEADS
LAYER = WIDTH * WIDTH * 2 + 2 * WIDTH * KV_HEADS * HEAD_DIM + 3 * WIDTH * INNER
"""Elements of the matrices of a layer."""
ROWS = 3


def llama(**options: Any) -> Any:
    config = {
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return hf.LlamaForCausalLM(hf.LlamaConfig(**config | options))


def forward(rows: int, positions: int, cached: int, scored: int) -> int:
    """By hand: layers, attention of every position with all there are, and the head of some."""
    attention = 4 * positions * (cached + positions) * WIDTH
    return rows * (LAYERS * (2 * positions * LAYER + attention) + 2 * scored * WIDTH * VOCABULARY)


def prefill(prompt: int) -> int:
    return forward(ROWS, prompt, 0, 1)


def decode(prompt: int, new: int) -> int:
    return sum(forward(ROWS, 1, prompt + n, 1) for n in range(new - 1))


def read_bytes(model: Any, prompt: int, new: int) -> int:
    """All parameters but the table of embeddings each step, and keys and values of the positions so far."""
    weights = sum(p.numel() for p in model.parameters()) - VOCABULARY * WIDTH
    cached = sum(ROWS * LAYERS * 2 * KV_HEADS * HEAD_DIM * (prompt + n + 1) for n in range(new - 1))
    return 4 * (weights * (new - 1) + cached)


def rows_of(folder: Path, model: Any, calls: list[tuple[int, int]], **options: Any) -> list[dict[str, Any]]:
    """A step for each call, of such a prompt and so many new tokens, that trains on the result."""
    config = {"monitoring": {"peak_tflops": 1.0, "mfu_calculation_mode": "smart"}}
    rows = []
    with TrainingMonitor(folder, config, model=model) as monitor:
        for number, (prompt, new) in enumerate(calls, 1):
            ids = torch.randint(1, VOCABULARY, (ROWS, prompt))
            with torch.no_grad():
                found = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=True, **options)
            model(input_ids=found, labels=found).loss.backward()
            model.zero_grad()
            monitor.log_step(number, 0, 0.0, None, 0.1)
            wait_until_learned(monitor)
            monitor.save_logs()
            rows.append(monitor.last)
    return rows


CALLS = [*[(6, 5)] * 5, (9, 7), (9, 7), (9, 7), (9, 4), (7, 6), (8, 7), (9, 40)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    model = llama()
    return model, rows_of(tmp_path_factory.mktemp("run"), model, CALLS)


def test_tokens_and_time_are_of_every_call(found: tuple[Any, list[dict[str, Any]]]) -> None:
    rows = found[1][1:]
    assert [row["perf/generate/tokens"] for row in rows] == [ROWS * new for _, new in CALLS[1:]]
    for row in rows:  # an unusual gap before a step is excluded from its time
        step_s = row["perf/step_time"] + row.get("perf/evaluation_time", 0.0)
        assert 0 < row["perf/generate/time"] < step_s


def test_prefill_and_decode_are_counted_with_the_cache(found: tuple[Any, list[dict[str, Any]]]) -> None:
    known = 0
    for (prompt, new), row in zip(CALLS[1:], found[1][1:], strict=True):
        if "perf/generate/prefill_flops" in row:
            known += 1
            assert row["perf/generate/prefill_flops"] == prefill(prompt)
            assert row["perf/generate/decode_flops"] == decode(prompt, new)
    assert known >= 7
    assert {row.get("perf/generate/method") for row in found[1][1:]} >= {OBSERVED, FORM}
    assert {row.get("perf/generate/unknown") for row in found[1][1:]} <= {None, NOT_KNOWN}


def test_a_call_in_an_unobserved_step_is_part_of_the_whole_step(
    found: tuple[Any, list[dict[str, Any]]],
) -> None:
    row = found[1][4]
    assert "perf/observed" not in row
    assert row["perf/no_grad_flops"] == prefill(6) + decode(6, 5)
    training = 3 * forward(ROWS, 11, 0, 11)
    assert row["perf/mfu"] * row["perf/step_time"] * 1e12 == pytest.approx(training)
    assert row["perf/mfu_whole_step"] * row["perf/step_time"] * 1e12 == pytest.approx(
        training + prefill(6) + decode(6, 5)
    )


def test_what_decoding_must_read(found: tuple[Any, list[dict[str, Any]]]) -> None:
    model, rows = found
    read = [row["perf/generate/read_bytes"] for row in rows[2:]]
    assert read == [read_bytes(model, prompt, new) for prompt, new in CALLS[2:]]
    assert not any("perf/generate/mbu" in row for row in rows)  # the bandwidth of a CPU is unknown


def test_tied_embeddings_are_read_as_the_head(tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    rows = rows_of(tmp_path, model, [(6, 5)] * 3)
    weights = sum(p.numel() for p in model.parameters())
    cached = sum(ROWS * LAYERS * 2 * KV_HEADS * HEAD_DIM * (6 + n + 1) for n in range(4))
    assert rows[-1]["perf/generate/read_bytes"] == 4 * (weights * 4 + cached)


def test_without_a_cache_every_pass_is_of_all_positions(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, llama(), [(6, 5)] * 4, use_cache=False)
    assert rows[-1]["perf/generate/prefill_flops"] == sum(forward(ROWS, 6 + n, 0, 1) for n in range(5))
    assert rows[-1]["perf/generate/decode_flops"] == 0
    assert "perf/generate/read_bytes" not in rows[-1]


def test_an_assistant_is_no_part_of_the_passes(tmp_path: Path) -> None:
    """Its work is without gradients all the same."""
    torch.manual_seed(1)
    model, assistant, passes = llama(), llama(), []

    def passed(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        if "labels" not in kwargs:
            rows, positions = kwargs["input_ids"].shape
            cached = out.past_key_values.layers[0].keys.shape[-2] - positions
            passes.append(forward(rows, positions, cached, out.logits.shape[1]))

    for each in (model, assistant):
        each.register_forward_hook(passed, with_kwargs=True)
    ids, rows = torch.randint(1, VOCABULARY, (1, 6)), []
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model) as monitor:
        for number in range(1, 5):
            passes.clear()
            model.generate(ids, max_new_tokens=5, assistant_model=assistant)
            model(input_ids=ids, labels=ids).loss.backward()
            model.zero_grad()
            monitor.log_step(number, 0, 0.0, None, 0.1)
            wait_until_learned(monitor)
            monitor.save_logs()
            rows.append((dict(monitor.last), sum(passes)))
    for row, work in rows[1:]:
        assert row["perf/generate/unknown"] == NOT_SEEN
        assert "perf/generate/read_bytes" not in row
        assert row.get("perf/no_grad_flops", work) == work
    assert any("perf/no_grad_flops" in row for row, _ in rows)


def test_generate_is_as_it_was_after_the_run(tmp_path: Path) -> None:
    from transformers.generation.utils import GenerationMixin

    before = GenerationMixin.generate
    model = llama()
    torch.manual_seed(3)
    rows_of(tmp_path, model, [(6, 5)] * 3)
    assert GenerationMixin.generate is before
    assert not model._forward_pre_hooks


def test_an_error_in_generate_reaches_the_caller(tmp_path: Path) -> None:
    model = llama()
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model) as monitor:
        for number in range(3):
            ids = torch.randint(1, VOCABULARY, (ROWS, 6))
            model(input_ids=ids, labels=ids).loss.backward()
            with pytest.raises(ValueError, match="max_new_tokens"):
                model.generate(ids, max_new_tokens=0)
            monitor.log_step(number, 0, 0.0, None, 0.1)
        assert monitor.summary()["warnings"] == []
    assert not model._forward_pre_hooks


def test_a_mixture_of_experts_reads_an_unknown_part_of_its_weights(tmp_path: Path) -> None:
    config = hf.MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=VOCABULARY,
        eos_token_id=None,
        pad_token_id=0,
    )
    rows = rows_of(tmp_path, hf.MixtralForCausalLM(config), [(6, 5)] * 4)
    assert rows[-1]["perf/generate/tokens"] == ROWS * 5
    assert "perf/generate/read_bytes" not in rows[-1]


def test_mbu_is_what_decoding_must_read_over_its_time_at_the_bandwidth() -> None:
    """Two layers of one row: 100 bytes of weights, 8 a cached position and layer, a second for two tokens."""
    flops = GenerationFlops(Convention(), 1000.0)
    passes = [Pass(1, 1, 3, 0), Pass(2, 1, 1, 3), Pass(3, 1, 1, 4)]
    call = Generation(
        model=0,
        begin=TimeMark(0.0, None, 0.0),
        weights=Weights(100, 50),
        is_paused=False,
        passes=passes,
        decode=TimeMark(2.0, None, 2.0),
        end=TimeMark(3.0, None, 3.0),
        prompt=3,
        tokens=3,
        cache={CacheLayer(5, 8): 2},
    )
    products = {
        each.number: each.queries * 80 + 20 + each.queries * (each.cached + each.queries) for each in passes
    }
    observed = {number: Counter(fp32=amount) for number, amount in products.items()}
    flops.take([call], observed)
    row = flops.metrics([call], None)
    assert row == {
        "perf/generate/time": 3.0,
        "perf/generate/tokens": 3,
        "perf/generate/prefill_flops": 80 * 3 + 20 + 9,
        "perf/generate/decode_flops": (80 + 20 + 4) + (80 + 20 + 5),
        "perf/generate/method": FORM,
        "perf/generate/read_bytes": 2 * 100 + 2 * 8 * (4 + 5),
        "perf/generate/mbu": pytest.approx((2 * 100 + 2 * 8 * (4 + 5)) / 1.0 / 1000.0),
    }


def test_passes_of_equal_sizes_with_other_work_end_the_form() -> None:
    """A prompt with an image, then one without: later calls may have either."""

    def call() -> Generation:
        passes = [Pass(1, 1, 3, 0), Pass(2, 1, 1, 3), Pass(3, 1, 1, 4)]
        mark = TimeMark(0.0, None, 0.0)
        return Generation(0, mark, Weights(100, 50), is_paused=False, passes=passes, prompt=3, tokens=3)

    flops = GenerationFlops(Convention(), None)
    flops.take([call()], {1: Counter(fp32=269), 2: Counter(fp32=104), 3: Counter(fp32=105)})
    assert isinstance(flops.answer(call(), None), GenerationCount)
    flops.take([call()], {1: Counter(fp32=999), 2: Counter(fp32=104), 3: Counter(fp32=105)})
    assert flops.answer(call(), None) == Unknown(NOT_KNOWN)
    flops.take([call()], {1: Counter(fp32=269), 2: Counter(fp32=104), 3: Counter(fp32=105)})
    assert flops.answer(call(), None) == Unknown(NOT_KNOWN)


@pytest.mark.parametrize("attention", ["full", "causal"])
def test_passes_of_one_position_each_are_as_one(attention: Any) -> None:
    flops = GenerationFlops(Convention(attention=attention), None)
    single = [Pass(0, 2, 1, cached) for cached in range(5, 30)]
    merged: Pass | None = single[0]
    for each in single[1:]:
        assert merged is not None
        merged = merged.followed_by(each)
    assert merged == Pass(0, 2, 1, 5, 25)
    assert merged.end == 30
    assert flops._row(merged) == tuple(map(sum, zip(*map(flops._row, single), strict=True)))


def test_calls_of_a_long_evaluation_are_kept_by_their_sizes_alone(tmp_path: Path) -> None:
    model, ids = llama(), torch.randint(1, VOCABULARY, (ROWS, 6))
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model) as monitor:
        for number in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            monitor.log_step(number, 0, 0.0, None, 0.1)
        with monitor.pause("evaluation"):
            model.generate(ids, max_new_tokens=100, min_new_tokens=100)
        assert monitor._live is not None
        (call,) = monitor._live.steps.watch.signals.generations
        assert call.passes == [Pass(0, ROWS, 6, 0), Pass(0, ROWS, 1, 6, 99)]
        assert call.is_whole
        assert sum(each.times for each in call.passes) == 100


@pytest.mark.parametrize("part", ["_weights", "_cached", "_layers"])
def test_a_call_that_cannot_be_followed_is_said_and_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(_: Any) -> Any:
        raise TypeError("of another kind")

    model, ids = llama(), torch.randint(1, VOCABULARY, (ROWS, 6))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    monkeypatch.setattr(generate_calls, part, fails)
    with TrainingMonitor(tmp_path, {"monitoring": {"peak_tflops": 1.0}}, model=model) as monitor:
        for number in range(4):
            model(input_ids=ids, labels=ids).loss.backward()
            if number:
                assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
            monitor.log_step(number, 0, 0.0, None, 0.1)
        monitor.save_logs()
        assert any("could not be followed" in text for text in monitor.summary()["warnings"])
        assert "perf/generate/decode_flops" not in monitor.last
