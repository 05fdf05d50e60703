"""Episodes of facts from completions that are given as text. Shared by the tests of its protocols."""

import functools

import jax
import numpy as np

from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import tasks
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


@functools.cache
def program(cfg):
    """Functions of N episodes: reset, observe and step."""
    env, key = facts.make(cfg), jax.random.key(0)
    step = lambda state, words, length: env.step(key, state, words[None], length)
    return tuple(jax.jit(jax.vmap(f)) for f in (functools.partial(env.reset, key), env.observe, step))


def texts_of(rows):
    """Tasks as text. ``rows``: of `array.make_tasks`, of any protocol."""
    text, out = lambda ids: bytes(ids.tolist()).decode(), []
    for every, asked, size, path in zip(*(rows[k] for k in ("facts", "question", "question_length", "path"))):
        shown = tuple(map(text, every))
        out.append(tasks.Task(shown, text(asked[:size]), tuple(shown[p] for p in path if p >= 0)))
    return out


def encode(said, width):
    """Completions (text, whether it has an eos) as tokens [N width] and lengths [N 1]. What is longer is cut."""
    rows = [([*text.encode()] + [BYTES.EOS] * ended)[:width] for text, ended in said]
    tokens = [ids + [BYTES.PAD] * (width - len(ids)) for ids in rows]
    return np.array(tokens, np.int32), np.array([[len(ids)] for ids in rows], np.int32)
