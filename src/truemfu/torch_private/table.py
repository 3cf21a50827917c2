"""Every private name of torch that this package uses, and what is lost without it.

No other package imports a private name of torch. A missing one costs speed or detail and one warning, the
first time it is needed; a count that requires it is refused, and FLOPs are unknown. Whether a name still
means the same is tested with each version of torch (`torch_versions.py`).

`NAMES` are looked up by `find.py`; all exist in torch 2.6 to 2.15, unless `since` states otherwise.
`ATTRIBUTES` belong to objects that torch returns, and are read from them directly.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import TruemfuWarning, warn_once
from . import find as lookup
from .find import ABSENT

_NOT_COUNTED = "models are not counted and no training step is observed: FLOPs are unknown"
_NOT_OBSERVED = "no training step is observed: its FLOPs are unknown"
_NOT_PROFILED = "no step is profiled: HFU is based on the count"
_ON_COPIES = "models are counted on real copies, which is slower and needs memory"


@dataclass(frozen=True, kw_only=True)
class Private:
    """A private name: where it is, what is lost without it, and the first torch version that has it."""

    path: str
    lost: str
    since: tuple[int, int] = (2, 6)

    @property
    def name(self) -> str:
        """The name as written in code."""
        return self.path.replace(":", ".")


FAKE_TENSOR = "torch._subclasses.fake_tensor:FakeTensor"
FAKE_MODE = "torch._subclasses.fake_tensor:FakeTensorMode"
DISPATCH_MODE = "torch.utils._python_dispatch:TorchDispatchMode"
PUSH_MODE = "torch.utils._python_dispatch:_push_mode"
POP_MODE = "torch.utils._python_dispatch:_pop_mode"
MODE_STACK = "torch.utils._python_dispatch:_get_current_dispatch_mode_stack"
STACK_LENGTH = "torch._C:_len_torch_dispatch_stack"
DISABLE_MODES = "torch.utils._python_dispatch:_disable_current_modes"
FUNCTION_DEPTH = "torch._C:_len_torch_function_stack"
SEQUENCE_NUMBER = "torch.autograd:_get_sequence_nr"
AUTOGRAD_NODE = "torch._C:_current_autograd_node"
GRAPH_TASK = "torch._C:_current_graph_task_id"
TOP_HOOKS = "torch._C:_autograd._top_saved_tensors_default_hooks"
RUN_BACKWARD = "torch.autograd:_engine_run_backward"
DISABLE_FUNCTION = "torch._C:DisableTorchFunction"
DISABLE_DISPATCH = "torch._C:_DisableTorchDispatch"
FLEX_FORWARD = "torch._higher_order_ops.flex_attention:flex_attention"
FLEX_BACKWARD = "torch._higher_order_ops.flex_attention:flex_attention_backward"
FLEX_CHECK = "torch.nn.attention.flex_attention:_validate_device"
PYTREE = "torch.utils._pytree:"
SCHEMAS = "torch._C:_jit_get_schemas_for_operator"
HAS_KERNEL = "torch._C:_dispatch_has_kernel_for_dispatch_key"
PROFILER_ENABLED = "torch._C:_autograd._profiler_enabled"
PROFILER_STEPS = "torch.autograd.profiler:KinetoStepTracker._step_dict"
PROFILER_FLAG = "torch.autograd.profiler:_is_profiler_enabled"
PROFILER_STOP = "torch.autograd.profiler:_run_on_profiler_stop"
FUNCTORCH_LEVEL = "torch._C:_functorch.peek_interpreter_stack"
ANY_AUTOCAST = "torch._C:_is_any_autocast_enabled"
CURRENT_STREAM = "torch._C:_cuda_getCurrentStream"
COUNTERS = "torch._dynamo.utils:counters"
COMPILED_CALL = "torch.nn:Module._compiled_call_impl"
COMPILED_REGION = "torch._inductor.output_code:CompiledFxGraph"
TRACING = "torch._guards:TracingContext"
TENSOR_GUARDS = "torch._C:_dynamo.guards.TensorGuards"
DEFAULT_STORE = "torch.distributed.distributed_c10d:_get_default_store"
VERSION = "torch:Tensor._version"
LOADER_ITERATOR = "torch.utils.data.dataloader:_BaseDataLoaderIter"
PIPELINE_STAGE = "torch.distributed.pipelining.stage:_PipelineStageBase"
NCCL_RECORDS = "torch._C:_distributed_c10d._dump_nccl_trace_json"
SCALED_MM = "torch:_scaled_mm"
INT_MM = "torch:_int_mm"
SCRIPT_MODULE = "torch.jit._recursive:create_script_module"

_TREES = ("tree_flatten", "tree_unflatten", "tree_leaves", "tree_map", "tree_map_only")

NAMES: dict[str, Private] = {
    path: Private(path=path, lost=lost, since=since)
    for path, lost, since in (
        (FAKE_TENSOR, _ON_COPIES, (2, 6)),
        (FAKE_MODE, _ON_COPIES, (2, 6)),
        (DISPATCH_MODE, _NOT_COUNTED, (2, 6)),
        (DISABLE_MODES, _NOT_COUNTED, (2, 6)),
        (PUSH_MODE, _NOT_OBSERVED, (2, 6)),
        (POP_MODE, _NOT_OBSERVED, (2, 6)),
        (MODE_STACK, _NOT_OBSERVED, (2, 6)),
        (STACK_LENGTH, _NOT_OBSERVED, (2, 6)),
        (FUNCTION_DEPTH, "the monitor hides its operators from modes in each step, which is slower", (2, 6)),
        (SEQUENCE_NUMBER, _NOT_COUNTED, (2, 6)),
        (AUTOGRAD_NODE, _NOT_COUNTED, (2, 6)),
        (GRAPH_TASK, _NOT_COUNTED, (2, 6)),
        (TOP_HOOKS, "counts take longer", (2, 7)),
        (RUN_BACKWARD, "tensors exported from torch in a backward pass are not reported", (2, 6)),
        (DISABLE_FUNCTION, "counts take longer", (2, 6)),
        (DISABLE_DISPATCH, "counts take longer", (2, 6)),
        (FLEX_FORWARD, "flex attention cannot be counted", (2, 6)),
        (FLEX_BACKWARD, "flex attention cannot be counted", (2, 6)),
        (FLEX_CHECK, "flex attention on a CPU cannot be counted", (2, 6)),
        *((PYTREE + name, _NOT_COUNTED, (2, 6)) for name in _TREES),
        (SCHEMAS, _NOT_PROFILED, (2, 6)),
        (HAS_KERNEL, _NOT_PROFILED, (2, 6)),
        (PROFILER_ENABLED, _NOT_PROFILED, (2, 6)),
        (PROFILER_STEPS, _NOT_PROFILED, (2, 6)),
        (PROFILER_FLAG, _NOT_PROFILED, (2, 6)),
        (PROFILER_STOP, _NOT_PROFILED, (2, 6)),
        (FUNCTORCH_LEVEL, "batches inside vmap cannot be recognised: there is no MFU", (2, 6)),
        (ANY_AUTOCAST, "autocast is looked up for each device, which is slower", (2, 6)),
        (CURRENT_STREAM, "the stream is looked up again for each step, which is slower", (2, 6)),
        (COUNTERS, "steps in which torch.compile ran are not marked", (2, 6)),
        (COMPILED_CALL, "a model compiled with Module.compile is not observed: it has no MFU", (2, 6)),
        (COMPILED_REGION, "steps with compiled code are not observed: their FLOPs are unknown", (2, 6)),
        (TRACING, "steps in which torch.compile compiles are not observed: their FLOPs are unknown", (2, 6)),
        (TENSOR_GUARDS, "steps with compiled code are not observed: their FLOPs are unknown", (2, 6)),
        (DEFAULT_STORE, "ranks are not compared and do not share their counts", (2, 6)),
        (VERSION, "numbers on the device are copied at once, which is slower", (2, 6)),
        (LOADER_ITERATOR, "waiting for data is measured only for loaders given to monitor.data", (2, 6)),
        (PIPELINE_STAGE, "pipeline stages are not recognised: each counts as a whole model", (2, 6)),
        (NCCL_RECORDS, "the time of a rank in collectives is unknown", (2, 6)),
        (SCALED_MM, "the fp8 rate of this device cannot be measured", (2, 6)),
        (INT_MM, "the int8 rate of this device cannot be measured", (2, 6)),
        (SCRIPT_MODULE, "an observed model can be scripted only inside monitor.without_hooks()", (2, 6)),
    )
}

ATTRIBUTES: dict[str, str] = {
    "_buffers _modules _parameters": "of a module: it can be neither counted nor estimated",
    "_forward_hooks _forward_pre_hooks": "of a module: it is observed by a hook, and not estimated",
    "_orig_mod": "of a compiled module: it is counted with its wrapper, or not at all",
    "_get_fsdp_state _mp_policy": "of a module sharded by FSDP: it can be neither counted nor estimated",
    "_fsdp_param_group _fsdp_param_groups": "of a module sharded by FSDP: the job's FLOPs are unknown",
    "_schema": "of an operator: models cannot be counted",
    "_sequence_nr": "of an autograd node: models cannot be counted",
    "_nested_tensor_size": "of a nested tensor: its products are not counted",
    "_mode_key": "of a dispatch mode: no step is observed while tensors are fake",
    "_forward_cls": "of an autograd node: what a re-entrant checkpoint recomputes counts as backward",
    "_values": "of a sparse tensor: its products are not counted",
    "inductor_post_grad_graph_str fx_kwargs": "of a compiled region: the FLOPs of its step are unknown",
    "_lazy_backward_info": "of an autograd node: what other backends of torch.compile recompute is backward",
    "_cdata": "of a storage: counts take longer",
    "fake_tensor_converter meta_converter storage_memo tensor_memo": (
        "of a mode of fake tensors: an interrupt during a garbage collection after a count may be lost"
    ),
    "_is_param": "of a tensor, written to: fake tensors are then not parameters for `isinstance`",
}
"""What is lost without attributes of torch's objects; each such error fails at most one count."""

missing: dict[str, str] = {}
"""The names found missing so far, and what is lost: for the summary of a run."""

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def get(path: str, *, load: bool = True) -> Any:
    """The object of a name in the table; ABSENT, without a warning yet, if torch does not have it."""
    assert path in NAMES
    return lookup.find(path, load=load)


def get_or(path: str, instead: Any) -> Any:
    """The same, with something instead of a missing one."""
    found = get(path)
    return instead if found is ABSENT else found


def reason(path: str) -> str:
    """One line about a name that is missing or no longer works."""
    private = NAMES[path]
    return f"torch {torch.__version__} has no usable {private.name}: {private.lost}"


def miss(path: str) -> None:
    """Record a missing name that the caller can do without: warn once, unless this torch predates it."""
    if path in missing or NAMES[path].since > _VERSION:
        return
    missing[path] = reason(path)
    with contextlib.suppress(TruemfuWarning):  # a filter may turn warnings into errors, during training
        warn_once(missing[path])
