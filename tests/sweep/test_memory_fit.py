"""What fits after an out-of-memory, from finished experiments and probes."""

from __future__ import annotations

import msgspec
import pytest

from truemfu.records import CaseResult, Memory, Phase, Status, SweepCase
from truemfu.sweep.supervisor.memory_fit import propose

GIB = 2**30


def result(batch_size: int, end: Status, *, model: str = "1b", trainer: str = "DPSGDTrainer") -> CaseResult:
    case = SweepCase(trainer=trainer, model=model, batch_size=batch_size, seq_len=512)
    memory = Memory(allocated_bytes=batch_size * 20 * GIB, device_total_bytes=140 * GIB)
    return CaseResult(
        name=f"{trainer}_bs{batch_size}",
        sweep_id="s",
        content_hash="h",
        case=case,
        end=end,
        phase=Phase.DONE,
        memory=memory,
    )


class Gpu:
    """Takes batches up to a limit, and remembers what it was asked for."""

    def __init__(self, **largest: int) -> None:
        self.largest = largest
        self.asked: list[tuple[str, int]] = []

    def __call__(self, case: SweepCase) -> CaseResult:
        self.asked.append((case.model, case.batch_size))
        fits = case.batch_size <= self.largest.get(case.model.replace("1b", "one_b"), 0)
        return result(case.batch_size, Status.OK if fits else Status.CUDA_OOM)


def test_bisection_between_what_fits_and_what_does_not() -> None:
    gpu = Gpu(one_b=6)
    answers = dict(propose([result(4, Status.OK), result(8, Status.CUDA_OOM)], gpu))
    assert answers == {
        "DPSGDTrainer_bs8": "batch 6 fits (measured: 120.0 GiB of 140.0 GiB); batch 7 does not"
    }
    assert gpu.asked == [("1b", 6), ("1b", 7)]


def test_every_out_of_memory_of_a_kind_gets_the_one_answer() -> None:
    gpu = Gpu(one_b=3)
    answers = dict(propose([result(4, Status.CUDA_OOM), result(8, Status.HOST_OOM)], gpu))
    assert set(answers) == {"DPSGDTrainer_bs4", "DPSGDTrainer_bs8"}
    assert set(answers.values()) == {"batch 3 fits (measured: 60.0 GiB of 140.0 GiB); batch 4 does not"}
    assert gpu.asked == [("1b", 2), ("1b", 3)]


def test_other_trainers_do_not_bound_it() -> None:
    others = [result(4, Status.OK, trainer="StandardTrainer"), result(8, Status.ERROR)]
    answers = dict(propose([*others, result(16, Status.CUDA_OOM)], None))
    assert answers == {}


def test_without_probes_only_what_finished_is_said() -> None:
    answers = dict(propose([result(2, Status.OK), result(4, Status.OK), result(8, Status.CUDA_OOM)], None))
    assert answers == {"DPSGDTrainer_bs8": "batch 4 fits (measured: 80.0 GiB of 140.0 GiB); batch 8 does not"}


def test_a_few_probes_are_enough_for_a_large_batch() -> None:
    gpu = Gpu(one_b=700)
    answer = dict(propose([result(1024, Status.CUDA_OOM)], gpu))["DPSGDTrainer_bs1024"]
    assert len(gpu.asked) == 5
    assert answer.startswith("batch 672 fits")
    assert answer.endswith("batch 704 does not")


def test_a_batch_of_one_is_always_tried_before_giving_up() -> None:
    gpu = Gpu(one_b=1)
    answer = dict(propose([result(1024, Status.CUDA_OOM)], gpu))["DPSGDTrainer_bs1024"]
    assert gpu.asked[-1] == ("1b", 1)
    assert answer.startswith("batch 1 fits")


def test_a_smaller_model_where_no_batch_fits() -> None:
    gpu = Gpu(small=8, tiny=8)
    answer = dict(propose([result(2, Status.CUDA_OOM)], gpu))["DPSGDTrainer_bs2"]
    assert gpu.asked == [("1b", 1), ("medium", 1), ("small", 1)]
    assert answer == (
        "not even a batch of 1 of 1b fits at sequence length 512; small at batch 1 does "
        "(measured: 20.0 GiB of 140.0 GiB)"
    )


def test_a_model_of_the_users_own_has_no_smaller_one() -> None:
    answer = dict(propose([result(1, Status.CUDA_OOM, model="mine:build")], Gpu()))["DPSGDTrainer_bs1"]
    assert answer == "not even a batch of 1 of mine:build fits at sequence length 512"


@pytest.mark.parametrize(
    ("end", "reason"), [(Status.TIMEOUT, "took too long"), (Status.SIGNAL, "failed: ended by SIGSEGV")]
)
def test_a_probe_that_fails_otherwise_ends_the_search_and_is_said(end: Status, reason: str) -> None:
    def broken(case: SweepCase) -> CaseResult:
        return msgspec.structs.replace(result(case.batch_size, end), message="ended by SIGSEGV")

    answer = dict(propose([result(4, Status.OK), result(8, Status.CUDA_OOM)], broken))["DPSGDTrainer_bs8"]
    assert answer == (
        f"batch 4 fits (measured: 80.0 GiB of 140.0 GiB); batch 8 does not; a probe of batch 6 {reason}"
    )
