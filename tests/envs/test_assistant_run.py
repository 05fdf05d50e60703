"""JoyAgents-R1 on the host environment, with real tasks of the package: a team of two architectures and tokenizers."""

import json

import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import HFTokenizer
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.runs import loop

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "head_dim": 4}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-pair tokenizer with a chat template, trained on the tasks' words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    words = [t["query"] for t in assistant.tasks(assistant.Config(count=16))]
    backend.train_from_iterator(words, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": CHATML,
            }
        )
    )
    return folder


@pytest.mark.slow
def test_two_architectures_with_two_tokenizers_train_together(tokenizer, tmp_path):
    cfg = from_dict(
        joyagents_r1.Config,
        {
            "steps": 2, "batch": 2, "group": 2,
            "team": {
                "max_new_tokens": 40,
                "backbone": {"family": "qwen3", **SHAPE},
                "overrides": {"master": {"family": "llama", "tokenizer": str(tokenizer), **SHAPE}},
            },
            "env": {"name": "assistant", "args": {"max_turns": 4, "count": 8, "domains": ["qa"]},
                    "workers": 2, "max_prompt": 1024, "eval_tasks": 2},
            "memory": {"capacity": 8, "retrieve": 1, "warmup": 4},
            "credit": {"normalise": "none"},
            "sft": {"steps": 2, "batch": 2, "samples": 16, "min_fitting": 0.0},
            "run": {"checkpoint_every": 2, "eval_every": 0, "eval_greedy": False, "tensorboard": False},
        },
    )  # fmt: skip
    recipe = joyagents_r1.make(cfg)
    master, qa = (recipe.team.model_of(recipe.team.role_index(r)) for r in ("master", "qa"))
    assert master.policy.config.family == "llama" and qa.policy.config.family == "qwen3"
    assert isinstance(master.tokenizer, HFTokenizer) and qa.tokenizer.name == "bytes"
    assert not master.policy.config.attention_bias and qa.policy.config.qk_norm
    try:
        state = loop.fit(cfg, recipe, tmp_path)
    finally:
        recipe.env_runner.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [1, 2, 3, 4] and int(state.counters["skipped"]) == 0
    assert all(r["count/invalid"] == 0 for r in rows[2:])
    assert max(r["logprob_diff"] for r in rows[2:]) <= 1e-4  # prompts of hundreds of tokens, float32
    assert rows[0]["sft/master/nll"] > 0 and rows[0]["sft/qa/nll"] > 0
    assert "reward/format" in rows[-1] and "final/success" in rows[-1]
    assert "Query:" in (tmp_path / "episodes.md").read_text()


def test_demonstrations_that_do_not_fit_are_an_error():
    cfg = from_dict(
        joyagents_r1.Config,
        {
            "team": {"max_new_tokens": 3, "backbone": SHAPE},
            "env": {"name": "assistant", "args": {"max_turns": 4, "count": 4, "domains": ["qa"]}, "eval_tasks": 2},
            "sft": {"steps": 1},
        },
    )
    with pytest.raises(
        ConfigError, match=r"config\.team\.max_new_tokens: (\d+) of \1 demonstrations of role 'master' .*0% would"
    ):
        joyagents_r1.make(cfg)
