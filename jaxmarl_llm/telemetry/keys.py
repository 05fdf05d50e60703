"""Keys of metrics: every key that a run writes, and every key that the panel and the report read, is one of `KEYS`.

``<name>`` stands for any name without a slash, ``{a, b}`` for one of the names in braces. In a mean over episodes all
continuations of a state have the same weight.
"""

from __future__ import annotations

import functools
import re

# Pattern -> meaning. A share is a number from 0 to 1.
KEYS = {
    "reward/<component>": "mean over roles and episodes of a reward component",
    "reward/total": "weighted sum of the components",
    "reward_variance/<component>": "share of the variance of the weighted reward that a component brings; sum 1",
    "success": "share of episodes solved (reward component accuracy)",
    "eval/<name>": "on held-out tasks: return, success and components, as sampled, and with _greedy at temperature 0",
    "eval/<name>@<part>": "return and success on a part of the held-out tasks that the environment names",
    "final/<name>": "as eval/<name>, after the last step",
    "agent/<role>/reward": "mean return of the role's completions",
    "agent/<role>/{variance, zero_variance}": "mean reward variance in a group, and share of groups without variance",
    "agent/<role>/{length, truncated}": "mean tokens of a completion, and share that the length limit ended",
    "agent/<role>/{selected, updated}": "share of groups selected for training, and whether the model was updated",
    "agent/<role>/{entropy, nll}": "nats per token: entropy, and negative log-likelihood of the trained tokens",
    "agent/<role>/{kl, ratio, clip_fraction}": "KL divergence to the reference, importance ratio, share clipped",
    "agent/<role>/{importance_weight, tis_clipped}": "weight of the policy over the sampler, and share of it capped",
    "agent/<role>/imitation": "loss of imitating experts: negative log-likelihood times its coefficient, in nats",
    "agent/<role>/logprob_diff": "largest difference of log-probs between sampler and learner",
    "agent/<role>/grad_norm": "norm of the gradient before clipping",
    "agent/<role>/{memory_size, memory_hit}": "entries in the role's memory, and share of prompts with a retrieved one",
    "memory/<role>/{size, inserted, refreshed, penalised, evicted}": "entries, and entries that a step changed",
    "memory/<role>/{mean_weight, hit, lo, hi}": "mean weight, share of prompts with an entry, reward thresholds",
    "node/<turn>/{variance, zero_variance, selected}": "as for an agent, of the groups of one turn",
    "critic/<model>/{loss, value}": "loss and mean value of a critic",
    "critic/<model>/explained_variance": "share of its targets' variance; absent: targets are equal, it is undefined",
    "sft/nll": "supervised fine-tuning: mean over models of the negative log-likelihood, nats per token",
    "sft/<model>/nll": "supervised fine-tuning: of one model",
    "sft/dropped": "share of the demonstrations that are too long for a completion; absent: none",
    "imitation/nll": "a supervised phase behind stage 0: mean over models",
    "imitation/<model>/nll": "a supervised phase behind stage 0: of one model",
    "dpo/{loss, accuracy, margin}": "preference optimization: loss, share of pairs in the right order, mean margin",
    "dpo/<model>/{loss, accuracy, margin}": "preference optimization: of one model",
    "data/<role>/{nodes, steps, positive, pairs}": "rows of an offline data set: decision points, completions, labels",
    "data/<role>/{episodes, learned_tokens}": "of a data set that a role imitates: sequences, and tokens with a loss",
    "eval/source_<name>": "as eval/<name>, of a team that another role learns from",
    "scheme/<name>": "share of joint actions with a cooperation scheme",
    "count/{sequences, branch_sequences}": "completions sampled, and those at nodes where the plan branches",
    "count/{prompt_tokens, completion_tokens}": "prompt tokens sent through a model, and tokens generated",
    "count/trunk_tokens": "tokens that an epoch of the update sends through the models, without padding",
    "count/{env_calls, launches}": "environment steps, and generation programs started",
    "count/invalid": "transitions whose reward could not be computed",
    "count/invalid_share": "their share of all transitions; a task that could not be started counts as one",
    "count/{expert_asked, expert_silent}": "completions that experts were asked for, and those without an answer",
    "count/unplayed": "tasks of a host environment whose reset or first observation failed",
    "count/{cut_prompts, cut_tokens}": "prompts longer than env.max_prompt, and the tokens left out of them",
    "sampling/{plays, played, kept}": "dynamic sampling: plays, tasks played, and tasks with a selected group",
    "curriculum/{learnability, tried}": "curriculum: mean p (1 - p) of the step's tasks, and share of all tasks tried",
    "replay/{stored, added, too_long}": "replay: completions in the ring, added by a step, and too long for a row",
    "replay/weight": "replay: mean truncated importance weight of the replayed tokens",
    "count/held_out": "held-out tasks that the evaluation of this line played",
    "change/{score, change, best}": "of the role that learns, on a held-out part: score, its last change, best score",
    "change/returns": "times of the run so far that the best parameters were put back",
    "majority/{agreement, right}": "CPMobius: mean share of the majority, and share of its labels that are the truth",
    "majority/agreement_wrong": "CPMobius: mean share of the majority where its label is wrong; absent: none is",
    "count/idle": "steps of the run so far that trained nobody, where the update counts them",
    "count/skipped": "steps of the run so far whose update was not finite and was skipped",
    "staleness": "steps that the policy of the rollout was behind, mean over completions; absent: none",
    "logprob_diff": "largest difference of log-probs between sampler and learner, over all models",
    "time/{rollout, reward, update, memory, step}": "seconds; written by the logger from its stages",
    "time/{evaluation, save}": "seconds of an evaluation and of the save before the step; absent: none",
    "time/compile": "seconds of tracing and compiling, which are part of the other times; absent: none",
    "speed/{rollout, reward, update, step}": "tokens per second; written by the logger where token counts are given",
    "nonfinite_metrics": "values of this step that were NaN or infinite; absent: none",
}


def is_documented(key: str) -> bool:
    """Whether ``key`` matches a pattern of `KEYS`."""
    return _expression().fullmatch(key) is not None


@functools.cache
def _expression() -> re.Pattern[str]:
    """One regular expression for all patterns."""

    def regular(pattern: str) -> str:
        names = re.sub(r"\{(.*?)\}", lambda m: f"(?:{'|'.join(m[1].split(', '))})", pattern)
        return re.sub(r"<\w+>", "[^/]+", names)

    return re.compile("|".join(map(regular, KEYS)))
