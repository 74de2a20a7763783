# Every target makes the virtual environment that it needs: `make test` on a fresh machine is enough.
#
#   PYTHON  the interpreter; by default the one that made the environment, or else python3
#   TORCH   the requirement for torch, if it is to be another version or build than that of constraints.txt
PYTHON ?=
TORCH ?= $(shell grep '^torch==' constraints.txt)
VENV ?= .venv
BIN := $(VENV)/bin

# What the tests run for real, as Debian packages and as commands.
PACKAGES := chromium chromium-headless-shell prometheus prometheus-alertmanager victoria-metrics
PROGRAMS := chromium chromium-headless-shell prometheus promtool prometheus-alertmanager amtool victoria-metrics vmalert

SETUP = PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/setup
# Three processes on two cores: much of the time one of them waits for a program.
PYTEST := -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Python's packages and the programs of the tests are installed at the same time, unless -j is given.
PREPARE = +@$(MAKE) --no-print-directory $(if $(filter -j%,$(MAKEFLAGS)),,--jobs=2) setup programs

# The lower bound of every direct dependency, as a constraint.
LOWEST := sed -n '/^dependencies/,/^\[project.scripts\]/ s/^ *"\([a-z-]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml

.PHONY: setup programs demo test test-all test-lowest check format bench constraints clean

setup:
	@$(SETUP) $(VENV) constraints.txt

# Installed where we may; elsewhere the tests that need a missing one are skipped, and fail under CI=true.
programs:
	@missing() { for program in $(PROGRAMS); do command -v $$program > /dev/null || echo $$program; done; }; \
	if [ -n "$$(missing)" ] && [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		echo "Installing the Debian packages $(PACKAGES): up to two minutes"; \
		apt-get update -qq; \
		for package in $(PACKAGES); do \
			DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $$package > /dev/null; \
		done; \
	fi; \
	for program in $$(missing); do echo "$$program is not installed: its tests are skipped"; done

demo: setup
	$(BIN)/hilbert-monitor demo $(ARGS)

# Every promise of the README once, for real.
test:
	$(PREPARE)
	@echo "Running the tests: three to six minutes on two cores"
	OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) -m "not sweep" $(ARGS)

# The sweeps, the long scenarios and the tests of the tests too.
test-all:
	$(PREPARE)
	@echo "Running all tests: eight to twenty minutes on two cores"
	HILBERT_MONITOR_SWEEP=1 OMP_NUM_THREADS=1 $(BIN)/python $(PYTEST) $(ARGS)

# With the oldest versions that pyproject.toml allows, in an environment of its own, and the newest tools that take them.
test-lowest: TORCH = $(shell $(LOWEST) | grep '^torch==')
test-lowest: programs
	@mkdir -p build
	$(LOWEST) > build/lowest.txt
	@$(SETUP) $(VENV)-lowest build/lowest.txt
	OMP_NUM_THREADS=1 $(VENV)-lowest/bin/python $(PYTEST) -m "not sweep" $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# `make bench ARGS="geometry --quick"`; without ARGS it lists the benchmarks.
bench: setup
	$(BIN)/python -m benchmarks $(ARGS)

# Renew constraints.txt: the newest versions that fit together, with the torch of TORCH.
constraints:
	rm -rf build/constraints
	@$(SETUP) build/constraints /dev/null
	{ echo "# The versions that \`make\` installs; \`make constraints\` renews them."; \
		build/constraints/bin/python -m pip freeze --exclude-editable | sed 's/+.*//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

clean:
	rm -rf $(VENV) $(VENV)-lowest build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
