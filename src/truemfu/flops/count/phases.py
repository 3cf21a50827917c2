"""Whether an operator belongs to the forward pass, the backward pass or a recomputation.

Outside a backward pass everything is forward; an observed step tells apart what runs without gradients
(`observe/`). Inside a backward pass:

    a checkpoint runs its region again (`torch.utils.checkpoint`)        recompute
    the code of a custom Function                                        backward, then by `data_flow.py`
    a hook that enables gradients, in a pass that is not differentiated  recompute
    anything else, `create_graph` or not                                 backward
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

from ...torch_private import table
from ...torch_private.compiler import is_of_disable
from ...torch_private.dispatch import current_graph_task_id, engine_code, top_saved_tensors_hooks
from .data_flow import calling_frames, is_checkpoint, is_custom


def phase_in_backward(node: Any) -> str:
    """The phase of a product that runs now, inside a backward pass, in this autograd node."""
    if checkpoint_is_running() or is_checkpoint(node):
        return "recompute"
    if is_custom(node) or not torch.is_grad_enabled():
        return "backward"
    return "recompute" if is_in_hook() and not is_differentiated() else "backward"


def checkpoint_is_running() -> bool:
    """Whether `torch.utils.checkpoint` is recomputing a region, which it does to unpack a tensor it saved.

    Meanwhile saved-tensor hooks are active: its own, or on top of them those of a checkpoint inside the
    region. So for most operators the callers need not be searched.
    """
    if top_saved_tensors_hooks is None:
        table.miss(table.TOP_HOOKS)
    elif top_saved_tensors_hooks(True) is None:
        return False
    return any(
        frame.f_code.co_name == "unpack_hook" and frame.f_globals is vars(checkpoint)
        for frame in calling_frames()
    )


def is_in_hook() -> bool:
    """Whether Python code that autograd called, other than a Function's, runs the current operator.

    Autograd's own nodes call operators directly: then no frame is between the pass and the innermost
    dispatch mode. On a thread of autograd's own there is no frame of the pass.
    """
    frame: FrameType | None = sys._getframe()
    outermost = frame
    while frame is not None and frame.f_code is not engine_code:
        outermost = outermost if is_of_disable(frame) else frame
        frame = frame.f_back
    return outermost is not None and outermost.f_code.co_name != "__torch_dispatch__"


def is_differentiated() -> bool:
    """Whether the innermost backward pass was started with `create_graph`; True if that is unknown."""
    assert current_graph_task_id() != -1
    frames = sys._current_frames()
    here = threading.get_ident()
    for thread in (here, *(thread for thread in frames if thread != here)):
        for frame in calling_frames(frames[thread]):
            if frame.f_code is engine_code:
                arguments = frame.f_locals.get("args", ())
                return bool(arguments[2]) if len(arguments) > 2 else True
    return True
