# holdfast: `make` lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup up demo docs check format test test-pythons quick test-all model test-races test-pgbouncer bench bench-worker bench-pgbouncer bench-service bench-peers fuzz torture torture-mutants mutation soak requirements schema clean

PYTHON ?= python3
BIN := .venv/bin
STORE_TESTS := tests/store tests/crash/test_crash.py
SHORT_TESTS := tests/unit tests/store tests/runner/test_attempt_folder.py tests/worker/test_functions.py tests/worker/test_function_stops.py tests/service/test_client.py tests/service/test_metrics.py
# Where it is set, each of the thousands of processes that the tests start would compile holdfast again.
unexport PYTHONDONTWRITEBYTECODE
SUPERVISOR := src/holdfast/runner/supervisor/holdfast-supervisor

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 26

setup: .venv/.ready $(SUPERVISOR) ## Make the virtual environment and, as root, install Postgres, PgBouncer, Docker, Spin, faketime, btrfs-progs, curl, strace and systemd-analyze if they are missing
	@scripts/need-postgres
	@scripts/need-pgbouncer
	@scripts/need-docker
	@scripts/need-faketime
	@scripts/need-btrfs
	@scripts/need-curl
	@scripts/need-systemd
	@scripts/need-spin
	@scripts/need-strace

.venv/.base: REQUIREMENTS := run
.venv/.ready: REQUIREMENTS := dev

# What holdfast needs to run, and what it takes to work on it; whoever has the second has the first.
.venv/.base .venv/.ready: pyproject.toml constraints.txt $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "holdfast needs Python 3.11 or newer: set PYTHON=…"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "cannot make a virtual environment: install Debian's python3-venv"; exit 1; }
	scripts/install .venv $(REQUIREMENTS)
	@touch .venv/.base $@

$(SUPERVISOR): $(wildcard $(addprefix $(dir $(SUPERVISOR)), *.c *.h build.py protocol.py)) | .venv/.base
	$(BIN)/python -m holdfast.runner.supervisor.build

up: .venv/.base $(SUPERVISOR) ## Run everything here: server, worker and SQLite in ./holdfast-data, on http://127.0.0.1:7070
	@$(BIN)/holdfast up

demo: .venv/.base $(SUPERVISOR) ## A story in under a minute: submit, follow, kill -9 the worker, see the adoption, cancel, a lane that blocks
	@$(BIN)/python -m demo

check: .venv/.ready ## Lint, format check, types, layers, words, and that docs/behaviours.md and the tests agree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/python -m scripts.behaviours --check
	$(BIN)/python -m scripts.glossary

format: .venv/.ready ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: setup check ## Everything: set up, check, all tests on SQLite and a real Postgres
	@scripts/need-compiler
	$(BIN)/python -m scripts.with_mounted_root $(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder --durations 25 # tests mostly wait: six at a time fill two processors
	@$(MAKE) --no-print-directory test-pythons

test-pythons: .venv/.ready $(SUPERVISOR) ## A short tier of the tests on every other Python from 3.11 to 3.14 that is found: under a minute each
	@scripts/test-pythons $(BIN)/python -q -n 3 --dist loadfile -k "not postgres and not among_ and not _races and not test_stateful and not test_submit_rules" $(SHORT_TESTS)

quick: check $(SUPERVISOR) ## Checks, and every test that needs neither Postgres nor Docker nor long processes: under a minute
	$(BIN)/python -m pytest -q -m quick -n 2 --dist worksteal

test-all: test test-races test-pgbouncer mutation torture-mutants ## Also what takes too long for `make test`: long races, PgBouncer, mutation testing, builds without a safeguard, five minutes of torture on each store: about three hours
	@$(MAKE) --no-print-directory torture SECONDS=300 STORE=sqlite RUNNERS=process,pipeline,docker
	@$(MAKE) --no-print-directory torture SECONDS=300 STORE=postgres RUNNERS=process,pipeline,docker

model: ## Check the model of the lease protocol with Spin, and that every way to break it is caught
	@scripts/need-spin
	@$(PYTHON) -m model.check

test-races: setup ## The two great races (lanes, dependencies) with 10,000 rounds each on both stores: some minutes
	HOLDFAST_TEST_ROUNDS=10000 $(BIN)/python -m pytest tests/store/test_lane_races.py tests/store/test_dependency_races.py -k "racing_a_finish or racing_the_parents_end"

test-pgbouncer: setup ## The tests of the store on Postgres once more, through PgBouncer in transaction mode: some minutes
	HOLDFAST_TEST_POOLER=1 $(BIN)/python -m pytest -n 2 --dist loadfile -k "not sqlite" $(STORE_TESTS)

bench: setup ## Store operations against raw SQL, claims in a crowd of millions, workers, containers, the service, the command line, pipelines, as ratios (fsync on; some minutes)
	@failed=; for part in store scale worker docker service cli pipelines; do $(BIN)/python -m bench.$$part || failed="$$failed $$part"; done; \
	test -z "$$failed" || { echo "below what is wanted:$$failed"; exit 1; }

bench-worker: setup ## Workers alone: throughput beside PgQueuer, pickup, processes, adoption, stops, output (some minutes)
	$(BIN)/python -m bench.worker

bench-pgbouncer: setup ## What PgBouncer in transaction mode costs: claim and finish through it against direct
	$(BIN)/python -m bench.pgbouncer

bench-service: setup ## The service: submits against a constant, bulks against the store, 1,000 followers of one job
	$(BIN)/python -m bench.service

bench-peers: setup ## holdfast beside nine peers (Node, Redis and a cache folder needed), written to docs/performance.md: hours; PARTS=drain PEERS=holdfast,graphile ROUNDS=1 JOBS=2000 OUT=folder for less
	@scripts/need-redis
	$(BIN)/python -m bench.peers $(if $(PARTS),--parts $(PARTS)) $(if $(PEERS),--peers $(PEERS)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(JOBS),--jobs $(JOBS)) $(if $(OUT),--out $(OUT))

fuzz: setup ## Requests made from the OpenAPI document, and sequences of them, on both stores as every role: an hour; STORES=sqlite ROLES=admin,viewer
	$(BIN)/python -m bench.fuzz $(if $(STORES),--stores $(STORES)) $(if $(ROLES),--roles $(ROLES))

docs: .venv/.ready ## Write the reference pages from the code, and the tests into docs/behaviours.md
	$(BIN)/python -m scripts.reference
	$(BIN)/python -m scripts.behaviours

torture: setup ## Real workers and servers under random faults, and a checker over what happened: SECONDS=60 SEED=… STORE=sqlite RUNNERS=process,pipeline,docker
	@$(BIN)/python -m torture --seconds $(or $(SECONDS),60) --store $(or $(STORE),sqlite) $(if $(RUNNERS),--runners $(RUNNERS)) $(if $(SEED),--seed $(SEED))

torture-mutants: setup ## Take one safeguard after the other out of holdfast: torture must catch each (some twenty minutes); BUILDS=… for some
	@$(BIN)/python -m torture.mutants $(BUILDS)

mutation: setup ## Mutation testing: COUNT=100 small faults in the store and the worker, drawn by SEED=1; the tests must notice each (under an hour)
	@$(BIN)/python -m scripts.mutation $(if $(SEED),--seed $(SEED)) $(if $(COUNT),--count $(COUNT))

soak: setup ## Half of the load that this machine carries, for HOURS=0.5; memory, files, connections and tables over time, a plot and a verdict
	@$(BIN)/python -m torture.soak --hours $(or $(HOURS),0.5) --store $(or $(STORE),postgres)

requirements: .venv/.ready ## Write requirements/*.txt from constraints.txt: the hashes of all wheels, from the package index
	$(BIN)/python -m scripts.requirements

schema: setup ## Write the rules of a submission for Postgres, raise the revisions of changed repeatable files, and write the dumped schemas that the tests compare with
	$(BIN)/python -m scripts.submission_rules
	$(BIN)/python -m scripts.revisions
	HOLDFAST_WRITE_SCHEMA=1 $(BIN)/python -m pytest -q tests/store/test_migrate.py -k "dumped or revision or released"

clean: ## Remove the virtual environment and caches
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .hypothesis .import_linter_cache $(SUPERVISOR)
