# make demo   is cosFormer as good as softmax on this machine, and what does it save? (report: runs/compare/report.html)
# make test   lint, types and the tests (make test-slow: those that take minutes)
# Both set everything up in .venv first; a second call is quick.

PYTHON ?= python3
BIN := .venv/bin
KERNEL := $(wildcard src/cosformer/ops/csrc/*) CMakeLists.txt
SECONDS_FUZZ ?= 300

.PHONY: demo test test-slow test-oldest lint bench fuzz clean

demo: .venv/ready
	$(BIN)/cosformer compare

test: lint
	$(BIN)/python -m pytest

test-slow: .venv/installed
	$(BIN)/python -m pytest -m slow

# The Hugging Face models and training with the oldest libraries they admit, which warn of what was new to them.
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest -o filterwarnings= tests/test_hf_*.py tests/test_train*.py tests/test_recipes.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The committed measurements, their pictures and the tables of docs/speed.md (about twenty minutes, on a quiet machine).
bench: .venv/installed
	rm -f benchmarks/operators.jsonl benchmarks/models.jsonl benchmarks/mixers.jsonl
	$(BIN)/cosformer bench --operators cosformer-paper cosformer softmax published --seconds 90 \
		--out benchmarks/operators.jsonl --plot docs/cost.svg
	$(BIN)/cosformer bench --models --out benchmarks/models.jsonl
	$(BIN)/cosformer bench --models cosformer --size base --work generating --contexts 64 \
		--weights float32 bfloat16 int8 --out benchmarks/models.jsonl
	$(BIN)/cosformer bench --mixers all --out benchmarks/mixers.jsonl --plot docs/mixers.svg
	$(BIN)/cosformer report benchmarks/operators.jsonl benchmarks/models.jsonl --page docs/speed.md

# Random calls of the kernel under the address, undefined-behaviour and thread sanitizers.
fuzz: .venv/installed
	$(BIN)/python tests/test_native.py $(SECONDS_FUZZ)

# The demo needs less than the tests: .venv/ready is what it runs with, .venv/installed everything.
PIP = $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.venv/ready: pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -m venv .venv
	$(PIP) '.[train,report]'
	touch $@

.venv/installed: pyproject.toml constraints.txt $(KERNEL)
	$(PYTHON) -m venv .venv
	$(PIP) '.[dev]'
	touch .venv/ready $@

.venv-oldest/installed: pyproject.toml constraints-oldest.txt $(KERNEL)
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-oldest build dist
