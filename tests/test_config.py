"""Configs: round trips, messages that name the key, and a fuzzer that must never see another exception."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import operator
import pkgutil
import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import absl.logging
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm import config, recipes
from jaxmarl_llm.config import (
    at_least,
    diff,
    fingerprint,
    finite,
    flatten,
    from_dict,
    in_range,
    later,
    one_of,
    override,
    positive,
    replace_path,
    to_dict,
)
from jaxmarl_llm.errors import ConfigError


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    clip: float | None = None
    kind: Literal["adam", "sgd"] = "adam"

    def check(self, path: str) -> None:
        if self.learning_rate <= 0:
            raise ConfigError(f"{path}.learning_rate: must be positive, got {self.learning_rate}")


@dataclass(frozen=True)
class Rollout:
    group_size: int
    sizes: tuple[int, ...] = (2, 2)
    pair: tuple[str, float] = ("x", 0.5)
    names: tuple[str, ...] = ()
    weights: dict[str, float] = field(default_factory=lambda: {"correct": 1.0})


@dataclass(frozen=True)
class Config:
    recipe: str = "toy"
    seed: int = 0
    fast: bool = False
    temperature: int | str = 1
    optimizer: Optimizer = Optimizer(clip=0.5)
    rollout: Rollout = Rollout(4)
    judge: Optimizer | None = None
    agents: tuple[Optimizer, ...] = (Optimizer(), Optimizer(kind="sgd"))


CASES = [
    ({"optimiser": {}}, "config.optimiser: unknown key; did you mean 'optimizer'?"),
    (
        {"optimizer": {"learing_rate": 1.0}},
        "config.optimizer.learing_rate: unknown key; did you mean 'learning_rate'?",
    ),
    ({"rollout": {"group_size": "eight"}}, "config.rollout.group_size: expected int, got 'eight'"),
    ({"rollout": {"group_size": 8.0}}, "config.rollout.group_size: expected int, got 8.0"),
    ({"rollout": {"group_size": True}}, "config.rollout.group_size: expected int, got True"),
    ({"rollout": {}}, "config.rollout.group_size: missing; expected int"),
    ({"rollout": {"group_size": 1, "pair": ["a"]}}, "config.rollout.pair: expected tuple of 2 (str, float), got ['a']"),
    ({"rollout": {"group_size": 1, "sizes": [1, "b"]}}, "config.rollout.sizes.1: expected int, got 'b'"),
    ({"rollout": {"group_size": 1, "weights": {"a": "b"}}}, "config.rollout.weights.a: expected float, got 'b'"),
    ({"rollout": {"group_size": 1, "weights": {1: 2.0}}}, "config.rollout.weights: expected keys of type str, got 1"),
    ({"rollout": 3}, "config.rollout: expected the keys of Rollout (group_size, sizes, pair, names, weights), got 3"),
    ({"optimizer": {"learning_rate": True}}, "config.optimizer.learning_rate: expected float, got True"),
    ({"optimizer": {"learning_rate": float("nan")}}, "config.optimizer.learning_rate: expected float, got nan"),
    ({"optimizer": {"learning_rate": -1}}, "config.optimizer.learning_rate: must be positive, got -1.0"),
    ({"optimizer": {"clip": "none"}}, "config.optimizer.clip: expected float or None, got 'none'"),
    ({"optimizer": {"kind": "adm"}}, "config.optimizer.kind: unknown value 'adm'; did you mean 'adam'?"),
    ({"optimizer": {"kind": 7}}, "config.optimizer.kind: unknown value 7; choose from 'adam', 'sgd'"),
    ({"judge": {"clp": 1}}, "config.judge.clp: unknown key; did you mean 'clip'?"),
    ({"agents": [{"learning_rate": 0}]}, "config.agents.0.learning_rate: must be positive, got 0.0"),
    ({"seed": 2**63}, "config.seed: expected int, got 9223372036854775808"),
    ({"seed": 10**5000}, "config.seed: expected int, got int too large to show"),
    ({"fast": 1}, "config.fast: expected bool, got 1"),
    ({"temperature": 1.5}, "config.temperature: expected int or str, got 1.5"),
    ({"a\nb": 1}, r"config.'a\nb': unknown key; known keys: "),
]


@pytest.mark.parametrize(("mapping", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_message_names_the_key(mapping, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, mapping)
    assert str(caught.value).startswith(message) if message.endswith(" ") else str(caught.value) == message


def test_round_trip_and_conversions():
    cfg = Config(seed=3, judge=Optimizer(), rollout=Rollout(2, names=("a", "b")))
    assert from_dict(Config, to_dict(cfg)) == cfg
    assert from_dict(Config, json.loads(json.dumps(to_dict(cfg)))) == cfg  # JSON makes lists of tuples
    built = from_dict(Config, {"optimizer": {"learning_rate": 1}, "temperature": "hot", "agents": []})
    assert isinstance(built.optimizer.learning_rate, float)
    assert built.temperature == "hot" and built.agents == ()
    assert from_dict(Config, {}) == Config()
    assert to_dict(cfg)["rollout"]["sizes"] == (2, 2) and to_dict(cfg)["optimizer"]["clip"] == 0.5


def test_unsupported_annotation_is_the_programmers_error():
    @dataclass(frozen=True)
    class Odd:
        x: complex = 0j

    with pytest.raises(TypeError, match=r"config\.x"):
        from_dict(Odd, {"x": 1j})


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("seed", "1_000", 1000),
        ("fast", "TRUE", True),
        ("fast", "0", False),
        ("recipe", "None", "None"),
        ("optimizer.clip", "None", None),
        ("optimizer.clip", "3", 3.0),
        ("optimizer.kind", "sgd", "sgd"),
        ("temperature", "7", 7),
        ("temperature", "low", "low"),
        ("rollout.sizes", "(4,4)", (4, 4)),
        ("rollout.sizes", "4,4", (4, 4)),
        ("rollout.sizes", "4", (4,)),
        ("rollout.sizes", "()", ()),
        ("rollout.names", "a,b", ("a", "b")),
        ("rollout.names", "('a','b')", ("a", "b")),
        ("rollout.pair", "('z',1)", ("z", 1.0)),
        ("rollout.weights", "{'a': 1}", {"a": 1.0}),
        ("rollout.weights.format", "0.2", {"correct": 1.0, "format": 0.2}),
        ("judge.clip", "1", Optimizer(clip=1.0)),
        ("agents[1].learning_rate", "5", (Optimizer(), Optimizer(5.0, kind="sgd"))),
        ("agents.0.clip", "5", (Optimizer(clip=5.0), Optimizer(kind="sgd"))),
    ],
)
def test_override_reads_text_by_annotation(path, text, value):
    group = re.match(r"judge|agents|rollout\.weights", path)  # compared whole
    for start in ({}, to_dict(Config())):  # from nothing as well: the other keys of a group keep their defaults
        cfg = from_dict(Config, override(Config, start, path, text))
        got = operator.attrgetter(group[0] if group else path)(cfg)
        assert got == value and type(got) is type(value)
        assert path.startswith("optimizer.clip") or cfg.optimizer.clip == 0.5
        assert cfg.rollout.group_size == 4


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("optimizer.lerning_rate", "1", "config.optimizer.lerning_rate: unknown key; did you mean 'learning_rate'?"),
        ("seed", "eight", "config.seed: expected int, got 'eight'"),
        ("seed", "1e3", "config.seed: expected int, got '1e3'"),
        ("seed.x", "1", "config.seed: expected int, which has no key 'x'"),
        ("optimizer", "1", "config.optimizer: set one of its keys as config.optimizer.KEY=VALUE: learning_rate, "),
        ("judge", "1", "config.judge: set one of its keys as config.judge.KEY=VALUE: "),
        ("agents[2].clip", "1", "config.agents: no item '2'; it has 2, counted from 0"),
        ("agents.first.clip", "1", "config.agents: no item 'first'; it has 2"),
        ("agents.².clip", "1", "config.agents: no item '²'; it has 2"),
        ("optimizer.clip", "x", "config.optimizer.clip: expected float or None, got 'x'"),
        ("rollout.weights", "5", "config.rollout.weights: expected dict of float, got 5"),
    ],
)
def test_override_message(path, text, message):
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, override(Config, {}, path, text))
    assert str(caught.value).startswith(message)


def test_replace_path():
    cfg = replace_path(Config(), "optimizer.learning_rate", 2)
    assert cfg == dataclasses.replace(Config(), optimizer=Optimizer(2.0, clip=0.5))
    assert replace_path(Config(), "judge", Optimizer(clip=1.0)).judge == Optimizer(clip=1.0)
    with pytest.raises(ConfigError, match=r"^config\.optimizer\.learning_rate: must be positive"):
        replace_path(Config(), "optimizer.learning_rate", -2)
    with pytest.raises(ConfigError, match=r"^config\.seeds: unknown key; did you mean 'seed'\?$"):
        replace_path(Config(), "seeds", 2)


def test_diff_names_what_changed():
    new = Config(
        seed=1, judge=Optimizer(), agents=(Optimizer(),), rollout=Rollout(4, sizes=(3,), weights={"format": 1.0})
    )
    assert diff(Config(), Config()) == []
    assert diff(Config(), json.loads(json.dumps(to_dict(Config())))) == []  # as stored in a checkpoint
    assert diff(Config(), new) == [
        "config.seed: 0 -> 1",
        "config.rollout.sizes: (2, 2) -> (3,)",
        "config.rollout.weights.correct: 1.0 -> (absent)",
        "config.judge: None -> (absent)",
        "config.agents.1.learning_rate: 0.001 -> (absent)",
        "config.agents.1.clip: None -> (absent)",
        "config.agents.1.kind: 'sgd' -> (absent)",
        "config.rollout.weights.format: (absent) -> 1.0",
        "config.judge.learning_rate: (absent) -> 0.001",
        "config.judge.clip: (absent) -> None",
        "config.judge.kind: (absent) -> 'adam'",
    ]


def test_fingerprint_depends_on_values_alone():
    one = fingerprint(Config(optimizer=Optimizer(learning_rate=1.0)))
    assert one == fingerprint(Config(optimizer=Optimizer(learning_rate=1)))
    assert len(one) == 64 and one != fingerprint(Config(optimizer=Optimizer(learning_rate=1.0, clip=0.0)))
    weights = [{"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}]
    assert len({fingerprint(Config(rollout=Rollout(1, weights=w))) for w in weights}) == 1


@dataclass(frozen=True)
class Sized:
    size: int = 1
    added: int = later(0)


@dataclass(frozen=True)
class Outer:
    one: Sized = Sized()


def test_a_field_that_came_later_changes_no_fingerprint_at_its_default():
    """Also inside another field. With another value it counts like any field."""
    before = hashlib.sha256(b'{"one":{"size":2}}').hexdigest()
    assert fingerprint(Outer(Sized(size=2))) == before
    assert len({before, *(fingerprint(Outer(Sized(2, added=n))) for n in range(3))}) == 3


def test_one_of():
    assert one_of("config.plan", "flat", ["flat", "tree"]) == "flat"
    with pytest.raises(ConfigError, match=r"^config\.plan: unknown value 'fat'; did you mean 'flat'\?$"):
        one_of("config.plan", "fat", ["flat", "tree"])
    with pytest.raises(ConfigError, match="choose from 1, 2"):
        one_of("config.n", True, [1, 2])


# ------------------------------------------------------------------------------------------------------- ranges


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (lambda: at_least("config.a", -5, 0), "config.a: expected >= 0, got -5"),
        (lambda: at_least("config.a", 2**31, 0), "config.a: expected <= 2147483647, got 2147483648"),
        (lambda: at_least("config.a", 10**9, 1, 2**24), "config.a: expected <= 16777216, got 1000000000"),
        (lambda: at_least("config.a", math.inf, 0), "config.a: expected a finite number, got inf"),
        (lambda: at_least("config.a", math.nan, 0), "config.a: expected a finite number, got nan"),
        (lambda: positive("config.a", 0.0), "config.a: expected > 0, got 0.0"),
        (lambda: positive("config.a", math.inf), "config.a: expected a finite number, got inf"),
        (lambda: finite("config.a", -math.inf), "config.a: expected a finite number, got -inf"),
        (lambda: in_range("config.a", 3.0, 0, 1, "[)"), "config.a: expected in [0, 1), got 3.0"),
        (lambda: in_range("config.a", 1.0, 0, 1, "[)"), "config.a: expected in [0, 1), got 1.0"),
        (lambda: in_range("config.a", 0.0, 0, 1, "(]"), "config.a: expected in (0, 1], got 0.0"),
        (lambda: in_range("config.a", math.nan, 0, 1), "config.a: expected in [0, 1], got nan"),
    ],
)
def test_range_helpers_write_one_line_with_the_key(check, line):
    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value) == line


def test_range_helpers_accept_the_ends():
    at_least("config.a", 0, 0)
    at_least("config.a", 2**24, 1, 2**24)
    at_least("config.a", 1e30, 0)
    positive("config.a", 1e-30)
    in_range("config.a", 0, 0, 1)
    in_range("config.a", 1, 0, 1, "(]")


# ------------------------------------------------------------------------------------------ renamed and removed keys


@dataclass(frozen=True)
class Rate:
    peak: float = 1e-3
    warmup_steps: int = 0

    ALIASES: ClassVar[dict[str, str]] = {"warmup": "warmup_steps"}

    def check(self, path: str) -> None:
        at_least(f"{path}.warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True)
class FastRate(Rate):
    momentum: float = 0.9

    ALIASES: ClassVar[dict[str, str]] = {"beta": "momentum"}
    REMOVED: ClassVar[dict[str, str]] = {"nesterov": "use momentum"}


@dataclass(frozen=True)
class Renamed:
    rate: Rate = Rate()
    fast: FastRate | None = None
    rates: tuple[FastRate, ...] = (FastRate(),)


@pytest.fixture
def warned(caplog):
    """Lines that a conversion has logged; each pair of names is logged once a process."""
    config._warn_of_alias.cache_clear()
    absl.logging.use_absl_handler()
    yield lambda: [record.getMessage() for record in caplog.records]
    config._warn_of_alias.cache_clear()


def test_an_old_name_is_read_under_its_new_name_with_one_warning(warned):
    stored = {"rate": {"peak": 1.0, "warmup": 5}, "rates": [{"beta": 0.5, "warmup": 2}]}
    cfg = from_dict(Renamed, stored)
    assert cfg == Renamed(Rate(1.0, 5), rates=(FastRate(warmup_steps=2, momentum=0.5),))
    assert from_dict(Renamed, stored) == cfg
    assert warned() == [
        f"{old}: renamed to {new}; the old name is accepted in this release alone"
        for old, new in (
            ("config.rate.warmup", "config.rate.warmup_steps"),
            ("config.rates.0.beta", "config.rates.0.momentum"),
            ("config.rates.0.warmup", "config.rates.0.warmup_steps"),  # of the class that it inherits from
        )
    ]


def test_overrides_accept_old_names(warned):
    full = to_dict(Renamed(Rate(warmup_steps=1), FastRate()))
    assert from_dict(Renamed, override(Renamed, full, "rate.warmup", "7")).rate == Rate(warmup_steps=7)
    assert from_dict(Renamed, override(Renamed, full, "fast.beta", "0.5")).fast == FastRate(momentum=0.5)
    assert from_dict(Renamed, override(Renamed, {}, "fast.beta", "0.5")).fast == FastRate(momentum=0.5)
    stored = {"rate": {"warmup": 3, "peak": 1.0}}  # the new name over a stored old one
    assert from_dict(Renamed, override(Renamed, stored, "rate.warmup_steps", "7")).rate == Rate(1.0, 7)
    assert replace_path(Renamed(), "rates[0].beta", 0.1).rates == (FastRate(momentum=0.1),)
    assert len(warned()) == 3


@pytest.mark.parametrize("keys", [["warmup", "warmup_steps"], ["warmup_steps", "warmup"]])
def test_an_old_and_a_new_name_together_are_refused(keys, warned):
    with pytest.raises(ConfigError) as caught:
        from_dict(Renamed, {"rate": dict.fromkeys(keys, 1)})
    assert str(caught.value) == (
        "config.rate.warmup: the old name of config.rate.warmup_steps, which is given too; keep "
        "config.rate.warmup_steps alone"
    )


def test_a_removed_key_says_what_to_do(warned):
    line = r"^config\.fast\.nesterov: removed; use momentum$"
    with pytest.raises(ConfigError, match=line):
        from_dict(Renamed, {"fast": {"nesterov": True}})
    with pytest.raises(ConfigError, match=line):
        override(Renamed, {}, "fast.nesterov", "true")
    with pytest.raises(ConfigError, match=line):
        replace_path(Renamed(), "fast.nesterov", True)


def test_a_message_about_a_value_under_its_old_name_has_the_new_name(warned):
    with pytest.raises(ConfigError, match=r"^config\.rate\.warmup_steps: expected >= 0, got -1$"):
        from_dict(Renamed, {"rate": {"warmup": -1}})


RENAMED = [  # (config class, old key, new key, value that is no default)
    ("training.optimizers:Optimizer", "warmup", "warmup_steps", 3),
    ("training.optimizers:Optimizer", "steps", "total_steps", 3),
    ("training.optimizers:Optimizer", "masters", "float32_master_weights", False),
    ("training.losses:Loss", "level", "ratio_level", "sequence"),
    ("training.losses:Loss", "aggregate", "aggregation", "sum"),
    ("training.losses:Loss", "importance_cap", "tis_clip", 2.0),
    ("training.losses:Loss", "constant", "loss_length", 7.0),
    ("credit.assign:Credit", "centre", "baseline", "loo"),
    ("credit.assign:Credit", "scale", "normalise", "none"),
    ("credit.assign:Credit", "over", "stats_over", "episodes"),
    ("credit.assign:Credit", "reduce", "joint_action_reduce", "sum"),
    ("agents.team:TeamConfig", "share", "parameter_sharing", "shared"),
    ("agents.team:TeamConfig", "stacked", "batch_models", True),
    ("agents.team:TeamConfig", "invariant", "batch_invariant", True),
    ("agents.team:TeamConfig", "max_new", "max_new_tokens", 3),
    ("agents.snapshots:Past", "share", "fraction", 0.25),
    ("training.config:RunConfig", "max_logprob_gap", "max_logprob_diff", 0.5),
    ("recipes.iac:Config", "decay", "gae_lambda", 0.5),
    ("recipes.maac:Config", "decay", "gae_lambda", 0.5),
    ("recipes.joyagents_r1:Config", "top_k", "selected_groups", 2),
    ("recipes.joyagents_r1:Config", "scope", "selection_scope", "batch"),
    ("recipes.magrpo:Config", "mode", "tree_mode", "tree"),
]


@pytest.mark.parametrize("name, old, new, value", RENAMED, ids=[f"{n.split(':')[0]}.{o}" for n, o, _, _ in RENAMED])
def test_every_renamed_key_is_read_with_one_warning_and_not_beside_its_new_name(name, old, new, value, warned):
    cls = config.load_object("test", f"jaxmarl_llm.{name}")
    others = {"credit": {"group": "node"}} if new == "tree_mode" else {}  # what a tree needs
    cfg = from_dict(cls, {old: value, **others})
    assert getattr(cfg, new) == value and not hasattr(cfg, old)
    assert warned() == [f"config.{old}: renamed to config.{new}; the old name is accepted in this release alone"]
    assert from_dict(cls, override(cls, others, old, str(value))) == cfg  # as on the command line
    with pytest.raises(ConfigError, match=rf"^config\.{old}: the old name of config\.{new}, which is given too"):
        from_dict(cls, {old: value, new: value, **others})


def test_the_table_of_renamed_keys_is_complete():
    room = {"training.optimizers", "training.losses", "credit.assign", "agents.team", "agents.snapshots"}
    modules = room | {"training.config"} | {f"recipes.{m.name}" for m in pkgutil.iter_modules(recipes.__path__)}
    found = set()
    for name in modules:
        for cls in vars(importlib.import_module(f"jaxmarl_llm.{name}")).values():
            if isinstance(cls, type) and dataclasses.is_dataclass(cls):
                found |= {(old, new) for old, new in config._inherited(cls, "ALIASES").items()}
    assert found == {(old, new) for _, old, new, _ in RENAMED}


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["adam", "sgd", 10**4000, -(2**70), b"x", object(), {1, 2}, float("nan"), "x" * 500]),
)
keys = st.one_of(
    st.sampled_from([*flatten(Config()), "learning_rate", "clip", "kind", "sede", "grop_size"]).map(
        lambda path: path.split(".")[-1]
    ),
    st.text(max_size=5),
    st.integers(0, 2),
)
junk = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


@st.composite
def configs(draw):
    """The default config with one to three places damaged, or nothing but junk."""
    if draw(st.integers(0, 9)) == 0:
        return draw(junk)
    tree = json.loads(json.dumps(to_dict(Config(judge=Optimizer()))))
    for _ in range(draw(st.integers(1, 3))):
        spot: Any = tree
        while True:
            inner = [k for k, v in (spot.items() if isinstance(spot, dict) else enumerate(spot)) if v and _holds(v)]
            if not inner or draw(st.booleans()):
                break
            spot = spot[draw(st.sampled_from(inner))]
        if isinstance(spot, list):
            spot.append(draw(junk))
        elif spot and draw(st.booleans()):
            name = draw(st.sampled_from(sorted(map(str, spot))))
            spot[name] = draw(junk)
        elif spot and draw(st.booleans()):
            del spot[draw(st.sampled_from(list(spot)))]
        else:
            spot[draw(keys)] = draw(junk)
    return tree


def _holds(value: object) -> bool:
    return isinstance(value, (dict, list))


outcomes: set[bool] = set()


def _builds_or_says_why(build):
    try:
        cfg = build()
    except ConfigError as error:
        outcomes.add(False)
        message = str(error)
        assert message.startswith("config") and message.isprintable() and len(message) < 400, message
        return
    outcomes.add(True)
    assert from_dict(Config, to_dict(cfg)) == cfg
    assert diff(cfg, to_dict(cfg)) == [] and len(fingerprint(cfg)) == 64


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(configs())
def test_fuzzed_config_builds_or_says_why(mapping):
    _builds_or_says_why(lambda: from_dict(Config, mapping))


paths = st.sampled_from([*flatten(Config()), "config.judge.clip", "config.agents[0].kind", "config.rollout"])
texts = st.one_of(
    st.text(max_size=9),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(["((", "None", "true", "adam", "(1,", "{1:2}", "[[1]]", "9" * 5000, "(" * 300, "a,b", "\0"]),
)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)
@given(paths | st.text(max_size=9), texts)
def test_fuzzed_override_builds_or_says_why(path, text):
    _builds_or_says_why(lambda: from_dict(Config, override(Config, {}, path.removeprefix("config."), text)))


def test_fuzzers_reached_both_outcomes():
    if not outcomes:
        pytest.skip("the fuzzers ran in another process")
    assert outcomes == {True, False}
