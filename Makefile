# `make demo` and `make test` set everything up themselves: python3 (3.11 or newer), git and make are all they need.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint clean

demo: $(READY)
	$(VENV)/bin/samopt demo

# One thread a process: as many processes as cores, each with as many threads, would wait for one another.
test: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses auto --dist loadfile

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest --numprocesses auto -m "slow and not gpu"

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

$(READY): pyproject.toml
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "samopt needs Python 3.11 or newer")'
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV)
