"""CoMLRL's MAGRPO trainer: agents that answer one prompt at once, G aligned completions of exactly R tokens, one update
of each agent.
"""

import random

from drive import SPEC, Turns, prompt, torch_model, words

from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer  # isort: skip

vocab, response = SPEC["hf"]["vocab_size"], SPEC["response"]
args = MAGRPOConfig(
    num_train_epochs=1,
    num_agents=SPEC["agents"],
    num_generations=SPEC["group"],
    max_new_tokens=response,
    num_turns=1,
    joint_mode="aligned",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    eval_interval=0,
    rollout_buffer_size=1,
    agent_devices="cpu",
)
turns = Turns("comlrl", "transformers", "torch")


class Paced:
    """Data set in which reading an item waits for the request of a step."""

    def __init__(self):
        self.items = turns.items({"prompt": prompt(SPEC["prompt"], vocab)})

    def __len__(self):
        return 1_000_000

    def __getitem__(self, _):
        return next(self.items)


trainer = MAGRPOTrainer(
    agents=[torch_model(SPEC["hf"]) for _ in range(SPEC["agents"])],
    num_agents=SPEC["agents"],
    tokenizer=words(vocab),
    train_dataset=Paced(),
    reward_func=lambda *said: [random.random()],
    args=args,
)
trainer.verbose = False
trainer.train(min_new_tokens=response)
