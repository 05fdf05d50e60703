"""The best doctor of `consult` against a search of all its questions and answers, and against play."""

import numpy as np
import pytest

from experiments.studies import consult_bounds
from jaxmarl_llm.envs.consult import array as consult


def searched(config, weight, left, heard):
    """(value, accuracy) of the best doctor who has heard {symptom: answer}, weighed by their probability."""
    of = consult.table(config)

    def joint(d, heard):
        p = 1 / 8
        for s, answer in heard.items():
            unknown = config.unknown if of.vague[s] else 0.0
            wrong = config.noise if answer != of.symptoms[d][s] else 1 - config.noise
            p *= unknown if answer == 2 else (1 - unknown) * wrong
        return p

    def worth(named, truth):
        if named == truth:
            return 5
        agrees = [sum(of.symptoms[d][s] == a for s, a in heard.items()) for d in range(8)]
        return max(0, 4 - sum(agrees[d] >= agrees[named] for d in range(8) if d not in (named, truth)))

    options = [(sum(joint(t, heard) * worth(d, t) for t in range(8)), joint(d, heard)) for d in range(8)]
    for s in set(range(10)) - set(heard) if left > 1 else ():
        value = right = 0.0
        for answer in range(3):
            more = {**heard, s: answer}
            later = searched(config, weight, left - 1, more)
            value += later[0] + weight * (-1 if answer == 2 else 1) * sum(joint(d, more) for d in range(8))
            right += later[1]
        options.append((value, right))
    return max(options)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("vague", [False, True], ids=["two vague symptoms", "all vague"])
def test_the_best_doctor_of_two_and_three_turns(weight, vague, monkeypatch):
    config = consult.Config(seed=3, budgets=(3,))
    if vague:  # a doctor who may choose asks no vague symptom
        of = consult.table(config)._replace(vague=np.ones(10, bool))
        monkeypatch.setattr(consult, "table", lambda config: of)
    got, want = consult_bounds.best_doctor(config, weight), searched(config, weight, 3, {})
    assert got.value == pytest.approx(want[0], abs=1e-4)
    short = consult_bounds.best_doctor(consult.Config(seed=3, budgets=(2,)), weight)
    assert short.value == pytest.approx(searched(config, weight, 2, {})[0], abs=1e-4)
    both = consult_bounds.best_doctor(consult.Config(seed=3, budgets=(2, 3)), weight)
    assert both.value == pytest.approx((got.value + short.value) / 2, abs=1e-4)
    assert got.turns == pytest.approx(3, abs=1e-4) and 1 / 8 < short.accuracy < got.accuracy <= want[1] + 0.2


@pytest.mark.slow
def test_the_demonstrator_is_the_one_of_the_demonstrations():
    config = consult.Config(seed=4)
    taught = consult.demonstrations(config, 0, 4000)["doctor"]
    named = np.mean(taught["completion"][:, 0] < ord("a"))  # one turn in `turns` is a diagnosis, unless turns run out
    seen = consult_bounds.demonstrator(config)
    assert 0 < seen.accuracy < consult_bounds.best_doctor(config).accuracy
    assert 1 - config.overrun_rate - 0.03 < named * seen.turns <= 1
