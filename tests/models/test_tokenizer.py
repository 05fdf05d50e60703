from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message
from jaxmarl_llm.models.tokenizer import ByteTokenizer, HFTokenizer

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "weights" / "smollm2"
TOKENIZERS = Path(os.environ.get("JAXMARL_TOKENIZERS", ROOT.parent / "shared" / "tokenizers"))
BYTES = ByteTokenizer()
settings.register_profile("tokenizer", deadline=None, max_examples=60)
settings.load_profile("tokenizer")

messages = st.builds(Message, st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=20))
sampled = st.builds(
    lambda ids, stop: Action(BYTES.decode(ids), (*ids, *([BYTES.EOS] if stop else [])), not stop).message("me"),
    st.lists(st.integers(0, 263).filter(lambda i: i != BYTES.EOS), max_size=20),
    st.booleans(),
)


@functools.cache
def load(name: str, **options) -> HFTokenizer:
    path = SMOLLM2 if name == "smollm2" else TOKENIZERS / name
    if not path.is_dir():
        pytest.skip(f"no {path}: " + ("run `make weights`" if name == "smollm2" else "set JAXMARL_TOKENIZERS"))
    return HFTokenizer(path, **options)


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3", pytest.param("smollm2", marks=pytest.mark.real_weights)])
def hf(request):
    return load(request.param)


@pytest.fixture(scope="module", params=["bytes", "qwen2_5", "qwen3", "qwen3-no-thinking"])
def any_tokenizer(request):
    if request.param == "bytes":
        return BYTES
    if request.param == "qwen3-no-thinking":
        return load("qwen3", enable_thinking=False)
    return load(request.param)


# Bytes


def test_bytes_golden():
    prompt = (
        Message("system", "s"),
        Message("user", "é"),
        Message("assistant", "ignored", (120, 257), "me"),
        Message("tool", "t"),
        Message("assistant", "peer", (1, 2), "you"),
    )
    want = [259, 115, 258, 260, 195, 169, 258, 261, 120, 257, 262, 116, 258, 261, *b"peer", 257, 261]
    assert BYTES.render(prompt, "me") == want


@given(st.text())
def test_bytes_round_trip(text):
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert all(0 <= i < 256 for i in ids)
    assert BYTES.decode([261, *ids, 257, 300]) == text


@given(st.binary())
def test_bytes_decode_any_bytes(data):
    assert BYTES.decode(list(data)) == data.decode(errors="replace")


@given(st.lists(messages, min_size=1, max_size=5), sampled, st.lists(messages, max_size=3), sampled)
def test_bytes_prompts_only_grow(before, first, between, second):
    """Two own turns: what was sampled is in the later prompts, right behind what it was sampled from."""
    prompt = tuple(before)
    one = BYTES.render(prompt, "me")
    prompt += (first, *between)
    two = BYTES.render(prompt, "me")
    three = BYTES.render((*prompt, second), "me")
    assert two[: len(one) + len(first.ids)] == one + list(first.ids)
    assert three[: len(two) + len(second.ids)] == two + list(second.ids)
    assert two.count(BYTES.EOS) == 1 + sum(m.speaker == "assistant" for m in before + between)


@given(st.lists(messages, min_size=1, max_size=5), st.integers(1, 120))
def test_bytes_fit(prompt, limit):
    prompt = tuple(prompt)
    whole = BYTES.render(prompt, "me")
    least = sum(2 + len(BYTES.encode(m.text)) * (m.speaker == "system") for m in prompt) + 1
    if least > limit:
        with pytest.raises(ConfigError, match=f"take {least} tokens, limit {limit}"):
            BYTES.fit(prompt, "me", limit)
        return
    fitted = BYTES.fit(prompt, "me", limit)
    assert len(fitted.ids) == min(limit, len(whole)) and fitted.cut == len(whole) - len(fitted.ids)
    assert fitted.ids[-1] == BYTES.ROLES["assistant"]
    for m in prompt:
        if m.speaker == "system":
            text = str([BYTES.ROLES["system"], *BYTES.encode(m.text), BYTES.SEP])[1:-1]
            assert text in str(fitted.ids)


def test_fit_takes_the_middle_of_the_longest():
    prompt = (Message("system", "x" * 50), Message("user", "abcdefghij"), Message("tool", "1234567"))
    fitted = BYTES.fit(prompt, "me", len(BYTES.render(prompt, "me")) - 4)
    assert BYTES.decode(fitted.ids) == "x" * 50 + "abchij" + "1234567"
    assert fitted.cut == 4
    fitted = BYTES.fit(prompt, "me", len(BYTES.render(prompt, "me")) - 12)
    assert (BYTES.decode(fitted.ids), fitted.cut) == ("x" * 50 + "12367", 12)


def test_unusable_prompts():
    for prompt in ((), (Message("narrator", "x"),), (Message("raw", "x"),)):
        with pytest.raises(ConfigError):
            BYTES.render(prompt, "me")


# Raw messages, all tokenizers


def test_raw(any_tokenizer):
    tok = any_tokenizer
    user, raw = Message("user", "hi"), Message("raw", "", (5, 6))
    header = tok.render((user,), "me")
    assert tok.render((raw, raw), "me") == [5, 6, 5, 6]
    assert tok.render((raw, user), "me") == [5, 6, *header]
    assert tok.render((user, raw, raw), "me") == [*header, 5, 6, 5, 6]
    both = tok.render((user, user), "me")
    middle = tok.render((user, raw, user), "me")
    at = middle.index(5)
    assert middle[at : at + 2] == [5, 6] and middle[:at] + middle[at + 2 :] == both


# Hugging Face


TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "\n\nnew\n\n\nlines\n",
    "你好，世界。多智能体",
    "🙂👩‍👩‍👧‍👦 flags 🇩🇪",
    "tabs\tand\r\nreturns",
    "x" * 300,
    "def f(a):\n    return a ** 2  # 3.14159",
    "العربية עברית ไทย",
    "\x00\x01 NUL",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(hf, text):
    assert hf.decode(hf.encode(text)) == text
    assert hf.encode(text) == hf.hf.encode(text, add_special_tokens=False)


def test_lone_surrogates_do_not_crash(any_tokenizer):
    assert any_tokenizer.decode(any_tokenizer.encode("a\ud800b\ud83d\ude42")) == "a\ufffdb🙂"


def conversations():
    for k, text in enumerate(TEXTS):
        other = TEXTS[(k + 3) % len(TEXTS)]
        yield [("user", text)]
        yield [("system", text), ("user", other)]
        yield [("system", "s"), ("user", text), ("assistant", other), ("user", text)]
        yield [("user", text), ("assistant", other), ("tool", text), ("tool", other), ("user", "and?"), ("system", "!")]


def test_render_is_the_chat_template(hf):
    for turns in conversations():
        want = hf.hf.apply_chat_template(
            [{"role": r, "content": c} for r, c in turns], add_generation_prompt=True, return_dict=False
        )
        assert hf.render(tuple(Message(r, c) for r, c in turns), "me") == want, turns


def test_render_with_and_without_thinking():
    prompt = (Message("user", "hi"),)
    chat = [{"role": "user", "content": "hi"}]
    for options in ({}, {"enable_thinking": False}):
        tok = load("qwen3", **options)
        want = tok.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False, **options)
        assert tok.render(prompt, "me") == want


def test_content_never_becomes_control(hf):
    added = hf.hf.backend_tokenizer.get_added_tokens_decoder()
    control = set(added)
    roles = ("system", "user", "assistant", "tool")
    empty = hf.render(tuple(Message(r, "") for r in roles), "me")
    for token in added.values():
        for text in (token.content, f"a{token.content}b", f" {token.content}\n" * 2, f"<{token.content}>"):
            assert control.isdisjoint(hf.encode(text)), text
            assert hf.decode(hf.encode(text)) == text
            ids = hf.render(tuple(Message(r, text) for r in roles), "me")
            assert [i for i in ids if i in control] == [i for i in empty if i in control], text


def turn(tok, text: str, stop: int | None) -> Message:
    """An own turn whose ids are not the ones the text would be encoded to."""
    ids = [i for c in text for i in tok.encode(c)]
    return Message("assistant", text, (*ids, *([] if stop is None else [stop])), "me")


@pytest.mark.parametrize("stop", ["own", "other", "none"])
def test_prompts_only_grow(any_tokenizer, stop):
    tok = any_tokenizer
    end = {"own": tok.stop_ids[0], "other": tok.stop_ids[-1], "none": None}[stop]
    prompt = (Message("system", "Be brief."), Message("user", "2+2?"))
    between = [
        (Message("user", "And 3?"),),
        (Message("tool", "9"), Message("tool", "8")),
        (Message("assistant", "peer <think>\nx\n</think>\n\ny", (1, 2), "you"), Message("user", "so?")),
        (),
    ]
    for more in between:
        shown = tok.render(prompt, "me")
        said = turn(tok, "<think>\nhm\n</think>\n\nfour", end)
        prompt += (said, *more)
        assert tok.render(prompt, "me")[: len(shown) + len(said.ids)] == shown + list(said.ids)
    ids = tok.render(prompt, "me")
    if stop == "none":  # the template ends a turn that was cut off
        assert ids.count(tok.stop_ids[0]) == tok.render(prompt, "nobody").count(tok.stop_ids[0])


def test_a_sampled_stop_is_not_doubled(any_tokenizer):
    tok = any_tokenizer
    prompt = (Message("user", "2+2?"), turn(tok, "four", tok.stop_ids[0]), Message("user", "ok"))
    open_ended = (prompt[0], turn(tok, "four", None), prompt[2])
    assert tok.render(prompt, "me") == tok.render(open_ended, "me")


def test_peers_ids_are_not_spliced(any_tokenizer):
    tok = any_tokenizer
    spoken = Message("user", "hello", (tok.stop_ids[0],) * 3, "you")
    assert tok.render((spoken,), "me") == tok.render((Message("user", "hello"),), "me")


def test_hf_fit(hf):
    prompt = (Message("system", "Rules. " * 20), Message("user", "word " * 400), Message("tool", "data " * 300))
    whole = hf.render(prompt, "me")
    header = hf.render((Message("user", ""),), "me")[-3:]
    for limit in (len(whole), len(whole) - 1, 300, 200):
        ids, cut = hf.fit(prompt, "me", limit)
        assert len(ids) == limit if limit < len(whole) else ids == whole
        assert abs(cut - (len(whole) - limit)) <= 4  # contents are encoded apart once they are cut
        assert ids[-3:] == header
        assert hf.decode(hf.encode("Rules. " * 19 + "Rules.")) in hf.decode(ids)
    with pytest.raises(ConfigError, match="limit 20"):
        hf.fit(prompt, "me", 20)


def test_stops_and_sizes():
    qwen = load("qwen2_5")
    assert [qwen.hf.convert_ids_to_tokens(i) for i in qwen.stop_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert (qwen.vocab_size, qwen.pad_id) == (151665, 151643)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A byte-level BPE tokenizer of our own; ``<tool>`` is added but not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(["the user said im_start im_end tool assistant"] * 9, trainer)
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "</s>"])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    path = tmp_path_factory.mktemp("tiny")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(path)
    return path


def test_tiny(tiny):
    tok = HFTokenizer(tiny, chat_template=CHATML)
    names = [tok.hf.convert_ids_to_tokens(i) for i in tok.stop_ids]
    assert names == ["<|im_end|>", "</s>"] and tok.pad_id == tok.stop_ids[-1]
    start = tok.hf.convert_tokens_to_ids("<|im_start|>")
    assert tok.vocab_size == start + 4 and tok.decode([start + 4, 10**6]) == ""
    assert all(i < start for i in tok.encode("<|im_start|></s><tool> the user"))
    (tiny / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert HFTokenizer(tiny, chat_template=CHATML).stop_ids == (tok.stop_ids[0], tok.stop_ids[1], 7, 8)
    (tiny / "generation_config.json").unlink()


def test_templates_that_cannot_be_used(tiny, tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        HFTokenizer(tmp_path)
    with pytest.raises(ConfigError, match="no single chat template"):
        HFTokenizer(tiny)
    with pytest.raises(ConfigError, match="drops"):
        HFTokenizer(tiny, chat_template="{% for m in messages[1:] %}{{ m.content }}<|im_end|>{% endfor %}")
    with pytest.raises(ConfigError, match="refuses"):
        HFTokenizer(tiny, chat_template="{{ raise_exception('no') }}")
    with pytest.raises(ConfigError, match="enable_thinking"):
        HFTokenizer(tiny, chat_template=CHATML, enable_thinking=False)
    strip = HFTokenizer(tiny, chat_template=CHATML.replace("m.content", "m.content | trim"))
    assert strip.render((Message("user", " a \n"),), "me") == strip.render((Message("user", "a"),), "me")


def test_saved_tokenizer_is_the_same(tiny, tmp_path):
    tok = HFTokenizer(tiny, chat_template=CHATML)
    tok.save(tmp_path)
    again = HFTokenizer(tmp_path)  # the template is saved too
    prompt = (Message("user", "hi 你好"), Message("assistant", "x"), Message("user", "y"))
    assert again.render(prompt, "me") == tok.render(prompt, "me")
    assert (again.stop_ids, again.pad_id, again.vocab_size) == (tok.stop_ids, tok.pad_id, tok.vocab_size)
