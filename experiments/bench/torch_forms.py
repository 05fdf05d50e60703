"""The same work in PyTorch and transformers, in their usual form. It uses all threads and disables end tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxmarl_llm.models.decoder_config import Config


def available() -> bool:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError:
        return False
    return True


def model(cfg: Config, device: str = "cpu") -> Any:
    """A transformers model of this shape and dtype with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    hf = cfg.to_hf()
    hf |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf))
    return net.to(dtype=getattr(torch, cfg.dtype))


def _wait(net: Any) -> None:
    """Wait for the GPU, which runs asynchronously."""
    import torch

    if net.device.type == "cuda":
        torch.cuda.synchronize()


def sampler(net: Any, tokens: np.ndarray, group: int, response: int) -> Callable[[], Any]:
    """transformers' generate: ``group`` samples of each prompt, exactly ``response`` tokens, temperature 1."""
    import torch

    ids = torch.from_numpy(tokens.astype(np.int64)).to(net.device)

    def run() -> Any:
        with torch.no_grad():
            said = net.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                num_return_sequences=group,
                max_new_tokens=response,
                min_new_tokens=response,
            )
        _wait(net)
        assert said.shape == (group * len(tokens), tokens.shape[1] + response)

    return run


def shared_sampler(net: Any, tokens: np.ndarray, group: int, response: int) -> Callable[[], Any]:
    """Function of samples [G R] with the prompt in the cache once: prefilled alone, then expanded to G rows.

    Args:
        net: A transformers model.
        tokens: One prompt [1 P].
        group: Samples.
        response: Tokens of each.
    """
    import inspect

    import torch

    ids = torch.from_numpy(tokens.astype(np.int64)).to(net.device)
    # transformers 5.24 renamed the argument.
    name = "cache" if "cache" in inspect.signature(net.forward).parameters else "past_key_values"

    def run() -> Any:
        with torch.no_grad():
            out = net(ids, use_cache=True, logits_to_keep=1)
            cache = out["past_key_values"] if "past_key_values" in out else out["cache"]
            cache.batch_repeat_interleave(group)
            logits, said = out.logits[:, -1].repeat_interleave(group, 0), []
            for _ in range(response):
                token = torch.multinomial(torch.softmax(logits.float(), -1), 1)
                said.append(token)
                if len(said) < response:
                    logits = net(token, use_cache=True, logits_to_keep=1, **{name: cache}).logits[:, -1]
        _wait(net)
        return torch.cat(said, 1)

    return run


def updater(
    net: Any, tokens: np.ndarray, completions: np.ndarray, advantages: np.ndarray, micro_batches: int
) -> Callable[[], Any]:
    """Function of one policy-gradient step of AdamW on prompts [N P] with completions [N G R]. Every prompt is repeated
    G times, and the gradient is summed over ``micro_batches``.
    """
    import torch

    n, g, r = completions.shape
    p = tokens.shape[1]
    rows = np.concatenate([np.repeat(tokens, g, 0), completions.reshape(n * g, r)], axis=1)
    ids = torch.from_numpy(rows.astype(np.int64)).to(net.device).chunk(micro_batches)
    gain = torch.from_numpy(advantages.reshape(n * g, 1)).to(net.device).chunk(micro_batches)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad()
        for row, a in zip(ids, gain):
            logits = net(row, logits_to_keep=r + 1, use_cache=False).logits[:, :-1].float()
            scored = torch.log_softmax(logits, -1).gather(-1, row[:, p:, None])[..., 0]
            ratio = torch.exp(scored - scored.detach())
            (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).mean() / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        _wait(net)

    return run
