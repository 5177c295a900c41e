# `make train` and `make test` set up everything they need by themselves; ARGS="..." passes options on.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
ARGS   ?=
# The many programs that tests start would each compile the package again without bytecode. Three workers on two
# cores: many tests wait, for a lease to end or for a disk. Passive: a thread that waits for another one sleeps, as
# that one may wait for its core.
TEST   := PYTHONDONTWRITEBYTECODE= OMP_WAIT_POLICY=passive $(PY) -m pytest -q -n 3 --dist worksteal --durations=15
# ninja, ruff and clang-format come from the virtual environment
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

NATIVE := setup.py pyproject.toml $(shell find csrc cuda -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')
CXX_FILES := $(shell find csrc cuda examples fmoe_ext/include tests -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

# Asked for other modules than those that were built: build again.
FLAGS := FMOE_CUDA=$(FMOE_CUDA) USE_NCCL=$(USE_NCCL)
ifneq ($(FMOE_CUDA)$(USE_NCCL),)
ifneq ($(FLAGS),$(shell cat $(VENV)/.flags 2>/dev/null))
$(shell rm -f $(VENV)/.built)
endif
endif

.PHONY: help compress finetune grpo train speedrun train-cpp train-ep train-megatron train-pipeline train-pipe train-remote test test-all test-torchtitan build lint tidy format docs bench bench-here bench-compare wheel asan test-aarch64 test-amx cuda clean
help:
	@sed -n 's/^## //p' Makefile

## make train    train the MoE language model on real text; pictures and metrics in out/lm  (ARGS="--compare")
train: build
	$(PY) examples/lm/train.py $(ARGS)

## make speedrun experts against dense at equal seconds, 4 models and 3 seeds, 2 hours; goes on where it stopped (ARGS="--seconds 600")
speedrun: build $(VENV)/.complete  # the corpus is the sources of the installed packages
	$(PY) examples/speedrun/speedrun.py $(ARGS)

## make train-cpp  a smaller such model in C++, without Python; Python repeats it to the bit (ARGS="--steps 100")
train-cpp: build
	$(PY) examples/cpp/run.py $(ARGS)

## make train-ep the same trainer on one process and on 4 that share the experts: the loss curves are equal
train-ep: build
	$(PY) examples/lm/train_ep.py $(ARGS)

## make train-megatron  a small DeepSeek-V3 by Megatron's arguments: its own layers, ours, ours on 2 processes
train-megatron: build $(VENV)/.complete
	$(PY) -W ignore examples/megatron/train.py $(ARGS)

## make train-remote  three servers, two replicas an expert, two trainers; each server is killed once
train-remote: build $(VENV)/.complete
	$(PY) examples/remote/train.py $(ARGS)

## make train-pipeline  a Transformer on 2 replicas x 2 pipeline stages, 4 processes; the schedule's picture in out/pipeline_lm
train-pipeline: build
	$(PY) examples/pipeline_lm/train.py $(ARGS)

## make train-pipe  an image classifier under Pipe, and unsharded: the same losses and accuracy; out/pipe_images
train-pipe: build $(VENV)/.complete
	$(PY) examples/pipe_images/train.py $(ARGS)

## make finetune adapters for a model whose experts stay in their files, every step checked; out/finetune (ARGS="--model FOLDER --memory 8GiB --text FILE")
finetune: build $(VENV)/.complete
	$(PY) -W ignore examples/finetune/finetune.py $(ARGS)

## make compress prune, merge and heal a small model, every step checked; loss against the share of experts in out/compress/compress.png
compress: build $(VENV)/.complete
	$(PY) -W ignore examples/compress/compress.py $(ARGS)

## make grpo     GRPO by TRL as usual and inside batch_invariant(): the KL of what was sampled to what is trained, in out/grpo  (ARGS="--dtype float32")
grpo: build $(VENV)/.complete
	$(PY) -W ignore examples/grpo/grpo.py $(ARGS)

## make test     the test suite, and what took longest of it                                (ARGS="-k sort -x")
test: build $(VENV)/.complete
	$(TEST) $(ARGS)

## make test-all the same with the long and slow tests: examples, sanitizers of the kernels, soaks, twenty kills of a training
test-all: build $(VENV)/.complete
	$(TEST) -m "slow or not slow" --hypothesis-profile=whole $(ARGS)

## make test-torchtitan  what docs/torchtitan.md says: with torchtitan and the little that its layers import, in build/torchtitan
test-torchtitan: build $(VENV)/.complete
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --target build/torchtitan torchtitan==0.3.0 spmd_types==0.2.3 tyro docstring_parser triton
	PYTHONPATH=build/torchtitan $(TEST) tests/test_torchtitan.py $(ARGS)

## make build    virtual environment in .venv, what training needs, native modules
build: $(VENV)/.built

# Two files: training needs few packages, and the first picture is not to wait for the others.
$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "fmoe_ext needs Python 3.10 or newer: make PYTHON=python3.12")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { echo "python3 cannot make a virtual environment: install its venv package (Debian: apt-get install python3-venv)"; exit 1; }
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.complete: requirements-test.txt $(VENV)/.installed
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-test.txt
	@touch $@

# CUDA kernels are left out here unless asked for, because this environment's torch is whatever pip brings: FMOE_CUDA=1 make build
$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	FMOE_CUDA=$${FMOE_CUDA:-0} $(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@echo '$(FLAGS)' > $(VENV)/.flags
	@touch $@

## make cuda     compile the CUDA kernels too, for any torch; minutes, needs nvcc
cuda: $(VENV)/.installed
	FMOE_CUDA=1 $(PY) setup.py build_ext --inplace

## make lint     ruff, mypy, codespell, a check of prose and clang-format, changing nothing;  make format repairs
lint: $(VENV)/.complete
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib
	$(PY) docs/prose.py
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/.complete
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

## make docs     the documentation's site in out/docs (open index.html); a warning, a dead link or a search that does not help is an error
docs: $(VENV)/.docs
	rm -rf out/docs out/doctrees  # Sphinx keeps old pages, and does not see that a docstring has changed
	$(PY) -m sphinx -q -W --keep-going -d out/doctrees docs out/docs
	$(PY) docs/check_links.py out/docs
	$(PY) docs/check_search.py out/docs
	@echo 'open out/docs/index.html'

$(VENV)/.docs: docs/requirements.txt $(VENV)/.built $(VENV)/.complete
	$(PY) -m pip install -q --disable-pip-version-check -r docs/requirements.txt
	@touch $@

## make bench    layer and operator benchmarks against their peers, results in benchmarks/results (ARGS: of bench_layer)
bench: build $(VENV)/.complete
	$(PY) -m benchmarks.bench_layer $(ARGS)
	$(PY) -m benchmarks.bench_routing --json benchmarks/results/routing.json
	$(PY) -m benchmarks.bench_gates --json benchmarks/results/gates.json

## make bench-here  this processor's row of docs/measurements.md against torch alone, in three minutes  (ARGS="--threads 1")
bench-here: build
	$(PY) -m benchmarks.bench_here $(ARGS)

## make bench-compare REV=main~5  the layer's speed at that commit and now, in turn in one run  (ARGS="--shapes A,D")
bench-compare: build $(VENV)/.complete
	$(PY) -m benchmarks.compare $(REV) $(ARGS)

## make wheel    source package and one abi3 wheel in dist/, repaired (manylinux) and installed into an empty environment
wheel: $(VENV)/.complete
	rm -rf build/wheel dist
	$(PY) -m build --sdist --no-isolation -o dist
	$(PY) -m build --wheel --no-isolation -o build/wheel
	$(PY) -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' -w dist build/wheel/*.whl
	$(PY) -m pytest -q -m slow --noconftest tests/test_wheel.py

## make tidy     clang-tidy over the headers for C++ programs
tidy: build $(VENV)/.complete
	cmake -S . -B build/cpp -DFMOE_TESTS=ON -DCMAKE_EXPORT_COMPILE_COMMANDS=ON \
	    -DCMAKE_PREFIX_PATH="$$($(PY) -c 'import torch; print(torch.utils.cmake_prefix_path)')" > /dev/null
	clang-tidy -p build/cpp --quiet tests/cpp/parity.cpp

## make asan     the operator tests with AddressSanitizer and UBSan on the CPU kernels
asan: $(VENV)/.complete
	bash tests/run_asan.sh $(ARGS)

## make test-aarch64  the wheel for 64-bit Arm by a cross compiler, tests of the operators on it under qemu; an hour (ARGS=kernels: a minute)
test-aarch64: $(VENV)/.complete
	bash tests/aarch64/run.sh $(ARGS)

## make test-amx  the operator tests with the tile registers of AMX emulated, on a processor with AVX512_BF16; ten minutes (ARGS: of pytest)
test-amx: $(VENV)/.complete
	bash tests/amx/run.sh $(ARGS)

## make clean    remove everything that was built, and .venv
clean:
	rm -rf build dist out *.egg-info .pytest_cache .hypothesis .ruff_cache $(VENV)
	find fmoe_ext -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
