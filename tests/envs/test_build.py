"""Build: whole episodes against a slow twin, graphs of random builders, the luck of workers, demonstrations."""

import collections
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.build import array as build
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONFIGS = {
    "6 actions": build.Config(),
    "8 actions": build.Config(actions=8, seed=3, solver=(0.7, 0.2), repair=0.5, cost=0.05),
    "1 action": build.Config(actions=1),
}


class Twin:
    """A construction in plain Python, written from the docstring of the environment. Nodes are objects, not numbers."""

    def __init__(self, config, query):
        self.config, self.query, self.left, self.over = config, query, config.actions, False
        self.nodes = []  # [role, the node that it listens to or None]
        self.hard = "*" in query

    def number(self, node):
        return 0 if node is None else 1 + next(i for i, other in enumerate(self.nodes) if other is node)

    def prompt(self):
        return f"B{self.query}|{''.join(f'{role}{self.number(heard)}' for role, heard in self.nodes)}|{self.left}>"

    def chain(self, node):
        return [] if node is None else [node, *self.chain(node[1])]

    def answer(self):
        longest = max((len(self.chain(node)) for node in self.nodes), default=0)
        return next((node for node in self.nodes if len(self.chain(node)) == longest), None)

    def chance(self, node):
        role, heard = node
        solver = self.config.solver[self.hard]
        return solver if role == "s" else self.chance(heard) + (1 - self.chance(heard)) * self.config.repair

    def act(self, text, ended):
        """Rewards of an action but for ``accuracy``, and whether it ran a graph with an answer node."""
        pay = collections.Counter()
        if self.over:
            return pay
        self.left -= 1
        pay["actions"] = 1
        named = re.fullmatch(r"[scd](\d)", text) if ended else None
        numbers = {self.number(node): node for node in self.nodes} | {0: None}
        if named and int(named[1]) in numbers:
            node, listens = numbers[int(named[1])], text[0] != "s"
            if (listens and node is None) or (text[0] == "d" and any(heard is node for _, heard in self.nodes)):
                pay["impossible"] = 1
            elif text[0] == "d":
                self.nodes = [other for other in self.nodes if other is not node]
            else:
                self.nodes.append([text[0], node])
                pay["used"] = int(self.answer() is self.nodes[-1])
        elif ended and text == "x" and self.nodes:
            self.over = True
        else:
            pay["impossible"] = 1
        if self.left == 0 or self.over:
            self.over, answer = True, self.answer()
            pay["nodes"], pay["cost"] = len(self.nodes), -self.config.cost * len(self.nodes)
            pay["unanswered"] = int(answer is None)
            pay["chance"] = 0 if answer is None else self.chance(answer)
        return pay


def random_words(rng, n, twins):
    """Completions of three tokens: actions that name nodes which are there, or are not, other bytes, missing ends."""
    rows, texts = [], []
    for twin in twins:
        digit = str(rng.integers(len(twin.nodes) + 2))
        options = ["s" + digit, "c" + digit, "d" + digit, "x", "s", "q1", "c?", "xx", "", "d-"]
        text = options[rng.choice(len(options), p=(0.2, 0.37, 0.13, 0.1, *[0.2 / 6] * 6))]
        ended = rng.random() < 0.95
        ids = [*text.encode(), *([BYTES.EOS] if ended else [ord("s")] * (3 - len(text)))]
        rows.append((ids + [BYTES.PAD] * 3)[:3])
        texts.append((text, ended, len(ids)))
    return np.array(rows, np.int32), texts


@pytest.mark.parametrize("name", CONFIGS)
def test_random_episodes_are_those_of_a_slow_twin(name):
    """With the property of graphs: acyclic, an answer node unless there is no node, and at most as many as actions."""
    config, n, rng = CONFIGS[name], 300, np.random.default_rng(0)
    env, tasks = build.make(config), build.make_tasks(config, n=n)
    twins = [Twin(config, bytes(query.tolist()).decode()) for query in tasks["query"]]
    assert [twin.hard for twin in twins] == (tasks["hard"] == 1).tolist()

    def turn(state, words, length, key):
        return env.observe(state), env.step(key, state, words[None], length[None])

    both, seen = jax.jit(jax.vmap(turn)), collections.Counter()
    find, state = jax.jit(jax.vmap(build.answer_node)), jax.vmap(partial(env.reset, jax.random.key(0)))(tasks)
    for t in range(config.actions + 1):
        words, texts = random_words(rng, n, twins)
        keys = jax.random.split(jax.random.key(t), n)
        shown, (state, paid, done) = jax.device_get(both(state, words, np.array([x[2] for x in texts]), keys))
        graph, nodes = state.graph, np.asarray(find(state.graph))
        for i, twin in enumerate(twins):
            before = twin.over
            assert bool(shown.active[i, 0]) == (not before)
            if not before:
                assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == twin.prompt()
            want = twin.act(*texts[i][:2])
            got = {k: float(v[i, 0]) for k, v in paid.items()}
            right = got.pop("accuracy")
            assert got == pytest.approx({k: want[k] for k in build.COMPONENTS if k != "accuracy"}, abs=1e-5)
            assert bool(done[i]) == twin.over
            assert right in (0, 1) and right <= (twin.over and not before and bool(twin.nodes))
            size = int(graph.size[i])
            assert size == len(twin.nodes) <= config.actions
            assert all(0 <= graph.heard[i, k] <= k for k in range(size)) and not graph.heard[i, size:].any()
            assert (nodes[i] < 0) == (size == 0) and nodes[i] < size
            seen.update(k for k, v in want.items() if v)
            seen[texts[i][0][:1]] += 1 - want["impossible"]
    assert all(twin.over for twin in twins)
    rare = {"unanswered"} if name == "1 action" else set()
    assert {*build.COMPONENTS} - {"accuracy"} - rare <= {k for k, count in seen.items() if count > 2}


def graph_of(text, places=6):
    """A graph from its nodes as prompts show them."""
    roles, heard = [build.WORKERS.index(x) for x in text[::2]], [int(x) for x in text[1::2]]
    pad = lambda row: jnp.array([*row, *[0] * (places - len(row))], jnp.int32)
    return build.Graph(pad(roles), pad(heard), jnp.int32(len(roles)))


ANSWERS = [
    ("", -1, (0, 0)),
    ("s0", 0, (0.98, 0.5)),
    ("s0c1", 1, (0.998, 0.95)),
    ("s0s0", 0, (0.98, 0.5)),  # equally long: the first one
    ("s0s1", 1, (0.98, 0.5)),  # a solver ignores what it hears
    ("s0c1c1", 1, (0.998, 0.95)),
    ("s0c1c2", 2, (0.9998, 0.995)),
    ("s0s0c2c3", 3, (0.9998, 0.995)),
    ("s0c1s2", 2, (0.98, 0.5)),
    ("s0s0s0c3c1", 3, (0.998, 0.95)),
]


@jax.jit
def answered(graph, hard):
    """The answer node of a graph; of 4000 runs the stated probability, and whether the answer is right."""
    keys = jax.random.split(jax.random.key(0), 4000)
    return build.answer_node(graph), jax.vmap(lambda key: build.run(build.Config(), key, graph, hard))(keys)


@pytest.mark.parametrize("text, node, chances", ANSWERS, ids=[row[0] or "none" for row in ANSWERS])
def test_the_answer_of_a_graph_is_right_as_often_as_planted(text, node, chances):
    for hard, chance in enumerate(chances):
        at, (stated, right) = answered(graph_of(text), hard)
        assert int(at) == node
        np.testing.assert_allclose(stated, chance, atol=1e-5)
        assert abs(np.mean(right) - chance) <= 4 * np.sqrt(chance * (1 - chance) / len(right))


def test_workers_err_anew_in_each_episode():
    config, keys = build.Config(), jax.random.split(jax.random.key(0), 12)
    luck = jax.jit(jax.vmap(lambda key: build.run(config, key, graph_of("s0"), 1)[1]))(keys)
    assert len(set(luck.tolist())) == 2


def test_both_types_are_as_likely_on_both_sides():
    config = build.Config(hard_share=0.3)
    for held_out in (False, True):
        tasks = build.make_tasks(config, n=3000, held_out=held_out)
        queries = [bytes(q.tolist()).decode() for q in tasks["query"]]
        assert all(re.fullmatch(r"\d([-+*]\d){3}", q) and q.count("*") == h for q, h in zip(queries, tasks["hard"]))
        assert abs(tasks["hard"].mean() - 0.3) < 0.03
        assert all(splits.is_held_out(q) == held_out for q in queries)
    assert build.prompt_length(build.Config(actions=8)) <= 64


def demonstrated(n=4000, **changes):
    """(whether the query is hard, nodes, left, action) of the samples of a demonstrator with changed settings."""
    config = build.Config(**changes)
    taught = build.demonstrations(config, 0, n)["builder"]
    assert taught["tokens"].shape[1] == build.prompt_length(config)
    for ids, length, said, size in zip(*(taught[k] for k in ("tokens", "length", "completion", "completion_length"))):
        assert said[size - 1] == BYTES.EOS
        query, nodes, left = re.fullmatch(r"B(.{7})\|((?:[sc]\d)*)\|(\d)>", BYTES.decode(ids[:length])).groups()
        yield "*" in query, nodes, int(left), BYTES.decode(said[: size - 1])


def possible(nodes, text):
    """Whether the twin of the environment takes an action on these nodes."""
    twin = Twin(build.Config(actions=8), "")
    for k in range(0, len(nodes), 2):
        assert not twin.act(nodes[k : k + 2], True)["impossible"]
    return not twin.act(text, True)["impossible"]


def test_demonstrators_act_as_often_as_the_settings_say():
    config, rows, kinds = build.Config(), list(demonstrated(8000)), collections.defaultdict(list)
    for hard, nodes, _, text in rows:
        fits = possible(nodes, text)
        kinds["impossible"].append(not fits)
        if nodes:
            kinds[hard].append(text == "x")
            kinds["delete"].append(fits and text[0] == "d")
            if fits and text[0] in "sc":
                kinds["chain"].append(text == f"c{len(nodes) // 2}")
    assert abs(np.mean(kinds["impossible"]) - config.impossible_rate) < 0.02
    assert abs(np.mean(kinds[False]) - config.exit_rates[0]) < 0.03
    assert abs(np.mean(kinds[True]) - config.exit_rates[1]) < 0.03
    assert abs(np.mean(kinds["delete"]) - config.delete_rate) < 0.02
    assert config.chain_rate < np.mean(kinds["chain"]) < config.chain_rate + 0.2  # also one of the others
    assert {text for _, nodes, _, text in rows if not nodes} == {"s0", "s1", "c0", "c1", "d1", "x"}
    assert max(len(nodes) for _, nodes, *_ in rows) >= 8 and {left for _, _, left, _ in rows} == set(range(1, 7))


BAD = [
    ({"actions": 0}, r"config\.env\.args\.actions: expected 1 to 8, got 0"),
    ({"actions": 9}, r"config\.env\.args\.actions: expected 1 to 8, got 9"),
    ({"hard_share": 1.5}, r"config\.env\.args\.hard_share: expected a probability in \[0, 1\], got 1\.5"),
    ({"solver": (0.9, 1.2)}, r"config\.env\.args\.solver: expected two probabilities in \[0, 1\], got \(0\.9, 1\.2\)"),
    ({"solver": (0.9,)}, r"config\.env\.args\.solver: expected tuple of 2"),
    ({"repair": -0.1}, r"config\.env\.args\.repair: expected a probability"),
    ({"cost": -1.0}, r"config\.env\.args\.cost: expected at least 0, got -1\.0"),
    ({"cost": float("nan")}, r"config\.env\.args\.cost: expected float, got nan"),
    ({"exit_rates": (0.5, 0.8)}, r"config\.env\.args\.exit_rates: expected at most 1 - delete_rate - .* = 0\.75, got"),
    ({"exit_rates": (0.5, -0.1)}, r"config\.env\.args\.exit_rates: expected two probabilities in \[0, 1\]"),
    ({"workers": "chain"}, r"config\.env\.args.*workers"),
]


@pytest.mark.parametrize("bad, message", BAD, ids=[str(bad) for bad, _ in BAD])
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("build", bad).check("config.env")
    assert "\n" not in str(error.value)
