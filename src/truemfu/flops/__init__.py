"""FLOP counting: the names that other folders may import. They load on first use.

batch, flop_count, ...   shared by the folders below
shadow/                  a copy of the model on tensors without data
attention/, operators/   FLOPs of one operator
identity/, isolation/    a digest of the model; process state that a count preserves
structure/               an estimate from the modules, without running them
count/                   one step, counted
observe/                 a training step, counted while it runs
profiled/                one real step, from a torch.profiler recording
closed_form/             counts as a function of the batch sizes
models/                  models and batches from a name or a configuration
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .arguments import check_call
    from .batch import CUMULATIVE, GRIDS, documents_of, is_readable
    from .closed_form.flop_model import PER_VALUES, FlopModel
    from .closed_form.form import CLOSED_FORM
    from .closed_form.whole_sequences import has_whole_sequences, whole_sequences
    from .count.count import count_flops, count_step, profile_model_flops, uncounted_notice, warn_uncounted
    from .count.loss import loss_of
    from .count.step_work import StepWork
    from .flop_count import FlopCount
    from .host_copy import HostCopy, start_host_copy
    from .identity.identity import model_identity
    from .interruption import (
        Fetched,
        OtherCountRuns,
        SignalArrived,
        Supervision,
        TimeIsUp,
        ValuesPending,
        deliver,
        user_handler,
    )
    from .isolation.process_state import AutocastState, autocast_state, uncompiled, untouched_casts
    from .isolation.random_states import own_random_draws
    from .isolation.shared_state import untouched_globals
    from .models.example_batch import example_batch
    from .models.hf_config import BuildOptions, model_from_config, read_config
    from .models.lora import parse_lora
    from .models.model_view import BatchRequest, ModelView
    from .models.targets import Target, count_target, parse_dtype, resolve_target
    from .observe.observation import Observation
    from .observe.observer import StepObserver
    from .profiled.profiler import StepProfile, StepProfiler
    from .registry import register_formula, register_module
    from .shadow.shadow import Shadow
    from .shadow.snapshot import snapshot
    from .shadow.tensor_makers import live
    from .structure.estimate import Estimator, estimate_flops
    from .wrappers import has_values, is_compiled_wrapper, unwrap

_HOMES = {
    "check_call": "arguments",
    "CUMULATIVE": "batch",
    "GRIDS": "batch",
    "documents_of": "batch",
    "is_readable": "batch",
    "FlopModel": "closed_form.flop_model",
    "PER_VALUES": "closed_form.flop_model",
    "CLOSED_FORM": "closed_form.form",
    "has_whole_sequences": "closed_form.whole_sequences",
    "whole_sequences": "closed_form.whole_sequences",
    "count_flops": "count.count",
    "count_step": "count.count",
    "profile_model_flops": "count.count",
    "uncounted_notice": "count.count",
    "warn_uncounted": "count.count",
    "loss_of": "count.loss",
    "StepWork": "count.step_work",
    "FlopCount": "flop_count",
    "HostCopy": "host_copy",
    "start_host_copy": "host_copy",
    "model_identity": "identity.identity",
    "Fetched": "interruption",
    "OtherCountRuns": "interruption",
    "SignalArrived": "interruption",
    "Supervision": "interruption",
    "TimeIsUp": "interruption",
    "ValuesPending": "interruption",
    "deliver": "interruption",
    "user_handler": "interruption",
    "AutocastState": "isolation.process_state",
    "autocast_state": "isolation.process_state",
    "uncompiled": "isolation.process_state",
    "untouched_casts": "isolation.process_state",
    "own_random_draws": "isolation.random_states",
    "untouched_globals": "isolation.shared_state",
    "example_batch": "models.example_batch",
    "BuildOptions": "models.hf_config",
    "model_from_config": "models.hf_config",
    "read_config": "models.hf_config",
    "parse_lora": "models.lora",
    "BatchRequest": "models.model_view",
    "ModelView": "models.model_view",
    "Target": "models.targets",
    "count_target": "models.targets",
    "parse_dtype": "models.targets",
    "resolve_target": "models.targets",
    "Observation": "observe.observation",
    "StepObserver": "observe.observer",
    "StepProfile": "profiled.profiler",
    "StepProfiler": "profiled.profiler",
    "register_formula": "registry",
    "register_module": "registry",
    "Shadow": "shadow.shadow",
    "snapshot": "shadow.snapshot",
    "live": "shadow.tensor_makers",
    "Estimator": "structure.estimate",
    "estimate_flops": "structure.estimate",
    "has_values": "wrappers",
    "is_compiled_wrapper": "wrappers",
    "unwrap": "wrappers",
}

__all__ = [
    "CLOSED_FORM",
    "CUMULATIVE",
    "GRIDS",
    "PER_VALUES",
    "AutocastState",
    "BatchRequest",
    "BuildOptions",
    "Estimator",
    "Fetched",
    "FlopCount",
    "FlopModel",
    "HostCopy",
    "ModelView",
    "Observation",
    "OtherCountRuns",
    "Shadow",
    "SignalArrived",
    "StepObserver",
    "StepProfile",
    "StepProfiler",
    "StepWork",
    "Supervision",
    "Target",
    "TimeIsUp",
    "ValuesPending",
    "autocast_state",
    "check_call",
    "count_flops",
    "count_step",
    "count_target",
    "deliver",
    "documents_of",
    "estimate_flops",
    "example_batch",
    "has_values",
    "has_whole_sequences",
    "is_compiled_wrapper",
    "is_readable",
    "live",
    "loss_of",
    "model_from_config",
    "model_identity",
    "own_random_draws",
    "parse_dtype",
    "parse_lora",
    "profile_model_flops",
    "read_config",
    "register_formula",
    "register_module",
    "resolve_target",
    "snapshot",
    "start_host_copy",
    "uncompiled",
    "uncounted_notice",
    "untouched_casts",
    "untouched_globals",
    "unwrap",
    "user_handler",
    "warn_uncounted",
    "whole_sequences",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
