"""A model as it is at this moment, to be counted later.

    in the forward pass:      taken = snapshot(model)             milliseconds, nothing runs
    at the end of a step:     FlopModel.fit(taken, batch)

Training changes a model while it goes on: flags, frozen weights, hooks, attributes. A snapshot shares none of
that. Its parameters are stand-ins without memory; buffers, whose values may steer a model, are the live ones.
"""

from __future__ import annotations

from torch import nn

from ..wrappers import has_values
from .shadow import Shadow
from .tensor_makers import stand_in


def snapshot(model: nn.Module) -> nn.Module:
    """The model as it is now: `count_flops` and `FlopModel.fit` count it as they would the model itself.

    Wrappers are taken off (DDP, FSDP2, `torch.compile`). Only good for counting: it cannot run.
    """
    taken = Shadow(stand_in).model(model)
    vars(taken)["_truemfu_had_values"] = has_values(model)
    return taken
