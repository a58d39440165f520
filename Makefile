# One command a job; `make setup` is done by whichever job comes first.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Only what requirements/*.txt name, and only if its hash is the one there; `make lock` writes them. What comes as source
# is built by what build.txt has put into the same environment: else pip would fetch a builder that nobody locked.
PIP    := -m pip install --quiet --disable-pip-version-check --no-build-isolation --use-pep517
LOCKED := $(PIP) --require-hashes -r
# An environment of its own for what works on the project from outside.
TOOLS  := build/tools

# The compiled copy, if today's sources have one.
FAST   := PYTHONPATH="$$($(BIN)/python tools/compiled.py --path)"

.PHONY: help setup run cluster fast test check bench sim fuzz soak docs proto lock audit sbom fmt clean

help:            ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: $(STAMP)  ## make .venv with everything in it

$(STAMP): pyproject.toml requirements/build.txt requirements/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || test -x $(BIN)/python || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing Agent-Reach and its tools into $(VENV) (half a minute) …"
	@$(BIN)/python $(LOCKED) requirements/build.txt
	@$(BIN)/python $(LOCKED) requirements/dev.txt
	@$(BIN)/python $(PIP) --no-deps --editable .
	@touch $@

$(VENV)/.bench: $(STAMP) requirements/bench.txt
	@$(BIN)/python $(LOCKED) requirements/bench.txt
	@touch $@

$(TOOLS)/.installed: requirements/tools.txt
	@test -x $(TOOLS)/bin/python || $(PYTHON) -m venv $(TOOLS)
	@$(TOOLS)/bin/python $(LOCKED) requirements/tools.txt
	@touch $@

run: $(STAMP)    ## a node with demo agents, calls you can watch; Ctrl-C ends it
	@$(FAST) $(BIN)/reach demo

cluster: $(STAMP) ## 3 etcd members, 3 nodes and agents on loopback, shown live; Ctrl-C ends it; ARGS="--first-port 8070"
	@$(FAST) $(BIN)/python tools/cluster.py $(ARGS)

fast: $(STAMP)   ## compile the hot path (needs a C compiler); `make run` and `make bench` then use it
	@$(BIN)/python tools/compiled.py

# Hundreds of processes are started: none but the first shall compile our sources, wherever that is forbidden.
test: $(STAMP)   ## every test a fresh machine can run (under 10 minutes on 2 cores)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

check: $(STAMP)  ## format, lint, types, layers, generated code and pages (under a minute)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python tools/genproto.py --check
	@$(BIN)/python tools/gendocs.py --check

bench: $(VENV)/.bench ## ratios to plain gRPC and NATS, compiled if it can be; AGAINST=<commit> compares two trees
	@$(BIN)/python tools/bench.py $(if $(QUICK),--quick) $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

sim: $(STAMP)    ## 300 seeds of the whole mesh on virtual time, with faults (3 minutes at most); SEEDS=1-1000, ARGS=--help
	@$(BIN)/python tools/sim.py --seeds $(or $(SEEDS),1-300) $(ARGS)

$(VENV)/.fuzz: $(STAMP) requirements/fuzz.txt
	@$(BIN)/python $(LOCKED) requirements/fuzz.txt
	@touch $@

fuzz: $(VENV)/.fuzz ## anything at all at parsers, link, core and SDK for a minute; SECONDS=600, ARGS="core --seed 7"
	@$(BIN)/python -m tools.fuzz --seconds $(or $(SECONDS),60) $(ARGS)

soak: $(STAMP)   ## the long cases in their full length
	@REACH_SOAK=1 $(BIN)/python -m pytest -m soak --timeout 3600

docs: $(STAMP)   ## write docs/reference/ from the code again
	@$(BIN)/python tools/gendocs.py

proto: $(STAMP)  ## generate the Python code of proto/ again
	@$(BIN)/python tools/genproto.py

lock: $(TOOLS)/.installed ## write requirements/*.txt again after a change of pyproject.toml; ARGS=--upgrade for newer versions
	@$(TOOLS)/bin/python tools/lock.py $(ARGS)

audit: $(TOOLS)/.installed ## look up known holes in what is locked (network); ARGS=--strict if it must not be skipped
	@$(TOOLS)/bin/python tools/audit.py $(ARGS)

sbom: $(STAMP)   ## the bill of materials (CycloneDX) of what is locked, in build/sbom
	@$(BIN)/python -m tools.sbom

fmt: $(STAMP)    ## format and mend what can be mended
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:           ## remove .venv and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
