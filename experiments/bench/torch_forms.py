"""The same work in PyTorch and transformers, as people write it today. All threads, float32, end tokens disabled."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmarl_llm.qwen import Config


def available() -> bool:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def model(cfg: Config) -> Any:
    """A transformers model of this shape with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    hf = cfg.to_hf()
    hf |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf))


def sampler(net: Any, tokens: np.ndarray, group: int, response: int) -> Callable[[], Any]:
    """transformers' generate: ``group`` samples of each prompt, exactly ``response`` tokens, temperature 1."""
    import torch

    ids = torch.from_numpy(tokens.astype(np.int64))

    def run() -> Any:
        with torch.no_grad():
            return net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=group,
                max_new_tokens=response,
                min_new_tokens=response,
            )

    return run


def updater(net: Any, tokens: np.ndarray, completions: np.ndarray, advantages: np.ndarray) -> Callable[[], Any]:
    """One policy-gradient step of AdamW on [N P] prompts with [N G R] completions, every prompt repeated G times."""
    import torch

    n, g, r = completions.shape
    p = tokens.shape[1]
    rows = np.concatenate([np.repeat(tokens, g, 0), completions.reshape(n * g, r)], axis=1)
    ids = torch.from_numpy(rows.astype(np.int64))
    gain = torch.from_numpy(advantages.reshape(n * g, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)

    def run() -> Any:
        logits = net(ids, logits_to_keep=r + 1).logits[:, :-1]
        scored = torch.log_softmax(logits, -1).gather(-1, ids[:, p:, None])[..., 0]
        ratio = torch.exp(scored - scored.detach())
        loss = -(torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return run
