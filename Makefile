# PYTHON is the interpreter that the virtual environments are made from: make test PYTHON=python3.12
PYTHON ?= python3

# Small torch work is slower on several threads, most of all when processes share the cores.
export OMP_NUM_THREADS ?= 1

VENV := .venv
NEWEST := .venv-newest
LOCKER := .venv-lock
PIP_INSTALL := -m pip install --disable-pip-version-check
PACKAGING := setup.cfg pyproject.toml requirements.lock

# What `make test-newest` takes from the index in its newest release, whatever the lock says.
UNLOCKED := gymnasium stable-baselines3 sb3-contrib

.PHONY: help demo test lint test-newest lock
.DEFAULT_GOAL := help

help: ## print these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## run the answer-pool benchmark and one CartPole run, at their quick settings
	$(VENV)/bin/python benchmarks/answer_pool_ppo.py --quick
	$(VENV)/bin/python benchmarks/cartpole_clip_sweep.py --quick

test: $(VENV)/.installed ## run all tests on the locked versions
	$(VENV)/bin/python -m pytest -n 2 tests

lint: $(VENV)/.installed ## ruff, mypy and the import rules
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-newest: $(NEWEST)/.installed ## run the environment and agent tests on the newest Gymnasium and SB3
	$(NEWEST)/bin/python $(PIP_INSTALL) --quiet --upgrade -c $(NEWEST)/constraints.txt $(UNLOCKED)
	@$(NEWEST)/bin/python -m pip freeze | grep -iE '^(gymnasium|stable.baselines3|sb3.contrib|torch)=='
	$(NEWEST)/bin/python -m pytest -n 2 tests/llmgym tests/agents

# One line instead of pip's long complaint. It also runs under an old Python, hence no f-string.
define check_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "llmgym needs Python 3.11 or newer, and $(PYTHON) is %d.%d: name another with make PYTHON=python3.12" % sys.version_info[:2])'
endef

# The stamp is written last, so an installation that broke off is taken up again.
$(VENV)/.installed: $(PACKAGING)
	$(check_python)
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) -c requirements.lock -e ".[dev,llm,offline]"
	@touch $@

# Everything but UNLOCKED keeps its locked version: a failure here is then Gymnasium's or SB3's.
$(NEWEST)/.installed: $(PACKAGING)
	$(check_python)
	$(PYTHON) -m venv $(NEWEST)
	grep -vE '^(gymnasium|stable-baselines3|sb3-contrib)==' requirements.lock > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python $(PIP_INSTALL) -c $(NEWEST)/constraints.txt -e . $(UNLOCKED) \
		hypothesis pytest pytest-xdist
	@touch $@

# Pins are kept where they still fit; `make lock UPGRADE=--upgrade` moves them all.
# The filter takes out what torch's CUDA builds pin themselves, which a CPU build does not want.
lock: ## resolve setup.cfg with all extras again and write requirements.lock
	$(check_python)
	$(PYTHON) -m venv $(LOCKER)
	$(LOCKER)/bin/python $(PIP_INSTALL) --quiet uv
	cp requirements.lock $(LOCKER)/resolved.txt
	$(LOCKER)/bin/uv pip compile setup.cfg --all-extras --universal --python-version 3.11 \
		--fork-strategy fewest --no-header --annotation-style line --quiet $(UPGRADE) \
		--output-file $(LOCKER)/resolved.txt
	printf '%s\n' \
		'# Made by `make lock`: every package that setup.cfg and all of its extras need, in one resolution' \
		'# for Python 3.11 and newer. Use it as a constraints file:' \
		'#     pip install -c requirements.lock -e ".[dev,llm,offline]"' \
		'# torch has no local version (+cpu, +cu130), and the nvidia-*, cuda-* and triton packages are left' \
		'# out: the CUDA builds of torch pin those exactly in their own metadata, so that a CPU wheel' \
		'# installs where there is one and a CUDA build elsewhere. d3rlpy is why gymnasium is 1.0.0.' \
		> requirements.lock
	grep -vE '^(nvidia-|cuda-|triton==)' $(LOCKER)/resolved.txt >> requirements.lock
