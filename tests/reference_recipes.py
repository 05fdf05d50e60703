"""Slow twins of published systems: loops in float64 over the data layout of the authors' code, one function a formula.

A twin is written from the facts of the authors' public code, or of the paper's text where there is no code. Each
function names its source. No twin reads this project's tables or calls its code.
"""

from __future__ import annotations

import itertools
import math

import numpy as np


def mean(values):
    return math.fsum(values) / len(values)


def std(values, ddof):
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - ddof))


# ReMA: ziyuwan/ReMA-public 24b5b47, verl/rema_trainer/ppo/core_algos.py


def rema_loss(trajectories, clip_mode, agg_mode, clip=0.2, dual=3.0, cap=3.0):
    """Loss of one agent, and the share of its units whose objective a clip changed, weighted as in the loss.

    ``trajectories``: lists of turns; a turn is (advantage, old log-probs, new log-probs). ``clip_mode``: what has a
    ratio, a token or a turn. ``agg_mode``: ``trajectory``, the mean over those units of a trajectory, then over
    trajectories; ``turn``, over the tokens of a turn, then over turns.
    """
    rows = []  # by trajectory and turn: losses of its units
    for turns in trajectories:
        row = []
        for advantage, old, new in turns:
            shifts = [b - a for a, b in zip(old, new, strict=True)]
            shifts = [mean(shifts)] if clip_mode == "turn" else shifts
            row.append([unit_loss(advantage, math.exp(min(shift, cap)), clip, dual) for shift in shifts])
        rows.append(row)
    if agg_mode == "turn":
        return mean([mean(turn) for row in rows for turn in row])
    return mean([mean([loss for turn in row for loss in turn]) for row in rows])


def unit_loss(advantage, ratio, clip, dual):
    """PPO's loss with a dual clip for negative advantages."""
    worst = max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip))
    return min(-advantage * dual, worst) if advantage < 0 else worst


# ReMA, and Dr. MAS: langfengQ/DrMAS 324c6fb, verl/trainer/ppo/core_algos.py


def grpo_by_index(scores, index, trajectory, across_steps):
    """Advantage of each row: statistics over rows of one index, or over the first row of each trajectory in it."""
    kept = {}
    for score, i, t in zip(scores, index, trajectory, strict=True):
        rows = kept.setdefault(i, {})
        rows[len(rows) if across_steps else t] = score if across_steps else rows.get(t, score)
    out = []
    for score, i in zip(scores, index, strict=True):
        values = list(kept[i].values())
        centre, spread = (0.0, 1.0) if len(values) == 1 else (mean(values), std(values, 1))
        out.append((score - centre) / (spread + 1e-6))
    return out


# MARSHAL: thu-nics/MARS 5979f75, roll/utils/functionals.py, with the settings of its self-play configurations


def marshal_text(games):
    """The paper's text: return from a turn on, less the mean of the role's returns. Games: lists of (role, reward)."""
    returns = [
        [math.fsum(r for other, r in game[t:] if other == role) for t, (role, _) in enumerate(game)] for game in games
    ]
    rows = [(role, value) for game, row in zip(games, returns) for (role, _), value in zip(game, row)]
    return [value - mean([v for other, v in rows if other == role]) for role, value in rows]


def marshal_code(games):
    """One token a turn. The steps of the code: centre by player, whiten, sum, centre by distinct values, whiten."""
    turns = [(g, t, role, reward) for g, game in enumerate(games) for t, (role, reward) in enumerate(game)]
    role = [row[2] for row in turns]
    reward = [row[3] for row in turns]
    centre = {k: mean([r for r, other in zip(reward, role) if other == k]) for k in set(role)}
    white = whiten([r - centre[k] for r, k in zip(reward, role, strict=True)])
    to_go = []
    for g, t, k, _ in turns:
        to_go.append(math.fsum(w for w, row in zip(white, turns) if row[0] == g and row[1] >= t and row[2] == k))
    centred = []
    for value, k in zip(to_go, role, strict=True):
        own = sorted(v for v, other in zip(to_go, role) if other == k)
        distinct = [v for i, v in enumerate(own) if i == 0 or v - own[i - 1] > 1e-9]
        centred.append(value - mean(distinct) if len(distinct) > 1 else 0.0)
    return whiten(centred)


def whiten(values):
    """Mean 0 and sample variance 1, with the code's 1e-8 under the root."""
    centre = mean(values)
    return [(v - centre) / math.sqrt(std(values, 1) ** 2 + 1e-8) for v in values]


# Advantage Alignment: dereckpiche/AdAlignLLM d53b76d, mllm/training/credit_methods.py


def alignment_credits(rewards, discount, beta, extra_discount, discount_t):
    """Credits [B T] of both players of a group of matches with the same draws; ``rewards``: two arrays [B T].

    ``extra_discount``: the factor that ``use_old_ad_align`` with ``exclude_k_equals_t`` adds.
    """
    matches, turns = rewards[0].shape
    powers = discount ** np.arange(turns)
    advantages = []
    for pay in rewards:
        returns = np.array([[pay[b, t:] @ powers[: turns - t] for t in range(turns)] for b in range(matches)])
        advantages.append(returns - (returns.sum(0) - returns) / (matches - 1))
    credits = []
    for own, other in (advantages, advantages[::-1]):
        before = np.triu(np.ones((turns, turns)), 1)  # k < t
        weights = powers * ((own / powers) @ before) * (discount if extra_discount else 1.0)
        credits.append((own + beta * weights * other) * (powers if discount_t else 1.0))
    return credits


# MAGRPO: OpenMLRL/CoMLRL 0090d3f, comlrl/trainers/magrpo.py; options of later versions by their documentation


def magrpo_returns(node, discount):
    """Return of each joint action of a node, (rewards, children or None each)."""
    rewards, children = node
    below = [0.0 if child is None else mean(magrpo_returns(child, discount)) for child in children]
    return [r + discount * b for r, b in zip(rewards, below, strict=True)]


def magrpo_advantages(node, samples, agents, discount, joint, baseline, normalise):
    """Advantage by agent and sample of one node. ``joint``: aligned, or cross (sums over joint actions)."""
    returns = magrpo_returns(node, discount)
    out = []
    for agent in range(agents):
        values = returns
        if joint == "cross":
            actions = list(itertools.product(range(samples), repeat=agents))
            values = [
                math.fsum(r for r, action in zip(returns, actions, strict=True) if action[agent] == u)
                for u in range(samples)
            ]
        if normalise:
            out.append([(v - mean(values)) / max(std(values, 0), 1e-6) for v in values])
            continue
        total = math.fsum(values)
        centre = {
            "mean": lambda v, total=total: total / samples,
            "loo": lambda v, total=total: (total - v) / (samples - 1),
            "max": lambda v, values=values: max(values),
            "none": lambda v: 0.0,
        }[baseline]
        out.append([v - centre(v) for v in values])
    return out


def magrpo_loss(advantages, logprobs):
    """Mean over the completions of a node of minus advantage times the summed log-probs of the completion."""
    return mean([-a * math.fsum(row) for a, row in zip(advantages, logprobs, strict=True)])


# IAC and MAAC: OpenMLRL/CoMLRL 1c94100, trainers/actor_critic/{iac,ac_base}.py


def actor_critic(episodes, discount):
    """Whitened advantages and value targets of one agent, by episode and turn.

    ``episodes``: lists of turns; a turn is (reward, estimate before the update). Advantages are whitened over the
    samples of one turn, when there are several.
    """
    targets, raw = [], []
    for turns in episodes:
        ahead = [*(value for _, value in turns[1:]), 0.0]
        targets.append([reward + discount * value for (reward, _), value in zip(turns, ahead, strict=True)])
        raw.append([target - value for target, (_, value) in zip(targets[-1], turns, strict=True)])
    out = [list(row) for row in raw]
    for t in range(max(map(len, raw))):
        there = [row[t] for row in raw if len(row) > t]
        if len(there) > 1:
            for row in out:
                if len(row) > t:
                    row[t] = (row[t] - mean(there)) / max(std(there, 0), 1e-6)
    return out, targets


# WaltzRL: the paper's text (no public code)


def waltz_rewards(answers, flags, verdicts, formats, alpha, lam, gamma):
    """R_c of each answer and R_f of each round. ``answers``: R_c; ``flags`` and ``verdicts`` of each round."""
    feedback = []
    for t, (said, judged, well_formed) in enumerate(zip(flags, verdicts, formats, strict=True)):
        label = float(said == judged)
        improvement = answers[t + 1] - answers[t] if t + 1 < len(answers) else 0.0
        feedback.append(alpha * improvement * label + lam * label + gamma * well_formed)
    return list(answers), feedback


def batch_normalised(values):
    """REINFORCE++ over the batch of one agent."""
    spread = std(values, 0)
    return [(v - mean(values)) / (spread + 1e-6) if spread > 1e-12 else 0.0 for v in values]


# MALT: the paper's text (no public code)


def malt_values(leaves):
    """Values of generators, verifiers and refiners, from the outcome of each refinement [generator][verifier]."""
    verifier = [[mean(refinements) for refinements in verdicts] for verdicts in leaves]
    return [mean(row) for row in verifier], verifier, leaves


def malt_pairs(values):
    """Pairs (positive, negative) among siblings, by the threshold 1/2."""
    return [(i, j) for i, a in enumerate(values) for j, b in enumerate(values) if a > 0.5 >= b]
