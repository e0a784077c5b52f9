SHELL := /bin/bash
PYTHON ?= python3
export STREAM_ASSETS_CACHE := $(CURDIR)/.cache
export DAGSTER_DISABLE_TELEMETRY := 1
# As in tools/install.
export UV_NATIVE_TLS := true
BIN := .venv/bin
READY := .venv/ready
CLASSES := .cache/spark-classes.jsa
PYTEST := $(BIN)/pytest -p no:cacheprovider
# Processes that share the tests; each has a Spark session, which takes 2 GB. On 2 cores a third one works while the
# others wait for brokers.
WORKERS ?= 3

.PHONY: help setup demo demo-airflow dev pictures docs bench kafka redis debezium test test-all checks lint types tests bytecode soak format lock pins audit test-versions clean

help: ## Show this help
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

setup: $(READY) ## Make .venv with everything in it, and fetch the Delta jars

$(READY): requirements-dev.txt pyproject.toml tools/setup
	@PYTHON="$(PYTHON)" tools/setup
	@touch $@

demo: setup ## 100,000 messages from a file into Delta under Dagster, with two runs killed
	@$(BIN)/stream-assets demo

demo-airflow: setup ## The same on a real Airflow, in .demo/airflow: the messages schedule a DAG, and two of its tasks are killed
	@$(BIN)/python -m tests.support.airflow_demo

dev: setup ## Open the Dagster UI on the demo's data (http://127.0.0.1:3000)
	@test -f .demo/orders.ss || echo "no demo data yet: the sensor will say so until you run make demo"
	@mkdir -p .demo && chmod 700 .demo && mkdir -p -m 700 .demo/dagster
	@private="$$($(BIN)/python -c 'from stream_assets.cli.demo import temporary_folder; print(temporary_folder())')" \
		&& TMPDIR="$$private" DAGSTER_HOME=$(CURDIR)/.demo/dagster \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dg dev -w workspace.yaml -h 127.0.0.1

pictures: setup ## The pictures of the UIs of Dagster and Airflow in docs/images, by the tests that look at its pages
	@tools/browser
	STREAM_ASSETS_PICTURES=1 $(PYTEST) -m browser tests/stream_assets tests/examples $(ARGS)

docs: setup ## The site of the documentation into .site; make docs ARGS="serve" shows it at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build --strict)

bench: setup ## How fast it is, beside its peers, into docs/benchmarks.md: an hour; ARGS="--scale 0.1 --only kafka --rounds 3"
	@$(BIN)/python -m benchmarks $(ARGS)

# PORT= is another port; KEEP= is a folder that keeps the data for the next start.
SERVE = $(if $(PORT),--port $(PORT)) $(if $(KEEP),--keep $(KEEP))

kafka: setup ## A real Kafka broker at localhost:9092 for examples/kafka, until Ctrl-C; PORT=9093 KEEP=.kafka-data
	@$(BIN)/python -m tests.support.kafka_broker $(SERVE)

redis: setup ## A real Redis server at localhost:6379 for examples/redis, until Ctrl-C; PORT= and KEEP= as for kafka
	@$(BIN)/python -m tests.support.redis_server $(SERVE)

debezium: setup ## Postgres with a table, and Debezium into the broker of make kafka, for examples/customers, until Ctrl-C
	@tools/postgres
	@$(BIN)/python -m tests.support.debezium $(if $(PORT),--port $(PORT)) $(if $(BROKER),--broker $(BROKER))

test: checks tests ## Lint, types and the first tier of the tests: about ten minutes on 2 idle cores

test-all: checks bytecode ## The same with the second tier: long kill chains, the demo, the browser; ARGS="--durations=30"
	@tools/browser
	@tools/postgres
	$(PYTEST) -n $(WORKERS) --dist loadgroup $(ARGS)

lint: setup ## Ruff, formatting included, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup ## mypy, strict; stream_airflow, and only its errors, with the packages of an environment with Airflow
	$(BIN)/mypy
	python="$$(tools/airflow)" && $(BIN)/mypy --python-executable "$$python" --cache-dir .mypy_cache/airflow --follow-imports silent -p stream_airflow

# None of the three keeps two cores busy.
checks: setup
	@$(MAKE) --no-print-directory --output-sync --jobs 2 lint types $(CLASSES)

# Two fifths of the CPU that a JVM of Spark needs until its first commits go into reading classes.
$(CLASSES): $(READY)
	$(BIN)/python -m tests.support.class_archive

# Where PYTHONDONTWRITEBYTECODE is set, each of the processes that tests start would compile all of it.
bytecode: setup
	@$(BIN)/python -m compileall -q -j 2 stream_consumers spark_jobs sensors stream_assets stream_airflow tests

tests: setup bytecode $(CLASSES) ## The first tier of the tests
	$(PYTEST) -n $(WORKERS) --dist loadgroup -m "not slow" $(ARGS)

soak: setup ## The property and model tests with many random examples: 20 times as many, or SOAK_FACTOR=100
	HYPOTHESIS_PROFILE=soak $(PYTEST) -m "hypothesis and not spark" --timeout=0 $(ARGS)

format: setup ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: setup ## Write requirements-dev.txt anew: names, versions and hashes
	$(BIN)/uv pip compile -q --universal --generate-hashes --python-version 3.10 --no-header --no-annotate --extra dev -o requirements-dev.txt pyproject.toml

pins: setup ## Write spark_jobs/jars.sha256 anew: the digests of the jars that are downloaded
	$(BIN)/python tools/pin_jars.py

audit: setup ## Ask for known vulnerabilities of the packages of requirements-dev.txt; needs the network
	$(BIN)/uv tool run pip-audit --requirement requirements-dev.txt --require-hashes --disable-pip

test-versions: setup ## The first tier on the RESOLUTION=lowest or highest versions that pyproject.toml allows
	tools/test-versions $(RESOLUTION) $(ARGS)

clean: ## Remove the demo's data and caches, but not .venv
	rm -rf .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis spark-warehouse metastore_db derby.log
