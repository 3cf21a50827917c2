"""Loss and accuracy per named dataset of a mixed batch.

    batch["dataset_names"] (B texts), batch["labels"], outputs.logits
        ─► one pass on the device: a row of sums per sample, B × 3, left where it is
        ─► later, on the host: rows summed by name ─► dataset/<name>/loss, accuracy, samples, tokens

The pass runs on the training thread, so it only queues kernels: nothing is read back, nothing is copied to
the device (rows stay per sample, so the names never have to go there), and no operator is used whose output
shape depends on values. Logits are the largest tensor of a step (8 × 1024 × 128,256 in bf16: 2 GiB); they are
read piece by piece, and the pass never holds more than `EXTRA_BYTES` of its own.

A dataset's loss is the sum of its token losses over the number of its counted tokens in the batch, and its
accuracy the share of those tokens that the largest logit got right: long samples weigh more, as they do in
the training loss. A label outside the vocabulary, such as -100, is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import warn_once
from ...flops import HostCopy, is_readable, unwrap

EXTRA_BYTES = 256 * 2**20
"""The most memory of a pass, in addition to its inputs and a few numbers per token."""

# A piece of logits is held at most three times: made contiguous, in fp32, and as log-probabilities.
_PIECE_NUMBERS = EXTRA_BYTES // (4 * 4)

IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class PendingDatasetMetrics:
    """The sums of one batch, still on the device: row i belongs to `names[i]`.

    The columns of `sums` (float32; float64 for float64 logits) are the sum of token losses, the number of
    correct tokens (NaN: unknown, there were no logits) and the number of counted tokens.
    """

    names: tuple[str, ...]
    sums: Tensor


def dataset_metrics(names: Sequence[str], sums: Tensor) -> dict[str, float | int]:
    """The metrics by dataset, from the rows of one or more batches, once `sums` is on the host.

    Names may repeat: their rows are summed. A dataset without any counted token has no loss and no accuracy,
    so these are omitted; so is the accuracy where there were no logits.
    """
    totals: dict[str, tuple[float, float, float, int]] = {}
    for name, (loss, correct, tokens) in zip(names, sums.tolist(), strict=True):
        row = totals.get(name, (0.0, 0.0, 0.0, 0))
        totals[name] = (row[0] + loss, row[1] + correct, row[2] + tokens, row[3] + 1)
    metrics: dict[str, float | int] = {}
    for name, (loss, correct, tokens, samples) in totals.items():
        if tokens:
            metrics[f"dataset/{name}/loss"] = loss / tokens
            if not math.isnan(correct):
                metrics[f"dataset/{name}/accuracy"] = correct / tokens
        metrics[f"dataset/{name}/samples"] = samples
        metrics[f"dataset/{name}/tokens"] = int(tokens)
    return metrics


class _Unusable(Exception):
    """A batch whose datasets cannot be measured; `problem` is the same text every time it occurs."""

    def __init__(self, problem: str, got: str) -> None:
        super().__init__(f"{problem}; got {got}")
        self.problem = problem


class DatasetMetrics:
    """Queues the pass of a batch; warns once per kind of problem, and such batches have no metrics.

    `shift` means that the logits at a position predict the label of the next one, as in causal language
    models that take labels the way transformers does (see `shifts_labels`). Logits of shape (B, C) with
    labels of shape (B,) are a classification, where nothing shifts.
    """

    def __init__(self, *, shift: bool = True, notice: Callable[[str], None] = warn_once) -> None:
        self._shift, self._notice = shift, notice
        self._warned: set[str] = set()
        self.pending: list[tuple[PendingDatasetMetrics, HostCopy]] = []
        """The batches of the current step, on their way to the host."""

    def set_model(self, model: nn.Module | None) -> None:
        """Measure batches of this model from now on; None: of several."""
        self._shift = model is None or shifts_labels(model)
        self._warned.clear()

    def add(self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any) -> None:
        """Measure a batch of the current step."""
        found = self.measure(batch, outputs, aggregated_loss)
        if found is not None:
            self.pending.append((found, HostCopy(found.sums)))

    def begin_step(self) -> None:
        """The pending batches were handed over with their step: the next one begins."""
        self.pending = []

    @torch.no_grad()
    def measure(
        self, batch: Mapping[str, Any], outputs: Any, aggregated_loss: Any
    ) -> PendingDatasetMetrics | None:
        """The sums of this batch, queued without waiting; None if it names no datasets or is unusable.

        `outputs` is the model's output (an object or a mapping with `logits`) or the logits themselves.
        Without logits, as after a fused loss kernel, a batch of one single dataset has `aggregated_loss`, the
        mean over its counted tokens, as its loss.
        """
        names = batch.get("dataset_names") if isinstance(batch, Mapping) else None
        if names is None or (isinstance(names, (list, tuple)) and not names):
            return None
        try:
            return self._measure(names, batch.get("labels"), _logits_of(outputs), aggregated_loss)
        except _Unusable as problem:
            self._warn(problem.problem, str(problem))
        # No exception of a kernel, a tensor subclass or a full device may end the training.
        except Exception as error:
            name = type(error).__name__
            self._warn(name, f"{name}: {' '.join(str(error).split())[:200]}")
        return None

    def _warn(self, problem: str, reason: str) -> None:
        """Warn once per problem, since shapes and texts in the reason may differ at every step."""
        if problem not in self._warned:
            self._warned.add(problem)
            self._notice(f"no dataset metrics for this batch and similar ones: {reason}")

    def _measure(self, names: Any, labels: Any, logits: Any, aggregated_loss: Any) -> PendingDatasetMetrics:
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise _Unusable("dataset_names must be a list of strings, one per sample", _type_name(names))
        _check(labels, "labels")
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise _Unusable("labels must be integers", str(labels.dtype))
        if labels.dim() not in (1, 2) or len(labels) != len(names):
            raise _Unusable(
                "labels must have shape (samples, tokens) or (samples,), and dataset_names one per sample",
                f"labels of shape {tuple(labels.shape)} and {len(names)} names",
            )
        if logits is None:
            _check_loss(aggregated_loss, labels, names)
            sums = sums_of_loss(aggregated_loss, self._aligned(labels))
        else:
            _check_logits(logits, labels)
            sums = sums_of_logits(logits if labels.dim() == 2 else logits[:, None], self._aligned(labels))
        return PendingDatasetMetrics(names=tuple(names), sums=sums)

    def _aligned(self, labels: Tensor) -> Tensor:
        """The labels as (samples, tokens), at the positions of the logits that predict them."""
        labels = labels.to(torch.int64)
        if labels.dim() == 1:
            return labels[:, None]
        return F.pad(labels[:, 1:], (0, 1), value=IGNORED) if self._shift else labels


def sums_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Per row of (B, T, V) logits: the sum of its token losses, its correct and its counted tokens."""
    over_tokens = 1
    if logits.stride(0) < logits.stride(1):  # stored as (T, B, V), and passed transposed
        logits, labels, over_tokens = logits.transpose(0, 1), labels.transpose(0, 1), 0
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    counted = (labels >= 0) & (labels < logits.shape[2])
    # An index out of range ends the process on CUDA, so ignored labels are replaced by index 0.
    index = labels.masked_fill(~counted, 0)
    log_probabilities: list[Tensor] = []
    guesses: list[Tensor] = []
    for piece, at in _pieces(logits, index[..., None]):
        log_probabilities.append(torch.log_softmax(piece, -1, dtype=dtype).gather(-1, at))
        guesses.append(piece.argmax(-1))
    # Filled, not multiplied: an ignored position may hold NaN.
    losses = torch.cat(log_probabilities).view(labels.shape).neg_().masked_fill_(~counted, 0.0)
    correct = (torch.cat(guesses).view(labels.shape) == index) & counted
    return torch.stack([part.sum(over_tokens, dtype=dtype) for part in (losses, correct, counted)], 1)


def _pieces(logits: Tensor, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of the logits with at most `_PIECE_NUMBERS` numbers each, with their labels."""
    tokens = max(1, _PIECE_NUMBERS // max(1, logits.shape[2]))
    # Flattening rows that are not contiguous would copy all of them: go row by row there.
    if 1 in logits.shape[:2] or logits.stride(0) == logits.stride(1) * logits.shape[1]:
        logits, index = logits.flatten(0, 1)[None], index.flatten(0, 1)[None]
    for row, at in zip(logits, index, strict=True):
        yield from zip(row.split(tokens), at.split(tokens), strict=True)


def sums_of_loss(loss: Tensor | float, labels: Tensor) -> Tensor:
    """The same rows where only the mean loss of all counted tokens is known."""
    tokens = (labels >= 0).sum(1, dtype=torch.float32)
    if isinstance(loss, Tensor):
        loss = loss.reshape(())
    # A sample without tokens does not contribute to the loss, which may be infinite.
    losses = (tokens * loss).masked_fill_(tokens == 0, 0.0)
    return torch.stack([losses, torch.full_like(tokens, torch.nan), tokens], 1)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's loss shifts the labels by one position itself, as causal language models do.

    transformers stores the type of loss in `loss_type`; encoder-decoders shift the decoder's input instead.
    A model without that attribute is assumed to be causal, and so is one whose attribute raises.
    """
    try:
        model = unwrap(model)
        config = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return False
        loss_type = getattr(model, "loss_type", None)
        return loss_type is None or loss_type in ("ForCausalLM", "ForConditionalGeneration")
    except Exception:  # a property of the model raised
        return True


def _logits_of(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits")
    return getattr(outputs, "logits", None)


def _check(tensor: Any, what: str) -> None:
    if not is_readable(tensor):
        raise _Unusable(f"{what} must be a tensor with values", _type_name(tensor))
    # A wrapper tensor (DTensor, nested, quantised) may hold only a part of the vocabulary, and an operator on
    # it may be a collective.
    if hasattr(type(tensor), "__tensor_flatten__"):
        raise _Unusable(f"{what} must be a plain tensor with the whole vocabulary", _type_name(tensor))


def _check_logits(logits: Any, labels: Tensor) -> None:
    _check(logits, "logits")
    if not logits.is_floating_point() or logits.shape[:-1] != labels.shape:
        raise _Unusable(
            "logits must be floating-point numbers of the labels' shape and one dimension more",
            f"logits of shape {tuple(logits.shape)} ({logits.dtype}), labels {tuple(labels.shape)}",
        )
    if logits.device != labels.device:
        raise _Unusable(
            "labels must be on the device of the logits: move the batch there first",
            f"labels on {labels.device}, logits on {logits.device}",
        )


def _check_loss(loss: Any, labels: Tensor, names: Sequence[str]) -> None:
    if len(set(names)) > 1:
        raise _Unusable(
            "a batch of several datasets needs logits in the outputs, which a fused loss does not return",
            f"no logits and {len(set(names))} datasets",
        )
    if isinstance(loss, Tensor):
        _check(loss, "aggregated_loss")
        # A scalar on the host can be multiplied with a device tensor, but not the other way round.
        if loss.numel() != 1 or loss.device not in (labels.device, torch.device("cpu")):
            raise _Unusable(
                "aggregated_loss must be one number, on the device of the labels",
                f"shape {tuple(loss.shape)} on {loss.device}, labels on {labels.device}",
            )
    elif isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise _Unusable("without logits aggregated_loss must be one number", _type_name(loss))


def _type_name(value: Any) -> str:
    return "none" if value is None else type(value).__name__
