"""Which part of a job's work the counts of one rank describe.

    job's FLOPs  = sum over ranks of  its FLOPs ÷ flops_shared_by
    job's tokens = sum over ranks of  its tokens ÷ tokens_shared_by, where it has_tokens

With tensor parallelism the ranks of a group get the same batch. FLOPs of an observed step are each rank's
own, shared with nobody; estimates are of whole layers, and each rank then stands for its part of them. Of a
pipeline only the first stage reports tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankRole:
    """The role of one rank; by default it processes a batch of its own with the whole model."""

    flops_shared_by: int = 1
    """How many ranks report the same products, where these are estimated."""
    tokens_shared_by: int = 1
    """How many ranks report the same samples and tokens."""
    has_tokens: bool = True
    """Whether this rank's batches are those of the job: false for later pipeline stages."""
    is_known: bool = True
    """False: how the ranks share their samples and tokens is unknown, so these are not added up."""
    splits_sequences: bool = False
    """Whether it processes a part of each sequence (context parallelism): its attention runs in chunks, of
    which some are skipped, so what it ran is not its share of the pairs that the convention counts."""
    name: str = ""
    """Ranks of equal name are expected to take equally long, so only these are compared."""


WHOLE = RankRole()
"""The role of a process that is no part of a job."""
UNKNOWN = RankRole(is_known=False)
