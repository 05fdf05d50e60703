"""`jaxmarl-llm plan`: every shipped configuration without weights, lengths by role and from a run, bad input."""

import dataclasses
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli import plan as plan_command
from jaxmarl_llm.config import replace_path
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.known_shapes import architecture, shape_only
from jaxmarl_llm.errors import ConfigError
from tests.test_config_fields import ROOT, SPECS

CONFIGS = ROOT / "jaxmarl_llm" / "configs"
JOY = f"{CONFIGS}/joyagents_r1.py"
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip


class Flags(dict):
    """Values of the flags of `cli.plan`, by attribute and by key, as absl's FlagValues gives them."""

    def __init__(self, **given):
        unset = {"prompt": None, "response": None, "length": [], "metrics": None, "chip": ["h200"], "memory": 1e6}
        super().__init__({name: SimpleNamespace(value=value) for name, value in (unset | given).items()})

    def __getattr__(self, name):
        return self[name].value


def printed(capfd, spec, **given):
    """The figures by name, and the assumptions, of ``spec`` (a file with a variant, or a configuration)."""
    cfg = config_flags.load(spec) if isinstance(spec, str) else spec
    predicted = plan_command.predict(cfg, Flags(**given))
    text = capfd.readouterr().out
    rows = re.findall(r"^(.{38}) *([\d.,e+-]+)(?: +([\d.,e+-]+))?(?:   \(.*)?$", text, re.MULTILINE)
    figures = {name.strip(): float(value.replace(",", "")) for name, value, _ in rows}
    return figures, re.findall(r"^assumed: (.*)$", text, re.MULTILINE), predicted


@pytest.mark.parametrize("spec", SPECS, ids=[Path(spec).name for spec in SPECS])
def test_every_shipped_configuration_is_planned_without_weights(spec, capfd):
    figures, assumed, predicted = printed(capfd, spec)
    assert figures["sampled sequences"] > 0 and figures["seconds on h200, at least"] > 0
    assert figures["FLOPs of the rollout, at least"] > 0 and assumed
    no_update = config_flags.load(spec).recipe in ("malt", "optagent")  # offline, and without a gradient
    assert (figures["FLOPs of the update, at least"] == 0) == no_update
    assert figures["bytes of parameters"] == costs.memory(*predicted).base + costs.memory(*predicted).own
    low, full = figures["FLOPs of the rollout, at least"], figures.get("no prompt begins as another")
    assert full is None or low <= full


def test_a_team_of_five_computes_what_one_shared_model_computes(capfd):
    """JoyAgents-R1 at the paper's scale: the figures of five models were five times those of one."""
    apart, assumed, _ = printed(capfd, f"{JOY}:qwen2_5_3b")
    cfg = replace_path(config_flags.load(f"{JOY}:qwen2_5_3b"), "team.parameter_sharing", "shared")
    shared, _, _ = printed(capfd, cfg)
    for name in ("no prompt begins as another", "sampled sequences", "tokens decoded"):
        assert apart[name] == pytest.approx(shared[name], rel=1e-3), name
    assert apart["no prompt begins as another"] == pytest.approx(2.15e17, rel=0.01)
    assert shared["seconds on h200, at least"] <= apart["seconds on h200, at least"]
    assert any("cached" in line for line in assumed)


def test_a_folder_with_config_json_alone_is_enough(tmp_path, capfd):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    cfg = config_flags.load(f"{JOY}:smollm2")
    own = Backbone(path=str(folder))
    cfg = dataclasses.replace(cfg, team=dataclasses.replace(cfg.team, backbone=own, parameter_sharing="shared"))
    figures, _, predicted = printed(capfd, cfg)
    arch = predicted.work.models[0].config
    assert (arch.vocab_size, arch.hidden_size, arch.num_layers) == (1000, 64, 2)
    assert figures["bytes of parameters"] == 4 * costs.parameters(arch)
    assert architecture(Backbone(tokenizer=str(folder))).vocab_size == 1000
    (folder / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^config\.team\.backbone\.path: .*config\.json"):
        shape_only(cfg)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"^config\.team\.backbone\.path: "):
        shape_only(cfg)


def test_known_shapes_and_tokenizers():
    assert costs.parameters(architecture(Backbone(path="weights/smollm2"))) == 134_515_008
    assert architecture(Backbone(tokenizer="weights/smollm2")).vocab_size == 49152
    assert architecture(Backbone(tokenizer="bytes")).vocab_size == architecture(Backbone()).vocab_size
    cfg = config_flags.load(f"{JOY}:mixed")
    bare = shape_only(cfg)
    assert bare.team.overrides["master"].vocab_size == 49152 and bare.team.overrides["master"].family == "llama"
    wrong = replace_path(cfg, "team.overrides", {"qa": Backbone(path="no/such")})
    with pytest.raises(ConfigError, match=r"^config\.team\.overrides\.qa\.path: 'no/such' is no folder, .*known: "):
        shape_only(wrong)
    with pytest.raises(ConfigError, match=r"^config\.team\.backbone\.tokenizer: 'no/such' is no folder"):
        shape_only(replace_path(cfg, "team.backbone.tokenizer", "no/such"))


def test_data_of_a_user_is_kept_and_data_from_the_hub_is_not_fetched(tmp_path, capfd):
    spec = f"{CONFIGS}/magrpo.py:tldr"
    _, assumed, _ = printed(capfd, spec)
    assert "the packaged tasks in place of trl-lib/tldr" in assumed
    cfg = config_flags.load(f"{JOY}:tiny")
    env = dataclasses.replace(cfg.env, args={"data": str(tmp_path)})
    assert shape_only(dataclasses.replace(cfg, env=env)).env.args == {"data": str(tmp_path)}


ROLES = ("master", "arithmetic", "lookup", "function", "transform")  # of joyagents_r1.py:tiny


def test_lengths_by_role(capfd):
    spec = f"{JOY}:tiny"
    every, assumed, _ = printed(capfd, spec, prompt="20", response="2:0.5,6:0.5")
    assert every["tokens decoded"] == 4 * every["sampled sequences"] and not any("the most" in x for x in assumed)
    assert every["tokens prefilled"] == 20 * every["decision points"]
    one, assumed, predicted = printed(capfd, spec, length=["master:10:1=0.25,5=0.75", "lookup::3"], response="6")
    assert "of arithmetic, lookup, function, transform every prompt has 40 tokens, the most (--prompt, --length)" in (
        assumed
    )
    speakers = dict(zip(ROLES, predicted.work.roles, strict=True))
    assert speakers["master"].response == {1: 0.25, 5: 0.75} and speakers["master"].prompt == ({10: 1.0},)
    assert speakers["lookup"].response == {3: 1.0} and speakers["lookup"].prompt == ({40: 1.0},)
    assert speakers["function"].response == {6: 1.0}
    assert one["tokens decoded"] < 6 * one["sampled sequences"]


def metrics(tmp_path, *rows):
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": i, **row}) + "\n" for i, row in enumerate(rows))
    )
    return str(tmp_path)


def test_lengths_of_a_run(tmp_path, capfd):
    """The mean of the last ten steps of each role, as a folder or as a file; ``--length`` goes before it."""
    early = [{"agent/master/length": 1.0, "sft/nll": 2.0}] * 5
    late = [{"agent/master/length": 2.5, "agent/lookup/length": 4.0}] * 10
    folder = metrics(tmp_path, *early, *late)
    for given in (folder, f"{folder}/metrics.jsonl"):
        _, assumed, predicted = printed(capfd, f"{JOY}:tiny", metrics=given, length=["lookup:30:"], response="7")
        speakers = dict(zip(ROLES, predicted.work.roles, strict=True))
        assert speakers["master"].response == {2: 0.5, 3: 0.5} and speakers["lookup"].response == {4: 1.0}
        assert speakers["lookup"].prompt == ({30: 1.0},) and speakers["function"].response == {7: 1.0}
        assert assumed[0].endswith("master 2.5, lookup 4.0 tokens")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "many"}, r"^--prompt: expected N or N:p,M:q \(tokens, probabilities\), got 'many'$"),
        ({"prompt": "41"}, r"^--prompt: prompt of role 'master': expected values from 1 to 40, got 41$"),
        ({"response": "0"}, r"^--response: response of role 'master': expected values from 1 to 7, got 0$"),
        ({"response": "2:0.5"}, r"^--response: response of role 'master': probabilities add up to 0.5"),
        ({"length": ["master:9"]}, r"^--length: expected role:prompt:response, got 'master:9'$"),
        ({"length": ["master:9:8"]}, r"^--length=master:9:8: response of role 'master': expected values .* 7, got 8$"),
        ({"length": ["boss:9:1"]}, r"^--length=boss:9:1: unknown role 'boss'; the roles are master, arithmetic"),
        ({"length": ["master:x:1"]}, r"^--length: expected N or N=p,M=q \(tokens, probabilities\), got 'x'$"),
        ({"metrics": "no/run"}, r"^--metrics=no/run: no file no/run/metrics.jsonl$"),
        ({"chip": ["b200"]}, r"^--chip: unknown chip 'b200'; did you mean 'h200'\?$"),
        ({"chip": ["h100:none"]}, r"^--chip: h100: expected a number of chips from 1 to \d+, got 'none'$"),
        ({"memory": 0.001}, r"^plan node_wise.*: needs at least .* \(or raise --memory\)$"),
    ],
    ids=str,
)
def test_bad_flags_are_refused_in_one_line(given, message):
    with pytest.raises(ConfigError, match=message) as error:
        plan_command.predict(config_flags.load(f"{JOY}:tiny"), Flags(**given))
    assert "\n" not in str(error.value)


def test_devices_that_sample_alone_are_not_planned():
    cfg = config_flags.load(f"{JOY}:tiny")
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, rollout_devices=1))
    with pytest.raises(ConfigError, match=r"^config\.mesh\.rollout_devices: expected 0: costs are of devices"):
        plan_command.predict(cfg, Flags())


def test_a_run_whose_metrics_do_not_fit_is_refused(tmp_path):
    cfg = config_flags.load(f"{JOY}:tiny")
    folder = metrics(tmp_path, {"sft/nll": 1.0})
    with pytest.raises(ConfigError, match=r"^--metrics=.*: no line has a key agent/<role>/length"):
        plan_command.predict(cfg, Flags(metrics=folder))
    folder = metrics(tmp_path, {"agent/boss/length": 2.0})
    with pytest.raises(ConfigError, match=r"^--metrics=.*: unknown role 'boss'; the roles are master"):
        plan_command.predict(cfg, Flags(metrics=folder))
    folder = metrics(tmp_path, {"agent/master/length": 7.5})
    with pytest.raises(ConfigError, match=r"^--metrics=.*: response of role 'master': .* 1 to 7, got 8"):
        plan_command.predict(cfg, Flags(metrics=folder))


def test_the_command_of_the_package():
    import subprocess
    import sys

    command = [sys.executable, "-m", "jaxmarl_llm", "plan", f"--config={CONFIGS}/grpo.py:tiny", "--chip=h200"]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    assert got.returncode == 0 and re.search(r"^sampled sequences +\d", got.stdout, re.MULTILINE), got.stderr


def chips_of(capfd, cfg, *sets):
    """Exit code, figures by set of chips and what stands before them, of `plan --chip=SETS`."""
    code = plan_command.main(cfg, None, Flags(chip=list(sets), memory=None))
    parts = re.split(r"^(\w+:\d+), a mesh of ", capfd.readouterr().out, flags=re.MULTILINE)
    return code, dict(zip(parts[1::2], parts[2::2], strict=True)), parts[0]


def test_sets_of_chips_have_a_mesh_and_a_verdict(capfd):
    code, found, before = chips_of(capfd, config_flags.load(f"{CONFIGS}/magrpo.py:qwen3_1_7b"), "v5p:8", "v5e:256")
    assert code == 0 and list(found) == ["v5p:8", "v5e:256"]
    least = [float(x) for x in re.findall(r"^seconds on v5\w:\d+, at least +(\S+)", before, re.MULTILINE)]
    assert least[0] / least[1] == pytest.approx(256 * 197 / (8 * 459), rel=0.1)  # chips times their FLOPs
    for name, text in found.items():
        sizes = re.match(r"data (\d+), fsdp (\d+), tensor (\d+) \(--config.mesh.data=\1 --config.mesh.fsdp=\2 ", text)
        assert math.prod(map(int, sizes.groups())) == int(name.partition(":")[2])
        rows = re.findall(r"^  bytes of a chip, (.*?) {2,}([\d,]+)$", text, re.MULTILINE)
        held = {k: int(v.replace(",", "")) for k, v in rows}
        parts = sum(v for k, v in held.items() if k in ("parameters", "optimizer", "gradient", "activations"))
        assert held["in all, updating"] == pytest.approx(parts, abs=4) and "fits: yes" in text
    here = replace_path(config_flags.load(f"{CONFIGS}/magrpo.py:humaneval"), "optimizer.offload", False)
    code, found, _ = chips_of(capfd, here, "h100:1", "v5e:1")
    assert code == 1 and "fits: no, a chip has 80,000,000,000 bytes; it fits with " in found["h100:1"]
    assert found["h100:1"].rstrip().endswith("--config.optimizer.offload=true")
    assert found["v5e:1"].rstrip().endswith("or take more chips")
