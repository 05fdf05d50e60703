"""The grammar of prompts: its three directions agree, and the shared readings of completions against plain Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.envs.array_env import EOS, PAD, completion_end, encoded, letter_samples, readable_part, text_samples
from jaxmarl_llm.envs.prompt_grammar import prompt_parts, prompt_row, prompt_text
from jaxmarl_llm.models.tokenizer import ByteTokenizer

WORDS = st.text("abc123+-", max_size=5)


@given(mark=st.sampled_from("SVR1"), subject=WORDS, entries=st.lists(WORDS, max_size=4), bar=st.sampled_from("|:"))
def test_the_three_directions_agree(mark, subject, entries, bar):
    text = prompt_text(mark, subject, entries, bar)
    assert prompt_parts(text, bar) == (mark, subject, tuple(entries))
    pieces = [(1, [(encoded(entry), len(entry))]) for entry in entries]
    tokens, length = prompt_row(mark, [(encoded(subject), len(subject))], pieces, 40, bar)
    assert int(length) == len(text) and ByteTokenizer().decode(np.asarray(tokens)[: int(length)]) == text
    assert (np.asarray(tokens)[int(length) :] == PAD).all()


def test_an_entry_that_is_not_shown_takes_its_bar_along():
    entries = [(jnp.bool_(shown), [(encoded(text), 2)]) for text, shown in (("ab", True), ("cd", False), ("ef", True))]
    tokens, length = prompt_row(jnp.int32(ord("S")), [(encoded("12345"), jnp.int32(3))], entries, 16)
    assert bytes(np.asarray(tokens)[: int(length)].tolist()) == b"S123|ab|ef>"


def test_without_bars_a_prompt_has_no_entries():
    assert prompt_parts("1A|b:c>", bar="") == ("1", "A|b:c", ())


ROWS = [[97, 98, EOS, 99], [EOS, 97, 97, 97], [97, 98, 99, 100], [97, 98, PAD, EOS]]


@pytest.mark.parametrize(
    ("row", "length", "ended", "size"),
    [(0, 4, True, 2), (0, 2, False, 2), (1, 1, True, 0), (1, 0, False, 0), (2, 4, False, 4), (3, 3, False, 3)],
)
def test_the_end_of_a_completion(row, length, ended, size):
    got = completion_end(jnp.array(ROWS[row]), jnp.int32(length))
    assert (bool(got[0]), int(got[1])) == (ended, size)
    both = completion_end(jnp.array([ROWS[row]] * 2), jnp.array([length, 0]))
    assert both[0].tolist() == [ended, False] and both[1].tolist() == [size, 0]


@pytest.mark.parametrize("most", [0, 2, 4, 6])
@pytest.mark.parametrize("least", [0, 1])
def test_what_other_players_read(most, least):
    tokens, length = jnp.array(ROWS), jnp.array([4, 1, 4, 3])
    if least > most:
        return
    got, size = readable_part(tokens, length, most, lambda cut: (cut != 98) & (cut < 256), least)
    for row, count, shown, kept in zip(ROWS, length.tolist(), got.tolist(), size.tolist(), strict=True):
        plain = row[:count]
        plain = plain[: plain.index(EOS)] if EOS in plain else plain
        want = ["?" if token == 98 or token > 255 else chr(token) for token in plain[:most]] or ["?"] * least
        assert shown == [ord(c) for c in want] + [PAD] * (most - len(want)) and kept == len(want)


def test_samples_end_where_there_is_room():
    got = text_samples([("S>", "ab"), ("Sx>", "abc")], 4, 3)
    assert got["completion"].tolist() == [[97, 98, EOS], [97, 98, 99]] and got["completion_length"].tolist() == [3, 3]
    assert got["length"].tolist() == [2, 3] and got["tokens"].shape == (2, 4)
    with pytest.raises(ValueError):
        text_samples([("S>", "abcd")], 4, 3)
    for room, want in ((1, [67]), (3, [67, EOS, PAD])):
        got = letter_samples(np.zeros((1, 2), np.int32), np.array([2]), np.array([67]), room)
        assert got["completion"].tolist() == [want] and got["completion_length"].tolist() == [min(2, room)]
