"""Every private name of torch that this package uses, and what is lost without it.

No other package imports a private name of torch. A missing one costs speed or detail and one warning, the
first time it is needed; a count that requires it is refused, and FLOPs are unknown. Whether a name still
means the same is tested with each version of torch (`torch_versions.py`).

`NAMES` are looked up by `find.py`; all exist in torch 2.6 to 2.15, unless `since` states otherwise.
`ATTRIBUTES` belong to objects that torch returns, and are read from them directly.
"""

from __future__ import annotations

import contextlib
import sys
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
    since: tuple[int, int]

    @property
    def name(self) -> str:
        """The name as written in code."""
        return self.path.replace(":", ".")


NAMES: dict[str, Private] = {}


def _private(path: str, lost: str, *, since: tuple[int, int] = (2, 6)) -> str:
    NAMES[path] = Private(path=path, lost=lost, since=since)
    return path


FAKE_TENSOR = _private("torch._subclasses.fake_tensor:FakeTensor", _ON_COPIES)
FAKE_MODE = _private("torch._subclasses.fake_tensor:FakeTensorMode", _ON_COPIES)
DISPATCH_MODE = _private("torch.utils._python_dispatch:TorchDispatchMode", _NOT_COUNTED)
DISABLE_MODES = _private("torch.utils._python_dispatch:_disable_current_modes", _NOT_COUNTED)
PUSH_MODE = _private("torch.utils._python_dispatch:_push_mode", _NOT_OBSERVED)
POP_MODE = _private("torch.utils._python_dispatch:_pop_mode", _NOT_OBSERVED)
MODE_STACK = _private("torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _NOT_OBSERVED)
STACK_LENGTH = _private("torch._C:_len_torch_dispatch_stack", _NOT_OBSERVED)
FUNCTION_DEPTH = _private(
    "torch._C:_len_torch_function_stack",
    "the monitor hides its operators from modes in each step, which is slower",
)
SEQUENCE_NUMBER = _private("torch.autograd:_get_sequence_nr", _NOT_COUNTED)
AUTOGRAD_NODE = _private("torch._C:_current_autograd_node", _NOT_COUNTED)
GRAPH_TASK = _private("torch._C:_current_graph_task_id", _NOT_COUNTED)
TOP_HOOKS = _private(
    "torch._C:_autograd._top_saved_tensors_default_hooks", "counts take longer", since=(2, 7)
)
RUN_BACKWARD = _private(
    "torch.autograd:_engine_run_backward",
    "tensors exported in a backward pass, and backward passes of only some steps, are not reported",
)
SKIP_CODE = _private(
    "torch._dynamo.eval_frame:skip_code", "code that is compiled in parts has a graph break more for each"
)
SET_EVAL_FRAME = _private("torch._C._dynamo.eval_frame:set_eval_frame", "the same")
DISABLE_FUNCTION = _private("torch._C:DisableTorchFunction", "counts take longer")
FLEX_FORWARD = _private(
    "torch._higher_order_ops.flex_attention:flex_attention", "flex attention cannot be counted"
)
FLEX_BACKWARD = _private(
    "torch._higher_order_ops.flex_attention:flex_attention_backward", "flex attention cannot be counted"
)
FLEX_CHECK = _private(
    "torch.nn.attention.flex_attention:_validate_device", "flex attention on a CPU cannot be counted"
)
TREES = tuple(
    _private(f"torch.utils._pytree:{name}", _NOT_COUNTED)
    for name in ("tree_flatten", "tree_unflatten", "tree_leaves", "tree_map", "tree_map_only")
)
SCHEMAS = _private("torch._C:_jit_get_schemas_for_operator", _NOT_PROFILED)
HAS_KERNEL = _private("torch._C:_dispatch_has_kernel_for_dispatch_key", _NOT_PROFILED)
_NOT_DIVIDED = (
    "observed steps do not see inside operators that are made of others, under inference_mode, and their "
    "results may differ in rounding where an operator calls others under autocast"
)
DISPATCH_ON_ENTRY = _private("torch._C:_RestorePythonTLSSnapshot", _NOT_DIVIDED)
IS_EXCLUDED = _private("torch._C:_dispatch_tls_is_dispatch_key_excluded", _NOT_DIVIDED)
EXCLUDE = _private("torch._C:_SetExcludeDispatchKeyGuard", _NOT_DIVIDED)
DISPATCH_KEY = _private("torch._C:DispatchKey", _NOT_DIVIDED)
_NO_CALLERS = "results of observed steps may differ in rounding where an operator calls others under autocast"
CALL_STACK = _private("torch._C:_profiler.gather_traceback", _NO_CALLERS)
SYMBOLS = _private("torch._C:_profiler.symbolize_tracebacks", _NO_CALLERS)
PROFILER_ENABLED = _private("torch._C:_autograd._profiler_enabled", _NOT_PROFILED)
PROFILER_STEPS = _private("torch.autograd.profiler:KinetoStepTracker._step_dict", _NOT_PROFILED)
PROFILER_FLAG = _private("torch.autograd.profiler:_is_profiler_enabled", _NOT_PROFILED)
PROFILER_STOP = _private("torch.autograd.profiler:_run_on_profiler_stop", _NOT_PROFILED)
FUNCTORCH_LEVEL = _private(
    "torch._C:_functorch.peek_interpreter_stack", "batches inside vmap cannot be recognised: there is no MFU"
)
CURRENT_STREAM = _private(
    "torch._C:_cuda_getCurrentStream", "the stream is looked up again for each step, which is slower"
)
COUNTERS = _private("torch._dynamo.utils:counters", "steps in which torch.compile ran are not marked")
COMPILED_CALL = _private(
    "torch.nn:Module._compiled_call_impl",
    "a model compiled with Module.compile is not observed: it has no MFU",
)
COMPILED_REGION = _private(
    "torch._inductor.output_code:CompiledFxGraph",
    "steps with compiled code are not observed: their FLOPs are unknown",
)
TRACING = _private(
    "torch._guards:TracingContext",
    "steps in which torch.compile compiles are not observed: their FLOPs are unknown",
)
TENSOR_GUARDS = _private(
    "torch._C:_dynamo.guards.TensorGuards",
    "steps with compiled code are not observed: their FLOPs are unknown",
)
DEFAULT_STORE = _private(
    "torch.distributed.distributed_c10d:_get_default_store",
    "ranks are not compared and do not share their counts",
)
VERSION = _private("torch:Tensor._version", "numbers on the device are copied at once, which is slower")
LOADER_ITERATOR = _private(
    "torch.utils.data.dataloader:_BaseDataLoaderIter",
    "waiting for data is measured only for loaders given to monitor.data",
)
PIPELINE_STAGE = _private(
    "torch.distributed.pipelining.stage:_PipelineStageBase",
    "pipeline stages are not recognised: each counts as a whole model",
)
NCCL_RECORDS = _private(
    "torch._C:_distributed_c10d._dump_nccl_trace_json", "the time of a rank in collectives is unknown"
)
SCALED_MM = _private("torch:_scaled_mm", "the fp8 rate of this device cannot be measured")
INT_MM = _private("torch:_int_mm", "the int8 rate of this device cannot be measured")
SCRIPT_MODULE = _private(
    "torch.jit._recursive:create_script_module",
    "an observed model can be scripted only inside monitor.without_hooks()",
)

ATTRIBUTES: dict[str, str] = {
    "_buffers _modules _parameters": "of a module: it can be neither counted nor estimated",
    "_forward_hooks _forward_pre_hooks": "of a module: it is observed by a hook, and not estimated",
    "_num_workers": "of a loader's iterator: the number of its workers is unknown",
    "_orig_mod": "of a compiled module: it is counted with its wrapper, or not at all",
    "_get_fsdp_state _mp_policy": "of a module sharded by FSDP: it can be neither counted nor estimated",
    "_fsdp_param_group _fsdp_param_groups": "of a module sharded by FSDP: the job's FLOPs are unknown",
    "_schema": "of an operator: models cannot be counted",
    "_sequence_nr": "of an autograd node: models cannot be counted",
    "_nested_tensor_size": "of a nested tensor: its products are not counted",
    "_op_dk": "of an operator: under inference_mode, operators that are made of others are not seen inside",
    "_mode_key": "of a dispatch mode: no step is observed while tensors are fake",
    "_forward_cls": "of an autograd node: what a re-entrant checkpoint recomputes counts as backward",
    "_values": "of a sparse tensor: its products are not counted",
    "inductor_post_grad_graph_str fx_kwargs": "of a compiled region: the FLOPs of its step are unknown",
    "_lazy_backward_info": "of an autograd node: recomputation by other compile backends counts as backward",
    "_is_param": "of a tensor, written to: fake tensors are then not parameters for `isinstance`",
}
"""What is lost without attributes of torch's objects; each such error fails at most one count."""

missing: dict[str, str] = {}
"""The names found missing so far, and what is lost: for the summary of a run."""

_VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


def get(path: str) -> Any:
    """The object of a name in the table; ABSENT, without a warning yet, if torch does not have it."""
    assert path in NAMES
    return lookup.find(path)


def get_or(path: str, instead: Any) -> Any:
    """The same, with something instead of a missing one."""
    found = get(path)
    return instead if found is ABSENT else found


def has(path: str) -> bool:
    """Whether torch has a name; a missing one is recorded."""
    is_there = get(path) is not ABSENT
    if not is_there:
        miss(path)
    return is_there


def loaded(path: str) -> Any:
    """The object of a name whose module the program has loaded, else ABSENT; a missing one is recorded."""
    assert path in NAMES
    found = lookup.find(path, load=False)
    home = sys.modules.get(path.partition(":")[0])
    if found is ABSENT and home is not None and not getattr(home.__spec__, "_initializing", False):
        miss(path)
    return found


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
