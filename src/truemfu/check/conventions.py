"""FLOPs of a token as tools count them: our count, and the formulas that logged figures come from.

    W  products with weights, counted        P  6 × all parameters
    A  attention over all pairs, counted     L  6 × parameters that are not only looked up
    C  attention over the pairs allowed      H  6 × parameters without any embedding

A row is a fault only where it changes the figure: on a dense model `L + A` is the count, on a mixture of
experts it counts experts that no token visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..convention import Attention, Convention

if TYPE_CHECKING:
    from torch import nn

    from ..flops import Target


CONSTANTS = 0.0012
"""Relative; tools round constants (989 for 989.4 TFLOP/s), and count without biases and norms."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a token takes in training: FLOPs of its products and of attention, and numbers of parameters.

    `is_counted` is False where only numbers of parameters were given, and formulas stand for the count.
    """

    model: str
    products: float
    attention: float
    causal_attention: float
    parameters: int
    looked_up: int = 0
    embeddings: int = 0
    is_counted: bool = True

    def flops(self, attention: Attention) -> float:
        return self.products + (self.attention if attention == "full" else self.causal_attention)


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One way to count: the key of what is wrong with it, and that in words."""

    key: str
    text: str
    flops: float


def work_of(target: Target) -> Work:
    """Count a model, in both conventions."""
    from ..flops import count_target

    full, causal = (
        count_target(target, convention=Convention(attention=attention), backward=True)
        for attention in ("full", "causal")
    )
    tokens = (target.samples or 1) * (target.length or 1)
    fused = sum(flops for name, flops in full.by_operator.items() if "attention" in name)
    difference = full.model_flops - causal.model_flops
    length = target.length or 1
    # A mask that allows S·(S+1)/2 of S² pairs: the difference is the share (S-1)/2S of attention.
    attention = fused or (difference * 2 * length / (length - 1) if length > 1 else 0.0)
    looked_up, embeddings = _embeddings(target.model)
    return Work(
        model=target.name,
        products=(full.model_flops - attention) / tokens,
        attention=attention / tokens,
        causal_attention=(attention - difference) / tokens,
        parameters=sum(parameter.numel() for parameter in target.model.parameters()),
        looked_up=looked_up,
        embeddings=embeddings,
    )


def _embeddings(model: nn.Module) -> tuple[int, int]:
    """Parameters of embeddings that nothing multiplies with, and those of all embeddings."""
    from torch import nn

    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(n for key, n in tables.items() if key not in multiplied), sum(tables.values())


def work_of_sizes(parameters: int, layers: int | None, hidden: int | None, seq: int | None) -> Work:
    """From numbers alone: 6 × parameters, and attention where layers, width and length are known."""
    attention = 12.0 * layers * hidden * seq if layers and hidden and seq else 0.0
    return Work(
        model=f"{parameters:,} parameters",
        products=6.0 * parameters,
        attention=attention,
        causal_attention=attention / 2,
        parameters=parameters,
        is_counted=False,
    )


def formulas(work: Work) -> list[Formula]:
    """Every known way to count this model."""
    w, a, c = work.products, work.attention, work.causal_attention
    p, looked_up = 6.0 * work.parameters, 6.0 * (work.parameters - work.looked_up)
    without_embeddings = 6.0 * (work.parameters - work.embeddings)
    embeddings = "input embeddings counted as products, although they are only looked up"
    none = "attention not counted"
    every = "all parameters counted as products, also norms, biases, and experts that a token does not visit"
    mask = "attention over the pairs of the mask alone"
    checkpointing = "the forward pass that activation checkpointing runs again is included: this is HFU"
    rows = [
        ("attention_all_pairs", "attention counted twice: over all pairs, where the mask allows half", w + a),
        ("attention_causal", mask, w + c),
        ("no_attention", none, w),
        ("attention_twice", "attention counted at twice all pairs", w + 2 * a),
        ("attention_recomputed", "logits that fused attention computes again in its backward pass are"
         " included: executed work, not the model's", w + 7 / 6 * a),
        ("6n", f"6 × all parameters × tokens: {embeddings}; {none}", p),
        ("embeddings", f"6 × all parameters: {embeddings}", p + a),
        ("embeddings", f"6 × all parameters: {embeddings}; {mask}", p + c),
        ("no_attention", f"6 × parameters without input embeddings × tokens: {none}", looked_up),
        ("all_parameters", every, looked_up + a),
        ("all_parameters", f"{every}; {mask}", looked_up + c),
        ("no_head", f"6 × parameters without embeddings × tokens: {none}, nor a head that shares its weight"
         " with them", without_embeddings),
        ("embeddings", embeddings, w + 6 * work.embeddings + a),
        ("embeddings", f"{embeddings}; {mask}", w + 6 * work.embeddings + c),
        ("recompute", checkpointing, 4 / 3 * (w + a)),
        ("recompute", f"{checkpointing}; {mask}", 4 / 3 * (w + c)),
        ("recompute", f"8 × all parameters × tokens: recomputation included; {none}", 4 / 3 * p),
        ("forward_only", "only the forward pass counted", (w + a) / 3),
        ("forward_only", f"2 × all parameters × tokens: only the forward pass; {none}", p / 3),
    ]  # fmt: skip
    found: list[Formula] = []
    for key, text, flops in rows:
        if all(abs(flops / other.flops - 1) > CONSTANTS for other in found):
            found.append(Formula(key=key, text=text, flops=flops))
    return found
