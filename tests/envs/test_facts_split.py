"""Every protocol of facts keeps held-out tasks apart: the sides share none, and no demonstration is of one."""

import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import tasks
from tests.envs.facts_episodes import texts_of

pytestmark = pytest.mark.parametrize("protocol", facts.PROTOCOLS)


def test_sides_of_the_split_share_no_task(protocol):
    config = facts.Config(protocol=protocol)
    train, held = ({*map(tasks.content, texts_of(facts.make_tasks(config, n=400, held_out=h)))} for h in (0, 1))
    assert len(train) > 300 and len(held) > 300 and not train & held
    assert all(map(splits.is_held_out, held)) and not any(map(splits.is_held_out, train))


def test_no_demonstration_has_a_held_out_task(protocol, monkeypatch):
    """Prompts do not show all facts, so the tasks themselves are looked at."""
    seen, draw = [], tasks.drawn
    monkeypatch.setattr(tasks, "drawn", lambda *args, **kw: seen.append(draw(*args, **kw)) or seen[-1])
    facts.demonstrations(facts.Config(protocol=protocol), 0, 200)
    assert len(seen) >= 200 and not any(splits.is_held_out(tasks.content(task)) for task in seen)
