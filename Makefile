# A fresh clone needs Python 3.11+ and make; everything else goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export HF_HUB_DISABLE_TELEMETRY := 1
export TOKENIZERS_PARALLELISM := false
# workers, and the processes that tests start, compile nothing a second time
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install demo test test-docs test-methods test-engines test-deploy test-journeys test-packages test-others test-studies test-all bench lint house docs dist clean

help:
	@echo "make demo      train a small multimodal federation on generated data, and its server alone"
	@echo "make test      fast tests        make test-all   all tests"
	@echo "make test-docs tests of the documentation and of the tools"
	@echo "make test-packages  the wheel with the newest and with the oldest packages, in environments of their own"
	@echo "make bench     benchmarks        make lint       ruff and mypy"
	@echo "make gpu       a GPU against the CPU and plain PyTorch"
	@echo "make docs      the site          make dist       wheel and source archive, tested"

# two processes run the tests: forked after one has collected them; where a fork of torch is unsafe, each collects its own
WORKERS := $(if $(filter Linux,$(shell uname)),--workers 2,-n 2 --dist worksteal)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'polyfed needs Python 3.11 or newer; try: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

install: $(STAMP)

demo: install
	$(BIN)/polyfed demo

test: install
	$(BIN)/python -m pytest -q $(WORKERS) -m "not slow" --ignore=$(HOUSE)

# promises of pages and counts of tools, slow ones too; the wheel is among the journeys
test-docs: install
	$(BIN)/python -m pytest -q $(WORKERS) $(HOUSE)

# all tests, slow ones too, in parts that can run side by side: make -j 6 test-all
METHODS := $(addprefix tests/,algorithms aggregation losses models optim presets tasks)
ENGINES := $(addprefix tests/,engines faults runs)
HOUSE := tests/house

test-methods: install
	$(BIN)/python -m pytest -q $(WORKERS) $(METHODS)

test-engines: install
	$(BIN)/python -m pytest -q $(ENGINES)

test-deploy: install
	$(BIN)/python -m pytest -q tests/deploy

# from the first command to the last: real processes and packages, other folders, relative paths, kills
test-journeys: install
	$(BIN)/python -m pytest -q -rs tests/journeys --ignore=$(PACKAGES)

# the wheel with the newest and with the oldest version of every package that it requires, without constraints.txt; not in test-all
PACKAGES := tests/journeys/test_packages.py
test-packages: install
	rm -f dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist
	$(BIN)/python -m pytest -q -rs $(PACKAGES)

# every study in its smoke form, on the data sets and weights in POLYFED_DATA and POLYFED_WEIGHTS: hours, the first time
test-studies: install
	$(BIN)/python -m pytest -q -rs tests/papers/test_smoke.py

test-others: install
	$(BIN)/python -m pytest -q $(WORKERS) tests $(addprefix --ignore=,$(METHODS) $(ENGINES) $(HOUSE) tests/deploy tests/journeys)

test-all: export HYPOTHESIS_PROFILE := many
test-all: test-docs test-methods test-engines test-deploy test-journeys test-others

# all figures against their limits, in one table and in a record, of which make pages makes docs/reference/speed.md:
# about half an hour on two cores; exit status 1 if one lies outside its limit
bench: install
	$(BIN)/python benchmarks/all.py --record benchmarks/record.json

# a GPU against the CPU and a plain loop, into the record; one line where there is none
.PHONY: gpu
gpu: install
	$(BIN)/python benchmarks/all.py --plan gpu --record benchmarks/record.json

# memory by clients, averaging and recalls: three minutes
.PHONY: bench-short
bench-short: install
	$(BIN)/python benchmarks/all.py --plan short

# a deployment on this machine, its memory, and twenty kills: about half an hour on two cores
.PHONY: bench-deployed
bench-deployed: install
	$(BIN)/python benchmarks/all.py --plan deployed

lint: install
	$(BIN)/ruff check src papers tests benchmarks scripts
	$(BIN)/ruff format --check src papers tests benchmarks scripts
	$(BIN)/mypy

# code lines by room, whose figures fall to the counts, imports, duplicates, complexity, fields; make test holds them too
house: install
	$(BIN)/python scripts/house.py --write

# the site in site/, which opens without a server; its packages are installed the first time
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

# wheel and source archive in dist/, and both in environments of their own
dist: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest -q tests/journeys/test_wheel.py

clean:
	rm -rf dist site $(VENV) .mypy_cache .ruff_cache .pytest_cache

# a study: make results STUDY=papers/polyfed/knowledge.yaml DATA=... WEIGHTS=...; without STUDY: the list of studies
.PHONY: results
results: install
	$(BIN)/polyfed study $(if $(STUDY),run $(STUDY) $(if $(DATA),--data-dir $(DATA)) $(if $(WEIGHTS),--weights-dir $(WEIGHTS)),list)

# the queue of evidence: cells that the records of papers/ lack, from a clean clone of COMMIT, at the lowest priority
.PHONY: evidence
evidence: install
	$(BIN)/python scripts/evidence.py --jobs $(or $(JOBS),1) --commit $(or $(COMMIT),HEAD) $(if $(HOURS),--hours $(HOURS)) $(if $(DATA),--data-dir $(DATA)) $(if $(WEIGHTS),--weights-dir $(WEIGHTS)) $(if $(STUDY),--only $(STUDY)) $(if $(ROWS),--rows "$(ROWS)")

# takes over the records that the queue has written, and makes the pages
.PHONY: records
records: install
	$(BIN)/python scripts/evidence.py --take
	$(BIN)/python scripts/pages.py

# a row of your own in a board: make board BOARD=same ROW=mine METHOD=mymethod.Mine SET="algorithm.length=2" DATA=... WEIGHTS=...
.PHONY: board
board: install
	PYTHONPATH=.:$(PYTHONPATH) $(BIN)/python scripts/enter.py $(BOARD) --row "$(ROW)" --algorithm $(METHOD) $(foreach one,$(SET),--set "$(one)") $(if $(SCALE),--scale $(SCALE)) $(if $(JOBS),--jobs $(JOBS)) $(if $(DATA),--data-dir $(DATA)) $(if $(WEIGHTS),--weights-dir $(WEIGHTS))

# a drawn cell of each row of STUDY's record, or of all records, run again and compared with it
.PHONY: confirm
confirm: install
	$(BIN)/python scripts/confirm.py $(STUDY) --draw $(or $(DRAW),0) $(if $(DATA),--data-dir $(DATA)) $(if $(WEIGHTS),--weights-dir $(WEIGHTS))

# pages of papers/ and blocks of docs/ from the records in papers/, and the table of protections by method; FROM=runs/studies takes over earlier runs
.PHONY: pages
pages: install
	$(BIN)/python scripts/pages.py $(if $(FROM),--from $(FROM))
	$(BIN)/python scripts/protections.py
