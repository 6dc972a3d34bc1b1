# One gate: `make test`. One server: `make serve`. Everything else is named in `make help`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := 2.13.0
PROTOS := $(wildcard proto/twostroke/rpc/v1/*.proto)
ARGS   ?=

.PHONY: help serve test lint proto proto-check gpu clean

help:
	@echo "make serve [ARGS=...]  install, fetch the default model, serve until Ctrl-C"
	@echo "make test              the gate: format, lint, types, contracts, generated code, tests"
	@echo "make proto             regenerate twostroke/rpc/v1 from proto/"

# torch first and pinned: a machine without an NVIDIA driver takes a CPU build where pip can find one.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --editable ".[engine,dev]"
	touch $@

serve: $(STAMP)
	$(BIN)/twostroke serve $(ARGS)

proto: $(STAMP)
	rm -f twostroke/rpc/v1/*_pb2*
	$(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint proto-check
	$(BIN)/python -m pytest

proto-check: $(STAMP)
	$(BIN)/python tests/check_generated.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
