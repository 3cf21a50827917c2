"""What one training step of each public case takes, by pencil: exact integers from dimensions and batch.

This is the referee of the counter, so it shares nothing with it: no import of truemfu, no counting mode,
no run of the model. Each function reads a configuration and the shapes of a batch (and, where sequences
are packed, the position ids that say so) and adds up the architecture's products. The rules are those of
docs/counting.md, "What is counted":

- a product of M×K by K×N is 2·M·K·N; elementwise work, embeddings, norms and softmax are nothing;
- backward is what the gradients need: one product for a trained weight, one for an input that needs a
  gradient. Pixels, mel spectrograms and token ids need none, so the first convolution has half a backward;
- attention is two products forward and four backward, whichever kernel runs;
- `recompute` is what is executed beyond that: the scores a fused attention kernel makes again in its
  backward, the gradients it makes though nothing needs them, re-run activation checkpoints, and masked
  pairs between packed documents.

`recompute` is for fp32 training on a CPU, the one place where all cases run. There SDPA takes its fused
kernel if there is no dropout, the mask needs no gradient and keys are as wide as values; else it takes
the plain path, which recomputes nothing. With `attention="causal"` a pair that a causal or sliding-window
mask forbids exists in no term, neither counted nor recomputed; the pairs such a mask would allow between
packed documents are recomputation, as they are with `"full"`.

`tests/flops/test_truth.py` holds every case against the operators that a real step executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

ATTENTION_CONVENTIONS = ("full", "causal")


@dataclass(frozen=True)
class Truth:
    """FLOPs of one training step: what the model needs, and what is executed on top of it."""

    forward: int = 0
    backward: int = 0
    recompute: int = 0

    @property
    def model_flops(self) -> int:
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        return self.model_flops + self.recompute

    def __add__(self, other: Truth) -> Truth:
        return Truth(
            self.forward + other.forward,
            self.backward + other.backward,
            self.recompute + other.recompute,
        )

    def __mul__(self, times: int) -> Truth:
        return Truth(self.forward * times, self.backward * times, self.recompute * times)


@dataclass(frozen=True)
class Pairs:
    """Pairs of query and key over a whole batch, for one head."""

    counted: int
    """Pairs the convention counts."""
    executed: int
    """Pairs a kernel works on; more than counted where documents are packed into one row."""


def linear(rows: int, inputs: int, outputs: int, *, trained: bool = True, into: bool = True) -> Truth:
    """rows × inputs by inputs × outputs; `trained`: the weight needs a gradient; `into`: the input does."""
    forward = 2 * rows * inputs * outputs
    return Truth(forward, forward * (trained + into))


def convolution(outputs: int, taps: int, *, into: bool = True) -> Truth:
    """`outputs` elements, each a sum over `taps` = input channels of its group × kernel elements."""
    forward = 2 * outputs * taps
    return Truth(forward, forward * (1 + into))


def attention_products(
    pairs: Pairs, heads: int, qk: int, v: int, *, fused: bool, keys_need_gradient: bool = True
) -> Truth:
    """Q·Kᵀ and P·V forward; dV, dP, dQ and dK backward.

    Masked pairs between documents cost the same six products. A fused kernel makes the scores once
    more in backward, and dK whether it is needed or not. The plain path leaves dK out.
    """
    unit = 2 * heads
    forward = qk + v
    backward = 2 * v + qk + qk * keys_need_gradient
    executed_backward = 2 * v + 3 * qk if fused else backward
    return Truth(
        unit * pairs.counted * forward,
        unit * pairs.counted * backward,
        unit * (pairs.executed * (forward + executed_backward) - pairs.counted * (forward + backward)),
    )


def gated_mlp(rows: int, hidden: int, inner: int) -> Truth:
    """Gate and up projections, their product, down projection."""
    return linear(rows, hidden, inner) * 2 + linear(rows, inner, hidden)


def plain_mlp(rows: int, hidden: int, inner: int) -> Truth:
    """Two layers."""
    return linear(rows, hidden, inner) + linear(rows, inner, hidden)


def experts(rows: int, hidden: int, inner: int, *, experts: int, visited: int) -> Truth:
    """The router's scores for all experts, and the gated MLPs of those each token visits."""
    return linear(rows, hidden, experts) + gated_mlp(rows * visited, hidden, inner)


def _total(parts: Iterable[Truth]) -> Truth:
    return sum(parts, Truth())


def _config(model: Any) -> Any:
    """The configuration of a model, compiled or not, or the configuration itself."""
    return getattr(model, "config", model)


def _documents(batch: Mapping[str, Any]) -> list[list[int]]:
    """The lengths of the documents in each row: the row itself unless position ids restart."""
    samples, length = batch["input_ids"].shape
    positions = batch.get("position_ids")
    if positions is None:
        return [[length]] * samples
    rows = []
    for row in positions.tolist():
        starts = [i for i, position in enumerate(row) if i == 0 or position != row[i - 1] + 1]
        rows.append([end - start for start, end in pairwise([*starts, length])])
    return rows


def _causal_pairs(length: int, window: int | None = None) -> int:
    """Query i sees itself and the keys before it, at most `window` of them in all."""
    return sum(min(i + 1, window or length) for i in range(length))


def _self_pairs(batch: Mapping[str, Any], attention: str, window: int | None = None) -> Pairs:
    """Pairs of a decoder's self-attention under this convention."""
    rows = _documents(batch)
    if attention == "causal":
        counted = sum(_causal_pairs(n, window) for row in rows for n in row)
        return Pairs(counted, sum(_causal_pairs(sum(row), window) for row in rows))
    if attention != "full":
        raise ValueError(f"attention must be one of {ATTENTION_CONVENTIONS}; got {attention!r}")
    return Pairs(sum(n * n for row in rows for n in row), sum(sum(row) ** 2 for row in rows))


def _plain_pairs(samples: int, queries: int, keys: int | None = None) -> Pairs:
    """All pairs of unmasked attention."""
    pairs = samples * queries * (queries if keys is None else keys)
    return Pairs(pairs, pairs)


def _decoder_side_pairs(samples: int, length: int, attention: str) -> Pairs:
    """Causal self-attention of a model whose rows are never packed."""
    pairs = samples * (_causal_pairs(length) if attention == "causal" else length**2)
    return Pairs(pairs, pairs)


def _fused(config: Any, dropout: float = 0.0) -> bool:
    """Whether SDPA takes its fused kernel on a CPU."""
    return (getattr(config, "_attn_implementation", None) or "sdpa") == "sdpa" and dropout == 0


def _window(config: Any, layer: int) -> int | None:
    """The sliding window of this layer, None where it sees everything before it."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)


def _grouped_query_attention(config: Any, batch: Mapping[str, Any], attention: str, layer: int) -> Truth:
    """Projections to queries and to fewer keys and values, attention, projection back."""
    samples, length = batch["input_ids"].shape
    rows, hidden, heads = samples * length, config.hidden_size, config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * width, config.num_key_value_heads * width
    pairs = _self_pairs(batch, attention, _window(config, layer))
    return (
        linear(rows, hidden, queries)
        + linear(rows, hidden, keys) * 2
        + attention_products(pairs, heads, width, width, fused=_fused(config, config.attention_dropout))
        + linear(rows, queries, hidden)
    )


def _rows(batch: Mapping[str, Any]) -> int:
    samples, length = batch["input_ids"].shape
    return int(samples * length)


def gpt2(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Fused query-key-value projection, plain MLP, tied head."""
    c, rows = _config(model), _rows(batch)
    width, inner = c.n_embd // c.n_head, c.n_inner or 4 * c.n_embd
    layer = (
        linear(rows, c.n_embd, 3 * c.n_embd)
        + attention_products(
            _self_pairs(batch, attention), c.n_head, width, width, fused=_fused(c, c.attn_pdrop)
        )
        + linear(rows, c.n_embd, c.n_embd)
        + plain_mlp(rows, c.n_embd, inner)
    )
    return layer * c.n_layer + linear(rows, c.n_embd, c.vocab_size)


def llama(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Llama and all of its shape: Qwen2, Qwen3, Mistral, Gemma 2 and 3.

    Rotary embeddings are elementwise in the pinned transformers (older ones made a product of them).
    """
    c, rows = _config(model), _rows(batch)
    layers = (
        _grouped_query_attention(c, batch, attention, i) + gated_mlp(rows, c.hidden_size, c.intermediate_size)
        for i in range(c.num_hidden_layers)
    )
    return _total(layers) + linear(rows, c.hidden_size, c.vocab_size)


def llama_checkpointed(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Llama whose layers run again in backward, all but the last product of each.

    Non-reentrant checkpointing stops when the last tensor it lacks is there. That is the input of the
    down projection, which autograd saves before the product is made.
    """
    c, rows = _config(model), _rows(batch)
    again = 0
    for i in range(c.num_hidden_layers):
        block = _grouped_query_attention(c, batch, attention, i)
        pairs = _self_pairs(batch, attention, _window(c, i))
        masked = (pairs.executed - pairs.counted) * 4 * c.num_attention_heads * c.head_dim
        again += block.forward + masked + 2 * linear(rows, c.hidden_size, c.intermediate_size).forward
    return llama(model, batch, attention) + Truth(recompute=again)


def llama_lora(model: Any, batch: Mapping[str, Any], attention: str = "full", *, rank: int) -> Truth:
    """Llama frozen, with adapters of this rank on the query and value projections.

    No frozen weight has a gradient. Nothing before the first layer is trained, so its input needs no
    gradient: none goes through its projections and down-adapters, and none to its keys.
    """
    c, rows = _config(model), _rows(batch)
    hidden, heads, width = c.hidden_size, c.num_attention_heads, c.head_dim
    queries, keys = heads * width, c.num_key_value_heads * width

    def adapted(outputs: int, into: bool) -> Truth:
        return (
            linear(rows, hidden, outputs, trained=False, into=into)
            + linear(rows, hidden, rank, into=into)
            + linear(rows, rank, outputs)
        )

    def layer(i: int) -> Truth:
        into = i > 0
        products = attention_products(
            _self_pairs(batch, attention, _window(c, i)),
            heads,
            width,
            width,
            fused=_fused(c, c.attention_dropout),
            keys_need_gradient=into,
        )
        frozen = linear(rows, queries, hidden, trained=False)
        for inputs, outputs in ((hidden, c.intermediate_size),) * 2 + ((c.intermediate_size, hidden),):
            frozen += linear(rows, inputs, outputs, trained=False)
        return (
            adapted(queries, into)
            + linear(rows, hidden, keys, trained=False, into=into)
            + adapted(keys, into)
            + products
            + frozen
        )

    head = linear(rows, hidden, c.vocab_size, trained=False)
    return _total(layer(i) for i in range(c.num_hidden_layers)) + head


def mixtral(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Llama's attention, experts in every layer."""
    c, rows = _config(model), _rows(batch)
    sparse = experts(
        rows,
        c.hidden_size,
        c.intermediate_size,
        experts=c.num_local_experts,
        visited=c.num_experts_per_tok,
    )
    blocks = (_grouped_query_attention(c, batch, attention, i) for i in range(c.num_hidden_layers))
    return _total(blocks) + sparse * c.num_hidden_layers + linear(rows, c.hidden_size, c.vocab_size)


def qwen3_moe(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Llama's attention; layers named in `mlp_only_layers` are dense, the others have experts."""
    c, rows = _config(model), _rows(batch)
    dense = gated_mlp(rows, c.hidden_size, c.intermediate_size)
    sparse = experts(
        rows,
        c.hidden_size,
        c.moe_intermediate_size,
        experts=c.num_experts,
        visited=c.num_experts_per_tok,
    )
    layers = (
        _grouped_query_attention(c, batch, attention, i)
        + (dense if i in c.mlp_only_layers or (i + 1) % c.decoder_sparse_step else sparse)
        for i in range(c.num_hidden_layers)
    )
    return _total(layers) + linear(rows, c.hidden_size, c.vocab_size)


def deepseek_v3(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Latent attention; the first layers are dense, the others have shared and routed experts.

    Queries, keys and values go through low-rank projections. Keys (content and rotary part) are wider
    than values, so no fused CPU kernel takes them.
    """
    c, rows = _config(model), _rows(batch)
    hidden, heads = c.hidden_size, c.num_attention_heads
    qk, v = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    fused = _fused(c, c.attention_dropout) and qk == v
    block = (
        linear(rows, hidden, c.q_lora_rank)
        + linear(rows, c.q_lora_rank, heads * qk)
        + linear(rows, hidden, c.kv_lora_rank + c.qk_rope_head_dim)
        + linear(rows, c.kv_lora_rank, heads * (c.qk_nope_head_dim + v))
        + attention_products(_self_pairs(batch, attention), heads, qk, v, fused=fused)
        + linear(rows, heads * v, hidden)
    )
    dense = gated_mlp(rows, hidden, c.intermediate_size)
    shared = gated_mlp(rows, hidden, c.moe_intermediate_size * c.n_shared_experts)
    routed = experts(
        rows,
        hidden,
        c.moe_intermediate_size,
        experts=c.n_routed_experts,
        visited=c.num_experts_per_tok,
    )
    sparse_layers = c.num_hidden_layers - c.first_k_dense_replace
    return (
        block * c.num_hidden_layers
        + dense * c.first_k_dense_replace
        + (shared + routed) * sparse_layers
        + linear(rows, hidden, c.vocab_size)
    )


def _encoder_layer(
    samples: int,
    length: int,
    hidden: int,
    heads: int,
    inner: int,
    *,
    fused: bool,
    pairs: Pairs | None = None,
) -> Truth:
    """Four square projections, attention (over all pairs unless told), plain MLP."""
    rows, width = samples * length, hidden // heads
    pairs = pairs or _plain_pairs(samples, length)
    return (
        linear(rows, hidden, hidden) * 4
        + attention_products(pairs, heads, width, width, fused=fused)
        + plain_mlp(rows, hidden, inner)
    )


def bert(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Encoder, then the masked-language head: a dense layer and the tied projection to the vocabulary."""
    c = _config(model)
    samples, length = batch["input_ids"].shape
    layer = _encoder_layer(
        samples,
        length,
        c.hidden_size,
        c.num_attention_heads,
        c.intermediate_size,
        fused=_fused(c, c.attention_probs_dropout_prob),
    )
    rows = samples * length
    head = linear(rows, c.hidden_size, c.hidden_size) + linear(rows, c.hidden_size, c.vocab_size)
    return layer * c.num_hidden_layers + head


def t5(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Encoder and decoder with cross-attention; keys and values of it come from the encoder's rows.

    The learned position bias of self-attention is a mask that needs a gradient, so no fused kernel
    takes it. Cross-attention has none, and takes one.
    """
    c = _config(model)
    samples, source = batch["input_ids"].shape
    target = batch["labels"].shape[1]
    inner = c.num_heads * c.d_kv

    def attend(queries: int, keys: int, pairs: Pairs, fused: bool) -> Truth:
        return (
            linear(samples * queries, c.d_model, inner)
            + linear(samples * keys, c.d_model, inner) * 2
            + attention_products(pairs, c.num_heads, c.d_kv, c.d_kv, fused=fused)
            + linear(samples * queries, inner, c.d_model)
        )

    encoder = attend(source, source, _plain_pairs(samples, source), False) + plain_mlp(
        samples * source, c.d_model, c.d_ff
    )
    decoder = (
        attend(target, target, _decoder_side_pairs(samples, target, attention), False)
        + attend(target, source, _plain_pairs(samples, target, source), _fused(c, c.dropout_rate))
        + plain_mlp(samples * target, c.d_model, c.d_ff)
    )
    head = linear(samples * target, c.d_model, c.vocab_size)
    return encoder * c.num_layers + decoder * c.num_decoder_layers + head


def _patches(batch: Mapping[str, Any], patch: int) -> tuple[int, int, int]:
    """Images, patches of each, and elements of a patch."""
    images, channels, height, width = batch["pixel_values"].shape
    return images, (height // patch) * (width // patch), channels * patch * patch


def vit(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Patch convolution, encoder over patches and one class token, classifier on that token."""
    c = _config(model)
    images, patches, taps = _patches(batch, c.patch_size)
    layer = _encoder_layer(
        images,
        patches + 1,
        c.hidden_size,
        c.num_attention_heads,
        c.intermediate_size,
        fused=_fused(c, c.attention_probs_dropout_prob),
    )
    return (
        convolution(images * patches * c.hidden_size, taps, into=False)
        + layer * c.num_hidden_layers
        + linear(images, c.hidden_size, c.num_labels)
    )


def _clip_vision_parts(vision: Any, batch: Mapping[str, Any]) -> tuple[Truth, Truth]:
    """The patch convolution, and one layer over patches and a class token."""
    images, patches, taps = _patches(batch, vision.patch_size)
    layer = _encoder_layer(
        images,
        patches + 1,
        vision.hidden_size,
        vision.num_attention_heads,
        vision.intermediate_size,
        fused=_fused(vision, vision.attention_dropout),
    )
    return convolution(images * patches * vision.hidden_size, taps, into=False), layer


def clip(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Two towers, a projection of each, and every text against every image."""
    c = _config(model)
    text, vision = c.text_config, c.vision_config
    texts, length = batch["input_ids"].shape
    images = batch["pixel_values"].shape[0]
    stem, vision_layer = _clip_vision_parts(vision, batch)
    text_layer = _encoder_layer(
        texts,
        length,
        text.hidden_size,
        text.num_attention_heads,
        text.intermediate_size,
        fused=_fused(text, text.attention_dropout),
        pairs=_decoder_side_pairs(texts, length, attention),
    )
    return (
        stem
        + vision_layer * vision.num_hidden_layers
        + text_layer * text.num_hidden_layers
        + linear(images, vision.hidden_size, c.projection_dim)
        + linear(texts, text.hidden_size, c.projection_dim)
        + linear(texts, c.projection_dim, images)
    )


def llava(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """CLIP's vision tower, two projections, Llama.

    Features are taken after layer `vision_feature_layer` (−2). The layers after it run forward, but
    nothing that reaches the loss comes from them: no backward.
    """
    c = _config(model)
    language = llama(c.text_config, batch, attention)
    if batch.get("pixel_values") is None:
        return language
    vision, hidden = c.vision_config, c.text_config.hidden_size
    stem, layer = _clip_vision_parts(vision, batch)
    depth = vision.num_hidden_layers
    trained = c.vision_feature_layer % (depth + 1)
    images, patches, _ = _patches(batch, vision.patch_size)
    rows = images * (patches + (c.vision_feature_select_strategy != "default"))
    return (
        stem
        + layer * trained
        + Truth(forward=layer.forward) * (depth - trained)
        + linear(rows, vision.hidden_size, hidden)
        + linear(rows, hidden, hidden)
        + language
    )


def _window_lengths(height: int, width: int, side: int, unit: int) -> list[int]:
    """Patches in each window that tiles a grid of merged cells; those at the edges are smaller."""
    return [
        min(side, height - top) * min(side, width - left) * unit
        for top in range(0, height, side)
        for left in range(0, width, side)
    ]


def qwen2_5_vl(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Windowed vision tower, patch merger, Qwen2.

    Most vision layers attend within windows of `window_size` pixels, those of `fullatt_block_indexes`
    within a frame. Each window is a sequence of its own: its pairs are its length squared.
    """
    c = _config(model)
    language = llama(c.text_config, batch, attention)
    grids = batch.get("image_grid_thw")
    if grids is None:
        return language
    v = c.vision_config
    unit = v.spatial_merge_size**2
    side = v.window_size // v.spatial_merge_size // v.patch_size
    rows = windowed = framed = 0
    for frames, height, width in grids.tolist():
        rows += frames * height * width
        framed += frames * (height * width) ** 2
        lengths = _window_lengths(height // v.spatial_merge_size, width // v.spatial_merge_size, side, unit)
        windowed += frames * sum(n * n for n in lengths)
    heads, head_width = v.num_heads, v.hidden_size // v.num_heads
    tower = convolution(
        rows * v.hidden_size, v.in_channels * v.temporal_patch_size * v.patch_size**2, into=False
    )
    for i in range(v.depth):
        pairs = framed if i in v.fullatt_block_indexes else windowed
        tower += (
            linear(rows, v.hidden_size, 3 * v.hidden_size)
            + attention_products(Pairs(pairs, pairs), heads, head_width, head_width, fused=_fused(v))
            + linear(rows, v.hidden_size, v.hidden_size)
            + gated_mlp(rows, v.hidden_size, v.intermediate_size)
        )
    merged = v.hidden_size * unit
    merger = linear(rows // unit, merged, merged) + linear(rows // unit, merged, v.out_hidden_size)
    return tower + merger + language


def mamba(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """The reference scan: one product of state and C a token; the recurrence itself is elementwise.

    The causal convolution is padded on both sides and cut afterwards: length + kernel − 1 outputs.
    """
    c = _config(model)
    samples, length = batch["input_ids"].shape
    rows, inner = samples * length, c.intermediate_size
    layer = (
        linear(rows, c.hidden_size, 2 * inner)
        + convolution(samples * inner * (length + c.conv_kernel - 1), c.conv_kernel)
        + linear(rows, inner, c.time_step_rank + 2 * c.state_size)
        + linear(rows, c.time_step_rank, inner)
        + linear(rows * inner, c.state_size, 1)
        + linear(rows, inner, c.hidden_size)
    )
    return layer * c.num_hidden_layers + linear(rows, c.hidden_size, c.vocab_size)


def mamba2(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """The reference chunked scan: five contractions over chunks (the last one padded to full length).

    Within a chunk C·Bᵀ and the result by the values; the state of each chunk; states carried over
    all chunks and the initial state; C by those states.
    """
    c = _config(model)
    samples, length = batch["input_ids"].shape
    rows, inner = samples * length, int(c.expand * c.hidden_size)
    mixed = inner + 2 * c.n_groups * c.state_size
    chunk, state, width = c.chunk_size, c.state_size, c.head_dim
    chunks = -(-length // chunk)
    blocks = samples * c.num_heads * chunks
    scan = (
        linear(blocks * chunk, state, chunk)
        + linear(blocks * chunk, chunk, width)
        + linear(blocks * width, chunk, state)
        + linear(samples * c.num_heads * (chunks + 1), chunks + 1, width * state)
        + linear(blocks * chunk, state, width)
    )
    layer = (
        linear(rows, c.hidden_size, inner + mixed + c.num_heads)
        + convolution(samples * mixed * (length + c.conv_kernel - 1), c.conv_kernel)
        + scan
        + linear(rows, inner, c.hidden_size)
    )
    return layer * c.num_hidden_layers + linear(rows, c.hidden_size, c.vocab_size)


def whisper(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """Two convolutions over the mel spectrogram (the second halves it), encoder, decoder, tied head."""
    c = _config(model)
    samples, mels, frames = batch["input_features"].shape
    target = batch["labels"].shape[1]
    source = (frames - 1) // 2 + 1
    fused, d = _fused(c, c.attention_dropout), c.d_model
    stem = convolution(samples * d * frames, 3 * mels, into=False) + convolution(samples * d * source, 3 * d)
    encoder = _encoder_layer(samples, source, d, c.encoder_attention_heads, c.encoder_ffn_dim, fused=fused)
    heads = c.decoder_attention_heads
    decoder = (
        _encoder_layer(
            samples,
            target,
            d,
            heads,
            c.decoder_ffn_dim,
            fused=fused,
            pairs=_decoder_side_pairs(samples, target, attention),
        )
        + linear(samples * target, d, d) * 2
        + linear(samples * source, d, d) * 2
        + attention_products(
            _plain_pairs(samples, target, source), heads, d // heads, d // heads, fused=fused
        )
    )
    head = linear(samples * target, d, c.vocab_size)
    return stem + encoder * c.encoder_layers + decoder * c.decoder_layers + head


def _halved(height: int, width: int) -> tuple[int, int]:
    """Spatial size after any odd kernel with stride 2 and 'same' padding."""
    return (height - 1) // 2 + 1, (width - 1) // 2 + 1


def resnet(model: Any, batch: Mapping[str, Any], attention: str = "full") -> Truth:
    """7×7 stem, pooling, four stages of two blocks; each stage but the first halves and widens."""
    c = _config(model)
    images, channels, height, width = batch["pixel_values"].shape
    height, width = _halved(height, width)
    total = convolution(images * c.widths[0] * height * width, channels * 49, into=False)
    height, width = _halved(height, width)
    before = c.widths[0]
    for stage, after in enumerate(c.widths):
        if stage:
            height, width = _halved(height, width)
        outputs = images * after * height * width
        total += convolution(outputs, before * 9) + convolution(outputs, after * 9) * 3
        if stage:
            total += convolution(outputs, before)
        before = after
    return total + linear(images, before, c.classes)
