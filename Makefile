# `make demo` and `make test` set themselves up: they need Python 3.11 or newer, make, and a package index.

PYTHON ?= python3
VENV ?= .venv
FLOWER ?= .venv-flower
WORKERS ?= 2
OUT ?= demo-out
LIVE ?= live-out
SIZE ?=
DATA ?= manifest:$(EDGEFL_DATA)/fed_isic2019_84.zip
ROUNDS ?= 30
DIST ?= dist
WORK ?= build
RUN ?= runs/derm-vit-tiny-84
SELECT ?= last
MINUTES ?= 30
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --constraint constraints.txt
# pip compiles one module after the other, this on all cores, without other projects' tests. Some of their files are no Python.
COMPILE = $(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests?/' $(1)/lib || true

# One thread a process: two test processes share two cores, and a fixed number of threads makes digests repeatable.
# Compiled modules are kept, whatever the shell says: hundreds of tests begin a process.
TEST_ENVIRONMENT := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
# Each process begins with a half of the tests and takes from the other when it has none left.
PYTEST = $(TEST_ENVIRONMENT) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: help demo live backbone wheel flower test test-slow test-flower test-all test-nightly fuzz soak check rules format types pages pins clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP) ## The whole path on drawn lesions: learn, export, federate, score
	@if [ "$(OUT)" = demo-out ]; then rm -rf demo-out; fi
	$(BIN)/python examples/demo.py --out $(OUT)

live: $(STAMP) ## A live federation of two GPU servers and three devices, round by round (SIZE=--tiny, ARGS="…" of the script)
	@if [ "$(LIVE)" = live-out ]; then rm -rf live-out; fi
	$(BIN)/python examples/live_federation.py $(SIZE) $(ARGS) --out $(LIVE)

backbone: $(STAMP) ## Learn, judge and publish backbones/derm-vit-tiny-84 (DATA=SPEC ROUNDS=N RUN=DIR SELECT=tune): hours without a GPU
	$(BIN)/python examples/learn_derm_backbone.py --data '$(DATA)' --rounds $(ROUNDS) --select $(SELECT) --run $(RUN)

wheel: ## The wheel and its bill of materials in dist/, without PyTorch
	@mkdir -p $(DIST) $(WORK) && rm -f $(DIST)/edgefl_derm-*
	@test -x $(WORK)/wheel-env/bin/pip || $(PYTHON) -m venv $(WORK)/wheel-env
	$(WORK)/wheel-env/bin/python -m pip --disable-pip-version-check install --quiet --upgrade --constraint constraints.txt pip \
		'hatchling>=1.27' 'cyclonedx-python-lib>=11'
	$(WORK)/wheel-env/bin/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) .
	$(WORK)/wheel-env/bin/python -m pip --disable-pip-version-check install --quiet --dry-run --ignore-installed \
		--report $(WORK)/device.json --require-hashes --only-binary=:all: --requirement requirements-device.txt
	$(WORK)/wheel-env/bin/python .ci/bill_of_materials.py $(DIST)/edgefl_derm-*.whl $(WORK)/device.json

# Over the packages of $(VENV): Flower holds some of them back (docs/decisions/0063).
flower: $(FLOWER)/bin/edgefl-train ## Flower in an environment of its own, $(FLOWER): its bin has an `edgefl-train` that knows --engine flower

$(FLOWER)/.installed: $(STAMP) constraints-flower.txt
	rm -rf $(FLOWER) && $(BIN)/python -m venv --without-pip $(FLOWER)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(" + repr(sysconfig.get_path("purelib")) + ")")' \
		> "$$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(FLOWER)/bin/python -m pip --disable-pip-version-check install --no-compile --quiet --constraint constraints-flower.txt \
		'flwr[simulation]'
	$(call COMPILE,$(FLOWER))
	$(FLOWER)/bin/python -m pip check
	@touch $@

# EdgeFL itself is not installed there a second time: the program of $(VENV) runs with this environment's Python.
$(FLOWER)/bin/edgefl-train: $(FLOWER)/.installed
	printf '#!/bin/sh\nexec "%s" "%s" "$$@"\n' "$(abspath $(FLOWER))/bin/python" "$(abspath $(BIN))/edgefl-train" > $@
	chmod +x $@

test: $(STAMP) ## What a change needs (WORKERS=N processes, ARGS="…" for pytest)
	$(PYTEST) -m "not slow" $(ARGS)

# One more than there are cores: its tests wait for servers, and for what another of them makes.
test-slow: WORKERS = 3
test-slow: $(STAMP) ## Only what `make test` leaves out
	$(PYTEST) -m "slow and not nightly" $(ARGS)

# The larger form of what is `smaller` is among the slow ones.
test-all: $(STAMP) ## Both; docs/results/README.md says how long each target takes
	$(PYTEST) -m "not nightly and not smaller" $(ARGS)

test-nightly: $(STAMP) ## Larger forms of what the others run, for a night and before a release
	$(PYTEST) -m nightly $(ARGS)

# The other targets leave these out: $(VENV) has no Flower.
test-flower: $(FLOWER)/bin/edgefl-train ## Those that need Flower (ARGS='-m "not long"' for what continuous integration runs)
	$(subst $(BIN),$(FLOWER)/bin,$(PYTEST)) tests/trainer/flower $(ARGS)

fuzz: $(STAMP) ## Fuzz the parsers (MINUTES=N, ARGS="TARGET …"); docs/security.md check 15
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) $(ARGS)

soak: $(STAMP) ## Twenty members, kills and a bad network (MINUTES=N, 480 for eight hours); docs/security.md check 68
	$(TEST_ENVIRONMENT) $(BIN)/python -m benchmarks.coordinator.soak --minutes $(MINUTES) $(ARGS)

check: format types rules ## Format, lint, types, and the rules of the house: imports, sources, commands, pages

format: $(STAMP) ## Only format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP) ## Only the type checker
	$(BIN)/mypy

rules: $(STAMP) ## Only the rules of the house
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest --quiet -m "not slow" tests/house

pages: $(STAMP) ## Write docs/reference/commands.md and the status of the checks in docs/security.md anew
	$(BIN)/python .ci/write_pages.py

pins: $(STAMP) ## Write requirements-device.txt anew from constraints.txt
	$(BIN)/python .ci/pin_device.py > requirements-device.new
	mv requirements-device.new requirements-device.txt

clean: ## Remove the virtual environment, caches and the demo's output
	rm -rf $(VENV) $(FLOWER) demo-out live-out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Installed again whenever a requirement changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("EdgeFL needs Python 3.11 or newer, this is %d.%d; name another: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV), once; PyTorch makes this a few minutes."
	$(PYTHON) -m venv $(VENV)
	$(PIP) --quiet --upgrade pip
	$(PIP) --editable '.[export,coordinator]' --group dev
	$(call COMPILE,$(VENV))
	@touch $@
