"""A count starts no collective: its numbers are known, or the count says why it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from truemfu import FlopModel, count_flops
from truemfu.errors import SplitOverRanks


@pytest.fixture
def group() -> Iterator[Any]:
    """A job of one rank: its collectives end at once, and the group numbers them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd


class Communicating(nn.Module):
    """Calls a collective in its forward pass, as models do."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.layer, self.case = nn.Linear(8, 8), case

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        group = dist.group.WORLD
        if self.case == "sum of a metric":
            dist.all_reduce(x.detach().mean())
        elif self.case == "gathered features":
            parts = [torch.empty_like(x)]
            dist.all_gather(parts, x.detach())
            x = x @ parts[0].T
        elif self.case == "gathered with gradient":
            x = x @ gather(x, 0, group).T
        elif self.case == "equal parts":
            x = functional.all_to_all_single_autograd(x, None, None, group)
        elif self.case == "barrier":
            dist.barrier()
        elif self.case == "a known number":
            x = x * functional.all_reduce(torch.ones(1), "sum", group).item()
        elif self.case == "objects":
            dist.all_gather_object([None], 3)
        elif self.case == "sum of activations":
            x = functional.all_reduce(x, "sum", group)
        elif self.case == "parts of chosen sizes":
            sizes = [int((x.argmax(-1) >= 0).sum())]
            x = functional.all_to_all_single_autograd(x, sizes, sizes, group)
        return x


PRODUCT = 2 * 4 * 8 * 8
COUNTED = {
    "sum of a metric": PRODUCT,
    "gathered features": PRODUCT + 2 * 4 * 4 * 8,
    "gathered with gradient": PRODUCT + 2 * 4 * 4 * 8,
    "equal parts": PRODUCT,
    "barrier": PRODUCT,
    "a known number": PRODUCT,
}
REFUSED = {
    "objects": "collective",
    "sum of activations": "adds up matrices",
    "parts of chosen sizes": "exchanges tokens",
}
if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
    # torch 2.6 cannot run collectives that write into their arguments on fake tensors
    for case in ("sum of a metric", "gathered features", "barrier"):
        del COUNTED[case]
        REFUSED[case] = "calls a collective .* with values"


@pytest.mark.parametrize("case", [*COUNTED, *REFUSED])
def test_no_collective_starts_in_a_count(group: Any, case: str) -> None:
    model, x = Communicating(case), torch.ones(4, 8)
    before = group._get_sequence_number_for_group()
    model(x).sum().backward()
    in_training = group._get_sequence_number_for_group()
    assert in_training > before
    for count in (count_flops, lambda *given: FlopModel.fit(*given)(given[1])):
        if case in COUNTED:
            assert count(model, (x,)).forward == COUNTED[case]
        else:
            with pytest.raises(SplitOverRanks, match=REFUSED[case]):
                count(model, (x,))
    assert group._get_sequence_number_for_group() == in_training
