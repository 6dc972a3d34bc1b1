"""The model that is billed: it is known from its config alone, and its backend plans what a worker of it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from tools.bill.options import BillFlags, ModelFlags
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.backends.cpu.backend import CpuBackend
from twostroke.engine.backends.cuda.backend import CudaBackend
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.engine.backends.paced.backend import PacedBackend
from twostroke.engine.ranks.cpu import RankedOnCpus
from twostroke.kv_cache.form import PageShape, page_form
from twostroke.models.catalog import places
from twostroke.models.known_specs import known_spec
from twostroke.models.memory_needs import MemoryReading
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import GGUF_SUFFIX, LayoutOf, layouts_in, layouts_of_gguf

BILLED_DEVICE: Final = "with --device-memory"
EVERY: Final = "every worker"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages are alike."""

    kind: str
    """What their attention reads: all tokens, or those of a window."""
    shape: PageShape
    """The dimensions of one block in all layers of the group."""
    window: int | None = None
    """Tokens that a token sees in layers whose pages lie apart."""

    def page_bytes(self, form: str) -> int:
        """Returns the bytes of one block in all layers of the group."""
        return page_form(form).page_bytes(self.shape)


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """A worker of several processes, or a worker of one process where others have several."""

    role: str
    plan: MemoryPlan
    more_bytes: int
    """What it holds besides pages more than a worker of one rank."""


@dataclass(frozen=True)  # no slots: what it plans is kept
class BilledModel:
    """A model, and what its workers hold."""

    flags: BillFlags
    spec: ModelSpec | None
    """None for a paced model."""
    layouts: LayoutOf | None
    """The layouts of quantised files; None for plain numbers, and for a directory with only a config."""

    @property
    def name(self) -> str:
        return self.flags.model.model

    def config(self, role: Role = Role.DECODE, **cache: Any) -> WorkerConfig:
        """Returns the config of a worker. `cache`: settings of its pages in place of the flags'."""
        model, memory = self.flags.model, self.flags.memory
        said = memory.model_dump(exclude={"device_memory_bytes", "host_cache_bytes", "disk_cache_bytes"})
        return WorkerConfig(
            role=role,
            worker_id="bill",
            model=model.config.replace(max_model_len=model.max_model_len),
            cache=CacheConfig(**said | cache),
            schedule=ScheduleConfig(max_num_seqs=model.max_num_seqs),
        )

    def planned(self, config: WorkerConfig) -> MemoryPlan:
        """Returns what a worker holds. Raises ConfigError where it would be refused."""
        spec, device_bytes = self.spec, self.flags.memory.device_memory_bytes
        if spec is None:
            return PacedBackend().plan(config).memory
        if device_bytes is None:
            return RankedOnCpus(CpuBackend(spec, Path(), self.layouts)).plan(config).memory
        device = (torch.device("cuda:0"), MemoryReading(BILLED_DEVICE, device_bytes, device_bytes))
        return CudaBackend(spec, Path(), self.layouts, [device]).plan(config).memory

    @cached_property
    def plan(self) -> MemoryPlan:
        """What a decode worker holds with pages in the form that is asked for."""
        return self.planned(self.config())

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers whose pages are counted apart; none for a paced model."""
        spec, plan = self.spec, self.plan
        if spec is None:
            return ()
        if len(plan.groups) == 1:
            return (LayerGroup(_attention_of(spec), plan.shapes[0]),)
        return tuple(
            LayerGroup(
                "full attention" if group.window is None else f"a window of {group.window} tokens", shape, group.window
            )
            for group, shape in zip(plan.groups, plan.shapes, strict=True)
        )

    @cached_property
    def ranked(self) -> tuple[RankedWorker, ...]:
        """A worker of each role, or of every one, where some have several ranks."""
        model = self.flags.model.config
        if not model.ranks_by_flag:
            return ()
        prefill, decode = (self._ranked(role) for role in (Role.PREFILL, Role.DECODE))
        are_alike = len(prefill.plan.processes) == len(decode.plan.processes)
        return (RankedWorker(EVERY, decode.plan, decode.more_bytes),) if are_alike else (prefill, decode)

    def _ranked(self, role: Role) -> RankedWorker:
        config = self.config(role)
        alone = config.replace(model=config.model.replace(tp=1, prefill_tp=None, decode_tp=None))
        plan, one = self.planned(config), self.planned(alone)
        more_bytes = plan.weights.total + plan.working_bytes - one.weights.total - one.working_bytes
        return RankedWorker(f"a {role.value} worker", plan, more_bytes)

    def block_bytes(self, form: str) -> int:
        """Returns the bytes of one block in all layers. Pages of a paced model have one size in every form."""
        return sum(group.page_bytes(form) for group in self.groups) or self.plan.layout.block_bytes


def billed_model(flags: BillFlags) -> BilledModel:
    """Reads the model's config. Raises ConfigError or UnsupportedModel where it cannot be served."""
    model = flags.model
    if model.is_paced:
        return BilledModel(flags, None, None)
    return BilledModel(flags, spec_of(model.model, model.dtype, model.max_model_len), _layouts_of(model))


def _attention_of(spec: ModelSpec) -> str:
    """Says what the layers read. Pages of window layers hold all tokens, as those of others do."""
    if spec.latents is not None:
        return f"latents of {spec.latents.latent_dim} and a rotated key of {spec.latents.rope_dim}"
    windows = sorted({rule.window for rule in spec.rules if rule.window is not None})
    if not windows:
        return "full attention"
    count = sum(rule.window is not None for rule in spec.rules)
    return f"full attention ({count} layers: {' and '.join(map(str, windows))} tokens)"


def _layouts_of(model: ModelFlags) -> LayoutOf | None:
    path = Path(model.model).expanduser()
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return layouts_of_gguf(path)
    directory = path if path.is_dir() else places.locate(model.model, model.dtype)
    return None if directory is None else layouts_in(directory)


def spec_of(model: str, dtype: str, max_model_len: int | None) -> ModelSpec:
    """Returns the spec of a model by the name that --model takes. It reads only config.json or a GGUF file's header."""
    path = Path(model).expanduser()
    if path.suffix == GGUF_SUFFIX:
        return _spec_of_gguf(path, max_model_len)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model directory {path} has no config.json", field="model")
        return _read(path, lambda: known_spec(path.resolve(), max_model_len))
    directory = places.locate(model, dtype)
    if directory is not None:
        return _read(directory, lambda: known_spec(directory, max_model_len))
    raise ConfigError(
        f"model {model!r} is not on this machine; run: twostroke model pull {model}, or name a directory with its "
        "config.json",
        field="model",
    )


def _read(path: Path, read: Callable[[], ModelSpec]) -> ModelSpec:
    """Reads the spec of a config. transformers may raise any error for a config with wrong values."""
    try:
        return read()
    except (AttributeError, TypeError, ValueError, KeyError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"{path}: its config cannot be read: {error!r}", field="model") from error


def _spec_of_gguf(path: Path, max_model_len: int | None) -> ModelSpec:
    if not path.is_file():
        raise ConfigError(f"--model {path}: no such file", field="model")
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, and only GGUF files need them

    with tempfile.TemporaryDirectory() as folder:
        try:
            config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
            config.save_pretrained(folder)
        except Exception as error:  # the reader raises whatever a damaged header leads to
            raise ConfigError(f"--model {path}: not a GGUF file that can be read: {error}", field="model") from error
        return _read(path, lambda: known_spec(Path(folder), max_model_len))
