"""Log-probs of completions that are there: of those that a learner trains on, and of a menu's in a rollout.

Both go through the same functions, so the ratio between the two policies is 1 before the first optimizer step.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.distributed import context, sharding, vocabulary
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.loss import head_logprob
from jaxmarl_llm.types import Array, Params, Policy, Unembed

CHUNK = 256  # tokens whose logits are in memory at once, where the head kernels cannot be used


def fused_head(policy: Policy, variables: Params, sampling: Sampling, rows: int) -> Head | None:
    """The head for the kernels `head_logprob` and `head_loss`, or None where these cannot be used.

    They cannot with filters, at temperature 0, or where ``unembed`` is a plain function. On a mesh they are for
    `vocabulary.by_vocabulary`. They cannot be used there where rows do not divide or are cut over devices.

    Args:
        policy: Functions of the model.
        variables: Variables of the model.
        sampling: The distribution that log-probs are of.
        rows: Number of prompts, whose completions are scored.
    """
    unembed = policy.unembed
    usable = not sampling.filters and sampling.temperature > 0 and vocabulary.divides(rows)
    return unembed.head(sharding.gather(variables)) if usable and isinstance(unembed, Unembed) else None


def score_hidden(
    policy: Policy,
    variables: Params,
    hidden: Float[jax.Array, "N G R D"],
    completions: Int[Array, "N G R"],
    sampling: Sampling,
) -> tuple[Float[jax.Array, "N G R"], Float[jax.Array, "N G R"]]:
    """Log-probs of completions and entropies (nats) at their tokens, from hidden states.

    Args:
        policy: Functions of the model.
        variables: Variables of the model.
        hidden: Result of ``policy.hidden``: the state that predicts each token.
        completions: Token ids.
        sampling: The distribution that log-probs are of, with a temperature above 0.
    """
    ids = jnp.asarray(completions)
    if (head := fused_head(policy, variables, sampling, len(ids))) is not None:

        def scored(axis: str | None, head: Head, hidden: jax.Array, ids: jax.Array) -> tuple[tuple, tuple]:
            return (), head_logprob(hidden, head, ids, temperature=sampling.temperature, axis_name=axis)

        return vocabulary.by_vocabulary(scored, head, hidden, ids)[1]
    rows = hidden.reshape(-1, *hidden.shape[2:]), ids.reshape(-1, ids.shape[-1])
    parts, score_part = sharding.row_parts(), functools.partial(_score_rows, policy, sampling)
    if sharding.context_parts() > 1 and not len(hidden) % parts:
        pieces = context.split_tokens(rows[0], parts), context.split_tokens(rows[1], parts)
        of_pieces = jax.vmap(score_part)(sharding.copies(variables), pieces)
        logprob, entropy = (context.join_tokens(x, parts, ids.shape[-1]) for x in of_pieces)
    elif parts == 1 or len(hidden) % parts:
        logprob, entropy = _score_rows(policy, sampling, variables, rows)
    else:
        # Each part scores its own rows with its own copy of the head. The copies' gradients are summed once, at the
        # end, and not after every completion.
        split_rows = sharding.cut_rows(jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), rows), rest=None)
        logprob, entropy = jax.vmap(score_part)(sharding.copies(variables), split_rows)
    return logprob.reshape(ids.shape), entropy.reshape(ids.shape)


def _score_rows(
    policy: Policy, sampling: Sampling, variables: Params, rows: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Score completions [rows R] from hidden states [rows R D].

    The logits of few completions are in memory at once, [R V] instead of [N G R V]. They are computed again in the
    backward pass.
    """
    one = jax.checkpoint(lambda row: score(policy.unembed(variables, row[0]), row[1], sampling))
    return jax.lax.map(one, rows, batch_size=max(1, CHUNK // rows[1].shape[-1]))


def scored_menu(
    policy: Policy,
    variables: Params,
    tokens: Int[Array, "N P"],
    length: Int[Array, " N"],
    active: Bool[Array, " N"],
    menu: Completions,
    sampling: Sampling,
) -> Completions:
    """The same K completions at each prompt, with their log-probs under the policy.

    Args:
        policy: Functions of the model.
        variables: Variables of the model.
        tokens: Prompts [N P], right-padded.
        length: Tokens of each prompt [N], at least 1.
        active: False for prompts that are padding. Their completions are empty.
        menu: The completions, with a leading axis of 1 in place of N. Their log-probs are not read.
        sampling: The distribution that log-probs are of, with a temperature above 0.
    """
    n, (_, k, r) = len(length), menu.tokens.shape
    said, played = jnp.broadcast_to(menu.tokens, (n, k, r)), jnp.asarray(active)[:, None]
    size = jnp.where(played, menu.length, 0)
    hidden = policy.hidden(variables, tokens, length, said)
    logprobs, _ = score_hidden(policy, variables, hidden, said, sampling)
    there = jnp.arange(r) < size[..., None]
    return Completions(said, size, jnp.where(there, logprobs, 0.0), played & menu.truncated)
