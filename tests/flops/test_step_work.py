"""A step by shape: it adds up to the count, and its attention block by block is what was measured."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from truemfu import Convention, count_flops
from truemfu.flops.attention.pairs import CAUSAL, FULL, Band
from truemfu.flops.count.counted_step import CountedStep
from truemfu.flops.count.step_work import StepWork, work_of
from truemfu.sweep.sizes import SIZES
from truemfu.sweep.worker.models import ReferenceModel

_DEFAULT = Convention()


def step_work(
    model: nn.Module, batch: dict[str, torch.Tensor], convention: Convention = _DEFAULT
) -> StepWork:
    return work_of(CountedStep(model, batch, convention, True, None).run()[0])


def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(samples, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def reference(layers: int) -> ReferenceModel:
    size = dataclasses.replace(SIZES["1b"], layers=layers)
    return ReferenceModel(size, device="meta", dtype=torch.bfloat16)


@pytest.mark.parametrize("attention", ["full", "causal"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_parts_add_up_to_the_count(attention: str, checkpointed: bool) -> None:
    model, convention = reference(2), Convention(attention=attention)  # type: ignore[arg-type]
    if checkpointed:
        model.gradient_checkpointing_enable()
    count = count_flops(model, batch(2, 256), convention=convention)
    work = step_work(model, batch(2, 256), convention)
    assert work.hardware_flops == count.hardware_flops
    assert work.other == 0


def test_what_nsight_compute_saw_of_a_step_with_two_layers() -> None:
    """H200, cuDNN's attention, 4 × 512: 10,737,418,240 FLOP forward and 26,843,545,600 backward."""
    full = step_work(reference(2), batch(4, 512))
    causal = step_work(reference(2), batch(4, 512), Convention(attention="causal"))
    assert full.attention_blocked == causal.attention_blocked == 10_737_418_240 + 26_843_545_600
    assert full.attention == pytest.approx(full.attention_blocked / 0.625)
    assert full.products["bf16", (2048, 32000, 2048)] == 2 * 2048 * 32000 * 2048
    assert full.products == causal.products


@pytest.mark.parametrize(("length", "share"), [(128, 1.0), (512, 0.625), (1024, 0.5625), (2048, 0.53125)])
def test_causal_kernels_execute_whole_blocks(length: int, share: float) -> None:
    assert CAUSAL.blocked_pairs(length, length) == share * length**2


@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.none() | st.integers(0, 20),
    st.none() | st.integers(0, 20),
    st.integers(1, 9),
)
def test_blocks_are_those_with_an_allowed_pair(
    q_len: int, k_len: int, behind: int | None, ahead: int | None, block: int
) -> None:
    touched = {
        (i // block, j // block)
        for i in range(q_len)
        for j in range(k_len)
        if (behind is None or j >= i - behind) and (ahead is None or j <= i + ahead)
    }
    band = Band(behind=behind, ahead=ahead)
    assert band.blocked_pairs(q_len, k_len, block) == len(touched) * block**2


def test_full_attention_overhangs_at_the_edges_only() -> None:
    assert FULL.blocked_pairs(130, 256) == 256 * 256


def test_a_mask_that_is_a_function_tells_no_blocks() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    class Flex(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)
            self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            mixed: torch.Tensor = flex_attention(q, k, v, block_mask=self.mask)  # type: ignore[assignment]
            return mixed

    work = step_work(Flex(), {"x": torch.ones(1, 128, 32)})
    assert work.attention > 0
    assert work.attention_blocked is None


def test_convolutions_with_few_input_channels_stand_apart() -> None:
    """Forward and weight gradient of the first; of no other, and of none with groups."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 16, 4, stride=4)
            self.second = nn.Conv2d(16, 8, 1)
            self.each = nn.Conv2d(8, 8, 3, groups=8)
            self.out = nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.each(self.second(self.first(x))).mean((2, 3))).sum()

    with torch.device("meta"):
        work = step_work(Net(), {"x": torch.empty(2, 3, 32, 32)})
    first = 2 * (2 * 16 * 8 * 8) * (3 * 4 * 4)
    assert work.few_channels == 2 * first
    assert work.other > work.few_channels
    assert (work.grouped, work.grouped_padded) == (0, 0)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
def test_grouped_products_know_their_padding_at_most() -> None:
    """4,096 rows of 8 groups: rounding each group up to 128 adds up to 127 rows, 8 × 127 in all."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 64, 96, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, self.weight, offs=offsets).sum()

    with torch.device("meta"):
        rows = torch.empty(4096, 64, dtype=torch.bfloat16, requires_grad=True)
        offsets = torch.zeros(8, dtype=torch.int32)
        work = step_work(Experts(), {"x": rows, "offsets": offsets})
    assert work.grouped == work.other
    assert work.grouped % (2 * 4096 * 64 * 96) == 0
    assert work.grouped_padded == work.grouped * (4096 + 8 * 127) // 4096


def test_sizes_that_are_no_multiples_of_eight_stand_apart() -> None:
    with torch.device("meta"):
        odd = nn.Linear(64, 33, bias=False, dtype=torch.bfloat16)
        work = step_work(odd, {"input": torch.empty(16, 64, dtype=torch.bfloat16)})
        even = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
        assert step_work(even, {"input": torch.empty(16, 64, dtype=torch.bfloat16)}).unaligned == 0
    assert work.unaligned == work.hardware_flops
