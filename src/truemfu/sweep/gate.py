"""Is this trainer's gradient the one its name promises? Asked on a small model before anything is timed.

    small model, 3 samples × 5 tokens
        ├─► one sample at a time, plain autograd ─► (private: clip each) ─► mean ──► expected change
        └─► the trainer, one step: SGD, learning rate 1, no noise ────────────────► change it made
                                                            largest relative difference ≤ 1e-4: passed

The clipping norm is the median of the samples' own norms, so that some are clipped and some are not. Samples
and tokens differ in number: per-sample gradients that go wrong along the other axis do so silently when the
two are equal. Everything runs in fp32, on the case's device.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..records import Gate, SweepCase
from .case_model import Batch, to_device
from .environment import forget_peaks
from .gate_model import GateModel, gate_model
from .standard_trainer import losses_by_sample
from .trainers import Trainer, TrainerSettings, Unsupported

TOLERANCE = 1e-4

NO_NUMBER = sys.float_info.max
"""The relative error of a step that makes NaN: JSON knows no infinity."""

# A parameter whose change is a smaller share of the whole is measured against this share: rounding alone
# is a large part of a gradient that cancels to zero (the bias of attention's keys).
_SMALLEST_SHARE = 1e-2

Changes = dict[str, Tensor]


def check_trainer(trainer_class: type[Trainer], case: SweepCase, device: torch.device) -> Gate:
    """Compare one step of the trainer with a per-sample loop; random state and memory peaks are put back."""
    with _undisturbed(device):
        return _check(trainer_class, case, gate_model(case, device), device)


def _check(trainer_class: type[Trainer], case: SweepCase, small: GateModel, device: torch.device) -> Gate:
    model, private = small.model, trainer_class.private
    batch = to_device(small.batch, device)
    gradients, independent = _loop(model, batch)
    norms = torch.stack([torch.stack([g.norm() for g in own.values()]).norm() for own in gradients])
    max_grad_norm = norms.median().item()
    if private and not independent:
        raise Unsupported(
            f"{trainer_class.__name__} cannot train {case.model}: the samples of a batch change each other's "
            "loss (batch normalisation?), so no sample has a gradient of its own"
        )
    if not independent:
        expected = _whole_batch(model, batch)
    else:
        scales = (max_grad_norm / norms).clamp(max=1.0) if private else torch.ones_like(norms)
        expected = {
            name: sum((own[name] * scale for own, scale in zip(gradients, scales, strict=True)), start=zero)
            / -len(gradients)
            for name, zero in ((name, torch.zeros_like(value)) for name, value in gradients[0].items())
        }
    settings = TrainerSettings(
        optimizer="sgd",
        learning_rate=1.0,
        max_grad_norm=max_grad_norm,
        noise_multiplier=0.0,
        compile=case.compile,
    )
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        trainer_class(model, settings).step(batch)
    except NotImplementedError as error:
        raise Unsupported(f"{trainer_class.__name__} cannot train {small.name}: {error}") from error
    after = dict(model.named_parameters())
    made = {name: after[name].detach() - before[name] for name in expected}
    relative_error = _difference(made, expected)
    return Gate(
        passed=relative_error <= TOLERANCE,
        relative_error=relative_error,
        tolerance=TOLERANCE,
        model=small.name,
        batch_size=small.samples,
        seq_len=small.length,
        clipped=private,
    )


def _loop(model: nn.Module, batch: Batch) -> tuple[list[Changes], bool]:
    """Each sample's own gradient, and whether its loss alone is its loss in the batch."""
    samples = next(len(value) for value in batch.values() if isinstance(value, Tensor))
    with torch.no_grad():
        together = losses_by_sample(model, batch)
    gradients, alone = [], []
    for index in range(samples):
        one = {
            name: value[index : index + 1].contiguous() if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        loss = losses_by_sample(model, one).mean()
        alone.append(loss.detach())
        gradients.append(_gradient(model, loss))
    independent = torch.allclose(torch.stack(alone), together, rtol=1e-3, atol=1e-5)
    return gradients, independent


def _whole_batch(model: nn.Module, batch: Batch) -> Changes:
    gradient = _gradient(model, losses_by_sample(model, batch).mean())
    return {name: -value for name, value in gradient.items()}


def _gradient(model: nn.Module, loss: Tensor) -> Changes:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return {
        name: torch.zeros_like(parameter) if gradient is None else gradient
        for (name, parameter), gradient in zip(trained.items(), found, strict=True)
    }


def _difference(made: Changes, expected: Changes) -> float:
    """The largest relative difference of any parameter; `NO_NUMBER` where one has become NaN or infinite."""
    whole = torch.stack([value.norm() for value in expected.values()]).norm()
    worst = torch.stack(
        [
            (made[name] - value).norm() / torch.maximum(value.norm(), _SMALLEST_SHARE * whole)
            for name, value in expected.items()
        ]
    ).max()
    return worst.item() if worst.isfinite() else NO_NUMBER


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Afterwards the random state is as before, and the GPU's memory and its peaks are those of no gate."""
    on_gpu = device.type == "cuda"
    try:
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            yield
    finally:
        if on_gpu:
            gc.collect()  # wrapped models refer to themselves
            torch.cuda.empty_cache()
            forget_peaks(device)
