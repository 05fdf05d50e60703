"""Every field of every environment's Config at extreme values: one line that names the full key, or an environment."""

import dataclasses
import math
import re
import time
import typing

import jax
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.checks import ARGS
from jaxmarl_llm.envs.registry import MODULES, EnvConfig
from jaxmarl_llm.errors import ConfigError

LARGE = 10**9
NUMBERS = {int: (-1, 0, LARGE), float: (-1.0, 0.0, math.nan, math.inf, 1e9)}
WRONG = {"no field": "has this type"}
BASE = {name: {"unsafe_exec": True} for name in ("coding", "programs_text")}  # needed where no sandbox works
SECONDS = 30.0  # for one case on a slow machine; an unchecked size takes minutes or all memory


def values(kind, default):
    """Values to try for a field annotated ``kind``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in NUMBERS:
        return NUMBERS[kind]
    if origin is tuple:
        return [(value,) * len(default or (0,)) for value in values(args[0], None)]
    return [value for member in args for value in values(member, None)] if type(None) in args else []


def fields(config, path=""):
    """(key, value) of every field of a Config and of the Configs in it."""
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        key, kind = path + field.name, hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from fields(kind, key + ".")
        else:
            yield from ((key, value) for value in [*values(kind, field.default), WRONG])


def cases():
    for name in MODULES:
        for key, value in fields(EnvConfig(name).module.Config):
            yield pytest.param(name, key, value, id=f"{name}-{key}-{str(value)[:12]}")


def nested(key, value):
    """Arguments of a Config in which ``key``, parts joined by dots, has this value."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def refusal(name, **args):
    """The error of a Config, or None."""
    try:
        from_dict(EnvConfig(name).module.Config, {**BASE.get(name, {}), **args}, ARGS)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "field", "value"), [*cases()])
def test_a_value_is_refused_by_its_full_key_or_works(name, field, value):
    start, message = time.monotonic(), refusal(name, **nested(field, value))
    if message is not None:
        assert re.match(
            rf"{re.escape(ARGS)}\.{re.escape(field)}(\.\d+)*: (expected .*, got|unknown value) ", message
        ), message
        assert "\n" not in message
    else:
        assert value is not WRONG and not math.isnan(value if isinstance(value, float) else 0.0)
        module = EnvConfig(name).module
        config = from_dict(module.Config, {**BASE.get(name, {}), **nested(field, value)}, ARGS)
        env = module.make(config)
        if isinstance(env, ArrayEnv):
            tasks = module.make_tasks(config, config.seed, 4)
            assert all(len(column) == 4 for column in tasks.values())
            seen = env.observe(env.reset(jax.random.key(0), jax.tree.map(lambda x: x[0], tasks)))
            assert seen.tokens.shape[0] == len(seen.role) == env.seats and bool(seen.active.any())
            assert int(seen.length.max()) <= seen.tokens.shape[1]
    assert time.monotonic() - start < SECONDS


@pytest.mark.parametrize("name", MODULES)
def test_the_defaults_are_accepted(name):
    assert refusal(name) is None


REAL = (
    "assistant",
    "call_team",
    "call_team_solo",
    "coding",
    "writing",
    "reference_game",
    "reference_game_solo",
    "two_writers",
    "two_writers_solo",
)  # have counts
SIZES = [
    *((name, "tasks") for name in MODULES if name not in (*REAL, "facts_text", "programs_text")),
    *((f"{name}{form}", "rounds") for name in ("chain", "safety", "dilemma") for form in ("", "_text")),
    ("matrix", "rounds"),
    *(("maze", field) for field in ("moves", "message", "agents", "size")),
    *(("chain", field) for field in ("terms", "filler")),
    *((name, "response") for name in ("dispatch", "dispatch_solo", "duet", "games", "matrix", "dilemma")),
    *(("relay_dispatch", field) for field in ("response", "keys", "spellings", "visible")),
    *(("games", field) for field in ("turns", "information", "lives", "hand", "colours")),
    *((name, "count") for name in MODULES if name.endswith("_text") or name in REAL),
    *(("reference_game", field) for field in ("titles", "abstract_words", "title_words", "hint_words")),
    *((f"two_writers{form}", field) for form in ("", "_solo") for field in ("abstract_words", "most_words")),
    *(
        (f"call_team{form}", field)
        for form in ("", "_solo")
        for field in ("demonstrated", "query_chars", "call_chars", "per_function")
    ),
    ("dilemma", "message"), ("safety", "length"), ("coding", "memory_mb"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field"), SIZES)
def test_a_size_that_cannot_be_held_is_refused(name, field):
    message = refusal(name, **{field: LARGE})
    assert message is not None and message.startswith(f"{ARGS}.{field}: expected") and message.endswith(f"got {LARGE}")


PAIRS = [
    ("chain", {"protocol": "verify", "rounds": 1}, "rounds: expected 2 to"),
    ("chain", {"protocol": "meta", "rounds": 2, "shaping": 0.5}, "shaping: expected 0"),
    ("maze", {"shortest": 5, "longest": 4}, "shortest: expected 1 to longest=4, got 5"),
    ("writing", {"min_words": 9, "max_words": 8}, "min_words: expected 1 to max_words=8, got 9"),
    ("writing", {"max_source": 50}, "min_source: expected 1 to max_source=50, got 100"),
    ("coding", {"cpu": 9.0, "total": 1.0}, "cpu: expected more than 0 and at most total=1 seconds, got 9.0"),
    ("coding", {"feedback": "expert", "expert": "http://x/v1"}, "expert_model: expected the name of a model"),
    ("games", {"hand": 4}, "hand: expected cards that the deck can deal"),
    ("games", {"copies": (1,)}, "copies: expected for each of 2 ranks"),
    ("dispatch", {"mixture": (0.0,) * 4}, "mixture: expected a weight >= 0 for each of"),
    ("relay_dispatch", {"verify_noise": (0.5, 0.5)}, "verify_noise: expected probabilities in [0, 1]: one for all"),
    ("matrix", {"payoffs": ((1.0, 1.0),)}, "payoffs: expected four pairs"),
]


@pytest.mark.parametrize(("name", "args", "message"), PAIRS)
def test_fields_that_do_not_fit_together(name, args, message):
    assert (refusal(name, **args) or "").startswith(f"{ARGS}.{message}")


def test_the_key_follows_the_place_of_the_config():
    with pytest.raises(ConfigError, match=r"^train\.env\.args\.rounds: expected 1 to \d+, got 0$"):
        EnvConfig("matrix", {"rounds": 0}).check("train.env")
