"""From a configuration to a team: its models, tokenizers and initial parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax

from jaxmarl_llm import meshes, qwen, sharding, weights
from jaxmarl_llm.invariant import invariant
from jaxmarl_llm.lora import TARGETS, init_lora
from jaxmarl_llm.losses import init_head
from jaxmarl_llm.past import understudy
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer, HFTokenizer, Tokenizer
from jaxmarl_llm.types import Model, Params, Policy, Role, Team

DTYPES = ("float32", "bfloat16", "float16")
SHARING = ("separate", "shared", "lora")
# none; a head on each policy's own backbone; an own copy of the backbone for each model; one copy that reads the
# prompts of all seats (CTDE)
CRITICS = ("none", "head", "separate", "joint")


@dataclass(frozen=True)
class Backbone:
    """A language model: weights from ``path``, or random ones of the given shape."""

    path: str | None = None  # Hugging Face directory or .gguf file; None: random weights
    tokenizer: str | None = None  # directory or .gguf; None: that of path, or bytes for random weights
    family: str = "qwen2"  # qwen2, qwen3 or llama; this and what follows describe random weights
    hidden_size: int = 64
    intermediate_size: int = 192
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int | None = None  # None: the tokenizer's
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    dtype: str = "float32"

    def check(self, path: str) -> None:
        if self.family not in qwen.FAMILIES:
            raise ConfigError(f"{path}.family: expected one of {', '.join(qwen.FAMILIES)}, got {self.family!r}")
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{path}.{name}: expected >= 1, got {getattr(self, name)}")
        if self.head_dim % 2:
            raise ConfigError(f"{path}.head_dim: expected an even number (rotary positions), got {self.head_dim}")
        if self.dtype not in DTYPES:
            raise ConfigError(f"{path}.dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{path}.num_kv_heads: expected a divisor of {self.num_heads}, got {self.num_kv_heads}")


@dataclass(frozen=True)
class TeamConfig:
    """Who shares what. ``separate``: a full copy a role; ``shared``: one model plays all roles; ``lora``: an adapter a
    role over one frozen backbone. ``overrides`` gives single roles another backbone (separate only).
    """

    share: str = "separate"
    backbone: Backbone = Backbone()
    overrides: dict[str, Backbone] = field(default_factory=dict)
    lora_rank: int = 16
    lora_targets: tuple[str, ...] = TARGETS
    max_new: int = 64  # tokens of one completion
    critic: str = "none"  # value estimates: see CRITICS
    critic_hidden: int = 0  # tanh units of the value head; 0: linear
    remat: bool = True  # recompute layers in the backward pass
    stacked: bool = False  # array environments: models that act together generate in one launch, parameters stacked
    invariant: bool = False  # generation: equal bits in any batch, bucket or cache and on any mesh; slower

    def check(self, path: str) -> None:
        if self.share not in SHARING:
            raise ConfigError(f"{path}.share: expected one of {', '.join(SHARING)}, got {self.share!r}")
        if self.overrides and self.share != "separate":
            raise ConfigError(f"{path}.overrides: expected none with share={self.share!r}; only separate copies differ")
        if self.critic not in CRITICS:
            raise ConfigError(f"{path}.critic: expected one of {', '.join(CRITICS)}, got {self.critic!r}")
        if self.critic_hidden < 0:
            raise ConfigError(f"{path}.critic_hidden: expected >= 0, got {self.critic_hidden}")
        if self.critic == "joint" and self.overrides:
            raise ConfigError(f"{path}.critic: expected another than 'joint' with overrides: it reads one tokenizer")
        if self.invariant and self.stacked:
            raise ConfigError(f"{path}.invariant: expected false with {path}.stacked: models in one launch are a batch")
        if self.max_new < 1:
            raise ConfigError(f"{path}.max_new: expected >= 1, got {self.max_new}")


def load_tokenizer(backbone: Backbone) -> Tokenizer:
    source = backbone.tokenizer or backbone.path
    return ByteTokenizer() if source is None else HFTokenizer(source)


def shape_of(backbone: Backbone, vocab_size: int) -> qwen.Config:
    """Of the backbone's folder, or of its own fields, with ``vocab_size`` unless it has one."""
    if backbone.path is not None:
        return dataclasses.replace(weights.read_config(backbone.path), dtype=backbone.dtype)
    return qwen.Config(
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


def architecture(backbone: Backbone, tokenizer: Tokenizer) -> qwen.Config:
    """The model's configuration; raises when the tokenizer does not fit the embedding."""
    cfg = shape_of(backbone, tokenizer.vocab_size)
    if tokenizer.vocab_size > cfg.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name}: {tokenizer.vocab_size} ids, but the embedding has {cfg.vocab_size} rows"
        )
    used = None if tokenizer.vocab_size == cfg.vocab_size else tokenizer.vocab_size
    return dataclasses.replace(cfg, used_vocab=used)


def init_backbone(backbone: Backbone, cfg: qwen.Config, key: jax.Array) -> Params:
    """On the mesh that is set, if any: every device makes or reads its own part."""
    init, mesh = qwen.make_policy(cfg).init, sharding.current()
    if backbone.path is None:
        return jax.jit(lambda key: sharding.settle(init(key)))(key)
    where = None if mesh is None else sharding.shardings(mesh, jax.eval_shape(init, key))
    arch = dataclasses.replace(cfg, used_vocab=None)
    params, _ = weights.load(Path(backbone.path), arch, dtype=backbone.dtype, sharding=where)
    return params


def policy_of(cfg: TeamConfig, arch: qwen.Config) -> Policy:
    policy = qwen.make_policy(arch, remat=cfg.remat)
    return invariant(policy) if cfg.invariant else policy


def make_team(cfg: TeamConfig, roles: tuple[str, ...]) -> Team:
    """Roles and models, without parameters. Raises for overrides of roles that the environment does not have."""
    unknown = sorted(set(cfg.overrides) - set(roles))
    if unknown:
        raise ConfigError(f"team.overrides: unknown role {unknown[0]!r}; the roles are {', '.join(roles)}")
    names = {role: "team" if cfg.share == "shared" else role for role in roles}
    tokenizers: dict[Backbone, Tokenizer] = {}
    models: list[Model] = []
    for role, name in names.items():
        if name in (m.name for m in models):
            continue
        backbone = cfg.overrides.get(role, cfg.backbone)
        if backbone not in tokenizers:
            tokenizers[backbone] = load_tokenizer(backbone)
        arch = architecture(backbone, tokenizers[backbone])
        policy = policy_of(cfg, arch)
        models.append(Model(name, policy, tokenizers[backbone], "backbone" if cfg.share == "lora" else None))
    critics: dict[str, str] = {}  # of each model
    for model in list(models) if cfg.critic != "none" else []:
        name = {"head": model.name, "separate": f"{model.name}-critic", "joint": "joint-critic"}[cfg.critic]
        if name in roles and cfg.critic != "head":
            raise ConfigError(f"team.critic: the role {name!r} has the name of a critic; rename it")
        critics[model.name] = name
        if name not in (m.name for m in models):
            models.append(dataclasses.replace(model, name=name, base=None))
    of_role = tuple(critics[names[r]] for r in roles) if critics else ()
    parts = tuple(Role(r, names[r], cfg.max_new) for r in roles)
    return Team(parts, tuple(models), of_role, cfg.critic == "joint", cfg.stacked)


def with_past(team: Team) -> Team:
    """The team with an understudy for each model that plays a role; see past.py for its parameters."""
    return with_understudies(
        team, {r.name: _renamed(team.model_of(i), understudy(r.model)) for i, r in enumerate(team.roles)}
    )


def with_understudies(team: Team, others: Mapping[str, Model]) -> Team:
    """The team with one more model for each role in ``others`` (by role), which a rollout's ``cast`` may let play it.

    Raises ConfigError where names or tokenizers do not go together.
    """
    models = {m.name: m for m in others.values()}
    taken = sorted(set(models) & {m.name for m in team.models})
    if taken:
        raise ConfigError(f"a model has the name of an understudy, {taken[0]!r}; rename its role")
    for i, role in enumerate(team.roles):
        reads = team.model_of(i).tokenizer
        if role.name in others and others[role.name].tokenizer.name != reads.name:
            raise ConfigError(
                f"role {role.name!r}: expected an understudy with the tokenizer {reads.name!r}, "
                f"got {others[role.name].tokenizer.name!r}"
            )
    more = lambda r: (*r.understudies, others[r.name].name) if r.name in others else r.understudies
    roles = tuple(dataclasses.replace(r, understudies=more(r)) for r in team.roles)
    return dataclasses.replace(team, roles=roles, models=(*team.models, *models.values()))


def with_partner(team: Team, params: Params, other: Team, own: Params) -> tuple[Team, Params]:
    """``team`` with the models of another run, ``other`` with parameters ``own``, as understudies of the same roles."""
    mine, theirs = (tuple(r.name for r in t.roles) for t in (team, other))
    if mine != theirs:
        raise ConfigError(f"partner: expected a team with the roles {', '.join(mine)}, got {', '.join(theirs)}")
    called = lambda name: f"{name}-partner"
    guests = {}
    for i, role in enumerate(other.roles):
        model = other.model_of(i)
        guests[role.name] = _renamed(model, called(model.name), model.base and called(model.base))
    both = {part: {**params[part], **{called(k): x for k, x in own[part].items()}} for part in ("agents", "shared")}
    return with_understudies(team, guests), {**params, **both}


def _renamed(model: Model, name: str, base: str | None = None) -> Model:
    return dataclasses.replace(model, name=name, base=base or model.base)


def init_params(cfg: TeamConfig, team: Team, key: jax.Array) -> Params:
    """{"shared": {base: params}, "agents": {model: ...}}, each model from its own folded key."""
    agents: Params = {}
    shared: Params = {}
    if cfg.share == "lora":
        base = init_backbone(cfg.backbone, team.models[0].policy.config, jax.random.fold_in(key, len(team.models)))
        shared["backbone"] = base
    owner = {critic: role.model for role, critic in zip(team.roles, team.critics)}
    for i, model in enumerate(team.models):
        own = jax.random.fold_in(key, i)
        if model.base is not None:
            agents[model.name] = {"lora": init_lora(own, base, cfg.lora_rank, cfg.lora_targets)}
        else:
            backbone = cfg.overrides.get(owner.get(model.name, model.name), cfg.backbone)
            with meshes.home(model.name):
                agents[model.name] = {"params": init_backbone(backbone, model.policy.config, own)}
        if model.name in team.critics:
            dim = model.policy.config.hidden_size
            agents[model.name]["value"] = init_head(jax.random.fold_in(own, 1), dim, cfg.critic_hidden)
    return {"shared": shared, "agents": agents}
