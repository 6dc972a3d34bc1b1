# One gate: `make test`. One server: `make serve`. Everything else is named in `make help`.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# What is never loaded is never compiled: pip would compile seven million lines, for a minute of the processor.
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --no-compile
# Five times as fast as pip, whose configuration uv does not read: where uv fails, pip installs the same.
UV     := $(BIN)/uv pip install --quiet --system-certs --python
TORCH  := 2.13.0
PROTOS := $(wildcard proto/twostroke/rpc/v1/*.proto)
ARGS   ?=

CLIENTS      := $(VENV)/clients
GATE_CLIENTS := openai anthropic tritonclient
ALL_CLIENTS  := $(GATE_CLIENTS) litellm node langchain pydantic-ai instructor guidellm aiperf vllm
CLIENT_PIP   := $(BIN)/pip --python
CLIENT_OPTIONS := install --quiet --disable-pip-version-check --no-deps --no-compile

RAN := .pytest_cache/gate.xml

# Every start of a process would compile its modules again, and every run of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

GPU_PYTHON ?= $(firstword $(wildcard $(BIN)/python) python3)

ifeq ($(wildcard pyproject.toml proto/twostroke),)
$(error This Makefile works in its own folder: make -C THE_CHECKOUT $(MAKECMDGOALS))
endif

.PHONY: help serve test budgets .prepared quick bench-kernels bench-index bench-decisions bench-determinism bench-policies bench-cores bench-overload bench-sweep bench-grid bench-host bench-open-prompts bench-startup bench-pins image manifests pods hosts rayup .tools rolling scaling lint settings faults soak proto proto-check slow gpu nixl fuzz schemas neighbours adapters mutants clean clients .clients .checked identity

help:
	@echo "make serve [ARGS=...]  install, fetch the default model, serve until Ctrl-C"
	@echo "make test              the gate: format, lint, types, contracts, generated code, tests"
	@echo "make budgets           write what the last gate took, folder by folder, into tests/durations.toml, where budgets come from"
	@echo "make quick             lint of what changed against main, and the unit tests that it touches, within a minute"
	@echo "make slow              tests that the gate leaves out for their time: more models, forms, dtypes, rivals, kernels and mutants (an hour)"
	@echo "make identity          32 prompts in seven ways with each way of speculation, and killed workers: the same to the bit (half an hour)"
	@echo "make rolling           rolling restarts under load with the real model, some minutes"
	@echo "make image             build the image from a local base, run router and server out of it (root, buildah, minutes)"
	@echo "make scaling           a load that doubles, with the planner's own times, some minutes"
	@echo "make manifests         of the gate: Kubernetes manifests, checked offline"
	@echo "make pods              the pods of overlay dev-cpu on this machine, out of namespaces (root)"
	@echo "make rayup             ray up, ray job, ray down at hosts with sshd, out of namespaces (root, sshd, rsync, minutes)"
	@echo "make lint              of the gate: format, lint, types, contracts"
	@echo "make faults            break a cluster in every way under load, write docs/faults.md (ARGS=...)"
	@echo "make hosts             the same for hosts and cables: four hosts out of namespaces, needs root; docs/multi-host.md"
	@echo "make soak              load and random faults for an hour, into docs/faults.md (ARGS=\"--for 10m\")"
	@echo "make bench-kernels     time the engine's parts; also bench-index, -decisions, -determinism, -policies, -cores, -overload, -sweep, -grid, -host, -open-prompts, -startup, -pins"
	@echo "make clients           stock clients against a served model: openai (also node's), LiteLLM, anthropic, LangChain, benchmarks (3 GB)"
	@echo "make nixl              page transport nixl through the conformance suite, on a CPU (69 MB to download)"
	@echo "make fuzz [ARGS=...]   garbage at every endpoint, led by coverage (35 MB to download): ARGS=\"--for 3600\""
	@echo "make schemas ARGS=\"--set FILE\"  JSON schemas of a set (default: a sample), instances and random answers of each; --write: into docs/structured-output.md"
	@echo "make neighbours        an honest client beside a hundred hostile ones, for 10 minutes: ARGS=\"--for 30m --seed 3\""
	@echo "make adapters          sixteen LoRA adapters that are loaded, replaced and unloaded every second under load, 3 minutes"
	@echo "make mutants           more than two hundred mistakes in copies of the tree, each with the test that notices it, 15 minutes: ARGS=\"-j 4 'noise-*'\""
	@echo "make gpu               check and time everything on one GPU; needs torch, Triton, numpy and pydantic alone (GPU_PYTHON=...)"
	@echo "make proto             regenerate twostroke/rpc/v1 from proto/ (make proto-check: is it up to date?)"
	@echo "make settings          write docs/settings.md, the table of all settings, from twostroke/config"
	@echo "make clean             remove .venv and the tools' caches"

# What a target cannot do without, asked before anything is built.
.needs-root:
	@[ "$$(id -u)" = 0 ] || { echo "this target makes namespaces and mounts, and needs root for it" >&2; exit 2; }

.needs-%:
	@PATH="$$PATH:/usr/sbin:/sbin" command -v $* >/dev/null || { echo "$* is missing: get it with Debian's package $(or $(PACKAGE_OF_$*),$*)" >&2; exit 2; }
PACKAGE_OF_ip := iproute2
PACKAGE_OF_sshd := openssh-server
PACKAGE_OF_nft := nftables
PACKAGE_OF_unshare := util-linux
PACKAGE_OF_nsenter := util-linux
PACKAGE_OF_setpriv := util-linux

# torch first and pinned: a machine with an NVIDIA driver takes the CUDA build; one without takes a CPU build, from
# wherever pip is told to look, else from PyTorch's own index of CPU builds. Never gigabytes of CUDA by accident.
$(VENV)/.torch:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	if nvidia-smi -L >/dev/null 2>&1; then $(PIP) "torch==$(TORCH)" "triton>=3.6"; \
	else $(PIP) "torch==$(TORCH)+cpu" || $(PIP) --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)"; fi
	$(PIP) "uv==0.13.9"
	touch $@

$(VENV)/.serve: $(VENV)/.torch pyproject.toml
	$(UV) $(BIN)/python --editable ".[engine,tools]" || $(PIP) --editable ".[engine,tools]"
	touch $@

$(VENV)/.dev: $(VENV)/.serve
	$(UV) $(BIN)/python --editable ".[engine,tools,dev]" || $(PIP) --editable ".[engine,tools,dev]"
	touch $@

serve: $(VENV)/.serve
	$(BIN)/twostroke serve $(ARGS)

proto: $(VENV)/.dev
	rm -f twostroke/rpc/v1/*_pb2*
	$(BIN)/python -m grpc_tools.protoc -I proto --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS)

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.check_english
	$(BIN)/python -m tests.check_house

quick: $(VENV)/.dev
	$(BIN)/python -m tests.quick

# kubectl and promtool for tests/deploy, Chromium and axe-core for tests/console, where they are not on PATH: Debian's and
# npm's, unpacked, not installed. Never fails: what cannot be had is printed, and its tests are skipped.
.tools: $(VENV)/.dev
	$(BIN)/python -m tests.deploy.fetch_tools
	$(BIN)/python -m tests.console.fetch_browser

image: .needs-root .needs-buildah .needs-debootstrap $(VENV)/.dev
	$(BIN)/python -m pytest tests/deploy/test_image.py -m slow

manifests: .tools
	$(BIN)/python -m tests.deploy.check deploy/k8s
	$(BIN)/python -m pytest tests/deploy/test_manifests.py

pods: .needs-root .needs-ip .needs-unshare .needs-nsenter .needs-setpriv .tools
	$(BIN)/python -m tests.trials.chaos.pods.run dev-cpu

# The rest of ray[default] in a venv over ours: the gate must not change with it.
$(VENV)/nodes/.installed: $(VENV)/.dev
	$(BIN)/python -m venv --without-pip $(VENV)/nodes
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$$(echo $(VENV)/nodes/lib/python*/site-packages)/main.pth"
	$(BIN)/pip --python $(VENV)/nodes/bin/python install --quiet --disable-pip-version-check "ray[default]==2.60.0"
	touch $@

rayup: .needs-root .needs-ip .needs-unshare .needs-sshd .needs-rsync $(VENV)/nodes/.installed
	$(BIN)/python -m pytest tests/trials/chaos/rayup -m slow

# Clients of the field, each in an environment of its own: what they need must not change ours, nor ours theirs.
$(CLIENTS)/node/.installed: | $(VENV)/.dev
	npm install --silent --no-audit --no-fund --prefix $(@D) "openai@7.57.0"
	touch $@

$(CLIENTS)/%/.installed: tests/trials/clients/requirements/%.txt | $(VENV)/.dev
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(UV) $(@D)/bin/python --no-deps -r $< || $(CLIENT_PIP) $(@D)/bin/python $(CLIENT_OPTIONS) -r $< \
		|| $(CLIENT_PIP) $(@D)/bin/python $(CLIENT_OPTIONS) --extra-index-url https://download.pytorch.org/whl/cpu -r $<
	touch $@

# Those of the gate. Never fails, as .tools: a client that cannot be had is printed, and its test is skipped.
.clients:
	@for name in $(GATE_CLIENTS); do $(MAKE) --no-print-directory $(CLIENTS)/$$name/.installed \
		|| echo "client $$name cannot be installed: its test is skipped"; done

clients: $(ALL_CLIENTS:%=$(CLIENTS)/%/.installed)
	$(BIN)/python -m tests.trials.clients --write docs/clients.md $(ARGS)

.prepared: $(VENV)/.dev
	$(BIN)/python -m tests.prepare

.checked: lint proto-check .prepared .tools .clients

# Kernels are built, and programs, clients and the model fetched, while the code is checked. RAN says what each file took.
test: $(VENV)/.dev
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target .checked
	$(BIN)/python -m tests.gate $(RAN)
	$(BIN)/python -m tests.durations $(RAN)

# What the last `make test` took, and new budgets, into tests/durations.toml.
budgets:
	$(BIN)/python -m tests.durations --write $(RAN)

slow: $(VENV)/.dev
	$(BIN)/python -m pytest tests/unit tests/cluster tests/native tests/trials/bench tests/trials/chaos/disk \
		tests/trials/chaos/faults tests/trials/chaos/hosts tests/trials/chaos/neighbours tests/console \
		tests/deploy/test_manifests.py tests/deploy/test_observability.py -m slow $(ARGS)

identity: $(VENV)/.dev
	$(BIN)/python -m pytest tests/cluster/requests/test_speculation.py -m slow -s $(ARGS)

faults: $(VENV)/.dev
	$(BIN)/python -m tests.trials.chaos.faults --write docs/faults.md $(ARGS)
	$(BIN)/python -m tests.trials.chaos.faults --write docs/faults.md --model smollm2-135m --dtype float32 --sample 12 $(ARGS)
	$(BIN)/python -m tests.trials.chaos.disk --write docs/faults.md

hosts: .needs-root .needs-ip .needs-unshare $(VENV)/.dev
	$(BIN)/python -m tests.trials.chaos.hosts --runs 2 --write docs/multi-host.md $(ARGS)

rolling: $(VENV)/.dev
	$(BIN)/python -m pytest tests/cluster/fleet/test_rolling.py -m slow

scaling: $(VENV)/.dev
	$(BIN)/python -m pytest tests/cluster/fleet/test_scaling.py -m slow -s

soak: $(VENV)/.dev
	$(BIN)/python -m tests.trials.chaos.soak --write docs/faults.md $(ARGS)

settings: $(VENV)/.dev
	$(BIN)/python -m twostroke.config.table > docs/settings.md

proto-check: $(VENV)/.dev
	$(BIN)/python tests/check_generated.py

# Beside the venv's packages, not among them: the gate must not change with it. The build for CUDA 12 runs without CUDA.
$(VENV)/nixl/.installed: $(VENV)/.dev
	$(PIP) --no-deps --target $(VENV)/nixl "nixl-cu12==1.5.1"
	touch $@

nixl: $(VENV)/nixl/.installed
	PYTHONPATH="$(CURDIR)/$(VENV)/nixl" $(BIN)/python -m pytest tests/unit/transfer -k nixl

# As for nixl. Without it targets are played by chance alone, as in the gate.
$(VENV)/fuzz/.installed: $(VENV)/.dev
	$(PIP) --no-deps --target $(VENV)/fuzz "atheris==3.0.0"
	touch $@

fuzz: $(VENV)/fuzz/.installed
	PYTHONPATH="$(CURDIR):$(CURDIR)/$(VENV)/fuzz" $(BIN)/python -m tests.trials.chaos.fuzz $(ARGS)

bench-kernels bench-index bench-decisions bench-determinism bench-policies bench-cores bench-overload bench-sweep bench-grid bench-host bench-open-prompts bench-startup bench-pins: $(VENV)/.dev
	$(BIN)/python -m tests.trials.bench $(@:bench-%=%) $(ARGS)

schemas: $(VENV)/.dev
	$(BIN)/python -m tests.trials.schemas $(ARGS)

neighbours: $(VENV)/.dev
	$(BIN)/python -m tests.trials.chaos.neighbours $(ARGS)

adapters: $(VENV)/.dev
	$(BIN)/python -m tests.trials.chaos.adapters $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python -m tests.mutants $(ARGS)

gpu:
	$(GPU_PYTHON) -m tests.trials.gpu.bench $(ARGS)

clean:
	rm -rf $(VENV) .tools .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
