# The commands of lightning-solo's developers; each makes the environment it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check gpu wheel ladder clean

# The environment: torch first and by the constraints, so that nothing pulls another build of it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch
	DS_BUILD_OPS=0 $(PIP) -e ".[test,dev]"
	touch $@

# Trains the byte GPT on the text of the standard library: on the GPU if there is one, else on the CPU.
demo: $(VENV)/.installed
	$(BIN)/lightning-solo train

# DeepSpeed's extensions are built once, before the tests' timeout counts; what can't be built is skipped by name there.
test: $(VENV)/.installed
	$(BIN)/python -c "from lightning_solo.zero.extension import BUILDERS, load_extension, what_is_missing; \
	  [load_extension(name) for name in BUILDERS if what_is_missing(name) is None]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=300 --numprocesses=2

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Fails, rather than skips, where there is no CUDA device. Takes $(VENV) if it is there, else the environment at hand.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	PYTHONPATH=. $(GPU_PYTHON) -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'make gpu: no CUDA device')"
	PYTHONPATH=. $(GPU_PYTHON) -m pytest -m gpu
	PYTHONPATH=. $(GPU_PYTHON) examples/measure_presets.py

wheel: $(VENV)/.installed
	$(BIN)/python -m build --wheel --outdir dist

# The ladder of README, measured here, and README's tables rewritten from examples/results.
ladder: $(VENV)/.installed
	$(BIN)/python examples/measure_presets.py
	$(BIN)/python examples/readme_tables.py --write

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .pytest_cache .ruff_cache
