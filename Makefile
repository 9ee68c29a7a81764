# The commands of lightning-solo's developers; each makes the environment it needs.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Tests start many processes: without files of bytecode each of these would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all simcuda kernels third_party check docs gpu faults peers wheel ladder architectures clean

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

# What protects a change, and the twenty tests that took longest. In `test-all` alone are DeepSpeed's engine, of which the
# contract of its technique is here, the package `pytorch_lightning`, and what takes long.
test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=600 --numprocesses=2 --durations=20
	$(MAKE) simcuda

# Tests of CUDA code on a device simulated on the CPU, which looks for races; in a process that has torch find it.
SIMULATED = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.simcuda.plugin --timeout=600 --numprocesses=2
simcuda: $(VENV)/.installed
	$(SIMULATED) -m "(gpu or simcuda or every_change) and not long" -k "not pytorch_lightning" tests

# And all that takes minutes; with whole suites on the simulated device, of which `simcuda` runs what is marked every_change.
# DeepSpeed's extensions are built once, before the tests' timeout counts; what can't be built is skipped by name there.
test-all: test
	-$(BIN)/lightning-solo doctor --build
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout=1000 --numprocesses=2 -m "long and not gpu and not simcuda"
	$(SIMULATED) -m "gpu or simcuda or any_device" tests
	$(MAKE) kernels
	$(MAKE) third_party

# Triton beside the CPU build of torch, which would compile for it: an environment of its own, over that of the tests;
# and Liger's kernels, which are written in it.
# 3.9.0, since the interpreters of 3.7 and before round a fused product and sum twice.
KERNELS ?= .venv-kernels
PURELIB := import sysconfig; print(sysconfig.get_path('purelib'))
$(KERNELS)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(KERNELS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(PURELIB)")')" \
	  > $$($(KERNELS)/bin/python -c "$(PURELIB)")/tests.pth
	$(KERNELS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0 liger-kernel==0.8.5
	touch $@

# The Triton kernels without a GPU: run by the interpreter against torch's operators, and compiled for five architectures,
# with a line for each, beside what Inductor makes of the operators; takes some 4 minutes, and 1.1 GB on disk.
kernels: $(KERNELS)/.installed
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest tests/kernels --timeout=600 --numprocesses=2
	PYTHONPATH=. $(KERNELS)/bin/python -m tests.simcuda examples/inductor_kernels.py --only sm_90
	PYTHONPATH=. $(KERNELS)/bin/python examples/measure_kernels.py --check examples/results/kernels.json

# Modules of libraries that others wrote, under every exact preset, in an environment of its own over that of the tests;
# without dependencies, of which many want another torch. Takes some 5 minutes, and 0.7 GB on disk.
THIRD_PARTY ?= .venv-third-party
THIRD_PARTY_PACKAGES := neuralforecast==3.3.0 pytorch-forecasting==1.8.0 gluonts==0.17.0 replay-rec==0.22.0 \
  pytorch-tabular==1.2.0 torch-geometric==2.8.1 diffusers==0.42.1 pandas==2.3.3 scipy==1.17.1 scikit-learn==1.9.1 \
  scikit-base==1.2.0 joblib==1.6.0 threadpoolctl==3.8.0 pytz==2026.6 python-dateutil==4.0.0 six==1.17.0 \
  tzdata==2026.6 toolz==1.2.0 coreforecast==0.0.20 utilsforecast==0.2.17 polars==2.1.0 polars-runtime-32==2.1.0 \
  pyparsing==3.3.3 xxhash==4.1.0 importlib_metadata==10.2.0 zipp==4.1.2 ray==2.60.0 tornado==6.6.1
$(THIRD_PARTY)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(THIRD_PARTY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c "$(PURELIB)")')" \
	  > $$($(THIRD_PARTY)/bin/python -c "$(PURELIB)")/tests.pth
	$(THIRD_PARTY)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(THIRD_PARTY_PACKAGES)
	touch $@

third_party: $(THIRD_PARTY)/.installed
	OMP_NUM_THREADS=1 $(THIRD_PARTY)/bin/python -m pytest tests/test_third_party.py --timeout=1000 --numprocesses=2 -m long

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The documentation, in docs/_build/html: a warning is an error, and so is a link or a file that isn't there.
docs: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs docs/_build/html
	$(BIN)/python docs/check_links.py docs/_build/html

# README's ladder: $(call measure_ladder,<python>,<cpu or gpu>); a folder of its own, so that nothing measured before,
# by other code, is kept.
LADDER_cpu := model=byte_gpt_small data.context=128 data.max_bytes=4000000 --steps 15
LADDER_gpu := model=byte_gpt_124m data.context=1024 data.max_bytes=4000000 --steps 25
define measure_ladder
rm -rf runs/readme
$(1) -m lightning_solo.cli ladder $(LADDER_$(2)) run=readme
$(1) -m json.tool --indent 1 --no-ensure-ascii runs/readme/ladder.json examples/results/ladder_$(2).json
endef
device_of = $(shell $(1) -c "import torch; print('gpu' if torch.cuda.is_available() else 'cpu')")

# Measures a GPU part by part, each under a limit of time: all in an hour, or `make gpu PART=b`; see the script's first
# lines. Fails, rather than skips, where there is no CUDA device. Takes $(VENV) if it is there, else the environment at
# hand: it needs no network.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PART ?= abcdefghij
RESULTS ?= examples/results/gpu
gpu:
	PYTHONPATH=. $(GPU_PYTHON) -c "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'make gpu: no CUDA device')"
	$(GPU_PYTHON) examples/gpu/run.py --parts $(PART) --results $(RESULTS)

# The exam of fault tolerance: thousands of killed processes, full disks and damaged files, and the tests of single faults;
# prints a table by row of faults. Half an hour on one core; an exam that was interrupted continues at the next call.
# `make faults FAULTS=files,rows` runs some parts.
FAULTS ?= kills,files,rows
faults: $(VENV)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python -m tests.faults --parts $(FAULTS) --write examples/results/faults_cpu.json

# One model trained by lightning-solo and by its peers, side by side, on an idle machine: an hour on two cores. Peers that
# the tests don't need are installed into .venv-peers. `make peers PEERS="--parts time --rows torchao"` measures a part.
PEERS ?=
peers: $(VENV)/.installed
	PYTHONPATH=. $(BIN)/python examples/compare_peers.py $(PEERS)
	PYTHONPATH=. $(BIN)/python examples/plan_promises.py

wheel: $(VENV)/.installed
	$(BIN)/python -m build --wheel --outdir dist

# The ladder of README, measured here, and README's table and pictures made anew from examples/results.
ladder: $(VENV)/.installed
	$(call measure_ladder,$(BIN)/python,$(call device_of,$(BIN)/python))
	$(BIN)/python docs/tables.py --write
	$(BIN)/python docs/pictures.py --write

# Every architecture of transformers, planned and trained: an hour on two cores; a dozen of them are in the tests.
architectures: $(VENV)/.installed
	$(BIN)/python examples/measure_architectures.py --write examples/results/architectures_cpu.json

clean:
	rm -rf $(VENV) build dist docs/_build runs .mypy_cache .pytest_cache .ruff_cache
