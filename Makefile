# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv, installs with the pinned versions, and is quick when everything is there.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
UV := $(shell command -v uv 2>/dev/null)

ifdef UV
# uv does not read pip's settings; with the same links both find the same torch.
INSTALL := UV_FIND_LINKS="$$PIP_FIND_LINKS" VIRTUAL_ENV=$(CURDIR)/.venv uv pip install --quiet
else
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.PHONY: demo test test-gpu test-quick test-long test-matrix check docs package format clean

demo: .venv/.demo
	$(BIN)/cadenza demo

LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check .
# A caller may forbid cached bytecode: hundreds of processes would then compile the package anew. Tests fork thousands of
# processes: with huge pages of memory each fork takes a third of the time.
PYTHON_OF_TESTS := PYTHONDONTWRITEBYTECODE= GLIBC_TUNABLES=glibc.malloc.hugetlb=1 OMP_NUM_THREADS=1 $(BIN)/python
TOOK = code=$$?; echo "make $@ took $$((SECONDS / 60)) min $$((SECONDS % 60)) s"; exit $$code

# mypy is run by tests/contracts/test_typing.py, beside the other tests. What fails is run once more, alone.
test: .venv/.dev
	@echo "Lint, types and all tests: about 8 minutes on two cores. Failures appear as they come. A quick form: make test-quick"
	@$(LINT) && $(PYTHON_OF_TESTS) tests/suite.py; $(TOOK)

# Beside these, tests that take minutes or need a daemon, and all seeds of property tests.
test-long: .venv/.dev
	@$(LINT) && $(PYTHON_OF_TESTS) tests/suite.py --long; $(TOOK)

# A part of the tests that touches every folder, for contributors.
QUICK := tests/hooks tests/status tests/optim tests/records tests/files tests/contracts/test_complete.py \
	tests/contracts/test_floors.py tests/contracts/test_words.py tests/engine/test_loop.py tests/engine/test_plan.py \
	tests/engine/test_gradients.py tests/callbacks/test_checkpoint.py tests/callbacks/test_conventions.py \
	tests/checkpoint/store/test_store.py tests/loading/test_tensors.py tests/sinks/test_console.py \
	tests/test_trainer.py tests/test_run.py

test-quick: .venv/.dev
	@echo "Lint and a part of the tests: under 60 seconds on two cores. All tests: make test"
	@$(BIN)/ruff check . && $(PYTHON_OF_TESTS) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(QUICK); $(TOOK)

# What needs a GPU, in under 100 seconds; each test is skipped where there is none.
test-gpu: .venv/.dev
	@CUBLAS_WORKSPACE_CONFIG=:4096:8 $(PYTHON_OF_TESTS) -m pytest tests/gpu tests/profiling/test_no_waiting.py -rs; $(TOOK)

check: .venv/.dev
	$(LINT) && $(BIN)/mypy

# The archives of a release, and the wheel in an empty environment; nothing is uploaded.
package: .venv/.dev
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m pytest tests/package

# Other versions of Python and torch, in small Debian trees; what this machine cannot run is said and left out.
test-matrix: .venv/.dev
	$(BIN)/python tests/matrix/run.py

# The site is written to site/; open site/index.html, no server is needed. The tests build it too, so CI needs no other step.
docs: .venv/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venvs .matrix dist

# torch first and by itself: asked for together with others, a newer build of several gigabytes could be taken.
.venv/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Cadenza needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Say: make PYTHON=python3.11 ...")'
	@echo "Setting up .venv; the first time this takes a minute or two."
ifdef UV
	test -x $(BIN)/python || uv venv --quiet --python "$$(command -v $(PYTHON))" .venv
else
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --upgrade "pip>=25.1"
endif
	$(INSTALL) "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	touch $@

.venv/.demo: .venv/.torch pyproject.toml
	$(INSTALL) -c constraints.txt -e ".[demo]"
	touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(INSTALL) -c constraints.txt -e ".[demo,all]" --group dev
	$(INSTALL) -c constraints.txt --no-deps timm mosaicml-streaming  # both ask for torchvision, and the recipes do without
	touch $@ .venv/.demo
