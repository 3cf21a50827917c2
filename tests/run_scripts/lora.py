"""LoRA by PEFT in a plain loop: adapters on a frozen Llama, which are then saved."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, BATCH, LENGTH, VOCABULARY = 6, 2, 16, 48


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
    adapters = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapters)


def example_batch():
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def main():
    torch.manual_seed(0)
    model = build()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item().hex()}")
    model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
