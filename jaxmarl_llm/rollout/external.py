"""Sampling of a host rollout by external engines, in place of `launches.TeamSampler`.

Before a rollout, engines get the parameters that they lack: the whole model or an adapter is written to a folder, which
the engine loads. Then every node of a turn is one request, and all requests of a turn are in flight together.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxmarl_llm.distributed import processes, sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.generation.engine import (
    EngineClient,
    EngineCompletion,
    EngineConfig,
    EngineError,
    EngineRequest,
)
from jaxmarl_llm.generation.engine_http import client_of
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import hf_weights, peft_files
from jaxmarl_llm.rollout.launches import GenerationRequest, SampledCompletion, as_completion, request_keys
from jaxmarl_llm.types import Model, Params, Team

KEY = "config.engine.urls"


class Engines:
    """The engines of a team, and which parameters they hold.

    Args:
        cfg: Addresses and limits.
        team: Roles and models; every model that plays a role needs an engine.
        max_prompt: Longest prompt, in tokens.

    Raises:
        ConfigError: A model without an engine, or an engine without a model.
    """

    def __init__(self, cfg: EngineConfig, team: Team, max_prompt: int):
        self._cfg, self._team, self._max_prompt = cfg, team, max_prompt
        playing = {name for role in team.roles for name in role.players}
        self._models = [model for model in team.models if model.name in playing]
        needed = dict.fromkeys(model.base or model.name for model in self._models)
        for name in [n for n in needed if n not in cfg.urls]:
            raise ConfigError(f"{KEY}.{name}: expected the address of an engine for the model, got none")
        for name in [n for n in cfg.urls if n not in needed]:
            raise ConfigError(f"{KEY}.{name}: no such model; the models are {', '.join(needed)}")
        self._clients = {name: client_of(cfg, cfg.urls[name]) for name in needed}
        self._served: dict[str, str] = {}  # by name of an engine: the name of its model
        self._loaded: dict[str, tuple[int, Path]] = {}  # version and folder that an engine has read, by model

    def open(self) -> None:
        """Ask every engine for its model. Raises ConfigError where none answers, or the model takes too few tokens."""
        self._served = processes.broadcast_from_0(lambda: {n: self._ask(n, c) for n, c in self._clients.items()})

    def _ask(self, name: str, client: EngineClient) -> str:
        where = f"{KEY}.{name}: {self._cfg.urls[name]}"
        try:
            models = list(client.served())
        except EngineError as error:
            start = "; start one (docs/engines.md)" if error.away else ""
            raise ConfigError(f"{where}: expected an engine, got {error}{start}") from None
        if not models:
            raise ConfigError(f"{where}: the engine serves no model")
        limit, longest = models[0].max_tokens, max(role.max_new_tokens for role in self._team.roles)
        if limit is not None and limit < self._max_prompt + longest:
            raise ConfigError(
                f"{where}: the engine takes {limit} tokens; expected config.env.max_prompt + "
                f"config.team.max_new_tokens = {self._max_prompt + longest} (vLLM's --max-model-len)"
            )
        return models[0].name

    def sampler(self, team: Team, params: Params, sampling: Sampling, version: int) -> EngineSampler:
        """What samples in one rollout; engines hold ``params`` from now on.

        Args:
            team: Roles and models.
            params: Parameters of the team.
            sampling: Distribution of tokens.
            version: Steps of training before these parameters. Parameters of one version are sent once.
        """
        if not self._served:
            self.open()
        names = {model.name for model in self._models}
        for player in [m for role in team.roles for m in role.players if m not in names]:
            raise ConfigError(f"{KEY}: expected models of the trained team; {player!r} has no engine")
        for model in self._models:
            self._load_model(model, params, version)
        return EngineSampler(self, team, sampling)

    def _load_model(self, model: Model, params: Params, version: int) -> None:
        """Load the parameters of a model into its engine: all of them, or its adapter over the frozen backbone."""
        own, config, base = params["agents"][model.name], model.policy.config, model.base
        save_whole = lambda folder, values: hf_weights.save(folder, values, config, model.tokenizer)
        if base is None:
            self._load(model.name, version, own["params"], save_whole, self._clients[model.name].load_weights)
            return
        client = self._clients[base]
        self._load(base, 0, params["shared"][base], save_whole, client.load_weights)
        backbone = str(self._loaded[base][1])
        save_adapter = lambda folder, values: peft_files.save(folder, values, config, backbone)
        load_adapter = lambda folder: client.load_adapter(model.name, folder)
        self._load(model.name, version, own["lora"], save_adapter, load_adapter)

    def _load(
        self,
        name: str,
        version: int,
        values: Params,
        save: Callable[[Path, Params], None],
        load: Callable[[str], None],
    ) -> None:
        """Write ``values`` to a folder and let an engine load it, unless the engine holds ``version``. Collective."""
        held, earlier = self._loaded.get(name, (None, None))
        if held == version:
            return
        folder = Path(self._cfg.weights or "").resolve() / f"{name}-{version:08}"
        values = sharding.to_host(values)

        def write_and_load() -> None:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
            folder.parent.mkdir(parents=True, exist_ok=True)
            save(folder, values)
            try:
                load(str(folder))
            except EngineError as error:
                raise EngineError(f"{KEY}.{name}: {folder} was not loaded: {error}") from None
            if earlier is not None:
                shutil.rmtree(earlier, ignore_errors=True)

        processes.broadcast_from_0(write_and_load)
        self._loaded[name] = version, folder

    def complete(self, requests: Sequence[tuple[Model, EngineRequest]]) -> list[list[EngineCompletion]]:
        """Completions of all requests, which are in flight together. Collective: process 0 asks.

        Args:
            requests: Model and request of each node; the request's ``model`` is set here.
        """

        def ask(job: tuple[Model, EngineRequest]) -> list[EngineCompletion]:
            model, request = job
            name = model.base or model.name
            served = self._served[name] if model.base is None else model.name
            try:
                found = self._clients[name].sample(request._replace(model=served))
            except EngineError as error:
                raise EngineError(f"{KEY}.{name}: {self._cfg.urls[name]}{error}", error.away) from None
            size = model.policy.config.vocab_size
            for token in [i for completion in found for i in completion.ids if not 0 <= i < size]:
                raise EngineError(
                    f"{KEY}.{name}: expected token ids below {size}, the vocabulary of the model, got {token}: the "
                    "engine serves another model"
                )
            return found

        def all_of() -> list[list[EngineCompletion]]:
            with contextlib.ExitStack() as pools:
                threads = {name: ThreadPoolExecutor(self._cfg.connections) for name in self._clients}
                for pool in threads.values():  # after a failure, requests that have not begun are given up
                    pools.callback(pool.shutdown, cancel_futures=True)
                jobs = [threads[model.base or model.name].submit(ask, (model, r)) for model, r in requests]
                return [job.result() for job in jobs]

        return processes.broadcast_from_0(all_of)


class EngineSampler:
    """Samples completions of a team's models during one rollout, as `launches.TeamSampler` does.

    Args:
        engines: Engines that hold the parameters of the rollout.
        team: Roles and models.
        sampling: Distribution of tokens.
    """

    def __init__(self, engines: Engines, team: Team, sampling: Sampling):
        self._engines, self._team, self._sampling = engines, team, sampling
        self.launches = self.prompt_tokens = 0

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of every request. ``more``: not read; an engine keeps its own cache of prefixes."""
        self.launches += len({request.model for request in requests})
        self.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        jobs = []
        for request, seed in zip(requests, _seeds(requests), strict=True):
            model, role = self._team.models[request.model], self._team.roles[request.role]
            stop, limit = model.tokenizer.stop_ids, role.max_new_tokens
            ids = tuple(request.prompt_ids)
            jobs.append((model, EngineRequest("", ids, request.group, limit, stop, seed, self._sampling)))
        out = []
        for (model, _), completions in zip(jobs, self._engines.complete(jobs), strict=True):
            out.append([as_completion(model, c.ids, c.truncated, c.logprobs) for c in completions])
        return out


def _seeds(requests: Sequence[GenerationRequest]) -> list[int]:
    """A seed of 63 bits for each request, from the key of its state and its role."""
    keys = request_keys(requests, bucket(len(requests), 4), group=1)
    words = np.asarray(jax.random.key_data(keys))[: len(requests), 0].astype(np.uint64)
    return [int(high << np.uint64(32) | low) & (2**63 - 1) for high, low in words]
