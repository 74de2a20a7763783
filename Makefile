# Every target makes the virtual environment it needs; `make test` on a fresh machine is enough.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin

# What the tests run for real, as Debian packages and as commands.
PACKAGES := chromium prometheus prometheus-alertmanager
PROGRAMS := chromium prometheus promtool prometheus-alertmanager amtool

.PHONY: setup programs demo test check format bench clean

setup: $(VENV)/.installed

# torch first, by name: the plain requirement could resolve to a build for another accelerator.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable . --group dev
	touch $@

# Installed where we may; elsewhere the tests that need a missing one are skipped, and fail under CI=true.
programs:
	@for program in $(PROGRAMS); do \
		command -v $$program > /dev/null && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
			apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(PACKAGES); break; \
		else echo "$$program is not installed: its tests are skipped"; fi; \
	done

demo: setup
	$(BIN)/hilbert-monitor demo $(ARGS)

test: setup programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/hilbert-monitor bench $(ARGS)

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
