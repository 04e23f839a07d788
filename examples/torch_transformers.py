"""Hugging Face's Trainer over a small GPT-2, compiled within a budget."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import mucudnn.torch as mt

BUDGET = 6 << 20

torch.manual_seed(0)
sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
backend = mt.backend(budget=BUDGET)
model.loss_type = "ForCausalLM"  # named, or a warning of theirs breaks the graph
model.forward = torch.compile(model.forward, backend=backend, dynamic=False)
tokens = torch.randint(0, 64, (16, 32))
rows = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=10,
        per_device_train_batch_size=16,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
print(backend.plans[0])
print(f"loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}")
assert float(losses[-1]) < float(losses[0])
assert backend.plans[0].peak_bytes <= BUDGET
