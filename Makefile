# Two commands matter: `make chat` and `make test`. Both set up what they need in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests compare with a torch reference; a CPU build is enough.
TORCH ?= torch==2.13.0
# Names of all modules: the editable install links single files, so a new file means a new link.
MODULES := $(shell find localspec convert models -name '*.py' | LC_ALL=C sort | cksum | cut -d' ' -f1)
INSTALL = $(BIN)/pip install -q --disable-pip-version-check \
	--config-settings editable_mode=strict -e

.PHONY: chat test lint docs clean
chat: $(VENV)/chat-$(MODULES)
	$(BIN)/localspec chat

test: $(VENV)/test-$(MODULES)
	$(BIN)/pytest

lint: $(VENV)/test-$(MODULES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd docs && ../$(BIN)/mypy --config-file ../pyproject.toml  # from here, convert/ and models/ are in the package

docs: $(VENV)/test-$(MODULES)
	$(BIN)/python docs/generate/cli.py docs/cli.md
	$(BIN)/python docs/generate/house.py docs/architecture.md
	$(BIN)/mkdocs build --strict

$(VENV)/chat-$(MODULES): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing; llama.cpp is compiled on the first run, which takes some minutes."
	$(INSTALL) '.[default]'
	rm -f $(VENV)/chat-* $(VENV)/test-*
	touch $@

$(VENV)/test-$(MODULES): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing; llama.cpp is compiled on the first run, which takes some minutes."
	$(BIN)/pip install -q --disable-pip-version-check '$(TORCH)'
	$(INSTALL) '.[convert,default,dev]'
	rm -f $(VENV)/chat-* $(VENV)/test-*
	touch $(VENV)/chat-$(MODULES) $@

clean:
	rm -rf $(VENV) build *.egg-info
