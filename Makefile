# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
DEMO ?= runs/demo
RUN := $(VENV)/bin/python
CPU := JAX_PLATFORMS=cpu
export TF_CPP_MIN_LOG_LEVEL ?= 2
# Bytecode is kept, whatever the environment says: each process would compile all modules, and pytest rewrite all tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test check test-slow test-312 lint types notebooks docs aot sandbox browser weights smollm2 transformers4 peers install install-test clean help

help:
	@echo "make demo       train JoyAgents-R1 on CPU with tiny models, or resume it; writes runs/demo/report.png"
	@echo "                (another run: make demo SEED=1 DEMO=runs/demo_1)"
	@echo "make test       install what the tests need; lint, types, and all tests that are not slow"
	@echo "make check      slow tests, the site, notebooks, compiles for TPUs, and Python 3.12 where it is found"
	@echo "make lint types notebooks aot"
	@echo "make docs       the site with the API reference, in build/site; warnings are errors"
	@echo "make sandbox    install what runs generated code safely: bubblewrap"
	@echo "make browser    install the browser of the slow tests of the viewer: Chromium"
	@echo "make transformers4  an environment with transformers 4, in which a slow test loads exports"
	@echo "make peers      other systems beside which experiments.bench measures, each in an environment of its own"
	@echo "make smollm2    fetch SmolLM2-135M, train a team that writes function calls on a CPU, and print the table of its"
	@echo "                held-out success. DATA=DIR: the full data in place of the sample"

# The stamp makes an install happen once; touch setup.cfg to repeat it.
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(RUN) -m pip install --quiet -e ".[dev]"
	@touch $@

# torch is the witness of the parity tests; the plain CPU build is enough.
$(VENV)/.installed-parity: $(VENV)/.installed-test
	$(RUN) -c "import torch" 2>/dev/null || $(RUN) -m pip install --quiet "torch==2.13.0" || $(RUN) -m pip install --quiet torch
	$(RUN) -m pip install --quiet -e ".[parity]"
	@touch $@

install: $(VENV)/.installed
install-test: $(VENV)/.installed-parity

# XLA's older emitters on CPU. With LLVM's first level they compile rollouts in less than half the time, and steps are no
# slower; the stored outputs of the notebooks are without it.
OLDER_EMITTERS := --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters
QUICK_COMPILE := $(OLDER_EMITTERS) --xla_backend_optimization_level=1

# An existing run is resumed, never deleted. The configuration itself has 300 and 250 steps, and evaluates greedily too.
demo: export XLA_FLAGS := $(QUICK_COMPILE) $(XLA_FLAGS)
demo: $(VENV)/.installed
	@test ! -d $(DEMO)/checkpoints || echo "$(DEMO) holds a run, which is resumed. A new run: make demo DEMO=runs/NAME"
	$(CPU) $(RUN) -m experiments.train --config=experiments/configs/joyagents_r1.py:tiny --workdir=$(DEMO) --config.seed=$(SEED) \
		--config.sft.steps=130 --config.steps=80 --config.optimizer.total_steps=80 \
		--config.run.eval_greedy=False --config.micro_tokens=2048
	@$(RUN) -m jaxmarl_llm.cli.summary $(DEMO)

# Compiled programs of the tests are kept: the second session compiles what has changed.
export JAXMARL_TEST_CACHE ?= $(CURDIR)/build/jax_cache
SPREAD := -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=5

# What is not slow. The rest is `make check`. Types are checked beside the tests, and mypy speaks at the end.
test: $(VENV)/.installed-parity lint sandbox
	@test -f weights/smollm2/config.json || $(MAKE) weights || echo "SmolLM2 was not fetched: its tests skip"
	@mkdir -p build
	@$(MAKE) -s types > build/types.log 2>&1 & types=$$!; \
	$(CPU) $(RUN) -m pytest $(SPREAD) -m "not slow"; tests=$$?; \
	wait $$types || { cat build/types.log; exit 1; }; exit $$tests

check: test-slow docs notebooks aot test-312

test-slow: $(VENV)/.installed-parity sandbox browser
	@test -f $(TRANSFORMERS4)/.installed || $(MAKE) transformers4 || echo "transformers 4 was not installed: its test skips"
	$(CPU) $(RUN) -m pytest $(SPREAD) -m slow

# The 3B team on three slices of TPUs: compiled, and fits. Two at a time, as many as there are cores.
AOT := $(CPU) $(RUN) -m experiments.tpu.plan_pod --config=experiments/configs/joyagents_r1.py:qwen2_5_3b
aot: $(VENV)/.installed-test
	$(AOT) --topology=v6e:16x16 & other=$$!; $(AOT) --topology=v5e:16x16,v5p:8x8x8 && wait $$other

# The newest JAX needs Python 3.12. Where that Python is found, what rests on JAX, Flax, Optax and Orbax runs on it too;
# torch, text environments and recipes, which are compositions of that, are left to the first leg.
NEWEST := $(addprefix tests/,test_config.py test_layering.py credit generation $(addsuffix .py,agents/test_memory \
	agents/test_team cli/test_cli kernels/test_group_attention kernels/test_kernels kernels/test_matmul \
	models/test_batch_invariant models/test_hf_config models/test_hf_weights models/test_lora models/test_rope \
	models/test_tokenizer rollout/test_array rollout/test_env_pool storage/test_checkpoint telemetry/test_metrics \
	training/test_learner training/test_losses))
PY312 := $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do command -v $$p >/dev/null 2>&1 && $$p -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
ifeq ($(PY312),)
test-312:
	@echo "python3.12 was not found: the second leg (newest JAX) did not run"
else
test-312: .venv-312/.installed-test sandbox
	$(CPU) .venv-312/bin/python -m pytest $(SPREAD) $(NEWEST) -m "not parity and not real_weights and not slow"

.venv-312/.installed-test: setup.cfg pyproject.toml
	$(MAKE) VENV=.venv-312 PYTHON=$(PY312) .venv-312/.installed
	.venv-312/bin/python -m pip install --quiet -e ".[dev]"
	@touch $@
endif

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed-test
	$(VENV)/bin/mypy

# What is missing is installed where that is possible and named where it is not; the tests of the sandbox then skip.
sandbox:
	@if command -v bwrap >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get -qq update && apt-get -qq install -y bubblewrap >/dev/null; } \
			|| echo "sandbox: apt-get could not install bubblewrap"; \
	else echo "sandbox: install bubblewrap"; fi

# The tests of the viewer in a browser skip where there is none.
browser:
	@if command -v chromium chromium-browser google-chrome google-chrome-stable >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } \
			|| echo "browser: apt-get could not install chromium"; \
	else echo "browser: install chromium"; fi

notebooks: export XLA_FLAGS := $(OLDER_EMITTERS)
notebooks: $(VENV)/.installed-test
	$(CPU) $(RUN) -m pytest --nbmake --nbmake-timeout=900 --durations=6 notebooks

$(VENV)/.installed-docs: $(VENV)/.installed
	$(RUN) -m pip install --quiet -e ".[docs]"
	@touch $@

docs: $(VENV)/.installed-docs
	$(RUN) -m mkdocs build --strict

weights: $(VENV)/.installed-test
	$(RUN) -m jaxmarl_llm.cli.fetch_weights --out=weights/smollm2

smollm2: weights
	$(CPU) $(RUN) -m experiments.studies.real_text --team=call_team --run=team --seeds=1 --work=runs/smollm2 \
		--records=runs/smollm2/record.json --page=runs/smollm2/table.md $(if $(DATA),--data=$(DATA))

# Exports must be the same model in transformers 4 and 5 (tests/models/test_transformers4.py).
TRANSFORMERS4 := .venv-transformers4
transformers4: $(TRANSFORMERS4)/.installed

$(TRANSFORMERS4)/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0" || $(@D)/bin/python -m pip install --quiet torch
	$(@D)/bin/python -m pip install --quiet "transformers<5"
	@touch $@

# What experiments.bench drives: TRL and CoMLRL share an environment, google-tunix pins an older transformers.
PEERS ?= .venv-peers
PEER_REQUIREMENTS := experiments/bench/peers
peers: $(PEERS)/torch/.installed $(PEERS)/tunix/.installed

$(PEERS)/torch/.installed: $(PEER_REQUIREMENTS)/torch.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet "torch==2.13.0" || $(@D)/bin/python -m pip install --quiet torch
	$(@D)/bin/python -m pip install --quiet -r $<
	@touch $@

$(PEERS)/tunix/.installed: $(PEER_REQUIREMENTS)/tunix.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	@touch $@

clean:
	rm -rf $(VENV) .venv-312 $(TRANSFORMERS4) $(PEERS) build *.egg-info
