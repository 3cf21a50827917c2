"""`truemfu check`: a second opinion on a logged MFU or TFLOP/s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click

from ..check.choices import peak_of
from ..check.conventions import Work, work_of, work_of_sizes
from ..check.logged import Figure, Logged
from ..check.readers import read_log
from ..check.texts import as_dict, facts, figure_rows, notes, sentences
from ..check.verdict import Opinion, Peak, opinion_of
from ..convention import Attention
from ..errors import UsageError
from ..hardware.detect import dtype_name, find_spec, override_flops_per_s
from ..text import on_one_line
from .console import FilePath, json_option, output, print_json, table, working
from .options import SIZE_NAMES, Amount, device_keys, device_of_table, older_names

_DISAGREES, _UNDECIDED = 1, 3


def _figure_option(name: str, *, help: str, scale: float = 1.0) -> Callable[..., Any]:
    """An option with a positive number, which keeps the digits that it was printed with."""

    def convert(context: click.Context, option: click.Parameter, text: str | None) -> Figure | None:

        try:
            return None if text is None else Figure.of(text.removesuffix("%"), scale)
        except UsageError as error:
            raise click.BadParameter(str(error), context, option) from error

    return click.option(name, metavar="NUMBER", callback=convert, help=help)


@click.command(
    short_help="Check a logged MFU or TFLOP/s, and explain it where it differs.",
    context_settings=older_names(SIZE_NAMES),
)
@click.argument("log", required=False, type=FilePath(dir_okay=False))
@_figure_option("--mfu", scale=0.01, help="The logged MFU in percent, as printed: 41.20.")
@_figure_option("--tflops", help="The logged TFLOP/s of one device, as printed.")
@click.option("--model", help="The model, as `truemfu count` takes it: 8b, ORG/NAME, config.json, tiny.")
@click.option(
    "--parameters",
    type=Amount(example="7B"),
    help="Number of parameters, if there is no configuration of the model.",
)
@click.option("--layers", type=click.IntRange(1), help="Layers, with --parameters: for attention.")
@click.option("--hidden", type=click.IntRange(1), help="Width of a layer, with --parameters: for attention.")
@click.option("--batch", type=click.IntRange(1), help="Samples of a step over all devices.")
@click.option("--seq", type=click.IntRange(1), help="Tokens per sample.")
@click.option("--gpus", type=click.IntRange(1), help="Number of devices that train the model.")
@click.option("--device", shell_complete=device_keys, help="The device: H100, 4090, NVIDIA A100-SXM4-80GB.")
@click.option("--dtype", default="bf16", show_default=True, help="dtype of the products.")
@_figure_option("--tokens-per-second", help="Logged throughput of all devices together.")
@_figure_option("--step-time", help="Seconds of a step.")
@_figure_option("--part-time", help="Seconds of a part of the step that may have been timed.")
@click.option(
    "--padding",
    type=click.FloatRange(0, 100, max_open=True),
    help="Percent of the tokens that are padding.",
)
@click.option(
    "--attention-convention",
    type=click.Choice(get_args(Attention)),
    help="The pairs of attention that should count; the other convention is then a fault.  [default: both]",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 50),
    default=1.0,
    show_default=True,
    help="Percent by which a figure that agrees may differ.",
)
@json_option
def check(
    log: Path | None,
    model: str | None,
    parameters: float | None,
    layers: int | None,
    hidden: int | None,
    device: str | None,
    dtype: str,
    attention_convention: Any,
    tolerance: float,
    as_json: bool,
    **given: Any,
) -> None:
    """Compute a logged MFU or TFLOP/s again, and say what is wrong with it where it differs.

    Known ways to count FLOPs, peaks, numbers of devices and times are combined. Those that give the logged
    figure within the rounding of its digits are its explanation; if there is none, it is unexplained.

    \b
    LOG is the output or the metrics of torchtitan, Megatron-LM, NeMo, verl, nanochat, nanoGPT, prime-rl,
    MaxText, TRL, Composer or Lightning (text, CSV, JSON lines, an export of W&B), or trainer_state.json of
    transformers. What it does not tell is given by options; an option wins over the log.

    \b
    Examples
        truemfu check train.log --model llama-3.1-8b --seq 8192 --device H100
        truemfu check --mfu 88.32 --tflops 275.6 --device B300
        truemfu check --mfu 13.44 --model d20/config.json --batch 256 --seq 2048 --step-time 13.77673 \\
            --device 4090
        truemfu check trainer_state.json --model qwen3-0.6b --seq 1024 --padding 35 --json

    \b
    Exit code
        0   every logged figure agrees
        1   one differs, explained or not, or an MFU is above 100 %
        2   wrong arguments, or a log without a figure to check
        3   not enough is known to check every figure; what is missing is named
    """

    part = given.pop("part_time")
    options = Logged(
        mfu=given["mfu"],
        tflops=given["tflops"],
        tokens_per_s=given["tokens_per_second"],
        step_time_s=given["step_time"],
        part_times_s={} if part is None else {"the part that --part-time gives": part},
        batch=given["batch"],
        seq=given["seq"],
        gpus=given["gpus"],
        padding=None if given["padding"] is None else given["padding"] / 100,
        model=model,
    )
    logged = options if log is None else read_log(log, options.gpus).updated(options)
    if logged.mfu is None and logged.tflops is None:
        raise UsageError("nothing to check: give a log, or the logged figure as --mfu or --tflops")
    opinion = opinion_of(
        logged,
        _work(logged, model, parameters, layers, hidden),
        _peak(device, dtype),
        attention=attention_convention,
        tolerance=tolerance / 100,
    )
    if as_json:
        print_json(as_dict(opinion))
    else:
        _show(opinion)
    if opinion.disagrees:
        raise click.exceptions.Exit(_DISAGREES)
    if not opinion.is_decided:
        raise click.exceptions.Exit(_UNDECIDED)


def _work(
    logged: Logged, model: str | None, parameters: float | None, layers: int | None, hidden: int | None
) -> Work | None:

    if parameters is not None:
        if model is not None:
            raise UsageError("--model has its number of parameters: leave out --parameters, or --model")
        return work_of_sizes(int(parameters), layers, hidden, logged.seq)
    if layers is not None or hidden is not None:
        raise UsageError("--layers and --hidden need --parameters")
    if model is None or logged.seq is None:
        return None
    from ..flops import BatchRequest, resolve_target
    from ..sweep.worker.models import REFERENCE_MODELS

    with working(f"counting {model}"):
        target = resolve_target(model, BatchRequest(samples=1, length=logged.seq), named=REFERENCE_MODELS)
        if target.length != logged.seq:
            raise UsageError(f"{model} takes {target.shapes}: --seq {logged.seq} does not fit its batch")
        return work_of(target)


def _peak(device: str | None, dtype: str) -> Peak:

    dtype = dtype_name(dtype)
    if device is None:
        return Peak(flops_per_s=override_flops_per_s(), dtype=dtype)
    name = device_of_table(device)
    spec = find_spec(name)
    assert spec is not None
    peak = peak_of(spec, dtype)
    if peak is None:
        raise UsageError(f"no {dtype} peak is known for {spec.name} (truemfu devices {name})")
    return Peak(flops_per_s=peak, spec=spec, dtype=dtype)


def _show(opinion: Opinion) -> None:

    console = output()
    for name, text in facts(opinion):
        console.print(on_one_line(f"{name}: {text}"))
    console.print()
    drawn = table("figure", "logged", "ours", "verdict", texts=["verdict"])
    for row in figure_rows(opinion):
        drawn.add_row(*row)
    console.print(drawn, "")
    for sentence in sentences(opinion):
        console.print(on_one_line(sentence))
    for note in notes(opinion):
        console.print(f"note: {on_one_line(note)}")
