"""Trains one model on synthetic batches, for `try_ledger.py`; with --write NAME by hand with that remedy.

    python benchmarks/gpu/try_training.py llama
    python benchmarks/gpu/try_training.py llama --write fused_optimizer --out times.json

Written as a user would write it, without truemfu. With --out the unchanged program and the written one take
turns in this process, and the file gets the seconds of the steps of each, by CUDA events; else it trains on.
"""

import argparse
import contextlib
import itertools
import json
import time

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("--tiny", action="store_true")
parser.add_argument("--write", nargs="*", default=[])
parser.add_argument("--line", default="", help="of remedies whose line depends on the model")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--turns", type=int, default=8)
parser.add_argument("--warm-up", type=int, default=10)
parser.add_argument("--out")
options = parser.parse_args()
device = "cpu" if options.tiny else "cuda"
TURN = 10


def sized(large, tiny):
    return tiny if options.tiny else large


class UNet(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        before = [width, *widths[:-1]]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(map(self.block, before, widths))
        self.middle = self.block(widths[-1], widths[-1])
        self.up = nn.ModuleList(map(self.block, [2 * w for w in widths[::-1]], before[::-1]))
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def block(inner, outer):
        parts = []
        for width in (inner, outer):
            parts += [nn.Conv2d(width, outer, 3, padding=1), nn.GroupNorm(8, outer), nn.SiLU()]
        return nn.Sequential(*parts)

    def forward(self, x):
        x, kept = self.stem(x), []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


class Images(torch.utils.data.Dataset):
    def __init__(self, size):
        self.pool = torch.randn(16, 3, size, size)

    def __len__(self):
        return 1 << 20

    def __getitem__(self, i):
        return {"pixel_values": self.pool[i % 16], "labels": i % 10}


def from_loader(size, batch, written=()):
    workers = options.workers if "loader_workers" in written else 0
    loader = torch.utils.data.DataLoader(
        Images(size),
        batch_size=batch,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory="pin_memory" in written,
    )
    for found in loader:
        yield {name: value.to(device) for name, value in found.items()}


def tokens(words, batch, length):
    draws = torch.Generator().manual_seed(1)
    while True:
        ids = torch.randint(words, (batch, length), generator=draws).to(device)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def of_transformers(name, shape, extra):
    import transformers

    config = getattr(transformers, f"{name[0]}Config")(**shape, **extra)
    return getattr(transformers, f"{name[0]}For{name[1]}")(config).to(device)


def decoder(name, width, inner, layers, batch, length, **extra):
    heads = width // sized(128, 16)
    shape = {
        "vocab_size": sized(32000, 128),
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "use_cache": False,
    }
    model = of_transformers((name, "CausalLM"), shape, extra).bfloat16()
    return model, tokens(shape["vocab_size"], batch, length)


def build(written):
    """The model, its batches, and whether the script has autocast of its own."""
    if options.model in ("llama", "llama_checkpointed"):
        model, batches = decoder("Llama", *sized((2048, 5632, 8, 8, 1024), (64, 128, 2, 2, 32)))
        if options.model == "llama_checkpointed" and "no_checkpointing" not in written:
            model.gradient_checkpointing_enable()
        return model, batches, False
    if options.model == "moe":
        experts = {"num_local_experts": sized(8, 4)}
        return *decoder("Mixtral", *sized((1024, 2048, 6, 8, 512), (64, 128, 2, 2, 32)), **experts), False
    if options.model == "bert":
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        shape = dict(zip(names, sized((30522, 768, 8, 12, 3072), (130, 64, 2, 4, 128)), strict=True))
        model = of_transformers(("Bert", "MaskedLM"), shape, {}).bfloat16()
        return model, tokens(shape["vocab_size"], *sized((64, 256), (2, 32))), False
    if options.model == "vit":
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "image_size")
        shape = dict(zip(names, sized((768, 12, 12, 3072, 224), (64, 2, 4, 128, 32)), strict=True))
        model = of_transformers(("ViT", "ImageClassification"), shape, {"num_labels": 1000})
        return model, itertools.repeat(next(from_loader(shape["image_size"], sized(128, 4)))), True
    if options.model == "convnext":
        shape = sized({}, {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 2, 1]})
        model = of_transformers(("ConvNext", "ImageClassification"), shape, {"num_labels": 1000})
        return model, from_loader(sized(224, 64), sized(64, 4), written), False
    batch, size = sized((16, 128), (2, 16))
    draws = torch.Generator().manual_seed(1)
    return (
        UNet(*sized((64, 4), (8, 2))).to(device),
        itertools.repeat(torch.randn(batch, 3, size, size, generator=draws).to(device)),
        False,
    )


def channels_last(value):
    if isinstance(value, dict):
        return {name: channels_last(one) for name, one in value.items()}
    return value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value


def train(written):
    """Trains with these remedies in the program, one step each time it is asked for the next."""
    torch.manual_seed(0)
    model, batches, has_autocast = build(written)
    flags = {name: True for name in ("fused", "foreach") if f"{name}_optimizer" in written}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **flags)
    if "channels_last" in written:
        model = model.to(memory_format=torch.channels_last)
    if "compile_blocks" in written or ("attention" in written and options.line.startswith("model.")):
        exec(options.line)
    called = model
    if "compile" in written:
        called = torch.compile(model)
    if "cuda_graphs" in written:
        called = torch.compile(model, mode="reduce-overhead")
    for batch in batches:
        if "channels_last" in written:
            batch = channels_last(batch)
        is_cast = has_autocast or "autocast_bf16" in written
        with torch.autocast(device, torch.bfloat16) if is_cast else contextlib.nullcontext():
            loss = called(**batch).loss if isinstance(batch, dict) else called(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def switch_to(written):
    """The settings of torch that one of the two programs has at its head."""
    torch.set_float32_matmul_precision("high" if "tf32" in written else "highest")
    torch.backends.cudnn.benchmark = "cudnn_benchmark" in written
    for name in ("cudnn", "flash", "mem_efficient"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(True)
    if "attention" in written and options.line.startswith("torch."):
        exec(options.line)


def take_turns():
    """Seconds of steps of the unchanged program and of the written one. The first steps of a turn are left
    out: the device's queue fills, and batches wait that workers loaded in the other's turn."""
    lead_in = max(2, 3 * options.workers)
    programs = {"unchanged": [], "written": options.write}
    running, marks = {}, {name: [] for name in programs}
    for turn in range(1 + options.turns):
        for name in sorted(programs, reverse=turn % 2 == 1):
            switch_to(programs[name])
            running.setdefault(name, train(programs[name]))
            for _ in range(lead_in if turn else options.warm_up):
                next(running[name])
            if turn:
                marks[name].append([mark()])
                for _ in range(TURN):
                    next(running[name])
                    marks[name][-1].append(mark())
    return {name: [s for turn in turns for s in seconds_between(turn)] for name, turns in marks.items()}


def mark():
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(marks):
    if device == "cpu":
        return [after - before for before, after in itertools.pairwise(marks)]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


if __name__ == "__main__":
    if options.out:
        times = take_turns()
        with open(options.out, "w") as file:
            json.dump(times, file)
    else:
        for _ in train(options.write):
            pass
