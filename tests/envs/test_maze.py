"""The split maze against a slow twin in words: rules, views, topologies, the generator's figures, demonstrations."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs import registry
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
SMALL = dict(size=3, shortest=2, longest=4, moves=4, tasks=16)
CONFIGS = {
    "pair": maze.Config(**SMALL),
    "talk": maze.Config(**SMALL, message=2),
    "full": maze.Config(**SMALL, view="full"),
    "solo": maze.Config(**SMALL, agents=1),
    "ring": maze.Config(**SMALL, agents=4, topology="ring"),
    "random": maze.Config(**SMALL, agents=3, topology="random", message=1),
}
ENVS = {name: maze.make(config) for name, config in CONFIGS.items()}
compiled = functools.cache(
    lambda name: tuple(jax.jit(f) for f in (ENVS[name].reset, ENVS[name].observe, ENVS[name].step))
)


def queue(walls, goal):
    """Distances to the goal {cell: moves}, one cell at a time."""
    n = len(walls)
    out, todo = {goal: 0}, [goal]
    for at in todo:
        for row, column in STEPS.values():
            to = at[0] + row, at[1] + column
            if 0 <= to[0] < n and 0 <= to[1] < n and not walls[to[0]][to[1]] and to not in out:
                out[to] = out[at] + 1
                todo.append(to)
    return out


class Twin:
    """The game in words, written from the docstring."""

    def __init__(self, config, task, partners):
        n = self.n = config.size
        cell = lambda c: divmod(int(c), n)
        self.config, self.partners = config, partners
        self.walls = [[bool(task["walls"][r * n + c]) for c in range(n)] for r in range(n)]
        self.owner = [[int(task["owner"][r * n + c]) for c in range(n)] for r in range(n)]
        self.at, self.goal = cell(task["start"]), cell(task["goal"])
        self.far = queue(self.walls, self.goal)
        self.first = self.far[self.at]
        self.said, self.outcome, self.turn, self.agreed, self.done = ["-"] * config.agents, "-", 0, 0, False

    def mark(self, row, column, me):
        if (row, column) == self.at:
            return "@"
        if row == self.n or column == self.n:
            return "#"
        if (row, column) == self.goal:
            return "G"
        if self.config.view == "split" and self.owner[row][column] != me:
            return "?"
        return "#" if self.walls[row][column] else "."

    def prompt(self, me):
        n, letters = self.n, "abcdefghijklmnopqrstuvwxyz"
        text = str(me + 1)
        for down in range(n + 1):
            for right in range(n + 1):
                text += self.mark((self.at[0] + down) % (n + 1), (self.at[1] + right) % (n + 1), me)
        text += "".join(letters[self.goal[i] - self.at[i] + n - 1] for i in (0, 1))
        text += self.outcome + self.said[me]
        for who in self.partners[min(self.turn, self.config.moves - 1)][me]:
            text += f"{who + 1}{self.said[who]}"
        return text + ">"

    def say(self, replies):
        covered = lambda: max(0, 1 - self.far[self.at] / self.first)
        before = covered()
        moves = [r[:1] if r[:1] in ("U", "D", "L", "R") else "?" for r in replies]
        tail = lambda r: "".join(c if c.isascii() and c.isalnum() else "?" for c in r[1 : 1 + self.config.message])
        self.said = [m + tail(r) for m, r in zip(moves, replies)]
        agree = moves[0] != "?" and all(m == moves[0] for m in moves)
        self.outcome = "="
        if agree:
            step = STEPS[moves[0]]
            to = self.at[0] + step[0], self.at[1] + step[1]
            self.outcome = "+" if to in self.far else "#"
            self.at = to if to in self.far else self.at
        self.agreed, self.turn = self.agreed + agree, self.turn + 1
        self.done = self.at == self.goal or self.turn == self.config.moves
        return {
            "accuracy": float(self.at == self.goal),
            "progress": covered() - before,
            "agreement": self.agreed / self.turn if self.done else 0.0,
        }


def ids(text, width=4):
    said = [*text.encode(), BYTES.EOS][:width]
    return said + [BYTES.PAD] * (width - len(said)), len(said)


def task_of(config, seed):
    return {k: v[0] for k, v in maze.make_tasks(config, seed, 1).items()}


def prompts(name, state):
    obs = compiled(name)[1](state)
    rows = [BYTES.decode(np.asarray(t[:n])) for t, n in zip(obs.tokens, obs.length)]
    return rows, np.asarray(obs.active)


words = st.one_of(st.sampled_from("UDLR"), st.text("UDLRudx1?>- é", max_size=3))


@settings(max_examples=60, deadline=None, database=None)
@given(
    name=st.sampled_from(sorted(CONFIGS)),
    seed=st.integers(0, 500),
    replies=st.lists(st.lists(words, min_size=4, max_size=4), min_size=4, max_size=4),
    follow=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_game_is_the_twins_game(name, seed, replies, follow):
    """``follow``: all say what the first one says, so that games move."""
    config, (reset, _, step) = CONFIGS[name], compiled(name)
    task = task_of(config, seed)
    state = reset(jax.random.key(seed), task)
    twin = Twin(config, task, np.asarray(state.partners))
    for said, same in zip(replies, follow):
        said = [said[0]] * config.agents if same else said[: config.agents]
        seen, active = prompts(name, state)
        assert seen == [twin.prompt(me) for me in range(config.agents)] and active.all()
        assert max(map(len, seen)) <= maze.prompt_length(config)
        want = twin.say(said)
        rows = [ids(s) for s in said]
        tokens, length = jnp.array([r for r, _ in rows]), jnp.array([n for _, n in rows])
        state, rewards, done = step(KEY, state, tokens, length)
        for component, value in want.items():
            np.testing.assert_allclose(rewards[component], [value] * config.agents, atol=1e-6, err_msg=component)
        assert bool(done) == twin.done and set(rewards) == set(ENVS[name].components)
        if twin.done:
            break
    assert twin.done and not prompts(name, state)[1].any()
    again, rewards, done = step(KEY, state, tokens, length)
    assert done and not any(np.asarray(r).any() for r in rewards.values())
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, again))


def test_the_shortest_way_wins_before_the_last_turn_and_pays_all_progress():
    config, (reset, _, step) = CONFIGS["pair"], compiled("pair")
    for seed in range(8):
        task = task_of(config, seed)
        state, total, far = reset(KEY, task), 0.0, int(task["distance"][task["start"]])
        for turn in range(far):
            row, column = divmod(int(state.cell), 3)
            near = {m: task["distance"].reshape(3, 3)[row + r, column + c] for m, (r, c) in STEPS.items()
                    if 0 <= row + r < 3 and 0 <= column + c < 3}  # fmt: skip
            move = next(m for m, d in near.items() if d == far - turn - 1)
            tokens, length = jnp.array([ids(move)[0]] * 2), jnp.array([2, 2])
            state, rewards, done = step(KEY, state, tokens, length)
            total += float(rewards["progress"][0])
            assert bool(done) == (turn == far - 1)
        assert rewards["accuracy"].tolist() == [1, 1] and rewards["agreement"].tolist() == [1, 1]
        assert total == pytest.approx(1.0)


@pytest.mark.parametrize("agents", (1, 2, 3, 4))
def test_the_views_partition_the_cells(agents):
    config = maze.Config(agents=agents, tasks=64)
    owner = maze.make_tasks(config)["owner"]
    shares = np.stack([(owner == a).sum(1) for a in range(agents)])
    assert (shares.sum(0) == 36).all() and np.ptp(shares) <= 1
    if agents == 2:
        assert abs((owner == 0).mean(0) - 0.5).max() < 0.3 and len(np.unique(owner, axis=0)) == 64
        state = jax.vmap(maze.make(config).reset, (None, 0))(KEY, maze.make_tasks(config))
        seen = jax.vmap(maze.make(config).observe)(state).tokens[:, :, 2:50]  # the map without its first cell, @
        hidden = np.asarray(seen == ord("?"))
        assert not (hidden[:, 0] & hidden[:, 1]).any()  # what one does not see the other does
        free = ~hidden[:, 0] & ~hidden[:, 1]  # goal and border: 1 + 13
        np.testing.assert_array_equal(free.sum(1), 14)


def test_partners():
    of = lambda n, topology, key=KEY: np.asarray(maze.partners(maze.Config(agents=n, topology=topology), key))
    assert of(1, "complete").shape == (20, 1, 0) == of(1, "ring").shape == of(1, "random").shape
    for topology in maze.TOPOLOGIES:  # with two agents all are the pair
        np.testing.assert_array_equal(of(2, topology), [[[1], [0]]] * 20)
    assert of(4, "complete")[0].tolist() == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    assert of(4, "ring")[7].tolist() == [[1, 3], [0, 2], [1, 3], [0, 2]]
    np.testing.assert_array_equal(of(3, "ring"), of(3, "complete"))
    drawn = of(4, "random")
    assert drawn.shape == (20, 4, 1) and not (drawn[..., 0] == np.arange(4)).any()
    assert {tuple(np.unique(drawn[:, a])) for a in range(4)} == {(1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)}
    assert not np.array_equal(drawn, of(4, "random", jax.random.key(1)))


# The generator


def test_the_generators_figures():
    """6x6, 30 % walls, path 7 to 9: 12.8 % +- 1 are taken; a random legal walk solves about 6 % in 20 moves."""
    config = maze.Config()
    taken = maze.draw(np.random.default_rng(0), config, 20_000)["fits"].mean()
    assert abs(taken - 0.128) < 0.01  # standard error 0.0023
    solved = (maze.walks(np.random.default_rng(1), maze.make_tasks(config, 2, 4000), 20) == 1).mean()
    assert abs(solved - 0.06) < 0.01  # standard error 0.0038


def test_mazes_are_as_wanted():
    config = maze.Config()
    tasks = maze.make_tasks(config, 3, 200)
    for i in range(200):
        walls = tasks["walls"][i].reshape(6, 6)
        start, goal = divmod(int(tasks["start"][i]), 6), divmod(int(tasks["goal"][i]), 6)
        far = queue(walls, goal)
        assert not walls[start] and not walls[goal] and 7 <= far[start] <= 9
        want = [[far.get((r, c), -1) for c in range(6)] for r in range(6)]
        np.testing.assert_array_equal(tasks["distance"][i].reshape(6, 6), want)
    drawn = maze.draw(np.random.default_rng(4), config, 4000)
    assert abs(drawn["walls"].mean() - 0.3) < 0.01
    starts = np.bincount(drawn["start"], minlength=36) / 4000
    assert abs(starts - 1 / 36).max() < 0.012 and (drawn["start"] != drawn["goal"]).all()


def test_mazes_depend_on_the_seed_alone():
    """The same in solo and in any company; the first ones of more are the same."""
    config = maze.Config(**SMALL)
    first = maze.make_tasks(config, 7, 20)
    for other in (dataclasses.replace(config, agents=1), dataclasses.replace(config, agents=4, topology="random")):
        again = maze.make_tasks(other, 7, 600)
        for name in ("walls", "start", "goal", "distance"):
            np.testing.assert_array_equal(first[name], again[name][:20])
    assert not np.array_equal(first["walls"], maze.make_tasks(config, 8, 20)["walls"])


@settings(max_examples=40, deadline=None, database=None)
@given(bits=st.integers(0, 2**16 - 1), goal=st.integers(0, 15), start=st.integers(0, 15))
def test_distances_and_ways_are_those_of_a_queue(bits, goal, start):
    walls = np.array([bits >> i & 1 for i in range(16)], bool).reshape(4, 4)
    walls[divmod(goal, 4)] = walls[divmod(start, 4)] = False
    far = queue(walls, divmod(goal, 4))
    want = [[far.get((r, c), -1) for c in range(4)] for r in range(4)]
    np.testing.assert_array_equal(maze.distances(walls[None], np.array([goal]))[0], want)
    row, column = divmod(start, 4)
    here = far.get((row, column))
    good = [here is not None and far.get((row + r, column + c)) == here - 1 for r, c in STEPS.values()]
    np.testing.assert_array_equal(maze.ways(walls[None], np.array([goal]), np.array([start]))[0], good)


def test_a_walk_stays_in_the_maze_and_at_the_goal():
    corridor = {"walls": np.zeros((1, 4), int), "start": np.array([0]), "goal": np.array([3])}
    corridor["walls"][0, 2] = 1  # 2x2 with one wall: there is one way
    corridor["distance"] = np.array([[2, 1, -1, 0]])
    share = lambda moves: np.array([maze.walks(np.random.default_rng(s), corridor, moves)[0] for s in range(400)]) == 1
    assert share(1).mean() == 0 and abs(share(2).mean() - 0.5) < 0.1 and abs(share(4).mean() - 0.75) < 0.1


# Demonstrations


@pytest.mark.parametrize("name", CONFIGS)
def test_demonstrators_go_by_what_they_see(name):
    """With skill 1 the first letter begins a shortest way over the free and unseen cells; messages go on along it."""
    config = dataclasses.replace(CONFIGS[name], skill=1.0)
    for role, rows in maze.demonstrations(config, 0, 60).items():
        seen = followed = 0
        for i in range(60):
            asked = BYTES.decode(rows["tokens"][i, : rows["length"][i]])
            said = BYTES.decode(rows["completion"][i, : rows["completion_length"][i]])
            assert maze.ROLES.index(role) + 1 == int(asked[0]) and asked.endswith(">") and set(said) <= set("UDLR")
            board = [asked[1 + 4 * r : 5 + 4 * r] for r in range(4)]  # wrapped around, the position first
            border = (
                next(c for c in range(1, 4) if all(board[r][c] == "#" for r in range(4))),
                next(r for r in range(1, 4) if board[r] == "####"),
            )
            goal = next((r, c) for r in range(4) for c in range(4) if board[r][c] == "G")
            wraps = lambda at: (at[0] % 4, at[1] % 4)
            far, todo = {goal: 0}, [goal]
            for at in todo:
                for r, c in STEPS.values():
                    to = wraps((at[0] + r, at[1] + c))
                    if board[to[0]][to[1]] != "#" and to not in far:
                        far[to] = far[at] + 1
                        todo.append(to)
            at, seen = (0, 0), seen + (border is not None)
            if at not in far:
                continue  # no way that it knows of: any direction
            for letter in said:
                to = wraps((at[0] + STEPS[letter][0], at[1] + STEPS[letter][1]))
                assert far[to] == far[at] - 1
                at, followed = to, followed + 1
        assert seen == 60 and followed >= 50
        assert rows["tokens"].shape == (60, maze.prompt_length(config))
        assert rows["completion"].shape == (60, config.max_new_tokens)


def test_clumsy_demonstrators_and_places():
    rows = maze.demonstrations(dataclasses.replace(CONFIGS["pair"], skill=0.0), 0, 400)["two"]
    share = np.bincount(rows["completion"][:, 0], minlength=256)[[*b"UDLR"]] / 400
    assert share.sum() == 1 and abs(share - 0.25).max() < 0.1
    outcome = np.bincount(rows["tokens"][:, 19], minlength=256)[[*b"-+=#"]] / 400
    np.testing.assert_allclose(outcome, [0.25, 0.75 * 0.25 * 0.7, 0.75 * 0.75, 0.75 * 0.25 * 0.3], atol=0.08)


def test_demonstrators_who_defer():
    """After a disagreement, and only then, they say what they heard: the reply at the end of the prompt."""
    mild, meek = (dataclasses.replace(CONFIGS["pair"], defer=d) for d in (0.0, 1.0))
    rows, plain = maze.demonstrations(meek, 0, 200)["two"], maze.demonstrations(mild, 0, 200)["two"]
    np.testing.assert_array_equal(rows["tokens"], plain["tokens"])
    heard, parted = rows["tokens"][:, 22], rows["tokens"][:, 19] == ord("=")
    np.testing.assert_array_equal(rows["completion"][:, 0], np.where(parted, heard, plain["completion"][:, 0]))
    assert 0 < parted.sum() < 200 and not np.array_equal(rows["completion"], plain["completion"])


# Bad input


@pytest.mark.parametrize(
    "args, message",
    [
        ({"agents": 0}, "config.env.args.agents: expected 1 to 9, got 0"),
        ({"agents": 10}, "config.env.args.agents"),
        ({"topology": "star"}, "config.env.args.topology"),
        ({"view": "half"}, "config.env.args.view"),
        ({"size": 1}, "config.env.args.size"),
        ({"shortest": 5, "longest": 4}, "config.env.args.shortest: expected 1 to longest=4, got 5"),
        ({"walls": 1.5}, "config.env.args.walls: expected a probability in [0, 1], got 1.5"),
        ({"skill": -1}, "config.env.args.skill"),
        ({"moves": 0}, "config.env.args.moves: expected 1 to"),
        ({"size": 3, "shortest": 9, "longest": 9}, "config.env.args.shortest: expected shorter paths"),
        ({"size": 3, "walls": 1.0, "shortest": 1}, "config.env.args.shortest: expected shorter paths"),
    ],
)
def test_bad_input_is_one_line(args, message, monkeypatch):
    monkeypatch.setattr(maze, "BLOCKS", 4)
    with pytest.raises(ConfigError) as error:
        maze.make_tasks(registry.EnvConfig("maze", args).build())
    assert message in str(error.value) and "\n" not in str(error.value)
