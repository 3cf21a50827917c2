"""The remedies: when each applies, what it changes, and the line to write. `truemfu try` measures them.

    Evidence of an unchanged run ─► Remedy.judge ─► an option to apply it with, or why it does not apply

How each is applied from outside is in `at_import.py`, `at_construction.py` and `at_first_pass.py`, under the
same names. In the order in which they are tried if there is no time for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .facts import Evidence

CHANGES = NOTHING, ROUNDING, PRECISION = "nothing", "rounding", "precision"
_LEAST_WAIT = 0.005
"""Of a step: a loader that is waited for less has nothing to gain."""
_MOST_WORKERS = 8
_TF32_SINCE = 8
_BF16_SINCE = 8


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Whether a remedy applies."""

    applies: bool
    reason: str
    option: str = ""
    """How to apply it."""


def _yes(reason: str, option: str = "") -> Judgement:
    return Judgement(applies=True, reason=reason, option=option)


def _no(reason: str) -> Judgement:
    return Judgement(applies=False, reason=reason)


@dataclass(frozen=True)
class Remedy:
    """A row of the table."""

    name: str
    title: str
    changes: str
    """What it changes in the numbers: "nothing", "rounding" (the order of sums) or "precision"."""
    judged_by: Callable[[Evidence], Judgement]
    line: str
    """What to write into the script; {option} and {device} are filled in."""
    one_of: str | None = None
    """Of remedies with the same word here, one is applied."""
    from_outside: bool = True
    """Whether it can be applied without a change of the script."""

    on_cuda_only: bool = False

    def judge(self, evidence: Evidence) -> Judgement:
        """Whether it applies."""
        if self.on_cuda_only and evidence.device != "cuda":
            return _no(f"the device is {evidence.device}")
        return self.judged_by(evidence)

    def line_for(self, option: str, evidence: Evidence) -> str:
        """The line for this script."""
        return self.line.format(option=option, device=evidence.device or "cuda")


def _has_parameters(e: Evidence) -> str | None:
    """Why no remedy of a model applies."""
    return None if e.models else "no call of a model was seen"


def _compile(e: Evidence) -> Judgement:
    if why := _has_parameters(e):
        return _no(why)
    return _no("something is compiled already") if e.is_compiled else _yes("the model is not compiled")


def _compile_blocks(e: Evidence) -> Judgement:
    whole = _compile(e)
    if not whole.applies:
        return whole
    if not e.repeated_blocks:
        return _no("the model has no list of blocks of one class")
    found = ", ".join(f"{number} in {name or 'the model'}" for name, number in e.repeated_blocks.items())
    parts = (f"*model.{name}" if name else "*model" for name in e.repeated_blocks)
    return _yes(f"repeated blocks: {found}", ", ".join(parts))


def _fp32_products(e: Evidence) -> str | None:
    """Why there are no fp32 products, or it is not known."""
    if e.products is None:
        return "the dtypes of products are not known: compiled code hides them"
    return None if e.products.get("float32") else "no product of the forward pass runs in fp32"


def _autocast(e: Evidence) -> Judgement:
    if why := _has_parameters(e) or _fp32_products(e):
        return _no(why)
    if e.device == "cuda" and (e.capability or [0])[0] < _BF16_SINCE:
        return _no("this GPU has no bf16 tensor cores")
    return _yes(f"{_of_products(e, 'float32')} run in fp32")


def _of_products(e: Evidence, dtype: str) -> str:
    products = e.products or {}
    return f"{products.get(dtype, 0)} of {sum(products.values())} products"


def _tf32(e: Evidence) -> Judgement:
    if (e.capability or [0])[0] < _TF32_SINCE:
        return _no("this GPU has no TF32")
    if e.matmul_precision != "highest":
        return _no("TF32 is allowed already")
    why = _fp32_products(e)
    return _no(why) if why else _yes(f"{_of_products(e, 'float32')} run in fp32, without TF32")


def _fused(e: Evidence) -> Judgement:
    takers = [one.name for one in e.optimizers if one.takes_fused and not one.is_fused]
    if takers:
        return _yes(f"{', '.join(takers)} is not fused")
    if any(one.is_fused for one in e.optimizers):
        return _no("the optimizer is fused already")
    return _no(_without_argument(e, "fused"))


def _foreach(e: Evidence) -> Judgement:
    takers = [one for one in e.optimizers if one.takes_foreach and not one.is_fused and not one.foreach]
    loops = [one.name for one in takers if e.device != "cuda" or one.foreach is False]
    if loops:
        return _yes(f"{', '.join(loops)} updates one parameter after another")
    if any(one.is_fused for one in e.optimizers):
        return _no("the optimizer is fused")
    if any(one.takes_foreach for one in e.optimizers):
        return _no("torch uses it by default here")
    return _no(_without_argument(e, "foreach"))


def _without_argument(e: Evidence, argument: str) -> str:
    names = ", ".join(one.name for one in e.optimizers)
    return f"{names} has no argument {argument}" if names else "no optimizer of torch was seen"


def _workers(e: Evidence) -> Judgement:
    if why := _no_wait(e):
        return _no(why)
    plain = [one for one in e.loaders if one.workers == 0]
    if not plain:
        return _no("the loaders have workers already")
    if all(one.is_stream for one in plain):
        return _no("the dataset is a stream: each worker would repeat all of it, unless it shards")
    workers = max(2, min(_MOST_WORKERS, (e.cpus or 2) // max(e.ranks or 1, 1)))
    share = _wait_share(e) or 0
    return _yes(f"the step waits for data {100 * share:.1f} % of its time, and loads it itself", str(workers))


def _no_wait(e: Evidence) -> str | None:
    if not e.loaders:
        return "no DataLoader of torch was seen"
    share = _wait_share(e)
    if share is None:
        return "the wait for data is not known"
    return f"the step waits for data {100 * share:.2f} % of its time" if share < _LEAST_WAIT else None


def _wait_share(e: Evidence) -> float | None:
    return None if e.data_wait_s is None or not e.step_time_s else e.data_wait_s / e.step_time_s


def _pin_memory(e: Evidence) -> Judgement:
    if not e.loaders:
        return _no("no DataLoader of torch was seen")
    if all(one.pins_memory for one in e.loaders):
        return _no("the loaders pin memory already")
    return _yes("batches are copied from pageable memory")


def _checkpointing(e: Evidence) -> Judgement:
    return _yes("torch.utils.checkpoint runs") if e.checkpoints else _no("nothing is checkpointed")


_BACKENDS = {
    "Cudnn": "enable_cudnn_sdp",
    "Flash": "enable_flash_sdp",
    "Efficient": "enable_mem_efficient_sdp",
}
"""In the name of an autograd node of attention → what switches its kernel off."""


def _attention(e: Evidence) -> Judgement:
    if e.attention_implementation == "eager":
        return _yes('attn_implementation is "eager"', 'model.set_attn_implementation("sdpa")')
    if not e.attention_calls:
        return _no("scaled_dot_product_attention was not called")
    if e.device != "cuda":
        return _no(f"the device is {e.device}: torch has one kernel there")
    for part, switch in _BACKENDS.items():
        if any(part in kernel for kernel in e.attention_kernels):
            return _yes(
                f"attention runs {part} kernels: the next choice of torch",
                f"torch.backends.cuda.{switch}(False)",
            )
    return _no("its kernel is not known, or no other fits its inputs")


def _liger(e: Evidence) -> Judgement:
    if not e.is_transformers_model:
        return _no("the model is not one of transformers")
    if e.device != "cuda":
        return _no(f"the device is {e.device}")
    return _yes("liger_kernel is installed") if e.has_liger else _no("liger_kernel is not installed")


def _channels_last(e: Evidence) -> Judgement:
    if e.convolutions_2d is None:
        return _no("convolutions are not known: compiled code hides them")
    if not e.convolutions_2d:
        return _no("no 2-d convolution runs")
    if e.are_channels_last:
        return _no("the inputs of convolutions are channels_last already")
    return _yes(f"{e.convolutions_2d} 2-d convolutions, channels first")


def _cudnn_benchmark(e: Evidence) -> Judgement:
    if e.cudnn_benchmark:
        return _no("it is on already")
    return _yes(f"{e.convolutions} convolutions") if e.convolutions else _no("no convolution was seen")


def _larger_batch(e: Evidence) -> Judgement:
    used, total = e.peak_memory_bytes, e.device_memory_bytes
    if used is None or total is None:
        return _no("the free memory of the device is not known")
    return _yes(f"the peak is {100 * used / total:.0f} % of the device's memory")


def _pad_vocabulary(e: Evidence) -> Judgement:
    if e.vocabulary is None:
        return _no("no embedding table was seen")
    rest = e.vocabulary % 64
    if not rest:
        return _no(f"the vocabulary of {e.vocabulary:,} is a multiple of 64")
    return _yes(f"the vocabulary of {e.vocabulary:,} is not a multiple of 64", str(e.vocabulary + 64 - rest))


def _packing(e: Evidence) -> Judgement:
    if e.padding is None:
        return _no("the share of padding is not known")
    return _yes(f"{100 * e.padding:.0f} % of the tokens are padding") if e.padding > 0 else _no("no padding")


REMEDIES: tuple[Remedy, ...] = (
    Remedy("compile", "torch.compile of the model", ROUNDING, _compile,
           "model.compile()  # before training", one_of="compile"),
    Remedy("compile_blocks", "torch.compile of its repeated blocks", ROUNDING, _compile_blocks,
           "for block in [{option}]: block.compile()", one_of="compile"),
    Remedy("cuda_graphs", "torch.compile with CUDA graphs", ROUNDING, _compile,
           'model.compile(mode="reduce-overhead")', one_of="compile", on_cuda_only=True),
    Remedy("autocast_bf16", "bf16 autocast", PRECISION, _autocast,
           'with torch.autocast("{device}", torch.bfloat16):  # around the forward pass'),
    Remedy("tf32", "TF32 products", PRECISION, _tf32,
           'torch.set_float32_matmul_precision("high")', on_cuda_only=True),
    Remedy("loader_workers", "loader workers", NOTHING, _workers,
           "DataLoader(…, num_workers={option}, persistent_workers=True)"),
    Remedy("no_checkpointing", "checkpointing off", NOTHING, _checkpointing,
           "call what is checkpointed directly (transformers: model.gradient_checkpointing_disable())"),
    Remedy("fused_optimizer", "fused optimizer", ROUNDING, _fused,
           "the optimizer's argument fused=True", one_of="optimizer"),
    Remedy("attention", "other attention kernels", ROUNDING, _attention,
           "{option}"),
    Remedy("liger", "Liger kernels", ROUNDING, _liger,
           "TrainingArguments(use_liger_kernel=True)"),
    Remedy("channels_last", "channels_last", ROUNDING, _channels_last,
           "model.to(memory_format=torch.channels_last), and the same for its inputs"),
    Remedy("cudnn_benchmark", "cuDNN benchmark", ROUNDING, _cudnn_benchmark,
           "torch.backends.cudnn.benchmark = True", on_cuda_only=True),
    Remedy("pin_memory", "pinned memory", NOTHING, _pin_memory,
           "DataLoader(…, pin_memory=True)", on_cuda_only=True),
    Remedy("foreach_optimizer", "foreach optimizer", ROUNDING, _foreach,
           "the optimizer's argument foreach=True", one_of="optimizer"),
    Remedy("larger_batch", "a larger batch", PRECISION, _larger_batch,
           "a larger batch, with a learning rate to match", from_outside=False),
    Remedy("pad_vocabulary", "a padded vocabulary", ROUNDING, _pad_vocabulary,
           "a vocabulary of {option}", from_outside=False),
    Remedy("packing", "packed batches", PRECISION, _packing,
           "several documents in one sequence, without padding", from_outside=False),
)  # fmt: skip
BY_NAME = {remedy.name: remedy for remedy in REMEDIES}
