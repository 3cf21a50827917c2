"""A tiny Llama by Hugging Face's Trainer: accumulation, evaluations and checkpoints in between."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

STEPS, BATCH, ACCUMULATION, LENGTH, VOCABULARY = 8, 2, 2, 16, 48


class Tokens(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        self.ids = torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def build():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def example_batch():
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def main():
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir="checkpoints",
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=4,
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(model=build(), args=arguments, train_dataset=Tokens(40, 0), eval_dataset=Tokens(6, 1))
    trainer.remove_callback(PrinterCallback)  # it prints times
    trainer.train()
    for entry in trainer.state.log_history:
        numbers = {
            name: entry[name] for name in ("loss", "grad_norm", "learning_rate", "eval_loss") if name in entry
        }
        print(entry["step"], {name: float(number).hex() for name, number in numbers.items()})


if __name__ == "__main__":
    main()
