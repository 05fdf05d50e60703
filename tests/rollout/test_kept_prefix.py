"""A cut of Search-R2 in the host engine: the prefix that it keeps is not prefilled again, counted token by token."""

import collections

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import refine
from jaxmarl_llm.generation import prefix_cache
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.types import Model, Role, Team
from tests.rollout.test_host import as_host, go, make_params, make_team, policy, prompt_of

pytestmark = pytest.mark.usefixtures("numpy_tables")

BYTES = ByteTokenizer()
R = refine.RESPONSE


def own_turns(tree):
    """The turns of each task of a rollout of one episode a task, in order: (role, prompt, completion), as ids."""
    out, moves = collections.defaultdict(list), tree.transitions
    for j in np.flatnonzero(moves.played):
        row = int(moves.steps[j, 0])
        said = tree.steps.tokens[row, : tree.steps.length[row]].tolist()
        node = tree.steps.node[row]
        out[int(moves.task[j])].append((int(tree.nodes.role[node]), [*map(int, prompt_of(tree, node))], said))
    return out


def typists():
    """One model for both roles whose tokens do not depend on its prompts: queries, digits and ends."""
    inner, logits = policy(), np.full(264, -30.0, np.float32)
    for ids, share in ((b"abcdef=*y", 0.2), (b"123", 0.4), ((BYTES.EOS,), 0.4)):
        logits[list(ids)] = np.log(share / len(ids))
    alike = inner._replace(unembed=lambda variables, hidden: 0 * inner.unembed(variables, hidden) + logits)
    return Team(tuple(Role(role, "m", R) for role in refine.ROLES), (Model("m", alike, BYTES),))


def test_a_kept_prefix_is_not_prefilled_again(monkeypatch):
    """Counted in the host engine, whose prefix cache is a tree of the tokens that a model has read and written.

    An actor's prompt behind a cut is one that the actor has read, so the tree has all of it. The last token of a prompt
    is always sent, because its hidden state is needed. Every other prompt continues the longest prefix that is known.
    """
    monkeypatch.setattr(prefix_cache, "MIN_REUSED_TOKENS", 1)
    cfg = facts.Config(protocol="refine", two_hops=1.0)
    rows = facts.make_tasks(cfg, n=48)
    each = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(48)]
    tree = go(as_host(facts.make(cfg)), typists(), each, plans.flat(1), params=make_params(make_team("m"))).tree
    sent, behind_a_cut, kept = 0, [], []
    for turns in own_turns(tree).values():
        beginnings, before = set(), None  # of what the model has read and written
        for role, prompt, said in turns:
            known = sum(tuple(prompt[:n]) in beginnings for n in range(1, len(prompt) + 1))
            sent += max(1, len(prompt) - known)
            if (role, before) == (refine.ACTOR, refine.REFINER):
                behind_a_cut.append(len(prompt) - known)
                kept.append(len(prompt))
            line, before = prompt + said[:-1], role  # the last token is never read
            beginnings |= {tuple(line[:n]) for n in range(1, len(line) + 1)}
    assert int(tree.counts.prompt_tokens) == sent
    assert len(behind_a_cut) > 5 and not any(behind_a_cut) and max(kept) > min(kept) > 4
