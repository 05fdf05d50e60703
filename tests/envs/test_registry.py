"""What a configuration asks of an environment's module before it draws tasks."""

import sys
from types import ModuleType

import pytest

from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError


def never(*args, **kwargs):
    raise AssertionError("a task was drawn")


@pytest.mark.parametrize(
    "name,args,roles",
    [
        ("facts", {}, ("rewriter", "selector", "generator")),
        ("facts", {"protocol": "inspect"}, ("planner", "solver", "inspector")),
        ("facts", {"protocol": "refine"}, ("actor", "refiner")),
        ("facts", {"protocol": "remember"}, ("extractor", "profiler", "retriever")),
        ("facts", {"protocol": "tags"}, ("planner", "searcher", "answerer", "agent")),
        ("facts", {"protocol": "mask"}, ("planner", "searcher", "summarizer", "updater", "answerer")),
        ("programs", {"protocol": "reflect"}, ("planner", "coder", "reflector")),
        ("maze", {}, ("one", "two")),
        ("chain", {"protocol": "refine"}, ("generator", "verifier", "refiner")),
        ("maze_text", {}, ("one", "two")),
        ("facts_text", {}, ("rewriter", "selector", "generator")),
        ("reference_game", {"hint": "human"}, ("speaker", "listener")),
        ("reference_game_solo", {}, ("solo",)),
        ("two_writers", {}, ("proposer", "editor")),
        ("two_writers_solo", {}, ("solo",)),
        ("call_team_solo", {}, ("solo",)),
        ("call_team", {}, ("master", "maths", "places", "trade", "culture", "office")),
    ],
)
def test_roles_are_those_of_the_environment_and_draw_no_task(name, args, roles, monkeypatch):
    config = EnvConfig(name, args)
    for drawn in ("make_tasks", "tasks"):
        if hasattr(config.module, drawn):
            monkeypatch.setattr(config.module, drawn, never)
    assert config.roles() == roles


def test_a_function_is_asked_for_its_environment():
    assert EnvConfig("tests.envs.test_registry:small", {"relations": 4}).roles() == facts.make(facts.Config()).roles


def small(relations):
    """An environment with eight tasks."""
    from jaxmarl_llm.envs.contract import of_module

    return of_module(facts, facts.Config(tasks=8, relations=relations), 8)


def test_what_make_returns_is_checked(monkeypatch):
    module = ModuleType("odd")
    module.Config, module.make = facts.Config, lambda config: 3
    monkeypatch.setitem(sys.modules, "odd.env", module)
    monkeypatch.setitem(sys.modules, "odd", module)
    with pytest.raises(ConfigError, match=r"make\(config\) returned int, not an ArrayEnv or HostEnv"):
        EnvConfig("odd.env").roles()
