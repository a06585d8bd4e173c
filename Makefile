# Two commands: `make test` and `make demo`. Each needs Python 3.11 or newer and make, nothing else prepared:
# they create .venv, install into it, and run. The others: docs, lint, test-all, wheel-test, golden, campaign, bench, clean.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed
# Not --quiet: that hides warnings from --strict.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Nothing here may reach out to the hub: tests and demo build their own models.
export HF_HUB_OFFLINE := 1

.PHONY: test demo docs lint test-all test-cuda wheel-test golden campaign bench clean
.DEFAULT_GOAL := test

# Tests run in two processes, so each keeps to one thread.
test test-all golden campaign: export OMP_NUM_THREADS := 1

# ISOBASIN_SLOW=0: tests marked `slow` run in a smoke version; ISOBASIN_SLOW=1: in full.
test: lint
	ISOBASIN_SLOW=0 $(BIN)/python -m pytest -q -n 2

test-all: lint
	ISOBASIN_SLOW=1 $(BIN)/python -m pytest -q -n 2

# On a machine with CUDA: what takes --device, each command compared with the answer of the processor.
test-cuda: $(INSTALLED)
	ISOBASIN_SLOW=1 $(BIN)/python -m pytest -q tests/test_accelerator.py tests/learn/test_learn_cuda.py

# The wheel in empty environments, with the lowest and the newest versions: downloads both, and needs 12 GB of disk.
wheel-test: $(INSTALLED)
	$(BIN)/python tests/wheel_versions.py --work out/wheel-test -o results/reliability/wheel.json

# Recomputes every recorded result of the command line; a line for each deviation.
golden: $(INSTALLED)
	$(BIN)/python tests/golden/record.py --check --workers 2

# The campaigns of docs/reliability.md in full (hours); each writes its table as JSON.
campaign: $(INSTALLED)
	$(BIN)/python tests/campaigns/fuzzing.py --inputs 100000 -o results/reliability/fuzzing.json
	$(BIN)/python tests/campaigns/kill_points.py -o results/reliability/kill_points.json
	$(BIN)/python tests/campaigns/verdicts.py -o results/reliability/verdicts.json
	$(BIN)/python tests/campaigns/canonical.py -o results/reliability/canonical.json

demo: $(PACKAGE)
	$(BIN)/isobasin demo -o out/demo --force

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(SITE) --site-dir out/.site-check

# The documentation site, in out/site. The pages and their links are checked; no other host is asked for anything.
docs: $(INSTALLED)
	$(SITE) --site-dir out/site
	@echo out/site/index.html

# Those that need no data from outside; the others say in their first lines what they take.
bench: $(INSTALLED)
	@set -e; for name in kernels align assignment merge path seeds; do \
		echo "bench/$$name.py"; $(BIN)/python "bench/$$name.py"; \
	done

# What the program needs. torch comes first: everything after it then finds the pinned one and looks for no other.
$(PACKAGE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than 3.11: name a newer one, make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -c constraints.txt torch
	$(PIP) install -q -c constraints.txt -e .
	@touch $@

# What the checks need as well.
$(INSTALLED): $(PACKAGE)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf src/*.egg-info
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
