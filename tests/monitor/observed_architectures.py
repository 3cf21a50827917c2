"""Small models of many architectures, each trained on batches of several shapes: more of `observed_steps.py`.

Written in plain torch, so that no library decides what is tried; those of transformers come from the public
cases of benchmarks/cases.py, which are configurations alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tests.monitor.observed_steps import Program, loop, mean_square
from torch import Tensor, nn
from torch.nn import functional as F

ARCHITECTURES: list[Program] = []


def architecture(function: Any) -> Any:
    ARCHITECTURES.append(Program(function.__name__.replace("_", "-"), function))
    return function


def images(sizes: list[tuple[int, int, int]], channels: int = 3) -> list[Tensor]:
    return [torch.randn(samples, channels, height, width) for samples, height, width in sizes]


def sequences(shapes: list[tuple[int, int]], width: int = 16) -> list[Tensor]:
    return [torch.randn(samples, length, width) for samples, length in shapes]


EVEN = [
    (2, 16, 16),
    (2, 16, 16),
    (2, 32, 16),
    (3, 24, 24),
    (2, 16, 16),
    (1, 40, 16),
    (3, 24, 24),
    (2, 32, 16),
]
ODD = [(2, 17, 19), (2, 17, 19), (3, 21, 16), (1, 33, 20), (2, 17, 19), (3, 21, 16)]
LENGTHS = [(2, 12), (2, 12), (3, 7), (2, 20), (4, 5), (3, 7), (2, 12), (1, 31)]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = Attention(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Skip connections that need even sizes, attention in the middle, a time embedding."""

    def __init__(self, attends: bool = True) -> None:
        super().__init__()
        self.time = nn.Linear(4, 16)
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.attention = Attention(16) if attends else None
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        a = self.down1(x).relu()
        b = self.down2(F.max_pool2d(a, 2)).relu()
        if time is not None:
            b = b + self.time(time)[:, :, None, None]
        if self.attention is not None:
            b = b + self.attention(b.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, b.shape[2:])
        return self.last(torch.cat([self.up(b), a], 1))  # type: ignore[no-any-return]


@architecture
def unet_of_many_sizes(run: Any) -> None:
    sizes = [(2, 16 + 2 * (3 * n % 11), 16 + 2 * (5 * n % 7)) for n in range(40)]
    loop(run, UNet(attends=False), images(sizes))


@architecture
def unet_with_attention_and_time(run: Any) -> None:
    loop(run, UNet(), images(EVEN), lambda m, x: mean_square(m(x, torch.randn(len(x), 4))))


@architecture
def diffusion_transformer(run: Any) -> None:
    class DiT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.modulation = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(8, 32)
            self.blocks, self.out = nn.ModuleList([Block(), Block()]), nn.Linear(16, 48)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).transpose(1, 2)
            shift, scale = self.modulation(time)[:, None].chunk(2, -1)
            for block in self.blocks:
                x = block(x * (1 + scale) + shift)
            return self.out(x)  # type: ignore[no-any-return]

    loop(run, DiT(), images(EVEN), lambda m, x: mean_square(m(x, torch.randn(len(x), 8))))


@architecture
def segmentation_with_skips(run: Any) -> None:
    class Fcn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
            self.side, self.head = nn.Conv2d(8, 5, 1), nn.Conv2d(16, 5, 1)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x).relu()
            b = self.head(self.b(a).relu())
            y = F.interpolate(b, size=a.shape[2:]) + self.side(a)
            return F.interpolate(y, size=x.shape[2:])

    loop(run, Fcn(), images(ODD))


@architecture
def detection_with_lists_of_images(run: Any) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.boxes = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 4)

        def forward(self, pictures: list[Tensor]) -> Tensor:
            return torch.cat([self.boxes(self.body(p[None]).flatten(2).transpose(1, 2)) for p in pictures], 1)

    run_batches = [tuple(torch.randn(3, 9 + n % 3, 11 + k) for k in range(1 + n % 3)) for n in range(8)]
    loop(run, Detector(), run_batches, lambda m, x: mean_square(m(list(x))))


@architecture
def pyramid_of_features(run: Any) -> None:
    class Fpn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList(nn.Conv2d(c, 8, 3, stride=2, padding=1) for c in (3, 8, 8))
            self.lateral, self.head = nn.Conv2d(8, 6, 1), nn.Conv2d(6, 4, 3, padding=1)

        def forward(self, x: Tensor) -> list[Tensor]:
            levels = []
            for stage in self.stages:
                x = stage(x).relu()
                levels.append(self.lateral(x))
            for upper in range(len(levels) - 1, 0, -1):
                below = levels[upper - 1]
                levels[upper - 1] = below + F.interpolate(levels[upper], size=below.shape[2:])
            return [self.head(level) for level in levels]

    loop(run, Fpn(), images(ODD), lambda m, x: sum(map(mean_square, m(x))))  # type: ignore[arg-type, return-value]


def _graphs() -> list[tuple[Tensor, Tensor]]:
    return [
        (torch.randn(nodes, 8), torch.randint(nodes, (2, edges)))
        for nodes, edges in ((10, 20), (10, 20), (13, 31), (10, 26), (7, 20), (13, 31), (20, 50))
    ]


@architecture
def graph_network_by_scatter(run: Any) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message, self.update = nn.Linear(16, 12), nn.Linear(20, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            m = self.message(torch.cat([x[edges[0]], x[edges[1]]], 1)).relu()
            return self.update(torch.cat([x, torch.zeros(len(x), 12).index_add(0, edges[1], m)], 1))  # type: ignore

    loop(run, Graph(), _graphs(), lambda m, b: mean_square(m(*b)))


@architecture
def graph_network_by_sparse_products(run: Any) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 12), nn.Linear(12, 4)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            ones = torch.ones(edges.shape[1])
            adjacency = torch.sparse_coo_tensor(edges, ones, (len(x), len(x))).coalesce()
            return torch.sparse.mm(adjacency, self.two(torch.sparse.mm(adjacency, self.one(x)).relu()))

    loop(run, Graph(), _graphs(), lambda m, b: mean_square(m(*b)))


@architecture
def graph_attention(run: Any) -> None:
    class Gat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value, self.score = nn.Linear(8, 12), nn.Linear(24, 1)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            v = self.value(x)
            weight = self.score(torch.cat([v[edges[0]], v[edges[1]]], 1)).sigmoid()
            return torch.zeros(len(x), 12).index_add(0, edges[1], v[edges[0]] * weight)

    loop(run, Gat(), _graphs(), lambda m, b: mean_square(m(*b)))


@architecture
def speech_with_lengths(run: Any) -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub1, self.sub2 = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 4, 3, stride=2)
            self.into, self.block, self.out = nn.Linear(4 * 3, 16), Block(), nn.Linear(16, 9)

        def forward(self, sound: Tensor, lengths: Tensor) -> Tensor:
            x = self.sub2(self.sub1(sound[:, None]).relu()).relu()
            x = self.block(self.into(x.transpose(1, 2).flatten(2)))
            mask = torch.arange(x.shape[1])[None] < (lengths // 4)[:, None]
            return self.out(x) * mask[..., None]  # type: ignore[no-any-return]

    shapes = [(2, 40), (2, 40), (3, 57), (2, 33), (3, 57), (2, 64), (2, 40)]
    batches = [(torch.randn(n, t, 16), torch.randint(t // 2, t, (n,))) for n, t in shapes]
    loop(run, Speech(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def selective_scan(run: Any) -> None:
    class Mamba(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.conv = nn.Linear(16, 48), nn.Conv1d(24, 24, 4, groups=24, padding=3)
            self.params, self.out = nn.Linear(24, 2 * 4 + 24), nn.Linear(24, 16)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            x, gate = self.into(x).chunk(2, -1)
            x = F.silu(self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2))
            b, c, delta = self.params(x).split([4, 4, 24], -1)
            state, outputs = torch.zeros(len(x), 24, 4), []
            for t in range(length):
                state = state * 0.9 + (F.softplus(delta[:, t]) * x[:, t])[..., None] * b[:, t, None]
                outputs.append((state @ c[:, t, :, None])[..., 0])
            return self.out(torch.stack(outputs, 1) * F.silu(gate))  # type: ignore[no-any-return]

    loop(run, Mamba(), sequences(LENGTHS))


class Experts(nn.Module):
    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.router, self.grouped = nn.Linear(16, 4), grouped
        self.up = nn.Parameter(torch.randn(4, 16, 32) * 0.1)
        self.down = nn.Parameter(torch.randn(4, 32, 16) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        weight, expert = self.router(x).softmax(-1).max(-1)
        if self.grouped:
            order = expert.argsort()
            ends = torch.bincount(expert, minlength=4).cumsum(0).to(torch.int32)
            y = torch._grouped_mm(x[order].bfloat16(), self.up.bfloat16(), offs=ends).relu()
            y = torch._grouped_mm(y, self.down.bfloat16(), offs=ends).float()
            return torch.zeros_like(x).index_add(0, order, y) * weight[:, None]
        y = torch.zeros_like(x)
        for n in range(4):
            rows = (expert == n).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, (x[rows] @ self.up[n]).relu() @ self.down[n])
        return y * weight[:, None]


@architecture
def experts_in_a_loop(run: Any) -> None:
    loop(run, Experts(grouped=False), sequences(LENGTHS))


def grouped_experts(run: Any) -> None:
    loop(run, Experts(grouped=True), sequences(LENGTHS))


if hasattr(torch, "_grouped_mm"):
    architecture(grouped_experts)


@architecture
def top_k_experts_with_capacity(run: Any) -> None:
    class Capacity(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4)
            self.up = nn.Parameter(torch.randn(4, 16, 24) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(0, 1)
            room = 1 + len(x) // 3
            chosen = self.router(x).topk(min(room, len(x)), 0).indices.T
            return torch.bmm(x[chosen], self.up)

    loop(run, Capacity(), sequences(LENGTHS))


@architecture
def packed_sequences_by_cumulative_lengths(run: Any) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.out = Block(), nn.Linear(16, 5)

        def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
            bounds = cu_seqlens.tolist()
            parts = [self.block(x[None, a:b])[0] for a, b in pairwise(bounds)]
            return self.out(torch.cat(parts))  # type: ignore[no-any-return]

    cuts = ([0, 5, 20], [0, 10, 20], [0, 5, 20], [0, 3, 9, 20], [0, 20], [0, 10, 20], [0, 7, 13])
    batches = [(torch.randn(cut[-1], 16), torch.tensor(cut)) for cut in cuts]
    loop(run, Packed(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def lstm_by_cells(run: Any) -> None:
    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = nn.LSTMCell(16, 12), nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = None
            for t in range(x.shape[1]):
                state = self.cell(x[:, t], state)
            return self.out(state[0])  # type: ignore[no-any-return, index]

    loop(run, Cells(), sequences(LENGTHS))


@architecture
def lstm_in_one_operator(run: Any) -> None:
    """Input gates, hidden gates; no gradient for the input, nor for the first hidden state."""

    class Lstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 12, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0]  # type: ignore[no-any-return]

    def call(model: nn.Module, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        run.expect(2 * samples * 48 * (16 * length * 2 + 12 * length * 2 + 12 * (length - 1)))
        return mean_square(model(x))

    loop(run, Lstm(), sequences(LENGTHS), call)


@architecture
def packed_lstm(run: Any) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 12)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x.transpose(0, 1), lengths, enforce_sorted=False)
            return self.lstm(packed)[0].data  # type: ignore[no-any-return]

    batches = [(x, torch.randint(1, x.shape[1] + 1, (len(x),))) for x in sequences(LENGTHS[:-1])]
    loop(run, Packed(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def bidirectional_gru(run: Any) -> None:
    class Gru(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.out = nn.GRU(16, 10, 2, bidirectional=True, batch_first=True), nn.Linear(20, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.gru(x)[0])  # type: ignore[no-any-return]

    loop(run, Gru(), sequences(LENGTHS))


@architecture
def encoder_decoder(run: Any) -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
    batches = [(x, torch.randn(len(x), 4 + n % 3, 16)) for n, x in enumerate(sequences(LENGTHS))]
    loop(run, model, batches, lambda m, b: mean_square(m(*b)))


@architecture
def causal_language_model(run: Any) -> None:
    class Lm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.block, self.head = nn.Embedding(40, 16), Block(), nn.Linear(16, 40, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.block(self.table(ids)))  # type: ignore[no-any-return]

    loop(run, Lm(), [torch.randint(40, shape) for shape in LENGTHS])


@architecture
def residual_network(run: Any) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 7, stride=2, padding=3)
            self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.out = nn.BatchNorm2d(8), nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.norm(self.b(self.a(x).relu()))
            return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]

    loop(run, Residual(), images(ODD))


@architecture
def separable_convolutions(run: Any) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 1), nn.Conv2d(12, 12, 3, groups=12, dilation=2), nn.Conv2d(12, 6, 1, groups=3)
    )
    loop(run, model, images(ODD))


@architecture
def squeeze_and_excite(run: Any) -> None:
    class Se(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate = nn.Conv2d(3, 8, 3), nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 8))

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return x * self.gate(x.mean((2, 3))).sigmoid()[:, :, None, None]  # type: ignore[no-any-return]

    loop(run, Se(), images(ODD))


@architecture
def video_convolutions(run: Any) -> None:
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv3d(4, 3, 3, stride=2))
    shapes = [(1, 5, 8, 9), (1, 5, 8, 9), (2, 6, 7, 7), (1, 7, 8, 9), (2, 6, 7, 7)]
    loop(run, model, [torch.randn(n, 2, t, h, w) for n, t, h, w in shapes])


@architecture
def dilated_audio_convolutions(run: Any) -> None:
    model = nn.Sequential(*(nn.Conv1d(16, 16, 2, dilation=2**n) for n in range(3)))
    loop(
        run,
        model,
        sequences([*LENGTHS[:3], (2, 20), (1, 31), (2, 12)]),
        lambda m, x: mean_square(m(F.pad(x.transpose(1, 2), (7, 0)))),
    )


@architecture
def variational_autoencoder(run: Any) -> None:
    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.code = nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.Conv2d(8, 8, 1)
            self.up = nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            mean, spread = self.code(self.down(x).relu()).chunk(2, 1)
            return self.up(mean + torch.randn_like(mean) * spread.exp())  # type: ignore[no-any-return]

    loop(run, Vae(), images(EVEN))


@architecture
def mixer(run: Any) -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.channels = nn.Linear(9, 9), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.channels(x + self.tokens(x.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]

    loop(run, Mixer(), sequences([(2, 9), (3, 9), (5, 9), (2, 9), (1, 9)]))


@architecture
def perceiver(run: Any) -> None:
    class Perceiver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents, self.kv = nn.Parameter(torch.randn(1, 4, 16)), nn.Linear(16, 32)
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            k, v = self.kv(x).chunk(2, -1)
            q = self.latents.expand(len(x), -1, -1)
            return self.block(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])  # type: ignore

    loop(run, Perceiver(), sequences(LENGTHS))


@architecture
def linear_attention(run: Any) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return q.softmax(-1) @ (k.softmax(1).transpose(1, 2) @ v)  # type: ignore[no-any-return]

    loop(run, Linear(), sequences(LENGTHS))


@architecture
def windowed_attention(run: Any) -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention(16)

        def forward(self, x: Tensor) -> Tensor:
            samples, length, _ = x.shape
            x = F.pad(x, (0, 0, 0, -length % 4))
            return self.attention(x.reshape(-1, 4, 16)).reshape(samples, -1, 16)[:, :length]  # type: ignore

    loop(run, Windows(), sequences(LENGTHS))


@architecture
def eager_attention_with_a_mask(run: Any) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return self.attention(x, x, x, attn_mask=mask)[0]  # type: ignore[no-any-return]

    loop(run, Masked(), sequences(LENGTHS))


@architecture
def points_in_a_set(run: Any) -> None:
    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each, self.whole = nn.Conv1d(16, 24, 1), nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.whole(self.each(x.transpose(1, 2)).amax(-1))  # type: ignore[no-any-return]

    loop(run, Points(), sequences(LENGTHS))


@architecture
def weights_made_by_a_network(run: Any) -> None:
    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hyper = nn.Linear(16, 16 * 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.hyper(x.mean(1)).view(-1, 16, 6))

    loop(run, Hyper(), sequences(LENGTHS))


@architecture
def solver_with_data_dependent_steps(run: Any) -> None:
    class Ode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.field = nn.Linear(16, 16)

        def forward(self, x: Tensor, steps: int) -> Tensor:
            for _ in range(steps):
                x = x + self.field(x).tanh() / steps
            return x

    batches = [(x, 2 + n % 4) for n, x in enumerate(sequences(LENGTHS))]
    loop(run, Ode(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def two_towers(run: Any) -> None:
    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.picture, self.text = nn.Conv2d(3, 12, 4, stride=4), nn.Linear(16, 12)

        def forward(self, picture: Tensor, text: Tensor) -> Tensor:
            return self.picture(picture).mean((2, 3)) @ self.text(text.mean(1)).T  # type: ignore[no-any-return]

    batches = [
        (torch.randn(n, 3, 8 + 4 * (k % 2), 8), torch.randn(n, 3 + k, 16))
        for k, n in enumerate((2, 2, 3, 4, 2))
    ]
    loop(run, Clip(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def image_and_text_model(run: Any) -> None:
    class Multimodal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.block, self.head = nn.Conv2d(3, 16, 4, stride=4), Block(), nn.Linear(16, 30)

        def forward(self, x: Tensor, picture: Tensor | None = None) -> Tensor:
            if picture is not None:
                x = torch.cat([self.vision(picture).flatten(2).transpose(1, 2), x], 1)
            return self.head(self.block(x))  # type: ignore[no-any-return]

    batches = [
        (x, torch.randn(len(x), 3, 8, 8 + 4 * (n % 2)) if n % 3 else None)
        for n, x in enumerate(sequences(LENGTHS))
    ]
    loop(run, Multimodal(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def decoding_with_a_kept_cache(run: Any) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor, cache: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if cache is not None:
                k, v = torch.cat([cache, k], 1), torch.cat([cache, v], 1)
            return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

    batches = [
        (x, torch.randn(len(x), 2 + n % 4, 16) if n % 2 else None) for n, x in enumerate(sequences(LENGTHS))
    ]
    loop(run, Cached(), batches, lambda m, b: mean_square(m(*b)))


@architecture
def convolution_of_kernels_made_of_the_input(run: Any) -> None:
    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = nn.Linear(3, 3 * 9)

        def forward(self, x: Tensor) -> Tensor:
            samples, channels, height, width = x.shape
            kernels = self.kernel(x.mean((2, 3))).view(-1, 1, 3, 3)
            y = F.conv2d(x.reshape(1, -1, height, width), kernels, groups=samples * channels)
            return y.view(samples, channels, *y.shape[2:])

    loop(run, Dynamic(), images(ODD))


@architecture
def unfolded_patches(run: Any) -> None:
    class Unfolded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 27) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ok,nkl->nol", self.weight, F.unfold(x, 3))

    loop(run, Unfolded(), images(ODD))


@architecture
def token_loops_with_early_ends(run: Any) -> None:
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(16, 16)

        def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
            state = torch.zeros(len(x), 16)
            for t in range(max(lengths)):
                alive = [n for n, length in enumerate(lengths) if length > t]
                state = state.index_copy(0, torch.tensor(alive), self.cell(x[alive, t], state[alive]))
            return state

    batches = [
        (x, [1 + (n + k) % x.shape[1] for k in range(len(x))]) for n, x in enumerate(sequences(LENGTHS))
    ]
    loop(run, Loops(), batches, lambda m, b: mean_square(m(*b)))
