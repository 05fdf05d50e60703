"""What each token adds to a text: bytes, a byte-level BPE, and a tokenizer whose bytes depend on their neighbours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.models.token_pieces import UNREADABLE, WINDOW, byte_level, pieces
from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer
from tests.models.test_tokenizer import CHATML

BYTES = ByteTokenizer()
TEXT = "na\u00efve \u20ac \U0001f600\U0001f99c \u4f60\n\tthe user"  # characters of 1 to 4 bytes


def cut(tokenizer, ids):
    """(pieces, names), after their own rules were checked."""
    found, text = pieces(tokenizer, ids), tokenizer.decode(ids)
    assert len(found.chars) == len(ids) and sum(found.chars) == len(text)
    out, at = [], 0
    for size in found.chars:
        out.append(text[at : at + size])
        at += size
    assert len(found.names) == sum(not piece.strip(UNREADABLE) for piece in out)
    return out, list(found.names)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A byte-level BPE that learned the first halves of two characters as tokens; ``<tool>`` is no special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=266, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["\U0001f600\U0001f601\U0001f602\U0001f603\u4f60\u4f61\u4f62 the user"] * 9, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    path = tmp_path_factory.mktemp("bpe")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)
    return HFTokenizer(path, chat_template=CHATML)


class Fallback:
    """A tokenizer that writes unknown characters as tokens ``<0xE2>``; a decoder reads a run of them as a whole."""

    def __init__(self):
        from tokenizers import Tokenizer, decoders, models

        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581the": 256, "s": 257}
        self.backend = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
        self.backend.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        self.calls = 0

    def decode(self, ids):
        self.calls += 1
        return self.backend.decode(ids)

    def token_bytes(self, token):
        return None

    def token_name(self, token):
        return self.backend.id_to_token(token)


def test_a_character_belongs_to_the_byte_that_completes_it():
    found, names = cut(BYTES, [*"a\u20ac ".encode(), BYTES.SEP, 263, BYTES.EOS])
    assert found == ["a", "", "", "\u20ac", " ", "", "", ""]
    assert names == ["\\xe2", "\\x82", "<sep>", "<263>", "<eos>"]


def test_half_a_character_at_the_end_is_named_by_its_bytes():
    found, names = cut(BYTES, [97, 0xF0, 0x9F, BYTES.EOS])
    assert found == ["a", "", UNREADABLE, ""] and names == ["\\xf0", "\\x9f", "<eos>"]


@given(st.lists(st.sampled_from([*b"a\xc3\xa9\xe2\x82\xac\xf0\x9f\xed\xa0\xff", 257, 263]), max_size=12))
@settings(deadline=None, max_examples=60)
def test_any_bytes_are_cut(ids):
    cut(BYTES, ids)


def test_characters_that_are_cut_across_tokens_of_a_bpe(bpe):
    start = bpe.encode(TEXT)
    found, names = cut(bpe, [*start, bpe.stop_ids[0]])
    assert "".join(found) == TEXT and names[-1] == "<|im_end|>"
    assert names[3:5] == ["\\xf0\\x9f\\x98", "\\xf0\\x9f"] and found.count("") == len(names)  # tokens of several bytes
    tool = bpe.hf.convert_tokens_to_ids("<tool>")
    assert (bpe.token_bytes(tool), bpe.token_bytes(bpe.stop_ids[0])) == (b"<tool>", b"")
    assert cut(bpe, [tool, 10**6]) == (["<tool>", ""], ["<1000000>"])  # text shows it, so it has no name


@given(st.lists(st.integers(0, 300), max_size=12))
@settings(deadline=None, max_examples=60)
def test_any_tokens_of_a_bpe_are_cut(bpe, ids):
    cut(bpe, ids)


def test_a_tokenizer_whose_bytes_depend_on_their_neighbours():
    tokenizer = Fallback()
    found, names = cut(tokenizer, [256, *"\u20ac".encode(), 257, 256])
    assert found == [" the", "", "", "\u20ac", "s", " the"] and names == ["<0xE2>", "<0x82>"]
    long = [256, 257] * 300
    tokenizer.calls = 0
    assert cut(tokenizer, long)[0] == [" the", "s"] * 300
    assert tokenizer.calls <= 2 * len(long) + 2  # runs are short, however long the text is


def test_pieces_that_cannot_be_known_are_left_out():
    tokenizer = Fallback()
    assert pieces(tokenizer, [*"\u00e9".encode(), 0xFF]) == ((), ())  # the last token changes the text before it
    assert pieces(tokenizer, [0xFF] * (WINDOW + 1)) == ((), ())
    assert pieces(BYTES, []) == ((), ())


def test_the_alphabet_of_a_byte_level_bpe_has_every_byte():
    from tokenizers import pre_tokenizers

    found = sorted(byte_level(c) for c in pre_tokenizers.ByteLevel.alphabet())
    assert found == [bytes([byte]) for byte in range(256)]
    assert byte_level("\u0120the") == b" the" and byte_level("<a b>") == b"<a b>"
