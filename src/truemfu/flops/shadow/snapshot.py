"""A model as it is now, to be counted later.

    in the forward pass:      taken = snapshot(model)             milliseconds, nothing runs
    at the end of a step:     FlopModel.fit(taken, batch)

Training changes a model as it runs: flags, frozen weights, hooks, attributes. A snapshot shares none of them.
Its parameters are placeholders without memory; its buffers, whose values may affect the work, are shared.
"""

from __future__ import annotations

from torch import nn

from ..wrappers import has_values
from .shadow import Shadow
from .tensor_makers import placeholder


def snapshot(model: nn.Module) -> nn.Module:
    """The model as it is now: `count_flops` and `FlopModel.fit` count it as they would the model itself.

    Wrappers are removed (DDP, FSDP2, `torch.compile`). It is only for counting: it cannot run.
    """
    taken = Shadow(placeholder).model(model)
    vars(taken)["_truemfu_had_values"] = has_values(model)
    return taken
