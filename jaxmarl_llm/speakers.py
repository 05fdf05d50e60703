"""Who speaks in a turn of a host rollout: one generation launch for each model and number of samples.

A launch goes on from what earlier ones cached (`prefixes`) and is padded to a bucket. Models that have devices of their
own (`meshes.Split`) speak at once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm import meshes, sharding
from jaxmarl_llm.generate import alone, generate, unstacked
from jaxmarl_llm.prefixes import Prefixes
from jaxmarl_llm.rollout import PLAY, fold
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.text import Action
from jaxmarl_llm.types import Model, Params, Team


class Asked(NamedTuple):
    """One node: who is asked, for how many samples, with what prompt. ``key``: key data of the state."""

    model: int
    group: int
    task: int
    role: int
    key: np.ndarray
    ids: Sequence[int]


class Said(NamedTuple):
    action: Action
    logprobs: np.ndarray  # of its tokens


class Playing:
    """Variables as generation takes them, of one model at a time: its copies go when another model plays.

    Copies of all models would be most of what a device holds (docs/pods.md); moving one takes a small part of the time
    of a launch.
    """

    def __init__(self, params: Params):
        self._params = params
        self._whole: dict[tuple[str, str], Params] = {}
        self._cut: dict[str, Params] = {}

    def variables(self, model: Model) -> Params:
        """`Model.variables`, whole along fsdp."""
        names = [("agents", model.name)] + ([] if model.base is None else [("shared", model.base)])
        # The other model's go before this one's are made: both at once may be more than there is room for.
        self._whole = {name: whole for name, whole in self._whole.items() if name in names}
        self._cut = {name: cut for name, cut in self._cut.items() if name == model.name}
        for kind, name in names:
            if (kind, name) not in self._whole:
                self._whole[kind, name] = sharding.to_rollout(sharding.current(), self._params[kind][name])
        return model.variables({kind: {name: whole} for (kind, name), whole in self._whole.items()})

    def layers(self, model: Model, max_new: int) -> Params | None:
        """`Policy.unstack` of them, where a launch of ``max_new`` tokens reads layers by themselves."""
        if not alone(max_new):
            return None
        if model.name not in self._cut:
            self._cut = {model.name: unstacked(model.policy, self.variables(model))}
        return self._cut[model.name]


@functools.partial(jax.jit, static_argnames=("group",))
def _sample_keys(data: jax.Array, role: jax.Array, *, group: int) -> jax.Array:
    keys = jnp.repeat(fold(jax.random.wrap_key_data(data), PLAY, role)[:, None], group, 1)
    return fold(keys, jnp.broadcast_to(jnp.arange(group), keys.shape))


def pad(rows: np.ndarray, size: int) -> np.ndarray:
    """``rows`` and copies of the last one."""
    return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), 0)])


class Speakers:
    """The models of a team during one rollout. ``launches`` so far; ``sent``: tokens of prompts that were computed."""

    def __init__(self, team: Team, params: Params, sampling: Sampling):
        self._team, self._sampling = team, sampling
        together = Playing(params)
        self._playing = {m.name: Playing(params) if meshes.apart() else together for m in team.models}
        self._cached: dict[str, Prefixes] = {}
        self.launches = 0

    @property
    def sent(self) -> int:
        return sum(prefixes.sent for prefixes in self._cached.values())

    def say(self, asked: Sequence[Asked], *, more: bool) -> list[list[Said]]:
        """The samples of every node. ``more``: later prompts may go on from these."""
        said: list[list[Said]] = [[] for _ in asked]
        launch: dict[int, dict[int, list[int]]] = {}
        for n, node in enumerate(asked):
            launch.setdefault(node.model, {}).setdefault(node.group, []).append(n)
        models = {self._team.models[m].name: self._team.models[m] for m in sorted(launch)}
        groups = {self._team.models[m].name: sorted(by_width.items()) for m, by_width in launch.items()}
        self.launches += sum(map(len, groups.values()))

        def speak(name: str) -> None:
            for k, (_, rows) in enumerate(groups[name]):
                keep = more or k + 1 < len(groups[name])
                for n, samples in zip(rows, self._launch(models[name], [asked[n] for n in rows], keep), strict=True):
                    said[n] = samples

        meshes.each(list(models), speak)
        return said

    def _launch(self, model: Model, asked: Sequence[Asked], keep: bool) -> list[list[Said]]:
        group, limit = asked[0].group, max(self._team.roles[a.role].max_new for a in asked)
        playing = self._playing[model.name]
        prefixes = self._cached.setdefault(model.name, Prefixes(model.policy, model.tokenizer.pad_id))
        of, given = [a.task for a in asked], [np.array(a.ids, np.int32) for a in asked]
        variables = playing.variables(model)
        ready = prefixes.ready(variables, of, given)
        size = len(ready.length)
        tokens, length, active = sharding.put_rows((ready.tokens, ready.length, np.arange(size) < len(asked)))
        data, roles = pad(np.stack([a.key for a in asked]), size), pad(np.array([a.role for a in asked]), size)
        out, prefix, suffix = generate(
            model.policy,
            variables,
            tokens,
            length,
            _sample_keys(data, roles, group=group),
            active,
            max_new=limit,
            stop_ids=model.tokenizer.stop_ids,
            pad_id=model.tokenizer.pad_id,
            sampling=self._sampling,
            prefix=ready.prefix,
            start=ready.start,
            keep=True,
            layers=playing.layers(model, limit),
        )
        out = sharding.to_host(out)
        said: list[list[Said]] = []
        for row in range(len(asked)):
            said.append([])
            for s in range(group):
                got = out.tokens[row, s, : out.length[row, s]].tolist()
                text = model.tokenizer.decode(got if out.truncated[row, s] else got[:-1])
                action = Action(text, tuple(got), bool(out.truncated[row, s]))
                said[-1].append(Said(action, out.logprobs[row, s, : len(got)]))
        if keep:
            prefixes.keep(of, given, prefix, suffix, [[s.action.ids for s in samples] for samples in said])
        return said
