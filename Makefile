# make setup | train | test | test-long | test-alone | check | docs | dist   PYTHON=python3.12 make setup chooses the interpreter (3.11 to 3.14)
PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin

.PHONY: setup train test test-long test-alone check docs dist clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "paceline needs Python 3.11 to 3.14; $(PYTHON) is $$($(PYTHON) --version). Try PYTHON=python3.12 make setup"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(INSTALL_FLAGS) --editable '.[dev]' --constraint $(CONSTRAINTS)
	@touch $@

train: setup  ## the main job: a model on this machine's cores, in under three minutes of training
	$(BIN)/paceline train --preset demo --nproc auto

test: setup  ## each law once, and what costs little: two minutes on two cores; four files at a time
	$(BIN)/python -m pytest -m "not long" --workers 4

test-long: setup  ## the rest: many ranks, many kills, two hosts, the documents' commands; a failed one is run again, and listed
	$(BIN)/python -m pytest -m "long and not alone and not nightly" --workers 4 --reruns 1 -rR

test-alone: setup  ## those that measure this machine, with nothing beside them; a busy machine fails them, and CI does not run them
	$(BIN)/python -m pytest -m "long and alone" --reruns 1 -rR

check: setup  ## lint, format, types, import contract
	$(BIN)/ruff check src tests bench examples docs
	$(BIN)/ruff format --check src tests bench examples docs
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup  ## the documentation as a site, in site/; a warning, or a link to nothing, is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open site/index.html"

dist: setup  ## what a release uploads, in dist/; installed in an empty environment, and trained with (docs/release.md)
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	empty=$$(mktemp -d) && trap 'rm -rf "$$empty"' EXIT && $(PYTHON) -m venv "$$empty/venv" && \
		"$$empty/venv/bin/python" -m pip install --quiet --disable-pip-version-check dist/*.whl --constraint constraints.txt && \
		cd "$$empty" && venv/bin/paceline train --preset tiny --nproc 2 --out run && venv/bin/paceline report run

clean:
	rm -rf $(VENV) build dist site *.egg-info src/*.egg-info
