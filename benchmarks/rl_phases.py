"""Work of every phase in reinforcement learning and preference tuning, beside a count by hand.

    python -m benchmarks.rl_phases [--steps 12]

REINFORCE and PPO are loops of this script; SFT, DPO, KTO, GRPO and RLOO are TRL's trainers, unchanged but for
the callback. By hand means: the shapes of every forward pass of every model, by hooks, in the formula of a
Llama's products. The table has how many rows state just that work, and the medians of plain steps. The peak
is set to 1 TFLOP/s, since that of a CPU is unknown: the MFUs compare with each other, not with other devices.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import io
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F

from truemfu import TrainingMonitor, __version__
from truemfu.integrations.transformers import TrueMFUCallback

CONFIG = {"monitoring": {"peak_tflops": 1.0, "mfu_calculation_mode": "smart"}}
LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ROWS, PROMPT, NEW = 4, 8, 12


def llama(**options: Any) -> Any:
    """A causal language model."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA | options))


def scorer() -> Any:
    """A model with one output at each position: a critic, or a reward model."""
    return hf.LlamaForTokenClassification(hf.LlamaConfig(**LLAMA, num_labels=1))


def forward_flops(config: Any, rows: int, positions: int, cached: int, scored: int, outputs: int) -> int:
    """Products of one forward pass by hand: each 2·m·n·k, attention with all positions so far."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = 2 * positions * (2 * width * queries + 2 * width * keys + 3 * width * inner)
    attention = 4 * positions * (cached + positions) * queries
    return rows * (config.num_hidden_layers * (layer + attention) + 2 * scored * width * outputs)


class HandCount:
    """The passes of models by hooks, in FLOPs: trained, without gradients, and of those in `generate`."""

    def __init__(self, *models: nn.Module, scored: Callable[[int, bool, bool], int] | None = None) -> None:
        self.steps: list[dict[str, int]] = []
        self._scored = scored or (lambda positions, trains, generates: 1 if generates else positions)
        self._now = {"training": 0, "no_grad": 0, "generate": 0}
        self._generates = False
        for model in models:
            model.register_forward_pre_hook(self._saw, with_kwargs=True)
            if hasattr(model, "generate"):
                model.generate = self._telling(model)  # type: ignore[assignment]

    def _telling(self, model: Any) -> Callable[..., Any]:
        def telling(*args: Any, **kwargs: Any) -> Any:
            self._generates = True
            try:
                return type(model).generate(model, *args, **kwargs)
            finally:
                self._generates = False

        return telling

    def _saw(self, model: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if ids.device.type == "meta" or type(ids) is not Tensor:
            return
        cache = kwargs.get("past_key_values")
        cached = 0 if cache is None else int(cache.get_seq_length())
        trains, config = torch.is_grad_enabled(), model.config
        outputs = config.num_labels if hasattr(model, "score") else config.vocab_size
        scored = self._scored(ids.shape[1], trains, self._generates)
        flops = forward_flops(config, ids.shape[0], ids.shape[1], cached, scored, outputs)
        self._now["training" if trains else "no_grad"] += 3 * flops if trains else flops
        self._now["generate"] += flops if self._generates else 0

    def end_step(self) -> None:
        """An optimizer step has ended."""
        self.steps.append(self._now)
        self._now = dict.fromkeys(self._now, 0)


def of_tokens(model: Any, ids: Tensor) -> Tensor:
    """Log-probabilities of the generated tokens."""
    logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return -F.cross_entropy(logits.flatten(0, 1), ids[:, PROMPT:].flatten(), reduction="none").view(ROWS, NEW)


def prompts() -> Tensor:
    """Random tokens."""
    return torch.randint(3, LLAMA["vocab_size"], (ROWS, PROMPT))


def reinforce(folder: Path, steps: int) -> HandCount:
    """Generate, reward by a rule, one step on the policy gradient."""
    policy = llama()
    optimizer, hand = torch.optim.AdamW(policy.parameters(), 1e-3), HandCount(policy)
    with TrainingMonitor(folder, CONFIG, model=policy) as monitor:
        for step in range(1, steps + 1):
            with torch.no_grad():
                ids = policy.generate(prompts(), max_new_tokens=NEW, do_sample=True)
            reward = (ids[:, PROMPT:] % 2).float().mean(1, keepdim=True)
            loss = -((reward - reward.mean()) * of_tokens(policy, ids)).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            hand.end_step()
            monitor.log_step(step, 0, loss, None, 1e-3)
            monitor.save_logs()
    return hand


def ppo(folder: Path, steps: int) -> HandCount:
    """Generate, score by four models without gradients, then two clipped steps on policy and critic.

    So every other step generates.
    """
    policy, critic, reference, reward_model = llama(), scorer(), llama(), scorer()
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer, hand = torch.optim.AdamW(parameters, 1e-3), HandCount(policy, critic, reference, reward_model)
    models = {"policy": policy, "critic": critic}
    with TrainingMonitor(folder, CONFIG, model=models) as monitor:
        for step in range(1, steps + 1):
            if step % 2:
                with torch.no_grad():
                    ids = policy.generate(prompts(), max_new_tokens=NEW, do_sample=True)
                    old, of_reference = of_tokens(policy, ids), of_tokens(reference, ids)
                    value = critic(input_ids=ids).logits[:, PROMPT:, 0]
                    reward = reward_model(input_ids=ids).logits[:, PROMPT:, 0] - 0.1 * (old - of_reference)
            ratio = (of_tokens(policy, ids) - old).exp()
            advantage = reward - value
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = (critic(input_ids=ids).logits[:, PROMPT:, 0] - reward).square().mean() - surrogate
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            hand.end_step()
            monitor.log_step(step, 0, loss, None, 1e-3)
            monitor.save_logs()
    return hand


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run."""
    found: list[dict[str, Any]] = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    return found


def work_of(row: dict[str, Any]) -> dict[str, int | None]:
    """The FLOPs that a row speaks of, as in `HandCount`."""
    seconds = row["perf/step_time"]
    generated = [row.get(f"perf/generate/{part}_flops") for part in ("prefill", "decode")]
    return {
        "training": round(row["perf/tflops_per_gpu"] * 1e12 * seconds)
        if "perf/tflops_per_gpu" in row
        else None,
        "no_grad": row.get("perf/no_grad_flops"),
        "generate": None if None in generated else sum(generated),
    }


class _Ends(hf.TrainerCallback):
    """Tells the count by hand where a step ends, and finishes the rows so far."""

    def __init__(self, callback: TrueMFUCallback) -> None:
        self.hand = HandCount()
        self._callback = callback

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The callback has logged the step."""
        self.hand.end_step()
        assert self._callback.monitor is not None
        self._callback.monitor.save_logs()


def trained_with_trl(name: str, folder: Path, steps: int) -> HandCount:
    """A short training with a trainer of TRL, two micro-batches a step."""
    import datasets
    import tokenizers
    import trl

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    names = [*special.values(), *(f"word{n}" for n in range(len(special), LLAMA["vocab_size"]))]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, **special)
    texts = [[f"word{5 + (7 * row + n) % 120}" for n in range(16)] for row in range(64)]
    whole = [" ".join(text) for text in texts]
    prompts, ends = [" ".join(text[:6]) for text in texts], [" ".join(text[6:]) for text in texts]
    rows: dict[str, list[dict[str, Any]]] = {
        "SFT": [{"text": text} for text in whole],
        "DPO": [
            {"prompt": p, "chosen": e, "rejected": o}
            for p, e, o in zip(prompts, ends, reversed(ends), strict=True)
        ],
        "KTO": [
            {"prompt": p, "completion": e, "label": n % 2 == 0}
            for n, (p, e) in enumerate(zip(prompts, ends, strict=True))
        ],
    }
    sampled = [{"prompt": prompt} for prompt in prompts]
    options: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "logging_steps": steps,
    }
    arguments: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        options |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.04}
        arguments["reward_funcs"] = lambda completions, **_: [float(len(text)) for text in completions]
    if name in ("DPO", "KTO"):
        arguments["ref_model"] = llama()
    llama().save_pretrained(folder / "model")  # where GRPO and RLOO find their reference model
    callback = TrueMFUCallback(config=CONFIG, output_dir=folder)
    ends_of_steps = _Ends(callback)
    trainer = getattr(trl, f"{name}Trainer")(
        hf.AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=getattr(trl, f"{name}Config")(str(folder / "trainer"), **options),
        train_dataset=datasets.Dataset.from_list(rows.get(name, sampled)),
        processing_class=tokenizer,
        callbacks=[callback, ends_of_steps],
        **arguments,
    )
    # The head scores each position but the last; one pass of `generate` scores one.
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    ends_of_steps.hand = HandCount(*models, scored=lambda n, trains, generates: 1 if generates else n - 1)
    trainer.train()
    return ends_of_steps.hand


TRL = ("SFT", "DPO", "KTO", "GRPO", "RLOO")
LOOPS: dict[str, Callable[[Path, int], HandCount]] = {"REINFORCE": reinforce, "PPO": ppo} | {
    f"TRL {name}": functools.partial(trained_with_trl, name) for name in TRL
}
WORK = ("training", "no_grad", "generate")
PHASES = ("forward", "backward", "clipping", "optimizer", "no_grad")


class Result(NamedTuple):
    """A loop's rows beside the count by hand."""

    name: str
    agree: dict[str, int]
    """Rows whose work is that by hand, by what it is of."""
    known: dict[str, int]
    steps: int
    """Of the same kind: those that did such work."""
    medians: dict[str, float | None]
    shares: dict[str, float]
    """Of the time of steps, with unusual gaps before them: the phases."""


def measured(name: str, folder: Path, steps: int) -> Result:
    """Run a loop, and compare its rows."""
    hand = LOOPS[name](folder, steps)
    rows = rows_of(folder)
    agree, known = dict.fromkeys(WORK, 0), dict.fromkeys(WORK, 0)
    for row, by_hand in zip(rows, hand.steps, strict=True):
        for work, flops in work_of(row).items():
            known[work] += flops is not None
            agree[work] += flops == by_hand[work]
    plain = [row for row in rows[3:] if "perf/observed" not in row]
    medians = {}
    for figure in ("mfu", "mfu_whole_step", "mfu_training"):
        found = [row[f"perf/{figure}"] for row in plain if f"perf/{figure}" in row]
        medians[figure] = statistics.median(found) if found else None
    total_s = sum(row["perf/step_time"] for row in plain)
    shares = {
        phase: sum(row.get(f"perf/phase/{phase}", 0.0) for row in plain) / total_s if total_s else 0.0
        for phase in PHASES
    }
    return Result(name, agree, known, len(rows), medians, shares)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    logging.disable(logging.WARNING)
    torch.manual_seed(5)
    results = []
    for name in LOOPS:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            results.append(measured(name, Path(folder), steps))
    import trl

    versions = f"torch {torch.__version__}, transformers {hf.__version__}, trl {trl.__version__}"
    print(f"{datetime.date.today()}, truemfu {__version__}, {versions}, {os.cpu_count()} CPU cores")
    print(f"{steps} steps of each loop, peak set to 1 TFLOP/s")
    rows, share = "rows with the FLOPs by hand, of known", "share of step times"
    print(f"{'':10} {rows:^38} {'MFU, median, in millionths':^27}  {share}")
    figures = " ".join(f"{head:>12}" for head in WORK) + "".join(
        f"{n:>9}" for n in ("MFU", "whole", "training")
    )
    print(f"{'':10} {figures}  " + " ".join(f"{phase:>9}" for phase in PHASES))
    for each in results:
        counts = " ".join(f"{each.agree[work]:>6} of {each.known[work]:>2}" for work in WORK)
        mfus = "".join(f"{'-' if mfu is None else f'{1e6 * mfu:.1f}':>9}" for mfu in each.medians.values())
        shares = " ".join(f"{100 * each.shares[phase]:>7.1f} %" for phase in PHASES)
        print(f"{each.name:10} {counts}{mfus}  {shares}")
    print(json.dumps([each._asdict() for each in results]))


if __name__ == "__main__":
    main()
