"""Slow twins of every formula: plain loops in float64, no jnp, written from the equations and not from the code."""

from __future__ import annotations

import math

import numpy as np


def scalarise(rewards, weights):
    out = np.zeros_like(next(iter(rewards.values())), dtype=np.float64)
    for name in weights:
        out += weights[name] * np.asarray(rewards[name], np.float64)
    return out


def returns_to_go(rewards, parent, valid, discount):
    """By recursion from the roots: the return of a row, or None when it is unknown."""

    def value(j):
        if not valid[j]:
            return None
        children = [i for i in range(len(parent)) if parent[i] == j]
        own = np.asarray(rewards[j], np.float64)
        if not children:
            return own
        known = [v for v in map(value, children) if v is not None]
        return own + discount * sum(known) / len(known) if known else None

    values = [value(j) for j in range(len(parent))]
    returns = np.stack([np.zeros(rewards.shape[1]) if v is None else v for v in values])
    return returns, np.array([v is not None for v in values])


def turn_returns(rewards, acts, parent, valid, discount):
    """By recursion, one role at a time: what it earns until just before its next turn, and which are known."""
    num, roles = rewards.shape
    children = [[i for i in range(num) if parent[i] == j] for j in range(num)]

    def value(j, a):
        """None when it is unknown."""
        if not valid[j]:
            return None
        passed = [0.0 if acts[i, a] else value(i, a) for i in children[j]]
        known = [v for v in passed if v is not None]
        if passed and not known:
            return None
        return float(rewards[j, a]) + (discount * math.fsum(known) / len(known) if known else 0.0)

    values = [[value(j, a) for a in range(roles)] for j in range(num)]
    return np.array([[v or 0.0 for v in row] for row in values]), np.array([[v is not None for v in r] for r in values])


def step_returns(steps, role_of_step, returns, valid, reduce):
    num = len(role_of_step)
    valid = np.broadcast_to(valid[:, None] if valid.ndim == 1 else valid, returns.shape)
    terms = [[] for _ in range(num)]
    for j, seats in enumerate(steps):
        for c in seats:
            if c >= 0 and valid[j][role_of_step[c]]:
                terms[c].append(float(returns[j][role_of_step[c]]))
    values = [0.0 if not t else math.fsum(t) / (len(t) if reduce == "mean" else 1) for t in terms]
    return np.array(values), np.array([bool(t) for t in terms])


def group_advantage(
    values, group, valid, num_groups, baseline, normalise, ddof=0, eps=1e-6, singleton="zero", counted=None
):
    advantage, stats = np.zeros(len(values)), []
    baseline = "mean" if normalise == "std" else baseline
    for k in range(num_groups):
        members = [i for i in range(len(values)) if valid[i] and group[i] == k]
        x = [float(values[i]) for i in members if counted is None or counted[i]]
        n = len(x)
        if n == 0:
            stats.append((0.0, 0.0, 0, 0.0, 0.0))
            continue
        mean = math.fsum(x) / n
        squares = math.fsum((v - mean) ** 2 for v in x)
        stats.append((mean, squares / n, n, min(x), max(x)))
        equal = min(x) == max(x)
        for i in members:
            v = float(values[i])
            if n == 1 and baseline != "none":
                advantage[i] = v if singleton == "raw" else 0.0
                continue
            others = (math.fsum(x) - v) / (n - 1) if n > 1 else 0.0
            centred = v - {"mean": mean, "loo": others, "max": max(x), "none": 0.0}[baseline]
            if equal and baseline != "none":
                centred = 0.0
            if normalise == "std" and not equal:
                centred /= math.sqrt(squares / (n - ddof)) + eps
            advantage[i] = centred
    return advantage, tuple(np.array(column) for column in zip(*stats, strict=True))


def top_k_variance(variance, eligible, k, scope, tol):
    selected = np.zeros(len(variance), bool)
    for s in set(scope):
        candidates = [i for i in range(len(variance)) if scope[i] == s and eligible[i] and variance[i] > tol]
        candidates.sort(key=lambda i: (-variance[i], i))
        for i in candidates[: len(candidates) if k is None else k]:
            selected[i] = True
    return selected


def step_episodes(steps, parent, num_steps):
    """By climbing from every joint action to its root."""

    def root(j):
        return j if parent[j] < 0 else root(parent[j])

    of = [min((root(j) for j in range(len(parent)) if c in steps[j]), default=None) for c in range(num_steps)]
    return np.array([c if of[c] is None else of.index(of[c]) for c in range(num_steps)])


def aggregation_weights(mask, sequence_weight, kind, loss_length=None):
    out = np.zeros(mask.shape)
    rows = [i for i in range(len(mask)) if mask[i].any() and sequence_weight[i] != 0]
    sequences = sum(float(sequence_weight[i]) for i in rows)
    tokens = sum(float(sequence_weight[i]) * int(mask[i].sum()) for i in rows)
    for i in rows:
        for t in range(mask.shape[1]):
            if mask[i, t]:
                w = float(sequence_weight[i])
                out[i, t] = {
                    "token": lambda w=w: w / tokens,
                    "sequence": lambda w=w, i=i: w / sequences / int(mask[i].sum()),
                    "sum": lambda w=w: w / sequences,
                    "constant": lambda w=w: w / sequences / loss_length,
                }[kind]()
    return out


def kl(logp, ref_logp, kind):
    ratio = math.exp(ref_logp - logp)  # ref / pi
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[kind]


def policy_loss(
    logprobs,
    old_logprobs,
    advantages,
    weights,
    clip,
    dual_clip=None,
    level="token",
    max_log_ratio=20.0,
    behaviour_logprobs=None,
    importance_cap=None,
    ref_logprobs=None,
    kl_coef=0.0,
    kl_kind="k3",
    entropy=None,
    entropy_coef=0.0,
):
    loss, names = 0.0, ("weight", "ratio", "clip_fraction", "approx_kl")
    names += ("importance_weight", "tis_clipped") if behaviour_logprobs is not None else ()
    names += ("ref_kl",) if ref_logprobs is not None else ()
    names += ("entropy",) if entropy is not None else ()
    metrics = dict.fromkeys(names, 0.0)
    for i in range(len(logprobs)):
        places = [t for t in range(logprobs.shape[1]) if weights[i, t] > 0]
        product = math.exp(math.fsum(logprobs[i, t] - old_logprobs[i, t] for t in places))
        for t in places:
            w = float(weights[i, t])
            a = float(advantages[i] if advantages.ndim == 1 else advantages[i, t])
            own = math.exp(logprobs[i, t] - old_logprobs[i, t])
            ratio = own if level == "token" else product ** (1 / len(places))
            ratio = min(max(ratio, math.exp(-20.0)), math.exp(max_log_ratio))
            objective = ratio * a
            clipped = False
            if clip is not None and (ratio > 1 + clip[1] if a > 0 else ratio < 1 - clip[0]) and a != 0:
                objective = a * (1 + clip[1] if a > 0 else 1 - clip[0])
                clipped = True
            if dual_clip is not None and a < 0 and objective < dual_clip * a:
                objective = dual_clip * a
                clipped = True
            if behaviour_logprobs is not None:
                full = math.exp(old_logprobs[i, t] - behaviour_logprobs[i, t])
                cap = math.inf if importance_cap is None else importance_cap
                objective *= min(full, cap)
                metrics["importance_weight"] += w * min(full, cap)
                metrics["tis_clipped"] += w * (full > cap)
            loss -= w * objective
            metrics["weight"] += w
            metrics["ratio"] += w * ratio
            metrics["clip_fraction"] += w * clipped
            metrics["approx_kl"] += w * kl(old_logprobs[i, t], logprobs[i, t], "k3")
            if ref_logprobs is not None:
                term = kl(logprobs[i, t], ref_logprobs[i, t], kl_kind)
                loss += w * kl_coef * term
                metrics["ref_kl"] += w * term
            if entropy is not None:
                loss -= w * entropy_coef * float(entropy[i, t])
                metrics["entropy"] += w * float(entropy[i, t])
    return loss, metrics


def generalised_advantage(rewards, values, acts, parent, played, valid, discount, gae_lambda):
    """By recursion from the roots, one role at a time: advantage and target [J A]."""
    num, roles = rewards.shape
    children = [[i for i in range(num) if parent[i] == j and played[i]] for j in range(num)]
    advantage, target = np.zeros((num, roles)), np.zeros((num, roles))

    def value(j, a):
        """V of the state where j was taken, or None when nobody knows."""
        if acts[j, a]:
            return float(values[j, a]) if played[j] else None
        if not valid[j]:
            return None
        known = [v for v in (value(i, a) for i in children[j]) if v is not None]
        if children[j] and not known:
            return None
        return float(rewards[j, a]) + discount * (math.fsum(known) / len(known) if known else 0.0)

    def bootstrapped(j, a):
        known = [v for v in (value(i, a) for i in children[j]) if v is not None]
        return float(rewards[j, a]) + discount * (math.fsum(known) / len(known) if known else 0.0)

    def gain(j, a):
        here = float(values[j, a]) if acts[j, a] else bootstrapped(j, a)
        later = [gain(i, a) for i in children[j] if valid[i]]
        return bootstrapped(j, a) - here + discount * gae_lambda * (math.fsum(later) / len(later) if later else 0.0)

    for j in range(num):
        for a in range(roles):
            if valid[j]:
                advantage[j, a] = gain(j, a)
                target[j, a] = advantage[j, a] + (values[j, a] if acts[j, a] else bootstrapped(j, a))
    return advantage, target


def same_parent_pairs(parent, label, valid):
    """Every (labelled, unlabelled) pair of valid siblings, by the first and then the second."""
    rows = range(len(parent))
    good = [i for i in rows if valid[i] and label[i]]
    return [(i, j) for i in good for j in rows if valid[j] and not label[j] and parent[i] == parent[j]]


def dpo(logprobs, ref_logprobs, advantages, weights, beta):
    """Loss, and {weight, accuracy, margin}; arrays [N G R], token by token."""
    loss, totals = 0.0, {"weight": 0.0, "accuracy": 0.0, "margin": 0.0}
    for n in range(len(logprobs)):
        gains, sides, shares = [], [], []
        for g in range(len(logprobs[n])):
            seen = [t for t, w in enumerate(weights[n][g]) if w > 0]
            gains.append(math.fsum(logprobs[n][g][t] - ref_logprobs[n][g][t] for t in seen))
            sides.append(math.fsum(advantages[n][g][t] for t in seen))
            shares.append(max((weights[n][g][t] for t in seen), default=0.0))
        for i, j in [(i, j) for i in range(len(gains)) for j in range(len(gains)) if sides[i] > 0 > sides[j]]:
            margin, weight = beta * (gains[i] - gains[j]), shares[i] + shares[j]
            loss += weight * math.log1p(math.exp(-margin))
            totals["weight"] += weight
            totals["accuracy"] += weight * (margin > 0)
            totals["margin"] += weight * margin
    return loss, totals
