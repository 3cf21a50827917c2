"""What tokens cost at a price per GPU-hour."""

from __future__ import annotations


def per_million_tokens(price_per_gpu_hour: float, tokens_per_s: float | None, *, gpus: int) -> float | None:
    """Price × GPUs ÷ tokens per hour × 10⁶; None without a rate."""
    if not tokens_per_s:
        return None
    return price_per_gpu_hour * gpus / (3600 * tokens_per_s) * 1e6
