# forq: setup, run, test. `make` alone lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
SPARK := $(VENV)/.spark
BROWSER := $(VENV)/.browser
STATE_DIR ?= .state
CTL := $(BIN)/forqctl --socket $(STATE_DIR)/control.sock

# Tests start thousands of Python processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

# The real directories: ruff skips the two symbolic links in src/forq.
SOURCES := src supervisor workers tests etc benchmarks

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## create .venv with forq; quick if nothing changed

$(READY): setup.cfg setup.py pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "make: $(PYTHON) not found: install Python 3.11 or newer (on Debian: apt install python3 python3-venv), or choose one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version), but forq needs 3.11 or newer; choose another with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "make: $(PYTHON) has no venv module: on Debian apt install python3-venv, or choose another Python with PYTHON=..." >&2; exit 1; }
	@test -d src/forq/supervisor || { \
	  echo "make: src/forq/supervisor is not a link to a directory: clone with symbolic links (git config core.symlinks true)" >&2; exit 1; }
	@echo 'make: installing forq and its dependencies into $(VENV) (once, about half a minute)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

tools: $(TOOLS) ## add the test tools to .venv

$(TOOLS): $(READY)
	@echo 'make: installing the test tools into $(VENV) (once, half a minute)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,metrics,top,tracing,web]'
	@touch $@

$(SPARK): $(READY)
	@echo 'make: installing Spark and Java into $(VENV) (once, 500 MB, one or two minutes)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[pipeline,java]'
	@touch $@

# axe-core comes with a package whose dependency, Playwright, is not needed.
$(BROWSER): $(TOOLS)
	@echo 'make: installing Selenium and axe-core into $(VENV) (once)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check 'selenium>=4.20'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'axe-playwright-python>=0.1.8'
	@touch $@

run: setup ## start a supervisor with a sample app and two sample queues, in the foreground
	@printf '%s\n' 'To try, in another terminal:' \
	  '  make hello                                  enqueues a job of the sample app, and prints its result' \
	  "  $(CTL) push hello '{\"name\": \"world\"}'     prints the id of the job" \
	  '  $(CTL) status' \
	  "  $(CTL) job slow \$$($(CTL) push slow '{\"seconds\": 10}')" \
	  'Ctrl-C stops it.' ''
	@cd etc/examples && exec $(abspath $(BIN)/forq) run --config sample.toml --app greetings:app --state-dir $(abspath $(STATE_DIR))

hello: setup ## enqueue a job of the sample app and print its result, while `make run` runs
	@FORQ_STATE_DIR=$(abspath $(STATE_DIR)) $(BIN)/python etc/examples/greetings.py

demo: setup ## a guided tour in about two minutes: kill -9, daemons, timeouts, rates, audit (ARGS=--fast: no pauses; --no-audit: no Spark)
	@$(if $(findstring --no-audit,$(ARGS)),,$(MAKE) --no-print-directory $(SPARK) || echo 'make: continuing without Spark' >&2)
	@$(BIN)/python etc/demo/tour.py $(ARGS)

reference: tools $(SPARK) settings ## generate man pages, completion and docs/reference from the declared commands and settings
	$(BIN)/python etc/reference.py

settings: setup ## generate etc/forq.toml and docs/reference/settings.md from the table of settings
	$(BIN)/python etc/write_settings.py

# In parallel, because most tests wait for processes.
test: tools ## everything but Spark; must pass before a commit (7 minutes on two cores)
	@$(MAKE) --no-print-directory -j3 unit-apart unit-forking checks

test-all: tools $(SPARK) ## the same with more examples, Spark, a browser, and the oldest Redis, redis-py and Django; run by CI (25 minutes)
	@FORQ_TEST_THOROUGH=1 $(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory spark
	@$(MAKE) --no-print-directory test-web
	@$(MAKE) --no-print-directory redis-old
	@$(MAKE) --no-print-directory redis-py-old django-old

checks: tools # lint, types, imports, wheel
	@MAKEFLAGS= $(HELD_BACK) $(MAKE) --no-print-directory lint types imports wheel

lint: tools ## ruff (rules and format), and luacheck if it is installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	@command -v luacheck >/dev/null || echo 'make: skipped the Lua library: luacheck is not installed (on Debian: apt install lua-check)'
	@command -v luacheck >/dev/null || exit 0; \
	$(BIN)/python -c 'from forq.broker.scripts import script; print(script("turn").library.partition("\n")[2], end="")' | luacheck --quiet -

# Without Spark, only `make test-all` checks the code that uses it.
ON_SPARK := (^|/)pipeline/

types: tools ## mypy --strict
	$(BIN)/mypy $(if $(wildcard $(SPARK)),,--exclude '$(ON_SPARK)')

imports: tools ## check the import contracts
	$(BIN)/lint-imports

HELD_BACK := tests/support/drive/held_back.sh
# Tests mostly wait for processes: two more pytest workers than cores keep the machine busy.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 7 ? n + 2 : 8)))
# These fork in the test's own process. pytest-xdist has threads, whose locks could be held at the fork.
FORKING := tests/supervisor tests/workers tests/services tests/procs tests/output tests/ctl

unit: tools ## pytest, without Spark and the slow suites (WORKERS=n: pytest workers in parallel)
	@$(MAKE) --no-print-directory -j2 unit-apart unit-forking

unit-apart: tools
	$(BIN)/pytest -m 'not slow' -n $(WORKERS) --dist worksteal --ignore=tests/pipeline --ignore=tests/web/browser $(addprefix --ignore=,$(FORKING))

unit-forking: tools
	@$(HELD_BACK) $(BIN)/pytest -q -p no:cacheprovider -m 'not slow' $(FORKING)

spark: tools $(SPARK) ## pytest for the Spark pipeline
	$(BIN)/pytest -m 'not slow' -p no:cacheprovider tests/pipeline

test-web: tools $(BROWSER) ## the dashboard in headless Chromium, which root on Debian gets installed: every page, live, keyboard, accessibility (2 minutes)
	@tests/support/drive/chromium.sh || exit 0; \
	$(BIN)/pytest -m 'not slow' -p no:cacheprovider tests/web/browser

screenshots: tools $(BROWSER) ## a PNG of every page of the dashboard, light and dark, wide and narrow, in .screenshots (DOCS=1: those of docs/guide)
	@tests/support/drive/chromium.sh || exit 0; \
	$(BIN)/python -m tests.web.browser.screenshots $(if $(DOCS),--docs docs/guide,.screenshots)

kills: tools ## KILLS=1000 kill -9 at random times while JOBS=50000 jobs run (SEED=n repeats a run)
	FORQ_TEST_KILLS=$(or $(KILLS),1000) FORQ_TEST_JOBS=$(or $(JOBS),50000) FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 3600 tests/end_to_end/test_random_kills.py -k under_random_kills

chaos: tools $(SPARK) ## SECONDS=60 of every fault at once on two supervisors: nothing is lost, doubled or left (SEED=n, FAULTS=a,b, ARGS=--no-audit)
	$(BIN)/python -m tests.chaos.run --seed $(or $(SEED),$(shell $(PYTHON) -c 'import random; print(random.randrange(1, 10**6))')) \
	  --seconds $(or $(SECONDS),60) --faults '$(FAULTS)' $(ARGS)

partition: tools ## an 18 s network partition during a 25 s job, two supervisors: it runs once (needs root, for network namespaces)
	$(BIN)/pytest -s --timeout 300 tests/end_to_end/test_late_requests.py -k partition

redis-old: tools ## the broker's tests and end-to-end smoke tests on Redis 7.0, the oldest supported version
	@server=$$(tests/support/drive/redis70.sh $(VENV)/redis-7.0) || exit 0; \
	echo "make: on $$($$server --version)"; \
	FORQ_TEST_SERVER=$$server $(BIN)/pytest -q -m 'not slow' -n $(WORKERS) --dist worksteal tests/broker tests/bridge \
	  tests/end_to_end/test_first_steps.py tests/end_to_end/test_redis_acl.py tests/end_to_end/test_releases.py tests/end_to_end/test_results.py \
	  tests/end_to_end/test_full_server.py tests/supervisor/test_embedded.py

# The oldest supported versions of packages, for the two targets below.
OLDEST := $(VENV)/oldest
REDIS_PY_TESTS := tests/broker/test_redis_py.py tests/broker/test_connection.py tests/broker/test_faults.py tests/end_to_end/test_first_steps.py

$(OLDEST)/bin/pytest: $(READY)
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' 'redis==6.4.0' 'django==4.2.*'
	@touch $@

redis-py-old: tools $(OLDEST)/bin/pytest ## connection and end-to-end smoke tests on redis-py 6.4, the oldest supported version, with and without hiredis
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check 'hiredis>=3'
	$(OLDEST)/bin/pytest -q -m 'not slow' -n $(WORKERS) --dist worksteal $(REDIS_PY_TESTS)
	@$(OLDEST)/bin/python -m pip uninstall --quiet --yes hiredis
	$(OLDEST)/bin/pytest -q -m 'not slow' -n $(WORKERS) --dist worksteal $(REDIS_PY_TESTS)

django-old: tools $(OLDEST)/bin/pytest ## the tests of forq.contrib.django on Django 4.2, the oldest supported version
	$(OLDEST)/bin/pytest -q -m 'not slow' -n $(WORKERS) --dist worksteal tests/contrib/django tests/examples/test_django_example.py

mutants: tools ## remove each guard of the Lua library in turn: some test must fail
	$(BIN)/pytest -q --timeout 600 tests/broker/test_mutants.py

trees: tools ## handlers that start daemons, 20 times each: delete, shutdown and kill -9 leave no process
	FORQ_TEST_TREES=20 $(BIN)/pytest --timeout 1800 tests/end_to_end/test_process_deaths.py -k "no_process"

fire: tools ## 50,000 dispatches of 100 ids and 10,000 permanent failures while processes are killed (SEED=n)
	FORQ_TEST_DISPATCHES=50000 FORQ_TEST_FAILURES=10000 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 1800 tests/end_to_end/test_singletons_under_kills.py

flows: tools ## 1,000 flows of 23 jobs and 2,000 batches, while processes, supervisors and the server are killed: each ends exactly once (N=count, SEED=n)
	FORQ_TEST_FLOWS=$(or $(N),1000) FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 3600 tests/end_to_end/test_flows_under_kills.py

deploys: tools ## 20 restarts, three of them with broken code, while 500 jobs a second arrive: none is interrupted, lost or delayed
	FORQ_TEST_DEPLOYS=20 FORQ_TEST_PER_SECOND=500 $(BIN)/pytest -s --timeout 600 tests/end_to_end/test_deploys.py

outbox: tools ## 1,000 orders of a Django project while Redis is restarted and deliverers are killed at every step: each gets its job exactly once (SEED=n)
	FORQ_TEST_ORDERS=1000 FORQ_TEST_SECONDS=60 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 900 tests/contrib/django/test_outbox_outages.py

releases: tools ## 1,000 awaiters, 20,000 releases while processes are killed, 10,000 items that expire (SEED=n)
	FORQ_TEST_AWAITED=1000 FORQ_TEST_RELEASES=20000 FORQ_TEST_AGING=10000 FORQ_TEST_LATE=0.2 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 1800 tests/end_to_end/test_releases.py

bridge-fire: tools ## 20,000 jobs for five external workers in two languages; workers and bridge are killed and frozen at random (SEED=n)
	FORQ_TEST_BRIDGE_JOBS=$(or $(JOBS),20000) FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 7200 tests/end_to_end/test_bridge_workers_killed.py

ticks: tools ## a tick per second for 120 s on three supervisors that are killed and frozen: one job per tick (SEED=n)
	FORQ_TEST_TICKS_SECONDS=120 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 600 tests/end_to_end/test_schedules.py -k killed_and_frozen

limits: tools ## 50 jobs per second for 20 s over two supervisors: the rate, the burst, the cost of waiting
	FORQ_TEST_RATE_SECONDS=20 $(BIN)/pytest -s --timeout 300 tests/end_to_end/test_limits.py

delayed: tools ## 100,000 delayed jobs over 60 s, for idle and busy workers and in bursts: none early, 99% within 20 ms (SEED=n)
	FORQ_TEST_DELAYED=100000 FORQ_TEST_DELAYED_SECONDS=60 FORQ_TEST_LATE=0.02 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 600 tests/end_to_end/test_delayed_jobs.py

test-systemd: tools ## forq under a real systemd, booted in namespaces: start, watchdog, stop, kill -9, socket (needs root)
	$(BIN)/pytest -s -v --timeout 300 tests/supervisor/test_systemd_units.py tests/end_to_end/test_systemd.py

model: ## check the model of claim, settle and recover, with the fence and without (needs spin and gcc)
	docs/design/model/check.sh

fuzz: tools ## a million inputs for the control socket and for a bridge, and 10,000 connections (N=count, SEED=n)
	FORQ_TEST_FUZZ=$(or $(N),1000000) FORQ_TEST_FUZZ_CONNECTIONS=10000 FORQ_TEST_SEED=$(or $(SEED),0) \
	  $(BIN)/pytest -s --timeout 7200 tests/end_to_end/test_fuzz.py

flood: tools ## a gigabyte of output from one handler, raw and printed, while others keep running
	FORQ_TEST_FLOOD_MB=1000 $(BIN)/pytest -s --timeout 600 tests/end_to_end/test_logs.py -k flood

isolation: tools ## a fork bomb, a leak and a gigabyte of output in one queue, three times: the effect on another queue
	FORQ_TEST_THOROUGH=1 FORQ_TEST_ISOLATION_ROUNDS=3 FORQ_TEST_FLOOD_MB=1000 $(BIN)/pytest -s --timeout 900 tests/end_to_end/test_isolation.py

exits: tools ## every exit code and signal from a handler, three times each: the effect on another queue and the supervisor
	FORQ_TEST_EXITS=3 $(BIN)/pytest -s --timeout 3600 tests/end_to_end/test_exit_codes.py -k no_exit_code

cluster: tools $(SPARK) ## the pipeline under spark-submit, on a standalone Spark cluster (a master and two workers on loopback)
	$(BIN)/pytest -s --timeout 900 tests/pipeline/test_cluster.py

redis-cluster: tools ## forq on a real Redis Cluster, and with sentinels, replicas and TLS: failovers under load, and the broker's tests
	$(BIN)/pytest -s --timeout 300 tests/servers
	FORQ_TEST_REDIS=cluster $(BIN)/pytest -q --timeout 300 tests/broker --ignore tests/broker/test_mutants.py

bench: tools ## forq against twelve other queues, each in its newest version: tables and a chart in benchmarks/.results (70 minutes)
	$(BIN)/python benchmarks/compare.py

bench-quick: tools ## the same with few jobs and one round, in less than 5 minutes (plus the time to download the peers, once)
	$(BIN)/python benchmarks/compare.py --quick

bench-tables: tools ## copy the tables and the chart of the last `make bench` to docs/design/performance.md and the README
	$(BIN)/python benchmarks/tables.py benchmarks/.results/results.json --write docs/design/performance.md
	$(BIN)/python benchmarks/tables.py benchmarks/.results/results.json --write README.md
	cp benchmarks/.results/results.png docs/design/performance.png

bench-scale: tools ## 1,000 queues on one supervisor, 1,000,000 jobs, 100,000 due at once, 10 supervisors
	$(BIN)/python benchmarks/scale.py

bench-prototype: tools ## the upper limit of one Python consumer: a bare loop without features
	$(BIN)/python benchmarks/prototype.py

bench-drain: tools ## drain rate of one worker process against RQ, Huey and Dramatiq
	$(BIN)/python benchmarks/drain.py

bench-tasks: tools ## a typed task against a plain handler, and against Taskiq, Dramatiq and Celery; fails if the task is too slow
	$(BIN)/python benchmarks/tasks.py

bench-cores: tools ## jobs that compute: one process of a queue, one per CPU, and a multiprocessing pool
	$(BIN)/python benchmarks/cores.py

bench-layouts: tools ## four layouts of job records in Redis, compared
	$(BIN)/python benchmarks/layouts.py

bench-backlog: tools ## cost of enqueue and claim with 10, 10k and 1M waiting jobs
	$(BIN)/python benchmarks/backlog.py

bench-idle: tools ## CPU, Redis commands and memory of 50 idle queues
	$(BIN)/python benchmarks/idle.py

workload: tools ## 150 workers in 11 queues, jobs from 1 ms to 20 s, 20 kills, against a simulation without overhead (SEED=n)
	$(BIN)/python benchmarks/workload.py --seed $(or $(SEED),1)

bench-metrics: tools ## the cost of metrics per no-op job, and of a scrape of 1,000 queues
	$(BIN)/python benchmarks/metrics.py

bench-dashboard: tools ## a drain beside 50 live pages, the dashboard's commands, and its page times with a million jobs
	$(BIN)/python benchmarks/dashboard.py

bench-flows: tools ## a batch of 100,000 members: memory, rates, time until its callback; drain with and without remembered ends
	$(BIN)/python benchmarks/flows.py

bench-pipeline: tools $(SPARK) ## a million events: ingest with a driver that is killed, audit, sink; and the cost of the journal
	$(BIN)/python benchmarks/pipeline.py

bench-exec: tools ## jobs of one Node.js process: an exec: handler against BullMQ (needs node and npm)
	$(BIN)/python benchmarks/exec_node.py

spec-report: tools $(SPARK) ## pytest, and a list of the tests for each behaviour of docs/design/spec.md
	$(BIN)/pytest -q -m 'not slow' --spec-report

fault-report: tools $(SPARK) ## the tests of docs/design/faults.md, listed by fault
	$(BIN)/pytest -q -m 'fault and not slow' --fault-report

wheel: tools ## build the wheel, install it in a clean venv, run a job there
	PYTHON=$(BIN)/python tests/support/drive/wheel_smoke.sh

format: tools ## format and fix the code with ruff
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean: ## remove build products and caches, but not .venv and .state
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
