"""Exports in transformers 4 and in transformers 5: equal logits for every kind of rotary scaling.

The two versions cannot share an environment. `make transformers4` makes one for version 4, and a process of its
interpreter computes the logits.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.models import decoder, decoder_config, hf_weights

torch = pytest.importorskip("torch", reason="needs the parity extra: pip install -e .[parity]")
PYTHON = Path(__file__).parents[2] / ".venv-transformers4" / "bin" / "python"
pytestmark = [
    pytest.mark.parity,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-transformers4: run `make transformers4`"),
]

V, T = 131, 48
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "qwen2 default": ("qwen2", None),
    "qwen3 default": ("qwen3", None),
    "llama linear": ("llama", {"rope_type": "linear", "factor": 4.0}),
    "llama llama3": ("llama", LLAMA3),
    "qwen2 yarn": ("qwen2", YARN),
    "qwen3 yarn": ("qwen3", {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}),
    "llama yarn": ("llama", {**YARN, "attention_factor": 1.3, "beta_fast": 4.0, "beta_slow": 0.5}),
    "qwen2 dynamic": ("qwen2", {"rope_type": "dynamic", "factor": 2.0}),
}
# Logits of each folder in argv, saved as logits.npy in it.
PROGRAM = """
import sys, numpy, torch, transformers
rows = torch.tensor(numpy.load(sys.argv[1]))
for folder in sys.argv[2:]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        numpy.save(folder + "/logits.npy", model(rows).logits.numpy())
print(transformers.__version__)
"""


def export(folder: Path, family: str, scaling: dict | None, seed: int):
    """Write a random tiny model and return its policy and parameters."""
    config = decoder_config.Config(
        V, 64, 96, 2, 4, 2, 16, rope_theta=500.0, rope_scaling=tuple(sorted(scaling.items())) if scaling else None,
        attention_bias=family == "qwen2", qk_norm=family == "qwen3", max_position=64, family=family,
    )  # fmt: skip
    policy, rng = decoder.make_policy(config), np.random.default_rng(seed)
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    centre = lambda path: 1.0 if path[-1].key == "scale" else 0.0
    draw = lambda path, leaf: jnp.asarray(rng.normal(centre(path), 0.12, leaf.shape), leaf.dtype)
    params = jax.tree_util.tree_map_with_path(draw, shapes)
    hf_weights.save(folder, params, config)
    return policy, params


def test_exports_are_the_same_model_in_transformers_4_and_5(tmp_path):
    from transformers import AutoModelForCausalLM, __version__

    row = np.random.default_rng(0).integers(0, V, T)
    np.save(tmp_path / "rows.npy", row[None])
    models = {
        name: export(tmp_path / name.replace(" ", "-"), *MODELS[name], seed=seed) for seed, name in enumerate(MODELS)
    }
    folders = [str(tmp_path / name.replace(" ", "-")) for name in MODELS]
    command = [str(PYTHON), "-c", PROGRAM, str(tmp_path / "rows.npy"), *folders]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.startswith("4.") and __version__.startswith("5.")
    differences = {}
    for (name, (policy, params)), folder in zip(models.items(), folders):
        hidden = policy.hidden({"params": params}, row[None, :1], np.array([1]), row[None, None, 1:])
        ours = np.asarray(policy.unembed({"params": params}, hidden))[0, 0]
        four = np.load(f"{folder}/logits.npy")[0, :-1]
        with torch.no_grad():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            five = model(torch.tensor(row[None])).logits[0, :-1].numpy()
        assert ours.std() > 0.5  # the comparison is not about zeros
        differences[name] = [float(np.abs(ours - x).max()) for x in (four, five)]
    print(json.dumps({"transformers": [ran.stdout.strip(), __version__], "max |logit difference|": differences}))
    assert max(max(pair) for pair in differences.values()) <= 1e-5, differences
