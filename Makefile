# `make report` and `make test` set up what they need in .venv and run. PYTHON chooses the
# interpreter (3.11 or newer), WORKERS the number of test processes, FUZZ_SECONDS how long `make fuzz`
# looks.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
FUZZ_SECONDS ?= 600

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: report figures test test-all fuzz mutation docs lint types format readme wheel clean

## The main job, on the embedded sample: writes ./report.
report: $(VENV)/installed
	$(BIN)/kvq report --out report

## Every figure of paper_figures, as PDF, PNG and CSV, in ./figures.
figures: $(VENV)/installed
	$(BIN)/python -m paper_figures --out figures

## What CI runs: style, types, tests.
test: lint types
	$(PYTEST)

## The slow tests too, and those that need a browser, a language model or a GPU, where there is one.
test-all: lint types
	$(PYTEST) -m ""

## The site of docs/, in ./site, with warnings as errors (which `--quiet` would not count).
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

## The property tests of tests/fuzz, again and again with other seeds until FUZZ_SECONDS have passed
## or one fails. A failure prints its smallest case and the line that plays it again; the folder
## .hypothesis remembers it, so the next run of any kind begins with it.
fuzz: $(VENV)/installed-dev
	@end=$$(( $$(date +%s) + $(FUZZ_SECONDS) )); \
	while [ $$(date +%s) -lt $$end ]; do HYPOTHESIS_PROFILE=long $(PYTEST) --timeout 3600 tests/fuzz \
	|| exit 1; done

## Whether a test fails for each of some 370 small faults in the arithmetic: some twenty minutes.
mutation: $(VENV)/installed-dev
	$(BIN)/python -m tests.mutation --jobs $(WORKERS) --out results/mutation.json

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## Rewrite the tables of modes in the README and in the guide.
readme: $(VENV)/installed
	$(BIN)/kvq modes --into README.md --into docs/guide/modes.md

## The source distribution and the wheel, in ./dist.
wheel: $(VENV)/installed-dev
	$(BIN)/python -m build

clean:
	rm -rf $(VENV) build dist report figures site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml constraints.txt
	@echo "installing kvq into $(VENV) (once; minutes, if torch has to be downloaded)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing what the tests need into $(VENV) (once)"
	$(PIP) -e '.[dev,hf]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	@echo "installing what the site needs into $(VENV) (once)"
	$(PIP) -e '.[docs]'
	touch $@
