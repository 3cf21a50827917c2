"""Supervised fine-tuning by TRL's SFTTrainer, of a tiny Llama on a text of few words."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

STEPS, BATCH = 6, 2
WORDS = "<pad> <eos> <unk> the cat dog sat ran on under mat tree and then slept".split()


def tokenizer():
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def build():
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config)


def sentences():
    ends = ("on the mat", "under the tree", "and then slept", "on the mat and then ran under the tree")
    return [f"the {animal} sat {end}" for animal in ("cat", "dog") for end in ends] * 2


def main():
    torch.manual_seed(0)
    arguments = SFTConfig(
        output_dir="sft",
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        max_length=32,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = SFTTrainer(
        model=build(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": sentences()}),
        processing_class=tokenizer(),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            numbers = float(entry["loss"]).hex(), float(entry["grad_norm"]).hex()
            print("step", entry["step"], *numbers, "tokens", int(entry["num_tokens"]))
    trainer.save_model("final")


if __name__ == "__main__":
    main()
