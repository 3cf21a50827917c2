"""`truemfu count`: the FLOPs of one training step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import click
from click.shell_completion import CompletionItem

from ..convention import Attention, Convention
from ..errors import UsageError
from ..known_models import COMPARED, known_models
from ..sweep.sizes import SIZES
from .console import (
    SafeConsole,
    json_option,
    output,
    percent,
    print_json,
    say,
    short,
    table,
    working,
)
from .options import SIZE_NAMES, Amount, device_keys, older_names
from .plan import FP8_NOTE, PlanOptions, dtype_is_fp8, plan_of, show_plan, wanted_plan, why_no_peak

if TYPE_CHECKING:
    from ..flops import FlopCount, Target


def _complete_model(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completion of MODEL: the reference models and the well-known ones, then files."""
    names = [*SIZES, *(model.name for model in known_models())]
    named = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return named or [CompletionItem(incomplete, type="file")]


def _list_models(context: click.Context, parameter: click.Parameter, is_wanted: bool) -> None:
    """`--list`: the well-known models, then nothing else."""
    if not is_wanted or context.resilient_parsing:
        return
    columns = ("model", "also", "on huggingface.co", "parameters")
    names = table(*columns, texts=columns[:-1])
    for model in known_models():
        names.add_row(model.name, " ".join(model.also), model.hub, f"{model.parameters:,}")
    output().print(names)
    say(f"Sizes come from each model's config.json on huggingface.co; {COMPARED}.")
    context.exit()


@click.command(
    short_help="FLOPs of one training step, exact, without a GPU.", context_settings=older_names(SIZE_NAMES)
)
@click.argument("model", shell_complete=_complete_model)
@click.option("--batch", "samples", type=int, default=4, show_default=True, help="Samples in the batch.")
@click.option("--seq", "length", type=int, help="Tokens per sample.  [default: 512, or the model's limit]")
@click.option(
    "--dtype",
    help="fp64, fp32, fp16, bf16, or fp8 (FLOPs as in bf16, relative to the fp8 peak)."
    "  [default: bf16; a factory's model is not changed]",
)
@click.option(
    "--attention-convention",
    type=click.Choice(get_args(Attention)),
    default="full",
    show_default=True,
    help="Count all query-key pairs, or only those the mask allows.",
)
@click.option(
    "--attn-implementation",
    type=click.Choice(["sdpa", "eager", "flex_attention"]),
    help="Attention implementation of a Hugging Face model; does not change the FLOPs.  "
    "[default: the model's own]",
)
@click.option(
    "--lora",
    metavar="r=R,targets=A+B",
    help="Train LoRA adapters of rank R on the modules A and B; without targets: PEFT's choice.",
)
@click.option("--checkpointing", is_flag=True, help="Recompute activations in the backward pass.")
@click.option("--no-backward", is_flag=True, help="Only the forward pass.")
@click.option("--images", type=int, default=1, show_default=True, help="Images per sample; 0: text only.")
@click.option(
    "--image-size", type=int, help="Width and height of an image in pixels.  [default: the model's own]"
)
@click.option("--depth", type=int, default=3, show_default=True, help="Module levels shown in the table.")
@click.option(
    "--device",
    shell_complete=device_keys,
    help="The GPU whose peak is used for MFU: H100, 4090, cuda.  [default: this machine's]",
)
@click.option("--gpus", type=int, default=1, show_default=True, help="Number of GPUs that train the model.")
@click.option(
    "--tokens-per-second", type=Amount(example="6900"), help="Throughput of all GPUs together: gives the MFU."
)
@click.option("--mfu", type=Amount(most=1.0, example="0.4"), help="An MFU to plan with, from 0 to 1.")
@click.option(
    "--tokens", type=Amount(), help="Tokens to train on, such as 15e12 or 15T: gives days and cost."
)
@click.option("--price", type=Amount(example="2.50"), help="Price of a GPU hour, in any currency.")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_models,
    help="Show the well-known models that can be given by name, and exit.",
)
@json_option
@click.pass_context
def count(
    context: click.Context,
    /,
    model: str,
    samples: int,
    length: int | None,
    dtype: str | None,
    attention_convention: Any,
    attn_implementation: str | None,
    lora: str | None,
    checkpointing: bool,
    no_backward: bool,
    images: int,
    image_size: int | None,
    depth: int,
    as_json: bool,
    **planned: Any,
) -> None:
    """FLOPs of one training step of MODEL, exact, without weights and without a GPU.

    \b
    MODEL is one of
        gpt2 llama-3.1-8b 8b ...    a well-known open model (--list shows all)
        tiny small medium 1b        a reference model of the sweep
        config.json or its folder   a Hugging Face configuration (no download, no weights)
        ORG/NAME                    the same, from the local Hugging Face cache
        package.module:factory      a function that returns a module, or (module, batch)
    \b
    Examples
        truemfu count gpt2 --batch 8 --seq 1024
        truemfu count llama-3.1-8b --seq 8192 --attention-convention causal --lora r=16,targets=q_proj+v_proj
        truemfu count ./Qwen2.5-VL-7B/config.json --images 2 --image-size 672 --seq 2048
        truemfu count train:build_model --json | jq .model_flops
    \b
    MFU, days and cost without a run
        truemfu count 8b --seq 8192 --device H100 --tokens-per-second 6900
        truemfu count 405b --batch 1 --seq 8192 --device H100 --gpus 16384 \\
            --tokens 15T --mfu 0.4 --price 2.50
    """
    from ..flops import BatchRequest, BuildOptions, count_target, parse_dtype, parse_lora, resolve_target
    from ..sweep.worker.models import REFERENCE_MODELS, parameter_count

    if depth < 0:
        raise UsageError(f"depth must be at least 0; got {depth}")
    wanted = wanted_plan(PlanOptions(**planned))
    peak_dtype = "fp8" if dtype is not None and dtype_is_fp8(dtype) else None
    request = BatchRequest(samples=samples, length=length, images=images, image_size=image_size)
    options = BuildOptions(
        dtype=None if dtype is None or peak_dtype else parse_dtype(dtype, also=("fp8",)),
        attn_implementation=attn_implementation,
        checkpointing=checkpointing,
        lora=None if lora is None else parse_lora(lora),
    )
    with working(f"building {model}"):
        target = resolve_target(model, request, options, named=REFERENCE_MODELS)
    if target.brought_batch:
        _report_unused_options(context, model)
    with working(f"counting {model}"):
        convention = Convention(attention=attention_convention)
        flops = count_target(target, convention=convention, backward=not no_backward)
    parameters = parameter_count(target.model)
    trained = sum(p.numel() for p in target.model.parameters() if p.requires_grad)
    plan = None if wanted is None else plan_of(wanted, target, flops, peak_dtype)
    if as_json:
        head = {"model": model, "model_class": type(target.model).__name__, "parameters": parameters}
        if lora is not None:
            head["trained_parameters"] = trained
        sizes = {"batch": target.samples, "seq": target.length, "shapes": target.tensor_shapes}
        planned_keys = {} if plan is None else {"plan": plan.as_dict()}
        print_json({**head, **sizes, **flops.as_dict(), **planned_keys})
        return
    console = output()
    share = f", {trained:,} trained" if lora is not None else ""
    _show(console, target, flops, f"{parameters:,} parameters{share}", depth)
    if peak_dtype is not None:
        console.print(FP8_NOTE)
    if wanted is not None and plan is not None:
        no_peak = why_no_peak(wanted, flops.by_dtype if peak_dtype is None else [peak_dtype])
        show_plan(console, plan, target.length, no_peak)


def _report_unused_options(context: click.Context, model: str) -> None:
    given = [
        option
        for name, option in (("samples", "--batch"), ("length", "--seq"), ("images", "--images"))
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        say(f"note: {model} provides its own batch; {', '.join(given)} not used", err=True)


def _show(console: SafeConsole, target: Target, flops: FlopCount, parameters: str, depth: int) -> None:
    heading = console.render_str(target.name, style="bold")
    console.print(heading, f" {type(target.model).__name__}, {parameters}")
    console.print(f"batch: {target.shapes}\n")

    totals = table("one training step", "FLOPs", "", "of the model")
    rows = {
        "forward": flops.forward,
        "backward": flops.backward,
        "model = forward + backward": flops.model_flops,
        "recompute": flops.recompute,
        "hardware = model + recompute": flops.hardware_flops,
    }
    for name, value in rows.items():
        totals.add_row(name, f"{value:,}", short(value), percent(value, flops.model_flops))
    console.print(totals, "")

    modules = table("module", "times", "FLOPs", "", "of the model")
    for path, (alike, value) in _by_module(flops.by_module, depth).items():
        modules.add_row(path, str(alike), f"{value:,}", short(value), percent(value, flops.model_flops))
    if modules.row_count:
        console.print(modules, "")
    if len(flops.by_dtype) > 1:
        dtypes = table("dtype", "FLOPs", "of the model")
        for name, value in flops.by_dtype.items():
            dtypes.add_row(name, f"{value:,}", percent(value, flops.model_flops))
        console.print(dtypes, "")
    if flops.uncounted:
        missing = table("not counted: no formula", "calls")
        for name, calls in flops.uncounted.items():
            missing.add_row(name, f"{calls:,}")
        console.print(missing, "")

    pairs = "all pairs" if flops.convention.attention == "full" else "the pairs the mask allows"
    console.print(f"A multiply-add is 2 FLOPs; attention counts {pairs}. Method: {flops.method}.")
    for note in flops.notes:
        console.print(f"note: {note}")


def _by_module(by_module: Mapping[str, int], depth: int) -> dict[str, tuple[int, int]]:
    """Modules down to `depth`; the members of a list of layers are summed under `*`."""
    rows: dict[str, tuple[int, int]] = {}
    for path, value in by_module.items():
        if path and value and path.count(".") < depth:
            name = re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", path)
            alike, total = rows.get(name, (0, 0))
            rows[name] = (alike + 1, total + value)
    return rows
