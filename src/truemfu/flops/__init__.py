"""FLOP counting: the names that other folders may import.

batch, flop_count, ...   shared by the folders below
shadow/                  a copy of the model on tensors without data
attention/, operators/   FLOPs of one operator
isolation/               process state that a count preserves
structure/               an estimate from the modules, without running them
count/                   one step, counted
observe/                 a training step, counted while it runs
profiled/                one real step, from a torch.profiler recording
closed_form/             counts as a function of the batch sizes
models/                  models and batches from a name or a configuration
"""

from __future__ import annotations

from .arguments import check_call
from .attention.windows import Windows
from .batch import CUMULATIVE, GRIDS, documents_of, is_readable
from .closed_form.batch_key import kind_and_sizes, lengths_in, sizes_of_lengths
from .closed_form.flop_model import FlopModel
from .closed_form.form import MicroBatch, ObservedForm
from .closed_form.integers import count_of, integers_of
from .closed_form.linear import Linear, solve
from .count.count import count_flops, count_step, profile_model_flops, uncounted_notice, warn_uncounted
from .count.counted_step import shadow_step
from .count.data_flow import is_checkpoint
from .count.step_work import StepWork
from .flop_count import FlopCount
from .host_copy import HostCopy
from .isolation.process_state import AutocastState, autocast_state
from .isolation.random_states import preserved_random_states
from .models.example_batch import example_batch
from .models.hf_config import BuildOptions, model_from_config, read_config
from .models.lora import parse_lora
from .models.model_view import BatchRequest, ModelView
from .models.targets import Target, count_target, parse_dtype, resolve_target
from .observe.observation import OBSERVED, Observation
from .observe.observer import StepObserver, cuda_captures, take_out_left_behind
from .profiled.profiler import StepProfile, StepProfiler
from .profiled.trace_step import OperatorWork, TracedWork, bytes_moved, work_of_trace
from .registry import register_formula, register_module, replaced_modules
from .structure.estimate import Estimator, estimate_flops
from .wrappers import has_values, is_compiled_wrapper, unwrap
