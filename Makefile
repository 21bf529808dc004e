# The commands of the project: each does what has to come first, and nothing that was done already.
# What was done is remembered by stamp files in the virtual environment; removing that forgets it all.

PYTHON ?= python3
VENV ?= .venv
SOAK ?= 20
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

python := $(VENV)/bin/python
oldest := $(VENV)-oldest/bin/python
sources := setup.py $(shell find ext -name '*.pyx' -o -name '*.px[di]' -o -name '*.h')

# HEADRACE_DEBUG=1 compiles with bounds checks and sanitizers. Those have to be loaded before Python is, with the C++
# library whose exceptions they watch; they see Python's objects only if each has its own malloc, and they get into
# every child, so tests that run programs of the system are left out, as are those that measure memory. Objects that
# live until exit are no leaks.
ifneq ($(filter-out 0,$(HEADRACE_DEBUG)),)
built := $(VENV)/.built-debug
module = $(firstword $(shell find build/debug -name '*.so'))
sanitized = LD_PRELOAD="$$(ldd $(module) | awk '/lib(asan|stdc[+][+])[.]so/ { print $$3 }' | xargs)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	PYTHONMALLOC=malloc ARROW_DEFAULT_MEMORY_POOL=system
pytest = $(sanitized) $(python) -m pytest -m 'not needs and not memory' --timeout=3000
else
built := $(VENV)/.built
sanitized =
pytest = $(python) -m pytest
endif

.PHONY: help run build lint test test-debug test-oldest soak bench clean distclean system-packages

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'PYTHON=python3.13 names the Python of a new environment, VENV=.venv-3.13 the environment;'
	@echo 'ARGS=... goes to the gateway (run) or to pytest (test, soak, bench and their kind).'

run: $(built) ## start the gateway on its embedded default, data in ./headrace-data
	@$(sanitized) exec $(VENV)/bin/headrace serve $(ARGS)

build: $(built) ## install the gateway into .venv and compile what changed

lint: $(VENV)/.dev ## check style, format and types
	$(python) -m ruff check
	$(python) -m ruff format --check
	$(python) -m mypy

test: $(built) $(VENV)/.dev system-packages lint ## lint, then run all tests
	$(pytest) $(ARGS)

test-debug: ## the same with bounds checks and sanitizers (gcc), then build as usual again
	@HEADRACE_DEBUG=1 $(MAKE) test; status=$$?; HEADRACE_DEBUG= $(MAKE) build; exit $$status

# It installs a source distribution, as a user would, and so covers what goes into one as well; unpacked, because pip
# would take an archive of the same name from its cache.
test-oldest: $(VENV)/.dev system-packages ## run the tests with the oldest versions that pyproject.toml allows
	@rm -rf build/oldest && mkdir -p build/oldest
	HEADRACE_ONLY=none $(python) setup.py -q sdist --dist-dir build/oldest
	tar -C build/oldest -xzf build/oldest/*.tar.gz
	$(python) .ci/requirements.py oldest > build/oldest/constraints.txt
	$(python) -m venv $(VENV)-oldest
	$(oldest) -m pip install -q -c build/oldest/constraints.txt setuptools cython
	$(oldest) -m pip uninstall -q -y headrace
	$(oldest) -m pip install -q -c build/oldest/constraints.txt --no-build-isolation \
		"$$(echo ./build/oldest/headrace-*/)[dev]"
	$(oldest) -m pytest $(ARGS)

soak: $(built) $(VENV)/.dev system-packages ## run the tests with SOAK (20) times the kills, examples and load
	HEADRACE_SOAK=$(SOAK) $(pytest) --timeout=$$((300 * $(SOAK))) $(ARGS)

bench: $(built) $(VENV)/.dev ## run the benchmarks; figures and machine go to bench/results/
	@mkdir -p bench/results
	$(pytest) bench --benchmark-only --benchmark-json=bench/results/$$(date -u +%Y%m%d-%H%M%S).json --timeout=0 $(ARGS)

clean: ## remove what was built and what checks left behind
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache src/headrace.egg-info $(VENV)/.built*
	find src -name '*.so' -delete
	find .ci bench src tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## remove the virtual environments too
	rm -rf .venv .venv-*

system-packages: $(VENV)/.dev
	@$(python) .ci/system_packages.py

$(VENV)/.made:
	@command -v $(PYTHON) > /dev/null || { echo "There is no $(PYTHON): install Python 3.11 or later," \
		"or name one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) .ci/toolchain.py
	$(PYTHON) -m venv $(VENV)
	@touch $@

# No module is compiled here but by the next rule, which, unlike pip, compiles only what changed.
$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@$(python) .ci/requirements.py build > $(VENV)/build-requirements.txt
	$(python) -m pip install -q -r $(VENV)/build-requirements.txt
	HEADRACE_ONLY=none $(python) -m pip install -q --no-build-isolation -e .
	@touch $@

$(built): $(VENV)/.installed $(sources)
	$(python) setup.py -q build_ext --inplace
	@rm -f $(VENV)/.built* && touch $@

$(VENV)/.dev: $(VENV)/.installed
	HEADRACE_ONLY=none $(python) -m pip install -q --no-build-isolation -e '.[dev]'
	@touch $@
