# Two commands: `make demo` and `make test`. Both install what they need into .venv first.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
RUN := $(VENV)/bin/python
CPU := JAX_PLATFORMS=cpu
export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test test-one test-312 lint types notebooks aot sandbox weights smollm2 peers install install-test clean help

help:
	@echo "make demo       train JoyAgents-R1 on CPU with tiny models; writes runs/demo/report.png (SEED=0)"
	@echo "make test       install what the tests need and run them all, on Python 3.12 too where it is found"
	@echo "make lint types notebooks aot"
	@echo "make sandbox    install what runs generated code safely: bubblewrap and libseccomp"
	@echo "make peers      other systems beside which experiments.bench measures, each in an environment of its own"
	@echo "make smollm2    fetch SmolLM2-135M and train five LoRA roles on real data (hours on CPU)"

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

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(CPU) $(RUN) -m experiments.train --config=experiments/configs/joyagents_r1.py:tiny --workdir=runs/demo --config.seed=$(SEED)
	@$(RUN) -m experiments.summary runs/demo

SPREAD := -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=5

test: test-one notebooks aot test-312

test-one: $(VENV)/.installed-parity lint types sandbox
	@test -f weights/smollm2/config.json || $(MAKE) weights || echo "SmolLM2 was not fetched: its tests skip"
	$(CPU) $(RUN) -m pytest $(SPREAD)

# The 3B team on three slices of TPUs: compiled, and fits. Two at a time, as many as there are cores.
AOT := $(CPU) $(RUN) -m experiments.aot --config=experiments/configs/joyagents_r1.py:qwen2_5_3b
aot: $(VENV)/.installed-test
	$(AOT) --topology=v6e:16x16 & other=$$!; $(AOT) --topology=v5e:16x16,v5p:8x8x8 && wait $$other

# The newest JAX needs Python 3.12. Where that Python is found, what rests on JAX, Flax, Optax and Orbax runs on it too;
# torch, text environments and recipes, which are compositions of that, are left to the first leg.
NEWEST := advantages checkpoint cli config generate group_attention invariant kernels layering lora losses matmul memory metrics rollout sampling \
	selection team tokenizer train weights workers
PY312 := $(shell for p in python3.12 $$HOME/.pyenv/versions/3.12*/bin/python; do command -v $$p >/dev/null 2>&1 && $$p -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo $$p && break; done)
ifeq ($(PY312),)
test-312:
	@echo "python3.12 was not found: the second leg (newest JAX) did not run"
else
test-312: .venv-312/.installed-test sandbox
	$(CPU) .venv-312/bin/python -m pytest $(SPREAD) $(NEWEST:%=tests/test_%.py) -m "not parity and not real_weights and not slow"

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
	@if command -v bwrap >/dev/null && $(PYTHON) -c 'import ctypes; ctypes.CDLL("libseccomp.so.2")' 2>/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		{ apt-get -qq update && apt-get -qq install -y bubblewrap libseccomp2 >/dev/null; } \
			|| echo "sandbox: apt-get could not install bubblewrap and libseccomp2"; \
	else echo "sandbox: install bubblewrap and libseccomp2 (apt-get, as root; libseccomp on Fedora and Arch)"; fi

# As in the tests (tests/conftest.py): half the compile time on CPU.
notebooks: export XLA_FLAGS := --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters
notebooks: $(VENV)/.installed-test
	$(CPU) $(RUN) -m pytest --nbmake --nbmake-timeout=600 --durations=4 notebooks

weights: $(VENV)/.installed-test
	$(RUN) -m experiments.fetch_weights --out=weights/smollm2

smollm2: weights
	$(CPU) $(RUN) -m experiments.train --config=experiments/configs/joyagents_r1.py:smollm2 --workdir=runs/smollm2

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
	rm -rf $(VENV) .venv-312 $(PEERS) build *.egg-info
