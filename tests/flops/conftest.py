"""Skips for the oldest torch: what these tests need is not in it. Each with its reason."""

from __future__ import annotations

import pytest
import torch

OLD_TORCH = tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 8)
NOT_IN_OLD_TORCH = {
    "float token ids": "fake embeddings take indices of any dtype before torch 2.8",
    "test_one_rank_counts_alone_and_then_both_train": "FSDP2 cannot train on a CPU before torch 2.7",
    "test_a_checkpoint_around_a_derivative": "a checkpoint's hooks cannot be seen before torch 2.7",
    "are_recomputation[non-reentrant]": "a checkpoint's hooks cannot be seen before torch 2.7",
    "test_per_sample_gradients_are_backward": "a checkpoint's hooks cannot be seen before torch 2.7",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not OLD_TORCH:
        return
    for item in items:
        for fragment, reason in NOT_IN_OLD_TORCH.items():
            if fragment in item.name:
                item.add_marker(pytest.mark.skip(reason=reason))
