"""What recipes list as kept, on ragged inputs, against slow twins of the authors' formulas.

The twins are in tests/reference_recipes.py. One table, `CASES`: a case draws an input, gives it to this project in its
tables and to the twin in the authors' layout, and returns both results. The project computes in float32 and the twins
in float64.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.recipes import advantage_alignment, dr_mas, iac, maac, magrpo, malt, marshal, rema, waltzrl
from jaxmarl_llm.training import losses
from jaxmarl_llm.training.actor_critic import advantages_of
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree
from tests import reference_recipes as authors

pytestmark = pytest.mark.usefixtures("numpy_tables")

SEEDS = range(25)
ROWS = 96  # of every table, so that a rule is compiled once
TASKS, TURNS, ROLES = 4, 6, 3
SIZES = Sizes(TURNS, TASKS, ROLES)


class Table:
    """Nodes, completions and joint actions that are added one by one, as a rollout's tables."""

    def __init__(self, components=("pay",)):
        self.nodes, self.steps, self.moves = [], [], []
        self.rewards = {name: np.zeros((ROWS, ROLES), np.float32) for name in components}

    def act(self, role, task, turn, parent=-1, **pay):
        """One role acts alone; the role is paid ``pay``. Returns the joint action."""
        self.nodes.append((role, task, turn, parent))
        self.steps.append(len(self.nodes) - 1)
        return self.move([len(self.steps) - 1], task, turn, parent, {k: {role: v} for k, v in pay.items()})

    def move(self, steps, task, turn, parent, pay):
        """A joint action of the completions ``steps``; ``pay``: component -> role -> reward."""
        for name, of_role in pay.items():
            for role, value in of_role.items():
                self.rewards[name][len(self.moves), role] = value
        self.moves.append((steps, task, turn, parent))
        return len(self.moves) - 1

    def tree(self):
        assert max(map(len, (self.nodes, self.steps, self.moves))) <= ROWS
        pad = lambda column, fill=0: np.array([*column, *[fill] * (ROWS - len(column))], np.int32)
        below = lambda rows: np.arange(ROWS) < len(rows)
        zero, one = np.zeros(ROWS, np.int32), np.zeros((ROWS, 1), np.int32)
        role, task, turn, parent = (pad(column, fill) for column, fill in zip(zip(*self.nodes), (0, 0, 0, -1)))
        nodes = Nodes(one, zero, role, zero, task, turn, parent, Retrieval.empty(ROWS), below(self.nodes))
        said = below(self.steps)
        steps = Steps(pad(self.steps), one, zero + 1, said[:, None], one * 1.0, ~said, zero, zero, said)
        seats = np.full((ROWS, ROLES), -1, np.int32)
        for j, move in enumerate(self.moves):
            seats[j, : len(move[0])] = move[0]
        task, turn, parent = (pad([m[k] for m in self.moves], fill) for k, fill in ((1, 0), (2, 0), (3, -1)))
        played = below(self.moves)
        leaf = played & ~np.isin(np.arange(ROWS), parent)
        moves = Transitions(seats, parent, task, turn, self.rewards, leaf, played, played)
        return Tree(nodes, steps, moves, Counts(*[zero[0]] * 7))

    def credit(self, rule, **weights):
        """Returns and advantages of the completions, in the order in which they were added."""
        got = assign(rule, self.tree(), weights=weights or {"pay": 1.0}, sizes=SIZES)
        n = len(self.steps)
        assert np.asarray(got.valid[:n]).all() and not np.asarray(got.valid[n:]).any()
        return np.asarray(got.returns[:n]), np.asarray(got.advantage[:n])


# ReMA


TOKENS, CONVERSATIONS = 5, 16  # one shape


def conversations(rng):
    """Trajectories of one to four turns of one to five tokens; shifts within, near and beyond the clips and the cap."""
    out = []
    for _ in range(rng.integers(1, 5)):
        advantage, turns = rng.normal() * 2, []
        for _ in range(rng.integers(1, 5)):
            old = -3 * rng.random(rng.integers(1, TOKENS + 1)) - 0.1
            turns.append((advantage, old, old + rng.choice([0.05, 0.3, 5.0]) * rng.normal(size=len(old))))
        out.append(turns)
    return out


@functools.partial(jax.jit, static_argnames="loss")
def our_loss(loss, new, old, advantage, mask, episode):
    weights = losses.aggregation_weights(mask, mask.any(-1).astype(jnp.float32), loss.aggregation, None, episode)

    def value(x):
        data = losses.RowData(weights, jnp.broadcast_to(advantage[:, None], x.shape), x * 0, old, None)
        return losses.row_loss(loss, x, x * 0, data)[0]

    return jax.value_and_grad(value)(new)


def rema_case(rng, clip_mode="turn", agg_mode="trajectory", clips=True):
    """The loss, and its gradient by central differences of the twin.

    ``clips`` False: without the two clips, which hide the cap of the log-ratio.
    """
    talks = conversations(rng)
    rows = [(k, t) for k, turns in enumerate(talks) for t in range(len(turns))]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    old, new = np.zeros((CONVERSATIONS, TOKENS)), np.full((CONVERSATIONS, TOKENS), np.nan)
    advantage, mask = np.zeros(CONVERSATIONS), np.zeros((CONVERSATIONS, TOKENS), bool)
    episode = np.arange(CONVERSATIONS)
    for i, (k, t) in enumerate(rows):
        advantage[i], before, after = talks[k][t]
        n = len(before)
        old[i, :n], new[i, :n], mask[i, :n] = before, after, True
        episode[i] = next(j for j, (other, _) in enumerate(rows) if other == k)
    loss = rema.Config().loss
    if agg_mode == "turn":
        loss = dataclasses.replace(loss, aggregation="sequence")
    if clip_mode == "token":
        own = {"ratio_level": "token"}
        if agg_mode == "trajectory":
            own["aggregation"] = "jaxmarl_llm.recipes.rema:mean_over_tokens"
        loss = dataclasses.replace(loss, **own)
    if not clips:
        loss = dataclasses.replace(loss, clip_low=None, dual_clip=None)
    bounds = {} if clips else {"clip": np.inf, "dual": np.inf}
    value, gradient = our_loss(loss, *(jnp.asarray(x, jnp.float32) for x in (new, old, advantage)), mask, episode)

    def twin(place=None, step=0.0):
        moved = [[(a, x, np.array(y)) for a, x, y in turns] for turns in talks]
        if place is not None:
            moved[place[0]][place[1]][2][place[2]] += step
        return authors.rema_loss(moved, clip_mode, agg_mode, **bounds)

    size = 1e-6
    places = [(i, k, t, r) for i, (k, t) in enumerate(rows) for r in range(len(talks[k][t][1]))]
    slopes = [(twin((k, t, r), size) - twin((k, t, r), -size)) / (2 * size) for _, k, t, r in places]
    ours = [float(gradient[i, r]) for i, _, _, r in places]
    return np.array([float(value), *ours]), np.array([twin(), *slopes])


def rema_advantage_case(rng):
    """G episodes of a task, each of some turns of both roles; statistics count an episode once."""
    return grouped_case(rng, rema.algorithm(rema.Config()).credit, 2, across_steps=False)


# Dr. MAS


def grouped_case(rng, rule, group, across_steps):
    """Episodes in which roles act a ragged number of times, paid at the end."""
    table, rows = Table(), []
    for task in range(TASKS):
        for trajectory in range(rng.integers(group, group + 3)):
            score, parent = rng.choice([0.0, 0.5, 1.0, rng.normal()]), -1
            roles = [0, *(int(r) for r in rng.integers(0, 2, rng.integers(1, 4)))]
            roles = [*roles, 1] if group > 1 else roles  # where no group may have one trajectory, both roles act
            for turn, role in enumerate(roles):
                last = turn == len(roles) - 1
                pay = {"pay": dict.fromkeys(range(ROLES), score)} if last else {}
                table.nodes.append((role, task, turn, parent))
                table.steps.append(len(table.nodes) - 1)
                parent = table.move([len(table.steps) - 1], task, turn, parent, pay)
                rows.append((score, (task, role), (task, trajectory)))
    return table.credit(rule)[1], np.array(authors.grpo_by_index(*zip(*rows), across_steps))


def dr_mas_case(rng, over="steps"):
    credit = dataclasses.replace(dr_mas.Config().credit, stats_over=over)
    rule = dr_mas.algorithm(dr_mas.Config(credit=credit)).credit
    return grouped_case(rng, rule, 1, across_steps=over == "steps")


# MARSHAL


def games(rng, quiet):
    """Games of one to five moves. ``quiet``: the last move of each player alone is paid, with few values: ties.

    The values are no round numbers, so that sums are equal only where they add equal numbers in one order: which sums
    are distinct is then the same in float32.
    """
    out, few = [], rng.normal(size=3)
    for _ in range(rng.integers(2, 7)):
        moves = [(int(r), 0.0) for r in rng.integers(0, 2, rng.integers(1, 6))]
        for t, (role, _) in enumerate(moves):
            if not quiet:
                moves[t] = (role, float(rng.normal()))
            elif role not in [r for r, _ in moves[t + 1 :]]:
                moves[t] = (role, float(rng.choice(few)))
        out.append(moves)
    return [[(0, 1.1), (1, -1.2)], [(1, 2.3), (0, -0.7)], *out]  # two turns of each player at least


def marshal_case(rng, form):
    table, drawn = Table(), games(rng, quiet=rng.random() < 0.5)
    for game in drawn:
        parent = -1
        for turn, (role, reward) in enumerate(game):
            parent = table.act(role, 0, turn, parent, pay=reward)
    rule = marshal.algorithm(marshal.Config(form=form)).credit
    return table.credit(rule)[1], np.array((authors.marshal_text if form == "text" else authors.marshal_code)(drawn))


# Advantage Alignment


def alignment_case(rng, **changes):
    """Groups of matches of both players, all of one length and all with the same draws within a group."""
    cfg = advantage_alignment.Config(**changes)
    table, want, count = Table(), [], [0, 0]
    matches, turns = int(rng.integers(2, 5)), int(rng.integers(1, TURNS - 1))
    for task in range(int(rng.integers(1, 3))):
        rewards = [rng.normal(size=(matches, turns)) for _ in range(2)]
        credits = authors.alignment_credits(rewards, cfg.credit.discount, cfg.beta, cfg.extra_discount, cfg.fade)
        for b in range(matches):
            parent = -1
            for t in range(turns):
                table.nodes += [(player, task, t, parent) for player in range(2)]
                table.steps += [len(table.nodes) - 2, len(table.nodes) - 1]
                seats = [len(table.steps) - 2, len(table.steps) - 1]
                parent = table.move(seats, task, t, parent, {"pay": {p: rewards[p][b, t] for p in range(2)}})
                want += [credits[p][b, t] for p in range(2)]
        count[0] += matches
    return table.credit(advantage_alignment.algorithm(cfg).credit)[1], np.array(want)


# MAGRPO


def library_tree(rng, actions, turns):
    """A node (rewards, children) whose joint actions may end: early termination leaves children out."""
    rewards = [float(r) / 4 for r in rng.integers(-9, 10, actions)]
    played_on = turns > 1 and rng.random() < 0.7
    return rewards, [library_tree(rng, actions, turns - 1) if played_on else None for _ in range(actions)]


def magrpo_case(rng, joint, **credit):
    agents, samples = 2, 2
    actions = [*itertools.product(range(samples), repeat=agents)] if joint == "cross" else [(j, j) for j in range(2)]
    settings = Credit(**{"group": "node", "normalise": "none", "discount": 0.9, "joint_action_reduce": "sum"} | credit)
    cfg = magrpo.Config(tree_mode="tree", joint=joint, credit=settings)
    table, want = Table(), []

    def walk(node, task, turn, parent):
        standard = cfg.credit.normalise == "std"
        want.extend(
            itertools.chain(
                *authors.magrpo_advantages(
                    node, samples, agents, cfg.credit.discount, joint, cfg.credit.baseline, standard
                )
            )
        )
        seats = []
        for agent in range(agents):
            table.nodes.append((agent, task, turn, parent))
            seats.append([len(table.steps) + s for s in range(samples)])
            table.steps += [len(table.nodes) - 1] * samples
        moves = []
        for action, reward in zip(actions, node[0], strict=True):
            pay = {"pay": dict.fromkeys(range(ROLES), reward)}
            moves.append(table.move([seats[a][u] for a, u in enumerate(action)], task, turn, parent, pay))
        for move, child in zip(moves, node[1], strict=True):
            if child is not None:
                walk(child, task, turn + 1, move)

    for task in range(2):
        walk(library_tree(rng, len(actions), 2), task, 0, -1)
    return table.credit(magrpo.algorithm(cfg).credit)[1], np.array(want)


def magrpo_loss_case(rng, loss=magrpo.Config().loss):
    """Summed log-probs and the mean over completions, through the recipe's loss."""
    lengths, advantage = rng.integers(1, TOKENS + 1, CONVERSATIONS), rng.normal(size=CONVERSATIONS)
    mask = np.arange(TOKENS) < lengths[:, None]
    logprobs = np.where(mask, -3 * rng.random(mask.shape), np.nan)
    arrays = [jnp.asarray(x, jnp.float32) for x in (logprobs, logprobs, advantage)]
    _, gradient = our_loss(loss, *arrays, mask, jnp.arange(CONVERSATIONS))
    rows = [row[:n] for row, n in zip(logprobs, lengths)]
    size, slopes = 1e-6, np.zeros(mask.shape)
    for i, r in zip(*np.nonzero(mask)):
        up, down = ([x.copy() for x in rows] for _ in range(2))
        up[i][r] += size
        down[i][r] -= size
        slopes[i, r] = (authors.magrpo_loss(advantage, up) - authors.magrpo_loss(advantage, down)) / (2 * size)
    return np.asarray(gradient), slopes


# IAC and MAAC


STATIC = ("roles", "max_turns", "discount", "gae_lambda", "whiten")
td_advantages = jax.jit(advantages_of, static_argnames=STATIC)


def actor_critic_case(rng, joint):
    """Episodes of one to three turns of all roles at once. ``joint``: one estimate of a state for all roles."""
    cfg = (maac if joint else iac).Config()
    table, values, episodes = Table(), [], [[] for _ in range(ROLES)]
    for task in range(rng.integers(2, 9)):
        parent, turns = -1, rng.integers(1, 4)
        for role in range(ROLES):
            episodes[role].append([])
        for turn in range(turns):
            paid, said, steps = rng.normal(), rng.normal(size=ROLES), []
            for role in range(ROLES):
                values.append(said[0 if joint else role])
                episodes[role][-1].append((paid, values[-1]))
                table.nodes.append((role, task, turn, parent))
                table.steps.append(len(table.nodes) - 1)
                steps.append(len(table.steps) - 1)
            parent = table.move(steps, task, turn, parent, {"pay": dict.fromkeys(range(ROLES), paid)})
    padded = jnp.zeros(ROWS).at[: len(values)].set(jnp.array(values))
    gain, has, target, known = td_advantages(
        table.tree(),
        padded,
        {"pay": 1.0},
        roles=ROLES,
        max_turns=TURNS,
        discount=cfg.credit.discount,
        gae_lambda=cfg.gae_lambda,
        whiten=cfg.whiten,
    )
    n = len(values)
    assert np.asarray(has[:n]).all() and np.asarray(known[:n]).all() and not np.asarray(has[n:]).any()
    want, aims = np.zeros(n), np.zeros(n)
    for role in range(ROLES):
        advantage, aim = authors.actor_critic(episodes[role], cfg.credit.discount)
        mine = [k for k in range(n) if table.nodes[k][0] == role]  # by episode and turn
        want[mine], aims[mine] = np.concatenate(advantage), np.concatenate(aim)
    return np.concatenate([gain[:n], target[:n]]), np.concatenate([want, aims])


def actor_critic_loss_case(rng):
    """The policy loss of both recipes is MAGRPO's, at the sampling policy."""
    assert iac.Config().loss == maac.Config().loss
    return magrpo_loss_case(rng, iac.Config().loss)


# WaltzRL


def waltzrl_case(rng, step):
    """Episodes of no to four rounds; the conversation agent answers first and after each round but a last one."""
    cfg = waltzrl.Config(stage_one=1, reward={"response": 1.0, "improvement": 0.7, "label": 0.5, "format": 0.25})
    weights = {k: float(v) for k, v in waltzrl.reward_schedule(cfg)(step).items()}
    paid = (0.7, 0.5 if step == 0 else 0.0, 0.25)  # alpha, lambda, which ends with stage 1, and gamma
    table, want = Table(("response", "improvement", "label", "format")), []
    for _ in range(int(rng.integers(2, 8))):
        rounds = int(rng.integers(0, 3))
        answers = [float(x) for x in rng.integers(0, 2, rounds + int(rounds == 0 or rng.random() < 0.5))]
        flags, verdicts = ([int(x) for x in rng.integers(0, 4, rounds)] for _ in range(2))
        form = [float(x) for x in rng.integers(0, 2, rounds)]
        of_answers, of_feedback = authors.waltz_rewards(answers, flags, verdicts, form, *paid)
        parent, turn = -1, 0
        for t, answer in enumerate(answers):
            pay = {"response": {0: answer}}
            if t:  # what the feedback before changed
                right = float(flags[t - 1] == verdicts[t - 1])
                pay["improvement"] = {1: right * (answer - answers[t - 1])}
            table.nodes.append((0, 0, turn, parent))
            table.steps.append(len(table.nodes) - 1)
            parent = table.move([len(table.steps) - 1], 0, turn, parent, pay)
            want.append((0, of_answers[t]))
            if t < rounds:
                label = float(flags[t] == verdicts[t])
                parent = table.act(1, 0, turn + 1, parent, label=label, format=form[t])
                want.append((1, of_feedback[t]))
            turn += 2
    returns, advantage = table.credit(waltzrl.algorithm(cfg).credit, **weights)
    values = [v for _, v in want]
    normalised = {k: iter(authors.batch_normalised(own)) for k in range(2) if (own := [v for r, v in want if r == k])}
    return np.concatenate([returns, advantage]), np.array([*values, *(next(normalised[role]) for role, _ in want)])


# MALT


def malt_case(rng):
    """Full and ragged trees: values of all samples, labels, and pairs of siblings."""
    cfg, table, want = malt.Config(), Table(("accuracy",)), []
    width = lambda: int(rng.integers(1, 4))
    leaves = [[[float(x) for x in rng.integers(0, 2, width())] for _ in range(width())] for _ in range(width())]
    generators, verifiers, refiners = authors.malt_values(leaves)

    def siblings(role, turn, parent, values):
        """Samples of one node, and their moves; the outcome is paid to all at the refiner."""
        table.nodes.append((role, 0, turn, parent))
        moves = []
        for value in values:
            table.steps.append(len(table.nodes) - 1)
            pay = {"accuracy": dict.fromkeys(range(ROLES), value)} if role == 2 else {}
            moves.append(table.move([len(table.steps) - 1], 0, turn, parent, pay))
        want.append((len(table.steps) - len(values), values))
        return moves

    for i, root in enumerate(siblings(0, 0, -1, generators)):
        for j, verdict in enumerate(siblings(1, 1, root, verifiers[i])):
            siblings(2, 2, verdict, refiners[i][j])
    values, _ = table.credit(cfg.credit, accuracy=1.0)
    node, pairs = np.array(table.steps), np.zeros((ROWS, ROWS))
    ours = malt.labelled(cfg, {"all": {"value": values, "node": node}})["all"]
    pairs[tuple(ours["pairs"].T)] = 1
    expected, order = np.zeros((ROWS, ROWS)), np.zeros(len(values))
    for first, of_node in want:
        order[first : first + len(of_node)] = of_node
        for i, j in authors.malt_pairs(of_node):
            expected[first + i, first + j] = 1
    return np.concatenate([values, pairs.ravel()]), np.concatenate([order, expected.ravel()])


CASES = {
    "rema, loss of turns": rema_case,
    "rema, loss of turns, mean over turns": functools.partial(rema_case, agg_mode="turn"),
    "rema, loss of tokens, mean over trajectories": functools.partial(rema_case, clip_mode="token"),
    "rema, loss of tokens, mean over turns": functools.partial(rema_case, clip_mode="token", agg_mode="turn"),
    "rema, loss of turns, cap alone": functools.partial(rema_case, clips=False),
    "rema, loss of tokens, cap alone": functools.partial(rema_case, clip_mode="token", clips=False),
    "rema, advantage": rema_advantage_case,
    "dr_mas, over steps": dr_mas_case,
    "dr_mas, over trajectories": functools.partial(dr_mas_case, over="episodes"),
    "marshal, text": functools.partial(marshal_case, form="text"),
    "marshal, code": functools.partial(marshal_case, form="code"),
    "advantage_alignment, paper": alignment_case,
    "advantage_alignment, as shipped": functools.partial(alignment_case, extra_discount=True),
    "advantage_alignment, faded": functools.partial(alignment_case, fade=True),
    "magrpo, aligned": functools.partial(magrpo_case, joint="aligned"),
    "magrpo, cross": functools.partial(magrpo_case, joint="cross"),
    "magrpo, MARLOO": functools.partial(magrpo_case, joint="cross", baseline="loo"),
    "magrpo, MAREMAX": functools.partial(magrpo_case, joint="aligned", baseline="max"),
    "magrpo, MAREINFORCE": functools.partial(magrpo_case, joint="cross", baseline="none"),
    # Returns are exact in float32, so that a group whose returns are equal has a std of 0 in both.
    "magrpo, std": functools.partial(magrpo_case, joint="cross", normalise="std", discount=0.5),
    "magrpo, loss": magrpo_loss_case,
    "iac, advantages and targets": functools.partial(actor_critic_case, joint=False),
    "maac, advantages and targets": functools.partial(actor_critic_case, joint=True),
    "iac and maac, loss": actor_critic_loss_case,
    "waltzrl, stage 1": functools.partial(waltzrl_case, step=0),
    "waltzrl, stage 2": functools.partial(waltzrl_case, step=1),
    "malt": malt_case,
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_kept_equals_the_twin_of_the_authors_formula(name):
    moved = 0.0
    for seed in SEEDS:
        got, want = CASES[name](np.random.default_rng(seed))
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4, err_msg=f"seed {seed}")
        moved = max(moved, float(np.ptp(want)))
    assert moved > 0.1  # inputs that all give one number would show nothing


def test_golden_numbers_of_the_twins():
    """The twins themselves, on numbers computed by hand or by the authors' code."""
    turns = [(1.0, np.log([0.5, 0.4]), np.log([0.6, 0.44])), (1.0, np.log([0.9, 0.2]), np.log([0.9, 0.1]))]
    ratios = [-authors.rema_loss([[turn]], "turn", "trajectory", clip=9.0) for turn in turns]
    np.testing.assert_allclose(ratios, [1.14891, 0.70711], atol=1e-5)
    rewards = [np.array([[3, 3, 1], [5, 1, 1]]), np.array([[3, 3, 1], [0, 1, 1]])]
    for extra, want in ((False, 1.6928), (True, 1.7051)):  # the second is what the authors' code prints
        first, _ = authors.alignment_credits(rewards, 0.96, 2.0, extra, False)
        assert first[0, 1] == pytest.approx(want, abs=5e-5)
    np.testing.assert_allclose(
        authors.grpo_by_index([0, 0, 1, 0, 0, 1], [0] * 6, range(6), True),
        [-0.6455] * 2 + [1.291] + [-0.6455] * 2 + [1.291],
        atol=1e-4,
    )
    assert authors.magrpo_returns(([1.0, 3.0], [([2.0, 4.0], [None] * 2), ([0.0, 2.0], [None] * 2)]), 0.9) == [3.7, 3.9]
    assert authors.marshal_text([[(0, 0.0), (0, 1.0)], [(0, 0.0), (0, 0.0), (0, -1.0)]]) == pytest.approx(
        [1.2, 1.2, -0.8, -0.8, -0.8]
    )
