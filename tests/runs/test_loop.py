"""Whole runs of the recipes: resume to the bit, refusal of changed configurations, reward failures, bad steps."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents import team_file
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.distributed import deadlines, processes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo, joyagents_r1, magrpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.versions import commit_of
from jaxmarl_llm.storage.checkpoint import meta_checksum
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.telemetry.logger import Logger
from tests.toys import Compiles

ROOT = Path(__file__).parents[2]
# Enough of stage 0 that completions end and rewards differ; then 6 steps of RL.
STAGE_0 = 40
SMALL = {
    "steps": 6,
    "batch": 4,
    "team": {
        "max_new_tokens": 7,
        "remat": False,
        "backbone": {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "head_dim": 8},
    },
    "env": {"name": "dispatch", "eval_tasks": 4},
    "group": 4,
    "memory": {"capacity": 8, "retrieve": 1, "warmup": 4},
    "sft": {"steps": STAGE_0, "batch": 16, "samples": 64, "optimizer": {"learning_rate": 0.02}},
    "run": {"checkpoint_every": STAGE_0 + 3, "eval_every": 0, "log_every": 100, "tensorboard": False},
}
TIMES = ("time/", "speed/")


def joy(**changes):
    return from_dict(joyagents_r1.Config, {**SMALL, **changes})


def lines(workdir):
    rows = [json.loads(line) for line in (Path(workdir) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Stage 0 and six steps of RL without a stop."""
    workdir = tmp_path_factory.mktemp("straight")
    return loop.fit(joy(), joyagents_r1.make(joy()), workdir), workdir


@pytest.mark.slow
def test_six_steps_are_three_and_a_kill_and_three(straight, tmp_path):
    """A process killed with -9 after its checkpoint at RL step 3; the same command goes on: every leaf byte-equal."""
    state, workdir = straight
    config = tmp_path / "config.py"
    config.write_text(
        "from ml_collections import ConfigDict\nfrom jaxmarl_llm.config import to_dict, from_dict\n"
        "from jaxmarl_llm.recipes.joyagents_r1 import Config\n"
        f"def get_config(variant=''):\n    return ConfigDict(to_dict(from_dict(Config, {SMALL!r})))\n"
    )
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "experiments.train",
        f"--config={config}",
        f"--workdir={run}",
        f"--compilation_cache={jax.config.jax_compilation_cache_dir}",
    ]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved = run / "checkpoints" / str(STAGE_0 + 3)
    deadline = time.time() + 240
    while time.time() < deadline and process.poll() is None:
        if saved.exists():
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.exists()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "resumed" in done.stdout
    from jaxmarl_llm.storage.checkpoint import Checkpointer

    got = Checkpointer(run).restore(loop.without_shared(state))
    assert got is not None and got[2] == STAGE_0 + 6
    assert digests(got[0]) == digests(loop.without_shared(state))
    assert lines(run) == lines(workdir)


def test_a_warm_step_and_evaluation_compile_nothing(straight, tmp_path):
    """A whole step of the recipe (rollout, credit, selection, update, memory) from a state it has met before."""
    state, _ = straight
    recipe = joyagents_r1.make(joy())
    with (
        Logger(tmp_path, resume_step=None, total_steps=99, interval=99, tensorboard=False) as logger,
        Compiles() as seen,
    ):
        # A step donates what it updates; it needs a copy each time.
        recipe.step(jax.tree.map(jnp.copy, state), logger)
        recipe.evaluate(state)
        cold = seen.count
        recipe.step(jax.tree.map(jnp.copy, state), logger)
        recipe.evaluate(state)
        assert cold > 0 and seen.count == cold


def test_metrics_and_files_of_a_run(straight):
    state, workdir = straight
    rows = lines(workdir)
    assert [r["step"] for r in rows] == list(range(1, STAGE_0 + 7))
    assert (workdir / "report.png").stat().st_size > 10_000
    assert "## Episode 1" in (workdir / "episodes.md").read_text()
    made_with = json.loads((workdir / "versions.json").read_text())
    assert made_with["jax"] == jax.__version__ and made_with["commit"] == commit_of(Path.cwd())
    last = rows[-1]
    for key in (
        "reward/accuracy",
        "reward/format",
        "reward/efficiency",
        "success",
        "agent/master/variance",
        "agent/master/zero_variance",
        "agent/master/length",
        "agent/master/memory_size",
        "node/0/variance",
        "count/branch_sequences",
        "final/success",
        "final/success_greedy",
    ):
        assert key in last, key
    total = last["reward/accuracy"] + last["reward/format"] - last["reward/efficiency"]
    assert last["reward/total"] == pytest.approx(total)
    assert state.memory["master"].count > 0 and int(state.counters["skipped"]) == 0


def test_every_metric_of_a_run_is_documented(straight):
    rows = [json.loads(line) for line in (straight[1] / "metrics.jsonl").read_text().splitlines()]
    keys = {key for row in rows for key in row} - {"step"}
    assert [key for key in sorted(keys) if not is_documented(key)] == []
    assert {"sft/nll", "memory/master/size", "final/success", "count/skipped", "agent/master/ratio"} <= keys


def test_a_changed_configuration_is_refused_by_key(straight):
    _, workdir = straight
    changed = joy(seed=1)
    with pytest.raises(ConfigError, match=r"config\.seed: 0 -> 1"):
        loop.fit(changed, joyagents_r1.make(changed), workdir)


def test_finished_runs_stay_as_they_are(straight):
    state, workdir = straight
    files = [workdir / name for name in ("metrics.jsonl", "episodes.md")]
    before = [file.read_bytes() for file in files]
    again = loop.fit(joy(), joyagents_r1.make(joy()), workdir)
    assert digests(loop.without_shared(again)) == digests(loop.without_shared(state))
    assert [file.read_bytes() for file in files] == before and b"## Episode 1" in before[1]


def test_episodes_stay_where_a_resumed_run_has_none(tmp_path):
    path, of = tmp_path / "episodes.md", lambda shown: SimpleNamespace(episodes=lambda: shown)
    loop._write_episodes(of([]), path)
    assert path.read_text() == "# Episodes\n"
    loop._write_episodes(of([[{"role": "master", "completion": "hi"}]]), path)
    written = path.read_text()
    loop._write_episodes(of([]), path)
    assert "## Episode 1" in written and path.read_text() == written


def copied(state, recipe):
    """A fresh state of ``recipe`` with the parameters of ``state``."""
    return recipe.init(0).replace(params=jax.tree.map(jnp.copy, state.params))


def test_top_k_updates_only_models_with_selected_groups(straight):
    """K = 1 of the whole batch: one model moves, the others are byte-equal, optimizer state included."""
    cfg = joy(selected_groups=1, selection_scope="batch", sft={"steps": 0}, use_memory=False, batch=8)
    recipe = joyagents_r1.make(cfg)
    state = copied(straight[0], recipe)
    before = {m.name: digests((state.params["agents"][m.name], state.opt_state[m.name])) for m in recipe.team.models}
    from jaxmarl_llm.telemetry.logger import Logger

    state, metrics = recipe.step(state, Logger(".", resume_step=None, total_steps=1, primary=False))
    after = {m.name: digests((state.params["agents"][m.name], state.opt_state[m.name])) for m in recipe.team.models}
    updated = {name for name in before if metrics.get(f"agent/{name}/updated") == 1.0}
    assert len(updated) == 1
    assert {name for name in before if before[name] != after[name]} == updated


def test_all_invalid_rewards_change_no_parameter(straight, monkeypatch):
    cfg = joy(sft={"steps": 0})
    recipe = joyagents_r1.make(cfg)
    state = copied(straight[0], recipe)
    before = digests((state.params, state.opt_state))
    play = recipe.env_runner.play

    def spoilt(*args, **kwargs):
        played = play(*args, **kwargs)
        moves = played.tree.transitions
        moves = moves.replace(valid=np.zeros_like(moves.valid))
        return played._replace(tree=played.tree.replace(transitions=moves))

    monkeypatch.setattr(recipe.env_runner, "play", spoilt)
    from jaxmarl_llm.telemetry.logger import Logger

    state, metrics = recipe.step(state, Logger(".", resume_step=None, total_steps=1, primary=False))
    assert digests((state.params, state.opt_state)) == before
    assert metrics["count/invalid_share"] == 1.0
    assert all(int(m.count) == 0 for m in state.memory.values())


def test_a_run_stops_after_bad_steps_and_keeps_its_checkpoint(tmp_path, monkeypatch):
    cfg = joy(sft={"steps": 0}, run={**SMALL["run"], "checkpoint_every": 1, "max_bad_steps": 2})
    recipe = joyagents_r1.make(cfg)
    step, calls = recipe.step, []

    def bad(state, logger):
        calls.append(1)
        state, metrics = step(state, logger)
        return state, {**metrics, "bad": float(len(calls) > 1)}

    monkeypatch.setattr(recipe, "step", bad)
    with pytest.raises(FloatingPointError, match=r"2 steps in a row .* the last checkpoint is that of step 2$"):
        loop.fit(cfg, recipe, tmp_path)
    assert len(calls) == 3
    assert (tmp_path / "checkpoints" / "2").exists()


# A game of one turn: runs of a few small programs.
GAME = {
    "steps": 2,
    "batch": 4,
    "group": 2,
    "env": {"name": "matrix", "eval_tasks": 4},
    "reward": {"payoff": 1.0},
    "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
    "sft": {"steps": 1, "batch": 4, "samples": 8, "optimizer": {"name": "sgd"}},
    "run": {
        "checkpoint_every": 1,
        "eval_every": 0,
        "eval_greedy": False,
        "log_every": 100,
        "tensorboard": False,
        "keep": 3,
    },
}


def game(**changes):
    cfg = from_dict(magrpo.Config, {**GAME, **changes})
    return cfg, magrpo.make(cfg)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A supervised step with SGD, then two of RL with AdamW, each saved."""
    workdir = tmp_path_factory.mktemp("played")
    return loop.fit(*game(), workdir), workdir


def test_a_loop_by_hand_ends_where_fit_ends(played, tmp_path):
    """`Recipe.step` counts its step: without that every step would be the first one again."""
    _, recipe = game()
    state = recipe.init(0)
    with Logger(tmp_path, resume_step=None, total_steps=3, tensorboard=False, primary=False) as logger:
        for number in range(recipe.total_steps):
            assert int(state.step) == number
            state, _ = recipe.step(state, logger)
    assert digests(state) == digests(played[0])


def damage(workdir, step):
    path = workdir / "checkpoints" / str(step) / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["sha256"][".step"] = "0" * 64
    path.write_text(json.dumps({**meta, "seal": meta_checksum(meta)}))


def test_a_run_falls_back_across_a_change_of_optimizers(played, tmp_path):
    """The newest steps are damaged, the one before them has the optimizers of stage 0."""
    state, workdir = played
    run = tmp_path / "run"
    shutil.copytree(workdir, run)
    damage(run, 2)
    damage(run, 3)
    again = loop.fit(*game(), run)
    assert sorted(path.name for path in (run / "corrupt").iterdir()) == ["2", "3"]
    assert digests(loop.without_shared(again)) == digests(loop.without_shared(state))
    assert lines(run) == lines(workdir)


def test_a_run_whose_metas_are_damaged_does_not_start_anew(played, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(played[1], run)
    for step in (1, 2, 3):
        (run / "checkpoints" / str(step) / "meta" / "metadata").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no usable checkpoint: the meta of steps \[1, 2, 3\] cannot be read"):
        loop.fit(*game(), run)


def test_another_optimizer_is_refused_and_costs_no_checkpoint(played, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(played[1], run)
    cfg, recipe = game(optimizer={"name": "sgd", "learning_rate": 1e-4, "max_grad_norm": 0.0})
    with pytest.raises(ConfigError, match=r"step 3 also holds \.opt_state"):
        loop.fit(cfg, recipe, run, allow_config_change=["optimizer.name"])
    assert not (run / "corrupt").exists()


def test_what_a_run_says_of_itself_while_it_saves_and_reports(tmp_path, monkeypatch):
    """The backbone is hashed once on resuming; steps are counted before their save; the report has a deadline, and
    nobody leaves before it is written."""
    loop.fit(*game(steps=1), tmp_path)
    hashed, seen, fingerprint = [], [], loop.fingerprint_of
    stage = lambda: [s.name for s in deadlines.PROGRESS.stages]
    asked = processes.all_gather
    monkeypatch.setattr(loop, "fingerprint_of", lambda tree: hashed.append(1) or fingerprint(tree))
    monkeypatch.setattr(processes, "stop_asked", lambda: seen.append(("asked", deadlines.PROGRESS.step)) or False)
    monkeypatch.setattr(loop, "report", lambda workdir: seen.append(("report", stage())))
    monkeypatch.setattr(processes, "all_gather", lambda x: (seen.append(("met", stage())), asked(x))[1])
    loop.fit(*game(steps=3), tmp_path)
    assert len(hashed) == 1
    assert [what for what in seen if what[0] == "asked"] == [("asked", 3), ("asked", 4)]
    assert ("report", ["save"]) in seen and seen[-1] == ("met", ["save"])


def test_grpo_learns_nothing_from_equal_rewards_and_runs(tmp_path):
    args = {"name": "dispatch_solo", "args": {"accuracy": 0.0, "format": 0.0, "efficiency": 0.0}, "eval_tasks": 4}
    cfg = from_dict(
        grpo.Config,
        {**{k: v for k, v in SMALL.items() if k not in ("memory",)}, "env": args, "steps": 1, "sft": {"steps": 0}},
    )
    recipe = grpo.make(cfg)
    start = digests(recipe.init(0).params)
    assert digests(loop.fit(cfg, recipe, tmp_path).params) == start
    assert lines(tmp_path)[-1]["agent/solo/zero_variance"] == 1.0


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"group": 1}, "config.group"),
        ({"selected_groups": 0}, "config.selected_groups"),
        ({"selection_scope": "world"}, "config.selection_scope"),
        ({"plan": "spiral"}, "config.plan"),
        ({"continuation": "local"}, "config.credit.discount"),
        ({"env": {"name": "dispatsh"}}, "did you mean 'dispatch'"),
        ({"env": {"name": "dispatch", "args": {"respnse": 7}}}, "config.env.args.respnse"),
        ({"sampling": {"temperature": 0.0}}, "config.sampling.temperature"),
        ({"batch": 0}, "config.batch: expected >= 1"),
    ],
)
def test_bad_configurations_name_the_key(changes, message):
    with pytest.raises(ConfigError) as error:
        joy(**changes)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_recipe_refuses_a_plan_that_its_environment_cannot_serve():
    cfg = joy(env={"name": "duet"}, reward={"form": 1.0}, continuation="local", credit={"discount": 0.0})
    with pytest.raises(ConfigError, match=r"plan node_wise\(4, local\): environment 'duet' has no local verifier"):
        joyagents_r1.make(cfg)


def test_group_sizes_may_differ_by_turn():
    cfg = joy(group=(3, 2), sft={"steps": 0}, use_memory=False)
    recipe = joyagents_r1.make(cfg)
    from jaxmarl_llm.telemetry.logger import Logger

    _, metrics = recipe.step(recipe.init(0), Logger(".", resume_step=None, total_steps=1, primary=False))
    assert metrics["count/branch_sequences"] >= 3 * cfg.batch


def test_config_is_a_plain_dataclass():
    assert dataclasses.replace(joy(), seed=3).seed == 3
    assert jax.tree.leaves(joy()) == [joy()]  # no pytree: static under jit


def test_evaluate_and_export_read_the_newest_checkpoint(straight, tmp_path):
    from absl import flags

    from jaxmarl_llm.cli import evaluate, export
    from jaxmarl_llm.models import hf_weights

    state, workdir = straight
    saving = workdir / "checkpoints" / "99.orbax-checkpoint-tmp"  # a trainer's that goes on
    saving.mkdir()
    _, recipe, again = evaluate.open_run(workdir)
    assert saving.is_dir()
    saving.rmdir()
    last = lines(workdir)[-1]
    for key, value in recipe.evaluate(again).items():
        assert value == last[key.replace("eval/", "final/")]
    given = {
        "models": ["lookup"],
        "export_to": str(tmp_path / "out"),
        "mesh": ["1", "1", "1"],
        "best": False,
        "push": None,
    }
    chosen = type("Flags", (), {**given, "adapters": False})
    with pytest.raises(ConfigError, match=r"--adapters: the run has none; .*parameter_sharing=lora, got separate"):
        export.main(None, workdir, type("Flags", (), {**given, "adapters": True}))
    export.main(None, workdir, chosen)
    params, _ = hf_weights.load(tmp_path / "out" / "lookup")
    assert digests(params) == digests(state.params["agents"]["lookup"]["params"])
    team = team_file.read(tmp_path / "out")
    assert team.step == int(state.step) and set(team.roles) == {r.name for r in recipe.team.roles}
    with pytest.raises(ConfigError, match="exists"):
        export.main(None, workdir, chosen)
    with pytest.raises(ConfigError, match="no checkpoints"):
        evaluate.open_run(tmp_path)
    assert "export_to" in flags.FLAGS


MAPS = """
from pathlib import Path
import jax, jax.numpy as jnp
from jaxmarl_llm.runs import loop
maps = lambda: Path("/proc/self/maps").read_bytes().count(b"\\n")
program = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0) * jnp.sin(x).sum())
before = maps()
for n in range(1, 25):
    program(jnp.ones((n, n + 1)))
grown = maps()
assert grown > before + 100 and not loop.release_programs(share=1.0)
assert loop.release_programs(share=0.0) and maps() < grown - 100
assert abs(float(program(jnp.ones((1, 2)))[0]) - 1.6224) < 1e-3
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_programs_are_released_before_the_process_has_too_many_maps():
    """A host run that compiled for ever new shapes died in the compiler once it held 65,530 maps."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}  # a process of its own: it forgets what other tests compiled
    subprocess.run([sys.executable, "-c", MAPS], env=env, check=True, timeout=240, cwd=ROOT)
