"""Board and card games: the libraries' rules through text, who sees what, illegal actions, Kuhn poker solved."""

import functools
import importlib
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.games import array as games
from jaxmarl_llm.envs.games import kuhn
from jaxmarl_llm.envs.games import text as games_text
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(3)
few = settings(max_examples=15, deadline=None, database=None)


@functools.cache
def table(*names, **kwargs):
    """Reset, prompt, legal letters and step of a game, compiled."""
    config = games.Config(games=names, **kwargs)
    env, legal = games.make(config), games.legal_actions(config)
    reset, step, observe, legal = map(jax.jit, (env.reset, env.step, env.observe, legal))

    def prompt(state):
        seen = jax.device_get(observe(state))
        return BYTES.decode(seen.tokens[0, : seen.length[0]])

    def say(state, text):
        ids = [BYTES.EOS if c == "$" else ord(c) for c in text][: config.response]
        row = np.array([ids + [BYTES.PAD] * (config.response - len(ids))], np.int32)
        after, rewards, done = jax.device_get(step(KEY, state, row, np.array([len(ids)], np.int32)))
        return after, rewards, bool(done)

    letters = lambda state: [x for x, ok in zip(games.LETTERS, np.asarray(legal(state))) if ok]
    start = lambda seed=0, game=0: jax.device_get(reset(jax.random.key(seed), {"game": game}))
    return env, start, prompt, letters, say


def nothing(rewards, *but):
    return not any(np.any(v) for name, v in rewards.items() if name not in but)


# Kuhn poker


def win(one, two, line):
    """What the first player wins, from the rules: ante 1, a bet is 1, a pass after a bet folds."""
    stake = 2 if line in ("bb", "pbb") else 1
    if line == "bp":
        return 1
    if line == "pbp":
        return -1
    return stake if one > two else -stake


def test_every_deal_and_line_pays_by_the_rules():
    for one, two in itertools.permutations(range(3), 2):
        for column, line in enumerate(kuhn.LINES):
            assert kuhn.payoffs()[one, two, column] == win(one, two, line)
    assert np.isnan(kuhn.payoffs()[np.arange(3), np.arange(3)]).all()


def walk(bet, one, two, line=""):
    """The first player's expected win, by recursion over the moves."""
    if line in kuhn.LINES:
        return win(one, two, line)
    player = len(line) % 2
    chance = bet[player][(one, two)[player]][1 if line in ("pb", "b") else 0]
    return chance * walk(bet, one, two, line + "b") + (1 - chance) * walk(bet, one, two, line + "p")


def twin_value(bet):
    return np.mean([walk(bet, one, two) for one, two in itertools.permutations(range(3), 2)])


def twin_best(bet, player):
    """Against ``bet`` of the other, the best of all 64 pure strategies."""
    won = []
    for choice in itertools.product((0, 1), repeat=6):
        tried = np.array(bet, float)
        tried[player] = np.reshape(choice, (3, 2))
        won.append(twin_value(tried) * (1, -1)[player])
    return max(won)


@few
@given(st.lists(st.sampled_from([0.0, 1.0, 0.5]) | st.floats(0, 1), min_size=12, max_size=12))
def test_values_and_best_responses_equal_enumeration(chances):
    bet = np.reshape(chances, (2, 3, 2))
    assert kuhn.value(bet) == pytest.approx(twin_value(bet), abs=1e-12)
    best = kuhn.best_responses(bet)
    assert best == pytest.approx((twin_best(bet, 0), twin_best(bet, 1)), abs=1e-12)
    assert kuhn.exploitability(bet) == pytest.approx(sum(best)) and sum(best) >= -1e-12


def test_known_values():
    even = np.full((2, 3, 2), 0.5)
    assert kuhn.exploitability(even) == pytest.approx(11 / 12, abs=1e-12)
    for alpha in (0.0, 0.2, 1 / 3):
        assert kuhn.exploitability(kuhn.equilibrium(alpha)) == pytest.approx(0, abs=1e-12)
        assert kuhn.value(kuhn.equilibrium(alpha)) == pytest.approx(kuhn.VALUE, abs=1e-12)
    with pytest.raises(ValueError, match="alpha"):
        kuhn.equilibrium(0.4)


def test_a_player_sees_its_card_and_the_moves():
    env, start, prompt, letters, say = table("kuhn_poker")
    seen = set()
    for seed in range(12):
        state = start(seed)
        first = prompt(state)
        middle, rewards, done = say(state, "p")
        assert nothing(rewards, "format") and not done and letters(middle) == ["b", "p"]
        np.testing.assert_array_equal(rewards["format"], [1, 0])
        second = prompt(middle)
        last, _, _ = say(middle, "b")
        assert first[0] == "1" and second[0] == "2" and first[1] != second[1] and second[2:] == "p>"
        assert prompt(last) == f"1{first[1]}pb>" and prompt(say(state, "b")[0]) == f"2{second[1]}b>"
        _, rewards, done = say(last, "b")
        one, two = (games.CARDS.index(x[1]) for x in (first, second))
        np.testing.assert_array_equal(rewards["payoff"], np.array([1, -1]) * win(one, two, "pbb"))
        assert done
        seen |= {first, second, prompt(last), prompt(say(state, "b")[0])}
    tokens, length = kuhn.information_sets()
    assert seen == {BYTES.decode(t[:n]) for t, n in zip(tokens, length)}  # all twelve, and no other


# Illegal actions


@pytest.mark.parametrize("said", ["x", ">", "$", ""])
def test_no_action_ends_the_game_and_pays_nobody(said):
    env, start, prompt, letters, say = table("kuhn_poker")
    middle, _, _ = say(start(), "p")
    after, rewards, done = say(middle, said)
    assert done and nothing(rewards, "illegal")
    np.testing.assert_array_equal(rewards["illegal"], [0, 1])
    again, rewards, done = say(after, "b")
    assert done and nothing(rewards) and jax.tree.all(jax.tree.map(np.array_equal, after, again))


def test_an_occupied_cell_is_well_formed_and_illegal():
    env, start, prompt, letters, say = table("tic_tac_toe")
    state, _, _ = say(start(), "e")
    assert "e" not in letters(state) and prompt(state) == "2....o....>"
    _, rewards, done = say(state, "e")
    assert done and nothing(rewards, "illegal", "format")
    np.testing.assert_array_equal(rewards["illegal"], [0, 1])
    np.testing.assert_array_equal(rewards["format"], [0, 1])


@pytest.mark.parametrize("said, fine", [("b$", True), ("b", False), ("bb", False), ("$b", False)])
def test_a_longer_completion_is_ended_by_the_stop_token(said, fine):
    env, start, prompt, letters, say = table("kuhn_poker", response=2)
    _, rewards, done = say(start(), said)
    assert done != fine and rewards["illegal"][0] == 1 - fine and rewards["format"][0] == fine


# Tic-tac-toe


@few
@given(st.permutations(range(9)))
def test_tic_tac_toe_by_the_rules(cells):
    env, start, prompt, letters, say = table("tic_tac_toe")
    lines = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8}, {0, 3, 6}, {1, 4, 7}, {2, 5, 8}, {0, 4, 8}, {2, 4, 6}]
    state, held = start(), (set(), set())
    for turn, cell in enumerate(cells):
        mover, board = (
            turn % 2,
            "".join("x" if c in held[turn % 2] else "o" if c in held[1 - turn % 2] else "." for c in range(9)),
        )
        assert prompt(state) == f"{1 + mover}{board}>"
        state, rewards, done = say(state, games.LETTERS[cell])
        held[mover].add(cell)
        won = any(line <= held[mover] for line in lines)
        payoff = np.array([1, -1]) * (1 - 2 * mover) * won
        np.testing.assert_array_equal(rewards["payoff"], payoff)
        assert done == (won or turn == 8) and not rewards["illegal"].any()
        if done:
            break


# Mini-Hanabi


def test_hanabi_pays_both_for_a_card_and_hides_ones_own():
    env, start, prompt, letters, say = table("hanabi")
    rng, seen, longest = np.random.default_rng(0), 0.0, 0
    for seed in range(12):
        state, done, turn = start(seed), False, 0
        score = 0.0
        while not done:
            (inner,) = state.inner
            text = prompt(state)
            assert len(text) == games.prompt_length(games.Config(games=("hanabi",))) and text[0] == "12"[turn % 2]
            me = turn % 2
            hidden = inner.replace(player_hands=inner.player_hands.copy())
            hidden.player_hands[me] = hidden.player_hands[me][::-1]
            assert prompt(state.replace(inner=(hidden,))) == text
            move = rng.choice(letters(state))
            after, rewards, done = say(state, move)
            assert rewards["payoff"][0] == rewards["payoff"][1] and not rewards["illegal"].any()
            score += rewards["payoff"][0]
            seen = max(seen, score)
            state, turn = after, turn + 1
        assert score == state.inner[0].score and turn <= 12
        longest = max(longest, turn)
    assert seen >= 2 and longest > 4


def test_a_hint_shows_in_the_partners_prompt():
    env, start, prompt, letters, say = table("hanabi")
    state = start(1)
    text = prompt(state)
    assert text[5:11] == "|????|"
    hint = next(x for x in letters(state) if x in "ef")
    told = prompt(say(state, hint)[0])
    assert "AB"["ef".index(hint)] in told[6:10] and told[-4] == "1"  # one token fewer


# Several games


def test_every_game_has_roles_and_columns_of_its_own():
    env, start, prompt, letters, say = table("kuhn_poker", "tic_tac_toe")
    assert env.roles == ("kuhn_poker-first", "kuhn_poker-second", "tic_tac_toe-first", "tic_tac_toe-second")
    assert env.actors[:2] == ((0, 2), (1, 3)) and env.max_turns == 9
    for game, moves in ((0, "pbb"), (1, "aebdc")):
        state = start(5, game)
        for turn, move in enumerate(moves):
            seen = env.observe(state)
            assert int(seen.role[0]) == 2 * game + turn % 2
            state, rewards, done = say(state, move)
            assert list(np.flatnonzero(rewards["format"])) == [2 * game + turn % 2]
        assert done and list(np.flatnonzero(rewards["payoff"])) == [2 * game, 2 * game + 1]


# Through text


def test_the_text_form_plays_the_same_game():
    config = games_text.Config(games=("kuhn_poker", "tic_tac_toe"))
    env = games_text.make(config)
    _, start, position, letters, say = table("kuhn_poker", "tic_tac_toe")
    rng = np.random.default_rng(1)
    for task in games_text.tasks(config)[:4]:
        state, array, done = env.reset(7, task), start(7, task["game"]), False
        while not done:
            ((role, shown),) = env.observe(state).items()
            assert shown[-1].text == f"Position: {position(array)[1:-1]}"
            assert role.rpartition("-")[2] in shown[0].text and role.startswith(config.games[task["game"]])
            move = rng.choice(letters(array))
            state, paid, done = env.step(0, state, {role: Action(str(move), ())})
            array, rewards, ended = say(array, move)
            assert done == ended
            for i, r in enumerate(env.roles):
                assert paid[r] == {c: v[i] for c, v in rewards.items()}
        assert env.observe(state) == {}


@pytest.mark.parametrize(
    "text, letter, form",
    [
        ("b", "b", 1),
        (" b\n", "b", 1),
        ("I bet: b.", "b", 0),
        ("bet", "?", 0),
        ("", "?", 0),
        ("B", "?", 0),
        ("\x00é", "?", 0),
    ],
)
def test_any_reply_is_an_action_or_illegal(text, letter, form):
    env = games_text.make(games_text.Config())
    state = env.reset(0, {"game": 0})
    assert games_text.action_of(text) == letter
    _, paid, done = env.step(0, state, {"first": Action(text, ())})
    assert paid["first"] == {"payoff": 0.0, "format": form, "illegal": float(letter == "?")} and done == (letter == "?")


def test_demonstrations_as_text():
    rows = games_text.demonstrations(games_text.Config(), [])
    assert {role for role, _, _ in rows} == {"first", "second"} and {said for _, _, said in rows} == {"b", "p"}
    assert len({shown[-1].text for _, shown, _ in rows}) == 3 + 3 + 3 + 3


# Demonstrations, configuration


@pytest.mark.parametrize("response", [1, 2])
def test_demonstrations_are_legal_and_random(response):
    config = games.Config(games=("kuhn_poker",), response=response)
    for role, rows in games.demonstrations(config, 0, 300).items():
        tokens, length = kuhn.information_sets()
        known = {BYTES.decode(t[:n]) for t, n in zip(tokens, length)}
        prompts = {BYTES.decode(t[:n]) for t, n in zip(rows["tokens"], rows["length"])}
        assert prompts == {k for k in known if k[0] == {"first": "1", "second": "2"}[role]}
        said = rows["completion"][:, 0]
        assert set(said) == {ord("b"), ord("p")} and 0.4 < (said == ord("b")).mean() < 0.6
        assert (rows["completion_length"] == response).all()
        assert response == 1 or (rows["completion"][:, 1] == BYTES.EOS).all()


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"games": ("chess",)}, "args.games: unknown value"),
        ({"games": ()}, "one or several"),
        ({"games": ("kuhn_poker", "kuhn_poker")}, "one or several"),
        ({"response": 0}, "response"),
        ({"copies": (1,)}, "copies"),
        ({"hand": 4}, "hand"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(games.Config, bad, "config.env.args")


def test_a_library_that_is_not_there_is_named_with_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pgx cannot be imported .*pip install jaxmarl_llm\[games\]"):
        games.library("pgx")
