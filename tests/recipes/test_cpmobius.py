"""CPMobius: golden rewards, the band, gradients without labels, figures of labels, kill and resume, bad input."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.cpmobius import VARIANTS, get_config
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import cpmobius
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.algorithm import StepResult
from tests.killed_run import killed_and_whole
from tests.recipes.test_fidelity import SIZES, Table
from tests.training.test_pay_by_change import CONFIG

pytestmark = pytest.mark.usefixtures("numpy_tables")


def voted(answers, truth=0):
    """A table with a question of each list of answers (None: malformed), and its credit."""
    table = Table(("answer", "malformed", "accuracy"))
    for task, said in enumerate(answers):
        root = table.act(0, task, 0, malformed=float(said is None))
        for k, answer in enumerate(said or ()):
            pay = {"answer": answer, "accuracy": float(answer == truth)}
            if k:
                table.steps.append(len(table.nodes) - 1)
                table.move([len(table.steps) - 1], task, 1, root, {n: {0: v, 1: v} for n, v in pay.items()})
            else:
                table.act(1, task, 1, root, answer=answer)
                table.rewards["accuracy"][len(table.moves) - 1] = pay["accuracy"]
    tree = table.tree()
    return tree, jax.device_get(assign(cpmobius.rule(CONFIG), tree, weights=CONFIG.reward, sizes=SIZES))


def test_golden_rewards():
    """Solve rates .25 .5 .75 and change .02: the coach has .005 .01 .015, and pays .01 for a malformed question.

    Four answers each. Answers 0 1 2 - have one vote each, so the label is 0. Answers 2 2 1 1 tie, so it is 1.
    """
    questions = [[0, 1, 2, -1], [2, 2, 1, 1], [1, 1, 1, 0], None]
    tree, credited = voted(questions)
    role = tree.nodes.role[tree.steps.node]
    coach = credited.advantage[tree.steps.valid & (role == 0)]
    np.testing.assert_allclose(cpmobius.coach_pay(0.02, coach), [0.005, 0.01, 0.015, -0.01], atol=1e-7)
    np.testing.assert_allclose(cpmobius.coach_pay(-0.02, coach), [-0.005, -0.01, -0.015, -0.01], atol=1e-7)
    player = credited.returns[tree.steps.valid & (role == 1)].reshape(3, 4)
    np.testing.assert_array_equal(player, [[1, -1, -1, -1], [-1, -1, 1, 1], [1, 1, 1, -1]])
    got = credited.advantage[tree.steps.valid & (role == 1)].reshape(3, 4)
    root = 3**0.5  # one of four is 1, three are -1: mean -.5, std .866
    np.testing.assert_allclose(got[0], np.array([3, -1, -1, -1]) / root, rtol=1e-4)
    np.testing.assert_allclose(got[2], np.array([1, 1, 1, -3]) / root, rtol=1e-4)


def test_the_band_includes_its_bounds_and_malformed_questions_stay():
    """Five answers: shares 1, .8, .2, and 0 where all answers are malformed; then a malformed question."""
    for questions, want in (
        ([[1] * 5, [1, 1, 1, 1, 2], [0, 1, 2, -1, -1], [-1] * 5], (False, True, True, False)),
        ([None, [2, 2, 2, -1, 0]], (True, True)),
    ):
        tree, credited = voted(questions)
        selected = np.asarray(cpmobius.InBand(0.2, 0.8)(credited, 4))
        task, used = tree.nodes.task, credited.stats.count > 0
        for t, wanted in enumerate(want):
            assert set(selected[used & (task == t)]) == {wanted}
        every = np.asarray(cpmobius.InBand(0.0, 1.0)(credited, 4))
        assert every[used].all() and not selected[~used].any() and not every[~used].any()


def test_figures_of_labels():
    """Truth 0: the label of the first question is right with .6, that of the second wrong with .8, the third is out."""
    tree, credited = voted([[0, 0, 0, 1, 2], [1, 1, 1, 1, 0], [0] * 5])
    selected = np.asarray(cpmobius.InBand(0.2, 0.8)(credited, 4))
    seen = cpmobius.label_metrics(StepResult(tree, None, credited, selected, {}, {}, None, {}, None))
    assert seen == pytest.approx({"majority/agreement": 0.7, "majority/right": 0.5, "majority/agreement_wrong": 0.8})
    none = StepResult(tree, None, credited, selected & False, {}, {}, None, {}, None)
    assert cpmobius.label_metrics(none) == {}


def after_a_step(args, folder, **changes):
    cfg = dataclasses.replace(CONFIG, env=EnvConfig("tests.training.coaching", args, eval_tasks=16), **changes)
    recipe = cpmobius.make(cfg)
    with Logger(folder, resume_step=None, total_steps=2, primary=False) as logger:
        state, first = recipe.step(recipe.init(0), logger)
        state, second = recipe.step(state, logger)
    return state, (first, second)


def test_no_label_enters_a_gradient(tmp_path):
    """Other answers are right to the coach's questions, those of validation stay: two steps are equal to the bit."""
    state, seen = after_a_step({}, tmp_path)
    other, flipped = after_a_step({"flipped": True}, tmp_path)
    assert digests(state) == digests(other)
    assert [m["majority/right"] for m in seen] != [m["majority/right"] for m in flipped]
    assert any(m["change/change"] for m in seen) and all(m["agent/coach/updated"] for m in seen)


def test_an_untrained_coach_stays_byte_equal(tmp_path):
    before = cpmobius.make(CONFIG).init(0)
    state, seen = after_a_step({}, tmp_path, train_coach=False)
    assert digests(state.params["agents"]["coach"]) == digests(before.params["agents"]["coach"])
    assert digests(state.params["agents"]["player"]) != digests(before.params["agents"]["player"])
    assert any(m["change/change"] for m in seen)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path):
    """Killed with -9 behind the checkpoint of step 3: coach, player, best player and history are byte-equal."""
    cfg = dataclasses.replace(CONFIG, patience=1, run=dataclasses.replace(CONFIG.run, checkpoint_every=3))
    run, whole = killed_and_whole(cpmobius, cfg, tmp_path)
    assert int(whole.kept["change"].returns) > 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 7)) and rows[-1]["change/best"] >= rows[-1]["change/score"]


BAD = [
    ({"answers": 1}, r"^config\.answers: expected >= 2 \(a majority compares answers\), got 1$"),
    ({"band": (0.8, 0.2)}, r"^config\.band: expected 0 <= low <= high <= 1, got \(0\.8, 0\.2\)$"),
    ({"outcomes": 1}, r"^config\.outcomes: expected >= 2, got 1$"),
    ({"patience": 0}, r"^config\.patience: expected >= 1, got 0$"),
    ({"malformed": -1.0}, r"^config\.malformed: expected >= 0, got -1\.0$"),
    ({"extra_plays": -1}, r"^config\.extra_plays: expected >= 0, got -1$"),
    ({"env": EnvConfig("defer")}, r"^config\.env: no role 'coach' in environment 'defer', whose roles are chooser$"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(cpmobius.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.answers == 16 and cfg.patience == 15
        assert cfg.band == ((0.0, 1.0) if variant == "no_band" else (0.2, 0.8))
        assert cfg.train_coach == (variant != "untrained_coach")
        assert cpmobius.make_plan(cfg).name == "product((1, 16))"
