"""Driver of TRL's GRPOTrainer: one prompt, G completions of exactly R tokens, one optimizer step."""

import random

from drive import SPEC, Turns, prompt, torch_model, words

from datasets import Dataset  # isort: skip
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

vocab, group, response = SPEC["hf"]["vocab_size"], SPEC["group"], SPEC["response"]
args = GRPOConfig(
    output_dir=SPEC["folder"],
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    per_device_train_batch_size=group // SPEC["micro_batches"],
    gradient_accumulation_steps=SPEC["micro_batches"],
    num_generations=group,
    max_completion_length=response,
    generation_kwargs={"min_new_tokens": response},
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    beta=0.0,
    learning_rate=1e-6,
    weight_decay=0.01,
    max_steps=1_000_000,
    save_strategy="no",
    logging_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
turns = Turns("trl", "transformers", "torch")


class Paced(TrainerCallback):
    def on_step_begin(self, *_, **__):
        turns.begin()

    def on_step_end(self, *_, **__):
        turns.end()


trainer = GRPOTrainer(
    model=torch_model(SPEC["hf"]),
    reward_funcs=lambda completions, **_: [random.random() for _ in completions],
    args=args,
    train_dataset=Dataset.from_list([{"prompt": prompt(SPEC["prompt"], vocab)}] * 64),
    processing_class=words(vocab),
    callbacks=[Paced()],
)
trainer.train()
