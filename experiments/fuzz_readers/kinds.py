"""The readers under test: a valid small file for each, its mutations, and the call that reads it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.fuzz_readers import mutations, templates
from jaxmarl_llm.telemetry.evaluations_file import Evaluations

Files = dict[str, bytes]  # path in the folder -> contents
Mutate = Callable[[random.Random, Files], tuple[str, Files]]


class Kind(NamedTuple):
    """One reader."""

    whole: Callable[[], Files]  # the valid files
    mutate: Mutate
    read: Callable[[Path], Any]


def of_file(name: str, change: Callable[[random.Random, bytes], tuple[str, bytes]]) -> Mutate:
    """Make the mutation of one file among several."""

    def mutate(rng: random.Random, files: Files) -> tuple[str, Files]:
        what, raw = change(rng, files[name])
        return f"{name}: {what}", {**files, name: raw}

    return mutate


def of_files(*changes: Mutate) -> Mutate:
    """Make the mutation that draws one of several."""
    return lambda rng, files: rng.choice(changes)(rng, files)


as_json = lambda rng, raw: mutations.json_file(rng, json.loads(raw))
as_rows = lambda rng, raw: mutations.jsonl_file(rng, [json.loads(line) for line in raw.splitlines()])


def in_folder(write: Callable[[Path], None]) -> Files:
    """Return what a function writes into a folder."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return {str(p.relative_to(folder)): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


@functools.cache
def model(shard: int = 2**30) -> Files:
    """A model folder of a few kilobytes."""
    import jax

    from jaxmarl_llm.models import decoder, decoder_config, hf_weights

    config = decoder_config.Config(
        vocab_size=264, hidden_size=8, intermediate_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4,
        tie_embeddings=True, attention_bias=True, family="qwen2",
    )  # fmt: skip
    params = decoder.make_policy(config).init(jax.random.key(0))
    return in_folder(lambda folder: hf_weights.save(folder / "m", params, config, max_shard_bytes=shard))


@functools.cache
def gguf_model() -> Files:
    """A GGUF file with all its tensors, texts, arrays and scalars."""
    import gguf

    def write(folder: Path) -> None:
        writer = gguf.GGUFWriter(folder / "m.gguf", "llama")
        writer.add_block_count(1)
        writer.add_embedding_length(4)
        writer.add_feed_forward_length(4)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10_000.0)
        writer.add_token_list([f"t{i}" for i in range(8)])
        writer.add_token_types([1] * 8)
        writer.add_bool("general.flag", True)
        shapes = {"token_embd": (8, 4), "output_norm": (4,)}
        layer = {"attn_norm": (4,), "ffn_norm": (4,), "attn_q": (4, 4), "attn_k": (2, 4), "attn_v": (2, 4)}
        layer |= {"attn_output": (4, 4), "ffn_gate": (4, 4), "ffn_up": (4, 4), "ffn_down": (4, 4)}
        for name, shape in {**shapes, **{f"blk.0.{k}": v for k, v in layer.items()}}.items():
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    return in_folder(write)


@functools.cache
def tokenizer() -> Files:
    """A tokenizer folder: all bytes, a few merges and four added tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate([*letters, "th", "the"])}
    backend = Tokenizer(BPE(vocab, [("t", "h"), ("th", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>"],
        "added_tokens_decoder": {
            str(backend.token_to_id(token)): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                "special": True,
            }
            for token in special
        },
        "chat_template": templates.PLAIN,
    }  # fmt: skip
    stop = [backend.token_to_id("<|im_end|>"), backend.token_to_id("<|endoftext|>")]
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps({"eos_token_id": stop, "do_sample": True}).encode(),
    }


def with_template(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Give a tokenizer folder another template, in either place where it may stand."""
    what, text = templates.template(rng)
    if rng.random() < 0.5:
        return what, {**files, "chat_template.jinja": text.encode("utf-8", "surrogatepass")}
    config = {**json.loads(files["tokenizer_config.json"]), "chat_template": text}
    return what, {**files, "tokenizer_config.json": json.dumps(config).encode()}


def read_tokenizer(folder: Path) -> None:
    from jaxmarl_llm.messages import Message
    from jaxmarl_llm.models.tokenizer import HFTokenizer

    HFTokenizer(folder).render((Message("system", "s"), Message("user", "u")), "me")


def load_weights(folder: Path) -> None:
    from jaxmarl_llm.models import hf_weights

    hf_weights.load(folder)


def read_config(folder: Path) -> None:
    from jaxmarl_llm.models import hf_weights

    hf_weights.leaves(hf_weights.read_config(folder / "m"))


@functools.cache
def team() -> Files:
    entry = {"slot": 0, "text": "é", "weight": 1.0, "reward": 0.5, "uses": 2, "last_used": 7}
    roles = {"a": {"model": "a", "max_new_tokens": 4}, "b": {"model": "a", "max_new_tokens": 8}}
    return {"team.json": json.dumps({"roles": roles, "memory": {"a": [entry]}, "step": 3}).encode()}


def read_team(folder: Path) -> None:
    from jaxmarl_llm.agents import team_file

    team_file.read(folder)


@functools.cache
def metrics() -> Files:
    rows: list[dict[str, Any]] = [{"step": i, "time/step": 0.5, "agent/a/reward": None} for i in range(4)]
    rows[0] |= {"eval/success": 0.1, "eval/success_greedy": 0.2}
    rows[-1] |= {"final/success": 0.3, "final/success_greedy": 0.4}
    return {"metrics.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows)}


def read_summary(folder: Path) -> None:
    from jaxmarl_llm.cli import summary

    with contextlib.redirect_stdout(io.StringIO()):
        summary.main(argparse.Namespace(workdir=str(folder)))


@functools.cache
def evaluations() -> Files:
    """Two evaluations of three held-out tasks, of which one has an unknown content and one an unknown return."""
    from jaxmarl_llm.telemetry.evaluations_file import EvaluationsFile

    def write(folder: Path) -> None:
        file = EvaluationsFile(folder, ["aa", "bb", ""], None)
        for step in (0, 5):
            values = {"return": (0.25 * step, None, 2.0), "success": (0.0, 1.0, None)}
            file.write(step, {**values, "return_greedy": (1.0, 2.0, 3.5)})

    return in_folder(write)


def read_evaluations(folder: Path) -> None:
    """Read the evaluations, and compare them task by task with the valid ones."""
    from jaxmarl_llm.telemetry import evaluations_file, task_pairs

    found = evaluations_file.read_evaluations(folder)
    if found is None:
        return
    whole = valid_evaluations()
    for metric in {name for row in found.rows for name in row.values}:
        for first, second in ((found, whole), (whole, found)):
            pairs = task_pairs.pair_tasks(first, second, metric)
            if pairs is not None and pairs.first:
                task_pairs.effect_of(pairs)


@functools.cache
def valid_evaluations() -> Evaluations:
    from jaxmarl_llm.telemetry import evaluations_file

    with tempfile.TemporaryDirectory() as folder:
        for name, raw in evaluations().items():
            (Path(folder) / name).write_bytes(raw)
        found = evaluations_file.read_evaluations(folder)
    assert found is not None
    return found


@functools.cache
def rollout() -> Files:
    """A rollout of one task: two nodes, two completions, two transitions, and one row of each other kind."""
    from jaxmarl_llm.telemetry import rollouts as r
    from jaxmarl_llm.telemetry.rollouts_writer import encode

    header = r.Header(
        r.SCHEMA,
        3,
        3,
        "f",
        "grpo",
        0,
        "toy",
        "flat(2)",
        ("a", "b"),
        ("m",),
        ("pay",),
        {"pay": 1.0},
        ("m",),
        4,
        1,
        {},
        {},
    )
    node = r.Node(0, 0, 0, "a", "m", -1, (1, 2), "é", (3,), (0.5,))
    said = r.Completion(0, 0, (5, 6), "x", (-1.5, None), False, "policy", 0, 1.0, 0.5, 0, True, True, True, "trained")
    said = said._replace(learner_logprobs=(-1.25, None))
    rows: list[r.Row] = [
        r.Task(0, 7), node, node._replace(node=1, parent=0, role="b"), said, said._replace(step=1, node=1),
        r.Transition(0, 0, 0, -1, (0, -1), {"pay": (1.0, 0.1)}, False, True),
        r.Transition(1, 0, 1, 0, (1, -1), {"pay": (None, None)}, True, False),
        r.Group(0, 0, "a", 0, 1, 1.0, 0.0, 1.0, 1.0, True), r.MemoryEvent("read", "a", 3, 0, 0.5, "e", 1.0, 0.2),
        r.Failure(7, "step", 0, ("a",), "no reward"),
    ]  # fmt: skip
    return {"rollouts/step-00000003.jsonl.zst": encode(header, rows)}


def mutate_rollout(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Mutate the rows, or the compressed bytes."""
    import zstandard

    (name,) = files
    draw = rng.random()
    if draw < 0.2:
        what, raw = mutations.binary_file(rng, files[name], len(files[name]))
        return what, {name: raw}
    if draw < 0.25:
        return "zstd bomb", {name: zstandard.ZstdCompressor().compress(bytes(2 * 10**8))}
    what, raw = as_rows(rng, zstandard.ZstdDecompressor().decompressobj().decompress(files[name]))
    return what, {name: zstandard.ZstdCompressor(1).compress(raw)}


def read_rollout(folder: Path) -> None:
    from jaxmarl_llm.cli import view
    from jaxmarl_llm.telemetry import rollouts

    for step in rollouts.read(folder):
        step.to_numpy()
    with contextlib.redirect_stdout(io.StringIO()):
        for form in (["--text"], ["--out", str(folder / "page.html")]):
            view.main(view.parser().parse_args([str(folder), *form]))


# Data sets and the splits that are read. Six rows whose split is drawn from a hash may have none in the other split.
TASKS = {
    "gsm8k": ("train", "test"),
    "bfcl": ("train",),
    "hotpotqa": ("train",),
    "taubench_retail": ("train", "test"),
    "scitldr": ("train", "test"),
}


@functools.cache
def data_set(name: str) -> Files:
    """Some rows of the sample in the package; all that its reader needs."""
    from jaxmarl_llm.data.loaders import FIXTURES

    folder, files = FIXTURES / name, {}
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".json", ".jsonl") and "dev.js" not in p.name):
        text = path.read_text("utf-8")
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [json.loads(line) for line in lines[:6]] if path.suffix == ".jsonl" or name == "bfcl" else None
        if rows is None:
            value = json.loads(text)
            value = value[:6] if isinstance(value, list) else value
            files[f"{name}/{path.relative_to(folder)}"] = json.dumps(value).encode()
        else:
            files[f"{name}/{path.relative_to(folder)}"] = b"\n".join(json.dumps(row).encode() for row in rows)
    return files


def mutate_data(rng: random.Random, files: Files) -> tuple[str, Files]:
    name = rng.choice(sorted(files))
    rows = b"\n" in files[name].strip()
    return of_file(name, as_rows if rows else as_json)(rng, files)


def read_tasks(name: str, folder: Path) -> None:
    from jaxmarl_llm.data import loaders

    for split in TASKS[name]:
        loaders.load(name, data_dir=folder, split=split)
    if name == "taubench_retail":
        loaders.load_retail_db(folder)


def read_code(name: str, folder: Path) -> None:
    from jaxmarl_llm.data import code_tasks

    code_tasks.load_code(name, data_dir=folder, split="all")


@functools.cache
def code(name: str) -> Files:
    import gzip

    from jaxmarl_llm.data.loaders import FIXTURES

    if name == "mbpp":
        rows = json.loads((FIXTURES / "mbpp" / "sanitized-mbpp.json").read_bytes())[:6]
        return {"mbpp/sanitized-mbpp.json": json.dumps(rows).encode()}
    lines = (FIXTURES / "humaneval" / "HumanEval.jsonl").read_bytes().splitlines()[:6]
    return {"humaneval/HumanEval.jsonl.gz": gzip.compress(b"\n".join(lines), mtime=0)}


def mutate_code(rng: random.Random, files: Files) -> tuple[str, Files]:
    import gzip

    name = rng.choice(sorted(files))
    if not name.endswith(".gz"):
        return mutate_data(rng, files)
    if rng.random() < 0.2:
        what, raw = mutations.binary_file(rng, files[name], len(files[name]))
        return what, {**files, name: raw}
    if rng.random() < 0.05:
        return "gzip bomb", {**files, name: gzip.compress(bytes(2 * 10**8), 1)}
    what, raw = as_rows(rng, gzip.decompress(files[name]))
    return what, {**files, name: gzip.compress(raw, 1)}


STORED = {"seed": 1, "team": {"roles": 2}}


@functools.cache
def stored() -> Files:
    from jaxmarl_llm.storage import dataset

    table = {"tokens": np.arange(12).reshape(3, 4), "task": np.arange(3)}
    return in_folder(lambda folder: dataset.save(folder / "d", STORED, {"steps": table}))


def mutate_stored(rng: random.Random, files: Files) -> tuple[str, Files]:
    """Mutate the arrays, or meta.json; half of the latter get a new seal, so that what lies behind it is reached."""
    from jaxmarl_llm.storage.checkpoint import meta_checksum

    if rng.random() < 0.5:
        return of_file("d/steps.npz", lambda rng, raw: mutations.binary_file(rng, raw, len(raw)))(rng, files)
    what, raw = as_json(rng, files["d/meta.json"])
    if len(raw) < 10**5 and rng.random() < 0.5:
        with contextlib.suppress(ValueError, RecursionError):
            meta = json.loads(raw)
            raw = json.dumps({**meta, "seal": meta_checksum(meta)}).encode() if isinstance(meta, dict) else raw
    return f"d/meta.json: {what}", {**files, "d/meta.json": raw}


def read_stored(folder: Path) -> None:
    from jaxmarl_llm.storage import dataset

    dataset.load(folder / "d", STORED)


@functools.cache
def words() -> Files:
    lists = {"stopwords": ["the", "a"], "transitions": {"cause": ["because", "so"], "time": ["then"]}}
    return {"w.json": json.dumps(lists).encode()}


def read_words(folder: Path) -> None:
    from jaxmarl_llm.envs.writing import word_lists

    word_lists.read.__wrapped__(str(folder / "w.json"), "config.env.args")  # not its cache


@functools.cache
def systems() -> Files:
    finding = {
        "kind": "L",
        "text": "t",
        "effect": "e",
        "delta": 0.1,
        "control": "c",
        "budget": "b",
        "values": [0.1, 0.2],
        "figures": {"a": [1, 2.0]},
    }
    golden = {"file": "tests/recipes/test_malt.py", "holds": True}
    record = {"status": "s", "golden": golden, "claims_commit": "c", "findings": [finding], "seeds": 2, "minutes": 1.5}
    return {"s.json": json.dumps({"malt": {**record, "date": "2026-01-01", "commit": "c"}}).encode()}


def read_systems(folder: Path) -> None:
    from experiments import systems

    systems.table(systems.recorded(folder / "s.json"))


@functools.cache
def sweep() -> Files:
    row = {"sweep": "k", "plan": "p", "turns": 1, "group": 2, "agents": 2, "share": "s", "tasks": 4, "round": 0}
    return {"sweep.jsonl": b"".join(json.dumps({**row, "round": i, "seconds": 0.5}).encode() + b"\n" for i in range(3))}


def read_sweep(folder: Path) -> None:
    from experiments.studies import sampling_sweeps

    for row in sampling_sweeps.read(folder / "sweep.jsonl"):
        sampling_sweeps.key_of(row)


tensors = of_file("m/model.safetensors", mutations.safetensors_file)
KINDS: Mapping[str, Kind] = {
    "config.json": Kind(model, of_file("m/config.json", as_json), read_config),
    "safetensors": Kind(
        model, of_files(tensors, tensors, of_file("m/config.json", as_json)), lambda f: load_weights(f / "m")
    ),
    "safetensors index": Kind(
        lambda: model(2000),
        of_file("m/model.safetensors.index.json", as_json),
        lambda f: load_weights(f / "m"),
    ),
    "GGUF": Kind(
        gguf_model,
        of_file("m.gguf", lambda rng, raw: mutations.binary_file(rng, raw, len(raw) - 500)),
        lambda f: load_weights(f / "m.gguf"),
    ),
    "tokenizer.json": Kind(tokenizer, of_file("tokenizer.json", as_json), read_tokenizer),
    "tokenizer_config.json": Kind(tokenizer, of_file("tokenizer_config.json", as_json), read_tokenizer),
    "generation_config.json": Kind(tokenizer, of_file("generation_config.json", as_json), read_tokenizer),
    "chat template": Kind(tokenizer, with_template, read_tokenizer),
    "team.json": Kind(team, of_file("team.json", as_json), read_team),
    "metrics.jsonl": Kind(metrics, of_file("metrics.jsonl", as_rows), read_summary),
    "evaluations.jsonl": Kind(evaluations, of_file("evaluations.jsonl", as_rows), read_evaluations),
    "rollouts": Kind(rollout, mutate_rollout, read_rollout),
    **{
        f"data: {name}": Kind(functools.partial(data_set, name), mutate_data, functools.partial(read_tasks, name))
        for name in TASKS
    },
    **{
        f"data: {name}": Kind(functools.partial(code, name), mutate_code, functools.partial(read_code, name))
        for name in ("humaneval", "mbpp")
    },
    "stored data set": Kind(stored, mutate_stored, read_stored),
    "word lists": Kind(words, of_file("w.json", as_json), read_words),
    "records of systems": Kind(systems, of_file("s.json", as_json), read_systems),
    "sweep rows": Kind(sweep, of_file("sweep.jsonl", as_rows), read_sweep),
}
