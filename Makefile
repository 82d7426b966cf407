# `make quickstart` and `make test` do all their set-up themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install quickstart test lint clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[lora,plot]"
	touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

# A warm start, then GRPO. Earlier runs are kept beside the new ones.
quickstart: install
	for run in quickstart-warm-start quickstart; do \
		test ! -e runs/$$run || mv runs/$$run runs/$$run-until-$$(date +%Y%m%d-%H%M%S); done
	$(BIN)/atomrl sft configs/quickstart_sft.yaml
	$(BIN)/atomrl train configs/quickstart.yaml

test: .venv/installed-test
	$(BIN)/python -m pytest -n 2

lint: .venv/installed-test
	$(BIN)/ruff check && $(BIN)/ruff format --check

clean:
	rm -rf .venv build *.egg-info
