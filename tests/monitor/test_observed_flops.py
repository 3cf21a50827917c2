"""Every logged row against the step it speaks of, for programs whose steps a count of the model gets wrong.

A row has the FLOPs that a dispatch mode of the tests (`step_truth.py`) saw in that very step, or none and a
reason. `python -m tests.monitor.test_observed_flops` prints a line for each program.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitor.observed_architectures import ARCHITECTURES
from tests.monitor.observed_steps import PROGRAMS, Mlp, Program, loop, vectors
from tests.monitor.step_truth import Verdict, judge, true_steps
from torch import nn

PUBLIC = ("llama-checkpointed", "gemma3", "mixtral", "whisper", "resnet")
"""Cases of benchmarks/cases.py, each with layers of another kind; test_logged_flops.py has all of them."""


def public_case(run: Any, name: str) -> None:
    """Four shapes, some of them again."""
    from benchmarks.cases import case

    c = case(name)
    shapes = ((2, 24), (2, 24), (3, 41), (1, 30), (2, 24), (3, 41), (4, 17))
    batches = [c.batch(samples=samples, length=length) for samples, length in shapes]
    loop(run, c.build(), batches, lambda model, batch: model(**batch).loss)


def allowed(program: Program, found: Verdict) -> bool:
    """No row is wrong, unknown ones have a reason, and some are known unless the program says why not."""
    if found.wrong or ((found.unknown or found.stale) and not found.reasons):
        return False
    return bool(found.exact) or program.may_be_unknown is not None


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("program", [*PROGRAMS, *ARCHITECTURES], ids=lambda program: program.name)
def test_each_row_has_the_flops_of_its_own_step(program: Program, tmp_path: Path) -> None:
    found = judge(program.run, tmp_path, changes=program.changes)
    assert allowed(program, found), str(found)


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("name", PUBLIC)
def test_public_models_of_several_shapes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.22")
    program = Program(name, partial(public_case, name=name))
    found = judge(program.run, tmp_path)
    assert allowed(program, found), str(found)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-sdpa", "llama-eager", "llama-checkpointed", "bert", "vit", "resnet"]
)
def test_the_truth_of_a_step_is_that_of_the_pencil(name: str) -> None:
    pytest.importorskip("transformers", minversion="5.22")
    from benchmarks.cases import case

    c = case(name)
    model = c.build()
    batches = [c.batch(samples=2, length=24), c.batch(samples=3, length=41)]
    found = true_steps(lambda run: loop(run, model, batches, lambda m, b: m(**b).loss))
    expected = [c.truth(model, batch) for batch in batches]
    assert [(w.forward, w.backward, w.recompute) for w in found] == [
        (t.forward, t.backward, t.recompute) for t in expected
    ]


ONE, TWO, THREE = (2 * 5 * a * b for a, b in ((8, 12), (12, 10), (10, 4)))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", ONE * 2 + TWO * 3 + THREE * 3),
        ("second-backward-with-retain-graph", ONE * 3 + TWO * 5 + THREE * 5),
        ("backward-for-some-inputs", ONE + TWO + THREE * 2),
        ("teacher-without-gradients", ONE * 2 + TWO * 3 + THREE * 3),
        ("frozen-layers", ONE + TWO + THREE * 2),
        ("product-after-the-model", ONE * 2 + TWO * 3 + THREE * 3 + 2 * 5 * 5 * 4 * 3),
        # forward; the input's gradient; its own gradient for weights and for the gradients it went through
        # (not for the loss's own, which is constant); the usual backward, down to the input
        ("gradient-penalty", (ONE + TWO + THREE) * 6 - THREE),
        ("function-named-checkpoint", ONE * 2 + TWO * 3 + THREE * 3),
        ("checkpointing", ONE * 2 + TWO * 3 + THREE * 3),
        ("checkpointing-with-reentry", ONE * 2 + TWO * 3 + THREE * 3),
    ],
)
def test_the_truth_of_a_step_by_hand(name: str, expected: int) -> None:
    (program,) = (p for p in PROGRAMS if p.name == name)
    first, *others = {work.model_flops for work in true_steps(program.run)}
    assert not others
    assert first == expected


def test_a_program_that_logs_another_count_is_found_wrong(tmp_path: Path) -> None:
    """The referee itself: the monitored run does more than the one under the truth."""
    calls = iter(range(2))

    def run(run: Any) -> None:
        model = Mlp()
        if next(calls):
            model.three = nn.Linear(10, 40)
        loop(run, model, vectors())

    found = judge(run, tmp_path)
    assert not found.exact
    assert found.wrong or found.unknown


@pytest.mark.filterwarnings("ignore::truemfu.errors.TruemfuWarning")
@pytest.mark.parametrize("name", ["experts-without-samples", "an-optimizer-step-after-four-logged-ones"])
def test_gradients_of_other_parameters_alone_leave_steps_known(name: str, tmp_path: Path) -> None:
    (run,) = [program.run for program in PROGRAMS if program.name == name]
    found = judge(run, tmp_path)
    assert not found.wrong
    assert len(found.unknown) < 0.1 * len(found.exact), str(found)


def main() -> None:
    """Each program's rows, as a table."""
    import logging
    import time

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    cases: list[Program] = [*PROGRAMS, *ARCHITECTURES]
    if "--public" in sys.argv:
        cases += [Program(name, partial(public_case, name=name)) for name in PUBLIC]
    chosen = [c for c in cases if len(sys.argv) < 2 or sys.argv[1].startswith("--") or c.name in sys.argv[1:]]
    failed = 0
    for program in chosen:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = judge(program.run, Path(folder), changes=program.changes)
            verdict, text = ("ok" if allowed(program, found) else "FAILS"), str(found)
        except Exception as error:
            verdict, text = "FAILS", f"{type(error).__name__}: {error}"
        failed += verdict != "ok"
        print(f"{verdict:<6}{program.name:<50}{time.monotonic() - began:5.1f} s  {text[:260]}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} programs have no wrong row")


if __name__ == "__main__":
    main()
