"""From a configuration to a team: its models, tokenizers and initial parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import jax

from jaxmarl_llm.agents.snapshots import opponent_model
from jaxmarl_llm.config import ROW_LIMIT, at_least, one_of, positive
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import decoder, decoder_config, hf_weights, hub
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.lora import TARGETS, init_lora
from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from jaxmarl_llm.models.value_head import init_head
from jaxmarl_llm.types import Model, Params, Policy, Role, Team

DTYPES = ("float32", "bfloat16", "float16")
# Sizes of a backbone and the largest value of each: some four times those of the largest published models.
LARGEST = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_layers": 2**10,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 2**12,
}
SHARING = ("separate", "shared", "lora")
# none; a head on each policy's own backbone; an own copy of the backbone for each model; one copy that reads the
# prompts of all seats (CTDE)
CRITICS = ("none", "head", "separate", "joint")


@dataclass(frozen=True)
class Backbone:
    """A language model: weights from ``path``, or random ones of the given shape."""

    path: str | None = None  # Hugging Face directory or hub name, or .gguf file; None: random weights
    tokenizer: str | None = None  # directory, hub name, .gguf or bytes; None: that of path, or bytes
    family: str = "qwen2"  # qwen2, qwen3 or llama; this and what follows describe random weights
    hidden_size: int = 64  # width of the residual stream
    intermediate_size: int = 192  # width of the MLP
    num_layers: int = 2  # decoder layers
    num_heads: int = 4  # query heads of a layer
    num_kv_heads: int = 2  # key/value heads of a layer; a divisor of num_heads
    head_dim: int = 16  # width of a head; even
    vocab_size: int | None = None  # None: the tokenizer's
    tie_embeddings: bool = True  # the output head is the embedding matrix
    rope_theta: float = 10_000.0  # base of the rotary position frequencies
    dtype: str = "float32"  # of the parameters: float32 or bfloat16; also for weights from path

    def check(self, path: str) -> None:
        one_of(f"{path}.family", self.family, tuple(decoder_config.FAMILIES))
        one_of(f"{path}.dtype", self.dtype, DTYPES)
        for name, largest in LARGEST.items():
            at_least(f"{path}.{name}", getattr(self, name), 1, largest)
        if self.vocab_size is not None:
            at_least(f"{path}.vocab_size", self.vocab_size, 1, ROW_LIMIT)
        positive(f"{path}.rope_theta", self.rope_theta)
        if self.head_dim % 2:
            raise ConfigError(f"{path}.head_dim: expected an even number (rotary positions), got {self.head_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{path}.num_kv_heads: expected a divisor of {path}.num_heads={self.num_heads}, got {self.num_kv_heads}"
            )


@dataclass(frozen=True)
class TeamConfig:
    """Models of a team and what they share.

    ``parameter_sharing``: ``separate``, a full copy for each role; ``shared``, one model plays all roles; ``lora``, an
    adapter for each role over one frozen backbone. ``overrides``: role or model -> backbone (``separate`` only).

    ``models`` says which model plays a role where that is not the role's own one. It is the name of another role, whose
    model both then share, or a name that two roles give. Several models of a role all play it, drawn anew for each
    task, and all learn.
    """

    parameter_sharing: str = "separate"  # separate, shared (one model plays all roles), or lora (an adapter a role)
    backbone: Backbone = Backbone()
    overrides: dict[str, Backbone] = field(default_factory=dict)  # role or model -> its own backbone (separate)
    models: dict[str, str | tuple[str, ...]] = field(default_factory=dict)  # role -> model, or models that play in turn
    lora_rank: int = 16  # rank of an adapter
    lora_targets: tuple[str, ...] = TARGETS  # matrices that have an adapter
    max_new_tokens: int = 64  # tokens of one completion
    critic: str = "none"  # value estimates: see CRITICS
    critic_hidden: int = 0  # tanh units of the value head; 0: linear
    remat: bool = True  # recompute layers in the backward pass
    batch_models: bool = (
        False  # array environments: models that act together generate in one launch, parameters stacked
    )
    batch_invariant: bool = False  # generation: equal bits in any batch, bucket or cache and on any mesh; slower

    ALIASES: ClassVar[dict[str, str]] = {
        "share": "parameter_sharing",
        "stacked": "batch_models",
        "invariant": "batch_invariant",
        "max_new": "max_new_tokens",
    }

    @property
    def pretrained(self) -> bool:
        """Whether a model of the team begins with weights from a file or from the hub."""
        return any(backbone.path is not None for backbone in (self.backbone, *self.overrides.values()))

    def check(self, path: str) -> None:
        one_of(f"{path}.parameter_sharing", self.parameter_sharing, SHARING)
        one_of(f"{path}.critic", self.critic, CRITICS)
        for target in self.lora_targets:
            one_of(f"{path}.lora_targets", target, TARGETS)
        if not self.lora_targets:
            raise ConfigError(f"{path}.lora_targets: expected one or several of {', '.join(TARGETS)}, got none")
        at_least(f"{path}.lora_rank", self.lora_rank, 1, LARGEST["hidden_size"])
        at_least(f"{path}.critic_hidden", self.critic_hidden, 0, LARGEST["intermediate_size"])
        at_least(f"{path}.max_new_tokens", self.max_new_tokens, 1, ROW_LIMIT)
        if self.overrides and self.parameter_sharing != "separate":
            raise ConfigError(
                f"{path}.overrides: expected none with {path}.parameter_sharing={self.parameter_sharing!r}; only "
                "separate copies differ"
            )
        if self.critic == "joint" and self.overrides:
            raise ConfigError(
                f"{path}.critic: expected another than 'joint' with overrides ({path}.overrides): it reads one "
                "tokenizer"
            )
        if self.batch_invariant and self.batch_models:
            raise ConfigError(
                f"{path}.batch_invariant: expected false with {path}.batch_models: models in one launch are a batch"
            )


def load_tokenizer(backbone: Backbone) -> Tokenizer:
    """Load the tokenizer that ``backbone`` names; the byte tokenizer if it names none."""
    source = backbone.tokenizer or backbone.path
    if source is None or source == ByteTokenizer.name:
        return ByteTokenizer()
    key = "config.team.backbone.tokenizer" if backbone.tokenizer else "config.team.backbone.path"
    return HFTokenizer(hub.folder(source, key, weights=not backbone.tokenizer))


def _weights(path: str) -> Path:
    return hub.folder(path, "config.team.backbone.path")


def shape_of(backbone: Backbone, vocab_size: int) -> decoder_config.Config:
    """Architecture of ``backbone``: from its folder, or from its own fields.

    ``vocab_size`` is used where the fields give none.
    """
    if backbone.path is not None:
        return dataclasses.replace(hf_weights.read_config(_weights(backbone.path)), dtype=backbone.dtype)
    return decoder_config.Config(
        vocab_size=backbone.vocab_size or vocab_size,
        hidden_size=backbone.hidden_size,
        intermediate_size=backbone.intermediate_size,
        num_layers=backbone.num_layers,
        num_heads=backbone.num_heads,
        num_kv_heads=backbone.num_kv_heads,
        head_dim=backbone.head_dim,
        rope_theta=backbone.rope_theta,
        tie_embeddings=backbone.tie_embeddings,
        attention_bias=backbone.family == "qwen2",
        qk_norm=backbone.family == "qwen3",
        family=backbone.family,
        dtype=backbone.dtype,
    )


def architecture(backbone: Backbone, tokenizer: Tokenizer) -> decoder_config.Config:
    """Architecture of ``backbone`` with the vocabulary of ``tokenizer``.

    Raises:
        ConfigError: The tokenizer has more ids than the embedding has rows.
    """
    cfg = shape_of(backbone, tokenizer.vocab_size)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name}: {tokenizer.vocab_size} ids, but the embedding has {cfg.vocab_size} rows"
        )
    used = None if tokenizer.vocab_size == cfg.vocab_size else tokenizer.vocab_size
    return dataclasses.replace(cfg, used_vocab=used)


def init_backbone(backbone: Backbone, cfg: decoder_config.Config, key: jax.Array) -> Params:
    """Draw or read the parameters of ``backbone``. On a mesh every device makes or reads its own part.

    Args:
        backbone: Source of the weights.
        cfg: Architecture.
        key: PRNG key of random weights; not used for a folder of weights.
    """
    init, mesh = decoder.make_policy(cfg).init, sharding.current()
    if backbone.path is None:
        return _compiled(init, mesh)(key)
    where = None if mesh is None else sharding.shardings(mesh, jax.eval_shape(init, key))
    arch = dataclasses.replace(cfg, used_vocab=None)
    params, _ = hf_weights.load(_weights(backbone.path), arch, dtype=backbone.dtype, sharding=where)
    return params


@functools.cache
def _compiled(init: Callable[[jax.Array], Params], mesh: jax.sharding.Mesh | None) -> Callable[[jax.Array], Params]:
    """Program that draws parameters as ``init`` does, on ``mesh``. Cached: models of one architecture share it."""
    return jax.jit(lambda key: sharding.constrain(init(key)))


def policy_of(cfg: TeamConfig, arch: decoder_config.Config) -> Policy:
    """Policy of the architecture ``arch`` with the settings ``cfg`` of the team."""
    policy = decoder.make_policy(arch, remat=cfg.remat)
    return invariant(policy) if cfg.batch_invariant else policy


def players_of(cfg: TeamConfig, roles: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The names of the models that play each role, the first one first.

    Args:
        cfg: Sharing, and the map from roles to models.
        roles: Names of the roles of the environment.

    Raises:
        ConfigError: An unknown role, or a model that is neither a role's own one nor given by a second role.
    """
    for key, named in (("models", cfg.models), ("overrides", cfg.overrides)):
        known = (*roles, *_given(cfg)) if key == "overrides" else roles
        unknown = sorted(set(named) - set(known))
        if unknown:
            raise ConfigError(f"config.team.{key}: unknown role {unknown[0]!r}; the roles are {', '.join(roles)}")
    given = _given(cfg)
    for role, players in cfg.models.items():
        for name in (players,) if isinstance(players, str) else players:
            if name not in roles and name not in cfg.overrides and given.count(name) < 2:
                raise ConfigError(
                    f"config.team.models.{role}: unknown model {name!r}; expected the name of a role "
                    f"({', '.join(roles)}), or a name that two roles give"
                )
        if not players:
            raise ConfigError(f"config.team.models.{role}: expected the name of a model, got {players!r}")
    default = lambda role: "team" if cfg.parameter_sharing == "shared" else role
    out = {role: cfg.models.get(role, default(role)) for role in roles}
    return {role: (own,) if isinstance(own, str) else tuple(dict.fromkeys(own)) for role, own in out.items()}


def _given(cfg: TeamConfig) -> list[str]:
    """All names of models in the map, as often as they are given."""
    return [name for own in cfg.models.values() for name in ((own,) if isinstance(own, str) else own)]


def backbone_of(cfg: TeamConfig, roles: tuple[str, ...], model: str) -> Backbone:
    """Backbone of a model: an override of its name or of a role that it plays, else the team's.

    Args:
        cfg: Settings of the team.
        roles: Names of the roles of the environment.
        model: Name of the model.

    Raises:
        ConfigError: Roles that share the model ask for different backbones.
    """
    plays = [role for role, own in players_of(cfg, roles).items() if model in own]
    asked = {name: cfg.overrides[name] for name in (model, *plays) if name in cfg.overrides}
    if len(set(asked.values())) > 1:
        raise ConfigError(f"config.team.overrides: {', '.join(asked)} share the model {model!r}: expected one backbone")
    return next(iter(asked.values()), cfg.backbone)


def make_team(cfg: TeamConfig, roles: tuple[str, ...]) -> Team:
    """Make roles and models, without parameters.

    Args:
        cfg: Settings of the team.
        roles: Names of the roles of the environment.

    Raises:
        ConfigError: An override of a role that the environment does not have.
    """
    players = players_of(cfg, roles)
    names = {role: own[0] for role, own in players.items()}
    tokenizers: dict[Backbone, Tokenizer] = {}
    models: list[Model] = []
    for name in dict.fromkeys(name for own in players.values() for name in own):
        backbone = backbone_of(cfg, roles, name)
        if backbone not in tokenizers:
            tokenizers[backbone] = load_tokenizer(backbone)
        arch = architecture(backbone, tokenizers[backbone])
        policy = policy_of(cfg, arch)
        models.append(
            Model(name, policy, tokenizers[backbone], "backbone" if cfg.parameter_sharing == "lora" else None)
        )
    critics: dict[str, str] = {}  # of each model
    for model in list(models) if cfg.critic != "none" else []:
        name = {"head": model.name, "separate": f"{model.name}-critic", "joint": "joint-critic"}[cfg.critic]
        if name in roles and cfg.critic != "head":
            raise ConfigError(f"team.critic: the role {name!r} has the name of a critic; rename it")
        critics[model.name] = name
        if name not in (m.name for m in models):
            models.append(dataclasses.replace(model, name=name, base=None))
    of_role = tuple(critics[names[r]] for r in roles) if critics else ()
    if critics and any(len(own) > 1 for own in players.values()):
        raise ConfigError("config.team.critic: expected 'none' where several models play a role")
    parts = tuple(Role(r, names[r], cfg.max_new_tokens, co_players=players[r][1:]) for r in roles)
    return Team(parts, tuple(models), of_role, cfg.critic == "joint", cfg.batch_models)


def with_past(team: Team) -> Team:
    """Add to ``team`` an opponent model for each model that plays a role; see snapshots.py for its parameters."""
    return with_opponent_models(
        team, {r.name: _renamed(team.model_of(i), opponent_model(r.model)) for i, r in enumerate(team.roles)}
    )


def with_opponent_models(team: Team, others: Mapping[str, Model]) -> Team:
    """Add to ``team`` one more model for each role in ``others``: its opponent model in a rollout's assignment.

    ``others``: role -> model. Raises ConfigError where names or tokenizers do not go together.
    """
    models = {m.name: m for m in others.values()}
    taken = sorted(set(models) & {m.name for m in team.models})
    if taken:
        raise ConfigError(f"a model has the name of an opponent model, {taken[0]!r}; rename its role")
    for i, role in enumerate(team.roles):
        reads = team.model_of(i).tokenizer
        if role.name in others and others[role.name].tokenizer.name != reads.name:
            raise ConfigError(
                f"role {role.name!r}: expected an opponent model with the tokenizer {reads.name!r}, "
                f"got {others[role.name].tokenizer.name!r}"
            )
    more = lambda r: (*r.opponent_models, others[r.name].name) if r.name in others else r.opponent_models
    roles = tuple(dataclasses.replace(r, opponent_models=more(r)) for r in team.roles)
    return dataclasses.replace(team, roles=roles, models=(*team.models, *models.values()))


def with_partner(team: Team, params: Params, other: Team, own: Params) -> tuple[Team, Params]:
    """Add the models of another run to a team, as opponents of the same roles.

    Args:
        team: The team of this run.
        params: Parameters of ``team``.
        other: The team of the other run, with the same roles.
        own: Parameters of ``other``.

    Returns:
        The team and the parameters of both runs.
    """
    mine, theirs = (tuple(r.name for r in t.roles) for t in (team, other))
    if mine != theirs:
        raise ConfigError(f"partner: expected a team with the roles {', '.join(mine)}, got {', '.join(theirs)}")
    called = lambda name: f"{name}-partner"
    guests = {}
    for i, role in enumerate(other.roles):
        model = other.model_of(i)
        guests[role.name] = _renamed(model, called(model.name), model.base and called(model.base))
    both = {part: {**params[part], **{called(k): x for k, x in own[part].items()}} for part in ("agents", "shared")}
    return with_opponent_models(team, guests), {**params, **both}


def _renamed(model: Model, name: str, base: str | None = None) -> Model:
    return dataclasses.replace(model, name=name, base=base or model.base)


def init_params(cfg: TeamConfig, team: Team, key: jax.Array) -> Params:
    """Draw the parameters of a team: ``{"shared": {base: params}, "agents": {model: ...}}``.

    Args:
        cfg: Settings of the team.
        team: Roles and models.
        key: PRNG key. Each model has a key of its own, folded from this one.
    """
    agents: Params = {}
    shared: Params = {}
    if cfg.parameter_sharing == "lora":
        base = init_backbone(cfg.backbone, team.models[0].policy.config, jax.random.fold_in(key, len(team.models)))
        shared["backbone"] = base
    owner = {critic: role.model for role, critic in zip(team.roles, team.critics)}
    for i, model in enumerate(team.models):
        own = jax.random.fold_in(key, i)
        if model.base is not None:
            agents[model.name] = {"lora": init_lora(own, base, cfg.lora_rank, cfg.lora_targets)}
        else:
            backbone = backbone_of(cfg, tuple(r.name for r in team.roles), owner.get(model.name, model.name))
            with meshes.model_mesh(model.name):
                agents[model.name] = {"params": init_backbone(backbone, model.policy.config, own)}
        if model.name in team.critics:
            dim = model.policy.config.hidden_size
            agents[model.name]["value"] = init_head(jax.random.fold_in(own, 1), dim, cfg.critic_hidden)
    return {"shared": shared, "agents": agents}
