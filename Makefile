# PYTHON chooses the interpreter. If it already has torch and pytest, it is used as it is and nothing is
# downloaded; otherwise a virtual environment is made in .venv.
PYTHON ?= python3
CC ?= cc
ARGS ?=

HAS_TORCH := $(shell $(PYTHON) -c "import torch, pytest" >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_TORCH),yes)
PY := $(PYTHON)
READY :=
else
PY := .venv/bin/python
READY := .venv/ready
endif

RUN := PYTHONPATH=$(CURDIR)/python:$(CURDIR)/tests $(PY)
PYTEST := $(RUN) -m pytest

C_TESTED := csrc/te_dims.c csrc/te_parse.c csrc/te_slots.c csrc/te_schema.c csrc/te_dtype.c csrc/te_infer.c csrc/te_status.c csrc/te_table.c
C_FLAGS := -std=c11 -D_GNU_SOURCE -DTE_ROWS_ONLY -g -Wall -Wextra -Werror -Ipython/te_ops/include -Icsrc
C_FILES := $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh' 2>/dev/null)

.PHONY: help demo test test-full ctest asan bench lint format docs build clean

help:
	@echo "make demo       set up, build, train a small language model eager and compiled"
	@echo "make test       the fast tests"
	@echo "make test-full  all tests; meant for a machine with a GPU"
	@echo "make ctest      the C unit tests"
	@echo "make asan       C tests and CPU operator tests under AddressSanitizer and UBSan"
	@echo "make bench      benchmarks (ARGS='--quick')"
	@echo "make lint       ruff, clang-format, mypy, compiler warnings as errors"
	@echo "make format     lets ruff and clang-format rewrite the sources"
	@echo "make docs       regenerates docs/operators.md from the table"

.venv/ready: pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	@echo "installing torch and the development tools (a few minutes)"
	.venv/bin/python -m pip install --quiet -e '.[dev]'
	@touch $@

build: $(READY)
	@$(PY) setup.py -q build_ext --inplace

demo: build
	$(RUN) examples/train_gpt.py $(ARGS)

test: build
	$(PYTEST) -m "not full" $(ARGS)

test-full: build
	$(PYTEST) $(ARGS)

ctest:
	@mkdir -p build
	$(CC) $(C_FLAGS) -O1 tests/csrc/*.c $(C_TESTED) -o build/ctest -lm
	build/ctest

# Leaks are the business of tests that watch memory: a Python process looks leaky to LeakSanitizer.
asan: $(READY)
	@mkdir -p build
	$(CC) $(C_FLAGS) -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	  tests/csrc/*.c $(C_TESTED) -o build/ctest-asan -lm
	build/ctest-asan
	TE_OPS_CUDA=0 TE_OPS_SANITIZE=1 $(PY) setup.py -q build --build-lib build/asan
	LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0 PYTHONPATH=$(CURDIR)/build/asan:$(CURDIR)/tests \
	  $(PY) -m pytest tests/ops -m "not full" -k "not memory_flat and not overflow" $(ARGS)

bench: build
	$(RUN) benchmarks/bench_linear.py $(ARGS)
	$(RUN) benchmarks/bench_linear_fp8.py $(ARGS)
	$(RUN) benchmarks/bench_quantize.py $(ARGS)
	$(RUN) benchmarks/bench_norm.py $(ARGS)
	$(RUN) benchmarks/bench_activation.py $(ARGS)

lint: build
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	CF=$$(test -x .venv/bin/clang-format && echo .venv/bin/clang-format || echo clang-format); \
	  $$CF --dry-run -Werror $(C_FILES)
	$(RUN) docs/generate.py --check

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	CF=$$(test -x .venv/bin/clang-format && echo .venv/bin/clang-format || echo clang-format); $$CF -i $(C_FILES)

docs: build
	$(RUN) docs/generate.py

clean:
	rm -rf build dist .venv python/te_ops/*.so python/*.egg-info
