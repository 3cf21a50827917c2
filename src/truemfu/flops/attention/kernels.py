"""Attention kernels: the meaning of their arguments, and how many query-key pairs count.

    kernel call ──► AttentionWork ──► pairs of the convention ──► FLOPs needed, FLOPs executed

Forward is two products for each pair (scores, values). Backward needs up to four: the values' gradient, the
probabilities', the queries' and the keys'; a fused kernel executes all four and recomputes the scores. What
it executes beyond what is needed is recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .pairs import FULL, Band


@dataclass(frozen=True, kw_only=True)
class AttentionWork:
    """One call of an attention kernel, as described by its shapes and flags.

    `mask` is the tensor given to the kernel (boolean: True is allowed; float: added to the scores),
    `mask_function` a flex-attention mask of (sample, head, query, key), `cumulative` the cumulative lengths
    of packed queries and keys.
    """

    samples: int
    heads: int
    q_len: int
    k_len: int
    qk_dim: int
    v_dim: int
    backward: bool
    band: Band = FULL
    mask: Any = None
    mask_function: Callable[..., Any] | None = None
    device: Any = None
    cumulative: tuple[Any, Any] | None = None

    def without_tensors(self) -> AttentionWork:
        """The same without what it was called with: shapes and flags only."""
        return replace(self, mask=None, mask_function=None, cumulative=None)

    def forward_flops(self, pairs: int) -> int:
        """Scores and values; `pairs` are those of all samples, one head."""
        return 2 * pairs * self.heads * (self.qk_dim + self.v_dim)

    def needed_backward_flops(self, pairs: int, *, q: bool, k: bool, v: bool) -> int:
        """Products that the requested gradients need: dV, dP (for q or k), dQ, dK."""
        return 2 * pairs * self.heads * (self.v_dim * (v + (q or k)) + self.qk_dim * (q + k))

    def executed_backward_flops(self, pairs: int) -> int:
        """What a fused kernel executes: the scores again and all four products."""
        return 2 * pairs * self.heads * (3 * self.qk_dim + 2 * self.v_dim)


@dataclass(frozen=True)
class _Kernel:
    """Layout of a kernel's tensors: heads first is (B, H, S, D), else (B, S, H, D) or packed (T, H, D)."""

    heads_first: bool
    backward: bool

    @property
    def is_padded(self) -> bool:
        """Whether torch may pad the head sizes before it calls this kernel from its attention function."""
        return self.heads_first and not self.backward


_SDPA, _SDPA_BACKWARD = _Kernel(True, False), _Kernel(True, True)
_PLAIN, _PLAIN_BACKWARD = _Kernel(False, False), _Kernel(False, True)

KERNELS: Mapping[str, _Kernel] = {
    "aten::_scaled_dot_product_flash_attention": _SDPA,
    "aten::_scaled_dot_product_flash_attention_backward": _SDPA_BACKWARD,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _SDPA,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _SDPA_BACKWARD,
    "aten::_scaled_dot_product_efficient_attention": _SDPA,
    "aten::_scaled_dot_product_efficient_attention_backward": _SDPA_BACKWARD,
    "aten::_scaled_dot_product_cudnn_attention": _SDPA,
    "aten::_scaled_dot_product_cudnn_attention_backward": _SDPA_BACKWARD,
    "aten::_scaled_dot_product_fused_attention_overrideable": _SDPA,
    "aten::_scaled_dot_product_fused_attention_overrideable_backward": _SDPA_BACKWARD,
    "aten::_scaled_dot_product_attention_math_for_mps": _SDPA,
    "aten::_flash_attention_forward": _PLAIN,
    "aten::_flash_attention_forward_no_dropout_inplace": _PLAIN,
    "aten::_flash_attention_backward": _PLAIN_BACKWARD,
    "aten::_efficient_attention_forward": _PLAIN,
    "aten::_efficient_attention_backward": _PLAIN_BACKWARD,
    "aten::_cudnn_attention_forward": _PLAIN,
    "aten::_cudnn_attention_forward_no_dropout_inplace": _PLAIN,
    "aten::_cudnn_attention_backward": _PLAIN_BACKWARD,
    "torch_attn::_varlen_attn": _PLAIN,
    "torch_attn::_varlen_attn_out": _PLAIN,
    "torch_attn::_varlen_attn_backward": _PLAIN_BACKWARD,
    "flash_attn::_flash_attn_forward": _PLAIN,
    "flash_attn::_flash_attn_backward": _PLAIN_BACKWARD,
    "flash_attn::_flash_attn_varlen_forward": _PLAIN,
    "flash_attn::_flash_attn_varlen_backward": _PLAIN_BACKWARD,
}


def _first(call: Mapping[str, Any], *names: str) -> Any:
    return next((call[name] for name in names if call.get(name) is not None), None)


def _band(call: Mapping[str, Any]) -> Band:
    """The band given by the kernel's own flags; an unbounded side of a window is None or −1."""
    # the memory-efficient kernel's custom_mask_type: 0 none, 1 causal top left, 2 causal bottom right
    causal = bool(_first(call, "is_causal", "causal") or call.get("custom_mask_type"))
    window = call.get("window_size")
    if isinstance(window, int):  # memory-efficient: a count of keys, this one included
        left: int | None = window - 1
        right: int | None = None
    elif isinstance(window, Sequence) and len(window) == 2:
        left, right = window[0], window[1]
    else:
        left, right = call.get("window_size_left"), call.get("window_size_right")
    behind = None if left is None or left < 0 else int(left)
    ahead = None if right is None or right < 0 else int(right)
    return Band(behind=behind, ahead=0 if causal else ahead)


def work_of_kernel(name: str, call: Mapping[str, Any]) -> AttentionWork:
    """The work of one call of a kernel in the table; `call` maps the schema's names to the arguments."""
    kernel = KERNELS[name]
    q, k, v = _first(call, "query", "q"), _first(call, "key", "k"), _first(call, "value", "v")
    length, head = (2, 1) if kernel.heads_first else (q.dim() - 3, q.dim() - 2)
    cumulative = (
        _first(call, "cum_seq_q", "cu_seqlens_q", "cu_seq_q"),
        _first(call, "cum_seq_k", "cu_seqlens_k", "cu_seq_k"),
    )
    packed = not kernel.heads_first and cumulative[0] is not None and cumulative[0].numel() > 1
    return AttentionWork(
        samples=q.shape[0] if q.dim() == 4 else 1,
        heads=q.shape[head],
        q_len=q.shape[length],
        k_len=k.shape[length],
        qk_dim=q.shape[-1],
        v_dim=v.shape[-1],
        backward=kernel.backward,
        band=_band(call),
        mask=_first(call, "attn_mask", "attn_bias", "bias"),
        cumulative=cumulative if packed else None,
    )


def work_of_flex(name: str, args: Sequence[Any]) -> AttentionWork:
    """The work of one flex-attention call; the block mask's tuple ends with the mask function."""
    backward = name.endswith("backward")
    q, k, v = args[:3]
    block_mask = next(a for a in reversed(args) if isinstance(a, tuple) and a and callable(a[-1]))
    return AttentionWork(
        samples=q.shape[0],
        heads=q.shape[1],
        q_len=q.shape[2],
        k_len=k.shape[2],
        qk_dim=q.shape[3],
        v_dim=v.shape[3],
        backward=backward,
        mask_function=block_mask[-1],
        device=q.device,
    )
