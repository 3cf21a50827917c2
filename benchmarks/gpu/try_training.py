"""Trains one model on synthetic batches, for `try_ledger.py`; with --write NAME by hand with that remedy.

    python benchmarks/gpu/try_training.py llama --steps 30 --write fused_optimizer --out times.json

Written as a user would write it, without truemfu. --out gets the times of the steps after warm-up, by CUDA
events, in seconds. It trains on without --steps.
"""

import argparse
import contextlib
import itertools
import json
import sys
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
parser.add_argument("--steps", type=int)
parser.add_argument("--warm-up", type=int, default=10)
parser.add_argument("--out")
options = parser.parse_args()
written, device = options.write, "cpu" if options.tiny else "cuda"
torch.manual_seed(0)
if "tf32" in written:
    torch.set_float32_matmul_precision("high")
if "cudnn_benchmark" in written:
    torch.backends.cudnn.benchmark = True
if "attention" in written and options.line.startswith("torch."):
    exec(options.line)


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


def from_loader(size, batch):
    loader = torch.utils.data.DataLoader(
        Images(size),
        batch_size=batch,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
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


def build():
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
        return model, from_loader(sized(224, 64), sized(64, 4)), False
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


def main():
    model, batches, has_autocast = build()
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
    marks = []
    steps = range(options.warm_up + options.steps) if options.steps else itertools.count()
    for step, batch in zip(steps, batches, strict=False):
        if "channels_last" in written:
            batch = channels_last(batch)
        is_cast = has_autocast or "autocast_bf16" in written
        with torch.autocast(device, torch.bfloat16) if is_cast else contextlib.nullcontext():
            loss = called(**batch).loss if isinstance(batch, dict) else called(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if options.out and step >= options.warm_up - 1:
            marks.append(mark())
    if options.out:
        with open(options.out, "w") as file:
            json.dump(seconds_between(marks), file)


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
    sys.exit(main())
