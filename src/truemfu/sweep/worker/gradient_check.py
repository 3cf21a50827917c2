"""Checks a trainer's gradient on a small model, before anything is timed.

    small model, 3 samples × 5 tokens
        ├─► one sample at a time, plain autograd ─► (private: clip each) ─► mean ──► expected change
        └─► the trainer, one step: SGD, large learning rate, no noise ────────────► change it made
                                                            largest relative difference ≤ 1e-4: passed

Of several ranks each has its own samples, and the expected change is the mean over all ranks.

The clipping norm is the median of the samples' own norms, so that some are clipped and some are not. Samples
and tokens differ in number: if they were equal, gradients along the wrong axis would go unnoticed.
Everything runs in fp32, on the case's device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import ModelError, UsageError, one_line
from ...flops import preserved_random_states
from ...private.batches import cut
from ...private.check import full_fp32, largest_error
from ...records import GradientCheck, SweepCase
from ..failures import is_out_of_memory
from ..trainers.base import Trainer, TrainerSettings, Unsupported
from ..trainers.standard import losses_by_sample
from .case_model import Batch, to_device
from .environment import reset_peaks
from .gradient_check_model import GradientCheckModel, gradient_check_model
from .rank_group import ALONE, RankGroup

TOLERANCE = 1e-4

# A power of two avoids rounding; a large one keeps the change above the precision of the old weights.
_LEARNING_RATE = 1024.0

_SEED = 0

Changes = dict[str, Tensor]


def check_trainer(
    trainer_class: type[Trainer], case: SweepCase, device: torch.device, group: RankGroup = ALONE
) -> GradientCheck:
    """Compare one step of the trainer with a per-sample loop; random state and memory peaks are restored."""
    with _isolated(device):
        return _check(trainer_class, case, gradient_check_model(case, device), device, group)


def _check(
    trainer_class: type[Trainer],
    case: SweepCase,
    small: GradientCheckModel,
    device: torch.device,
    group: RankGroup,
) -> GradientCheck:
    model, private = small.model, trainer_class.private
    batch = to_device(_of_rank(small.batch, group.rank), device)
    if private and small.stands_in and case.batch_size == case.seq_len:
        raise Unsupported(
            f"{trainer_class.__name__} cannot be checked on {case.model} itself, and wrong gradients can go "
            f"unnoticed if batch and sequence are equal: use a batch size other than {case.seq_len}"
        )
    gradients, dependent = _loop(model, batch, small.samples)
    max_grad_norm = 1.0
    if private and dependent:
        raise Unsupported(
            f"{trainer_class.__name__} cannot train {case.model}: no sample has a gradient of its own, "
            f"because {dependent}"
        )
    if dependent:
        expected = _whole_batch(model, batch)
    else:
        norms = torch.stack([_norm(own) for own in gradients])
        max_grad_norm = norms.median().item()
        scales = (max_grad_norm / norms).clamp(max=1.0) if private else torch.ones_like(norms)
        expected = {
            name: sum((own[name] * scale for own, scale in zip(gradients, scales, strict=True)), start=zero)
            / -len(gradients)
            for name, zero in ((name, torch.zeros_like(value)) for name, value in gradients[0].items())
        }
    expected = _mean_of_ranks(expected, group)
    if _norm(expected) == 0:
        raise ModelError(f"the loss of {small.name} has no gradient: nothing can be trained or checked")
    settings = TrainerSettings(
        optimizer="sgd",
        learning_rate=_LEARNING_RATE,
        max_grad_norm=max_grad_norm,
        noise_multiplier=0.0,
        compile=case.compile,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(_SEED)
    try:
        loss: object = trainer_class(group.wrapped(model, device), settings).step(batch)
    except NotImplementedError as error:
        raise Unsupported(f"{trainer_class.__name__} cannot train {small.name}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            f"{case.trainer}: step(batch) must return the mean loss, as a tensor with one element"
        )
    after = dict(model.named_parameters())
    made = {name: (_whole(after[name].detach()) - before[name]) / _LEARNING_RATE for name in expected}
    left = {name: made[name] - value for name, value in expected.items()}
    lengths = {name: value.norm() for name, value in expected.items()}
    relative_error = max(group.gather(largest_error(left, lengths)))
    return GradientCheck(
        passed=relative_error <= TOLERANCE,
        relative_error=relative_error,
        tolerance=TOLERANCE,
        model=small.name,
        batch_size=small.samples,
        seq_len=small.length,
        clipped=private,
        stands_in=small.stands_in,
    )


def _of_rank(batch: Batch, rank: int) -> Batch:
    """Samples of this rank's own: those of the batch with their tokens (or features) moved along."""
    return {
        name: value.roll(rank, dims=-1) if isinstance(value, Tensor) and value.dim() > 1 else value
        for name, value in batch.items()
    }


def _mean_of_ranks(changes: Changes, group: RankGroup) -> Changes:
    every = group.gather({name: value.cpu() for name, value in changes.items()})
    return {
        name: torch.stack([rank[name] for rank in every]).mean(dim=0).to(value)
        for name, value in changes.items()
    }


def _whole(parameter: Tensor) -> Tensor:
    """A parameter that FSDP2 has split, put together from all ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _loop(model: nn.Module, batch: Batch, samples: int) -> tuple[list[Changes], str | None]:
    """Each sample's own gradient, or why it has none: its loss depends on the rest of the batch."""
    with torch.no_grad():
        together = losses_by_sample(model, batch)
    gradients, alone = [], []
    for index in range(samples):
        try:
            loss = losses_by_sample(model, cut(batch, samples, slice(index, index + 1))).mean()
        except Exception as error:  # the whole batch has just worked
            if is_out_of_memory(error):
                raise
            return [], f"a single sample raises {one_line(error)}"
        alone.append(loss.detach())
        gradients.append(_gradient(model, loss))
    if not torch.allclose(torch.stack(alone), together, rtol=1e-3, atol=1e-5):
        return (
            [],
            "a sample's loss alone differs from its loss in the batch (batch normalisation, or randomness?)",
        )
    return gradients, None


def _whole_batch(model: nn.Module, batch: Batch) -> Changes:
    torch.manual_seed(_SEED)  # the seed of the trainer's step: the same random values
    gradient = _gradient(model, losses_by_sample(model, batch).mean())
    return {name: -value for name, value in gradient.items()}


def _gradient(model: nn.Module, loss: Tensor) -> Changes:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(trained.items(), found, strict=True)
    }


def _norm(changes: Changes) -> Tensor:
    """Of all parameters together."""
    norm: Tensor = torch.stack([value.norm() for value in changes.values()]).norm()
    return norm


@contextmanager
def _isolated(device: torch.device) -> Iterator[None]:
    """Full fp32 inside; afterwards random state, memory, peaks and compiled code are as if nothing had run.

    After an error the peaks stay, for the result.
    """
    with full_fp32(), preserved_random_states():
        yield
    gc.collect()  # wrapped models refer to themselves
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # a second shape would make it compile for dynamic shapes
    if device.type == "cuda":
        torch.cuda.empty_cache()
    reset_peaks(device)
