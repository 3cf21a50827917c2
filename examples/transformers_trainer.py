"""The Trainer of transformers with MFU in its own log: one callback. A random model, seconds on a CPU.

python examples/transformers_trainer.py
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from truemfu.integrations.transformers import TrueMFUCallback

VOCABULARY = 1000


def main() -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(VOCABULARY, (256, 64))]
    args = TrainingArguments(
        "out/transformers_trainer",
        max_steps=60,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    # A CPU has no known peak; an invented one shows what the log looks like. On a GPU, leave config out.
    config = None if torch.cuda.is_available() else {"monitoring": {"peak_tflops": 0.1}}
    trainer = Trainer(
        model, args, train_dataset=data, eval_dataset=data[:32], callbacks=[TrueMFUCallback(config=config)]
    )
    trainer.train()
    print("rows of every step: out/transformers_trainer/truemfu/training_log.json")


if __name__ == "__main__":
    main()
