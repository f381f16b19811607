# From a fresh clone: 'make demo' and 'make test'. 'make help' lists the rest.
#
#   PYTHON=python3.12   Python 3.11 or newer to use
#   TORCH=torch==2.14   torch to use, with options of pip if need be
#   ARGS='...'          options for what the target runs

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?=
TORCH ?=
ARGS ?=
export PYTHON TORCH

# Puts the tools of .venv first for one command only: set-up itself must see the system's Python.
in_venv := PATH="$(CURDIR)/.venv/bin:$$PATH"
cpp_files = $$(git ls-files --cached --others --exclude-standard 'csrc/*' 'tests/native/*' 'tests/fuzz/*' 'tests/vm/*' | grep -E '\.(cc|h)$$')

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

.PHONY: set-up
set-up: ## make .venv and build the core; every target below that needs it does that
	@bash tools/set_up.sh

.PHONY: demo
demo: set-up ## train, kill, resume and compare on built-in data
	@$(in_venv) trainingcxl demo $(ARGS)

.PHONY: test
test: test-native ## all tests; ARGS='-k word' chooses
	@$(in_venv) pytest $(ARGS)

.PHONY: test-native
test-native: set-up ## C++ unit tests
	@$(in_venv) bash tools/native_tests.sh build/native

.PHONY: sanitize
sanitize: set-up ## C++ unit tests under ASan + UBSan, then under TSan
	@$(in_venv) bash tools/native_tests.sh build/asan -DTCXL_SANITIZE=address,undefined
	@$(in_venv) bash tools/native_tests.sh build/tsan -DTCXL_SANITIZE=thread

.PHONY: lint lint-python lint-types lint-layers lint-format lint-warnings lint-text
lint: lint-python lint-types lint-layers lint-format lint-warnings lint-text ## static checks
lint-python: set-up
	@$(in_venv) ruff check --output-format=concise .
	@$(in_venv) ruff format --check .
lint-types: set-up
	@$(in_venv) mypy
lint-layers: set-up
	@$(in_venv) lint-imports --no-logo
lint-format: set-up
	@$(in_venv); for file in $(cpp_files); do \
	  clang-format --dry-run -Werror "$$file" 2>/dev/null || wrong+=" $$file"; \
	done; \
	[ -z "$${wrong:-}" ] || { echo "not formatted ('make format'):$$wrong"; exit 1; }
lint-warnings: set-up # of the core, its bindings and its tests
	@$(in_venv) bash tools/native_tests.sh --build-only build/lint -DTCXL_WERROR=ON \
	  -DCMAKE_CXX_FLAGS="-Wall -Wextra -Wconversion -Wshadow -Werror" \
	  -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DSKBUILD=ON -DSKBUILD_STATE=lint -DPython_EXECUTABLE="$(CURDIR)/.venv/bin/python" \
	  -Dnanobind_ROOT="$$(.venv/bin/python -m nanobind --cmake_dir)"
lint-text: set-up
	@$(in_venv) codespell
	@$(in_venv) python tools/tidy.py

.PHONY: format
format: set-up ## format all source files
	@$(in_venv) ruff check --fix-only --exit-zero .
	@$(in_venv) ruff format .
	@$(in_venv) clang-format -i $(cpp_files)

# The peers' environment when 'make bench-peers' has made it; nothing is installed by a benchmark.
bench = python=.venv-peers/bin/python; [ -x "$$python" ] || { python=python; \
  echo "bench: no peers ('make bench-peers' installs them): their comparisons are left out"; }; \
  PATH="$(CURDIR)/.venv/bin:$$PATH" "$$python" benchmarks/bench.py

.PHONY: bench-peers
bench-peers: set-up ## install what the benchmarks compare with, beside .venv
	@bash tools/bench_peers.sh

.PHONY: bench bench-quick bench-check
bench: set-up ## every benchmark once, up to 45 minutes; the machine should do nothing else
	@$(bench) all $(ARGS)
bench-quick: set-up ## a small part of every benchmark, up to 5 minutes
	@$(bench) quick $(ARGS)
bench-check: set-up ## the bars, one line each; ARGS='--scripts step_peers.py' chooses
	@$(bench) check $(ARGS)

.PHONY: bench-step
bench-step: set-up ## time of the embedding step and of the DLRM step, log on and off
	@$(in_venv) python benchmarks/step.py $(ARGS)

.PHONY: accuracy
accuracy: set-up ## what failures cost in accuracy, by lag of the dense part: half an hour
	@$(in_venv) python benchmarks/accuracy_failures.py $(ARGS)

.PHONY: crash-images
crash-images: set-up ## power failures of persistent memory and files, tried: some minutes
	@$(in_venv) bash tools/fault_build.sh
	@$(in_venv) python tests/crash/crash_images.py $(ARGS)
	@$(in_venv) python tests/crash/crash_images.py --modes '' --faults build/faults/_core*.so $(ARGS)

.PHONY: crash
crash: set-up ## every crash rig but make crash-vm, a JSON line each: about 15 minutes; ARGS='--scale 0.1'
	@$(in_venv) python tests/crash/make_crash.py $(ARGS)

.PHONY: crash-vm
crash-vm: set-up ## power cuts of a virtual machine with persistent memory: 10 to 20 minutes
	@$(in_venv) python tests/vm/run.py $(ARGS)

.PHONY: torture
torture: set-up ## kill a small training on this disk for a minute; ARGS='--minutes 30'
	@$(in_venv) trainingcxl torture build/torture $(ARGS)

.PHONY: fuzz
fuzz: set-up ## opens a million hostile pools; needs clang (installed where it may); ARGS='--seconds 600'
	@$(in_venv) python tools/fuzz.py $(ARGS)

.PHONY: reproduce
reproduce: ## the paper's evaluation from the simulator; needs neither torch nor a compiler
	@bash tools/sim_env.sh reproduce --out build/reproduce $(ARGS)

.PHONY: clean
clean: ## remove what was built; keeps .venv
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@rm -f src/trainingcxl/_core*.so .venv/set-up/core
	@find src tests tools benchmarks examples -name __pycache__ -prune -exec rm -rf {} +
